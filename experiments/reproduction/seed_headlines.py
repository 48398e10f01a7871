"""The headlines that the seed article quotes: each where it was measured again.

Those of DistServe are taken from its figures, those of Sarathi-Serve from its capacities, both from
runs that those figures share. Mooncake's two are of its technical report (arXiv 2407.00079, figures
12 and 13), which has no figure elsewhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from configs.seed import mooncake
from experiments.figures.reproduction import Bars, draw
from experiments.reproduction import distserve, reduce
from experiments.reproduction.bench import Bench, Point
from experiments.reproduction.crossover_rates import (
  SHARE,
  Run,
  capacity_of,
  goodput_rps,
  only,
  rates_of,
  sweep_rates,
  tuned,
)
from experiments.reproduction.distserve_serving import bound, gain, published_gains
from experiments.reproduction.distserve_systems import STUDIES, Study, curves_of, runs_of
from experiments.reproduction.figure import (
  HOLDS,
  IN_PART,
  MISSING,
  NOT,
  Compared,
  Figure,
  Found,
  Judged,
  Missing,
)
from experiments.reproduction.published_sarathi import OVER_VLLM
from experiments.reproduction.sarathi_systems import (
  DEPLOYMENTS,
  as_system,
  capacities,
  judged_ratio,
  over,
)
from experiments.reproduction.seed_serving import profile_of
from pdjax.config import ExperimentConfig
from pdjax.core.request import Slo
from pdjax.workloads.lengths import Fixed

NEAR = 0.8  # of a published gain: from here on it is reached


class Gain(NamedTuple):
  """How much better the system comes out, in the headline's unit, and what that makes of it."""

  ours: float | None
  judged: Judged
  bound: str = ""  # where the gain is no more than a bound: `at least `, `at most `


def judge_percent(ours: float | None, published: float, how: str) -> Gain:
  """Held from `NEAR` of a published gain in percent on, in part where it is 10 % or more."""
  if ours is None:
    return Gain(None, Judged(IN_PART, f"The other serves nothing within its targets: {how}."))
  verdict = HOLDS if ours >= NEAR * published else IN_PART if ours >= 10 else NOT
  return Gain(ours, Judged(verdict, f"{ours:.0f} % more here, {published:g} there: {how}."))


# DistServe ----------------------------------------------------------------------------------------


def distserve_gain(bench: Bench, name: str, study: Study, axis: str, baseline: str) -> Gain:
  """By `rate` or by `scale`: the gain of a figure's runs, and what that makes of its claim."""
  (figure,) = (f for f in distserve.FIGURES if f.name == f"distserve/{name}")
  gains = published_gains(figure.name.split("/")[1][:4], study)
  (number,) = (i for i, own in enumerate(gains) if own[:2] == (axis, baseline))
  judged = figure.make(bench).judged[number]
  runs = runs_of(study, bench, also=False)
  ours, theirs = (
    curves_of(study, runs, *study.judged(system))[axis].crossing(100 * SHARE)
    for system in ("distserve", baseline)
  )
  return Gain(gain(axis, ours.x, theirs.x), judged, bound((ours, theirs)))


# Sarathi-Serve ------------------------------------------------------------------------------------


def sarathi_gain(bench: Bench, name: str) -> Gain:
  """Capacity over vLLM's on ShareGPT, strict."""
  own = DEPLOYMENTS[name]
  config, strict_s = own.config(), own.slos_s()[0]
  found = capacities(
    bench,
    {
      (name, system): (as_system(config, own.parts, system), strict_s)
      for system in ("vLLM", "Sarathi")
    },
  )
  sarathi, vllm = found[name, "Sarathi"], found[name, "vLLM"]
  ratio = over(sarathi, vllm)
  what = f"{sarathi:.3g} against {vllm:.3g} requests/s at P99 ITL {1e3 * strict_s:.0f} ms"
  return Gain(ratio, judged_ratio(ratio, OVER_VLLM[name], what))


# Mooncake -----------------------------------------------------------------------------------------

