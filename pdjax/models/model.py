"""What the engine runs: any model as parameters and pure functions of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from pdjax.core.model_config import ModelConfig
from pdjax.kernels.backends.xla import Reduction
from pdjax.models.attention import Attend
from pdjax.models.kv_cache import Cache, KVLayout

TENSOR_AXIS = "tensor"
"""The mesh axis of tensor parallelism."""

# Logical axis -> mesh axis, for parameters and cache alike: the Megatron split (Shoeybi et al.
# 2019, section 3). Each matrix pair is split by its inner axis, so a layer needs two all-reduces.
AXIS_RULES = {"H": TENSOR_AXIS, "K": TENSOR_AXIS, "F": TENSOR_AXIS, "V": TENSOR_AXIS}
_MAY_REPLICATE = ("K", "V")  # where the mesh axis does not divide them; the others are refused

Params = tuple[jax.Array | None, ...]
LayerRange = tuple[int, int]  # [first, last)
Target = jax.Device | Sharding | Mesh


def tensor_parallel(mesh: Mesh) -> int:
  """Over how many devices of `mesh` a model is split."""
  return mesh.shape.get(TENSOR_AXIS, 1)


def kv_copies(config: ModelConfig, tp: int) -> int:
  """Copies of each kv head over `tp` devices: more than 1 where devices outnumber kv heads."""
  return max(1, tp // config.num_kv_heads)


def axes_sharding(axes: str, shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
  """How an array with logical `axes` such as "D -> H h" lies on `mesh`."""
  tp = tensor_parallel(mesh)

  def mesh_axis(letter: str, size: int) -> str | None:
    is_whole = tp == 1 or (letter in _MAY_REPLICATE and size % tp)
    return None if is_whole else AXIS_RULES.get(letter)

  letters = axes.replace("->", "").split()
  mesh_axes = [mesh_axis(letter, size) for letter, size in zip(letters, shape, strict=True)]
  while mesh_axes and mesh_axes[-1] is None:  # as the results of steps say it: one that says it
    mesh_axes.pop()  # otherwise is compiled for again
  return NamedSharding(mesh, PartitionSpec(*mesh_axes))


def param_sharding(
  config: ModelConfig, axes: str, shape: tuple[int, ...], target: Target
) -> Sharding:
  """How a parameter with logical `axes` lies on a device, a sharding or a mesh."""
  if isinstance(target, Mesh):
    config.check_split(tensor_parallel(target))
    return axes_sharding(axes, shape, target)
  return SingleDeviceSharding(target) if isinstance(target, jax.Device) else target


def place(
  config: ModelConfig, axes: str, array: np.ndarray, dtype: str, target: Target | None
) -> jax.Array | np.ndarray:
  """One parameter on `target`, cast shard by shard. Copies: `array` may be a view of a file.

  Returns when the device has it, so that the host need not hold the next one as well.
  """
  if target is None:
    return np.array(array, jnp.dtype(dtype), order="C")
  sharding = param_sharding(config, axes, array.shape, target)

  def cast(index):  # in the order of a file's view: JAX transposes many times faster than numpy
    return np.array(array[index], jnp.dtype(dtype), order="K")

  return jax.make_array_from_callback(array.shape, sharding, cast).block_until_ready()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Model:
  """A model ready to run. `params` is a flat tuple, the cheapest pytree to pass to a jit.

  The three functions are pure and never jitted here; parts of a model need a part of its parameters
  (`params_of`). `hidden` says all that one layer tells the next. Rows may be picked from it before
  `unembed`, so that only tokens that emit pay for logits.
  """

  config: ModelConfig
  params: Params  # None for those that a part does not need
  param_names: tuple[str, ...]
  param_axes: tuple[str, ...]  # axis letters of each, as in models/transformer.py: "D -> H h"
  param_layers: tuple[
    tuple[int, ...], ...
  ]  # that need it; the first also embeds, the last unembeds
  # params, tokens [T], positions [T] -> hidden [T, D]
  embed: Callable[[Params, jax.Array, jax.Array], jax.Array]
  # params, hidden [T, D], positions [T], cache of the layers, attend, layers -> hidden, cache
  run_layers: Callable[
    [Params, jax.Array, jax.Array, Cache, Attend, LayerRange], tuple[jax.Array, Cache]
  ]
  unembed: Callable[
    [Params, jax.Array], jax.Array
  ]  # params, hidden [R, D] -> logits [R, V] float32
  reduction: Reduction | None  # instead of softmax
  cache_dtype: str

  def forward(
    self, params: Params, tokens: jax.Array, positions: jax.Array, cache: Cache, attend: Attend
  ) -> tuple[jax.Array, Cache]:
    """All layers: hidden [T, D] of tokens [T], and the cache with their K and V."""
    hidden = self.embed(params, tokens, positions)
    layers = (0, self.config.num_layers)
    return self.run_layers(params, hidden, positions, cache, attend, layers)

  def params_of(self, layers: LayerRange) -> Params:
    """Those that layers [first, last) need, and None in the place of each other one."""
    first, last = layers
    return tuple(
      param if any(first <= layer < last for layer in needed_by) else None
      for param, needed_by in zip(self.params, self.param_layers, strict=True)
    )

  def to(self, target: Target) -> Model:
    """This model with its parameters on `target`.

    A mesh splits them by `AXIS_RULES`; a device or a sharding takes every parameter as it is.

    Raises:
      ValueError: the mesh does not divide the heads or the MLP.
    """
    if isinstance(target, Mesh):
      self.config.check_split(tensor_parallel(target))
      target = tuple(
        None if param is None else axes_sharding(axes, param.shape, target)
        for axes, param in zip(self.param_axes, self.params)
      )
    return dataclasses.replace(self, params=jax.device_put(self.params, target))

  def layout(
    self,
    *,
    kind: str,
    num_rows: int,
    page_size: int,
    pages_per_row: int,
    num_pages: int,
    tp: int = 1,
  ) -> KVLayout:
    """The layout of a cache for this model over `tp` devices."""
    return KVLayout(
      kind=kind,
      num_layers=self.config.num_layers,
      num_kv_heads=self.config.num_kv_heads,
      kv_copies=kv_copies(self.config, tp),
      head_dim=self.config.head_dim,
      dtype=self.cache_dtype,
      num_rows=num_rows,
      page_size=page_size,
      pages_per_row=pages_per_row,
      num_pages=num_pages,
    )
