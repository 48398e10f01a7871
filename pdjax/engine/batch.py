"""A plan as arrays: the only place that builds device inputs. Numpy on the host."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pdjax.core.plan import DecodeSlices, PageUpdates, Slice, StepPlan
from pdjax.core.request import MAX_HELD_STOP_IDS, SamplingParams
from pdjax.engine.buckets import Buckets, pick_bucket
from pdjax.models.attention import DECODE_ROWS, PREFILL_TILE, StepBatch, Tiles
from pdjax.models.sampling import Sampling

_TOKENS_PER_EMIT = 16  # a prefill bucket of T tokens has room for T / 16 first tokens


class StepInputs(NamedTuple):
  """All that a compiled step takes besides parameters and what it updates.

  The ids of decode tokens are on the device: the step fills them in from `last_token` of
  `token_rows`. There are R samples: for each slice that emits a token, for each decode, then
  padding. No row has two in a step, so a mixed step has room for one of every row.
  """

  batch: StepBatch
  token_rows: np.ndarray  # [T] int32, the row of a decode token; num_rows for any other
  sample_places: np.ndarray  # [R] int32 indices into T of the tokens whose logits are sampled
  sample_rows: np.ndarray  # [R] int32, num_rows is padding
  sampling: Sampling  # arrays [R]


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
    self.min_p = np.zeros(num_rows + 1, np.float32)
    self.repetition_penalty = np.ones(num_rows + 1, np.float32)
    self.seed = np.zeros(num_rows + 1, np.uint32)
    self.min_position = np.zeros(num_rows + 1, np.int32)
    self.stop_ids = np.full((num_rows + 1, MAX_HELD_STOP_IDS), vocab_size, np.int32)
    self.logprobs: list[int | None] = [None] * (num_rows + 1)  # how many of the likeliest

  def update_pages(self, updates: PageUpdates) -> None:
    if updates.rows:
      self.tables[updates.rows, updates.indices] = updates.page_ids

  def seat(
    self, row: int, request_id: int, num_prompt_tokens: int, sampling: SamplingParams
  ) -> None:
    """A request begins in `row`. Stop ids that the model does not have are left out."""
    self.temperature[row] = sampling.temperature
    self.top_k[row] = min(sampling.top_k or self.vocab_size, self.vocab_size)
    self.top_p[row] = sampling.top_p
    self.min_p[row] = sampling.min_p
    self.repetition_penalty[row] = sampling.repetition_penalty
    self.seed[row] = (request_id if sampling.seed is None else sampling.seed) & 0xFFFFFFFF
    stop_ids = [i for i in sampling.stop_ids if 0 <= i < self.vocab_size]
    holds_stops = bool(stop_ids) and sampling.min_tokens > 0
    self.min_position[row] = num_prompt_tokens + sampling.min_tokens if holds_stops else 0
    self.stop_ids[row] = self.vocab_size
    if holds_stops:
      self.stop_ids[row, : len(stop_ids)] = stop_ids
    self.logprobs[row] = sampling.logprobs

  def sampling(self, rows: np.ndarray) -> Sampling:
    return Sampling(
      temperature=self.temperature[rows],
      top_k=self.top_k[rows],
      top_p=self.top_p[rows],
      min_p=self.min_p[rows],
      repetition_penalty=self.repetition_penalty[rows],
      seed=self.seed[rows],
      min_position=self.min_position[rows],
      stop_ids=self.stop_ids[rows],
      logprobs=np.array([self.logprobs[row] is not None for row in rows], bool),
    )


def pick_prefill_bucket(plan: StepPlan, sizes: tuple[int, ...], num_rows: int) -> tuple[int, int]:
  """The smallest size that holds the prompt tokens of a plan, and its room for first tokens.

  The largest has room for those of every row, so that no step within its budget is without one.

  Raises:
    ValueError: the plan has more tokens than the largest size.
  """
  num_emits = sum(s.emits_token for s in plan.prefills)
  for size in sizes:
    room = size if size == sizes[-1] else max(1, size // _TOKENS_PER_EMIT)
    if plan.num_tokens <= size and num_emits <= room:
      return size, min(num_rows, room)
  raise ValueError(f"a step of {plan.num_tokens} tokens does not fit the largest size {sizes[-1]}")


def step_inputs(plan: StepPlan, buckets: Buckets, rows: RowState) -> StepInputs:
  """The arrays of a plan: slices packed one after another, then its decodes. Updates `rows`."""
  rows.update_pages(plan.page_updates)
  for s in plan.prefills:
    rows.seat(s.row, s.request_id, s.num_prompt_tokens, s.sampling)
  num_decodes = len(plan.decodes)
  if not plan.prefills:
    num_tokens = num_samples = num_decode_rows = pick_bucket(buckets.rows, num_decodes)
  elif num_decodes:
    num_tokens = pick_bucket(buckets.mixed, plan.num_tokens)
    num_samples = num_decode_rows = rows.num_rows
  else:
    num_tokens, num_samples = pick_prefill_bucket(plan, buckets.prefill, rows.num_rows)
    num_decode_rows = 0
  tokens = np.zeros(num_tokens, np.int32)
  positions = np.full(num_tokens, -1, np.int32)
  sample_places = np.zeros(num_samples, np.int32)
  sample_rows = np.full(num_samples, rows.num_rows, np.int32)

  at = emits = 0
  for s in plan.prefills:
    end = at + s.num_tokens
    tokens[at:end] = s.token_ids
    positions[at:end] = range(s.start, s.start + s.num_tokens)
    if s.emits_token:
      sample_places[emits] = end - 1
      sample_rows[emits] = s.row
      emits += 1
    at = end
  positions[at : at + num_decodes] = plan.decodes.positions
  decoding = slice(emits, emits + num_decodes)
  sample_places[decoding] = range(at, at + num_decodes)
  sample_rows[decoding] = plan.decodes.rows

  token_rows = np.full(num_tokens, rows.num_rows, np.int32)
  token_rows[at : at + num_decodes] = plan.decodes.rows
  prefill = decode = None
  if plan.prefills:
    prefill = _prefill_tiles(plan.prefills, num_tokens, rows)
  if num_decode_rows:
    decode = _decode_tiles(plan.decodes, at, num_decode_rows, num_tokens, rows)
  return StepInputs(
    batch=StepBatch(tokens=tokens, positions=positions, prefill=prefill, decode=decode),
    token_rows=token_rows,
    sample_places=sample_places,
    sample_rows=sample_rows,
    sampling=rows.sampling(sample_rows),
  )


def _prefill_tiles(slices: tuple[Slice, ...], num_tokens: int, rows: RowState) -> Tiles:
  """Cuts packed slices into tiles of one row each."""
  tile = min(PREFILL_TILE, num_tokens)
  # Every slice may leave its last tile part empty, hence a spare tile for each row but one.
  num_tiles = -(-num_tokens // tile) + rows.num_rows - 1
  places = np.full((num_tiles, tile), num_tokens, np.int32)
  tile_rows = np.full(num_tiles, rows.num_rows, np.int32)
  at = used = 0
  for s in slices:
    own = slice(used, used + -(-s.num_tokens // tile))
    places[own].ravel()[: s.num_tokens] = range(at, at + s.num_tokens)
    tile_rows[own] = s.row
    at, used = at + s.num_tokens, own.stop
  return Tiles(
    places=places[:, None], tables=rows.tables[tile_rows][:, None], num_tiles=np.int32(used)
  )


def _decode_tiles(
  decodes: DecodeSlices, first_place: int, num_decode_rows: int, num_tokens: int, rows: RowState
) -> Tiles:
  """Cuts decodes, which lie from `first_place` on, into tiles of rows of like length."""
  b = min(DECODE_ROWS, num_decode_rows)
  num_tiles = -(-num_decode_rows // b)
  order = np.argsort(decodes.positions, kind="stable")
  places = np.full(num_tiles * b, num_tokens, np.int32)
  places[: len(order)] = first_place + order
  tile_rows = np.full(num_tiles * b, rows.num_rows, np.int32)
  tile_rows[: len(order)] = np.asarray(decodes.rows, np.int32)[order]
  return Tiles(
    places=places.reshape(num_tiles, b, 1),
    tables=rows.tables[tile_rows].reshape(num_tiles, b, -1),
    num_tiles=np.int32(-(-len(order) // b)),
  )
