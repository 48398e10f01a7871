"""One decoder for all families, driven by `ModelConfig`, in Flax NNX.

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
import math
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pdjax.core.model_config import ModelConfig, RopeScaling
from pdjax.models.attention import Attend
from pdjax.models.kv_cache import Cache, LayerCache
from pdjax.models.model import Model, Params, Target, place

_RANDOM_LOGIT_STD = 10.0  # of `random_arrays`
_RANDOM_BIAS_STD = 0.1

_ACTIVATIONS = {
  "silu": jax.nn.silu,
  "gelu": functools.partial(jax.nn.gelu, approximate=False),
  "relu": jax.nn.relu,
}

Rope = tuple[jax.Array, jax.Array]  # cos and sin, each [T, 1, h / 2]


def _sizes(config: ModelConfig) -> dict[str, int]:
  return {
    "D": config.d_model,
    "H": config.num_heads,
    "K": config.num_kv_heads,
    "h": config.head_dim,
    "F": config.d_ff,
    "V": config.vocab_size,
    "S": config.max_len,
  }


def _param(config: ModelConfig, axes: str) -> nnx.Param:
  shape = [_sizes(config)[letter] for letter in axes.replace("->", "").split()]
  return nnx.Param(jnp.zeros(shape), axes=axes)


class Norm(nnx.Module):
  """RMSNorm or LayerNorm over the last axis, in float32."""

  def __init__(self, config: ModelConfig, axis: str = "D", *, kind: str | None = None):
    self.eps = config.norm_eps
    self.scale = _param(config, axis)
    self.centers = (kind or config.norm) == "layer"
    if self.centers:
      self.bias = _param(config, axis)

  def __call__(self, x: jax.Array) -> jax.Array:  # [..., D]
    y = x.astype(jnp.float32)
    if self.centers:
      y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps) * self.scale[...]
    if self.centers:
      y = y + self.bias[...]
    return y.astype(x.dtype)


def rope_frequencies(config: ModelConfig) -> np.ndarray:  # [h / 2] float32, radians a position
  """A constant of compiled steps, rounded where transformers rounds.

  Where a last bit differs, as in powers by XLA, so do angles: by 5e-4 at position 8,000, and logits
  by more.
  """
  h = config.head_dim
  exponents = np.arange(0, h, 2, dtype=np.float32) / np.float32(h)
  periods = (config.rope_theta ** exponents.astype(np.float64)).astype(np.float32)
  frequencies = np.float32(1) / periods
  if config.rope_scaling is None:
    return frequencies
  return scale_frequencies(frequencies, config.rope_scaling)


def scale_frequencies(
  frequencies: np.ndarray,  # [h / 2]
  scaling: RopeScaling,
) -> np.ndarray:
  """RoPE frequencies for contexts longer than those of pre-training, as `RopeScaling` says."""
  if scaling.kind == "linear":
    return frequencies / scaling.factor
  wavelengths = 2 * math.pi * (1 / frequencies)  # by reciprocals, as torch divides a number
  turns = scaling.original_max_len * (1 / wavelengths)  # over the trained context
  low, high = scaling.low_freq_factor, scaling.high_freq_factor
  kept = ((turns - low) / (high - low)).clip(0, 1)  # 1 for fast pairs, 0 for slow ones
  return kept * frequencies + (1 - kept) * frequencies / scaling.factor


def rope_angles(
  positions: jax.Array,  # [T]
  config: ModelConfig,
) -> Rope:
  """cos and sin of the angles by which pairs are turned."""

  def compute(positions):
    angles = positions[:, None, None].astype(jnp.float32) * rope_frequencies(config)
    return jnp.cos(angles), jnp.sin(angles)

  def compute_once(positions):
    # XLA for CPU drops optimization barriers and computes what looks cheap anew where it is read:
    # here cos and sin for every head of every layer, 7 % of a step of 256 tokens of SmolLM2-135M.
    # What comes out of a branch is kept.
    nothing = jnp.zeros((len(positions), 1, config.head_dim // 2), jnp.float32)
    return jax.lax.cond(positions.max() >= 0, compute, lambda _: (nothing, nothing), positions)

  return jax.lax.platform_dependent(positions, cpu=compute_once, default=compute)


def rotate(
  x: jax.Array,  # [T, H, h]
  rope: Rope,
) -> jax.Array:
  """Turns the pairs (x[i], x[i + h / 2]): half-split, as in Hugging Face checkpoints."""
  cos, sin = rope
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


class Attention(nnx.Module):
  def __init__(self, config: ModelConfig):
    self.config = config
    self.q = _param(config, "D -> H h")
    self.k = _param(config, "D -> K h")
    self.v = _param(config, "D -> K h")
    self.o = _param(config, "H h -> D")
    if config.qkv_bias:
      self.q_bias = _param(config, "H h")
      self.k_bias = _param(config, "K h")
      self.v_bias = _param(config, "K h")
    if config.out_bias:
      self.o_bias = _param(config, "D")
    if config.qk_norm:
      self.q_norm = Norm(config, "h", kind="rms")
      self.k_norm = Norm(config, "h", kind="rms")

  def __call__(
    self,
    x: jax.Array,  # [T, D]
    rope: Rope | None,
    layer_cache: LayerCache,
    attend: Attend,
    window: int | None,
  ) -> tuple[jax.Array, LayerCache]:
    q, k, v = (jnp.einsum("td,dhk->thk", x, w[...]) for w in (self.q, self.k, self.v))
    if self.config.qkv_bias:
      q, k, v = q + self.q_bias[...], k + self.k_bias[...], v + self.v_bias[...]
    if self.config.qk_norm:
      q, k = self.q_norm(q), self.k_norm(k)
    if rope is not None:
      q, k = rotate(q, rope), rotate(k, rope)
    out, layer_cache = attend(q, k, v, layer_cache, window)
    out = jnp.einsum("thk,hkd->td", out, self.o[...])
    return (out + self.o_bias[...] if self.config.out_bias else out), layer_cache


class MLP(nnx.Module):
  def __init__(self, config: ModelConfig):
    self.config = config
    if config.gated_mlp:
      self.gate = _param(config, "D -> F")
    self.up = _param(config, "D -> F")
    self.down = _param(config, "F -> D")
    if config.mlp_bias:
      if config.gated_mlp:
        self.gate_bias = _param(config, "F")
      self.up_bias = _param(config, "F")
      self.down_bias = _param(config, "D")

  def __call__(self, x: jax.Array) -> jax.Array:  # [T, D]
    act, biased = _ACTIVATIONS[self.config.activation], self.config.mlp_bias
    up = x @ self.up[...]
    if biased:
      up = up + self.up_bias[...]
    if self.config.gated_mlp:
      gate = x @ self.gate[...]
      up = act(gate + self.gate_bias[...] if biased else gate) * up
    else:
      up = act(up)
    down = up @ self.down[...]
    return down + self.down_bias[...] if biased else down


class Block(nnx.Module):
  def __init__(self, config: ModelConfig):
    self.config = config
    self.attention_norm = Norm(config)
    self.attention = Attention(config)
    if not config.shared_norm:
      self.mlp_norm = Norm(config)
    self.mlp = MLP(config)

  def __call__(self, x, rope, layer_cache, attend, window):
    with jax.named_scope("attention"):
      normed = self.attention_norm(x)
      out, layer_cache = self.attention(normed, rope, layer_cache, attend, window)
    with jax.named_scope("mlp"):
      if self.config.parallel_residual:
        if not self.config.shared_norm:
          normed = self.mlp_norm(x)
        return x + (out + self.mlp(normed)), layer_cache
      x = x + out
      return x + self.mlp(self.mlp_norm(x)), layer_cache


class Transformer(nnx.Module):
  """Layers are unrolled: the cache is one donated array per layer, which a scan would copy.

  Named scopes are what a profile shows of a step: `embed`, `layer_N/attention` (norm, projections,
  RoPE, the kernel), `layer_N/mlp`, `unembed`.
  """

  def __init__(self, config: ModelConfig):
    self.config = config
    self.embedding = _param(config, "V -> D")
    if config.position == "learned":
      self.position_embedding = _param(config, "S -> D")
    self.blocks = nnx.List([Block(config) for _ in range(config.num_layers)])
    self.final_norm = Norm(config)
    if not config.tie_embeddings:
      self.unembedding = _param(config, "D -> V")

  def embed(
    self,
    tokens: jax.Array,  # [T]
    positions: jax.Array,  # [T], -1 for padding
  ) -> jax.Array:  # [T, D]
    with jax.named_scope("embed"):
      x = self.embedding[...][tokens]
      if self.config.position == "learned":
        x = x + self.position_embedding[...].at[positions].get(mode="clip")
      return x

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
    rope = rope_angles(positions, self.config) if self.config.position == "rope" else None
    new_cache = []
    for layer, layer_cache in zip(range(lo, hi), cache, strict=True):
      block, window = self.blocks[layer], self.config.window(layer)
      with jax.named_scope(f"layer_{layer}"):
        x, layer_cache = block(x, rope, layer_cache, attend, window)
      new_cache.append(layer_cache)
    return x, tuple(new_cache)

  def unembed(self, x: jax.Array) -> jax.Array:  # [R, D] -> [R, V]
    with jax.named_scope("unembed"):
      x = self.final_norm(x)
      if self.config.tie_embeddings:
        equation, weights = "rd,vd->rv", self.embedding
      else:
        equation, weights = "rd,dv->rv", self.unembedding
      return jnp.einsum(equation, x, weights[...], preferred_element_type=jnp.float32)


@functools.cache
def _abstract(config: ModelConfig):
  """The module's graph, the tree of its parameters, and their names, axes and shapes in order."""
  graph, state = nnx.split(nnx.eval_shape(lambda: Transformer(config)))
  names, axes, shapes = [], [], []
  for path, param in nnx.to_flat_state(state):
    names.append(".".join(str(part) for part in path))
    axes.append(param.get_metadata("axes"))
    shapes.append(param.shape)
  return graph, jax.tree.structure(state), tuple(names), tuple(axes), tuple(shapes)


