"""Capacity and targets follow from step times by arithmetic that a person can redo."""

from __future__ import annotations

import numpy as np
import pytest

from pdjax.analysis.capacity import StepTimes, capacity_rps, derive_slo, measure, probe_points
from pdjax.config import STRATEGIES
from pdjax.core.clock import VirtualClock
from pdjax.core.events import EventLog, Finished
from pdjax.core.request import SamplingParams
from pdjax.scheduling.pages import PageConfig
from pdjax.scheduling.policies import POLICIES, make_policy
from pdjax.scheduling.scheduler import Scheduler, SchedulerConfig
from pdjax.serving.cluster import Cluster, Pool
from pdjax.serving.inbox import Inbox
from pdjax.serving.loop import serve
from pdjax.sim.hardware import Link
from pdjax.sim.sim_executor import SimExecutor
from pdjax.workloads import make_requests
from pdjax.workloads.arrivals import Poisson
from pdjax.workloads.lengths import Uniform

pytestmark = pytest.mark.quick

PAGES = PageConfig(num_rows=4, page_size=16, pages_per_row=8, num_pages=32)
TIMES = StepTimes(prefill=((10, 1.0), (20, 3.0), (40, 4.0)), decode=((1, 0.5), (4, 2.0)))


@pytest.mark.parametrize(
  ("num_tokens", "time_s"),
  [
    *TIMES.prefill,  # at the points
    (15, 2.0),  # half-way
    (25, 3.25),
    (60, 5.0),  # beyond, with the last slope: 1 s per 20 tokens
    (9, 0.8),  # before, with the first: 2 s per 10 tokens
    (1, 0.0),  # which would go below 0
  ],
)
def test_times_are_linear_between_and_beyond_the_points(num_tokens, time_s):
  assert TIMES.prefill_s(num_tokens) == pytest.approx(time_s)


def test_a_single_point_is_a_constant():
  times = StepTimes(prefill=((10, 1.5),), decode=((1, 0.25),))
  assert [times.prefill_s(n) for n in (1, 10, 99)] == [1.5] * 3
  assert times.decode_s(8) == 0.25


def test_capacity_is_pools_over_the_mean_cost_of_a_request():
  # 20 prompt tokens cost 3 s, 40 cost 4 s; each token after the first a quarter of 2 s.
  lengths = [(20, 3), (40, 1)]
  mean_s = ((3 + 2 * 0.5) + (4 + 0 * 0.5)) / 2
  assert capacity_rps(TIMES, lengths, num_pools=1, num_rows=4) == pytest.approx(1 / mean_s)
  assert capacity_rps(TIMES, lengths, num_pools=3, num_rows=4) == pytest.approx(3 / mean_s)


@pytest.mark.parametrize(("num_prefill_pools", "num_decode_pools"), [(1, 9), (9, 1), (2, 2)])
def test_of_pools_that_do_one_half_the_slower_half_decides(num_prefill_pools, num_decode_pools):
  lengths = [(10, 5), (30, 9)]
  prefill_s = sum(TIMES.prefill_s(prompt) for prompt, _ in lengths) / 2
  decode_s = sum(output - 1 for _, output in lengths) / 2 * TIMES.decode_s(4) / 4
  halves = dict(num_prefill_pools=num_prefill_pools, num_decode_pools=num_decode_pools)
  slower_rps = min(num_prefill_pools / prefill_s, num_decode_pools / decode_s)
  assert capacity_rps(TIMES, lengths, num_rows=4, **halves) == pytest.approx(slower_rps)
  beside_rps = capacity_rps(TIMES, lengths, num_pools=2, num_rows=4)
  both_rps = capacity_rps(TIMES, lengths, num_pools=2, num_rows=4, **halves)
  assert both_rps == pytest.approx(slower_rps + beside_rps)
  at_first_token = [(10, 1), (30, 1)]  # these need no decode
  assert capacity_rps(TIMES, at_first_token, num_rows=4, **halves) == pytest.approx(
    num_prefill_pools / prefill_s
  )


def test_targets_are_multiples_of_unloaded_steps():
  slo = derive_slo(TIMES, num_rows=4, longest_prompt=40, ttft_multiple=3.0, tpot_multiple=5.0)
  assert (slo.ttft_s, slo.tpot_s) == pytest.approx((3 * 4.0, 5 * 2.0))


