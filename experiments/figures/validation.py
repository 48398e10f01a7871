"""Pictures of the validation: simulated beside measured. Need the extra `[figures]`."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.figures.serving import STYLE, _matplotlib
from experiments.validation.replay import METRICS, Replay

MEASURED = {"color": "#000000", "linestyle": "-", "label": "measured"}
SIMULATED = {"color": "#D55E00", "linestyle": "--", "label": "simulated"}
OTHER = {"color": "#56B4E9", "linestyle": "-.", "label": "no memory limit"}


def draw_replay(replay: Replay, path: pathlib.Path, title: str = "") -> Any:
  """Writes how TTFT, TPOT and end-to-end times were distributed, measured and simulated."""
  mpl = _matplotlib()
  with mpl.rc_context(STYLE):
    figure = mpl.figure.Figure(figsize=(15, 4.6), layout="constrained")
    for axes, metric in zip(figure.subplots(1, 3, sharey=True), METRICS):
      for values, style in zip(replay.columns(metric), (MEASURED, SIMULATED)):
        axes.ecdf(values, **style)
      axes.set(title=metric.removesuffix("_s").upper(), xlabel="seconds", ylim=(0, 1))
      axes.set_xlim(left=0)
      axes.locator_params(axis="x", nbins=6)
    figure.axes[0].set_ylabel("share of requests")
    figure.axes[0].legend(loc="lower right")
    if title:
      figure.suptitle(title)
    figure.savefig(path)
    return figure


def draw_attainment(
  systems: Mapping[str, Sequence[tuple[str, float, float]]], path: pathlib.Path
) -> Any:
  """Writes attainment of each run, measured and simulated, in percent: a panel for each system."""
  mpl = _matplotlib()
  with mpl.rc_context(STYLE):
    figure = mpl.figure.Figure(figsize=(15, 5.4), layout="constrained")
    widths = [len(runs) for runs in systems.values()]
    panels = figure.subplots(1, len(systems), sharey=True, width_ratios=widths, squeeze=False)
    for axes, (name, runs) in zip(panels[0], systems.items()):
      at = np.arange(len(runs))
      for offset, column, style in ((-0.2, 1, MEASURED), (0.2, 2, SIMULATED)):
        axes.bar(
          at + offset,
          [run[column] for run in runs],
          0.4,
          color=style["color"],
          label=style["label"],
        )
      axes.set(title=name, ylim=(0, 100))
      axes.set_xticks(at, [run[0] for run in runs], rotation=60, ha="right")
    panels[0][0].set_ylabel("SLOs met (%)")
    panels[0][0].legend()
    figure.savefig(path)
    return figure


def draw_tails(runs: Mapping[str, tuple[Replay, Replay]], path: pathlib.Path) -> Any:
  """Writes the distribution of TTFT of runs in overload, with and without memory limits."""
  mpl = _matplotlib()
  with mpl.rc_context(STYLE):
    figure = mpl.figure.Figure(figsize=(7.5 * len(runs), 4.8), layout="constrained")
    panels = figure.subplots(1, len(runs), sharey=True, squeeze=False)[0]
    for axes, (name, (limited, unlimited)) in zip(panels, runs.items()):
      measured, simulated = limited.columns("ttft_s")
      for values, style in (
        (measured, MEASURED),
        (simulated, SIMULATED),
        (unlimited.columns("ttft_s")[1], OTHER),
      ):
        axes.ecdf(values, **style)
      axes.set(title=name, xlabel="TTFT (s)", xscale="log", ylim=(0, 1))
    panels[0].set_ylabel("share of requests")
    panels[0].legend(loc="lower right")
    figure.savefig(path)
    return figure
