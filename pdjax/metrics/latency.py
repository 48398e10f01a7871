"""How long requests took. Changes nothing: pure functions of the event log.

The record of a request holds time stamps alone; every duration is a difference of two of them, so
no two numbers can tell different stories. Failed and unfinished requests have records too.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import itertools
import operator
import statistics
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from pdjax.core.events import (
  Arrived,
  Copied,
  Event,
  Failed,
  Finished,
  Preempted,
  Step,
  Stroke,
  each_step,
)
from pdjax.core.garbage import no_collection


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
  """What happened to one request. Absent stamps are None: it did not come that far.

  `token_s[i]` is the end of the step that emitted `token_ids[i]`: n is the number of tokens that
  came, never the number asked for. `finish_s`, `failed_s` both None: the log ended before it did.
  A request refused before any pool took it arrived when it failed, and its lengths are unknown.

  Raises:
    ValueError: a request that both finished and failed, or finished without a token.
  """

  request_id: int
  arrival_s: float
  num_prompt_tokens: int | None
  max_tokens: int | None
  first_scheduled_s: float | None = None  # start of the first step that computed a part of it
  token_s: tuple[float, ...] = ()
  token_ids: tuple[int, ...] = ()
  finish_s: float | None = None
  finish_reason: str | None = None
  failed_s: float | None = None
  failed_reason: str | None = None
  copy_start_s: float | None = None
  copy_end_s: float | None = None
  copy_bytes: int | None = None
  num_preemptions: int = 0
  pools: tuple[str, ...] = ()  # in the order of the visits

  def __post_init__(self):
    if self.finish_s is not None and self.failed_s is not None:
      raise ValueError(
        f"request {self.request_id} finished at {self.finish_s} s and failed at {self.failed_s} s"
      )
    if self.finish_s is not None and not self.token_s:
      raise ValueError(f"request {self.request_id} finished at {self.finish_s} s without a token")

  @property
  def outcome(self) -> str:
    """`finished`, `failed` or `unfinished`."""
    if self.failed_s is not None:
      return "failed"
    return "unfinished" if self.finish_s is None else "finished"

  @property
  def ttft_s(self) -> float | None:
    """First token - arrival, queueing included."""
    return self.token_s[0] - self.arrival_s if self.token_s else None

  @property
  def itl_s(self) -> tuple[float, ...]:
    """The n - 1 gaps between consecutive tokens: time to the first token is none of them."""
    return tuple(b - a for a, b in zip(self.token_s, self.token_s[1:]))

  @property
  def tpot_s(self) -> float | None:
    """(last - first) / (n - 1); None for n < 2."""
    n = len(self.token_s)
    return (self.token_s[-1] - self.token_s[0]) / (n - 1) if n > 1 else None

  @property
  def e2e_s(self) -> float | None:
    return None if self.finish_s is None else self.finish_s - self.arrival_s

  @property
  def prefill_s(self) -> float | None:
    """First token - first scheduled; a preemption in between is part of it."""
    if not self.token_s or self.first_scheduled_s is None:
      return None
    return self.token_s[0] - self.first_scheduled_s

  @property
  def copy_s(self) -> float | None:
    return None if self.copy_end_s is None else self.copy_end_s - self.copy_start_s


@no_collection()
def request_records(log: Iterable[Event]) -> dict[int, RequestRecord]:
  """One record per request, in order of first mention. Does not change the log.

  Should a request be copied more than once, the last copy is its copy and bytes add up.

  Raises:
    ValueError: an event of a request that never arrived.
  """
  drafts: dict[int, _Draft] = {}
  started: dict[str, set[int]] = collections.defaultdict(set)  # requests by pool
  for event in log:
    match event:
      case Step():
        _start(drafts, started[event.pool], event.prefill_ids, event)
        _start(drafts, started[event.pool], event.decode_ids, event)
        end_s = event.end_s
        for request_id, token_id in zip(event.emitted_ids, event.token_ids, strict=True):
          found = drafts[request_id]
          found.token_s.append(end_s)
          found.token_ids.append(token_id)
      case Stroke():
        _start(drafts, started[event.pool], event.decode_ids, event)
        ends_s, tokens = event.ends_s, (0,) * len(event.ends_s)
        for request_id in event.decode_ids:
          found = drafts[request_id]
          found.token_s += ends_s
          found.token_ids += tokens
      case Arrived():
        drafts.setdefault(
          event.request_id, _Draft(event.time_s, event.num_prompt_tokens, event.max_tokens)
        )
        _find(drafts, event.request_id, event).visit(event.pool)
      case Preempted():
        found = _find(drafts, event.request_id, event)
        found.visit(event.pool)
        found.num_preemptions += 1
      case Copied():
        found = _find(drafts, event.request_id, event)
        found.visit(event.target)
        found.copy_start_s, found.copy_end_s = event.start_s, event.end_s
        found.copy_bytes = (found.copy_bytes or 0) + event.num_bytes
      case Finished():
        found = _find(drafts, event.request_id, event)
        found.visit(event.pool)
        found.finish_s, found.finish_reason = event.time_s, event.reason
      case Failed():
        drafts.setdefault(event.request_id, _Draft(event.time_s, None, None))
        found = _find(drafts, event.request_id, event)
        found.visit(event.pool)
        found.failed_s, found.failed_reason = event.time_s, event.reason
  return {request_id: found.record(request_id) for request_id, found in drafts.items()}


@dataclasses.dataclass(slots=True)
class _Draft:
  """A `RequestRecord` that is being written; its fields."""

  arrival_s: float
  num_prompt_tokens: int | None
  max_tokens: int | None
  first_scheduled_s: float | None = None
  token_s: list[float] = dataclasses.field(default_factory=list)
  token_ids: list[int] = dataclasses.field(default_factory=list)
  finish_s: float | None = None
  finish_reason: str | None = None
  failed_s: float | None = None
  failed_reason: str | None = None
  copy_start_s: float | None = None
  copy_end_s: float | None = None
  copy_bytes: int | None = None
  num_preemptions: int = 0
  pools: list[str] = dataclasses.field(default_factory=list)

  def visit(self, pool: str | None) -> None:
    if pool is not None and pool not in self.pools:
      self.pools.append(pool)

  def record(self, request_id: int) -> RequestRecord:
    values = dict(zip(self.__slots__, _values_of(self)))
    for name in ("token_s", "token_ids", "pools"):
      values[name] = tuple(values[name])
    return RequestRecord(request_id=request_id, **values)


_values_of = operator.attrgetter(*_Draft.__slots__)


def _find(drafts: Mapping[int, _Draft], request_id: int, event: Event) -> _Draft:
  found = drafts.get(request_id)
  if found is None:
    raise ValueError(f"request {request_id} never arrived, but: {event}")
  return found


def _start(
  drafts: Mapping[int, _Draft], started: set[int], request_ids: Iterable[int], event: Step | Stroke
) -> None:
  """Notes that a step has a part of these requests; `started` are those known to its pool."""
  if started.issuperset(request_ids):  # nearly always
    return
  for request_id in request_ids:
    found = _find(drafts, request_id, event)
    if found.first_scheduled_s is None:
      found.first_scheduled_s = event.start_s
    found.visit(event.pool)
  started.update(request_ids)


def outcomes(records: Mapping[int, RequestRecord]) -> dict[str, int]:
  """How many requests finished, failed, and were unfinished when the log ended."""
  counts = {"finished": 0, "failed": 0, "unfinished": 0}
  for record in records.values():
    counts[record.outcome] += 1
  return counts


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
  """The five parts of a request's time. They sum to its end-to-end time exactly, with `==`."""

  queue_s: float  # arrival to the start of its first step
  prefill_s: float  # to its first token
  handoff_wait_s: float  # from its last token before to the start of its copy: there was no room
  copy_s: float
  decode_s: float  # the rest: a preemption and what follows it, earlier copies too, are part of it

  @property
  def total_s(self) -> float:
    # Exact: stamps are multiples of 2**-30 s, so differences and sums need no rounding.
    return self.queue_s + self.prefill_s + self.handoff_wait_s + self.copy_s + self.decode_s


