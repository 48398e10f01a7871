"""Stamps are ticks that add exactly; the virtual clock jumps, the wall clock waits."""

import itertools
import threading
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdjax.core.clock import VirtualClock, WallClock, to_ticks
from pdjax.sim.sim_executor import SimTicket

pytestmark = pytest.mark.quick
DAYS_97 = 97 * 86_400.0


@settings(max_examples=200, derandomize=True)
@given(st.floats(0, DAYS_97))
def test_a_tick_is_the_next_one_and_stays_itself(seconds):
  stamp = to_ticks(seconds)
  assert 0 <= Fraction(stamp) - Fraction(seconds) < Fraction(1, 2**30)
  assert to_ticks(stamp) == stamp
  assert (Fraction(stamp) * 2**30).denominator == 1


@settings(max_examples=200, derandomize=True)
@given(st.lists(st.floats(0, DAYS_97), min_size=2, max_size=8))
def test_sums_and_differences_of_ticks_are_exact(times):
  stamps = sorted(map(to_ticks, times))
  gaps = [b - a for a, b in itertools.pairwise(stamps)]
  assert [Fraction(g) for g in gaps] == [
    Fraction(b) - Fraction(a) for a, b in itertools.pairwise(stamps)
  ]
  assert sum(gaps) == stamps[-1] - stamps[0]


def test_plain_floats_would_not_sum_exactly():
  """What the ticks are for."""
  assert 0.1 + 0.2 != 0.3
  ticks = [to_ticks(x) for x in (0.1, 0.2)]
  assert Fraction(ticks[0] + ticks[1]) == Fraction(ticks[0]) + Fraction(ticks[1])


def test_the_virtual_clock_jumps_to_the_earliest_ticket():
  clock = VirtualClock()
  late, early, same = (SimTicket(finish_s=s) for s in (3.0, 2.0, 2.0))
  assert clock.now_s() == 0.0
  assert clock.wait([late, early, same], None) == [early, same]
  assert clock.now_s() == clock.end_s(early) == 2.0


def test_the_virtual_clock_stops_at_until_s_and_never_goes_back():
  clock = VirtualClock()
  ticket = SimTicket(finish_s=2.0)
  assert clock.wait([ticket], 0.5) == [] and clock.now_s() == 0.5
  assert clock.wait([], 1.5) == [] and clock.now_s() == 1.5
  assert clock.wait([], 1.0) == [] and clock.now_s() == 1.5
  assert clock.wait([ticket], 9.0) == [ticket] and clock.now_s() == 2.0
  assert clock.wait([ticket], None) == [ticket] and clock.now_s() == 2.0


def test_with_nothing_to_wait_for_the_virtual_clock_stands():
  clock = VirtualClock()
  assert clock.wait([], None) == [] and clock.now_s() == 0.0


def test_the_virtual_clock_reads_ticks_only():
  clock = VirtualClock()
  clock.wait([SimTicket(finish_s=0.1)], None)
  assert clock.now_s() == to_ticks(0.1) != 0.1


class SlowTicket:
  """Ends when it is told to."""

  finish_s = None

  def __init__(self):
    self._event = threading.Event()

  def end_in(self, seconds):
    threading.Timer(seconds, self._event.set).start()
    return self

  def is_ready(self):
    return self._event.is_set()

  def block(self):
    self._event.wait()

  def result(self):
    return None


def test_the_wall_clock_wakes_when_a_ticket_ends():
  clock, late = WallClock(), SlowTicket()
  start_s = clock.now_s()
  soon = SlowTicket().end_in(0.05)
  assert clock.wait([late, soon], None) == [soon]
  assert 0.05 <= clock.now_s() - start_s < 5
  late.end_in(0)
  assert clock.wait([late], None) == [late]


def test_a_ticket_keeps_the_time_at_which_it_ended():
  """However late the loop looks: two steps that are noticed together have ends of their own."""
  clock = WallClock()
  first, second = SlowTicket().end_in(0.02), SlowTicket().end_in(0.3)
  assert clock.wait([first, second], clock.now_s() + 0.001) == []
  time.sleep(0.6)
  assert clock.wait([first, second], None) == [first, second]
  assert clock.end_s(first) < clock.end_s(second) < clock.now_s() - 0.1


def test_a_ticket_that_had_ended_before_anyone_waited_ends_now():
  clock, ticket = WallClock(), SlowTicket().end_in(0)
  ticket.block()
  assert clock.wait([ticket], None) == [ticket]
  assert clock.end_s(ticket) <= clock.now_s()


def test_the_wall_clock_gives_up_at_until_s():
  clock, ticket = WallClock(), SlowTicket()
  until_s = clock.now_s() + 0.02
  assert clock.wait([ticket], until_s) == []
  assert clock.now_s() >= until_s
  assert clock.wait([], clock.now_s() - 1) == []
  ticket.end_in(0)


@pytest.mark.parametrize("until_s", [None, 60.0])
def test_a_wait_ends_when_another_thread_wakes_the_clock(until_s):
  clock, ticket = WallClock(), SlowTicket()
  start_s = clock.now_s()  # before the timer starts: this thread may have to wait for a core
  threading.Timer(0.05, clock.wake).start()
  assert clock.wait([ticket], until_s) == []
  assert 0.05 <= clock.now_s() - start_s < 30
  ticket.end_in(0)
  assert clock.wait([ticket], None) == [ticket], "it wakes one wait only"


def test_woken_before_it_waits_the_clock_does_not_wait():
  clock, ticket = WallClock(), SlowTicket()
  clock.wake()
  assert clock.wait([ticket], None) == []
  assert clock.wait([ticket], clock.now_s() + 0.01) == []
  ticket.end_in(0)


def test_with_nothing_to_wait_for_the_wall_clock_returns():
  assert WallClock().wait([], None) == []


def test_the_wall_clock_rises_from_0_in_ticks():
  clock = WallClock()
  stamps = [clock.now_s() for _ in range(100)]
  assert stamps == sorted(stamps) and 0 <= stamps[0] < 60
  assert all((Fraction(s) * 2**30).denominator == 1 for s in stamps)
