"""One Mosaic GPU kernel for chunks of prompts, parts of decodes, or both: wgmma, TMA, barriers.

A program serves one tile of queries and one kv head. Its warpgroups have roles:

    memory      page ids -> TMA copies, a page or a part of one each -> a ring of blocks in SMEM
    compute 0   q k^T -> softmax -> p v ...        a tile of a chunk: 64 of its rows, every block
    compute 1          q k^T -> softmax -> p v     a decode: all of its rows, every other block

Barriers of a block: `filled` (its copies arrive) and `drained` (every reader arrives), for keys
and values apart. On a tile of a chunk two compute warpgroups take turns at the tensor cores
(`turn`; FlashAttention 3, Shah et al. 2024, 3.1): while one does its softmax the other multiplies.
Softmax is online and in base 2; blocks that every row sees whole take a loop without masks.

Rows of a tile are head-major, row = head * tokens + token, so that queries come and results go by
TMA from and to [T, H, h] itself, without a gather. Only tokens of the tile's slice are stored, in
pieces of falling powers of two.

Interpret mode runs all of this, a Python thread for each warpgroup; only `_add_product` has a
branch for it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64  # of a compute warpgroup: those of one wgmma
SWIZZLE_BYTES = 128
_COLUMNS = 64  # of 16 bits: as many as are swizzled together
_LOG2E = math.log2(math.e)
_LOWEST = -1e30  # of a row's top: finite, so that rows which see nothing stay free of NaN
_REGISTERS = {2: (232, 40), 3: (160, 32)}  # of compute and memory threads; 65,536 in all

# The columns of a program in `Work.tiles`.
SLICE, START, SKIP, COUNT, POSITION, LOW, HIGH, _ = range(8)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
  """How the G query heads of a kv head lie in tiles: `groups` tiles of `heads` each."""

  heads: int
  groups: int
  tokens: int  # of a tile

  @classmethod
  def of_chunks(cls, group: int, block_q: int) -> Heads:
    """Tiles of a multiple of 8 tokens: what a TMA copy into swizzled SMEM must have."""
    groups = -(-group // (block_q // 8))
    heads = -(-group // groups)
    return cls(heads=heads, groups=groups, tokens=block_q // heads // 8 * 8)

  @classmethod
  def of_decodes(cls, group: int) -> Heads:
    groups = -(-group // ROWS)
    return cls(heads=-(-group // groups), groups=groups, tokens=1)

  @property
  def rows(self) -> int:
    """Rows copied of a tile: whole groups of 8."""
    return -(-self.heads * self.tokens // 8) * 8

  @property
  def piece(self) -> int:
    """Tokens of one head that lie in one warpgroup's rows side by side."""
    return math.gcd(self.tokens, ROWS)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
  """What is static of a launch. `chunks` and `decodes` are the kinds of program it has.

  Raises:
    ValueError: tiles or blocks that the kernel cannot make.
  """

  num_kv_heads: int
  group: int  # G
  head_dim: int
  dtype: str
  page_size: int
  pages_per_outer: int
  window: int | None
  soft_cap: float | None
  scale: float
  warpgroups: int  # that compute
  block_k: int
  num_stages: int
  chunks: Heads | None
  decodes: Heads | None
  interpret: bool

  def __post_init__(self):
    if self.block_k % ROWS or max(self.page_size, self.block_k) % self.piece:
      raise ValueError(f"block_k={self.block_k} does not fit pages of {self.page_size}")
    if self.decodes is not None and self.num_stages % self.warpgroups:
      # A warpgroup that never waits for a barrier's phase would lose count of them.
      raise ValueError(f"num_stages={self.num_stages} does not divide by {self.warpgroups}")

  @property
  def piece(self) -> int:
    """Keys of one copy: a page, or as much of one as a block takes."""
    return min(self.page_size, self.block_k)


