"""The checksum model of `pdjax.core.checksum` in JAX: exact integers, no weights.

It runs through the same cache, paging, attention loops and steps as a transformer. One wrong page,
position, row or layer gives a wrong token.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pdjax.core import checksum
from pdjax.core.model_config import ModelConfig
from pdjax.kernels.backends.xla import Reduction
from pdjax.models.model import Model

# Layer l caches K and V times an odd factor and multiplies its sum by the inverse modulo 2**32, so
# that the cache of one layer does not do for another.
_FACTORS = (1, 2654435769)

CHECKSUM = ModelConfig(
  name="checksum",
  num_layers=len(_FACTORS),
  d_model=1,
  num_heads=1,
  num_kv_heads=1,
  head_dim=1,
  d_ff=1,
  vocab_size=checksum.VOCAB_SIZE,
  max_len=1 << 20,
  position="learned",  # part of K itself, so there is nothing to turn
)


def _init(q):
  return jnp.zeros(q.shape, jnp.uint32)


def _step(total, q, k, v, key_positions, mask):
  j = key_positions.astype(jnp.uint32)[:, None]
  terms = k * (2 * j + 1) + v * (2 * j + 3)  # [B, K, S, h]
  seen = jnp.where(mask[:, None, :, :, None], terms[:, :, None], jnp.uint32(0))  # [B, K, t, S, h]
  return total + seen.sum(3, dtype=jnp.uint32)[:, :, None]


def _finish(total):
  return total


checksum_reduction = Reduction(_init, _step, _finish)
"""`pdjax.core.checksum.attend`."""


def _next_token(total: jax.Array) -> jax.Array:
  total = (total ^ total >> 16) * jnp.uint32(0x7FEB352D)
  total = (total ^ total >> 15) * jnp.uint32(0x846CA68B)
  total = total ^ total >> 16
  return (total % checksum.VOCAB_SIZE).astype(jnp.int32)


# Hidden is [T, 2]: the sum, and the key of the token, which every layer needs.


def _embed(params, tokens, positions):
  key = tokens.astype(jnp.uint32) + 1
  return jnp.stack([jnp.zeros_like(key), key], axis=1)


def _run_layers(params, hidden, positions, cache, attend, layers):
  total, k = hidden[:, :1, None], hidden[:, 1:, None]
  v = k * jnp.uint32(checksum.V_FACTOR)
  new_cache = []
  for layer, layer_cache in zip(range(*layers), cache, strict=True):
    factor, inverse = jnp.uint32(_FACTORS[layer]), jnp.uint32(pow(_FACTORS[layer], -1, 1 << 32))
    own, layer_cache = attend(jnp.zeros_like(k), k * factor, v * factor, layer_cache, None)
    own *= inverse
    total = own if layer == 0 else 2 * own - total  # the same unless a layer is wrong
    new_cache.append(layer_cache)
  return jnp.concatenate([total, k], axis=1)[:, :, 0], tuple(new_cache)


def _unembed(params, hidden):
  return jax.nn.one_hot(_next_token(hidden[:, 0]), checksum.VOCAB_SIZE, dtype=jnp.float32)


def checksum_model() -> Model:
  """The checksum model; greedy sampling gives the tokens of `pdjax.core.checksum.generate`."""
  return Model(
    config=CHECKSUM,
    params=(),
    param_names=(),
    param_axes=(),
    param_layers=(),
    embed=_embed,
    run_layers=_run_layers,
    unembed=_unembed,
    reduction=checksum_reduction,
    cache_dtype="uint32",
  )
