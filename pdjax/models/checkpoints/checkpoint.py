"""One interface to weights on disk, whatever wrote them."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

import numpy as np

from pdjax.core.model_config import ModelConfig
from pdjax.models import transformer
from pdjax.models.model import Model, Target

Tensors = Iterable[tuple[str, np.ndarray]]
Show = Callable[[str], None]


def silent(line: str) -> None:
  """Shows nothing."""


class Load(Protocol):
  def __call__(
    self, *, dtype: str = "float32", target: Target | None = None, show: Show = silent
  ) -> Model: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
  """A model on disk of which only the shape was read.

  `load` reads the weights a tensor at a time, onto a device, a sharding or a mesh (None leaves them
  on the host), and raises ValueError with the file and the tensor where they are damaged. `show`
  gets a line on each.
  """

  path: pathlib.Path
  config: ModelConfig
  load: Load


def streamed(path: pathlib.Path, config: ModelConfig, read: Callable[[], Tensors]) -> Checkpoint:
  """A checkpoint whose tensors `read` gives one at a time, named and laid out as pdjax's."""

  def load(*, dtype: str = "float32", target: Target | None = None, show: Show = silent) -> Model:
    def shown() -> Iterator[tuple[str, np.ndarray]]:
      for name, array in read():
        show(f"{name} {array.shape}")
        yield name, array
        del array  # before the next one is read

    return transformer.from_tensors(config, shown(), dtype=dtype, target=target)

  return Checkpoint(path=path, config=config, load=load)


def open_checkpoint(path: str | pathlib.Path, *, check_weights: bool = False) -> Checkpoint:
  """Reads what says the shape of a model, no weights. The kind follows from what is at `path`.

  That is a folder with config.json and safetensors as on Hugging Face, a GGUF file, or a folder
  that pdjax wrote with Orbax. With `check_weights` loading refuses NaN and infinity.

  Raises:
    FileNotFoundError: nothing at `path`.
    ImportError: a package that this kind needs is absent.
    ValueError: another kind of file or folder, a damaged one, or a model that is not supported.
  """
  path = pathlib.Path(path)
  if not path.exists():
    raise FileNotFoundError(f"no checkpoint at {path}")
  if path.is_file():
    with open(path, "rb") as file:
      is_gguf = file.read(4) == b"GGUF"
    if is_gguf or path.suffix == ".gguf":
      from pdjax.models.checkpoints.gguf import open_gguf

      return open_gguf(path, check_weights=check_weights)
    if path.suffix == ".safetensors" or path.name == "config.json":
      raise ValueError(f"{path} is part of a checkpoint; give its folder {path.parent}")
    raise ValueError(f"{path} is neither a GGUF file nor a folder with a checkpoint")
  from pdjax.models.checkpoints.hf import is_hf, open_hf

  if is_hf(path):
    return open_hf(path, check_weights=check_weights)
  from pdjax.models.checkpoints.orbax import is_orbax, open_orbax

  if is_orbax(path):
    return open_orbax(path, check_weights=check_weights)
  raise ValueError(
    f"{path} holds no checkpoint: neither config.json with *.safetensors (PyTorch's .bin and .pt "
    f"files are not read) nor one that pdjax wrote{_gguf_hint(path)}"
  )


def _gguf_hint(folder: pathlib.Path) -> str:
  files = sorted(path.name for path in folder.glob("*.gguf"))
  return f"; of its GGUF files {', '.join(files)} give one by its path" if files else ""


def stored_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
  """The shape in which Hugging Face and GGUF files hold pdjax's parameter `name` of `shape`.

  They hold matrices as [out, in] with heads and head_dim as one axis.
  """
  if name in ("embedding", "position_embedding"):
    return shape
  num_in = _num_in(name, shape)
  return tuple(math.prod(axes) for axes in (shape[num_in:], shape[:num_in]) if axes)


def from_stored(name: str, stored: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
  """A view of `stored`, of `stored_shape(name, shape)`, with the axes of pdjax's parameter."""
  num_in = _num_in(name, shape)
  if num_in == 0:
    return stored.reshape(shape)
  outer = stored.reshape(shape[num_in:] + shape[:num_in])
  num_out = len(shape) - num_in
  return outer.transpose(*range(num_out, len(shape)), *range(num_out))


def to_stored(name: str, array: np.ndarray) -> np.ndarray:
  """The inverse of `from_stored`, as an array in C order."""
  num_in = _num_in(name, array.shape)
  order = (*range(num_in, array.ndim), *range(num_in))
  return np.ascontiguousarray(array.transpose(order).reshape(stored_shape(name, array.shape)))


def split_layer(name: str) -> tuple[str | None, str]:
  """`blocks.7.mlp.up` -> ("7", "mlp.up"); a parameter of no block -> (None, its name)."""
  return re.fullmatch(r"(?:blocks\.(\d+)\.)?(.+)", name).groups()


def _num_in(name: str, shape: tuple[int, ...]) -> int:
  """How many axes of a matrix [in, out] are `in`; 0 for biases, scales and tables."""
  if len(shape) == 1 or name.endswith("_bias") or name in ("embedding", "position_embedding"):
    return 0
  return len(shape) - 1 if name.endswith("attention.o") else 1


def refuse_non_finite(where: str, tensor: np.ndarray) -> None:
  """Raises ValueError, beginning with `where`, if any value is NaN or infinite."""
  bad = tensor.size - int(np.count_nonzero(np.isfinite(tensor)))
  if bad:
    raise ValueError(f"{where}: {bad} of {tensor.size} values are NaN or infinite")


def differences(wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> str:
  """All tensors that are missing, unknown or of another shape, by their names in the file.

  Empty where there are none.
  """
  shaped: dict[str, list[str]] = {}
  for name, shape in wanted.items():
    if name in found and found[name] != shape:
      kind = f"of shape {list(found[name])} instead of {list(shape)}"
      shaped.setdefault(kind, []).append(name)
  problems = {
    "missing": [name for name in wanted if name not in found],
    "unknown": [name for name in found if name not in wanted],
    **shaped,
  }
  return "; ".join(f"{kind} {_listed(names)}" for kind, names in problems.items() if names)


def without_layer(name: str) -> str:
  """`model.layers.7.mlp.up_proj.weight` -> `model.layers.{}.mlp.up_proj.weight`."""
  return re.sub(r"\.\d+\.", ".{}.", name, count=1)


def _listed(names: Iterable[str]) -> str:
  """The names, with those that differ in the layer only as one: `model.layers.{0,1}.norm`."""
  layers: dict[str, list[int]] = {}
  for name in names:
    numbers = layers.setdefault(without_layer(name), [])
    numbers += [int(number) for number in re.findall(r"\.(\d+)\.", name)[:1]]
  texts = []
  for template, numbers in layers.items():
    which = ",".join(map(str, sorted(numbers)))
    texts.append(template.replace("{}", f"{{{which}}}" if len(numbers) > 1 else which))
  return ", ".join(texts)
