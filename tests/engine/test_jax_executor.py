"""What an executor promises beside the right tokens: no compilation, updates in place, failures."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine.pools import CAPACITY, PAGE_SIZE, ROWS, build, cpus, make_cluster, serve_all
from engine.pools import request as make_request
from virtual import expected, make_requests, tokens_of

from pdjax.core.events import Failed
from pdjax.core.model_config import TINY
from pdjax.core.request import SamplingParams
from pdjax.engine.buckets import Buckets
from pdjax.engine.jax_executor import JaxExecutor
from pdjax.engine.mesh import make_mesh
from pdjax.models.transformer import from_arrays, random_arrays
from pdjax.scheduling.probe import probe_plan
from pdjax.serving.executor import Handle

COMPILED = "/jax/core/compile/backend_compile_duration"
STEPS = ("prefill_step", "decode_step", "mixed_step", "gather_pages", "scatter_pages")


def _size(name, args):
  """The bucket that a call of a compiled function uses."""
  if name in ("prefill_step", "decode_step", "mixed_step"):
    return len(args[4].batch.tokens)
  return len(args[1])


@pytest.mark.quick
def test_serving_compiles_nothing_once_warm(checksum_slots, monkeypatch):
  """Traffic that uses every shape under every strategy; jax's own count of compilations is 0."""
  steps, buckets = checksum_slots.steps, checksum_slots.buckets
  before, used, compiled = steps.num_traces.total(), set(), []

  def watched(name, step):
    def call(*args):
      used.add((name, _size(name, args)))
      return step(*args)

    return call

  for name in STEPS:
    monkeypatch.setattr(steps, name, watched(name, getattr(steps, name)))

  def listen(event, duration_s, **_):
    if event == COMPILED:
      compiled.append(duration_s)

  # All at once, so that the steps of a mixed pool do not depend on how fast the machine is.
  requests = make_requests(30, seed=1, rate_rps=1e12)
  requests += [
    make_request(100 + i, range(n), max_tokens=9 + i, repetition_penalty=1.5, logprobs=i)
    for i, n in enumerate((70, 3, 15, 50))
  ]  # a penalty takes nothing from the only logit that is not 0
  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    with warnings.catch_warnings():
      warnings.simplefilter("error")
      for strategy in ("continuous", "chunked", "disaggregated"):
        log = serve_all(make_cluster(checksum_slots, strategy, budget=24), requests)
        assert tokens_of(log) == expected(requests)
    assert not compiled and steps.num_traces.total() == before
    jax.jit(lambda x: x * 3)(np.arange(7)).block_until_ready()
    assert compiled, f"jax no longer reports {COMPILED}: this test sees nothing"
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)
  want = {("prefill_step", n) for n in buckets.prefill} | {("mixed_step", n) for n in buckets.mixed}
  want |= {("decode_step", n) for n in buckets.rows}
  want |= {(name, n) for name in ("gather_pages", "scatter_pages") for n in buckets.pages}
  assert used == want


@pytest.mark.parametrize(
  "name",
  [
    pytest.param("checksum_slots", marks=pytest.mark.quick),
    pytest.param("checksum_paged", marks=pytest.mark.quick),
    "tiny_slots",
    "tiny_paged",
  ],
)
def test_steps_and_hand_offs_update_the_cache_in_place(request, name):
  engine = request.getfixturevalue(name)
  source, target = engine.executors
  plans = [
    probe_plan(engine.pages, prefills=(CAPACITY,)),
    probe_plan(engine.pages, decodes=ROWS),
    probe_plan(engine.pages, prefills=(8,), decodes=1),
  ]
  for plan in plans:
    before = _places(source)
    source.submit(plan, 0.0).result()
    source._add_seen(1, (2, 3), anew=False)
    assert _places(source) == before, plan.kind
  before = _places(target)
  handle = Handle(
    request_id=0,
    num_tokens=CAPACITY,
    num_prompt_tokens=CAPACITY,
    first_token_id=0,
    sampling=SamplingParams(max_tokens=2),
  )
  handle = source.export(handle, page_ids=tuple(range(20)), now_s=0.0)
  ticket = target.import_(handle, row=0, page_ids=tuple(range(20)), now_s=0.0)
  while not ticket.is_ready():
    pass
  jax.block_until_ready(target._cache)
  assert _places(target) == before
  source.reset()
  target.reset()


