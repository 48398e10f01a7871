"""What all programs share: progress lines, whole files, and how a program ends."""

from __future__ import annotations

import io
import pathlib
import sys

import pytest

from experiments import program
from experiments.program import Progress, whole_file
from pdjax.serving.executor import PoolLost
from pdjax.sources import SourceError

pytestmark = pytest.mark.quick


class Screen(io.StringIO):
  """A stream that remembers, and what a terminal would show of it."""

  def __init__(self, *, is_terminal: bool):
    super().__init__()
    self.is_terminal = is_terminal

  def isatty(self) -> bool:
    return self.is_terminal

  def shown(self) -> list[str]:
    lines = []
    for written in self.getvalue().split("\n"):
      line = ""
      for part in written.split("\r"):
        line = part + line[len(part) :]
      lines.append(line.rstrip())
    return lines


class Now:
  def __init__(self):
    self.now_s = 100.0

  def __call__(self) -> float:
    return self.now_s


def served(progress: Progress, now: Now, *, duration_s: float, every_s: float = 0.125) -> None:
  for i in range(int(duration_s / every_s)):
    progress.update(f"{i} of many")
    now.now_s += every_s


def test_a_file_gets_a_line_now_and_then():
  screen, now = Screen(is_terminal=False), Now()
  progress = Progress(screen, now)
  served(progress, now, duration_s=20.0)
  progress.done("all done")
  assert "\r" not in screen.getvalue()
  lines = screen.shown()
  assert lines == ["0 of many", "40 of many", "80 of many", "120 of many", "all done", ""]
  progress.update("the next strategy")  # just begun: nothing to tell yet
  assert screen.shown() == lines
  now.now_s += Progress.every_s
  progress.update("the next strategy")
  assert screen.shown()[-2] == "the next strategy"


def test_a_terminal_gets_one_line_that_is_rewritten(monkeypatch):
  monkeypatch.setenv("COLUMNS", "200")
  screen, now = Screen(is_terminal=True), Now()
  progress = Progress(screen, now)
  served(progress, now, duration_s=5.0)
  assert len(screen.shown()) == 1
  assert screen.getvalue().count("\r") >= 20
  progress.done("ok")  # shorter than what it overwrites
  assert screen.shown() == ["ok", ""]
  progress.update("next")
  assert screen.shown() == ["ok", "next"]


@pytest.mark.parametrize("columns", [20, 80])
def test_a_line_that_is_rewritten_never_wraps(monkeypatch, columns):
  monkeypatch.setenv("COLUMNS", str(columns))
  screen, now = Screen(is_terminal=True), Now()
  progress = Progress(screen, now)
  progress.update("x" * 300)
  assert screen.shown() == ["x" * (columns - 1)]
  progress.done("y" * 300)  # stays, so it may wrap
  assert screen.shown() == ["y" * 300, ""]


def test_a_file_appears_whole_or_not_at_all(tmp_path):
  target = tmp_path / "a.json"
  with whole_file(target) as path:
    assert path.suffix == ".json" and path.parent == tmp_path
    path.write_text("old")
    assert not target.exists()
  assert target.read_text() == "old"
  for error in (KeyboardInterrupt, RuntimeError):
    with pytest.raises(error), whole_file(target) as path:
      path.write_text("ne")
      raise error
  assert target.read_text() == "old"
  assert list(tmp_path.iterdir()) == [target]


def end_of(monkeypatch, capsys, prepare, run=lambda prepared: 0, argv=()):
  """(exit status, stdout, stderr) of a program."""
  monkeypatch.setattr(sys, "argv", ["program", *argv])
  with pytest.raises(SystemExit) as stopped:
    program.main(prepare, run)
  return stopped.value.code, *capsys.readouterr()


def raising(error):
  def prepare():
    raise error

  return prepare


@pytest.mark.parametrize(
  "error",
  [
    ValueError("rate=0 must be positive"),
    SourceError("no network"),
    ImportError("pip install 'pdjax[hf]'"),
    FileNotFoundError("no such file: x"),
  ],
)
def test_refused_input_ends_with_one_message_and_status_2(monkeypatch, capsys, error):
  status, out, err = end_of(monkeypatch, capsys, raising(error), run=lambda _: pytest.fail("ran"))
  assert (status, out) == (2, "")
  assert err == f"error: {error}\n"


def test_a_file_that_is_not_there_is_named_without_the_number_of_the_error(monkeypatch, capsys):
  status, _, err = end_of(monkeypatch, capsys, pathlib.Path("none.toml").read_text)
  assert (status, err) == (2, "error: none.toml: No such file or directory\n")


def test_a_fault_in_the_work_itself_is_not_taken_for_wrong_input(monkeypatch):
  monkeypatch.setattr(sys, "argv", ["program"])
  with pytest.raises(ValueError, match="a fault of ours"):
    program.main(lambda: None, lambda _: raising(ValueError("a fault of ours"))())


def test_a_pool_that_does_not_start_ends_with_why(monkeypatch, capsys):
  lost = raising(PoolLost("devices 0: its process ended"))
  status, out, err = end_of(monkeypatch, capsys, lambda: None, lambda _: lost())
  assert (status, out, err) == (1, "", "error: devices 0: its process ended\n")


@pytest.mark.parametrize("argv", [["--nonsense=1"], ["--verbosity=loud"], ["stray"]])
def test_flags_that_do_not_exist_are_refused_like_all_input(monkeypatch, capsys, argv):
  status, _, err = end_of(monkeypatch, capsys, lambda: pytest.fail("ran"), argv=argv)
  assert status == 2
  assert err.startswith("error: ") and argv[0].strip("-").split("=")[0] in err
  assert err.count("\n") == 1


def test_the_status_is_that_of_the_work(monkeypatch, capsys):
  assert end_of(monkeypatch, capsys, lambda: 7, lambda prepared: prepared)[0] == 7


@pytest.mark.parametrize("where", ["prepare", "run"])
def test_an_interrupt_ends_with_130_and_no_traceback(monkeypatch, capsys, where):
  stop = raising(KeyboardInterrupt())
  prepare, run = (stop, lambda _: 0) if where == "prepare" else (lambda: None, lambda _: stop())
  status, out, err = end_of(monkeypatch, capsys, prepare, run)
  assert (status, out) == (130, "")
  assert "interrupted" in err and "Traceback" not in err
