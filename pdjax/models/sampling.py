"""Logits to token ids, on the device. Rows never see each other."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Sampling(NamedTuple):
  """How each row samples, as columns [R]; `core.request.SamplingParams` says what they mean."""

  temperature: jax.Array  # float32, 0 is greedy
  top_k: jax.Array  # int32, the vocabulary size for no limit
  top_p: jax.Array  # float32
  seed: jax.Array  # uint32


def _truncate(
  logits: jax.Array,  # [R, V]
  sampling: Sampling,
) -> jax.Array:  # [R, V], whether an id may be drawn
  """Top-k, then the smallest set of the rest whose probability reaches top_p; ties by lower id."""
  ids = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
  negated, order = lax.sort((-logits, ids), num_keys=1, is_stable=True)
  in_top_k = ids < sampling.top_k[:, None]
  p = jax.nn.softmax(jnp.where(in_top_k, -negated, -jnp.inf), axis=-1)
  before = jnp.cumsum(p, axis=-1) - p  # probability of the likelier ids
  # top_p 1 keeps all by definition, not by a sum that may round to 1 early
  in_top_p = (before < sampling.top_p[:, None]) | (sampling.top_p >= 1)[:, None]
  last = jnp.sum(in_top_k & in_top_p, axis=-1, keepdims=True) - 1
  last_logit = -jnp.take_along_axis(negated, last, axis=-1)
  last_id = jnp.take_along_axis(order, last, axis=-1)
  return (logits > last_logit) | ((logits == last_logit) & (ids <= last_id))


def _draw(logits: jax.Array, sampling: Sampling, positions: jax.Array) -> jax.Array:
  """One id per row from softmax(logits / temperature), truncated; rows at temperature 0 get any."""
  _, vocab_size = logits.shape
  temperature = jnp.where(sampling.temperature > 0, sampling.temperature, 1)[:, None]
  # the largest becomes 0, so that a tiny temperature gives -inf and never inf - inf
  logits = (logits - logits.max(axis=-1, keepdims=True)) / temperature
  truncates = (sampling.temperature > 0) & (
    (sampling.top_k < vocab_size) | (sampling.top_p < 1)
  )  # the sort is the dear part
  keep = lax.cond(
    truncates.any(),
    lambda: _truncate(logits, sampling),
    lambda: jnp.ones(logits.shape, bool),
  )

  def noise(seed, position):
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)
    return jax.random.gumbel(key, (vocab_size,))

  noisy = logits + jax.vmap(noise)(sampling.seed, positions)
  return jnp.argmax(jnp.where(keep, noisy, -jnp.inf), axis=-1)


def sample(
  logits: jax.Array,  # [R, V]
  sampling: Sampling,
  positions: jax.Array,  # [R]
) -> jax.Array:  # [R] int32
  """The next id of each row: the likeliest at temperature 0, else drawn after top-k and top-p.

  The key of a draw is folded from (seed, position), and nothing of a row depends on another row. A
  row with a logit that is not finite gives -1. Greedy rows alone cost one argmax.
  """
  logits = logits.astype(jnp.float32)
  greedy = jnp.argmax(logits, axis=-1)
  samples = sampling.temperature > 0
  drawn = lax.cond(
    samples.any(), lambda: _draw(logits, sampling, positions), lambda: jnp.zeros_like(greedy)
  )
  ids = jnp.where(samples, drawn, greedy)
  return jnp.where(jnp.isfinite(logits).all(axis=-1), ids, -1).astype(jnp.int32)
