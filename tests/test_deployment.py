"""Pools hold what they say they hold, and no plan of theirs is larger than what is compiled."""

import dataclasses

import pytest

from pdjax.config import STRATEGIES, CacheConfig, SchedulerOptions
from pdjax.deployment import (
  largest_budgets,
  limits,
  make_cluster,
  make_pages,
  policy_name,
  roles_of,
)
from pdjax.scheduling.policies import POLICIES

pytestmark = pytest.mark.quick


class Executor:
  vocab_size = None

  def __init__(self, devices):
    self.devices = devices


@pytest.mark.parametrize("layout", ["slots", "paged"])
@pytest.mark.parametrize(("longest", "max_len"), [(33, None), (7, 33), (500, 33)])
def test_a_row_holds_the_longest_sequence_in_whole_pages(layout, longest, max_len):
  cache = CacheConfig(layout=layout, num_rows=3, page_size=16, max_len=max_len)
  pages = make_pages(cache, longest)
  assert pages.pages_per_row * pages.page_size == 48
  assert pages.num_pages == 3 * pages.pages_per_row
  assert pages.contiguous == (layout == "slots")


def test_pages_are_those_asked_for_or_what_the_device_holds():
  cache = CacheConfig(layout="paged", num_rows=3, page_size=16)
  assert make_pages(cache, 33, 70).num_pages == 70
  assert make_pages(dataclasses.replace(cache, num_pages=5), 33, 70).num_pages == 5
  with pytest.raises(ValueError, match=r"num_pages=5 goes with cache.layout=paged.* has 3 pages"):
    make_pages(CacheConfig(layout="slots", page_size=16, num_pages=5), 33)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_pool_runs_on_its_own_devices(strategy, tp):
  specs = STRATEGIES[strategy](4, tp)
  pages = make_pages(CacheConfig(num_rows=4), 64)
  cluster = make_cluster(specs, SchedulerOptions(token_budget=8), pages, Executor)
  assert [(p.name, p.role, p.executor.devices) for p in cluster.pools] == [
    (s.name, s.role, s.devices) for s in specs
  ]
  for pool, spec in zip(cluster.pools, specs, strict=True):
    config = pool.scheduler.config
    needs = POLICIES[spec.policy]
    whole_budget = 64 + 4 * needs.mixes  # the longest prompt beside a decode of every row
    assert config.chunk_prompts == needs.chunks
    assert config.token_budget == (8 if needs.chunks else whole_budget)
    assert config.reservation == needs.reservation
    assert config.decodes == (spec.role != "prefill")


def test_a_policy_replaces_that_of_mixed_pools_alone():
  options = SchedulerOptions(policy="prefill_first")
  chunked, disaggregated = STRATEGIES["chunked"](2), STRATEGIES["disaggregated"](2)
  assert {policy_name(spec, options) for spec in chunked} == {"prefill_first"}
  assert [policy_name(spec, options) for spec in disaggregated] == ["prefill_only", "decode_only"]
  with pytest.raises(ValueError, match="policy=decode_only serves only half of a request"):
    policy_name(chunked[0], SchedulerOptions(policy="decode_only"))


@pytest.mark.parametrize("policy", [None, "sarathi", "prefill_first", "orca"])
@pytest.mark.parametrize("num_rows", [2, 16, 256])
def test_the_compiled_shapes_hold_the_budget_of_every_pool(policy, num_rows):
  """Whatever the rows and the policy: no plan that a scheduler may make is without a shape."""
  options = SchedulerOptions(policy=policy, token_budget=300)
  pages = make_pages(CacheConfig(num_rows=num_rows), 44)
  specs = [spec for strategy in STRATEGIES.values() for spec in strategy(2)]
  whole, mixed = largest_budgets(specs, options, pages)
  for spec in specs:
    budget = limits(spec, options, pages).token_budget
    assert budget <= whole
    assert budget <= mixed or not POLICIES[policy_name(spec, options)].mixes


def test_a_group_of_devices_has_the_roles_of_all_strategies():
  specs = [spec for strategy in STRATEGIES.values() for spec in strategy(4, 2)]
  assert roles_of(specs) == {(0, 1): {"mixed", "prefill"}, (2, 3): {"mixed", "decode"}}
  assert roles_of(STRATEGIES["chunked"](1)) == {(0,): {"mixed"}}
