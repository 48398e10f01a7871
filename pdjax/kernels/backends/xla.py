"""Attention in plain XLA: what a CPU runs, and any device whose kernels refuse a case.

Keys are read in blocks by loops whose trip counts are dynamic, so that cost follows the true
context and one compiled shape serves all contexts. Prompts are cut into tiles of one slice and many
tokens, decodes into tiles of several rows and one token each. A tile reads as many keys as its
longest row needs, so decodes of like length should be neighbours.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pdjax.kernels.reference import write_pages_reference
from pdjax.kernels.slices import Pages, Slices, cut
from pdjax.kernels.tile_config import Case, Chip, TileConfig

_MASKED = -1e30  # finite: exp(-inf - -inf) is NaN for a row that sees no key


def default(case: Case, chip: Chip) -> TileConfig:
  # Measured on 2 AVX-512 cores with the shapes of SmolLM2-135M (H 9, K 3, h 64), jax 0.10.2, in ms
  # a layer. Prefill of 512 tokens, and of 256 behind 1,000, tokens of a tile x key block: 64 x 128
  # 5.7 10.4, 128 x 128 5.4 9.7, 128 x 256 4.9 7.9, 256 x 256 4.6 6.9: matrices of fewer than some
  # 400 rows (G x tokens) are multiplied on one core. A tile of 256 would make a chunk of one token
  # cost 256.
  # Decode of 16 rows at context 300, 8 at 256, and 15 at 300 beside one at 1,400, rows of a tile x
  # key block: 2 x 256 1.1 0.34 1.2, 4 x 128 0.94 0.34 3.2, 4 x 256 0.96 0.28 1.4, 8 x 256 0.93
  # 0.45 1.7, 16 x 128 0.77 0.30 2.5, 16 x 256 0.90 0.49 2.5.
  return TileConfig(backend="xla", block_q=384, block_k=256, decode_rows=4)


def refuses(case: Case, chip: Chip) -> str | None:
  return None


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


def _softmax_step(scale, soft_cap, carry, q, k, v, key_positions, mask):
  m, l, o = carry
  s = jnp.einsum("bkgth,bksh->bkgts", q, k, preferred_element_type=jnp.float32) * scale
  if soft_cap is not None:
    s = soft_cap * jnp.tanh(s / soft_cap)
  s = jnp.where(mask[:, None, None], s, _MASKED)
  m_new = jnp.maximum(m, s.max(-1))
  p = jnp.exp(s - m_new[..., None])
  shrink = jnp.exp(m - m_new)
  pv = jnp.einsum("bkgts,bksh->bkgth", p.astype(v.dtype), v, preferred_element_type=jnp.float32)
  return m_new, l * shrink + p.sum(-1), o * shrink[..., None] + pv


def _softmax_finish(carry):
  _, l, o = carry
  return o / jnp.maximum(l, 1e-30)[..., None]  # 0 only where a row saw no block at all


def softmax_reduction(scale: float, soft_cap: float | None) -> Reduction:
  """Online softmax in float32 (Dao et al. 2022, algorithm 1)."""
  return Reduction(
    _softmax_init, functools.partial(_softmax_step, scale, soft_cap), _softmax_finish
  )


def attend(
  q: jax.Array,  # [T, H, h]
  pages: Pages,
  prefill: Slices | None,
  decode: Slices | None,
  *,
  page_size: int,
  window: int | None = None,
  soft_cap: float | None = None,
  scale: float,
  config: TileConfig,
  reduction: Reduction | None = None,
) -> jax.Array:  # [T, H, h]
  """As all backends; tokens of no slice come back as they are. `reduction` replaces softmax."""
  num_tokens, num_heads, _ = q.shape
  _, num_kv_heads, *_ = pages[0].shape
  run = functools.partial(
    _attend_tile,
    reduction or softmax_reduction(scale, soft_cap),
    pages=pages,
    page_size=page_size,
    window=window,
    block_k=config.block_k,
  )
  # Outputs take the place of queries, as XLA for GPUs would make buffers of zeros of all layers at
  # once, before the first (2 GB for 2,048 tokens of Llama-3-8B).
  if prefill is not None:
    tile_tokens = min(config.tile_tokens(num_heads // num_kv_heads), num_tokens)
    tiles = cut(prefill, num_tokens=num_tokens, tile_tokens=tile_tokens)

    def attend_prompt(i, x):
      index = tiles.firsts[i] + jnp.arange(tile_tokens)
      owners = tiles.slices[i][None]
      return run(x, prefill, owners, index[None])

    q = lax.fori_loop(0, tiles.num_tiles, attend_prompt, q)
  if decode is not None:
    rows = min(config.decode_rows, len(decode.lengths))
    used = jnp.max(jnp.where(decode.lengths > 0, jnp.arange(1, 1 + len(decode.lengths)), 0))

    def attend_rows(i, x):
      owners = i * rows + jnp.arange(rows)
      return run(x, decode, owners, jnp.zeros((rows, 1), jnp.int32))

    q = lax.fori_loop(0, -(-used // rows), attend_rows, q)
  return q


def _attend_tile(
  reduction: Reduction,
  x: jax.Array,  # [T, H, h]
  slices: Slices,
  owners: jax.Array,  # [B]; beyond the slices: none
  index: jax.Array,  # [B, t]: tokens, counted within their slice
  *,
  pages: Pages,
  page_size: int,
  window: int | None,
  block_k: int,
) -> jax.Array:
  """Attends t tokens of each of B slices to all positions up to their own, in their place in x.

  With a `window`, only to the last so many. Reads up to the largest position, and with a window
  from the first one that any token sees, in steps of about `block_k` keys.
  """
  num_tokens, num_heads, head_dim = x.shape
  num_rows, num_queries = index.shape
  _, num_kv_heads, *_ = pages[0].shape
  starts, lengths, offsets, tables = (
    field.at[owners].get(mode="fill", fill_value=0) for field in slices
  )
  is_token = index < lengths[:, None]
  places = jnp.where(is_token, starts[:, None] + index, num_tokens)
  positions = jnp.where(is_token, offsets[:, None] + index, -1)
  q = x.at[places].get(mode="fill", fill_value=0)
  q = q.reshape(num_rows, num_queries, num_kv_heads, -1, head_dim).transpose(0, 2, 3, 1, 4)

  *_, pages_per_row = tables.shape
  max_len = page_size * pages_per_row
  block = page_size * max(1, min(block_k // page_size, pages_per_row))

  def body(i, carry):
    start = jnp.minimum(i * block, max_len - block)  # the last block may overlap the one before
    key_positions = start + jnp.arange(block)
    k, v = fetch_block(pages, tables, start, block, page_size)
    mask = (key_positions <= positions[..., None]) & (key_positions >= i * block)
    if window is not None:
      mask &= key_positions > positions[..., None] - window
    v = jnp.where(mask.any(1)[:, None, :, None], v, 0)  # 0 * NaN is NaN
    return reduction.step(carry, q, k, v, key_positions, mask)

  first = 0
  if window is not None:
    earliest = jnp.where(positions < 0, max_len, positions).min() - window + 1
    first = jnp.maximum(earliest, 0) // block
  carry = lax.fori_loop(first, positions.max() // block + 1, body, reduction.init(q))
  out = reduction.finish(carry).transpose(0, 3, 1, 2, 4)
  out = out.reshape(num_rows, num_queries, num_heads, head_dim).astype(x.dtype)
  return x.at[places].set(out, mode="drop")


def fetch_block(
  pages: Pages,
  tables: jax.Array,  # [B, P]
  start: jax.Array,  # [], a multiple of page_size, at most the length of a row less block_size
  block_size: int,  # a multiple of page_size
  page_size: int,
) -> tuple[jax.Array, jax.Array]:
  """K and V [B, K, block_size, h] of positions start, start + 1, ... of each row.

  Places without a page hold anything. Where pages lie side by side, a row's are all of one entry.
  """
  k, v, *scales = (_fetch(x, tables, start, block_size, page_size) for x in pages)
  if scales:
    k, v = (x * scale[..., None] for x, scale in zip((k, v), scales))
  return k, v


def _fetch(x, tables, start, block_size, page_size):
  _, num_kv_heads, inner, *rest = x.shape
  if inner > page_size:

    def fetch_row(row):
      at = (row, 0, start, *(0 for _ in rest))
      return lax.dynamic_slice(x, at, (1, num_kv_heads, block_size, *rest))[0]

    return jax.vmap(fetch_row)(tables[:, 0] // (inner // page_size))
  num_pages = block_size // page_size
  ids = lax.dynamic_slice_in_dim(tables, start // page_size, num_pages, axis=1)
  found = x.at[ids].get(mode="clip").swapaxes(1, 2)  # [B, K, pages, page_size, ...]
  return found.reshape(len(tables), num_kv_heads, block_size, *rest)


def write(pages: Pages, k: jax.Array, v: jax.Array, slots: jax.Array, *, config) -> Pages:
  return write_pages_reference(pages, k, v, slots)
