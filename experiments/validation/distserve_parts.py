"""The parts of the validation suite about DistServe's runs and its simulator."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence

from experiments.figures.validation import draw_attainment, draw_tails
from experiments.validation import distserve
from experiments.validation.page import Reached, Section
from experiments.validation.replay import Replay, markdown_table
from pdjax.metrics.latency import percentile

Show = Callable[[str], None]
MS = 1e3
SLO = distserve.SLOS[0]
LABELS = {"distserve": "DistServe, one prefill and one decode instance", "vllm": "vLLM"}
MOST_POINTS = {"distserve": 3.0, "vllm": 5.0}
JUDGED = "shipped"  # of `STEP_TIMES`
ALIGNED = {  # runs that the authors' script compares with their simulator
  "distserve": "those of 300 requests",
  "vllm": "all of them",
}
OF_300 = "-300-"
NUM_OVERLOADED = 2  # of the longest runs, drawn with and without memory limits


def as_served(data_dir: pathlib.Path, show: Show) -> Section:
  """DistServe's own runs, of its system and of vLLM."""
  title = "End to end: DistServe's runs of OPT-13B on A100s"
  folder = data_dir / "distserve"
  if (missing := _missing(folder)) is not None:
    return Section(title=title, missing=missing)
  runs, facts = distserve.read_runs(folder), distserve.read_facts(folder)
  names = {
    system: sorted((n for n in runs if distserve.system_of(n) == system), key=_size)
    for system in LABELS
  }

  def served(name: str, times: str, *, has_limits: bool = True) -> Replay:
    show(f"{name}, step times {times}")
    log = distserve.as_served(
      runs[name],
      distserve.system_of(name),
      shipped=times == "shipped",
      has_limits=has_limits,
    )
    return Replay.of(runs[name], log)

  replays = {
    (times, name): served(name, times)
    for times in distserve.STEP_TIMES
    for own in names.values()
    for name in own
  }
  unlimited = {n: served(n, JUDGED, has_limits=False) for n in names["distserve"]}
  judged = {system: {n: replays[JUDGED, n] for n in own} for system, own in names.items()}
  points = {
    system: {times: _points([replays[times, n] for n in own]) for times in distserve.STEP_TIMES}
    for system, own in names.items()
  }
  by_times = [("step times", *LABELS.values())]
  for times in distserve.STEP_TIMES:
    by_times.append((times, *(f"{own[times]:.1f}" for own in points.values())))
  without = f"{_points(list(unlimited.values())):.1f}"
  by_times.append((f"{JUDGED}, no memory limits", without, ""))
  peer = {run["name"]: run["att"]["200/100"][1] for run in facts["peer_results"]["align"]}
  tables = [
    f"### {LABELS[system]}\n\n{markdown_table(_run_rows(own, peer))}"
    for system, own in judged.items()
  ]
  others = _points([own for n, own in judged["distserve"].items() if OF_300 not in n])
  last = names["distserve"][-NUM_OVERLOADED:]
  tails = {n: (judged["distserve"][n], unlimited[n]) for n in last}
  attainment = {
    LABELS[system]: [(_short(n), *replay.attainments(*SLO)) for n, replay in own.items()]
    for system, own in judged.items()
  }
  return Section(
    title=title,
    reached=[
      *reached_rows(points, {system: len(own) for system, own in names.items()}),
      _tail_reached(tails),
    ],
    text="\n\n".join([_words(markdown_table(by_times), others), *tables, _TAIL_WORDS]),
    pictures={
      "attainment.png": functools.partial(draw_attainment, attainment),
      "tails.png": functools.partial(draw_tails, tails),
    },
  )


def reached_rows(points: Mapping[str, Mapping[str, float]], num_runs: Mapping) -> list[Reached]:
  """By step times as shipped; what they were scaled to is said, and what others give."""
  rows = []
  for system, by_times in points.items():
    own, most = by_times[JUDGED], MOST_POINTS[system]
    told = ", ".join(f"{times} {error:.1f}" for times, error in by_times.items() if times != JUDGED)
    rows.append(
      Reached(
        f"{LABELS[system]}: RMSE of attainment, {num_runs[system]} runs, step times {JUDGED} "
        f"(scaled by its authors, whose script for that has {ALIGNED[system]})",
        f"under {most:.0f} points",
        f"{own:.1f} points; {told}",
        own < most,
      )
    )
  return rows


def _tail_reached(tails: Mapping[str, tuple[Replay, Replay]]) -> Reached:
  parts = []
  for name, (limited, unlimited) in tails.items():
    measured, simulated = (percentile(own, 90) for own in limited.columns("ttft_s"))
    free = percentile(unlimited.columns("ttft_s")[1], 90)
    parts.append(
      f"{_short(name)}: {simulated:.1f} s for {measured:.1f} s, without memory limits {free:.1f} s"
    )
  return Reached("DistServe in overload: TTFT p90", "the tail is there", "; ".join(parts))


def _run_rows(own: Mapping[str, Replay], peer: Mapping[str, float]) -> list[tuple[str, ...]]:
  rows = [("run", "SLOs met, %: measured", "simulated", "simdistserve", "TTFT p90, s: measured",
           "simulated", "TPOT p90, ms: measured", "simulated")]  # fmt: skip
  for name, replay in own.items():
    found = replay.summaries()
    rows.append(
      (
        _short(name),
        *(f"{share:.1f}" for share in replay.attainments(*SLO)),
        f"{peer[name]:.1f}" if name in peer else "",
        *(f"{summary.p90:.2f}" for summary in found["ttft_s"]),
        *(f"{summary.p90 * MS:.0f}" for summary in found["tpot_s"]),
      )
    )
  return rows


