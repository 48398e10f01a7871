"""Folders as on Hugging Face: config.json and safetensors, in one file or several with an index.

The format is read here and not through the `safetensors` package, whose errors name no tensor. A
file is a little-endian uint64, so many bytes of JSON (name -> dtype, shape, where its bytes begin
and end), then the bytes.
"""

from __future__ import annotations

import json
import math
import mmap
import pathlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import ml_dtypes
import numpy as np

from pdjax.core.model_config import ModelConfig
from pdjax.models.checkpoints.checkpoint import (
  Checkpoint,
  differences,
  from_stored,
  refuse_non_finite,
  split_layer,
  stored_shape,
  streamed,
  without_layer,
)
from pdjax.models.transformer import param_shapes

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

_DTYPES = {
  "F32": np.dtype(np.float32),
  "F16": np.dtype(np.float16),
  "BF16": np.dtype(ml_dtypes.bfloat16),
}
_OPT_UNUSED_POSITIONS = 2  # OPT's position p is row p + 2 of its table
_HARMLESS = re.compile(r".*rotary_emb\.inv_freq|.*decoder\.version")  # old buffers, no weights

# pdjax's name -> the name in the file; biases follow from their matrices and norms.
_GATED = {
  "embedding": "model.embed_tokens.weight",
  "final_norm.scale": "model.norm.weight",
  "unembedding": "lm_head.weight",
  "attention_norm.scale": "model.layers.{}.input_layernorm.weight",
  "attention.q": "model.layers.{}.self_attn.q_proj.weight",
  "attention.k": "model.layers.{}.self_attn.k_proj.weight",
  "attention.v": "model.layers.{}.self_attn.v_proj.weight",
  "attention.o": "model.layers.{}.self_attn.o_proj.weight",
  "attention.q_norm.scale": "model.layers.{}.self_attn.q_norm.weight",
  "attention.k_norm.scale": "model.layers.{}.self_attn.k_norm.weight",
  "mlp_norm.scale": "model.layers.{}.post_attention_layernorm.weight",
  "mlp.gate": "model.layers.{}.mlp.gate_proj.weight",
  "mlp.up": "model.layers.{}.mlp.up_proj.weight",
  "mlp.down": "model.layers.{}.mlp.down_proj.weight",
}
_OPT = {
  "embedding": "model.decoder.embed_tokens.weight",
  "position_embedding": "model.decoder.embed_positions.weight",
  "final_norm.scale": "model.decoder.final_layer_norm.weight",
  "unembedding": "lm_head.weight",
  "attention_norm.scale": "model.decoder.layers.{}.self_attn_layer_norm.weight",
  "attention.q": "model.decoder.layers.{}.self_attn.q_proj.weight",
  "attention.k": "model.decoder.layers.{}.self_attn.k_proj.weight",
  "attention.v": "model.decoder.layers.{}.self_attn.v_proj.weight",
  "attention.o": "model.decoder.layers.{}.self_attn.out_proj.weight",
  "mlp_norm.scale": "model.decoder.layers.{}.final_layer_norm.weight",
  "mlp.up": "model.decoder.layers.{}.fc1.weight",
  "mlp.down": "model.decoder.layers.{}.fc2.weight",
}
_FALCON = {
  "embedding": "transformer.word_embeddings.weight",
  "final_norm.scale": "transformer.ln_f.weight",
  "unembedding": "lm_head.weight",
  "attention_norm.scale": "transformer.h.{}.input_layernorm.weight",
  "attention.q": "transformer.h.{}.self_attention.query_key_value.weight",
  "attention.k": "transformer.h.{}.self_attention.query_key_value.weight",
  "attention.v": "transformer.h.{}.self_attention.query_key_value.weight",
  "attention.o": "transformer.h.{}.self_attention.dense.weight",
  "mlp_norm.scale": "transformer.h.{}.post_attention_layernorm.weight",
  "mlp.up": "transformer.h.{}.mlp.dense_h_to_4h.weight",
  "mlp.down": "transformer.h.{}.mlp.dense_4h_to_h.weight",
}
_FALCON_TWO_NORMS = _FALCON | {
  "attention_norm.scale": "transformer.h.{}.ln_attn.weight",
  "mlp_norm.scale": "transformer.h.{}.ln_mlp.weight",
}
_FAMILIES = {"Llama, Mistral or Qwen": _GATED, "OPT": _OPT, "Falcon": _FALCON}


