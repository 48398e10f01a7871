"""Every compiled function of the engine, in one place, but for one of transfer.py.

  function         donates                  static shapes                compiled once per
  prefill_step     cache, last_token, seen  T                            bucket, layers and mesh
  decode_step      cache, last_token, seen  T = decode rows              bucket, layers and mesh
  mixed_step       cache, last_token, seen  T; decode rows are all rows  bucket, layers and mesh
  prefill_layers   cache                    as its step                  bucket, layers and mesh
  decode_layers    cache                    as its step                  bucket, layers and mesh
  mixed_layers     cache                    as its step                  bucket, layers and mesh
  add_seen         seen                                                  mesh
  set_last_token   last_token                                            mesh
  gather_pages     into                     pages, layers, cuts          bucket and mesh
  scatter_pages    cache                    pages, layers, cuts          bucket and mesh
  last_logits      nothing                  T                            when tokens are explained

The three steps are one forward through the weights; they differ in `attend` alone. `mixed_step`
reads the weights once for chunks and decodes together, which is the whole point of Sarathi-Serve:
two calls would read them twice. A step may be cut into groups of layers: all but the last are
`..._layers`, the last is the step, which also unembeds and samples. Each is given its part of the
cache. `num_traces` counts tracings, which all meshes share; after warm-up it must not move.
"""

from __future__ import annotations

import collections
import functools
import inspect
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pdjax.engine.batch import StepInputs
from pdjax.models import kv_cache
from pdjax.models.attention import Attention
from pdjax.models.kv_cache import KVLayout
from pdjax.models.model import LayerRange, Model, axes_sharding
from pdjax.models.sampling import sample


