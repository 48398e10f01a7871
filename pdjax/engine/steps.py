"""Every compiled function of the engine, in one place.

  function       donates             static shapes                 compiled once per
  prefill_step   cache, last_token   T of `PrefillInputs`          bucket and mesh
  decode_step    cache, last_token   B of `DecodeInputs`           bucket and mesh
  mixed_step     cache, last_token   T, and B = all rows           bucket and mesh
  gather_pages   nothing             number of pages               bucket and mesh
  scatter_pages  cache, last_token   number of pages               bucket and mesh
  last_logits    nothing             T of `PrefillInputs`          when tokens must be explained

The three steps are one forward through the weights; they differ in `attend` alone. `mixed_step`
reads the weights once for chunks and decodes together, which is the whole point of Sarathi-Serve:
two calls would read them twice. `num_traces` counts tracings, which all meshes share; after warm-up
it must not move.
"""

from __future__ import annotations

import collections
from typing import Any

import jax
import jax.numpy as jnp

from pdjax.engine.batch import DecodeInputs, PrefillInputs
from pdjax.models import kv_cache
from pdjax.models.attention import DecodeBatch, make_attend
from pdjax.models.kv_cache import KVLayout
from pdjax.models.model import Model
from pdjax.models.sampling import sample


class Steps:
  """The compiled functions for one model and one cache layout, shared by all pools that have them.

  Each call returns at once; its arrays become ready when the device has done the work.
  """

  def __init__(self, model: Model, layout: KVLayout):
    self._model, self._layout = model, layout
    self.num_traces: collections.Counter[str] = collections.Counter()
    self.prefill_step = self._jit("prefill_step", self._prefill, donate=("cache", "last_token"))
    self.decode_step = self._jit("decode_step", self._decode, donate=("cache", "last_token"))
    self.mixed_step = self._jit("mixed_step", self._mixed, donate=("cache", "last_token"))
    self.gather_pages = self._jit("gather_pages", self._gather, donate=())
    self.scatter_pages = self._jit("scatter_pages", self._scatter, donate=("cache", "last_token"))
    self.last_logits = self._jit("last_logits", self._logits, donate=())

  def _jit(self, name: str, function, donate: tuple[str, ...]):
    def traced(*args):
      self.num_traces[name] += 1  # runs while tracing only
      return function(*args)

    arguments = function.__code__.co_varnames[1 : function.__code__.co_argcount]
    traced.__name__ = name
    return jax.jit(traced, donate_argnums=tuple(arguments.index(d) for d in donate))

  # Each step returns (cache, last_token, ids): ids [E] of the emitting slices in order, then [B].

  def _prefill(self, params, cache, last_token, prefill: PrefillInputs):
    return self._step(params, cache, last_token, prefill, None)

  def _decode(self, params, cache, last_token, decode: DecodeInputs):
    return self._step(params, cache, last_token, None, decode)

  def _mixed(self, params, cache, last_token, prefill: PrefillInputs, decode: DecodeInputs):
    return self._step(params, cache, last_token, prefill, decode)

  def _step(
    self,
    params: Any,
    cache: Any,
    last_token: jax.Array,  # [num_rows] int32
    prefill: PrefillInputs | None,
    decode: DecodeInputs | None,
  ):
    tokens, positions, chosen, rows, new_positions, samplings = [], [], [], [], [], []
    prefill_batch = decode_batch = None
    num_prefill = 0
    if prefill is not None:
      prefill_batch = prefill.batch
      (num_prefill,) = prefill_batch.tokens.shape
      tokens.append(prefill_batch.tokens)
      positions.append(prefill_batch.positions)
      chosen.append(prefill.emit_index)
      rows.append(prefill.emit_row)
      new_positions.append(prefill.emit_position)
      samplings.append(prefill.sampling)
    if decode is not None:
      (num_rows,) = decode.rows.shape
      ids = jnp.maximum(last_token.at[decode.rows].get(mode="clip"), 0)  # -1 after a failure
      decode_batch = DecodeBatch(ids, decode.positions, decode.tables)
      tokens.append(ids)
      positions.append(decode.positions)
      chosen.append(num_prefill + jnp.arange(num_rows))
      rows.append(decode.rows)
      new_positions.append(decode.positions + 1)
      samplings.append(decode.sampling)
    attend = make_attend(self._layout, self._model.reduction, prefill_batch, decode_batch)
    hidden, cache = self._model.forward(
      params, jnp.concatenate(tokens), jnp.concatenate(positions), cache, attend
    )
    logits = self._model.unembed(params, hidden[jnp.concatenate(chosen)])
    sampling = jax.tree.map(lambda *parts: jnp.concatenate(parts), *samplings)
    ids = sample(logits, sampling, jnp.concatenate(new_positions))
    last_token = last_token.at[jnp.concatenate(rows)].set(ids, mode="drop")
    return cache, last_token, ids

  def _logits(self, params, cache, prefill: PrefillInputs):  # -> [E, V]
    batch = prefill.batch
    attend = make_attend(self._layout, self._model.reduction, batch, None)
    hidden, _ = self._model.forward(params, batch.tokens, batch.positions, cache, attend)
    return self._model.unembed(params, hidden[prefill.emit_index])

  def _gather(self, cache, page_ids: jax.Array):  # [n] -> pieces
    return kv_cache.gather(self._layout, cache, page_ids)

  def _scatter(self, cache, last_token, page_ids: jax.Array, pieces, row, token_id):
    cache = kv_cache.scatter(self._layout, cache, page_ids, pieces)
    return cache, last_token.at[row].set(token_id)
