"""Work for tests of sweeps: in a module, so that other processes find it."""

from __future__ import annotations

import os
import pathlib
import signal

_known: set[int] = set()  # of this process


def learn_7() -> None:
  _known.add(7)


def is_known(n: int) -> bool:
  return n in _known


def is_workload(name: str) -> bool:
  from configs.workloads import WORKLOADS

  return name in WORKLOADS


def square(n: int) -> int:
  return n * n


def square_but_not_3(n: int) -> int:
  if n == 3:
    raise ValueError("3 is not squared here")
  return n * n


def square_after_dying_once(item: tuple[int, str]) -> int:
  """Kills its process, as a lack of memory would, unless `path` says that it did."""
  n, path = item
  if n == 3 and not pathlib.Path(path).exists():
    pathlib.Path(path).touch()
    os.kill(os.getpid(), signal.SIGKILL)
  return n * n


def die_on_3(n: int) -> int:
  if n == 3:
    os.kill(os.getpid(), signal.SIGKILL)
  return n * n


def die_four_times(path: str) -> int:
  """Counts in the file, and kills its process until there are four."""
  deaths = pathlib.Path(path)
  count = len(deaths.read_text()) if deaths.exists() else 0
  if count < 4:
    deaths.write_text("x" * (count + 1))
    os.kill(os.getpid(), signal.SIGKILL)
  return count