class Work(NamedTuple):
  """Programs of one kind: tiles of chunks, or parts of the contexts of decodes.

  COUNT tokens from START of T (rows of `queries` for decodes) are at POSITION and the next ones;
  the first SKIP of them are not the tile's, since START is a multiple of 8 as TMA wants it. The
  others see keys LOW to HIGH, of which a decode's part has its own. COUNT 0 is no program.
  """

  tiles: jax.Array  # [n, 8] int32
  tables: jax.Array  # [B, P] int32
  queries: jax.Array  # [T, H, h]; of decodes [B, K, groups, rows, h]


class Partials(NamedTuple):
  """What parts of decodes yield. Anything where a part is not in use.

  A result is the sum of its two halves, rounded and what rounding left: as good as float32 here,
  and they leave through the SMEM that the queries had.
  """

  halves: jax.Array  # [n, K, groups, compute warpgroups, 2, rows, h]
  tops: jax.Array  # [n, K, groups, compute warpgroups, 64] float32: highest score, in base 2
  sums: jax.Array  # the same: sum of the weights


def attend_work(
  chunks: Work | None, decodes: Work | None, k_pages: jax.Array, v_pages: jax.Array, shape: Shape
) -> tuple[jax.Array | None, Partials | None]:
  """One launch. The result of chunks is [T, H, h], zero in places of none of them."""
  kinds = [kind for kind in ("chunks", "decodes") if getattr(shape, kind) is not None]
  programs, outputs, operands = {}, {}, {}
  if chunks is not None:
    operands["chunks"] = chunks
    programs["chunks"] = len(chunks.tiles) * shape.num_kv_heads * shape.chunks.groups
    outputs["chunks"] = jax.new_ref(jnp.zeros_like(chunks.queries))
  if decodes is not None:
    operands["decodes"] = decodes
    parts = (len(decodes.tiles), shape.num_kv_heads, shape.decodes.groups)
    programs["decodes"] = math.prod(parts)
    outputs["decodes"] = _partials((*parts, shape.warpgroups), shape)
  leaves, tree = jax.tree.flatten((operands, outputs))

  def body(*refs):
    (ins, outs), (k_ref, v_ref), scratch = (
      jax.tree.unflatten(tree, refs[: len(leaves)]),
      refs[len(leaves) : -1],
      refs[-1],
    )
    first, program = 0, lax.axis_index("program")
    for kind in kinds:
      run = functools.partial(
        _run, kind, program - first, ins[kind], outs[kind], k_ref, v_ref, scratch, shape
      )
      if len(kinds) == 1:
        run()
      else:
        last = first + programs[kind]
        pl.when((program >= first) & (program < last))(run)
        first = last

  def entry(*refs):
    scratch = _scratch(shape)
    pl.run_scoped(
      lambda *held: body(*refs, dict(zip(scratch, held))),
      *scratch.values(),
      collective_axes="warpgroup",
    )

  plgpu.kernel(
    entry,
    out_type=(),
    grid=(sum(programs.values()),),
    grid_names=("program",),
    num_threads=shape.warpgroups + 1,
    thread_name="warpgroup",
    kernel_name="attend_" + "_".join(kinds),
    compiler_params=plgpu.CompilerParams(approx_math=True),
    interpret=plgpu.InterpretGPUParams() if shape.interpret else None,
  )(*leaves, k_pages, v_pages)
  results = jax.tree.map(lambda ref: ref[...], outputs)
  return results.get("chunks"), results.get("decodes")


def _partials(axes: tuple[int, ...], shape: Shape) -> Partials:
  def empty(*more, dtype):
    return jax.new_ref(lax.empty((*axes, *more), dtype))

  return Partials(
    halves=empty(2, shape.decodes.rows, shape.head_dim, dtype=shape.dtype),
    tops=empty(ROWS, dtype=jnp.float32),
    sums=empty(ROWS, dtype=jnp.float32),
  )


