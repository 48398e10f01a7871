"""The oracles: attention and page writes as the shortest plain jnp, slow and in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pdjax.kernels.slices import Pages, Slices


def attention_reference(
  q: jax.Array,  # [T, H, h]
  pages: Pages,
  slices: Slices,
  *,
  page_size: int,
  window: int | None = None,
  soft_cap: float | None = None,
  scale: float | None = None,
) -> jax.Array:  # [T, H, h] float32; zero in places of no slice
  """What chunked_prefill, paged_decode and mixed all compute, slice by slice."""
  num_tokens, _, head_dim = q.shape
  k_pages, v_pages = as_float32(pages)
  _, num_kv_heads, _, _ = k_pages.shape
  grouped = q.astype(jnp.float32).reshape(num_tokens, num_kv_heads, -1, head_dim)

  def attend(out, s: Slices):
    k, v = (rows(x, s.tables, page_size) for x in (k_pages, v_pages))  # [K, S, h]
    index = jnp.arange(num_tokens) - s.starts
    own = (index >= 0) & (index < s.lengths)
    queries, keys = (s.offsets + index)[:, None], jnp.arange(k.shape[1])
    seen = own[:, None] & (keys <= queries)
    if window is not None:
      seen &= keys > queries - window
    scores = jnp.einsum("tkgh,ksh->kgts", grouped, k)
    scores *= head_dim**-0.5 if scale is None else scale
    if soft_cap is not None:
      scores = soft_cap * jnp.tanh(scores / soft_cap)
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1)
    v = jnp.where(seen.any(0)[:, None], v, 0)  # 0 * NaN is NaN
    new = jnp.einsum("kgts,ksh->tkgh", weights, v).reshape(q.shape)
    return jnp.where(own[:, None, None], new, out), None

  return lax.scan(attend, jnp.zeros(q.shape), slices)[0]


def as_float32(pages: Pages) -> tuple[jax.Array, jax.Array]:
  """K and V [outer, K, inner, h] of pages of any kind."""
  if len(pages) == 1:  # [N, page_size, 2 K, h], keys and values in turn
    (kv,) = pages
    return tuple(kv[:, :, i::2].swapaxes(1, 2).astype(jnp.float32) for i in range(2))
  k, v, *scales = (x.astype(jnp.float32) for x in pages)
  if scales:
    k, v = (x * scale[..., None] for x, scale in zip((k, v), scales))
  return k, v


def rows(x: jax.Array, table: jax.Array, page_size: int) -> jax.Array:  # [K, S, h] float32
  """The positions of one table, in order; places without a page hold anything."""
  _, num_kv_heads, inner, head_dim = x.shape
  by_page = x.reshape(-1, num_kv_heads, inner // page_size, page_size, head_dim)
  outer, index = table // (inner // page_size), table % (inner // page_size)
  found = by_page.at[outer, :, index].get(mode="clip")  # [P, K, page_size, h]
  return found.swapaxes(0, 1).reshape(num_kv_heads, -1, head_dim)


def write_pages_reference(
  pages: Pages,
  k: jax.Array,  # [T, K, h]
  v: jax.Array,  # [T, K, h]
  slots: jax.Array,  # [T] int32: page * page_size + the place in it
) -> Pages:
  """Writes each token's K and V to its slot; drops those whose slot does not exist."""
  num_outer, _, inner, _ = pages[0].shape
  slots = jnp.where(slots < 0, num_outer * inner, slots)
  outer, place = slots // inner, slots % inner
  return tuple(
    x.at[outer, :, place].set(new.astype(x.dtype), mode="drop") for x, new in zip(pages, (k, v))
  )
