"""What a request asks of sampling holds under every strategy, and costs nothing where none asks."""

import dataclasses

import jax
import numpy as np
import pytest
from engine.pools import CAPACITY, make_cluster, request, serve_all

from pdjax.core.events import Preempted
from pdjax.core.model_config import TINY
from pdjax.core.plan import DecodeSlices, StepPlan
from pdjax.engine.jax_executor import StepTicket
from pdjax.models.sampling import Sampled
from pdjax.stopping import Stopper
from pdjax.tokenizer import ByteTokenizer

WAYS = {
  "continuous": dict(strategy="continuous"),
  "small chunks": dict(strategy="chunked", budget=7),
  "disaggregated": dict(strategy="disaggregated"),
  "preempting": dict(strategy="chunked", num_pages=CAPACITY // 4, shuffle=4),
}


def serve(engine, way, requests, **options):
  """The sequences at their end, by request id; and that no step was compiled for them."""
  sequences, before = {}, engine.steps.num_traces.total()
  each_turn = lambda turn: sequences.update(turn.sequences)  # noqa: E731
  cluster = make_cluster(engine, **WAYS[way])
  log = serve_all(cluster, requests, each_turn=each_turn, steps_in_flight=2, **options)
  assert engine.steps.num_traces.total() == before
  if way == "preempting" and all(len(seq.output_ids) == 12 for seq in sequences.values()):
    assert any(isinstance(e, Preempted) for e in log), "no pressure: nothing is shown"
  return sequences


def make_requests(**sampling):
  """A row is soon another request's, whose prompt it must not be penalised for."""
  rng = np.random.default_rng(5)
  return [
    request(i, rng.integers(0, TINY.vocab_size, n).tolist(), max_tokens=12, **sampling)
    for i, n in enumerate((1, 20, 9, 33, 4, 14, 40, 2, 25))
  ]


@pytest.mark.parametrize("way", WAYS)
def test_a_penalty_that_forbids_gives_no_id_twice(tiny_paged, way):
  """Neither of the prompt nor of the output; and only to those that ask for it."""
  requests = make_requests(repetition_penalty=1e6)
  plain = dataclasses.replace(requests[0].sampling, repetition_penalty=1.0)
  requests += [
    dataclasses.replace(r, request_id=100 + i, sampling=plain) for i, r in enumerate(requests)
  ]
  sequences = serve(tiny_paged, way, requests)
  for r in requests[:9]:
    ids = sequences[r.request_id].output_ids
    assert len(set(ids)) == len(ids) == 12 and not set(ids) & set(r.prompt_ids)
  alone = serve(tiny_paged, "continuous", requests[9:])
  assert {i: sequences[i].output_ids for i in alone} == {i: s.output_ids for i, s in alone.items()}


@pytest.mark.parametrize("way", WAYS)
def test_logprobs_are_those_of_a_plain_forward_for_every_token(tiny_paged, plain_logits, way):
  """The first included, also where another pool gave it; after preemption none twice."""
  wants = [None, 0, 3, 20, None, 1, 20, 0, 2]
  requests = [
    dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, logprobs=n))
    for r, n in zip(make_requests(temperature=0.7, min_p=0.02), wants)
  ]
  for r, seq in zip(requests, map(serve(tiny_paged, way, requests).get, range(9))):
    num_top, ids = r.sampling.logprobs, seq.output_ids
    if num_top is None:
      assert seq.output_logprobs == []
      continue
    assert len(seq.output_logprobs) == len(ids) == 12
    logits = plain_logits((*r.prompt_ids, *ids))[r.num_prompt_tokens - 1 : -1].astype(float)
    exact = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    for token, got, want in zip(ids, seq.output_logprobs, exact, strict=True):
      assert got.logprob == pytest.approx(want[token], abs=1e-3)
      assert len(got.top_ids) == len(got.top_logprobs) == num_top
      assert list(got.top_logprobs) == pytest.approx(np.sort(want)[::-1][:num_top], abs=1e-3)
      assert want[list(got.top_ids)] == pytest.approx(got.top_logprobs, abs=1e-3)


@pytest.mark.parametrize("way", WAYS)
def test_stop_ids_are_held_back_until_min_tokens(tiny_paged, way):
  """Greedy tokens of a run without stops say where they would have come, the first included."""
  requests = make_requests()
  free = serve(tiny_paged, way, requests)
  for num_free, min_tokens in ((0, 0), (0, 1), (0, 4), (2, 5), (3, 12)):
    stopping = [
      dataclasses.replace(
        r,
        sampling=dataclasses.replace(
          r.sampling,
          min_tokens=min_tokens,
          stop_ids=(10**6, free[r.request_id].output_ids[num_free]),
        ),
      )
      for r in requests
    ]
    sequences = serve(tiny_paged, way, stopping)
    for r in stopping:
      ids, (_, stop_id) = sequences[r.request_id].output_ids, r.sampling.stop_ids
      assert stop_id not in ids[:min_tokens] and len(ids) >= min(12, min_tokens + 1)
      assert stop_id not in ids[:-1] and (len(ids) == 12 or ids[-1] == stop_id)
      if min_tokens == 0:
        assert len(ids) == 1


@pytest.mark.parametrize("way", WAYS)
def test_a_stop_string_cuts_ids_logprobs_and_text_alike(tiny_paged, way):
  letters = Letters()
  requests = make_requests(logprobs=1)
  free = serve(tiny_paged, way, requests)
  stopping = []
  for r in requests:
    text = letters.decode(free[r.request_id].output_ids)
    sampling = dataclasses.replace(r.sampling, stop=(text[7:9],))  # the end of one, the next
    stopping.append(dataclasses.replace(r, sampling=sampling))
  stopper = Stopper(letters)
  for i, seq in serve(tiny_paged, way, stopping, finish_reason=stopper).items():
    ids, (stop,) = free[i].output_ids, stopping[i].sampling.stop
    whole = letters.decode(ids)
    cut = whole.index(stop)
    num_kept = -(-cut // 4)
    assert stopper.settled(seq) == (whole[:cut], num_kept)
    assert seq.output_ids == ids[:num_kept] and len(seq.output_logprobs) == num_kept


class Letters(ByteTokenizer):
  """Every id has four letters."""

  def __init__(self):
    super().__init__(TINY.vocab_size)

  def decode(self, ids):
    return "".join("".join(chr(97 + (i >> 2 * n) % 16) for n in range(4)) for i in ids)


@pytest.mark.quick
def test_log_probabilities_stay_on_the_device_unless_asked_for():
  class Guarded:
    def __array__(self, *args, **kwargs):
      raise AssertionError("fetched")

  ids = jax.numpy.array([3, 4, 5])
  plan = StepPlan(
    step_id=0,
    decodes=DecodeSlices(request_ids=(0, 1), generations=(0, 0), rows=(0, 1), positions=(5, 5)),
  )
  used = np.array([True, True, False])
  ticket = StepTicket(Sampled(ids, Guarded(), Guarded(), Guarded()), plan, used, [None, None])
  assert ticket.result().token_ids == (3, 4) and ticket.result().logprobs == ()
  with pytest.raises(AssertionError, match="fetched"):
    StepTicket(Sampled(ids, Guarded(), Guarded(), Guarded()), plan, used, [None, 0]).result()
