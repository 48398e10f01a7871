"""The attention of a step: all that differs between a prefill, a decode and a mixed step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec

from pdjax.kernels.backends import backend
from pdjax.kernels.backends.xla import Reduction
from pdjax.kernels.choice import Tuning
from pdjax.kernels.chunked_prefill import chunked_prefill
from pdjax.kernels.mixed import mixed
from pdjax.kernels.paged_decode import paged_decode
from pdjax.kernels.slices import Slices
from pdjax.kernels.write_pages import write_pages
from pdjax.models.kv_cache import KVLayout, LayerCache


class StepBatch(NamedTuple):
  """The tokens of a step, packed in any order. Only attention knows which is prefill or decode.

  So the linear layers see no padding but at the end of T. Decodes of like length are neighbours in
  `decode`. `fresh` takes the place of `prefill` in a step of prompts that all begin in it, where a
  kernel makes use of that.
  """

  tokens: jax.Array  # [T]
  positions: jax.Array  # [T], -1 for padding
  slots: jax.Array  # [T]: where K and V go; out of range for padding
  prefill: Slices | None
  decode: Slices | None
  fresh: Slices | None = None


Attend = Callable[
  [jax.Array, jax.Array, jax.Array, LayerCache, int | None], tuple[jax.Array, LayerCache]
]  # q [T, H, h], k and v [T, K, h], a layer's cache, its window -> out [T, H, h], the layer's cache


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
  """How the steps of a pool attend: static, so that steps are compiled for it.

  `reduction` replaces softmax (the checksum model's); only plain XLA has it. On a `mesh` the heads
  are split over its one axis, and each device runs the kernels on its own.
  """

  layout: KVLayout
  tuning: Tuning
  mesh: AbstractMesh | None = None
  reduction: Reduction | None = None

  def __call__(self, batch: StepBatch) -> Attend:
    """The `attend` of one step, for every layer of it."""

    def attend_step(q, k, v, layer_cache, window):
      # Where devices outnumber kv heads the cache has copies of each.
      k, v = (jnp.repeat(x, self.layout.kv_copies, axis=1) for x in (k, v))
      run = functools.partial(self._write_and_attend, window)
      if self.mesh is not None:
        run = self._split(run, layer_cache, batch)
      return run(q, k, v, layer_cache, batch)

    return attend_step

  def _split(self, run, layer_cache, batch):
    """`run` on each device with its heads. XLA cannot split a kernel by itself."""
    (axis,) = self.mesh.axis_names
    heads = PartitionSpec(None, axis, None)
    pages = jax.tree.map(lambda x: self.layout.split(axis), layer_cache)
    whole = jax.tree.map(lambda x: PartitionSpec(), batch)
    return jax.shard_map(
      run, mesh=self.mesh, in_specs=(heads, heads, heads, pages, whole), out_specs=(heads, pages),
      check_vma=False,
    )  # fmt: skip

  def _write_and_attend(self, window, q, k, v, pages, batch: StepBatch):
    tuning = self.tuning
    *_, head_dim = q.shape
    pages = write_pages(pages, k, v, batch.slots, config=tuning.write)
    options = dict(page_size=self.layout.page_size, window=window)
    if self.reduction is not None:
      run = functools.partial(backend("xla").attend, reduction=self.reduction)
      config = dict(scale=1.0, config=tuning.mixed)
      return run(q, pages, batch.prefill, batch.decode, **options, **config), pages
    if batch.fresh is not None:
      run = backend(tuning.fresh.backend).attend_fresh
      # Libraries multiply what they mask by 0: a request that went wrong would take others along.
      # Its own keys still do.
      v = jnp.where(jnp.isfinite(v), v, 0)
      more = dict(soft_cap=None, scale=head_dim**-0.5, config=tuning.fresh)
      return run(q, k, v, batch.fresh, window=window, **more), pages
    if batch.decode is None:
      return chunked_prefill(q, pages, batch.prefill, **options, config=tuning.prefill), pages
    if batch.prefill is None:
      return paged_decode(q, pages, batch.decode, **options, config=tuning.decode), pages
    return mixed(q, pages, batch.prefill, batch.decode, **options, config=tuning.mixed), pages
