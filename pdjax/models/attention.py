"""Causal attention over a KV cache in plain XLA, for any layout and any reduction.

`make_attend` writes the K and V of a step's tokens and attends them: all that differs between a
prefill, a decode and a mixed step.

Keys are read in blocks by loops whose trip counts are dynamic, so that cost follows the true
context and one compiled shape serves all contexts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pdjax.models import kv_cache
from pdjax.models.kv_cache import KVLayout, LayerCache

# Measured on 2 AVX-512 cores with the shapes of SmolLM2-135M (H 9, K 3, h 64), jax 0.10.2, in ms a
# layer. Prefill of 512 tokens, and of 256 behind 1,000, tile x key block: 64 x 128 5.7 10.4, 128 x
# 128 5.4 9.7, 128 x 256 4.9 7.9, 256 x 256 4.6 6.9: matrices of fewer than some 400 rows (G x tile)
# are multiplied on one core. A tile of 256 would make a chunk of one token cost 256.
PREFILL_TILE = 128
PREFILL_KEY_BLOCK = 256
# Decode of 16 rows at context 300, 8 at 256, and 15 at 300 beside one at 1,400, rows of a tile x
# key block: 2 x 256 1.1 0.34 1.2, 4 x 128 0.94 0.34 3.2, 4 x 256 0.96 0.28 1.4, 8 x 256 0.93 0.45
# 1.7, 16 x 128 0.77 0.30 2.5, 16 x 256 0.90 0.49 2.5.
DECODE_ROWS = 4
DECODE_KEY_BLOCK = 256

_MASKED = -1e30  # finite: exp(-inf - -inf) is NaN for a row that sees no key


class Reduction(NamedTuple):
  """How keys and values are reduced to an output. Pure functions, G = H / K.

  `init(q)` gives a carry; `step` takes in one block of keys; `finish(carry)` gives [B, K, G, t, h].
  v is zero where no query of the row sees it; k may hold anything where `mask` is false.
  """

  init: Callable[[jax.Array], Any]  # q [B, K, G, t, h]
  # carry, q [B, K, G, t, h], k and v [B, K, S, h], key positions [S], mask [B, t, S]
  step: Callable[[Any, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], Any]
  finish: Callable[[Any], jax.Array]


def _softmax_init(q):
  m = jnp.full(q.shape[:-1], _MASKED, jnp.float32)
  return m, jnp.zeros_like(m), jnp.zeros(q.shape, jnp.float32)


def _softmax_step(carry, q, k, v, key_positions, mask):
  m, l, o = carry
  *_, head_dim = q.shape
  s = jnp.einsum("bkgth,bksh->bkgts", q, k, preferred_element_type=jnp.float32)
  s = jnp.where(mask[:, None, None], s * head_dim**-0.5, _MASKED)
  m_new = jnp.maximum(m, s.max(-1))
  p = jnp.exp(s - m_new[..., None])
  shrink = jnp.exp(m - m_new)
  pv = jnp.einsum("bkgts,bksh->bkgth", p.astype(v.dtype), v, preferred_element_type=jnp.float32)
  return m_new, l * shrink + p.sum(-1), o * shrink[..., None] + pv


def _softmax_finish(carry):
  _, l, o = carry
  return o / jnp.maximum(l, 1e-30)[..., None]  # 0 only where a row saw no block at all


softmax_reduction = Reduction(_softmax_init, _softmax_step, _softmax_finish)
"""Online softmax in float32 with scale head_dim ** -0.5 (Dao et al. 2022, algorithm 1)."""


class Tiles(NamedTuple):
  """The tokens of a step that are attended together: t tokens of each of b rows.

  Prompts are cut into tiles of one row and many tokens, decodes into tiles of several rows and one
  token each. A tile reads as many keys as its longest row needs, so rows of like length belong
  together.
  """

  places: jax.Array  # [n, b, t] indices into T; T for padding
  tables: jax.Array  # [n, b, P]
  num_tiles: jax.Array  # [], int32: the tiles in use, which come first


class StepBatch(NamedTuple):
  """The tokens of a step, packed in any order. Only attention knows which is prefill or decode.

  Padding of tiles is no token, so the linear layers see none but at the end of T.
  """

  tokens: jax.Array  # [T]
  positions: jax.Array  # [T], -1 for padding
  prefill: Tiles | None
  decode: Tiles | None


def attend(
  layout: KVLayout,
  reduction: Reduction,
  q: jax.Array,  # [B, t, H, h]
  positions: jax.Array,  # [B, t], -1 for padding
  tables: jax.Array,  # [B, P]
  layer_cache: LayerCache,
  *,
  window: int | None = None,
  block_size: int,
) -> jax.Array:  # [B, t, H, h]
  """Attends t tokens of each of B rows to all cached positions up to their own.

  With a `window`, only to the last so many. Reads up to the largest position, and with a window
  from the first one that any token sees, in steps of about `block_size` keys. What the cache holds
  beyond a position does not matter, not even NaN. Padding gives something finite.
  """
  num_rows, num_tokens, num_heads, head_dim = q.shape
  page_size, num_kv_heads = layout.page_size, layout.num_kv_heads * layout.kv_copies
  block = page_size * max(1, min(block_size // page_size, layout.pages_per_row))
  group = num_heads // num_kv_heads
  q = q.reshape(num_rows, num_tokens, num_kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)

  def body(i, carry):
    start = jnp.minimum(
      i * block, layout.max_len - block
    )  # the last block may overlap the one before
    key_positions = start + jnp.arange(block)
    k, v = kv_cache.fetch_block(layout, layer_cache, tables, start, block)
    mask = (key_positions <= positions[..., None]) & (key_positions >= i * block)
    if window is not None:
      mask &= key_positions > positions[..., None] - window
    v = jnp.where(mask.any(1)[:, None, :, None], v, 0)  # 0 * NaN is NaN
    return reduction.step(carry, q, k, v, key_positions, mask)

  first = 0
  if window is not None:
    earliest = jnp.where(positions < 0, layout.max_len, positions).min() - window + 1
    first = jnp.maximum(earliest, 0) // block
  carry = lax.fori_loop(first, positions.max() // block + 1, body, reduction.init(q))
  out = reduction.finish(carry).transpose(0, 3, 1, 2, 4)
  return out.reshape(num_rows, num_tokens, num_heads, head_dim).astype(q.dtype)


def _take(x: jax.Array, places: jax.Array, fill: int) -> jax.Array:  # [T, ...] -> places' shape
  return x.at[places].get(mode="fill", fill_value=fill)


def _attend_tiles(layout, reduction, x, positions, tiles, layer_cache, window, block_size):
  """Attends the queries of `tiles` in x [T, H, h] and puts the outputs in their place.

  In their place, as XLA for GPUs would make buffers of zeros of all layers at once, before the
  first (2 GB for 2,048 tokens of Llama-3-8B).
  """

  def body(i, x):
    places = tiles.places[i]
    q, p = _take(x, places, 0), _take(positions, places, -1)
    out = attend(
      layout, reduction, q, p, tiles.tables[i], layer_cache, window=window, block_size=block_size
    )
    return x.at[places].set(out, mode="drop")

  return lax.fori_loop(0, tiles.num_tiles, body, x)


Attend = Callable[
  [jax.Array, jax.Array, jax.Array, LayerCache, int | None], tuple[jax.Array, LayerCache]
]  # q [T, H, h], k and v [T, K, h], a layer's cache, its window -> out [T, H, h], the layer's cache


def make_attend(layout: KVLayout, reduction: Reduction, batch: StepBatch) -> Attend:
  """The `attend` of one step, for every layer of it."""
  positions = batch.positions
  (num_tokens,) = positions.shape
  kinds = [(batch.prefill, PREFILL_KEY_BLOCK), (batch.decode, DECODE_KEY_BLOCK)]
  kinds = [(tiles, block_size) for tiles, block_size in kinds if tiles is not None]
  outer = inner = jnp.full(num_tokens, layout.num_pages)  # padding is in no tile
  for tiles, _ in kinds:
    *_, num_pages = tiles.tables.shape
    *_, t = tiles.places.shape
    places, tables = tiles.places.reshape(-1, t), tiles.tables.reshape(-1, num_pages)
    where = kv_cache.locate(layout, tables, _take(positions, places, -1))
    outer, inner = (x.at[places].set(w, mode="drop") for x, w in zip((outer, inner), where))

  def attend_step(q, k, v, layer_cache, window):
    layer_cache = kv_cache.write(layout, layer_cache, outer, inner, k, v)
    out = q  # of padding it stays so: finite, and nobody reads it
    for tiles, block_size in kinds:
      out = _attend_tiles(layout, reduction, out, positions, tiles, layer_cache, window, block_size)
    return out, layer_cache

  return attend_step
