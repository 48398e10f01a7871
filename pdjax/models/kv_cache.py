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
import itertools
from collections.abc import Sequence

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

  def pieces_shape(self, num_pages: int, num_cuts: int = 1) -> tuple[int, int, int, int, int]:
    """[2, L, K, positions, h] of what `gather` gives for so many pages, or of each of its cuts.

    Each kv head once.
    """
    num_heads = self.num_kv_heads // num_cuts
    return 2, self.num_layers, num_heads, num_pages * self.page_size, self.head_dim

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
  *,
  num_shards: int = 1,
  num_cuts: int = 1,
  cut: int = 0,
) -> jax.Array:
  """The pages of one sequence as one array [2, L, K, n * page_size, h], for a hand-off.

  L are the layers of `cache`, which may be a part of the pool's. Pieces depend neither on the kind
  of layout nor on copies of heads; those of padding hold anything. For a pool of another size they
  are cut: K are then the heads of the `cut`-th of `num_cuts` equal parts of each shard's.
  """
  head_dim, copies = layout.head_dim, layout.kv_copies
  positions = len(pages) * layout.page_size, head_dim

  def of_cut(x, axis):  # [.., K, ..] -> [.., num_shards, K of the cut, ..]
    shape = (*x.shape[:axis], num_shards, num_cuts, -1, *x.shape[axis + 1 :])
    return jax.lax.index_in_dim(x.reshape(shape), cut, axis + 1, keepdims=False)

  # Heads are chosen before pages, which costs nothing. Copied ones after: the cache is split within
  # a cut of them, and all of it would be moved between devices.
  def take(x):
    outer, index = pages // layout.pages_per_outer, pages % layout.pages_per_outer
    x = _by_page(layout, x)
    x = of_cut(x, 1) if copies == 1 else x[:, None]
    found = x.at[outer, :, :, index].get(mode="clip")
    if copies > 1:
      found = of_cut(found[:, 0, ::copies], 1)
    return found.transpose(1, 2, 0, 3, 4).reshape(-1, *positions)

  def take_both(kv):
    kv = of_cut(kv, 2) if copies == 1 else kv[:, :, None]
    found = kv.at[pages].get(mode="clip")
    found = found.reshape(*found.shape[:3], -1, copies, 2, head_dim)[:, :, :, :, 0]
    if copies > 1:
      found = of_cut(found[:, :, 0], 2)
    return found.transpose(4, 2, 3, 0, 1, 5).reshape(2, -1, *positions)

  def take_layer(layer_cache):  # [2, K, n * page_size, h]
    if layout.kind == "interleaved":
      return take_both(*layer_cache)
    return jnp.stack([take(x) for x in layer_cache])

  return jnp.stack([take_layer(layer_cache) for layer_cache in cache], axis=1)


def scatter(
  layout: KVLayout,
  cache: Cache,
  pages: jax.Array,  # [n], padded with num_pages
  cuts: Sequence[jax.Array],  # [2, L, K, n * page_size, h] in all
  *,
  num_shards: int = 1,
) -> Cache:
  """Writes all cuts that `gather` gave to other pages; in place if `cache` is donated.

  Drops padding. Pages of slots follow one another in a row, as those of a sequence do: they are
  written as one window of it, without the copy of K and V that a scatter makes of its updates.
  """
  (num_pages,) = pages.shape
  page_size, head_dim = layout.page_size, layout.head_dim
  cuts = [x.reshape(*x.shape[:2], num_shards, -1, num_pages, page_size, head_dim) for x in cuts]
  outer, index = pages // layout.pages_per_outer, pages % layout.pages_per_outer

  def piece_of(k_or_v, layer):  # [K, n, page_size, h], joined where it is read
    piece = jnp.stack([x[k_or_v, layer] for x in cuts], axis=1)
    piece = piece.reshape(-1, num_pages, page_size, head_dim)
    return piece if layout.kv_copies == 1 else jnp.repeat(piece, layout.kv_copies, axis=0)

  def put(x, piece):
    piece = piece.transpose(1, 0, 2, 3)
    return _by_page(layout, x).at[outer, :, index].set(piece, mode="drop").reshape(x.shape)

  def put_window(x, piece):
    # Padding may reach beyond the end of the row: the window then begins before the first page.
    start = jnp.minimum(index[0], layout.pages_per_outer - num_pages)
    shift = (index[0] - start) * page_size
    is_new = jnp.roll(jnp.repeat(pages < layout.num_pages, page_size), shift)[:, None]
    piece = piece.reshape(1, -1, num_pages * page_size, head_dim)
    window = (outer[0], 0, start * page_size, 0)
    old = jax.lax.dynamic_slice(x, window, piece.shape)
    new = jnp.where(is_new, jnp.roll(piece, shift, axis=2), old)
    return jax.lax.dynamic_update_slice(x, new, window)

  def put_both(kv, pieces):
    pieces = jnp.stack(pieces).transpose(2, 3, 1, 0, 4).reshape(num_pages, *layout.shape[1:])
    return kv.at[pages].set(pieces, mode="drop")

  def put_layer(layer, layer_cache):
    pieces = [piece_of(k_or_v, layer) for k_or_v in range(2)]
    if layout.kind == "interleaved":
      return (put_both(*layer_cache, pieces),)
    return tuple(map(put_window if layout.kind == "slots" else put, layer_cache, pieces))

  return tuple(itertools.starmap(put_layer, enumerate(cache)))
