"""A row's token depends on its logits, parameters, seed and position alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pdjax.models.sampling import Sampling, _truncate, sample

pytestmark = pytest.mark.quick

V = 50
run = jax.jit(sample)


def columns(num_rows, temperature=1.0, top_k=V, top_p=1.0, seed=0):
  return Sampling(
    np.broadcast_to(np.float32(temperature), num_rows),
    np.broadcast_to(np.int32(top_k), num_rows),
    np.broadcast_to(np.float32(top_p), num_rows),
    np.broadcast_to(np.uint32(seed), num_rows),
  )


def draw(logits, num_draws, **params):
  """Ids of one row of logits at positions 0, 1, ..."""
  rows = np.broadcast_to(np.float32(logits), (num_draws, len(logits)))
  return np.asarray(run(rows, columns(num_draws, **params), np.arange(num_draws, dtype=np.int32)))


def logits_of(seed=0, num_rows=1, scale=2.0):
  return scale * np.random.default_rng(seed).standard_normal((num_rows, V)).astype(np.float32)


def test_temperature_0_is_greedy():
  logits = logits_of(num_rows=20)
  ids = run(logits, columns(20, temperature=0, top_k=3, top_p=0.1), np.arange(20))
  assert ids.dtype == jnp.int32
  np.testing.assert_array_equal(ids, logits.argmax(-1))


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_frequencies_are_the_softmax(temperature):
  logits, num_draws = logits_of()[0], 40_000
  p = np.exp(logits.astype(float) / temperature)
  p /= p.sum()
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
  p = np.exp(logits[order].astype(float))
  cumulative = np.cumsum(p / p.sum())
  size = int(np.argmax(cumulative >= top_p)) + 1
  assert min(abs(cumulative - top_p)) > 1e-4  # not a matter of rounding
  assert set(draw(logits, 20_000, top_p=top_p)) == set(order[:size])


def test_top_p_counts_within_top_k():
  logits = np.log(np.array([4, 3, 2, 1], np.float32))
  # of the top 2, 4/7 and 3/7: the first alone reaches 0.5 (it would not within all four)
  assert set(draw(logits, 500, top_k=2, top_p=0.5)) == {0}
  assert set(draw(logits, 500, top_p=0.5)) == {0, 1}
  assert set(draw(logits, 500, top_k=2, top_p=0.6)) == {0, 1}


def test_no_limit_keeps_ids_of_vanishing_probability():
  logits = np.array([[0, -30, -60]], np.float32)  # the sum of probabilities is 1 after the first
  assert _truncate(logits, columns(1, top_k=3)).all()
  assert _truncate(logits, columns(1, top_k=3, top_p=0.999)).tolist() == [[True, False, False]]


def test_ties_keep_exactly_k():
  assert set(draw(np.zeros(V), 4000, top_k=3)) == {0, 1, 2}
  assert set(draw(np.zeros(4), 500, top_p=0.5)) == {0, 1}


def test_a_token_depends_on_no_batch_mate():
  rng = np.random.default_rng(3)
  num_rows = 17
  logits, positions = logits_of(4, num_rows), rng.integers(0, 9999, num_rows)
  params = Sampling(
    rng.choice([0, 0.7, 1.5], num_rows).astype(np.float32),
    rng.choice([1, 5, V], num_rows).astype(np.int32),
    rng.choice([0.4, 0.9, 1.0], num_rows).astype(np.float32),
    rng.integers(0, 1 << 32, num_rows, dtype=np.uint32),
  )
  want = np.asarray(run(logits, params, positions))
  assert (want != logits.argmax(-1)).any()
  for size in (1, 2, 3, 8, 17):
    for _ in range(12):
      rows = rng.permutation(num_rows)[:size]
      got = run(logits[rows], Sampling(*(x[rows] for x in params)), positions[rows])
      np.testing.assert_array_equal(got, want[rows])


def test_seed_and_position_both_count():
  logits = np.zeros((30, V), np.float32)
  numbers, fives = np.arange(30), np.full(30, 5)
  by_seed = run(logits, columns(30, seed=numbers), fives)
  by_position = run(logits, columns(30, seed=fives), numbers)
  for ids in (by_seed, by_position):
    assert len(set(np.asarray(ids).tolist())) > 15
  assert (by_seed != by_position).sum() > 15
  np.testing.assert_array_equal(by_seed, run(logits, columns(30, seed=numbers), fives))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_gives_minus_1_and_harms_no_other(bad):
  logits = logits_of(num_rows=3)
  for temperature in (0, 1):
    params, positions = columns(3, temperature=temperature, top_k=9), np.arange(3)
    want = np.asarray(run(logits, params, positions))
    broken = logits.copy()
    broken[1, 7] = bad
    got = np.asarray(run(broken, params, positions))
    assert got[1] == -1
    np.testing.assert_array_equal(got[[0, 2]], want[[0, 2]])


def test_tiny_temperatures_are_greedy():
  logits = logits_of(num_rows=20)
  ids = run(logits, columns(20, temperature=1e-30, top_p=0.9), np.arange(20))
  np.testing.assert_array_equal(ids, logits.argmax(-1))
