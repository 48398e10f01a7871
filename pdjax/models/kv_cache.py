"""Where K and V lie in memory: the cache of a pool as `kernels.slices.Pages` of each layer.

A cache is a tuple with the arrays of each layer, (k, v) `[outer, K, inner, h]` or (kv,):

    slots         outer = row    inner = max_len      page i of row r has id r * pages_per_row + i
    paged         outer = page   inner = page_size    pages anywhere
    interleaved   [N, page_size, 2 K, h], heads k0 v0 k1 v1 ..; pages anywhere, as TPUs read them

Slots is paged with several pages side by side in one outer entry, so both go through the same page
ids: page p lies in entry p // pages_per_outer. Heads come before positions, so that the keys of
one head are contiguous. Page tables are int32 `[B, P]` with P = pages_per_row; unused entries hold
`num_pages`, which is out of range: writes to it are dropped, and nobody reads from it.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from pdjax.kernels.slices import Pages

LayerCache = Pages
Cache = tuple[LayerCache, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
  """The shape of a pool's cache.

  Raises:
    ValueError: an unknown kind, a size below 1, or slots whose pages are not exactly its rows.
  """

  kind: str  # slots, paged, interleaved
  num_layers: int
  num_kv_heads: int
  head_dim: int
  dtype: str
  num_rows: int
  page_size: int
  pages_per_row: int
  num_pages: int
  kv_copies: int = 1

  def __post_init__(self):
    if self.kind not in ("slots", "paged", "interleaved"):
      raise ValueError(f"kind={self.kind!r} must be 'slots', 'paged' or 'interleaved'")
    for field in ("num_layers", "num_kv_heads", "head_dim", "num_rows", "page_size",
                  "pages_per_row", "num_pages", "kv_copies"):  # fmt: skip
      if getattr(self, field) < 1:
        raise ValueError(f"{field}={getattr(self, field)} must be at least 1")
    if self.kind == "slots" and self.num_pages != self.num_rows * self.pages_per_row:
      raise ValueError(
        f"num_pages={self.num_pages} must be num_rows={self.num_rows} * "
        f"pages_per_row={self.pages_per_row} in slots"
      )

  @property
  def max_len(self) -> int:
    return self.page_size * self.pages_per_row

  @property
  def pages_per_outer(self) -> int:
    return self.pages_per_row if self.kind == "slots" else 1

  @property
  def axes(self) -> str:
    """Of each array; with `interleaved` K stands for the keys and values of a head in turn."""
    return "N P K h" if self.kind == "interleaved" else "N K P h"

  @property
  def shape(self) -> tuple[int, int, int, int]:
    """Of each array."""
    num_heads = self.num_kv_heads * self.kv_copies
    if self.kind == "interleaved":
      return self.num_pages, self.page_size, 2 * num_heads, self.head_dim
    outer = self.num_pages // self.pages_per_outer
    return outer, num_heads, self.pages_per_outer * self.page_size, self.head_dim

  def split(self, axis: str) -> PartitionSpec:
    """How each array is split by its heads over the mesh axis `axis`."""
    return PartitionSpec(*(axis if letter == "K" else None for letter in self.axes.split()))

  def pieces_shape(self, num_pages: int) -> tuple[int, int, int, int, int]:
    """[2, L, K, positions, h] of what `gather` gives for so many pages: each kv head once."""
    return 2, self.num_layers, self.num_kv_heads, num_pages * self.page_size, self.head_dim

  def of_layers(self, num_layers: int) -> KVLayout:
    """That of a part of the cache."""
    return dataclasses.replace(self, num_layers=num_layers)

  @property
  def bytes_per_token(self) -> int:
    """K and V of one token over all layers, each kv head once."""
    num_values = 2 * self.num_layers * self.num_kv_heads * self.head_dim
    return num_values * jnp.dtype(self.dtype).itemsize

  @property
  def num_bytes(self) -> int:
    """The whole cache, copies of kv heads included."""
    return self.num_pages * self.page_size * self.kv_copies * self.bytes_per_token


def init_cache(
  layout: KVLayout, sharding: jax.sharding.Sharding | jax.Device | None = None
) -> Cache:
  """A new cache of zeros on `sharding`."""

  num_arrays = 1 if layout.kind == "interleaved" else 2

  def zeros(_):
    return jnp.zeros(layout.shape, layout.dtype, device=sharding)

  return tuple(tuple(map(zeros, range(num_arrays))) for _ in range(layout.num_layers))


def _by_page(layout: KVLayout, x: jax.Array) -> jax.Array:
  """[outer, K, inner, h] as [outer, K, pages_per_outer, page_size, h]; moves nothing."""
  outer, num_kv_heads, _, head_dim = layout.shape
  return x.reshape(outer, num_kv_heads, layout.pages_per_outer, layout.page_size, head_dim)


def gather(
  layout: KVLayout,
  cache: Cache,
  pages: jax.Array,  # [n], padded with num_pages
) -> jax.Array:
  """The pages of one sequence as one array [2, L, K, n * page_size, h], for a hand-off.

  L are the layers of `cache`, which may be a part of the pool's. Pieces depend neither on the kind
  of layout nor on copies of heads; those of padding hold anything.
  """
  (num_pages,) = pages.shape
  page_size, head_dim = layout.page_size, layout.head_dim

  def take(x):
    outer, index = pages // layout.pages_per_outer, pages % layout.pages_per_outer
    found = _by_page(layout, x).at[outer, :, index].get(mode="clip")  # [n, K, page_size, h]
    return found[:, :: layout.kv_copies].transpose(1, 0, 2, 3)

  def take_both(kv):
    found = kv.at[pages].get(mode="clip")  # [n, page_size, 2 K, h]
    found = found.reshape(num_pages, page_size, -1, layout.kv_copies, 2, head_dim)[:, :, :, 0]
    return found.transpose(3, 2, 0, 1, 4)

  def take_layer(layer_cache):  # [2, K, n, page_size, h]
    if layout.kind == "interleaved":
      return take_both(*layer_cache)
    return jnp.stack([take(x) for x in layer_cache])

  pieces = jnp.stack([take_layer(layer_cache) for layer_cache in cache], axis=1)
  return pieces.reshape(layout.of_layers(len(cache)).pieces_shape(num_pages))


def scatter(
  layout: KVLayout,
  cache: Cache,
  pages: jax.Array,  # [n], padded with num_pages
  pieces: jax.Array,  # [2, L, K, n * page_size, h]
) -> Cache:
  """Writes what `gather` gave to other pages; in place if `cache` is donated. Drops padding."""
  (num_pages,) = pages.shape
  num_kv_heads, page_size, head_dim = layout.num_kv_heads, layout.page_size, layout.head_dim
  pieces = pieces.reshape(2, -1, num_kv_heads, num_pages, page_size, head_dim)
  if layout.kv_copies > 1:
    pieces = jnp.repeat(pieces, layout.kv_copies, axis=2)

  def put(x, piece):  # [K, n, page_size, h]
    outer, index = pages // layout.pages_per_outer, pages % layout.pages_per_outer
    piece = piece.transpose(1, 0, 2, 3)
    return _by_page(layout, x).at[outer, :, index].set(piece, mode="drop").reshape(x.shape)

  def put_both(kv, piece):  # [2, K, n, page_size, h]
    piece = piece.transpose(2, 3, 1, 0, 4).reshape(num_pages, *layout.shape[1:])
    return kv.at[pages].set(piece, mode="drop")

  def put_layer(layer_cache, piece):
    if layout.kind == "interleaved":
      return (put_both(*layer_cache, piece),)
    return tuple(map(put, layer_cache, piece))

  return tuple(put_layer(layer_cache, pieces[:, layer]) for layer, layer_cache in enumerate(cache))
