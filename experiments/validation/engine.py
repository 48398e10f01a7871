"""The engine on this machine beside the simulator, which knows its steps alone."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from configs.engine_validation import get_config
from configs.latency import roofline
from experiments.profiling import Point, fit_points, padding_of, steps_to_time, time_steps
from experiments.program import Progress
from experiments.serving import Experiment, check, serve_strategy, set_up
from experiments.validation.page import Reached, Section
from experiments.validation.replay import markdown_table, simulate
from pdjax.config import ExperimentConfig, PoolSpec
from pdjax.core.events import Copied, EventLog
from pdjax.core.request import Request
from pdjax.deployment import largest_budgets
from pdjax.metrics.goodput import attainment
from pdjax.metrics.latency import request_records, tpots_s, ttfts_s
from pdjax.sim.hardware import Device, Link
from pdjax.sim.latency_model import LatencyModel
from pdjax.sim.padded import Padded, Padding
from pdjax.sources import SourceError

LOADS = (0.4, 0.6, 0.8, 1.0)  # of the capacity that the steps of the first calibration promise
REPEATS = 3
SAVED = "engine.json"  # where runs are kept, beside the pictures
TITLE = "The engine on this machine"
COPY_TOKENS = (32, 128, 256, 432)


class Measured(NamedTuple):
  """What a run gave, on the engine or in simulation."""

  attainment: float
  ttft_s: float  # means
  tpot_s: float

  @classmethod
  def of(cls, log: EventLog, slo) -> Measured:
    records = request_records(log)
    return cls(
      attainment(records, slo),
      statistics.fmean(ttfts_s(records)),
      statistics.fmean(tpots_s(records)),
    )


class Calibration(NamedTuple):
  """What is known of the engine by its steps and copies; of prefill pools apart.

  These have one step in flight: what the device waits for the host is part of their steps.
  """

  latency: Mapping[str, LatencyModel]  # by role
  link: Link

  def of(self, spec: PoolSpec) -> LatencyModel:
    return self.latency["prefill" if spec.role == "prefill" else "mixed"]


class Run(NamedTuple):
  strategy: str
  load: float
  repeat: int
  measured: Measured
  simulated: Measured


def part(data_dir: pathlib.Path, show: Callable[[str], None]) -> Section:
  """Needs no data: it measures, for 25 minutes."""
  try:
    runs, label = measure(get_config(), show)
  except (ImportError, SourceError) as error:
    return Section(title=TITLE, missing=str(error))
  return section(TITLE, runs, label)


def saved(path: pathlib.Path, data_dir: pathlib.Path, show: Callable[[str], None]) -> Section:
  """The same of runs that were measured before."""
  if not path.is_file():
    return Section(title=TITLE, missing=f"there is no {path.name}, where earlier runs are kept")
  show(f"runs of the engine measured before: {path.name}")
  data = json.loads(path.read_text())
  runs = [
    Run(*head, Measured(*measured), Measured(*simulated))
    for *head, measured, simulated in data["runs"]
  ]
  return section(TITLE, runs, data["label"])


def measure(config: ExperimentConfig, show: Callable[[str], None]) -> tuple[list[Run], str]:
  """Serves every strategy at every rate, a calibration before each repeat.

  The same requests at every rate: only the gaps between them differ.
  """
  checked = check(config, pathlib.Path())
  try:
    experiment = set_up(checked, _Shown(show))
    load_before = os.getloadavg()[0]
    runs = []
    for repeat in range(REPEATS):
      calibration = calibrate(experiment, show)
      for load in LOADS:
        for strategy in config.strategy_names:
          show(f"{strategy} at {load} of capacity, repeat {repeat + 1} of {REPEATS}")
          at_rate = _at_load(experiment, load)
          log = EventLog()
          serve_strategy(at_rate, strategy, log, _Shown(lambda line: None))
          measured = Measured.of(log, experiment.slo)
          simulated = Measured.of(
            _simulated(experiment, strategy, at_rate.requests, calibration), experiment.slo
          )
          runs.append(Run(strategy, load, repeat, measured, simulated))
  finally:
    checked.world.close()
  label = (
    f"{experiment.world.label}; {time.strftime('%d %b %Y')}, load {load_before:.1f} at the start "
    f"and {os.getloadavg()[0]:.1f} at the end; "
    f"{len(experiment.requests)} requests a run, SLOs TTFT {experiment.slo.ttft_s * 1e3:.0f} ms "
    f"and TPOT {experiment.slo.tpot_s * 1e3:.1f} ms, capacity {experiment.capacity_rps:.1f}/s"
  )
  return runs, label


class _Shown(Progress):
  """Progress that goes where the suite's does."""

  is_due = True

  def __init__(self, show: Callable[[str], None]):
    self._show = show

  def update(self, text: str) -> None:
    self._show(text)

  def done(self, text: str) -> None:
    self._show(text)