def _scratch(shape: Shape) -> dict:
  """What a program holds. The results of a warpgroup take the place of its own queries."""
  dtype, h, wgs = shape.dtype, shape.head_dim, shape.warpgroups
  tiled = (
    plgpu.TilingTransform((8, SWIZZLE_BYTES // jnp.dtype(dtype).itemsize)),
    plgpu.SwizzleTransform(SWIZZLE_BYTES),
  )
  ring = (shape.num_stages, shape.block_k, h)
  copies = shape.block_k // shape.piece
  filled = plgpu.Barrier(num_arrivals=copies, num_barriers=shape.num_stages)
  drained = plgpu.Barrier(num_arrivals=wgs, num_barriers=shape.num_stages)
  held = {
    "rows": plgpu.RefUnion(
      plgpu.SMEM((wgs, ROWS, h), dtype, transforms=tiled), plgpu.SMEM((wgs, ROWS, h), dtype)
    ),
    "k": plgpu.SMEM(ring, dtype, transforms=tiled),
    "v": plgpu.SMEM(ring, dtype, transforms=tiled),
    "k_filled": filled,
    "v_filled": filled,
    "k_drained": drained,
    "v_drained": drained,
    "q_filled": plgpu.Barrier(num_arrivals=1, num_barriers=wgs),
  }
  if shape.chunks is not None:
    copies = ROWS // shape.chunks.piece
    held["q_filled_chunks"] = plgpu.Barrier(num_arrivals=copies, num_barriers=wgs)
    if wgs == 2:
      held["turn"] = plgpu.Barrier(num_arrivals=2)
  if shape.decodes is not None:
    held["stats"] = plgpu.SMEM((wgs, 2, ROWS), jnp.float32)
  if shape.interpret:
    held["p"] = plgpu.SMEM((wgs, ROWS, shape.block_k), dtype, transforms=tiled)
  return held


class _Tile(NamedTuple):
  """One program's part, as scalars."""

  index: jax.Array
  kv_head: jax.Array
  group: jax.Array
  slice: jax.Array
  start: jax.Array
  skip: jax.Array
  count: jax.Array
  position: jax.Array
  low: jax.Array
  high: jax.Array


def _run(kind, program, work, out, k_ref, v_ref, scratch, shape: Shape) -> None:
  """The program `program` of those of one kind: every warpgroup in its role."""
  heads = getattr(shape, kind)
  group, rest = lax.rem(program, heads.groups), lax.div(program, heads.groups)
  kv_head, index = lax.rem(rest, shape.num_kv_heads), lax.div(rest, shape.num_kv_heads)
  columns = [work.tiles[index, column] for column in range(HIGH + 1)]
  tile = _Tile(index, kv_head, group, *columns)
  warpgroup = lax.axis_index("warpgroup")
  registers = _REGISTERS.get(shape.warpgroups)

  @pl.when((tile.count > 0) & (warpgroup < shape.warpgroups))
  def _():
    if registers:
      plgpu.set_max_registers(registers[0], action="increase")
    _compute(kind, warpgroup, tile, work.queries, out, scratch, shape)

  @pl.when((tile.count > 0) & (warpgroup == shape.warpgroups))
  def _():
    if registers:
      plgpu.set_max_registers(registers[1], action="decrease")
    _fetch(tile, work.tables, k_ref, v_ref, scratch, shape)


def _blocks(tile: _Tile, shape: Shape) -> tuple[jax.Array, jax.Array]:
  """The first block of keys that a tile sees, and the one after the last."""
  return lax.div(tile.low, shape.block_k), lax.div(tile.high + shape.block_k - 1, shape.block_k)


def _fetch(tile: _Tile, tables, k_ref, v_ref, scratch, shape: Shape) -> None:
  """Copies the keys and values that a tile sees into the ring, block by block."""
  first, end = _blocks(tile, shape)
  _, num_pages = tables.shape
  piece, page_size, in_outer = shape.piece, shape.page_size, shape.pages_per_outer
  rings = [(x, scratch[n], scratch[f"{n}_filled"], scratch[f"{n}_drained"])
           for n, x in (("k", k_ref), ("v", v_ref))]  # fmt: skip

  @pl.loop(0, end - first)
  def _(i):
    slot = lax.rem(i, shape.num_stages)
    keys = [(first + i) * shape.block_k + at for at in range(0, shape.block_k, piece)]
    # Ids are loaded before the wait, which hides how long that takes, and for all pieces alike, so
    # past the table's end too.
    places = [jnp.minimum(lax.div(key, page_size), num_pages - 1) for key in keys]
    ids = [tables[tile.slice, place] for place in places]
    for source, ring, filled, drained in rings:
      pl.when(i >= shape.num_stages)(lambda: plgpu.barrier_wait(drained.at[slot]))  # noqa: B023
      for key, page, at in zip(keys, ids, range(0, shape.block_k, piece)):
        is_seen = (key < tile.high) & (key + piece > tile.low)
        outer, place = lax.div(page, in_outer), lax.rem(page, in_outer) * page_size
        place = pl.multiple_of(place + (lax.rem(key, page_size) if piece < page_size else 0), piece)

        @pl.when(is_seen)
        def _():
          plgpu.copy_gmem_to_smem(
            source.at[outer, tile.kv_head, pl.ds(place, piece)],  # noqa: B023
            ring.at[slot, pl.ds(at, piece)],  # noqa: B023
            filled.at[slot],  # noqa: B023
          )

        # What is not copied keeps what was there before: masked keys, values set to zero.
        pl.when(~is_seen)(lambda: plgpu.barrier_arrive(filled.at[slot]))  # noqa: B023

  @pl.loop(jnp.maximum(end - first - shape.num_stages, 0), end - first)
  def _(i):  # a barrier is to be seen to its end, says interpret mode
    for _, _, _, drained in rings:
      plgpu.barrier_wait(drained.at[lax.rem(i, shape.num_stages)])


def _compute(kind, warpgroup, tile: _Tile, queries, out, scratch, shape: Shape) -> None:
  """One compute warpgroup's share of a tile: queries in, blocks, results out."""
  rows = scratch["rows"]
  q_smem, o_smem = (x.at[warpgroup] for x in rows)
  layout = plgpu.Layout.WGMMA
  is_chunk = kind == "chunks"
  (_load_chunk if is_chunk else _load_decode)(warpgroup, tile, queries, q_smem, scratch, shape)
  position = plgpu.layout_cast(lax.broadcast(tile.position, (ROWS,)), layout.reduce(1))
  if is_chunk:
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=layout.reduce(1))
    position += lax.rem(row + warpgroup * ROWS, shape.chunks.tokens)
  takes_turns = is_chunk and shape.warpgroups == 2

  def turn():
    if takes_turns:
      plgpu.barrier_arrive(scratch["turn"])
      plgpu.barrier_wait(scratch["turn"])

  first, end = _blocks(tile, shape)
  stride = 1 if is_chunk else shape.warpgroups  # decodes: a warpgroup drains its own blocks alone
  offset = 0 if is_chunk else warpgroup
  arrivals = 1 if is_chunk else shape.warpgroups

  def block(i, carry, *, is_masked: bool):
    acc, top, total = carry
    nth = offset + i * stride
    slot, key = lax.rem(nth, shape.num_stages), (first + nth) * shape.block_k
    k_smem, v_smem = scratch["k"].at[slot], scratch["v"].at[slot]
    plgpu.barrier_wait(scratch["k_filled"].at[slot])

    def multiply(ref):
      plgpu.wgmma(ref, q_smem, k_smem.transpose((1, 0)))
      turn()
      return ref[...]

    scores = pl.run_scoped(multiply, plgpu.ACC((ROWS, shape.block_k), jnp.float32))
    for _ in range(arrivals):
      plgpu.barrier_arrive(scratch["k_drained"].at[slot])
    unit = shape.scale * _LOG2E
    if shape.soft_cap is not None:
      scores, unit = jnp.tanh(scores * (shape.scale / shape.soft_cap)), shape.soft_cap * _LOG2E
    if is_masked:
      # Not a finite number: fused with the product, its rounding error alone could be 1e21.
      scores = jnp.where(_sees(position, key, shape), scores, -jnp.inf)
    new_top = jnp.maximum(top, scores.max(axis=1) * unit)
    weights = jnp.exp2(scores * unit - lax.broadcast_in_dim(new_top, scores.shape, [0]))
    keep = jnp.exp2(top - new_top)
    acc *= lax.broadcast_in_dim(keep, acc.shape, [0])
    total = total * keep + weights.sum(axis=1)
    weights = weights.astype(shape.dtype)
    if takes_turns:
      # Softmax is to be done before the turn is given up, not after.
      acc, total, new_top, weights = lax.optimization_barrier((acc, total, new_top, weights))
      plgpu.barrier_arrive(scratch["turn"])
    plgpu.barrier_wait(scratch["v_filled"].at[slot])
    if is_masked:
      _clear_unseen(v_smem, key, tile)
    if takes_turns:
      plgpu.barrier_wait(scratch["turn"])
    acc = _add_product(acc, weights, v_smem, warpgroup, scratch, shape)
    for _ in range(arrivals):
      plgpu.barrier_arrive(scratch["v_drained"].at[slot])
    return acc, new_top, total

  def before(limit):
    """How many of this warpgroup's blocks come before block `limit`."""
    return jnp.maximum(lax.div(limit - first - offset + stride - 1, stride), 0)

  whole_end = lax.div(tile.position + 1, shape.block_k)
  whole_begin = first
  if shape.window is not None:
    last = tile.position + tile.count - shape.window  # the last key that not every row sees
    whole_begin = jnp.maximum(first, lax.div(last + shape.block_k - 1, shape.block_k))
  whole_begin = jnp.minimum(whole_begin, end)
  whole_end = jnp.clip(whole_end, whole_begin, end)

  carry = (
    plgpu.layout_cast(jnp.zeros((ROWS, shape.head_dim), jnp.float32), layout),
    plgpu.layout_cast(jnp.full((ROWS,), _LOWEST, jnp.float32), layout.reduce(1)),
    plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), layout.reduce(1)),
  )
  masked, whole = (functools.partial(block, is_masked=flag) for flag in (True, False))
  if takes_turns:
    pl.when(warpgroup == 1)(turn)
  if shape.window is not None:
    carry = lax.fori_loop(0, before(whole_begin), masked, carry)
  carry = lax.fori_loop(before(whole_begin), before(whole_end), whole, carry)
  acc, top, total = lax.fori_loop(before(whole_end), before(end), masked, carry)
  if takes_turns:
    pl.when(warpgroup == 0)(turn)

  share = 1 / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)  # 0: a warpgroup without a block
  acc *= lax.broadcast_in_dim(share, acc.shape, [0])
  if is_chunk:
    _store_chunk(acc, warpgroup, tile, out, o_smem, shape)
  else:
    _store_decode(acc, top, total, warpgroup, tile, out, o_smem, scratch, shape)


