"""Attention and page writes on TPUs: the ragged paged attention that comes with JAX.

That kernel takes prefill and decode alike, as sequences packed in q, and reads pages
`[N, page_size, 2 K, h]` as they lie. With a window it still reads the whole context. Tables are in
scalar memory, 1 MiB on a v5e: long contexts of many slices, chunks and decodes counted, need large
pages.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel as rpa

from pdjax.kernels.slices import Pages, Slices
from pdjax.kernels.tile_config import Case, Chip, TileConfig


class Packed(NamedTuple):
  """Slices as the kernel wants them: the n that exist first, in the order of their tokens."""

  kv_lens: jax.Array  # [B] int32
  tables: jax.Array  # [B, P] int32
  cu_q_lens: jax.Array  # [B + 1] int32: queries of i are cu_q_lens[i] to cu_q_lens[i + 1]
  num_seqs: jax.Array  # [1] int32: n, but at least 1
  num_tokens: jax.Array  # [] int32: places in q up to the end of the last slice


def refuses(case: Case, chip: Chip) -> str | None:
  """Why the kernel cannot serve a case, or None."""
  if chip.platform != "tpu":
    return f"it is for TPUs, not for a {chip.platform}"
  if case.kernel == "fresh":
    return "it reads K and V from pages only"
  if case.dtype not in ("bfloat16", "float32") or case.cache_dtype != case.dtype:
    return f"queries of {case.dtype} and a cache of {case.cache_dtype}: both bfloat16 or float32"
  if case.head_dim != 128:  # 64 it asserts, 256 its strided loads refuse
    return f"head_dim {case.head_dim} is not 128"
  try:
    rpa.get_min_heads_per_blk(case.num_heads, 2 * case.num_kv_heads, case.dtype, case.cache_dtype)
  except ValueError:
    return f"{case.num_kv_heads} kv heads a device in {case.cache_dtype} fill no tile of its memory"
  return None


def default(case: Case, chip: Chip) -> TileConfig:
  """Blocks that fit the vector memory of a v5e. Not measured by us on a TPU.

  The table that comes with the kernel has mostly 32 tokens, and 512 to 2,048 keys. The kernel
  multiplies a whole block of queries with the keys of each sequence that has one in it, so blocks
  are small where every token is another sequence.
  """
  group = case.num_heads // case.num_kv_heads
  tokens = 8 if case.kernel == "decode" else max(8, min(32, 256 // group))
  return TileConfig(backend="tpu", block_q=tokens * group, block_k=512)


def pack(slices: Slices, num_tokens: int) -> Packed:
  """Sorts slices by their place in q and drops those of length 0.

  The kernel knows no gaps. Tokens of no slice before a slice are given to it as queries of earlier,
  perhaps negative, positions: they read nothing but what it reads and come out finite.
  """
  exists = slices.lengths > 0
  order = jnp.argsort(jnp.where(exists, slices.starts, num_tokens), stable=True)
  num_slices = exists.sum(dtype=jnp.int32)
  in_use = jnp.arange(len(order)) < num_slices
  ends = jnp.where(exists, slices.starts + slices.lengths, 0)[order]
  end = ends.max()
  # The kernel fetches the first keys of a first sequence before it asks whether there is one. So
  # there is: a query that sees one key of page 0, of which nothing is kept.
  is_first = jnp.arange(len(order)) == 0
  kv_lens = jnp.where(in_use, (slices.offsets + slices.lengths)[order], is_first.astype(jnp.int32))
  return Packed(
    kv_lens=kv_lens,
    tables=jnp.where(in_use[:, None], slices.tables[order], 0),
    cu_q_lens=jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.where(in_use, ends, end + is_first)]),
    num_seqs=jnp.maximum(num_slices, 1)[None],
    num_tokens=end,
  )


@functools.partial(
  jax.jit, static_argnames=("page_size", "window", "soft_cap", "scale", "config")
)  # so that layers of equal shapes trace and lower once
def attend(
  q: jax.Array,  # [T, H, h]
  pages: Pages,
  prefill: Slices | None,
  decode: Slices | None,
  *,
  page_size: int,
  window: int | None,
  soft_cap: float | None,
  scale: float,
  config: TileConfig,
) -> jax.Array:  # [T, H, h]
  """Attends chunks, decodes or both in one launch; something finite in places of no slice."""
  (kv,) = pages
  num_tokens, num_heads, _ = q.shape
  _, _, num_combined_heads, _ = kv.shape
  kinds = [slices for slices in (prefill, decode) if slices is not None]
  packed = pack(Slices(*map(jnp.concatenate, zip(*kinds))), num_tokens)
  _, pages_per_table = packed.tables.shape
  group = 2 * num_heads // num_combined_heads
  out = rpa.ragged_paged_attention(
    q,
    kv,
    packed.kv_lens,
    packed.tables,
    packed.cu_q_lens,
    packed.num_seqs,
    sm_scale=scale,
    sliding_window=window,
    soft_cap=soft_cap,
    num_kv_pages_per_block=min(max(1, config.block_k // page_size), pages_per_table),
    num_queries_per_block=min(config.tile_tokens(group), num_tokens),
  )
  is_computed = jnp.arange(num_tokens) < packed.num_tokens
  return jnp.where(is_computed[:, None, None], out, q)  # beyond, the kernel leaves what was there


def write(
  pages: Pages,
  k: jax.Array,  # [T, K, h]
  v: jax.Array,  # [T, K, h]
  slots: jax.Array,  # [T] int32
  *,
  config: TileConfig,
) -> Pages:
  """Writes each token's K and V to its slot, in place if `pages` are donated. A scatter of XLA."""
  (kv,) = pages
  num_pages, page_size, num_combined_heads, head_dim = kv.shape
  new = jnp.stack([k, v], axis=2).reshape(-1, num_combined_heads, head_dim)  # k0, v0, k1, v1, ..
  slots = jnp.where(slots < 0, num_pages * page_size, slots)
  return (kv.at[slots // page_size, slots % page_size].set(new.astype(kv.dtype), mode="drop"),)
