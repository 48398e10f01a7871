"""DistServe's end-to-end figures: attainment by rate and by SLO scale (8, 9, 13, 14)."""

from __future__ import annotations

import functools
import math
import pathlib
from collections.abc import Mapping, Sequence

from experiments.figures.reproduction import Panel, Series, draw
from experiments.reproduction.bench import Bench
from experiments.reproduction.distserve_systems import (
  MII_NOTE,
  OURS,
  STUDIES,
  SYSTEMS,
  WITHIN,
  Columns,
  Crossing,
  Curve,
  Name,
  Study,
  as_system,
  attainment_percent,
  crossing_like,
  curves_of,
  lengths_note,
  paper_lengths,
  runs_of,
  sampled_lengths,
  unreachable,
)
from experiments.reproduction.figure import HOLDS, IN_PART, NOT, Compared, Figure, Found, Judged
from experiments.reproduction.published_distserve import ATTAINMENT, CROSSINGS, PEER

AHEAD = 1.1  # times as much: what counts as more

# Verdicts -----------------------------------------------------------------------------------------


def gain(axis: str, ours: float, theirs: float) -> float:
  """How much better: the higher rate, or the smaller scale."""
  return ours / theirs if axis == "rate" else theirs / ours


def judge_gain(
  axis: str, here: tuple[Crossing, Crossing], there: tuple[Crossing, Crossing]
) -> Judged:
  """Of DistServe's crossing over a baseline's, ours and published.

  Holds: within `WITHIN` of the published gain, by curves that end alike. In part: ahead by more
  than `AHEAD`.
  """
  found, published = (gain(axis, *(crossing.x for crossing in pair)) for pair in (here, there))
  words = ", ".join(
    f"{bound(pair)}{number:.3g} {where} ({_against(pair)})"
    for where, number, pair in (("here", found, here), ("there", published, there))
  )
  words = f"{words[0].upper()}{words[1:]}."
  is_alike = [crossing.kind for crossing in here] == [crossing.kind for crossing in there]
  if is_alike and abs(found / published - 1) <= WITHIN:
    return Judged(HOLDS, words)
  return Judged(IN_PART if found > AHEAD else NOT, words)


def bound(pair: tuple[Crossing, Crossing]) -> str:
  """What a gain is short of a number where a crossing is beyond what was tried."""
  ours, theirs = (crossing.kind for crossing in pair)
  is_more = ours == "above everywhere" or theirs == "below everywhere"
  is_less = ours == "below everywhere" or theirs == "above everywhere"
  return "perhaps " if is_more and is_less else "at least " * is_more + "at most " * is_less


def _against(pair: tuple[Crossing, Crossing]) -> str:
  return " against ".join(map(str, pair))


def claims_of(fig: str, study: Study) -> tuple[str, ...]:
  return tuple(
    f"{study.title}: at {CROSSINGS[fig][study.name][axis][0]:g} % attainment DistServe "
    + (
      f"serves {published:.3g} times {SYSTEMS[baseline]}'s rate a GPU."
      if axis == "rate"
      else f"keeps SLOs {published:.3g} times as tight as {SYSTEMS[baseline]} does."
    )
    for axis, baseline, published in published_gains(fig, study)
  )


def published_gains(fig: str, study: Study) -> list[tuple[str, str, float]]:
  found = []
  for axis, (_, crossings) in CROSSINGS[fig][study.name].items():
    for baseline in study.systems[1:]:
      published = gain(axis, crossings["distserve"], crossings[baseline])
      found.append((axis, baseline, published))
  return found


Curves = Mapping[tuple[str, str, int], Mapping[str, Curve]]
"""By system, step times and times the paper's requests; then by axis."""


