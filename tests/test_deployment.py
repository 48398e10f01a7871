"""Pools hold what they say they hold, and no plan of theirs is larger than what is compiled."""

import dataclasses

import pytest

from pdjax.config import STRATEGIES, CacheConfig, SchedulerOptions, parse_pools
from pdjax.core.device_group import DeviceGroup
from pdjax.deployment import (
  in_role,
  largest_budgets,
  limits,
  make_cluster,
  make_pages,
  policy_name,
  uses_of,
)
from pdjax.scheduling.policies import POLICIES
from pdjax.scheduling.routing import PowerOfTwo
from pdjax.scheduling.scheduler import SchedulerConfig

pytestmark = pytest.mark.quick


class Executor:
  vocab_size = page_shape = None

  def __init__(self, group):
    self.group = group


def alone(*devices):
  return DeviceGroup(devices=devices)


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
  cluster = make_cluster(specs, SchedulerOptions(token_budget=8), lambda _: pages, Executor)
  assert [(p.name, p.role, p.executor.group) for p in cluster.pools] == [
    (s.name, s.role, s.group) for s in specs
  ]
  for pool, spec in zip(cluster.pools, specs, strict=True):
    config = pool.scheduler.config
    needs = POLICIES[spec.policy]
    whole_budget = 64 + 4 * needs.mixes  # the longest prompt beside a decode of every row
    assert config.chunk_prompts == needs.chunks
    assert config.token_budget == (8 if needs.chunks else whole_budget)
    assert config.reservation == needs.reservation
    assert config.decodes == (spec.role != "prefill")


def test_pools_of_any_shape_have_the_memory_and_the_limits_of_their_own():
  specs = parse_pools("1xprefill:tp2,2xdecode:tp4,mixed:orca")
  cache = CacheConfig(layout="paged", num_rows=4)

  def pages(group):
    return make_pages(cache, 64, num_pages=100 * len(group.devices))

  cluster = make_cluster(specs, SchedulerOptions(token_budget=8), pages, Executor)
  found = {
    pool.name: (pool.executor.group.devices, pool.scheduler.pages.config.num_pages)
    for pool in cluster.pools
  }
  assert found == {
    "prefill0": ((0, 1), 200),
    "decode0": ((2, 3, 4, 5), 400),
    "decode1": ((6, 7, 8, 9), 400),
    "mixed0": ((10,), 100),
  }
  assert [pool.name for pool in cluster.entry] == ["prefill0", "mixed0"]
  assert [pool.name for pool in cluster.decode] == ["decode0", "decode1"]
  steps = {"prefill", "decode", "mixed"}
  assert list(uses_of(specs, SchedulerOptions()).items()) == [
    (alone(0, 1), {"prefill", "gather"}),
    (alone(2, 3, 4, 5), {"decode", "scatter"}),
    (alone(6, 7, 8, 9), {"decode", "scatter"}),
    (alone(10), steps),
  ]


def test_groups_of_other_sizes_on_the_same_devices_compile_what_they_use_themselves():
  """As where strategies of equal pools are compared with pools that differ."""
  specs = [*STRATEGIES["chunked"](4), *parse_pools("1xprefill:tp2,2xdecode")]
  steps = {"prefill", "decode", "mixed"}
  assert uses_of(specs, SchedulerOptions()) == {
    alone(0): steps,
    alone(0, 1): {"prefill", "gather"},
    alone(1): steps,
    alone(2): steps | {"scatter"},
    alone(3): steps | {"scatter"},
  }


def test_what_is_compiled_is_of_all_that_makes_a_group():
  """Not of its devices alone: the same in stages, or by another name, is another group."""
  specs = parse_pools("prefill:tp2:pp2,decode")
  specs += parse_pools("prefill:tp4,decode") + parse_pools("prefill:tp4@cpu,decode")
  uses = uses_of(specs, SchedulerOptions())
  assert list(uses) == [*dict.fromkeys([specs[2].group, specs[4].group, specs[0].group]), alone(4)]
  assert {group.devices for group in uses} == {(0, 1, 2, 3), (4,)}


def test_pools_that_cannot_serve_together_are_refused():
  pages = make_pages(CacheConfig(num_rows=4), 64)
  specs = parse_pools("prefill,decode")[:1]
  with pytest.raises(ValueError, match="prefill pools need a decode pool"):
    make_cluster(specs, SchedulerOptions(), lambda _: pages, Executor)
  sizes = {(0,): CacheConfig(num_rows=4), (1,): CacheConfig(num_rows=4, page_size=32)}
  with pytest.raises(ValueError, match="page_size is 16 in mixed0, 32 in mixed1"):
    make_cluster(
      parse_pools("2xmixed"),
      SchedulerOptions(),
      lambda g: make_pages(sizes[g.devices], 64),
      Executor,
    )


def test_a_policy_replaces_that_of_mixed_pools_alone():
  options = SchedulerOptions(policy="prefill_first")
  chunked, disaggregated = STRATEGIES["chunked"](2), STRATEGIES["disaggregated"](2)
  assert {policy_name(spec, options) for spec in chunked} == {"prefill_first"}
  assert [policy_name(spec, options) for spec in disaggregated] == ["prefill_only", "decode_only"]
  with pytest.raises(ValueError, match="policy=decode_only serves only half of a request"):
    policy_name(chunked[0], SchedulerOptions(policy="decode_only"))


