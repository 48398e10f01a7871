"""When to share devices and when to separate phases: the map that no paper has, and a check on one
that has a corner of it.

TaiChi's numbers are its Table 2 (arXiv 2508.01989, simulated in Vidur by its authors), as noted in
secondary reading: Llama-2-70B on groups of four devices, arXiv summarization, 12 requests a second.
It names neither the devices nor how many there were.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from configs import crossover, crossover_taichi
from configs.hardware import LINKS
from configs.workloads import WORKLOADS
from experiments.figures.crossover import Map, draw_map
from experiments.figures.reproduction import Panel, Series, draw
from experiments.reproduction import reduce
from experiments.reproduction.bench import Bench, Point
from experiments.reproduction.crossover_rates import (
  LEVELS,
  PAIRS,
  SHARE,
  SLO_ROWS,
  TPOT_MULTIPLES,
  TTFT_MULTIPLES,
  Best,
  Run,
  answer_s,
  best_of,
  capacity_of,
  cell_of,
  lead_percent,
  of_seconds,
  only,
  rates_of,
  sweep_rates,
  targets,
  tuned,
)
from experiments.reproduction.figure import HOLDS, IN_PART, NOT, Compared, Figure, Found, Judged
from experiments.searching.goals import Asked, make_search
from pdjax.analysis.targets import Attainment
from pdjax.config import ExperimentConfig
from pdjax.core.request import Slo

SHARED = ("continuous", "chunked")
SEPARATE = "disaggregated"
TIE_PERCENT = 5  # a smaller margin is within what chance does to so many requests
MAP_WORKLOADS = ("sharegpt", "arxiv", "azure-conv")
MAP_LINKS = ("10gbe", "100gbe", "nvlink")
# A run has the requests that come at capacity in so many times what an answer takes at the balanced
# TPOT target: in a shorter one pools pass at rates at which they fill up.
ANSWERS, QUICK_ANSWERS = 3.0, 1.0
LEAST_REQUESTS, QUICK_LEAST_REQUESTS = 400, 150
LAYER_GROUPS = 4  # of hand-offs over all links but the fastest
FIRST_SHARE, LAST_SHARE = 0.12, 1.5  # of capacity
FACTOR, QUICK_FACTOR = 1.5, 1.85

Key = tuple[str, str, str, str]
"""Workload, link, strategy, how it is set. Shared devices hand nothing over: their link is ""."""


# The map ------------------------------------------------------------------------------------------


def map_settings(
  config: ExperimentConfig, links: Sequence[str], quick: bool
) -> dict[tuple[str, str, str], ExperimentConfig]:
  """What each strategy is tuned by, by (link, strategy, how)."""
  found: dict[tuple[str, str, str], ExperimentConfig] = {}
  for rows in (256,) if quick else (64, 256):
    found["", "continuous", f"{rows} rows"] = tuned(config, "continuous", rows=rows)
  budgets = [(512, 64), *((tokens, 256) for tokens in (512, 1024, 2048))]
  for tokens, rows in [(512, 256), (2048, 256)] if quick else budgets:
    how = f"{tokens} tokens, {rows} rows"
    found["", "chunked", how] = tuned(config, "chunked", rows=rows, token_budget=tokens)
  for link in links:
    groups = 1 if link == MAP_LINKS[-1] else LAYER_GROUPS
    for num_prefill in (4, 5, 7) if quick else (3, 4, 5, 6, 7):
      pools = f"{num_prefill}xprefill,{config.num_devices - num_prefill}xdecode"
      hand_off = dataclasses.replace(config.hand_off, layer_groups=groups)
      separate = dataclasses.replace(only(config, pools), link=link, hand_off=hand_off)
      found[link, SEPARATE, f"{num_prefill} of {config.num_devices} prefill"] = separate
  return found


def with_workload(config: ExperimentConfig, name: str) -> ExperimentConfig:
  own = WORKLOADS[name]
  workload = dataclasses.replace(
    config.workload,
    lengths=own.lengths,
    arrivals=own.arrivals,
    cv=own.cv,
    label=own.label,
  )
  return dataclasses.replace(config, workload=workload)


def median_prompt(name: str) -> int:
  """As published."""
  return dict(WORKLOADS[name].lengths.prompt_tokens)[0.5]


class Swept(NamedTuple):
  """All runs of the map, by workload, link and setting, and the SLOs of each workload."""

  runs: Mapping[Key, Sequence[Run]]
  configs: Mapping[Key, ExperimentConfig]
  slos: Mapping[str, Mapping[tuple[str, str], Slo]]

  def best(self, workload: str, link: str, pair: tuple[str, str]) -> dict[str, Best]:
    own = {
      (strategy, how): runs
      for (name, way, strategy, how), runs in self.runs.items()
      if name == workload and way in ("", link)
    }
    return best_of(own, self.slos[workload][pair])


def sweep_map(bench: Bench, base: ExperimentConfig) -> Swept:
  """Simulates the whole map."""
  answers, least, factor = ANSWERS, LEAST_REQUESTS, FACTOR
  if bench.quick:
    answers, least, factor = QUICK_ANSWERS, QUICK_LEAST_REQUESTS, QUICK_FACTOR
  configs: dict[Key, ExperimentConfig] = {}
  rates: dict[Key, Sequence[float]] = {}
  slos = {}
  for name in MAP_WORKLOADS:
    config = with_workload(base, name)
    capacity_rps = capacity_of(config)
    slos[name] = targets(config, median_prompt(name))
    seconds = answers * answer_s(config, slos[name]["balanced", "balanced"])
    config = of_seconds(config, capacity_rps, seconds, least)
    grid = rates_of(capacity_rps, FIRST_SHARE, factor, LAST_SHARE)
    for key, own in map_settings(config, MAP_LINKS, bench.quick).items():
      configs[name, *key], rates[name, *key] = own, grid
  runs = sweep_rates(bench, configs, rates, {key: list(slos[key[0]].values()) for key in configs})
  return Swept(runs, configs, slos)


Bests = Mapping[tuple[str, str, tuple[str, str]], Mapping[str, Best]]
"""Each strategy at its best, by workload, link and pair of SLOs."""


def judge_map(bests: Bests) -> list[Judged]:
  """The verdicts on `MAP_CLAIMS`, in their order."""
  return [
    _judge_corner(bests, ("tight", "loose"), separate=False),
    _judge_corner(bests, ("loose", "tight"), separate=True),
    _judge_links(bests),
    _judge_winners(bests),
  ]


def goodput_of(best: Mapping[str, Best], separate: bool) -> float | None:
  """Of separate pools, or of the better strategy on shared devices."""
  names = (SEPARATE,) if separate else SHARED
  return max((b.goodput_rps for n, b in best.items() if n in names and b.goodput_rps), default=None)


def lead(best: Mapping[str, Best], *, separate: bool = True) -> float:
  """Of separate pools over shared devices, or the other way round, in percent."""
  return lead_percent(goodput_of(best, separate), goodput_of(best, not separate))


def _judge_corner(bests: Bests, pair: tuple[str, str], separate: bool) -> Judged:
  """Over the fastest link: ahead by `TIE_PERCENT` in all workloads holds, in some in part."""
  corner = (MAP_LINKS[-1], pair)
  leads = {key[0]: lead(b, separate=separate) for key, b in bests.items() if key[1:] == corner}
  num_ahead = sum(value >= TIE_PERCENT for value in leads.values())
  verdict = HOLDS if num_ahead == len(leads) else IN_PART if num_ahead else NOT
  said = ", ".join(
    f"{name} {'alone' if value == math.inf else f'{value:+.0f} %'}" for name, value in leads.items()
  )
  sides = "separate pools over shared devices" if separate else "shared devices over separate pools"
  return Judged(verdict, f"Lead of {sides}, over {corner[0]}: {said}.")


def _judge_links(bests: Bests) -> Judged:
  """Half of the cells that separate pools win over the fastest link, or fewer, holds."""
  num_won = {
    link: sum(lead(best) >= TIE_PERCENT for (_, way, _), best in bests.items() if way == link)
    for link in MAP_LINKS
  }
  slow, fast = num_won[MAP_LINKS[0]], num_won[MAP_LINKS[-1]]
  verdict = NOT if slow >= fast else HOLDS if 2 * slow <= fast else IN_PART
  said = ", ".join(f"{number} over {link}" for link, number in num_won.items())
  each = len(bests) // len(MAP_LINKS)
  return Judged(
    verdict, f"Of {each} cells a link, separate pools are {TIE_PERCENT} % ahead in {said}."
  )


def _judge_winners(bests: Bests) -> Judged:
  """Each strategy wins a cell by `TIE_PERCENT` holds, two of them in part."""
  cells = [cell_of(best) for best in bests.values()]
  clear = [c for c in cells if c.margin_percent is None or c.margin_percent >= TIE_PERCENT]
  counts: dict[str, int] = {}
  for cell in clear:
    if cell.winner is not None:
      counts[cell.winner] = counts.get(cell.winner, 0) + 1
  said = ", ".join(f"{name} {number}" for name, number in sorted(counts.items()))
  verdict = HOLDS if len(counts) > 2 else IN_PART if len(counts) == 2 else NOT
  return Judged(
    verdict,
    f"By {TIE_PERCENT} % or more win {said or 'none'}, of {len(cells)} cells; the others are ties "
    f"within that, or out of reach of all.",
  )


MAP_CLAIMS = (
  "Shared devices serve most where first tokens are urgent and the others are not.",
  "Separate pools serve most where first tokens can wait and the others cannot.",
  "A slow link takes from separate pools what they win.",
  "None of the three strategies is best everywhere, each is somewhere.",
)

# Cells that are searched again, by probes of their own: workload, link, pair of SLOs.
CHECKED = (
  ("sharegpt", "nvlink", ("balanced", "balanced")),
  ("arxiv", "nvlink", ("loose", "tight")),
  ("azure-conv", "100gbe", ("balanced", "balanced")),
)


def check_cells(bench: Bench, swept: Swept) -> list[Compared]:
  """Goodput of some cells' best settings by a search of twice the requests, beside the map's."""
  found, searches = [], []
  for workload, link, pair in CHECKED[:1] if bench.quick else CHECKED:
    slo = swept.slos[workload][pair]
    for strategy, best in swept.best(workload, link, pair).items():
      if best.goodput_rps is None:
        continue
      way = link if strategy == SEPARATE else ""
      config = swept.configs[workload, way, strategy, best.how]
      config = dataclasses.replace(
        config, slo=dataclasses.replace(config.slo, ttft_s=slo.ttft_s, tpot_s=slo.tpot_s)
      )
      asked = Asked(
        config=config,
        target=Attainment(share=SHARE),
        out=bench.out,
        num_requests=2 * config.workload.num_requests,
      )
      name = f"{workload}, {link}, {'/'.join(pair)}: {strategy} ({best.how})"
      searches.append(make_search(asked, name, config, capacity_rps=best.goodput_rps))
      found.append((name, best.goodput_rps))
  bench.search(searches)
  return [
    Compared(name, search.passed_rps or 0.0, rate_rps, "requests/s (searched, twice the requests)")
    for (name, rate_rps), search in zip(found, searches)
  ]


def make_map(bench: Bench) -> Found:
  base = crossover.get_config()
  swept = sweep_map(bench, base)
  rows, cells, bests = [], {}, {}
  for workload in MAP_WORKLOADS:
    for link in MAP_LINKS:
      for pair in PAIRS:
        best, slo = swept.best(workload, link, pair), swept.slos[workload][pair]
        cell = cells[workload, link, pair] = cell_of(best)
        bests[workload, link, pair] = best
        for strategy, own in best.items():
          rows.append(
            (workload, link, *pair, slo.ttft_s, slo.tpot_s, strategy, own.how, own.goodput_rps,
             cell.winner == strategy, cell.margin_percent if cell.winner == strategy else None)
          )  # fmt: skip
  sizes = {key[0]: own.workload.num_requests for key, own in swept.configs.items()}
  checked = check_cells(bench, swept)
  errors = [abs(c.error_percent) for c in checked if c.error_percent is not None]
  num_runs = sum(map(len, swept.runs.values()))
  return Found(
    columns=("workload", "link", "TTFT", "TPOT", "ttft_slo_s", "tpot_slo_s", "strategy", "set to",
             "goodput_rps", "wins", "margin_percent"),
    rows=rows,
    judged=judge_map(bests),
    draw=lambda path: draw_map(
      Map(
        title=(
          f"Who serves most with {SHARE:.0%} of the requests in time: {base.model} on "
          f"{base.num_devices} {base.hardware.upper()}s, each strategy at its best (simulated; "
          f"lengths synthetic)"
        ),
        rows=MAP_WORKLOADS,
        columns={name: _link_label(name) for name in MAP_LINKS},
        levels=LEVELS,
        cells=cells,
        tie_percent=TIE_PERCENT,
        slos=swept.slos,
      ),
      path,
    ),
    notes=(
      f"Synthetic: lengths of all three workloads are drawn from published quantiles, arrivals are "
      f"Poisson (azure-conv: gamma, cv {WORKLOADS['azure-conv'].cv:g}).",
      f"TTFT targets are {_multiples(TTFT_MULTIPLES)} times the unloaded prefill of the median "
      f"prompt, TPOT targets {_multiples(TPOT_MULTIPLES)} times a decode step of {SLO_ROWS} rows "
      f"behind such a prompt. Tuned: batch cap, token budget, how many pools prefill; KV "
      f"is sent in {LAYER_GROUPS} groups of layers, but over NVLink whole.",
      f"{num_runs} runs of {', '.join(f'{n} requests ({name})' for name, n in sizes.items())}, "
      f"{QUICK_ANSWERS if bench.quick else ANSWERS:g} times what an answer takes or more at "
      f"capacity; goodput is interpolated between rates "
      f"{QUICK_FACTOR if bench.quick else FACTOR:g} times apart. "
      + (f"{len(checked)} of them searched again with twice the requests: "
         f"{statistics.median(errors):.0f} % apart (median), at most {max(errors):.0f} %. "
         if errors else "")
      + f"Margins below {TIE_PERCENT} % are ties."
      + (" --quick: few settings, rates and requests." if bench.quick else ""),
    ),
  )  # fmt: skip


def _link_label(name: str) -> str:
  return f"{name}: {8e-9 * LINKS[name].bytes_per_s:,.0f} Gbit/s"


def _multiples(values: Mapping[str, float]) -> str:
  return ", ".join(f"{value:g}" for value in values.values())


# TaiChi's corner ----------------------------------------------------------------------------------

# (TTFT s, TPOT s): percent of the requests in time under aggregation and under disaggregation.
TAICHI = {(16.0, 0.06): (7, 98), (5.0, 0.25): (97, 42), (6.0, 0.1): (16, 50)}
MOST_PERCENT = 50  # more than that are most requests
TAICHI_RPS = 12.0
# From the fewest that can prefill at that rate to half as many again.
TAICHI_GROUPS = {"a100": (18, 20, 22, 24, 28), "h100": (7, 8, 9, 10, 12)}
TAICHI_TP = 4
TAICHI_BUDGETS = (512, 1024, 2048)  # its sliders go from 128 to 1,024; 512 is its baseline's range
TAICHI_REQUESTS, TAICHI_QUICK_REQUESTS = 600, 150


class Group(NamedTuple):
  """A number of groups of devices that may be TaiChi's."""

  hardware: str
  number: int