def judged_of(
  fig: str, study: Study, curves: Curves, data_dir: pathlib.Path
) -> tuple[list[Judged], list[Compared]]:
  """A verdict for each of `claims_of`, with why systems are off, and all crossings."""
  here, there, compared = {}, {}, []
  for axis, (target, published) in CROSSINGS[fig][study.name].items():
    for system in study.systems:
      curve = Curve(ATTAINMENT[study.name][axis][system])
      own = here[system, axis] = crossing_like(curves[study.judged(system)][axis], curve, target)
      there[system, axis] = curve.crossing(target)
      what = f"{study.title}, {OURS[system]}: {_AXES[axis]} at {target:g} %"
      unit = "1/s" if axis == "rate" else ""
      compared.append(Compared(what, published[system], own.value, unit))
  judged = []
  for axis, baseline, _ in published_gains(fig, study):
    pairs = [(own["distserve", axis], own[baseline, axis]) for own in (here, there)]
    found = judge_gain(axis, *pairs)
    target = CROSSINGS[fig][study.name][axis][0]
    reasons = [
      why_off(study, system, axis, target, crossings, curves, data_dir)
      for system, *crossings in zip(("distserve", baseline), *pairs)
    ]
    found = found._replace(why=" ".join([found.why, *filter(None, reasons)]))
    judged.append(found)
  return judged, compared


def why_off(
  study: Study,
  system: str,
  axis: str,
  target: float,
  crossings: Sequence[Crossing],
  curves: Curves,
  data_dir: pathlib.Path,
) -> str | None:
  """What can be shown of why our crossing is off the published one; None where it is not."""
  key, (here, there) = study.judged(system), crossings
  if here.kind == there.kind and abs(here.x / there.x - 1) <= WITHIN:
    return None
  label = SYSTEMS[system]
  if system == "mii":
    return f"{label}: a stand-in, by step times that are not its own."
  if study.name == "175b":
    return f"{label}: its step times are synthetic."
  reasons = []
  if (profile := curves.get((system, "profiled", 1))) is not None:
    other = profile[axis].crossing(target)
    low, high = sorted((here.x, other.x))
    where = "between the two" if low <= there.x <= high else "beyond both"
    reasons.append(f"{other} by the profiled step times, the published one is {where}")
  if axis == "rate" and target == 90 and system in (peer := PEER.get(study.name, {})):
    reasons.append(f"{Curve(peer[system]).crossing(target)} by simdistserve on other draws")
  _, percent = unreachable(study, system, key[1], sampled_lengths(study, data_dir))
  if percent > (100 - target) / 2:
    reasons.append(f"{percent:.0f} % of the prompts miss the TTFT SLO by these step times alone")
  if study.requests == "longbench":
    reasons.append("its requests are drawn, not the paper's")
  if target > 95:
    requests = study.config.workload.num_requests / study.config.num_devices
    num = round(requests * as_system(study.config, system, study.tp).num_devices)
    reasons.append(f"{(100 - target) / 100 * num:.0f} late ones of {num} requests decide")
  return f"{label}: {'; '.join(reasons) or 'why is not known'}."


SLOW_VLLM = (
  "vLLM's shipped step times are too slow for these SLOs: of its own run at 1 a second "
  "(`vllm-100-1`, the same requests) 86 % met them, by its authors' simulator 71 %."
)

# Figures 8 and 9 ----------------------------------------------------------------------------------

_AXES = {"rate": "rate a GPU", "scale": "SLO scale"}
_X = {"rate": "requests a second, each GPU", "scale": "SLO scale (smaller is stricter)"}
_COLOUR = {system: number for number, system in enumerate(SYSTEMS)}


def make(fig: str, study: Study, bench: Bench) -> Found:
  """One column of Figure 8 or 9: both panels, long runs, and other step times."""
  runs = runs_of(study, bench)
  every = {name[:3] for name in runs}
  curves = {key: curves_of(study, runs, *key) for key in sorted(every)}
  judged, compared = judged_of(fig, study, curves, bench.data_dir)
  rows = [
    (OURS[system], step_times, times, axis, x, percent)
    for (system, step_times, times), by_axis in curves.items()
    for axis, curve in by_axis.items()
    for x, percent in curve.points
  ]
  return Found(
    columns=("system", "step times", "times the paper's requests", "axis", "x", "attainment %"),
    rows=rows,
    judged=judged,
    compared=compared,
    draw=functools.partial(
      draw, _panels(study, curves), title=f"DistServe: {study.title}", columns=2
    ),
    notes=[*_notes(study, bench, curves), *_binding(study, runs)],
  )


