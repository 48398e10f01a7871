"""The one loop. The engine and the simulator differ only in the executors and the clock."""

from __future__ import annotations

import bisect
import collections
import dataclasses
import math
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq

from pdjax.core.clock import Clock, Ticket
from pdjax.core.costs import count_plan
from pdjax.core.events import (
  Arrived,
  Copied,
  EventLog,
  Failed,
  Fetched,
  Finished,
  PoolChanged,
  Preempted,
  Step,
  Stroke,
)
from pdjax.core.plan import StepPlan
from pdjax.core.request import Request
from pdjax.core.sequence import Sequence, State
from pdjax.scheduling.planner import Planner, Planning, PoolState
from pdjax.scheduling.routing import Rejected
from pdjax.scheduling.scheduler import FinishReason, Outcome, length_or_stop
from pdjax.serving.cluster import Cluster, Part, Pool, Prefetch, StrokeInFlight, Transfer
from pdjax.serving.executor import Handle, PoolLost, StrokeTicket, export_bytes
from pdjax.serving.inbox import ChangeRole, Inbox

GRACE_S = 10.0
_MOST_STEPS = 256  # in a stroke: most are cut short, and every end is computed beforehand
_LOOK_S = 0.01  # from one look at a pool that is down to the next


@dataclasses.dataclass(slots=True)
class Turn:
  """What happened in one turn of the loop.

  `num_tokens` were computed. `tokens` has them, and `sequences` those that got one, by request id:
  their output so far, and of those that ended the output that is kept. Tokens of a simulator that
  `repeats` its steps say nothing and are only counted.
  """

  now_s: float
  num_tokens: int = 0
  tokens: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # request id, token id
  sequences: dict[int, Sequence] = dataclasses.field(default_factory=dict)
  ended: list[tuple[int, str]] = dataclasses.field(default_factory=list)  # request id, reason
  failed: list[tuple[int, str]] = dataclasses.field(default_factory=list)


def serve(
  cluster: Cluster,
  inbox: Inbox,
  clock: Clock,
  log: EventLog,
  *,
  finish_reason: FinishReason = length_or_stop,
  steps_in_flight: int = 1,
  grace_s: float = GRACE_S,
  planner: Planner | None = None,
) -> Iterator[Turn]:
  """Serves until the inbox is closed and every request has ended; yields turn by turn.

  Appends to `log`. Each turn drains the inbox, starts hand-offs, plans and submits steps, waits for
  the first thing to end, and commits it. With an open inbox and nothing to do, turns are empty.

  `steps_in_flight` 2 plans and starts a pool's next step while one runs, so that the device need
  not wait for the host: just before that one will end, so that whoever has arrived by then is in
  it; at once where the scheduler knows no step times. Prefill pools have one, and pipelines as many
  as they have stages.

  `planner` is asked before each turn's work whether a pool should take another role.

  A pool that is lost (`PoolLost`) is left out until it is back; what it had is computed again by
  others, tokens that were emitted are kept. Requests that need a pool of which none is left fail.

  A step or a copy that never ends holds up its requests until they time out or are cancelled
  (`Request.timeout_s`), and its pages for ever. When all requests have ended, what still runs is
  waited for `grace_s` at most, so that its pages come back, and then left.

  An executor that knows its step times (`repeats`, a simulator) has one step in flight, or as many
  decode steps as follow one another without a change, in one stroke: such turns are further apart.

  Raises:
    RuntimeError: work is left but no pool can move (a fault in a policy; never silent).
  """
  return _Loop(cluster, inbox, clock, log, finish_reason, steps_in_flight, grace_s, planner).turns()