def _at_load(experiment: Experiment, load: float) -> Experiment:
  factor = experiment.rate_rps / (load * experiment.capacity_rps)
  requests = [dataclasses.replace(r, arrival_s=r.arrival_s * factor) for r in experiment.requests]
  return dataclasses.replace(experiment, requests=tuple(requests))


def calibrate(experiment: Experiment, show: Callable[[str], None]) -> Calibration:
  """Times steps on all pools at once, as they will run, and copies between two of them."""
  from pdjax.engine.build import default_buckets

  config, world = experiment.config, experiment.world
  specs = [spec for name in config.strategy_names for spec in config.pools_of(name)]
  executors = [world.executor(group) for group in dict.fromkeys(spec.group for spec in specs)]
  pages = world.pages
  whole, chunk = largest_budgets(specs, config.scheduler, pages)
  padding = padding_of(default_buckets(pages, whole_budget=whole, chunk_budget=chunk))
  sizes = dict(prefill_tokens=whole, mixed_tokens=chunk)
  plans = steps_to_time(pages, **sizes, kinds=("prefill", "decode", "mixed"))
  show("calibration: steps that follow one another")
  points = time_steps(executors, plans, show=show)
  show("calibration: whole prompts, one step at a time")
  whole = [p for p in plans if p.kind == "prefill" and [s.start for s in p.prefills] == [0]]
  alone = time_steps(executors, whole, steps_in_flight=1)
  # What the peaks are is of no matter here: the fit has shares of them.
  device = Device(
    name="cpu", peak_flops_per_s=2e11, peak_bytes_per_s=1e11, memory_bytes=1e10, bytes_per_value=4
  )
  latency = {
    role: _latency(experiment, own, device, padding)
    for role, own in (("mixed", points), ("prefill", alone))
  }
  show("calibration: copies")
  return Calibration(latency, _link(experiment))


def _latency(
  experiment: Experiment, points: Sequence[Point], device: Device, padding: Padding
) -> Padded:
  model = experiment.world.model
  fitted = fit_points(points, model, device, padding)
  own = dataclasses.replace(device, fit=fitted.fit)
  return Padded(latency=roofline(model, own, 1, 1, None), padding=padding)


def _link(experiment: Experiment) -> Link:
  """The way between two pools, from copies of prompts of some lengths, one at a time."""
  prompts = experiment.requests
  longest = max(prompts, key=lambda request: request.num_prompt_tokens).prompt_ids
  requests = []
  for i, num_tokens in enumerate(COPY_TOKENS * 3):
    ids = longest[: min(num_tokens, len(longest))]
    sampling = dataclasses.replace(prompts[0].sampling, max_tokens=2)
    requests.append(
      Request(
        request_id=i,
        arrival_s=0.1 * i,
        num_prompt_tokens=len(ids),
        prompt_ids=ids,
        sampling=sampling,
      )
    )
  log = EventLog()
  serve_strategy(
    dataclasses.replace(experiment, requests=tuple(requests)),
    "disaggregated",
    log,
    _Shown(lambda line: None),
  )
  copies = [event for event in log if isinstance(event, Copied)]
  slope, latency_s = np.polyfit(
    [copy.num_tokens for copy in copies], [copy.end_s - copy.start_s for copy in copies], 1
  )
  token_bytes = experiment.world.model.kv_bytes_per_token(2)  # as `simulate` counts them
  return Link(
    name="measured", latency_s=max(0.0, latency_s), bytes_per_s=token_bytes / max(slope, 1e-12)
  )


