"""What all serving programs share: flags, wrong input in one message, progress, whole files."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from absl import app, flags, logging

from configs.workloads import WORKLOADS
from pdjax.config import (
  POOLS_FORM,
  ExperimentConfig,
  WorkloadConfig,
  load_config,
  num_devices_of,
  override,
  parse_pools,
)
from pdjax.core.events import EventLog
from pdjax.core.names import pick
from pdjax.serving.cluster import Cluster
from pdjax.serving.executor import PoolLost
from pdjax.sources import SourceError

ROOT = pathlib.Path(__file__).resolve().parent.parent
FLAGS = flags.FLAGS
T = TypeVar("T")
flags.disclaim_key_flags()  # so that --help of a program lists the flags defined here as its own


def define_flags(default_config: str) -> None:
  flags.DEFINE_string("config", str(ROOT / default_config), "an experiment's Python file")
  flags.DEFINE_multi_string("set", [], "change one value, as in --set workload.rate_rps=2")
  flags.DEFINE_string("out", None, "folder for results; default: runs/PROGRAM-TIME")
  flags.DEFINE_string("model", None, "a name, the path of a checkpoint, or a Hugging Face repo id")
  flags.DEFINE_string("hardware", None, "device to simulate, by name")
  flags.DEFINE_string(
    "workload", None, f"lengths and arrivals of one of {', '.join(WORKLOADS)}; all are synthetic"
  )
  flags.DEFINE_string(
    "trace",
    None,
    "a recorded workload, plain or .gz: CSV with arrival_s,prompt_tokens,output_tokens, or the "
    "files of Azure, Mooncake, Vidur and Sarathi as published",
  )
  flags.DEFINE_string("pools", None, f"a strategy of pools that differ: {POOLS_FORM}")
  flags.DEFINE_string("backend", None, "jax: serve here; sim: simulate")
  flags.DEFINE_string("attention", None, "auto: the device's best kernels; xla; pallas")
  flags.DEFINE_bool("processes", None, "serve each pool in a process of its own")
  flags.DEFINE_bool("pin", None, "give each of these processes its own share of the cores")
  flags.DEFINE_string("hosts", None, "serve on the hosts of a start-up file (configs/hosts.toml)")
  flags.DEFINE_bool("check_weights", None, "refuse weights that are NaN or infinite")


def config_from_flags(**changes) -> ExperimentConfig:
  """The experiment that the flags name; `changes` are fields that a program sets itself."""
  config = load_config(FLAGS.config)
  names = ("model", "hardware", "backend", "attention", "check_weights")
  for name in (*names, "processes", "pin", "hosts"):
    if getattr(FLAGS, name) is not None:
      changes[name] = getattr(FLAGS, name)
  if FLAGS.pools is not None:
    num_devices = num_devices_of(parse_pools(FLAGS.pools))
    changes |= {"pools": FLAGS.pools, "num_devices": num_devices}
  if FLAGS.trace is not None:
    if FLAGS.workload is not None:
      raise ValueError(f"--trace={FLAGS.trace} and --workload={FLAGS.workload}: give one of them")
    changes["workload"] = dataclasses.replace(config.workload, trace=FLAGS.trace)
  if FLAGS.workload is not None:
    changes["workload"] = named_workload(config.workload, FLAGS.workload)
  config = dataclasses.replace(config, **{k: v for k, v in changes.items() if v is not None})
  return override(config, FLAGS.set)


def named_workload(workload: WorkloadConfig, name: str) -> WorkloadConfig:
  """A copy that asks like the workload called `name`, at the same load.

  Raises:
    ValueError: no such workload.
  """
  named = pick(WORKLOADS, name, "workload")
  return dataclasses.replace(
    workload,
    lengths=named.lengths,
    label=named.label,
    arrivals=named.arrivals,
    cv=named.cv,
    trace=None,
  )


def out_folder(program: str) -> pathlib.Path:
  """Where results will go. Does not create it.

  Raises:
    ValueError: nothing can be written there.
  """
  if FLAGS.out == "":
    raise ValueError("--out is empty; give a folder, or leave it out")
  if FLAGS.out is None:
    out = pathlib.Path("runs") / f"{program}-{time.strftime('%Y%m%d-%H%M%S')}"
  else:
    out = pathlib.Path(FLAGS.out)
  existing = next(path for path in (out, *out.absolute().parents) if path.exists())
  if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
    what = "cannot be written to" if existing.is_dir() else "is a file"
    raise ValueError(f"--out={out}: {existing} {what}; give another folder")
  return out


@contextlib.contextmanager
def whole_file(path: pathlib.Path) -> Iterator[pathlib.Path]:
  """A path to write to that becomes `path` once it is written: whole or not at all."""
  part = path.with_name(f".part-{path.name}")  # keeps the ending: it may choose a format
  try:
    yield part
    os.replace(part, path)
  finally:
    part.unlink(missing_ok=True)


def main(prepare: Callable[[], T], run: Callable[[T], int]) -> None:
  """Runs a program: `prepare` reads and checks what the user gave, `run` does the work with it.

  What `prepare` refuses ends with one message and exit status 2, without a traceback; so does, with
  status 1, a pool that does not start. Any other error of `run` is a fault of ours and shows its
  traceback.
  """

  def guarded(argv: list[str]) -> None:
    logging.set_verbosity(logging.WARNING)  # not which accelerators JAX looked for in vain
    try:
      try:
        if len(argv) > 1:
          raise ValueError(f"unexpected arguments {argv[1:]}; every option is --name=value")
        prepared = prepare()
      except OSError as error:  # its own text begins with a number
        where = f"{error.filename}: {error.strerror}" if error.filename is not None else None
        _refuse(where or str(error))
      except (ValueError, SourceError, ImportError) as error:
        _refuse(str(error))
      try:
        status = run(prepared)
      except PoolLost as error:  # before or between runs: a process that cannot start
        print(f"error: {error}", file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
      sys.stdout.flush()
      print("\ninterrupted; nothing was written but the files named above", file=sys.stderr)
      if any(thread.name.startswith("warm-up") for thread in threading.enumerate()):
        sys.stderr.flush()
        os._exit(130)  # XLA compiles in these threads, and aborts when Python ends under it
      sys.exit(130)
    sys.exit(status)

  app.run(guarded, flags_parser=_parse_flags)


def _parse_flags(argv: list[str]) -> list[str]:
  try:
    return FLAGS(argv)
  except flags.Error as error:
    _refuse(f"{error}; --help lists all options")


def _refuse(message: str) -> None:
  sys.stdout.flush()
  print(f"error: {message}", file=sys.stderr)
  sys.exit(2)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Status:
  """How far a run has come: what a person is shown of it. `cluster` and `log` are the run's own."""

  strategy: str
  num_ended: int
  num_requests: int
  num_tokens: int
  now_s: float
  cluster: Cluster
  log: EventLog

  def __str__(self) -> str:
    rate = self.num_tokens / self.now_s if self.now_s else 0.0
    return (
      f"{self.strategy}: {self.num_ended} of {self.num_requests} requests, {rate:.1f} tokens/s, "
      f"{self.now_s:.1f} s"
    )


