"""Pictures of what limits steps: the roof, and times by operator. Need the extra `[figures]`."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Sequence
from typing import Any

from experiments.figures.reproduction import COLOURS
from experiments.figures.serving import KIND_COLOURS, STYLE, _matplotlib
from pdjax.analysis.intensity import Ridge
from pdjax.core.costs import KINDS as OP_KINDS

LINES = ("-", "--", "-.", ":")
MARKS = {"prefill": "o", "chunk": "^", "decode": "s", "mixed": "D"}
COLOURS_OF = {**KIND_COLOURS, "chunk": "#CC79A7"}


def draw_roofline(
  cases: Sequence[Any],
  own: Ridge,
  steps: Sequence[Any],
  measured: Any,
  message: str,
  path: pathlib.Path,
) -> None:
  """Writes three panels: the base's steps under the roofs of all devices; its prefill over tokens
  and its decode over rows, by kind of operator. Measured steps have a roof of their own.

  `cases` (the base first), `own` (its ridge), its `steps`, and `measured` or None are those of
  `experiments.roofline`. `message` is what it shows.
  """
  mpl = _matplotlib()
  base = cases[0]
  with mpl.rc_context(STYLE):
    figure = mpl.figure.Figure(figsize=(20, 7), layout="constrained")
    roof, prefill, decode = figure.subplots(1, 3, width_ratios=(1.3, 1, 1))
    for device, line in zip(dict.fromkeys(case.device for case in cases), itertools.cycle(LINES)):
      _draw_roof(roof, device, line, f"{device.name}: ridge {device.ridge_flop_per_byte:.0f}")
    roof.axvline(own.achieved, color="#888888", linewidth=1, linestyle=":",
                 label=f"achieved ridge {own.achieved:.0f}")  # fmt: skip
    for kind, mark in MARKS.items():
      points = [
        (step.profile.flop_per_byte, step.profile.flops / step.profile.step_s / 1e12)
        for step in steps
        if step.kind == kind
      ]
      roof.plot(*zip(*points), mark, color=COLOURS_OF[kind], label=kind, markersize=6,
                linestyle="-", linewidth=0.8)  # fmt: skip
    if measured is not None:
      _draw_measured(roof, measured)
    roof.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="TFLOP/s of a device",
             title="Steps under the roof")  # fmt: skip
    roof.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3)
    _draw_times(
      prefill, [(s.tokens, s.profile) for s in steps if s.kind == "prefill"], "prompt tokens",
      "Where a prefill's time goes",
    )  # fmt: skip
    _draw_times(
      decode, [(s.rows, s.profile) for s in steps if s.kind == "decode"], "rows",
      f"Where a decode's time goes, at {base.context} tokens",
    )  # fmt: skip
    for axes in (roof, prefill, decode):
      axes.grid(alpha=0.3)
    figure.suptitle(message, x=0.01, ha="left", weight="bold")
    figure.savefig(path, dpi=90)


def _draw_measured(axes, measured) -> None:
  """Steps of the engine under the roof of the device that ran them, in the colour of both."""
  device, colour = measured.device, "#B30000"
  label = f"{device.name}, measured: ridge {device.ridge_flop_per_byte:.0f}"
  _draw_roof(axes, device, "-", label, colour)
  for kind in dict.fromkeys(step.kind for step in measured.steps):
    points = [
      (step.flop_per_byte, step.flops_per_s / 1e12) for step in measured.steps if step.kind == kind
    ]
    axes.plot(*zip(*points), MARKS[kind], color=COLOURS_OF[kind], markeredgecolor=colour,
              label=f"{kind}, measured")  # fmt: skip


def _draw_roof(axes, device, line: str, label: str, colour: str = "#333333") -> None:
  top = device.peak_flops_per_s / 1e12
  at = device.ridge_flop_per_byte
  axes.plot((0.5, at, 5000), (0.5 / at * top, top, top), line, color=colour, linewidth=1.5,
            label=label)  # fmt: skip


def _draw_times(axes, steps, label: str, title: str) -> None:
  """What kinds of operators, the links and the host take of a step, and how long it takes."""
  sizes = [size for size, _ in steps]
  columns = {
    kind: [100 * getattr(p.terms, f"{kind}_s") / p.step_s for _, p in steps]
    for kind in (*OP_KINDS, "all_reduce", "host")
  }
  bottom = [0.0] * len(sizes)
  for colour, (kind, values) in zip(COLOURS, columns.items()):
    if not any(values):
      continue
    top = [a + b for a, b in zip(bottom, values)]
    axes.fill_between(sizes, bottom, top, color=colour, alpha=0.6, linewidth=0,
                      label=kind.replace("_", " "))  # fmt: skip
    bottom = top
  axes.set(xscale="log", xlabel=label, ylabel="% of the step", title=title, ylim=(0, 100))
  axes.set_xlim(sizes[0], sizes[-1])
  right = axes.twinx()
  right.plot(sizes, [1e3 * p.step_s for _, p in steps], "k.-", label="ms (right)")
  right.set(yscale="log", ylabel="ms")
  right.spines["right"].set_visible(True)
  handles = [h for own in (axes, right) for h in own.get_legend_handles_labels()[0]]
  axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3)
