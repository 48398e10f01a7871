"""Plans as arrays: every token in its place, padding where nothing may be written."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdjax.core.plan import DecodeSlices, PageUpdates, Slice, StepPlan
from pdjax.core.request import SamplingParams
from pdjax.engine.batch import RowState, pick_prefill_bucket, prefill_inputs, step_inputs
from pdjax.engine.buckets import Buckets
from pdjax.models.attention import PREFILL_TILE

pytestmark = pytest.mark.quick
ROWS, PAGES_PER_ROW, NUM_PAGES, VOCAB = 5, 7, 40, 1000


def rows_state(num_rows=ROWS):
  """Every row has a table and a temperature of its own."""
  rows = RowState(num_rows, PAGES_PER_ROW, NUM_PAGES, VOCAB)
  for row in range(num_rows):
    rows.tables[row] = 100 * row + np.arange(PAGES_PER_ROW)
    rows.seat(row, 1000 + row, SamplingParams(max_tokens=9, temperature=row + 1.0, top_k=row + 1))
  return rows


def prefill(row, start, num_tokens, emits=True, **sampling):
  return Slice(
    request_id=row + 10,
    generation=0,
    row=row,
    start=start,
    num_tokens=num_tokens,
    token_ids=tuple(100 * row + i for i in range(num_tokens)),
    emits_token=emits,
    sampling=SamplingParams(max_tokens=5, **sampling),
  )


@st.composite
def prefills(draw):
  """Slices of distinct rows of a pool, and a prefill size that is just or more than enough."""
  num_rows = draw(st.integers(1, 9))
  rows = draw(st.permutations(range(num_rows)).map(lambda r: r[: draw(st.integers(1, num_rows))]))
  lengths = st.integers(1, 2 * PREFILL_TILE + 3) | st.sampled_from([1, PREFILL_TILE])
  slices = tuple(
    prefill(row, draw(st.integers(0, 50)), draw(lengths), draw(st.booleans())) for row in rows
  )
  spare = draw(st.sampled_from([0, 0, 1, 40]))
  return num_rows, slices, sum(s.num_tokens for s in slices) + spare


@given(prefills())
def test_slices_are_packed_without_gaps_and_tiles_cover_each_token_once(case):
  """Of any lengths, in any size that holds them: the tiles never run out."""
  num_rows, slices, num_padded = case
  rows = rows_state(num_rows)
  inputs = prefill_inputs(slices, num_padded, num_rows, rows)
  batch, num_tokens = inputs.batch, sum(s.num_tokens for s in slices)
  assert batch.tokens.shape == batch.positions.shape == (num_padded,)
  assert batch.tokens[:num_tokens].tolist() == [i for s in slices for i in s.token_ids]
  places = [(s.row, s.start + i) for s in slices for i in range(s.num_tokens)]
  assert batch.positions[:num_tokens].tolist() == [position for _, position in places]
  assert (batch.positions[num_tokens:] == -1).all()
  used, covered = int(batch.num_tiles), []
  for tile, table in zip(batch.tiles[:used], batch.tables[:used], strict=True):
    indices = tile[tile < num_padded].tolist()
    assert indices == list(range(indices[0], indices[0] + len(indices))), "a tile is one stretch"
    (row,) = {places[i][0] for i in indices}
    assert table.tolist() == rows.tables[row].tolist()
    covered += indices
  assert covered == list(range(num_tokens))
  assert (batch.tiles[used:] == num_padded).all() and (batch.tables[used:] == NUM_PAGES).all()


@given(prefills())
def test_a_slice_that_emits_says_where_for_whom_and_at_which_position(case):
  num_rows, slices, num_padded = case
  rows = rows_state(num_rows)
  inputs = prefill_inputs(slices, num_padded, num_rows, rows)
  emitting = [s for s in slices if s.emits_token]
  n = len(emitting)
  assert inputs.emit_row[:n].tolist() == [s.row for s in emitting]
  assert inputs.emit_position[:n].tolist() == [s.start + s.num_tokens for s in emitting]
  for index, s in zip(inputs.emit_index, emitting):
    assert inputs.batch.tokens[index] == s.token_ids[-1]
    assert inputs.batch.positions[index] == s.start + s.num_tokens - 1
  assert inputs.sampling.temperature[:n].tolist() == [s.row + 1 for s in emitting]
  # Padding writes to no row and samples greedily.
  assert (inputs.emit_row[n:] == num_rows).all() and len(inputs.emit_row) == num_rows
  assert (inputs.sampling.temperature[n:] == 0).all()


@given(st.lists(st.tuples(st.integers(1, 60), st.booleans()), min_size=1, max_size=ROWS))
def test_the_prefill_bucket_is_the_smallest_with_room_for_tokens_and_first_tokens(parts):
  slices = tuple(prefill(row, 0, n, emits) for row, (n, emits) in enumerate(parts))
  num_tokens, num_emits = sum(n for n, _ in parts), sum(emits for _, emits in parts)
  sizes = (16, 32, 64, 128)
  if num_tokens > 128:
    with pytest.raises(ValueError, match=f"{num_tokens} prefill tokens do not fit"):
      pick_prefill_bucket(slices, sizes, ROWS)
    return
  size, room = pick_prefill_bucket(slices, sizes, ROWS)
  assert num_tokens <= size and num_emits <= room <= ROWS
  fits = [s for s in sizes if num_tokens <= s and (num_emits <= s // 16 or s == 128)]
  assert size == fits[0]
  assert pick_prefill_bucket(slices[:1], sizes, ROWS)[1] <= ROWS


def test_the_largest_bucket_has_room_for_a_first_token_of_every_row():
  """A step that the token budget allows always has a shape, however short its prompts are."""
  slices = tuple(prefill(row, 0, 1) for row in range(ROWS))
  assert pick_prefill_bucket(slices, (16,), ROWS) == (16, ROWS)


BUCKETS = Buckets(prefill=(16,), mixed=(8, 32), rows=(2, ROWS))
DECODES = DecodeSlices(
  request_ids=(7, 8, 9), generations=(0, 0, 0), rows=(4, 0, 2), positions=(3, 11, 5)
)


def test_decodes_are_padded_with_rows_that_nobody_has():
  rows = rows_state()
  _, decode = step_inputs(StepPlan(step_id=0, decodes=DECODES), BUCKETS, rows)
  assert decode.rows.tolist() == [4, 0, 2, ROWS, ROWS]
  assert decode.positions.tolist() == [3, 11, 5, -1, -1]
  assert decode.tables[:3].tolist() == rows.tables[[4, 0, 2]].tolist()
  assert (decode.tables[3:] == NUM_PAGES).all(), "padding has pages out of range"
  assert decode.sampling.temperature.tolist() == [5, 1, 3, 0, 0]
  assert decode.sampling.seed[:3].tolist() == [1004, 1000, 1002]
  two = DecodeSlices(request_ids=(7,), generations=(0,), rows=(4,), positions=(3,))
  _, decode = step_inputs(StepPlan(step_id=0, decodes=two), BUCKETS, rows)
  assert decode.rows.tolist() == [4, ROWS]


def test_a_mixed_step_has_its_own_sizes_and_all_rows():
  plan = StepPlan(step_id=0, prefills=(prefill(1, 0, 5),), decodes=DECODES)
  part, decode = step_inputs(plan, BUCKETS, rows_state())
  assert len(part.batch.tokens) == 8 and len(decode.rows) == ROWS
  part, decode = step_inputs(StepPlan(step_id=0, prefills=plan.prefills), BUCKETS, rows_state())
  assert len(part.batch.tokens) == 16 and decode is None


def test_page_updates_and_seats_come_before_the_arrays():
  updates = PageUpdates(rows=(1, 4), indices=(2, 0), page_ids=(33, 34))
  s = prefill(1, 0, 5, temperature=0.25, top_p=0.5, seed=2**32 + 3)
  plan = StepPlan(step_id=0, prefills=(s,), decodes=DECODES, page_updates=updates)
  part, decode = step_inputs(plan, BUCKETS, rows_state())
  assert part.batch.tables[0, 2] == 33 and decode.tables[0, 0] == 34
  assert part.sampling.temperature[0] == np.float32(0.25)
  assert part.sampling.top_k[0] == VOCAB and part.sampling.top_p[0] == np.float32(0.5)
  assert part.sampling.seed[0] == 3


def test_a_request_without_a_seed_samples_by_its_id():
  rows = rows_state()
  rows.seat(0, 77, SamplingParams(max_tokens=1))
  rows.seat(1, 77, SamplingParams(max_tokens=1, seed=0))
  assert rows.seed[:2].tolist() == [77, 0]


def test_arrays_given_out_do_not_follow_the_rows():
  """JAX may read them while the next plan is being made."""
  rows = rows_state()
  plan = StepPlan(step_id=0, prefills=(prefill(1, 0, 5),), decodes=DECODES)
  given_out = step_inputs(plan, BUCKETS, rows)
  leaves = [leaf for leaf in jax.tree.leaves(given_out) if isinstance(leaf, np.ndarray)]
  before = [leaf.copy() for leaf in leaves]
  for array in (rows.tables, rows.temperature, rows.top_k, rows.top_p, rows.seed):
    assert not any(np.shares_memory(array, leaf) for leaf in leaves)
    array[:] = 3
  assert len(leaves) > 10
  assert all((a == b).all() for a, b in zip(leaves, before, strict=True))
