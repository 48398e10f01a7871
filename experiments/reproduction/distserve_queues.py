"""What DistServe's figures presuppose: the queue of prompts (4), lengths (7), targets (Table 1)."""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Sequence

import numpy as np

from configs.hardware import LINKS
from configs.models import MODELS
from configs.slos import SLOS
from configs.workloads import WORKLOADS
from experiments.figures.reproduction import Panel, Series, draw
from experiments.reproduction import published_distserve as published
from experiments.reproduction.bench import Bench
from experiments.reproduction.distserve_systems import (
  STUDIES,
  WITHIN,
  arrivals_s,
  lengths_note,
  recorded_lengths,
)
from experiments.reproduction.figure import HOLDS, IN_PART, NOT, Compared, Figure, Found, Judged
from experiments.validation.replay import simulate
from pdjax.analysis.queueing import even_rate_rps, mean_ttft_s
from pdjax.config import SchedulerOptions, parse_pools
from pdjax.core.clock import to_ticks
from pdjax.core.costs import StepCounts
from pdjax.core.request import Request, SamplingParams
from pdjax.metrics.latency import request_records
from pdjax.scheduling.pages import PageConfig
from pdjax.sim.latency_model import LatencyModel, StepTerms

# Figure 4 -----------------------------------------------------------------------------------------


class _Constant(LatencyModel):
  """Every step takes as long."""

  __slots__ = ("_step_s",)

  def __init__(self, step_s: float):
    self._step_s = step_s

  def terms_of(self, counts: StepCounts) -> StepTerms:
    return StepTerms(linear_s=self._step_s)

  def hand_over_s(self, num_tokens: int) -> float:
    return 0.0


def recursive_ttft_s(times_s: Sequence[float], prefill_s: float, stages: int) -> float:
  """The mean of a queue with just these arrivals: a prompt enters when the one before leaves room.

  Lindley's recursion: D/M apart at the first of M stages, nobody waits at the others.
  """
  ttfts_s, enters_s = [], -math.inf
  for time_s in times_s:
    enters_s = max(time_s, enters_s + prefill_s / stages)
    ttfts_s.append(enters_s + prefill_s - time_s)
  return statistics.fmean(ttfts_s)


def simulated_ttft_s(times_s: Sequence[float], prefill_s: float, stages: int) -> float:
  """The mean by the serving loop: prompts of one step each, in a pool of so many stages."""
  requests = [
    Request(
      request_id=i,
      arrival_s=to_ticks(time_s),
      num_prompt_tokens=16,
      sampling=SamplingParams(max_tokens=1),
    )
    for i, time_s in enumerate(times_s)
  ]
  log = simulate(
    requests,
    parse_pools(f"mixed:tp{2 // stages}:pp{stages}:prefill_first"),
    SchedulerOptions(prefill_budget=16, watermark=0.0, steps_in_flight=1),
    MODELS["opt-66b"],
    lambda spec: _Constant(prefill_s),
    lambda spec: PageConfig(num_rows=16, page_size=16, pages_per_row=1, num_pages=16),
    LINKS["nvlink"],
  )
  return statistics.fmean(record.ttft_s for record in request_records(log).values())


