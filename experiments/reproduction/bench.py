"""What figures are made with: simulated runs side by side, kept from one command to the next."""

from __future__ import annotations

import dataclasses
import inspect
import pathlib
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from experiments.program import Progress, Relayed
from experiments.searching.drive import Driver, ProbeCache, RateSearch
from experiments.searching.probe import code_version, key_of, meanings
from experiments.serving import Experiment, log_of, unserved
from experiments.sweep import Failure, Sweep
from pdjax.config import ExperimentConfig
from pdjax.core.clock import to_ticks
from pdjax.core.events import EventLog
from pdjax.core.plain import to_plain

T = TypeVar("T")
Reduce = Callable[[Experiment, EventLog], Any]
"""From a finished run to plain data: what a figure needs of it. A function of `reduce.py`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Point:
  """One simulated run of one strategy, and what to keep of it. Picklable.

  `lengths` are (prompt, output) tokens of the requests in order of arrival, and `arrivals_s` when
  they arrive, instead of what the workload draws.

  Raises:
    ValueError: an experiment of several strategies, or on the engine.
  """

  config: ExperimentConfig
  reduce: Reduce
  lengths: tuple[tuple[int, int], ...] | None = None
  arrivals_s: tuple[float, ...] | None = None

  def __post_init__(self):
    if self.config.backend != "sim" or len(self.config.strategy_names) != 1:
      raise ValueError(f"a point simulates one strategy, not {self.config.strategy_names}")

  def key(self) -> str:
    """A digest of all that the result depends on: also what names stand for, and the code."""
    parts = {
      "config": to_plain(self.config),
      **meanings(self.config),
      "requests": (self.lengths, self.arrivals_s),
      "reduce": f"{self.reduce.__module__}.{self.reduce.__qualname__}",
      "source": _source(self.reduce),
      "code": code_version(),
    }
    return key_of(parts)


def _source(function: Callable) -> dict[str, str]:
  """What a function's result depends on in its module: its text, and that of all it names there."""
  found: dict[str, str] = {}
  todo = [function.__name__]
  while todo:
    name = todo.pop()
    value = function.__globals__[name]
    if inspect.isfunction(value) and value.__module__ == function.__module__:
      found[name] = inspect.getsource(value)
      words = set(re.findall(r"\w+", found[name])) & function.__globals__.keys()
      todo += sorted(words - found.keys())
    elif isinstance(value, int | float | str | tuple):
      found[name] = repr(value)
  return found


def simulate(point: Point) -> Any:
  """Serves the point's requests in virtual time; what `reduce` makes of it, as plain data.

  Raises:
    ValueError: an experiment that cannot run.
  """
  experiment = unserved(point.config)
  if point.lengths is not None:
    experiment.requests = [
      dataclasses.replace(
        request,
        num_prompt_tokens=prompt_tokens,
        sampling=dataclasses.replace(request.sampling, max_tokens=output_tokens),
      )
      for request, (prompt_tokens, output_tokens) in zip(
        experiment.requests, point.lengths, strict=True
      )
    ]
  if point.arrivals_s is not None:
    experiment.requests = [
      dataclasses.replace(request, arrival_s=to_ticks(arrival_s))
      for request, arrival_s in zip(experiment.requests, point.arrivals_s, strict=True)
    ]
  return to_plain(point.reduce(experiment, log_of(experiment)))


class Bench:
  """Runs points and searches over a sweep; what is finished is kept in files of `out`. Owns those.

  `quick` asks a figure for less: fewer points, shorter runs. `data_dir` and `trace_dir` are folders
  of published measurements and traces, which may be absent.
  """

  def __init__(
    self,
    *,
    out: pathlib.Path,
    sweep: Sweep,
    progress: Progress,
    quick: bool,
    data_dir: pathlib.Path,
    trace_dir: pathlib.Path,
  ):
    self.out, self.quick, self.data_dir, self.trace_dir = out, quick, data_dir, trace_dir
    self._sweep, self._progress = sweep, progress
    self._points = ProbeCache(out / "points.jsonl", Any)
    self._probes = ProbeCache(out / "probes.jsonl")
    self._shared: dict[Callable, Any] = {}

  def once(self, make: Callable[[Bench], T]) -> T:
    """What `make` gives, which is called the first time only: what figures of a command share."""
    if make not in self._shared:
      self._shared[make] = make(self)
    return self._shared[make]

  @property
  def num_kept(self) -> int:
    """How many runs and probes of commands before this one were taken over."""
    return self._points.num_used_before + self._probes.num_used_before

  def show(self, text: str) -> None:
    """Shows where a figure has come to."""
    self._progress.update(text)

  def run(self, points: Mapping[Any, Point]) -> dict[Any, Any]:
    """The results by the names of the points, in their order.

    Raises:
      RuntimeError: a point failed, and why.
    """
    keys = {name: point.key() for name, point in points.items()}
    todo = {keys[name]: point for name, point in points.items()}
    todo = {key: point for key, point in todo.items() if self._points.get(key) is None}
    num_points = len(todo)
    names = {keys[name]: name for name in points}
    items = deque(todo.items())
    for number, ((key, _), result) in enumerate(self._sweep.run(_simulate, items), 1):
      if isinstance(result, Failure):
        raise RuntimeError(f"{names[key]}: {result.message}\n{result.trace}")
      self._points.add(key, str(names[key]), result)
      self.show(f"{number} of {num_points} runs")
    return {name: self._points.get(key) for name, key in keys.items()}

  def driver(self) -> Driver:
    """What runs searches that begin others, as those for placements do."""
    return Driver(self._sweep, self._probes, Relayed(self.show))

  def search(self, searches: Sequence[RateSearch]) -> None:
    """Brings searches for rates to their ends (`searching.goals.make_search` makes them).

    Raises:
      RuntimeError: a probe failed, and why.
    """
    self.driver().run(searches)
    for search in searches:
      if search.failure is not None:
        raise RuntimeError(f"{search.name}: {search.failure.message}\n{search.failure.trace}")


def _simulate(item: tuple[str, Point]) -> Any:
  return simulate(item[1])
