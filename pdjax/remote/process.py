"""A worker process of this machine, from its start to its end."""

from __future__ import annotations

import contextlib
import os
import pathlib
import queue
import secrets
import subprocess
import sys
import threading
import time

import pdjax
from pdjax.remote.protocol import Connection, ProtocolError, accept, greet, listen

WORKER = "pdjax.engine.worker"


class WorkerProcess:
  """A process that has been started, and the connection to it. It ends when that is closed."""

  def __init__(self, connection: Connection, process: subprocess.Popen):
    self.connection = connection
    self._process = process

  @property
  def process_id(self) -> int:
    return self._process.pid

  def kill(self) -> None:
    """Ends it at once, whatever it does."""
    self.connection.close()
    with contextlib.suppress(ProcessLookupError):
      self._process.kill()
    self._process.wait()

  def close(self, timeout_s: float = 5.0) -> None:
    """Lets it end; after `timeout_s` ends it."""
    self.connection.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
      self._process.wait(timeout_s)
    self.kill()


def start_process(*, timeout_s: float = 60.0) -> WorkerProcess:
  """Starts a worker and returns when both ends know each other.

  The secret goes through a pipe: arguments and environments can be read by others.

  Raises:
    ProtocolError: it ended, or did not call within `timeout_s`, or who called was another.
  """
  secret = secrets.token_hex(32)
  with listen() as listener:
    host, port = listener.getsockname()
    process = subprocess.Popen(
      [sys.executable, "-m", WORKER, f"--connect={host}:{port}"],
      stdin=subprocess.PIPE,
      env={**os.environ, "PYTHONPATH": python_path()},
    )
    try:
      with process.stdin as pipe:
        pipe.write(secret.encode() + b"\n")
      return WorkerProcess(_accept(listener, secret, process, timeout_s), process)
    except BaseException:
      process.kill()
      process.wait()
      raise


def _accept(listener, secret: str, process: subprocess.Popen, timeout_s: float) -> Connection:
  answers: queue.SimpleQueue[Connection | Exception] = queue.SimpleQueue()

  def answer(connection: Connection) -> None:
    try:
      greet(connection, secret, is_worker=False)
      answers.put(connection)
    except (ProtocolError, OSError) as error:  # anyone may call; the worker may yet
      connection.close()
      answers.put(error)

  stranger: Exception | None = None
  end_s = time.monotonic() + timeout_s
  while time.monotonic() < end_s and process.poll() is None:
    with contextlib.suppress(TimeoutError):
      caller = accept(listener, timeout_s=0.1)
      # Each in its own thread: the worker does not wait for long behind who says nothing.
      threading.Thread(target=answer, args=(caller,), daemon=True).start()
    with contextlib.suppress(queue.Empty):
      answered = answers.get(timeout=0.1)
      if isinstance(answered, Connection):
        return answered
      stranger = answered
  status = process.poll()
  what = f"did not call within {timeout_s} s" if status is None else f"ended with status {status}"
  raise ProtocolError(
    f"a worker {what}" + (f"; a caller was refused: {stranger}" if stranger else "")
  )


def python_path() -> str:
  """Where the worker finds this very pdjax."""
  root = str(pathlib.Path(pdjax.__file__).parent.parent)
  return os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