def param_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
  """Name -> shape of every parameter, in the order of `Model.params`."""
  _, _, names, _, shapes = _abstract(config)
  return dict(zip(names, shapes))


def _layers_that_need(config: ModelConfig, name: str) -> tuple[int, ...]:
  """The first layer embeds too, the last one unembeds."""
  first, last = 0, config.num_layers - 1
  part, *rest = name.split(".")
  if part == "blocks":
    return (int(rest[0]),)
  if part == "embedding":
    return (first, last) if config.tie_embeddings else (first,)
  return (first,) if part == "position_embedding" else (last,)


def merge(config: ModelConfig, params: Params) -> Transformer:
  """The module around `Model.params`; of a part of a model what it has no parameters for fails."""
  graph, structure, *_ = _abstract(config)
  return nnx.merge(graph, jax.tree.unflatten(structure, params))


def check_shapes(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
  """Compares the parameters that a checkpoint has with those of the model.

  Raises:
    ValueError: the names of all that are missing, unknown or of another shape.
  """
  wanted = param_shapes(config)
  problems = [f"missing {name}" for name in wanted if name not in shapes]
  problems += [f"unknown {name}" for name in sorted(shapes.keys() - wanted.keys())]
  problems += [
    f"{name} has shape {tuple(shapes[name])}, not {shape}"
    for name, shape in wanted.items()
    if name in shapes and tuple(shapes[name]) != shape
  ]
  if problems:
    raise ValueError(f"model {config.name}: {'; '.join(problems)}")


def build(config: ModelConfig, params: Params, *, dtype: str) -> Model:
  """A model around parameters that are placed already, or around their shapes alone."""
  _, _, names, axes, _ = _abstract(config)

  def embed(params, tokens, positions):
    return merge(config, params).embed(tokens, positions)

  def run_layers(params, hidden, positions, cache, attend, layers):
    return merge(config, params).layers(hidden, positions, cache, attend, *layers)

  def unembed(params, hidden):
    return merge(config, params).unembed(hidden)

  return Model(
    config=config,
    params=params,
    param_names=names,
    param_axes=axes,
    param_layers=tuple(_layers_that_need(config, name) for name in names),
    embed=embed,
    run_layers=run_layers,
    unembed=unembed,
    reduction=None,
    cache_dtype=dtype,
  )


def from_tensors(
  config: ModelConfig,
  tensors: Iterable[tuple[str, np.ndarray]],
  *,
  dtype: str = "float32",
  target: Target | None = None,
) -> Model:
  """A model from named tensors, each placed on `target` as it comes; None leaves them on the host.

  A mesh gets each parameter split by `model.AXIS_RULES`, cast to `dtype` shard by shard, so that
  the host holds one tensor at a time. Norms, softmax and logits are computed in float32.

  Raises:
    ValueError: the names of all tensors that are missing, unknown or of another shape.
  """
  _, _, names, axes, shapes = _abstract(config)
  wanted, placed, seen = dict(zip(names, zip(axes, shapes))), {}, {}
  for name, array in tensors:
    seen[name] = array.shape
    own_axes, shape = wanted.get(name, (None, None))
    if array.shape == shape:
      placed[name] = place(config, own_axes, array, dtype, target)
    del array  # before the next one is read
  check_shapes(config, seen)
  return build(config, tuple(placed[name] for name in names), dtype=dtype)


def from_arrays(
  config: ModelConfig,
  arrays: Mapping[str, np.ndarray],
  *,
  dtype: str = "float32",
  target: Target | None = None,
) -> Model:
  """As `from_tensors`, from a dict that holds all of them."""
  return from_tensors(config, arrays.items(), dtype=dtype, target=target)


def random_arrays(config: ModelConfig, seed: int) -> dict[str, np.ndarray]:
  """Random parameters for `from_arrays`: the same for the same config and seed.

  Matrices keep the scale of what they multiply; the unembedding is larger, so that logits have a
  standard deviation of 10 and the two largest rarely lie close.
  """
  rng = np.random.default_rng(seed)
  _, _, names, axes, shapes = _abstract(config)
  arrays = {}
  for name, letters, shape in zip(names, axes, shapes):
    if name.endswith("scale"):
      arrays[name] = np.ones(shape, np.float32)
      continue
    if "->" not in letters:
      arrays[name] = rng.standard_normal(shape, np.float32) * np.float32(_RANDOM_BIAS_STD)
      continue
    fan_in = [_sizes(config)[letter] for letter in letters.split("->")[0].split()]
    scale = 1 / np.sqrt(np.prod(fan_in))
    if name == "embedding":
      scale = _RANDOM_LOGIT_STD / np.sqrt(config.d_model) if config.tie_embeddings else 1.0
    elif name == "unembedding":
      scale *= _RANDOM_LOGIT_STD
    arrays[name] = rng.standard_normal(shape, np.float32) * np.float32(scale)
  return arrays
