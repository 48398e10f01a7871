"""A row's token depends on its logits, parameters, seed and position alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdjax.core.request import MAX_HELD_STOP_IDS, MAX_LOGPROBS
from pdjax.models.sampling import Sampled, Sampling, _truncate, sample

pytestmark, once = pytest.mark.quick, pytest.mark.once

V = 50
run_all = jax.jit(sample)
truncate = jax.jit(_truncate)


def columns(num_rows, stop_ids=(), vocab_size=V, **params):
  """Columns of `num_rows`; a parameter is a value for all rows or one for each."""
  params = {
    "temperature": 1.0, "top_k": vocab_size, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0,
    "seed": 0, "min_position": 0, "logprobs": False,
  } | params  # fmt: skip
  dtypes = {"top_k": np.int32, "seed": np.uint32, "min_position": np.int32, "logprobs": bool}
  held = np.full((num_rows, MAX_HELD_STOP_IDS), vocab_size, np.int32)
  held[:, : len(stop_ids)] = stop_ids
  return Sampling(
    stop_ids=held,
    **{
      name: np.broadcast_to(np.asarray(value, dtypes.get(name, np.float32)), num_rows)
      for name, value in params.items()
    },
  )


SIZE, DRAWS = 40, 4000  # one shape compiles in seconds, so all share two


def run(logits, params, positions, seen=None, size=SIZE):
  """As many pool rows as samples, each sample of its own; padded as a step pads, to `size`."""
  num_rows, _ = logits.shape
  seen = np.zeros(logits.shape, bool) if seen is None else seen
  padding = columns(size - num_rows, temperature=0)
  got = run_all(
    np.pad(logits, ((0, size - num_rows), (0, 0))),
    Sampling(*map(np.concatenate, zip(params, padding))),
    np.pad(np.asarray(positions), (0, size - num_rows)),
    np.pad(seen, ((0, size - num_rows), (0, 0))),
    np.arange(size),
  )
  return Sampled(*(np.asarray(x)[:num_rows] for x in got))


def of_few(logits):
  """A row of `V` logits of which only the first may come."""
  return np.pad(np.float32(logits), (0, V - len(logits)), constant_values=-1000)


def draw(logits, num_draws, **params):
  """Ids of one row of logits at positions 0, 1, ..."""
  rows = np.broadcast_to(of_few(logits), (DRAWS, V))
  seen, owner = np.zeros((1, V), bool), np.zeros(DRAWS, np.int32)
  params = columns(DRAWS, **params)
  ids = [
    run_all(rows, params, start + np.arange(DRAWS), seen, owner).ids
    for start in range(0, num_draws, DRAWS)
  ]
  return np.concatenate(ids)[:num_draws]


def logits_of(seed=0, num_rows=1, scale=2.0):
  return scale * np.random.default_rng(seed).standard_normal((num_rows, V)).astype(np.float32)


def softmax(x):
  p = np.exp(x.astype(float) - x.max())
  return p / p.sum()


def test_temperature_0_is_greedy():
  logits = logits_of(num_rows=20)
  ids = run(logits, columns(20, temperature=0, top_k=3, top_p=0.1, min_p=0.9), np.arange(20)).ids
  assert ids.dtype == jnp.int32
  np.testing.assert_array_equal(ids, logits.argmax(-1))
  ties = np.zeros((2, V), np.float32)
  ties[1, [7, 9]] = 1
  assert run(ties, columns(2, temperature=0), [0, 1]).ids.tolist() == [0, 7]


@pytest.mark.parametrize("temperature", [0.5, *(pytest.param(t, marks=once) for t in (1.0, 2.0))])
def test_frequencies_are_the_softmax(temperature):
  logits, num_draws = logits_of()[0], 40_000
  p = softmax(logits / temperature)
  counts = np.bincount(draw(logits, num_draws, temperature=temperature, seed=7), minlength=V)
  deviations = (counts - num_draws * p) / np.sqrt(num_draws * p * (1 - p) + 1)
  assert np.abs(deviations).max() < 5
  assert np.sqrt((deviations**2).mean()) < 1.5


@pytest.mark.parametrize("top_k", [1, 2, 7, V, V + 1])
def test_top_k_draws_each_of_the_k_likeliest_and_no_other(top_k):
  logits = logits_of(scale=0.5)[0]
  ids = draw(logits, 4000, top_k=top_k)
  assert set(ids) == set(np.argsort(-logits)[:top_k])


@pytest.mark.parametrize("top_p", [0.01, 0.3, 0.8, 0.95])
def test_top_p_draws_from_the_smallest_set_that_reaches_p(top_p):
  logits = logits_of(seed=2, scale=1.0)[0]
  order = np.argsort(-logits)
  cumulative = np.cumsum(softmax(logits)[order])
  size = int(np.argmax(cumulative >= top_p)) + 1
  assert min(abs(cumulative - top_p)) > 1e-4  # not a matter of rounding
  assert set(draw(logits, 20_000, top_p=top_p)) == set(order[:size])


@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.parametrize("min_p", [0.02, 0.2, 1.0])
def test_min_p_draws_what_is_at_least_so_many_times_as_likely_as_the_likeliest(min_p, temperature):
  logits = logits_of(seed=5, scale=1.0)[0]
  p = softmax(logits / temperature)
  assert min(abs(p / p.max() - min_p)[p < p.max()]) > 1e-5
  ids = draw(logits, 20_000, min_p=min_p, temperature=temperature)
  assert set(ids) == set(np.flatnonzero(p >= min_p * p.max()))
  ties = np.array([1, 0, 1, 0.999], np.float32)
  assert set(draw(ties, 200, min_p=1)) == {0, 2}


def test_top_p_counts_within_top_k():
  logits = np.log(np.array([4, 3, 2, 1], np.float32))
  # of the top 2, 4/7 and 3/7: the first alone reaches 0.5 (it would not within all four)
  assert set(draw(logits, 500, top_k=2, top_p=0.5)) == {0}
  assert set(draw(logits, 500, top_p=0.5)) == {0, 1}
  assert set(draw(logits, 500, top_k=2, top_p=0.6)) == {0, 1}


def test_top_p_counts_what_min_p_takes_out():
  """As in transformers. After min_p, as in vLLM, the first id would be 4/7 and reach 0.55 alone."""
  logits = np.log(np.array([4, 3, 1, 1, 1], np.float32))
  assert set(draw(logits, 500, top_p=0.55, min_p=0.5)) == {0, 1}


@pytest.mark.once
def test_no_limit_keeps_ids_of_vanishing_probability():
  logits = np.array([[0, -30, -60]], np.float32)  # the sum of probabilities is 1 after the first
  assert truncate(logits, columns(1, top_k=3)).all()
  company = columns(1, top_k=3, top_p=0.999)
  assert truncate(logits, company).tolist() == [[True, False, False]]
  both = Sampling(*map(np.concatenate, zip(columns(1, top_k=3), company)))
  assert truncate(np.repeat(logits, 2, 0), both).tolist() == [[True] * 3, [True, False, False]]


def test_ties_keep_exactly_k():
  assert set(draw(np.zeros(V), 4000, top_k=3)) == {0, 1, 2}
  assert set(draw(np.zeros(4), 500, top_p=0.5)) == {0, 1}
  assert set(draw(np.array([0, 0, 1, 0, 0]), 500, top_k=3)) == {0, 1, 2}


def kept_by_sorting(logits, top_k, top_p):
  """What a full sort keeps, in float64; and how near rounding comes to another answer."""
  order = np.lexsort((np.arange(len(logits)), -logits))[:top_k]
  p = np.exp(logits[order].astype(float))
  before = (np.cumsum(p) - p) / p.sum()
  near = np.abs(before - top_p).min() if top_p < 1 else 1.0
  return set(order[(before < top_p) | (top_p >= 1)]), near


@pytest.mark.once
@settings(max_examples=60, derandomize=True, deadline=None)
@given(
  st.integers(0, 2**32 - 1),
  st.sampled_from([3, 700, 3000]),
  st.sampled_from([0.0, 0.3, 3.0, 12.0]),
  st.booleans(),
)
def test_what_may_be_drawn_is_what_a_full_sort_keeps(seed, vocab_size, scale, has_ties):
  """Of any shape, with ties and with ids that a mask took out, each row for itself."""
  rng = np.random.default_rng(seed)
  logits = scale * rng.standard_normal((4, vocab_size)).astype(np.float32)
  if has_ties:
    logits = np.round(logits)
  logits[:, rng.integers(1, vocab_size, 2)] = -np.inf
  logits -= logits.max(-1, keepdims=True)
  top_k = rng.integers(1, vocab_size + 1, 4)
  top_p = rng.choice([0.05, 0.5, 0.9, 0.999, 1.0], 4).astype(np.float32)
  params = columns(4, vocab_size=vocab_size, top_k=top_k, top_p=top_p)
  kept = np.asarray(truncate(logits, params))
  for row in range(4):
    want, near = kept_by_sorting(logits[row], top_k[row], top_p[row])
    if near > 1e-5:
      assert set(np.flatnonzero(kept[row])) == want


def penalised(logits, seen, penalty):
  return np.where(seen, np.where(logits > 0, logits / penalty, logits * penalty), logits)


@pytest.mark.parametrize("penalty", [0.5, 1.3, 4.0])
def test_the_penalty_divides_positive_logits_of_seen_ids_and_multiplies_others(penalty):
  """Before the temperature; greedy rows pay it too, and rows without one stay as they are."""
  logits, rng = logits_of(num_rows=30) - 4, np.random.default_rng(1)  # the largest near 0
  seen = rng.random((30, V)) < 0.4
  want = penalised(logits, seen, np.float32(penalty))
  asks = np.arange(30) % 3 > 0
  ids = run(logits, columns(30, temperature=0, repetition_penalty=np.where(asks, penalty, 1)),
            np.arange(30), seen).ids  # fmt: skip
  np.testing.assert_array_equal(ids, np.where(asks, want.argmax(-1), logits.argmax(-1)))
  assert (want.argmax(-1) != logits.argmax(-1)).any()
  warm = dict(temperature=0.7, top_k=9, seed=np.arange(30))
  drawn = run(logits, columns(30, repetition_penalty=penalty, **warm), np.arange(30), seen).ids
  np.testing.assert_array_equal(drawn, run(want, columns(30, **warm), np.arange(30)).ids)


@pytest.mark.once
def test_seen_ids_are_those_of_the_row_that_is_sampled():
  """Samples come in another order than rows; padding reads a row but harms none."""
  logits, seen = np.zeros((4, V), np.float32), np.zeros((3, V), bool)
  for row in range(3):
    seen[row, : row + 1] = True
  rows = np.array([2, 0, 1, 3])
  ids = run_all(logits, columns(4, temperature=0, repetition_penalty=[2, 2, 2, 1]),
                np.zeros(4, np.int32), seen, rows).ids  # fmt: skip
  assert ids.tolist() == [0, 0, 0, 0]  # a logit of 0 has no sign to be penalised by
  ids = run_all(logits + 1, columns(4, temperature=0, repetition_penalty=[2, 2, 2, 1]),
                np.zeros(4, np.int32), seen, rows).ids  # fmt: skip
  assert ids.tolist() == [3, 1, 2, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_ids_cannot_come_before_their_position(temperature):
  logits = np.zeros((40, V), np.float32)
  logits[:, [3, 9]] = 20
  params = columns(40, temperature=temperature, min_position=20, stop_ids=(3, 9))
  ids = np.asarray(run(logits, params, np.arange(40)).ids)
  assert not set(ids[:20]) & {3, 9} and (ids[:20] >= 0).all()
  assert set(ids[20:]) <= {3, 9}


def test_filters_go_on_without_the_ids_that_are_held_back():
  """The mask comes before top-k: with the likeliest masked, top-1 is the next."""
  logits = np.tile(of_few(np.log([8, 4, 2, 1])), (SIZE, 1))
  params = dict(min_position=1000, stop_ids=(0,), seed=np.arange(SIZE))
  for rules in (dict(top_k=1), dict(top_p=0.5), dict(min_p=0.6)):
    ids = run(logits, columns(SIZE, **params, **rules), np.arange(SIZE)).ids
    assert set(ids.tolist()) == {1}, rules


def test_logprobs_are_of_the_raw_logits():
  """Whatever the rules are that the token was chosen by; of the chosen and of the likeliest."""
  logits, rng = logits_of(num_rows=12), np.random.default_rng(2)
  logits[3, :] = 0  # ties go by id
  seen = rng.random((12, V)) < 0.5
  params = columns(
    12, temperature=1.7, top_k=20, min_p=0.01, repetition_penalty=1.4, logprobs=True,
    min_position=99, stop_ids=(1, 2), seed=np.arange(12),
  )  # fmt: skip
  got = run(logits, params, np.arange(12), seen)
  exact = logits.astype(float) - np.log(np.exp(logits.astype(float)).sum(-1, keepdims=True))
  np.testing.assert_allclose(got.logprobs, exact[np.arange(12), got.ids], atol=2e-6)
  order = np.argsort(-logits, axis=-1, kind="stable")[:, :MAX_LOGPROBS]
  np.testing.assert_array_equal(got.top_ids, order)
  np.testing.assert_allclose(got.top_logprobs, np.take_along_axis(exact, order, -1), atol=2e-6)


@pytest.mark.once
def test_a_vocabulary_smaller_than_the_most_logprobs_gives_all_it_has():
  params, seen = columns(2, vocab_size=3, logprobs=True), np.zeros((2, 3), bool)
  got = run_all(np.zeros((2, 3), np.float32), params, np.arange(2), seen, np.arange(2))
  np.testing.assert_allclose(got.top_logprobs, np.full((2, 3), -np.log(3)), rtol=1e-6)


def random_columns(rng, num_rows):
  return columns(
    num_rows,
    stop_ids=(4, 5, 6),
    temperature=rng.choice([0, 0.7, 1.5], num_rows),
    top_k=rng.choice([1, 5, V], num_rows),
    top_p=rng.choice([0.4, 0.9, 1.0], num_rows),
    min_p=rng.choice([0, 0.1], num_rows),
    repetition_penalty=rng.choice([1, 1.8], num_rows),
    seed=rng.integers(0, 1 << 32, num_rows, dtype=np.uint32),
    min_position=rng.choice([0, 5000], num_rows),
    logprobs=rng.choice([False, True], num_rows),
  )


@pytest.mark.once
def test_a_token_depends_on_no_batch_mate():
  rng = np.random.default_rng(3)
  num_rows = 17
  logits, positions = logits_of(4, num_rows), rng.integers(0, 9999, num_rows)
  params, seen = random_columns(rng, num_rows), rng.random((num_rows, V)) < 0.3
  want = run(logits, params, positions, seen)
  assert (want.ids != logits.argmax(-1)).any()
  for size, padded_to in ((1, 1), (1, SIZE), (2, SIZE), (8, 8), (17, SIZE)):
    for _ in range(12):
      rows = rng.permutation(num_rows)[:size]
      company = Sampling(*(x[rows] for x in params))
      got = run(logits[rows], company, positions[rows], seen[rows], padded_to)
      np.testing.assert_array_equal(got.ids, want.ids[rows])
      for a, b in zip(got[1:], want[1:]):
        asked = params.logprobs[rows]
        np.testing.assert_array_equal(a[asked], b[rows][asked])


def test_seed_and_position_both_count():
  logits = np.zeros((30, V), np.float32)
  numbers, fives = np.arange(30), np.full(30, 5)
  by_seed = run(logits, columns(30, seed=numbers), fives).ids
  by_position = run(logits, columns(30, seed=fives), numbers).ids
  for ids in (by_seed, by_position):
    assert len(set(np.asarray(ids).tolist())) > 15
  assert (by_seed != by_position).sum() > 15
  np.testing.assert_array_equal(by_seed, run(logits, columns(30, seed=numbers), fives).ids)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_gives_minus_1_and_harms_no_other(bad):
  logits = logits_of(num_rows=3)
  for temperature in (0, 1):
    params = columns(3, temperature=temperature, top_k=9, top_p=0.9, logprobs=True)
    want = run(logits, params, np.arange(3))
    broken = logits.copy()
    broken[1, 7] = bad
    got = run(broken, params, np.arange(3))
    assert got.ids[1] == -1
    for a, b in zip(got, want):
      np.testing.assert_array_equal(np.asarray(a)[[0, 2]], np.asarray(b)[[0, 2]])


def test_tiny_temperatures_are_greedy():
  logits = logits_of(num_rows=20)
  ids = run(logits, columns(20, temperature=1e-30, top_p=0.9), np.arange(20)).ids
  np.testing.assert_array_equal(ids, logits.argmax(-1))
