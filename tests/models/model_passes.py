"""Forward passes for the tests of models: tables, batches and one jitted pass."""

import functools

import jax
import numpy as np

from pdjax.kernels.choice import choose
from pdjax.kernels.slices import Slices
from pdjax.kernels.tile_config import Chip
from pdjax.models.attention import Attention, StepBatch
from pdjax.models.kv_cache import KVLayout


def make_tables(layout: KVLayout, seed: int = 0) -> np.ndarray:
  """A full page table [num_rows, P]: in slots the rule, else pages in random places."""
  pages = np.arange(layout.num_rows * layout.pages_per_row, dtype=np.int32)
  if layout.kind == "paged":
    pages = np.random.default_rng(seed).permutation(layout.num_pages)[: len(pages)]
  return pages.reshape(layout.num_rows, layout.pages_per_row).astype(np.int32)


def _slots(layout, table, positions):
  positions = np.asarray(positions)
  return table[positions // layout.page_size] * layout.page_size + positions % layout.page_size


def prefill_batch(layout, tables, slices, *, num_tokens):
  """`slices`: (row, start, ids) each, packed. Returns the batch and the places of the tokens."""
  tokens, positions = np.zeros(num_tokens, np.int32), np.full(num_tokens, -1, np.int32)
  slots = np.full(num_tokens, layout.num_pages * layout.page_size, np.int32)
  starts, lengths, offsets = np.zeros((3, layout.num_rows), np.int32)
  own_tables = np.full((layout.num_rows, layout.pages_per_row), layout.num_pages, np.int32)
  at = 0
  for i, (row, start, ids) in enumerate(slices):
    end = at + len(ids)
    tokens[at:end] = ids
    positions[at:end] = np.arange(start, start + len(ids))
    slots[at:end] = _slots(layout, tables[row], positions[at:end])
    starts[i], lengths[i], offsets[i], own_tables[i] = at, len(ids), start, tables[row]
    at = end
  prefill = Slices(starts, lengths, offsets, own_tables)
  return StepBatch(tokens, positions, slots, prefill, None), np.arange(at)


def decode_batch(layout, tables, entries, *, num_rows):
  """`entries`: (row, position, id) each, in the first places of `num_rows`."""
  tokens, positions = np.zeros(num_rows, np.int32), np.full(num_rows, -1, np.int32)
  slots = np.full(num_rows, layout.num_pages * layout.page_size, np.int32)
  row_tables = np.full((num_rows, layout.pages_per_row), layout.num_pages, np.int32)
  for i, (row, position, token) in enumerate(entries):
    tokens[i], positions[i], row_tables[i] = token, position, tables[row]
    slots[i] = _slots(layout, tables[row], position)
  lengths = (positions >= 0).astype(np.int32)
  decode = Slices(np.arange(num_rows, dtype=np.int32), lengths, positions, row_tables)
  return StepBatch(tokens, positions, slots, None, decode)


def step_batch(prefill, decode):
  """One batch of both, prefill tokens first; either may be None."""
  if prefill is None or decode is None:
    return decode if prefill is None else prefill
  slices = decode.decode
  return StepBatch(
    *(np.concatenate(pair) for pair in zip(prefill[:3], decode[:3])),
    prefill.prefill,
    slices._replace(starts=slices.starts + np.int32(len(prefill.tokens))),
  )


def attention(layout: KVLayout, reduction=None) -> Attention:
  """That of a CPU: plain XLA."""
  tuning = choose(
    Chip(platform="cpu", kind="cpu"), "xla", num_heads=layout.num_kv_heads,
    num_kv_heads=layout.num_kv_heads, head_dim=layout.head_dim, page_size=layout.page_size,
    dtype=layout.dtype, cache_dtype=layout.dtype,
  )  # fmt: skip
  return Attention(layout=layout, tuning=tuning, reduction=reduction)


def make_pass(model, layout):
  """A jitted pass (cache, prefill, decode) -> logits of every token in flat order, cache."""

  @functools.partial(jax.jit, donate_argnums=1)
  def step(params, cache, batch):
    attend = attention(layout, model.reduction)(batch)
    hidden, cache = model.forward(params, batch.tokens, batch.positions, cache, attend)
    return model.unembed(params, hidden), cache

  def run(cache, prefill, decode):
    return step(model.params, cache, step_batch(prefill, decode))

  run.step = step
  return run
