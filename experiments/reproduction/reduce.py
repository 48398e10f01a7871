"""What figures keep of a simulated run, as plain data. Kept results are those of this file."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable
from typing import Any

from experiments.serving import Experiment
from pdjax.core.events import EventLog, Fetched
from pdjax.metrics.latency import RequestRecord, itls_s, percentile, phases, request_records
from pdjax.metrics.utilisation import pool_usage, prefix_hits


def requests(experiment: Experiment, log: EventLog) -> dict[str, list[Any]]:
  """Columns of all requests in order of arrival: `ttft_s`, `tpot_s` (None: there is none)."""
  records = request_records(log)
  own = [records[request.request_id] for request in experiment.requests]
  return {
    "ttft_s": [record.ttft_s for record in own],
    "tpot_s": [record.tpot_s for record in own],
  }


def tails(experiment: Experiment, log: EventLog) -> dict[str, float | None]:
  """TTFT p50 and P99 of all gaps between tokens, as Sarathi-Serve reports them."""
  records = request_records(log)
  ttfts_s = [record.ttft_s for record in records.values() if record.ttft_s is not None]
  return {"ttft_p50_s": percentile(ttfts_s, 50), "itl_p99_s": percentile(itls_s(records), 99)}


def micros(experiment: Experiment, log: EventLog) -> dict[str, list[int | None]]:
  """As `requests`, in whole microseconds, for a great many runs. A failed request has no TTFT."""
  return _micros(experiment, log, lambda record: record.tpot_s)


def slowest_micros(experiment: Experiment, log: EventLog) -> dict[str, list[int | None]]:
  """As `micros`, with the TBT of `mooncake` in place of the TPOT."""
  return _micros(experiment, log, _tbt_s)


def _micros(
  experiment: Experiment, log: EventLog, gap_s: Callable[[RequestRecord], float | None]
) -> dict[str, list[int | None]]:
  records = request_records(log)
  own = [records[request.request_id] for request in experiment.requests]
  ttfts_s = [record.ttft_s if record.outcome == "finished" else None for record in own]
  return {
    name: [None if value_s is None else round(1e6 * value_s) for value_s in values_s]
    for name, values_s in (("ttft_us", ttfts_s), ("tpot_us", map(gap_s, own)))
  }


STALL_PERCENTS = (50, 90, 95, 99, 99.9, 100)


def stalls(experiment: Experiment, log: EventLog) -> dict[str, Any]:
  """`itl_s`: gaps between tokens at `STALL_PERCENTS`; TTFT p50 and p90, and the median of those
  with the longest prompt.
  """
  records = request_records(log)
  ttfts_s = [record.ttft_s for record in records.values() if record.ttft_s is not None]
  longest = max(record.num_prompt_tokens for record in records.values())
  of_longest = [r.ttft_s for r in records.values() if r.num_prompt_tokens == longest]
  gaps_s = itls_s(records)
  return {
    "itl_s": [percentile(gaps_s, percent) for percent in STALL_PERCENTS],
    "ttft_p50_s": percentile(ttfts_s, 50),
    "ttft_p90_s": percentile(ttfts_s, 90),
    "long_ttft_p50_s": percentile(of_longest, 50),
  }


TBTS_S = (0.1, 0.2, 0.3)  # limits of FAST'25


def mooncake(experiment: Experiment, log: EventLog) -> dict[str, Any]:
  """What Mooncake reports. TBT of a request is the mean of the longest tenth of its gaps (FAST'25).

  `ttft_s`, `tbt_s` and `tpot_s` are percentiles 0 to 100, `second_mean_s` is the mean time from
  arrival to the second token; `met` the shares of all requests that end with TTFT and TBT in time:
  that of the SLO, and each of `TBTS_S`; `tbt_met` those that keep the latter alone. `busy` is the
  mean share of the run that pools of a role spend in steps.
  """
  records = list(request_records(log).values())
  tbts_s = [_tbt_s(record) for record in records]
  has_ended = [record.finish_s is not None for record in records]
  soon = [own and r.ttft_s <= experiment.slo.ttft_s for own, r in zip(has_ended, records)]
  ttfts_s = [record.ttft_s for record in records if record.ttft_s is not None]
  rejected = [r for r in records if (r.failed_reason or "").startswith("rejected")]
  seconds_s = [r.token_s[1] - r.arrival_s for r in records if len(r.token_s) > 1]
  num_hits, num_tokens = prefix_hits(log)
  busy: dict[str, list[float]] = {}
  for pool, usage in pool_usage(log).items():
    busy.setdefault(pool.rstrip("0123456789"), []).append(usage.busy_share)
  each = range(101)
  return {
    "num_requests": len(records),
    "num_ended": sum(has_ended),
    "ttft_mean_s": statistics.fmean(ttfts_s),
    "second_mean_s": statistics.fmean(seconds_s) if seconds_s else None,
    "ttft_s": [percentile(ttfts_s, q) for q in each],
    "tbt_s": [percentile([own for own in tbts_s if own is not None], q) for q in each],
    "tpot_s": [percentile([r.tpot_s for r in records if r.tpot_s is not None], q) for q in each],
    "met": [statistics.fmean(a and (own or 0.0) <= limit_s for a, own in zip(soon, tbts_s))
            for limit_s in TBTS_S],
    "tbt_met": [statistics.fmean(a and (own or 0.0) <= limit_s for a, own in zip(has_ended, tbts_s))
                for limit_s in TBTS_S],
    "num_rejected": sum(not record.token_s for record in rejected),
    "num_rejected_after_prefill": sum(bool(record.token_s) for record in rejected),
    "hits": num_hits / num_tokens,
    "fetched_bytes": sum(event.num_bytes for event in log if isinstance(event, Fetched)),
    "busy": {role: statistics.fmean(shares) for role, shares in busy.items()},
  }  # fmt: skip


def _tbt_s(record: RequestRecord) -> float | None:
  gaps_s = sorted(record.itl_s, reverse=True)
  return statistics.fmean(gaps_s[: -(-len(gaps_s) // 10)]) if gaps_s else None


def phase_shares(experiment: Experiment, log: EventLog) -> dict[str, Any]:
  """Of finished requests: `percent` of their time in each phase, the mean of the shares of each
  request, and `copy_s` of each that was copied.
  """
  records = list(request_records(log).values())
  own = [dataclasses.asdict(p) | {"total_s": p.total_s} for p in map(phases, records) if p]
  return {
    "percent": {
      name.removesuffix("_s"): 100 * statistics.fmean(p[name] / p["total_s"] for p in own)
      for name in own[0]
      if name != "total_s"
    },
    "copy_s": [record.copy_s for record in records if record.copy_s is not None],
  }


MOST_KEPT = 400  # points of a curve


def outpouring(experiment: Experiment, log: EventLog) -> dict[str, Any]:
  """When tokens came, all requests together: `token_s[i]` is the time of the i-th `every`-th one.

  `second_s` is the first time that a request has two; `stall_s` the longest gap between two tokens
  of a request.
  """
  records = request_records(log)
  times_s = sorted(itertools.chain.from_iterable(r.token_s for r in records.values()))
  every = -(-len(times_s) // MOST_KEPT)
  return {
    "token_s": times_s[::every],
    "every": every,
    "num_tokens": len(times_s),
    "end_s": times_s[-1],
    "second_s": min((r.token_s[1] for r in records.values() if len(r.token_s) > 1), default=None),
    "stall_s": float(max(itls_s(records), default=0.0)),
  }