def _synthetic(study: Study) -> str:
  """What of our runs is made up, to be written where they are drawn."""
  if study.name == "175b":
    return ", SYNTHETIC step times"
  return ", SYNTHETIC lengths" if study.requests == "longbench" else ""


def _panels(study: Study, curves: Curves) -> list[Panel]:
  panels = []
  for axis in ("rate", "scale"):
    series = []
    for system in study.systems:
      colour, label = _COLOUR[system], OURS[system]
      series.append(Series(label, curves[study.judged(system)][axis].points, "ours", colour))
      published = ATTAINMENT[study.name][axis][system]
      series.append(Series(f"{SYSTEMS[system]}, published", published, "published", colour))
      if axis == "rate" and system in PEER.get(study.name, {}):
        series.append(Series(f"{label} by simdistserve", PEER[study.name][system], "peer", colour))
    panels.append(_panel(study, f"ours beside the paper's{_synthetic(study)}", axis, series))
  longer = [
    Series(
      f"{OURS[system]}{f', {times} times as many' if times > 1 else ''}",
      by_axis["rate"].points,
      "long" if times > 1 else "ours",
      _COLOUR[system],
    )
    for (system, step_times, times), by_axis in curves.items()
    if step_times == study.judged(system)[1]
  ]
  has_long = any(times > 1 for *_, times in curves)
  title = "the paper's requests" + (", and a long run (dotted)" if has_long else "")
  panels.append(_panel(study, title, "rate", longer))
  sources = {"shipped": "ours", "profiled": "peer", "roofline": "long"}
  others = [
    Series(f"{OURS[system]}, {step_times}", by["rate"].points, sources[step_times], _COLOUR[system])
    for (system, step_times, times), by in curves.items()
    if times == 1 and system != "mii"
  ]
  panels.append(_panel(study, "by other step times", "rate", others))
  return panels


def _xlim(study: Study, axis: str) -> tuple[float | None, float | None]:
  """Of SLO scales the published ones, beyond which ours go on."""
  if axis == "rate":
    return None, None
  scales = [scale for scale, _ in ATTAINMENT[study.name]["scale"]["distserve"]]
  margin = 0.04 * (max(scales) - min(scales))
  return min(scales) - margin, max(scales) + margin


def _panel(study: Study, title: str, axis: str, series: Sequence[Series]) -> Panel:
  return Panel(
    title,
    _X[axis],
    "requests within both SLOs (%)",
    series,
    lines={"90 %": 90.0},
    falls=axis == "scale",
    xlim=_xlim(study, axis),
    ylim=(0, 103),
  )


def _notes(study: Study, bench: Bench, curves: Curves) -> list[str]:
  config = study.config
  lengths = paper_lengths(study, bench.data_dir, config.workload.num_requests)
  notes = [
    f"{config.workload.num_requests // config.num_devices} requests for each GPU of a system, as "
    f"in the paper, with its gaps. {lengths_note(lengths, config, study.requests)}"
  ]
  if study.name == "175b":
    notes.append(
      "Step times of OPT-175B are SYNTHETIC: OPT-66B's on as many GPUs, scaled by the sizes of "
      "both (`configs/linear.py`); nobody published any."
    )
  if "mii" in study.systems:
    notes.append(MII_NOTE)
  if study.name == "13b":
    notes.append(SLOW_VLLM)
  for (system, step_times, times), by_axis in curves.items():
    if times > 1:
      long = by_axis["rate"].crossing(90.0)
      short = curves[system, step_times, 1]["rate"].crossing(90.0)
      note = (
        f"{OURS[system]} with {times} times as many requests: 90 % at {long} a second for each "
        f"GPU; with as many as the paper's: {short}"
      )
      if short.value and long.x < 0.95 * short.x:
        note += ", so much of it is the end of the run before its queue has built up"
      notes.append(f"{note}.")
  for system in ("distserve", "vllm"):
    for step_times in study.step_times_of(system):
      sample = sampled_lengths(study, bench.data_dir)
      fits, percent = unreachable(study, system, step_times, sample)
      if percent:
        notes.append(
          f"{OURS[system]}, {step_times}: a lone prompt of {fits:,} tokens takes the whole TTFT "
          f"SLO, and {percent:.1f} % of the prompts are longer."
        )
  if bench.quick:
    notes.append("--quick: no long run.")
  return notes


