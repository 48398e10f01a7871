"""The figures about requests that are served, by the engine on one device of this machine."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from configs.engine import distserve_fig1 as fig1_config
from configs.engine import sarathi_fig1 as stalls_config
from configs.engine import sarathi_table4 as table4_config
from experiments.bench_engine import Done
from experiments.figures.reproduction import Bars, Panel, Series, draw
from experiments.profiling import padding_of
from experiments.program import SILENT
from experiments.reproduction import published_distserve, published_sarathi
from experiments.reproduction.bench import Bench
from experiments.reproduction.crossing import Curve
from experiments.reproduction.engine_steps import at_least, at_most
from experiments.reproduction.figure import HOLDS, IN_PART, NOT, Compared, Figure, Found, Judged
from experiments.serving import Checked, Experiment, check, machine, serve_strategy, set_up
from experiments.traffic import read_traffic
from experiments.validation.engine import with_rate
from experiments.worlds import World, pools_of
from pdjax.analysis.capacity import capacity_rps
from pdjax.config import ExperimentConfig, parse_pools
from pdjax.core.device_group import DeviceGroup
from pdjax.core.events import EventLog, each_step
from pdjax.core.plan import StepPlan, StepResult
from pdjax.deployment import largest_budgets
from pdjax.metrics.latency import itls_s, percentile, request_records, tpots_s, ttfts_s
from pdjax.metrics.utilisation import first_and_last
from pdjax.serving.executor import Executor, Handle, export_bytes
from pdjax.sim.padded import Padding

QUICK_MODEL = "tiny"
QUICK_REQUESTS = 16


# One warm-up for all of them ----------------------------------------------------------------------


class SharedWorld:
  """A world that others use too: it is prepared already."""

  def __init__(self, world: World):
    self._world = world

  def __getattr__(self, name: str):
    return getattr(self._world, name)

  def prepare(self, show) -> None:
    pass


def _shared_config(bench: Bench) -> ExperimentConfig:
  """One device, with every strategy of the figures here, and hand-offs."""
  config = _at_scale(table4_config.get_config(), bench)
  every = {*stalls_config.get_config().strategies, *config.strategies}
  return dataclasses.replace(
    config,
    strategies=tuple(sorted(every)),
    scheduler=dataclasses.replace(config.scheduler, changes_roles=True),
  )


def open_world(bench: Bench) -> World:
  """A device with all steps compiled that the figures here need.

  Raises:
    SourceError: the weights cannot be had.
  """
  world = check(_shared_config(bench), pathlib.Path()).world
  world.prepare(bench.show)
  return world


def _padding(bench: Bench) -> Padding:
  """What the steps compiled for that device do to those that are asked for."""
  from pdjax.engine.build import default_buckets

  config, pages = _shared_config(bench), bench.once(open_world).pages
  whole, mixed = largest_budgets(pools_of(config), config.scheduler, pages)
  return padding_of(default_buckets(pages, whole_budget=whole, chunk_budget=mixed))


def padded(log: EventLog, padding: Padding) -> float:
  """Tokens that the steps of a run computed over those that they were asked for."""
  asked = [first_and_last(step)[0] for step in each_step(log)]
  return sum(padding(counts).num_tokens for counts in asked) / sum(c.num_tokens for c in asked)


def _at_scale(config: ExperimentConfig, bench: Bench) -> ExperimentConfig:
  if not bench.quick:
    return config
  workload = dataclasses.replace(config.workload, num_requests=QUICK_REQUESTS)
  return dataclasses.replace(config, model=QUICK_MODEL, workload=workload)


def _experiment(config: ExperimentConfig, bench: Bench) -> Experiment:
  """Of one device, in the world that all share."""
  config = dataclasses.replace(_at_scale(config, bench), num_devices=1)
  checked = Checked(
    config=config,
    out=pathlib.Path(),
    world=SharedWorld(bench.once(open_world)),
    traffic=read_traffic(config.workload),
  )
  return set_up(checked, SILENT)


def _served(experiment: Experiment, strategy: str) -> EventLog:
  log = EventLog()
  serve_strategy(experiment, strategy, log, SILENT)
  return log


def _notes(experiment: Experiment, bench: Bench, *more: str) -> list[str]:
  found = machine(experiment)
  notes = [
    f"Measured here: {experiment.world.label}, {found['processor']}, {found['num_cores']} cores, "
    f"load {found['load_1min']:.1f}; {len(experiment.requests)} requests a run.",
    *more,
  ]
  if bench.quick:
    notes.append(f"Fewer requests and rates, and the model {QUICK_MODEL}, by --quick.")
  return notes


SYNTHETIC = (
  "Synthetic lengths, drawn from the quantiles of Sarathi-Serve's ShareGPT and divided by 20."
)


# Sarathi-Serve, Figure 1 --------------------------------------------------------------------------


class Emitted(NamedTuple):
  """A run, by its tokens."""

  ends_s: Sequence[float]  # of every token, ascending
  longest_gap_s: float
  itl_p99_s: float

  @classmethod
  def of(cls, log: EventLog) -> Emitted:
    records = request_records(log)
    gaps_s = itls_s(records)
    return cls(
      sorted(end_s for record in records.values() for end_s in record.token_s),
      float(max(gaps_s)),
      percentile(gaps_s, 99),
    )


STALL_LOADS = (0.5, 0.9)


def sarathi_fig1(bench: Bench) -> Found:
  config = stalls_config.get_config()
  experiment = _experiment(config, bench)
  at_once = {name: Emitted.of(_served(experiment, name)) for name in config.strategies}
  poisson = _experiment(
    dataclasses.replace(config, workload=dataclasses.replace(config.workload, arrivals="poisson")),
    bench,
  )
  tbt_s: dict[str, list[tuple[float, float]]] = {name: [] for name in config.strategies}
  for load in STALL_LOADS:
    for name in config.strategies:
      bench.show(f"{name} at {load} of capacity")
      own = with_rate(poisson, load * poisson.capacity_rps)
      tbt_s[name].append((load, Emitted.of(_served(own, name)).itl_p99_s))
  return stalls(at_once, tbt_s, [*_notes(experiment, bench, SYNTHETIC)], experiment.world.label)


def stalls(
  at_once: Mapping[str, Emitted],
  tbt_s: Mapping[str, Sequence[tuple[float, float]]],
  notes: Sequence[str],
  label: str,
) -> Found:
  """By strategy a run of all requests at once, and P99 TBT by load."""
  whole, chunked = at_once["continuous"], at_once["chunked"]
  makespan = chunked.ends_s[-1] / whole.ends_s[-1]
  ratios = [(load, a / b) for (load, a), (_, b) in zip(tbt_s["continuous"], tbt_s["chunked"])]
  rise = {name: points[-1][1] / points[0][1] for name, points in tbt_s.items()}
  read_s, artifact_s = published_sarathi.FIG1A_MAKESPAN_S, published_sarathi.FIG1B_ARTIFACT
  panels = [
    Panel(
      f"{len(whole.ends_s)} tokens of requests that are all there at 0",
      "s",
      "tokens so far",
      [
        Series(name, [(end_s, i) for i, end_s in enumerate(at_once[name].ends_s, 1)], colour=c)
        for c, name in enumerate(at_once)
      ],
    ),
    Panel(
      "P99 of the gaps between tokens",
      "load (of capacity)",
      "ms",
      [
        Series(name, [(load, own * 1e3) for load, own in points], colour=c)
        for c, (name, points) in enumerate(tbt_s.items())
      ],
      ylim=(0, None),
    ),
  ]
  return Found(
    columns=("run", "strategy", "itl_p99_s", "itl_max_s", "first_token_s", "last_token_s"),
    rows=[
      *(
        ("all at once", name, own.itl_p99_s, own.longest_gap_s, own.ends_s[0], own.ends_s[-1])
        for name, own in at_once.items()
      ),
      *(
        (f"load {load}", name, own, None, None, None)
        for name, points in tbt_s.items()
        for load, own in points
      ),
    ],
    judged=[
      at_least(
        whole.longest_gap_s / chunked.longest_gap_s,
        2,
        1.2,
        f"All at once, the longest gap between two tokens is {whole.longest_gap_s * 1e3:.0f} ms "
        f"with whole prompts and {chunked.longest_gap_s * 1e3:.0f} ms with chunks, "
        f"{whole.longest_gap_s / chunked.longest_gap_s:.1f} times.",
      ),
      at_most(
        makespan,
        1,
        1.1,
        f"Chunks take {makespan:.2f} times as long for all requests (0.89 in the paper), and their "
        f"first token comes after {chunked.ends_s[0]:.2f} instead of {whole.ends_s[0]:.2f} s.",
      ),
      at_least(
        ratios[-1][1],
        1.5,
        1.15,
        f"At load {ratios[-1][0]} P99 TBT of whole prompts is {ratios[-1][1]:.1f} times that of "
        f"chunks; from load {ratios[0][0]} on it grows {rise['continuous']:.2f} times, that of "
        f"chunks {rise['chunked']:.2f} times.",
      ),
    ],
    compared=[
      Compared(
        "time for all requests, chunks over whole prompts",
        read_s["Sarathi"] / read_s["vLLM"],
        makespan,
        is_read=True,
      ),
      Compared(
        "P99 TBT of whole prompts over chunks, highest load",
        artifact_s["vLLM"][1.0] / artifact_s["Sarathi"][1.0],
        ratios[-1][1],
      ),
    ],
    draw=lambda path: draw(panels, path, f"Sarathi-Serve, Figure 1: stalls (engine, {label})"),
    notes=notes,
  )


# Sarathi-Serve, Table 4 ---------------------------------------------------------------------------


class Tails(NamedTuple):
  """What Table 4 has of a run, and the tokens that its steps computed over those asked for."""

  ttft_p50_s: float
  itl_p99_s: float
  padded: float


def sarathi_table4(bench: Bench) -> Found:
  config = table4_config.get_config()
  experiment = _experiment(config, bench)
  padding, own = _padding(bench), {}
  for name in config.strategies:
    bench.show(f"serving under {name}")
    log = _served(experiment, name)
    records = request_records(log)
    own[name] = Tails(
      percentile(ttfts_s(records), 50), percentile(itls_s(records), 99), padded(log, padding)
    )
  return ablation(own, _notes(experiment, bench, SYNTHETIC), experiment.world.label)


def ablation(own: Mapping[str, Tails], notes: Sequence[str], label: str) -> Found:
  """By strategy."""
  words = {
    "hybrid_only": "hybrid batches only",
    "simple_chunking": "chunks only",
    "chunked": "both",
  }
  published_s = {name: published_sarathi.TABLE4[name][0] for name in words}
  relative, paper, compared = {}, {}, []
  for i, metric in enumerate(("P50 TTFT", "P99 TBT")):
    relative[metric] = [own[name][i] / own["chunked"][i] for name in words]
    for name, ratio in zip(words, relative[metric]):
      paper[metric, words[name]] = published_s[name][i] / published_s["chunked"][i]
      if name != "chunked":
        what = f"{metric}, {words[name]} over both"
        compared.append(Compared(what, paper[metric, words[name]], ratio))
  hybrid, chunks, both = (own[name] for name in words)
  in_order = (hybrid.ttft_p50_s < both.ttft_p50_s) + (both.ttft_p50_s < chunks.ttft_p50_s)
  is_lowest = both.itl_p99_s <= 1.05 * chunks.itl_p99_s
  stalls = hybrid.itl_p99_s / max(chunks.itl_p99_s, both.itl_p99_s)
  return Found(
    columns=("strategy", *Tails._fields, "paper_ttft_p50_s", "paper_tbt_p99_s"),
    rows=[(name, *own[name], *published_s[name]) for name in words],
    judged=[
      Judged(
        (NOT, IN_PART, HOLDS)[in_order],
        f"P50 TTFT is {hybrid.ttft_p50_s * 1e3:.0f} ms with hybrid batches only, "
        f"{both.ttft_p50_s * 1e3:.0f} with both and {chunks.ttft_p50_s * 1e3:.0f} with chunks "
        f"only; steps are padded to the next compiled size, to {hybrid.padded:.2f}, "
        f"{both.padded:.2f} and {chunks.padded:.2f} times their tokens. (Holds in this order, in "
        f"part if one of its two steps does.)",
      ),
      Judged(
        HOLDS if is_lowest and stalls >= 2 else IN_PART if stalls >= 1.2 else NOT,
        f"P99 TBT is {hybrid.itl_p99_s * 1e3:.0f} ms with hybrid batches only, "
        f"{chunks.itl_p99_s * 1e3:.0f} ms with chunks only and {both.itl_p99_s * 1e3:.0f} ms with "
        f"both. "
        f"(Holds if the first is twice the others and both is within 5 % of the lowest, in part "
        f"from 1.2 times.)",
      ),
    ],
    compared=compared,
    draw=lambda path: draw(
      [Bars(f"{label}, over both together", "times", tuple(words.values()), relative, paper)],
      path,
      "Sarathi-Serve, Table 4 (engine)",
    ),
    notes=notes,
  )


# DistServe, Figure 1 ------------------------------------------------------------------------------


class InstantPrefill:
  """Stands for a prefill pool that takes no time: what it hands over are pages of zeros.

  `target` is the executor of the pool that takes them, which knows their shapes. What is decoded
  from them is no text, but takes as long.
  """

  def __init__(self, target: Executor):
    self._target = target
    self._pieces: dict[int, dict] = {}  # by tokens

  def __getattr__(self, name: str):
    return getattr(self._target, name)

  def submit(self, plan: StepPlan, now_s: float, exports=()) -> Done:
    return Done(StepResult(token_ids=(0,) * sum(s.emits_token for s in plan.prefills)))

  def export(self, handle: Handle, *, page_ids: tuple[int, ...], now_s: float) -> Handle:
    import jax.numpy as jnp

    num_tokens = handle.num_tokens - handle.start
    if num_tokens not in self._pieces:
      self._pieces[num_tokens] = {
        layers: jnp.zeros(like.shape, like.dtype, device=like.sharding)
        for layers, like in self._target.pieces_like(handle).items()
      }
    num_bytes = export_bytes(self._target, handle)
    return dataclasses.replace(handle, num_bytes=num_bytes, payload=self._pieces[num_tokens])

  def drop(self, handle: Handle) -> None:
    """The same pages are handed over again."""

  def recover(self) -> bool:
    return False


class DecodesAlone(SharedWorld):
  """A world in which prefill takes no time: its decode pool is all that is on the device."""

  def executor(self, group: DeviceGroup) -> Executor:
    prefill, decode = (spec.group for spec in parse_pools("prefill,decode"))
    executor = self._world.executor(prefill)  # that of the only device
    return executor if group == decode else InstantPrefill(executor)


class System(NamedTuple):
  """P90 TTFT and TPOT by rate; empty where it has no such thing."""

  ttft_s: Sequence[tuple[float, float]] = ()
  tpot_s: Sequence[tuple[float, float]] = ()


# Metric, the system that is measured by it alone, what was published of both, and its SLO there.
FIG1_METRICS = (
  ("ttft_s", "prefill only", published_distserve.FIG1_TTFT_S, 0.4),
  ("tpot_s", "decode only", published_distserve.FIG1_TPOT_S, 0.04),
)
LOADS = (0.3, 0.8, 1.3)
QUICK_LOADS = (0.3, 1.3)


def distserve_fig1(bench: Bench) -> Found:
  config = fig1_config.get_config()
  experiment = _experiment(dataclasses.replace(config, strategies=("continuous",)), bench)
  loads = QUICK_LOADS if bench.quick else LOADS
  first = dataclasses.replace(
    experiment, requests=tuple(_with_outputs(experiment.requests, num_tokens=1))
  )
  decodes = dataclasses.replace(
    experiment,
    config=dataclasses.replace(experiment.config, num_devices=2, strategies=("disaggregated",)),
    world=DecodesAlone(bench.once(open_world)),
  )
  prompt, output = config.workload.lengths.longest
  alone, rows = experiment.world.alone, experiment.world.pages.num_rows
  whole_rps, prefill_rps, decode_rps = (
    experiment.capacity_rps,
    capacity_rps(alone, [(prompt, 1)], num_pools=1, num_rows=rows),
    rows / alone.decode_s(rows) / (output - 1),
  )
  systems = {}
  for name, own, strategy, promised_rps in (
    ("both phases", experiment, "continuous", whole_rps),
    ("prefill only", first, "continuous", prefill_rps),
    ("decode only", decodes, "disaggregated", decode_rps),
  ):
    ttft_s, tpot_s = [], []
    # The lowest rate is the same for all.
    for rate_rps in (loads[0] * whole_rps, *(load * promised_rps for load in loads[1:])):
      bench.show(f"{name} at {rate_rps:.2f} requests a second")
      records = request_records(_served(with_rate(own, rate_rps), strategy))
      ttft_s.append((rate_rps, percentile(ttfts_s(records), 90)))
      tpot_s.append((rate_rps, percentile(tpots_s(records), 90)))
    systems[name] = System(
      () if name == "decode only" else ttft_s, () if name == "prefill only" else tpot_s
    )
  more = (
    f"Prompts of {prompt} tokens and outputs of {output}, all alike. The pool that only decodes is "
    f"given pages of zeros, so that no prefill runs on its device."
  )
  return interference(systems, _notes(experiment, bench, more), experiment.world.label)


def _with_outputs(requests, num_tokens: int):
  for request in requests:
    sampling = dataclasses.replace(request.sampling, max_tokens=num_tokens)
    yield dataclasses.replace(request, sampling=sampling)


def crossing(points: Sequence[tuple[float, float]], target: float) -> tuple[float, bool]:
  """Where points that rise first pass `target`, linearly between them, and whether they do.

  Where they do not, the last x; where the first is above already, the first.
  """
  found = Curve(tuple((x, -y) for x, y in points)).crossing(-target)
  return found.x, found.kind != "above everywhere"


def interference(systems: Mapping[str, System], notes: Sequence[str], label: str) -> Found:
  """Targets are as far above the lowest rate of a system of one phase as the published ones."""
  both, paper_rps = systems["both phases"], published_distserve.FIG1_CROSS_RPS
  slo_s, slower, ends, both_ends = {}, {}, {}, []
  for metric, name, paper, paper_slo_s in FIG1_METRICS:
    alone, ours = getattr(systems[name], metric), getattr(both, metric)
    slo_s[metric] = alone[0][1] * paper_slo_s / paper[name.replace(" ", "_")][0][1]
    slower[metric] = _over(ours, alone)
    ends[name] = crossing(alone, slo_s[metric])
    both_ends.append(crossing(ours, slo_s[metric]))
  ends["both phases"] = min(both_ends)
  prefill_rps, decode_rps, both_rps = (rate_rps for rate_rps, _ in ends.values())
  split_rps = 1 / (1 / prefill_rps + 1 / decode_rps)  # a device, each phase with its share of them
  paper_split_rps = 1 / (1 / paper_rps["prefill_only"] + 1 / paper_rps["decode_only"])
  said = ", ".join(
    f"{name} {'' if is_crossed else 'at least '}{rate_rps:.2f}/s"
    for name, (rate_rps, is_crossed) in ends.items()
  )
  panels = []
  for metric, name, paper, paper_slo_s in FIG1_METRICS:
    series = []
    for colour, (own, other) in enumerate(
      (("both phases", "existing"), (name, name.replace(" ", "_")))
    ):
      ours = [(r / both_rps, t / slo_s[metric]) for r, t in getattr(systems[own], metric)]
      theirs = [(r / paper_rps["existing"], t / paper_slo_s) for r, t in paper[other]]
      series += [
        Series(f"engine, {own}", ours, colour=colour),
        Series(f"paper, {own}", theirs, "published", colour),
      ]
    title = f"P90 {metric[:4].upper()} over its SLO"
    x = "rate over the goodput of both phases on one device"
    panels.append(Panel(title, x, "times", series, {"SLO": 1.0}, is_log_y=True))
  return Found(
    columns=("system", "metric", "rate_rps", "p90_s"),
    rows=[
      (name, metric, *point)
      for name, system in systems.items()
      for metric, *_ in FIG1_METRICS
      for point in getattr(system, metric)
    ],
    judged=[
      Judged(
        (NOT, IN_PART, HOLDS)[sum(times >= 1.2 for times in slower.values())],
        f"At the rates of both phases together P90 TTFT is {slower['ttft_s']:.1f} times that of "
        f"prefills alone, and P90 TPOT {slower['tpot_s']:.1f} times that of decodes alone. (Holds "
        f"if both are 1.2 times or more, in part if one is.)",
      ),
      at_least(
        min(prefill_rps, decode_rps) / both_rps,
        1.5,
        1.05,
        f"Within both SLOs (TTFT {slo_s['ttft_s'] * 1e3:.0f} ms, TPOT {slo_s['tpot_s'] * 1e3:.0f} "
        f"ms) a device serves: {said}. In the paper {paper_rps['prefill_only']:.1f}, "
        f"{paper_rps['decode_only']:.1f} and {paper_rps['existing']:.1f}.",
      ),
      at_least(
        split_rps / both_rps,
        1.5,
        1.05,
        f"With its best share of devices for each phase that is {split_rps:.2f}/s a device, "
        f"{split_rps / both_rps:.2f} times as many as with both on each; "
        f"{paper_split_rps / paper_rps['existing']:.2f} times by the paper's rates, 2.1 there "
        f"with two that prefill and one that decodes.",
      ),
    ],
    compared=[
      Compared(
        f"goodput, {name} over both phases",
        paper_rps[name.replace(" ", "_")] / paper_rps["existing"],
        ends[name][0] / both_rps,
      )
      for _, name, *_ in FIG1_METRICS
    ],
    draw=lambda path: draw(panels, path, f"DistServe, Figure 1: interference (engine, {label})"),
    notes=notes,
  )


def _over(own: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]) -> float:
  """The mean of its values over those of another at its rates, linearly between the other's."""
  rates, values = zip(*own)
  return float(np.mean(np.array(values) / np.interp(rates, *zip(*other))))


