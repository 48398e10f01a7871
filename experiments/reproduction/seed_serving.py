"""The seed article's numbers that take a simulation; see `seed.py`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

from configs.hardware import HARDWARE
from configs.latency import roofline
from configs.models import MODELS
from configs.seed import budget_7b, budget_70b, lengths, stall, upgrade
from configs.workloads import WORKLOADS
from experiments.figures.reproduction import Bars, Panel, Series, draw
from experiments.reproduction import reduce
from experiments.reproduction.bench import Bench, Point
from experiments.reproduction.crossover_rates import (
  Best,
  answer_s,
  best_of,
  capacity_of,
  goodput_rps,
  lead_percent,
  of_seconds,
  only,
  rates_of,
  sweep_rates,
  targets,
  tuned,
)
from experiments.reproduction.figure import HOLDS, IN_PART, NOT, Figure, Found, Judged
from experiments.searching.probe import unloaded
from pdjax.analysis.intensity import StepProfile, profile_step, step_of
from pdjax.config import ExperimentConfig
from pdjax.sim.roofline import Roofline

A100 = HARDWARE["a100"]
LLAMA = "llama3-8b"
CONTEXT = 1024  # of decodes, where nothing else is said
TIE_PERCENT = 5


def latency_of(model: str, hardware: str, tp: int = 1) -> Roofline:
  device = HARDWARE[hardware]
  return roofline(MODELS[model], device, tp, 1, device.link)


def profile_of(model: str, hardware: str, *, tp: int = 1, **step: int) -> StepProfile:
  """Of a step that `step_of` makes."""
  return profile_step(
    step_of(**step), latency_of(model, hardware, tp), MODELS[model], HARDWARE[hardware], tp=tp
  )


# A stall and its remedy ---------------------------------------------------------------------------


def judge_stall(prefill_s: float, whole: Mapping[str, Any], chunked: Mapping[str, Any]):
  """The longest gap is a prefill, four fifths of it or more; chunks cut it to 40 % or less."""
  gap_s, cut_s = whole["itl_s"][-1], chunked["itl_s"][-1]
  p99 = reduce.STALL_PERCENTS.index(99)
  share, ttft = cut_s / gap_s, chunked["long_ttft_p50_s"] / whole["long_ttft_p50_s"]
  return [
    Judged(
      HOLDS if gap_s >= 0.8 * prefill_s else NOT,
      f"Its longest gap is {1e3 * gap_s:.0f} ms; the prefill alone takes {1e3 * prefill_s:.0f} ms, "
      f"the median gap is {1e3 * whole['itl_s'][0]:.0f} ms.",
    ),
    Judged(
      HOLDS if share <= 0.4 else IN_PART if share < 0.9 else NOT,
      f"To {1e3 * cut_s:.0f} ms, {share:.0%} of that; ITL p99 from {1e3 * whole['itl_s'][p99]:.0f} "
      f"to {1e3 * chunked['itl_s'][p99]:.0f} ms. A chunk's weights and decodes come on top of a "
      f"quarter. The long prompt waits {ttft:.2f} times as long for its first token.",
    ),
  ]


def make_stall(bench: Bench) -> Found:
  config = _shorter(stall.get_config(), bench)
  names = config.strategy_names
  runs = bench.run({name: Point(config=only(config, name), reduce=reduce.stalls) for name in names})
  prefill_s = profile_of(LLAMA, "a100", chunk_tokens=2048).step_s
  rows = [
    (name, percent, gap_s)
    for name, run in runs.items()
    for percent, gap_s in zip(reduce.STALL_PERCENTS, run["itl_s"])
  ]
  bars = Bars(
    "Gaps between tokens of running answers",
    "ms",
    names,
    {
      label: [1e3 * runs[name]["itl_s"][reduce.STALL_PERCENTS.index(percent)] for name in names]
      for label, percent in (("p50", 50), ("p99", 99), ("p99.9", 99.9), ("longest", 100))
    },
    lines={"prefill of 2,048 tokens, alone": 1e3 * prefill_s},
  )
  firsts = Bars(
    "First token of the 2,048-token prompts",
    "TTFT p50 (ms)",
    names,
    {"2,048 tokens": [1e3 * runs[name]["long_ttft_p50_s"] for name in names]},
  )
  return Found(
    columns=("strategy", "percentile", "itl_s"),
    rows=rows,
    judged=judge_stall(prefill_s, runs["continuous"], runs["chunked"]),
    draw=lambda path: draw([bars, firsts], path, f"{LLAMA} on one A100 (simulated)"),
    notes=("Chunks of 512 tokens beside up to 32 decodes.", *_quick(bench)),
  )


def _shorter(config: ExperimentConfig, bench: Bench, num_requests: int = 96) -> ExperimentConfig:
  """With fewer requests under --quick."""
  if not bench.quick:
    return config
  return dataclasses.replace(
    config, workload=dataclasses.replace(config.workload, num_requests=num_requests)
  )


def _quick(bench: Bench) -> list[str]:
  return ["--quick: fewer points and requests."] if bench.quick else []


# The token budget ---------------------------------------------------------------------------------

BUDGETS = (256, 512, 1024, 2048, 4096, 8192)
ITL_P99 = reduce.STALL_PERCENTS.index(99)


def judge_budget(model: str, runs: Mapping[int, Mapping[str, Any]]) -> Judged:
  """ITL p99 rises with the budget and TTFT p50 falls, but for 5 % a step; in part: one does."""
  ttfts = [runs[budget]["ttft_p50_s"] for budget in sorted(runs)]
  itls = [runs[budget]["itl_s"][ITL_P99] for budget in sorted(runs)]
  rises = all(b >= 0.95 * a for a, b in itertools.pairwise(itls)) and itls[-1] > itls[0]
  falls = all(b <= 1.05 * a for a, b in itertools.pairwise(ttfts)) and ttfts[-1] < ttfts[0]
  return Judged(
    HOLDS if rises and falls else IN_PART if rises or falls else NOT,
    f"From {min(runs)} to {max(runs)} tokens TTFT p50 goes from {ttfts[0]:.2f} to {ttfts[-1]:.2f} "
    f"s ({'falls' if falls else 'not always down'}) and ITL p99 from {1e3 * itls[0]:.0f} to "
    f"{1e3 * itls[-1]:.0f} ms ({'rises' if rises else 'not always up'}).",
  )


def make_budget(bench: Bench) -> Found:
  budgets = BUDGETS[::2] if bench.quick else BUDGETS
  bases = {c.model: _shorter(c, bench) for c in (budget_7b.get_config(), budget_70b.get_config())}
  points = {}
  for model, config in bases.items():
    rate_rps = config.workload.load * unloaded(config).capacity_rps
    workload = dataclasses.replace(config.workload, rate_rps=rate_rps)
    for budget in budgets:
      own = tuned(dataclasses.replace(config, workload=workload), "chunked", token_budget=budget)
      points[model, budget] = Point(config=own, reduce=reduce.stalls)
  runs = bench.run(points)
  by_model = {model: {budget: runs[model, budget] for budget in budgets} for model in bases}
  panels = []
  for title, value in (
    ("First token", lambda run: run["ttft_p50_s"]),
    ("Gaps between tokens", lambda run: run["itl_s"][ITL_P99]),
  ):
    series = [
      Series(_on(bases[model]), [(b, value(run)) for b, run in own.items()], "ours", colour)
      for colour, (model, own) in enumerate(by_model.items())
    ]
    y = "TTFT p50 (s)" if title == "First token" else "ITL p99 (s)"
    panels.append(Panel(title, "token budget", y, series, is_log_x=True, ylim=(0, None)))
  panels.append(
    Panel("One for the other", "TTFT p50 (s)", "ITL p99 (s)", [
      Series(_on(bases[model]), [(r["ttft_p50_s"], r["itl_s"][ITL_P99]) for r in own.values()],
             "ours", colour)
      for colour, (model, own) in enumerate(by_model.items())
    ], xlim=(0, None), ylim=(0, None))
  )  # fmt: skip
  return Found(
    columns=("model", "token budget", "ttft_p50_s", "ttft_p90_s", "itl_p50_s", "itl_p99_s"),
    rows=[
      (model, budget, run["ttft_p50_s"], run["ttft_p90_s"], run["itl_s"][0], run["itl_s"][ITL_P99])
      for (model, budget), run in runs.items()
    ],
    judged=[judge_budget(model, own) for model, own in by_model.items()],
    draw=lambda path: draw(
      panels, path, "What a token budget trades (simulated, SYNTHETIC lengths)"
    ),
    notes=(
      "Synthetic: lengths are drawn from ShareGPT's published quantiles, up to 8,192 tokens; the "
      "same requests at the same rate for all budgets, 0.6 of the capacity at 2,048.",
      *_quick(bench),
    ),
  )


def _on(config: ExperimentConfig) -> str:
  return f"{config.model} on {config.num_devices} {config.hardware.upper()}"


# Which half to upgrade ----------------------------------------------------------------------------

PAIRS = {  # what prefills, what decodes
  "both A100": ("a100", "a100"),
  "decode on H100": ("a100", "h100"),
  "prefill on H100": ("h100", "a100"),
  "both H100": ("h100", "h100"),
}
MOST_LOAD = 4.0  # times what two A100s promise
UPGRADE_WORKLOADS = ("humaneval", "sharegpt", "arxiv")


def judge_upgrade(speedups: Mapping[str, float], gains: Mapping[str, Mapping[str, float | None]]):
  """Prefill gains as peak FLOP/s grow and decode as peak bytes/s do, within 25 %. Then which of the
  two upgrades lifts goodput more by 5 % or more in each workload, and whether it is always one.
  """
  asked = {
    "prefill": HARDWARE["h100"].peak_flops_per_s / A100.peak_flops_per_s,
    "decode": HARDWARE["h100"].peak_bytes_per_s / A100.peak_bytes_per_s,
  }
  near = [name for name, factor in asked.items() if abs(speedups[name] / factor - 1) <= 0.25]
  winners, said = {}, []
  for workload, own in gains.items():
    prefill, decode = own["prefill on H100"], own["decode on H100"]
    said.append(f"{workload}: prefill {_times(prefill)}, decode {_times(decode)}")
    if prefill is not None and decode is not None:
      best = "prefill" if prefill > decode else "decode"
      if max(prefill, decode) >= (1 + TIE_PERCENT / 100) * min(prefill, decode):
        winners[workload] = best
  differ = len(set(winners.values())) > 1
  return [
    Judged(
      HOLDS if len(near) == 2 else IN_PART if near else NOT,
      f"A prompt of 2,048 tokens {speedups['prefill']:.2f} times as fast (peak FLOP/s "
      f"{asked['prefill']:.2f} times), a decode of 32 rows {speedups['decode']:.2f} times (peak "
      f"bytes/s {asked['decode']:.2f} times).",
    ),
    Judged(
      HOLDS if differ else IN_PART if winners else NOT,
      f"Goodput of the pair, times that of two A100s, with one half on an H100: {'; '.join(said)}.",
    ),
  ]


def _times(gain: float | None) -> str:
  return "none" if gain is None else f"{gain:.2f}"


def make_upgrade(bench: Bench) -> Found:
  base = upgrade.get_config()
  settings, rates, slos = {}, {}, {}
  names = UPGRADE_WORKLOADS
  for name in names:
    own = WORKLOADS[name]
    workload = dataclasses.replace(base.workload, lengths=own.lengths, label=own.label)
    config = dataclasses.replace(base, workload=workload)
    slo = targets(config, dict(own.lengths.prompt_tokens)[0.5])["balanced", "balanced"]
    capacity_rps = capacity_of(config)
    # Long enough for answers to fill the pools at the highest rate.
    seconds = (1 if bench.quick else 2) * answer_s(config, slo)
    config = of_seconds(config, MOST_LOAD * capacity_rps, seconds, 100)
    grid = rates_of(capacity_rps, 0.1, 1.8 if bench.quick else 1.35, MOST_LOAD)
    for pair, (prefill, decode) in PAIRS.items():
      key = name, pair
      settings[key] = only(config, f"1xprefill@{prefill},1xdecode@{decode}")
      rates[key], slos[key] = grid, [slo]
  runs = sweep_rates(bench, settings, rates, slos)
  goodputs = {key: goodput_rps(own, slos[key][0]) for key, own in runs.items()}
  gains = {
    name: {pair: _ratio(goodputs[name, pair], goodputs[name, "both A100"]) for pair in PAIRS}
    for name in names
  }
  speedups = {
    "prefill": _step_ratio(chunk_tokens=2048),
    "decode": _step_ratio(rows=32, context=CONTEXT),
  }
  bars = Bars(
    "Goodput of a pair, one device for each phase",
    "times that of two A100s",
    tuple(PAIRS),
    {name: [gains[name][pair] for pair in PAIRS] for name in names},
  )
  faster = Bars(
    "One step",
    "times as fast on an H100",
    ("ours", "of the peak that limits it"),
    {
      "prefill of 2,048": (
        speedups["prefill"], HARDWARE["h100"].peak_flops_per_s / A100.peak_flops_per_s),
      "decode of 32 rows": (
        speedups["decode"], HARDWARE["h100"].peak_bytes_per_s / A100.peak_bytes_per_s),
    },
  )  # fmt: skip
  return Found(
    columns=("workload", "pair", "goodput_rps", "times both A100"),
    rows=[(*key, value, gains[key[0]][key[1]]) for key, value in goodputs.items()],
    judged=judge_upgrade(speedups, gains),
    draw=lambda path: draw(
      [bars, faster], path, "A100 to H100 for one half (simulated, SYNTHETIC lengths)"
    ),
    notes=(
      "Synthetic lengths (published quantiles). Targets are the crossover map's balanced pair, on "
      "A100s, for all pairs. The A100 has 0.8 ms and 42 us a row of host time a step, of the H100 "
      "nobody published any: decode gains by that too.",
      *_quick(bench),
    ),
  )


def _ratio(a: float | None, b: float | None) -> float | None:
  return None if a is None or b is None else a / b


def _step_ratio(**step: int) -> float:
  return profile_of(LLAMA, "a100", **step).step_s / profile_of(LLAMA, "h100", **step).step_s


# How long prompts must be -------------------------------------------------------------------------

LENGTHS = (128, 512, 2048, 8192, 16_384)
LENGTH_LINKS = ("10gbe", "hdr200")
TPOT_CONTEXT = 2048  # of the decode step that TPOT targets are multiples of, for all lengths
SHARED, SEPARATE = "shared", "separate"
Goodputs = Mapping[int, Mapping[str, Best]]
"""By prompt length and kind of strategy."""


def judge_lengths(balanced: Mapping[str, Goodputs], tight: Goodputs) -> list[Judged]:
  """Below some length separate pools do not pay, and above it they do. At 8,192 and more, with
  tight targets, they serve more than chunks; below that, no less.
  """
  pays = {
    link: [n for n, best in own.items() if _lead(best) >= TIE_PERCENT]
    for link, own in balanced.items()
  }
  fast = LENGTH_LINKS[-1]
  short, long_ones = min(LENGTHS), [n for n in tight if n >= 8192]
  does = short not in pays[fast] and bool(pays[fast])
  stops = [n for n in long_ones if _lead(tight[n]) >= TIE_PERCENT]
  before = [n for n in tight if n < 8192 and _lead(tight[n]) >= TIE_PERCENT]
  leads = ", ".join(f"{n}: {_lead_words(best)}" for n, best in tight.items())
  said = "; ".join(
    f"over {link} from {min(own)} tokens on" if own else f"over {link} at no length"
    for link, own in pays.items()
  )
  return [
    Judged(
      HOLDS if does else IN_PART if short not in pays[fast] else NOT,
      f"With balanced targets separate pools serve {TIE_PERCENT} % more than shared ones {said} "
      f"(leads over {fast}: "
      f"{', '.join(f'{n}: {_lead_words(b)}' for n, b in balanced[fast].items())}).",
    ),
    Judged(
      HOLDS if len(stops) == len(long_ones) and not before else IN_PART if stops else NOT,
      f"Lead of separate pools over chunks and whole prompts with both targets tight, by prompt "
      f"tokens: {leads}.",
    ),
  ]


def _lead(best: Mapping[str, Best]) -> float:
  """Of separate pools over shared ones, in percent."""
  return lead_percent(best[SEPARATE].goodput_rps, best[SHARED].goodput_rps)


def _lead_words(best: Mapping[str, Best]) -> str:
  if all(own.goodput_rps is None for own in best.values()):
    return "none reaches them"
  lead, how = _lead(best), best[SEPARATE].how
  words = "alone" if lead == float("inf") else f"{lead:+.0f} %"
  return f"{words} ({how})" if how else words


def make_lengths(bench: Bench) -> Found:
  base = lengths.get_config()
  sizes = LENGTHS[::2] if bench.quick else LENGTHS
  settings, rates, slos = {}, {}, {}
  for n in sizes:
    fixed = dataclasses.replace(base.workload.lengths, prompt_tokens=n)
    config = dataclasses.replace(base, workload=dataclasses.replace(base.workload, lengths=fixed))
    capacity_rps = capacity_of(config)
    config = of_seconds(config, capacity_rps, 4 if bench.quick else 15, 80 if bench.quick else 300)
    grid = rates_of(capacity_rps, 0.15, 1.7 if bench.quick else 1.35, 1.6)
    wanted = targets(config, n, context=TPOT_CONTEXT)
    for key, own in _length_settings(config).items():
      settings[n, *key], rates[n, *key] = own, grid
      slos[n, *key] = [wanted["balanced", "balanced"], wanted["tight", "tight"]]
  runs = sweep_rates(bench, settings, rates, slos)

  def best(n: int, link: str, which: int) -> dict[str, Best]:
    own = {key[2:]: run for key, run in runs.items() if key[0] == n and key[1] in ("", link)}
    return best_of(own, slos[n, "", SHARED, "whole prompts"][which])

  found = {
    (level, link): {n: best(n, link, which) for n in sizes}
    for which, level in enumerate(("balanced", "tight"))
    for link in LENGTH_LINKS
  }
  panels = []
  for level in ("balanced", "tight"):
    series = [_goodputs("shared, best", found[level, LENGTH_LINKS[0]], SHARED, "ours", 0)]
    for link, source in zip(LENGTH_LINKS, ("long", "ours")):
      series.append(_goodputs(f"separate, {link}", found[level, link], SEPARATE, source, 1))
    panels.append(
      Panel(f"Both targets {level}", "prompt tokens", "goodput x prompt tokens (tokens/s)", series,
            is_log_x=True)
    )  # fmt: skip
  return Found(
    columns=("targets", "link", "prompt tokens", "pools", "set to", "goodput_rps"),
    rows=[
      (*key, n, kind, own.how, own.goodput_rps)
      for key, by_length in found.items()
      for n, both in by_length.items()
      for kind, own in both.items()
    ],
    judged=judge_lengths(
      {link: found["balanced", link] for link in LENGTH_LINKS}, found["tight", LENGTH_LINKS[-1]]
    ),
    draw=lambda path: draw(panels, path, f"{_on(base)}, prompts all alike (simulated)"),
    notes=(
      f"Synthetic: all prompts alike, answers of {base.workload.lengths.output_tokens} tokens. "
      "Shared pools at the best of whole prompts and budgets of 512, 2,048 and 8,192; separate "
      "ones at the best number that prefill. TTFT targets as in the crossover map, of the same "
      f"prompt; TPOT targets too, but behind {TPOT_CONTEXT:,} tokens whatever the prompt.",
      "Prompts of 8,192 tokens and more are longer than the model was trained for; steps take as "
      "long.",
      *_quick(bench),
    ),
  )


def _length_settings(config: ExperimentConfig) -> dict[tuple[str, str, str], ExperimentConfig]:
  found = {("", SHARED, "whole prompts"): only(config, "continuous")}
  for budget in (512, 2048, 8192):
    found["", SHARED, f"chunks of {budget}"] = tuned(config, "chunked", token_budget=budget)
  for link in LENGTH_LINKS:
    for prefill in range(1, config.num_devices):
      pools = f"{prefill}xprefill,{config.num_devices - prefill}xdecode"
      separate = dataclasses.replace(only(config, pools), link=link)
      found[link, SEPARATE, f"{prefill} of {config.num_devices} prefill"] = separate
  return found


def _goodputs(label: str, found: Goodputs, kind: str, source: str, colour: int) -> Series:
  points = [
    (n, n * both[kind].goodput_rps)
    for n, both in found.items()
    if both[kind].goodput_rps is not None
  ]
  return Series(label, points, source, colour)


FIGURES = (
  Figure(
    name="seed/stall",
    title="A prompt of 2,048 tokens beside running answers, whole and in four chunks of 512",
    kind="simulated",
    claims=(
      "A prompt of 2,048 tokens stalls running answers for its whole prefill.",
      "Four chunks of 512 cut that.",
    ),
    make=make_stall,
    configs=("configs/seed/stall.py",),
  ),
  Figure(
    name="seed/budget",
    title="Token budgets from 256 to 8,192: TTFT against ITL",
    kind="simulated",
    claims=(
      "For a 7B model a larger budget brings first tokens sooner and tokens less evenly.",
      "So it does for a 70B model.",
    ),
    make=make_budget,
    configs=("configs/seed/budget_7b.py", "configs/seed/budget_70b.py"),
  ),
  Figure(
    name="seed/upgrade",
    title="An H100 for the pool that prefills, or for the one that decodes",
    kind="simulated",
    claims=(
      "An H100 speeds prefill as its arithmetic grows, and decode as its memory does.",
      "Which half to upgrade depends on the traffic.",
    ),
    make=make_upgrade,
    configs=("configs/seed/upgrade.py",),
  ),
  Figure(
    name="seed/lengths",
    title="From which prompt length on separate pools pay, and chunks no longer suffice",
    kind="simulated",
    claims=(
      "There is a prompt length below which separate pools do not pay.",
      "With prompts of 8,192 and more and tight targets on both, chunks no longer suffice.",
    ),
    make=make_lengths,
    configs=("configs/seed/lengths.py",),
  ),
)
