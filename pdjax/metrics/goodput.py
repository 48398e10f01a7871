"""Whether users got what they were promised. Changes nothing: pure functions of the records."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pdjax.core.events import Arrived, Copied, Event, Preempted
from pdjax.core.request import Slo
from pdjax.metrics.latency import (
  RequestRecord,
  itls_s,
  mean_phases,
  outcomes,
  percentiles,
  tpots_s,
  ttfts_s,
)
from pdjax.metrics.utilisation import prefix_hits


def meets_ttft(record: RequestRecord, slo: Slo) -> bool:
  return record.outcome == "finished" and record.ttft_s <= slo.ttft_s


def meets_tpot(record: RequestRecord, slo: Slo) -> bool:
  """True for a request that finished with one token: it has no time per token to be judged by."""
  return record.outcome == "finished" and (record.tpot_s is None or record.tpot_s <= slo.tpot_s)


def attainment(records: Mapping[int, RequestRecord], slo: Slo) -> float | None:
  """The share of all requests that meet both SLOs; None without requests.

  Failed and unfinished requests are misses. A request of one token is judged on its TTFT alone.
  """
  return _share(records, lambda r: meets_ttft(r, slo) and meets_tpot(r, slo))


def attainment_ttft(records: Mapping[int, RequestRecord], slo: Slo) -> float | None:
  """The share of all requests that finish and meet the TTFT; None without requests."""
  return _share(records, lambda r: meets_ttft(r, slo))


def attainment_tpot(records: Mapping[int, RequestRecord], slo: Slo) -> float | None:
  """The share of all requests that finish and meet the TPOT; None without requests."""
  return _share(records, lambda r: meets_tpot(r, slo))


def _share(
  records: Mapping[int, RequestRecord], is_met: Callable[[RequestRecord], bool]
) -> float | None:
  return sum(map(is_met, records.values())) / len(records) if records else None


def achieved_rate_rps(log: Iterable[Event]) -> float | None:
  """The rate at which the loop took requests in: gaps / time from the first to the last.

  It is the rate of the draw unless the loop lags behind it. None for fewer than two requests, or
  where all came at once.
  """
  arrivals_s = [e.time_s if e.seen_s is None else e.seen_s for e in log if isinstance(e, Arrived)]
  if len(arrivals_s) < 2 or max(arrivals_s) == min(arrivals_s):
    return None
  return (len(arrivals_s) - 1) / (max(arrivals_s) - min(arrivals_s))


def output_tokens_per_s(records: Mapping[int, RequestRecord]) -> float | None:
  """Tokens of finished requests / time from the first arrival to the last finish.

  Tokens of failed and unfinished requests are work, not output. None where nothing finished.
  """
  finished = [r for r in records.values() if r.outcome == "finished"]
  if not finished:
    return None
  num_tokens = sum(len(r.token_s) for r in finished)
  return num_tokens / (
    max(r.finish_s for r in finished) - min(r.arrival_s for r in records.values())
  )


def summary(
  records: Mapping[int, RequestRecord], log: Iterable[Event], *, slo: Slo | None = None
) -> dict[str, Any]:
  """A run as plain JSON data; with an SLO also its attainment.

  `copy_s` and `prefill_s` are sums over requests, so that they can be set against each other;
  `phases` are means over finished requests; `handoff_bytes` counts every copy of the log, and
  `handoff_bytes_ahead` what of it was sent before the prompt was prefilled;
  `prefix_hit_share` is of prompt tokens.
  """
  samples = {"ttft_s": ttfts_s(records), "tpot_s": tpots_s(records), "itl_s": itls_s(records)}
  data: dict[str, Any] = {}
  for name, values in samples.items():
    found = percentiles(values)
    data[name] = {"p50": found.p50, "p90": found.p90, "p99": found.p99, "n": found.n}
    if name == "itl_s":
      data[name]["max"] = found.max
  mean = mean_phases(records)
  num_hits, num_prompt_tokens = prefix_hits(log)
  data |= {
    "output_tokens_per_s": output_tokens_per_s(records),
    "num_requests": len(records),
    "num_failed": outcomes(records)["failed"],
    "num_preemptions": sum(isinstance(e, Preempted) for e in log),
    "prefix_hit_share": num_hits / num_prompt_tokens if num_prompt_tokens else None,
    "handoff_bytes": sum(e.num_bytes for e in log if isinstance(e, Copied)),
    "handoff_bytes_ahead": sum(e.num_bytes_ahead for e in log if isinstance(e, Copied)),
    "copy_s": sum(r.copy_s for r in records.values() if r.copy_s is not None),
    "prefill_s": sum(r.prefill_s for r in records.values() if r.prefill_s is not None),
    "phases": None if mean is None else dataclasses.asdict(mean),
  }
  if slo is not None:
    data["attainment"] = attainment(records, slo)
  return data
