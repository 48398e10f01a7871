"""Every compiled function of the engine, in one place, but for the cuts and joins of transfer.py.

  function       donates                  static shapes                compiled once per
  prefill_step   cache, last_token, seen  T                            bucket and mesh
  decode_step    cache, last_token, seen  T = decode rows              bucket and mesh
  mixed_step     cache, last_token, seen  T; decode rows are all rows  bucket and mesh
  add_seen       seen                                                  mesh
  gather_pages   nothing                  number of pages              bucket and mesh
  scatter_pages  cache, last_token        number of pages              bucket and mesh
  last_logits    nothing                  T                            when tokens are explained

The three steps are one forward through the weights; they differ in `attend` alone. `mixed_step`
reads the weights once for chunks and decodes together, which is the whole point of Sarathi-Serve:
two calls would read them twice. `num_traces` counts tracings, which all meshes share; after warm-up
it must not move.
"""

from __future__ import annotations

import collections
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pdjax.engine.batch import StepInputs
from pdjax.models import kv_cache
from pdjax.models.attention import Attention, StepBatch
from pdjax.models.kv_cache import KVLayout
from pdjax.models.model import Model, axes_sharding
from pdjax.models.sampling import sample


def state_shapes(model: Model, layout: KVLayout, mesh: jax.sharding.Mesh):
  """The cache, `last_token` and `seen` of a pool on `mesh`, as shapes: what its steps update."""

  def shape(axes, x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=axes_sharding(axes, x.shape, mesh))

  cache = jax.eval_shape(lambda: kv_cache.init_cache(layout))
  last_token = jax.ShapeDtypeStruct((layout.num_rows,), jnp.int32)
  seen = jax.ShapeDtypeStruct((layout.num_rows, model.config.vocab_size), bool)
  cache = jax.tree.map(lambda x: shape(layout.axes, x), cache)
  return cache, shape("B", last_token), shape("B V", seen)


class Steps:
  """The compiled functions for one model and one attention, shared by all pools that have them.

  Each call returns at once; its arrays become ready when the device has done the work.
  """

  def __init__(self, model: Model, attention: Attention):
    self._model, self.attention, self._layout = model, attention, attention.layout
    self.num_traces: collections.Counter[str] = collections.Counter()
    updated = ("cache", "last_token", "seen")
    self.prefill_step = self._jit("prefill_step", self._step, donate=updated)
    self.decode_step = self._jit("decode_step", self._step, donate=updated)
    self.mixed_step = self._jit("mixed_step", self._step, donate=updated)
    self.add_seen = self._jit("add_seen", self._add_seen, donate=("seen",))
    self.gather_pages = self._jit("gather_pages", self._gather, donate=())
    self.scatter_pages = self._jit("scatter_pages", self._scatter, donate=("cache", "last_token"))
    self.last_logits = self._jit("last_logits", self._logits, donate=())

  def _jit(self, name: str, function, donate: tuple[str, ...]):
    @functools.wraps(function)
    def traced(*args):
      self.num_traces[name] += 1  # runs while tracing only
      return function(*args)

    traced.__name__ = name
    return jax.jit(traced, donate_argnames=donate)

  # The three steps are one function of different inputs: with slices of prompts, decodes, or both.
  # They return what they update, and what was sampled in the order of `StepInputs`.

  def _step(
    self,
    params: Any,
    cache: Any,
    last_token: jax.Array,  # [num_rows] int32
    seen: jax.Array,  # [num_rows, V] bool
    inputs: StepInputs,
  ):
    batch = inputs.batch
    if batch.decode is not None:
      rows = inputs.token_rows
      ids = jnp.maximum(last_token.at[rows].get(mode="clip"), 0)  # -1 after a failure
      batch = batch._replace(tokens=jnp.where(rows < len(last_token), ids, batch.tokens))
      seen = seen.at[rows, ids].set(True, mode="drop")  # prompts: see `add_seen`
    hidden, cache = self._forward(params, cache, batch)
    logits = self._model.unembed(params, hidden[inputs.sample_places])
    positions = batch.positions[inputs.sample_places] + 1
    sampled = sample(logits, inputs.sampling, positions, seen, inputs.sample_rows)
    last_token = last_token.at[inputs.sample_rows].set(sampled.ids, mode="drop")
    return cache, last_token, seen, sampled

  def _add_seen(self, seen, row, ids: jax.Array, anew):  # ids [V] bool
    """Adds ids to what `row` has seen, or begins `anew` with them.

    Only for rows that look back at them: of others `seen` holds what nobody reads.
    """
    return seen.at[row].set(ids | (seen[row] & ~anew))

  def _logits(self, params, cache, inputs: StepInputs):  # -> [R, V]
    hidden, _ = self._forward(params, cache, inputs.batch)
    return self._model.unembed(params, hidden[inputs.sample_places])

  def _forward(self, params, cache, batch: StepBatch):
    attend = self.attention(batch)
    return self._model.forward(params, batch.tokens, batch.positions, cache, attend)

  def _gather(self, cache, page_ids: jax.Array):  # [n] -> pieces
    return kv_cache.gather(self._layout, cache, page_ids)

  def _scatter(self, cache, last_token, page_ids: jax.Array, pieces, row, token_id):
    cache = kv_cache.scatter(self._layout, cache, page_ids, pieces)
    return cache, last_token.at[row].set(token_id, mode="drop")
