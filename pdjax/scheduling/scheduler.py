"""Mechanism: queues, token budget, rows, pages, preemption. A policy only chooses the order.

The scheduler knows no phase: prefill, chunk, decode and recompute after a preemption are all
"tokens not yet computed" (the view of vLLM v1's scheduler). `StepBuilder` keeps every invariant, so
a policy may offer it any sequence in any order.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, ValuesView
from collections.abc import Sequence as Seq
from typing import Protocol, TypeVar

from pdjax.core.costs import StepCounts, count_slices
from pdjax.core.plan import DecodeSlices, PageUpdates, Slice, StepPlan, StepResult, Swap
from pdjax.core.request import Request
from pdjax.core.sequence import Sequence, State
from pdjax.scheduling.pages import PageConfig, PagePool
from pdjax.scheduling.prefix import extend_keys

FinishReason = Callable[[Sequence], str | None]
"""Called once for every token that a sequence gets; says why it ends with that token, or None."""

StepTime = Callable[[StepCounts], float]
"""How long a step of these counts will take, in seconds."""

RESERVATIONS = ("chunk", "prompt", "request", "max_len")
_MOST_HELD = 64  # long prompts that a step looks past for short ones behind them


class Policy(Protocol):
  def __call__(self, step: StepBuilder) -> None:
    """Offers sequences to `step`; everything else about the step is the builder's."""
    ...


P = TypeVar("P", bound=Policy | type)


def steady(policy: P) -> P:
  """Marks a policy whose steps of decodes repeat while nobody comes or goes.

  It then gives each that runs a token, whatever their lengths. A simulator takes such steps in one
  stroke, those of other policies one at a time.
  """
  policy.is_steady = True
  return policy


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
  """The limits of a step, and who gets memory.

  `chunk_prompts` False gives a prompt all its tokens in one step or none. `decodes` False is a pool
  whose sequences leave with their first token: only prompts need room.

  `reservation`: the pages that a sequence takes when it is admitted. `chunk`: of its first chunk,
  then as it grows; `prompt`: of its whole prompt (Sarathi-Serve's own scheduler); `request`: of
  prompt + max_tokens - 1, so that it never needs more; `max_len`: of the longest sequence of a row
  (Orca, FasterTransformer). `watermark` is the share of the pages that admission leaves free for
  running sequences to grow into (not in an empty pool). A sequence preempted `max_preemptions`
  times is admitted again only with all that it may need, and never preempted again. `swap_tokens`
  of K and V may lie in the host's memory: a preempted sequence is copied there, and back when it is
  admitted, instead of being computed again; where there is no room for it, or with 0, it is.

  Fairness: at most `look_ahead` others are admitted past a sequence that finds no room at the head
  of the queue (0 is strict FCFS); at most `max_partial_prefills` prompts are in progress at a time;
  prompts longer than `long_prompt_tokens` together get at most `long_prompt_share` of a budget.

  `micro_batches`: the steps of a pipeline that are on their way at once, one in each stage. A step
  takes its share of the decodes, those that no step in flight has, so that none waits for another's
  tokens (vLLM and Sarathi-Serve likewise; the rounds of a short queue leave stages idle).

  `prefix_cache` keeps the pages of common prefixes; `eviction` says which goes first when room is
  needed: `lru`, `lfu`, or `length`.

  Raises:
    ValueError: a value outside its range, with the value.
  """

  token_budget: int
  chunk_prompts: bool = True
  decodes: bool = True
  reservation: str = "prompt"
  watermark: float = 0.01
  max_preemptions: int = 3
  swap_tokens: int = 0
  look_ahead: int = 0
  max_partial_prefills: int | None = None
  long_prompt_tokens: int | None = None
  long_prompt_share: float = 1.0
  micro_batches: int = 1
  prefix_cache: bool = False
  eviction: str = "lru"

  def __post_init__(self):
    for name, lowest in (
      ("token_budget", 1),
      ("micro_batches", 1),
      ("max_preemptions", 0),
      ("swap_tokens", 0),
      ("look_ahead", 0),
      ("max_partial_prefills", 1),
      ("long_prompt_tokens", 1),
    ):
      value = getattr(self, name)
      if value is not None and value < lowest:
        raise ValueError(f"{name}={value} must be at least {lowest}")
    if self.reservation not in RESERVATIONS:
      raise ValueError(f"reservation={self.reservation!r} must be one of {', '.join(RESERVATIONS)}")
    if not 0 <= self.watermark < 1:
      raise ValueError(f"watermark={self.watermark} must be in [0, 1)")
    if not 0 < self.long_prompt_share <= 1:
      raise ValueError(f"long_prompt_share={self.long_prompt_share} must be in (0, 1]")
    if not self.chunk_prompts and self.long_prompt_share < 1:
      raise ValueError(
        f"long_prompt_share={self.long_prompt_share} cuts long prompts, but chunk_prompts is off"
      )

  @property
  def long_prompt_budget(self) -> int:
    """Tokens of a step for prompts longer than `long_prompt_tokens`."""
    return max(1, int(self.long_prompt_share * self.token_budget))


