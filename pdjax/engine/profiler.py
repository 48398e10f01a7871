"""A run under JAX's profiler, with the scopes of its operators where Perfetto shows them.

XProf reads `plugins/profile/TIME/HOST.xplane.pb`, which has the compiled steps, with the scope of
each operator. The trace of a CPU names operators alone (`fusion.12`), so each thread that ran some
has a track of their scopes in `perfetto_trace.json.gz`: phase, layer, part.
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

PERFETTO = "perfetto_trace.json.gz"
_OP = re.compile(r'^\s*(?:ROOT )?%?([\w.-]+) = .*metadata=\{[^}]*op_name="([^"]+)"', re.MULTILINE)
_SCOPE = re.compile(
  r"\b(prefill|decode|mixed)/(?:(embed|unembed|sample|layer_\d+)(?:/(attention|mlp)\b)?)?"
)
Path = tuple[str, ...]
"""Of an operator: phase, then layer and part, or embed, unembed or sample."""


@contextlib.contextmanager
def profiled(folder: pathlib.Path) -> Iterator[None]:
  """Profiles what runs meanwhile into `folder`; the Python of the host is left out."""
  options = jax.profiler.ProfileOptions()
  options.python_tracer_level = 0
  try:
    with jax.profiler.trace(str(folder), profiler_options=options):
      yield
  finally:
    for path in folder.glob("plugins/profile/*/*.trace.json.gz"):
      with gzip.open(path, "rt") as file:
        rows = [row for row in json.load(file)["traceEvents"] if row]
      modules = {row["args"]["hlo_module"] for row in rows if "hlo_module" in row.get("args", {})}
      with gzip.open(path.with_name(PERFETTO), "wt") as file:
        json.dump({"traceEvents": rows + scope_rows(rows, compiled_scopes(modules))}, file)


def compiled_scopes(names: Iterable[str]) -> dict[str, list[dict[str, Path]]]:
  """Operator -> scope of every program of these names that is loaded: one for each shape."""
  found: dict[str, list[dict[str, Path]]] = {name: [] for name in names}
  for executable in jax.devices()[0].client.live_executables():
    for module in executable.hlo_modules():
      if module.name in found:
        found[module.name].append(scopes_of(module.to_string()))
  return found


def scopes_of(text: str) -> dict[str, Path]:
  """The scope of each operator of a compiled program that has one, from its HLO."""
  matches = ((name, _SCOPE.search(op_name)) for name, op_name in _OP.findall(text))
  return {name: tuple(filter(None, match.groups())) for name, match in matches if match}


def scope_rows(
  rows: Sequence[Mapping[str, Any]], programs: Mapping[str, Sequence[Mapping[str, Path]]]
) -> list[dict[str, Any]]:
  """Slices of scopes, on a track beside each thread that ran operators, and the tracks' names.

  `rows` are those of a trace. Programs of one name are told apart by the operators of a run.
  """
  threads: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
  names: dict[tuple[int, int], str] = {}
  ops: dict[tuple[str, str], set[str]] = {}  # of a run
  for row in rows:
    args = row.get("args", {})
    if row.get("ph") == "X" and "hlo_op" in args and args.get("hlo_module") in programs:
      threads.setdefault((row["pid"], row["tid"]), []).append(row)
      ops.setdefault(_run(row), set()).add(args["hlo_op"])
    elif row.get("name") == "thread_name":
      names[row["pid"], row["tid"]] = args["name"]
  scopes = {
    (module, run): max(programs[module], key=lambda own: len(found & own.keys()), default={})
    for (module, run), found in ops.items()
  }
  made: list[dict[str, Any]] = []
  last_tid = max((row["tid"] for row in rows if isinstance(row.get("tid"), int)), default=0)
  for number, (thread, own) in enumerate(sorted(threads.items()), 1):
    track = {"pid": thread[0], "tid": last_tid + number}
    name = {"name": f"scopes of {names.get(thread, thread[1])}"}
    made.append({"name": "thread_name", "ph": "M", **track, "args": name})
    made += [slice_ | track for slice_ in _slices(own, scopes)]
  return made


def _run(row: Mapping[str, Any]) -> tuple[str, str]:
  """The program of an operator, and which run of it."""
  args = row["args"]
  return args["hlo_module"], args.get("run_id", "")


def _slices(
  rows: Iterable[Mapping[str, Any]], scopes: Mapping[tuple[str, str], Mapping[str, Path]]
) -> Iterator[dict[str, Any]]:
  """Operators of a thread that follow one another in one scope, as one slice of each level."""
  open_: list[dict[str, Any]] = []  # one inside the other
  run = None

  def close(depth: int, before: float) -> Iterator[dict[str, Any]]:
    while len(open_) > depth:
      slice_ = open_.pop()
      slice_["dur"] = min(slice_.pop("end"), before) - slice_["ts"]
      yield slice_

  for row in sorted(rows, key=lambda row: row["ts"]):
    start, end = row["ts"], row["ts"] + row["dur"]
    path = scopes[_run(row)].get(row["args"]["hlo_op"])
    if path is None:
      continue
    names = [slice_["name"] for slice_ in open_] if run == _run(row) else []
    run = _run(row)
    num_same = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(names, path))))
    yield from close(num_same, start)
    for name in path[num_same:]:
      open_.append({"name": name, "cat": "scope", "ph": "X", "ts": start, "end": end})
    for slice_ in open_:
      slice_["end"] = max(slice_["end"], end)
  yield from close(0, float("inf"))