def _sees(position, key, shape: Shape):
  """Which keys of a block from `key` on each row sees."""
  block = (ROWS, shape.block_k)
  layout = plgpu.Layout.WGMMA
  keys = plgpu.broadcasted_iota(jnp.int32, block, 1, layout=layout) + key
  position = lax.broadcast_in_dim(position, block, [0])
  seen = keys <= position
  return seen if shape.window is None else seen & (keys > position - shape.window)


def _clear_unseen(v_smem, key, tile: _Tile) -> None:
  """Zeroes the values of a block that no row sees: 0 * NaN is NaN.

  Warpgroups that share the block may all do it: what is seen they write as it was.
  """
  block_k, head_dim = v_smem.shape
  layout = plgpu.Layout.WGMMA
  for at in range(0, block_k, ROWS):
    begin = key + at

    @pl.when((begin < tile.low) | (begin + ROWS > tile.high))
    def _():
      keys = plgpu.broadcasted_iota(jnp.int32, (ROWS, _COLUMNS), 0, layout=layout) + begin  # noqa: B023
      seen = (keys >= tile.low) & (keys < tile.high)
      for column in range(0, head_dim, _COLUMNS):  # few at a time: the result holds the registers
        piece = v_smem.at[pl.ds(at, ROWS), pl.ds(column, _COLUMNS)]  # noqa: B023
        values = plgpu.load(piece, layout=layout)
        piece[...] = jnp.where(seen, values, jnp.zeros_like(values))
      plgpu.commit_smem()


