"""Pictures of what limits steps: the roof, and times by operator. Need the extra `[figures]`."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

from experiments.figures.reproduction import COLOURS
from experiments.figures.serving import KIND_COLOURS, STYLE, _matplotlib
from pdjax.analysis.intensity import StepProfile, ridge
from pdjax.core.costs import KINDS as OP_KINDS

LINES = ("-", "--", "-.", ":")
MARKS = {"prefill": "o", "chunk": "^", "decode": "s", "mixed": "D"}
COLOURS_OF = {**KIND_COLOURS, "chunk": "#CC79A7"}


def draw_roofline(
  cases: Sequence[Any],
  steps: Sequence[tuple[str, int, int, StepProfile]],
  measured: Any,
  path: pathlib.Path,
) -> None:
  """Writes three panels: steps under the roofs of all cases; the base's prefill over its tokens and
  decode over its rows, by kind of operator. Measured steps have a roof of their own.

  `cases` (the base first), its `steps` and `measured` are those of `experiments.roofline`.
  """
  mpl = _matplotlib()
  base = cases[0]
  with mpl.rc_context(STYLE):
    figure = mpl.figure.Figure(figsize=(19, 6.4), layout="constrained")
    roof, prefill, decode = figure.subplots(1, 3, width_ratios=(1.25, 1, 1))
    for case, line in zip(cases, LINES):
      label = f"{case.tp} x {case.device.name}" if case.tp > 1 else case.device.name
      _draw_roof(roof, case.device, line, label if case is base or case.device != base.device
                 else None)  # fmt: skip
    own = ridge(base.latency, base.model, base.device, tp=base.tp)
    roof.axvline(own.achieved, color="#888888", linewidth=1, linestyle=":")
    roof.text(own.achieved, roof.get_ylim()[0], " achieved ridge", rotation=90, va="bottom",
              fontsize="small", color="#555555")  # fmt: skip
    for kind, mark in MARKS.items():
      points = [(p.flop_per_byte, p.flops / p.step_s / 1e12) for k, _, _, p in steps if k == kind]
      roof.plot(*zip(*points), mark, color=COLOURS_OF[kind], label=kind, markersize=6,
                linestyle="-", linewidth=0.8)  # fmt: skip
    if measured is not None:
      _draw_roof(roof, measured.device, "-", f"{measured.device.name}, measured", "#B30000")
      for kind in dict.fromkeys(step.kind for step in measured.steps):
        points = [
          (s.flop_per_byte, s.flops / s.seconds / 1e12) for s in measured.steps if s.kind == kind
        ]
        roof.plot(*zip(*points), MARKS[kind], color=COLOURS_OF[kind], fillstyle="none",
                  label=f"{kind}, measured")  # fmt: skip
    roof.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="TFLOP/s of a device",
             title="Steps under the roof")  # fmt: skip
    roof.legend(fontsize="small")
    _draw_times(
      prefill, [(tokens, p) for kind, tokens, _, p in steps if kind == "prefill"], "prompt tokens",
      "Prefill, by operator",
    )  # fmt: skip
    _draw_times(
      decode, [(rows, p) for kind, _, rows, p in steps if kind == "decode"], "rows",
      f"Decode at {base.context} tokens, by operator",
    )  # fmt: skip
    for axes in (roof, prefill, decode):
      axes.grid(alpha=0.3)
    figure.suptitle(
      f"{base.model.name} on {base.tp} x {base.device.label}", x=0.01, ha="left", weight="bold"
    )
    figure.savefig(path, dpi=90)


def _draw_roof(axes, device, line: str, label: str | None, colour: str = "#333333") -> None:
  if label is None:
    return
  top = device.peak_flops_per_s / 1e12
  at = device.ridge_flop_per_byte
  axes.plot((0.5, at, 5000), (0.5 / at * top, top, top), line, color=colour, linewidth=1.5,
            label=f"{label}: ridge {at:.0f}")  # fmt: skip


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
  axes.legend(handles=handles, fontsize="small", loc="lower left", frameon=True, framealpha=0.9)
