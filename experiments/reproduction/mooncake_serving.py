"""Mooncake's cluster with everyone served: schedulers, bandwidth, how many nodes prefill."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.figures.reproduction import Bars, Panel, Series, draw
from experiments.program import ROOT
from experiments.reproduction import reduce
from experiments.reproduction.bench import Bench, Point
from experiments.reproduction.figure import HOLDS, IN_PART, NOT, Compared, Figure, Found, Judged
from experiments.reproduction.mooncake_cache import TRACES, trace_file
from experiments.reproduction.published_mooncake import (
  FIG5_TTFT_S,
  FIG13_KNEE_GBPS,
  FIG13_TTFT_S,
  TR_FIG8_TTFT_S,
  TR_TOKENS_PER_S,
)
from pdjax.config import ExperimentConfig, load_config
from pdjax.workloads.traces import read_trace

TICK_S = 3.0  # of the conversation trace's stamps
QUICK_S = 300.0  # of a trace, with --quick
WITHIN = 0.15  # of a published number: what counts as reached
AHEAD = 1.02  # times as much: what counts as more
ARRIVALS = {"as stamped": None, "ticks spread": TICK_S}

Results = Mapping[Any, Mapping[str, Any]]


def replayed(
  bench: Bench,
  config: ExperimentConfig,
  trace: str,
  *,
  limit_s: float | None = None,
  speed: float = 1.0,
  spread_s: float | None = None,
) -> ExperimentConfig:
  """The experiment with a trace's requests: those of its first `limit_s`, at most `QUICK_S` with
  --quick.
  """
  if bench.quick:
    limit_s = min(limit_s or QUICK_S, QUICK_S)
  workload = dataclasses.replace(
    config.workload,
    trace=str(trace_file(bench, trace)),
    num_requests=None,
    trace_limit_s=limit_s,
    trace_speed=speed,
    trace_spread_s=spread_s,
  )
  return dataclasses.replace(config, workload=workload)


def load(path: str) -> ExperimentConfig:
  return load_config(ROOT / path)


def as_fast_as_the_report(bench: Bench) -> float:
  """By how much the conversation trace has to go faster to have its trace's prompt tokens/s."""
  rows = read_trace(trace_file(bench, "conversation")).rows
  return TR_TOKENS_PER_S / (sum(row.prompt_tokens for row in rows) / rows[-1].arrival_s)


def run(bench: Bench, configs: Mapping[Any, ExperimentConfig]) -> Results:
  points = {name: Point(config=own, reduce=reduce.mooncake) for name, own in configs.items()}
  return bench.run(points)


def part_note(bench: Bench, limit_s: float | None) -> list[str]:
  limit_s = min(limit_s or QUICK_S, QUICK_S) if bench.quick else limit_s
  if limit_s is None:
    return []
  why = "--quick: " if bench.quick else ""
  return [f"{why}of each trace only what arrives in its first {limit_s:g} s."]


STAND_IN = (
  "The report's trace is not at hand. Stand-in: the conversation trace of FAST'25, {:.3g} times as "
  "fast, which gives as many prompt tokens a second as the report had."
)
CACHE_NOTE = (
  "A100s with NVLink at 400 GB/s stand in for A800s. A node's prefix cache is its devices' memory, "
  "1.4M tokens; Mooncake's is the host's, 3M."
)


# Verdicts -----------------------------------------------------------------------------------------


def judge_order(values: Mapping[str, Mapping[str, float]], order: Sequence[str]) -> Judged:
  """Whether the values rise in `order`. Holds: in every row. In part: in some, or but for one pair.

  `values` are by row and name.
  """
  num_wrong = {
    row: sum(own[a] >= own[b] for a, b in itertools.pairwise(order)) for row, own in values.items()
  }
  words = "; ".join(
    f"{row}: " + ", ".join(f"{name} {own[name]:.3g} s" for name in order)
    for row, own in values.items()
  )
  verdict = (
    HOLDS if not any(num_wrong.values()) else IN_PART if min(num_wrong.values()) < 2 else NOT
  )
  return Judged(verdict, f"{words}.")


