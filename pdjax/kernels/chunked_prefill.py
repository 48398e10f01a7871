"""Attention of chunks of prompts over a paged cache."""

from __future__ import annotations

import jax

from pdjax.kernels.backends import attend
from pdjax.kernels.reference import attention_reference
from pdjax.kernels.slices import Pages, Slices
from pdjax.kernels.tile_config import TileConfig


def chunked_prefill(
  q: jax.Array,  # [T, H, h]
  pages: Pages,
  slices: Slices,
  *,
  page_size: int,
  window: int | None = None,
  soft_cap: float | None = None,
  scale: float | None = None,
  config: TileConfig,
) -> jax.Array:  # [T, H, h]
  """Changes nothing. Each token of a slice attends all cached positions up to its own.

  With a `window`, only the last so many. `soft_cap` bounds the logits by tanh; `scale` None is
  h ** -0.5. What pages hold beyond a context does not matter, not even NaN. Tokens of no slice
  come back as anything finite. The keys and values of the chunks must have been written.
  """
  return attend(q, pages, slices, None, page_size=page_size, window=window, soft_cap=soft_cap,
                scale=scale, config=config)  # fmt: skip


def chunked_prefill_reference(q, pages, slices, *, config=None, **options) -> jax.Array:
  """The same in float32, by the shortest way; `config` makes no difference."""
  return attention_reference(q, pages, slices, **options)
