"""The same tokens on the tiny model under every policy, layout, chunk size, and use of memory."""

import dataclasses
import itertools
import random

import jax.numpy as jnp
import pytest
from engine.pools import (
  CAPACITY,
  PAGE_SIZE,
  PAGES_PER_ROW,
  ROWS,
  build,
  cpus,
  make_cluster,
  request,
  serve_all,
)
from virtual import tokens_of

from pdjax.config import STRATEGIES
from pdjax.core.events import Fetched, Preempted, Step
from pdjax.engine import build as engine_build
from pdjax.engine.buckets import Buckets
from pdjax.kernels.backends import tpu
from pdjax.kernels.choice import Tuning
from pdjax.kernels.reference import attention_reference
from pdjax.kernels.slices import Slices
from pdjax.kernels.tile_config import TileConfig
from pdjax.metrics.utilisation import prefix_hits
from pdjax.scheduling.policies import make_policy
from pdjax.scheduling.routing import Fetch
from pdjax.scheduling.scheduler import Scheduler, SchedulerConfig
from pdjax.serving.cluster import Cluster, Pool

SAMPLING = {
  "greedy": {},
  "seeded": dict(temperature=0.8, top_k=40, seed=7),
  "looking back": dict(temperature=0.8, min_p=0.01, repetition_penalty=2.0, seed=7),
}
FEW = CAPACITY // PAGE_SIZE + 6  # pages: one request always fits, three rarely
MEMORY = {
  "plenty": {},
  "computed again": dict(num_pages=FEW),
  "swapped": dict(num_pages=FEW, limits={"swap_tokens": 1000}),
  "cached": dict(limits={"prefix_cache": True}),
  "cached and computed again": dict(num_pages=FEW, limits={"prefix_cache": True}),
  "all at once": dict(
    num_pages=FEW, limits={"prefix_cache": True, "swap_tokens": 100, "reservation": "chunk"}
  ),
}


@pytest.fixture(scope="module")
def requests():
  """Ten requests, most of which begin as another does; all kinds of sampling."""
  rng = random.Random(5)
  stems = [[rng.randrange(512) for _ in range(40)] for _ in range(2)]
  made = []
  for i in range(10):
    own = [rng.randrange(512) for _ in range(rng.choice([1, 2, 9]))]
    prompt = stems[i % 2][: rng.choice([4, 12, 23, 40])] + own
    sampling = list(SAMPLING.values())[i % 3]
    made.append(request(i, prompt, i * 1e-3, max_tokens=rng.randint(2, 16), **sampling))
  return made


@pytest.fixture(scope="module")
def alone(tiny_slots, requests):
  tokens = {}
  for r in requests:
    tokens |= tokens_of(serve_all(make_cluster(tiny_slots, "continuous"), [r]))
  return tokens


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_in_rows_of_their_own(tiny_slots, requests, alone, strategy, steps_in_flight):
  log = serve_all(make_cluster(tiny_slots, strategy), requests, steps_in_flight=steps_in_flight)
  assert tokens_of(log) == alone


OF_EACH_SORT = ("continuous", "chunked", "disaggregated")


def in_memory(strategy, memory):
  """By default every policy has all kinds at once, and every kind a policy of each sort."""
  usual = memory == "all at once" or strategy in OF_EACH_SORT
  return pytest.param(strategy, memory, marks=[pytest.mark.slow] * (not usual))


@pytest.mark.parametrize(
  ("strategy", "memory"),
  [in_memory(*case) for case in itertools.product(sorted(STRATEGIES), MEMORY)],
)
def test_in_pages(tiny_paged, requests, alone, strategy, memory):
  for budget in (7, 24):
    cluster = make_cluster(tiny_paged, strategy, budget=budget, shuffle=4, **MEMORY[memory])
    log = serve_all(cluster, requests, steps_in_flight=2)
    assert tokens_of(log) == alone