def judge_ratio(ours: Mapping[str, float], published: float) -> Judged:
  """Holds: every ratio within `WITHIN` of the published one, on its side of 1. In part: on that."""
  words = ", ".join(f"{ratio:.3g} ({row})" for row, ratio in ours.items())
  if all(abs(ratio / published - 1) <= WITHIN for ratio in ours.values()):
    verdict = HOLDS
  else:
    verdict = IN_PART
  if not all((own > AHEAD) if published > 1 else (own < 1 / AHEAD) for own in ours.values()):
    verdict = NOT
  return Judged(verdict, f"{words}; {published:.3g} there.")


# Schedulers ---------------------------------------------------------------------------------------

ORDER = ("global cache", "local cache", "load", "random")


def scheduled(config: ExperimentConfig, name: str) -> ExperimentConfig:
  """With one of `ORDER` in place of the Conductor that fetches prefixes, which is the first."""
  changes = {
    "global cache": {},
    "local cache": dict(options=()),
    "load": dict(router="least_loaded", options=()),
    "random": dict(router="random", options=()),
  }[name]
  return dataclasses.replace(config, scheduler=dataclasses.replace(config.scheduler, **changes))


def schedulers_found(
  bench: Bench,
  config: ExperimentConfig,
  published: Mapping[str, float],
  *,
  title: str,
  speed: float,
  limit_s: float | None,
  notes: Sequence[str],
  is_same_trace: bool,
) -> Found:
  results = run(
    bench,
    {
      (arrivals, name): replayed(
        bench,
        scheduled(config, name),
        "conversation",
        limit_s=limit_s,
        speed=speed,
        spread_s=spread_s,
      )
      for arrivals, spread_s in ARRIVALS.items()
      for name in ORDER
    },
  )
  means = {a: {name: results[a, name]["ttft_mean_s"] for name in ORDER} for a in ARRIVALS}

  def picture(path: pathlib.Path) -> None:
    values = {name: [means[a][name] for a in ARRIVALS] for name in ORDER}
    marks = {(name, "as stamped"): published[name] for name in ORDER}
    mean = Bars("mean", "TTFT (s)", tuple(ARRIVALS), values, marks)
    tail = {name: [results[a, name]["ttft_s"][90] for a in ARRIVALS] for name in ORDER}
    draw(
      [mean, Bars("90th percentile", "TTFT (s)", tuple(ARRIVALS), tail)],
      path,
      title,
    )

  first, *_ = ARRIVALS
  rows = [
    (a, name, own["ttft_mean_s"], own["ttft_s"][50], own["ttft_s"][90], own["hits"],
     own["busy"]["prefill"], *own["met"])
    for (a, name), own in results.items()
  ]  # fmt: skip
  ratios = {
    name: {a: own[name] / own["global cache"] for a, own in means.items()} for name in ORDER[1:]
  }
  worst = {a: results[a, "random"]["hits"] for a in ARRIVALS}
  best = {a: results[a, "global cache"]["hits"] for a in ARRIVALS}
  return Found(
    columns=("arrivals", "scheduler", "TTFT mean (s)", "TTFT p50 (s)", "TTFT p90 (s)", "hit rate",
             "prefill busy", "effective at 0.1 s", "at 0.2 s", "at 0.3 s"),
    rows=rows,
    judged=[
      judge_order(means, ORDER),
      *(
        judge_ratio(ratios[name], published[name] / published["global cache"])
        for name in ORDER[1:]
      ),
    ],
    compared=[Compared(name, published[name], means[first][name], "s") for name in ORDER]
    if is_same_trace
    else (),
    draw=picture,
    notes=[
      *part_note(bench, limit_s),
      *notes,
      f"Of the prompts' tokens {best[first]:.0%} come from the cache with the Conductor, "
      f"{worst[first]:.0%} at random.",
      CACHE_NOTE,
    ],
  )  # fmt: skip


SCHEDULER_CLAIMS = (
  "Mean TTFT rises from global cache-aware scheduling to local, to load balancing, to chance.",
  "Without fetching prefixes from other nodes (local) TTFT is {:.3g} times that with it.",
  "Load balancing alone has {:.3g} times the TTFT of global cache-aware scheduling.",
  "Chance has {:.3g} times its TTFT.",
)


