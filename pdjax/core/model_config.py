"""The shape of a transformer: what the engine builds and what costs are computed from."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
  """A decoder-only transformer.

  `gated_mlp`: gate, up and down matrices (SwiGLU) instead of up and down. `family` names the
  architecture; the engine runs `llama`, the latency models take any.

  Raises:
    ValueError: heads that are no multiple of kv heads, or a size below 1.
  """

  name: str
  family: str = "llama"
  num_layers: int
  d_model: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  d_ff: int
  vocab_size: int
  max_len: int  # longest sequence it was trained for
  gated_mlp: bool = True
  tie_embeddings: bool = False
  rope_theta: float = 10_000.0
  norm_eps: float = 1e-5

  def __post_init__(self):
    for field in ("num_layers", "d_model", "num_heads", "num_kv_heads", "head_dim", "d_ff",
                  "vocab_size", "max_len"):  # fmt: skip
      if getattr(self, field) < 1:
        raise ValueError(f"model {self.name}: {field}={getattr(self, field)} must be at least 1")
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f"model {self.name}: num_heads={self.num_heads} is no multiple of "
        f"num_kv_heads={self.num_kv_heads}"
      )

  @property
  def attention_params(self) -> int:
    """Parameters of the four attention matrices of one layer."""
    return 2 * self.d_model * (self.num_heads + self.num_kv_heads) * self.head_dim

  @property
  def mlp_params(self) -> int:
    """Parameters of the two or three MLP matrices of one layer."""
    return (3 if self.gated_mlp else 2) * self.d_model * self.d_ff

  @property
  def num_params(self) -> int:
    """All weights, embeddings included; norms and biases (under 0.1 %) left out."""
    embeddings = (1 if self.tie_embeddings else 2) * self.vocab_size * self.d_model
    return self.num_layers * (self.attention_params + self.mlp_params) + embeddings

  def kv_bytes_per_token(self, bytes_per_value: int = 2) -> int:
    """Bytes of K and V of one token over all layers."""
    return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_value


TINY = ModelConfig(
  name="tiny",
  num_layers=4,
  d_model=128,
  num_heads=8,
  num_kv_heads=2,
  head_dim=16,
  d_ff=384,
  vocab_size=512,
  max_len=4096,
)
"""Starts on a laptop in seconds, yet a long prefill outlasts a decode by far."""