def phases(record: RequestRecord) -> Phases | None:
  """The phases of a finished request; None for one that failed or is unfinished."""
  if record.finish_s is None:
    return None
  wait_s = copy_s = 0.0
  if record.copy_end_s is not None:
    num_before = bisect.bisect_right(record.token_s, record.copy_start_s)
    wait_s = record.copy_start_s - record.token_s[max(0, num_before - 1)]
    copy_s = record.copy_s
  return Phases(
    queue_s=record.first_scheduled_s - record.arrival_s,
    prefill_s=record.prefill_s,
    handoff_wait_s=wait_s,
    copy_s=copy_s,
    decode_s=record.finish_s - record.token_s[0] - wait_s - copy_s,
  )


def mean_phases(records: Mapping[int, RequestRecord]) -> Phases | None:
  """The mean of each phase over finished requests; None where none finished."""
  parts = [p for p in map(phases, records.values()) if p is not None]
  if not parts:
    return None
  return Phases(
    **{f.name: statistics.fmean(getattr(p, f.name) for p in parts)
       for f in dataclasses.fields(Phases)}
  )  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
  """A sample in six numbers. All but `n` are None where it is empty: nothing is not zero."""

  n: int
  mean: float | None
  p50: float | None
  p90: float | None
  p99: float | None
  max: float | None


