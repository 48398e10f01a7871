"""Steps in groups of layers and on stages give the same tokens; pages are handed over in parts."""

import dataclasses
import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine.conftest import ONE_OF_EACH
from engine.pools import (
  CAPACITY,
  PAGE_SIZE,
  PAGES_PER_ROW,
  ROWS,
  build,
  cpus,
  make_cluster,
  serve_all,
)
from engine.test_transfer import COMPILED, check_arrived, fill
from virtual import expected, make_requests, tokens_of

from pdjax.core.model_config import TINY
from pdjax.core.plan import Swap
from pdjax.core.request import SamplingParams
from pdjax.engine.buckets import Buckets
from pdjax.engine.build import build_executors, warm_up
from pdjax.models.checksum import checksum_model
from pdjax.models.transformer import from_arrays, random_arrays
from pdjax.scheduling.pages import PageConfig
from pdjax.scheduling.probe import probe_plan
from pdjax.serving.executor import Handle

TOLERANCE = 2e-4  # of logits with a standard deviation of 10, as over several devices
SMALL = dataclasses.replace(
  TINY, num_layers=3, d_model=32, num_heads=4, head_dim=8, d_ff=32, vocab_size=64
)
PAGES = PageConfig(
  num_rows=ROWS, page_size=PAGE_SIZE, pages_per_row=PAGES_PER_ROW, num_pages=ROWS * PAGES_PER_ROW
)
BUCKETS = Buckets(prefill=(16,), mixed=(16,), rows=(ROWS,), pages=(PAGES_PER_ROW,))
ASKS = SamplingParams(max_tokens=9, logprobs=3)
LOOKS_BACK = dataclasses.replace(ASKS, repetition_penalty=1.7, temperature=0.8, seed=5)
quick = pytest.mark.quick


@pytest.fixture(scope="module")
def small():
  return from_arrays(SMALL, random_arrays(SMALL, 0))


def warm(executors, uses):
  with warnings.catch_warnings():
    warnings.filterwarnings("error", message=".*donated.*")
    return list(warm_up(executors, uses))


def chunk(ids, start, end, sampling=ASKS):
  """A plan of positions [start, end) of a prompt in row 0."""
  plan = probe_plan(PAGES, prefills=(len(ids),))
  (whole,) = plan.prefills
  part = dataclasses.replace(
    whole,
    start=start,
    num_tokens=end - start,
    token_ids=ids[start:end],
    emits_token=end == len(ids),
    sampling=sampling,
  )
  return dataclasses.replace(plan, prefills=(part,))


def served(executor):
  """What chunks of a prompt and decodes give, all in flight at once, and the cache they leave."""
  executor.reset()
  ids = tuple(map(int, np.random.default_rng(0).integers(0, SMALL.vocab_size, 29)))
  plans = [
    *(chunk(ids, start, min(start + 12, 29), LOOKS_BACK) for start in (0, 12, 24)),
    *[probe_plan(PAGES, decodes=ROWS, context=30)] * 2,  # of its token, on from the first layer
    chunk(ids[:9], 0, 9),
    probe_plan(PAGES, decodes=ROWS, context=10),
  ]
  tickets = [executor.submit(plan, 0.0) for plan in plans]
  return [ticket.result() for ticket in tickets], jax.device_get(executor._cache)


def check_same(got, want):
  """Equal tokens, and logprobs and caches within `TOLERANCE`."""
  for one, other in zip(got[0], want[0], strict=True):
    assert one.token_ids == other.token_ids
    for a, b in zip(one.logprobs, other.logprobs, strict=True):
      assert (a is None) == (b is None)
      if a is not None:
        assert a.top_ids == b.top_ids
        pair = [(x.logprob, *x.top_logprobs) for x in (a, b)]
        np.testing.assert_allclose(*pair, rtol=0, atol=TOLERANCE)
  for leaf, other in zip(*map(jax.tree.leaves, (got[1], want[1])), strict=True):
    assert np.abs(other).max() > 0.1
    np.testing.assert_allclose(leaf, other, rtol=0, atol=TOLERANCE)


@pytest.fixture(scope="module")
def whole(small):
  (executor,) = build_executors(small, PAGES, BUCKETS, cpus(1), layout="paged")
  warm([executor], [{"prefill", "decode"}])
  return executor


@pytest.fixture(scope="module")
def want(whole):
  """Served once: what other tests leave in its cache, where nobody reads, would be compared too."""
  return served(whole)


