"""When traffic drifts, what would be placed now: DistServe's replanning (section 4.3)."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from experiments.program import Progress, whole_file
from experiments.searching.drive import Driver, RateSearch
from experiments.searching.goals import Asked, found
from experiments.searching.placing import PlacementGoal
from pdjax.analysis.placement import Nodes, Placement
from pdjax.analysis.replan import (
  Drift,
  Seen,
  Window,
  check_threshold,
  first_drift,
  windows,
)
from pdjax.core.plain import to_plain


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Change:
  """What a search for the traffic of a window came to. The first has no drift and nothing before.

  `kept` is the placement before it, on the new traffic.
  """

  window: Window
  drifts: tuple[Drift, ...]
  goal: PlacementGoal
  kept: RateSearch | None = None

  @property
  def placement(self) -> Placement | None:
    return self.goal.placement


class ReplanGoal:
  """Searches a placement for the first window of a trace, and another for each that drifts from it.

  A window's lengths are those that it has, in pairs; arrivals are drawn. Placements are replicated
  for the rate of their window. A window of fewer than `least_requests` shows its rate alone, and is
  placed for the lengths before it. Writes the lengths of the windows into the folder of results.

  Raises:
    ValueError: a trace that does not hold a window of enough requests and another after it, or a
      number out of range.
  """

  def __init__(
    self,
    asked: Asked,
    requests: Sequence[Seen],
    cluster: Nodes,
    *,
    affinity: str,
    node_link: str,
    width_s: float,
    threshold: float,
    least_requests: int = 100,
    most_changes: int = 3,
  ):
    self._asked, self._cluster = asked, cluster
    self._how = dict(affinity=affinity, node_link=node_link)
    self._threshold, self._least = threshold, least_requests
    self._most_changes, self._width_s = most_changes, width_s
    check_threshold(threshold)
    for name, value in (("least_requests", least_requests), ("most_changes", most_changes)):
      if value < 1:
        raise ValueError(f"{name}={value} must be at least 1")
    every = windows(requests, width_s)
    first = next((i for i, w in enumerate(every) if len(w.requests) >= least_requests), len(every))
    self.windows = every[first:]  # what comes before is too little to place pools for
    if len(self.windows) < 2:
      most = max((len(w.requests) for w in every), default=0)
      raise ValueError(
        f"of {len(every)} windows of {width_s:g} s, {len(self.windows)} come from the first with "
        f"{least_requests} requests on (the fullest has {most}): there is no drift to see; take "
        f"wider windows, or a lower --least_requests"
      )
    # The same mistakes as in a search for one placement, before anything runs.
    PlacementGoal(asked, cluster, **self._how)
    self.changes: list[Change] = []

  def run(self, driver: Driver, progress: Progress) -> None:
    window, *rest = self.windows
    later = iter(rest)
    self._add(window, (), driver, progress)
    while self.changes[-1].placement is not None and len(self.changes) <= self._most_changes:
      drifted = first_drift(window, later, self._threshold, least_requests=self._least)
      if drifted is None:
        return
      window, found_drifts = drifted
      progress.done(f"{_span(window)} drifted: {'; '.join(map(str, found_drifts))}")
      self._add(window, tuple(found_drifts), driver, progress)

  def _add(
    self, window: Window, drifts: tuple[Drift, ...], driver: Driver, progress: Progress
  ) -> None:
    name = f"window-{window.start_s:g}-{window.end_s:g}.csv"
    rows = [f"{r.prompt_tokens},{r.output_tokens}" for r in window.sample]
    with whole_file(self._asked.out / name) as path:
      path.write_text("\n".join(["num_prefill_tokens,num_decode_tokens", *rows]) + "\n")
    workload = self._asked.config.workload
    workload = dataclasses.replace(
      workload,
      trace=str(self._asked.out / name),
      arrivals="poisson" if workload.arrivals == "trace" else workload.arrivals,
      # What follows was asked of the recording, and is in the windows already.
      length_scale=1,
      trace_limit_s=None,
      trace_speed=1.0,
      trace_spread_s=None,
    )
    asked = dataclasses.replace(
      self._asked, config=dataclasses.replace(self._asked.config, workload=workload)
    )
    goal = PlacementGoal(
      asked, self._cluster, **self._how, rate_rps=window.rate_rps, baselines=False
    )
    change = Change(window=window, drifts=drifts, goal=goal)
    before = self.changes[-1].placement if self.changes else None
    self.changes.append(change)
    goal.run(driver, progress)
    if before is not None:
      kept = goal.final if before == goal.placement else goal.serve(before, driver)
      self.changes[-1] = dataclasses.replace(change, kept=kept)

  def report(self) -> tuple[str, dict[str, Any]]:
    lines = [
      f"{len(self.windows)} windows of {self._width_s:g} s, from the first with {self._least} "
      f"requests on; one with fewer shows its rate alone. A search runs again when the rate or a "
      f"mean length is more than {self._threshold:.0%} off, up or down, what was planned for."
    ]
    for change in self.changes:
      lines.append(f"{_span(change.window)}: {_traffic(change.window)}")
      if change.drifts:
        lines.append(f"  drifted: {'; '.join(map(str, change.drifts))}")
      lines += [f"  {line}" for line in change.goal.verdict().splitlines()]
    words = self._verdict()
    lines += ["Verdict", *(f"  {line}" for line in words)]
    data = {
      "threshold": self._threshold,
      "changes": [
        {
          "window_s": [change.window.start_s, change.window.end_s],
          "rate_rps": change.window.rate_rps,
          "mean_prompt_tokens": change.window.mean_prompt_tokens,
          "mean_output_tokens": change.window.mean_output_tokens,
          "drifts": [to_plain(drift) for drift in change.drifts],
          "kept_rps": change.kept and change.kept.passed_rps,
          **change.goal.report()[1],
        }
        for change in self.changes
      ],
      "verdict": "\n".join(words),
    }
    return "\n".join(lines), data

  def _verdict(self) -> list[str]:
    changes = [c for c in self.changes if c.kept is not None]
    if not changes:
      return ["no drift was found." if self.changes else "nothing was searched."]
    lines = []
    for before, change in zip(self.changes, self.changes[1:]):
      if change.kept is None or change.placement is None:
        continue
      old, new = before.placement.pools, change.placement.pools
      if old == new:
        lines.append(f"{_span(change.window)}: keep {old} ({found(change.kept)}).")
      else:
        rate = f"{change.window.rate_rps:.4g}/s"
        lines.append(
          f"{_span(change.window)}: {old} -> {new}. On this traffic, {rate}, "
          f"the old serves {found(change.kept)}; the new {found(change.goal.final)}."
        )
    return lines

  def draw(self, out: pathlib.Path) -> list[str]:
    from experiments.figures.search import draw_windows

    with whole_file(out / "windows.png") as path:
      draw_windows(self.windows, [change.window for change in self.changes], path)
    return ["windows.png"]


def _span(window: Window) -> str:
  return f"{window.start_s:g} to {window.end_s:g} s"


def _traffic(window: Window) -> str:
  return (
    f"{window.rate_rps:.4g} requests a second, mean {window.mean_prompt_tokens:.0f} prompt and "
    f"{window.mean_output_tokens:.0f} output tokens"
  )
