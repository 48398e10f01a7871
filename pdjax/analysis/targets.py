"""What a run at one rate came to, and what it has to reach. Changes nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Protocol

from pdjax.core.request import Slo
from pdjax.metrics.goodput import attainment, attainment_tpot, attainment_ttft
from pdjax.metrics.latency import (
  RequestRecord,
  itls_s,
  outcomes,
  percentile,
  tpots_s,
  ttfts_s,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
  """One run at one rate, in the numbers that targets are about. Absent values are None.

  `caveats` are what a reader must know of all its step times, `extrapolated` of some of them.
  """

  rate_rps: float
  num_requests: int
  num_failed: int
  attainment: float
  attainment_ttft: float
  attainment_tpot: float
  ttft_p50_s: float | None
  ttft_p90_s: float | None
  ttft_p99_s: float | None
  tpot_p50_s: float | None
  tpot_p90_s: float | None
  tpot_p99_s: float | None
  itl_p99_s: float | None
  queue_p50_s: float | None
  caveats: tuple[str, ...] = ()
  extrapolated: tuple[str, ...] = ()


def outcome_of(records: Mapping[int, RequestRecord], slo: Slo, rate_rps: float) -> Outcome:
  """The numbers of a run of at least one request."""
  ttft_s, tpot_s = ttfts_s(records), tpots_s(records)
  queues_s = [
    r.first_scheduled_s - r.arrival_s for r in records.values() if r.first_scheduled_s is not None
  ]
  return Outcome(
    rate_rps=rate_rps,
    num_requests=len(records),
    num_failed=len(records) - outcomes(records)["finished"],
    attainment=attainment(records, slo),
    attainment_ttft=attainment_ttft(records, slo),
    attainment_tpot=attainment_tpot(records, slo),
    **{f"ttft_p{q}_s": percentile(ttft_s, q) for q in (50, 90, 99)},
    **{f"tpot_p{q}_s": percentile(tpot_s, q) for q in (50, 90, 99)},
    itl_p99_s=percentile(itls_s(records), 99),
    queue_p50_s=percentile(queues_s, 50),
  )


class Target(Protocol):
  """`value` is what is drawn over the rate, against `limit`; None where there is nothing."""

  @property
  def label(self) -> str: ...

  @property
  def limit(self) -> float: ...

  def value(self, outcome: Outcome) -> float | None: ...

  def is_met(self, outcome: Outcome) -> bool: ...


# What of the SLOs a share of the requests has to meet: both at once; each, perhaps by others (what
# DistServe's code asks: P90 TTFT and P90 TPOT); or one of them.
PARTS = {
  "joint": lambda o: o.attainment,
  "separate": lambda o: min(o.attainment_ttft, o.attainment_tpot),
  "ttft": lambda o: o.attainment_ttft,
  "tpot": lambda o: o.attainment_tpot,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Attainment:
  """A share of all requests meets the SLOs (DistServe). `part` is one of `PARTS`.

  Raises:
    ValueError: a share outside (0, 1], or no such part.
  """

  share: float = 0.9
  part: str = "joint"

  def __post_init__(self):
    if not 0 < self.share <= 1:
      raise ValueError(f"share={self.share} must be in (0, 1]")
    if self.part not in PARTS:
      raise ValueError(f"part={self.part!r} must be one of {', '.join(PARTS)}")

  @property
  def label(self) -> str:
    names = {
      "joint": "meet both SLOs",
      "separate": "meet the TTFT SLO, and as many the TPOT SLO",
      "ttft": "meet the TTFT SLO",
      "tpot": "meet the TPOT SLO",
    }
    return f"{self.share:.3g} of the requests {names[self.part]}"

  @property
  def limit(self) -> float:
    return self.share

  def value(self, outcome: Outcome) -> float:
    return PARTS[self.part](outcome)

  def is_met(self, outcome: Outcome) -> bool:
    return self.value(outcome) >= self.share


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stalls:
  """P99 of all gaps between tokens, and the median queue, are short (Sarathi-Serve's capacity).

  Nothing may fail: a request that got no token has no gap that could be long.
  """

  itl_s: float
  queue_s: float = 2.0

  def __post_init__(self):
    for name in ("itl_s", "queue_s"):
      if not getattr(self, name) > 0:
        raise ValueError(f"{name}={getattr(self, name)} must be positive")

  @property
  def label(self) -> str:
    return f"P99 ITL of at most {self.itl_s:.3g} s, median queue of at most {self.queue_s:g} s"

  @property
  def limit(self) -> float:
    return self.itl_s

  def value(self, outcome: Outcome) -> float | None:
    return outcome.itl_p99_s

  def is_met(self, outcome: Outcome) -> bool:
    if outcome.num_failed:
      return False
    return (outcome.itl_p99_s or 0.0) <= self.itl_s and outcome.queue_p50_s <= self.queue_s
