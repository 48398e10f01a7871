"""The engine on this machine beside the simulator, which knows its steps alone."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from configs.engine_validation import get_config
from experiments.profiling import Point, kept_busy, padding_of, time_steps
from experiments.program import SILENT, Relayed
from experiments.serving import Experiment, check, serve_strategy, set_up
from experiments.validation.page import Reached, Section
from experiments.validation.replay import markdown_table, simulate
from experiments.worlds import pools_of
from pdjax.config import ExperimentConfig
from pdjax.core.events import Copied, EventLog
from pdjax.core.plan import StepPlan
from pdjax.core.request import Request
from pdjax.deployment import largest_budgets
from pdjax.metrics.goodput import attainment
from pdjax.metrics.latency import request_records, tpots_s, ttfts_s
from pdjax.metrics.utilisation import overlaps
from pdjax.scheduling.pages import PageConfig
from pdjax.scheduling.probe import probe_plan
from pdjax.sim.hardware import Link
from pdjax.sim.padded import PaddedSteps, Padding
from pdjax.sources import SourceError

LOADS = (0.4, 0.6, 0.8, 1.0)  # of the capacity that the steps of the first calibration promise
REPEATS = 3
SAVED = "engine.json"  # where runs are kept, beside the pictures
TITLE = "The engine on this machine"
NEIGHBOURS = {"prefill": "prefill", "mixed": "prefill", "decode": "decode"}
"""Kind of another pool's step -> the one that was timed in its place."""
COPY_TOKENS = (32, 128, 256, 432)
ROUNDS = 4  # of simulations: by the third one the shares hardly change


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
  """What is known of the engine by its steps and copies.

  Steps take longer beside those of another pool, and how much longer depends on the kind of these:
  the pools share the machine's memory.
  """

  alone: PaddedSteps
  beside: Mapping[str, PaddedSteps]  # by `NEIGHBOURS`
  link: Link


class Run(NamedTuple):
  strategy: str
  load: float
  repeat: int
  measured: Measured
  simulated: Measured


def part(data_dir: pathlib.Path, show: Callable[[str], None]) -> Section:
  """Needs no data: it measures, for 40 minutes."""
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
  """Serves every strategy at every rate, in each repeat, with a pass of timings before each rate.

  What the passes of a repeat found is what the simulator knows of it. The same requests at every
  rate: only the gaps between them differ.
  """
  checked = check(config, pathlib.Path())
  try:
    experiment = set_up(checked, Relayed(show))
    padding = _padding(experiment)
    load_before = os.getloadavg()[0]
    runs = []
    for repeat in range(REPEATS):
      passes, served = [], []
      for load in LOADS:
        passes.append(time_pools(experiment, padding, len(passes), show))
        at_rate = with_rate(experiment, load * experiment.capacity_rps)
        for strategy in config.strategy_names:
          show(f"{strategy} at {load} of capacity, repeat {repeat + 1} of {REPEATS}")
          log = EventLog()
          serve_strategy(at_rate, strategy, log, SILENT)
          served.append((strategy, load, at_rate.requests, Measured.of(log, experiment.slo)))
      calibration = calibration_of(experiment, padding, passes)
      for strategy, load, requests, measured in served:
        log = _simulated(experiment, strategy, requests, calibration)
        runs.append(Run(strategy, load, repeat, measured, Measured.of(log, experiment.slo)))
  finally:
    checked.world.close()
  label = (
    f"{experiment.world.label}; {time.strftime('%d %b %Y')}, load {load_before:.1f} at the start "
    f"and {os.getloadavg()[0]:.1f} at the end; "
    f"{len(experiment.requests)} requests a run, SLOs TTFT {experiment.slo.ttft_s * 1e3:.0f} ms "
    f"and TPOT {experiment.slo.tpot_s * 1e3:.1f} ms, capacity {experiment.capacity_rps:.1f}/s"
  )
  return runs, label


def with_rate(experiment: Experiment, rate_rps: float) -> Experiment:
  """The same requests at another rate: only the gaps between them differ."""
  factor = experiment.rate_rps / rate_rps
  requests = [dataclasses.replace(r, arrival_s=r.arrival_s * factor) for r in experiment.requests]
  return dataclasses.replace(experiment, requests=tuple(requests))


class Timed(NamedTuple):
  """One pass over the steps and the copies that are timed."""

  alone: Sequence[Point]  # in the order of `steps_of_each_size`
  beside: Mapping[str, Sequence[Point]]
  copies: Sequence[Copied]


def time_pools(
  experiment: Experiment, padding: Padding, number: int, show: Callable[[str], None]
) -> Timed:
  """Times steps of every size on one pool, another in each pass, and copies between two.

  The steps run alone, beside prompts that another pool computes, and beside its decodes.
  """
  world = experiment.world
  groups = dict.fromkeys(spec.group for spec in pools_of(experiment.config))
  executors = [world.executor(group) for group in groups]
  plans = steps_of_each_size(world.pages, padding)
  one, other = (executors[(number + i) % len(executors)] for i in (0, 1))
  prompts = [request.num_prompt_tokens for request in experiment.requests]
  context, most_rows = round(statistics.fmean(prompts)), world.pages.num_rows // 2
  # Of changing sizes, as in a run: beside one and the same step others take hardly longer.
  neighbours = {
    "prefill": [probe_plan(world.pages, prefills=(prompt,)) for prompt in prompts],
    "decode": [
      probe_plan(world.pages, decodes=rows, context=context)
      for rows in random.Random(number).sample(range(1, 1 + most_rows), most_rows)
    ],
  }
  alone, beside = time_steps(one, plans, passes=1, show=show), {}
  for kind, its in neighbours.items():
    with kept_busy(other, its):
      beside[kind] = time_steps(one, plans, passes=1, show=show)
  return Timed(alone, beside, _time_copies(experiment))