def _names(architecture: str, config: ModelConfig) -> dict[str, str]:
  if architecture == "FalconForCausalLM":
    has_two_norms = config.parallel_residual and not config.shared_norm
    return _FALCON_TWO_NORMS if has_two_norms else _FALCON
  return _OPT if architecture == "OPTForCausalLM" else _GATED


class _Tensor(NamedTuple):
  """Where a tensor lies: bytes [start, end) of `path`."""

  path: pathlib.Path
  name: str
  dtype: np.dtype
  shape: tuple[int, ...]
  start: int
  end: int


def is_hf(folder: pathlib.Path) -> bool:
  return (folder / INDEX).exists() or any(folder.glob("*.safetensors"))


def open_hf(folder: str | pathlib.Path, *, check_weights: bool = False) -> Checkpoint:
  """Reads config.json and the headers of the weights, and compares them. Reads no weights.

  Raises:
    FileNotFoundError: config.json is absent.
    ValueError: a file is damaged, a model is not supported, or the tensors are not those that
      config.json describes: all that are missing, unknown or of another shape, by name. On loading:
      embeddings that config.json ties and that differ.
  """
  folder = pathlib.Path(folder)
  config = ModelConfig.from_hf(folder / "config.json")
  raw = json.loads((folder / "config.json").read_text("utf-8"))
  if raw.get("quantization_config"):
    quantised = raw["quantization_config"]
    raise ValueError(f"{folder}/config.json: quantization_config={quantised} is not supported")
  (architecture,) = raw["architectures"]
  names = _names(architecture, config)
  tensors = {tensor.name: tensor for tensor in _read_headers(folder)}
  wanted = _wanted(names, tensors, config)
  _compare(folder, architecture, names, wanted, tensors, config)
  shapes = param_shapes(config)
  copy = tensors.get(names["unembedding"]) if config.tie_embeddings else None
  (embedding,) = (tensors[name] for name, parts in wanted.items() if parts == ["embedding"])

  def read() -> Iterator[tuple[str, np.ndarray]]:
    if copy is not None and not _are_equal(copy, embedding):  # transformers would not tie them
      raise ValueError(
        f"{copy.path}: tensor {copy.name} differs from {embedding.name}, with which config.json "
        f"ties it: set tie_word_embeddings to false there, or remove the tensor"
      )
    for tensor, stored in _read(tensors[name] for name in wanted):
      if check_weights:
        refuse_non_finite(f"{tensor.path}: tensor {tensor.name}", stored)
      for name, part in _split(wanted[tensor.name], stored, config):
        yield name, from_stored(name, part, shapes[name])

  return streamed(folder, config, read)


# Headers.


def _read_headers(folder: pathlib.Path) -> list[_Tensor]:
  """The tensors of all files, each in the order of its file."""
  if (folder / SINGLE).exists():
    return _read_header(folder / SINGLE)
  if not (folder / INDEX).exists():
    raise ValueError(f"{folder} has neither {SINGLE} nor {INDEX}")
  index = folder / INDEX
  try:
    places = json.loads(index.read_text("utf-8"))["weight_map"]
    paths = {name: folder / file for name, file in places.items()}
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise ValueError(f"{index}: not an index of safetensors ({error!r})") from error
  tensors: dict[str, _Tensor] = {}
  for path in sorted(set(paths.values())):
    if not path.is_file():
      missing = [name for name in paths if paths[name] == path]
      raise ValueError(f"{index}: names {path.name} (with {missing[0]}), which is not there")
    for tensor in _read_header(path):
      if tensor.name in tensors:
        first = tensors[tensor.name].path.name
        raise ValueError(f"{path}: tensor {tensor.name} is also in {first}")
      tensors[tensor.name] = tensor
  for name, path in paths.items():
    if name not in tensors or tensors[name].path != path:
      raise ValueError(f"{index}: tensor {name} is not in {path.name}")
  return list(tensors.values())