def _add_product(acc, weights, v_smem, warpgroup, scratch, shape: Shape):
  """acc + weights @ values."""
  if not shape.interpret:

    def multiply(ref):
      plgpu.wgmma(ref, weights, v_smem)

    return pl.run_state(multiply)(plgpu.ACC.init(acc))

  # Interpret mode knows neither a left side in registers nor an accumulator that begins with one.
  p_smem = scratch["p"].at[warpgroup]
  p_smem[...] = weights
  plgpu.commit_smem()

  def multiply_staged(ref):
    plgpu.wgmma(ref, p_smem, v_smem)
    return ref[...]

  return acc + pl.run_scoped(multiply_staged, plgpu.ACC(acc.shape, jnp.float32))


def _load_chunk(warpgroup, tile: _Tile, queries, q_smem, scratch, shape: Shape) -> None:
  """Brings this warpgroup's rows; tokens and heads past the end of [T, H] come as zeros."""
  heads = shape.chunks
  barrier = scratch["q_filled_chunks"].at[warpgroup]
  for at in range(0, ROWS, heads.piece):
    row = warpgroup * ROWS + at
    head, token = lax.div(row, heads.tokens), lax.rem(row, heads.tokens)
    head += tile.kv_head * shape.group + tile.group * heads.heads
    plgpu.copy_gmem_to_smem(
      queries.at[pl.ds(pl.multiple_of(tile.start + token, 8), heads.piece), head],
      q_smem.at[pl.ds(at, heads.piece)],
      barrier,
    )
  plgpu.barrier_wait(barrier)