def percentile(values: Sequence[float], q: float) -> float | None:
  """Linear interpolation between the two nearest ranks, numpy's default; None without values."""
  return float(np.percentile(values, q)) if len(values) else None


def percentiles(values: Sequence[float]) -> Summary:
  """The summary of a sample, percentiles by linear interpolation as in `percentile`."""
  if not len(values):
    return Summary(n=0, mean=None, p50=None, p90=None, p99=None, max=None)
  values = np.asarray(values)
  p50, p90, p99, largest = map(float, np.percentile(values, (50, 90, 99, 100)))
  return Summary(n=len(values), mean=float(np.mean(values)), p50=p50, p90=p90, p99=p99, max=largest)


def enough(n: int, q: float) -> bool:
  """Whether n values can tell their q-th percentile from their maximum: n >= 1 / (1 - q / 100)."""
  return round(n * (100 - q), 6) >= 100  # rounded: 100 - 99.9 is a little under 0.1


def format_ms(value_s: float | None, *, n: int, q: float) -> str:
  """A percentile for a person: `12.3 ms`, `12.3 ms (n=40!)` where n is too small, or `n/a`."""
  if value_s is None:
    return "n/a"
  text = f"{value_s * 1e3:.1f} ms"
  return text if enough(n, q) else f"{text} (n={n}!)"


def ttfts_s(records: Mapping[int, RequestRecord]) -> list[float]:
  """The TTFT of every request that got a token, whatever became of it."""
  return [r.ttft_s for r in records.values() if r.ttft_s is not None]


def tpots_s(records: Mapping[int, RequestRecord]) -> list[float]:
  """The TPOT of every request with two tokens or more."""
  return [r.tpot_s for r in records.values() if r.tpot_s is not None]


def itls_s(records: Mapping[int, RequestRecord]) -> np.ndarray:
  """The gaps of all requests, pooled. [gaps]"""
  tokens_s = [r.token_s for r in records.values() if r.token_s]
  ends = np.cumsum([len(own) for own in tokens_s], dtype=int)
  flat_s = np.fromiter(itertools.chain.from_iterable(tokens_s), float)
  return np.delete(np.diff(flat_s), ends[:-1] - 1)  # from one request to the next


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Interference:
  """The longest gap between two tokens of a request while a long prompt was prefilled."""

  pool: str
  request_id: int
  gap_s: float
  prompt_id: int
  prompt_tokens: int


def interference(
  log: Iterable[Event], *, long_tokens: int | None = None, any_pool: bool = False
) -> Interference | None:
  """The longest gap of a running request that overlapped the prefill of another's long prompt.

  A gap belongs to the pool that emitted its second token, and overlaps a step when some time lies
  in both: a step of that pool, or with `any_pool` of any (what a disaggregated run still feels). Of
  several long prompts in the gap the longest is named. `long_tokens` None takes 4 x the median
  prompt of the log, or its longest prompt where none is as long. None is the answer where no gap
  overlapped.
  """
  log = list(log)
  prompt_tokens = {e.request_id: e.num_prompt_tokens for e in log if isinstance(e, Arrived)}
  if long_tokens is None:
    lengths = prompt_tokens.values()
    long_tokens = min(4 * statistics.median(lengths), max(lengths)) if prompt_tokens else 0
  steps = list(each_step(log))
  long_steps: dict[str, list[tuple[Step, list[int]]]] = {}  # by pool, in order of their ends
  for step in steps:
    ids = [i for i in step.prefill_ids if prompt_tokens[i] >= long_tokens]
    if ids:
      long_steps.setdefault("" if any_pool else step.pool, []).append((step, ids))

  def longest_prompt_within(pool: str, start_s: float, end_s: float, request_id: int) -> int | None:
    candidates = long_steps.get("" if any_pool else pool, [])
    first = bisect.bisect_right(candidates, start_s, key=lambda c: c[0].end_s)
    found = [
      i for step, ids in candidates[first:] if step.start_s < end_s for i in ids if i != request_id
    ]
    return max(found, key=lambda i: prompt_tokens[i], default=None)

  worst: Interference | None = None
  last_token_s: dict[int, float] = {}
  for step in steps:
    for request_id in step.emitted_ids:
      start_s = last_token_s.get(request_id, step.end_s)
      last_token_s[request_id] = step.end_s
      if step.end_s - start_s <= (worst.gap_s if worst else 0):
        continue
      prompt_id = longest_prompt_within(step.pool, start_s, step.end_s, request_id)
      if prompt_id is not None:
        worst = Interference(
          pool=step.pool,
          request_id=request_id,
          gap_s=step.end_s - start_s,
          prompt_id=prompt_id,
          prompt_tokens=prompt_tokens[prompt_id],
        )
  return worst