@pytest.mark.parametrize(
  ("size", "stages", "layer_groups"),
  [(2, 2, 1), *(pytest.param(*cut, marks=pytest.mark.slow) for cut in [(1, 1, 3), (4, 2, 1)])],
)
def test_tokens_logprobs_and_caches_are_those_of_one_call_on_one_device(
  small, whole, want, size, stages, layer_groups
):
  cuts = dict(stages=(stages,), layer_groups=(layer_groups,))
  groups = [cpus(1, size)[1]]
  (cut,) = build_executors(small, PAGES, BUCKETS, groups, layout="paged", **cuts)
  warm([cut], [{"prefill", "decode"}])
  before = cut.num_traces
  assert any(logprobs for result in want[0] for logprobs in result.logprobs)
  check_same(served(cut), want)
  assert cut.num_traces == before
  ids = list(range(40))
  np.testing.assert_allclose(whole.last_logits(ids), cut.last_logits(ids), rtol=0, atol=TOLERANCE)


# The checksum model is exact, and one layer on the wrong stage gives a wrong token.


@pytest.fixture(scope="module")
def staged():
  """A pool of two stages, and one that computes its two layers in as many groups."""
  cuts = dict(stages=(2, 1), layer_groups=(1, 2))
  return build(checksum_model(), "paged", ONE_OF_EACH, cpus(2, 1), **cuts)


@pytest.fixture(scope="module")
def grouped(staged):
  """The other way round: layer groups are handed over to stages."""
  return dataclasses.replace(staged, executors=staged.executors[::-1])


@quick
def test_a_pool_says_how_its_layers_are_cut(staged, checksum_paged):
  stages, groups = staged.executors
  assert (stages.layer_groups, stages.num_stages) == (((0, 1), (1, 2)), 2)
  assert (groups.layer_groups, groups.num_stages) == (((0, 1), (1, 2)), 1)
  plain = checksum_paged.executors[0]
  assert (plain.layer_groups, plain.num_stages) == (((0, 2),), 1)
  assert {plain.bytes_per_token, stages.bytes_per_token} == {2 * 2 * 4}  # K, V, layers, uint32
  (first,), (second,) = cpus(1, 1)
  assert [k.devices() for k, _ in stages._cache] == [{first}, {second}]


@quick
@pytest.mark.parametrize("strategy", ["continuous", "chunked"])
@pytest.mark.parametrize("name", ["staged", "grouped"])
def test_every_strategy_gives_the_tokens_of_the_model(request, name, strategy):
  engine = request.getfixturevalue(name)
  before = engine.executors[0].num_traces
  requests = make_requests(15, seed=2, rate_rps=1e4)
  log = serve_all(make_cluster(engine, strategy, shuffle=1), requests, steps_in_flight=2)
  assert tokens_of(log) == expected(requests)
  assert engine.executors[0].num_traces == before


@quick
@pytest.mark.parametrize("name", ["staged", "grouped"])
def test_a_hand_off_between_them_changes_no_token(request, name):
  engine = request.getfixturevalue(name)
  warm(engine.executors, [{"prefill", "gather"}, {"decode", "scatter"}])
  before = [executor.num_traces for executor in engine.executors]
  requests = make_requests(15, seed=3, rate_rps=1e4)
  assert tokens_of(serve_all(make_cluster(engine, "disaggregated", shuffle=1), requests)) == (
    expected(requests)
  )
  assert [executor.num_traces for executor in engine.executors] == before


@pytest.fixture
def slow(staged):
  """x -> x on the same device, a while later. Compiled for what passes between the stages."""

  @jax.jit
  def wait(w, x):
    w = jax.lax.fori_loop(0, 60, lambda _, w: jnp.tanh(w @ w * 1e-3), w)
    return x + (w[0, 0] * 0).astype(x.dtype)

  def slow(x):
    return wait(jax.device_put(np.ones((512, 512), np.float32), x.sharding), x)

  for stage in staged.executors[0]._stages:
    slow(jax.device_put(np.ones((CAPACITY, 2), np.uint32), stage.whole)).block_until_ready()
  return slow


@quick
def test_a_later_step_runs_on_the_first_stage_while_an_earlier_one_is_on_the_last(
  staged, slow, monkeypatch
):
  """The last stage of the first step waits for what takes long; the first stage does not."""
  executor, step = staged.executors[0], staged.steps.prefill_step
  executor.reset()
  plan = probe_plan(staged.pages, prefills=(CAPACITY,))
  want = executor.submit(plan, 0.0).result()
  monkeypatch.setattr(
    staged.steps, "prefill_step", lambda *args: step(*args[:5], slow(args[5]), args[6])
  )
  tickets = [executor.submit(plan, 0.0) for _ in range(2)]
  (first, _), (last, _) = executor._cache
  first.block_until_ready()  # written by both steps
  assert not tickets[0].is_ready() and not last.is_ready()
  assert [ticket.result() for ticket in tickets] == [want] * 2
  executor.reset()


