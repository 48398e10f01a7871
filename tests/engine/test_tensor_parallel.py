"""A model split over devices gives the same logits and tokens, with two all-reduces a layer."""

import collections
import dataclasses
import re

import numpy as np
import pytest
from engine.pools import CAPACITY, PAGE_SIZE, PAGES_PER_ROW, ROWS, cpus, request, serve_all
from virtual import tokens_of

from pdjax.core.model_config import TINY
from pdjax.engine.buckets import Buckets
from pdjax.engine.build import build_executors
from pdjax.models.transformer import from_arrays, random_arrays
from pdjax.scheduling.pages import PageConfig
from pdjax.scheduling.policies import make_policy
from pdjax.scheduling.probe import probe_plan
from pdjax.scheduling.scheduler import Scheduler, SchedulerConfig
from pdjax.serving.cluster import Cluster, Pool

TOLERANCE = 2e-4  # of logits with a standard deviation of 10, as between chunks and one pass
BUCKETS = Buckets(prefill=(CAPACITY,), mixed=(CAPACITY,), rows=(ROWS,), pages=(PAGES_PER_ROW,))
PAGES = PageConfig(
  num_rows=ROWS, page_size=PAGE_SIZE, pages_per_row=PAGES_PER_ROW, num_pages=ROWS * PAGES_PER_ROW
)
COLLECTIVES = re.compile(
  r" (all-reduce|all-gather|all-to-all|collective-permute|collective-broadcast|reduce-scatter)"
  r"(?:-start)?\("
)


def build(model, *sizes, layout="paged"):
  """Executors on groups of so many devices, one after another."""
  pages = dataclasses.replace(PAGES, contiguous=layout == "slots")
  return build_executors(model, pages, BUCKETS, cpus(*sizes), layout=layout)


def prompts(vocab_size):
  rng = np.random.default_rng(0)
  return [tuple(map(int, rng.integers(0, vocab_size, n))) for n in (1, 7, 24, 33)]


def tokens(executors, roles, policies, vocab_size):
  pools = []
  for executor, role, policy in zip(executors, roles, policies):
    limits = SchedulerConfig(
      token_budget=CAPACITY if role == "prefill" else 8,
      chunk_prompts=role != "prefill",
      decodes=role != "prefill",
    )
    executor.reset()
    scheduler = Scheduler(make_policy(policy), executor._pages, limits)
    pools.append(Pool(f"{role}{len(pools)}", role, scheduler, executor))
  requests = [request(i, p, max_tokens=10) for i, p in enumerate(prompts(vocab_size))]
  return tokens_of(serve_all(Cluster(pools), requests))


@pytest.fixture(scope="module")
def alone(tiny):
  (executor,) = build(tiny, 1)
  return tokens([executor], ["mixed"], ["sarathi"], TINY.vocab_size)


@pytest.mark.parametrize(
  ("tp", "layout"),
  [(4, "slots"), *(pytest.param(tp, "paged", marks=pytest.mark.slow) for tp in (2, 8))],
)
def test_tokens_and_logits_are_those_of_one_device(tiny, plain_logits, alone, tp, layout):
  """8 query heads on 2 kv heads: from 4 devices on, each kv head lies on several."""
  (executor,) = build(tiny, tp, layout=layout)
  assert tokens([executor], ["mixed"], ["sarathi"], TINY.vocab_size) == alone
  executor.reset()
  for ids in prompts(TINY.vocab_size):
    logits = executor.last_logits(ids)
    np.testing.assert_allclose(logits, plain_logits(ids)[-1], rtol=0, atol=TOLERANCE)
  shard = executor._cache[0][0].addressable_shards[0].data
  assert shard.size * tp == executor._cache[0][0].size
  assert executor._cache[0][0].size == PAGES.num_pages * PAGE_SIZE * max(2, tp) * TINY.head_dim


@pytest.mark.parametrize(
  ("source", "target"),
  [(2, 4), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in [(1, 2), (4, 2)])],
)
def test_a_hand_off_between_pools_of_different_sizes_changes_no_token(tiny, alone, source, target):
  executors = build(tiny, source, target)
  roles, policies = ["prefill", "decode"], ["prefill_only", "decode_only"]
  assert tokens(executors, roles, policies, TINY.vocab_size) == alone


def compiled_steps(num_layers, tp):
  """kind -> the compiled step of a model of so many layers over `tp` devices."""
  config = dataclasses.replace(TINY, num_layers=num_layers)
  (executor,) = build(from_arrays(config, random_arrays(config, 0)), tp)
  plans = {
    "prefill": probe_plan(PAGES, prefills=(20,)),
    "decode": probe_plan(PAGES, decodes=3),
    "mixed": probe_plan(PAGES, prefills=(20,), decodes=2),
  }
  return {kind: executor.lower(plan).compile() for kind, plan in plans.items()}, executor


def collectives(compiled):
  return collections.Counter(COLLECTIVES.findall(compiled.as_text()))


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4])
def test_a_layer_costs_two_all_reduces_and_no_other_collective(tp, plain_sampling):
  one, _ = compiled_steps(1, tp)
  two, executor = compiled_steps(2, tp)
  for kind in ("prefill", "decode", "mixed"):
    more = collectives(two[kind])
    more.subtract(collectives(one[kind]))
    assert +more == {"all-reduce": 2}, kind
    # and its cache is updated in place on every device
    cache_bytes = executor._layout.num_bytes // tp
    assert cache_bytes <= two[kind].memory_analysis().alias_size_in_bytes < 1.2 * cache_bytes


def test_what_cannot_be_split_is_refused_with_its_numbers():
  for config, tp, message in (
    (TINY, 3, "num_heads=8 is no multiple of the 3 devices"),
    (dataclasses.replace(TINY, d_ff=382), 4, "d_ff=382 is no multiple of the 4 devices"),
    (dataclasses.replace(TINY, num_heads=12, num_kv_heads=6), 4, "num_kv_heads=6 can neither"),
  ):
    with pytest.raises(ValueError, match=message):
      config.check_split(tp)
  small = dataclasses.replace(TINY, num_layers=1)
  with pytest.raises(ValueError, match="num_heads=8"):
    build(from_arrays(small, random_arrays(small, 0)), 3)
