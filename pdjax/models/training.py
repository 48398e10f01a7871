"""Next-token loss and optimizer: training runs the model that serving runs, under another `attend`."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from pdjax.models.attention import Attend
from pdjax.models.model import Model, Params


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
  """Attention within each of the equally long sequences that lie one after another in T; no cache."""

  def attend(q, k, v, layer_cache, window):
    q_, k_, v_ = (x.reshape(num_sequences, -1, *x.shape[1:]) for x in (q, k, v))
    local = None if window is None else (window - 1, 0)
    out = jax.nn.dot_product_attention(q_, k_, v_, is_causal=True, local_window_size=local)
    return out.reshape(q.shape), layer_cache

  return attend


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
