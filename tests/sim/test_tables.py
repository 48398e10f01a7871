"""Tables give back what was measured, go on in lines, and say when they left what was measured."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim.test_latency_model import tables

from pdjax.core.costs import StepCounts, count_slices
from pdjax.sim.hardware import Link
from pdjax.sim.tables import Grid

pytestmark = pytest.mark.quick

AXES = ((1, 2, 5, 20), (0, 10, 300))
coordinates = st.tuples(st.floats(-5, 60), st.floats(-50, 900))


def grid_of(function, axes=AXES, without=()):
  points = {place: function(*place) for place in itertools.product(*axes) if place not in without}
  return Grid.of(points)


@given(a=st.floats(0, 9), b=st.floats(0, 9), c=st.floats(0, 9), d=st.floats(0, 9))
def test_a_grid_is_exact_where_the_truth_is_linear_in_each_coordinate(a, b, c, d):
  grid = grid_of(lambda x, y: a + b * x + c * y + d * x * y)
  for x, y in ((1, 0), (3, 7), (20, 300), (31, 450)):  # on points, between, beyond
    assert grid.at(x, y) == pytest.approx(a + b * x + c * y + d * x * y, abs=1e-9)


@given(place=coordinates, values=st.lists(st.floats(0, 10), min_size=12, max_size=12))
def test_a_row_of_a_grid_is_its_single_values(place, values):
  grid = Grid(axes=AXES, values=np.array(values).reshape(4, 3), is_measured=np.ones((4, 3), bool))
  x, y = place
  last = np.array([y, y + 1, y + 700])
  assert grid.along(x, last=last) == pytest.approx([grid.at(x, each) for each in last], abs=1e-9)


@given(values=st.lists(st.floats(0, 10), min_size=12, max_size=12), x=st.floats(1, 20))
def test_between_points_a_grid_stays_between_their_values(values, x):
  grid = Grid(axes=AXES, values=np.array(values).reshape(4, 3), is_measured=np.ones((4, 3), bool))
  assert min(values) - 1e-9 <= grid.at(x, 17.0) <= max(values) + 1e-9


def test_a_line_that_would_fall_below_zero_ends_there():
  grid = Grid.of({(1,): 4.0, (2,): 1.0})
  assert grid.at(3) == 0.0 and list(grid.along(last=np.array([2.0, 3.0]))) == [1.0, 0.0]


def test_missing_points_lie_on_the_line_of_their_neighbours_and_are_not_measured():
  truth = lambda x, y: 1 + 2 * x + 3 * y  # noqa: E731
  grid = grid_of(truth, without={(20, 300), (5, 300), (2, 10)})
  assert grid.at(20, 300) == pytest.approx(truth(20, 300))
  assert grid.at(2, 10) == pytest.approx(truth(2, 10))
  assert grid.is_beyond(20, 300) and grid.is_beyond(6, 290) and grid.is_beyond(1.5, 5)
  assert not grid.is_beyond(20, 10)
  assert not grid.is_beyond(1, 300)


def test_only_points_on_the_given_axes_are_taken():
  points = {(1, 0): 1.0, (1, 9): 2.0, (4, 0): 3.0, (4, 9): 4.0, (2, 3): 99.0}
  grid = Grid.of(points, axes=((1, 4), (0, 9)))
  assert grid.at(2, 3) == pytest.approx(2.0)


@pytest.mark.parametrize(
  ("points", "message"),
  [
    ({(1,): 1.0}, "two or more ascending values"),
    ({(1, 1): 1.0, (2, 2): 1.0}, "2 points have no two measured neighbours"),
  ],
)
def test_a_grid_that_cannot_be_is_refused(points, message):
  with pytest.raises(ValueError, match=message):
    Grid.of(points)


def test_a_step_beyond_what_was_measured_is_named():
  latency = tables()
  assert latency.beyond(count_slices(decode_positions=[500] * 8, num_emitted=8)) == ()
  (where,) = latency.beyond(count_slices(decode_positions=[9000] * 8, num_emitted=8))
  assert where == "8 decodes of 9001 keys"
  found = latency.beyond(count_slices(prefill_tokens=[2000], prefill_starts=[5000], num_emitted=1))
  assert found == ("2000 tokens in a step", "a chunk of 2000 tokens behind 5000")


@given(
  start=st.integers(0, 4000),
  num_tokens=st.integers(1, 1000),
  positions=st.lists(st.integers(0, 7000), max_size=60),
)
def test_more_work_takes_longer(start, num_tokens, positions):
  latency = tables()

  def total_s(start, num_tokens, positions):
    counts = count_slices(
      prefill_starts=[start],
      prefill_tokens=[num_tokens],
      decode_positions=positions,
      num_emitted=len(positions),
    )
    return latency.terms_of(counts).total_s

  base_s = total_s(start, num_tokens, positions)
  assert base_s < total_s(start, num_tokens + 5, positions)
  assert base_s < total_s(start + 5, num_tokens, positions)
  assert base_s <= total_s(start, num_tokens, [p + 5 for p in positions])
  assert base_s <= total_s(start, num_tokens, positions * 2)


def test_chunks_of_a_step_count_as_one_of_as_many_pairs():
  """One slice is itself; two prompts are a chunk of both, behind what makes the pairs right."""
  latency = tables()
  alone = latency.terms_of(StepCounts(num_prefill_tokens=64, num_prefill_pairs=64 * 512 + 2080))
  assert alone.attention_prefill_s == pytest.approx(
    latency.model.num_layers * latency.prefill.at(64, 512)
  )
  two = count_slices(prefill_starts=[0, 900], prefill_tokens=[100, 60], num_emitted=2)
  before = two.num_prefill_pairs / 160 - 161 / 2
  assert latency.terms_of(two).attention_prefill_s == pytest.approx(
    latency.model.num_layers * latency.prefill.at(160, before)
  )


def test_one_kernel_for_both_takes_what_its_own_table_says():
  axes = ((1, 1024), (0, 4096), (1, 64), (1, 8000))
  both = grid_of(lambda c, b, n, k: 1e-3 + 1e-7 * c + 1e-8 * b + 1e-9 * n * k, axes)
  latency = tables(mixed=both)
  counts = count_slices(
    prefill_starts=[128], prefill_tokens=[512], decode_positions=[999] * 32, num_emitted=32
  )
  terms = latency.terms_of(counts)
  assert terms.attention_prefill_s + terms.attention_decode_s == pytest.approx(
    latency.model.num_layers * both.at(512, 128, 32, 1000)
  )
  for pure in counts.split():
    assert latency.terms_of(pure) == tables().terms_of(pure)


def test_hidden_states_cross_the_link_to_the_next_stage():
  link = Link(name="l", latency_s=1e-5, bytes_per_s=1e9)
  latency = dataclasses.replace(tables(), link=link)
  assert latency.hand_over_s(7) == link.copy_s(7 * latency.model.d_model * 2)
  with pytest.raises(ValueError, match="need a link"):
    tables().hand_over_s(7)