def scheduler_claims(published: Mapping[str, float]) -> tuple[str, ...]:
  order, *ratios = SCHEDULER_CLAIMS
  return (
    order,
    *(
      claim.format(published[name] / published["global cache"])
      for claim, name in zip(ratios, ORDER[1:])
    ),
  )


def make_fig5(bench: Bench) -> Found:
  return schedulers_found(
    bench,
    load("configs/mooncake/fig5.py"),
    FIG5_TTFT_S,
    title="TTFT by scheduler, LLaMA3-70B, 8 + 8 nodes, conversation trace",
    speed=1.0,
    limit_s=None,
    notes=["How many of the nodes prefill is not published: half of them here."],
    is_same_trace=True,
  )


def make_tr_fig8(bench: Bench) -> Found:
  speed = as_fast_as_the_report(bench)
  return schedulers_found(
    bench,
    load("configs/mooncake/tr_fig8.py"),
    TR_FIG8_TTFT_S,
    title="TTFT by scheduler, LLaMA2-70B, 8 + 8 nodes; a STAND-IN trace, published: its own",
    speed=speed,
    limit_s=1800.0,
    notes=[
      STAND_IN.format(speed) + " Its hit rate without limit is 37 %, that trace's about 50 %, so "
      "that only order and size can be compared.",
    ],
    is_same_trace=False,
  )


# Bandwidth ----------------------------------------------------------------------------------------

FIG13_GBPS = (24, 50, 100, 200, 400)
SYSTEMS = {"global cache": "prefixes fetched", "local cache": "never fetched"}


def make_fig13(bench: Bench) -> Found:
  config = load("configs/mooncake/fig13.py")
  gbps = FIG13_GBPS[::2] if bench.quick else FIG13_GBPS
  results = run(
    bench,
    {
      (name, rate): replayed(
        bench,
        dataclasses.replace(scheduled(config, name), link=f"{rate}gbps"),
        "synthetic",
      )
      for name in SYSTEMS
      for rate in gbps
    },
  )
  means, seconds = (
    {name: {r: results[name, r][key] for r in gbps} for name in SYSTEMS}
    for key in ("ttft_mean_s", "second_mean_s")
  )
  x = "bandwidth of a node (Gbps)"

  def picture(path: pathlib.Path) -> None:
    series = [
      Series(label, list(means[name].items()), colour=i)
      for i, (name, label) in enumerate(SYSTEMS.items())
    ]
    knee = {f"published: below it from {FIG13_KNEE_GBPS} Gbps on": FIG13_TTFT_S}
    second = [
      Series(label, list(seconds[name].items()), colour=i)
      for i, (name, label) in enumerate(SYSTEMS.items())
    ]
    draw(
      [
        Panel("first token (of a prefill node)", x, "mean TTFT (s)", series, knee, ylim=(0, None)),
        Panel("second token (of a decode node)", x, "mean time to it (s)", second, knee,
              is_log_y=True),
      ],
      path,
      "TTFT by bandwidth, synthetic trace",
    )  # fmt: skip

  own = means["global cache"]
  return Found(
    columns=("system", "Gbps", "TTFT mean (s)", "TTFT p90 (s)", "hit rate", "prefill busy",
             "prefixes fetched (GB a request)", "second token mean (s)"),
    rows=[
      (name, rate, r["ttft_mean_s"], r["ttft_s"][90], r["hits"], r["busy"]["prefill"],
       fetched_gb(r), r["second_mean_s"])
      for (name, rate), r in results.items()
    ],
    judged=[judge_knee(own), judge_below(own), judge_rise(own, seconds["global cache"])],
    draw=picture,
    notes=[
      *part_note(bench, None),
      "The published curve is known here by its knee and what it stays below, no more.",
      f"Prefixes fetched: {fetched_gb(results['global cache', max(gbps)]):.2g} GB a request at "
      f"{max(gbps)} Gbps, {fetched_gb(results['global cache', min(gbps)]):.2g} at {min(gbps)}. The "
      "first token comes from the prefill node, before the prompt's own hand-off of 5 GB on "
      "average, which the second waits for. Whether the paper's first does is not known.",
      CACHE_NOTE,
    ],
  )  # fmt: skip


