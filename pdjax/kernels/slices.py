"""The ragged batch that every attention kernel takes, and how it is cut into tiles.

Axes, as in models/transformer.py: T tokens, B slices, P pages of a table, H query heads, K kv
heads, G = H / K, h head_dim.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

Pages = tuple[jax.Array, ...]
"""What is cached of one layer.

(k, v), each `[outer, K, inner, h]` with `inner` a multiple of the page size: page p lies in entry
p // (inner / page_size), so pages that lie anywhere (inner is the page size) and pages side by
side in a row's slot are the same to a kernel. (k, v, k_scales, v_scales) with int8 k and v: a
scale `[outer, K, inner]` for each vector. (kv,), `[N, page_size, 2 K, h]` with keys and values in
turn, as the TPU's kernels read them.
"""


class Slices(NamedTuple):
  """B slices of sequences in q [T, H, h]: chunks of prompts, or decodes, which are of one token.

  Token i of slice b lies at starts[b] + i in T and at position offsets[b] + i of its sequence, and
  sees the positions up to its own. The keys and values of all of them are in the pages.
  """

  starts: jax.Array  # [B] int32
  lengths: jax.Array  # [B] int32; 0: no slice, whatever the rest says
  offsets: jax.Array  # [B] int32
  tables: jax.Array  # [B, P] int32; what lies beyond the context may be out of range


def decode_slices(tables: jax.Array, context_lens: jax.Array) -> Slices:
  """A query for each row: slices of one token at the end of contexts that count it; 0 is none."""
  starts = jnp.arange(len(context_lens), dtype=jnp.int32)
  lengths = (context_lens > 0).astype(jnp.int32)
  return Slices(starts, lengths, jnp.maximum(context_lens - 1, 0), tables)


class Tiles(NamedTuple):
  """Slices cut into n tiles of at most so many tokens, those in use first."""

  slices: jax.Array  # [n] int32, the slice of a tile; B for a tile that is not in use
  firsts: jax.Array  # [n] int32, the tile's first token, counted within its slice
  num_tiles: jax.Array  # [] int32, the tiles in use


def max_tiles(num_tokens: int, num_slices: int, tile_tokens: int) -> int:
  """The most tiles that T tokens in B slices can need: every slice may leave one part empty."""
  return -(-num_tokens // tile_tokens) + num_slices - 1


def cut(slices: Slices, *, num_tokens: int, tile_tokens: int) -> Tiles:
  """The tiles of slices that lie in `num_tokens` places."""
  counts = -(-slices.lengths // tile_tokens)
  ends = jnp.cumsum(counts)
  tiles = jnp.arange(max_tiles(num_tokens, len(counts), tile_tokens), dtype=jnp.int32)
  owners = (tiles[:, None] >= ends).sum(1, dtype=jnp.int32)
  begins = jnp.append(ends - counts, ends[-1])[owners]
  return Tiles(owners, ((tiles - begins) * tile_tokens).astype(jnp.int32), ends[-1])
