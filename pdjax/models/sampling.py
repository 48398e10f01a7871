"""Logits to token ids, on the device. Rows never see each other."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pdjax.core.request import MAX_LOGPROBS


class Sampling(NamedTuple):
  """How each row samples, as columns [R]; `core.request.SamplingParams` says what they mean."""

  temperature: jax.Array  # float32, 0 is greedy
  top_k: jax.Array  # int32, the vocabulary size for no limit
  top_p: jax.Array  # float32
  min_p: jax.Array  # float32
  repetition_penalty: jax.Array  # float32
  seed: jax.Array  # uint32
  min_position: jax.Array  # int32, stop ids are masked at positions below it
  stop_ids: jax.Array  # [R, MAX_HELD_STOP_IDS] int32, the vocabulary size for none
  logprobs: jax.Array  # bool, whether they were asked for


class Sampled(NamedTuple):
  """What came out. The last three are zeros where no row asked."""

  ids: jax.Array  # [R] int32, -1 for a row whose logits are not finite
  logprobs: jax.Array  # [R] float32, of `ids`
  top_ids: jax.Array  # [R, MAX_LOGPROBS] int32, the likeliest first, ties by lower id
  top_logprobs: jax.Array  # [R, MAX_LOGPROBS] float32


def sample(
  logits: jax.Array,  # [R, V]
  sampling: Sampling,
  positions: jax.Array,  # [R]
  seen: jax.Array,  # [N, V] bool, the ids that stand in each row of a pool
  rows: jax.Array,  # [R] which of them each sample is of; N and above is nobody's
) -> Sampled:
  """The next id of each row: the likeliest at temperature 0, else drawn.

  In this order: repetition penalty, mask of stop ids before `min_position`, temperature, top-k,
  top-p of what top-k leaves, min-p. The key of a draw is folded from (seed, position), and nothing
  of a row depends on another row. Log-probabilities are of the logits as they came. Greedy rows
  that ask for nothing cost one argmax, as nothing else is computed until some row needs it.
  """
  _, vocab_size = logits.shape
  logits = logits.astype(jnp.float32)
  is_held = positions < sampling.min_position
  is_penalised = sampling.repetition_penalty != 1
  ids = lax.cond(
    ((sampling.temperature > 0) | is_held | is_penalised).any(),
    lambda: _choose(logits, sampling, positions, seen, rows),
    lambda: _likeliest(logits),
  )
  num_top = min(MAX_LOGPROBS, vocab_size)
  logprobs, top_ids, top_logprobs = lax.cond(
    sampling.logprobs.any(),
    lambda: _logprobs(logits, ids, num_top),
    lambda: (
      jnp.zeros(ids.shape, jnp.float32),
      jnp.zeros((*ids.shape, num_top), jnp.int32),
      jnp.zeros((*ids.shape, num_top), jnp.float32),
    ),
  )
  ids = jnp.where(jnp.isfinite(logits).all(axis=-1), ids, -1)
  return Sampled(ids, logprobs, top_ids, top_logprobs)


def _likeliest(logits: jax.Array) -> jax.Array:  # [R] int32, ties by lower id
  """`jnp.argmax` in two plain reductions: 0.4 ms instead of 1.8 where `_truncate` was timed."""
  _, vocab_size = logits.shape
  ids = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
  best = logits.max(axis=-1, keepdims=True)
  return jnp.where(logits == best, ids, vocab_size).min(axis=-1)


def _logprobs(logits: jax.Array, ids: jax.Array, num_top: int):
  total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
  chosen = jnp.take_along_axis(logits, ids[:, None], axis=-1)
  top, top_ids = lax.top_k(logits, num_top)
  return (chosen - total)[:, 0], top_ids.astype(jnp.int32), top - total


def _choose(
  logits: jax.Array, sampling: Sampling, positions: jax.Array, seen: jax.Array, rows: jax.Array
) -> jax.Array:  # [R] int32
  """One id per row, by every rule there is. Each rule is computed only if some row needs it."""
  is_penalised = sampling.repetition_penalty != 1
  logits = lax.cond(
    is_penalised.any(), lambda: _penalise(logits, sampling, seen, rows), lambda: logits
  )
  is_held = positions < sampling.min_position
  logits = lax.cond(is_held.any(), lambda: _hold_stops(logits, sampling, is_held), lambda: logits)
  samples = sampling.temperature > 0
  greedy = _likeliest(logits)
  drawn = lax.cond(samples.any(), lambda: _draw(logits, sampling, positions), lambda: greedy)
  return jnp.where(samples, drawn, greedy)


def _penalise(logits: jax.Array, sampling: Sampling, seen: jax.Array, rows: jax.Array):
  """Divides positive logits of ids that the row has, multiplies others.

  The penalty of CTRL, section 4.1, with the sign that Hugging Face and vLLM look at.
  """
  penalty = sampling.repetition_penalty[:, None]
  penalised = jnp.where(logits > 0, logits / penalty, logits * penalty)
  return jnp.where(seen.at[rows].get(mode="clip"), penalised, logits)


def _hold_stops(logits: jax.Array, sampling: Sampling, is_held: jax.Array):
  _, vocab_size = logits.shape
  stop_ids = jnp.where(is_held[:, None], sampling.stop_ids, vocab_size)
  return jax.vmap(lambda x, i: x.at[i].set(-jnp.inf, mode="drop"))(logits, stop_ids)


def _draw(logits: jax.Array, sampling: Sampling, positions: jax.Array) -> jax.Array:  # [R] int32
  """One id per row from softmax(logits / temperature), truncated; rows at temperature 0 get any."""
  _, vocab_size = logits.shape
  temperature = jnp.where(sampling.temperature > 0, sampling.temperature, 1)[:, None]
  # the largest becomes 0, so that a tiny temperature gives -inf and never inf - inf
  logits = (logits - logits.max(axis=-1, keepdims=True)) / temperature
  samples = sampling.temperature > 0

  def noise(seed, position):
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)
    return jax.random.gumbel(key, (vocab_size,))

  noisy = logits + jax.vmap(noise)(sampling.seed, positions)
  # relative to the likeliest, whose logit is 0 by now: no sum is needed
  noisy = jnp.where(logits >= jnp.log(sampling.min_p)[:, None], noisy, -jnp.inf)
  truncates = samples & ((sampling.top_k < vocab_size) | (sampling.top_p < 1))
  return lax.cond(
    truncates.any(),
    lambda: _likeliest(jnp.where(_truncate(logits, sampling), noisy, -jnp.inf)),
    lambda: _likeliest(noisy),
  )


# Truncation without a sort: `sample` of 8 rows of 49,152 with top-k and top-p takes 98 ms sorted
# and 10 ms this way (2 AMD EPYC cores, jax 0.10.2, 29 Nov 2026). `lax.top_k` of 1,024 takes 8 ms,
# and needs a second way for rows that want more.


def _truncate(
  logits: jax.Array,  # [R, V], the largest of a row is 0
  sampling: Sampling,
) -> jax.Array:  # [R, V], whether an id may be drawn
  """Top-k, then the smallest set of the rest whose probability reaches top_p; ties by lower id.

  Both keep the ids above some logit and the first few of those at it. That logit is found bit by
  bit, as the greatest at or above which there is enough: of ids for top-k, of probability for
  top-p. A sum over more ids, in the same order of addition, is never smaller, so rounding cannot
  mislead the search.
  """
  _, vocab_size = logits.shape
  keys = _sort_keys(logits)
  num_ids = jnp.minimum(sampling.top_k, vocab_size)
  keep = lax.cond(
    (num_ids < vocab_size).any(),
    lambda: _first(keys, jnp.ones_like(keys), num_ids),
    lambda: jnp.ones(keys.shape, bool),
  )
  p = jnp.where(keep, jnp.exp(logits), 0)
  within = lax.cond(
    (sampling.top_p < 1).any(),
    lambda: _first(keys, p, sampling.top_p * p.sum(axis=-1)),
    lambda: keep,
  )
  # top_p 1 keeps all by definition, not by a sum that may reach 1 early
  return keep & (within | (sampling.top_p >= 1)[:, None])


def _sort_keys(x: jax.Array) -> jax.Array:
  """int32 in the order of float32 `x`; equal for equal numbers, so also for both zeros."""
  bits = lax.bitcast_convert_type(jnp.where(x == 0, jnp.float32(0), x), jnp.int32)
  return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _first(
  keys: jax.Array,  # [R, V] int32
  weights: jax.Array,  # [R, V], not negative
  enough: jax.Array,  # [R]
) -> jax.Array:  # [R, V] bool
  """The fewest entries in order of key, then of index, whose weights sum to `enough` or more.

  Entries of one key weigh the same. All entries, where even they fall short.
  """

  def holds(threshold):
    return jnp.where(keys >= threshold[:, None], weights, 0).sum(axis=-1) >= enough

  lowest = jnp.full(enough.shape, jnp.iinfo(jnp.int32).min)
  threshold = jnp.where(holds(jnp.zeros_like(lowest)), 0, lowest)

  def narrow(i, threshold):
    higher = threshold + (jnp.int32(1) << (30 - i))
    return jnp.where(holds(higher), higher, threshold)

  threshold = lax.fori_loop(0, 31, narrow, threshold)[:, None]

  def by_index():
    above, at = keys > threshold, keys == threshold
    have = jnp.where(above, weights, 0).sum(axis=-1, keepdims=True)
    weight = jnp.where(at, weights, 0).max(axis=-1, keepdims=True)  # of each entry at the threshold
    before = jnp.cumsum(at, axis=-1) - at  # how many of them come first
    reached = have + before * weight >= enough[:, None]
    return above | (at & ((before == 0) | ~reached))  # one is needed, however sums round

  has_ties = ((keys == threshold).sum(axis=-1) > 1).any()
  return lax.cond(has_ties, by_index, lambda: keys >= threshold)
