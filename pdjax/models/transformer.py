"""A Llama decoder: RMSNorm, half-split RoPE, grouped-query attention, SwiGLU; in Flax NNX.

Axes, for the whole project:

    T  tokens in the step     D  embedding      F  mlp
    S  key positions          H  query heads    V  vocabulary
    B  rows                   K  kv heads       L  layers
                              h  head_dim       N  pages     P  pages of a row

The modules hold parameters and say what is computed; they run inside plain `jax.jit` over a flat
tuple of parameters (`Model.forward`), never under `nnx.jit`, whose dispatch would cost a tenth of a
decode step. Each parameter is declared by its axes, "in -> out", from which its shape, its random
scale and the axis to split between devices follow.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pdjax.core.model_config import ModelConfig
from pdjax.models.attention import Attend, softmax_reduction
from pdjax.models.kv_cache import Cache, LayerCache
from pdjax.models.model import Model, Params, Target

FAMILIES = ("llama",)

_RANDOM_LOGIT_STD = 10.0  # of `random_arrays`


def _sizes(config: ModelConfig) -> dict[str, int]:
  return {
    "D": config.d_model,
    "H": config.num_heads,
    "K": config.num_kv_heads,
    "h": config.head_dim,
    "F": config.d_ff,
    "V": config.vocab_size,
  }


def _param(config: ModelConfig, axes: str) -> nnx.Param:
  shape = [_sizes(config)[letter] for letter in axes.replace("->", "").split()]
  return nnx.Param(jnp.zeros(shape), axes=axes)


class RMSNorm(nnx.Module):
  def __init__(self, config: ModelConfig):
    self.eps = config.norm_eps
    self.scale = _param(config, "D")

  def __call__(self, x: jax.Array) -> jax.Array:  # [T, D]
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
    return (y * self.scale[...]).astype(x.dtype)


def rope_angles(
  positions: jax.Array,  # [T]
  head_dim: int,
  theta: float,
) -> tuple[jax.Array, jax.Array]:
  """cos and sin, each [T, 1, h / 2], of the angles by which pairs are turned."""
  frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
  angles = positions[:, None, None].astype(jnp.float32) * frequencies
  return jnp.cos(angles), jnp.sin(angles)


def rotate(
  x: jax.Array,  # [T, H, h]
  cos: jax.Array,  # [T, 1, h / 2]
  sin: jax.Array,
) -> jax.Array:
  """Turns the pairs (x[i], x[i + h / 2]): half-split, as in Hugging Face checkpoints."""
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


class Attention(nnx.Module):
  def __init__(self, config: ModelConfig):
    self.q = _param(config, "D -> H h")
    self.k = _param(config, "D -> K h")
    self.v = _param(config, "D -> K h")
    self.o = _param(config, "H h -> D")

  def __call__(
    self,
    x: jax.Array,  # [T, D]
    rope: tuple[jax.Array, jax.Array],
    layer_cache: LayerCache,
    attend: Attend,
  ) -> tuple[jax.Array, LayerCache]:
    q = rotate(jnp.einsum("td,dhk->thk", x, self.q[...]), *rope)
    k = rotate(jnp.einsum("td,dhk->thk", x, self.k[...]), *rope)
    v = jnp.einsum("td,dhk->thk", x, self.v[...])
    out, layer_cache = attend(q, k, v, layer_cache)
    return jnp.einsum("thk,hkd->td", out, self.o[...]), layer_cache


class MLP(nnx.Module):
  def __init__(self, config: ModelConfig):
    self.gate = _param(config, "D -> F")
    self.up = _param(config, "D -> F")
    self.down = _param(config, "F -> D")

  def __call__(self, x: jax.Array) -> jax.Array:  # [T, D]
    return (jax.nn.silu(x @ self.gate[...]) * (x @ self.up[...])) @ self.down[...]


class Block(nnx.Module):
  def __init__(self, config: ModelConfig):
    self.attention_norm = RMSNorm(config)
    self.attention = Attention(config)
    self.mlp_norm = RMSNorm(config)
    self.mlp = MLP(config)

  def __call__(self, x, rope, layer_cache, attend):
    out, layer_cache = self.attention(self.attention_norm(x), rope, layer_cache, attend)
    x = x + out
    return x + self.mlp(self.mlp_norm(x)), layer_cache


class Llama(nnx.Module):
  """Layers are unrolled: the cache is one donated array per layer, which a scan would copy."""

  def __init__(self, config: ModelConfig):
    self.config = config
    self.embedding = _param(config, "V -> D")
    self.blocks = nnx.List([Block(config) for _ in range(config.num_layers)])
    self.final_norm = RMSNorm(config)
    if not config.tie_embeddings:
      self.unembedding = _param(config, "D -> V")

  def embed(self, tokens: jax.Array) -> jax.Array:  # [T] -> [T, D]
    return self.embedding[...][tokens]

  def layers(
    self,
    x: jax.Array,  # [T, D]
    positions: jax.Array,  # [T]
    cache: Cache,  # of layers lo, ..., hi - 1
    attend: Attend,
    lo: int,
    hi: int,
  ) -> tuple[jax.Array, Cache]:
    """Runs layers [lo, hi). Writes their part of the cache through `attend`."""
    rope = rope_angles(positions, self.config.head_dim, self.config.rope_theta)
    new_cache = []
    for block, layer_cache in zip(list(self.blocks)[lo:hi], cache, strict=True):
      x, layer_cache = block(x, rope, layer_cache, attend)
      new_cache.append(layer_cache)
    return x, tuple(new_cache)

  def unembed(self, x: jax.Array) -> jax.Array:  # [R, D] -> [R, V]
    x = self.final_norm(x)
    if self.config.tie_embeddings:
      equation, weights = "rd,vd->rv", self.embedding
    else:
      equation, weights = "rd,dv->rv", self.unembedding
    return jnp.einsum(equation, x, weights[...], preferred_element_type=jnp.float32)


def _check_family(config: ModelConfig) -> None:
  if config.family not in FAMILIES:
    raise ValueError(
      f"model {config.name}: family {config.family!r} is not supported (supported: "
      f"{', '.join(FAMILIES)})"
    )
  if not config.gated_mlp:
    raise ValueError(f"model {config.name}: family {config.family!r} needs gated_mlp")


@functools.cache
def _abstract(config: ModelConfig):
  """The module's graph, the tree of its parameters, and their names, axes and shapes in order."""
  _check_family(config)
  graph, state = nnx.split(nnx.eval_shape(lambda: Llama(config)))
  names, axes, shapes = [], [], []
  for path, param in nnx.to_flat_state(state):
    names.append(".".join(str(part) for part in path))
    axes.append(param.get_metadata("axes"))
    shapes.append(param.shape)
  return graph, jax.tree.structure(state), tuple(names), tuple(axes), shapes