def calibration_of(
  experiment: Experiment, padding: Padding, passes: Sequence[Timed]
) -> Calibration:
  """From the median time of each step, and from all copies."""

  def steps_of(timed: Iterable[Sequence[Point]]) -> PaddedSteps:
    timings = [
      (same[0].counts, statistics.median(point.seconds for point in same))
      for same in zip(*timed, strict=True)
    ]
    return PaddedSteps.of(padding, timings)

  copies = [copy for timed in passes for copy in timed.copies]
  slope, latency_s = np.polyfit(
    [copy.num_tokens for copy in copies], [copy.end_s - copy.start_s for copy in copies], 1
  )
  token_bytes = experiment.world.model.kv_bytes_per_token(2)  # as `simulate` counts them
  link = Link(
    name="measured", latency_s=max(0.0, latency_s), bytes_per_s=token_bytes / max(slope, 1e-12)
  )
  alone = steps_of([timed.alone for timed in passes])
  beside = {kind: steps_of([timed.beside[kind] for timed in passes]) for kind in passes[0].beside}
  return Calibration(alone, beside, link)


def _padding(experiment: Experiment) -> Padding:
  from pdjax.engine.build import default_buckets

  config, pages = experiment.config, experiment.world.pages
  whole, chunk = largest_budgets(pools_of(config), config.scheduler, pages)
  return padding_of(default_buckets(pages, whole_budget=whole, chunk_budget=chunk))


def steps_of_each_size(pages: PageConfig, padding: Padding) -> list[StepPlan]:
  """Some steps of every size that an engine pads to: few and many prompts and rows, short and long
  contexts.

  Longer ones take longer, and so does the attention of many short prompts than that of a long one.
  """
  most = pages.capacity_tokens
  half = most // 2
  plans = []
  for size in padding.prefill:
    for prompts in (1, 2, 4):
      plans.append(probe_plan(pages, prefills=(size // prompts,) * prompts))
    plans.append(probe_plan(pages, prefills=(size,), start=min(half, most - size)))
  for rows, fewest in zip(padding.rows, (1, *(rows + 1 for rows in padding.rows))):
    plans += [probe_plan(pages, decodes=rows, context=context) for context in (1, half, most)]
    if fewest < rows:
      plans.append(probe_plan(pages, decodes=fewest, context=half))
  for size in padding.mixed:
    several = min(pages.num_rows - 4, size // 4)
    for prompts, start, rows, context in (
      (1, 0, 1, half),
      (1, half, 1, half),
      (4, 0, 1, half),
      (1, 0, several, half),
      (1, 0, several, 1),
    ):
      chunk = ((size - rows) // prompts,) * prompts
      plans.append(probe_plan(pages, prefills=chunk, start=start, decodes=rows, context=context))
  return plans


def _time_copies(experiment: Experiment) -> list[Copied]:
  """Copies of prompts of some lengths between two pools, one at a time."""
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
    SILENT,
  )
  return [event for event in log if isinstance(event, Copied)]


def _simulated(
  experiment: Experiment, strategy: str, requests: Sequence[Request], calibration: Calibration
) -> EventLog:
  """Simulated again until it is known how long each pool is in steps beside which of another."""
  config, specs = experiment.config, experiment.config.pools_of(strategy)
  shares: dict[str, dict[str, float]] = {}
  for _ in range(ROUNDS):
    steps = {
      spec.name: calibration.alone.blend(
        (calibration.beside[NEIGHBOURS[kind]], share)
        for kind, share in shares.get(spec.name, {}).items()
      )
      for spec in specs
    }
    log = simulate(
      requests,
      specs,
      config.scheduler,
      experiment.world.model,
      lambda spec, steps=steps: steps[spec.name],
      lambda spec: experiment.world.pages,
      calibration.link,
    )
    shares = overlaps(log)
  return log


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

In each of {num_repeats} repeats, before every rate, a few steps of every size that the engine pads
to are timed on one pool, alone, beside prompts of another and beside decodes of another, both of
changing sizes, and copies of a few prompts; the simulator knows the medians of these, nothing of
the runs. Pools share the machine's memory: for how much of a pool's time another one is busy, and
with what, a first simulation says, and others are made with that. Every strategy serves the same
requests. Medians of the repeats; the spread is that of the engine's. This machine is shared, and
its speed swings. What is served (`configs/engine_validation.py`) and beside what steps are timed
were settled in knowledge of the steps of earlier runs: the process that schedules runs on the same
cores, which the simulator leaves out, and takes a third of the tiny model's steps but a small share
of these.

{markdown_table(table)}"""
  return Section(
    title=title, reached=reached, text=text, data={SAVED: {"label": label, "runs": runs}}
  )