def fig4(bench: Bench) -> Found:
  prefill_s, speedup = published.FIG4_PREFILL_S, published.FIG4_SPEEDUP
  curves = {"inter-op": (published.FIG4_INTER, dict(stages=2))}
  curves |= {
    f"intra-op, K = {k}": (points, dict(speedup=k)) for k, points in published.FIG4_INTRA.items()
  }
  rows, compared, series = [], [], {}
  for i, (name, (points, changes)) in enumerate(curves.items()):
    own = [(rate, mean_ttft_s(2 * rate, prefill_s, **changes)) for rate, _ in points]
    rows += [(name, "closed form", rate, ttft_s) for rate, ttft_s in own]
    compared += [
      Compared(f"{name}, {rate:g}/s", there, here, "s")
      for (rate, there), (_, here) in zip(points, own)
    ]
    series[name] = [
      Series(name, own, "ours", i),
      Series(f"{name}, published", points, "published", i),
    ]
  num_requests = 10_000 if bench.quick else 30_000
  loops: dict[str, list] = {"inter-op": [], f"intra-op, K = {speedup}": []}
  apart = 0.0
  for rate, name in itertools.product((1.0, 2.0, 3.0), loops):
    bench.show(f"{name} at {rate:g}/s through the serving loop")
    stages = 2 if name == "inter-op" else 1
    step_s = prefill_s if name == "inter-op" else prefill_s / speedup
    times_s = arrivals_s(num_requests, 2 * rate)
    ttft_s, same_s = (
      ttft_of(times_s, step_s, stages) for ttft_of in (simulated_ttft_s, recursive_ttft_s)
    )
    loops[name].append((rate, ttft_s))
    apart = max(apart, abs(ttft_s / same_s - 1))
    rows.append((name, f"serving loop, {num_requests} requests", rate, ttft_s))
    rows.append((name, "Lindley's recursion, the same requests", rate, same_s))
  worst_s = max(abs(c.ours - c.published) for c in compared)
  sampled = max(
    abs(ttft_s / mean_ttft_s(2 * rate, prefill_s, **curves[name][1]) - 1)
    for name, points in loops.items()
    for rate, ttft_s in points
  )
  even_rps = even_rate_rps(prefill_s, stages=2, speedup=speedup) / 2
  panels = [
    Panel(
      "(a) and the serving loop (dash-dotted)",
      "requests a second, each of 2 GPUs",
      "mean TTFT (s)",
      [
        *(s for name in loops for s in series[name]),
        *(Series(f"{name}, loop", points, "peer", 6) for name, points in loops.items()),
      ],
      ylim=(0, 1.2),
    ),
    Panel(
      "(b) intra-op by its speed-up K",
      "requests a second, each of 2 GPUs",
      "mean TTFT (s)",
      [s for own in series.values() for s in own],
      ylim=(0, 1.4),
    ),
  ]
  is_exact, is_queue = worst_s <= 1e-4, apart <= 1e-3
  return Found(
    columns=("placement", "by", "rate a GPU (1/s)", "mean TTFT (s)"),
    rows=rows,
    judged=[
      Judged(
        HOLDS if is_exact and is_queue else IN_PART if is_exact or is_queue else NOT,
        f"Equations 2 and 3 are within {worst_s:.1g} s of all {len(compared)} points, the serving "
        f"loop within {100 * apart:.1g} % of a queue with the same {num_requests:,} arrivals, and "
        f"these within {100 * sampled:.2g} % of the equations, which are of endless ones.",
      ),
      Judged(
        HOLDS if 2 < even_rps < 4 else NOT,
        f"They are even at {even_rps:.3g}/s a GPU: below it intra-op has the shorter TTFT, above "
        f"it inter-op.",
      ),
    ],
    compared=compared,
    draw=functools.partial(
      draw,
      panels,
      title="DistServe Figure 4: prefill of OPT-66B, 512 tokens, as a queue",
      columns=2,
    ),
    notes=[
      "D = 0.2 s and K = 1.7; the paper's axis is the rate for each GPU, so R is twice what is "
      "drawn. Its panel (a) is captioned as measured, and equals the equations."
    ],
  )


# Figure 7 -----------------------------------------------------------------------------------------