MORE_IN_TIME_PERCENT = 75.0
MORE_LONG_PERCENT = 525.0
LONG_PROMPTS = (16_384, 32_768, 65_536, 131_072)
LONG_OUTPUT = 512
LONG_POOLS = "3xprefill:tp8,1xdecode:tp8"
TTFT_TIMES, TBT_TIMES = 10.0, 5.0  # of the value at the lowest rate, P90 of each


def in_time_gain(bench: Bench) -> Gain:
  """Requests within the report's targets, 10 + 10 nodes against 20 that do both."""
  config = mooncake.get_config()
  if bench.quick:
    workload = dataclasses.replace(config.workload, num_requests=250)
    config = dataclasses.replace(config, workload=workload)
  points = {
    name: Point(config=only(config, name), reduce=reduce.slowest_micros)
    for name in config.strategy_names
  }
  slo = Slo(ttft_s=config.slo.ttft_s, tpot_s=config.slo.tpot_s)
  met = {
    name: Run.of(config.workload.rate_rps, columns).attainment(slo)
    for name, columns in bench.run(points).items()
  }
  shared, separate = (met[name] for name in config.strategy_names)
  how = f"{separate:.0%} of the requests in time against {shared:.0%}"
  gain = 100 * (separate / shared - 1) if shared else None
  return judge_percent(gain, MORE_IN_TIME_PERCENT, how)


def long_settings(quick: bool) -> dict[tuple[int, str, str], ExperimentConfig]:
  """By prompt length, system and how it is set. vLLM had to keep long prompts apart to hold its
  TBT: its number of rows is what it is tuned by.
  """
  found = {}
  for prompt in LONG_PROMPTS[::3] if quick else LONG_PROMPTS:
    base = mooncake.get_config()
    workload = dataclasses.replace(
      base.workload,
      lengths=Fixed(prompt_tokens=prompt, output_tokens=LONG_OUTPUT),
      num_requests=60 if quick else 160,
    )
    base = dataclasses.replace(base, workload=workload, num_devices=32, pools=None)
    found[prompt, "Mooncake", LONG_POOLS] = only(base, LONG_POOLS)
    for rows in (1, 32) if quick else (1, 2, 4, 32):
      found[prompt, "vLLM", f"{rows} rows"] = tuned(base, "continuous", rows=rows)
  return found


def long_gain(bench: Bench) -> Gain:
  """The largest of the gains over prompt lengths, as the report's headline is."""
  settings, rates, slos = long_settings(bench.quick), {}, {}
  for key, config in settings.items():
    prompt, (spec, *_) = key[0], config.pools_of(config.strategy_names[0])
    step = dict(tp=spec.group.tp)
    slos[key] = [
      Slo(
        ttft_s=TTFT_TIMES
        * profile_of(config.model, config.hardware, chunk_tokens=prompt, **step).step_s,
        tpot_s=TBT_TIMES
        * profile_of(config.model, config.hardware, rows=1, context=prompt, **step).step_s,
      )
    ]
    capacity_rps = capacity_of(settings[prompt, "vLLM", "32 rows"])
    rates[key] = rates_of(capacity_rps, 0.05, 2.0 if bench.quick else 1.4, 2.0)
  runs = sweep_rates(bench, settings, rates, slos, reduce.slowest_micros)
  best: dict[tuple[int, str], float] = {}
  for key, own in runs.items():
    rate_rps = goodput_rps(own, slos[key][0]) or 0.0
    best[key[:2]] = max(best.get(key[:2], 0.0), rate_rps)
  gains, said = [], []
  for prompt in dict.fromkeys(prompt for prompt, _ in best):
    ours, theirs = best[prompt, "Mooncake"], best[prompt, "vLLM"]
    said.append(f"{prompt // 1024}k {ours:.3g} against {theirs:.3g} requests/s")
    if theirs:
      gains.append(100 * (ours / theirs - 1))
  return judge_percent(max(gains, default=None), MORE_LONG_PERCENT, ", ".join(said))


# All of them --------------------------------------------------------------------------------------