@pytest.mark.parametrize(
  "strategy",
  [
    pytest.param(name, marks=[pytest.mark.slow] * (name not in OF_EACH_SORT))
    for name in sorted(STRATEGIES)
  ],
)
def test_by_pallas_kernels(tiny_pallas, requests, alone, strategy):
  tuning = tiny_pallas.steps.attention.tuning
  kernels = (tuning.prefill, tuning.decode, tuning.mixed, tuning.write)
  assert {(config.backend, config.interpret) for config in kernels} == {("triton", True)}
  cluster = make_cluster(tiny_pallas, strategy, budget=24)
  assert tokens_of(serve_all(cluster, requests, steps_in_flight=2)) == alone


@pytest.fixture(scope="module")
def tiny_as_on_tpus(tiny):
  """Keys and values in turn in one array, and splash for prompts that begin in a step.

  Paged attention is the reference, as that of TPUs takes no heads of 16.
  """
  config = TileConfig(backend="tpu")
  fresh = TileConfig(backend="splash", block_q=128, block_k=128, interpret=True)
  tuning = Tuning(prefill=config, decode=config, mixed=config, write=config, fresh=fresh)

  def attend(q, pages, prefill, decode, *, config, **options):
    kinds = [slices for slices in (prefill, decode) if slices is not None]
    slices = Slices(*map(jnp.concatenate, zip(*kinds, strict=True)))
    return attention_reference(q, pages, slices, **options).astype(q.dtype)

  buckets = Buckets(prefill=(CAPACITY,), mixed=(CAPACITY,), rows=(ROWS,), pages=(PAGES_PER_ROW,))
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(engine_build, "choose", lambda *args, **kwargs: tuning)
    patch.setattr(tpu, "attend", attend)
    return build(tiny, "paged", buckets, cpus(1) * 2)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
@pytest.mark.parametrize("memory", ["plenty", "swapped", "cached"])
def test_as_on_tpus(tiny_as_on_tpus, requests, alone, strategy, memory):
  steps = tiny_as_on_tpus.steps
  assert steps.attention.layout.kind == "interleaved"
  num_traces = dict(steps.num_traces)
  assert num_traces["prefill_step"] == 2, "one shape for prompts that begin, one for chunks"
  cluster = make_cluster(tiny_as_on_tpus, strategy, budget=24, shuffle=4, **MEMORY[memory])
  assert tokens_of(serve_all(cluster, requests, steps_in_flight=2)) == alone
  assert steps.num_traces == num_traces


def test_the_cases_are_what_they_say(tiny_paged, requests):
  """Preemptions, hits and swaps do happen under chunked prefill."""

  def run(memory):
    cluster = make_cluster(tiny_paged, "chunked", budget=24, **MEMORY[memory])
    log = serve_all(cluster, requests)
    return log

  log = run("computed again")
  assert any(isinstance(e, Preempted) for e in log)
  recomputed = sum(sum(e.prefill_tokens) for e in log if isinstance(e, Step))
  log = run("swapped")
  assert sum(sum(e.prefill_tokens) for e in log if isinstance(e, Step)) < recomputed
  num_hits, num_tokens = prefix_hits(run("cached"))
  assert num_hits >= 0.3 * num_tokens


def test_a_prefix_copied_from_another_pool(tiny_paged, requests, alone):
  """Two mixed pools; every other request goes to the second one, with what the first one has."""
  limits = SchedulerConfig(token_budget=24, prefix_cache=True)
  pools = []
  for i, executor in enumerate(tiny_paged.executors):
    executor.reset()
    scheduler = Scheduler(make_policy("sarathi"), tiny_paged.pages, limits)
    pools.append(Pool(f"mixed{i}", "mixed", scheduler, executor))

  def route(routing):
    number = routing.request.request_id
    return Fetch(pool=1, source=0) if number % 4 >= 2 else 0

  log = serve_all(Cluster(pools, route), requests, steps_in_flight=2)
  assert tokens_of(log) == alone
  late = [dataclasses.replace(r, request_id=r.request_id + 10, arrival_s=0.0) for r in requests]
  log = serve_all(Cluster(pools, route), late, steps_in_flight=2)
  assert any(isinstance(event, Fetched) for event in log)
  tokens = tokens_of(log)
  assert {i: tokens[i + 10] for i in alone} == alone
