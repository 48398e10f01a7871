"""Rows and pages are free or held, each exactly once, whatever is taken, grown and released."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdjax.scheduling.pages import PageConfig, PagePool

pytestmark = pytest.mark.quick


def make_pool(*, num_rows=3, page_size=4, pages_per_row=5, num_pages=8, contiguous=False):
  return PagePool(
    PageConfig(
      num_rows=num_rows,
      page_size=page_size,
      pages_per_row=pages_per_row,
      num_pages=num_rows * pages_per_row if contiguous else num_pages,
      contiguous=contiguous,
    )
  )


@settings(max_examples=150, derandomize=True, deadline=None)
@given(
  contiguous=st.booleans(),
  shape=st.tuples(*[st.integers(1, 5)] * 3, st.integers(1, 20)),
  actions=st.lists(
    st.tuples(st.sampled_from(["take", "grow", "release"]), st.integers(0, 4), st.integers(0, 40)),
    max_size=40,
  ),
)
def test_rows_and_pages_are_conserved(contiguous, shape, actions):
  num_rows, page_size, pages_per_row, num_pages = shape
  pool = make_pool(
    num_rows=num_rows,
    page_size=page_size,
    pages_per_row=pages_per_row,
    num_pages=num_pages,
    contiguous=contiguous,
  )
  total, held = pool.num_free_pages, {}  # row -> its pages, as the answers of the pool said
  for action, pick, num_tokens in actions:
    if action == "take" and pool.num_free_rows:
      row = pool.take_row()
      assert row not in held
      held[row] = []
    elif action != "take" and held:
      row = sorted(held)[pick % len(held)]
      if action == "release":
        pool.release(row)
        del held[row]
      else:
        before, missing = pool.num_free_pages, pool.num_missing(row, num_tokens)
        could, new = pool.has_room(row, num_tokens), pool.grow(row, num_tokens)
        assert (new is not None) == could
        if new is None:
          assert pool.num_free_pages == before and pool.table(row) == tuple(held[row])
          assert len(held[row]) + missing > pages_per_row or missing > before
        else:
          held[row] += new
          assert len(new) == missing and len(held[row]) * page_size >= num_tokens
    pool.check()
    assert {row: pool.table(row) for row in held} == {row: tuple(p) for row, p in held.items()}
    assert pool.num_free_rows == num_rows - len(held)
    assert pool.num_free_pages == total - sum(map(len, held.values()))
    everything = [page for pages in held.values() for page in pages]
    assert len(set(everything)) == len(everything), "a page is held twice"
    if contiguous:
      for row, pages in held.items():
        assert pages == [row * pages_per_row + i for i in range(len(pages))]


@pytest.mark.parametrize("contiguous", [False, True])
def test_capacity_is_the_last_length_that_fits(contiguous):
  pool = make_pool(contiguous=contiguous)
  capacity = pool.config.capacity_tokens
  assert capacity == 20  # 5 pages of 4 in a row
  assert pool.has_room(None, capacity) and not pool.has_room(None, capacity + 1)
  row = pool.take_row()
  for num_tokens in (capacity - 1, capacity):
    assert pool.has_room(row, num_tokens) and pool.grow(row, num_tokens) is not None
  assert not pool.has_room(row, capacity + 1) and pool.grow(row, capacity + 1) is None
  assert len(pool.table(row)) == 5


def test_capacity_of_a_pool_with_fewer_pages_than_a_row_is_its_pages():
  pool = make_pool(num_pages=3)
  row = pool.take_row()
  assert pool.config.capacity_tokens == 12
  assert len(pool.grow(row, 12)) == 3 and pool.grow(row, 13) is None


@pytest.mark.parametrize(("num_tokens", "pages"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_a_page_more_at_each_multiple_of_the_page_size(num_tokens, pages):
  pool = make_pool()
  assert pool.num_missing(None, num_tokens) == pages
  assert len(pool.grow(pool.take_row(), num_tokens)) == pages


def test_no_room_changes_nothing_and_room_returns_with_a_release():
  pool = make_pool()
  first, second = pool.take_row(), pool.take_row()
  pool.grow(first, 20)
  assert pool.grow(second, 16) is None  # 4 wanted, 3 free
  assert pool.table(second) == () and pool.num_free_pages == 3
  pool.release(first)
  assert len(pool.grow(second, 16)) == 4


def test_spare_pages_stay_free():
  pool = make_pool()
  assert pool.has_room(None, 16, spare=4)
  assert not pool.has_room(None, 16, spare=5)


@pytest.mark.parametrize("contiguous", [False, True])
def test_a_second_release_is_an_error(contiguous):
  pool = make_pool(contiguous=contiguous)
  row = pool.take_row()
  pool.grow(row, 8)
  pool.release(row)
  with pytest.raises(KeyError):
    pool.release(row)
  pool.check()


@pytest.mark.parametrize("name", ["num_rows", "page_size", "pages_per_row", "num_pages"])
def test_sizes_below_1_are_refused(name):
  sizes = {"num_rows": 1, "page_size": 1, "pages_per_row": 1, "num_pages": 1, name: 0}
  with pytest.raises(ValueError, match=f"{name}=0 must be at least 1"):
    PageConfig(**sizes)


def test_contiguous_pages_must_fill_the_rows():
  with pytest.raises(ValueError, match=r"= 15, not 14"):
    PageConfig(num_rows=3, page_size=4, pages_per_row=5, num_pages=14, contiguous=True)