def taichi_settings(
  config: ExperimentConfig, group: Group, quick: bool
) -> dict[tuple[str, str], ExperimentConfig]:
  """Aggregation by token budget, disaggregation by how many groups prefill."""
  config = dataclasses.replace(
    config,
    hardware=group.hardware,
    link="nvlink" if group.hardware == "a100" else "nvlink4",
    num_devices=TAICHI_TP * group.number,
    strategies=("chunked",),
    pools=None,
  )
  found = {
    ("aggregated", f"{tokens} tokens"): tuned(config, "chunked", token_budget=tokens)
    for tokens in ((1024,) if quick else TAICHI_BUDGETS)
  }
  for share in (0.75,) if quick else (0.625, 0.75, 0.875):
    prefill = round(share * group.number)
    pools = f"{prefill}xprefill:tp{TAICHI_TP},{group.number - prefill}xdecode:tp{TAICHI_TP}"
    found["disaggregated", f"{prefill} of {group.number} prefill"] = only(config, pools)
  return found


def judge_taichi(
  found: Mapping[Group, Mapping[tuple[float, float], tuple[float, float]]],
) -> list[Judged]:
  """One verdict for each pair of SLOs: in how many sizes the published order comes out, and where
  neither serves most requests as published, neither does.
  """
  judged = []
  for pair, published in TAICHI.items():
    same = [
      group
      for group, by_pair in found.items()
      if (by_pair[pair][0] > by_pair[pair][1]) == (published[0] > published[1])
      and abs(by_pair[pair][0] - by_pair[pair][1]) >= TIE_PERCENT
      and (max(published) > MOST_PERCENT or max(by_pair[pair]) <= MOST_PERCENT)
    ]
    verdict = HOLDS if 2 * len(same) > len(found) else IN_PART if same else NOT
    best = min(found, key=lambda g: sum(abs(a - b) for a, b in zip(found[g][pair], published)))
    ours = found[best][pair]
    judged.append(
      Judged(
        verdict,
        f"So in {len(same)} of {len(found)} sizes ({_group_words(same)}), by "
        f"{TIE_PERCENT} points or more; nearest with {best.number} x {TAICHI_TP} "
        f"{best.hardware.upper()}: {ours[0]:.0f} and {ours[1]:.0f} % beside {published[0]} and "
        f"{published[1]} %.",
      )
    )
  return judged


