"""Attention of a mixed step: chunks of prompts and decodes in one call."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pdjax.kernels.backends import attend
from pdjax.kernels.reference import attention_reference
from pdjax.kernels.slices import Pages, Slices
from pdjax.kernels.tile_config import TileConfig


def mixed(
  q: jax.Array,  # [T, H, h]
  pages: Pages,
  prefill: Slices,
  decode: Slices,  # of one token each, or none
  *,
  page_size: int,
  window: int | None = None,
  soft_cap: float | None = None,
  scale: float | None = None,
  config: TileConfig,
) -> jax.Array:  # [T, H, h]
  """Changes nothing. As `chunked_prefill` of one and `paged_decode` of the other, in one launch.

  Decodes, which wait for memory, then run beside chunks, which wait for arithmetic (POD-Attention,
  Kamath et al. 2024), and the queries are read once.
  """
  return attend(q, pages, prefill, decode, page_size=page_size, window=window, soft_cap=soft_cap,
                scale=scale, config=config)  # fmt: skip


def mixed_reference(q, pages, prefill, decode, *, config=None, **options) -> jax.Array:
  """The same in float32, by the shortest way; `config` makes no difference."""
  slices = Slices(*map(jnp.concatenate, zip(prefill, decode)))
  return attention_reference(q, pages, slices, **options)
