"""Programs as a user starts them, in forks of one interpreter that has imported what they share."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping

# Answers a line of (program, arguments, folder, files of its output) with an exit status.
_SERVER = """
import json, os, runpy, signal, sys
for name in sys.argv[1:]:
  __import__(name)
for line in sys.stdin:
  program, argv, cwd, *streams = json.loads(line)
  if os.fork() == 0:
    signal.alarm(60)
    os.chdir(cwd)
    for number, name in enumerate([os.devnull, *streams]):
      os.dup2(os.open(name, os.O_RDWR), number)
    sys.argv = [program, *argv]
    runpy.run_module(program, run_name="__main__", alter_sys=True)
    sys.exit()
  print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""
Start = Callable[..., subprocess.CompletedProcess[str]]


@contextlib.contextmanager
def forks(*modules: str, env: Mapping[str, str]) -> Iterator[Start]:
  """A function (program, *argv, cwd) like `python -m program` after `modules` are imported.

  They may neither start threads nor be programs that are started. What takes a minute is ended.
  """
  command = [sys.executable, "-c", _SERVER, *modules]
  pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
  with (
    tempfile.TemporaryDirectory() as folder,
    subprocess.Popen(command, env=env, **pipes) as server,
  ):
    streams = [pathlib.Path(folder, name) for name in ("stdout", "stderr")]

    def start(program: str, *argv: str, cwd: os.PathLike[str]) -> subprocess.CompletedProcess[str]:
      for stream in streams:
        stream.write_text("")
      asked = [program, argv, *map(os.fspath, (cwd, *streams))]
      print(json.dumps(asked), file=server.stdin, flush=True)
      status = int(server.stdout.readline())
      return subprocess.CompletedProcess(argv, status, *(x.read_text() for x in streams))

    yield start
    server.stdin.close()
