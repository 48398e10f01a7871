"""Mechanism: queues, token budget, rows, pages, preemption. A policy only chooses the order.

The scheduler knows no phase: prefill, chunk, decode and recompute after a preemption are all
"tokens not yet computed" (the view of vLLM v1's scheduler). `StepBuilder` keeps every invariant, so
a policy may offer it any sequence in any order.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, ValuesView
from typing import Protocol

from pdjax.core.plan import DecodeSlices, PageUpdates, Slice, StepPlan, StepResult, TokenLogprobs
from pdjax.core.request import Request
from pdjax.core.sequence import Sequence
from pdjax.scheduling.pages import PageConfig, PagePool

FinishReason = Callable[[Sequence], str | None]
"""Called once for every token that a sequence gets; says why it ends with that token, or None."""


class Policy(Protocol):
  def __call__(self, step: StepBuilder) -> None:
    """Offers sequences to `step`; everything else about the step is the builder's."""
    ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
  """The limits of a step.

  `chunk_prompts` False gives a prompt all its tokens in one step or none. `decodes` False is a pool
  whose sequences leave with their first token: only prompts need room. `watermark` is the share
  of the pages that admission leaves free for running sequences to grow into (not in an empty pool).

  Raises:
    ValueError: a value outside its range, with the value.
  """

  token_budget: int
  chunk_prompts: bool = True
  decodes: bool = True
  watermark: float = 0.01

  def __post_init__(self):
    if self.token_budget < 1:
      raise ValueError(f"token_budget={self.token_budget} must be at least 1")
    if not 0 <= self.watermark < 1:
      raise ValueError(f"watermark={self.watermark} must be in [0, 1)")


@dataclasses.dataclass(slots=True)
class Outcome:
  """What a finished step changed."""

  emitted: list[tuple[Sequence, int]] = dataclasses.field(default_factory=list)
  finished: list[tuple[Sequence, str]] = dataclasses.field(default_factory=list)
  failed: list[tuple[Sequence, str]] = dataclasses.field(default_factory=list)


def length_or_stop(seq: Sequence) -> str | None:
  """The default finish rule: a stop id after `min_tokens` others, which wins, or `max_tokens`."""
  sampling, num_tokens = seq.request.sampling, len(seq.output_ids)
  if num_tokens > sampling.min_tokens and seq.output_ids[-1] in sampling.stop_ids:
    return "stop"
  return "length" if num_tokens >= sampling.max_tokens else None