def test_options_reach_the_policy_of_every_pool_that_runs_it():
  options = SchedulerOptions(
    token_budget=8, options=("sarathi.tile_tokens=4", "deadline.tpot_s=0.25")
  )
  pages = make_pages(CacheConfig(num_rows=4), 64)
  policies = {
    name: [
      p.scheduler.policy for p in make_cluster(make(2), options, lambda _: pages, Executor).pools
    ]
    for name, make in STRATEGIES.items()
  }
  assert {policy.tile_tokens for policy in policies["sarathi"] + policies["chunked"]} == {4}
  assert {policy.tpot_s for policy in policies["deadline"]} == {0.25}
  for name in ("deadline", "simple_chunking"):
    first, second = policies[name]
    assert first is not second, "two pools would share what it keeps"


def test_every_pool_has_the_step_time_of_its_own_devices():
  pages = make_pages(CacheConfig(num_rows=4), 64)
  specs = STRATEGIES["disaggregated"](4, 2)
  cluster = make_cluster(
    specs,
    SchedulerOptions(),
    lambda _: pages,
    Executor,
    lambda group: lambda counts: (group.devices, counts),
  )
  assert [pool.scheduler.predict_step_s(7) for pool in cluster.pools] == [((0, 1), 7), ((2, 3), 7)]
  cluster = make_cluster(specs, SchedulerOptions(), lambda _: pages, Executor)
  assert [pool.scheduler.predict_step_s for pool in cluster.pools] == [None, None]


def test_limits_are_those_of_the_options_where_they_are_set():
  pages = make_pages(CacheConfig(layout="paged", num_rows=4), 64)
  changes = dict(
    watermark=0.2,
    max_preemptions=1,
    swap_tokens=100,
    look_ahead=3,
    max_partial_prefills=2,
    long_prompt_tokens=30,
    long_prompt_share=0.5,
    prefix_cache=True,
    eviction="lfu",
  )
  (orca,), (sarathi,) = STRATEGIES["orca"](1), STRATEGIES["sarathi"](1)
  for reservation in ("chunk", "request"):
    options = SchedulerOptions(token_budget=9, reservation=reservation, **changes)
    config = limits(sarathi, options, pages)
    assert config == SchedulerConfig(token_budget=9, reservation=reservation, **changes)
    config = limits(orca, options, pages)
    # Whole prompts cannot be held to a share of a budget.
    changed = changes | dict(long_prompt_share=1.0, chunk_prompts=False)
    assert config == SchedulerConfig(token_budget=68, reservation=reservation, **changed)
  assert limits(orca, SchedulerOptions(prefill_budget=70), pages).token_budget == 70


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


def test_a_group_of_devices_compiles_what_the_pools_of_all_strategies_use():
  def uses(strategy, num_devices=2, **options):
    return list(uses_of(STRATEGIES[strategy](num_devices), SchedulerOptions(**options)).values())

  steps = {"prefill", "decode", "mixed"}
  assert uses("chunked", 1) == [steps]
  assert uses("continuous", 1) == [steps - {"mixed"}], "its steps never mix"
  assert uses("chunked", 1, swap_tokens=9) == [steps | {"gather", "scatter"}]
  copies = dict(router="conductor", options=("conductor.balancing_threshold=1.5",))
  assert uses("disaggregated", **copies)[0] == {"prefill", "gather", "scatter"}
  assert uses("disaggregated") == [{"prefill", "gather"}, {"decode", "scatter"}]
  specs = [spec for name in ("chunked", "disaggregated") for spec in STRATEGIES[name](4, 2)]
  all_uses = uses_of(specs, SchedulerOptions())
  assert all_uses == {alone(0, 1): steps | {"gather"}, alone(2, 3): steps | {"scatter"}}


def test_a_decode_pool_takes_prompts_only_from_a_router_that_sends_it_some():
  specs, pages = STRATEGIES["disaggregated"](2), make_pages(CacheConfig(num_rows=4), 64)
  local = SchedulerOptions(router="conductor", options=("conductor.local_prefill_tokens=16",))
  for options, policy in (
    (SchedulerOptions(router="conductor"), "decode_only"),
    (local, "sarathi"),
  ):
    assert [policy_name(spec, options) for spec in specs] == ["prefill_only", policy]
    assert limits(specs[1], options, pages).reservation == "request", "nobody is preempted there"
  assert list(uses_of(specs, local).values())[1] == {"prefill", "decode", "mixed", "scatter"}


def test_the_router_is_the_one_that_the_options_name():
  pages = make_pages(CacheConfig(num_rows=4), 64)
  options = SchedulerOptions(router="power_of_two", options=("power_of_two.seed=3",))
  assert make_cluster(
    STRATEGIES["chunked"](2), options, lambda _: pages, Executor
  ).router == PowerOfTwo(seed=3)
  for wrong, message in (
    (dict(router="nearest"), "unknown router 'nearest'"),
    (dict(options=("conductor.rejects=late",)), "router conductor: rejects='late'"),
    (dict(options=("random.sed=1",)), "option of router random: 'sed'; did you mean seed"),
  ):
    with pytest.raises(ValueError, match=message):
      SchedulerOptions(**wrong)


def test_a_pipeline_that_turns_to_prefill_cuts_prompts_to_fill_its_stages():
  decode = next(spec for spec in parse_pools("1xprefill,1xdecode:pp2") if spec.role == "decode")
  assert in_role(decode, "prefill").policy == "prefill_chunks"
  assert in_role(dataclasses.replace(decode, pp=1), "prefill").policy == "prefill_only"
  assert in_role(decode, "decode") is decode
  with pytest.raises(ValueError, match="unknown role 'train'"):
    in_role(decode, "train")
