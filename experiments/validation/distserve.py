"""DistServe's own runs of OPT-13B on A100s, and what its authors' simulator says of them.

The runs are ShareGPT requests (LLMServe/DistServe, Apache-2.0), the simulator is simdistserve. Two
models of the same systems:

- `as_simdistserve`: all its assumptions. No memory limit but 50,000 tokens of context in a step of
  decodes, hand-offs that take no time, prompts of any number in a step, and a first token that is
  not one of the output, so that each request has one token more.
- `as_served`: what the source of the real systems says. DistServe: prompts in order of arrival, up
  to 8,192 tokens a step and as its KV cache has room, which they keep until they have moved; a
  decode instance takes them between two steps, as soon as it has room for the prompt, grows, and
  takes pages from the newest when it has none left (deviation: those are computed again, there they
  go to the host and back). vLLM 0.2.3: prompts first, whole, all of a step at the length of the
  longest, up to 16,384 tokens so computed and 256 of them padding; preemption by recomputing the
  newest; 1 % of the pages are kept free. By its shipped step times no padding and no such limit:
  their factors were chosen in a simulator that knows neither (`configs/linear.py: pads_prompts`).

Nothing was fitted to these runs by us; by their authors, see `STEP_TIMES`.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from configs.hardware import HARDWARE, LINKS
from configs.linear import SIMDISTSERVE, distserve_fit, pads_prompts
from configs.models import MODELS
from experiments.validation.replay import simulate
from experiments.validation.requests import Measured, to_requests
from pdjax.config import PoolSpec, SchedulerOptions, parse_pools
from pdjax.core.clock import to_ticks
from pdjax.core.events import EventLog
from pdjax.scheduling.hand_off import HandOff
from pdjax.scheduling.pages import PageConfig
from pdjax.serving.executor import Handle
from pdjax.sim.hardware import Link
from pdjax.sim.linear import DistServeForm
from pdjax.sim.roofline import num_pages
from pdjax.sim.sim_executor import SimExecutor, SimTicket

MODEL = MODELS["opt-13b"]
DEVICE = HARDWARE["a100"]
PAGE_SIZE = 16
PAGES_PER_ROW = 2048 // PAGE_SIZE + 1  # OPT ends at 2,048 tokens
SLOS = ((0.2, 0.1), (0.25, 0.1), (0.4, 0.1))  # TTFT, TPOT in seconds, as in facts.json
INSTANT = Link(name="instant", latency_s=0.0, bytes_per_s=float("inf"))
# What a median prompt of 680 tokens takes over NVLink is 1.9 ms; the paper measured 3.4 (Figure 10,
# at 2 requests a second on each device): the rest is the start.
NVLINK = dataclasses.replace(LINKS["nvlink"], latency_s=1.5e-3)

# `max_paddings` of vLLM 0.2.3 (core/scheduler.py, engine/arg_utils.py), a default that DistServe's
# runs left as it is (evaluation/2-benchmark-serving/2-start-api-server.py).
PADDING_LIMIT = "prefill_first.max_padding_tokens=256"

RUNS = "opt13b_sharegpt_a100_measured_requests.csv"
FACTS = "facts.json"

# Where step times come from: how the coefficients of `configs/linear.py` are taken. simdistserve's
# own constants for Ray and for stages come on top of each. As shipped is as their authors use them:
# scaled by hand to runs that were served. Their script for that (simdistserve/benchmarks/alignment/
# align_with_real.py) has DistServe's runs of 300 requests and all of vLLM's here, by the first of
# `SLOS`. As profiled nobody scaled them to anything that was served.
STEP_TIMES = ("shipped", "profiled")


def read_runs(folder: pathlib.Path) -> dict[str, tuple[Measured, ...]]:
  """Requests by run, in order of arrival. A run is named system[-placement]-requests-rate.

  The placement c21d11 is a prefill instance of TP 2 and a decode instance of TP 1; vLLM has TP 1.
  """
  runs: dict[str, list[Measured]] = {}
  with open(folder / RUNS, newline="") as file:
    for record in csv.DictReader(file):
      output_tokens = int(record["output_len"])
      row = Measured(
        arrival_s=float(record["arrival_s"]),
        prompt_tokens=int(record["prompt_len"]),
        output_tokens=output_tokens,
        ttft_s=float(record["ttft_ms"]) / 1e3,
        tpot_s=float(record["tpot_ms"]) / 1e3 if output_tokens > 1 else None,
      )
      runs.setdefault(record["file"], []).append(row)
  return {
    name: tuple(sorted(rows, key=lambda row: row.arrival_s)) for name, rows in sorted(runs.items())
  }


def read_facts(folder: pathlib.Path) -> dict[str, Any]:
  return json.loads((folder / FACTS).read_text())


def system_of(run: str) -> str | None:
  """`distserve` for one prefill and one decode instance, `vllm`, or None: a placement apart."""
  if run.startswith("vllm-"):
    return "vllm"
  return "distserve" if run.startswith("distserve-c21d11-") else None


class CopiesBetweenSteps(SimExecutor):
  """Its steps wait for the copies into its memory, and those for the step that runs.

  So that a copy waits for one step at most, it takes no strokes.
  """

  def __init__(self, *, steps_s: Callable, **args):
    super().__init__(**args)

  def import_(
    self, handle: Handle, *, row: int, page_ids: tuple[int, ...], now_s: float
  ) -> SimTicket:
    start_s = max(now_s, self._busy_until_s[0])
    self._busy_until_s[0] = end_s = start_s + to_ticks(self._link.copy_s(handle.num_bytes))
    return SimTicket(finish_s=end_s)


def _forms(system: str, *, shipped: bool = True) -> Callable:
  def latency(spec: PoolSpec) -> DistServeForm:
    fit = distserve_fit(system, MODEL.name, spec.group.tp, shipped=shipped)
    pads = pads_prompts(system, shipped=shipped)
    return DistServeForm(fit=fit, pads_prompts=pads, **SIMDISTSERVE)

  return latency


def as_simdistserve(rows: Sequence[Measured], system: str) -> EventLog:
  """The run of these requests by simdistserve's assumptions, by shipped coefficients."""
  n = len(rows)
  pages = PageConfig(
    num_rows=n, page_size=PAGE_SIZE, pages_per_row=PAGES_PER_ROW, num_pages=n * PAGES_PER_ROW
  )
  pools = {
    "distserve": "prefill:tp2,decode:sim_dist_serve",
    "vllm": "mixed:sim_dist_serve",
  }
  return simulate(
    to_requests(rows, more_tokens=1),
    parse_pools(pools[system]),
    SchedulerOptions(prefill_budget=n * MODEL.max_len, watermark=0.0, steps_in_flight=1),
    MODEL,
    _forms(system),
    lambda spec: pages,
    INSTANT,
    HandOff(streams=False),
  )


