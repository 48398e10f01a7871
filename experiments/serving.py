"""Serve one workload under several strategies and report: the body of `compare` and `run`."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from configs.hardware import HARDWARE, link
from configs.latency import LATENCY
from experiments.program import SILENT, Progress, Status, whole_file
from experiments.traffic import Traffic, read_traffic
from experiments.worlds import World, make_world, typical_pools
from pdjax.analysis.capacity import capacity_rps, derive_slo
from pdjax.analysis.verdict import StrategyRun, analyse, interference_line, verdict
from pdjax.config import ExperimentConfig, parse_role_change
from pdjax.core.events import EventLog, PoolChanged, each_step, write_events
from pdjax.core.garbage import no_collection
from pdjax.core.names import pick
from pdjax.core.plain import to_plain
from pdjax.core.request import Request, SamplingParams
from pdjax.deployment import make_cluster, planner_of
from pdjax.metrics.goodput import Slo, achieved_rate_rps
from pdjax.metrics.latency import enough
from pdjax.metrics.timeline import write_chrome_trace
from pdjax.metrics.utilisation import span_s
from pdjax.serving.cluster import Cluster
from pdjax.serving.executor import Nowhere, PoolLost
from pdjax.serving.inbox import Inbox
from pdjax.serving.loop import serve
from pdjax.workloads import make_requests
from pdjax.workloads.arrivals import ARRIVALS, Recorded
from pdjax.workloads.lengths import LengthFamily, Lengths
from pdjax.workloads.prompts import corpus_source
from pdjax.workloads.traces import TraceRow

# Logits of sums in another order may differ by so much, by the bytes of a value. In bfloat16 the
# tiny model's did by 0.1, one token's against another's (230 tokens whole and in chunks of 48, jax
# 0.10 on CPU); deeper models add up more.
TIE_MARGINS = {4: 1e-3, 2: 0.5}
DRAWN = 2520  # lengths at a time: a multiple of 1 to 10, as Mix places a long one among so many
MOST_CHANGES = 12  # of pools, in the report
MOST_STEPS_SHOWN = 1000  # in the picture of a timeline; more are a smear


@dataclasses.dataclass(slots=True, kw_only=True)
class Experiment:
  """Everything one comparison measured."""

  config: ExperimentConfig
  world: World
  slo: Slo
  rate_rps: float | None
  capacity_rps: float
  requests: Sequence[Request]
  runs: dict[str, StrategyRun]
  workload_label: str | None = None
  cut_short: int = 0  # exit status of one that ended before all strategies had: 130 after Ctrl-C


# Before anything compiles -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
  """An experiment that can run."""

  config: ExperimentConfig
  out: pathlib.Path
  world: World
  traffic: Traffic


def check(config: ExperimentConfig, out: pathlib.Path) -> Checked:
  """Reads all input of an experiment and finds what is wrong with it; compiles and writes nothing.

  Raises:
    ValueError: what is wrong, where, and what to do.
  """
  workload = config.workload
  # Also where the backend does not ask for them: a name that is wrong should not pass unseen.
  pick(HARDWARE, config.hardware, "hardware")
  pick(LATENCY, config.latency, "latency model")
  for name in (config.link, config.tp_link, config.pp_link):
    if name is not None:
      link(name)
  traffic = read_traffic(workload)
  longest, trace = traffic.longest, traffic.trace
  prompts, outputs = zip(*traffic.sample(workload.seed))
  # Over its life a decode sees its prompt and on average half of its output.
  context = round(statistics.fmean(prompts) + statistics.fmean(outputs) / 2)
  world = make_world(config, longest, context)
  for strategy in config.strategy_names:
    # The scheduler alone knows what it can hold; it needs no device for that.
    try:
      specs = config.pools_of(strategy)
      cluster = make_cluster(specs, config.scheduler, world.pages_of, lambda group: Nowhere())
      for text in config.scheduler.role_changes:
        _check_role_change(text, cluster)
    except ValueError as error:
      raise ValueError(f"strategy {strategy} cannot run: {error}") from error
    for row in trace.rows if trace else [TraceRow(0.0, *longest, line=0)]:
      request = Request(
        request_id=0,
        arrival_s=0.0,
        num_prompt_tokens=row.prompt_tokens,
        sampling=SamplingParams(max_tokens=row.output_tokens),
      )
      reason = cluster.refusal(request)
      if reason is not None:
        where = f"{workload.trace}:{row.line}" if trace else "workload.lengths: the longest"
        raise ValueError(
          f"{where} ({row.prompt_tokens} prompt, {row.output_tokens} output tokens) cannot run "
          f"under {strategy}: {reason}; shorten it, or raise cache.max_len, cache.num_pages or "
          f"scheduler.prefill_budget where the config sets it"
        )
  world.load()
  return Checked(config=config, out=out, world=world, traffic=traffic)


def _check_role_change(text: str, cluster: Cluster) -> None:
  """Raises ValueError for a pool that is not there; what it may become depends on the others."""
  names = [pool.name for pool in cluster.pools]
  name, _, _ = parse_role_change(text)
  if name not in names:
    raise ValueError(f"scheduler.role_changes: {text!r} is of no pool; there are {names}")


# The run ------------------------------------------------------------------------------------------


Profiled = Callable[[str], contextlib.AbstractContextManager]
"""What to serve a strategy under, by its name."""


def run_experiment(
  checked: Checked,
  progress: Progress,
  profiled: Profiled = lambda strategy: contextlib.nullcontext(),
) -> Experiment:
  """Sets an experiment up and serves it under every strategy in turn.

  Ctrl-C once the first strategy serves ends the experiment with what there is, and so does a pool
  that cannot start again after the first strategy.

  Raises:
    PoolLost: one that cannot start before anything was served.
  """
  experiment = set_up(checked, progress)
  for strategy in experiment.config.strategy_names:
    log = EventLog()
    try:
      with profiled(strategy):
        serve_strategy(experiment, strategy, log, progress)
    except KeyboardInterrupt:
      experiment.cut_short, reason = 130, "interrupted"
    except PoolLost as error:
      if not experiment.runs:
        raise
      experiment.cut_short, reason = 1, f"error: {error}"
      break
    experiment.runs[strategy] = analyse(strategy, log, experiment.slo)
    if experiment.cut_short:
      break
  if experiment.cut_short:
    progress.done(f"{reason}: reporting what was measured so far")
  return experiment


def served(config: ExperimentConfig) -> Experiment:
  """Runs an experiment without a word and writes nothing: for notebooks.

  Raises:
    ValueError: an experiment that cannot run.
  """
  checked = check(config, pathlib.Path())
  try:
    return run_experiment(checked, SILENT)
  finally:
    checked.world.close()


def unserved(config: ExperimentConfig) -> Experiment:
  """An experiment that is set up without a word, and not served yet: its requests may be changed.

  Raises:
    ValueError: an experiment that cannot run.
  """
  return set_up(check(config, pathlib.Path()), SILENT)


def log_of(experiment: Experiment) -> EventLog:
  """Serves an experiment of one strategy without a word; what happened."""
  (strategy,) = experiment.config.strategy_names
  log = EventLog()
  serve_strategy(experiment, strategy, log, SILENT)
  return log


def set_up(checked: Checked, progress: Progress) -> Experiment:
  """Measures the world's steps, derives rate and SLOs, and draws the requests; serves nothing."""
  config, world, traffic = checked.config, checked.world, checked.traffic
  world.prepare(progress.update)
  workload, pages = config.workload, world.pages
  # Streams of their own: of one seed fewer requests are the first of more, at any rate.
  lengths_rng, gaps_rng = np.random.default_rng(workload.seed).spawn(2)
  sample = traffic.sample(workload.seed)
  # No more rows are busy than have pages: each holds its prompt and half of its output on average.
  footprint = statistics.fmean(prompt + output / 2 for prompt, output in sample)
  fitting = int(pages.num_pages * pages.page_size / footprint)
  capacity = capacity_rps(
    world.together,
    sample,
    **_num_pools(config),
    num_rows=max(1, min(pages.num_rows, fitting)),
  )
  blocks = None
  if traffic.lengths is None:
    lengths, blocks = sample, traffic.trace.blocks
    arrivals = Recorded(arrivals_s=tuple(row.arrival_s for row in traffic.trace.rows))
    rate_rps = None
  else:
    rate_rps = workload.rate_rps or workload.load * capacity
    num_requests = workload.num_requests or max(1, round(rate_rps * workload.duration_s))
    lengths = _drawn(traffic.lengths, num_requests, lengths_rng)
    family = ARRIVALS[workload.arrivals]
    knobs = {"rate_rps": rate_rps, "cv": workload.cv}
    arrivals = family(**{f.name: knobs[f.name] for f in dataclasses.fields(family)})
  derived = derive_slo(
    world.alone,
    num_rows=pages.num_rows,
    longest_prompt=traffic.longest[0],
    ttft_multiple=config.slo.ttft_multiple,
    tpot_multiple=config.slo.tpot_multiple,
  )
  slo = Slo(ttft_s=config.slo.ttft_s or derived.ttft_s, tpot_s=config.slo.tpot_s or derived.tpot_s)
  requests = make_requests(
    arrivals.times_s(len(lengths), gaps_rng),
    lengths,
    world.prompts(lengths, workload.seed, chat=workload.chat, blocks=blocks),
    config.sampling.params(),
    blocks,
  )
  experiment = Experiment(
    config=config,
    world=world,
    slo=slo,
    rate_rps=rate_rps,
    capacity_rps=capacity,
    requests=[dataclasses.replace(request, slo=slo) for request in requests],
    runs={},
    workload_label=traffic.label,
  )
  progress.done(
    f"{world.label}: {len(requests)} requests, "
    + (f"{rate_rps:.2f} a second ({rate_rps / capacity:.2f} of capacity {capacity:.2f}), "
       if rate_rps else "arrivals of the trace, ")
    + f"SLOs TTFT {slo.ttft_s:.3g} s and TPOT {slo.tpot_s:.3g} s"
  )  # fmt: skip
  return experiment


