"""Attention and page writes in Pallas Mosaic GPU, for Hopper: wgmma, TMA, warp specialisation.

The kernel is in mosaic_attention.py; here is what surrounds it: which programs there are, the merge
of decodes' parts, and writes. Not measured on a GPU. The arithmetic of the tile sizes, for an H200
(132 SMs, about 800 TFLOP/s in bf16 in practice, 4.8 TB/s; per SM and clock of 1.8 GHz 2,048
multiply-adds in tensor cores, 16 exponentials, 128 B of SMEM) and head_dim 128:

- A chunk's tile of 128 rows x 128 keys is 8.4 MFLOP in 1.4 us and reads 64 KB of K and V: 128 FLOP
  a byte, so all SMs draw 6 TB/s, most of it from L2, as programs of one kv head run at once.
  Its 16,384 exponentials take 1,024 clocks beside 2,048 of products: the two warpgroups take turns,
  so that they overlap. A thread holds 64 floats of the result, 64 of scores and 32 registers of
  weights, within 232; ptxas spills nothing.
- A decode reads each key once: 64 KB of K and V take an SM 1.8 us at its share of 4.8 TB/s. The
  products over 64 rows, mostly padding, are 1,024 clocks and the softmax about 900, 1.05 us, split
  over two warpgroups that take every other block. With 4 x 32 KB in flight, three times what its
  share of bandwidth times a latency of 1 us asks for, copies never wait.
- Splitting contexts gives each SM about two parts of equal length; a part of 256 keys reads 128 KB
  and leaves 1 KB a head.
- Pages of 16 cost eight copies a block and operand, and all 128 threads of the memory warpgroup
  arrive at a barrier for each: about as long as a chunk's products. Pages of 64 and more cost a
  quarter of that and less.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pdjax.kernels.backends import mosaic_attention as kernel
from pdjax.kernels.backends.mosaic_attention import Heads, Partials, Shape, Work
from pdjax.kernels.slices import Pages, Slices, cut
from pdjax.kernels.tile_config import Case, Chip, TileConfig

SMEM_BYTES = 232_448  # of a program on Hopper
_ALIGNED_TOKENS = 8  # where a TMA copy into swizzled SMEM may begin
_WRITTEN_TOKENS = 8  # of a program of `write`, if SMEM holds as many


def refuses(case: Case, chip: Chip) -> str | None:
  """Why these kernels cannot serve a case, or None."""
  if case.kernel == "fresh":
    return "it reads K and V from pages only"
  if jax.__version_info__ < (0, 11):
    return f"needs jax 0.11, not {jax.__version__}"
  if chip.platform != "gpu":
    return f"Mosaic is for GPUs, not for a {chip.platform}"
  if chip.compute_capability is None or int(chip.compute_capability) != 9:
    return f"wgmma is of compute capability 9.0 alone, not {chip.compute_capability}"
  if case.cache_dtype != case.dtype:
    return f"a cache of {case.cache_dtype} with queries of {case.dtype}"
  if case.dtype not in ("bfloat16", "float16"):
    return f"wgmma takes no {case.dtype} here"
  if case.head_dim not in (64, 128, 256):
    return f"head_dim {case.head_dim} is not 64, 128 or 256"
  if case.kernel == "write":
    return None
  block_k = default(case, chip).block_k
  if case.page_size % 8 or max(case.page_size, block_k) % min(case.page_size, block_k):
    return f"pages of {case.page_size} do not fit blocks of {block_k}"
  return None


def default(case: Case, chip: Chip) -> TileConfig:
  """Two compute warpgroups, and a ring that fills what SMEM the queries leave."""
  del chip  # all that it serves have the same SMEM
  block_k = {64: 128, 128: 128, 256: 64}[case.head_dim]
  if case.kernel == "decode":
    block_k = {64: 128, 128: 64, 256: 64}[case.head_dim]
  stage_bytes = 2 * block_k * case.head_dim * 2
  rows_bytes = 128 * case.head_dim * 2
  num_stages = (SMEM_BYTES - 8192 - rows_bytes) // stage_bytes
  return TileConfig(
    backend="mosaic",
    block_q=128,
    block_k=block_k,
    num_stages=min(4, num_stages // 2 * 2),
    min_split_tokens=256,
    programs=264,
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
  """Attends chunks, decodes or both in one launch; zero in places of no slice.

  Raises:
    ValueError: tiles or blocks that the kernel cannot make.
  """
  if config.block_q % kernel.ROWS:
    raise ValueError(f"block_q={config.block_q} is not a multiple of {kernel.ROWS}")
  num_tokens, num_heads, head_dim = q.shape
  k_pages, v_pages = pages
  _, num_kv_heads, inner, _ = k_pages.shape
  group = num_heads // num_kv_heads
  shape = Shape(
    num_kv_heads=num_kv_heads,
    group=group,
    head_dim=head_dim,
    dtype=q.dtype.name,
    page_size=page_size,
    pages_per_outer=inner // page_size,
    window=window,
    soft_cap=soft_cap,
    scale=scale,
    warpgroups=config.block_q // kernel.ROWS,
    block_k=config.block_k,
    num_stages=config.num_stages,
    chunks=None if prefill is None else Heads.of_chunks(group, config.block_q),
    decodes=None if decode is None else Heads.of_decodes(group),
    interpret=config.interpret,
  )
  chunks = parts = None
  if prefill is not None:
    chunks = _chunk_work(q, prefill, shape)
  if decode is not None:
    parts = _decode_work(q, decode, shape, config)
  out, partials = kernel.attend_work(chunks, parts, k_pages, v_pages, shape)
  out = jnp.zeros_like(q) if out is None else out[:num_tokens]
  if decode is None:
    return out
  merged = _merge(partials, parts, decode.lengths, shape).astype(q.dtype)
  targets = jnp.where(decode.lengths > 0, decode.starts, num_tokens)
  return out.at[targets].set(merged.reshape(-1, num_heads, head_dim), mode="drop")


def _columns(**columns: jax.Array) -> jax.Array:  # [n, 8] int32
  names = ("slice", "start", "skip", "count", "position", "low", "high")
  tiles = jnp.stack([columns[name] for name in names], axis=1).astype(jnp.int32)
  return jnp.pad(tiles, ((0, 0), (0, 1)))


def _chunk_work(q: jax.Array, prefill: Slices, shape: Shape) -> Work:
  """Tiles of chunks, the last ones first: they see the most keys, and short ones fill the end."""
  num_tokens, _, _ = q.shape
  (num_slices,) = prefill.starts.shape
  skips = jnp.where(prefill.lengths > 0, prefill.starts % _ALIGNED_TOKENS, 0)
  aligned = Slices(
    prefill.starts - skips, prefill.lengths + skips, prefill.offsets - skips, prefill.tables
  )
  most = num_tokens + num_slices * (_ALIGNED_TOKENS - 1)
  tiles = cut(aligned, num_tokens=most, tile_tokens=shape.chunks.tokens)
  (num_slots,) = tiles.slices.shape
  slots = jnp.arange(num_slots)
  is_used = slots < tiles.num_tiles
  order = jnp.where(is_used, tiles.num_tiles - 1 - slots, slots)
  owners, firsts = tiles.slices[order], tiles.firsts[order]
  starts, lengths, offsets, skips = (
    x.at[owners].get(mode="clip") for x in (aligned.starts, aligned.lengths, aligned.offsets, skips)
  )
  skips = jnp.where(firsts == 0, skips, 0)
  counts = jnp.where(is_used, jnp.minimum(lengths - firsts, shape.chunks.tokens), 0)
  positions = offsets + firsts
  # A TMA descriptor that tiles by 8 tokens has no part of a tile.
  padded = max(shape.chunks.piece, -(-num_tokens // _ALIGNED_TOKENS) * _ALIGNED_TOKENS)
  return Work(
    _columns(
      slice=owners,
      start=starts + firsts,
      skip=skips,
      count=counts,
      position=positions,
      low=_first_seen(positions + skips, shape),
      high=positions + counts,
    ),
    prefill.tables,
    jnp.pad(q, ((0, padded - num_tokens), (0, 0), (0, 0))),
  )


def _first_seen(positions: jax.Array, shape: Shape) -> jax.Array:
  if shape.window is None:
    return jnp.zeros_like(positions)
  return jnp.maximum(positions - (shape.window - 1), 0)


def _decode_work(q: jax.Array, decode: Slices, shape: Shape, config: TileConfig) -> Work:
  """Contexts in parts of equal length (flash decoding), about `config.programs` in all.

  Parts begin at borders of blocks, so that none is read twice.
  """
  num_slices, num_pages = decode.tables.shape
  heads, block_k = shape.decodes, shape.block_k
  parts_per_program = shape.num_kv_heads * heads.groups
  contexts = jnp.where(decode.lengths > 0, decode.offsets + 1, 0)
  lows = _first_seen(contexts - 1, shape)
  begins = lows // block_k * block_k
  keys = contexts - begins
  min_split = -(-config.min_split_tokens // block_k)
  split = -(-keys.sum() * parts_per_program // (config.programs * block_k))
  split = jnp.maximum(split, min_split) * block_k
  ends = jnp.cumsum(-(-keys // split))
  max_parts = -(-num_pages * shape.page_size // (min_split * block_k)) + 1
  num_parts = min(num_slices * max_parts, num_slices + config.programs // parts_per_program)
  parts = jnp.arange(num_parts)
  owners = (parts[:, None] >= ends).sum(1)
  row = jnp.minimum(owners, num_slices - 1)
  nth = parts - (ends - (-(-keys // split)))[row]
  part_begins = begins[row] + nth * split
  group = jnp.pad(
    q.at[decode.starts].get(mode="clip").reshape(num_slices, shape.num_kv_heads, shape.group, -1),
    ((0, 0), (0, 0), (0, heads.groups * heads.heads - shape.group), (0, 0)),
  ).reshape(num_slices, shape.num_kv_heads, heads.groups, heads.heads, -1)
  return Work(
    _columns(
      slice=owners,
      start=row,
      skip=jnp.zeros_like(row),
      count=owners < num_slices,
      position=contexts[row] - 1,
      low=jnp.maximum(part_begins, lows[row]),
      high=jnp.minimum(part_begins + split, contexts[row]),
    ),
    decode.tables,
    jnp.pad(group, ((0, 0),) * 3 + ((0, heads.rows - heads.heads), (0, 0))),
  )


def _merge(
  partials: Partials, parts: Work, lengths: jax.Array, shape: Shape
) -> jax.Array:  # [B, K, G, h] float32
  """Sums the parts of each row by their weights; a product with a matrix of who owns which.

  In few operations, as each is a launch: the product is one for all heads. It would spread what is
  not finite to every row, so rows with such parts are told apart, and theirs is NaN alone.
  """
  heads, (num_slices,) = shape.decodes, lengths.shape
  is_used = (parts.tiles[:, kernel.COUNT] > 0)[:, None]
  is_own = is_used & (parts.tiles[:, kernel.SLICE, None] == jnp.arange(num_slices))  # [n, B]
  # Of the parts [n, K, groups, W, r], r heads, and of rows [B, K, groups, r].
  tops, sums = (x[..., : heads.heads] for x in (partials.tops, partials.sums))
  top = jnp.where(is_own[..., None, None, None], tops.max(3)[:, None], -jnp.inf).max(0)
  shares = (jnp.exp2(tops - top[parts.tiles[:, kernel.START], :, :, None]) * sums)[..., None]
  results = partials.halves[..., : heads.heads, :].astype(jnp.float32).sum(4)
  both = jnp.concatenate([results * shares, shares], axis=-1).sum(3)  # [n, K, groups, r, h + 1]
  both = both.reshape(len(both), -1)
  is_finite = jnp.isfinite(both).all(1, keepdims=True)
  both = jnp.where(is_used & is_finite, both, 0)
  is_lost = (is_own & ~is_finite).any(0)[:, None, None, None]
  both = jnp.matmul(is_own.T.astype(jnp.float32), both, precision=lax.Precision.HIGHEST)
  both = both.reshape(num_slices, shape.num_kv_heads, -1, shape.head_dim + 1)
  merged, total = both[..., :-1], both[..., -1:]
  merged = jnp.where(is_lost, jnp.nan, merged / jnp.where(total > 0, total, 1))
  return merged[:, :, : shape.group]


@functools.partial(jax.jit, static_argnames=("config",))
def write(
  pages: Pages,
  k: jax.Array,  # [T, K, h]
  v: jax.Array,  # [T, K, h]
  slots: jax.Array,  # [T] int32
  *,
  config: TileConfig,
) -> Pages:
  """Writes each token's K and V to its slot, in place if `pages` are donated."""
  k_pages, _ = pages
  num_outer, num_kv_heads, inner, head_dim = k_pages.shape
  dtype = k_pages.dtype
  (num_tokens,) = slots.shape
  token_bytes = 2 * num_kv_heads * head_dim * dtype.itemsize
  written = min(_WRITTEN_TOKENS, (SMEM_BYTES - 8192) // token_bytes)
  num_programs = -(-num_tokens // written)
  padding = num_programs * written - num_tokens
  slots = jnp.pad(slots, (0, padding), constant_values=-1)
  news = [x.astype(dtype).reshape(num_tokens, num_kv_heads, 1, head_dim) for x in (k, v)]
  news = [jnp.pad(x, ((0, padding), *((0, 0),) * 3)) for x in news]
  refs = [jax.new_ref(x) for x in pages]

  def body(slots_ref, *rest):
    *copied, barrier = rest
    first = lax.axis_index("program") * written
    for source, smem in zip(copied[:2], copied[4:]):
      plgpu.copy_gmem_to_smem(source.at[pl.ds(first, written)], smem, barrier)
    plgpu.barrier_wait(barrier)
    for i in range(written):
      slot = slots_ref[first + i]

      @pl.when((slot >= 0) & (slot < num_outer * inner))
      def _():
        outer, place = lax.div(slot, inner), lax.rem(slot, inner)  # noqa: B023
        for smem, target in zip(copied[4:], copied[2:4]):
          plgpu.copy_smem_to_gmem(smem.at[i], target.at[outer, :, pl.ds(place, 1)])  # noqa: B023

    plgpu.wait_smem_to_gmem(0)

  buffer = plgpu.SMEM((written, num_kv_heads, 1, head_dim), dtype)
  plgpu.kernel(
    body,
    out_type=(),
    scratch_types=(buffer, buffer, plgpu.Barrier(num_arrivals=2)),
    grid=(num_programs,),
    grid_names=("program",),
    kernel_name="write_pages",
    interpret=plgpu.InterpretGPUParams() if config.interpret else None,
  )(slots, *news, *refs)
  return tuple(ref[...] for ref in refs)