class Scheduler:
  """Plans the steps of one pool. `next_step` may be called while earlier plans are in flight.

  Victim rule: a sequence that must grow and finds no page takes them from the newest sequence
  admitted after it that is not in the step yet. The oldest is never a victim, so something always
  advances.

  Raises:
    ValueError: a token budget that cannot hold one decode of every row.
  """

  def __init__(self, policy: Policy, pages: PageConfig, config: SchedulerConfig):
    if config.token_budget < pages.num_rows:
      raise ValueError(
        f"token_budget={config.token_budget} cannot advance {pages.num_rows} running sequences; "
        f"raise it to at least num_rows={pages.num_rows} or lower num_rows"
      )
    self.policy, self.pages, self.config = policy, PagePool(pages), config
    self.watermark_pages = int(config.watermark * pages.num_pages)
    self.waiting: collections.OrderedDict[int, Sequence] = collections.OrderedDict()
    self.running: dict[int, Sequence] = {}  # holds a row; in the order of admission
    self.leaving: dict[int, Sequence] = {}  # holds a row whose pages are being handed over
    self.prefill_tokens_left = 0  # over waiting and running, kept for routers
    self.output_tokens_left = 0
    self.unreported_preemptions: list[int] = []
    self.pages_owed: dict[int, int] = {}  # running request -> pages it could not get; see `_grow`
    self._next_step_id = 0
    self._in_flight: collections.deque[StepPlan] = collections.deque()
    self._last_step_of_row: dict[int, int] = {}
    self._rows_to_release: dict[int, list[int]] = {}  # step id -> rows free when it ends

  # Requests in and out -------------------------------------------------------------------------

  def refusal(self, request: Request) -> str | None:
    """Why `request` can never run here, or None."""
    need = request.max_cached_tokens if self.config.decodes else request.num_prompt_tokens
    capacity = self.pages.config.capacity_tokens
    if need > capacity:
      what = "prompt + max_tokens - 1" if self.config.decodes else "prompt"
      return f"{what} = {need} tokens, but the pool holds {capacity}"
    if not self.config.chunk_prompts and need > self.config.token_budget:
      # After a preemption the generated tokens are prefill too, hence `need` and not the prompt.
      return (
        f"{need} tokens never fit token_budget={self.config.token_budget} in one step, and "
        f"chunk_prompts is off"
      )
    return None

  def add(self, seq: Sequence) -> None:
    """Queues a new sequence."""
    self.waiting[seq.request_id] = seq
    self._count(seq, 1)

  def reserve(self, num_tokens: int) -> int | None:
    """Takes a row with pages for `num_tokens`, or returns None without changing anything."""
    if not self.pages.num_free_rows or not self.pages.has_room(None, num_tokens):
      return None
    row = self.pages.take_row()
    self.pages.grow(row, num_tokens)
    return row

  def adopt(self, seq: Sequence, row: int) -> None:
    """Runs a sequence whose K and V are already in the reserved `row`."""
    seq.row, seq.generation = row, seq.generation + 1
    self.running[seq.request_id] = seq
    self._count(seq, 1)

  def detach(self, seq: Sequence) -> None:
    """Stops planning a running sequence; it keeps its row until `drop`.

    What is in flight for it is forgotten: the next pool goes on from what was computed.
    """
    del self.running[seq.request_id]
    self.leaving[seq.request_id] = seq
    self.pages_owed.pop(seq.request_id, None)
    self._count(seq, -1)
    seq.num_scheduled_tokens, seq.num_pending_tokens = seq.num_computed_tokens, 0

  def give_back(self, row: int) -> None:
    """Frees a row and its pages, at the end of the last plan in flight that touches it."""
    last = self._last_step_of_row.pop(row, None)
    if last is not None and self._in_flight and last >= self._in_flight[0].step_id:
      self._rows_to_release.setdefault(last, []).append(row)
    else:
      self.pages.release(row)

  def drop(self, request_id: int) -> Sequence | None:
    """Forgets a sequence wherever it is here and frees what it holds; None if it is not here."""
    if (seq := self.waiting.pop(request_id, None)) or (seq := self.running.pop(request_id, None)):
      self._count(seq, -1)
    else:
      seq = self.leaving.pop(request_id, None)
    self.pages_owed.pop(request_id, None)
    if seq is not None and seq.row is not None:
      self.give_back(seq.row)
      seq.row = None
    return seq

  # Steps ---------------------------------------------------------------------------------------

  def next_step(self) -> StepPlan | None:
    """Plans the next step, or returns None when nothing can be done now."""
    step = StepBuilder(self, self._next_step_id)
    self.policy(step)
    plan = step.build()
    if plan is None:
      return None
    self._next_step_id += 1
    self._in_flight.append(plan)
    for s in plan.prefills:
      self._last_step_of_row[s.row] = plan.step_id
    for row in plan.decodes.rows:
      self._last_step_of_row[row] = plan.step_id
    return plan

  def commit(
    self, plan: StepPlan, result: StepResult, finish_reason: FinishReason = length_or_stop
  ) -> Outcome:
    """Applies a finished step. Results of sequences that lost their row since are ignored."""
    self._end(plan)
    outcome, errors = Outcome(), dict(result.errors)
    tokens = zip(result.token_ids, result.logprobs or itertools.repeat(None))
    for s in plan.prefills:
      token = next(tokens) if s.emits_token else None
      if (seq := self._owner(s.request_id, s.generation)) is None:
        continue
      seq.num_computed_tokens += s.num_tokens
      self.prefill_tokens_left -= s.num_tokens
      if s.emits_token:
        self._emit(seq, token, errors, finish_reason, outcome)
    for request_id, generation, token in zip(
      plan.decodes.request_ids, plan.decodes.generations, tokens, strict=True
    ):
      if (seq := self._owner(request_id, generation)) is None:
        continue
      seq.num_computed_tokens += 1
      self._emit(seq, token, errors, finish_reason, outcome)
    self._release_rows(plan)
    return outcome

  def abort(self, plan: StepPlan, reason: str) -> Outcome:
    """Ends a step that failed as a whole: every sequence in it fails."""
    self._end(plan)
    outcome = Outcome()
    owners = [(s.request_id, s.generation) for s in plan.prefills]
    owners += zip(plan.decodes.request_ids, plan.decodes.generations)
    for request_id, generation in owners:
      if (seq := self._owner(request_id, generation)) is not None:
        self.drop(request_id)
        outcome.failed.append((seq, reason))
    self._release_rows(plan)
    return outcome

  def check(self) -> None:
    """Raises AssertionError unless pages, rows and token counts add up."""
    self.pages.check()
    queues = [*self.waiting.values(), *self.running.values()]
    assert self.prefill_tokens_left == sum(_prefill_left(s) for s in queues)
    assert self.output_tokens_left == sum(self._output_left(s) for s in queues)
    held = {s.row for s in [*self.running.values(), *self.leaving.values()]}
    assert len(held) == len(self.running) + len(self.leaving), "two sequences share a row"
    assert self.pages_owed.keys() <= self.running.keys(), "pages are kept for one that is gone"

  # Inside --------------------------------------------------------------------------------------

  def preempt(self, seq: Sequence) -> None:
    """Takes the row of a running sequence. The builder queues it again at the front."""
    del self.running[seq.request_id]
    self.pages_owed.pop(seq.request_id, None)
    self.give_back(seq.row)
    self._count(seq, -1)
    seq.lose_row()
    seq.num_preemptions += 1
    self._count(seq, 1)

  @property
  def num_pages_coming(self) -> int:
    """Pages that return to the pool when plans in flight end."""
    rows = [row for rows in self._rows_to_release.values() for row in rows]
    return sum(len(self.pages.table(row)) for row in rows)

  def _owner(self, request_id: int, generation: int) -> Sequence | None:
    seq = self.running.get(request_id)
    return seq if seq is not None and seq.generation == generation else None

  def _emit(
    self,
    seq: Sequence,
    sampled: tuple[int | None, TokenLogprobs | None],
    errors: dict[int, str],
    finish_reason: FinishReason,
    outcome: Outcome,
  ) -> None:
    token, logprobs = sampled
    seq.num_pending_tokens -= 1
    if token is None:
      self.drop(seq.request_id)
      outcome.failed.append((seq, errors.get(seq.request_id, "no token came back")))
      return
    seq.output_ids.append(token)
    if logprobs is not None:
      seq.output_logprobs.append(logprobs)
    self.output_tokens_left -= self.config.decodes
    outcome.emitted.append((seq, token))
    try:
      reason = finish_reason(seq)
    except Exception as error:  # a caller's rule: its failure is this request's alone
      self.drop(seq.request_id)
      outcome.failed.append((seq, f"finish rule failed: {error!r}"))
      return
    if reason is not None:
      self.drop(seq.request_id)
      seq.cut()  # only now: what the scheduler counts goes by what was emitted
      outcome.finished.append((seq, reason))

  def _end(self, plan: StepPlan) -> None:
    if not self._in_flight or self._in_flight[0] is not plan:
      raise RuntimeError(f"step {plan.step_id} ended out of order")
    self._in_flight.popleft()

  def _release_rows(self, plan: StepPlan) -> None:
    for row in self._rows_to_release.pop(plan.step_id, ()):
      self.pages.release(row)

  def _count(self, seq: Sequence, sign: int) -> None:
    self.prefill_tokens_left += sign * _prefill_left(seq)
    self.output_tokens_left += sign * self._output_left(seq)

  def _output_left(self, seq: Sequence) -> int:
    """Tokens that this pool has yet to decode for `seq`."""
    if not self.config.decodes:
      return 0
    return seq.request.sampling.max_tokens - len(seq.output_ids)