def merge(config: ModelConfig, params: Params) -> Llama:
  """The module around `Model.params`; for parts of a forward, such as a group of layers."""
  graph, structure, *_ = _abstract(config)
  return nnx.merge(graph, jax.tree.unflatten(structure, params))


def from_arrays(
  config: ModelConfig,
  arrays: dict[str, np.ndarray],
  *,
  dtype: str = "float32",
  target: Target | None = None,
) -> Model:
  """A model with the parameters `arrays`, named as the modules nest ("blocks.0.attention.q").

  Parameters and cache get `dtype`; norms, softmax and logits are computed in float32.

  Raises:
    ValueError: an unsupported family, or the names of all tensors that are missing, unknown or of
      another shape.
  """
  _, _, names, axes, shapes = _abstract(config)
  problems = [f"missing {name}" for name in names if name not in arrays]
  problems += [f"unknown {name}" for name in sorted(arrays.keys() - set(names))]
  problems += [
    f"{name} has shape {arrays[name].shape}, not {shape}"
    for name, shape in zip(names, shapes)
    if name in arrays and arrays[name].shape != shape
  ]
  if problems:
    raise ValueError(f"model {config.name}: {'; '.join(problems)}")

  def forward(params, tokens, positions, cache, attend):
    llama = merge(config, params)
    return llama.layers(llama.embed(tokens), positions, cache, attend, 0, config.num_layers)

  def unembed(params, hidden):
    return merge(config, params).unembed(hidden)

  model = Model(
    config=config,
    params=tuple(np.asarray(arrays[name], jnp.dtype(dtype)) for name in names),
    param_names=names,
    param_axes=axes,
    forward=forward,
    unembed=unembed,
    reduction=softmax_reduction,
    cache_dtype=dtype,
  )
  return model.to(target)


def random_arrays(config: ModelConfig, seed: int) -> dict[str, np.ndarray]:
  """Random parameters for `from_arrays`: the same for the same config and seed.

  Matrices keep the scale of what they multiply; the unembedding is larger, so that logits have a
  standard deviation of 10 and the two largest rarely lie close. For `TINY` with seed 0 the smallest
  margin between them over 400 random tokens was 0.0059 and the largest difference between one pass
  and chunks 3.9e-5 (CPU, float32); a test asserts both roughly.
  """
  rng = np.random.default_rng(seed)
  _, _, names, axes, shapes = _abstract(config)
  arrays = {}
  for name, letters, shape in zip(names, axes, shapes):
    if "->" not in letters:
      arrays[name] = np.ones(shape, np.float32)
      continue
    fan_in = [_sizes(config)[letter] for letter in letters.split("->")[0].split()]
    scale = 1 / np.sqrt(np.prod(fan_in))
    if name == "embedding":
      scale = _RANDOM_LOGIT_STD / np.sqrt(config.d_model) if config.tie_embeddings else 1.0
    elif name == "unembedding":
      scale *= _RANDOM_LOGIT_STD
    arrays[name] = rng.standard_normal(shape, np.float32) * np.float32(scale)
  return arrays
