"""Forward passes for the tests of models: tables, batches and one jitted pass."""

import functools

import jax
import numpy as np

from pdjax.models.attention import StepBatch, Tiles, make_attend
from pdjax.models.kv_cache import KVLayout


def make_tables(layout: KVLayout, seed: int = 0) -> np.ndarray:
  """A full page table [num_rows, P]: in slots the rule, else pages in random places."""
  pages = np.arange(layout.num_rows * layout.pages_per_row, dtype=np.int32)
  if layout.kind == "paged":
    pages = np.random.default_rng(seed).permutation(layout.num_pages)[: len(pages)]
  return pages.reshape(layout.num_rows, layout.pages_per_row).astype(np.int32)


def prefill_batch(layout, tables, slices, *, num_tiles, tile):
  """`slices`: (row, start, ids) each, packed. Returns the batch and the places of the tokens."""
  num_padded = num_tiles * tile
  tokens, positions = np.zeros(num_padded, np.int32), np.full(num_padded, -1, np.int32)
  places = np.full((num_tiles, tile), num_padded, np.int32)
  tile_tables = np.full((num_tiles, layout.pages_per_row), layout.num_pages, np.int32)
  used = at = 0
  for row, start, ids in slices:
    tokens[at : at + len(ids)] = ids
    positions[at : at + len(ids)] = start + np.arange(len(ids))
    for first in range(0, len(ids), tile):
      size = min(tile, len(ids) - first)
      places[used, :size] = at + first + np.arange(size)
      tile_tables[used] = tables[row]
      used += 1
    at += len(ids)
  tiles = Tiles(places[:, None], tile_tables[:, None], np.int32(used))
  return StepBatch(tokens, positions, tiles, None), np.arange(at)


def decode_batch(layout, tables, entries, *, num_rows):
  """`entries`: (row, position, id) each, in the first places of `num_rows`."""
  tokens, positions = np.zeros(num_rows, np.int32), np.full(num_rows, -1, np.int32)
  row_tables = np.full((num_rows, layout.pages_per_row), layout.num_pages, np.int32)
  for i, (row, position, token) in enumerate(entries):
    tokens[i], positions[i], row_tables[i] = token, position, tables[row]
  places = np.arange(num_rows, dtype=np.int32)
  rows = Tiles(places[None, :, None], row_tables[None], np.int32(1))
  return StepBatch(tokens, positions, None, rows)


def step_batch(prefill, decode):
  """One batch of both, prefill tokens first; either may be None."""
  if prefill is None or decode is None:
    return decode if prefill is None else prefill
  num_prefill, num_tokens = len(prefill.tokens), len(prefill.tokens) + len(decode.tokens)
  places = prefill.prefill.places
  return StepBatch(
    np.concatenate([prefill.tokens, decode.tokens]),
    np.concatenate([prefill.positions, decode.positions]),
    prefill.prefill._replace(places=np.where(places == num_prefill, num_tokens, places)),
    decode.decode._replace(places=num_prefill + decode.decode.places),
  )


def make_pass(model, layout):
  """A jitted pass (cache, prefill, decode) -> logits of every token in flat order, cache."""

  @functools.partial(jax.jit, donate_argnums=1)
  def step(params, cache, batch):
    attend = make_attend(layout, model.reduction, batch)
    hidden, cache = model.forward(params, batch.tokens, batch.positions, cache, attend)
    return model.unembed(params, hidden), cache

  def run(cache, prefill, decode):
    return step(model.params, cache, step_batch(prefill, decode))

  run.step = step
  return run