def _read_header(path: pathlib.Path) -> list[_Tensor]:
  """The tensors of one file by their place. Checks that their bytes fill the file exactly."""
  size = path.stat().st_size
  with open(path, "rb") as file:
    prefix = file.read(8)
    num_bytes = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or num_bytes > size - 8:
      raise ValueError(
        f"{path}: truncated or no safetensors file: header to byte {8 + num_bytes} of {size}"
      )
    header = file.read(num_bytes)
  try:
    entries = json.loads(header, object_pairs_hook=_unique)
    entries.pop("__metadata__", None)
  except (ValueError, TypeError, AttributeError, RecursionError) as error:
    raise ValueError(f"{path}: damaged header ({error})") from error
  tensors = [_entry(path, name, entry, 8 + num_bytes) for name, entry in entries.items()]
  tensors.sort(key=lambda tensor: (tensor.start, tensor.end))
  end = 8 + num_bytes
  for tensor in tensors:
    if tensor.end > size:
      raise ValueError(
        f"{path}: truncated: tensor {tensor.name} ends at byte {tensor.end} of {size}"
      )
    if tensor.start != end:
      raise ValueError(f"{path}: tensor {tensor.name} begins at byte {tensor.start}, not {end}")
    end = tensor.end
  if end != size:
    raise ValueError(f"{path}: {size - end} bytes after the last tensor")
  return tensors


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
  values = dict(pairs)
  if len(values) < len(pairs):
    names = [name for name, _ in pairs]
    raise ValueError(f"{max(names, key=names.count)} appears twice")
  return values


def _entry(path: pathlib.Path, name: str, entry: object, data_start: int) -> _Tensor:
  try:
    dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    numbers = (*shape, start, end)
    if not isinstance(dtype, str) or not all(type(n) is int and n >= 0 for n in numbers):
      raise ValueError(f"dtype {dtype}, sizes {numbers}")
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(f"{path}: damaged header: tensor {name} ({error!r})") from error
  if dtype not in _DTYPES:
    if _HARMLESS.fullmatch(name):  # such as integers: its bytes only need to be skipped
      return _Tensor(path, name, np.dtype(np.uint8), shape, data_start + start, data_start + end)
    raise ValueError(
      f"{path}: tensor {name} has dtype {dtype}, which is not supported (supported: "
      f"{', '.join(_DTYPES)})"
    )
  if end - start != math.prod(shape) * _DTYPES[dtype].itemsize:
    raise ValueError(
      f"{path}: damaged header: tensor {name} of {dtype} {shape} has {end - start} bytes"
    )
  return _Tensor(path, name, _DTYPES[dtype], shape, data_start + start, data_start + end)


# What the model needs and what the files have.


def stored_name(name: str, names: Mapping[str, str] = _GATED) -> str:
  """What the parameter `name` is called in files whose names are `names`."""
  layer, kind = split_layer(name)
  if kind.endswith("bias"):  # "mlp.up_bias" or "final_norm.bias"
    weight = kind.removesuffix("_bias") if kind.endswith("_bias") else kind[:-4] + "scale"
    stored = names[weight].removesuffix("weight") + "bias"
  else:
    stored = names[kind]
  return stored.format(layer)


def _wanted(
  names: Mapping[str, str], found: Collection[str], config: ModelConfig
) -> dict[str, list[str]]:
  """The tensors that the files must have -> the parameters that each becomes."""
  wanted: dict[str, list[str]] = {}
  for name in param_shapes(config):
    wanted.setdefault(stored_name(name, names), []).append(name)
  prefix, _, embedding = names["embedding"].partition(".")
  if embedding in found:  # as saved from the model without its LM head
    wanted = {name.removeprefix(f"{prefix}."): parts for name, parts in wanted.items()}
  elif config.tie_embeddings and names["embedding"] not in found and names["unembedding"] in found:
    wanted[names["unembedding"]] = wanted.pop(names["embedding"])  # either name may be dropped
  return wanted