def _group_words(groups: Sequence[Group]) -> str:
  return ", ".join(f"{g.number} {g.hardware.upper()}" for g in groups) or "none"


def make_taichi(bench: Bench) -> Found:
  base = crossover_taichi.get_config()
  num_requests = TAICHI_QUICK_REQUESTS if bench.quick else TAICHI_REQUESTS
  base = dataclasses.replace(
    base, workload=dataclasses.replace(base.workload, num_requests=num_requests)
  )
  groups = [
    Group(hardware, number)
    for hardware, numbers in TAICHI_GROUPS.items()
    for number in (numbers[1::2] if bench.quick else numbers)
  ]
  points = {
    (group, *setting): Point(config=config, reduce=reduce.micros)
    for group in groups
    for setting, config in taichi_settings(base, group, bench.quick).items()
  }
  runs = {key: Run.of(TAICHI_RPS, columns) for key, columns in bench.run(points).items()}
  rows, found, how_of = [], {}, {}
  for group in groups:
    found[group] = {}
    for pair in TAICHI:
      slo = Slo(ttft_s=pair[0], tpot_s=pair[1])
      best: dict[str, tuple[float, str]] = {}
      for (own, strategy, how), run in runs.items():
        if own == group:
          percent = 100 * run.attainment(slo)
          rows.append((*group, *pair, strategy, how, percent))
          best[strategy] = max(best.get(strategy, (-1.0, "")), (percent, how))
      found[group][pair] = best["aggregated"][0], best["disaggregated"][0]
      how_of[group, pair] = best
  return Found(
    columns=("hardware", "groups of 4", "ttft_slo_s", "tpot_slo_s", "strategy", "set to",
             "attainment_percent"),
    rows=rows,
    judged=judge_taichi(found),
    draw=lambda path: draw(
      _taichi_panels(found),
      path,
      "TaiChi's three corners (simulated, SYNTHETIC lengths; circles: published, of no named size)",
    ),
    notes=(
      "TaiChi names neither the devices nor how many: both are swept, each strategy at the best of "
      "its settings for the targets (token budget; groups that prefill). Its own settings are not "
      "known either.",
      "Synthetic: lengths are drawn from Sarathi-Serve's quantiles of arXiv summarization, "
      "arrivals are Poisson. Its numbers are themselves simulated, in Vidur.",
      *(["--quick: one setting a strategy, fewer sizes and requests."] if bench.quick else []),
    ),
  )  # fmt: skip


