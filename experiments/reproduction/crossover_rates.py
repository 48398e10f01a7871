"""Goodput under many SLOs from the same runs: each setting over a grid of rates, once.

A run at a rate says for every request when its first token came and how fast the others did, so
its attainment follows for any SLOs, and with those of a few rates the goodput.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from configs.hardware import HARDWARE, LINKS
from configs.latency import LATENCY
from configs.models import MODELS
from experiments.reproduction import reduce
from experiments.reproduction.bench import Bench, Point, Reduce
from experiments.reproduction.crossing import Curve
from experiments.searching.goals import with_pools
from experiments.searching.probe import unloaded
from pdjax.analysis.intensity import step_of
from pdjax.config import STRATEGIES, ExperimentConfig
from pdjax.core.request import Slo

SHARE = 0.9  # of the requests, as in DistServe
LEVELS = ("tight", "balanced", "loose")
TTFT_MULTIPLES = dict(zip(LEVELS, (5.0, 10.0, 20.0)))  # of the median prompt's prefill, alone
TPOT_MULTIPLES = dict(zip(LEVELS, (1.5, 3.0, 6.0)))  # of a decode step of `SLO_ROWS` rows
SLO_ROWS = 32  # as in Sarathi-Serve's rule (section 5.1), at the median prompt
PAIRS = tuple((ttft, tpot) for ttft in LEVELS for tpot in LEVELS)

Setting = tuple[str, str]
"""A strategy and what it was tuned by, in words."""


class Run(NamedTuple):
  """What the requests of one run saw. [requests], infinite where they saw no first token."""

  rate_rps: float
  ttft_s: np.ndarray
  tpot_s: np.ndarray  # 0 for a request of one token, which has none to be judged by

  @classmethod
  def of(cls, rate_rps: float, columns: Mapping[str, Sequence[int | None]]) -> Run:
    """From what `reduce.micros` keeps."""
    ttft_s = [np.inf if us is None else us * 1e-6 for us in columns["ttft_us"]]
    tpot_s = [0.0 if us is None else us * 1e-6 for us in columns["tpot_us"]]
    return cls(rate_rps, np.array(ttft_s), np.array(tpot_s))

  def attainment(self, slo: Slo) -> float:
    """The share of the requests that meet both."""
    return float(np.mean((self.ttft_s <= slo.ttft_s) & (self.tpot_s <= slo.tpot_s)))


def goodput_rps(runs: Iterable[Run], slo: Slo, share: float = SHARE) -> float | None:
  """The rate at which attainment first falls below `share`: linear between the two rates that were
  tried, as DistServe's scripts read it. None: it does at the lowest rate already. Where no rate
  failed it is the highest that was tried.
  """
  ordered = sorted(runs, key=lambda run: run.rate_rps)
  if not ordered:
    return None
  curve = Curve(tuple((run.rate_rps, run.attainment(slo)) for run in ordered))
  found = curve.crossing(share)
  return None if found.kind == "below everywhere" else found.x


def targets(
  config: ExperimentConfig, median_prompt: int, context: int | None = None
) -> dict[Any, Slo]:
  """The nine pairs of SLOs by (TTFT, TPOT) of `LEVELS`, from one device's step times without load.

  Decodes are behind `context` tokens, the median prompt where it is None.
  """
  device = HARDWARE[config.hardware]
  make = LATENCY[config.latency]
  latency = make(MODELS[config.model], device, 1, 1, device.link or LINKS[config.link])
  prefill_s = latency.terms_of(step_of(chunk_tokens=median_prompt)).total_s
  decode_s = latency.terms_of(step_of(rows=SLO_ROWS, context=context or median_prompt)).total_s
  return {
    (ttft, tpot): Slo(
      ttft_s=TTFT_MULTIPLES[ttft] * prefill_s, tpot_s=TPOT_MULTIPLES[tpot] * decode_s
    )
    for ttft, tpot in PAIRS
  }


def only(config: ExperimentConfig, strategy: str) -> ExperimentConfig:
  """The experiment with one strategy, which is a name or the text of pools."""
  if strategy in STRATEGIES:
    return dataclasses.replace(config, strategies=(strategy,), pools=None)
  return with_pools(config, strategy)


def tuned(
  config: ExperimentConfig, strategy: str, *, rows: int | None = None, **scheduler: Any
) -> ExperimentConfig:
  """With one strategy and with other limits."""
  changes: dict[str, Any] = {}
  if scheduler:
    changes["scheduler"] = dataclasses.replace(config.scheduler, **scheduler)
  if rows is not None:
    changes["cache"] = dataclasses.replace(config.cache, num_rows=rows)
  return dataclasses.replace(only(config, strategy), **changes)


def capacity_of(config: ExperimentConfig) -> float:
  """Requests a second that step times promise to mixed pools on all devices."""
  return unloaded(only(config, "continuous")).capacity_rps


def rates_of(capacity_rps: float, first: float, factor: float, last: float) -> list[float]:
  """A geometric grid between shares of a capacity."""
  shares = [first]
  while shares[-1] * factor <= last * (1 + 1e-9):
    shares.append(shares[-1] * factor)
  return [share * capacity_rps for share in shares]


def answer_s(config: ExperimentConfig, slo: Slo) -> float:
  """What a mean answer takes at the TPOT target."""
  pairs = config.workload.lengths.pairs(1000, np.random.default_rng(0))
  return statistics.fmean(output for _, output in pairs) * slo.tpot_s


def of_seconds(
  config: ExperimentConfig, capacity_rps: float, seconds: float, least: int
) -> ExperimentConfig:
  """With as many requests as come in so many seconds at capacity, and at least `least`."""
  num_requests = max(least, math.ceil(capacity_rps * seconds))
  workload = dataclasses.replace(config.workload, num_requests=num_requests)
  return dataclasses.replace(config, workload=workload)


def sweep_rates(
  bench: Bench,
  settings: Mapping[Any, ExperimentConfig],
  rates_rps: Mapping[Any, Sequence[float]],
  slos: Mapping[Any, Sequence[Slo]],
  keep: Reduce = reduce.micros,
) -> dict[Any, list[Run]]:
  """Runs each setting at its rates in turn, until it fails under all of its SLOs.

  `keep` is `micros` of `reduce.py`, or another that keeps the same columns.
  """
  found: dict[Any, list[Run]] = {name: [] for name in settings}
  alive = list(settings)
  for number in range(max(map(len, rates_rps.values()))):
    alive = [name for name in alive if number < len(rates_rps[name])]
    points = {
      name: Point(config=at_rate(settings[name], rates_rps[name][number]), reduce=keep)
      for name in alive
    }
    for name, columns in bench.run(points).items():
      found[name].append(Run.of(rates_rps[name][number], columns))
    alive = [
      name for name in alive if any(found[name][-1].attainment(slo) >= SHARE for slo in slos[name])
    ]
  return found


def at_rate(config: ExperimentConfig, rate_rps: float) -> ExperimentConfig:
  workload = dataclasses.replace(config.workload, rate_rps=rate_rps)
  return dataclasses.replace(config, workload=workload)


class Best(NamedTuple):
  """The best setting of a strategy. `goodput_rps` None: no setting reaches the SLOs."""

  goodput_rps: float | None
  how: str = ""


def best_of(runs: Mapping[Setting, Sequence[Run]], slo: Slo) -> dict[str, Best]:
  """Each strategy under the setting that serves most."""
  found: dict[str, Best] = {}
  for (strategy, how), own in runs.items():
    rate_rps = goodput_rps(own, slo)
    if strategy not in found or (rate_rps or 0.0) > (found[strategy].goodput_rps or 0.0):
      found[strategy] = Best(rate_rps, how if rate_rps is not None else "")
  return found


class Cell(NamedTuple):
  """Who wins under one pair of SLOs. Without a winner no strategy reaches them."""

  winner: str | None
  runner_up: str | None = None
  margin_percent: float | None = None  # over the runner-up; None: nobody else reaches them


def cell_of(best: Mapping[str, Best]) -> Cell:
  passed = [(own.goodput_rps, name) for name, own in best.items() if own.goodput_rps is not None]
  if not passed:
    return Cell(None)
  (most, winner), *others = sorted(passed, key=lambda pair: -pair[0])
  if not others:
    return Cell(winner)
  second, runner_up = others[0]
  return Cell(winner, runner_up, 100 * (most / second - 1))


def lead_percent(ours: float | None, theirs: float | None) -> float:
  """By how much one goodput is above another; without end where the other is none. Two that are
  none are level.
  """
  if ours is None:
    return 0.0 if theirs is None else -100.0
  return math.inf if theirs is None else 100 * (ours / theirs - 1)
