"""Prompts that begin in this step, on GPUs: the library that JAX's own GPU kernels point to.

All keys of such a step are in the step itself, K and V `[T, K, h]`, so no page is read. Slices are
told apart by the first key that each token sees, so that blocks of keys before it are left out. The
public `tokamax.dot_product_attention` has no such bound, only boolean masks of T x T, which leave
nothing out: hence what lies under it, and a pinned version.

Of pages tokamax 0.0.17 serves none on a GPU: its Mosaic and Triton kernels raise on a `PagingInfo`.
Chunks and decodes would do where their contexts were gathered side by side, since `k_start` and
`k_end` bound the keys of each token; that copy is what paged kernels save.
"""

from __future__ import annotations

import functools
import importlib.util

import jax
import jax.numpy as jnp

from pdjax.kernels.slices import Slices
from pdjax.kernels.tile_config import Case, Chip, TileConfig


def refuses(case: Case, chip: Chip) -> str | None:
  """Why the library cannot serve a case, or None."""
  if importlib.util.find_spec("tokamax") is None:
    return "tokamax is not installed"
  if chip.platform != "gpu":
    return f"it is for GPUs, not for a {chip.platform}"
  if (chip.compute_capability or 0) < 8:
    return f"needs compute capability 8.0, not {chip.compute_capability}"
  if case.kernel != "fresh":
    return "it reads no pages"
  if case.dtype not in ("bfloat16", "float16"):
    return f"queries of {case.dtype}"
  return None


def default(case: Case, chip: Chip) -> TileConfig:
  """Names the library, which cuts tiles by its own rules."""
  return TileConfig(backend="tokamax")


@functools.partial(
  jax.jit, static_argnames=("window", "soft_cap", "scale", "config")
)  # so that layers of equal shapes trace and lower once
def attend_fresh(
  q: jax.Array,  # [T, H, h]
  k: jax.Array,  # [T, K, h]
  v: jax.Array,  # [T, K, h]
  slices: Slices,  # with offsets of 0; their tables are not read
  *,
  window: int | None,
  soft_cap: float | None,
  scale: float,
  config: TileConfig,
) -> jax.Array:  # [T, H, h]
  """Attends prompts that begin in this step; something finite in places of no slice.

  `config.interpret` takes the library's plain XLA, which runs on a CPU.

  Raises:
    NotImplementedError: the library has no kernel for this case on this device.
  """
  from tokamax._src.ops.attention import api, base  # the extra [gpu]

  num_tokens, _, _ = q.shape
  mask = base.Mask(
    causal_mask=base.CausalMask(window_size=window),
    k_start=_first_keys(slices, num_tokens)[None],
  )
  names = ("xla",) if config.interpret else ("mosaic_gpu", "triton")
  reasons = []
  for name in names:
    try:
      attend = api.IMPLEMENTATIONS[name]
      return attend(q, k, v, mask=mask, logits_scale=scale, logits_soft_cap=soft_cap)
    except NotImplementedError as error:
      reasons.append(f"{name}: {error}")
  raise NotImplementedError("; ".join(reasons))


def _first_keys(slices: Slices, num_tokens: int) -> jax.Array:  # [T] int32
  """The first token of each token's slice; itself for a token of none, which then sees itself."""
  tokens = jnp.arange(num_tokens, dtype=jnp.int32)
  index = tokens[:, None] - slices.starts
  own = (index >= 0) & (index < slices.lengths)  # [T, B]
  return jnp.where(own.any(1), slices.starts[own.argmax(1)], tokens)
