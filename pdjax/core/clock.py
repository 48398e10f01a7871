"""Time. The engine and the simulator run the same loop under different clocks.

Every time stamp is a multiple of 2**-30 s (about a nanosecond). Such numbers add and subtract
exactly in float64 for runs of up to 97 days, so the phases of a request sum to its end-to-end time
with no rounding at all.
"""

from __future__ import annotations

import concurrent.futures
import math
import threading
import time
import weakref
from collections.abc import Collection
from typing import Any, Protocol

_TICKS_PER_S = 2.0**30


def to_ticks(seconds: float) -> float:
  """`seconds` rounded up to the next tick."""
  return math.ceil(seconds * _TICKS_PER_S) / _TICKS_PER_S


class Ticket(Protocol):
  """Work in flight: a step or a transfer.

  `finish_s` is known in the modelled world and None in the real one. `is_ready` true means that the
  work ended, not that it succeeded: `result()` returns what it gave or raises why it failed.
  `block()` returns when the work has ended, in whichever thread, and raises nothing; only the real
  world needs it.
  """

  finish_s: float | None

  def is_ready(self) -> bool: ...

  def block(self) -> None: ...

  def result(self) -> Any: ...


class Clock(Protocol):
  def now_s(self) -> float: ...

  def wake(self) -> None:
    """Lets a `wait` in progress, or else the next one, return at once. From any thread."""
    ...

  def wait(self, tickets: Collection[Ticket], until_s: float | None) -> list[Ticket]:
    """Returns the tickets that ended, at the latest at `until_s` (then perhaps none).

    With no ticket and no `until_s` it returns soon: there is nothing to wait for but the caller.
    """
    ...

  def end_s(self, ticket: Ticket) -> float:
    """When a ticket that `wait` returned ended; at the latest now."""
    ...


class VirtualClock:
  """Jumps to the earliest ticket or to `until_s`. The `min` over tickets is the event queue."""

  def __init__(self):
    self._now_s = 0.0

  def now_s(self) -> float:
    return self._now_s

  def wake(self) -> None:
    """Nothing: no wait takes any time."""

  def wait(self, tickets: Collection[Ticket], until_s: float | None) -> list[Ticket]:
    due_s = math.inf if until_s is None else until_s
    for ticket in tickets:
      if ticket.finish_s < due_s:
        due_s = ticket.finish_s
    if self._now_s < due_s < math.inf:
      self._now_s = to_ticks(due_s)
    return [ticket for ticket in tickets if ticket.finish_s <= self._now_s]

  def end_s(self, ticket: Ticket) -> float:
    return min(to_ticks(ticket.finish_s), self._now_s)


class WallClock:
  """Real time since it was made. A thread blocks on each ticket and stamps its end.

  Asking every 0.1 ms instead took 5 to 10 % of the device's time where both share two cores.
  """

  _IDLE_S = 1e-3  # between two looks at an open inbox while nothing runs

  def __init__(self):
    self._start_s = time.perf_counter()
    self._event = threading.Event()  # a ticket ended, or `wake` was called
    self._is_woken = False
    self._watchers = concurrent.futures.ThreadPoolExecutor(256, "ticket")  # made as needed
    self._end_s: weakref.WeakKeyDictionary[Ticket, float | None] = weakref.WeakKeyDictionary()

  def now_s(self) -> float:
    return to_ticks(time.perf_counter() - self._start_s)

  def wake(self) -> None:
    self._is_woken = True
    self._event.set()

  def wait(self, tickets: Collection[Ticket], until_s: float | None) -> list[Ticket]:
    if not tickets and until_s is None:
      until_s = self.now_s() + self._IDLE_S
    while True:
      self._event.clear()  # before the looks: what comes after them sets it again
      ready = [ticket for ticket in tickets if ticket.is_ready()]
      left_s = None if until_s is None else until_s - self.now_s()
      if ready or self._is_woken or (left_s is not None and left_s <= 0):
        self._is_woken = False
        return ready
      for ticket in tickets:
        if ticket not in self._end_s:
          self._end_s[ticket] = None
          self._watchers.submit(self._watch, ticket)
      self._event.wait(left_s)

  def end_s(self, ticket: Ticket) -> float:
    end_s = self._end_s.get(ticket)  # none yet where it was seen ready before its thread woke
    return self.now_s() if end_s is None else end_s

  def _watch(self, ticket: Ticket) -> None:
    ticket.block()
    self._end_s[ticket] = self.now_s()
    self._event.set()