def state_shapes(
  model: Model, layout: KVLayout, stages: Sequence[tuple[LayerRange, jax.sharding.Mesh]]
):
  """The cache, `last_token` and `seen` of a pool, as shapes: what its steps update.

  The cache of a layer lies with the stage that has the layer, the others with the last stage.
  """

  def shape(axes, x, mesh):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=axes_sharding(axes, x.shape, mesh))

  whole = jax.eval_shape(lambda: kv_cache.init_cache(layout))
  cache = ()
  for (first, last), mesh in stages:
    cache += jax.tree.map(lambda x, mesh=mesh: shape(layout.axes, x, mesh), whole[first:last])
  last_token = jax.ShapeDtypeStruct((layout.num_rows,), jnp.int32)
  seen = jax.ShapeDtypeStruct((layout.num_rows, model.config.vocab_size), bool)
  return cache, shape("B", last_token, mesh), shape("B V", seen, mesh)


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
    self.prefill_layers = self._jit("prefill_layers", self._layers, donate=("cache",))
    self.decode_layers = self._jit("decode_layers", self._layers, donate=("cache",))
    self.mixed_layers = self._jit("mixed_layers", self._layers, donate=("cache",))
    self.add_seen = self._jit("add_seen", self._add_seen, donate=("seen",))
    self.set_last_token = self._jit("set_last_token", self._set_token, donate=("last_token",))
    # JAX leaves out what is not read, and with it the memory that is to be written.
    self.gather_pages = self._jit("gather_pages", self._gather, donate=("into",), keep_unused=True)
    self.scatter_pages = self._jit("scatter_pages", self._scatter, donate=("cache",))
    self.last_logits = self._jit("last_logits", self._logits, donate=())

  @property
  def num_shards(self) -> int:
    """Over how many devices the kv heads of pieces are split; 1 if each device has all of them."""
    mesh = self.attention.mesh
    return 1 if mesh is None or self._layout.kv_copies > 1 else mesh.size

  def _jit(self, name: str, function, donate: tuple[str, ...], *, keep_unused: bool = False):
    @functools.wraps(function)
    def traced(*args):
      self.num_traces[name] += 1  # runs while tracing only
      with jax.named_scope(name.removesuffix("_step").removesuffix("_layers")):  # of a profile
        return function(*args)

    traced.__name__ = name
    static = {"layers", "num_cuts"} & inspect.signature(function).parameters.keys()
    return jax.jit(traced, donate_argnames=donate, static_argnames=static, keep_unused=keep_unused)

  # The three steps are one function of different inputs: with slices of prompts, decodes, or both.
  # They return what they update, and what was sampled in the order of `StepInputs`.

  def _step(
    self,
    params: Any,
    cache: Any,
    last_token: jax.Array,  # [num_rows] int32
    seen: jax.Array,  # [num_rows, V] bool
    inputs: StepInputs,
    hidden: jax.Array | None,  # [T, D] of the layers before; None: these begin with the first
    layers: LayerRange,  # that end with the last
  ):
    hidden, cache = self._forward(params, cache, last_token, inputs, hidden, layers)
    if inputs.batch.decode is not None:
      rows = inputs.token_rows  # prompts: see `add_seen`
      seen = seen.at[rows, self._decode_ids(last_token, rows)].set(True, mode="drop")
    logits = self._model.unembed(params, hidden[inputs.sample_places])
    positions = inputs.batch.positions[inputs.sample_places] + 1
    with jax.named_scope("sample"):
      sampled = sample(logits, inputs.sampling, positions, seen, inputs.sample_rows)
    sampled = self._on_each_device(sampled)
    last_token = last_token.at[inputs.sample_rows].set(sampled.ids, mode="drop")
    return cache, last_token, seen, sampled

  def _add_seen(self, seen, row, ids: jax.Array, anew):  # ids [V] bool
    """Adds ids to what `row` has seen, or begins `anew` with them.

    Only for rows that look back at them: of others `seen` holds what nobody reads.
    """
    return seen.at[row].set(ids | (seen[row] & ~anew))

  def _layers(self, params, cache, last_token, inputs: StepInputs, hidden, layers: LayerRange):
    """Layers before the last one; returns their cache and hidden [T, D].

    `last_token` is read by decodes in the first group; None elsewhere.
    """
    hidden, cache = self._forward(params, cache, last_token, inputs, hidden, layers)
    return cache, hidden

  def _logits(self, params, cache, inputs: StepInputs, hidden, layers: LayerRange):  # -> [R, V]
    hidden, _ = self._forward(params, cache, None, inputs, hidden, layers)
    return self._on_each_device(self._model.unembed(params, hidden[inputs.sample_places]))

  def _on_each_device(self, values):
    """All of them: a process can read only what its own devices have."""
    mesh = self.attention.mesh
    if mesh is None:
      return values
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.lax.with_sharding_constraint(values, whole)

  def _forward(self, params, cache, last_token, inputs: StepInputs, hidden, layers: LayerRange):
    batch = inputs.batch
    if hidden is None:
      tokens = batch.tokens
      if batch.decode is not None:
        rows = inputs.token_rows
        tokens = jnp.where(rows < len(last_token), self._decode_ids(last_token, rows), tokens)
      hidden = self._model.embed(params, tokens, batch.positions)
    attend = self.attention(batch)
    return self._model.run_layers(params, hidden, batch.positions, cache, attend, layers)

  def _decode_ids(self, last_token, rows):
    return jnp.maximum(last_token.at[rows].get(mode="clip"), 0)  # -1 after a failure

  def _set_token(self, last_token, row, token_id):
    return last_token.at[row].set(token_id)

  def _gather(self, cache, page_ids: jax.Array, into, num_cuts: int):  # [n] -> cuts
    """Cuts of the pages, in the memory of the arrays `into`, of the same shapes; None is new."""
    how = {"num_shards": self.num_shards, "num_cuts": num_cuts}
    return tuple(
      kv_cache.gather(self._layout, cache, page_ids, cut=cut, **how) for cut in range(num_cuts)
    )

  def _scatter(self, cache, page_ids: jax.Array, cuts):
    return kv_cache.scatter(self._layout, cache, page_ids, cuts, num_shards=self.num_shards)