FIGURES = (
  Figure(
    name="engine/sarathi-fig1",
    title="Whole prompts stall running answers",
    kind="engine",
    claims=(
      "Whole prompts stall running answers for many decode steps, chunks do not.",
      "Chunks cost no throughput, and the first tokens come sooner.",
      "The tail of the gaps grows with the load under whole prompts and is lower with chunks.",
    ),
    make=sarathi_fig1,
    configs=("configs/engine/sarathi_fig1.py",),
  ),
  Figure(
    name="engine/sarathi-table4",
    title="Hybrid batches and chunks, apart and together",
    kind="engine",
    claims=(
      "TTFT is lowest with hybrid batches only and highest with chunks only.",
      "TBT is several times higher with hybrid batches only, and lowest with both.",
    ),
    make=sarathi_table4,
    configs=("configs/engine/sarathi_table4.py",),
  ),
  Figure(
    name="engine/distserve-fig1",
    title="Each phase slows the other down",
    kind="engine",
    claims=(
      "TTFT and TPOT are higher where one device does both phases than where it does one.",
      "Within both SLOs a device that does both serves less than one that does either.",
      "So devices of their own for each phase serve more requests a device.",
    ),
    make=distserve_fig1,
    configs=("configs/engine/distserve_fig1.py",),
  ),
)