def _places(executor):
  leaves = jax.block_until_ready(
    jax.tree.leaves((executor._cache, executor._last_token, executor._seen))
  )
  return [leaf.unsafe_buffer_pointer() for leaf in leaves]


UNTIED = dataclasses.replace(TINY, num_layers=1, tie_embeddings=False)


@pytest.fixture(scope="module", params=[pytest.param("slots", marks=pytest.mark.slow), "paged"])
def untied_engine(request):
  """Its embedding gives no logits: what is wrong with one id is wrong with those who read it."""
  buckets = Buckets(prefill=(CAPACITY,), mixed=(CAPACITY,), rows=(ROWS,), pages=(20,))
  model = from_arrays(UNTIED, random_arrays(UNTIED, 0))
  return build(model, request.param, buckets, cpus(1) * 2)


@pytest.mark.parametrize("strategy", ["continuous", "chunked", "disaggregated"])
def test_logits_that_are_not_finite_fail_one_request_alone(untied_engine, strategy):
  """NaN in the embedding of one token id, which one prompt has; what it cached harms nobody."""
  bad_id = 511
  rng = np.random.default_rng(0)
  requests = [
    make_request(i, rng.integers(0, bad_id, 5 + 6 * i).tolist(), max_tokens=8) for i in range(10)
  ]
  want = tokens_of(serve_all(make_cluster(untied_engine, strategy), requests))
  assert bad_id not in {t for tokens in want.values() for t in tokens}, "choose another id"
  arrays = random_arrays(UNTIED, 0)
  arrays["embedding"][bad_id] = np.nan
  broken = _with_params(untied_engine, from_arrays(UNTIED, arrays))
  poisoned = make_request(99, (3, 4, bad_id, 5, 6), max_tokens=8)
  for company in ([poisoned, *requests], requests):  # the second run meets what is left in pages
    log = serve_all(make_cluster(broken, strategy, shuffle=1), company, steps_in_flight=2)
    tokens = tokens_of(log)
    assert tokens.pop(99, ()) == ()
    assert tokens == want
    failures = [(e.request_id, e.reason) for e in log if isinstance(e, Failed)]
    assert [i for i, _ in failures] == ([99] if poisoned in company else [])
    assert all("not finite" in reason for _, reason in failures)


def _with_params(engine, model):
  """The same compiled steps with other weights and fresh caches."""
  executors = [
    JaxExecutor(model, engine.steps, engine.pages, engine.buckets, [make_mesh(cpus(1)[0])])
    for _ in range(2)
  ]
  return type(engine)(
    executors=executors, steps=engine.steps, pages=engine.pages, buckets=engine.buckets
  )


def test_top2_margin_is_that_of_a_plain_forward(tiny, tiny_paged, plain_logits):
  """Also for a text of several prefill buckets, and it leaves an executor that serves as before."""
  pages = tiny_paged.pages
  executor = JaxExecutor(
    tiny, tiny_paged.steps, pages, Buckets(prefill=(32,)), [make_mesh(cpus(1)[0])]
  )
  rng = np.random.default_rng(3)
  for num_tokens in (1, 20, 32, 79):
    ids = rng.integers(0, TINY.vocab_size, num_tokens).tolist()
    second, first = np.sort(plain_logits(ids)[-1])[-2:]
    assert executor.top2_margin(ids) == pytest.approx(first - second, abs=1e-3)
  small = dict(prefills=(PAGE_SIZE,))
  fresh = tiny_paged.executors[0].submit(probe_plan(pages, **small), 0.0).result()
  assert executor.submit(probe_plan(pages, **small), 0.0).result() == fresh
  tiny_paged.executors[0].reset()


@pytest.mark.quick
def test_a_step_ticket_is_ready_when_its_tokens_are(checksum_paged):
  executor = checksum_paged.executors[0]
  ticket = executor.submit(probe_plan(checksum_paged.pages, prefills=(8, 3), decodes=2), 0.0)
  result = ticket.result()
  assert ticket.is_ready() and len(result.token_ids) == 3 and not result.errors
  assert all(isinstance(token, int) for token in result.token_ids)
  rows = [1, ROWS - 2, ROWS - 1]  # the last prompt, the two decodes
  assert jnp.asarray(executor._last_token)[jnp.asarray(rows)].tolist() == list(result.token_ids)
  executor.reset()
