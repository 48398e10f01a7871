"""What the outside world asks of a run, by when it is due."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import threading
from collections.abc import Callable, Iterable

from pdjax.core.request import Request


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class End:
  """Ends a request that has not ended yet."""

  request_id: int
  reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChangeRole:
  pool: str
  role: str


Message = Request | End | ChangeRole


class Inbox:
  """What the outside world asks of a run: requests at their arrival times, cancels, time-outs.

  And changes of the pools' roles.

  A workload is an inbox that is closed from the start. An open one is fed between turns, or by
  other threads at any time: the loop wakes at once. It is for one run.
  """

  def __init__(self, requests: Iterable[Request] = (), *, is_open: bool = False):
    self._lock = threading.Lock()
    self._heap: list[tuple[float, int, Message]] = []
    self._order = itertools.count()
    self._used_ids: set[int] = set()
    self._arrival_s: dict[int, float] = {}  # of every request that has not ended
    self.is_open = is_open
    self.wake: Callable[[], None] = lambda: None  # the loop's
    for request in requests:
      self.submit(request)

  def submit(self, request: Request) -> None:
    """Queues a request.

    Raises:
      ValueError: its id was used before in this run. One that has ended is no exception: the log
        would tell of two requests by one name, and so would results that are still under way.
    """
    request_id, arrival_s = request.request_id, request.arrival_s
    with self._lock:
      if request_id in self._used_ids:
        raise ValueError(f"request id {request_id} was submitted before")
      self._used_ids.add(request_id)
      self._arrival_s[request_id] = arrival_s
      self._push(arrival_s, request)
      if request.timeout_s is not None:
        reason = f"timed out after {request.timeout_s} s"
        self._push(arrival_s + request.timeout_s, End(request_id=request_id, reason=reason))
    self.wake()

  def cancel(self, request_id: int, at_s: float = 0.0) -> None:
    """Ends a request at `at_s` or at the next turn, but not before it arrives.

    One that has ended already, or was never submitted, is left alone.
    """
    with self._lock:
      if request_id not in self._arrival_s:
        return
      at_s = max(at_s, self._arrival_s[request_id])
      self._push(at_s, End(request_id=request_id, reason="cancelled"))
    self.wake()

  def change_role(self, pool: str, role: str, at_s: float = 0.0) -> None:
    """Asks a pool to take another role from `at_s` on, or from the next turn on.

    It is drained first. What became of it is in the log (`PoolChanged`). A closed inbox that has no
    request left does not wait for it.
    """
    with self._lock:
      self._push(at_s, ChangeRole(pool=pool, role=role))
    self.wake()

  def close(self) -> None:
    self.is_open = False
    self.wake()

  # For the loop

  @property
  def num_left(self) -> int:
    """Requests that have not ended, arrived or not."""
    return len(self._arrival_s)

  def next_s(self) -> float | None:
    """When something is due next."""
    try:  # one look needs no lock
      time_s, _, message = self._heap[0]
    except IndexError:
      return None
    if self._counts(message):
      return time_s
    with self._lock:
      while self._heap and not self._counts(self._heap[0][2]):
        heapq.heappop(self._heap)
      return self._heap[0][0] if self._heap else None

  def due(self, now_s: float) -> list[Message]:
    """Takes out what is due, in order of time."""
    messages: list[Message] = []
    if not self._heap or self._heap[0][0] > now_s:  # nothing, most of the time: no lock
      return messages
    with self._lock:
      while self._heap and self._heap[0][0] <= now_s:
        message = heapq.heappop(self._heap)[2]
        if self._counts(message):
          messages.append(message)
    return messages

  def ended(self, request_id: int) -> None:
    """Forgets a request that has ended, and what was to end it."""
    with self._lock:
      del self._arrival_s[request_id]

  def _push(self, time_s: float, message: Message) -> None:
    heapq.heappush(self._heap, (time_s, next(self._order), message))

  def _counts(self, message: Message) -> bool:
    if isinstance(message, ChangeRole):
      return self.is_open or bool(self._arrival_s)  # else nobody would see what it changes
    return not isinstance(message, End) or message.request_id in self._arrival_s