def fig7(bench: Bench) -> Found:
  num = 2000 if bench.quick else 100_000  # the mean of LongBench's outputs to 1 %
  lengths: dict[str, Sequence[tuple[int, int]] | None] = {
    "sharegpt": recorded_lengths(bench.data_dir),
    "humaneval": published.HUMANEVAL,
    "longbench": WORKLOADS["longbench"].lengths.pairs(num, np.random.default_rng(0)),
  }
  chat = STUDIES["13b"].config
  drawn = {"longbench"} if lengths["sharegpt"] is not None else {"longbench", "sharegpt"}
  notes = [
    lengths_note(lengths["sharegpt"], chat),
    "HumanEval's are its 164 problems. LongBench's are SYNTHETIC: drawn from the paper's own "
    "histogram of outputs and, independently, as its script cuts prompts (`configs/workloads.py`).",
  ]
  if lengths["sharegpt"] is None:
    lengths["sharegpt"] = chat.workload.lengths.pairs(num, np.random.default_rng(0))
  rows, panels, compared, judged = [], [], [], []
  edges = np.arange(41) * published.FIG7_BIN_TOKENS
  middles = ((edges[1:] + edges[:-1]) / 2).tolist()
  for name, pairs in lengths.items():
    series, parts = [], []
    for i, kind in enumerate(("prompt", "output")):
      values = np.array([pair[i] for pair in pairs])
      density = 1e3 * np.histogram(values, edges)[0] / (len(values) * published.FIG7_BIN_TOKENS)
      there = published.FIG7_DENSITY[name][kind]
      rows += [(name, kind, middle, d) for middle, d in zip(middles, density.tolist())]
      series.append(Series(kind, list(zip(middles, density.tolist())), "ours", i))
      series.append(Series(f"{kind}, published", list(zip(middles, there)), "published", i))
      compared.append(
        Compared(
          f"{name}: mean {kind}", published.FIG7_MEAN[name][i], float(values.mean()), "tokens"
        )
      )
      apart = 50 * published.FIG7_BIN_TOKENS / 1e3 * np.abs(density - np.array(there)).sum()
      parts.append(f"{kind} {compared[-1].error_percent:+.1f} %, {apart:.0f} % of it in other bins")
    errors = [abs(c.error_percent) for c in compared[-2:]]
    verdict = HOLDS if max(errors) <= 2 else IN_PART if max(errors) <= 100 * WITHIN else NOT
    judged.append(Judged(verdict, f"Means here: {'; '.join(parts)}."))
    title = f"{name}, ours SYNTHETIC" if name in drawn else name
    panels.append(Panel(title, "tokens", "share of requests a token (1/1,000)", series))
  return Found(
    columns=("data set", "length", "tokens (middle of the bin)", "density (1/1,000)"),
    rows=rows,
    judged=judged,
    compared=compared,
    draw=functools.partial(draw, panels, title="DistServe Figure 7: lengths of requests"),
    notes=notes,
  )


# Table 1 ------------------------------------------------------------------------------------------


def table1(bench: Bench) -> Found:
  rows, compared = [], []
  for name, (model, gigabytes, ttft_s, tpot_s) in published.TABLE1.items():
    own, slo = 2 * MODELS[model].num_params / 1e9, SLOS[name]
    rows.append((name, model, own, slo.ttft_s, slo.tpot_s))
    compared += [
      Compared(f"{name}: weights", gigabytes, own, "GB"),
      Compared(f"{name}: TTFT", ttft_s, slo.ttft_s, "s"),
      Compared(f"{name}: TPOT", tpot_s, slo.tpot_s, "s"),
    ]
  weights = [abs(c.error_percent) for c in compared if c.what.endswith("weights")]
  slos = [c.error_percent for c in compared if not c.what.endswith("weights")]
  return Found(
    columns=("application", "model", "weights (GB)", "TTFT (s)", "TPOT (s)"),
    rows=rows,
    judged=[
      Judged(HOLDS if max(weights) <= 2 else NOT, f"Within {max(weights):.1g} % from our shapes."),
      Judged(NOT if any(slos) else HOLDS, "They are those of `configs/slos.py`, used throughout."),
    ],
    compared=compared,
  )


FIGURES = (
  Figure(
    name="distserve/fig4",
    title="mean TTFT under inter-op and intra-op parallelism",
    kind="analytic",
    claims=(
      "TTFT of prefill is that of an M/D/1 queue (equations 2 and 3).",
      "Intra-op parallelism is better at low rates, inter-op at high ones.",
    ),
    make=fig4,
  ),
  Figure(
    name="distserve/fig7",
    title="lengths of the data sets",
    kind="analytic",
    claims=tuple(
      f"{name}: prompts of {prompt:g} and outputs of {output:g} tokens on average."
      for name, (prompt, output) in published.FIG7_MEAN.items()
    ),
    make=fig7,
  ),
  Figure(
    name="distserve/table1",
    title="applications, models and SLOs",
    kind="analytic",
    claims=("Weights take 26, 132 and 350 GB.", "SLOs of the five applications."),
    make=table1,
  ),
)
