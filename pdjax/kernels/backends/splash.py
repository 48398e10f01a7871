"""Prompts that begin in this step, on TPUs: the splash attention that comes with JAX.

All keys of such a step are in the step itself, K and V `[T, K, h]`, so no page is read. Slices are
the segments of one causal mask over T: blocks above the diagonal or beyond a window are left out,
those between two slices are computed and masked.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from pdjax.kernels.slices import Slices
from pdjax.kernels.tile_config import Case, Chip, TileConfig

_LANES = 128  # blocks of keys are multiples of it


def refuses(case: Case, chip: Chip) -> str | None:
  """Why the kernel cannot serve a case, or None."""
  if chip.platform != "tpu":
    return f"it is for TPUs, not for a {chip.platform}"
  if case.kernel != "fresh":
    return "it reads no pages"
  if case.dtype not in ("bfloat16", "float32"):
    return f"queries of {case.dtype}"
  return None


def default(case: Case, chip: Chip) -> TileConfig:
  """Blocks of one head. Not measured on a TPU."""
  return TileConfig(backend="splash", block_q=512, block_k=512)


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
  """Attends prompts that begin in this step; something finite in places of no slice."""
  num_tokens, num_heads, _ = q.shape
  length = -(-num_tokens // _LANES) * _LANES
  q = (q.astype(jnp.float32) * scale).astype(q.dtype)  # the kernel has no scale
  by_head = (
    jnp.pad(x, ((0, length - num_tokens), (0, 0), (0, 0))).swapaxes(0, 1) for x in (q, k, v)
  )
  if window is None:
    mask = masks.CausalMask((length, length))
  else:
    mask = masks.LocalMask((length, length), window_size=(window - 1, 0), offset=0)
  attend = splash.make_splash_mha(
    masks.MultiHeadMask([mask] * num_heads),
    block_sizes=splash.BlockSizes(
      block_q=math.gcd(length, config.block_q), block_kv=math.gcd(length, config.block_k)
    ),
    attn_logits_soft_cap=soft_cap,
    head_shards=1,
    q_seq_shards=1,
    interpret=config.interpret,
  )
  segments = _segments(slices, length)
  out = attend(*by_head, segment_ids=splash.SegmentIds(q=segments, kv=segments))
  return out.swapaxes(0, 1)[:num_tokens]


def _segments(slices: Slices, num_tokens: int) -> jax.Array:  # [T] int32
  """The slice of each token; B, a segment of its own, for those of none."""
  tokens = jnp.arange(num_tokens)[:, None]
  own = (tokens >= slices.starts) & (tokens < slices.starts + slices.lengths)  # [T, B]
  return jnp.where(own.any(1), own.argmax(1), len(slices.starts)).astype(jnp.int32)
