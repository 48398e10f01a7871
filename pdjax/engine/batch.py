"""A plan as arrays: the only place that builds device inputs. Numpy on the host."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pdjax.core.plan import DecodeSlices, PageUpdates, Slice, StepPlan
from pdjax.core.request import MAX_HELD_STOP_IDS, SamplingParams
from pdjax.engine.buckets import Buckets, pick_bucket
from pdjax.kernels.slices import Slices
from pdjax.models.attention import StepBatch
from pdjax.models.sampling import Sampling
from pdjax.scheduling.pages import PageConfig

_TOKENS_PER_EMIT = 16  # a prefill bucket of T tokens has room for T / 16 first tokens
# Nearer to 0 a float32 is 0 to XLA: such a top_p leaves no id, and such a penalty makes infinities.
_SMALLEST, _LARGEST = 1e-30, 1e30


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

  def __init__(self, pages: PageConfig, vocab_size: int):
    num_rows = pages.num_rows
    self.num_rows, self.vocab_size = num_rows, vocab_size
    self.page_size, self.num_slots = pages.page_size, pages.num_pages * pages.page_size
    # One spare row stands for padding: pages out of range, greedy.
    self.tables = np.full((num_rows + 1, pages.pages_per_row), pages.num_pages, np.int32)
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

  def slots(self, rows: np.ndarray | int, positions: np.ndarray) -> np.ndarray:
    """Where positions of rows lie, as `kernels.write_pages` counts places."""
    pages = self.tables[rows, positions // self.page_size]
    return pages * self.page_size + positions % self.page_size

  def seat(
    self, row: int, request_id: int, num_prompt_tokens: int, sampling: SamplingParams
  ) -> None:
    """A request begins in `row`. Stop ids that the model does not have are left out."""
    self.temperature[row] = sampling.temperature
    self.top_k[row] = min(sampling.top_k or self.vocab_size, self.vocab_size)
    self.top_p[row] = max(sampling.top_p, _SMALLEST)
    self.min_p[row] = sampling.min_p
    self.repetition_penalty[row] = min(max(sampling.repetition_penalty, _SMALLEST), _LARGEST)
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


def step_inputs(
  plan: StepPlan, buckets: Buckets, rows: RowState, *, serves_fresh: bool = False
) -> StepInputs:
  """The arrays of a plan: slices packed one after another, then its decodes. Updates `rows`.

  With `serves_fresh` a step whose prompts all begin in it says so: it is a shape of its own.
  """
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
  slots = np.full(num_tokens, rows.num_slots, np.int32)
  sample_places = np.zeros(num_samples, np.int32)
  sample_rows = np.full(num_samples, rows.num_rows, np.int32)

  at = emits = 0
  for s in plan.prefills:
    end = at + s.num_tokens
    tokens[at:end] = s.token_ids
    positions[at:end] = np.arange(s.start, s.start + s.num_tokens)
    slots[at:end] = rows.slots(s.row, positions[at:end])
    if s.emits_token:
      sample_places[emits] = end - 1
      sample_rows[emits] = s.row
      emits += 1
    at = end
  decoding = slice(at, at + num_decodes)
  positions[decoding] = plan.decodes.positions
  token_rows = np.full(num_tokens, rows.num_rows, np.int32)
  token_rows[decoding] = plan.decodes.rows
  slots[decoding] = rows.slots(token_rows[decoding], positions[decoding])
  emitting = slice(emits, emits + num_decodes)
  sample_places[emitting] = range(at, at + num_decodes)
  sample_rows[emitting] = plan.decodes.rows

  prefill = decode = None
  if plan.prefills:
    prefill = _prompt_slices(plan.prefills, min(num_tokens, rows.num_rows), rows)
  if num_decode_rows:
    decode = _decode_slices(plan.decodes, at, num_decode_rows, rows)
  is_fresh = serves_fresh and decode is None and all(s.start == 0 for s in plan.prefills)
  return StepInputs(
    batch=StepBatch(
      tokens=tokens,
      positions=positions,
      slots=slots,
      prefill=None if is_fresh else prefill,
      decode=decode,
      fresh=prefill if is_fresh else None,
    ),
    token_rows=token_rows,
    sample_places=sample_places,
    sample_rows=sample_rows,
    sampling=rows.sampling(sample_rows),
  )


def _prompt_slices(slices: tuple[Slice, ...], num_slices: int, rows: RowState) -> Slices:
  """Packed slices of prompts, one after another."""
  lengths = np.array([s.num_tokens for s in slices])
  return _slices(
    num_slices,
    starts=np.cumsum(lengths) - lengths,
    lengths=lengths,
    offsets=np.array([s.start for s in slices]),
    tables=rows.tables[[s.row for s in slices]],
  )


def _decode_slices(
  decodes: DecodeSlices, first_place: int, num_slices: int, rows: RowState
) -> Slices:
  """Decodes, which lie from `first_place` on, those of like length side by side."""
  positions = np.asarray(decodes.positions, np.int32)
  order = np.argsort(positions, kind="stable")
  return _slices(
    num_slices,
    starts=first_place + order,
    lengths=np.ones(len(order)),
    offsets=positions[order],
    tables=rows.tables[np.asarray(decodes.rows, np.int32)[order]],
  )


def _slices(num_slices: int, **fields: np.ndarray) -> Slices:
  """As many slices of no token behind them as are missing."""
  padded = {}
  for name, values in fields.items():
    padded[name] = np.zeros((num_slices, *values.shape[1:]), np.int32)
    padded[name][: len(values)] = values
  return Slices(**padded)
