"""The highest rate that still meets a target. Changes nothing: whoever asks runs the probes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator

NEAR_SHARE = 1 / 4  # of the first guess, which seldom is further off
FLOOR_SHARE = 2.0**-10  # so little load that nobody meets anybody
MOST_DOUBLINGS = 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RateBound:
  """Between which rates a target stops being met.

  `passed_rps` None: not even without load, or not at the rate that was to be beaten. `failed_rps`
  None: no rate that was tried failed.
  """

  passed_rps: float | None
  failed_rps: float | None


def search_rate(
  start_rps: float, *, tolerance: float, must_beat_rps: float | None = None
) -> Generator[float, bool, RateBound]:
  """Yields rates to probe, is sent whether each passed, and returns the bound.

  From `start_rps` it doubles until a rate fails, or falls to a quarter and then at once to next to
  no load, to know whether any rate passes; then it bisects, by ratios, until the rates that passed
  and failed are within a share of `tolerance`. `must_beat_rps` is probed first, and ends the search
  if it fails. A target is taken to be met at every rate below one that passed. With few requests
  chance makes that a little untrue, and the rate that comes out passed and one `tolerance` above it
  failed.

  Raises:
    ValueError: a rate or a tolerance that is not positive.
  """
  for name, value in (("start_rps", start_rps), ("tolerance", tolerance)):
    if not 0 < value < math.inf:
      raise ValueError(f"{name}={value} must be positive")
  passed, failed = None, None
  if must_beat_rps is not None:
    if not (yield must_beat_rps):
      return RateBound(passed_rps=None, failed_rps=must_beat_rps)
    passed, start_rps = must_beat_rps, max(start_rps, 2 * must_beat_rps)
  for doublings in range(MOST_DOUBLINGS + 1):
    rate_rps = start_rps * 2**doublings
    if not (yield rate_rps):
      failed = rate_rps
      break
    passed = rate_rps
  if failed is None:
    return RateBound(passed_rps=passed, failed_rps=None)
  if passed is None:
    for share in (NEAR_SHARE, FLOOR_SHARE):
      if (yield start_rps * share):
        passed = start_rps * share
        break
      failed = start_rps * share
    else:
      return RateBound(passed_rps=None, failed_rps=failed)
  while failed > passed * (1 + tolerance):
    middle_rps = math.sqrt(passed * failed)
    if (yield middle_rps):
      passed = middle_rps
    else:
      failed = middle_rps
  return RateBound(passed_rps=passed, failed_rps=failed)
