"""Attention and page writes in Pallas on the Triton path: the baseline for sm_80 and newer.

The same kernels run in interpret mode on any platform. Upstream has deprecated this path, so all of
it is in this file.

One launch serves chunks of prompts, decodes or both. Its programs are tiles of chunks and then
parts of decodes' contexts (flash decoding), for each kv head; which kinds there are is static:

    program         0 ........ tiles of chunks ... | ... parts of contexts ........
    rows of q       tokens x G heads, padded         G heads of one token, padded
    writes          the output, in q's place         (o, m, l); `_merge` reduces them

Softmax is online and in base 2 (FlashAttention 2, 3.1). Masked lanes load nothing, so neither NaN
nor a page out of range can come in. No two lanes of a store have the same place, masked ones
included: interpret mode writes back what it read there.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pdjax.kernels.slices import Pages, Slices, cut
from pdjax.kernels.tile_config import Case, Chip, TileConfig

_LOG2E = math.log2(math.e)
_LOWEST = -1e30  # finite, so that rows which see nothing stay free of NaN
_MIN_DOT = 16  # rows of the smallest dot that tensor cores take
_MERGED_PARTS = 16
_WRITTEN_TOKENS = 16


class _Shape(NamedTuple):
  """What is static of a launch, beside its config."""

  page_size: int
  window: int | None
  soft_cap: float | None
  scale: float
  group: int  # G
  tile_tokens: int
  num_tiles: int  # programs for tiles; 0 without chunks
  is_split: bool  # whether a decode may have more than one part


class _Chunks(NamedTuple):
  owners: jax.Array  # [n] the slice of each tile, or B
  firsts: jax.Array  # [n] its first token within the slice
  slices: Slices


class _Parts(NamedTuple):
  """The contexts of decodes in parts, those of a row side by side."""

  owners: jax.Array  # [n] the row of each part, or B
  firsts: jax.Array  # [n] its first key
  sizes: jax.Array  # [B] keys in each part of a row but its last
  begins: jax.Array  # [B] the first part of each row
  counts: jax.Array  # [B] its parts
  slices: Slices


def refuses(case: Case, chip: Chip) -> str | None:
  """Why these kernels cannot serve a case, or None."""
  if case.kernel == "fresh":
    return "it reads K and V from pages only"
  if chip.platform not in ("gpu", "cpu"):
    return f"Triton is for GPUs, not for a {chip.platform}"
  if (chip.compute_capability or math.inf) < 8:
    return f"needs compute capability 8.0, not {chip.compute_capability}"
  if case.head_dim < _MIN_DOT or case.head_dim & (case.head_dim - 1):
    return f"head_dim {case.head_dim} is not a power of two of at least {_MIN_DOT}"
  if case.dtype not in ("float32", "bfloat16", "float16"):
    return f"queries of {case.dtype}"
  if case.cache_dtype not in ("float32", "bfloat16", "float16", "int8"):
    return f"a cache of {case.cache_dtype}"
  if case.cache_dtype == "int8" and case.kernel == "write":
    return "it does not quantize"
  return None


def default(case: Case, chip: Chip) -> TileConfig:
  """Tiles that fit the shared memory and, but for float32, the registers of sm_80 and sm_90.

  Read from what the compiler says for the shapes of Llama-3-8B; not measured on a GPU.
  """
  if chip.platform == "cpu":  # interpreted: few programs with few turns
    return TileConfig(backend="triton", block_q=64, block_k=64, min_split_tokens=64)
  is_float32 = "float32" in (case.dtype, case.cache_dtype)  # no tensor cores: see `_dot`
  is_wide = case.head_dim > 128
  programs = 4 * (chip.num_cores or 108)
  if case.kernel in ("decode", "write"):
    block_k = 32 if is_float32 and is_wide else 64
    return TileConfig(backend="triton", block_k=block_k, programs=programs)
  if is_float32:
    block_q, block_k, num_stages, num_warps = 64, 16, 2, 8
  elif (chip.compute_capability or 8) < 9:  # accumulators of its dots take more registers
    block_q, block_k, num_stages, num_warps = (64, 32, 2, 8) if is_wide else (128, 64, 2, 8)
  elif is_wide:
    block_q, block_k, num_stages, num_warps = 128, 32, 2, 8
  else:
    block_q, block_k, num_stages, num_warps = 128, 64, 3, 8 if case.head_dim > 64 else 4
  return TileConfig(
    backend="triton",
    block_q=block_q,
    block_k=block_k,
    num_stages=num_stages,
    num_warps=num_warps,
    programs=programs,
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
  """Attends chunks, decodes or both in one launch; `q` in places of no slice.

  A second, small launch merges the parts of decodes where there can be more than one of a row.
  """
  num_tokens, num_heads, head_dim = q.shape
  _, num_kv_heads, *_ = pages[0].shape
  if 2**31 < pages[0].nbytes <= 2**32 and pages[0].itemsize == 1:
    raise ValueError(f"int8 pages {pages[0].shape}: offsets of 2**31 to 2**32 overflow in Triton")
  tile_tokens = config.tile_tokens(num_heads // num_kv_heads)
  chunks = parts = None
  if prefill is not None:
    tiles = cut(prefill, num_tokens=num_tokens, tile_tokens=tile_tokens)
    chunks = _Chunks(tiles.slices, tiles.firsts, prefill)
  if decode is not None:
    parts = _cut_contexts(decode, num_kv_heads, page_size, window, config)
  num_tiles = 0 if chunks is None else len(chunks.owners)
  num_parts = 0 if parts is None else len(parts.owners)
  is_split = parts is not None and num_parts > len(parts.counts)
  out_shapes = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
  if is_split:
    shape = (num_parts, num_heads)
    for partial in ((*shape, head_dim), shape, shape):  # o, m, l
      out_shapes.append(jax.ShapeDtypeStruct(partial, jnp.float32))
  shape = _Shape(
    page_size, window, soft_cap, scale, num_heads // num_kv_heads, tile_tokens, num_tiles, is_split
  )
  out, *partials = pl.pallas_call(
    functools.partial(_attend_kernel, shape=shape, config=config),
    out_shape=out_shapes,
    grid=(num_tiles + num_parts, num_kv_heads),
    input_output_aliases={0: 0},
    compiler_params=_params(config),
    interpret=config.interpret,
    name="attend",
  )(q, pages, chunks, parts)
  if not is_split:
    return out
  return pl.pallas_call(
    _merge_kernel,
    out_shape=out_shapes[0],
    grid=(len(parts.counts), num_heads),
    input_output_aliases={0: 0},
    compiler_params=pltriton.CompilerParams(num_warps=2, num_stages=1),
    interpret=config.interpret,
    name="merge_parts",
  )(out, tuple(partials), parts)


def _params(config: TileConfig) -> pltriton.CompilerParams:
  return pltriton.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages)


def _cut_contexts(
  decode: Slices, num_kv_heads: int, page_size: int, window: int | None, config: TileConfig
) -> _Parts:
  """Cuts each context into equal parts: over all kv heads about `config.programs` programs."""
  num_rows, pages_per_row = decode.tables.shape
  block_k, least = config.block_k, config.min_split_tokens
  ends = jnp.where(decode.lengths > 0, decode.offsets + 1, 0)
  begins = jnp.zeros_like(ends) if window is None else jnp.maximum(ends - window, 0)
  begins = begins // block_k * block_k
  lengths = ends - begins
  # A row's share x of the programs of a head, rounded, but at least 1: so below x + 1, and below
  # `per_head` + B in all.
  per_head = max(1, config.programs // num_kv_heads)
  total = jnp.maximum(lengths.sum(), 1)
  shares = (2 * per_head * lengths + total) // (2 * total)
  shares = jnp.maximum(jnp.minimum(shares, lengths // least), 1)
  sizes = -(-lengths // (shares * block_k)) * block_k
  counts = -(-lengths // jnp.maximum(sizes, 1))
  last = jnp.cumsum(counts)
  most_each = max(1, pages_per_row * page_size // least)
  parts = jnp.arange(min(num_rows * most_each, num_rows + per_head - 1), dtype=jnp.int32)
  owners = (parts[:, None] >= last).sum(1)
  row = jnp.minimum(owners, num_rows - 1)
  firsts = begins[row] + (parts - (last - counts)[row]) * sizes[row]
  columns = (owners, firsts, sizes, last - counts, counts)
  return _Parts(*(x.astype(jnp.int32) for x in columns), decode)


def _attend_kernel(q_ref, pages, chunks, parts, out_ref, *partials, shape: _Shape, config):
  """One tile of a chunk, or one part of a decode's context, for one kv head."""
  program, kv_head = pl.program_id(0), pl.program_id(1)
  rows_of = functools.partial(_rows, shape.group, kv_head)

  def tile():
    # The last tiles of a chunk see most keys: they come first.
    index = shape.num_tiles - 1 - program
    b, first = chunks.owners[index], chunks.firsts[index]

    @pl.when(b < len(chunks.slices.starts))
    def _():
      starts, lengths, offsets, tables = chunks.slices
      num = jnp.minimum(shape.tile_tokens, lengths[b] - first)
      token, head, own = rows_of(shape.tile_tokens)
      own &= token < num
      position = offsets[b] + first
      state = _attend_keys(
        _load_rows(q_ref, starts[b] + first + token, head, own),
        pages, tables, b, kv_head, (position + token)[:, None],
        0 if shape.window is None else jnp.maximum(position - shape.window + 1, 0),
        position + num, shape, config,
      )  # fmt: skip
      _store_rows(out_ref, starts[b] + first + token, head, own, _normalised(*state))

  def part():
    index = program - shape.num_tiles
    b, first = parts.owners[index], parts.firsts[index]

    @pl.when(b < len(parts.slices.starts))
    def _():
      starts, _, offsets, tables = parts.slices
      token, head, own = rows_of(1)
      position = offsets[b]
      if shape.window is not None:
        begin = jnp.maximum(first, position - shape.window + 1)
      else:
        begin = first
      o, m, l = _attend_keys(
        _load_rows(q_ref, starts[b] + token, head, own),
        pages, tables, b, kv_head, position,
        begin, jnp.minimum(position + 1, first + parts.sizes[b]), shape, config,
      )  # fmt: skip
      if shape.is_split:
        o_ref, m_ref, l_ref = partials
        _store_rows(o_ref, index + token, head, own, o)
        pltriton.store(m_ref.at[index + token, head], m, mask=own)
        pltriton.store(l_ref.at[index + token, head], l, mask=own)
      else:
        _store_rows(out_ref, starts[b] + token, head, own, _normalised(o, m, l))

  if parts is None:
    tile()
  elif chunks is None:
    part()
  else:
    lax.cond(program < shape.num_tiles, tile, part)


