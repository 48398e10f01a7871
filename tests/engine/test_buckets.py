"""The shapes that steps are padded to."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdjax.engine.buckets import grow_to, pick_bucket

pytestmark = pytest.mark.quick


@given(st.integers(1, 50), st.integers(0, 1000), st.integers(2, 4))
def test_sizes_grow_by_the_ratio_and_end_exactly_at_the_highest(lowest, extra, ratio):
  sizes = grow_to(lowest, lowest + extra, ratio)
  assert (sizes[0], sizes[-1]) == (lowest, lowest + extra)
  for a, b in itertools.pairwise(sizes):
    assert a < b <= ratio * a
    assert b == ratio * a or b == sizes[-1]


def test_a_range_that_is_upside_down_is_refused():
  with pytest.raises(ValueError, match="lowest=5 is above highest=4"):
    grow_to(5, 4, 2)


@given(st.lists(st.integers(1, 100), min_size=1, unique=True).map(sorted), st.integers(0, 100))
def test_the_bucket_is_the_smallest_that_holds_the_size(buckets, size):
  if size > buckets[-1]:
    with pytest.raises(ValueError, match=f"{size} is larger than the largest bucket"):
      pick_bucket(buckets, size)
    return
  bucket = pick_bucket(buckets, size)
  assert bucket >= size and not [b for b in buckets if size <= b < bucket]