def _prefill_left(seq: Sequence) -> int:
  return max(0, seq.num_prefill_tokens - seq.num_computed_tokens)


class StepBuilder:
  """What a policy writes a step with. Keeps every invariant: budget, rows, pages, one slice."""

  def __init__(self, scheduler: Scheduler, step_id: int):
    self._scheduler = scheduler
    self._step_id = step_id
    self._taken: set[int] = set()  # in this step, or preempted by it
    self._admitted: list[Sequence] = []
    self._preempted: list[Sequence] = []
    self._prefills: list[Slice] = []
    self._decodes: tuple[list[int], ...] = ([], [], [], [])  # the columns of DecodeSlices
    self._page_updates: tuple[list[int], ...] = ([], [], [])  # the columns of PageUpdates
    self.tokens_left = scheduler.config.token_budget

  @property
  def waiting(self) -> ValuesView[Sequence]:
    """Queued sequences in order of arrival, preempted ones first. Not copied."""
    return self._scheduler.waiting.values()

  @property
  def decoding(self) -> list[Sequence]:
    """Running sequences whose next token is a decode, oldest first."""
    return [s for s in self._scheduler.running.values() if s.is_decoding]

  @property
  def prefilling(self) -> list[Sequence]:
    """Running sequences with prompt left, oldest first."""
    return [s for s in self._scheduler.running.values() if not s.is_decoding]

  @property
  def is_empty(self) -> bool:
    return not self._prefills and not self._decodes[0]

  def advance(self, seq: Sequence, max_tokens: int | None = None, *, preempt: bool = False) -> int:
    """Gives `seq` up to `max_tokens` of this step and returns how many it got.

    Admits a waiting sequence if a row and the pages of its whole prompt are free. `preempt` lets a
    running one take pages from newer ones.
    """
    if seq.request_id in self._taken:
      return 0
    wanted = seq.num_unscheduled_tokens
    num_tokens = min(wanted, self.tokens_left)
    if max_tokens is not None:
      num_tokens = min(num_tokens, max_tokens)
    if num_tokens <= 0 or (num_tokens < wanted and not self._scheduler.config.chunk_prompts):
      return 0
    if seq.row is None:
      if not self._admit(seq):
        return 0
    elif not self._grow(seq, seq.num_scheduled_tokens + num_tokens, preempt):
      return 0
    self._write(seq, num_tokens)
    return num_tokens

  def build(self) -> StepPlan | None:
    """Ends the step: admitted sequences leave the queue, preempted ones return to its front."""
    s = self._scheduler
    for seq in self._admitted:
      del s.waiting[seq.request_id]
    for seq in self._preempted:  # newest first, so the oldest ends up in front
      s.waiting[seq.request_id] = seq
      s.waiting.move_to_end(seq.request_id, last=False)
      s.unreported_preemptions.append(seq.request_id)
    if self.is_empty:
      return None
    preempted, s.unreported_preemptions = tuple(s.unreported_preemptions), []
    request_ids, generations, rows, positions = map(tuple, self._decodes)
    update_rows, indices, page_ids = map(tuple, self._page_updates)
    return StepPlan(
      step_id=self._step_id,
      prefills=tuple(self._prefills),
      decodes=DecodeSlices(
        request_ids=request_ids, generations=generations, rows=rows, positions=positions
      ),
      page_updates=PageUpdates(rows=update_rows, indices=indices, page_ids=page_ids),
      preempted=preempted,
    )

  def _admit(self, seq: Sequence) -> bool:
    s = self._scheduler
    spare = (s.watermark_pages if s.running else 0) + sum(s.pages_owed.values())
    if not s.pages.num_free_rows or not s.pages.has_room(None, seq.num_tokens, spare=spare):
      return False
    seq.row = s.pages.take_row()
    self._record(seq.row, 0, s.pages.grow(seq.row, seq.num_tokens))
    s.running[seq.request_id] = seq
    self._admitted.append(seq)
    return True

  def _grow(self, seq: Sequence, num_tokens: int, preempt: bool) -> bool:
    s = self._scheduler
    while (new := s.pages.grow(seq.row, num_tokens)) is None:
      missing = s.pages.num_missing(seq.row, num_tokens)
      # A victim's pages may be busy until a plan in flight ends. They are owed to this sequence
      # then; without the debt a policy that admits first would give them back to the victim, for
      # ever.
      coming = s.pages.num_free_pages + s.num_pages_coming
      if not preempt or coming >= missing or not self._preempt_newest(seq):
        if preempt:
          s.pages_owed[seq.request_id] = missing
        return False
    s.pages_owed.pop(seq.request_id, None)
    if new:
      self._record(seq.row, len(s.pages.table(seq.row)) - len(new), new)
    return True

  def _preempt_newest(self, keep: Sequence) -> bool:
    for victim in reversed(self._scheduler.running.values()):
      if victim is keep:
        return False  # never an older one: two could take each other's pages for ever
      if victim.request_id not in self._taken:
        self._scheduler.preempt(victim)
        self._taken.add(victim.request_id)
        self._preempted.append(victim)
        return True
    return False

  def _record(self, row: int, first_index: int, page_ids: Iterable[int]) -> None:
    rows, indices, pages = self._page_updates
    for index, page in enumerate(page_ids, first_index):
      rows.append(row)
      indices.append(index)
      pages.append(page)

  def _write(self, seq: Sequence, num_tokens: int) -> None:
    start, end = seq.num_scheduled_tokens, seq.num_scheduled_tokens + num_tokens
    emits_token = end == seq.num_tokens
    if seq.is_decoding:
      request_ids, generations, rows, positions = self._decodes
      request_ids.append(seq.request_id)
      generations.append(seq.generation)
      rows.append(seq.row)
      positions.append(start)
    else:
      self._prefills.append(
        Slice(
          request_id=seq.request_id,
          generation=seq.generation,
          row=seq.row,
          num_prompt_tokens=seq.request.num_prompt_tokens,
          start=start,
          num_tokens=num_tokens,
          token_ids=seq.known_ids(start, end),
          emits_token=emits_token,
          sampling=seq.request.sampling,
        )
      )
    seq.num_scheduled_tokens = end
    seq.num_pending_tokens += emits_token
    self._taken.add(seq.request_id)
    self.tokens_left -= num_tokens
