"""The systems that DistServe's paper measures, as experiments; their runs, and what came of them.

The paper's runs are short: so many requests a GPU, of which the last have been taken in before a
queue has built up. Ours have as many, the same gaps, and for ShareGPT the same requests in the same
order; beside them stand runs of `LONGER` times as many.
"""

from __future__ import annotations

import dataclasses
import pathlib
import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from configs.hardware import HARDWARE, link
from configs.latency import LATENCY
from configs.models import MODELS
from experiments.program import ROOT
from experiments.reproduction import reduce
from experiments.reproduction.bench import Bench, Point
from experiments.reproduction.crossing import Crossing, Curve
from experiments.reproduction.published_distserve import ATTAINMENT, HUMANEVAL
from experiments.validation import distserve as measured
from pdjax.config import ExperimentConfig, load_config
from pdjax.core.costs import count_slices

LONGER = 5  # times the paper's requests
NUM_SAMPLED = 1600
WIDER = (
  4.0,
  3.0,
  2.0,
  1.5,
  1.25,
)  # times the published SLO scales, both ways: ours may cross there
WITHIN = 0.15  # of a published number: what counts as reached
SAMPLE = "distserve-c21d12-1600-16"  # the run with the most requests; all others are its first

SYSTEMS = {"distserve": "DistServe", "vllm": "vLLM", "mii": "MII"}
OURS = SYSTEMS | {"mii": "MII (a stand-in)"}  # what they are called in our numbers
STEP_TIMES = ("shipped", "profiled", "roofline")
MII_NOTE = (
  "DeepSpeed-MII is a STAND-IN: nobody published its step times. Drawn for it is chunked prefill "
  "(budget 512) by our roofline of an A100, which knows nothing of MII's kernels."
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Study:
  """A model and a workload: one column of Figure 8 or 9. `tp` is that of both baselines."""

  name: str  # of the published tables
  title: str
  path: str  # of the config
  tp: int
  systems: tuple[str, ...] = ("distserve", "vllm", "mii")
  step_times: tuple[str, ...] = STEP_TIMES
  requests: str = "sharegpt"  # the data set

  @property
  def config(self) -> ExperimentConfig:
    return load_config(ROOT / self.path)

  @property
  def rates(self) -> list[float]:
    """For each GPU, as published."""
    return [rate for rate, _ in ATTAINMENT[self.name]["rate"]["distserve"]]

  @property
  def fixed_rate(self) -> float:
    """For each GPU: that of the panel over the SLO scale."""
    config = self.config
    return config.workload.rate_rps / config.num_devices

  def step_times_of(self, system: str) -> tuple[str, ...]:
    return ("roofline",) if system == "mii" else self.step_times

  def judged(self, system: str) -> tuple[str, str, int]:
    """The runs that verdicts are of: system, step times, times the paper's requests."""
    return system, self.step_times_of(system)[0], 1


STUDIES = {
  study.name: study
  for study in (
    Study(name="13b", title="OPT-13B, ShareGPT", path="configs/distserve/fig8_13b.py", tp=1),
    Study(name="66b", title="OPT-66B, ShareGPT", path="configs/distserve/fig8_66b.py", tp=4),
    Study(
      name="175b",
      title="OPT-175B, ShareGPT",
      path="configs/distserve/fig8_175b.py",
      tp=8,
      systems=("distserve", "vllm"),
      step_times=("shipped", "roofline"),
    ),
    Study(
      name="code",
      title="OPT-66B, code completion",
      path="configs/distserve/fig9_code.py",
      tp=4,
      requests="humaneval",
    ),
    Study(
      name="summarization",
      title="OPT-66B, summarization",
      path="configs/distserve/fig9_summarization.py",
      tp=4,
      requests="longbench",
    ),
  )
}

# The systems --------------------------------------------------------------------------------------


def as_system(
  config: ExperimentConfig, system: str, tp: int, step_times: str = "shipped"
) -> ExperimentConfig:
  """The experiment served by DistServe as it is, or by a baseline on `tp` devices.

  vLLM takes prompts first and whole, up to 16,384 tokens, and keeps 1 % of its pages free (its
  source at 0.2.3), and pads them within `PADDING_LIMIT`; not by step times as shipped, whose
  factors its authors chose in a simulator that knows neither padding nor that limit.
  """
  latency = config.latency
  if system == "vllm":
    latency = latency.replace("distserve", "distserve_vllm")
    scheduler = dataclasses.replace(
      config.scheduler,
      prefill_budget=16_384,
      watermark=0.01,
      options=() if step_times == "shipped" else (measured.PADDING_LIMIT,),
    )
    config = dataclasses.replace(config, scheduler=scheduler)
  elif system == "mii":
    scheduler = dataclasses.replace(config.scheduler, token_budget=512, prefill_budget=None)
    cache = dataclasses.replace(config.cache, num_rows=256)
    config = dataclasses.replace(config, scheduler=scheduler, cache=cache)
  if system != "distserve":
    policy = {"vllm": "prefill_first", "mii": "sarathi"}[system]
    config = dataclasses.replace(config, pools=f"mixed:tp{tp}:{policy}", num_devices=tp)
  latency = {"shipped": latency, "profiled": f"{latency}_profiled", "roofline": "roofline"}
  return dataclasses.replace(config, latency=latency[step_times])


def exponential_gaps(num: int) -> np.ndarray:
  """Between the requests of the paper's runs, in mean gaps: as its benchmark draws them. [num]"""
  return np.random.RandomState(0).gamma(1.0, 1.0, num + 1)[1:]


def arrivals_s(num_requests: int, rate_rps: float) -> tuple[float, ...]:
  """When requests arrive in the paper's runs, the first at 0."""
  return (0.0, *(np.cumsum(exponential_gaps(num_requests - 1)) / rate_rps).tolist())


def recorded_lengths(data_dir: pathlib.Path) -> tuple[tuple[int, int], ...] | None:
  """The 1,600 ShareGPT pairs in the order of the paper's runs; None where the file is not."""
  folder = data_dir / "distserve"
  if not (folder / measured.RUNS).is_file():
    return None
  rows = measured.read_runs(folder)[SAMPLE]
  return tuple((row.prompt_tokens, row.output_tokens) for row in rows)


def paper_lengths(
  study: Study, data_dir: pathlib.Path, num_requests: int
) -> tuple[tuple[int, int], ...] | None:
  """The requests of the paper's run of so many, in their order; None where they are not known.

  Its benchmark draws them by Python's generator from seed 0, of HumanEval from ten times each of
  its problems.
  """
  if study.requests == "humaneval":
    problems = 10 * HUMANEVAL
    return tuple(random.Random(0).sample(problems, min(num_requests, len(problems))))
  return recorded_lengths(data_dir) if study.requests == "sharegpt" else None


KNOWN_REQUESTS = {
  "sharegpt": "the first of the 1,600 ShareGPT pairs behind DistServe's measured runs",
  "humaneval": "the paper's: what its benchmark draws of HumanEval's 164 problems from seed 0",
}


def lengths_note(
  lengths: Sequence | None, config: ExperimentConfig, requests: str = "sharegpt"
) -> str:
  if lengths is not None:
    return f"Requests are {KNOWN_REQUESTS[requests]}."
  return f"Requests are {config.workload.label}: drawn, not those of the paper's runs."


def at_rate(
  config: ExperimentConfig,
  rate_per_device: float,
  requests_per_device: int,
  lengths: Sequence[tuple[int, int]] | None,
) -> Point:
  """A run of so many requests for each device, at that rate for each, with the paper's gaps."""
  num_requests = requests_per_device * config.num_devices
  rate_rps = rate_per_device * config.num_devices
  workload = dataclasses.replace(config.workload, rate_rps=rate_rps, num_requests=num_requests)
  if lengths is not None:
    repeats = -(-num_requests // len(lengths))
    lengths = (tuple(lengths) * repeats)[:num_requests]
  return Point(
    config=dataclasses.replace(config, workload=workload),
    reduce=reduce.micros,
    lengths=lengths,
    arrivals_s=arrivals_s(num_requests, rate_rps),
  )


# The runs -----------------------------------------------------------------------------------------


class Name(NamedTuple):
  """What a run is of: a system, its step times, how often the paper's requests, the rate a GPU."""

  system: str
  step_times: str
  times: int
  rate: float


Columns = Mapping[str, Sequence[int | None]]
"""Of a run: `ttft_us` and `tpot_us` of each request."""


def runs_of(study: Study, bench: Bench, *, also: bool = True) -> dict[Name, Columns]:
  """The runs of a study; with `also` the long ones and those by other step times too."""
  config = study.config
  per_device = config.workload.num_requests // config.num_devices
  rates = sorted({*study.rates, study.fixed_rate})
  points = {}
  for system in study.systems:
    for step_times in study.step_times_of(system) if also else study.step_times_of(system)[:1]:
      is_judged = step_times == study.judged(system)[1]
      own = as_system(config, system, study.tp, step_times)
      for times in (1, LONGER) if also and is_judged and not bench.quick else (1,):
        num_requests = times * per_device * own.num_devices
        lengths = paper_lengths(study, bench.data_dir, num_requests)
        for rate in rates:
          points[Name(system, step_times, times, rate)] = at_rate(
            own, rate, times * per_device, lengths
          )
  return bench.run(points)


def attainment_percent(columns: Columns, ttft_s: float, tpot_s: float) -> float:
  """Of requests that met both."""
  met = [
    ttft is not None and ttft <= 1e6 * ttft_s and (tpot is None or tpot <= 1e6 * tpot_s)
    for ttft, tpot in zip(columns["ttft_us"], columns["tpot_us"])
  ]
  return 100 * sum(met) / len(met)


def crossing_like(curve: Curve, published: Curve, target: float) -> Crossing:
  """Where ours crosses; of points that were published too where that one crosses nowhere."""
  if published.crossing(target).kind != "crosses":
    xs = {x for x, _ in published.points}
    curve = Curve(tuple(point for point in curve.points if point[0] in xs))
  return curve.crossing(target)


def curves_of(
  study: Study, runs: Mapping[Name, Columns], system: str, step_times: str, times: int = 1
) -> dict[str, Curve]:
  """By `rate`, and by `scale` of both SLOs at the fixed rate, from the easiest on."""
  slo = study.config.slo
  own = {name.rate: run for name, run in runs.items() if name[:3] == (system, step_times, times)}
  by_rate = [
    (rate, attainment_percent(run, slo.ttft_s, slo.tpot_s)) for rate, run in sorted(own.items())
  ]
  fixed = own[study.fixed_rate]
  drawn = [scale for scale, _ in ATTAINMENT[study.name]["scale"]["distserve"]]
  scales = [factor * drawn[0] for factor in WIDER] + drawn + [drawn[-1] / f for f in WIDER[::-1]]
  by_scale = [
    (scale, attainment_percent(fixed, scale * slo.ttft_s, scale * slo.tpot_s)) for scale in scales
  ]
  return {"rate": Curve(tuple(by_rate)), "scale": Curve(tuple(by_scale))}


def sampled_lengths(study: Study, data_dir: pathlib.Path) -> Sequence[tuple[int, int]]:
  """The pairs of the paper's requests, or as many drawn from the workload."""
  known = paper_lengths(study, data_dir, NUM_SAMPLED)
  family = study.config.workload.lengths
  return known or family.pairs(NUM_SAMPLED, np.random.default_rng(0))


def unreachable(
  study: Study, system: str, step_times: str, lengths: Sequence[tuple[int, int]]
) -> tuple[int, float]:
  """How many tokens a lone prompt may have within the TTFT SLO by these step times, and how many of
  these requests have more, in percent.
  """
  config = as_system(study.config, system, study.tp, step_times)
  (spec, *_) = config.pools_of(config.pools)
  make = LATENCY[config.latency]
  device = HARDWARE[config.hardware]
  model = make(MODELS[config.model], device, spec.group.tp, spec.pp, link(config.link))

  def alone_s(num_tokens: int) -> float:
    counts = count_slices(prefill_starts=[0], prefill_tokens=[num_tokens], num_emitted=1)
    return model.terms_of(counts).total_s

  most = MODELS[config.model].max_len
  fits = next((n for n in range(most, 0, -1) if alone_s(n) <= config.slo.ttft_s), 0)
  return fits, 100 * sum(prompt > fits for prompt, _ in lengths) / len(lengths)
