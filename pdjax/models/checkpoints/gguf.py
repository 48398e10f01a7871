"""GGUF files to named float32 arrays, through the `gguf` package (extra `[hf]`)."""

from __future__ import annotations

import pathlib
import re

import numpy as np

from pdjax.core.model_config import ModelConfig

ARCHITECTURES = ("llama",)

_NAMES = {
  "token_embd.weight": "embedding",
  "output_norm.weight": "final_norm.scale",
  "output.weight": "unembedding",
}
_BLOCK_NAMES = {
  "attn_norm.weight": "attention_norm.scale",
  "attn_q.weight": "attention.q",
  "attn_k.weight": "attention.k",
  "attn_v.weight": "attention.v",
  "attn_output.weight": "attention.o",
  "ffn_norm.weight": "mlp_norm.scale",
  "ffn_gate.weight": "mlp.gate",
  "ffn_up.weight": "mlp.up",
  "ffn_down.weight": "mlp.down",
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
      tensors = []
      for field in fields:
        try:
          super()._build_tensors(start_offs, [field])
        except Exception as error:
          raise ValueError(f"tensor {field.name}: {error}") from error
        tensors += self.tensors
      self.tensors = tensors

  return Reader(path)


def _pdjax_name(name: str) -> str:
  if name in _NAMES:
    return _NAMES[name]
  match = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
  if match and match[2] in _BLOCK_NAMES:
    return f"blocks.{match[1]}.{_BLOCK_NAMES[match[2]]}"
  raise ValueError(f"tensor {name}: not part of a llama model that pdjax can run")


def _to_pdjax(name: str, weights: np.ndarray, config: ModelConfig) -> np.ndarray:
  """From [out, in] with interleaved RoPE pairs to [in, out] with half-split pairs."""
  h = config.head_dim
  kind = name.rsplit(".", 1)[-1]
  if kind in ("q", "k"):  # GGUF has the pairs (2i, 2i + 1) of a head where pdjax has (i, i + h / 2)
    weights = weights.reshape(-1, h // 2, 2, config.d_model).swapaxes(1, 2)
  if kind in ("q", "k", "v"):
    return np.ascontiguousarray(weights.reshape(-1, h, config.d_model).transpose(2, 0, 1))
  if kind == "o":
    return np.ascontiguousarray(weights.T).reshape(-1, h, config.d_model)
  if kind in ("gate", "up", "down", "unembedding"):
    return np.ascontiguousarray(weights.T)
  return weights


def _config(path: pathlib.Path, reader) -> ModelConfig:
  def get(key, default=None):
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
  scaling = get("llama.rope.scaling.type", "none")
  if scaling != "none":
    raise ValueError(f"RoPE scaling {scaling!r} is not supported (supported: none)")
  shapes = {t.name: tuple(int(n) for n in reversed(t.shape)) for t in reader.tensors}
  if "token_embd.weight" not in shapes:
    raise ValueError("tensor token_embd.weight is missing")
  vocab_size, d_model = shapes["token_embd.weight"]
  num_heads = int(get("llama.attention.head_count"))
  return ModelConfig(
    name=get("general.name", path.stem),
    family="llama",
    num_layers=int(get("llama.block_count")),
    d_model=d_model,
    num_heads=num_heads,
    num_kv_heads=int(get("llama.attention.head_count_kv", num_heads)),
    head_dim=int(get("llama.attention.key_length", d_model // num_heads)),
    d_ff=int(get("llama.feed_forward_length")),
    vocab_size=vocab_size,
    max_len=int(get("llama.context_length")),
    tie_embeddings="output.weight" not in shapes,
    rope_theta=float(get("llama.rope.freq_base", 10_000.0)),
    norm_eps=float(get("llama.attention.layer_norm_rms_epsilon")),
  )


def _array(tensor, config: ModelConfig) -> tuple[str, np.ndarray]:
  from gguf import dequantize

  name = _pdjax_name(tensor.name)
  try:
    weights = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
    if not np.isfinite(weights).all():
      raise ValueError("holds values that are not finite")
    return name, _to_pdjax(name, weights, config)
  except (ValueError, NotImplementedError) as error:
    raise ValueError(f"tensor {tensor.name}: {error}") from error


def load_gguf(path: str | pathlib.Path) -> tuple[ModelConfig, dict[str, np.ndarray]]:
  """Reads a llama model: its shape, and its tensors in float32 as `transformer.from_arrays` wants.

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
    reader = _open(path)
    config = _config(path, reader)
    return config, dict(_array(tensor, config) for tensor in reader.tensors)
  except ImportError:
    raise
  except Exception as error:  # the reader fails in many ways on a damaged file
    raise ValueError(f"{path}: truncated, damaged or not supported: {error}") from error
