"""Many independent pieces of work: here, in processes, or on a Ray cluster. One interface.

    with contextlib.closing(make_sweep(jobs=4, ray=None)) as sweep:
      for item, result in sweep.run(work, todo):  # as they end
        todo.append(...)  # more work, if this led to some

`work` and items are picklable: `work` is a function of a module. What it raises comes back as a
`Failure`, and so does an item whose process died every time; the others go on.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import multiprocessing
import multiprocessing.connection
import pathlib
import re
import signal
import socket
import tempfile
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from pdjax.config import load_config

ROOT = pathlib.Path(__file__).resolve().parent.parent
MOST_ATTEMPTS = 3  # of an item whose worker is lost; more than that is the item's doing

Work = Callable[[Any], Any]
Begin = Callable[[], Any]  # picklable, as work is
Todo = collections.deque  # of items; whoever iterates may append more


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
  """What became of an item that has no result. `trace` is for whoever looks for the fault."""

  message: str
  trace: str = ""


class Sweep(Protocol):
  def run(self, work: Work, todo: Todo) -> Iterator[tuple[Any, Any]]:
    """Empties `todo`; yields (item, result or Failure) as they end. Ctrl-C ends it at once."""
    ...

  def close(self) -> None: ...


def as_configured(path: str | pathlib.Path) -> Begin:
  """Makes other processes, on any host, know what a config file puts into tables of names."""
  return functools.partial(_load, str(path), pathlib.Path(path).read_text())


def _load(path: str, text: str) -> None:
  if pathlib.Path(path).is_file():
    load_config(path)
    return
  with tempfile.TemporaryDirectory() as folder:
    copy = pathlib.Path(folder) / pathlib.Path(path).name
    copy.write_text(text)
    load_config(copy)


def attempt(work: Work, item: Any) -> Any:
  """The result, or the `Failure` that an exception is."""
  try:
    return work(item)
  except Exception as error:  # whatever it is: the other items do not depend on it
    message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return Failure(message=message, trace=traceback.format_exc())


class Serial:
  """One after the other, in this process."""

  def run(self, work: Work, todo: Todo) -> Iterator[tuple[Any, Any]]:
    while todo:
      item = todo.popleft()
      yield item, attempt(work, item)

  def close(self) -> None:
    pass


class _Worker:
  """A process that does one item at a time."""

  def __init__(self, context: multiprocessing.context.BaseContext, begin: Begin | None):
    self.connection, theirs = context.Pipe()
    self.process = context.Process(target=_work_on, args=(theirs, begin), daemon=True)
    # Ctrl-C reaches all processes of a terminal. It is for the parent, which then ends this one;
    # what is ignored here is ignored there from the start.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    self.process.start()
    signal.signal(signal.SIGINT, handler)
    theirs.close()  # so that the end of the process is the end of the pipe

  def end(self) -> None:
    self.connection.close()
    self.process.terminate()
    self.process.join()


def _work_on(connection: multiprocessing.connection.Connection, begin: Begin | None) -> None:
  if begin is not None:
    begin()
  with contextlib.suppress(EOFError, BrokenPipeError):
    while True:
      work, item = connection.recv()
      connection.send(attempt(work, item))


class Processes:
  """On so many processes of this machine, each of which calls `begin` first. Owns them until it is
  closed.

  Raises:
    ValueError: no process.
  """

  def __init__(self, jobs: int, begin: Begin | None = None):
    if jobs < 1:
      raise ValueError(f"jobs={jobs} must be at least 1")
    self._context = multiprocessing.get_context("spawn")
    self._jobs, self._begin_with = jobs, begin
    self._idle, self._busy = [], {}  # connection -> (worker, item)

  def run(self, work: Work, todo: Todo) -> Iterator[tuple[Any, Any]]:
    attempts: collections.Counter[int] = collections.Counter()
    try:
      while todo or self._busy:
        while todo and len(self._busy) < self._jobs:
          self._begin(work, todo.popleft())
        for connection in multiprocessing.connection.wait(list(self._busy)):
          worker, item = self._busy.pop(connection)
          try:
            result = connection.recv()
          except (EOFError, ConnectionResetError):
            worker.end()
            attempts[id(item)] += 1
            if attempts[id(item)] < MOST_ATTEMPTS:
              todo.appendleft(item)
              continue
            del attempts[id(item)]  # a later item may have its address
            code = worker.process.exitcode
            message = f"its process died {MOST_ATTEMPTS} times (exit code {code})"
            yield item, Failure(message=message)
          else:
            attempts.pop(id(item), None)
            self._idle.append(worker)
            yield item, result
    finally:  # also where nobody wants the rest
      for worker, _ in self._busy.values():
        worker.end()
      self._busy = {}

  def _begin(self, work: Work, item: Any) -> None:
    worker = self._idle.pop() if self._idle else _Worker(self._context, self._begin_with)
    self._busy[worker.connection] = worker, item
    with contextlib.suppress(BrokenPipeError):  # a lost process is found where its result is read
      worker.connection.send((work, item))

  def close(self) -> None:
    for worker in self._idle:
      worker.end()
    self._idle = []


class RayCluster:
  """On a Ray cluster, to which the code is sent. Owns the connection.

  `local` starts a cluster of its own on this machine, whatever else runs there. Work of a lost
  worker is repeated by Ray. Each worker calls `begin` first.

  Raises:
    ImportError: the extra [ray] is not installed.
    ValueError: nobody answers at the address.
  """

  def __init__(self, address: str, begin: Begin | None = None):
    try:
      import ray
    except ImportError as error:
      raise ImportError("--ray needs the extra [ray]: pip install 'pdjax[ray]'") from error
    self._ray = ray
    if match := re.fullmatch(r"(?:ray://)?([\w.-]+):(\d+)", address):  # Ray tries for minutes
      try:
        socket.create_connection((match[1], int(match[2])), timeout=5).close()
      except OSError as error:
        raise ValueError(f"--ray={address}: no cluster answers: {error}") from error
    # Workers import what this process does, from a copy of the same files.
    environment = {"working_dir": str(ROOT), "excludes": [".git", "runs", "tests", ".venv"]}
    if begin is not None:
      environment["worker_process_setup_hook"] = lambda: begin()  # it has to have a name
    try:
      ray.init(
        address=address,
        runtime_env=environment,
        log_to_driver=False,
        include_dashboard=False if address == "local" else None,
      )
    except (ConnectionError, ValueError) as error:
      raise ValueError(f"--ray={address}: no cluster answers: {error}") from error

  def run(self, work: Work, todo: Todo) -> Iterator[tuple[Any, Any]]:
    ray = self._ray
    task = ray.remote(num_cpus=1, max_retries=MOST_ATTEMPTS - 1)(attempt)
    most = 2 * max(1, int(ray.cluster_resources().get("CPU", 1)))  # as many wait as run
    running: dict[Any, Any] = {}  # reference -> item
    try:
      while todo or running:
        while todo and len(running) < most:
          item = todo.popleft()
          running[task.remote(work, item)] = item
        (reference,), _ = ray.wait(list(running), num_returns=1)
        item = running.pop(reference)
        try:
          result = ray.get(reference)
        except ray.exceptions.RayError as error:
          is_lost = isinstance(error, _lost(ray.exceptions))
          what = f"its worker was lost {MOST_ATTEMPTS} times" if is_lost else type(error).__name__
          result = Failure(message=f"{what}: {error}")
        yield item, result
    finally:
      for reference in running:
        ray.cancel(reference, force=True)

  def close(self) -> None:
    self._ray.shutdown()


def _lost(exceptions: Any) -> tuple[type[Exception], ...]:
  """What Ray raises where a worker is gone. Anything else is not cured by another worker."""
  return (
    exceptions.WorkerCrashedError,
    exceptions.NodeDiedError,
    exceptions.LocalRayletDiedError,
    exceptions.OutOfMemoryError,
    exceptions.ObjectLostError,
  )


def make_sweep(*, jobs: int, ray: str | None, begin: Begin | None = None) -> Sweep:
  """`ray` is the address of a cluster, or `local`; without it, `jobs` processes, 1 being this one.

  `begin` makes other processes like this one, before they work: what a config file has put into
  tables of names is nowhere else (`as_configured`).

  Raises:
    ImportError, ValueError: see `RayCluster` and `Processes`.
  """
  if ray is not None:
    return RayCluster(ray, begin)
  return Serial() if jobs == 1 else Processes(jobs, begin)