def _taichi_panels(found: Mapping[Group, Any]) -> list[Panel]:
  panels = []
  for pair, published in TAICHI.items():
    series = []
    for colour, (strategy, percent) in enumerate(zip(("aggregated", "disaggregated"), published)):
      for hardware, source in (("a100", "ours"), ("h100", "long")):
        points = [(g.number, found[g][pair][colour]) for g in found if g.hardware == hardware]
        label = f"{strategy}, {hardware.upper()}"
        series.append(Series(label, points, source, colour))
      every = [g.number for g in found]
      ends = [(n, percent) for n in (min(every), max(every))]
      series.append(Series(f"{strategy}, published", ends, "published", colour))
    panels.append(
      Panel(
        f"TTFT {pair[0]:g} s, TPOT {1e3 * pair[1]:g} ms", "groups of 4 devices", "in time (%)",
        series, ylim=(-5, 105),
      )
    )  # fmt: skip
  return panels


FIGURES = (
  Figure(
    name="crossover/map",
    title="TTFT SLO x TPOT SLO x workload x link: who serves most, and by how much",
    kind="simulated",
    claims=MAP_CLAIMS,
    make=make_map,
    configs=("configs/crossover.py",),
    is_headline=True,
  ),
  Figure(
    name="crossover/taichi",
    title="TaiChi's table of attainments: aggregation against disaggregation",
    kind="simulated",
    claims=(
      "With 16 s to the first token and 60 ms a token, disaggregation has most requests in time.",
      "With 5 s and 250 ms, aggregation has.",
      "With 6 s and 100 ms neither serves most requests, and disaggregation is ahead.",
    ),
    make=make_taichi,
    configs=("configs/crossover_taichi.py",),
  ),
)
