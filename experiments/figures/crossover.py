"""The crossover map: who wins under which targets. Needs the extra `[figures]`."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from experiments.figures.serving import STYLE, _matplotlib
from pdjax.core.request import Slo

COLOURS = {"continuous": "#E69F00", "chunked": "#56B4E9", "disaggregated": "#009E73"}
INITIALS = {"continuous": "P", "chunked": "C", "disaggregated": "D"}
LABELS = {
  "continuous": "P  whole prompts first, shared devices (continuous batching)",
  "chunked": "C  chunks beside decodes, shared devices (Sarathi-Serve)",
  "disaggregated": "D  separate pools (DistServe)",
}
NONE = "#DDDDDD"


class Map(NamedTuple):
  """Panels by workload (`rows`) and link (`columns`); in each a cell for every pair of `levels`.

  `cells` are by (row, column, (TTFT level, TPOT level)); each has `winner`, `runner_up` and
  `margin_percent`. `slos` are by row and pair.
  """

  title: str
  rows: Sequence[str]
  columns: Mapping[str, str]  # by name: what is written over it
  levels: Sequence[str]
  cells: Mapping[tuple[str, str, tuple[str, str]], Any]
  tie_percent: float
  slos: Mapping[str, Mapping[tuple[str, str], Slo]]


def draw_map(drawn: Map, path: pathlib.Path) -> None:
  """Writes the map to `path`."""
  mpl = _matplotlib()
  with mpl.rc_context(STYLE):
    size = (1.5 + 3.6 * len(drawn.columns), 1.9 + 2.7 * len(drawn.rows))
    figure = mpl.figure.Figure(figsize=size, layout="constrained")
    every = figure.subplots(len(drawn.rows), len(drawn.columns), squeeze=False)
    for row, line in zip(drawn.rows, every):
      for column, axes in zip(drawn.columns, line):
        _panel(axes, drawn, row, column)
    for axes, label in zip(every[0], drawn.columns.values()):
      axes.set_title(label, weight="bold")
    handles = [
      mpl.patches.Patch(color=COLOURS[name], label=label) for name, label in LABELS.items()
    ]
    handles.append(mpl.patches.Patch(color=NONE, label="no strategy reaches the targets"))
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle(
      f"{drawn.title}\n+12 % D: 12 % more than the runner-up D; pale: a tie, within "
      f"{drawn.tie_percent:g} %; alone: nobody else reaches the targets",
      x=0.01, ha="left", fontsize="medium",
    )  # fmt: skip
    figure.savefig(path, dpi=100)


def _panel(axes, drawn: Map, row: str, column: str) -> None:
  slos, n = drawn.slos[row], len(drawn.levels)
  for y, ttft in enumerate(drawn.levels):
    for x, tpot in enumerate(drawn.levels):
      cell = drawn.cells[row, column, (ttft, tpot)]
      is_tie = cell.margin_percent is not None and cell.margin_percent < drawn.tie_percent
      colour = NONE if cell.winner is None else COLOURS[cell.winner]
      axes.add_patch(
        _rectangle()((x, y), 1, 1, facecolor=colour, alpha=0.4 if is_tie else 1.0, edgecolor="w")
      )
      axes.text(x + 0.5, y + 0.5, _text(cell), ha="center", va="center", fontsize="small")
  axes.set(xlim=(0, n), ylim=(0, n))
  axes.set_aspect("auto")
  places = [i + 0.5 for i in range(n)]
  first = drawn.levels[0]
  tpots = [f"{1e3 * slos[first, level].tpot_s:.0f} ms" for level in drawn.levels]
  ttfts = [f"{slos[level, first].ttft_s:.2g} s" for level in drawn.levels]
  axes.set_xticks(places, tpots)
  axes.set_yticks(places, ttfts)
  axes.tick_params(length=0)
  axes.grid(False)
  axes.set_xlabel("TPOT target")
  if column == next(iter(drawn.columns)):
    axes.set_ylabel(f"{row}\nTTFT target", weight="bold")


def _rectangle():
  return _matplotlib().patches.Rectangle


def _text(cell: Any) -> str:
  if cell.winner is None:
    return "none"
  own = INITIALS[cell.winner]
  if cell.margin_percent is None:
    return f"{own} alone"
  return f"{own}\n+{cell.margin_percent:.0f} % {INITIALS[cell.runner_up]}"
