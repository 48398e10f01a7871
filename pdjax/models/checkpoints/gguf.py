"""GGUF files, through the `gguf` package (extra `[hf]`): llama models, plain or quantised."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from pdjax.core.model_config import ModelConfig, RopeScaling
from pdjax.models.checkpoints.checkpoint import (
  Checkpoint,
  differences,
  from_stored,
  refuse_non_finite,
  split_layer,
  stored_shape,
  streamed,
)
from pdjax.models.transformer import param_shapes, scale_frequencies

ARCHITECTURES = ("llama",)
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")

_ROPE_FACTORS = "rope_freqs.weight"  # what the frequencies of a Llama 3.1 are divided by
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_len": 8192}
_VALUES_AT_ONCE = 1 << 22  # de-quantising needs several times the memory of what comes out

_NAMES = {
  "embedding": "token_embd.weight",
  "final_norm.scale": "output_norm.weight",
  "unembedding": "output.weight",
  "attention_norm.scale": "blk.{}.attn_norm.weight",
  "attention.q": "blk.{}.attn_q.weight",
  "attention.k": "blk.{}.attn_k.weight",
  "attention.v": "blk.{}.attn_v.weight",
  "attention.o": "blk.{}.attn_output.weight",
  "mlp_norm.scale": "blk.{}.ffn_norm.weight",
  "mlp.gate": "blk.{}.ffn_gate.weight",
  "mlp.up": "blk.{}.ffn_up.weight",
  "mlp.down": "blk.{}.ffn_down.weight",
}


def _open(path: pathlib.Path):
  try:
    from gguf import GGUFReader
  except ImportError as error:
    raise ImportError(
      "reading a GGUF file needs the extra [hf]: pip install 'pdjax[hf]'"
    ) from error

  class Reader(GGUFReader):
    def _build_tensors(self, start_offs, fields):
      """As the base class, but an error names the tensor."""
      tensors = {}
      for field in fields:
        try:
          super()._build_tensors(start_offs, [field])
        except Exception as error:
          raise ValueError(f"tensor {field.name}: {error}") from error
        if field.name in tensors:
          raise ValueError(f"tensor {field.name} appears twice")
        tensors[field.name] = self.tensors[0]
      self.tensors = list(tensors.values())

  return Reader(path)


def _config(path: pathlib.Path, reader, shapes: dict[str, tuple[int, ...]]) -> ModelConfig:
  def get(key: str, default: Any = None) -> Any:
    field = reader.get_field(key)
    if field is None:
      if default is None:
        raise ValueError(f"field {key} is missing")
      return default
    return field.contents()

  architecture = get("general.architecture")
  if architecture not in ARCHITECTURES:
    raise ValueError(
      f"architecture {architecture!r} is not supported (supported: {', '.join(ARCHITECTURES)})"
    )
  if "token_embd.weight" not in shapes:
    raise ValueError("tensor token_embd.weight is missing")
  vocab_size, d_model = shapes["token_embd.weight"]
  num_heads = int(get("llama.attention.head_count"))
  head_dim = int(get("llama.attention.key_length", d_model // num_heads))
  num_turned = int(get("llama.rope.dimension_count", head_dim))
  if num_turned != head_dim:
    raise ValueError(f"llama.rope.dimension_count={num_turned} of {head_dim} is not supported")
  theta = float(get("llama.rope.freq_base", 10_000.0))
  # As llama.cpp reads it: without a type a factor is linear; files of 2023 have it by another name.
  factor = get("llama.rope.scaling.factor", get("llama.rope.scale_linear", 0.0))
  kind = get("llama.rope.scaling.type", "linear" if factor else "none")
  if kind == "linear":
    scaling = RopeScaling(kind="linear", factor=float(factor or get("llama.rope.scaling.factor")))
  elif kind != "none":
    raise ValueError(f"RoPE scaling {kind!r} is not supported (supported: none, linear)")
  elif _ROPE_FACTORS in shapes:
    (tensor,) = (t for t in reader.tensors if t.name == _ROPE_FACTORS)
    scaling = _llama3_scaling(np.asarray(tensor.data, np.float64), theta, head_dim)
  else:
    scaling = None
  return ModelConfig(
    name=get("general.name", path.stem),
    num_layers=int(get("llama.block_count")),
    d_model=d_model,
    num_heads=num_heads,
    num_kv_heads=int(get("llama.attention.head_count_kv", num_heads)),
    head_dim=head_dim,
    d_ff=int(get("llama.feed_forward_length")),
    vocab_size=vocab_size,
    max_len=int(get("llama.context_length")),
    tie_embeddings="output.weight" not in shapes,
    rope_theta=theta,
    rope_scaling=scaling,
    norm_eps=float(get("llama.attention.layer_norm_rms_epsilon")),
  )


def _llama3_scaling(factors: np.ndarray, theta: float, head_dim: int) -> RopeScaling:
  """The scaling whose divisors of frequencies are `factors`: those of Llama 3.1 and 3.2."""
  scaling = RopeScaling(kind="llama3", factor=float(factors.max()), **_LLAMA3_ROPE)
  frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
  wanted = frequencies / scale_frequencies(frequencies, scaling)
  if factors.shape != wanted.shape or not np.allclose(factors, wanted, rtol=1e-4):
    raise ValueError(f"tensor {_ROPE_FACTORS}: not the RoPE scaling of Llama 3.1")
  return scaling


def _wanted(config: ModelConfig) -> dict[str, str]:
  """The tensors that a file must have -> the parameter that each becomes."""
  wanted = {}
  for name in param_shapes(config):
    layer, kind = split_layer(name)
    wanted[_NAMES[kind].format(layer)] = name
  return wanted


def _values(tensor) -> np.ndarray:
  """The values of a tensor, in float32 unless it is stored plainly."""
  from gguf import dequantize

  kind = tensor.tensor_type
  if kind.name in ("F32", "F16"):
    return tensor.data
  shape = tuple(int(n) for n in reversed(tensor.shape))
  values = np.empty(shape, np.float32)
  num_rows = max(1, _VALUES_AT_ONCE // shape[-1])
  for row in range(0, shape[0], num_rows):
    values[row : row + num_rows] = dequantize(tensor.data[row : row + num_rows], kind)
  return values


def _half_split(stored: np.ndarray, head_dim: int) -> np.ndarray:
  """Rows of q or k: GGUF has the pairs (2i, 2i + 1) of a head where pdjax has (i, i + h / 2)."""
  num_rows, d_model = stored.shape
  pairs = stored.reshape(-1, head_dim // 2, 2, d_model)
  return pairs.swapaxes(1, 2).reshape(num_rows, d_model)


def _read_header(path: pathlib.Path, check_weights: bool) -> tuple[ModelConfig, Callable]:
  reader = _open(path)
  for tensor in reader.tensors:
    kind = tensor.tensor_type.name
    if kind not in TYPES:
      raise ValueError(
        f"tensor {tensor.name} of type {kind} is not supported (supported: {', '.join(TYPES)})"
      )
  found = {t.name: tuple(int(n) for n in reversed(t.shape)) for t in reader.tensors}
  config = _config(path, reader, found)
  found.pop(_ROPE_FACTORS, None)
  wanted, shapes = _wanted(config), param_shapes(config)
  problems = differences({n: stored_shape(p, shapes[p]) for n, p in wanted.items()}, found)
  if problems:
    raise ValueError(f"not the tensors of the llama model that its fields describe: {problems}")

  def read() -> Iterator[tuple[str, np.ndarray]]:
    for tensor in reader.tensors:
      if tensor.name == _ROPE_FACTORS:
        continue
      name, stored = wanted[tensor.name], _values(tensor)
      if check_weights:
        refuse_non_finite(f"{path}: tensor {tensor.name}", stored)
      if name.endswith(("attention.q", "attention.k")):
        stored = _half_split(stored, config.head_dim)
      yield name, from_stored(name, stored, shapes[name])
      del stored

  return config, read


def open_gguf(path: str | pathlib.Path, *, check_weights: bool = False) -> Checkpoint:
  """Reads the fields and the header of a llama model, no weights.

  Raises:
    FileNotFoundError: no such file.
    ImportError: the `gguf` package is absent.
    ValueError: not a GGUF file, a damaged one, or a model that is not supported; with the file and,
      where there is one, the tensor.
  """
  path = pathlib.Path(path)
  if not path.is_file():
    raise FileNotFoundError(f"no GGUF file at {path}")
  try:
    config, read = _read_header(path, check_weights)
  except ImportError:
    raise
  except Exception as error:  # the reader fails in many ways on a damaged file
    raise ValueError(f"{path}: truncated, damaged or not supported: {error}") from error
  return streamed(path, config, read)
