"""Causal attention over a KV cache in plain XLA, for any layout and any reduction.

`make_attend` writes the K and V of a step's tokens and attends them: all that differs between a
prefill, a decode and a mixed step. The flat order of tokens is prefill tokens, then decode rows.

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

# Measured on 2 AVX-512 cores with the shapes of SmolLM2-135M (H 9, K 3, h 64), jax 0.10.2, in ms
# a layer. Prefill of 512 tokens, tile x key block: 64 x 64 6.5, 64 x 128 6.1, 64 x 256 7.7,
# 128 x 128 5.4, 128 x 256 5.0; of 16 tokens, key block 128 0.13, 256 0.23. A tile of 128 would save
# 5 % of a whole prefill step but make a chunk of one token cost 128.
PREFILL_TILE = 64
PREFILL_KEY_BLOCK = 128
# Decode of 8 rows at context 200 and 900, key block 128: 0.30 1.04; 256: 0.26 0.94; 512: 0.53 1.01.
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


class PrefillBatch(NamedTuple):
  """Prompt tokens of several rows, packed. For attention each slice is cut into tiles of one row.

  Only the tiles have gaps, the tokens do not, so the linear layers see no padding between slices.
  """

  tokens: jax.Array  # [T]
  positions: jax.Array  # [T], -1 for padding
  tiles: jax.Array  # [n_tiles, tile] indices into T; T for padding
  tables: jax.Array  # [n_tiles, P], of the row of each tile
  num_tiles: jax.Array  # [], int32: the tiles in use, which come first


class DecodeBatch(NamedTuple):
  """One token each of B rows."""

  tokens: jax.Array  # [B]
  positions: jax.Array  # [B], -1 for padding
  tables: jax.Array  # [B, P]


def attend(
  layout: KVLayout,
  reduction: Reduction,
  q: jax.Array,  # [B, t, H, h]
  positions: jax.Array,  # [B, t], -1 for padding
  tables: jax.Array,  # [B, P]
  layer_cache: LayerCache,
  *,
  block_size: int = DECODE_KEY_BLOCK,
) -> jax.Array:  # [B, t, H, h]
  """Attends t tokens of each of B rows to all cached positions up to their own.

  Reads up to the largest position in steps of about `block_size` keys. What the cache holds beyond
  a position does not matter, not even NaN. Padding gives something finite.
  """
  num_rows, num_tokens, num_heads, head_dim = q.shape
  page_size, num_kv_heads = layout.page_size, layout.num_kv_heads
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
    v = jnp.where(mask.any(1)[:, None, :, None], v, 0)  # 0 * NaN is NaN
    return reduction.step(carry, q, k, v, key_positions, mask)

  carry = lax.fori_loop(0, positions.max() // block + 1, body, reduction.init(q))
  out = reduction.finish(carry).transpose(0, 3, 1, 2, 4)
  return out.reshape(num_rows, num_tokens, num_heads, head_dim).astype(q.dtype)


def _tile_positions(prefill: PrefillBatch) -> jax.Array:  # [n_tiles, tile], -1 for padding
  return prefill.positions.at[prefill.tiles].get(mode="fill", fill_value=-1)


def _locate_packed(layout: KVLayout, prefill: PrefillBatch) -> tuple[jax.Array, jax.Array]:
  """`kv_cache.locate` of packed tokens: (outer, inner), each [T]."""
  (num_tokens,) = prefill.positions.shape
  outer, inner = kv_cache.locate(layout, prefill.tables, _tile_positions(prefill))
  nowhere = jnp.full(num_tokens, layout.num_pages, outer.dtype)  # padding is in no tile
  tiles = prefill.tiles
  return nowhere.at[tiles].set(outer, mode="drop"), nowhere.at[tiles].set(inner, mode="drop")


def _attend_tiles(layout, reduction, q, prefill, layer_cache):
  """Attends tile by tile, so that each reads no more keys than its own row and place need."""
  tiles = q.at[prefill.tiles].get(mode="fill", fill_value=0)  # [n_tiles, tile, H, h]
  positions = _tile_positions(prefill)

  def body(i, out):
    q, p, table = (lax.dynamic_slice_in_dim(x, i, 1) for x in (tiles, positions, prefill.tables))
    tile = attend(layout, reduction, q, p, table, layer_cache, block_size=PREFILL_KEY_BLOCK)
    return lax.dynamic_update_slice_in_dim(out, tile, i, 0)

  out = lax.fori_loop(0, prefill.num_tiles, body, jnp.zeros_like(tiles))
  return jnp.zeros_like(q).at[prefill.tiles].set(out, mode="drop")


Attend = Callable[
  [jax.Array, jax.Array, jax.Array, LayerCache], tuple[jax.Array, LayerCache]
]  # q [T, H, h], k and v [T, K, h], a layer's cache -> out [T, H, h], the layer's cache


def make_attend(
  layout: KVLayout,
  reduction: Reduction,
  prefill: PrefillBatch | None,
  decode: DecodeBatch | None,
) -> Attend:
  """The `attend` of one step, for every layer of it; `prefill`, `decode` or both."""
  places = []
  if prefill is not None:
    places.append(_locate_packed(layout, prefill))
  if decode is not None:
    places.append(kv_cache.locate(layout, decode.tables, decode.positions[:, None]))
  outer, inner = (jnp.concatenate([x.ravel() for x in xs]) for xs in zip(*places, strict=True))
  num_decodes = 0 if decode is None else len(decode.positions)

  def attend_step(q, k, v, layer_cache):
    layer_cache = kv_cache.write(layer_cache, outer, inner, k, v)
    num_prefills = len(q) - num_decodes
    outs = []
    if prefill is not None:
      outs.append(_attend_tiles(layout, reduction, q[:num_prefills], prefill, layer_cache))
    if decode is not None:
      rows = q[num_prefills:, None]
      out = attend(layout, reduction, rows, decode.positions[:, None], decode.tables, layer_cache)
      outs.append(out[:, 0])
    return jnp.concatenate(outs), layer_cache

  return attend_step