def _simulated(
  experiment: Experiment, strategy: str, requests: Sequence[Request], calibration: Calibration
) -> EventLog:
  config = experiment.config
  return simulate(
    requests,
    config.pools_of(strategy),
    config.scheduler,
    experiment.world.model,
    calibration.of,
    lambda spec: experiment.world.pages,
    calibration.link,
  )


# The page -----------------------------------------------------------------------------------------


class Line(NamedTuple):
  """The medians of the repeats of one strategy at one load, and how far the repeats spread."""

  strategy: str
  load: float
  measured: Measured
  simulated: Measured
  spread: Measured  # largest - smallest, measured; times relative to the median

  @property
  def errors(self) -> Measured:
    """In points, and relative to what was measured."""
    return Measured(
      100 * (self.simulated.attainment - self.measured.attainment),
      self.simulated.ttft_s / self.measured.ttft_s - 1,
      self.simulated.tpot_s / self.measured.tpot_s - 1,
    )


def lines_of(runs: Sequence[Run]) -> list[Line]:
  groups: dict[tuple[str, float], list[Run]] = {}
  for run in runs:
    groups.setdefault((run.strategy, run.load), []).append(run)
  lines = []
  for (strategy, load), own in groups.items():
    measured = [run.measured for run in own]
    middle = Measured(*map(statistics.median, zip(*measured)))
    simulated = Measured(*map(statistics.median, zip(*(run.simulated for run in own))))
    ranges = Measured(*(max(values) - min(values) for values in zip(*measured)))
    spread = Measured(
      100 * ranges.attainment, ranges.ttft_s / middle.ttft_s, ranges.tpot_s / middle.tpot_s
    )
    lines.append(Line(strategy, load, middle, simulated, spread))
  return lines


def section(title: str, runs: Sequence[Run], label: str) -> Section:
  lines = lines_of(runs)
  table = [
    ("strategy", "load", "attainment, %: engine", "simulated", "spread", "TTFT mean: engine",
     "simulated", "error", "spread", "TPOT mean: engine", "simulated", "error", "spread")
  ]  # fmt: skip
  for line in lines:
    m, s, e, spread = line.measured, line.simulated, line.errors, line.spread
    table.append(
      (
        line.strategy,
        f"{line.load:g}",
        f"{100 * m.attainment:.1f}",
        f"{100 * s.attainment:.1f}",
        f"{spread.attainment:.1f}",
        f"{m.ttft_s * 1e3:.1f} ms",
        f"{s.ttft_s * 1e3:.1f} ms",
        f"{e.ttft_s:+.0%}",
        f"{spread.ttft_s:.0%}",
        f"{m.tpot_s * 1e3:.2f} ms",
        f"{s.tpot_s * 1e3:.2f} ms",
        f"{e.tpot_s:+.0%}",
        f"{spread.tpot_s:.0%}",
      )
    )
  num_repeats = len({run.repeat for run in runs})
  reached = []
  for name, form, most in (
    ("attainment", "{:.1f} points", 3.0),
    ("ttft_s", "{:.0%}", 0.1),
    ("tpot_s", "{:.0%}", 0.1),
  ):
    errors = [abs(getattr(line.errors, name)) for line in lines]
    within = sum(error <= most for error in errors)
    what = {"attainment": "attainment", "ttft_s": "mean TTFT", "tpot_s": "mean TPOT"}[name]
    reached.append(
      Reached(
        f"Engine against simulator, {what}",
        f"within {form.format(most)}",
        f"{within} of {len(errors)} strategies and rates; largest error {form.format(max(errors))}",
        within == len(errors),
      )
    )
  text = f"""{label}.

Before each of {num_repeats} repeats the steps of the pools are timed while all are busy, and copies
of a few prompts; the simulator knows these and the sizes that steps are padded to, nothing of the
runs. Then every strategy serves the same requests at every rate. Medians of the repeats; the
spread is that of the engine's. This machine is shared, and its speed swings. What is served
(`configs/engine_validation.py`) was chosen in knowledge of earlier runs: the process that schedules
runs on the same cores, which the simulator leaves out, and takes a third of the tiny model's steps
but a small share of these.

{markdown_table(table)}"""
  return Section(
    title=title, reached=reached, text=text, data={SAVED: {"label": label, "runs": runs}}
  )