def _attend_keys(q, pages, tables, b, kv_head, position, begin, end, shape: _Shape, config):
  """(o, m, l) of rows `q` at `position` over the keys [begin, end) of row `b`; o not normalised."""
  num_rows, head_dim = q.shape
  page_size, block_k = shape.page_size, config.block_k
  k_ref, v_ref, *scale_refs = pages
  num_outer, _, inner, _ = k_ref.shape
  pages_per_outer = inner // page_size
  dtype = q.dtype if scale_refs else jnp.promote_types(q.dtype, k_ref.dtype)
  q = q.astype(dtype)
  lane = jnp.arange(block_k, dtype=jnp.int32)
  dim = jnp.arange(head_dim, dtype=jnp.int32)[None, :]
  # Units of the exponent: scores are in base 2.
  unit = shape.scale * _LOG2E if shape.soft_cap is None else shape.scale / shape.soft_cap

  def block(i, state):
    o, m, l = state
    key = i * block_k + lane
    valid = (key >= begin) & (key < end)
    if page_size % block_k == 0:  # a block lies in one page
      page = tables[b, lax.div(i, page_size // block_k)]
    else:
      page = pltriton.load(tables.at[b, lax.div(key, page_size)], mask=valid, other=0)
    page = jnp.clip(page, 0, num_outer * pages_per_outer - 1)
    place = lax.rem(page, pages_per_outer) * page_size + lax.rem(key, page_size)
    outer = jnp.broadcast_to(lax.div(page, pages_per_outer), place.shape)

    def load(ref):
      where = ref.at[outer[:, None], kv_head, place[:, None], dim]
      return pltriton.load(where, mask=valid[:, None], other=0).astype(dtype)

    def load_scales(ref):
      return pltriton.load(ref.at[outer, kv_head, place], mask=valid, other=0)[None, :]

    scores = _dot(q, load(k_ref), contract=1) * unit
    if scale_refs:
      scores *= load_scales(scale_refs[0])
    if shape.soft_cap is not None:
      scores = jnp.tanh(scores) * (shape.soft_cap * _LOG2E)
    seen = valid & (key <= position)
    if shape.window is not None:
      seen &= key > position - shape.window
    scores = jnp.where(seen, scores, -jnp.inf)
    new_m = jnp.maximum(m, scores.max(axis=1))
    weights = jnp.exp2(scores - new_m[:, None])
    shrink = jnp.exp2(m - new_m)
    l = l * shrink + weights.sum(axis=1)
    if scale_refs:
      weights *= load_scales(scale_refs[1])
    o = o * shrink[:, None] + _dot(weights.astype(dtype), load(v_ref), contract=0)
    return o, new_m, l

  start = (
    jnp.zeros((num_rows, head_dim), jnp.float32),
    jnp.full(num_rows, _LOWEST, jnp.float32),
    jnp.zeros(num_rows, jnp.float32),
  )
  return lax.fori_loop(lax.div(begin, block_k), pl.cdiv(end, block_k), block, start)


def _dot(a, b, *, contract: int):
  """`a` times `b` over the latter's axis `contract`, added up in float32."""
  return lax.dot_general(
    a, b, (((1,), (contract,)), ((), ())),
    precision=lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
    preferred_element_type=jnp.float32,
  )  # fmt: skip


def _rows(group: int, kv_head, num_tokens: int):
  """(token, head, whether it is one) of each row of a tile; head varies fastest."""
  row = jnp.arange(max(_MIN_DOT, pl.next_power_of_2(num_tokens * group)), dtype=jnp.int32)
  token = lax.div(row, group)
  return token, kv_head * group + lax.rem(row, group), row < num_tokens * group


def _load_rows(ref, token, head, own):
  dim = jnp.arange(ref.shape[-1], dtype=jnp.int32)[None, :]
  return pltriton.load(ref.at[token[:, None], head[:, None], dim], mask=own[:, None], other=0)


def _store_rows(ref, token, head, own, value):
  dim = jnp.arange(ref.shape[-1], dtype=jnp.int32)[None, :]
  where = ref.at[token[:, None], head[:, None], dim]
  pltriton.store(where, value.astype(ref.dtype), mask=own[:, None])


def _normalised(o, m, l):
  del m
  return o / jnp.where(l > 0, l, 1)[:, None]


def _merge_kernel(_, partials, parts, out_ref):
  """The parts of one row and one head into the output (FlashDecoding's reduction)."""
  b, head = pl.program_id(0), pl.program_id(1)
  o_ref, m_ref, l_ref = partials
  _, _, head_dim = o_ref.shape
  lane = jnp.arange(_MERGED_PARTS, dtype=jnp.int32)
  dim = jnp.arange(head_dim, dtype=jnp.int32)
  begin, count = parts.begins[b], parts.counts[b]

  def some(i, state):
    o, m, l = state
    own = i * _MERGED_PARTS + lane < count
    part = begin + i * _MERGED_PARTS + lane
    part_m = pltriton.load(m_ref.at[part, head], mask=own, other=_LOWEST)
    part_l = pltriton.load(l_ref.at[part, head], mask=own, other=0)
    part_o = pltriton.load(o_ref.at[part[:, None], head, dim[None, :]], mask=own[:, None], other=0)
    new_m = jnp.maximum(m, part_m.max())
    shrink, weight = jnp.exp2(m - new_m), jnp.exp2(part_m - new_m)
    o = o * shrink + (part_o * weight[:, None]).sum(axis=0)
    return o, new_m, l * shrink + (part_l * weight).sum()

  start = jnp.zeros(head_dim, jnp.float32), jnp.float32(_LOWEST), jnp.float32(0)
  o, _, l = lax.fori_loop(0, pl.cdiv(count, _MERGED_PARTS), some, start)
  where = out_ref.at[jnp.broadcast_to(parts.slices.starts[b], dim.shape), head, dim]
  value = (o / jnp.where(l > 0, l, 1)).astype(out_ref.dtype)
  pltriton.store(where, value, mask=jnp.broadcast_to(count > 0, dim.shape))


@functools.partial(jax.jit, static_argnames="config")
def write(
  pages: Pages,
  k: jax.Array,  # [T, K, h]
  v: jax.Array,  # [T, K, h]
  slots: jax.Array,  # [T] int32
  *,
  config: TileConfig,
) -> Pages:
  """Writes each token's K and V into `pages`, in place where they are donated."""
  num_tokens, num_kv_heads, _ = k.shape
  return pl.pallas_call(
    _write_kernel,
    out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pages),
    grid=(pl.cdiv(num_tokens, _WRITTEN_TOKENS), num_kv_heads),
    input_output_aliases={i: i for i in range(len(pages))},
    compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
    interpret=config.interpret,
    name="write_pages",
  )(*pages, k, v, slots)


def _write_kernel(_k_pages, _v_pages, k_ref, v_ref, slots_ref, k_out, v_out):
  block, kv_head = pl.program_id(0), pl.program_id(1)
  num_tokens, _, head_dim = k_ref.shape
  num_outer, _, inner, _ = k_out.shape
  token = block * _WRITTEN_TOKENS + jnp.arange(_WRITTEN_TOKENS, dtype=jnp.int32)
  slot = pltriton.load(slots_ref.at[token], mask=token < num_tokens, other=-1)
  own = (slot >= 0) & (slot < num_outer * inner)
  slot = jnp.where(own, slot, num_outer * inner)
  outer, place = lax.div(slot, inner)[:, None], lax.rem(slot, inner)[:, None]
  dim = jnp.arange(head_dim, dtype=jnp.int32)[None, :]
  for ref, out_ref in ((k_ref, k_out), (v_ref, v_out)):
    value = pltriton.load(ref.at[token[:, None], kv_head, dim], mask=own[:, None], other=0)
    where = out_ref.at[outer, kv_head, place, dim]
    pltriton.store(where, value.astype(out_ref.dtype), mask=own[:, None])
