"""What the numbers of several strategies say, in words. Changes nothing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from pdjax.core.events import EventLog
from pdjax.metrics.goodput import Slo, meets_tpot, meets_ttft, summary
from pdjax.metrics.latency import (
  Interference,
  RequestRecord,
  enough,
  interference,
  mean_phases,
  outcomes,
  phases,
  request_records,
)

_PHASES = {
  "queue_s": "queue",
  "prefill_s": "prefill",
  "handoff_wait_s": "hand-off wait",
  "copy_s": "copy",
  "decode_s": "decode",
}
FEW_MISSES = 0.05  # up to this share of misses a target counts as met


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
      if is_hand_off(run.records[found.request_id], found.gap_s):
        where = f"in its hand-off, {where}"
    else:
      parts.append(f"{name}: no running request met a long prompt")
      continue
    parts.append(f"{name} {time_text(found.gap_s)} ({where})")
  return "Longest gap of a running request during a long prefill: " + "; ".join(parts) + "."


def is_hand_off(record: RequestRecord, gap_s: float) -> bool:
  """Whether a gap is the one between the first token and the second, with the copy in it."""
  return record.copy_end_s is not None and record.itl_s[:1] == (gap_s,)


def verdict(
  runs: Mapping[str, StrategyRun],
  slo: Slo,
  decode_step_s: float,
  caveats: list[str],
  *,
  num_requests: int,
) -> str:
  """Where the time went, the symptom, the choice and why, and what the numbers do not show.

  `num_requests` were to be served; a run that saw fewer, or left some unfinished, was interrupted
  and is not chosen.
  """
  lines = [f"  {name}: {_where_time_went(run)} {_symptom(run, slo, decode_step_s)}".rstrip()
           for name, run in runs.items()]  # fmt: skip
  lines.append("  " + _choice(runs, slo, num_requests))
  not_shown = [*caveats, *_limits(runs)]
  if not_shown:
    lines.append(f"  Not shown: {'; '.join(not_shown)}.")
  return "\n".join(lines)


def _where_time_went(run: StrategyRun) -> str:
  mean = mean_phases(run.records)
  if mean is None:
    return "nothing finished."
  parts = [
    f"{label} {time_text(value_s)} ({_share(value_s / mean.total_s)})"
    for name, label in _PHASES.items()
    if (value_s := getattr(mean, name)) > 0
  ]
  return f"on average {time_text(mean.total_s)} end to end = {' + '.join(parts)}."


# The symptom --------------------------------------------------------------------------------------


def _symptom(run: StrategyRun, slo: Slo, decode_step_s: float) -> str:
  """Names what is wrong, by the SLO that answered requests miss and by the gaps they saw."""
  counts = outcomes(run.records)
  answered = [r for r in run.records.values() if r.outcome == "finished"]
  said = []
  for outcome in ("failed", "unfinished"):
    if counts[outcome]:
      what = "failed" if outcome == "failed" else "did not finish"
      said.append(f"{counts[outcome]} of {len(run.records)} requests {what}.")
  if not answered:
    return " ".join(said)
  late = [r for r in answered if not meets_ttft(r, slo)]
  slow = [r for r in answered if not meets_tpot(r, slo)]
  many = FEW_MISSES * len(answered)
  gap_s = run.summary["itl_s"]["max"] or 0.0
  gap = f"the longest gap, {time_text(gap_s)}, is {gap_s / decode_step_s:.0f} decode steps"
  if len(late) > many and len(slow) > many:
    said.append(
      f"TTFT and TPOT high ({_of(late, answered)} and {_of(slow, answered)} miss them): "
      f"{_why_late(late)}, and {_why_slow(slow, run, slo)}; {gap}."
    )
  elif len(late) > many:
    also = f"; {gap}" if gap_s > slo.tpot_s else ""
    said.append(f"High TTFT ({_of(late, answered)} miss it), normal TPOT: {_why_late(late)}{also}.")
  elif len(slow) > many:
    cause = _why_slow(slow, run, slo)
    said.append(f"High TPOT ({_of(slow, answered)} miss it), normal TTFT: {cause}; {gap}.")
  elif run.same_pool is not None and run.same_pool.gap_s > slo.tpot_s:
    said.append(f"TTFT and TPOT normal, but prefill intrudes on decode: {gap}.")
  else:
    said.append("TTFT and TPOT normal.")
  return " ".join(said)


def _why_late(late: list[RequestRecord]) -> str:
  queue_s = sum(phases(r).queue_s for r in late)
  prefill_s = sum(phases(r).prefill_s for r in late)
  if sum(phases(r).handoff_wait_s for r in late) > queue_s:
    return "the decode pool is full, and prefill waits behind it"
  return "prefill queues" if queue_s >= prefill_s else "prefill itself takes long"


def _why_slow(slow: list[RequestRecord], run: StrategyRun, slo: Slo) -> str:
  """The hand-off where most would be in time without it; else prefill, if a gap shows it."""
  in_time_without = 0
  for record in slow:
    parts = phases(record)
    waited_s = parts.handoff_wait_s + parts.copy_s
    in_time_without += record.tpot_s - waited_s / (len(record.token_s) - 1) <= slo.tpot_s
  if 2 * in_time_without > len(slow):
    return "the hand-off delays the second token"
  if run.same_pool is not None and run.same_pool.gap_s > slo.tpot_s:
    return "prefill intrudes on decode"
  other = run.any_pool
  if (
    run.same_pool is None
    and other is not None
    and other.gap_s > slo.tpot_s
    and not is_hand_off(run.records[other.request_id], other.gap_s)
  ):
    return "decode stalls while another device prefills"
  return "decode itself is short of time"


# The choice ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Score:
  """How a strategy did, of `n` requests that all strategies were to serve."""

  name: str
  num_met: int
  num_late: int
  num_slow: int
  n: int
  itl_p99_s: float | None
  ttft_p50_s: float | None

  @property
  def met(self) -> str:
    return percent_text(self.num_met, self.n)


def _score(run: StrategyRun, slo: Slo) -> _Score:
  records = run.records.values()
  return _Score(
    name=run.name,
    num_met=sum(meets_ttft(r, slo) and meets_tpot(r, slo) for r in records),
    num_late=sum(not meets_ttft(r, slo) for r in records),
    num_slow=sum(not meets_tpot(r, slo) for r in records),
    n=len(records),
    itl_p99_s=run.summary["itl_s"]["p99"],
    ttft_p50_s=run.summary["ttft_s"]["p50"],
  )


def _choice(runs: Mapping[str, StrategyRun], slo: Slo, num_requests: int) -> str:
  """The strategy with the highest attainment; one request more or less is chance, so what ties
  within that is told apart by its ITL p99, or by its median TTFT where there are no gaps.
  """
  scores = {name: _score(run, slo) for name, run in runs.items()}
  partial = [
    name
    for name, run in runs.items()
    if len(run.records) < num_requests or outcomes(run.records)["unfinished"]
  ]
  if partial:
    said = ", ".join(
      f"{name} answered {outcomes(runs[name].records)['finished']} of {num_requests} requests"
      for name in partial
    )
    return f"No choice: interrupted; {said}."
  if len(scores) == 1:
    (score,) = scores.values()
    met = f"{score.name}: {score.num_met} of {score.n} requests ({score.met}) meet both SLOs"
    return f"{met};{_misses(score)}." if _misses(score) else f"{met}."
  ranked = sorted(scores.values(), key=lambda s: -s.num_met)
  best_met, n = ranked[0].num_met, ranked[0].n
  if not best_met:
    return (
      f"No choice: under no strategy does any of {n} requests meet both SLOs; lower the load "
      f"or relax the targets."
    )
  tied = sorted((s for s in ranked if s.num_met >= max(1, best_met - 1)), key=_tail)
  best, behind = tied[0], [s for s in ranked if s not in tied]
  text = f"Choose {best.name}: {best.num_met} of {n} requests ({best.met}) meet both SLOs"
  if len(tied) > 1:
    level = ", ".join(f"{s.name} ({s.met})" for s in tied[1:])
    text += f", level with {level} to within one request. "
    name, value = ("ITL p99", "itl_p99_s") if best.itl_p99_s else ("median TTFT", "ttft_p50_s")
    tails = ", ".join(f"{time_text(getattr(s, value))} for {s.name}" for s in tied[1:])
    if _tail(tied[1]) == _tail(best):
      text += f"Nothing tells them apart: the {name} is {time_text(getattr(best, value))} for both"
    else:
      text += f"Its {name} is {time_text(getattr(best, value))} against {tails}"
  else:
    second = behind[0]
    text += f", {best.num_met - second.num_met} more than under {second.name}"
  text += "."
  for score in behind:
    text += f" {score.name} ({score.met}){_misses(score)}."
  smoothest = min(behind, key=_tail, default=best)
  tail_s = best.itl_p99_s or 0.0
  if tail_s > slo.tpot_s and _tail(smoothest)[0] < tail_s / 2:
    text += (
      f" But its ITL p99 is {time_text(best.itl_p99_s)} against {time_text(smoothest.itl_p99_s)} "
      f"under {smoothest.name}: a mean over tokens hides such stalls."
    )
  return text


def _tail(score: _Score) -> tuple[float, float]:
  """Lower is better; what was not measured is worst."""
  values = (score.itl_p99_s, score.ttft_p50_s)
  return tuple(math.inf if v is None else v for v in values)


def _misses(score: _Score) -> str:
  """What a strategy misses, as the end of a sentence."""
  parts = [
    f"{what} on {percent_text(count, score.n)}"
    for what, count in (("TTFT", score.num_late), ("TPOT", score.num_slow))
    if count
  ]
  return f" misses {' and '.join(parts)}" if parts else ""


def _limits(runs: Mapping[str, StrategyRun]) -> list[str]:
  """What so few requests, served once, cannot show."""
  n = min(len(run.records) for run in runs.values())
  if not n:
    return []
  share = 0.5  # the widest; the true share is what nobody knows
  points = 100 * math.sqrt(share * (1 - share) / n)
  said = [
    f"another draw of arrivals: by chance alone an attainment over {n} requests moves by up to "
    f"{max(1, round(points))} points (one standard error)"
  ]
  if not enough(n, 99):
    said.append(f"the tail: p99 over {n} requests is close to the slowest one alone")
  return said


def _of(some: list[RequestRecord], every: list[RequestRecord]) -> str:
  return percent_text(len(some), len(every))


def percent_text(count: int, n: int) -> str:
  """`77%`; but never 100% or 0% where that is not exact."""
  if not n:
    return "0%"
  text = f"{count / n:.0%}"
  return text if text not in ("0%", "100%") or count in (0, n) else f"{count / n:.1%}"


def _share(share: float) -> str:
  return f"{share:.0%}" if share >= 0.005 else "<1%"


def time_text(value_s: float) -> str:
  if value_s >= 1:
    return f"{value_s:.2f} s"
  return f"{value_s * 1e3:.0f} ms" if value_s >= 0.01 else f"{value_s * 1e3:.2g} ms"