def _drawn(family: LengthFamily, num_requests: int, rng: np.random.Generator) -> list[Lengths]:
  """The first of as many requests as there may be. A family draws by columns, so that what comes
  first depends on how many it is asked for: always `DRAWN`.
  """
  lengths: list[Lengths] = []
  while len(lengths) < num_requests:
    lengths += family.pairs(DRAWN, *rng.spawn(1))
  return lengths[:num_requests]


def _num_pools(config: ExperimentConfig) -> dict[str, int]:
  """For the capacity: that of mixed pools bounds all strategies that have the same ones."""
  if config.strategies:
    return {"num_pools": config.num_devices // config.tp}
  roles = collections.Counter(spec.role for spec in typical_pools(config))
  return {
    "num_pools": roles["mixed"],
    "num_prefill_pools": roles["prefill"],
    "num_decode_pools": roles["decode"],
  }


def serve_strategy(
  experiment: Experiment, strategy: str, log: EventLog, progress: Progress
) -> None:
  """Serves the requests of an experiment once; what happens is appended to `log`."""
  world, config = experiment.world, experiment.config
  specs = config.pools_of(strategy)
  cluster = make_cluster(
    specs,
    config.scheduler,
    world.pages_of,
    world.executor,
    world.step_time,
    hand_off=config.hand_off,
  )
  inbox = Inbox(experiment.requests)
  for pool, role, at_s in map(parse_role_change, config.scheduler.role_changes):
    inbox.change_role(pool, role, at_s)
  num_ended = num_tokens = 0
  now_s = 0.0

  def status() -> Status:
    return Status(
      strategy=strategy,
      num_ended=num_ended,
      num_requests=len(experiment.requests),
      num_tokens=num_tokens,
      now_s=now_s,
      cluster=cluster,
      log=log,
    )

  turns = serve(
    cluster,
    inbox,
    world.clock(),
    log,
    steps_in_flight=config.scheduler.steps_in_flight,
    planner=planner_of(config.scheduler),
  )
  # The engine's failures may hold arrays in cycles, which should go soon.
  with no_collection() if config.backend == "sim" else contextlib.nullcontext():
    for turn in turns:
      num_ended += len(turn.ended) + len(turn.failed)
      num_tokens += turn.num_tokens
      now_s = turn.now_s
      if progress.is_due:
        progress.serving(status())
  progress.done(str(status()))


# Are the tokens the same? -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
  """The first token at which a strategy left what the first strategy gave."""

  request_id: int
  position: int  # among the output tokens
  strategies: tuple[str, str]
  token_ids: tuple[int | None, int | None]  # None: it had ended
  margin: float | None  # between the two likeliest tokens there, in logits; None: not known
  tie_margin: float  # below which either may come first

  @property
  def is_tie(self) -> bool:
    return self.margin is not None and self.margin < self.tie_margin

  def __str__(self) -> str:
    margin = "unknown" if self.margin is None else f"{self.margin:.2g}"
    return (
      f"request {self.request_id}, output token {self.position}: "
      f"{self.strategies[0]} {self.token_ids[0]}, {self.strategies[1]} {self.token_ids[1]}, "
      f"top-2 logit margin {margin}" + (" (a tie)" if self.is_tie else "")
    )


def compare_tokens(experiment: Experiment) -> tuple[int, list[Difference]]:
  """How many tokens all strategies have in common to compare, and where they first differ."""
  runs = list(experiment.runs.values())
  num_compared, differences = 0, []
  for request in experiment.requests:
    streams = []
    for run in runs:
      record = run.records.get(request.request_id)
      streams.append(record.token_ids if record is not None else ())
    num_compared += min(map(len, streams))
    for run, stream in zip(runs[1:], streams[1:]):
      position = next((i for i, (a, b) in enumerate(zip(streams[0], stream)) if a != b), None)
      if position is None and all(
        request.request_id in r.records and r.records[request.request_id].outcome == "finished"
        for r in (runs[0], run)
      ):
        shorter, longer = sorted(map(len, (streams[0], stream)))
        position = shorter if shorter < longer else None  # one ended, the other went on
      if position is None:
        continue
      margin = None
      if request.prompt_ids is not None and position < min(len(streams[0]), len(stream)):
        prefix = (*request.prompt_ids, *stream[:position])
        margin = experiment.world.top2_margin(prefix)
      differences.append(
        Difference(
          request_id=request.request_id,
          position=position,
          strategies=(runs[0].name, run.name),
          token_ids=tuple(s[position] if position < len(s) else None for s in (streams[0], stream)),
          margin=margin,
          tie_margin=TIE_MARGINS[experiment.world.bytes_per_value],
        )
      )
  return num_compared, differences


# The report ---------------------------------------------------------------------------------------


def table(runs: Mapping[str, StrategyRun]) -> str:
  """One row a strategy. A percentile over too few values for it is marked with `!`."""
  header = ("", "TTFT p50", "p99", "TPOT p50", "p99", "ITL p99", "max", "SLOs met", "tokens/s",
            "handed off", "copy/prefill")  # fmt: skip
  rows = [header]
  for name, run in runs.items():
    s = run.summary
    rows.append(
      (
        name,
        _value(s["ttft_s"], "p50", 50),
        _value(s["ttft_s"], "p99", 99),
        _value(s["tpot_s"], "p50", 50),
        _value(s["tpot_s"], "p99", 99),
        _value(s["itl_s"], "p99", 99),
        _value(s["itl_s"], "max", 0),
        f"{s['attainment']:.0%}" if s["attainment"] is not None else "n/a",
        f"{s['output_tokens_per_s']:.1f}" if s["output_tokens_per_s"] else "n/a",
        _bytes(s["handoff_bytes"]),
        f"{s['copy_s']:.2g} / {s['prefill_s']:.3g} s" if s["handoff_bytes"] else "-",
      )
    )
  widths = [max(map(len, column)) for column in zip(*rows)]
  lines = [
    "  ".join(
      cell.ljust(width) if i == 0 else cell.rjust(width)
      for i, (cell, width) in enumerate(zip(row, widths))
    )
    for row in rows
  ]
  counts = "; ".join(
    f"{name} {run.summary['ttft_s']['n']} / {run.summary['tpot_s']['n']} / "
    f"{run.summary['itl_s']['n']}"
    for name, run in runs.items()
  )
  lines.append(f"n of TTFT / TPOT / ITL: {counts}. (!) n is too small for this percentile.")
  for what, key, unit in (
    ("Prompt tokens from the prefix cache", "prefix_hit_share", ".1%"),
    ("Preemptions", "num_preemptions", ",d"),
  ):
    if any(run.summary[key] for run in runs.values()):
      each = ", ".join(f"{name} {run.summary[key] or 0:{unit}}" for name, run in runs.items())
      lines.append(f"{what}: {each}.")
  if any(run.summary["handoff_bytes_ahead"] for run in runs.values()):
    each = ", ".join(
      f"{name} {run.summary['handoff_bytes_ahead'] / run.summary['handoff_bytes']:.0%}"
      for name, run in runs.items()
      if run.summary["handoff_bytes"]
    )
    lines.append(f"Handed off before the prompt was prefilled: {each} of the bytes.")
  for name, run in runs.items():
    changed = [e for e in run.log if isinstance(e, PoolChanged)]
    lines += [f"{name}: {e.time_s:.2f} s, {e.pool}: {e.reason}" for e in changed[:MOST_CHANGES]]
    if len(changed) > MOST_CHANGES:
      lines.append(f"{name}: {len(changed) - MOST_CHANGES} more changes of pools, see events.jsonl")
  return "\n".join(lines)


def _value(stats: Mapping[str, Any], key: str, q: float) -> str:
  value_s = stats[key]
  if value_s is None:
    return "n/a"
  text = f"{value_s * 1e3:.0f} ms" if value_s < 10 else f"{value_s:.1f} s"
  return text if enough(stats["n"], q) else text + "!"


def _bytes(num_bytes: float) -> str:
  if not num_bytes:
    return "-"
  for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
    if num_bytes >= size:
      return f"{num_bytes / size:.3g} {unit}"
  return f"{num_bytes:.0f} B"


def report(experiment: Experiment) -> tuple[str, dict[str, Any]]:
  """The text for a person and the same as plain data, without files and figures."""
  world, runs, slo = experiment.world, experiment.runs, experiment.slo
  decode_step_s = world.alone.decode_s(world.pages.num_rows)
  achieved = achieved_rate_rps(next(iter(runs.values())).log)
  asked = "the trace" if experiment.rate_rps is None else f"{experiment.rate_rps:.3g}/s"
  caveats = [*world.caveats, *world.extrapolated({name: run.log for name, run in runs.items()})]
  words = verdict(runs, slo, decode_step_s, caveats, num_requests=len(experiment.requests))
  label = experiment.workload_label
  text = "\n".join(
    [
      f"\n== {world.label} ==",
      *([f"Workload: {label}"] if label else []),
      f"{len(experiment.requests)} requests; asked {asked}, achieved "
      + (f"{achieved:.3g}/s" if achieved else "n/a")
      + f"; capacity {experiment.capacity_rps:.3g}/s; SLOs: TTFT {_ms(slo.ttft_s)}, "
      f"TPOT {_ms(slo.tpot_s)}; a decode step of {world.pages.num_rows} rows alone "
      f"{_ms(decode_step_s)}",
      "",
      table(runs),
      "",
      interference_line(runs),
      "Verdict",
      words,
    ]
  )
  data = {
    "strategies": {name: run.summary for name, run in runs.items()},
    "label": world.label,
    "workload": label,
    "backend": experiment.config.backend,
    "config": to_plain(experiment.config),
    "slo": to_plain(slo),
    "rate_rps": {
      "asked": experiment.rate_rps, "achieved": achieved, "capacity": experiment.capacity_rps
    },
    "step_times": {"alone": to_plain(world.alone), "together": to_plain(world.together)},
    "interference": {
      name: {"same_pool": to_plain(run.same_pool), "any_pool": to_plain(run.any_pool)}
      for name, run in runs.items()
    },
    "interrupted": bool(experiment.cut_short),
    "verdict": words,
  }  # fmt: skip
  return text, data


def _ms(value_s: float) -> str:
  return f"{value_s * 1e3:.3g} ms" if value_s < 1 else f"{value_s:.3g} s"


def token_report(experiment: Experiment) -> tuple[str, dict[str, Any], bool]:
  """Whether strategies agree on every token: text, data, and whether a difference is no tie.

  Says nothing where there is nothing to compare: one strategy, or a simulation without words.
  """
  if len(experiment.runs) < 2 or experiment.requests[0].prompt_ids is None:
    return "", {"tokens_identical": None, "num_tokens_compared": 0}, False
  num_compared, differences = compare_tokens(experiment)
  if not num_compared and not differences:
    return "", {"tokens_identical": None, "num_tokens_compared": 0}, False
  data = {
    "tokens_identical": not differences,
    "num_tokens_compared": num_compared,
    "token_differences": [
      {**to_plain(d), "is_tie": d.is_tie} for d in differences
    ],
  }  # fmt: skip
  if not differences:
    return f"Tokens: {num_compared} compared, identical under all strategies.", data, False
  wrong = [d for d in differences if not d.is_tie]
  lines = [f"Tokens: {num_compared} compared; {len(differences)} requests differ"]
  lines += [f"  {d}" for d in differences]
  if wrong:
    lines.append("  A difference that is no tie means that a strategy is wrong: this run FAILED.")
  return "\n".join(lines), data, bool(wrong)


def machine(experiment: Experiment) -> dict[str, Any]:
  """Where and when this ran, for the record."""
  has_words = experiment.requests[0].prompt_ids is not None
  return {
    "date": time.strftime("%Y-%m-%d %H:%M:%S"),
    "python": platform.python_version(),
    "processor": platform.machine(),
    "num_cores": os.cpu_count(),
    "load_1min": os.getloadavg()[0],
    "processes": experiment.world.processes,
    "prompts": corpus_source() if has_words else None,
  }


def write_results(out: pathlib.Path, experiment: Experiment, data: Mapping[str, Any]) -> list[str]:
  """Writes events, summary, timeline and pictures; returns the names of the files.

  Each file appears whole or not at all.
  """
  out.mkdir(parents=True, exist_ok=True)
  runs, world = experiment.runs, experiment.world
  logs = {name: run.log for name, run in runs.items()}
  with whole_file(out / "events.jsonl") as path:
    write_events(path, logs)
  write_summary(out, data)
  with whole_file(out / "timeline.json") as path:
    peaks = {
      name: {
        spec.name: found
        for spec in experiment.config.pools_of(name)
        if (found := world.peaks_of(spec)) is not None
      }
      for name in runs
    }
    write_chrome_trace(
      path,
      logs,
      world.model,
      bytes_per_value=world.bytes_per_value,
      page_size=world.pages.page_size,
      peaks=peaks,
    )
  files = ["events.jsonl", "summary.json", "timeline.json"]
  try:
    from experiments.figures.serving import draw_latency, draw_phases, draw_timeline

    records = {name: run.records for name, run in runs.items()}
    with whole_file(out / "latency.png") as path:
      draw_latency(records, experiment.slo, path)
    with whole_file(out / "phases.png") as path:
      draw_phases(records, path)
    title, window_s = f"{world.label}: {len(experiment.requests)} requests", _window_s(runs)
    if window_s is not None:
      title += f" ({window_s[1] - window_s[0]:.3g} s of them)"
    with whole_file(out / "timeline.png") as path:
      draw_timeline(logs, path, title, window_s=window_s)
    files += ["latency.png", "phases.png", "timeline.png"]
  except ImportError as error:
    print(f"no pictures: {error}")
  return files


def write_summary(out: pathlib.Path, data: Mapping[str, Any]) -> None:
  """Writes `summary.json`, whole or not at all."""
  with whole_file(out / "summary.json") as path:
    path.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")


def _window_s(runs: Mapping[str, StrategyRun]) -> tuple[float, float] | None:
  """The part of long runs that a picture can show: around the longest gap of all; None: all."""
  num_steps = max(sum(1 for _ in each_step(run.log)) for run in runs.values())
  gaps = [(run.same_pool.gap_s, run) for run in runs.values() if run.same_pool is not None]
  if num_steps <= MOST_STEPS_SHOWN or not gaps:
    return None
  gap_s, run = max(gaps, key=lambda gap: gap[0])
  record = run.records[run.same_pool.request_id]
  middle_s = record.token_s[record.itl_s.index(gap_s)] + gap_s / 2
  width_s = max(4 * gap_s, span_s(run.log) * MOST_STEPS_SHOWN / num_steps)
  start_s = max(0.0, middle_s - width_s / 2)
  return start_s, start_s + width_s
