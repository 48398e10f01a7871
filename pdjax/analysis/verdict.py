"""What the numbers of several strategies say, in words. Changes nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from pdjax.core.events import EventLog
from pdjax.metrics.goodput import Slo, attainment, attainment_tpot, attainment_ttft, summary
from pdjax.metrics.latency import (
  Interference,
  RequestRecord,
  enough,
  interference,
  mean_phases,
  outcomes,
  request_records,
)

_PHASES = {
  "queue_s": "queue",
  "prefill_s": "prefill",
  "handoff_wait_s": "hand-off wait",
  "copy_s": "copy",
  "decode_s": "decode",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StrategyRun:
  """One strategy's log with what was computed from it."""

  name: str
  log: EventLog
  records: Mapping[int, RequestRecord]
  summary: dict
  same_pool: Interference | None
  any_pool: Interference | None


def analyse(name: str, log: EventLog, slo: Slo) -> StrategyRun:
  records = request_records(log)
  return StrategyRun(
    name=name,
    log=log,
    records=records,
    summary=summary(records, log, slo=slo),
    same_pool=interference(log),
    any_pool=interference(log, any_pool=True),
  )


def interference_line(runs: Mapping[str, StrategyRun]) -> str:
  """The longest gap of a running request beside a long prompt, per strategy, in one line."""
  parts = []
  for name, run in runs.items():
    if run.same_pool is not None:
      found = run.same_pool
      where = f"beside a {found.prompt_tokens}-token prompt on its own device"
    elif run.any_pool is not None:
      found = run.any_pool
      where = f"while another device prefilled {found.prompt_tokens} tokens"
    else:
      parts.append(f"{name}: no running request met a long prompt")
      continue
    parts.append(f"{name} {_time(found.gap_s)} ({where})")
  return "Longest gap of a running request during a long prefill: " + "; ".join(parts) + "."


def verdict(
  runs: Mapping[str, StrategyRun], slo: Slo, decode_step_s: float, caveats: list[str]
) -> str:
  """Where the time went, the symptom, the choice and why, and what the numbers do not show."""
  lines = [f"  {name}: {_where_time_went(run)} {_symptom(run, slo, decode_step_s)}"
           for name, run in runs.items()]  # fmt: skip
  lines.append("  " + _choice(runs, slo))
  num_requests = min(len(run.records) for run in runs.values())
  if not enough(num_requests, 99):
    caveats = [*caveats, f"p99 over {num_requests} requests is close to the slowest one alone"]
  if caveats:
    lines.append("  Not shown: " + "; ".join(caveats) + ".")
  return "\n".join(lines)


def _where_time_went(run: StrategyRun) -> str:
  phases = mean_phases(run.records)
  if phases is None:
    return "nothing finished."
  parts = [
    f"{label} {_time(value_s)} ({value_s / phases.total_s:.0%})"
    for name, label in _PHASES.items()
    if (value_s := getattr(phases, name)) > 0
  ]
  return f"a mean {_time(phases.total_s)} end to end = {' + '.join(parts)}."


def _symptom(run: StrategyRun, slo: Slo, decode_step_s: float) -> str:
  """Names what is wrong, by the SLO that requests miss and by the gaps they saw."""
  counts = outcomes(run.records)
  num_lost = counts["failed"] + counts["unfinished"]
  answered = {i: r for i, r in run.records.items() if r.outcome == "finished"}
  said = []
  if num_lost:
    said.append(f"{num_lost} of {len(run.records)} requests did not finish.")
  if not answered:
    return " ".join(said)
  missed_ttft = 1 - attainment_ttft(answered, slo)
  missed_tpot = 1 - attainment_tpot(answered, slo)
  longest_gap_s = run.summary["itl_s"]["max"] or 0.0
  intrudes = run.same_pool is not None and run.same_pool.gap_s > slo.tpot_s
  gap = f"one of {_time(longest_gap_s)} is {longest_gap_s / decode_step_s:.0f} decode steps"
  if missed_ttft > 0.05 and missed_tpot <= 0.05:
    said.append(f"High TTFT ({missed_ttft:.0%} miss it) with normal TPOT: prefill queues.")
  elif missed_tpot > 0.05:
    cause = "prefill intrudes on decode" if intrudes else "decode itself is short of time"
    also = f", and {missed_ttft:.0%} miss TTFT" if missed_ttft > 0.05 else " with normal TTFT"
    said.append(f"TPOT missed by {missed_tpot:.0%}{also}: {cause}.")
  elif intrudes:
    said.append(f"Means are within the SLOs, but gaps show prefill intruding on decode: {gap}.")
  else:
    said.append("Both within the SLOs.")
  return " ".join(said)


def _choice(runs: Mapping[str, StrategyRun], slo: Slo) -> str:
  """The strategy with the highest attainment; one request more or less is chance, so what ties
  within that is ranked by its ITL tail.
  """
  shares = {name: attainment(run.records, slo) or 0.0 for name, run in runs.items()}
  n = max(len(run.records) for run in runs.values())
  tied = [name for name in runs if max(shares.values()) - shares[name] <= 1 / max(n, 1) + 1e-9]
  best = min(tied, key=lambda name: _p99_itl(runs[name]))
  text = f"Choose {best}: {shares[best]:.0%} of {n} requests meet both SLOs"
  if len(runs) == 1:
    return text.replace(f"Choose {best}", best) + "."
  others = ", ".join(f"{name} {shares[name]:.0%}" for name in runs if name != best)
  text += f" ({others})."
  if len(tied) > 1:
    tails = ", ".join(f"{name} {_time(_p99_itl(runs[name]))}" for name in tied)
    text += f" Attainment ties within one request, so the ITL p99 decides: {tails}."
  for name in runs:
    if name not in tied:
      ttft = 1 - (attainment_ttft(runs[name].records, slo) or 0.0)
      tpot = 1 - (attainment_tpot(runs[name].records, slo) or 0.0)
      text += f" {name} misses TTFT on {ttft:.0%} and TPOT on {tpot:.0%}."
  return text


def _p99_itl(run: StrategyRun) -> float:
  p99 = run.summary["itl_s"]["p99"]
  return float("inf") if p99 is None else p99


def _time(value_s: float) -> str:
  return f"{value_s * 1e3:.0f} ms" if value_s < 1 else f"{value_s:.2f} s"
