"""Attention of one query a row over a paged cache, split over the context (flash decoding)."""

from __future__ import annotations

import jax

from pdjax.kernels.backends import attend
from pdjax.kernels.reference import attention_reference
from pdjax.kernels.slices import Pages, Slices
from pdjax.kernels.tile_config import TileConfig


def paged_decode(
  q: jax.Array,  # [T, H, h]
  pages: Pages,
  slices: Slices,  # of one token each, or none; see `decode_slices`
  *,
  page_size: int,
  window: int | None = None,
  soft_cap: float | None = None,
  scale: float | None = None,
  config: TileConfig,
) -> jax.Array:  # [T, H, h]
  """Changes nothing. As `chunked_prefill`, for slices of a single token.

  A row's context is split between programs and the parts are merged (Dao et al. 2023,
  Flash-Decoding), as few rows would leave most of a chip idle. int8 pages with scales are served
  where a backend can.
  """
  return attend(q, pages, None, slices, page_size=page_size, window=window, soft_cap=soft_cap,
                scale=scale, config=config)  # fmt: skip


def paged_decode_reference(q, pages, slices, *, config=None, **options) -> jax.Array:
  """The same in float32, by the shortest way; `config` makes no difference."""
  return attention_reference(q, pages, slices, **options)