def fetched_gb(result: Mapping[str, Any]) -> float:
  """Of a request, on average."""
  return result["fetched_bytes"] / result["num_requests"] / 1e9


def judge_knee(means: Mapping[int, float]) -> Judged:
  """From the knee to the widest link. Holds: TTFT falls by no more than 10 %. In part: by 25 %."""
  ratio = means[FIG13_KNEE_GBPS] / means[max(means)]
  words = f"At {FIG13_KNEE_GBPS} Gbps it is {ratio:.3g} times that at {max(means)} Gbps."
  return Judged(HOLDS if ratio <= 1.1 else IN_PART if ratio <= 1.25 else NOT, words)


def judge_below(means: Mapping[int, float]) -> Judged:
  """Holds: below the limit from the knee on. In part: below 1.5 times as much."""
  most = max(value for rate, value in means.items() if rate >= FIG13_KNEE_GBPS)
  verdict = HOLDS if most < FIG13_TTFT_S else IN_PART if most < 1.5 * FIG13_TTFT_S else NOT
  return Judged(verdict, f"It is at most {most:.3g} s there.")


def judge_rise(means: Mapping[int, float], seconds: Mapping[int, float]) -> Judged:
  """Holds: at the narrowest link TTFT is a fifth more than at the knee. In part: the time to the
  second token is.
  """
  low = min(means)
  first, second = (own[low] / own[FIG13_KNEE_GBPS] for own in (means, seconds))
  words = (
    f"At {low} Gbps it is {first:.3g} times that at {FIG13_KNEE_GBPS} Gbps, the time to the second "
    f"token {second:.3g} times."
  )
  return Judged(HOLDS if first >= 1.2 else IN_PART if second >= 1.2 else NOT, words)


# How many prefill ---------------------------------------------------------------------------------

NUM_NODES = 16
FIG15_PREFILL = tuple(range(5, 12))
FIG15_LIMIT_S = 1200.0
BEST = 8  # published


def with_nodes(config: ExperimentConfig, num_prefill: int, num_decode: int) -> ExperimentConfig:
  pools = f"{num_prefill}xprefill:tp8:prefill_chunks,{num_decode}xdecode:tp8"
  return dataclasses.replace(config, pools=pools)


def make_fig15(bench: Bench) -> Found:
  config = load("configs/mooncake/fig15.py")
  counts = FIG15_PREFILL[::3] if bench.quick else FIG15_PREFILL
  results = run(
    bench,
    {
      (trace, n): replayed(
        bench, with_nodes(config, n, NUM_NODES - n), trace, limit_s=FIG15_LIMIT_S
      )
      for trace in TRACES
      for n in counts
    },
  )
  shares = {trace: {n: results[trace, n]["met"][0] for n in counts} for trace in TRACES}

  def picture(path: pathlib.Path) -> None:
    effective = [
      Series(trace, list(own.items()), colour=i) for i, (trace, own) in enumerate(shares.items())
    ]
    tails = {
      key: [
        Series(trace, [(n, results[trace, n][key][90]) for n in counts], colour=i)
        for i, trace in enumerate(TRACES)
      ]
      for key in ("ttft_s", "tbt_s")
    }
    x = f"nodes that prefill, of {NUM_NODES}"
    draw(
      [
        Panel("TTFT within 10 s, TBT in 0.1 s", x, "share of requests", effective, ylim=(0, 1.05)),
        Panel("TTFT", x, "p90 (s)", tails["ttft_s"], {"target": config.slo.ttft_s}, is_log_y=True),
        Panel("TBT", x, "p90 (s)", tails["tbt_s"], {"target": config.slo.tpot_s}, ylim=(0, None)),
      ],
      path,
      f"Prefill against decode nodes (published: best near {BEST} + {NUM_NODES - BEST})",
    )  # fmt: skip

  return Found(
    columns=("trace", "prefill nodes", "effective at 0.1 s", "TTFT mean (s)", "TTFT p90 (s)",
             "TBT p90 (s)", "prefill busy", "decode busy"),
    rows=[
      (trace, n, r["met"][0], r["ttft_mean_s"], r["ttft_s"][90], r["tbt_s"][90],
       r["busy"]["prefill"], r["busy"]["decode"])
      for (trace, n), r in results.items()
    ],
    judged=[judge_best(shares), judge_sides(results, counts)],
    draw=picture,
    notes=[
      *part_note(bench, FIG15_LIMIT_S),
      "Which traces the published effective requests are of is not known here: both that are at "
      "hand.",
      *fast_decode_note(results["synthetic", max(counts)], NUM_NODES - max(counts)),
      CACHE_NOTE,
    ],
  )  # fmt: skip


