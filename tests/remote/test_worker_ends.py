"""Workers end with their coordinator, and say why they cannot begin."""

import dataclasses
import itertools
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest
from remote.test_worker import setup

from pdjax.remote import process, protocol
from pdjax.remote.executor import RemoteExecutor, start_all
from pdjax.serving.executor import PoolLost

pytestmark = [pytest.mark.slow, pytest.mark.processes]

ORPHANS = """
import itertools, os, signal, sys
from remote import test_worker
from pdjax.remote import process, protocol
from pdjax.remote.executor import RemoteExecutor
setup = test_worker.setup(1, ("gather",), "shared_memory", None)
executor = RemoteExecutor("a", setup, itertools.count())
executor.start()
for line in executor.wait_until_up():
  break
print(executor.process_id, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_worker_ends_with_its_coordinator_even_while_it_warms_up():
  tests = str(pathlib.Path(__file__).parent.parent)
  done = subprocess.run(
    [sys.executable, "-c", ORPHANS],
    capture_output=True,
    text=True,
    timeout=60,
    env={**os.environ, "PYTHONPATH": os.pathsep.join([tests, *filter(None, sys.path)])},
  )
  assert done.returncode == -signal.SIGKILL, done.stderr
  end_s = time.monotonic() + 10
  while pathlib.Path(f"/proc/{int(done.stdout)}").exists():
    assert time.monotonic() < end_s, "an orphan"
    time.sleep(0.05)


def test_a_worker_does_not_wait_behind_callers_who_say_nothing(monkeypatch):
  strangers = []

  def listen():
    listener = protocol.listen()
    strangers.extend(socket.create_connection(listener.getsockname()) for _ in range(3))
    return listener

  monkeypatch.setattr(process, "listen", listen)
  start_s = time.monotonic()
  process.start_process().close()
  assert time.monotonic() - start_s < protocol.HELLO_TIMEOUT_S
  for stranger in strangers:
    stranger.close()


def test_a_worker_that_cannot_build_its_pool_says_why():
  wrong = dataclasses.replace(setup(1, ("prefill",), "shared_memory", None), attention="no such")
  executor = RemoteExecutor("a", wrong, itertools.count())
  with pytest.raises(PoolLost, match="no such"):
    list(start_all([executor]))
