"""Why requests were slow: causes, ranked, with the numbers behind them. Changes nothing.

Three symptoms count: a first token after its target (late), a mean time per token above its target
(slow), and a gap of more than `STALL_GAPS` target times (stalled), which a mean hides. Whatever a
request lost by a symptom is shared out among causes, and a cause is as large as its share of what
all requests lost. An event log says exactly what each second went to (`diagnose_log`); from what a
client saw, causes are told by their signatures (`pdjax.analysis.signatures`).
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import enum
import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from pdjax.analysis.verdict import FEW_MISSES, percent_text, time_text
from pdjax.core.events import Arrived, Copied, Event, Preempted, Step, each_step
from pdjax.core.model_config import ModelConfig
from pdjax.core.request import Slo
from pdjax.metrics.latency import RequestRecord, interference, percentile, request_records
from pdjax.metrics.utilisation import pool_usage
from pdjax.sim.hardware import Device

STALL_GAPS = 2.0
"""A gap of so many TPOT targets: one token at least did not come when it was promised."""
FEWEST = 20
"""Requests. In fewer a single one is more than `FEW_MISSES`, so health cannot be told from luck."""
LEAST_SHARE = 0.05
"""Of all that was lost: what is less is not named."""
ALIKE = 0.75
"""A second cause that is so large a part of the first is not told apart from it by one run."""
LAG_SHARE = 0.1
"""Of the TTFT target: a request that was seen so late after it was due was sent late. What is less
cannot make a request late by itself."""
NEAR_PEAK = 0.4
"""MFU of prompts that fill a device: matrices reach 0.7 to 0.95 of the peak and attention 0.4 to
0.9 (the fits in `configs/hardware.py`), and what lies between them adds nothing."""


class Cause(enum.StrEnum):
  QUEUEING = "prefill queueing"
  INTERFERENCE = "interference"
  MEMORY = "decode memory pressure"
  PREEMPTION = "preemption"
  HANDOFF_WAIT = "hand-off wait"
  LINK = "link-bound hand-off"
  CLIENT = "client-side lag"
  OWN_PREFILL = "prefill itself"
  UNEXPLAINED = "unexplained"
  HEALTHY = "nothing wrong"
  TOO_FEW = "too few samples to tell"


class Symptom(enum.StrEnum):
  LATE = "late"
  SLOW = "slow"
  STALLED = "stalled"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
  """A request as its client saw it. `tpot_s` is None for one token, or all in one chunk.

  `arrival_s` None: nobody noted when it was due. `sent_late_s` of `ttft_s` went by before it was
  sent, where its client noted that. `itl_s` are the gaps between what came, None where their mean
  alone is known; a server that sends several tokens at once gives fewer of them.

  Raises:
    ValueError: a first token before its arrival, or a negative gap.
  """

  arrival_s: float | None
  prompt_tokens: int
  output_tokens: int
  ttft_s: float
  tpot_s: float | None
  itl_s: tuple[float, ...] | None = None
  sent_late_s: float = 0.0

  def __post_init__(self):
    if not self.sent_late_s >= 0:
      raise ValueError(f"sent {-self.sent_late_s} s before it was due")
    if not self.ttft_s >= self.sent_late_s:
      raise ValueError(f"ttft_s={self.served_s}: its first token came before its arrival")
    least_s = min(self.itl_s or (), default=self.tpot_s or 0.0)
    if not least_s >= 0:
      raise ValueError(f"a gap of {least_s} s: a token came before the one before it")

  @property
  def served_s(self) -> float:
    """From when it was sent to its first token."""
    return self.ttft_s - self.sent_late_s

  @property
  def _num_gaps(self) -> int:
    return self.output_tokens - 1

  @property
  def token_s(self) -> tuple[float, ...]:
    """When its tokens came; evenly spread where only their mean gap is known."""
    start_s = (self.arrival_s or 0.0) + self.ttft_s
    gaps_s = self.itl_s if self.itl_s is not None else (self.tpot_s or 0.0,) * self._num_gaps
    return tuple(itertools.accumulate(gaps_s, initial=start_s))

  @property
  def longest_gap_s(self) -> float:
    return max(self.itl_s or (), default=0.0)


def observe_by_id(records: Iterable[RequestRecord]) -> dict[int, Observed]:
  """Finished requests as a client with no lag of its own saw them, in order of arrival."""
  finished = sorted(
    (r for r in records if r.outcome == "finished"), key=lambda r: (r.arrival_s, r.request_id)
  )
  return {
    r.request_id: Observed(
      arrival_s=r.arrival_s,
      prompt_tokens=r.num_prompt_tokens,
      output_tokens=len(r.token_s),
      ttft_s=r.ttft_s,
      tpot_s=r.tpot_s,
      itl_s=r.itl_s,
    )
    for r in finished
  }


def observe(records: Iterable[RequestRecord]) -> list[Observed]:
  """The same without their ids."""
  return list(observe_by_id(records).values())


Lost = dict[Cause, float]
"""Seconds by cause."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
  """What a request lost by one symptom. `at_s`: when it began, None where that is not known."""

  request_id: int
  symptom: Symptom
  at_s: float | None
  lost_s: Lost

  @property
  def shares(self) -> Lost:
    total_s = sum(self.lost_s.values())
    if total_s <= 0:
      return {Cause.UNEXPLAINED: 1.0}
    return {cause: value_s / total_s for cause, value_s in self.lost_s.items() if value_s > 0}

  @property
  def main(self) -> Cause:
    shares = self.shares
    return max(shares, key=shares.__getitem__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
  """A cause. `share` is of what all requests lost; `says` has the numbers, for a person."""

  cause: Cause
  share: float
  says: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
  """Causes, the largest first. `notes` say what could not be told, or is worth knowing beside."""

  findings: tuple[Finding, ...]
  losses: tuple[Loss, ...]
  num_requests: int
  num_troubled: int
  slo: Slo
  notes: tuple[str, ...] = ()

  @property
  def cause(self) -> Cause:
    return self.findings[0].cause

  @property
  def is_ambiguous(self) -> bool:
    return len(self.findings) > 1 and self.findings[1].share >= ALIKE * self.findings[0].share

  @property
  def first_causes(self) -> tuple[Cause, ...]:
    """The first, and the one that cannot be told apart from it."""
    return tuple(found.cause for found in self.findings[: 1 + self.is_ambiguous])

  def __str__(self) -> str:
    lines = [
      f"{self.num_troubled} of {self.num_requests} requests are late (TTFT above "
      f"{time_text(self.slo.ttft_s)}), slow (TPOT above {time_text(self.slo.tpot_s)}), stalled (a "
      f"gap above {time_text(STALL_GAPS * self.slo.tpot_s)}), or failed."
    ]
    for number, found in enumerate(self.findings, 1):
      lines.append(f"{number}. {found.cause}: {found.says}")
    if self.is_ambiguous:
      alike = f"{' and '.join(self.first_causes)} have like evidence"
      lines.append(f"Ambiguous: {alike}; change one and look again.")
    return "\n".join([*lines, *(f"Note: {note}" for note in self.notes)])


def symptoms(request: Observed | RequestRecord, slo: Slo) -> list[Symptom]:
  """Of a request that finished."""
  found = []
  if request.ttft_s > slo.ttft_s:
    found.append(Symptom.LATE)
  if request.tpot_s is not None and request.tpot_s > slo.tpot_s:
    found.append(Symptom.SLOW)
  if max(request.itl_s or (), default=0.0) > STALL_GAPS * slo.tpot_s:
    found.append(Symptom.STALLED)
  return found


def is_troubled(request: Observed | RequestRecord, slo: Slo) -> bool:
  return bool(symptoms(request, slo))


# What both ways of looking share ------------------------------------------------------------------


class Seconds:
  """How much of a span of time some intervals take, each with a weight. Sums where they overlap."""

  def __init__(self, intervals: Iterable[tuple[float, float, float]]):
    """`intervals` are (start, end, weight)."""
    ramps = sorted(
      ramp
      for start_s, end_s, weight in intervals
      if end_s > start_s
      for ramp in ((start_s, weight), (end_s, -weight))
    )
    self._at_s = [at_s for at_s, _ in ramps]
    self._weights = list(itertools.accumulate((w for _, w in ramps), initial=0.0))
    self._moments = list(itertools.accumulate((w * at_s for at_s, w in ramps), initial=0.0))

  def within(self, start_s: float, end_s: float) -> float:
    """Never more than the span."""
    return min(self.total(start_s, end_s), max(0.0, end_s - start_s))

  def total(self, start_s: float, end_s: float) -> float:
    """More than the span where they overlap."""
    return max(0.0, self._until(end_s) - self._until(start_s))

  def _until(self, time_s: float) -> float:
    i = bisect.bisect_right(self._at_s, time_s)
    return self._weights[i] * time_s - self._moments[i]


def conclude(
  losses: Sequence[Loss],
  slo: Slo,
  *,
  num_requests: int,
  num_failed: int = 0,
  facts: Mapping[Cause, str],
  notes: Sequence[str] = (),
) -> Diagnosis:
  """Ranks the causes of all losses; `facts` are the numbers of each cause, for its words.

  Symptoms of a request count alike and requests count alike, so that neither the longest nor the
  one with most tokens decides.
  """
  by_request: dict[int, list[Loss]] = collections.defaultdict(list)
  for loss in losses:
    by_request[loss.request_id].append(loss)
  num_troubled = len(by_request) + num_failed
  same = dict(
    losses=tuple(losses),
    num_requests=num_requests,
    num_troubled=num_troubled,
    slo=slo,
    notes=tuple(notes),
  )
  if num_requests < FEWEST:
    says = (
      f"{num_requests} requests, {FEWEST} at least are needed: one of them is "
      f"{percent_text(1, num_requests)} of all, and above {FEW_MISSES:.0%} targets count as missed."
    )
    return Diagnosis(findings=(Finding(cause=Cause.TOO_FEW, share=1.0, says=says),), **same)
  if num_troubled <= FEW_MISSES * num_requests:
    says = f"{percent_text(num_troubled, num_requests)} miss a target; up to {FEW_MISSES:.0%} may."
    return Diagnosis(findings=(Finding(cause=Cause.HEALTHY, share=1.0, says=says),), **same)
  shares: Lost = collections.Counter()
  for own in by_request.values():
    for loss in own:
      for cause, share in loss.shares.items():
        shares[cause] += share / len(own) / num_troubled
  if num_failed:
    shares[Cause.UNEXPLAINED] += num_failed / num_troubled
  findings = [
    Finding(cause=cause, share=share, says=_words(cause, share, by_request, facts))
    for cause, share in sorted(shares.items(), key=lambda item: -item[1])
    if share >= LEAST_SHARE
  ]
  return Diagnosis(findings=tuple(findings), **same)


def _words(
  cause: Cause, share: float, by_request: Mapping[int, Sequence[Loss]], facts: Mapping[Cause, str]
) -> str:
  """Its share, whom it hit and how hard, and the numbers that are its own."""
  hit = [loss for own in by_request.values() for loss in own if loss.main == cause]
  text = f"{share:.0%} of what was lost"
  if hit:
    counts = collections.Counter(loss.symptom for loss in hit)
    made = ", ".join(f"{count} {symptom}" for symptom, count in counts.items())
    worst = max(hit, key=lambda loss: loss.lost_s.get(cause, 0.0))
    mean_s = statistics.fmean(loss.lost_s.get(cause, 0.0) for loss in hit)
    text += f"; it makes {made}, by {time_text(mean_s)} on average"
    text += f" (most: request {worst.request_id}, {time_text(worst.lost_s.get(cause, 0.0))}"
    text += f" from {worst.at_s:.2f} s on)" if worst.at_s is not None else ")"
  return f"{text}. {facts[cause]}" if cause in facts else f"{text}."


# From our own event log ---------------------------------------------------------------------------

# What a prompt that is computed is for those that wait behind it, and for those that decode beside.
_BESIDE = {
  Cause.QUEUEING: Cause.INTERFERENCE,
  Cause.PREEMPTION: Cause.PREEMPTION,
  Cause.CLIENT: Cause.INTERFERENCE,
}


def diagnose_log(log: Iterable[Event], slo: Slo, *, notes: Sequence[str] = ()) -> Diagnosis:
  """The causes that the phases of requests and the steps of pools show."""
  log = list(log)
  records = request_records(log)
  finished = [r for r in records.values() if r.outcome == "finished"]
  look = _LogLook(log, records, slo)
  losses = [
    Loss(request_id=r.request_id, symptom=symptom, at_s=at_s, lost_s=dict(lost_s))
    for r in finished
    for symptom in symptoms(r, slo)
    for at_s, lost_s in [look.loss(r, symptom, slo)]
  ]
  num_failed = sum(r.outcome == "failed" for r in records.values())
  if unfinished := len(records) - len(finished) - num_failed:
    notes = [*notes, f"{unfinished} requests did not finish before the log ended: left out"]
  return conclude(
    losses,
    slo,
    num_requests=len(finished) + num_failed,
    num_failed=num_failed,
    facts=look.facts(finished),
    notes=notes,
  )


class _PoolLook:
  """What one pool did, as spans of time.

  Steps with slices of prompts are shared out by tokens: among prompts whose turn it was, those that
  are computed again after a preemption, and those that a client sent late, all in a bunch.
  `blame` gives the cause that a slice is for who waits behind it.
  """

  def __init__(self, steps: Sequence[Step], blame: Callable[[int, Step], Cause]):
    alone = [s.end_s - s.start_s for s in steps if not s.prefill_ids]
    beside = [s.end_s - s.start_s for s in steps if s.decode_ids]
    # What a decode step takes here: as a rule, and at its quietest.
    few = len(alone) < FEWEST
    self.decode_s = min(beside, default=0.0) if few else statistics.median(alone)
    self.quiet_s = min(beside, default=0.0) if few else percentile(alone, 5)
    self.busy_decode_s = max(beside, default=0.0) if few else percentile(alone, 95)
    spans: dict[Cause, list] = {cause: [] for cause in _BESIDE}
    excess: dict[Cause, list] = {cause: [] for cause in _BESIDE.values()}
    self.own: dict[int, list[tuple[float, float, float]]] = collections.defaultdict(list)
    for step in steps:
      num_tokens, step_s = sum(step.prefill_tokens), step.end_s - step.start_s
      above = max(0.0, 1 - self.decode_s / step_s) if step.decode_ids else 1.0
      for request_id, tokens in zip(step.prefill_ids, step.prefill_tokens):
        cause, share = blame(request_id, step), tokens / num_tokens
        self.own[request_id].append((step.start_s, step.end_s, share))
        spans[cause].append((step.start_s, step.end_s, share))
        excess[_BESIDE[cause]].append((step.start_s, step.end_s, share * above))
    self._prompts = {cause: Seconds(own) for cause, own in spans.items()}
    self._excess = {cause: Seconds(own) for cause, own in excess.items()}
    self._span_s = (steps[0].start_s, steps[-1].end_s)

  def prompts_within(self, start_s: float, end_s: float) -> Lost:
    """Seconds in which prompts were computed, by the cause that they are for who waits."""
    return {cause: own.within(start_s, end_s) for cause, own in self._prompts.items()}

  def excess_within(self, start_s: float, end_s: float) -> Lost:
    """Seconds that prompts added to steps, by the cause that they are for who decodes."""
    return {cause: own.within(start_s, end_s) for cause, own in self._excess.items()}

  @property
  def prompts_share(self) -> float:
    """Of its time from first to last step, that in steps with prompts."""
    start_s, end_s = self._span_s
    prompts_s = sum(self.prompts_within(start_s, end_s).values())
    return prompts_s / (end_s - start_s) if end_s > start_s else 0.0


class _LogLook:
  """A log, looked at pool by pool."""

  def __init__(self, log: Sequence[Event], records: Mapping[int, RequestRecord], slo: Slo):
    self._log = log
    self._seen_s = {
      e.request_id: max(e.seen_s or e.time_s, e.time_s) for e in log if isinstance(e, Arrived)
    }
    self._entry = {e.request_id: e.pool for e in log if isinstance(e, Arrived)}
    self._sources = {e.source for e in log if isinstance(e, Copied)}
    self.preempted_s: dict[int, list[float]] = collections.defaultdict(list)
    preempted_in: dict[str, list[tuple[float, int]]] = collections.defaultdict(list)
    for event in log:
      if isinstance(event, Preempted):
        self.preempted_s[event.request_id].append(event.time_s)
        preempted_in[event.pool].append((event.time_s, event.request_id))
    by_pool: dict[str, list[Step]] = collections.defaultdict(list)
    for step in each_step(log):
      by_pool[step.pool].append(step)
    most_lag_s = LAG_SHARE * slo.ttft_s

    def blame(request_id: int, step: Step) -> Cause:
      if any(at_s <= step.start_s for at_s in self.preempted_s.get(request_id, ())):
        return Cause.PREEMPTION
      lag_s = self._seen_s[request_id] - records[request_id].arrival_s
      return Cause.CLIENT if lag_s > most_lag_s else Cause.QUEUEING

    self.pools = {name: _PoolLook(steps, blame) for name, steps in by_pool.items()}
    self._ends: dict[float, list[Step]] = collections.defaultdict(list)
    for step in itertools.chain.from_iterable(by_pool.values()):
      self._ends[step.end_s].append(step)
    # Until somebody preempted has ended it comes before whoever is new, and takes pages once more.
    self._behind = {
      pool: Seconds((at_s, records[i].finish_s or at_s, 1.0) for at_s, i in preempted)
      for pool, preempted in preempted_in.items()
    }
    copies = [r for r in records.values() if r.copy_s is not None]
    self._copy_s = sum(r.copy_s for r in copies)
    self._wait_s = sum(_wait_s(r) for r in copies)
    self._decode_s = sum(max(0.0, r.token_s[-1] - r.copy_end_s) for r in copies)

  def loss(self, record: RequestRecord, symptom: Symptom, slo: Slo) -> tuple[float, Lost]:
    if symptom is Symptom.LATE:
      return record.arrival_s, self._of_first_token(record, slo)
    gaps = list(zip(record.token_s, record.token_s[1:]))
    if symptom is Symptom.STALLED:
      gaps = [(a, b) for a, b in gaps if b - a > STALL_GAPS * slo.tpot_s]
    lost_s: Lost = collections.Counter()
    for start_s, end_s in gaps:
      lost_s.update(self._of_gap(record, start_s, end_s, slo))
    return max(gaps, key=lambda gap: gap[1] - gap[0])[0], lost_s

  def _of_first_token(self, record: RequestRecord, slo: Slo) -> Lost:
    """Arrival, in the queue, and being prefilled: which of it was others' doing."""
    seen_s = self._seen_s[record.request_id]
    first_s, start_s = record.token_s[0], max(seen_s, record.first_scheduled_s)
    tried = (self._entry[record.request_id], *record.pools)  # the first may be lost before a step
    pool_name = next(name for name in tried if name in self.pools)
    pool = self.pools[pool_name]
    lost_s: Lost = collections.Counter({Cause.CLIENT: seen_s - record.arrival_s})
    before = pool.prompts_within(seen_s, start_s)
    idle_s = max(0.0, start_s - seen_s - sum(before.values()))
    lost_s.update(before)
    lost_s.update(self._without_room(pool_name, seen_s, start_s, idle_s))
    own_s = Seconds(pool.own[record.request_id]).within(start_s, first_s)
    prompts_s = sum(pool.prompts_within(start_s, first_s).values())
    lost_s[Cause.QUEUEING] += max(0.0, prompts_s - own_s)
    lost_s[Cause.OWN_PREFILL] = max(0.0, own_s - slo.ttft_s)
    idle_s = max(0.0, first_s - start_s - max(prompts_s, own_s))
    if any(start_s <= at_s < first_s for at_s in self.preempted_s.get(record.request_id, ())):
      lost_s[Cause.PREEMPTION] += idle_s
    else:
      lost_s.update(self._without_room(pool_name, start_s, first_s, idle_s))
    return lost_s

  def _without_room(self, pool: str, start_s: float, end_s: float, idle_s: float) -> Lost:
    """A wait in which no prompt was computed: for pages or a row, and who has them."""
    if pool in self._sources:  # what was prefilled holds the pages until it is handed over
      held_s = self._wait_s + self._copy_s
      share = self._wait_s / held_s if held_s else 1.0
      waits = {cause: share * s for cause, s in self._of_wait(idle_s).items()}
      waits[Cause.LINK] = waits.get(Cause.LINK, 0.0) + (1 - share) * idle_s
      return waits
    behind_s = 0.0
    if pool in self._behind and end_s > start_s:
      behind_s = idle_s * self._behind[pool].within(start_s, end_s) / (end_s - start_s)
    return {Cause.PREEMPTION: behind_s, Cause.MEMORY: idle_s - behind_s}

  def _of_wait(self, wait_s: float) -> Lost:
    """A wait for room in a decode pool: who has it, those that decode or those on their way."""
    room_s = self._decode_s + self._copy_s
    on_their_way = self._copy_s / room_s if room_s else 0.0
    return {Cause.HANDOFF_WAIT: (1 - on_their_way) * wait_s, Cause.LINK: on_their_way * wait_s}

  def _of_gap(self, record: RequestRecord, start_s: float, end_s: float, slo: Slo) -> Lost:
    lost_s: Lost = collections.Counter()
    pool = self.pools[self._pool_of(record.request_id, end_s)]
    if any(start_s <= at_s < end_s for at_s in self.preempted_s.get(record.request_id, ())):
      lost_s[Cause.PREEMPTION] = max(0.0, end_s - start_s - pool.decode_s)
      return lost_s
    if record.copy_end_s is not None and start_s < record.copy_end_s <= end_s:
      lost_s.update(self._of_wait(max(0.0, record.copy_start_s - start_s)))
      lost_s[Cause.LINK] += record.copy_end_s - max(record.copy_start_s, start_s)
      start_s = record.copy_end_s
    excess = pool.excess_within(start_s, end_s)
    lost_s.update(excess)
    # The rest are decode steps: what they take beyond the quietest is K and V that they read.
    step_s = end_s - start_s - sum(excess.values())
    lost_s[Cause.MEMORY] = max(0.0, step_s - min(pool.quiet_s, slo.tpot_s))
    return lost_s

  def _pool_of(self, request_id: int, end_s: float) -> str:
    """Where the token of this time was made."""
    steps = self._ends[end_s]
    return next(s.pool for s in steps if len(steps) == 1 or request_id in s.emitted_ids)

  def facts(self, finished: Sequence[RequestRecord]) -> dict[Cause, str]:
    """The numbers of each cause."""
    facts = {}
    if self.pools:
      name, pool = max(self.pools.items(), key=lambda item: item[1].prompts_share)
      facts[Cause.QUEUEING] = f"{name} computes prompts {pool.prompts_share:.0%} of its time."
      name, pool = max(self.pools.items(), key=lambda item: item[1].busy_decode_s)
      facts[Cause.MEMORY] = (
        f"A decode step of {name} takes {time_text(pool.decode_s)} as a rule and "
        f"{time_text(pool.busy_decode_s)} at its busiest (p95), {time_text(pool.quiet_s)} at its "
        f"quietest (p5)."
      )
    if (found := interference(self._log)) is not None:
      facts[Cause.INTERFERENCE] = (
        f"The longest gap beside a long prompt is {time_text(found.gap_s)}, of request "
        f"{found.request_id} beside the {found.prompt_tokens} tokens of request {found.prompt_id}."
      )
    facts[Cause.PREEMPTION] = (
      f"{sum(map(len, self.preempted_s.values()))} preemptions of {len(self.preempted_s)} requests."
    )
    copies = [r for r in finished if r.copy_s is not None]
    if copies:
      waits_s = statistics.fmean(_wait_s(r) for r in copies)
      copy_s = statistics.fmean(r.copy_s for r in copies)
      facts[Cause.HANDOFF_WAIT] = (
        f"A prefilled request waits {time_text(waits_s)} on average for room in its decode pool; "
        f"its copy takes {time_text(copy_s)}."
      )
      prefill_s = statistics.fmean(r.prefill_s for r in copies)
      num_bytes = statistics.fmean(r.copy_bytes or 0 for r in copies)
      facts[Cause.LINK] = (
        f"A copy of {num_bytes / 1e6:.0f} MB is seen for {time_text(copy_s)} on average, and its "
        f"prefill takes {time_text(prefill_s)}."
      )
    lags_s = [self._seen_s[r.request_id] - r.arrival_s for r in finished]
    if lags_s:
      facts[Cause.CLIENT] = (
        f"Requests were seen {time_text(statistics.fmean(lags_s))} after they were due on average, "
        f"{time_text(max(lags_s))} at most."
      )
    return facts


def _wait_s(record: RequestRecord) -> float:
  """From its last token before its copy to the start of it."""
  before = [at_s for at_s in record.token_s if at_s <= record.copy_start_s]
  return record.copy_start_s - before[-1] if before else 0.0


# Which roof each phase is under -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PhaseUse:
  """Steps of one kind in one pool against the peaks of its devices."""

  pool: str
  kind: str
  mfu: float
  mbu: float
  flop_per_byte: float
  ridge_flop_per_byte: float


def phase_use(
  log: Iterable[Event], model: ModelConfig, devices: Mapping[str, tuple[Device, int]]
) -> list[PhaseUse]:
  """MFU and MBU of each kind of step; `devices` are those of each pool, and how many."""
  found = []
  for name, usage in pool_usage(log, model).items():
    device, count = devices[name]
    for kind, work in usage.by_kind.items():
      if work.busy_s:
        found.append(
          PhaseUse(
            pool=name,
            kind=kind,
            mfu=work.flops_per_s / (count * device.peak_flops_per_s),
            mbu=work.bytes_per_s / (count * device.peak_bytes_per_s),
            flop_per_byte=work.flop_per_byte,
            ridge_flop_per_byte=device.ridge_flop_per_byte,
          )
        )
  return found


def opposed_phases(uses: Sequence[PhaseUse]) -> tuple[PhaseUse, PhaseUse] | None:
  """Prefill near the peak FLOP/s and decode under the memory's roof, where a run has both."""
  prefills = [u for u in uses if u.kind == "prefill" and u.mfu >= NEAR_PEAK]
  decodes = [u for u in uses if u.kind == "decode" and u.flop_per_byte < u.ridge_flop_per_byte]
  prefills = [u for u in prefills if u.flop_per_byte > u.ridge_flop_per_byte]
  if not prefills or not decodes:
    return None
  return max(prefills, key=lambda u: u.mfu), max(decodes, key=lambda u: u.mbu)