class _Loop:
  def __init__(self, cluster, inbox, clock, log, finish_reason, steps_in_flight, grace_s, planner):
    self.cluster: Cluster = cluster
    self.inbox: Inbox = inbox
    self.clock: Clock = clock
    self.log: EventLog = log
    self.finish_reason: FinishReason = finish_reason
    self.steps_in_flight: int = steps_in_flight
    self.grace_s: float = grace_s
    self.planner: Planner | None = planner
    self.prefilled: list[Sequence] = []  # just now; whether they go on is yet to be asked
    inbox.wake = clock.wake

  def turns(self) -> Iterator[Turn]:
    leave_s = None
    while True:
      turn = Turn(self.clock.now_s())
      self._look_at_pools(turn)
      self._drain(turn)
      self._change_roles(turn)
      has_moved = True
      while has_moved:  # what a decode pool gave up may find a place, and leaves one, at once
        if self.cluster.outbox or self.cluster.transfers or self.cluster.prefetches:
          self._settle(turn)
          self._hand_off(turn)
        self._cut(turn)
        plan_at_s, has_moved = self._submit(turn)
      tickets = self._tickets()
      is_open = self.inbox.is_open  # first: what came before it was closed is in it by then
      until_s = self.inbox.next_s()
      if until_s is None and self.inbox.num_left:
        if not turn.failed:  # else there may be room now
          self._raise_if_stuck(tickets)
      elif until_s is None and not is_open:  # what runs still, nobody waits for
        leave_s = turn.now_s + self.grace_s if leave_s is None else leave_s
        self._close_transfers(turn)  # of those that this turn's steps have failed
        if not tickets or turn.now_s >= leave_s:
          if turn.ended or turn.failed:
            yield turn
          return
        until_s = leave_s
      look_s = None
      for pool in self.cluster.pools:
        if not pool.is_up and not pool.is_gone and self.inbox.num_left:
          look_s = turn.now_s + _LOOK_S
      for time_s in (plan_at_s, look_s):
        if time_s is not None and (until_s is None or time_s < until_s):
          until_s = time_s
      self.clock.wait(tickets, until_s)
      turn.now_s = self.clock.now_s()
      self._commit(turn)
      yield turn

  def _tickets(self) -> list[Ticket]:
    tickets = [pool.in_flight[0][1] for pool in self.cluster.pools if pool.in_flight]
    for transfer in self.cluster.transfers:
      tickets += [part.ticket for part in transfer.parts]
    for prefetch in self.cluster.prefetches:
      tickets.append(prefetch.ticket)
    return tickets

  # Steps in one stroke, in simulation ---------------------------------------------------------

  def _settle(self, turn: Turn) -> None:
    """Lets schedulers know of steps that have ended, as somebody is about to look at them."""
    for pool in self.cluster.pools:
      if (stroke := pool.stroke) is not None:
        num_ended = bisect.bisect_right(stroke.ticket.ends_s, turn.now_s)
        if num_ended > stroke.num_done:
          pool.scheduler.advance_stroke(stroke.plan, num_ended - stroke.num_done)
          stroke.num_done = num_ended

  def _cut(self, turn: Turn) -> None:
    """Ends strokes after the step under way where something else may be planned now."""
    for pool in self.cluster.pools:
      stroke = pool.stroke
      if stroke is not None and stroke.num_changes != pool.scheduler.num_changes:
        stroke.ticket.cut(turn.now_s)

  def _num_steps(self, pool: Pool, plan: StepPlan) -> int:
    """How many times a plan may run in a row."""
    if (
      not pool.executor.repeats
      or pool.role == "prefill"
      or self.planner is not None  # it looks after every step
      or self.finish_reason is not length_or_stop
    ):
      return 1
    return min(pool.scheduler.steady_steps(plan), _MOST_STEPS)

  # Requests in and out -------------------------------------------------------------------------

  def _drain(self, turn: Turn) -> None:
    messages = self.inbox.due(turn.now_s)
    if messages:
      self._settle(turn)
    for message in messages:
      if isinstance(message, Request):
        self._arrive(message, turn)
      elif isinstance(message, ChangeRole):
        self._begin_change(message, turn)
      else:
        self._end(message.request_id, message.reason, turn)

  def _arrive(self, request: Request, turn: Turn) -> None:
    seq, pool = Sequence(request), None
    reason = self.cluster.refusal(request)
    if reason is not None:
      reason = f"refused: {reason}"
    else:
      chosen = self.cluster.route(seq, turn.now_s)
      if isinstance(chosen, Rejected):
        reason = f"rejected: {chosen.reason}"
      else:
        pool, source = chosen
    self.log.append(
      Arrived(
        time_s=request.arrival_s,
        request_id=request.request_id,
        pool=pool and pool.name,
        num_prompt_tokens=request.num_prompt_tokens,
        max_tokens=request.sampling.max_tokens,
        seen_s=max(request.arrival_s, turn.now_s),
      )
    )
    if pool is None:
      self._fail(request.request_id, None, reason, turn)
    elif source is None or not self._prefetch(seq, source, pool, turn):
      pool.scheduler.add(seq)

  def _end(self, request_id: int, reason: str, turn: Turn) -> None:
    """Ends a request wherever it is. Nothing happens to one that has ended."""
    copied = [(t.seq, t.target) for t in self.cluster.transfers if not t.is_ahead]
    copied += [(seq, prefetch.target) for prefetch in self.cluster.prefetches
               for seq in prefetch.seqs]  # fmt: skip
    for seq, target in copied:
      if seq.request_id == request_id:
        if seq.state is not State.ENDED:  # its pages are busy: freed when the copy ends
          seq.enter(State.ENDED)
          self._fail(request_id, target, reason, turn)
        return
    for pool in self.cluster.pools:
      if pool.scheduler.drop(request_id) is not None:
        outbox = self.cluster.outbox
        for waiting in [item for item in outbox if item[1].request_id == request_id]:
          outbox.remove(waiting)
        self._fail(request_id, pool, reason, turn)
        return

  def _fail(self, request_id: int, pool: Pool | None, reason: str, turn: Turn) -> None:
    self.inbox.ended(request_id)
    self.log.append(
      Failed(time_s=turn.now_s, request_id=request_id, pool=pool and pool.name, reason=reason)
    )
    turn.failed.append((request_id, reason))

  # Work out to the devices ---------------------------------------------------------------------

  def _prefetch(self, seq: Sequence, source: Pool, target: Pool, turn: Turn) -> bool:
    """Starts to copy what `source` has of a new sequence; it is queued when that has ended.

    One copy serves all that wait for the same pages in the same pool.
    """
    keys, own = (p.scheduler.cached_keys(seq) for p in (source, target))
    for prefetch in self.cluster.prefetches:
      if prefetch.target is target and prefetch.keys[: len(keys)] == keys:
        seq.enter(State.FETCHING)
        prefetch.seqs.append(seq)
        return True
    rows = self.cluster.reserve_prefix(source, keys, target, own)
    if rows is None:
      return False
    source_row, target_row = rows
    page_size = source.scheduler.pages.config.page_size
    handle = Handle(
      request_id=seq.request_id,
      start=len(own) * page_size,
      num_tokens=len(keys) * page_size,
      num_prompt_tokens=seq.request.num_prompt_tokens,
      first_token_id=0,  # nobody decodes in that row
      sampling=seq.request.sampling,
    )
    source_pages = source.scheduler.pages.table(source_row)[len(own) :]
    handle, ticket = self._copy(handle, source, source_pages, target, target_row, turn)
    seq.enter(State.FETCHING)
    self.cluster.prefetches.append(
      Prefetch([seq], source, source_row, target, target_row, keys, handle, ticket, turn.now_s)
    )
    return True

  def _copy(
    self, handle: Handle, source: Pool, pages: tuple[int, ...], target: Pool, row: int, turn: Turn
  ) -> tuple[Handle, Ticket]:
    """Starts a copy of pages to a reserved row; one that cannot start is a ticket that fails."""
    try:
      handle = source.executor.export(handle, page_ids=pages, now_s=turn.now_s)
      ticket = target.executor.import_(
        handle, row=row, page_ids=target.scheduler.pages.table(row), now_s=turn.now_s
      )
    except Exception as error:
      ticket = _NotStarted(error, turn.now_s)
    return handle, ticket

  def _hand_off(self, turn: Turn) -> None:
    self._reject_prefilled(turn)
    self._close_transfers(turn)
    for transfer in self.cluster.transfers:
      self._send(transfer, turn)
    outbox = self.cluster.outbox
    while outbox and not self.cluster.decode_later:
      source, seq = outbox.popleft()
      source.scheduler.drop(seq.request_id)
      self._fail(seq.request_id, source, "no decode pool is left", turn)
    while outbox:
      source, seq = outbox[0]
      reserved = self.cluster.reserve(seq)
      if reserved is None:
        return  # in order: the first in the outbox is the first to go
      outbox.popleft()
      seq.enter(State.MOVING)
      self._open_transfer(seq, source, reserved, turn)

  def _reject_prefilled(self, turn: Turn) -> None:
    """Ends those that have been prefilled in vain."""
    prefilled, self.prefilled = self.prefilled, []
    for seq in prefilled:
      rejected = self.cluster.rejection(seq, turn.now_s)
      if rejected is not None:
        self._end(seq.request_id, f"rejected: {rejected.reason}", turn)

  def _open_transfer(
    self, seq: Sequence, source: Pool, reserved: tuple[Pool, int, int], turn: Turn
  ) -> Transfer:
    target, row, num_cached = reserved
    transfer = Transfer(
      seq, source, target, row, num_cached, seq.state is State.RUNNING, seq.generation
    )
    self.cluster.transfers.append(transfer)
    self._send(transfer, turn)
    return transfer

  def _send(self, transfer: Transfer, turn: Turn) -> None:
    """Sends what was computed since the last part, whole pages or the end, if there is room.

    Never what a step in flight is computing yet, but for layer groups: see `_groups_to_begin`.
    """
    seq, source = transfer.seq, transfer.source
    page_size = source.scheduler.pages.config.page_size
    while not (transfer.is_whole or transfer.is_abandoned):
      start, end, layers = transfer.num_sent_tokens, seq.num_computed_tokens, None
      if transfer.is_ahead:
        end = end // page_size * page_size
      if transfer.due:
        end, layers = transfer.due[0], source.executor.layer_groups[-1]
      elif transfer.begun:
        return  # the rest of it comes when its step has ended
      is_last = not transfer.is_ahead and end == seq.num_computed_tokens
      if end <= start and not is_last:
        return
      handle = self._handle(transfer, start, end, layers, is_last=is_last)
      transfer.is_held = not self.cluster.may_send(
        transfer, [export_bytes(source.executor, handle)]
      )
      if transfer.is_held:
        return
      self._send_part(transfer, handle, turn)
      if layers is not None:
        transfer.due.popleft()
      transfer.num_sent_tokens = end
      transfer.num_tokens += end - start
      transfer.is_whole = is_last

  def _handle(
    self,
    transfer: Transfer,
    start: int,
    end: int,
    layers: tuple[int, int] | None,
    *,
    is_last: bool,
  ) -> Handle:
    seq = transfer.seq
    sampling = seq.request.sampling
    looks_back = is_last and sampling.repetition_penalty != 1
    return Handle(
      request_id=seq.request_id,
      start=start,
      num_tokens=end,
      num_prompt_tokens=seq.request.num_prompt_tokens,
      first_token_id=seq.output_ids[-1] if is_last else None,
      sampling=sampling,
      token_ids=seq.known_ids(0, end) if looks_back else None,
      layers=layers,
    )

  def _send_part(self, transfer: Transfer, handle: Handle, turn: Turn) -> None:
    source, target = transfer.source, transfer.target
    pages = _pages_of(source, transfer.seq, handle)
    handle, ticket = self._copy(handle, source, pages, target, transfer.target_row, turn)
    transfer.parts.append(Part(handle, ticket, turn.now_s))
    transfer.num_bytes += handle.num_bytes
    transfer.num_bytes_ahead += handle.num_bytes * transfer.is_ahead
    if transfer.first_start_s is None:
      transfer.first_start_s = turn.now_s
    transfer.last_start_s = turn.now_s

  def _open_streams(self, pool: Pool, plan: StepPlan, turn: Turn) -> list[Transfer]:
    """The streams of the prompts in a step that is about to start, new ones too.

    New ones never before those whose prompt is prefilled. What was computed is sent now, so that
    it is read before the step begins.
    """
    if pool.role != "prefill" or not self.cluster.hand_off.streams:
      return []
    streams = []
    swapped_in = {swap.request_id for swap in plan.swap_ins}  # by this step: not there yet
    for part in plan.prefills:
      seq = pool.scheduler.running[part.request_id]
      stream = self.cluster.stream_of(seq)
      may_open = not self.cluster.outbox and part.request_id not in swapped_in
      if stream is None and may_open and self.cluster.wants_stream(pool, seq):
        self._settle(turn)
        reserved = self.cluster.reserve(seq)
        self._cut(turn)
        if reserved is not None:
          stream = self._open_transfer(seq, pool, reserved, turn)
      if stream is not None:
        streams.append(stream)
    return streams

  def _groups_to_begin(
    self, pool: Pool, plan: StepPlan, streams: list[Transfer]
  ) -> list[tuple[Transfer, Handle]]:
    """What can be sent of a step before it has ended: all layer groups but the last."""
    groups = pool.executor.layer_groups[:-1]
    begun = []
    for stream in streams:
      start, end = stream.num_begun_tokens, self._streamed_end(pool, plan, stream)
      if end <= start:
        continue
      handles = [self._handle(stream, start, end, layers, is_last=False) for layers in groups]
      coming = [handle for other, handle in begun if other.target is stream.target] + handles
      if self.cluster.may_send(stream, [export_bytes(pool.executor, handle) for handle in coming]):
        begun += [(stream, handle) for handle in handles]
    return begun

  def _to_send_then(
    self, pool: Pool, plan: StepPlan, streams: list[Transfer], begun: list[tuple[Transfer, Handle]]
  ) -> list[tuple[Transfer, Handle]]:
    """What `_send` will send when a step has ended, if it may: read behind it, not a turn later.

    Not of pipelines, which are given more steps before that.
    """
    if pool.executor.num_stages > 1:
      return []
    of_begun = {stream.seq.request_id for stream, _ in begun}
    coming = []
    for stream in streams:
      layers = pool.executor.layer_groups[-1] if stream.seq.request_id in of_begun else None
      start, end = stream.num_sent_tokens, self._streamed_end(pool, plan, stream)
      if end > start:
        coming.append((stream, self._handle(stream, start, end, layers, is_last=False)))
    return coming

  def _streamed_end(self, pool: Pool, plan: StepPlan, stream: Transfer) -> int:
    """How many positions a stream may have sent behind a step: whole pages, or all at the end."""
    (part,) = (s for s in plan.prefills if s.request_id == stream.seq.request_id)
    end, page_size = part.start + part.num_tokens, pool.scheduler.pages.config.page_size
    return end if part.emits_token else end // page_size * page_size

  def _submit(self, turn: Turn) -> tuple[float | None, bool]:
    """Starts steps.

    Returns when the first pool wants to plan another behind one in flight, and whether sequences
    were moved to other pools.
    """
    plan_at_s, has_moved = None, False
    for pool in self.cluster.pools:
      # A prefill pool's pages are read behind whatever it has been given to do, so a second step
      # there would hold up every hand-off for its whole length. A pipeline is filled at once.
      # Where steps take what is said beforehand, two make no difference.
      num_stages = pool.executor.num_stages
      one = pool.role == "prefill" or pool.executor.repeats
      most = max(num_stages, 1 if one else self.steps_in_flight)
      if len(pool.in_flight) >= most:
        continue
      while pool.is_up and len(pool.in_flight) < most and not _waits_to_fail(pool):
        now_s = self.clock.now_s()
        start_s = max(now_s, _predicted_end_s(pool)) if num_stages == 1 else now_s
        at_s = start_s - 3 * pool.host_s  # a few times the host's share before
        if pool.in_flight and now_s < at_s:
          plan_at_s = at_s if plan_at_s is None else min(at_s, plan_at_s)
          break
        plan = pool.scheduler.next_step(start_s)
        if pool.role == "decode":
          preempted = [s for s in pool.scheduler.waiting.values() if s.state is State.PREEMPTED]
          self._recompute(pool, pool.scheduler.withdraw(preempted), turn)
          has_moved |= bool(preempted)
        if plan is None:
          break
        if pool.role != "decode":
          self._log_preempted(pool, plan.preempted, now_s)
        num_steps = self._num_steps(pool, plan)
        if num_steps > 1:
          ticket = pool.executor.submit_stroke(plan, now_s, num_steps, self.inbox.next_s())
          pool.in_flight.append((plan, ticket, now_s))
          pool.stroke = StrokeInFlight(plan, ticket, pool.scheduler.num_changes)
          break
        streams = self._open_streams(pool, plan, turn)
        begun = self._groups_to_begin(pool, plan, streams)
        coming = begun + self._to_send_then(pool, plan, streams, begun)
        exports = [(handle, _pages_of(pool, stream.seq, handle)) for stream, handle in coming]
        try:
          ticket = pool.executor.submit(plan, now_s, exports)
        except PoolLost as error:
          self._lose_pool(pool, str(error), turn)
          break
        except Exception as error:
          if pool.executor.recover():
            self._lose_cache(pool, turn, plan, error)
            continue
          ticket, begun = _NotStarted(error, now_s), []
        pool.in_flight.append((plan, ticket, now_s))
        for stream, handle in begun:
          self._send_part(stream, handle, turn)
          if not stream.begun or stream.begun[-1][0] != plan.step_id:
            stream.begun.append((plan.step_id, handle.num_tokens))
        pool.host_s += (self.clock.now_s() - now_s - pool.host_s) / 8
        predict_step_s = pool.scheduler.predict_step_s
        if most > 1 and predict_step_s is not None:
          pool.predicted_s = predict_step_s(count_plan(plan))
    return plan_at_s, has_moved

  # Results back --------------------------------------------------------------------------------

  def _commit(self, turn: Turn) -> None:
    for pool in self.cluster.pools:
      if pool.stroke is not None and _ends_at(pool.stroke.ticket, turn.now_s):
        pool.stroke.ticket.cut(turn.now_s)  # what else is due now comes after this step
      while pool.in_flight and _has_ended(pool.in_flight[0][1], turn.now_s):
        if pool.stroke is None:
          self._commit_step(pool, turn)
        else:
          self._commit_stroke(pool, turn)
    for transfer in self.cluster.transfers:
      for part in [p for p in transfer.parts if _has_ended(p.ticket, turn.now_s)]:
        self._commit_part(transfer, part, turn)
    if self.cluster.transfers:
      self._close_transfers(turn)
    for prefetch in [p for p in self.cluster.prefetches if _has_ended(p.ticket, turn.now_s)]:
      self._commit_prefetch(prefetch, turn)

  def _commit_step(self, pool: Pool, turn: Turn) -> None:
    plan, ticket, submit_s = pool.in_flight.popleft()
    try:
      result = ticket.result()
    except PoolLost as error:
      self._log_step(pool, plan, ticket, submit_s, Outcome(), turn)
      self._lose_pool(pool, str(error), turn)
      return
    except Exception as error:  # the device's failure: its requests fail, the service goes on
      self._log_step(pool, plan, ticket, submit_s, Outcome(), turn)
      if pool.executor.recover():
        self._lose_cache(pool, turn, plan, error)
      else:
        self._fail_all(pool, pool.scheduler.abort(plan, _step_failed(error)), turn)
      return
    outcome = pool.scheduler.commit(plan, result, self.finish_reason)
    step_s = self._log_step(pool, plan, ticket, submit_s, outcome, turn)
    observe = getattr(pool.scheduler.predict_step_s, "observe", None)  # a fitted one's
    if observe is not None:
      observe(count_plan(plan), step_s)
    turn.num_tokens += len(outcome.emitted)
    if not pool.executor.repeats:
      turn.tokens += zip(outcome.emitted_ids, outcome.token_ids)
      turn.sequences |= {seq.request_id: seq for seq, _ in outcome.emitted}
    self._fail_all(pool, outcome, turn)
    self._finish_all(pool, outcome, turn)
    for transfer in self.cluster.transfers:
      if transfer.source is pool and transfer.begun and transfer.begun[0][0] == plan.step_id:
        transfer.due.append(transfer.begun.popleft()[1])
    if pool.role == "prefill":
      for seq, _ in outcome.emitted:
        if seq.state is not State.ENDED:
          self._leave(pool, seq)
          if len(seq.output_ids) == 1:  # else it was let on before, and is only computed again
            self.prefilled.append(seq)

  def _commit_stroke(self, pool: Pool, turn: Turn) -> None:
    plan, ticket, submit_s = pool.in_flight.popleft()
    num_done, pool.stroke = pool.stroke.num_done, None
    start_s, ends_s = max(submit_s, pool.last_end_s), ticket.ends_s
    outcome, gone = pool.scheduler.commit_stroke(plan, len(ends_s), num_done)
    pool.last_end_s = ends_s[-1]
    ids = plan.decodes.request_ids
    stroke = Stroke(
      pool=pool.name,
      step_id=plan.step_id,
      start_s=start_s,
      ends_s=tuple(ends_s),
      decode_ids=ids,
      decode_positions=plan.decodes.positions,
    )
    if not gone:
      self.log.append(stroke)
    else:
      *before, last = stroke.steps()
      emitted = tuple(i for i in ids if i not in gone)
      for step in before:
        self.log.append(step)
      self.log.append(dataclasses.replace(last, emitted_ids=emitted, token_ids=(0,) * len(emitted)))
    turn.num_tokens += len(ids) * len(ends_s) - len(gone)
    self._finish_all(pool, outcome, turn)

  def _finish_all(self, pool: Pool, outcome: Outcome, turn: Turn) -> None:
    for seq, reason in outcome.finished:
      self.inbox.ended(seq.request_id)
      turn.ended.append((seq.request_id, reason))
      self.log.append(
        Finished(time_s=pool.last_end_s, request_id=seq.request_id, pool=pool.name, reason=reason)
      )

  def _leave(self, pool: Pool, seq: Sequence) -> None:
    """Takes a prefilled sequence from its pool: to its stream, or to those that wait for one."""
    stream = self.cluster.stream_of(seq)
    pool.scheduler.detach(seq)
    if stream is None:
      self.cluster.outbox.append((pool, seq))
    else:
      seq.enter(State.MOVING)
      stream.is_ahead = False

  def _fail_all(self, pool: Pool, outcome: Outcome, turn: Turn) -> None:
    for seq, reason in outcome.failed:
      self._fail(seq.request_id, pool, reason, turn)

  def _log_step(
    self, pool: Pool, plan: StepPlan, ticket: Ticket, submit_s: float, outcome: Outcome, turn: Turn
  ) -> float:
    """Returns how long the step took."""
    start_s = max(submit_s, pool.last_end_s)
    pool.last_end_s = min(max(start_s, self.clock.end_s(ticket)), turn.now_s)
    self.log.append(_step_event(pool, plan, outcome, start_s, pool.last_end_s))
    return pool.last_end_s - start_s

  def _copy_error(self, ticket: Ticket, source: Pool, target: Pool, turn: Turn) -> Exception | None:
    """Why a copy that has ended failed: it is never used then, and may have cost a cache."""
    try:
      ticket.result()
    except PoolLost as error:
      self._look_at_pools(turn)
      return error
    except Exception as error:
      for pool in (source, target):
        if pool.executor.recover():
          self._lose_cache(pool, turn)
      return error
    return None

  def _commit_part(self, transfer: Transfer, part: Part, turn: Turn) -> None:
    transfer.parts.remove(part)
    was_abandoned, source = transfer.is_abandoned, transfer.source
    error = self._copy_error(part.ticket, source, transfer.target, turn)
    source.executor.drop(part.handle)
    if error is None:
      if part.handle.layers in (None, source.executor.layer_groups[-1]):  # others await their step
        num_tokens = part.handle.num_bytes / source.executor.bytes_per_token
        self.cluster.note_copy(num_tokens, turn.now_s - part.start_s)
    elif not was_abandoned:  # else it may have failed for that: whoever broke a cache pays for it
      transfer.error = error

  def _close_transfers(self, turn: Turn) -> None:
    for transfer in [t for t in self.cluster.transfers if t.has_ended]:
      self._close_transfer(transfer, turn)

  def _close_transfer(self, transfer: Transfer, turn: Turn) -> None:
    seq, source, target = transfer.seq, transfer.source, transfer.target
    is_moved, error = not transfer.is_abandoned, transfer.error
    self.cluster.transfers.remove(transfer)
    if not is_moved:
      target.scheduler.give_back(transfer.target_row)
    if transfer.is_ahead:
      return  # its source pool has the sequence, or has lost or ended it
    if is_moved or seq.state is State.ENDED:
      source.scheduler.release(seq)  # the source pages, exactly once
    elif transfer.is_source_lost:
      source.scheduler.unseat(seq)
      self._recompute(source, [seq], turn)
    elif error is None or isinstance(error, PoolLost):  # only the copy is lost: again
      seq.enter(State.READY)
      self.cluster.outbox.appendleft((source, seq))
    else:
      source.scheduler.drop(seq.request_id)
      self._fail(seq.request_id, target, f"hand-off failed: {error!r}", turn)
    if is_moved:
      self.log.append(
        Copied(
          request_id=seq.request_id,
          source=source.name,
          target=target.name,
          start_s=transfer.last_start_s,
          end_s=turn.now_s,
          num_tokens=transfer.num_tokens,
          num_bytes=transfer.num_bytes,
          first_start_s=transfer.first_start_s,
          num_bytes_ahead=transfer.num_bytes_ahead,
        )
      )
      target.scheduler.adopt(seq, transfer.target_row)

  def _commit_prefetch(self, prefetch: Prefetch, turn: Turn) -> None:
    """Queues the sequences, with their prefix or, if the copy failed, without."""
    source, target = prefetch.source, prefetch.target
    error = self._copy_error(prefetch.ticket, source, target, turn)
    self.cluster.prefetches.remove(prefetch)
    source.executor.drop(prefetch.handle)
    num_tokens = prefetch.handle.num_tokens - prefetch.handle.start
    if error is None and not prefetch.is_target_lost:
      target.scheduler.publish(prefetch.target_row, prefetch.keys)
      self.cluster.note_copy(num_tokens, turn.now_s - prefetch.start_s)
      self.log.append(
        Fetched(
          time_s=turn.now_s,
          request_id=prefetch.handle.request_id,
          pool=target.name,
          source=source.name,
          start_s=prefetch.start_s,
          num_tokens=num_tokens,
          num_bytes=prefetch.handle.num_bytes,
        )
      )
    source.scheduler.give_back(prefetch.source_row)
    target.scheduler.give_back(prefetch.target_row)
    for seq in prefetch.seqs:
      if seq.state is not State.ENDED:
        seq.enter(State.QUEUED)
        self._queue_again(target, seq, turn)

  # A cache is lost -----------------------------------------------------------------------------

  def _lose_cache(
    self, pool: Pool, turn: Turn, plan: StepPlan | None = None, error: Exception | None = None
  ) -> None:
    """Computes again what a pool held; fails the requests of the step `plan` that broke it."""
    outcome = pool.scheduler.lose_cache(plan, _step_failed(error))
    while pool.in_flight:
      self._log_step(pool, *pool.in_flight.popleft(), Outcome(), turn)
    for transfer in self.cluster.transfers:  # what was gathered may still arrive
      transfer.is_source_lost |= transfer.source is pool
      transfer.is_target_lost |= transfer.target is pool
    for prefetch in self.cluster.prefetches:
      prefetch.is_target_lost |= prefetch.target is pool
    ready = [item for item in self.cluster.outbox if item[0] is not pool]
    self.cluster.outbox = collections.deque(ready)
    self._fail_all(pool, outcome, turn)
    self._recompute(pool, outcome.preempted, turn)

  def _recompute(self, pool: Pool, sequences: Seq[Sequence], turn: Turn) -> None:
    """Queues preempted sequences, oldest first, where their prompt can be computed again."""
    for seq in reversed(sequences):  # each goes to the front
      self._log_preempted(pool, [seq.request_id], turn.now_s)
      self._queue_again(pool, seq, turn)

  def _queue_again(self, pool: Pool, seq: Sequence, turn: Turn) -> None:
    """Queues a sequence that `pool` had: there, or elsewhere if it does not prefill any more."""
    entry = pool
    if not pool.is_up or pool not in self.cluster.entry:
      self._settle(turn)
      entry = self.cluster.route_again(seq, turn.now_s)
    refusal = "no pool that could prefill it is left"
    if entry is not None:
      refusal = entry.scheduler.refusal(seq.request, len(seq.output_ids))
    if refusal is None:
      entry.scheduler.add(seq)
    else:
      seq.enter(State.ENDED)
      self._fail(seq.request_id, pool, f"its K and V are lost for good: {refusal}", turn)

  # Pools that come and go, and change ----------------------------------------------------------

  def _look_at_pools(self, turn: Turn) -> None:
    """Notices which pools were lost, are back, or are gone for good."""
    for pool in self.cluster.pools:
      if pool.is_gone:
        continue
      try:
        is_up = pool.executor.is_up
      except PoolLost as error:
        self._lose_pool(pool, str(error), turn)
        pool.is_gone, pool.next_role = True, None
        self._log_pool(pool, f"gone: {error}", turn)
        self._keep_roles(turn)
        self._move_queue(pool, turn)
        continue
      if not is_up and not pool.is_up:
        pool.executor.recover()  # it may have been back since, and lost again
      elif not is_up:
        self._lose_pool(pool, "its process ended", turn)
      elif not pool.is_up:
        pool.is_up = True
        self._log_pool(pool, "it is back", turn)

  def _lose_pool(self, pool: Pool, reason: str, turn: Turn) -> None:
    """Moves what a lost pool had to others, and has it started again. Once for each loss."""
    if not pool.is_up:
      return
    pool.is_up = False
    self._log_pool(pool, f"lost: {reason}", turn)
    pool.executor.recover()
    self._lose_cache(pool, turn)
    self._move_queue(pool, turn)

  def _move_queue(self, pool: Pool, turn: Turn) -> None:
    """Queues elsewhere what waits in a pool that will not prefill it, in the same order."""
    queue = pool.scheduler.withdraw(pool.scheduler.waiting.values())
    preempted = [seq for seq in queue if seq.state is State.PREEMPTED]  # each goes to the front
    for seq in [*reversed(preempted), *queue[len(preempted) :]]:
      self._queue_again(pool, seq, turn)

  def _begin_change(self, change: ChangeRole, turn: Turn) -> None:
    """Begins to drain a pool for another role, if it can have that."""
    found = [p for p in self.cluster.pools if p.name == change.pool]
    if not found:
      names = ", ".join(p.name for p in self.cluster.pools)
      reason = f"refused: there is no pool {change.pool!r}, only {names}"
      self.log.append(
        PoolChanged(
          time_s=turn.now_s, pool=change.pool, role=change.role, is_up=False, reason=reason
        )
      )
      return
    (pool,) = found
    refusal = self.cluster.why_not(pool, change.role)
    if refusal is not None:
      self._log_pool(pool, f"refused to be {change.role}: {refusal}", turn)
    elif change.role != (pool.next_role or pool.role):
      pool.next_role = change.role if change.role != pool.role else None
      self._log_pool(pool, f"asked to be {change.role}", turn)

  def _keep_roles(self, turn: Turn) -> None:
    """Takes back changes that the pools which are left cannot do without."""
    for pool in self.cluster.pools:
      if pool.next_role is not None:
        refusal = self.cluster.why_not(pool, pool.next_role)
        if refusal is not None:
          pool.next_role = None
          self._log_pool(pool, f"it stays {pool.role}: {refusal}", turn)

  def _change_roles(self, turn: Turn) -> None:
    """Asks the planner, and lets those pools change that are drained."""
    if any([pool.next_role is not None for pool in self.cluster.pools]):
      self._settle(turn)
    elif self.planner is None:
      return
    if self.planner is not None:
      for pool, role in self.planner(self._planning(turn)):
        self._begin_change(ChangeRole(pool=pool, role=role), turn)
    for pool in self.cluster.pools:
      if pool.next_role is None or not pool.is_up:
        continue
      if pool.next_role == "decode":
        self._move_queue(pool, turn)
      if self.cluster.is_drained(pool):
        self._take_role(pool, pool.next_role, turn)

  def _planning(self, turn: Turn) -> Planning:
    pools = [p for p in self.cluster.pools if p.is_up]
    return Planning(
      now_s=turn.now_s,
      pools=[
        PoolState(name=p.name, role=p.next_role or p.role, scheduler=p.scheduler) for p in pools
      ],
      handing_over=[seq for _, seq in self.cluster.outbox],
      is_changing=any(p.next_role is not None for p in self.cluster.pools),
    )

  def _take_role(self, pool: Pool, role: str, turn: Turn) -> None:
    """Changes a drained pool. What it decodes goes on there, or moves to decode pools."""
    scheduler = pool.scheduler
    if pool.role != "decode":  # where they are told of when they are computed again elsewhere
      self._log_preempted(pool, scheduler.unreported_preemptions, turn.now_s)
    scheduler.unreported_preemptions = []
    pool.role, pool.next_role = role, None
    scheduler.become(*pool.as_role(role))
    self._log_pool(pool, f"it is {role} now", turn)
    if role == "prefill":
      for seq in list(scheduler.decoding.values()):
        if seq.num_computed_tokens >= seq.num_prefill_tokens:  # else it leaves with its next token
          self._leave(pool, seq)

  def _log_preempted(self, pool: Pool, request_ids: Iterable[int], time_s: float) -> None:
    for request_id in request_ids:
      self.log.append(Preempted(time_s=time_s, request_id=request_id, pool=pool.name))

  def _log_pool(self, pool: Pool, reason: str, turn: Turn) -> None:
    self.log.append(
      PoolChanged(
        time_s=turn.now_s, pool=pool.name, role=pool.role, is_up=pool.is_up, reason=reason
      )
    )

  def _raise_if_stuck(self, tickets: Iterable[Ticket]) -> None:
    if any(not pool.is_up and not pool.is_gone for pool in self.cluster.pools):
      return
    if any(ticket.finish_s != math.inf for ticket in tickets):
      return
    stuck = {
      pool.name: f"{len(pool.scheduler.waiting)} waiting, {len(pool.scheduler.running)} running"
      for pool in self.cluster.pools
    }
    raise RuntimeError(
      f"no pool can move: {stuck}, {len(self.cluster.outbox)} waiting for hand-off, "
      f"{len(self.cluster.transfers)} copies that never end"
    )


