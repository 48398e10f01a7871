"""When requests arrive: open-loop processes, as drawn, never rescaled to hit a rate exactly.

Each has `times_s(n, rng)`: n arrival times from the start of the run, sorted, multiples of a tick.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from pdjax.core.clock import to_ticks


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AllAtOnce:
  """Everything is there at time 0: an offline batch."""

  def times_s(self, n: int, rng: np.random.Generator) -> list[float]:
    return [0.0] * n


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Poisson:
  """Independent users: exponential gaps, the first one before the first request.

  Raises:
    ValueError: a rate that is not positive.
  """

  rate_rps: float

  def __post_init__(self):
    _check_positive("rate_rps", self.rate_rps)

  def times_s(self, n: int, rng: np.random.Generator) -> list[float]:
    return _from_gaps(rng.exponential(1 / self.rate_rps, n))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gamma:
  """Gamma-distributed gaps. `cv` is their standard deviation over their mean: 1 is Poisson, more
  comes in bursts, less is more even.

  Raises:
    ValueError: a rate or `cv` that is not positive.
  """

  rate_rps: float
  cv: float

  def __post_init__(self):
    _check_positive("rate_rps", self.rate_rps)
    _check_positive("cv", self.cv)

  def times_s(self, n: int, rng: np.random.Generator) -> list[float]:
    variance = self.cv**2  # of the gap in units of its mean; a gamma's is 1 / shape
    return _from_gaps(rng.gamma(1 / variance, variance / self.rate_rps, n))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
  """The times of a trace, as they stand.

  Raises:
    ValueError: a time before 0 or before its predecessor; more requests asked for than recorded.
  """

  arrivals_s: tuple[float, ...]

  def __post_init__(self):
    last_s = 0.0
    for i, arrival_s in enumerate(self.arrivals_s):
      if not last_s <= arrival_s < math.inf:
        raise ValueError(f"arrivals_s[{i}]={arrival_s} must be finite and at least {last_s}")
      last_s = arrival_s

  def times_s(self, n: int, rng: np.random.Generator) -> list[float]:
    if n > len(self.arrivals_s):
      raise ValueError(f"{n} requests wanted but the trace has {len(self.arrivals_s)}")
    return [to_ticks(arrival_s) for arrival_s in self.arrivals_s[:n]]


ARRIVALS = {"all_at_once": AllAtOnce, "poisson": Poisson, "gamma": Gamma, "trace": Recorded}


def _check_positive(name: str, value: float) -> None:
  if not 0 < value < math.inf:
    raise ValueError(f"{name}={value} must be positive")


def _from_gaps(gaps_s: np.ndarray) -> list[float]:
  return [to_ticks(time_s) for time_s in np.cumsum(gaps_s).tolist()]