class Progress:
  """A line that is rewritten on a terminal, and now and then a line of its own elsewhere."""

  every_s = 5.0

  def __init__(self, stream=None, now_s: Callable[[], float] = time.monotonic):
    self._stream, self._now_s = stream or sys.stderr, now_s
    self._is_terminal = self._stream.isatty()
    self._next_s = 0.0
    self._width = 0  # of what stands on the line that will be rewritten

  @property
  def is_due(self) -> bool:
    """Whether `update` would show something."""
    return self._now_s() >= self._next_s

  def update(self, text: str) -> None:
    """Shows `text` if it is time to."""
    if not self.is_due:
      return
    self.shown()
    if self._is_terminal:  # a line that wraps could not be rewritten
      text = text[: shutil.get_terminal_size().columns - 1]
    self._write(text, end="\r" if self._is_terminal else "\n")

  def shown(self) -> None:
    """Something was: nothing is due for a while."""
    self._next_s = self._now_s() + (0.2 if self._is_terminal else self.every_s)

  def serving(self, status: Status) -> None:
    """Shows how a run goes, if it is time to."""
    self.update(str(status))

  def done(self, text: str) -> None:
    """Shows `text` for good."""
    self._write(text, end="\n")
    self._next_s = 0.0 if self._is_terminal else self._now_s() + self.every_s

  def _write(self, text: str, end: str) -> None:
    padding = " " * max(0, self._width - len(text)) if self._is_terminal else ""
    self._width = len(text) if end == "\r" else 0
    print(text + padding, end=end, file=self._stream, flush=True)


class Relayed(Progress):
  """Progress that goes where another's does: to a function, a line at a time, none for good."""

  is_due = True

  def __init__(self, show: Callable[[str], None]):
    self._show = show

  def update(self, text: str) -> None:
    self._show(text)

  def done(self, text: str) -> None:
    self._show(text)


class Silent(Progress):
  """Progress that nobody sees. Never due, so nothing is made to be shown."""

  is_due = False

  def __init__(self):
    pass

  def update(self, text: str) -> None:
    pass

  def done(self, text: str) -> None:
    pass


SILENT = Silent()
