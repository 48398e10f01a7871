"""What figures keep of a simulated run, as plain data. Kept results are those of this file."""

from __future__ import annotations

from typing import Any

from experiments.serving import Experiment
from pdjax.core.events import EventLog
from pdjax.metrics.latency import itls_s, percentile, request_records


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