@quick
def test_a_step_is_on_its_way_through_all_stages_before_the_first_has_computed(
  staged, slow, monkeypatch
):
  executor, steps, were_ready = staged.executors[0], staged.steps, []
  layers, step = steps.prefill_layers, steps.prefill_step

  def delayed(*args):
    cache, hidden = layers(*args)
    return cache, slow(hidden)

  def watched(*args):
    were_ready.append(args[5].is_ready())
    return step(*args)

  executor.reset()
  plan = probe_plan(staged.pages, prefills=(CAPACITY,))
  want = executor.submit(plan, 0.0).result()
  monkeypatch.setattr(steps, "prefill_layers", delayed)
  monkeypatch.setattr(steps, "prefill_step", watched)
  assert executor.submit(plan, 0.0).result() == want
  assert were_ready == [False]
  executor.reset()


def handle_of(start, num_tokens, *, layers=None, first_token_id=None, token_ids=None):
  return Handle(
    request_id=5,
    start=start,
    num_tokens=num_tokens,
    num_prompt_tokens=19,
    first_token_id=first_token_id,
    sampling=LOOKS_BACK,
    layers=layers,
    token_ids=token_ids,
  )


def arrive(target, handle, row, pages):
  ticket = target.import_(handle, row=row, page_ids=pages, now_s=0.0)
  while not ticket.is_ready():
    pass
  assert ticket.result() is None


NAMES = ["groups", "stages", "tp2"]


@pytest.fixture(scope="module")
def unlike(small):
  """Pools of one device, of two stages and of a tensor-parallel mesh, warm for all hand-offs."""
  executors = build_executors(
    small,
    PAGES,
    Buckets(prefill=(16,), pages=(2, PAGES_PER_ROW)),
    cpus(1, 2, 2),
    layout="paged",
    stages=(1, 2, 1),
    layer_groups=(3, 1, 1),
  )
  warm(executors, [{"gather", "scatter"}] * 3)
  return dict(zip(NAMES, executors))


@pytest.fixture
def compiles_nothing():
  compiled = []

  def listen(event, duration_s, **_):
    if event == COMPILED:
      compiled.append(duration_s)

  yield lambda: jax.monitoring.register_event_duration_secs_listener(listen)
  jax.monitoring.unregister_event_duration_listener(listen)
  assert not compiled


