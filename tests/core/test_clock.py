"""Stamps are ticks that add exactly; the virtual clock jumps, the wall clock polls."""

import itertools
import math
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
  assert clock.now_s() == 2.0


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


class CountingTicket:
  """Ready at the n-th question."""

  finish_s = None

  def __init__(self, num_questions):
    self.num_left = num_questions

  def is_ready(self):
    self.num_left -= 1
    return self.num_left <= 0

  def result(self):
    return None


def test_the_wall_clock_polls_until_a_ticket_is_ready():
  clock = WallClock()
  never, soon = CountingTicket(math.inf), CountingTicket(5)
  assert clock.wait([never, soon], None) == [soon]


def test_the_wall_clock_gives_up_at_until_s():
  clock = WallClock()
  until_s = clock.now_s() + 0.02
  assert clock.wait([CountingTicket(math.inf)], until_s) == []
  assert clock.now_s() >= until_s
  assert clock.wait([], clock.now_s() - 1) == []


def test_with_nothing_to_wait_for_the_wall_clock_returns():
  assert WallClock().wait([], None) == []


def test_the_wall_clock_rises_from_0_in_ticks():
  clock = WallClock()
  stamps = [clock.now_s() for _ in range(100)]
  assert stamps == sorted(stamps) and 0 <= stamps[0] < 60
  assert all((Fraction(s) * 2**30).denominator == 1 for s in stamps)
