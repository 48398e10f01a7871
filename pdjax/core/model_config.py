"""The shape of a transformer: what the engine builds and what costs are computed from."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
  """How RoPE frequencies are changed for contexts longer than those of pre-training.

  `linear` divides all by `factor` (Chen et al. 2023). `llama3` divides those whose wavelength is
  above `original_max_len / low_freq_factor`, keeps those below `original_max_len /
  high_freq_factor`, and goes over smoothly between (Llama 3.1's rule).

  Raises:
    ValueError: an unknown kind, or a value outside its range.
  """

  kind: str
  factor: float
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  original_max_len: int = 8192

  def __post_init__(self):
    if self.kind not in ("linear", "llama3"):
      raise ValueError(f"RoPE scaling {self.kind!r} is not supported (supported: linear, llama3)")
    for field in ("factor", "low_freq_factor", "original_max_len"):
      if not getattr(self, field) > 0:
        raise ValueError(f"RoPE scaling: {field}={getattr(self, field)} must be positive")
    if self.high_freq_factor <= self.low_freq_factor:
      raise ValueError(
        f"RoPE scaling: high_freq_factor={self.high_freq_factor} must be above "
        f"low_freq_factor={self.low_freq_factor}"
      )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
  """A decoder-only transformer. What tells families apart is here, not in copies of the model.

  `gated_mlp`: gate, up and down matrices (SwiGLU) instead of up and down. `parallel_residual`:
  attention and MLP read the same residual and are added together (Falcon); with `shared_norm`
  through one norm. `sliding_window`: a token sees so many, itself included, in the layers from
  `first_window_layer` on. `qk_norm`: an RMSNorm of each head of q and k before RoPE (Qwen 3).

  Raises:
    ValueError: heads that are no multiple of kv heads, a size below 1, a `norm_eps` or `rope_theta`
      that is not positive, or an unknown choice.
  """

  name: str
  num_layers: int
  d_model: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  d_ff: int
  vocab_size: int
  max_len: int  # longest sequence it was trained for
  norm: str = "rms"  # rms, layer
  norm_eps: float = 1e-5
  position: str = "rope"  # rope, learned
  rope_theta: float = 10_000.0
  rope_scaling: RopeScaling | None = None
  activation: str = "silu"  # silu, gelu (exact), relu
  gated_mlp: bool = True
  qkv_bias: bool = False
  out_bias: bool = False  # of attention's output matrix
  mlp_bias: bool = False
  qk_norm: bool = False
  parallel_residual: bool = False
  shared_norm: bool = False
  sliding_window: int | None = None
  first_window_layer: int = 0
  tie_embeddings: bool = False

  def __post_init__(self):
    for field in ("num_layers", "d_model", "num_heads", "num_kv_heads", "head_dim", "d_ff",
                  "vocab_size", "max_len"):  # fmt: skip
      if getattr(self, field) < 1:
        raise ValueError(f"model {self.name}: {field}={getattr(self, field)} must be at least 1")
    for field in ("norm_eps", "rope_theta"):
      if not 0 < getattr(self, field) < math.inf:
        raise ValueError(
          f"model {self.name}: {field}={getattr(self, field)} must be positive and finite"
        )
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f"model {self.name}: num_heads={self.num_heads} is no multiple of "
        f"num_kv_heads={self.num_kv_heads}"
      )
    for field, choices in (
      ("norm", ("rms", "layer")),
      ("position", ("rope", "learned")),
      ("activation", ("silu", "gelu", "relu")),
    ):
      if getattr(self, field) not in choices:
        raise ValueError(
          f"model {self.name}: {field}={getattr(self, field)!r} must be one of {choices}"
        )
    if self.position == "rope" and self.head_dim % 2:
      raise ValueError(f"model {self.name}: head_dim={self.head_dim} must be even for RoPE")
    if self.shared_norm and not self.parallel_residual:
      raise ValueError(f"model {self.name}: shared_norm needs parallel_residual")
    if self.sliding_window is not None and self.sliding_window < 1:
      raise ValueError(f"model {self.name}: sliding_window={self.sliding_window} must be positive")

  @classmethod
  def from_hf(cls, source: Mapping[str, Any] | str | os.PathLike) -> ModelConfig:
    """The model of a Hugging Face config.json, given as its path or as what it holds.

    Raises:
      ValueError: an architecture or a setting that is not supported, or a key that is missing.
    """
    from pdjax.core.hf_config import read_hf_config

    return read_hf_config(source)

  def window(self, layer: int) -> int | None:
    """How many tokens a token of `layer` sees, itself included; None for all."""
    return self.sliding_window if layer >= self.first_window_layer else None

  def check_split(self, tp: int) -> None:
    """Whether the model can be split over `tp` devices.

    Raises:
      ValueError: `tp` divides not the heads, not the MLP, or neither divides nor is divided by the
        kv heads.
    """
    for field in ("num_heads", "d_ff"):
      if getattr(self, field) % tp:
        raise ValueError(
          f"model {self.name}: {field}={getattr(self, field)} is no multiple of the {tp} devices "
          f"of tensor parallelism"
        )
    if self.num_kv_heads % tp and tp % self.num_kv_heads:
      raise ValueError(
        f"model {self.name}: num_kv_heads={self.num_kv_heads} can neither be split over {tp} "
        f"devices of tensor parallelism nor copied evenly to them"
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
  vocab_size=1024,
  max_len=2048,
  tie_embeddings=True,
)
"""The model that `experiments.train_tiny` makes, whose weights are in `pdjax/models/tiny`."""
