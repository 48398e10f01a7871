"""Time. The engine and the simulator run the same loop under different clocks.

Every time stamp is a multiple of 2**-30 s (about a nanosecond). Such numbers add and subtract
exactly in float64 for runs of up to 97 days, so the phases of a request sum to its end-to-end time
with no rounding at all.
"""

from __future__ import annotations

import math
import time
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
  """

  finish_s: float | None

  def is_ready(self) -> bool: ...

  def result(self) -> Any: ...


class Clock(Protocol):
  def now_s(self) -> float: ...

  def wait(self, tickets: Collection[Ticket], until_s: float | None) -> list[Ticket]:
    """Returns the tickets that ended, at the latest at `until_s` (then perhaps none).

    With no ticket and no `until_s` it returns soon: there is nothing to wait for but the caller.
    """
    ...


class VirtualClock:
  """Jumps to the earliest ticket or to `until_s`. The `min` over tickets is the event queue."""

  def __init__(self):
    self._now_s = 0.0

  def now_s(self) -> float:
    return self._now_s

  def wait(self, tickets: Collection[Ticket], until_s: float | None) -> list[Ticket]:
    due_s = min((ticket.finish_s for ticket in tickets), default=math.inf)
    if until_s is not None:
      due_s = min(due_s, until_s)
    if due_s < math.inf:
      self._now_s = max(self._now_s, to_ticks(due_s))
    return [ticket for ticket in tickets if ticket.finish_s <= self._now_s]


class WallClock:
  """Real time since it was made. Polls the tickets."""

  poll_s = 1e-4  # well under any step; a longer sleep would show in every ITL

  def __init__(self):
    self._start_s = time.perf_counter()

  def now_s(self) -> float:
    return to_ticks(time.perf_counter() - self._start_s)

  def wait(self, tickets: Collection[Ticket], until_s: float | None) -> list[Ticket]:
    while True:
      ready = [ticket for ticket in tickets if ticket.is_ready()]
      if ready or (until_s is not None and self.now_s() >= until_s):
        return ready
      time.sleep(self.poll_s)
      if not tickets and until_s is None:
        return []
