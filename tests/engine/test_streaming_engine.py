"""KV caches streamed on the engine: tokens and log-probabilities are those of a mixed pool."""

import dataclasses
import random

import pytest
from engine.pools import PAGE_SIZE, PAGES_PER_ROW, ROWS, build, cpus, make_cluster, request
from virtual import run, tokens_of

from pdjax.core.clock import WallClock
from pdjax.core.events import Copied
from pdjax.core.model_config import TINY
from pdjax.engine.buckets import Buckets
from pdjax.models.transformer import from_arrays, random_arrays
from pdjax.scheduling.hand_off import HandOff

slow = pytest.mark.slow
CHUNKS = "1xprefill:prefill_chunks,1xdecode"
BUDGET = 8
SMALL = dataclasses.replace(
  TINY, num_layers=3, d_model=32, num_heads=4, head_dim=8, d_ff=32, vocab_size=64
)
BUCKETS = Buckets(prefill=(16,), mixed=(16,), rows=(ROWS,), pages=(2, PAGES_PER_ROW))


@pytest.fixture(scope="module")
def model():
  return from_arrays(SMALL, random_arrays(SMALL, 0))


@pytest.fixture(scope="module")
def whole(model):
  return build(model, "paged", BUCKETS, cpus(1, 1))


@pytest.fixture(scope="module")
def grouped(model):
  return build(model, "paged", BUCKETS, cpus(1, 1), layer_groups=[3, 1])


@pytest.fixture(scope="module")
def staged(model):
  return build(model, "paged", BUCKETS, cpus(2, 1), stages=[2, 1])


@pytest.fixture(scope="module")
def wider(model):
  """Two devices hand over to one."""
  return build(model, "paged", BUCKETS, cpus(2, 1))


def prompts(lengths, **sampling):
  rng = random.Random(3)
  return [
    request(i, [rng.randrange(64) for _ in range(n)], **sampling) for i, n in enumerate(lengths)
  ]


def serve_and_keep(engine, strategy, requests, **options):
  """Tokens, log-probabilities and copies by request."""
  logprobs = {}

  def keep(turn):
    for request_id, seq in turn.sequences.items():
      logprobs[request_id] = [one.logprob for one in seq.output_logprobs]

  cluster = make_cluster(engine, strategy, budget=BUDGET, shuffle=5, **options)
  log = run(cluster, requests, clock=WallClock(), each_turn=keep)
  return tokens_of(log), logprobs, {e.request_id: e for e in log if isinstance(e, Copied)}


@pytest.mark.parametrize(
  "name",
  ["whole", *(pytest.param(name, marks=slow) for name in ("grouped", "staged", "wider"))],
)
def test_for_all_residues_of_the_prompt_and_few_tokens(request, whole, name):
  engine = request.getfixturevalue(name)
  lengths = [n for n in range(17, 17 + 2 * PAGE_SIZE) for _ in range(3)]
  requests = [
    dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, max_tokens=1 + i % 3))
    for i, r in enumerate(prompts(lengths, max_tokens=1, logprobs=0))
  ]
  want, want_logprobs, _ = serve_and_keep(whole, "chunked", requests)
  before = [executor.num_traces.total() for executor in engine.executors]
  tokens, logprobs, copies = serve_and_keep(engine, CHUNKS, requests)
  assert tokens == want
  for i, own in want_logprobs.items():
    assert logprobs[i] == pytest.approx(own, abs=1e-4)
  assert copies.keys() == {r.request_id for r in requests if r.sampling.max_tokens > 1}
  assert sum(c.num_bytes_ahead > 0 for c in copies.values()) > len(copies) / 2
  assert [executor.num_traces.total() for executor in engine.executors] == before


@pytest.mark.parametrize("name", ["whole", "grouped"])
def test_one_that_stops_at_its_first_token_never_reaches_the_decode_pool(request, whole, name):
  engine = request.getfixturevalue(name)
  requests = prompts([33, 34], max_tokens=1)
  first = {i: ids[0] for i, ids in serve_and_keep(whole, "chunked", requests)[0].items()}
  stopping = [
    dataclasses.replace(
      r,
      sampling=dataclasses.replace(r.sampling, max_tokens=9, stop_ids=(first[r.request_id],)),
    )
    for r in requests
  ]
  tokens, _, copies = serve_and_keep(engine, CHUNKS, stopping)
  assert tokens == {i: (token,) for i, token in first.items()} and not copies


def test_bounded_and_growing_hand_offs_change_no_token(grouped, whole):
  requests = prompts([5, 40, 23, 31, 12, 44], max_tokens=12)
  want, *_ = serve_and_keep(whole, "chunked", requests)
  for options in (dict(most_bytes=20_000), dict(reservation="prompt"), dict(streams=False)):
    tokens, _, copies = serve_and_keep(grouped, CHUNKS, requests, hand_off=HandOff(**options))
    assert tokens == want and len(copies) == len(requests)
    assert bool(sum(c.num_bytes_ahead for c in copies.values())) == options.get("streams", True)


def test_requests_that_look_back_take_what_they_have_seen_along(grouped, whole):
  requests = prompts([30, 41], max_tokens=8, repetition_penalty=1.7, temperature=0.7, seed=4)
  want, *_ = serve_and_keep(whole, "chunked", requests)
  tokens, *_ = serve_and_keep(grouped, CHUNKS, requests)
  assert tokens == want
