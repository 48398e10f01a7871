"""Runs searches side by side: probes over a sweep, finished ones in a file, a line for each."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any

from experiments.program import Progress
from experiments.searching.probe import Probe, simulate
from experiments.sweep import Failure, Sweep
from pdjax.analysis.rate_search import RateBound, search_rate
from pdjax.analysis.targets import Outcome, Target
from pdjax.core.plain import from_plain, to_plain

START_SHARE = 0.7  # of what is promised: where searches begin
LONGER = 4  # times the requests of a probe are those of a long run
NUM_DRAWS = 3  # of requests, in long runs
MOST_REPEATS = 2  # of a search whose rate long runs do not hold
MOST_REQUESTS = 30_000  # of a long run, whose log takes some 17 kB each


class ProbeCache:
  """The finished probes of a folder by their keys, a JSON line each. Owns the file.

  Their results are of the type `result`, as plain data in the file.
  """

  def __init__(self, path: pathlib.Path, result: Any = Outcome):
    self._path = path
    self._found: dict[str, Any] = {}
    self._ends_whole = True
    if path.is_file():
      text = path.read_text()
      self._ends_whole = text.endswith("\n") or not text
      for line in text.splitlines():
        try:
          record = json.loads(line)
          self._found[record["key"]] = from_plain(result, record["outcome"])
        except (ValueError, TypeError, KeyError):
          continue  # cut off, or of another version: it is run again
    self._before = frozenset(self._found)
    self._used: set[str] = set()

  def __len__(self) -> int:
    return len(self._found)

  @property
  def num_used_before(self) -> int:
    """How many that the file had from the beginning were asked for. Of other code none are."""
    return len(self._used)

  def get(self, key: str) -> Any | None:
    if key in self._before:
      self._used.add(key)
    return self._found.get(key)

  def add(self, key: str, label: str, outcome: Any) -> None:
    """Remembers an outcome, also on disk: at once, as the next one may never come."""
    self._found[key] = outcome
    line = json.dumps({"key": key, "label": label, "outcome": to_plain(outcome)})
    with self._path.open("a") as file:
      file.write(("" if self._ends_whole else "\n") + line + "\n")
    self._ends_whole = True


class RateSearch:
  """One search for the highest rate at which `template` meets a target. Fed by a `Driver`.

  A probe has the template's requests, or those that come in `most_s` where they are fewer.

  With `confirms`, the rate that was found has to hold, a tolerance lower, in most of `NUM_DRAWS`
  draws of `LONGER` times the requests (or `MOST_REQUESTS`): in a short run pools pass at a load
  that they could not hold, as it ends before their queues are long. Where it does not, the search
  begins again with as many requests, up to `MOST_REPEATS` times. `outcomes` are those of the last
  search, `long_runs` those that confirmed it or did not, `earlier` all before.

  `bound` is None until it ends, and stays so where a probe failed: `failure` says why.
  """

  def __init__(
    self,
    name: str,
    template: Probe,
    target: Target,
    *,
    start_rps: float,
    tolerance: float,
    most_s: float | None = None,
    must_beat_rps: float | None = None,
    confirms: bool = False,
  ):
    self.name, self.template, self.target = name, template, target
    self.outcomes: list[Outcome] = []
    self.long_runs: list[Outcome] = []
    self.earlier: list[Outcome] = []
    self.bound: RateBound | None = None
    self.failure: Failure | None = None
    self._tolerance, self._most_s = tolerance, most_s
    self._must_beat_rps, self._confirms = must_beat_rps, confirms
    self._points = self._search(start_rps)
    self._next: Probe = next(self._points)

  @property
  def num_devices(self) -> int:
    """Those whose work counts."""
    specs = self.template.config.pools_of(self.template.strategy)
    return sum(len(spec.devices) for spec in specs if self.template.half in (None, spec.role))

  @property
  def num_probes(self) -> int:
    return len(self.outcomes) + len(self.long_runs) + len(self.earlier)

  @property
  def passed_rps(self) -> float | None:
    return None if self.bound is None else self.bound.passed_rps

  @property
  def per_device_rps(self) -> float | None:
    return None if self.passed_rps is None else self.passed_rps / self.num_devices

  @property
  def is_beaten(self) -> bool:
    """Whether it ended at the rate that it had to beat."""
    return self._must_beat_rps is not None and self.bound is not None and self.passed_rps is None

  @property
  def is_confirmed(self) -> bool:
    """Whether most of the long runs passed."""
    return 2 * sum(map(self.target.is_met, self.long_runs)) > len(self.long_runs)

  @property
  def is_over(self) -> bool:
    return self.bound is not None or self.failure is not None

  def next_probe(self) -> Probe | None:
    """The next point to look at, or None at the end."""
    return None if self.is_over else self._next

  def take(self, outcome: Outcome) -> None:
    """The outcome of the point asked for last."""
    try:
      self._next = self._points.send(outcome)
    except StopIteration as stop:
      self.bound = stop.value

  def _search(self, start_rps: float) -> Generator[Probe, Outcome, RateBound]:
    must_beat_rps = self._must_beat_rps
    for repeat in range(1 + MOST_REPEATS):
      bound = yield from self._bound(start_rps, must_beat_rps)
      if bound.passed_rps is None or not self._confirms:
        break
      for draw in range(NUM_DRAWS):
        rate_rps = bound.passed_rps / (1 + self._tolerance)
        self.long_runs.append((yield self._probe(rate_rps, longer=LONGER, draw=draw)))
      template = self._probe(1.0, longer=LONGER)
      if self.is_confirmed or repeat == MOST_REPEATS or template == self.template:
        break
      self.earlier += self.outcomes + self.long_runs
      self.outcomes, self.long_runs = [], []
      self.template = template
      start_rps, must_beat_rps = START_SHARE * bound.passed_rps, None
    return bound

  def _bound(
    self, start_rps: float, must_beat_rps: float | None
  ) -> Generator[Probe, Outcome, RateBound]:
    rates = search_rate(start_rps, tolerance=self._tolerance, must_beat_rps=must_beat_rps)
    rate_rps = next(rates)
    while True:
      self.outcomes.append((yield self._probe(rate_rps)))
      try:
        rate_rps = rates.send(self.target.is_met(self.outcomes[-1]))
      except StopIteration as stop:
        return stop.value

  def _probe(self, rate_rps: float, *, longer: int = 1, draw: int = 0) -> Probe:
    """The template at a rate, with so many times its requests, of another draw."""
    config = self.template.config
    workload = config.workload
    num_requests = max(workload.num_requests, min(longer * workload.num_requests, MOST_REQUESTS))
    if self._most_s is not None:
      num_requests = min(num_requests, math.ceil(rate_rps * self._most_s))
    workload = dataclasses.replace(workload, num_requests=num_requests, seed=workload.seed + draw)
    return dataclasses.replace(
      self.template, rate_rps=rate_rps, config=dataclasses.replace(config, workload=workload)
    )


class Driver:
  """Runs searches, and keeps all that it was given. Writes the cache."""

  def __init__(
    self,
    sweep: Sweep,
    cache: ProbeCache,
    progress: Progress,
    simulate: Callable[[Probe], Outcome] = simulate,
  ):
    self._sweep, self._cache, self._progress, self._simulate = sweep, cache, progress, simulate
    self.searches: list[RateSearch] = []
    self.num_simulated = self.num_reused = 0

  def run(self, searches: Sequence[RateSearch]) -> None:
    """Brings all these searches to their ends."""
    self.searches += searches
    todo: deque[_Item] = deque()
    of_key: dict[str, list[RateSearch]] = {}  # who waits for a probe: two may ask for the same

    def proceed(search: RateSearch) -> None:
      while (probe := search.next_probe()) is not None:
        key = probe.key()
        outcome = self._cache.get(key)
        if outcome is None:
          waiting = of_key.setdefault(key, [])
          waiting.append(search)
          if len(waiting) == 1:
            todo.append(_Item(key=key, probe=probe, work=self._simulate))
          return
        self.num_reused += 1
        self._report(search, outcome, "known")
        search.take(outcome)

    for search in searches:
      proceed(search)
    for item, result in self._sweep.run(_simulate, todo):
      waiting = of_key.pop(item.key)
      if not isinstance(result, Failure):
        self.num_simulated += 1
        self._cache.add(item.key, item.probe.label, result)
      for search in waiting:
        if isinstance(result, Failure):
          search.failure = result
          self._progress.done(f"{search.name}: {item.probe.label} FAILED: {result.message}")
          continue
        self._report(search, result)
        search.take(result)
        proceed(search)
      self._show(searches)

  def _report(self, search: RateSearch, outcome: Outcome, note: str = "") -> None:
    value = search.target.value(outcome)
    shown = "n/a" if value is None else f"{value:.4g}"
    verdict = "passes" if search.target.is_met(outcome) else "fails"
    self._progress.done(
      f"{search.name}: {outcome.rate_rps:.4g}/s, {outcome.num_requests} requests: {shown} against "
      f"{search.target.limit:.4g}, {verdict}" + (f" ({note})" if note else "")
    )

  def _show(self, searches: Sequence[RateSearch]) -> None:
    num_over, n = sum(search.is_over for search in searches), len(searches)
    filled = 20 * num_over // n
    self._progress.update(
      f"[{'#' * filled}{'.' * (20 - filled)}] {num_over} of {n} searches, "
      f"{self.num_simulated} probes simulated, {self.num_reused} known before"
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Item:
  """A probe on its way through a sweep."""

  key: str
  probe: Probe
  work: Callable[[Probe], Outcome]


def _simulate(item: _Item) -> Outcome:
  return item.work(item.probe)