def test_measure_takes_the_median_of_each_probe():
  seen: dict[tuple[str, int], int] = {}

  def time_step_s(plan):
    size = plan.num_prefill_tokens or len(plan.decodes)
    key = (plan.kind, size)
    seen[key] = seen.get(key, 0) + 1
    return {1: 1000.0, 2: float(size), 3: 0.0}[seen[key]]  # the median is the second

  times = measure(PAGES, time_step_s, longest_prompt=100, context=50, repeats=3)
  assert times.prefill == ((12, 12.0), (50, 50.0), (100, 100.0))
  assert times.decode == ((1, 1.0), (4, 4.0))
  assert set(seen.values()) == {3}


@pytest.mark.parametrize("longest_prompt", [1, 2, 7, 128, 10_000])
@pytest.mark.parametrize("context", [1, 10_000])
@pytest.mark.parametrize("num_rows", [1, 4])
def test_probes_fit_the_pool_and_rise(longest_prompt, context, num_rows):
  pages = PageConfig(num_rows=num_rows, page_size=16, pages_per_row=8, num_pages=8 * num_rows)
  points = list(probe_points(pages, longest_prompt, context))
  for kind in ("prefill", "decode"):
    sizes = [size for k, size, _ in points if k == kind]
    assert sizes == sorted(set(sizes)) and sizes
    assert sizes[-1] == (min(longest_prompt, 128) if kind == "prefill" else num_rows)
  for kind, size, plan in points:
    assert plan.kind == kind
    assert (plan.num_prefill_tokens if kind == "prefill" else len(plan.decodes)) == size
    assert all(p < pages.capacity_tokens for p in plan.decodes.positions)


# Steps whose two halves cost the same together as apart: then capacity is a bound.
PREFILL_S_PER_TOKEN, DECODE_S = 1e-3, 5e-3


def additive_step_s(plan):
  return PREFILL_S_PER_TOKEN * plan.num_prefill_tokens + (DECODE_S if len(plan.decodes) else 0.0)


def serve_far_above_capacity(strategy: str) -> tuple[float, float]:
  """(achieved, capacity) of two devices in requests a second, at three times the capacity."""
  lengths = Uniform(prompt_tokens=(4, 60), output_tokens=(2, 40)).pairs(
    300, np.random.default_rng(1)
  )
  times = measure(PAGES, additive_step_s, longest_prompt=60, context=40)
  capacity = capacity_rps(times, lengths, num_pools=2, num_rows=PAGES.num_rows)
  arrivals_s = Poisson(rate_rps=3 * capacity).times_s(len(lengths), np.random.default_rng(2))
  requests = make_requests(arrivals_s, lengths, None, SamplingParams(max_tokens=1))
  pools = []
  for spec in STRATEGIES[strategy](2):
    limits = SchedulerConfig(
      token_budget=32 if POLICIES[spec.policy].chunks else 128,
      chunk_prompts=POLICIES[spec.policy].chunks,
      reservation=POLICIES[spec.policy].reservation,
      decodes=spec.role != "prefill",
    )
    executor = SimExecutor(
      step_s=additive_step_s,
      link=Link(name="fast", latency_s=0.0, bytes_per_s=1e15),
      bytes_per_token=1,
    )
    scheduler = Scheduler(make_policy(spec.policy), PAGES, limits)
    pools.append(Pool(spec.name, spec.role, scheduler, executor))
  log = EventLog()
  for _ in serve(Cluster(pools), Inbox(requests), VirtualClock(), log):
    pass
  ends_s = [event.time_s for event in log if isinstance(event, Finished)]
  assert len(ends_s) == len(requests)
  return len(requests) / max(ends_s), capacity


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_strategy_serves_more_than_the_capacity(strategy):
  achieved, capacity = serve_far_above_capacity(strategy)
  assert achieved <= capacity
  # Devices of two roles cannot help each other, and batches of whole requests leave rows idle.
  if strategy not in ("disaggregated", "faster_transformer"):
    assert achieved > 0.85 * capacity, "the bound is not tight"