def _binding(study: Study, runs: Mapping[Name, Columns]) -> list[str]:
  """Which of the SLOs requests miss at the fixed rate, in runs as long as the paper's."""
  slo, notes = study.config.slo, []
  for system in study.systems:
    run = runs[Name(*study.judged(system), study.fixed_rate)]
    missed = (
      100 - attainment_percent(run, *slos)
      for slos in ((slo.ttft_s, math.inf), (math.inf, slo.tpot_s))
    )
    ttft, tpot = (f"{percent:.3g} %" for percent in missed)
    notes.append(
      f"{OURS[system]} at {study.fixed_rate:g} a second for each GPU: {ttft} of the requests miss "
      f"the TTFT SLO, {tpot} the TPOT SLO."
    )
  return notes


# Figures 13 and 14 --------------------------------------------------------------------------------


def make_stricter(fig: str, names: Sequence[str], bench: Bench) -> Found:
  """The runs of Figures 8 and 9 at a target near all requests."""
  rows, judged, compared, panels = [], [], [], []
  for name in names:
    study = STUDIES[name]
    runs = runs_of(study, bench, also=False)
    keys = [study.judged(system) for system in study.systems]
    curves = {key: curves_of(study, runs, *key) for key in keys}
    own, crossings = judged_of(fig, study, curves, bench.data_dir)
    judged, compared = judged + own, compared + crossings
    for axis, (target, _) in CROSSINGS[fig][name].items():
      rows += [
        (study.title, OURS[system], axis, x, percent)
        for (system, *_), by_axis in curves.items()
        for x, percent in by_axis[axis].points
      ]
      series = []
      for (system, *_), by_axis in curves.items():
        colour, label = _COLOUR[system], OURS[system]
        series.append(Series(label, by_axis[axis].points, "ours", colour))
        published = ATTAINMENT[name][axis][system]
        series.append(Series(f"{SYSTEMS[system]}, published", published, "published", colour))
      panel = _panel(study, f"{study.title}{_synthetic(study)}", axis, series)
      panels.append(panel._replace(lines={f"{target:g} %": target}, ylim=(60, 101.5)))
  notes = [
    "The same runs as in Figures 8 and 9. Both figures are captioned 99 %; their crossings are "
    "those of 98.5 and 99 (Figure 13) and of 96.5 % (Figure 14), which are used here.",
    MII_NOTE,
  ]
  if "175b" in names:
    notes.append("Step times of OPT-175B are SYNTHETIC, as in Figure 8.")
  return Found(
    columns=("study", "system", "axis", "x", "attainment %"),
    rows=rows,
    judged=judged,
    compared=compared,
    draw=functools.partial(
      draw, panels, title="DistServe: nearly all requests within the SLOs", columns=2
    ),
    notes=notes,
  )


def _column(figure: str, fig: str, name: str, *, is_headline: bool = False) -> Figure:
  study = STUDIES[name]
  return Figure(
    name=f"distserve/{figure}",
    title=f"attainment of {study.title}",
    kind="simulated",
    claims=claims_of(fig, study),
    make=functools.partial(make, fig, study),
    configs=(study.path,),
    is_headline=is_headline,
  )


def _stricter(fig: str, names: Sequence[str]) -> Figure:
  return Figure(
    name=f"distserve/{fig}",
    title="attainment where nearly all requests count",
    kind="simulated",
    claims=[claim for name in names for claim in claims_of(fig, STUDIES[name])],
    make=functools.partial(make_stricter, fig, names),
    configs=[STUDIES[name].path for name in names],
  )


FIGURES = (
  _column("fig8a", "fig8", "13b", is_headline=True),
  _column("fig8b", "fig8", "66b"),
  _column("fig8c", "fig8", "175b"),
  _column("fig9a", "fig9", "code"),
  _column("fig9b", "fig9", "summarization", is_headline=True),
  _stricter("fig13", ("13b", "66b", "175b")),
  _stricter("fig14", ("code", "summarization")),
)
