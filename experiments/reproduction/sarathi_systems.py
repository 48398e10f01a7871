"""What Sarathi-Serve was measured on, and the systems it was measured against."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import NamedTuple

from configs.hardware import HARDWARE, link
from configs.latency import LATENCY
from configs.models import MODELS
from configs.slos import SLOS
from configs.workloads import WORKLOADS
from experiments.program import ROOT
from experiments.reproduction.bench import Bench
from experiments.reproduction.figure import HOLDS, IN_PART, NOT, Judged
from experiments.searching.goals import Asked, make_search
from experiments.validation.measured import decode_counts, prefill_counts
from pdjax.analysis.targets import Stalls
from pdjax.config import ExperimentConfig, SloConfig, load_config, num_devices_of, parse_pools
from pdjax.sim.latency_model import LatencyModel, StepTerms

NEAR = 0.8  # of a published ratio, or so much of ours: it is taken to be the same
FOLDER = "configs/sarathi"
LONGEST = {"sharegpt": 8192, "arxiv": 16_384}  # of a request, as in the authors' runs
NUM_REQUESTS = {True: 256, False: 1024}  # of a probe, quick or not
TOLERANCE = {True: 0.12, False: 0.05}  # of the rates that probes find
STRICT, RELAXED = 5, 25  # decode steps: section 5.1
RULE_ROWS, RULE_CONTEXT = 32, 4096


A40_NOTE = "LLaMA2-70B: attention and all-reduces of the A40 are stand-ins (`configs/hardware.py`)."
SYNTHETIC = (
  "Lengths are synthetic: ShareGPT's by quantiles of its file, arXiv's by table 2, as its sample "
  "was never published."
)


class Deployment(NamedTuple):
  """A model on its devices (table 1). `parts` are those of its pool, `slo` the stem of its SLOs."""

  file: str
  slo: str
  parts: str
  orca_rows: int
  relaxed_budget: int = 2048

  @property
  def path(self) -> str:
    return f"{FOLDER}/{self.file}"

  def config(self) -> ExperimentConfig:
    return config_of(self.file)

  def slos_s(self) -> tuple[float, float]:
    """Strict and relaxed, as published."""
    return tuple(SLOS[f"sarathi-{self.slo}-{name}"].tpot_s for name in ("strict", "relaxed"))


DEPLOYMENTS: dict[str, Deployment] = {
  "Mistral-7B": Deployment("fig10_mistral.py", "mistral-7b", "mixed", 16),
  "Yi-34B": Deployment("fig10_yi.py", "yi-34b", "mixed:tp2", 16),
  "LLaMA2-70B": Deployment("fig11_llama2_70b.py", "llama2-70b", "mixed:tp4:pp2", 8, 1536),
  "Falcon-180B": Deployment("fig11_falcon.py", "falcon-180b", "mixed:tp4:pp2", 8),
}
POLICY = {"Orca": "orca", "vLLM": "prefill_first", "Sarathi": "sarathi"}


def config_of(name: str) -> ExperimentConfig:
  """That of a file of `configs/sarathi`."""
  return load_config(ROOT / FOLDER / name)


def with_strategy(config: ExperimentConfig, strategy: str, **workload) -> ExperimentConfig:
  """One strategy of an experiment, and changes of its workload."""
  return dataclasses.replace(
    config,
    strategies=(strategy,),
    workload=dataclasses.replace(config.workload, **workload),
  )


def as_system(
  config: ExperimentConfig,
  parts: str,
  system: str,
  *,
  rows: int = 128,
  budget: int = 512,
  dataset: str = "sharegpt",
) -> ExperimentConfig:
  """The experiment under one system of `POLICY`, with its limits.

  Orca's step may have as many tokens as all its rows can, and its memory must hold the activations
  of that (the artifact's limit); vLLM's as many as the longest request.
  """
  pools, longest = f"{parts}:{POLICY[system]}", LONGEST[dataset]
  own = WORKLOADS[dataset]
  return dataclasses.replace(
    config,
    strategies=(),
    pools=pools,
    num_devices=num_devices_of(parse_pools(pools)),
    tp=1,
    workload=dataclasses.replace(config.workload, lengths=own.lengths, label=own.label),
    scheduler=dataclasses.replace(
      config.scheduler,
      token_budget=budget,
      prefill_budget=longest * (rows if system == "Orca" else 1),
    ),
    cache=dataclasses.replace(config.cache, num_rows=rows, max_len=longest),
    slo=SloConfig(ttft_s=1e6, tpot_s=1e6),  # the rule has limits of its own
  )


def capacities(
  bench: Bench, asked: Mapping[tuple, tuple[ExperimentConfig, float]]
) -> dict[tuple, float]:
  """Capacity by the paper's rule of each experiment, at its P99 of the gaps; 0 where none passes.

  Searches of one experiment under several SLOs share the rates at which they begin.
  """
  searches = {}
  for key, (config, itl_s) in asked.items():
    target = Stalls(itl_s=itl_s)
    limits = Asked(
      config=config,
      target=target,
      out=bench.out,
      num_requests=NUM_REQUESTS[bench.quick],
      most_s=1800.0,
      tolerance=TOLERANCE[bench.quick],
    )
    searches[key] = make_search(limits, " ".join(map(str, key)), config)
  bench.search(list(searches.values()))
  return {key: search.passed_rps or 0.0 for key, search in searches.items()}


def capacity_note(bench: Bench) -> str:
  return (
    f"Capacities by the paper's rule, P99 of all gaps within the SLO and a median queue of at most "
    f"2 s, in probes of {NUM_REQUESTS[bench.quick]:,} requests (the paper: 2,048) or those of 30 "
    f"minutes; rates to within {TOLERANCE[bench.quick]:.0%}. Memory: 90 % of it is used here, 85 % "
    f"there."
  )


# Step times ---------------------------------------------------------------------------------------


def ms(seconds: float) -> float:
  return 1e3 * seconds


@functools.cache
def latency_of(model: str, hardware: str, tp: int = 1, tp_link: str | None = None) -> LatencyModel:
  """Step times by the roofline that `configs/hardware.py` has for the device."""
  device = HARDWARE[hardware]
  way = link(tp_link) if tp_link else device.link
  return LATENCY["roofline"](MODELS[model], device, tp, 1, way)


def latency_of_config(config: ExperimentConfig) -> LatencyModel:
  """That of an experiment's pools, which are alike."""
  group = config.pools_of(config.strategy_names[0])[0].group
  return latency_of(config.model, config.hardware, group.tp, config.tp_link)


def prefill_terms(
  latency: LatencyModel, num_tokens: int, *, before: int = 0, batch: int = 1
) -> StepTerms:
  """A step of whole prompts, or of chunks behind cached tokens."""
  counts = prefill_counts(batch, before, num_tokens)
  return latency.terms_of(counts._replace(num_emitted=batch))


def decode_terms(latency: LatencyModel, batch: int, context: int) -> StepTerms:
  return latency.terms_of(decode_counts(batch, context)._replace(num_emitted=batch))


def mixed_terms(
  latency: LatencyModel, chunk: int, batch: int, context: int, *, before: int = 0
) -> StepTerms:
  """A chunk behind so many tokens of its prompt, beside decodes."""
  parts = prefill_counts(1, before, chunk), decode_counts(batch, context)
  counts = type(parts[0])(*map(sum, zip(*parts)))
  return latency.terms_of(counts._replace(num_emitted=batch + 1))


def chunked_s(latency: LatencyModel, prompt: int, chunk: int) -> float:
  """A prompt in chunks, a step each."""
  starts = range(0, prompt, chunk)
  return sum(prefill_terms(latency, min(chunk, prompt - at), before=at).total_s for at in starts)


def rule_slos_s(config: ExperimentConfig) -> tuple[float, float]:
  """Strict and relaxed SLOs by the paper's rule on these devices."""
  latency = latency_of_config(config)
  step_s = decode_terms(latency, RULE_ROWS, RULE_CONTEXT).total_s
  pp = config.pools_of(config.strategy_names[0])[0].pp
  if pp > 1:
    stages = LATENCY["roofline"](
      MODELS[config.model], HARDWARE[config.hardware], 1, pp, link(config.pp_link)
    )
    step_s += (pp - 1) * stages.hand_over_s(RULE_ROWS)
  return STRICT * step_s, RELAXED * step_s


BUDGETS = (128, 256, 512, 768, 1024, 1536, 2048)


def rule_budget(config: ExperimentConfig, slo_s: float, dataset: str) -> int:
  """The most tokens a step may have within the SLO, with as many decodes as it can (section 4.3).

  The chunk is at the end of a prompt that is longer than 90 % of the others. Stages share the rows.
  """
  latency = latency_of_config(config)
  rows = config.cache.num_rows // config.pools_of(config.strategy_names[0])[0].pp
  (context,) = [n for share, n in WORKLOADS[dataset].lengths.prompt_tokens if share == 0.9]

  def step_s(budget: int) -> float:
    chunk = max(1, budget - rows)
    return mixed_terms(latency, chunk, rows, RULE_CONTEXT, before=context - chunk).total_s

  return max((n for n in BUDGETS if step_s(n) <= slo_s), default=BUDGETS[0])


# Verdicts -----------------------------------------------------------------------------------------


def is_near(ours: float, published: float) -> bool:
  """Within `NEAR` of it, from below or above."""
  return NEAR * published <= ours <= published / NEAR


def judged_ratio(ours: float | None, published: float, what: str) -> Judged:
  """Held where a gain is near the published, in part where there is one of 10 % or more."""
  if ours is None:
    return Judged(NOT, f"{what}: the other serves nothing here, so there is no ratio.")
  verdict = HOLDS if is_near(ours, published) else IN_PART if ours >= 1.1 else NOT
  return Judged(verdict, f"{what}: {ours:.2f}x here, {published:g}x published.")


def judged_share(met: Mapping[str, bool], why: str) -> Judged:
  """Holds where all cases do, in part where half of them or more do. Names those that do not."""
  failing = [name for name, is_met in met.items() if not is_met]
  share = 1 - len(failing) / len(met)
  verdict = HOLDS if not failing else IN_PART if share >= 0.5 else NOT
  shown = "" if not failing else f"; not so: {', '.join(failing)}"
  return Judged(verdict, f"{why} ({len(met) - len(failing)} of {len(met)} cases{shown}).")


def over(ours: float, other: float) -> float | None:
  return ours / other if other else None
