"""DistServe's search for placements: its cost (Figure 12) and its answers (Table 5).

Placements come from the search's own code (`experiments.search --goal=placement`).
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import tempfile
import time

from experiments.figures.reproduction import Bars, Panel, Series, draw
from experiments.program import SILENT
from experiments.reproduction import published_distserve as published
from experiments.reproduction.bench import Bench
from experiments.reproduction.distserve_systems import (
  STUDIES,
  WITHIN,
  Study,
)
from experiments.reproduction.figure import (
  HOLDS,
  IN_PART,
  MISSING,
  NOT,
  Compared,
  Figure,
  Found,
  Judged,
)
from experiments.searching.drive import Driver, ProbeCache, RateSearch
from experiments.searching.goals import Asked, make_search
from experiments.searching.placing import PlacementGoal, best_of
from experiments.sweep import make_sweep
from pdjax.analysis.placement import Nodes, Placement, Shape
from pdjax.analysis.targets import Attainment
from pdjax.config import ExperimentConfig

NODE = 8  # GPUs
BETWEEN_NODES = "25gbe"
TOLERANCE = 0.05  # of rates that are searched


def placements(
  config: ExperimentConfig,
  nodes: Nodes,
  affinity: str,
  *,
  requests_per_device: int = 25,
  num_requests: int | None = None,
) -> PlacementGoal:
  """The search of an experiment on these nodes, as DistServe's code has it: P90 of TTFT and of TPOT
  each within its SLO, so many requests a GPU.
  """
  # Pipelines cut prompts here; with the budget of whole ones they seldom do.
  scheduler = dataclasses.replace(config.scheduler, token_budget=config.scheduler.prefill_budget)
  asked = Asked(
    config=dataclasses.replace(config, scheduler=scheduler),
    target=Attainment(part="separate"),
    out=pathlib.Path(),
    requests_per_device=requests_per_device,
    num_requests=num_requests,
    least_s=0.0,
    tolerance=TOLERANCE,
  )
  return PlacementGoal(asked, nodes, affinity=affinity, node_link=BETWEEN_NODES, baselines=False)


def short(pools: str) -> str:
  """Of pools that are one each, under the only policy there is here."""
  return pools.replace("1x", "").replace(":prefill_first", "")


# Figure 12 ----------------------------------------------------------------------------------------

SIZES = {2: (1, 2), 4: (1, 4), 8: (1, 8), 16: (2, 8), 32: (4, 8)}  # GPUs: nodes, GPUs of each
MOST_TIMED = {False: 8, True: 4}  # GPUs, by --quick
MOST_S = 1.3 * 60  # of the paper's text
CORES = 96


def fig12(bench: Bench) -> Found:
  config = STUDIES["13b"].config
  rows, counts, seconds = [], {}, {}
  for affinity in ("low", "high"):
    for num, (num_nodes, per_node) in SIZES.items():
      nodes = Nodes(num_nodes=num_nodes, devices_per_node=per_node)
      goal = placements(config, nodes, affinity, num_requests=300)
      candidates = goal.candidates()
      counts[affinity, num] = sum(map(len, candidates.values()))
      if num <= MOST_TIMED[bench.quick]:
        bench.show(f"{affinity}, {num} GPUs: {counts[affinity, num]} candidates")
        seconds[affinity, num] = _search_s(goal)
      rows.append((affinity, num, counts[affinity, num], seconds.get((affinity, num))))
  each_s = max(seconds[key] / counts[key] for key in seconds if key[1] == MOST_TIMED[bench.quick])
  whole_s = each_s * counts["low", 32]
  panels = [
    Panel(
      "(a) seconds of a search",
      "GPUs",
      "seconds",
      [
        series
        for i, affinity in enumerate(("low", "high"))
        for series in (
          Series(f"{affinity}, ours, one core",
                 [(num, seconds[affinity, num]) for num in SIZES if (affinity, num) in seconds],
                 "ours", i),
          Series(f"{affinity}, published, {CORES} cores", published.FIG12_SECONDS[affinity],
                 "published", i),
        )
      ],
      is_log_x=True,
      is_log_y=True,
    ),
    Panel(
      "(b) candidates",
      "GPUs",
      "candidates",
      [
        series
        for i, affinity in enumerate(("low", "high"))
        for series in (
          Series(f"{affinity}, ours", [(num, counts[affinity, num]) for num in SIZES], "ours", i),
          Series(f"{affinity}, simdistserve's code", published.FIG12_CANDIDATES[affinity],
                 "published", i),
        )
      ],
      is_log_x=True,
      is_log_y=True,
    ),
  ]  # fmt: skip
  few, many = counts["high", 32], counts["low", 32]
  return Found(
    columns=("affinity", "GPUs", "candidates", "seconds on one core"),
    rows=rows,
    judged=[
      Judged(
        HOLDS if whole_s <= CORES * MOST_S else NOT,
        f"{many} candidates for 32 GPUs, at {each_s:.2g} s each as for "
        f"{MOST_TIMED[bench.quick]} GPUs, are {whole_s:.0f} s of one core; {CORES} cores have "
        f"{CORES * MOST_S:.0f} s in that time. The whole search was not run.",
      ),
      Judged(
        HOLDS if few < many / 2 else IN_PART if few < many else NOT,
        f"{few} candidates of both kinds against {many} for 32 GPUs.",
      ),
    ],
    compared=[
      Compared(f"candidates, {affinity}, {num:g} GPUs", there, counts[affinity, num])
      for affinity, points in published.FIG12_CANDIDATES.items()
      for num, there in points
    ],
    draw=functools.partial(
      draw, panels, title="DistServe Figure 12: searching placements of OPT-13B", columns=2
    ),
    notes=[
      "Processor time on this machine, measured anew each time: 300 requests a probe, candidates "
      "that cannot win cost one. Ours has only shapes whose step times were published (TP 1, 2, 4) "
      "and searches prefill and decode alone for high affinity, as the paper's Algorithm 1; its "
      "code searches all pairs.",
    ],
  )


def _search_s(goal: PlacementGoal) -> float:
  """Processor seconds of the search, with nothing known before."""
  with tempfile.TemporaryDirectory() as folder:
    cache = ProbeCache(pathlib.Path(folder) / "probes.jsonl")
    driver = Driver(make_sweep(jobs=1, ray=None), cache, SILENT)
    start_s = time.process_time()
    for candidates in goal.candidates().values():
      best_of(goal.asked, candidates, driver, [])
    return time.process_time() - start_s


# Table 5 ------------------------------------------------------------------------------------------

TABLE5_NODES = {"13b": 1, "66b": 1, "code": 1, "summarization": 1, "175b": 3}
TABLE5_QUICK = ("code",)
RATE_LABELS = ("best found", "the paper's placement")
# What DistServe's repository says of those that are not found: evaluation/2-benchmark-serving/
# 2-start-api-server.py, simdistserve/benchmarks/search_binary.py, simdistserve/base/worker.py and
# distserve/decoding_stage_scheduler.py.
_OF_SHAREGPT = (
  "The paper's is ShareGPT's: its server has one placement a model, and its search draws ShareGPT "
  "whatever is asked."
)
WHY_NOT = {
  "13b": "In the paper's simulator a stage takes all decodes that stand in its queue, so that a "
  "pipeline gains them little; here each step has its share, as in its engine.",
  "175b": "Its step times are synthetic.",
  "code": _OF_SHAREGPT,
  "summarization": _OF_SHAREGPT,
}


def table5(bench: Bench) -> Found:
  rows, compared, judged, bars, notes = [], [], [], {}, []
  for name, sizes in published.TABLE5.items():
    study = STUDIES[name]
    if bench.quick and name not in TABLE5_QUICK:
      judged.append(Judged(MISSING, "Not searched with --quick."))
      continue
    best, theirs, best_small, num = search_placement(study, sizes, bench)
    ratio = _ratio(theirs, best)
    rows += [
      (study.title, label, search.template.strategy, search.per_device_rps)
      for label, search in zip(RATE_LABELS, (best, theirs))
    ]
    bars[name] = [search.per_device_rps for search in (best, theirs)]
    found = judge_placement(best, theirs, best_small)
    if found.verdict != HOLDS and name in WHY_NOT:
      found = found._replace(why=f"{found.why} {WHY_NOT[name]}")
    judged.append(found)
    compared.append(
      Compared(f"{study.title}: goodput a GPU of the paper's placement over the best", 1.0, ratio)
    )
    notes.append(f"{study.title}: {num} candidates on {TABLE5_NODES[name]} nodes of {NODE} GPUs.")
  return Found(
    columns=("study", "placement", "pools", "goodput a GPU (1/s)"),
    rows=rows,
    judged=judged,
    compared=compared,
    draw=functools.partial(
      draw,
      [Bars("SYNTHETIC lengths; 175b: step times too", "goodput a GPU (1/s)", RATE_LABELS, bars)],
      title="DistServe Table 5: what the search chooses",
    ),
    notes=[
      "Algorithm 2 (KV caches stay inside nodes) over the shapes whose step times were published, "
      "in probes of the paper's requests a GPU, synthetic ones (`configs/workloads.py`, "
      "`configs/opt13b_a100.py`); P90 of TTFT and of TPOT each within its SLO. Rates are within "
      "5 % of themselves, so that placements nearer than that to the best are as good.",
      "The paper's simulator knows no limit of KV memory but 50,000 tokens in a step of decodes; "
      "ours has the pages that fit, of which pipelines have more. How many GPUs it searched is not "
      "known.",
      *notes,
    ],
  )  # fmt: skip


def search_placement(
  study: Study, sizes: tuple[int, int, int, int], bench: Bench
) -> tuple[RateSearch, RateSearch, RateSearch, int]:
  """The best placement that the search finds, the paper's, the best on no more GPUs than that, and
  how many were looked at.
  """
  config = study.config
  goal = placements(
    config,
    Nodes(num_nodes=TABLE5_NODES[study.name], devices_per_node=NODE),
    "low",
    requests_per_device=config.workload.num_requests // config.num_devices,
  )
  ((_, candidates),) = goal.candidates().items()
  prefill, decode = (Shape(tp=tp, pp=pp) for tp, pp in (sizes[:2], sizes[2:]))
  pools = Placement(prefill=prefill, decode=decode).pools
  own = next(c for c in candidates if c.thing.pools == pools)
  theirs = make_search(goal.asked, own.name, own.config, is_candidate=True)
  bench.search([theirs])
  small = [c for c in candidates if c.thing.num_devices <= own.thing.num_devices]
  found = [best_of(goal.asked, some, bench.driver(), []) for some in (small, candidates)]
  best_small, best = (theirs if one is None else one[1] for one in found)
  return best, theirs, best_small, len(candidates)


def _ratio(theirs: RateSearch, best: RateSearch) -> float | None:
  """Of goodputs a GPU; None where one has none."""
  if theirs.per_device_rps is None or best.per_device_rps is None:
    return None
  return theirs.per_device_rps / best.per_device_rps


def judge_placement(best: RateSearch, theirs: RateSearch, best_small: RateSearch) -> Judged:
  """Holds: the paper's is the best, or as good within the tolerance of rates. In part: `WITHIN`, or
  the best on as many GPUs or fewer.
  """
  ratio, ratio_small = _ratio(theirs, best), _ratio(theirs, best_small)
  if ratio is None:
    return Judged(NOT, "The paper's placement keeps the SLOs at no rate here.")
  words = f"{theirs.per_device_rps:.3g} a second for each GPU"
  if theirs.template.strategy == best.template.strategy:
    return Judged(HOLDS, f"{words}, the best here too.")
  words += f"; the best here is {_found(best)}"
  if best_small.template.strategy != best.template.strategy:
    words += f", on {theirs.num_devices} GPUs or fewer {_found(best_small)}"
  is_near = ratio >= 1 - WITHIN or ratio_small >= 1 - TOLERANCE
  return Judged(HOLDS if ratio >= 1 - TOLERANCE else IN_PART if is_near else NOT, f"{words}.")


def _found(search: RateSearch) -> str:
  return f"{short(search.template.strategy)} with {search.per_device_rps:.3g}"


FIGURES = (
  Figure(
    name="distserve/fig12",
    title="time and candidates of the search",
    kind="simulated",
    claims=(
      "The search for 32 GPUs takes under 1.3 minutes on 96 cores.",
      "For many GPUs high affinity is searched quicker than low affinity.",
    ),
    make=fig12,
    configs=(STUDIES["13b"].path,),
  ),
  Figure(
    name="distserve/table5",
    title="the placements that the search chooses",
    kind="simulated",
    claims=tuple(
      f"{STUDIES[name].title}: prefill with TP {a} and PP {b}, decode with TP {c} and PP {d}."
      for name, (a, b, c, d) in published.TABLE5.items()
    ),
    make=table5,
    configs=[STUDIES[name].path for name in published.TABLE5],
  ),
)