def fast_decode_note(result: Mapping[str, Any], num_decode: int) -> list[str]:
  """Why more decode nodes are of no use, where they are not."""
  tbt_s = result["tbt_s"][90]
  if tbt_s > 0.05:
    return []
  return [
    f"Decode is too fast here to matter: with {num_decode} nodes TBT p90 is {1e3 * tbt_s:.0f} ms "
    "of 100. Steps are a roofline's with an engine's host time and none of its other stalls; why "
    "theirs took longer is not known."
  ]


def judge_best(shares: Mapping[str, Mapping[int, float]]) -> Judged:
  """Holds: for every trace the best is one node from `BEST` at most, or within half a percent of
  it. In part: for one.
  """
  best = {trace: max(own, key=own.get) for trace, own in shares.items()}
  near = {
    trace: max(own[n] for n in own if abs(n - BEST) <= 1) >= own[best[trace]] - 0.005
    for trace, own in shares.items()
  }
  words = ", ".join(
    f"{trace}: best with {n} ({shares[trace][n]:.1%}), {BEST} reach {shares[trace][BEST]:.1%}"
    for trace, n in best.items()
  )
  verdict = HOLDS if all(near.values()) else IN_PART if any(near.values()) else NOT
  return Judged(verdict, f"{words}.")


def judge_sides(results: Results, counts: Sequence[int]) -> Judged:
  """From the fewest to the most prefill nodes. Holds: TTFT falls and TBT rises, by a tenth each."""
  few, many = (results["synthetic", n] for n in (min(counts), max(counts)))
  ttft = many["ttft_s"][90] / few["ttft_s"][90]
  tbt = many["tbt_s"][90] / few["tbt_s"][90]
  words = f"TTFT p90 becomes {ttft:.3g} times as long, TBT p90 {tbt:.3g} times (synthetic trace)."
  passed = (ttft <= 0.9) + (tbt >= 1.1)
  return Judged((NOT, IN_PART, HOLDS)[passed], words)


FIGURES = (
  Figure(
    name="mooncake/fig5",
    title="Mean TTFT by scheduler, conversation trace (FAST'25)",
    kind="simulated",
    claims=scheduler_claims(FIG5_TTFT_S),
    make=make_fig5,
    configs=("configs/mooncake/fig5.py",),
  ),
  Figure(
    name="mooncake/fig13",
    title="TTFT by bandwidth between nodes, synthetic trace (FAST'25)",
    kind="simulated",
    claims=(
      f"From {FIG13_KNEE_GBPS} Gbps on more bandwidth gains little.",
      f"Mean TTFT is below {FIG13_TTFT_S:g} s there.",
      f"Below {FIG13_KNEE_GBPS} Gbps it rises.",
    ),
    make=make_fig13,
    configs=("configs/mooncake/fig13.py",),
  ),
  Figure(
    name="mooncake/fig15",
    title="Effective requests by the ratio of prefill to decode nodes (FAST'25)",
    kind="simulated",
    claims=(
      "Of 16 nodes, most requests are effective when about 8 prefill.",
      "More prefill nodes shorten TTFT and lengthen TBT.",
    ),
    make=make_fig15,
    configs=("configs/mooncake/fig15.py",),
  ),
  Figure(
    name="mooncake/tr-fig8",
    title="Mean TTFT by scheduler (technical report; a stand-in trace)",
    kind="simulated",
    claims=scheduler_claims(TR_FIG8_TTFT_S),
    make=make_tr_fig8,
    configs=("configs/mooncake/tr_fig8.py",),
  ),
)