def _load_decode(warpgroup, tile: _Tile, queries, q_smem, scratch, shape: Shape) -> None:
  """Brings all rows, to each warpgroup. What lies in the others of the 64 does not matter."""
  barrier = scratch["q_filled"].at[warpgroup]
  plgpu.copy_gmem_to_smem(
    queries.at[tile.start, tile.kv_head, tile.group],
    q_smem.at[pl.ds(0, shape.decodes.rows)],
    barrier,
  )
  plgpu.barrier_wait(barrier)


def _store_chunk(acc, warpgroup, tile: _Tile, out, o_smem, shape: Shape) -> None:
  heads = shape.chunks
  o_smem[...] = acc.astype(shape.dtype)
  plgpu.commit_smem()

  @pl.loop(0, ROWS // heads.piece)
  def _(i):
    row = warpgroup * ROWS + i * heads.piece
    head, token = lax.div(row, heads.tokens), lax.rem(row, heads.tokens)
    head += tile.group * heads.heads
    is_own = (lax.div(row, heads.tokens) < heads.heads) & (head < shape.group)
    begin = jnp.clip(tile.skip - token, 0, heads.piece)
    count = jnp.clip(tile.count - token, 0, heads.piece) - begin
    count = jnp.where(is_own, jnp.maximum(count, 0), 0)
    size = heads.piece
    while size:
      at = begin + (count & -(2 * size))  # after larger pieces

      @pl.when((count & size) != 0)
      def _():
        plgpu.copy_smem_to_gmem(
          o_smem.at[pl.ds(i * heads.piece + at, size)],  # noqa: B023
          out.at[pl.ds(tile.start + token + at, size), tile.kv_head * shape.group + head],  # noqa: B023
        )

      size //= 2

  plgpu.wait_smem_to_gmem(0)


def _store_decode(acc, top, total, warpgroup, tile: _Tile, out: Partials, o_smem, scratch, shape):
  place = (tile.index, tile.kv_head, tile.group, warpgroup)
  rounded = acc.astype(shape.dtype)
  rest = (acc - rounded.astype(jnp.float32)).astype(shape.dtype)
  for half, values in enumerate((rounded, rest)):
    o_smem[...] = values
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(o_smem.at[pl.ds(0, shape.decodes.rows)], out.halves.at[*place, half])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
  for i, (values, target) in enumerate(((top, out.tops), (total, out.sums))):
    stats = scratch["stats"].at[warpgroup, i]
    stats[...] = values
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(stats, target.at[*place])
  plgpu.wait_smem_to_gmem(0)
