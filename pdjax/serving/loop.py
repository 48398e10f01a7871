"""The one loop. The engine and the simulator differ only in the executors and the clock."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Iterable, Iterator

from pdjax.core.clock import Clock
from pdjax.core.events import Arrived, Copied, EventLog, Failed, Finished, Preempted, Step
from pdjax.core.plan import StepPlan
from pdjax.core.request import Request
from pdjax.core.sequence import Sequence
from pdjax.scheduling.scheduler import FinishReason, Outcome, length_or_stop
from pdjax.serving.cluster import Cluster, Pool, Transfer
from pdjax.serving.executor import Handle


class Inbox:
  """What the outside world asks of a run: requests at their arrival times, and cancels.

  A workload is an inbox that is closed from the start. An open one is fed between turns.
  """

  def __init__(self, requests: Iterable[Request] = (), *, is_open: bool = False):
    self._heap: list[tuple[float, int, Request | int]] = []
    self._order = itertools.count()
    self._arrival_s: dict[int, float] = {}  # of every request ever submitted
    self.is_open = is_open
    for request in requests:
      self.submit(request)

  def submit(self, request: Request) -> None:
    """Queues a request.

    Raises:
      ValueError: its id was used before.
    """
    if request.request_id in self._arrival_s:
      raise ValueError(f"request id {request.request_id} was submitted before")
    self._arrival_s[request.request_id] = request.arrival_s
    heapq.heappush(self._heap, (request.arrival_s, next(self._order), request))

  def cancel(self, request_id: int, at_s: float = 0.0) -> None:
    """Ends a request at `at_s` or at the next turn, but not before it arrives.

    One that has ended already, or was never submitted, is left alone.
    """
    at_s = max(at_s, self._arrival_s.get(request_id, at_s))
    heapq.heappush(self._heap, (at_s, next(self._order), request_id))

  def close(self) -> None:
    self.is_open = False

  def next_s(self) -> float | None:
    return self._heap[0][0] if self._heap else None

  def due(self, now_s: float) -> Iterator[Request | int]:
    """Takes out what is due, a request or the id of one to cancel, in order of time."""
    while self._heap and self._heap[0][0] <= now_s:
      yield heapq.heappop(self._heap)[2]


@dataclasses.dataclass(slots=True)
class Turn:
  """What happened in one turn of the loop.

  `tokens` has every token that was computed. `sequences` has those that got one, by request id:
  their output so far, and of those that ended the output that is kept.
  """

  now_s: float
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
) -> Iterator[Turn]:
  """Serves until the inbox is closed and empty and all work is done; yields turn by turn.

  Appends to `log`. Each turn drains the inbox, starts hand-offs, plans and submits steps, waits for
  the first thing to end, and commits it. `steps_in_flight` 2 plans a pool's next step while one
  runs. With an open inbox and nothing to do it yields empty turns.

  Raises:
    RuntimeError: work is left but no pool can move (a fault in a policy; never silent).
  """
  return _Loop(cluster, inbox, clock, log, finish_reason, steps_in_flight).turns()


class _Loop:
  def __init__(self, cluster, inbox, clock, log, finish_reason, steps_in_flight):
    self.cluster: Cluster = cluster
    self.inbox: Inbox = inbox
    self.clock: Clock = clock
    self.log: EventLog = log
    self.finish_reason: FinishReason = finish_reason
    self.steps_in_flight: int = steps_in_flight

  def turns(self) -> Iterator[Turn]:
    while True:
      turn = Turn(self.clock.now_s())
      self._drain(turn)
      self._hand_off(turn)
      self._submit()
      tickets = [pool.in_flight[0][1] for pool in self.cluster.pools if pool.in_flight]
      tickets += [transfer.ticket for transfer in self.cluster.transfers]
      next_s = self.inbox.next_s()
      if not tickets and next_s is None:
        self._raise_if_stuck()
        if not self.inbox.is_open:
          if turn.ended or turn.failed:
            yield turn
          return
      self.clock.wait(tickets, next_s)
      turn.now_s = self.clock.now_s()
      self._commit(turn)
      yield turn

  # Requests in and out -------------------------------------------------------------------------

  def _drain(self, turn: Turn) -> None:
    for message in self.inbox.due(turn.now_s):
      if isinstance(message, Request):
        self._arrive(message, turn)
      else:
        self._cancel(message, turn)

  def _arrive(self, request: Request, turn: Turn) -> None:
    refusal = self.cluster.refusal(request)
    pool = None if refusal else self.cluster.route(request)
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
      self._fail(request.request_id, None, f"refused: {refusal}", turn)
    else:
      pool.scheduler.add(Sequence(request))

  def _cancel(self, request_id: int, turn: Turn) -> None:
    for transfer in self.cluster.transfers:
      if transfer.seq.request_id == request_id:
        if not transfer.is_cancelled:
          transfer.is_cancelled = True  # its pages are busy: freed when the copy ends
          self._fail(request_id, transfer.target, "cancelled", turn)
        return
    for pool in self.cluster.pools:
      if pool.scheduler.drop(request_id) is not None:
        outbox = self.cluster.outbox
        for waiting in [item for item in outbox if item[1].request_id == request_id]:
          outbox.remove(waiting)
        self._fail(request_id, pool, "cancelled", turn)
        return

  def _fail(self, request_id: int, pool: Pool | None, reason: str, turn: Turn) -> None:
    self.log.append(
      Failed(time_s=turn.now_s, request_id=request_id, pool=pool and pool.name, reason=reason)
    )
    turn.failed.append((request_id, reason))

  # Work out to the devices ---------------------------------------------------------------------

  def _hand_off(self, turn: Turn) -> None:
    outbox = self.cluster.outbox
    while outbox:
      source, seq = outbox[0]
      reserved = self.cluster.reserve(seq)
      if reserved is None:
        return  # in order: the first in the outbox is the first to go
      outbox.popleft()
      target, row = reserved
      sampling, num_tokens = seq.request.sampling, seq.num_computed_tokens
      looks_back = sampling.repetition_penalty != 1
      handle = Handle(
        request_id=seq.request_id,
        num_tokens=num_tokens,
        num_prompt_tokens=seq.request.num_prompt_tokens,
        first_token_id=seq.output_ids[-1],
        sampling=sampling,
        token_ids=seq.known_ids(0, num_tokens) if looks_back else None,
      )
      try:
        handle = source.executor.export(
          handle, page_ids=source.scheduler.pages.table(seq.row), now_s=turn.now_s
        )
        ticket = target.executor.import_(
          handle, row=row, page_ids=target.scheduler.pages.table(row), now_s=turn.now_s
        )
      except Exception as error:
        ticket = _NotStarted(error, turn.now_s)
      self.cluster.transfers.append(Transfer(seq, source, target, row, handle, ticket, turn.now_s))

  def _submit(self) -> None:
    for pool in self.cluster.pools:
      while len(pool.in_flight) < self.steps_in_flight:
        plan = pool.scheduler.next_step(self.clock.now_s())
        if plan is None:
          break
        now_s = self.clock.now_s()
        try:
          ticket = pool.executor.submit(plan, now_s)
        except Exception as error:
          ticket = _NotStarted(error, now_s)
        pool.in_flight.append((plan, ticket, now_s))
        for request_id in plan.preempted:
          self.log.append(Preempted(time_s=now_s, request_id=request_id, pool=pool.name))

  # Results back --------------------------------------------------------------------------------

  def _commit(self, turn: Turn) -> None:
    for pool in self.cluster.pools:
      while pool.in_flight and _has_ended(pool.in_flight[0][1], turn.now_s):
        self._commit_step(pool, turn)
    for transfer in [t for t in self.cluster.transfers if _has_ended(t.ticket, turn.now_s)]:
      self.cluster.transfers.remove(transfer)
      self._commit_transfer(transfer, turn)

  def _commit_step(self, pool: Pool, turn: Turn) -> None:
    plan, ticket, submit_s = pool.in_flight.popleft()
    try:
      result = ticket.result()
    except Exception as error:  # the device's failure: its requests fail, the service goes on
      outcome = pool.scheduler.abort(plan, f"step failed: {error!r}")
    else:
      outcome = pool.scheduler.commit(plan, result, self.finish_reason)
    start_s = max(submit_s, pool.last_end_s)
    end_s = min(max(start_s, self.clock.end_s(ticket)), turn.now_s)
    self.log.append(_step_event(pool, plan, outcome, start_s, end_s))
    pool.last_end_s = end_s
    for seq, token_id in outcome.emitted:
      turn.tokens.append((seq.request_id, token_id))
      turn.sequences[seq.request_id] = seq
    for seq, reason in outcome.failed:
      self._fail(seq.request_id, pool, reason, turn)
    for seq, reason in outcome.finished:
      turn.ended.append((seq.request_id, reason))
      self.log.append(
        Finished(time_s=end_s, request_id=seq.request_id, pool=pool.name, reason=reason)
      )
    if pool.role == "prefill":
      for seq, _ in outcome.emitted:
        if seq.request_id in pool.scheduler.running:  # neither finished nor failed
          pool.scheduler.detach(seq)
          self.cluster.outbox.append((pool, seq))

  def _commit_transfer(self, transfer: Transfer, turn: Turn) -> None:
    seq, source, target = transfer.seq, transfer.source, transfer.target
    error = None
    try:
      transfer.ticket.result()
    except Exception as raised:  # a failed copy is never used; the request fails alone
      error = raised
    source.scheduler.drop(seq.request_id)  # frees the source pages, exactly once
    source.executor.drop(transfer.handle)
    if transfer.is_cancelled or error is not None:
      target.scheduler.give_back(transfer.target_row)
      if not transfer.is_cancelled:
        self._fail(seq.request_id, target, f"hand-off failed: {error!r}", turn)
      return
    self.log.append(
      Copied(
        request_id=seq.request_id,
        source=source.name,
        target=target.name,
        start_s=transfer.start_s,
        end_s=turn.now_s,
        num_tokens=transfer.handle.num_tokens,
        num_bytes=transfer.handle.num_bytes,
      )
    )
    target.scheduler.adopt(seq, transfer.target_row)

  def _raise_if_stuck(self) -> None:
    stuck = {
      pool.name: f"{len(pool.scheduler.waiting)} waiting, {len(pool.scheduler.running)} running"
      for pool in self.cluster.pools
      if pool.scheduler.waiting or pool.scheduler.running
    }
    if stuck or self.cluster.outbox:
      raise RuntimeError(
        f"no pool can move: {stuck}, {len(self.cluster.outbox)} waiting for hand-off"
      )


class _NotStarted:
  """The ticket of work that a device refused at the call: it fails as work that fails later."""

  def __init__(self, error: Exception, now_s: float):
    self.finish_s, self._error = now_s, error

  def is_ready(self) -> bool:
    return True

  def result(self) -> None:
    raise self._error


def _has_ended(ticket, now_s: float) -> bool:
  return ticket.is_ready() if ticket.finish_s is None else ticket.finish_s <= now_s


def _step_event(pool: Pool, plan: StepPlan, outcome: Outcome, start_s: float, end_s: float) -> Step:
  return Step(
    pool=pool.name,
    step_id=plan.step_id,
    kind=plan.kind,
    start_s=start_s,
    end_s=end_s,
    prefill_ids=tuple(s.request_id for s in plan.prefills),
    prefill_starts=tuple(s.start for s in plan.prefills),
    prefill_tokens=tuple(s.num_tokens for s in plan.prefills),
    decode_ids=plan.decodes.request_ids,
    decode_positions=plan.decodes.positions,
    emitted_ids=tuple(seq.request_id for seq, _ in outcome.emitted),
    token_ids=tuple(token_id for _, token_id in outcome.emitted),
  )
