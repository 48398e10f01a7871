"""What the engine runs: any model as parameters and pure functions of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from pdjax.core.model_config import ModelConfig
from pdjax.models.attention import Attend, Reduction
from pdjax.models.kv_cache import Cache, KVLayout

TENSOR_AXIS = "tensor"  # the mesh axis over which heads and the MLP are split
_SPLIT_LETTERS = ("H", "K", "F")

Params = tuple[jax.Array, ...]
Target = jax.Device | Sharding | Mesh


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Model:
  """A model ready to run. `params` is a flat tuple, the cheapest pytree to pass to a jit.

  `forward` and `unembed` are pure and never jitted here. `hidden` is what `unembed` takes: rows may
  be picked from it first, so that only tokens that emit pay for logits.
  """

  config: ModelConfig
  params: Params
  param_names: tuple[str, ...]
  param_axes: tuple[str, ...]  # axis letters of each, as in models/transformer.py: "D -> H h"
  # params, tokens [T], positions [T], cache, attend -> hidden [T, D], cache
  forward: Callable[[Params, jax.Array, jax.Array, Cache, Attend], tuple[jax.Array, Cache]]
  unembed: Callable[
    [Params, jax.Array], jax.Array
  ]  # params, hidden [R, D] -> logits [R, V] float32
  reduction: Reduction
  cache_dtype: str

  def to(self, target: Target) -> Model:
    """This model with its parameters on `target`.

    A mesh with an axis named "tensor" splits heads and the MLP over it (any other parameter and any
    other axis: copies); a device or a sharding takes every parameter as it is.

    Raises:
      ValueError: the axis does not divide the heads or the MLP.
    """
    if not isinstance(target, Mesh):
      return dataclasses.replace(self, params=jax.device_put(self.params, target))
    size = target.shape.get(TENSOR_AXIS, 1)
    config = self.config
    for field in ("num_heads", "num_kv_heads", "d_ff"):
      if getattr(config, field) % size:
        raise ValueError(
          f"model {config.name}: {field}={getattr(config, field)} is no multiple of the "
          f"{size} devices of mesh axis {TENSOR_AXIS!r}"
        )

    def sharding(axes: str) -> NamedSharding:
      letters = axes.replace("->", "").split()
      axis = TENSOR_AXIS if size > 1 else None
      return NamedSharding(
        target, PartitionSpec(*(axis if x in _SPLIT_LETTERS else None for x in letters))
      )

    shardings = tuple(sharding(axes) for axes in self.param_axes)
    return dataclasses.replace(self, params=jax.device_put(self.params, shardings))

  def layout(
    self, *, kind: str, num_rows: int, page_size: int, pages_per_row: int, num_pages: int
  ) -> KVLayout:
    """The layout of a cache for this model."""
    return KVLayout(
      kind=kind,
      num_layers=self.config.num_layers,
      num_kv_heads=self.config.num_kv_heads,
      head_dim=self.config.head_dim,
      dtype=self.cache_dtype,
      num_rows=num_rows,
      page_size=page_size,
      pages_per_row=pages_per_row,
      num_pages=num_pages,
    )