class Headline(NamedTuple):
  claim: str
  published: float
  unit: str
  where: str  # the figure that has the curves
  gain: Callable[[Bench], Gain]


HEADLINES = (
  Headline(
    "Sarathi-Serve serves 2.6 times as much as vLLM (Mistral-7B, one A100).",
    OVER_VLLM["Mistral-7B"], "x", "sarathi/fig10", lambda bench: sarathi_gain(bench, "Mistral-7B"),
  ),
  Headline(
    "Sarathi-Serve serves 3.7 times as much as vLLM (Yi-34B, two A100s).",
    OVER_VLLM["Yi-34B"], "x", "sarathi/fig10", lambda bench: sarathi_gain(bench, "Yi-34B"),
  ),
  Headline(
    "DistServe serves 7.4 times as much within its SLOs as others do (OPT-13B, over MII).",
    7.4, "x", "distserve/fig8a", 
    lambda bench: distserve_gain(bench, "fig8a", STUDIES["13b"], "rate", "mii"),
  ),
  Headline(
    "DistServe keeps SLOs 12.6 times as tight (OPT-66B summarization, over vLLM).",
    12.6, "x", "distserve/fig9b", 
    lambda bench: distserve_gain(bench, "fig9b", STUDIES["summarization"], "scale", "vllm"),
  ),
  Headline(
    "Mooncake handles 75 % more requests in time.",
    MORE_IN_TIME_PERCENT, "% more", "configs/seed/mooncake.py", in_time_gain,
  ),
  Headline(
    "Mooncake serves up to 525 % more where prompts are long.",
    MORE_LONG_PERCENT, "% more", "configs/seed/mooncake.py", long_gain,
  ),
)  # fmt: skip


def measured(headline: Headline, bench: Bench) -> Gain:
  try:
    return headline.gain(bench)
  except (Missing, FileNotFoundError) as error:
    return Gain(None, Judged(MISSING, f"{headline.where} could not be made: {error}."))


def make_headlines(bench: Bench) -> Found:
  gains = [measured(headline, bench) for headline in HEADLINES]
  labelled = [
    (f"{_label(h)}{gain.bound and f' ({gain.bound.strip()})'}", h, gain)
    for h, gain in zip(HEADLINES, gains)
  ]
  bars = [
    Bars(
      title,
      unit,
      ("ours",),
      {label: (gain.ours,) for label, h, gain in labelled if h.unit == unit},
      published={(label, "ours"): h.published for label, h, _ in labelled if h.unit == unit},
    )
    for title, unit in (("Times as much", "x"), ("More", "% more"))
  ]
  return Found(
    columns=("headline", "published", "ours", "unit", "verdict", "where"),
    rows=[
      (h.claim, h.published, gain.ours, h.unit, gain.judged.verdict, h.where)
      for h, gain in zip(HEADLINES, gains)
    ],
    judged=[gain.judged for gain in gains],
    # A bound is off by no number.
    compared=[
      Compared(_label(h), h.published, None if gain.bound else gain.ours, h.unit)
      for h, gain in zip(HEADLINES, gains)
    ],
    draw=lambda path: draw(bars, path, "Headlines (simulated; MII a STAND-IN, Mooncake SYNTHETIC)"),
    notes=(
      "Stand-ins: MII is chunked prefill by our roofline; Mooncake's clusters serve synthetic "
      "prompts without common prefixes (the report's have half of theirs cached), A100s stand for "
      "A800s; vLLM prefills whole prompts first, with as many rows as serve most. TBT is the mean "
      "of a request's longest tenth of gaps.",
      *(["--quick: fewer lengths, rates and requests."] if bench.quick else []),
    ),
  )


def _label(headline: Headline) -> str:
  return f"{headline.claim.split()[0]} {headline.published:g}{headline.unit.replace(' more', '')}"


FIGURES = (
  Figure(
    name="seed/headlines",
    title="The headlines that the article quotes",
    kind="simulated",
    claims=tuple(headline.claim for headline in HEADLINES),
    make=make_headlines,
    configs=("configs/seed/mooncake.py",),
    is_headline=True,
  ),
)