def _shape(parts: list[str], config: ModelConfig) -> tuple[int, ...]:
  """The shape that the tensor of `parts` has in the file."""
  shapes = [stored_shape(name, param_shapes(config)[name]) for name in parts]
  rows = sum(shape[0] for shape in shapes)  # of more than one where they are fused
  if parts == ["position_embedding"]:
    rows += _OPT_UNUSED_POSITIONS
  return (rows, *shapes[0][1:])


def _split(
  parts: list[str], stored: np.ndarray, config: ModelConfig
) -> Iterable[tuple[str, np.ndarray]]:
  """The tensors that `stored` consists of."""
  if parts == ["position_embedding"]:
    return [(parts[0], stored[_OPT_UNUSED_POSITIONS:])]
  if len(parts) == 1:
    return [(parts[0], stored)]
  # Falcon: for each kv head its query heads, then k, then v. With one kv head (multi_query) and
  # with as many as query heads this is what older layouts are, too.
  group = config.num_heads // config.num_kv_heads
  heads = stored.reshape(config.num_kv_heads, group + 2, config.head_dim, *stored.shape[1:])
  kinds = {"q": heads[:, :group], "k": heads[:, group], "v": heads[:, group + 1]}
  return [
    (name, kinds[name.rpartition(".")[2][0]].reshape(-1, *stored.shape[1:])) for name in parts
  ]


def _compare(
  folder: pathlib.Path,
  architecture: str,
  names: Mapping[str, str],
  wanted: Mapping[str, list[str]],
  tensors: Mapping[str, _Tensor],
  config: ModelConfig,
) -> None:
  """Raises ValueError naming all tensors that are missing, unknown or of another shape."""
  found = {name: tensor.shape for name, tensor in tensors.items() if not _HARMLESS.fullmatch(name)}
  if config.tie_embeddings and names["unembedding"] not in wanted:
    found.pop(names["unembedding"], None)
  problems = differences({name: _shape(parts, config) for name, parts in wanted.items()}, found)
  if not problems:
    return
  what, kinds = "not the weights", {without_layer(name) for name in found}
  matches = {family: len(kinds & set(table.values())) for family, table in _FAMILIES.items()}
  best = max(matches, key=matches.get)
  if matches[best] > len(kinds & {without_layer(name) for name in wanted}):
    what = f"weights of {best}, not those"
  raise ValueError(f"{folder}: {what} of the {architecture} that config.json describes: {problems}")


# Weights.

_BYTES_AT_ONCE = 1 << 24


def _are_equal(a: _Tensor, b: _Tensor) -> bool:
  """Whether two tensors are the same bytes. Holds little of them at a time."""
  if (a.dtype, a.shape) != (b.dtype, b.shape):
    return False
  with open(a.path, "rb") as a_file, open(b.path, "rb") as b_file:
    a_file.seek(a.start)
    b_file.seek(b.start)
    for left in range(a.end - a.start, 0, -_BYTES_AT_ONCE):
      num_bytes = min(left, _BYTES_AT_ONCE)
      if a_file.read(num_bytes) != b_file.read(num_bytes):
        return False
  return True


def _read(tensors: Iterable[_Tensor]) -> Iterator[tuple[_Tensor, np.ndarray]]:
  """Each tensor as a view of its file. Opens each file once and reads it from front to back.

  Pages of the file are let go when the next tensor is asked for, so that only one counts.
  """
  by_path: dict[pathlib.Path, list[_Tensor]] = {}
  for tensor in tensors:
    by_path.setdefault(tensor.path, []).append(tensor)
  for path, of_file in sorted(by_path.items()):
    with open(path, "rb") as file:
      mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    for tensor in sorted(of_file, key=lambda tensor: tensor.start):
      if tensor.end > len(mapped):
        raise ValueError(f"{path}: truncated since it was opened: no tensor {tensor.name}")
      count = math.prod(tensor.shape)
      stored = np.frombuffer(mapped, tensor.dtype, count, tensor.start).reshape(tensor.shape)
      first = tensor.start - tensor.start % mmap.PAGESIZE
      mapped.madvise(mmap.MADV_WILLNEED, first, tensor.end - first)
      yield tensor, stored
      del stored
      mapped.madvise(mmap.MADV_DONTNEED, first, tensor.end - first)
