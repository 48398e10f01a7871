"""What all goals share, and the plainest two: capacity and goodput of some strategies."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Sequence
from typing import Any, Protocol

from experiments.program import Progress
from experiments.searching.drive import (
  LONGER,
  MOST_REQUESTS,
  NUM_DRAWS,
  START_SHARE,
  Driver,
  RateSearch,
)
from experiments.searching.probe import Probe, unloaded
from pdjax.analysis.targets import Outcome, Stalls, Target
from pdjax.config import ExperimentConfig, num_devices_of, parse_pools
from pdjax.core.plain import to_plain

MOST_NAMED = 3  # searches, of those with a caveat of their own


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
  """What a search is asked for. The SLOs of `config` are known.

  Every probe has `num_requests`, or those that come in `most_s` where they are fewer. Where it is
  None it has `requests_per_device` times its devices, as DistServe's runs have, and no fewer than
  arrive in `least_s` at the rate that step times promise. With `confirms`, what is reported is held
  against longer runs (`RateSearch`); candidates, of which one is chosen, are not.

  Raises:
    ValueError: a number that is not positive.
  """

  config: ExperimentConfig
  target: Target
  out: pathlib.Path
  num_requests: int | None = None
  most_s: float | None = None
  requests_per_device: int = 200
  least_s: float = 150.0
  tolerance: float = 0.05
  confirms: bool = False

  def __post_init__(self):
    for name in ("num_requests", "most_s", "requests_per_device", "tolerance"):
      value = getattr(self, name)
      if value is not None and not value > 0:
        raise ValueError(f"{name}={value} must be positive")
    if not self.least_s >= 0:
      raise ValueError(f"least_s={self.least_s} must be 0 or more")

  @property
  def length(self) -> str:
    """Of a probe, in words."""
    if self.num_requests is None:
      return (
        f"{self.requests_per_device} requests a device in every probe, or as many as come in "
        f"{self.least_s:g} s if nothing waits"
      )
    text = f"{self.num_requests} requests in every probe"
    return text if self.most_s is None else f"{text}, or those of {self.most_s:g} s"


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
  is_candidate: bool = False,
) -> RateSearch:
  """A search of the experiment's one strategy, beginning at what its `capacity_rps` suggests.

  Raises:
    ValueError: it cannot run.
  """
  (strategy,) = config.strategy_names
  specs = [s for s in config.pools_of(strategy) if half in (None, s.role)]
  capacity_rps = capacity_rps or unloaded(config).capacity_rps
  num_requests = asked.num_requests or max(
    asked.requests_per_device * num_devices_of(specs), math.ceil(capacity_rps * asked.least_s)
  )
  workload = dataclasses.replace(config.workload, num_requests=num_requests)
  template = Probe(config=dataclasses.replace(config, workload=workload), rate_rps=1.0, half=half)
  return RateSearch(
    name,
    template,
    target or asked.target,
    start_rps=START_SHARE * capacity_rps,
    tolerance=asked.tolerance,
    most_s=asked.most_s,
    must_beat_rps=must_beat_rps,
    confirms=asked.confirms and not is_candidate,
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
    text = f"at least {text}: no rate failed"
  return text + _confirmed(search)


def _confirmed(search: RateSearch) -> str:
  """What the long runs say, which are of other draws of requests: so much is chance."""
  if not search.long_runs:
    return ""
  runs = search.long_runs
  lo, *_, hi = sorted(search.target.value(o) for o in runs)
  verdict = "holds" if search.is_confirmed else "does NOT hold"
  return (
    f"; {runs[0].rate_rps:.4g}/s {verdict} in {len(runs)} draws of {runs[0].num_requests} requests "
    f"({lo:.3g} to {hi:.3g})"
  )


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
  slo, text = asked.config.slo, f"Highest rate with {asked.target.label}"
  if not isinstance(asked.target, Stalls):  # which has limits of its own
    text += f"; SLOs TTFT {slo.ttft_s:.3g} s, TPOT {slo.tpot_s:.3g} s"
  text += (
    f". {asked.length}, the first of the same ones at all rates and for all pools (seed "
    f"{asked.config.workload.seed}); rates to within {asked.tolerance:.2g} of themselves."
  )
  if asked.confirms:
    text += (
      f" What is reported is held, lower by as much, against {NUM_DRAWS} draws of {LONGER} times "
      f"as many (at most {MOST_REQUESTS}); where most fail, it is searched again with so many."
    )
  return text


def caveats_of(searches: Sequence[RateSearch]) -> list[str]:
  """What a reader must know of the step times: of all of them, and of those that were not measured
  the like of, at the rates that passed.
  """
  outcomes = [o for search in searches for o in _all_outcomes(search)]
  found = dict.fromkeys(c for o in outcomes for joined in o.caveats for c in joined.split("; "))
  beyond = [
    f"{search.name} at {outcome.rate_rps:.4g}/s: {text}"
    for search in searches
    for outcome in search.outcomes
    if outcome.rate_rps == search.passed_rps
    for text in outcome.extrapolated
  ]
  more = [f"and so {len(beyond) - MOST_NAMED} more"] if len(beyond) > MOST_NAMED else []
  return [*found, *beyond[:MOST_NAMED], *more]


def _all_outcomes(search: RateSearch) -> list[Outcome]:
  return [*search.earlier, *search.outcomes, *search.long_runs]


def table(searches: Sequence[RateSearch]) -> str:
  """A line for each search but those that ended at the rate to beat, which share one."""
  shown = [search for search in searches if not search.is_beaten]
  width = max((len(search.name) for search in shown), default=0)
  lines = [
    f"  {search.name.ljust(width)}  {search.num_devices:3d} devices  "
    f"{search.num_probes:2d} probes  {found(search)}{_over(search)}"
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
  (num_requests,) = {o.num_requests for o in search.outcomes if o.rate_rps == search.passed_rps}
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
    "long_runs": [to_plain(o) for o in search.long_runs],
    "is_confirmed": search.is_confirmed if search.long_runs else None,
    "earlier": [to_plain(o) for o in search.earlier],
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
