"""A search by rates finds the threshold of anything that passes below it and fails above."""

from __future__ import annotations

import math

import pytest

from pdjax.analysis.rate_search import FLOOR_SHARE, MOST_DOUBLINGS, NEAR_SHARE, search_rate

pytestmark = pytest.mark.quick


def searched(threshold_rps: float, start_rps: float, **options):
  """The bound, and the rates that were probed."""
  probed, search = [], search_rate(start_rps, **options)
  rate_rps = next(search)
  try:
    while True:
      probed.append(rate_rps)
      rate_rps = search.send(rate_rps <= threshold_rps)
  except StopIteration as stop:
    return stop.value, probed


def most_probes(tolerance: float, doublings: int) -> int:
  """How many rates there are to probe at most, if the guess had to be doubled so often."""
  ratio = 2.0 if doublings else NEAR_SHARE / FLOOR_SHARE
  steps = math.ceil(math.log2(math.log(ratio) / math.log1p(tolerance)))
  return max(0, steps) + (doublings + 1 if doublings else 3)


@pytest.mark.parametrize("tolerance", [0.3, 0.05, 0.003])
@pytest.mark.parametrize("share", [0.0011, 0.02, 0.5, 0.999, 1.0, 1.7, 3.0, 7.9])
def test_the_threshold_is_found_within_the_tolerance_and_few_probes(share, tolerance):
  bound, probed = searched(10.0 * share, 10.0, tolerance=tolerance)
  assert bound.passed_rps <= 10.0 * share < bound.failed_rps
  assert bound.failed_rps <= bound.passed_rps * (1 + tolerance)
  assert {bound.passed_rps, bound.failed_rps} <= set(probed), "a rate was reported but not seen"
  doublings = max(0, math.ceil(math.log2(share))) if share >= 1 else 0
  assert len(probed) <= most_probes(tolerance, doublings if share >= 1 else 0) + (share == 1.0)
  assert len(set(probed)) == len(probed)


def test_what_nothing_reaches_costs_three_probes():
  bound, probed = searched(1e-9, 10.0, tolerance=0.05)
  assert bound.passed_rps is None
  assert probed == [10.0, 10.0 * NEAR_SHARE, 10.0 * FLOOR_SHARE]


def test_what_nothing_exceeds_ends_after_the_doublings():
  bound, probed = searched(math.inf, 1.0, tolerance=0.05)
  assert bound.failed_rps is None and bound.passed_rps == 2**MOST_DOUBLINGS == max(probed)


def test_a_rate_to_beat_comes_first_and_may_end_it():
  bound, probed = searched(4.0, 10.0, tolerance=0.05, must_beat_rps=5.0)
  assert bound.passed_rps is None and probed == [5.0]
  bound, probed = searched(6.0, 1.0, tolerance=0.05, must_beat_rps=5.0)
  assert probed[0] == 5.0 and 5.0 <= bound.passed_rps <= 6.0 < bound.failed_rps
  assert min(probed) == 5.0, "it looked below what already passed"


@pytest.mark.parametrize(("start_rps", "tolerance"), [(0.0, 0.1), (1.0, 0.0), (math.inf, 0.1)])
def test_a_search_needs_a_rate_and_a_tolerance(start_rps, tolerance):
  with pytest.raises(ValueError, match=r"must be positive"):
    next(search_rate(start_rps, tolerance=tolerance))