@quick
@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(NAMES, 2)))
@pytest.mark.parametrize("by", ["layers", "all layers"])
def test_parts_arrive_byte_for_byte_and_the_last_one_seats_the_row(
  unlike, compiles_nothing, source, target, by
):
  """19 tokens in chunks of 8; nothing of the row is set before the last part, which is empty."""
  source, target = unlike[source], unlike[target]
  traces = source.num_traces + target.num_traces
  sent, before = fill(source, 1), fill(target, 2)
  jax.block_until_ready((source._cache, target._cache))
  compiles_nothing()
  source_pages, target_pages = tuple(range(94, 89, -1)), tuple(range(40, 60))
  target.reset()
  target._add_seen(2, (60,), anew=True)
  token_id = int(np.asarray(target._last_token)[2])
  groups = source.layer_groups if by == "layers" else (None,)
  num_bytes = 0
  for start, end in ((0, 8), (8, 16), (16, 19)):
    for layers in groups:
      handle = handle_of(start, end, layers=layers)
      handle = source.export(handle, page_ids=source_pages[start // 4 :], now_s=0.0)
      num_bytes += handle.num_bytes
      arrive(target, handle, 2, target_pages)
  assert num_bytes == 19 * source.bytes_per_token
  assert np.asarray(target._last_token)[2] == token_id and target._rows.seed[2] == 0
  end = source.export(
    handle_of(19, 19, first_token_id=token_id + 1, token_ids=(7, 8, 9)), page_ids=(), now_s=0.0
  )
  assert end.num_bytes == 0
  arrive(target, end, 2, target_pages)
  check_arrived(source, target, sent, before, dict(zip(target_pages, source_pages)))
  assert (
    np.asarray(target._last_token)[2] == token_id + 1 and target._rows.seed[2] == LOOKS_BACK.seed
  )
  assert np.flatnonzero(np.asarray(target._seen)[2]).tolist() == [7, 8, 9]
  assert target._rows.tables[2].tolist() == list(target_pages)
  assert source.num_traces + target.num_traces == traces
  target.reset()


@quick
def test_pages_swapped_out_come_back_to_every_stage(unlike):
  executor = unlike["stages"]
  plan = probe_plan(PAGES, prefills=(4,))
  sent, pages, others = fill(executor, 3), (7, 3, 50), (11, 12, 13)
  swap = Swap(request_id=1, num_tokens=11, page_ids=pages)
  back = dataclasses.replace(swap, page_ids=others)
  executor._swap(dataclasses.replace(plan, swap_outs=(swap,)))
  executor._swap(dataclasses.replace(plan, swap_ins=(back,)))
  for leaf, old in zip(*map(jax.tree.leaves, (executor._cache, sent)), strict=True):
    np.testing.assert_array_equal(leaf[np.array(others)], old[np.array(pages)])
  assert not executor._swapped
  executor.reset()


@pytest.fixture
def calls(grouped, monkeypatch):
  """The layers of each call of the pool with two groups, and what was gathered, in order."""
  steps, made = grouped.steps, []
  for name in ("prefill_layers", "prefill_step", "gather_pages"):
    run = getattr(steps, name)

    def watched(*args, run=run, name=name):
      made.append((name, args[-1] if name != "gather_pages" else None))
      return run(*args)

    monkeypatch.setattr(steps, name, watched)
  return made


@quick
def test_pages_are_read_as_soon_as_their_layers_are_computed(grouped, calls):
  executor = grouped.executors[0]
  executor.reset()
  exports = [(handle_of(0, 8, layers=(i, i + 1)), (0, 1)) for i in range(2)]
  ticket = executor.submit(probe_plan(PAGES, prefills=(8,)), 0.0, exports)
  assert calls == [
    ("prefill_layers", (0, 1)),
    ("gather_pages", None),
    ("prefill_step", (1, 2)),
    ("gather_pages", None),
  ]
  early = [executor.export(handle, page_ids=pages, now_s=0.0) for handle, pages in exports]
  assert len(calls) == 4, "it had been gathered"
  ticket.result()
  late = [executor.export(handle, page_ids=pages, now_s=0.0) for handle, pages in exports]
  assert len(calls) == 6, "each is given once"
  for a, b in zip(early, late, strict=True):
    assert a.num_bytes == b.num_bytes == 8 * executor.bytes_per_token // 2
    (layers,) = a.payload
    assert layers == a.layers and np.asarray(a.payload[layers])[:, :, :, :8].all()  # K = id + 1
    np.testing.assert_array_equal(a.payload[layers], b.payload[layers])
  executor.reset()


@quick
@pytest.mark.parametrize("call", ["submit", "recover", "reset"])
def test_what_nobody_asks_for_is_forgotten(grouped, call):
  executor = grouped.executors[0]
  executor.reset()
  plan = probe_plan(PAGES, prefills=(8,))
  executor.submit(plan, 0.0, [(handle_of(0, 8, layers=(0, 1)), (0, 1))])
  assert len(executor._gathered) == 1
  executor.submit(plan, 0.0) if call == "submit" else getattr(executor, call)()
  assert not executor._gathered
  executor.reset()


@quick
def test_a_stage_that_is_lost_takes_the_pool_along(staged):
  executor, plan = staged.executors[0], probe_plan(PAGES, prefills=(8, 3))
  executor.reset()
  want = executor.submit(plan, 0.0).result()
  executor._cache[1][0].delete()
  with pytest.raises(RuntimeError, match="deleted"):
    executor.submit(plan, 0.0)
  assert executor.recover()
  assert not any(np.asarray(x).any() for x in jax.tree.leaves(executor._cache))
  assert executor.submit(plan, 0.0).result() == want
  executor.reset()


@quick
@pytest.mark.parametrize(
  ("cuts", "message"),
  [
    (dict(stages=(3,)), "2 layers cannot be .* into 3 parts"),
    (dict(stages=(2,)), "3 devices do not make 2 stages of equal size"),
    (dict(stages=(0,)), "3 devices do not make 0 stages"),
    (dict(layer_groups=(3,)), "2 layers cannot be .* into 3 parts"),
  ],
)
def test_what_cannot_be_cut_is_refused(cuts, message):
  sizes = cpus(1 if "layer_groups" in cuts else 3)
  with pytest.raises(ValueError, match=message):
    build_executors(checksum_model(), PAGES, BUCKETS, sizes, layout="paged", **cuts)
