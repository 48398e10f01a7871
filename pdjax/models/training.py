"""Next-token loss and optimizer: training runs the model that serving runs, without a cache."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from pdjax.models.attention import Attend
from pdjax.models.model import Model, Params

# Steps of the tiny model on 2 AVX-512 cores: 8 sequences of 256 tokens take as long with blocks of
# 64, one of 2,048 a quarter longer, and half as long again to compile. One block for all queries
# reads twice the keys; the attention of 256 tokens then takes three times as long.
_QUERY_BLOCK = 128


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
  """AdamW with a linear warm-up, then a cosine to zero at `num_steps`.

  Raises:
    ValueError: a value outside its range, with the value.
  """

  num_steps: int
  num_warmup_steps: int
  peak_rate: float
  weight_decay: float
  max_grad_norm: float

  def __post_init__(self):
    if not 0 <= self.num_warmup_steps < self.num_steps:
      raise ValueError(
        f"num_warmup_steps={self.num_warmup_steps} must be 0 or more, and fewer than the "
        f"{self.num_steps} steps"
      )
    for field in ("peak_rate", "max_grad_norm"):
      if not getattr(self, field) > 0:
        raise ValueError(f"{field}={getattr(self, field)} must be positive")
    if not self.weight_decay >= 0:
      raise ValueError(f"weight_decay={self.weight_decay} must be 0 or positive")

  def rate(self, step: int | jax.Array) -> jax.Array:
    """The learning rate of a step."""
    return optax.warmup_cosine_decay_schedule(
      0.0, self.peak_rate, self.num_warmup_steps, self.num_steps
    )(step)


def causal_attend(num_sequences: int) -> Attend:
  """Attention within each of the equally long sequences that follow each other in T; no cache."""

  def attend(q, k, v, layer_cache, window):
    num_heads, head_dim = q.shape[-2:]
    k, v = (jnp.repeat(x, num_heads // x.shape[-2], axis=-2) for x in (k, v))
    q_, k, v = (x.reshape(num_sequences, -1, num_heads, head_dim).swapaxes(1, 2) for x in (q, k, v))
    num_tokens = q_.shape[-2]
    out = [
      _attend_block(q_, k, v, lo, min(lo + _QUERY_BLOCK, num_tokens), window)
      for lo in range(0, num_tokens, _QUERY_BLOCK)
    ]
    return jnp.concatenate(out, axis=-2).swapaxes(1, 2).reshape(q.shape), layer_cache

  return attend


def _attend_block(q, k, v, lo, hi, window):  # [B, H, S, h] -> [B, H, hi - lo, h]
  """The queries of positions [lo, hi) over the keys that any of them sees."""
  first = 0 if window is None else max(0, lo - window + 1)
  q, k, v = q[..., lo:hi, :], k[..., first:hi, :], v[..., first:hi, :]
  scores = jnp.einsum("bhqd,bhkd->bhqk", q, k, preferred_element_type=jnp.float32)
  distances = jnp.arange(lo, hi)[:, None] - jnp.arange(first, hi)
  is_seen = distances >= 0 if window is None else (distances >= 0) & (distances < window)
  scores = scores * q.shape[-1] ** -0.5 + jnp.where(is_seen, 0.0, -jnp.inf)
  # Divided after the sum over keys, which halves the time of jax.nn.softmax.
  weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
  out = jnp.einsum("bhqk,bhkd->bhqd", weights.astype(v.dtype), v)
  return out / weights.sum(-1, keepdims=True).astype(v.dtype)


def token_losses(
  model: Model,
  params: Params,
  ids: jax.Array,  # [B, S + 1]
) -> jax.Array:  # [B, S], in nats
  """Minus the log probability of each token but the first of its row, given those before it."""
  num_sequences, num_tokens = ids[:, :-1].shape
  positions = jnp.tile(jnp.arange(num_tokens), num_sequences)
  no_cache = (None,) * model.config.num_layers
  attend = causal_attend(num_sequences)
  hidden, _ = model.forward(params, ids[:, :-1].reshape(-1), positions, no_cache, attend)
  logits = model.unembed(params, hidden)
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:].reshape(-1))
  return losses.reshape(num_sequences, num_tokens)


def make_optimizer(model: Model, schedule: Schedule) -> optax.GradientTransformation:
  """Clips by the global norm; decays matrices alone, not norms, biases or the embedding."""
  is_decayed = tuple(
    "->" in axes and name != "embedding" for name, axes in zip(model.param_names, model.param_axes)
  )
  return optax.chain(
    optax.clip_by_global_norm(schedule.max_grad_norm),
    optax.adamw(schedule.rate, b2=0.99, weight_decay=schedule.weight_decay, mask=is_decayed),
  )


def train_step(
  model: Model,
  optimizer: optax.GradientTransformation,
  params: Params,
  optimizer_state: Any,
  ids: jax.Array,  # [B, S + 1]
) -> tuple[Params, Any, jax.Array]:
  """One update; returns the mean loss before it. To be jitted by the caller, with donation."""
  loss, grads = jax.value_and_grad(lambda p: token_losses(model, p, ids).mean())(params)
  updates, optimizer_state = optimizer.update(grads, optimizer_state, params)
  return optax.apply_updates(params, updates), optimizer_state, loss
