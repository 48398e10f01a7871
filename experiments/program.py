"""What all serving programs share: flags, errors in one message, progress."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
import time
from collections.abc import Callable

from absl import app, flags, logging

from experiments.fetch_model import FetchError
from pdjax.config import ExperimentConfig, load_config, override

ROOT = pathlib.Path(__file__).resolve().parent.parent
FLAGS = flags.FLAGS


def define_flags(default_config: str) -> None:
  flags.DEFINE_string("config", str(ROOT / default_config), "an experiment's Python file")
  flags.DEFINE_multi_string("set", [], "change one value, as in --set workload.rate_rps=2")
  flags.DEFINE_string("out", None, "folder for results; default: runs/PROGRAM-TIME")
  flags.DEFINE_string("model", None, "a model by name, or the path of a .gguf file")
  flags.DEFINE_string("hardware", None, "device to simulate, by name")
  flags.DEFINE_string("trace", None, "CSV with arrival_s,prompt_tokens,output_tokens")
  flags.DEFINE_string("backend", None, "jax: serve here; sim: simulate")


def config_from_flags(**changes) -> ExperimentConfig:
  """The experiment that the flags name; `changes` are fields that a program sets itself."""
  config = load_config(FLAGS.config)
  for name in ("model", "hardware", "backend"):
    if getattr(FLAGS, name) is not None:
      changes[name] = getattr(FLAGS, name)
  if FLAGS.trace is not None:
    changes["workload"] = dataclasses.replace(config.workload, trace=FLAGS.trace)
  config = dataclasses.replace(config, **{k: v for k, v in changes.items() if v is not None})
  return override(config, FLAGS.set)


def out_folder(program: str) -> pathlib.Path:
  """Where results will go. Does not create it."""
  if FLAGS.out is not None:
    return pathlib.Path(FLAGS.out)
  return pathlib.Path("runs") / f"{program}-{time.strftime('%Y%m%d-%H%M%S')}"


def main(run: Callable[[], int]) -> None:
  """Runs a program. Wrong input ends it with one message and exit status 2, without a traceback."""

  def guarded(argv: list[str]) -> None:
    logging.set_verbosity(logging.WARNING)  # not which accelerators JAX looked for in vain
    try:
      if len(argv) > 1:
        raise ValueError(f"unexpected arguments {argv[1:]}; every option is --name=value")
      status = run()
    except (ValueError, FetchError, ModuleNotFoundError, OSError) as error:
      sys.stdout.flush()
      print(f"error: {error}", file=sys.stderr)
      sys.exit(2)
    except KeyboardInterrupt:
      print("\ninterrupted before anything was measured; nothing was written", file=sys.stderr)
      sys.exit(130)
    sys.exit(status)

  app.run(guarded)


class Progress:
  """A line that is rewritten on a terminal, and now and then a line of its own elsewhere."""

  every_s = 5.0

  def __init__(self, stream=sys.stderr):
    self._stream = stream
    self._is_terminal = stream.isatty()
    self._next_s = 0.0
    self._width = 0

  def update(self, text: str) -> None:
    """Shows `text` if it is time to."""
    now_s = time.monotonic()
    if now_s < self._next_s:
      return
    self._next_s = now_s + (0.2 if self._is_terminal else self.every_s)
    self._write(text, end="\r" if self._is_terminal else "\n")

  def done(self, text: str) -> None:
    """Shows `text` for good."""
    self._write(text, end="\n")
    self._next_s = 0.0

  def _write(self, text: str, end: str) -> None:
    padding = " " * max(0, self._width - len(text)) if self._is_terminal else ""
    self._width = len(text) if end == "\r" else 0
    print(text + padding, end=end, file=self._stream, flush=True)
