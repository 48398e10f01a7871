"""What all goals share, and the plainest two: capacity and goodput of some strategies."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Sequence
from typing import Any, Protocol

from experiments.program import Progress
from experiments.searching.drive import Driver, RateSearch
from experiments.searching.probe import Probe, unloaded
from pdjax.analysis.targets import Outcome, Stalls, Target
from pdjax.config import ExperimentConfig, num_devices_of, parse_pools
from pdjax.core.plain import to_plain

START_SHARE = 0.7  # of what step times promise: where searches begin


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
  """What a search is asked for. The SLOs of `config` are known.

  Every probe of a search has `requests_per_device` times its devices requests, as DistServe's runs
  have, and no fewer than arrive in `least_s` at the rate that step times promise: in a shorter run
  pools pass at a load that they could not hold, as it ends before their queues are long.

  Raises:
    ValueError: a number that is not positive.
  """

  config: ExperimentConfig
  target: Target
  out: pathlib.Path
  requests_per_device: int = 200
  least_s: float = 30.0
  tolerance: float = 0.05

  def __post_init__(self):
    for name in ("requests_per_device", "tolerance"):
      if not getattr(self, name) > 0:
        raise ValueError(f"{name}={getattr(self, name)} must be positive")
    if not self.least_s >= 0:
      raise ValueError(f"least_s={self.least_s} must be 0 or more")


class Goal(Protocol):
  """From candidates to a verdict. Keeps what it found, also where `run` is cut short."""

  def run(self, driver: Driver, progress: Progress) -> None: ...

  def report(self) -> tuple[str, dict[str, Any]]:
    """The text for a person, and the same as plain data."""
    ...

  def draw(self, out: pathlib.Path) -> list[str]:
    """Writes pictures; returns the names of the files. Raises ImportError without matplotlib."""
    ...


def with_pools(config: ExperimentConfig, pools: str) -> ExperimentConfig:
  """The experiment with these pools alone."""
  num_devices = num_devices_of(parse_pools(pools))
  return dataclasses.replace(config, pools=pools, num_devices=num_devices, strategies=(), tp=1)


def with_slo(config: ExperimentConfig) -> ExperimentConfig:
  """With the SLOs that follow from the devices where none were given: the same for all searches."""
  if config.slo.ttft_s is not None and config.slo.tpot_s is not None:
    return config
  slo = unloaded(config).slo
  return dataclasses.replace(
    config, slo=dataclasses.replace(config.slo, ttft_s=slo.ttft_s, tpot_s=slo.tpot_s)
  )


def make_search(
  asked: Asked,
  name: str,
  config: ExperimentConfig,
  *,
  capacity_rps: float | None = None,
  half: str | None = None,
  target: Target | None = None,
  must_beat_rps: float | None = None,
) -> RateSearch:
  """A search of the experiment's one strategy, beginning at what its `capacity_rps` suggests.

  Raises:
    ValueError: it cannot run.
  """
  (strategy,) = config.strategy_names
  specs = [s for s in config.pools_of(strategy) if half in (None, s.role)]
  capacity_rps = capacity_rps or unloaded(config).capacity_rps
  # Of decodes, step times promise one step at a time also of a pipeline, which may hold more.
  most_rps = capacity_rps * max([1, *(spec.pp for spec in specs if spec.role != "prefill")])
  num_requests = max(
    asked.requests_per_device * num_devices_of(specs), math.ceil(most_rps * asked.least_s)
  )
  workload = dataclasses.replace(config.workload, num_requests=num_requests)
  template = Probe(config=dataclasses.replace(config, workload=workload), rate_rps=1.0, half=half)
  return RateSearch(
    name,
    template,
    target or asked.target,
    start_rps=START_SHARE * capacity_rps,
    tolerance=asked.tolerance,
    must_beat_rps=must_beat_rps,
  )


# In words -----------------------------------------------------------------------------------------


def found(search: RateSearch) -> str:
  """What a search came to."""
  if search.failure is not None:
    return f"failed: {search.failure.message}"
  if not search.outcomes:
    return "not begun"
  if search.bound is None:
    passed = [o.rate_rps for o in search.outcomes if search.target.is_met(o)]
    return "interrupted" + (f"; {max(passed):.4g}/s passed" if passed else "")
  if search.is_beaten:
    return f"fails at {search.bound.failed_rps:.4g}/s, which others beat"
  if search.passed_rps is None:
    return f"none: {at_least_load(search)}"
  text = f"{search.passed_rps:.4g}/s, {search.per_device_rps:.4g} a device"
  if search.bound.failed_rps is None:
    return f"at least {text}: no rate failed"
  return text


def at_least_load(search: RateSearch) -> str:
  """Why no rate passes: what requests see that meet nobody."""
  outcome = min(search.outcomes, key=lambda o: o.rate_rps)
  slo = search.template.config.slo
  shown = [f"even at {outcome.rate_rps:.2g}/s"]
  if isinstance(search.target, Stalls):
    shown.append(f"ITL p99 is {_s(outcome.itl_p99_s)} (limit {search.target.itl_s:.3g} s)")
  else:
    shown.append(f"TTFT p90 is {_s(outcome.ttft_p90_s)} (SLO {slo.ttft_s:.3g} s)")
    shown.append(f"TPOT p90 is {_s(outcome.tpot_p90_s)} (SLO {slo.tpot_s:.3g} s)")
  if outcome.num_failed:
    shown.append(f"{outcome.num_failed} of {outcome.num_requests} requests failed")
  return ", ".join(shown)


def _s(value_s: float | None) -> str:
  return "n/a" if value_s is None else f"{value_s:.3g} s"


def asked_line(asked: Asked) -> str:
  slo = asked.config.slo
  return (
    f"Highest rate with {asked.target.label}; SLOs TTFT {slo.ttft_s:.3g} s, TPOT "
    f"{slo.tpot_s:.3g} s. {asked.requests_per_device} requests a device in every probe, or as many "
    f"as come in {asked.least_s:g} s if nothing waits, the same ones at all rates (seed "
    f"{asked.config.workload.seed}); rates to within {asked.tolerance:.2g} of themselves."
  )


def table(searches: Sequence[RateSearch]) -> str:
  """A line for each search but those that ended at the rate to beat, which share one."""
  shown = [search for search in searches if not search.is_beaten]
  width = max((len(search.name) for search in shown), default=0)
  lines = [
    f"  {search.name.ljust(width)}  {search.num_devices:3d} devices  "
    f"{len(search.outcomes):2d} probes  {found(search)}{_over(search)}"
    for search in shown
  ]
  if len(shown) < len(searches):
    lines.append(
      f"  and {len(searches) - len(shown)} that fail at a rate that one above passes, by device"
    )
  return "\n".join(lines)


def _over(search: RateSearch) -> str:
  """How long requests keep coming at the rate that passed."""
  if search.passed_rps is None:
    return ""
  num_requests = search.template.config.workload.num_requests
  return f"; {num_requests} requests in {num_requests / search.passed_rps:.3g} s"


def data_of(search: RateSearch) -> dict[str, Any]:
  return {
    "name": search.name,
    "strategy": search.template.strategy,
    "half": search.template.half,
    "num_devices": search.num_devices,
    "num_requests": search.template.config.workload.num_requests,
    "target": {"kind": type(search.target).__name__, **to_plain(search.target)},
    "bound": None if search.bound is None else to_plain(search.bound),
    "failure": None if search.failure is None else to_plain(search.failure),
    "per_device_rps": search.per_device_rps,
    "outcomes": [to_plain(o) for o in sorted(search.outcomes, key=_rate)],
  }


def _rate(outcome: Outcome) -> float:
  return outcome.rate_rps


def nothing_passes(searches: Sequence[RateSearch]) -> str | None:
  """The one message where the target is out of reach for all; None where it is not."""
  if not searches or any(s.bound is None or s.passed_rps is not None for s in searches):
    return None
  lines = [f"  {s.name}: {at_least_load(s)}" for s in searches]
  return "\n".join([f"Nothing reaches it ({searches[0].target.label}):", *lines])


# Some strategies ----------------------------------------------------------------------------------


class StrategiesGoal:
  """The capacity or goodput of each strategy of an experiment: which is best.

  Raises:
    ValueError: one of them cannot run.
  """

  def __init__(self, asked: Asked):
    self._asked, config = asked, asked.config
    self.searches = [
      make_search(
        asked,
        name,
        with_pools(config, name)
        if name == config.pools
        else dataclasses.replace(config, strategies=(name,), pools=None),
      )
      for name in config.strategy_names
    ]

  def run(self, driver: Driver, progress: Progress) -> None:
    driver.run(self.searches)

  def report(self) -> tuple[str, dict[str, Any]]:
    words = nothing_passes(self.searches) or self._verdict()
    text = "\n".join([asked_line(self._asked), table(self.searches), "Verdict", f"  {words}"])
    return text, {"searches": [data_of(s) for s in self.searches], "verdict": words}

  def _verdict(self) -> str:
    passed = sorted(
      (s for s in self.searches if s.passed_rps is not None), key=lambda s: -s.per_device_rps
    )
    if not passed:
      return "no search came to a rate."
    best, *others = passed
    text = f"{best.name} serves most: {found(best)}"
    if others:
      text += "; times as much as " + ", ".join(
        f"{other.name} {best.per_device_rps / other.per_device_rps:.2f}" for other in others
      )
    return f"{text}."

  def draw(self, out: pathlib.Path) -> list[str]:
    from experiments.figures.search import draw_frontier
    from experiments.program import whole_file

    with whole_file(out / "frontier.png") as path:
      draw_frontier(self.searches, path)
    return ["frontier.png"]
