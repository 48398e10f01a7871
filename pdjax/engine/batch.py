"""A plan as arrays: the only place that builds device inputs. Numpy on the host."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pdjax.core.plan import PageUpdates, Slice, StepPlan
from pdjax.core.request import SamplingParams
from pdjax.engine.buckets import Buckets, pick_bucket
from pdjax.models.attention import PREFILL_TILE, PrefillBatch
from pdjax.models.sampling import Sampling

_TOKENS_PER_EMIT = 16  # a prefill bucket of T tokens has room for T / 16 first tokens


class PrefillInputs(NamedTuple):
  """The prefill part of a step."""

  batch: PrefillBatch
  # One entry for each slice that emits a token, padded:
  emit_index: np.ndarray  # [E] int32, where in T its last token is
  emit_row: np.ndarray  # [E] int32, num_rows is padding
  emit_position: np.ndarray  # [E] int32, position of the new token
  sampling: Sampling  # arrays [E]


class DecodeInputs(NamedTuple):
  """The decode part of a step: one token a row, ids from `last_token` on the device."""

  rows: np.ndarray  # [B] int32, num_rows is padding
  positions: np.ndarray  # [B] int32, -1 is padding
  tables: np.ndarray  # [B, pages_per_row] int32
  sampling: Sampling  # arrays [B]


class RowState:
  """What the host knows of every row of a pool: its page table and how it samples.

  Every array given out is a fresh copy: JAX may alias host memory on CPU, and the tables change
  while steps are in flight.
  """

  def __init__(self, num_rows: int, pages_per_row: int, num_pages: int, vocab_size: int):
    self.num_rows, self.vocab_size = num_rows, vocab_size
    # One spare row stands for padding: pages out of range, greedy.
    self.tables = np.full((num_rows + 1, pages_per_row), num_pages, np.int32)
    self.temperature = np.zeros(num_rows + 1, np.float32)
    self.top_k = np.full(num_rows + 1, vocab_size, np.int32)
    self.top_p = np.ones(num_rows + 1, np.float32)
    self.seed = np.zeros(num_rows + 1, np.uint32)

  def update_pages(self, updates: PageUpdates) -> None:
    if updates.rows:
      self.tables[updates.rows, updates.indices] = updates.page_ids

  def seat(self, row: int, request_id: int, sampling: SamplingParams) -> None:
    """A request begins in `row`."""
    self.temperature[row] = sampling.temperature
    self.top_k[row] = min(sampling.top_k or self.vocab_size, self.vocab_size)
    self.top_p[row] = sampling.top_p
    self.seed[row] = (request_id if sampling.seed is None else sampling.seed) & 0xFFFFFFFF

  def sampling(self, rows: np.ndarray) -> Sampling:
    return Sampling(
      temperature=self.temperature[rows],
      top_k=self.top_k[rows],
      top_p=self.top_p[rows],
      seed=self.seed[rows],
    )


def pick_prefill_bucket(
  slices: tuple[Slice, ...], sizes: tuple[int, ...], num_rows: int
) -> tuple[int, int]:
  """The smallest prefill size that holds the slices, and how many first tokens it has room for.

  The largest has room for those of every row, so that no step within its budget is without one.

  Raises:
    ValueError: the slices have more tokens than the largest size.
  """
  num_tokens = sum(s.num_tokens for s in slices)
  num_emits = sum(s.emits_token for s in slices)
  for size in sizes:
    room = size if size == sizes[-1] else max(1, size // _TOKENS_PER_EMIT)
    if num_tokens <= size and num_emits <= room:
      return size, min(num_rows, room)
  raise ValueError(f"{num_tokens} prefill tokens do not fit the largest bucket {sizes[-1]}")


def prefill_inputs(
  slices: tuple[Slice, ...], num_padded: int, num_emits: int, rows: RowState
) -> PrefillInputs:
  """Packs the slices one after another; attention gets them cut into tiles of one row each."""
  tile = min(PREFILL_TILE, num_padded)
  # Every slice may leave its last tile part empty, hence a spare tile for each row but one.
  num_tiles = -(-num_padded // tile) + rows.num_rows - 1
  tokens = np.zeros(num_padded, np.int32)
  positions = np.full(num_padded, -1, np.int32)
  tiles = np.full((num_tiles, tile), num_padded, np.int32)
  tile_rows = np.full(num_tiles, rows.num_rows, np.int32)
  emit_index = np.zeros(num_emits, np.int32)
  emit_row = np.full(num_emits, rows.num_rows, np.int32)
  emit_position = np.zeros(num_emits, np.int32)
  at = used_tiles = emits = 0
  for s in slices:
    end = at + s.num_tokens
    tokens[at:end] = s.token_ids
    positions[at:end] = range(s.start, s.start + s.num_tokens)
    slice_tiles = -(-s.num_tokens // tile)
    own = slice(used_tiles, used_tiles + slice_tiles)
    tiles[own].ravel()[: s.num_tokens] = range(at, end)
    tile_rows[own] = s.row
    used_tiles += slice_tiles
    if s.emits_token:
      emit_index[emits] = end - 1
      emit_row[emits] = s.row
      emit_position[emits] = s.start + s.num_tokens
      emits += 1
    at = end
  return PrefillInputs(
    batch=PrefillBatch(
      tokens=tokens,
      positions=positions,
      tiles=tiles,
      tables=rows.tables[tile_rows],
      num_tiles=np.int32(used_tiles),
    ),
    emit_index=emit_index,
    emit_row=emit_row,
    emit_position=emit_position,
    sampling=rows.sampling(emit_row),
  )


def decode_inputs(plan: StepPlan, num_padded: int, rows: RowState) -> DecodeInputs:
  """The decode columns of a plan, padded."""
  padded_rows = np.full(num_padded, rows.num_rows, np.int32)
  positions = np.full(num_padded, -1, np.int32)
  n = len(plan.decodes)
  padded_rows[:n] = plan.decodes.rows
  positions[:n] = plan.decodes.positions
  return DecodeInputs(
    rows=padded_rows,
    positions=positions,
    tables=rows.tables[padded_rows],
    sampling=rows.sampling(padded_rows),
  )


def step_inputs(
  plan: StepPlan, buckets: Buckets, rows: RowState
) -> tuple[PrefillInputs | None, DecodeInputs | None]:
  """The arrays of a plan: prefill part, decode part, None where it has none. Updates `rows`."""
  rows.update_pages(plan.page_updates)
  for s in plan.prefills:
    rows.seat(s.row, s.request_id, s.sampling)
  prefill = decode = None
  if plan.prefills:
    sizes = buckets.mixed if len(plan.decodes) else buckets.prefill
    num_padded, num_emits = pick_prefill_bucket(plan.prefills, sizes, rows.num_rows)
    prefill = prefill_inputs(plan.prefills, num_padded, num_emits, rows)
  if len(plan.decodes):
    num_padded = rows.num_rows if plan.prefills else pick_bucket(buckets.rows, len(plan.decodes))
    decode = decode_inputs(plan, num_padded, rows)
  return prefill, decode