def as_served(
  rows: Sequence[Measured], system: str, *, shipped: bool = True, has_limits: bool = True
) -> EventLog:
  """The run of these requests by a system as it was, with step times as shipped or as profiled.

  `has_limits` False takes away what its KV cache holds no more: what it was limited by shows.
  """
  is_vllm = system == "vllm"
  # Of the device's memory DistServe uses 95 % and keeps 1 % free (distserve/worker.py). vLLM uses
  # 95 % less what a pass over 16,384 tokens takes.

  def pages(spec: PoolSpec) -> PageConfig:
    found = num_pages(
      model=MODEL,
      device=DEVICE,
      page_size=PAGE_SIZE,
      tp=spec.group.tp,
      memory_share=0.95 if is_vllm else 0.94,
      step_tokens=16_384 if is_vllm else 0,
    )
    return PageConfig(
      num_rows=1024,
      page_size=PAGE_SIZE,
      pages_per_row=PAGES_PER_ROW,
      num_pages=found if has_limits else 1024 * PAGES_PER_ROW,
    )

  options = SchedulerOptions(
    options=(PADDING_LIMIT,) if pads_prompts(system, shipped=shipped) else (),
    token_budget=1024,  # of steps of decodes
    prefill_budget=16_384 if is_vllm else 8192,
    watermark=0.01 if is_vllm else 0.0,
    max_preemptions=len(rows) * MODEL.max_len,  # nobody is protected from preemption there
    steps_in_flight=1,
  )
  return simulate(
    to_requests(rows),
    parse_pools("mixed:prefill_first" if is_vllm else "prefill:tp2,decode"),
    options,
    MODEL,
    _forms(system, shipped=shipped),
    pages,
    NVLINK,
    HandOff(streams=False, reservation="prompt"),
    SimExecutor if is_vllm else CopiesBetweenSteps,
  )


def rms(values: Sequence[float]) -> float:
  """The root of the mean square."""
  return (sum(value * value for value in values) / len(values)) ** 0.5
