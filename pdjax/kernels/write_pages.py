"""Writes of a step's keys and values into a paged cache."""

from __future__ import annotations

import jax

from pdjax.kernels.backends import backend
from pdjax.kernels.reference import write_pages_reference as _reference
from pdjax.kernels.slices import Pages
from pdjax.kernels.tile_config import TileConfig


def write_pages(
  pages: Pages,
  k: jax.Array,  # [T, K, h]
  v: jax.Array,  # [T, K, h]
  slots: jax.Array,  # [T] int32: page * page_size + the place in it
  *,
  config: TileConfig,
) -> Pages:
  """Writes each token's K and V to its slot, in place if `pages` are donated.

  A slot that does not exist is dropped: that of padding. No slot is written twice.

  Raises:
    ValueError: pages with scales, which are only read.
  """
  if len(pages) > 2:
    raise ValueError(f"pages of {pages[0].dtype} with scales cannot be written: nothing quantizes")
  return backend(config.backend).write(pages, k, v, slots, config=config)


def write_pages_reference(pages, k, v, slots, *, config=None) -> Pages:
  """The same by the shortest way; `config` makes no difference."""
  return _reference(pages, k, v, slots)