@dataclasses.dataclass(slots=True)
class Outcome:
  """What a step that ended has changed. Those `preempted` by its failure are queued nowhere yet.

  `emitted_ids` and `token_ids` are `emitted` as columns.
  """

  emitted: list[tuple[Sequence, int]] = dataclasses.field(default_factory=list)
  emitted_ids: tuple[int, ...] = ()
  token_ids: tuple[int, ...] = ()
  finished: list[tuple[Sequence, str]] = dataclasses.field(default_factory=list)
  failed: list[tuple[Sequence, str]] = dataclasses.field(default_factory=list)
  preempted: list[Sequence] = dataclasses.field(default_factory=list)


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

  `predict_step_s` is for policies that plan by time.

  Raises:
    ValueError: a token budget that cannot hold one decode of every row, or a prefix cache over rows
      whose pages cannot be shared.
  """

  def __init__(
    self,
    policy: Policy,
    pages: PageConfig,
    config: SchedulerConfig,
    predict_step_s: StepTime | None = None,
  ):
    self.predict_step_s = predict_step_s
    self.pages = PagePool(pages, eviction=config.eviction)
    self.waiting: collections.OrderedDict[int, Sequence] = collections.OrderedDict()
    self.running: dict[int, Sequence] = {}  # holds a row; in the order of admission
    self.prefilling: dict[int, Sequence] = {}  # running, with prompt left to plan; same order
    self.decoding: dict[int, Sequence] = {}  # running, the rest; in the order of their first tokens
    self.leaving: dict[int, Sequence] = {}  # holds a row whose pages are being handed over
    self.prefill_tokens_left = 0  # over waiting and running, kept for routers
    self.output_tokens_left = 0
    self.num_swapped_tokens = 0  # in the host's memory
    self.unreported_preemptions: list[int] = []
    self.unreported_swaps: tuple[dict[int, Swap], list[int]] = ({}, [])  # outs, and drops
    self.pages_owed: dict[int, int] = {}  # running request -> pages it could not get; see `_grow`
    self.num_changes = 0  # from outside: a stroke that began before one may not go on
    self._next_step_id = 0
    self._admits_nobody = False  # the policy, in such a step as its last
    self._in_flight: collections.deque[StepPlan] = collections.deque()
    self._rows_to_release: dict[int, list[int]] = {}  # step id -> rows free when it ends
    self.become(policy, config)

  def become(self, policy: Policy, config: SchedulerConfig) -> None:
    """Plans by this policy within these limits from now on; keeps whom it has, and its pages.

    Raises:
      ValueError: as when it is made.
    """
    pages = self.pages.config
    if config.token_budget < pages.num_rows:
      raise ValueError(
        f"token_budget={config.token_budget} cannot advance {pages.num_rows} running sequences; "
        f"raise it to at least num_rows={pages.num_rows} or lower num_rows"
      )
    if config.prefix_cache and pages.contiguous:
      raise ValueError(
        "prefix_cache shares pages between rows, and in the slots layout every row has its own; "
        "use cache.layout=paged"
      )
    self.policy, self.config = policy, config
    self.num_changes += 1
    self.watermark_pages = int(config.watermark * pages.num_pages)
    self.prefill_tokens_left = self.output_tokens_left = 0
    for seq in (*self.waiting.values(), *self.running.values()):
      self._count(seq, 1)

  # Requests in and out -------------------------------------------------------------------------

  def refusal(
    self, request: Request, num_output_tokens: int = 0, config: SchedulerConfig | None = None
  ) -> str | None:
    """Why `request` can never run here, or None; `num_output_tokens` are those it has already.

    Within the limits of `config`, which the pool may be about to have, or of those it has.
    """
    config = self.config if config is None else config
    decodes = config.decodes
    need = request.max_cached_tokens if decodes else request.num_prompt_tokens + num_output_tokens
    capacity = self.pages.config.capacity_tokens
    if need > capacity:
      what = "prompt + max_tokens - 1" if decodes else "prompt"
      return f"{what} = {need} tokens, but the pool holds {capacity}"
    if not config.chunk_prompts and need > config.token_budget:
      # After a preemption the generated tokens are prefill too, hence `need` and not the prompt.
      return (
        f"{need} tokens never fit token_budget={config.token_budget} in one step, and "
        f"chunk_prompts is off"
      )
    return None

  def add(self, seq: Sequence) -> None:
    """Queues a sequence: a new one at the end, a preempted one in front.

    Raises:
      ValueError: one with its id is here.
    """
    request_id = seq.request_id
    if request_id in self.waiting or request_id in self.running or request_id in self.leaving:
      raise ValueError(f"request id {request_id} is in use")
    seq.last_step = -1
    self.num_changes += 1
    self.waiting[request_id] = seq
    if seq.state is State.PREEMPTED:
      self.waiting.move_to_end(request_id, last=False)
    self._count(seq, 1)

  def reserve(self, num_tokens: int, keys: tuple[bytes, ...] = ()) -> int | None:
    """Takes a row with pages for `num_tokens`, or returns None without changing anything.

    The row begins with the cached pages of `keys`. Pages that are owed are not for it; and none is
    while pages wait to be swapped out by the next step, as the row may be written to before that.
    """
    swap_outs, _ = self.unreported_swaps
    spare = sum(self.pages_owed.values())
    if (
      swap_outs
      or not self.pages.num_free_rows
      or not self.pages.has_room(None, num_tokens, spare=spare, keys=keys)
    ):
      return None
    self.num_changes += 1
    row = self.pages.take_row(keys)
    self.pages.grow(row, num_tokens)
    return row

  def cached_keys(self, seq: Sequence) -> tuple[bytes, ...]:
    """Keys of the pages that the prefix cache has for `seq`. Does not change the pool.

    Never of all its tokens: the last one is computed anew, in a page of its own, as its logits are
    wanted.
    """
    if not self.config.prefix_cache:
      return ()
    page_size = self.pages.config.page_size
    extend_keys(seq, seq.num_tokens, page_size)
    keys = seq.page_keys[: (seq.num_tokens - 1) // page_size]
    return tuple(keys[: self.pages.match(keys)])

  def publish(self, row: int, keys: Seq[bytes]) -> None:
    """Tells the prefix cache what the first pages of a reserved row hold by now."""
    self.num_changes += 1
    for index, key in enumerate(keys):
      self.pages.publish(row, index, key)

  def adopt(self, seq: Sequence, row: int) -> None:
    """Runs a sequence whose K and V are already in the reserved `row`."""
    seq.enter(State.RUNNING)
    self.num_changes += 1
    seq.row, seq.generation, seq.last_step = row, seq.generation + 1, -1
    self.note_published(seq, 0)
    self.update_room(seq)
    self.running[seq.request_id] = self.decoding[seq.request_id] = seq
    self._count(seq, 1)
    self._publish(seq)

  def detach(self, seq: Sequence) -> None:
    """Stops planning a running sequence; it keeps its row until `release`, `drop` or `unseat`.

    What is in flight for it is forgotten: the next pool goes on from what was computed.
    """
    seq.enter(State.READY)
    self.num_changes += 1
    self._stop_running(seq.request_id)
    self.leaving[seq.request_id] = seq
    self._count(seq, -1)
    seq.num_scheduled_tokens = seq.num_computed_tokens

  def give_back(self, row: int, last_step: int = -1) -> None:
    """Frees a row and its pages, if `last_step` touches it and is in flight at the end of that."""
    self.num_changes += 1
    if self._in_flight and last_step >= self._in_flight[0].step_id:
      self._rows_to_release.setdefault(last_step, []).append(row)
    else:
      self.pages.release(row)

  def release(self, seq: Sequence) -> None:
    """Frees what a leaving sequence holds here: its pages are copied, or no longer wanted."""
    del self.leaving[seq.request_id]
    self.give_back(seq.row, seq.last_step)
    seq.row = None

  def unseat(self, seq: Sequence) -> None:
    """Takes the row of a running or leaving sequence, to be computed again; queues it nowhere."""
    seq.enter(State.PREEMPTED)
    if self._stop_running(seq.request_id) is not None:
      self._count(seq, -1)
    else:
      del self.leaving[seq.request_id]
    self.give_back(seq.row, seq.last_step)
    seq.lose_row()
    seq.num_preemptions += 1

  def withdraw(self, seqs: Iterable[Sequence]) -> list[Sequence]:
    """Takes sequences from the queue, to be computed elsewhere; what was swapped out is lost."""
    withdrawn = list(seqs)
    self.num_changes += bool(withdrawn)
    for seq in withdrawn:
      del self.waiting[seq.request_id]
      self._count(seq, -1)
      self.forget_swapped(seq)
    return withdrawn

  def drop(self, request_id: int) -> Sequence | None:
    """Ends a sequence wherever it is here and frees what it holds; None if it is not here."""
    if (seq := self.waiting.pop(request_id, None)) or (seq := self._stop_running(request_id)):
      self._count(seq, -1)
    else:
      seq = self.leaving.pop(request_id, None)
    if seq is None:
      return None
    seq.enter(State.ENDED)
    self.num_changes += 1
    self.forget_swapped(seq)
    if seq.row is not None:
      self.give_back(seq.row, seq.last_step)
      seq.row = None
    return seq

  # Steps ---------------------------------------------------------------------------------------

  def next_step(self, now_s: float = 0.0) -> StepPlan | None:
    """Plans the step that will start at `now_s`, or returns None when nothing can be done."""
    step = StepBuilder(self, self._next_step_id, now_s)
    self.policy(step)
    plan = step.build()
    self._admits_nobody = step.has_found_no_room and not step.has_asked_time
    if plan is None:
      return None
    self._next_step_id += 1
    self._in_flight.append(plan)
    return plan

  def commit(
    self, plan: StepPlan, result: StepResult, finish_reason: FinishReason = length_or_stop
  ) -> Outcome:
    """Applies a finished step. Results of sequences that lost their row since are ignored."""
    self._end(plan)
    outcome, errors = Outcome(), dict(result.errors)
    emitting = [s for s in plan.prefills if s.emits_token]
    for s in plan.prefills:
      if (seq := self._owner(s.request_id, s.generation)) is not None:
        # The last position of a slice that emits is counted below, with its token.
        seq.num_computed_tokens += s.num_tokens - s.emits_token
        self.prefill_tokens_left -= s.num_tokens
        if not s.emits_token:
          self._publish(seq)
    # This loop runs for every token that is generated: no calls where none is needed.
    running, emitted = self.running, outcome.emitted
    is_default = finish_reason is length_or_stop
    request_ids, generations = plan.decodes.request_ids, plan.decodes.generations
    if emitting:
      request_ids = (*[s.request_id for s in emitting], *request_ids)
      generations = (*[s.generation for s in emitting], *generations)
    for request_id, generation, token, logprobs in zip(
      request_ids,
      generations,
      result.token_ids,
      result.logprobs or itertools.repeat(None, len(request_ids)),
      strict=True,
    ):
      seq = running.get(request_id)
      if seq is None or seq.generation != generation:
        continue
      seq.num_computed_tokens = num_computed = seq.num_computed_tokens + 1
      if token is None:
        self.drop(request_id)
        outcome.failed.append((seq, errors.get(request_id, "no token came back")))
        continue
      if num_computed >= seq.publish_at_tokens:
        self._publish(seq)
      seq.output_ids.append(token)
      if logprobs is not None:
        seq.output_logprobs.append(logprobs)
      emitted.append((seq, token))
      if is_default and len(seq.output_ids) < seq.may_end_tokens:
        continue
      try:
        reason = finish_reason(seq)
      except Exception as error:  # a caller's rule: its failure is this request's alone
        self.drop(request_id)
        outcome.failed.append((seq, f"finish rule failed: {error!r}"))
        continue
      if reason is not None:
        self.drop(request_id)
        seq.cut()  # only now: what the scheduler counts goes by what was emitted
        outcome.finished.append((seq, reason))
    self.output_tokens_left -= self.config.decodes * len(emitted)
    if len(emitted) == len(request_ids):  # as nearly always: columns that are there
      outcome.emitted_ids, outcome.token_ids = request_ids, result.token_ids
    else:
      outcome.emitted_ids = tuple([seq.request_id for seq, _ in emitted])
      outcome.token_ids = tuple([token for _, token in emitted])
    self._release_rows(plan)
    return outcome

  def steady_steps(self, plan: StepPlan) -> int:
    """How many steps in a row the newest plan can be, a position further each: 1 is always right.

    More where it decodes all that run and nothing can be admitted, until one of them has all its
    tokens or there is no page for the next. Asks each sequence once. While rows are free, nothing
    can be admitted if the policy has just tried, and not by the time.
    """
    running = self.running.values()
    if (
      not getattr(self.policy, "is_steady", False)
      or plan.prefills
      or plan.preempted  # queued after the policy looked
      or plan.swap_outs
      or plan.swap_ins
      or self.prefilling
      or self.pages_owed
      or len(plan.decodes) != len(running)
      or len(self._in_flight) != 1
      or (self.waiting and self.pages.num_free_rows and not self._admits_nobody)
      or any([seq.request.sampling.stop_ids for seq in running])
    ):
      return 1
    most = 1 + min([seq.max_cached_tokens - seq.num_scheduled_tokens for seq in running])
    pages, num_free = self.pages, self.pages.num_free_pages
    if pages.config.contiguous or len(running) * (most // pages.config.page_size + 1) <= num_free:
      return most

    def is_too_long(num_steps: int) -> bool:
      return num_free < sum(
        pages.num_missing(seq.row, seq.num_scheduled_tokens + num_steps - 1) for seq in running
      )

    return bisect.bisect_left(range(1, most + 1), True, key=is_too_long)

  def advance_stroke(
    self, plan: StepPlan, num_steps: int, *, num_under_way: int = 1
  ) -> list[Sequence]:
    """Applies steps of a stroke (`steady_steps`) that have ended; the next one is under way.

    Returns those that have all their tokens.
    """
    running, tokens = self.running, (0,) * num_steps
    done = []
    for request_id in plan.decodes.request_ids:
      seq = running.get(request_id)
      if seq is None:
        continue  # it has left since, and what was to come for it counts for nothing
      seq.num_computed_tokens = num_computed = seq.num_computed_tokens + num_steps
      seq.num_scheduled_tokens = num_scheduled = num_computed + num_under_way
      seq.output_ids += tokens
      self.output_tokens_left -= num_steps
      if num_scheduled > seq.room_tokens:
        if self.pages.grow(seq.row, num_scheduled) is None:
          raise RuntimeError(f"request {request_id}: a stroke went on for which there was no page")
        self.update_room(seq)
      if num_computed >= seq.publish_at_tokens:
        self._publish(seq)
      if num_computed >= seq.max_cached_tokens:
        done.append(seq)
    return done

  def commit_stroke(
    self, plan: StepPlan, num_steps: int, num_done: int
  ) -> tuple[Outcome, frozenset[int]]:
    """Ends a stroke of `num_steps`, of which `num_done` were applied before.

    The outcome has what has finished. Beside it, who left during the last step and got no token.
    """
    self._end(plan)
    self._next_step_id = plan.step_id + num_steps
    gone = frozenset(plan.decodes.request_ids) - self.running.keys()
    outcome = Outcome()
    for seq in self.advance_stroke(plan, num_steps - num_done, num_under_way=0):
      self.drop(seq.request_id)
      outcome.finished.append((seq, "length"))
    self._release_rows(plan)
    return outcome, gone

  def abort(self, plan: StepPlan, reason: str) -> Outcome:
    """Ends a step that failed as a whole: every sequence in it fails."""
    self._end(plan)
    self._void_swaps([plan])
    outcome = Outcome(failed=self._drop_all(plan, reason))
    self._release_rows(plan)
    return outcome

  def lose_cache(self, plan: StepPlan | None, reason: str) -> Outcome:
    """Forgets K and V of the whole pool, lost in the step `plan` or, if None, elsewhere.

    The sequences of `plan` fail. All plans in flight are void, and whatever else holds a row here
    is preempted, oldest first; pages that are being copied are left to whoever copies them.
    """
    outcome = Outcome()
    if plan is not None:
      outcome.failed = self._drop_all(plan, reason)
    self._void_swaps(self._in_flight)
    self._in_flight.clear()
    for rows in self._rows_to_release.values():
      for row in rows:
        self.pages.release(row)
    self._rows_to_release.clear()
    ready = [seq for seq in self.leaving.values() if seq.state is State.READY]
    outcome.preempted = [*ready, *self.running.values()]
    for seq in outcome.preempted:
      self.unseat(seq)
    self.pages.forget()
    return outcome

  def _void_swaps(self, plans: Iterable[StepPlan]) -> None:
    """What these plans were to copy to the host may not be there: it is computed again."""
    outs, drops = self.unreported_swaps
    for swap in [*outs.values(), *(s for plan in plans for s in plan.swap_outs)]:
      seq = self.waiting.get(swap.request_id)
      if seq is not None:
        self.forget_swapped(seq)
    for plan in plans:
      drops += plan.swap_drops
      for swap in plan.swap_ins:
        seq = self.waiting.get(swap.request_id)
        if seq is None or not seq.num_swapped_tokens:  # else it is the newer copy that is there
          drops.append(swap.request_id)

  def check(self) -> None:
    """Raises AssertionError unless pages, rows and token counts add up."""
    self.pages.check()
    for seq in self.running.values():
      held = self.pages.num_held(seq.row) * self.pages.config.page_size
      assert seq.num_computed_tokens <= held, "computed without a page"
      room_tokens = seq.room_tokens
      self.update_room(seq)
      assert seq.room_tokens == room_tokens, "room is not that of the pages"
    queues = [*self.waiting.values(), *self.running.values()]
    assert self.prefill_tokens_left == sum(_prefill_left(s) for s in queues)
    assert self.output_tokens_left == sum(self._output_left(s) for s in queues)
    held = {s.row for s in [*self.running.values(), *self.leaving.values()]}
    assert len(held) == len(self.running) + len(self.leaving), "two sequences share a row"
    used = {s.row for plan in self._in_flight for s in plan.prefills}
    used.update(*(plan.decodes.rows for plan in self._in_flight))
    assert used <= self.pages.held_rows, "a row was given back under a plan in flight"
    assert {s.state for s in self.waiting.values()} <= {State.QUEUED, State.PREEMPTED}
    assert {s.state for s in self.running.values()} <= {State.RUNNING}
    assert {s.state for s in self.leaving.values()} <= {State.READY, State.MOVING, State.ENDED}
    assert self.pages_owed.keys() <= self.running.keys(), "pages are kept for one that is gone"
    assert self.running.keys() == self.prefilling.keys() | self.decoding.keys()
    assert all(not s.is_decoding for s in self.prefilling.values())
    assert all(s.is_decoding for s in self.decoding.values())

  # Inside --------------------------------------------------------------------------------------

  def preempt(self, seq: Sequence) -> None:
    """Takes the row of a running sequence. The builder queues it again at the front."""
    num_tokens, row = seq.num_computed_tokens, seq.row
    if 0 < num_tokens <= self.config.swap_tokens - self.num_swapped_tokens:
      # Copied before the step that is being planned, so before anyone else writes to its pages.
      pages = self.pages.table(row)[: -(-num_tokens // self.pages.config.page_size)]
      outs, _ = self.unreported_swaps
      outs[seq.request_id] = Swap(request_id=seq.request_id, num_tokens=num_tokens, page_ids=pages)
      seq.num_swapped_tokens = num_tokens
      self.num_swapped_tokens += num_tokens
    self.unseat(seq)
    self._count(seq, 1)

  def forget_swapped(self, seq: Sequence) -> None:
    """Its copy in the host's memory, if it has one, is not needed any more."""
    if seq.num_swapped_tokens:
      outs, drops = self.unreported_swaps
      if outs.pop(seq.request_id, None) is None:
        drops.append(seq.request_id)
      self.num_swapped_tokens -= seq.num_swapped_tokens
      seq.num_swapped_tokens = 0

  def tokens_to_reserve(self, seq: Sequence, num_first: int) -> int:
    """Tokens that `seq` gets pages for when it is admitted with its first `num_first` of them."""
    config = self.config
    most = seq.max_cached_tokens if config.decodes else seq.num_tokens
    if config.reservation == "max_len":
      return self.pages.config.capacity_tokens
    if config.reservation == "request" or seq.num_preemptions >= config.max_preemptions:
      return most
    return num_first if config.reservation == "chunk" else seq.num_tokens

  def update_room(self, seq: Sequence) -> None:
    """After a change of its pages."""
    num_held = self.pages.num_held(seq.row) * self.pages.config.page_size
    seq.room_tokens = min(seq.max_cached_tokens, num_held)

  @property
  def num_pages_coming(self) -> int:
    """Pages that return to the pool when plans in flight end."""
    rows = [row for rows in self._rows_to_release.values() for row in rows]
    return sum(len(self.pages.table(row)) for row in rows)

  def _stop_running(self, request_id: int) -> Sequence | None:
    self.prefilling.pop(request_id, None)
    self.decoding.pop(request_id, None)
    self.pages_owed.pop(request_id, None)
    return self.running.pop(request_id, None)

  def _publish(self, seq: Sequence) -> None:
    """Tells the prefix cache the pages that are complete by now."""
    if seq.num_computed_tokens < seq.publish_at_tokens:
      return
    page_size = self.pages.config.page_size
    num_pages = seq.num_computed_tokens // page_size
    extend_keys(seq, num_pages * page_size, page_size)
    keys = seq.page_keys
    for index in range(seq.publish_at_tokens // page_size - 1, min(num_pages, len(keys))):
      self.pages.publish(seq.row, index, keys[index])
    self.note_published(seq, num_pages)

  def note_published(self, seq: Sequence, num_pages: int) -> None:
    """The prefix cache knows so many pages of its row: when it is to hear of the next."""
    if self.config.prefix_cache:
      seq.publish_at_tokens = (num_pages + 1) * self.pages.config.page_size

  def _drop_all(self, plan: StepPlan, reason: str) -> list[tuple[Sequence, str]]:
    owners = [(s.request_id, s.generation) for s in plan.prefills]
    owners += zip(plan.decodes.request_ids, plan.decodes.generations)
    here = [seq for seq in itertools.starmap(self._owner, owners) if seq is not None]
    for seq in here:
      self.drop(seq.request_id)
    return [(seq, reason) for seq in here]

  def _owner(self, request_id: int, generation: int) -> Sequence | None:
    seq = self.running.get(request_id)
    return seq if seq is not None and seq.generation == generation else None

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


_NO_DECODES, _NO_UPDATES = DecodeSlices(), PageUpdates()


def _is_in_flight(seq: Sequence) -> bool:
  return seq.num_scheduled_tokens > seq.num_computed_tokens


class StepBuilder:
  """What a policy writes a step with. Keeps every invariant: budget, rows, pages, one slice.

  `now_s` is when the step will start. A policy may lower `tokens_left`, which is how it sets a
  smaller budget for this step.
  `predict_step_s` is None where nobody knows how long steps take.
  """

  def __init__(self, scheduler: Scheduler, step_id: int, now_s: float):
    self._scheduler = scheduler
    self._step_id = step_id
    self._now_s = now_s
    self.has_asked_time = self.has_found_no_room = False
    self.predict_step_s = scheduler.predict_step_s
    self._admitted: list[Sequence] = []
    self._preempted: dict[int, Sequence] = {}
    self._prefills: list[Slice] = []
    self._decodes: tuple[list[int], ...] = ([], [], [], [])  # the columns of DecodeSlices
    self._page_updates: tuple[list[int], ...] = ([], [], [])  # the columns of PageUpdates
    self._swap_ins: list[Swap] = []
    self._tokens_left = scheduler.config.token_budget
    self._long_tokens_left = scheduler.config.long_prompt_budget
    num_shares = scheduler.config.micro_batches
    # The share of one stage of a pipeline, where there are several.
    self._most_decodes = -(-len(scheduler.decoding) // num_shares) if num_shares > 1 else None

  @property
  def now_s(self) -> float:
    self.has_asked_time = True
    return self._now_s

  @property
  def tokens_left(self) -> int:
    return self._tokens_left

  @tokens_left.setter
  def tokens_left(self, num_tokens: int) -> None:
    self._tokens_left = min(num_tokens, self._tokens_left)

  @property
  def waiting(self) -> ValuesView[Sequence]:
    """Queued sequences in order of arrival, preempted ones first. Not copied."""
    return self._scheduler.waiting.values()

  @property
  def running(self) -> list[Sequence]:
    """All that hold a row, in the order of their admission."""
    return list(self._scheduler.running.values())

  @property
  def decoding(self) -> list[Sequence]:
    """Running sequences whose next token is a decode, in the order of their first tokens."""
    return list(self._scheduler.decoding.values())

  @property
  def prefilling(self) -> list[Sequence]:
    """Running sequences with prompt left, in the order of their admission."""
    return list(self._scheduler.prefilling.values())

  @property
  def is_empty(self) -> bool:
    return not self._prefills and not self._decodes[0]

  @property
  def num_decodes(self) -> int:
    return len(self._decodes[0])

  @property
  def counts(self) -> StepCounts:
    """What is in the step so far, as a latency model counts it."""
    positions = self._decodes[-1]
    return count_slices(
      prefill_starts=[s.start for s in self._prefills],
      prefill_tokens=[s.num_tokens for s in self._prefills],
      decode_positions=positions,
      num_emitted=sum(s.emits_token for s in self._prefills) + len(positions),
    )

  # What most policies are made of

  def decode(self, *, preempt: bool = True) -> None:
    """A token for every decoding sequence, in the order of their first tokens."""
    # A loop of its own, as it runs for every token that is generated: a tenth of what `advance`
    # takes.
    step_id, most = self._step_id, self._tokens_left
    if self._most_decodes is not None:  # of those that find room: others may wait for theirs
      most = min(most, self._most_decodes)
    left = most
    taken: list[Sequence] = []
    positions = self._decodes[-1]
    for seq in self._micro_batch():
      if left <= 0:
        break
      position = seq.num_scheduled_tokens
      if position >= seq.room_tokens and not self._make_room(seq, preempt):
        continue
      if seq.row is None or seq.last_step == step_id:
        continue  # preempted by one before it, or in the step already
      taken.append(seq)
      positions.append(position)
      seq.num_scheduled_tokens = position + 1
      seq.last_step = step_id
      left -= 1
    request_ids, generations, rows, _ = self._decodes
    request_ids += [seq.request_id for seq in taken]
    generations += [seq.generation for seq in taken]
    rows += [seq.row for seq in taken]
    self._tokens_left -= most - left

  def prefill(self, max_tokens: int | None = None) -> None:
    """Chunks of the prompts in progress, in the order of their admission."""
    for seq in self.prefilling:
      self.advance(seq, max_tokens, preempt=self._scheduler.config.reservation == "chunk")

  def admit(
    self, order: Iterable[Sequence] | None = None, *, max_tokens: int | None = None
  ) -> None:
    """Queued sequences, in order of arrival or in `order`, until one finds no room.

    Looks past such a one until `look_ahead` others have been admitted past it, in this step and
    those before. Prompts that wait for their share of the budget only (`long_prompt_share`) hold up
    those behind them no further than so many of them stand in a row.
    """
    look_ahead = self._scheduler.config.look_ahead
    blocked: list[Sequence] = []
    num_held = 0
    for seq in self.waiting if order is None else order:
      if self.tokens_left <= 0:
        break
      if seq.last_step == self._step_id:
        continue
      if self.advance(seq, max_tokens):
        for passed in blocked:
          passed.num_passes += 1
        if any(passed.num_passes >= look_ahead for passed in blocked):
          break
      elif self._is_long(seq) and self._long_tokens_left <= 0:
        num_held += 1
        if num_held >= _MOST_HELD:
          break
      else:
        blocked.append(seq)
        if seq.num_passes >= look_ahead or len(blocked) > look_ahead:
          break

  def advance(self, seq: Sequence, max_tokens: int | None = None, *, preempt: bool = False) -> int:
    """Gives `seq` up to `max_tokens` of this step and returns how many it got.

    Admits a waiting sequence if a row and the pages that `reservation` asks for are free. `preempt`
    lets a running one take pages from newer ones.
    """
    if seq.last_step == self._step_id or seq.request_id in self._preempted:
      return 0
    scheduler, config = self._scheduler, self._scheduler.config
    here = scheduler.waiting if seq.row is None else scheduler.running
    if here.get(seq.request_id) is not seq:
      return 0  # it has left since the policy saw it
    most = self._most_decodes
    if most is not None and seq.is_decoding and (_is_in_flight(seq) or self.num_decodes >= most):
      return 0
    if seq.row is None and not scheduler.pages.num_free_rows:
      return 0
    keys, num_cached = ((), 0) if seq.row is not None else self._find_computed(seq)
    wanted = seq.num_unscheduled_tokens - num_cached
    num_tokens = min(wanted, self._tokens_left)
    if max_tokens is not None:
      num_tokens = min(num_tokens, max_tokens)
    is_long = self._is_long(seq)
    if is_long:
      num_tokens = min(num_tokens, self._long_tokens_left)
    if num_tokens <= 0 or (num_tokens < wanted and not config.chunk_prompts):
      return 0
    if seq.row is None:
      limit = config.max_partial_prefills
      if num_tokens < wanted and limit is not None and len(self._scheduler.prefilling) >= limit:
        return 0
      if not self._admit(seq, num_tokens, keys, num_cached):
        return 0
    elif not self._grow(seq, seq.num_scheduled_tokens + num_tokens, preempt):
      return 0
    self._write(seq, num_tokens, num_cached)
    if is_long:
      self._long_tokens_left -= num_tokens
    return num_tokens

  def build(self) -> StepPlan | None:
    """Ends the step: admitted sequences leave the queue, preempted ones return to its front."""
    s = self._scheduler
    for seq in self._admitted:
      del s.waiting[seq.request_id]
    for seq in self._preempted.values():  # newest first, so the oldest ends up in front
      s.waiting[seq.request_id] = seq
      s.waiting.move_to_end(seq.request_id, last=False)
      s.unreported_preemptions.append(seq.request_id)
    if self.is_empty:
      return None
    preempted, s.unreported_preemptions = tuple(s.unreported_preemptions), []
    (swap_outs, swap_drops), s.unreported_swaps = s.unreported_swaps, ({}, [])
    decodes, page_updates = _NO_DECODES, _NO_UPDATES
    if self._decodes[0]:
      request_ids, generations, rows, positions = map(tuple, self._decodes)
      decodes = DecodeSlices(
        request_ids=request_ids, generations=generations, rows=rows, positions=positions
      )
    if self._page_updates[0]:
      rows, indices, page_ids = map(tuple, self._page_updates)
      page_updates = PageUpdates(rows=rows, indices=indices, page_ids=page_ids)
    return StepPlan(
      step_id=self._step_id,
      prefills=tuple(self._prefills),
      decodes=decodes,
      page_updates=page_updates,
      preempted=preempted,
      swap_outs=tuple(swap_outs.values()),
      swap_ins=tuple(self._swap_ins),
      swap_drops=tuple(swap_drops),
    )

  # Inside

  def _micro_batch(self) -> list[Sequence]:
    """The decodes that may be in this step: all, or those in no other stage."""
    if self._most_decodes is None:
      return self.decoding
    return [seq for seq in self.decoding if not _is_in_flight(seq)]

  def _is_long(self, seq: Sequence) -> bool:
    longest = self._scheduler.config.long_prompt_tokens
    return longest is not None and seq.request.num_prompt_tokens > longest and not seq.is_decoding

  def _find_computed(self, seq: Sequence) -> tuple[tuple[bytes, ...], int]:
    """What a sequence without a row need not compute: pages in the cache, or else swapped out."""
    keys = self._scheduler.cached_keys(seq)
    num_cached = len(keys) * self._scheduler.pages.config.page_size
    return (
      (keys, num_cached) if num_cached >= seq.num_swapped_tokens else ((), seq.num_swapped_tokens)
    )

  def _admit(
    self, seq: Sequence, num_tokens: int, keys: tuple[bytes, ...], num_cached: int
  ) -> bool:
    s = self._scheduler
    reserved = s.tokens_to_reserve(seq, num_cached + num_tokens)
    spare = (s.watermark_pages if s.running else 0) + sum(s.pages_owed.values())
    if not s.pages.has_room(None, reserved, spare=spare, keys=keys):
      self.has_found_no_room = True
      return False
    seq.row = s.pages.take_row(keys)
    s.pages.grow(seq.row, reserved)
    self._record(seq.row, 0, s.pages.table(seq.row))
    if seq.num_swapped_tokens:
      self._swap_in(seq, num_cached if not keys else 0)
    s.prefill_tokens_left -= num_cached
    seq.num_computed_tokens = seq.num_scheduled_tokens = num_cached
    s.note_published(seq, len(keys))
    seq.enter(State.RUNNING)
    s.update_room(seq)
    s.running[seq.request_id] = s.prefilling[seq.request_id] = seq
    self._admitted.append(seq)
    return True

  def _swap_in(self, seq: Sequence, num_tokens: int) -> None:
    """Brings back so many tokens of an admitted sequence; 0 where its pages were in the cache."""
    s = self._scheduler
    if num_tokens:
      pages = s.pages.table(seq.row)[: -(-num_tokens // s.pages.config.page_size)]
      self._swap_ins.append(Swap(request_id=seq.request_id, num_tokens=num_tokens, page_ids=pages))
      s.num_swapped_tokens -= num_tokens
      seq.num_swapped_tokens = 0
    else:
      s.forget_swapped(seq)

  def _make_room(self, seq: Sequence, preempt: bool) -> bool:
    """Whether a decoding sequence can get its next token."""
    position = seq.num_scheduled_tokens
    if seq.row is None or position >= seq.max_cached_tokens or seq.last_step == self._step_id:
      return False
    return self._grow(seq, position + 1, preempt)

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
      s.update_room(seq)
      self._record(seq.row, s.pages.num_held(seq.row) - len(new), new)
    return True

  def _preempt_newest(self, keep: Sequence) -> bool:
    s = self._scheduler
    for victim in reversed(s.running.values()):
      if victim is keep:
        return False  # never an older one: two could take each other's pages for ever
      is_protected = victim.num_preemptions >= s.config.max_preemptions
      is_done = (
        victim.num_scheduled_tokens >= victim.max_cached_tokens
      )  # its pages come by themselves
      if victim.last_step != self._step_id and not is_protected and not is_done:
        s.preempt(victim)
        self._preempted[victim.request_id] = victim
        return True
    return False

  def _record(self, row: int, first_index: int, page_ids: Seq[int]) -> None:
    rows, indices, pages = self._page_updates
    rows += [row] * len(page_ids)
    indices += range(first_index, first_index + len(page_ids))
    pages += page_ids

  def _write(self, seq: Sequence, num_tokens: int, num_cached: int) -> None:
    start, end = seq.num_scheduled_tokens, seq.num_scheduled_tokens + num_tokens
    emits_token = end == seq.num_tokens
    if seq.is_decoding:
      request_ids, generations, rows, positions = self._decodes
      request_ids.append(seq.request_id)
      generations.append(seq.generation)
      rows.append(seq.row)
      positions.append(start)
    else:
      s = self._scheduler
      sampling = seq.request.sampling
      looks_back = num_cached > 0 and sampling.repetition_penalty != 1
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
          sampling=sampling,
          cached_ids=seq.known_ids(0, num_cached) if looks_back else None,
        )
      )
      if end >= seq.num_prefill_tokens:
        s.decoding[seq.request_id] = s.prefilling.pop(seq.request_id)
    seq.num_scheduled_tokens = end
    seq.last_step = self._step_id
    self._tokens_left -= num_tokens