def _points(replays: Sequence[Replay]) -> float:
  """Of attainment, the root of the mean square error."""
  pairs = [replay.attainments(*SLO) for replay in replays]
  return distserve.rms([simulated - measured for measured, simulated in pairs])


def _short(run: str) -> str:
  return run.removeprefix("distserve-")


def _size(run: str) -> tuple[int, float]:
  *_, num_requests, rate = run.split("-")
  return int(num_requests), float(rate)


def _missing(folder: pathlib.Path) -> str | None:
  missing = [n for n in (distserve.RUNS, distserve.FACTS) if not (folder / n).is_file()]
  return f"there is no {' and no '.join(missing)} in distserve" if missing else None


def _words(by_times: str, others: float) -> str:
  return f"""ShareGPT requests as they arrived; a run is named requests-rate. Judged are
those that the data folder has of the 13 runs of one prefill and one decode instance and of vLLM's
8. SLOs of each request: TTFT {SLO[0] * MS:.0f} ms and TPOT {SLO[1] * MS:.0f} ms. How the systems
are modelled comes from their source (`experiments/validation/distserve.py`): batches, memory from
real bytes, copies between steps, padding and what limits it. The authors' own simulator,
simdistserve, stands beside it.

Root mean square error of attainment in points, by where step times come from:

{by_times}

- shipped: the coefficients of DistServe's repository as they are. Its authors had scaled them by
  hand to served runs in their simulator: prompts by 1.1, those of vLLM by 1.4 and its decodes by
  1.2. That simulator knows neither padding nor a limit of it, so what both cost is in vLLM's
  factors, and here neither is modelled beside them. The script that compares it with served runs
  (`simdistserve/benchmarks/alignment/align_with_real.py`) has DistServe's runs of 300 requests and
  all of vLLM's, by these SLOs: of those this is no prediction. Of DistServe's others the error is
  {others:.1f} points.
- profiled: before that, as timed on idle devices. Here vLLM pads the prompts of a step, by 256
  tokens at most, as its version 0.2.3 does.

Judged are those as shipped. Only profiled step times were never fitted to what was served.

To all of them come what simdistserve adds, {distserve.SIMDISTSERVE["host_s"] * MS:g} ms a step for
Ray and {distserve.SIMDISTSERVE["stage_s"] * MS:g} ms for a stage of prompts, and
{distserve.NVLINK.latency_s * MS:g} ms at the start of a copy, which the paper's Figure 10 gives.
Run vllm-100-2 was slow by itself: the same first requests have a lower TPOT in vllm-250-2.5, at a
higher rate."""


_TAIL_WORDS = """In overload requests wait until the decode instance has room, meanwhile hold the
prefill instance's memory, and so keep prompts waiting: without memory limits TTFT has no tail
(below, dash-dotted)."""


def as_simdistserve(data_dir: pathlib.Path, show: Show) -> Section:
  """The same assumptions as simdistserve give the same attainment."""
  title = "The same assumptions as simdistserve"
  folder = data_dir / "distserve"
  if (missing := _missing(folder)) is not None:
    return Section(title=title, missing=missing)
  runs, facts = distserve.read_runs(folder), distserve.read_facts(folder)
  slos = [f"{ttft_s * MS:.0f}/{tpot_s * MS:.0f}" for ttft_s, tpot_s in distserve.SLOS]
  rows = [("run", *(f"SLOs {slo} ms" for slo in slos), "apart, p50 and p90")]
  equal, worst_ms = [], 0.0
  for peer in facts["peer_results"]["align"]:
    name = peer["name"]
    system = distserve.system_of(name)
    if system is None or name not in runs:
      continue
    show(f"{name} by simdistserve's assumptions")
    replay = Replay.of(runs[name], distserve.as_simdistserve(runs[name], system))
    cells = []
    for slo, key in zip(distserve.SLOS, slos):
      ours, theirs = round(replay.attainments(*slo)[1], 1), peer["att"][key][1]
      equal.append(ours == theirs)
      cells.append(f"{ours:.1f} {'=' if equal[-1] else 'not'} {theirs:.1f}")
    apart_ms = _apart_ms(replay, peer)
    worst_ms = max(worst_ms, apart_ms)
    rows.append((name, *cells, f"{apart_ms:.4f} ms"))
  text = f"""The loop of `pdjax`, the policy `sim_dist_serve` and the shipped coefficients, with all
assumptions of DistServe's simulator, against what that one gave for the same requests
(`facts.json`: shares of requests, to 0.1 %, and percentiles of TTFT and TPOT). What is left apart
is the last digit of the arrivals.

{markdown_table(rows)}"""
  return Section(
    title=title,
    reached=[
      Reached(
        "The same assumptions as simdistserve: attainments that are equal",
        "all",
        f"{sum(equal)} of {len(equal)}; percentiles within {worst_ms:.4f} ms",
        all(equal),
      )
    ],
    text=text,
  )


def _apart_ms(replay: Replay, peer: Mapping) -> float:
  """The largest difference of the percentiles that the peer's run has."""
  apart = []
  for metric in ("ttft", "tpot"):
    values = [getattr(record, f"{metric}_s") for record in replay.records]
    for q, theirs_ms in zip((50, 90), peer[f"{metric}_p50_p90_sim"]):
      apart.append(abs(percentile(values, q) * MS - theirs_ms))
  return max(apart)
