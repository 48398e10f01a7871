"""Hugging Face's config.json to a `ModelConfig`. Pure Python.

Keys that are absent get the defaults of transformers (as of 5.24), except for sizes: a file without
them says nothing about its model.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from pdjax.core.model_config import ModelConfig, RopeScaling

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "relu": "relu"}
_NEEDED: Any = object()
_FULL, _SLIDING = "full_attention", "sliding_attention"


class _Keys:
  """The keys of a config.json. Errors name the file and the key."""

  def __init__(self, where: str, values: Mapping[str, Any]):
    self.where, self._values = where, values

  def get(self, key: str, kind: Any, default: Any = _NEEDED, *, null: Any = _NEEDED) -> Any:
    """The value of `key`: `default` if absent, `null` (or else `default`) if null."""
    value = self._values.get(key)
    if value is None:
      value = null if key in self._values and null is not _NEEDED else default
      if value is _NEEDED:
        raise ValueError(f"{self.where}: key {key!r} is missing")
      return value
    if kind is float and type(value) is int:
      value = float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
      raise ValueError(f"{self.where}: {key}={value!r} is not of type {kind.__name__}")
    return value

  def size(self, key: str, default: Any = _NEEDED, **null: Any) -> int:
    return self.get(key, int, default, **null)

  def flag(self, key: str, default: bool) -> bool:
    return self.get(key, bool, default)

  def inner(self, key: str) -> _Keys | None:
    """The keys of the object `key`; None if absent, null or empty."""
    values = self.get(key, dict, None)
    return _Keys(f"{self.where}: {key}", values) if values else None

  def has(self, key: str) -> bool:
    return key in self._values

  def refuse(self, setting: str) -> ValueError:
    return ValueError(f"{self.where}: {setting} is not supported")


def read_hf_config(source: Mapping[str, Any] | str | os.PathLike) -> ModelConfig:
  """The shape of the model of a config.json, given as its path or as what it holds.

  Its name is that of its repository or folder.

  Raises:
    FileNotFoundError: no such file.
    ValueError: not JSON, a needed key is missing, or the architecture or a setting of it is not
      supported; with the file.
  """
  if isinstance(source, Mapping):
    keys, name = _Keys("config.json", source), str(source.get("model_type", "unnamed"))
  else:
    path = pathlib.Path(source)
    keys, name = _Keys(str(path), _read_json(path)), _name(path)
  architectures = keys.get("architectures", list)
  architecture = architectures[0] if len(architectures) == 1 else architectures
  if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
    raise ValueError(
      f"{keys.where}: architecture {architecture!r} is not supported (supported: "
      f"{', '.join(ARCHITECTURES)})"
    )
  fields = ARCHITECTURES[architecture](keys)
  try:
    return ModelConfig(name=name, **fields)
  except ValueError as error:
    raise ValueError(f"{keys.where}: {error}") from error


def _read_json(path: pathlib.Path) -> dict[str, Any]:
  try:
    values = json.loads(path.read_text("utf-8"))
  except ValueError as error:  # of JSON or of UTF-8
    raise ValueError(f"{path}: not JSON ({error})") from error
  if not isinstance(values, dict):
    raise ValueError(f"{path}: not a JSON object")
  return values


def _name(path: pathlib.Path) -> str:
  """Of org/name in a cache of huggingface_hub (models--org--name/snapshots/...) the name."""
  for folder in path.absolute().parents:
    if folder.name.startswith("models--"):
      return folder.name.rsplit("--", 1)[-1]
  return path.absolute().parent.name


def _activation(keys: _Keys, key: str, default: str) -> str:
  name = keys.get(key, str, default)
  if name not in _ACTIVATIONS:
    raise keys.refuse(f"{key}={name!r} (supported: {', '.join(_ACTIVATIONS)})")
  return _ACTIVATIONS[name]


def _head_dim(keys: _Keys, d_model: int, num_heads: int) -> int:
  if num_heads < 1 or d_model % num_heads:
    raise ValueError(
      f"{keys.where}: hidden_size={d_model} is no multiple of num_attention_heads={num_heads}"
    )
  return d_model // num_heads


def _rope(keys: _Keys, max_len: int) -> dict[str, Any]:
  """`rope_theta` and `rope_scaling`, from the keys of transformers 4 or from `rope_parameters`."""
  theta = keys.get("rope_theta", float, 10_000.0)
  whole = [keys.get("partial_rotary_factor", float, 1.0)]
  scaling = None
  rope = keys.inner("rope_scaling") or keys.inner("rope_parameters")
  if rope is not None:
    if rope.has(_FULL) or rope.has(_SLIDING):
      raise rope.refuse("a RoPE of its own for each type of layer")
    theta = rope.get("rope_theta", float, theta)
    whole.append(rope.get("partial_rotary_factor", float, 1.0))
    kind = rope.get("rope_type", str, None) or rope.get("type", str, "default")
    if kind != "default":
      scaling = _rope_scaling(keys, rope, kind, max_len)
  for factor in whole:
    if factor != 1:
      raise keys.refuse(f"partial_rotary_factor={factor}")
  return {"rope_theta": theta, "rope_scaling": scaling}


def _rope_scaling(keys: _Keys, rope: _Keys, kind: str, max_len: int) -> RopeScaling:
  if kind not in ("linear", "llama3"):
    raise keys.refuse(f"RoPE scaling {kind!r} (supported: default, linear, llama3)")
  fields = {"factor": rope.get("factor", float)}
  if kind == "llama3":
    original = rope.size("original_max_position_embeddings", max_len)
    fields |= {
      "low_freq_factor": rope.get("low_freq_factor", float),
      "high_freq_factor": rope.get("high_freq_factor", float),
      "original_max_len": keys.size("original_max_position_embeddings", original),
    }
  try:
    return RopeScaling(kind=kind, **fields)
  except ValueError as error:
    raise ValueError(f"{keys.where}: {error}") from error


def _window(keys: _Keys, window: int | None, first: int, num_layers: int) -> dict[str, Any]:
  """The layers with a sliding window must be the last ones: `first`, first + 1, ..."""
  if window is None:
    return {}
  kinds = keys.get("layer_types", list, None)
  if kinds is not None:
    first = kinds.index(_SLIDING) if _SLIDING in kinds else num_layers
    if kinds != [_FULL] * first + [_SLIDING] * (num_layers - first):
      raise keys.refuse(f"layer_types={kinds} (supported: {_FULL} first, then {_SLIDING})")
  if first >= num_layers:
    return {}
  return {"sliding_window": window, "first_window_layer": first}


def _gated(
  keys: _Keys,
  *,
  max_len: int,
  num_kv_heads: int | None = None,
  head_dim: int | None = None,
) -> dict[str, Any]:
  """What Llama, Mistral and Qwen share; the arguments are defaults of absent keys."""
  d_model, num_heads = keys.size("hidden_size"), keys.size("num_attention_heads")
  max_len = keys.size("max_position_embeddings", max_len)
  head_dim = keys.size("head_dim", head_dim, null=None)
  return {
    "num_layers": keys.size("num_hidden_layers"),
    "d_model": d_model,
    "num_heads": num_heads,
    "num_kv_heads": keys.size("num_key_value_heads", num_kv_heads, null=None) or num_heads,
    "head_dim": head_dim or _head_dim(keys, d_model, num_heads),
    "d_ff": keys.size("intermediate_size"),
    "vocab_size": keys.size("vocab_size"),
    "max_len": max_len,
    "norm_eps": keys.get("rms_norm_eps", float, 1e-6),
    "activation": _activation(keys, "hidden_act", "silu"),
    "tie_embeddings": keys.flag("tie_word_embeddings", False),
    **_rope(keys, max_len),
  }


def _llama(keys: _Keys) -> dict[str, Any]:
  has_bias = keys.flag("attention_bias", False)
  biases = {"qkv_bias": has_bias, "out_bias": has_bias, "mlp_bias": keys.flag("mlp_bias", False)}
  return _gated(keys, max_len=2048) | biases


def _mistral(keys: _Keys) -> dict[str, Any]:
  fields = _gated(keys, max_len=4096 * 32, num_kv_heads=8)
  window = keys.size("sliding_window", 4096, null=None)
  return fields | _window(keys, window, 0, fields["num_layers"])


def _qwen_window(keys: _Keys, num_layers: int) -> dict[str, Any]:
  window = keys.size("sliding_window", 4096, null=None)
  if not keys.flag("use_sliding_window", False):
    window = None
  return _window(keys, window, keys.size("max_window_layers", 28), num_layers)


def _qwen2(keys: _Keys) -> dict[str, Any]:
  fields = _gated(keys, max_len=32768, num_kv_heads=32)
  return fields | {"qkv_bias": True} | _qwen_window(keys, fields["num_layers"])


def _qwen3(keys: _Keys) -> dict[str, Any]:
  fields = _gated(keys, max_len=32768, num_kv_heads=32, head_dim=128)
  has_bias = keys.flag("attention_bias", False)
  fields |= {"qk_norm": True, "qkv_bias": has_bias, "out_bias": has_bias}
  return fields | _qwen_window(keys, fields["num_layers"])


def _opt(keys: _Keys) -> dict[str, Any]:
  d_model, num_heads = keys.size("hidden_size"), keys.size("num_attention_heads")
  for key, value in (
    ("do_layer_norm_before", True),
    ("layer_norm_elementwise_affine", True),
    ("_remove_final_layer_norm", False),
  ):
    if keys.flag(key, value) != value:
      raise keys.refuse(f"{key}={not value}")
  width = keys.size("word_embed_proj_dim", d_model)
  if width != d_model:
    raise keys.refuse(f"word_embed_proj_dim={width} other than hidden_size={d_model}")
  has_bias = keys.flag("enable_bias", True)
  return {
    "num_layers": keys.size("num_hidden_layers"),
    "d_model": d_model,
    "num_heads": num_heads,
    "num_kv_heads": num_heads,
    "head_dim": _head_dim(keys, d_model, num_heads),
    "d_ff": keys.size("ffn_dim"),
    "vocab_size": keys.size("vocab_size"),
    "max_len": keys.size("max_position_embeddings", 2048),
    "norm": "layer",
    "norm_eps": 1e-5,
    "position": "learned",
    "activation": _activation(keys, "activation_function", "relu"),
    "gated_mlp": False,
    "qkv_bias": has_bias,
    "out_bias": has_bias,
    "mlp_bias": has_bias,
    "tie_embeddings": keys.flag("tie_word_embeddings", True),
  }


def _falcon(keys: _Keys) -> dict[str, Any]:
  d_model = keys.size("n_embed", None) or keys.size("hidden_size")
  num_heads = keys.size("num_attention_heads")
  max_len = keys.size("max_position_embeddings", 2048)
  if keys.flag("alibi", False):
    raise keys.refuse("alibi=True")
  is_new = keys.flag("new_decoder_architecture", False)
  is_parallel = keys.flag("parallel_attn", True)
  if is_new and not is_parallel:  # transformers cannot run it either
    raise keys.refuse("parallel_attn=False with new_decoder_architecture=True")
  num_norms = keys.size("num_ln_in_parallel_attn", 2 if is_new else 1)
  if is_parallel and num_norms not in ((1, 2) if is_new else (1,)):
    raise keys.refuse(f"num_ln_in_parallel_attn={num_norms} with new_decoder_architecture={is_new}")
  if is_new:
    num_kv_heads = keys.size("num_kv_heads", num_heads)
  else:
    num_kv_heads = 1 if keys.flag("multi_query", True) else num_heads
  has_bias = keys.flag("bias", False)
  return {
    "num_layers": keys.size("num_hidden_layers"),
    "d_model": d_model,
    "num_heads": num_heads,
    "num_kv_heads": num_kv_heads,
    "head_dim": _head_dim(keys, d_model, num_heads),
    "d_ff": keys.size("ffn_hidden_size", 4 * d_model),
    "vocab_size": keys.size("vocab_size"),
    "max_len": max_len,
    "norm": "layer",
    "norm_eps": keys.get("layer_norm_epsilon", float, 1e-5),
    "activation": _activation(keys, "activation", "gelu"),
    "gated_mlp": False,
    "qkv_bias": has_bias,
    "out_bias": has_bias,
    "mlp_bias": has_bias,
    "parallel_residual": is_parallel,
    "shared_norm": is_parallel and num_norms == 1,
    "tie_embeddings": keys.flag("tie_word_embeddings", True),
    **_rope(keys, max_len),
  }


ARCHITECTURES: dict[str, Callable[[_Keys], dict[str, Any]]] = {
  "LlamaForCausalLM": _llama,
  "MistralForCausalLM": _mistral,
  "Qwen2ForCausalLM": _qwen2,
  "Qwen3ForCausalLM": _qwen3,
  "OPTForCausalLM": _opt,
  "FalconForCausalLM": _falcon,
}
