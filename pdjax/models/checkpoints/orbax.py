"""Folders that pdjax writes with Orbax: saved from one mesh, loaded straight onto another.

A folder has `params/` (Orbax), the tokenizer's files, and `pdjax.json`: the model's shape, and the
size and SHA-256 of every other file. Of a save that was interrupted it says so.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

from pdjax.core.model_config import ModelConfig
from pdjax.core.plain import from_plain, to_plain
from pdjax.models.checkpoints.checkpoint import Checkpoint, Show, refuse_non_finite, silent
from pdjax.models.model import Model, Target, param_sharding
from pdjax.models.transformer import build, check_shapes

MANIFEST, PARAMS = "pdjax.json", "params"
_FORMAT = 1
# What a device of a pool reads for its shard ends at a chunk, and a chunk is read whole.
_CHUNK_BYTES = 32 << 20
_SMALL_BYTES = 1 << 20  # files up to this size are no weights worth mentioning: always checked


def is_orbax(folder: pathlib.Path) -> bool:
  """Whether pdjax saved a model to `folder`, or began to."""
  return (folder / MANIFEST).is_file()


def is_complete(folder: pathlib.Path) -> bool:
  """Whether a save to `folder` came to its end."""
  return is_orbax(folder) and _read_manifest(folder)["complete"]


def save_orbax(
  folder: str | pathlib.Path, model: Model, *, files: Mapping[str, str] | None = None
) -> None:
  """Writes a model, with `files` (name -> text) beside it; replaces one that was saved there.

  A save that is interrupted, at whatever point, leaves a folder that is refused until it is saved
  again.

  Raises:
    ValueError: the folder has something else in it.
  """
  folder = pathlib.Path(folder).absolute()
  check_writable(folder)
  folder.mkdir(parents=True, exist_ok=True)
  files = files or {}
  old = _old_files(folder)
  names = dict.fromkeys((*old, *files))
  _write_manifest(folder, {"format": _FORMAT, "complete": False, "files": names})
  for path in folder.glob(f"{PARAMS}*/"):  # also what Orbax leaves of a save that was killed
    shutil.rmtree(path)
  for name in old:
    (folder / name).unlink(missing_ok=True)
  for name, text in files.items():
    (folder / name).write_text(text)
  context = ocp.Context()
  context.array.saving.storage_options.chunk_byte_size = _CHUNK_BYTES
  context.array.saving.use_compression = False  # weights shrink by a fifth and cost seconds
  with context:
    ocp.save(folder / PARAMS, dict(zip(model.param_names, model.params, strict=True)))
  paths = [folder / name for name in files]
  paths += [path for path in sorted((folder / PARAMS).rglob("*")) if path.is_file()]
  _write_manifest(
    folder,
    {
      "format": _FORMAT,
      "complete": True,
      "config": to_plain(model.config),
      "shapes": {
        name: param.shape for name, param in zip(model.param_names, model.params, strict=True)
      },
      "files": {
        path.relative_to(folder).as_posix(): [path.stat().st_size, _sha256(path)] for path in paths
      },
    },
  )


def check_writable(folder: pathlib.Path) -> None:
  """Raises ValueError where saving to `folder` would destroy something else."""
  if folder.exists() and not folder.is_dir():
    raise ValueError(f"{folder} is a file; give a folder")
  if folder.is_dir() and any(folder.iterdir()) and not is_orbax(folder):
    raise ValueError(f"{folder} has files that are not a model saved by pdjax; give another folder")


def open_orbax(folder: str | pathlib.Path, *, check_weights: bool = False) -> Checkpoint:
  """Reads the shape of a saved model and compares it with the files. Reads no large ones.

  With `check_weights` loading compares those with their SHA-256 too and refuses NaN and infinity.

  Raises:
    ValueError: no such folder, one whose saving was interrupted, or a damaged one.
  """
  folder = pathlib.Path(folder)
  if not is_orbax(folder):
    raise ValueError(f"{folder} is no model saved by pdjax: it has no {MANIFEST}")
  manifest = _read_manifest(folder)
  if not manifest["complete"]:
    raise ValueError(f"{folder}: its saving was interrupted; save it again")
  try:
    config: ModelConfig = from_plain(ModelConfig, manifest["config"])
    # Not from Orbax: it would start JAX, after which the CPU can no longer be split into devices.
    shapes: dict[str, tuple[int, ...]] = from_plain(dict[str, tuple[int, ...]], manifest["shapes"])
    files: dict[str, tuple[int, str]] = from_plain(dict[str, tuple[int, str]], manifest["files"])
  except (KeyError, TypeError, ValueError) as error:
    raise ValueError(f"{folder / MANIFEST}: damaged ({error!r})") from error
  for name, (num_bytes, sha256) in files.items():
    path = folder / name
    if not path.is_file():
      raise ValueError(f"{folder}: damaged: {name} is missing")
    if path.stat().st_size != num_bytes:
      raise ValueError(f"{path}: damaged: {path.stat().st_size} bytes instead of {num_bytes}")
    if num_bytes <= _SMALL_BYTES:
      _check_digest(path, sha256)
  try:
    check_shapes(config, shapes)
  except ValueError as error:
    raise ValueError(f"{folder}: {error}") from error

  def load(*, dtype: str = "float32", target: Target | None = None, show: Show = silent) -> Model:
    if check_weights:
      for name, (_, sha256) in files.items():
        show(f"checking {name}")
        _check_digest(folder / name, sha256)
    show(f"{len(shapes)} parameters")
    model = build(config, (), dtype=dtype)
    wanted = {
      name: _wanted(config, axes, shapes[name], dtype, target)
      for name, axes in zip(model.param_names, model.param_axes, strict=True)
    }
    try:
      arrays = ocp.load((folder / PARAMS).absolute(), wanted)
    except Exception as error:  # Orbax fails in many ways on a damaged folder
      raise ValueError(f"{folder / PARAMS}: damaged ({_first_line(error)})") from error
    if check_weights:
      for name, array in arrays.items():
        refuse_non_finite(f"{folder}: parameter {name}", np.asarray(array))
    return build(config, tuple(arrays[name] for name in model.param_names), dtype=dtype)

  return Checkpoint(path=folder, config=config, load=load)


def _wanted(
  config: ModelConfig, axes: str, shape: tuple[int, ...], dtype: str, target: Target | None
) -> Any:
  """What tells Orbax where to load a parameter to, and as what."""
  if target is None:
    return np.broadcast_to(np.zeros((), jnp.dtype(dtype)), shape)  # takes no memory
  return jax.ShapeDtypeStruct(
    shape, jnp.dtype(dtype), sharding=param_sharding(config, axes, shape, target)
  )


def _write_manifest(folder: pathlib.Path, manifest: Mapping[str, Any]) -> None:
  part = folder / f"{MANIFEST}.part"
  part.write_text(json.dumps(manifest, indent=1))
  os.replace(part, folder / MANIFEST)


def _old_files(folder: pathlib.Path) -> list[str]:
  """The files that an earlier save wrote, or was about to write."""
  try:
    return list(json.loads((folder / MANIFEST).read_bytes())["files"])
  except (OSError, ValueError, KeyError, TypeError):
    return []


def _read_manifest(folder: pathlib.Path) -> dict[str, Any]:
  path = folder / MANIFEST
  try:
    manifest = json.loads(path.read_bytes())
    written_format, _ = manifest["format"], manifest["complete"]
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(f"{path}: damaged ({error!r})") from error
  if written_format != _FORMAT:
    raise ValueError(f"{path}: format {written_format!r}, and only {_FORMAT} is read")
  return manifest


def _check_digest(path: pathlib.Path, sha256: str) -> None:
  digest = _sha256(path)
  if digest != sha256:
    raise ValueError(f"{path}: damaged: sha256 {digest} instead of {sha256}")


def _sha256(path: pathlib.Path) -> str:
  with open(path, "rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


def _first_line(error: Exception) -> str:
  lines = str(error).strip().splitlines()
  return lines[0][:300] if lines else type(error).__name__