def _predicted_end_s(pool: Pool) -> float:
  """When the newest step in flight will end; 0 without one, its start where nobody knows."""
  if not pool.in_flight:
    return 0.0
  *_, submit_s = pool.in_flight[-1]
  return max(submit_s, pool.last_end_s) + pool.predicted_s


def _pages_of(source: Pool, seq: Sequence, handle: Handle) -> tuple[int, ...]:
  """The source's pages of the positions that a handle is for."""
  page_size = source.scheduler.pages.config.page_size
  first, end = handle.start // page_size, -(-handle.num_tokens // page_size)
  return source.scheduler.pages.table(seq.row)[first:end]


class _NotStarted:
  """The ticket of work that a device refused at the call: it fails as work that fails later."""

  def __init__(self, error: Exception, now_s: float):
    self.finish_s, self._error = now_s, error

  def is_ready(self) -> bool:
    return True

  def block(self) -> None:
    pass

  def result(self) -> None:
    raise self._error


def _waits_to_fail(pool: Pool) -> bool:
  """Whether its newest step never started: what it was to write, the next could not build on."""
  return bool(pool.in_flight) and isinstance(pool.in_flight[-1][1], _NotStarted)


def _step_failed(error: Exception | None) -> str:
  return f"step failed: {error!r}"


def _has_ended(ticket: Ticket, now_s: float) -> bool:
  return ticket.is_ready() if ticket.finish_s is None else ticket.finish_s <= now_s


def _ends_at(ticket: StrokeTicket, now_s: float) -> bool:
  """Whether one of its steps ends just now."""
  place = bisect.bisect_left(ticket.ends_s, now_s)
  return place < len(ticket.ends_s) and ticket.ends_s[place] == now_s


def _step_event(pool: Pool, plan: StepPlan, outcome: Outcome, start_s: float, end_s: float) -> Step:
  return Step(
    pool=pool.name,
    step_id=plan.step_id,
    kind=plan.kind,
    start_s=start_s,
    end_s=end_s,
    prefill_ids=tuple([s.request_id for s in plan.prefills]),
    prefill_starts=tuple([s.start for s in plan.prefills]),
    prefill_tokens=tuple([s.num_tokens for s in plan.prefills]),
    decode_ids=plan.decodes.request_ids,
    decode_positions=plan.decodes.positions,
    emitted_ids=outcome.emitted_ids,
    token_ids=outcome.token_ids,
  )
