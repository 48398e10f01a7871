"""Plans as arrays: every token in its place, padding where nothing may be written."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdjax.core.plan import DecodeSlices, PageUpdates, Slice, StepPlan
from pdjax.core.request import MAX_HELD_STOP_IDS, SamplingParams
from pdjax.engine.batch import RowState, pick_prefill_bucket, step_inputs
from pdjax.engine.buckets import Buckets
from pdjax.models.sampling import sample
from pdjax.scheduling.pages import PageConfig

pytestmark = pytest.mark.quick
ROWS, PAGE_SIZE, PAGES_PER_ROW, NUM_PAGES, VOCAB = 5, 64, 7, 40, 1000


def rows_state(num_rows=ROWS):
  """Every row has a table and a temperature of its own."""
  pages = PageConfig(
    num_rows=num_rows, page_size=PAGE_SIZE, pages_per_row=PAGES_PER_ROW, num_pages=NUM_PAGES
  )
  rows = RowState(pages, VOCAB)
  for row in range(num_rows):
    rows.tables[row] = 100 * row + np.arange(PAGES_PER_ROW)
    sampling = SamplingParams(max_tokens=9, temperature=row + 1.0, top_k=row + 1)
    rows.seat(row, 1000 + row, 4, sampling)
  return rows


def prefill(row, start, num_tokens, emits=True, **sampling):
  return Slice(
    request_id=row + 10,
    generation=0,
    row=row,
    num_prompt_tokens=start + num_tokens,
    start=start,
    num_tokens=num_tokens,
    token_ids=tuple(100 * row + i for i in range(num_tokens)),
    emits_token=emits,
    sampling=SamplingParams(max_tokens=5, **sampling),
  )


@st.composite
def steps(draw):
  """A plan of distinct rows of a pool, and a size that is just or more than enough for it."""
  num_rows = draw(st.integers(1, 9))
  order = draw(st.permutations(range(num_rows)))
  num_prefills = draw(st.integers(1, num_rows))
  num_decodes = draw(st.integers(0, num_rows - num_prefills))
  lengths = st.integers(1, 300) | st.sampled_from([1, PAGE_SIZE])
  slices = tuple(
    prefill(row, draw(st.integers(0, 50)), draw(lengths), draw(st.booleans()))
    for row in order[:num_prefills]
  )
  rows = tuple(order[num_prefills : num_prefills + num_decodes])
  decodes = DecodeSlices(
    request_ids=rows,
    generations=(0,) * num_decodes,
    rows=rows,
    positions=tuple(draw(st.integers(1, 60)) for _ in rows),
  )
  plan = StepPlan(step_id=0, prefills=slices, decodes=decodes)
  return num_rows, plan, plan.num_tokens + draw(st.sampled_from([0, 0, 1, 40]))


def inputs_of(num_rows, plan, size):
  rows = rows_state(num_rows)
  seats = rows.temperature.copy()
  inputs = step_inputs(plan, Buckets(prefill=(size,), mixed=(size,)), rows)
  assert (rows.temperature != seats).sum() == len(plan.prefills), "prefill seats its rows anew"
  return inputs, rows


@given(steps())
def test_tokens_are_packed_without_gaps_and_slices_say_which_are_whose(case):
  num_rows, plan, size = case
  inputs, rows = inputs_of(num_rows, plan, size)
  batch, num_prefill = inputs.batch, plan.num_prefill_tokens
  assert batch.tokens.shape == batch.positions.shape == batch.slots.shape == (size,)
  assert batch.tokens[:num_prefill].tolist() == [i for s in plan.prefills for i in s.token_ids]
  owners = [s.row for s in plan.prefills for _ in range(s.num_tokens)] + list(plan.decodes.rows)
  positions = [s.start + i for s in plan.prefills for i in range(s.num_tokens)]
  positions += plan.decodes.positions
  assert batch.positions[: plan.num_tokens].tolist() == positions
  assert (batch.positions[plan.num_tokens :] == -1).all()
  # K and V go to the page that the table has for a position; those of padding nowhere.
  pages, places = np.divmod(batch.slots, PAGE_SIZE)
  want = [rows.tables[row, at // PAGE_SIZE] for row, at in zip(owners, positions, strict=True)]
  assert pages[: plan.num_tokens].tolist() == want
  assert places[: plan.num_tokens].tolist() == [at % PAGE_SIZE for at in positions]
  assert (batch.slots[plan.num_tokens :] == NUM_PAGES * PAGE_SIZE).all()
  # Slices cover the prompts in order; the rest are of no token.
  n, s = len(plan.prefills), batch.prefill
  assert s.lengths[:n].tolist() == [part.num_tokens for part in plan.prefills]
  assert s.starts[:n].tolist() == np.cumsum([0, *s.lengths[: n - 1]]).tolist()
  assert s.offsets[:n].tolist() == [part.start for part in plan.prefills]
  assert (s.tables[:n] == rows.tables[[part.row for part in plan.prefills]]).all()
  assert (s.lengths[n:] == 0).all()


@given(steps())
def test_decodes_come_after_the_prompts_each_with_the_table_of_its_row(case):
  num_rows, plan, size = case
  inputs, rows = inputs_of(num_rows, plan, size)
  n, decode, first = len(plan.decodes), inputs.batch.decode, plan.num_prefill_tokens
  want = [num_rows] * size
  want[first : first + n] = plan.decodes.rows
  assert inputs.token_rows.tolist() == want
  if not n:
    assert decode is None
    return
  assert sorted(decode.starts[:n]) == list(range(first, first + n))
  assert (decode.tables[:n] == rows.tables[inputs.token_rows[decode.starts[:n]]]).all()
  # Those of like length are neighbours. A mixed step has a slice for every row.
  positions = inputs.batch.positions[decode.starts[:n]].tolist()
  assert decode.offsets[:n].tolist() == positions == sorted(positions)
  assert decode.lengths.tolist() == [1] * n + [0] * (num_rows - n)


def test_a_step_of_prompts_that_all_begin_in_it_says_so_where_that_helps():
  begun, new = prefill(0, 3, 5), prefill(1, 0, 6)
  for slices, decodes, is_fresh in (
    ([new], None, True), ([new, begun], None, False), ([new], DECODES, False)
  ):  # fmt: skip
    plan = plan_of(slices, decodes)
    plain = step_inputs(plan, BUCKETS, rows_state()).batch
    batch = step_inputs(plan, BUCKETS, rows_state(), serves_fresh=True).batch
    assert plain.fresh is None and plain.prefill is not None
    assert (batch.fresh is not None) == (batch.prefill is None) == is_fresh
    jax.tree.map(np.testing.assert_array_equal, plain.prefill, batch.fresh or batch.prefill)


@given(steps())
def test_samples_are_the_last_tokens_of_emitting_slices_then_the_decodes(case):
  num_rows, plan, size = case
  inputs, rows = inputs_of(num_rows, plan, size)
  used = inputs.sample_rows < num_rows
  emitting = [s for s in plan.prefills if s.emits_token]
  owners = [s.row for s in emitting] + list(plan.decodes.rows)
  assert inputs.sample_rows[used].tolist() == owners
  places = inputs.sample_places[used]
  last = [s.start + s.num_tokens - 1 for s in emitting] + list(plan.decodes.positions)
  assert inputs.batch.positions[places].tolist() == last
  for place, s in zip(places, emitting):
    assert inputs.batch.tokens[place] == s.token_ids[-1]
  assert inputs.sampling.temperature[used].tolist() == rows.temperature[owners].tolist()
  assert (inputs.sampling.temperature[~used] == 0).all(), "padding is greedy"


@given(st.lists(st.tuples(st.integers(1, 60), st.booleans()), min_size=1, max_size=ROWS))
def test_the_prefill_bucket_is_the_smallest_with_room_for_tokens_and_first_tokens(parts):
  plan = plan_of(prefill(row, 0, n, emits) for row, (n, emits) in enumerate(parts))
  num_tokens, num_emits = plan.num_tokens, sum(emits for _, emits in parts)
  sizes = (16, 32, 64, 128)
  if num_tokens > 128:
    with pytest.raises(ValueError, match=f"a step of {num_tokens} tokens does not fit"):
      pick_prefill_bucket(plan, sizes, ROWS)
    return
  size, room = pick_prefill_bucket(plan, sizes, ROWS)
  assert num_tokens <= size and num_emits <= room <= ROWS
  fits = [s for s in sizes if num_tokens <= s and (num_emits <= s // 16 or s == 128)]
  assert size == fits[0]


def plan_of(slices, decodes=None):
  return StepPlan(step_id=0, prefills=tuple(slices), decodes=decodes or DecodeSlices())


def test_the_largest_bucket_has_room_for_a_first_token_of_every_row():
  """A step that the token budget allows always has a shape, however short its prompts are."""
  plan = plan_of(prefill(row, 0, 1) for row in range(ROWS))
  assert pick_prefill_bucket(plan, (16,), ROWS) == (16, ROWS)


BUCKETS = Buckets(prefill=(16,), mixed=(8, 32), rows=(2, ROWS))
DECODES = DecodeSlices(
  request_ids=(7, 8, 9), generations=(0, 0, 0), rows=(4, 0, 2), positions=(3, 11, 5)
)


def test_decodes_alone_are_padded_with_rows_that_nobody_has():
  rows = rows_state()
  inputs = step_inputs(plan_of((), DECODES), BUCKETS, rows)
  decode = inputs.batch.decode
  assert inputs.batch.prefill is None
  assert inputs.sample_rows.tolist() == [4, 0, 2, ROWS, ROWS]
  assert inputs.batch.positions.tolist() == [3, 11, 5, -1, -1]
  assert decode.starts[:3].tolist() == [0, 2, 1], "the shortest first"
  assert decode.tables[:3].tolist() == rows.tables[[4, 2, 0]].tolist()
  assert decode.lengths.tolist() == [1, 1, 1, 0, 0]
  assert inputs.sampling.temperature.tolist() == [5, 1, 3, 0, 0]
  assert inputs.sampling.seed[:3].tolist() == [1004, 1000, 1002]
  one = DecodeSlices(request_ids=(7,), generations=(0,), rows=(4,), positions=(3,))
  assert step_inputs(plan_of((), one), BUCKETS, rows).sample_rows.tolist() == [4, ROWS]


def test_a_mixed_step_has_its_own_sizes_with_decodes_counted():
  five, six = (prefill(1, 0, n) for n in (5, 6))
  sizes = {n: len(step_inputs(plan_of([s], DECODES), BUCKETS, rows_state()).batch.tokens)
           for n, s in ((5, five), (6, six))}  # fmt: skip
  assert sizes == {5: 8, 6: 32}  # 5 + 3 decodes fill the first, 6 + 3 do not fit
  assert len(step_inputs(plan_of([five]), BUCKETS, rows_state()).batch.tokens) == 16


def test_page_updates_and_seats_come_before_the_arrays():
  updates = PageUpdates(rows=(1, 4), indices=(2, 0), page_ids=(33, 34))
  s = prefill(1, 0, 5, temperature=0.25, top_p=0.5, seed=2**32 + 3)
  plan = StepPlan(step_id=0, prefills=(s,), decodes=DECODES, page_updates=updates)
  inputs = step_inputs(plan, BUCKETS, rows_state())
  assert inputs.batch.prefill.tables[0, 2] == 33 and inputs.batch.decode.tables[0, 0] == 34
  assert inputs.sampling.temperature[0] == np.float32(0.25)
  assert inputs.sampling.top_k[0] == VOCAB and inputs.sampling.top_p[0] == np.float32(0.5)
  assert inputs.sampling.seed[0] == 3


def test_a_request_without_a_seed_samples_by_its_id():
  rows = rows_state()
  rows.seat(0, 77, 4, SamplingParams(max_tokens=1))
  rows.seat(1, 77, 4, SamplingParams(max_tokens=1, seed=0))
  assert rows.seed[:2].tolist() == [77, 0]


def test_a_row_keeps_nothing_of_the_request_before():
  """And whoever asks for nothing gets what padding gets, but for the seed."""
  rows = rows_state()
  asking = SamplingParams(
    max_tokens=9, min_tokens=3, temperature=1.0, top_k=3, top_p=0.5, min_p=0.1,
    repetition_penalty=1.5, stop_ids=(7, 8), logprobs=2,
  )  # fmt: skip
  columns = lambda: rows.sampling(np.array([1, ROWS]))._replace(seed=None)  # noqa: E731
  rows.seat(1, 5, 20, asking)
  for name, column in columns()._asdict().items():
    if column is not None:
      assert (column[0] != column[1]).any(), name
  assert rows.logprobs[1] == 2 and rows.min_position[1] == 23
  rows.seat(1, 6, 30, SamplingParams(max_tokens=9))
  for name, column in columns()._asdict().items():
    if column is not None:
      assert (column[0] == column[1]).all(), name
  assert rows.logprobs[1] is None


def test_stop_ids_that_the_model_does_not_have_are_left_out():
  rows = rows_state()
  stop_ids = (-1, 7, VOCAB, 2**40, VOCAB - 1)
  rows.seat(0, 1, 10, SamplingParams(max_tokens=9, min_tokens=2, stop_ids=stop_ids))
  assert rows.stop_ids[0].tolist() == [7, VOCAB - 1] + [VOCAB] * (MAX_HELD_STOP_IDS - 2)


@pytest.mark.parametrize(
  ("params", "want"),
  [
    ({"top_p": 1e-60}, 3),  # the likeliest alone
    ({"top_p": 1e-39}, 3),  # a subnormal number, as a float32
    ({"repetition_penalty": 1e-60}, 2),  # the likeliest of those that the row has
    ({"repetition_penalty": 1e60}, 3),
  ],
)
def test_values_too_small_or_large_for_a_float32_mean_what_they_say(params, want):
  logits = np.tile(np.float32([0, -4, 5, 30]), (ROWS, 1))
  rows = RowState(PageConfig(num_rows=ROWS, page_size=4, pages_per_row=1, num_pages=ROWS), 4)
  for row in range(ROWS):
    rows.seat(row, row, 1, SamplingParams(max_tokens=1, temperature=1.0, **params))
  seen, own = np.tile([True, True, True, False], (ROWS, 1)), np.arange(ROWS)
  sampled = jax.jit(sample)(logits, rows.sampling(own), own, seen, own)
  assert sampled.ids.tolist() == [want] * ROWS


def test_arrays_given_out_do_not_follow_the_rows():
  """JAX may read them while the next plan is being made."""
  rows = rows_state()
  plan = StepPlan(step_id=0, prefills=(prefill(1, 0, 5),), decodes=DECODES)
  given_out = step_inputs(plan, BUCKETS, rows)
  leaves = [leaf for leaf in jax.tree.leaves(given_out) if isinstance(leaf, np.ndarray)]
  before = [leaf.copy() for leaf in leaves]
  arrays = [array for array in vars(rows).values() if isinstance(array, np.ndarray)]
  assert len(arrays) == 9
  for array in arrays:
    assert not any(np.shares_memory(array, leaf) for leaf in leaves)
    array[:] = 3
  assert len(leaves) > 10
  assert all((a == b).all() for a, b in zip(leaves, before, strict=True))
