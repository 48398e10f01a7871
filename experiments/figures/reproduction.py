"""Pictures of reproduced figures: ours beside the published points. Need the extra `[figures]`.

Ours are lines, published numbers are marks of the same colour: hollow where they are exact, crosses
where they were read off a plot. Every function writes a picture to `path`.
"""

from __future__ import annotations

import math
import pathlib
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from experiments.figures.serving import KIND_COLOURS, STYLE, _matplotlib

# Okabe and Ito's palette
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#882255")
DPI = 72
LETTERS_PER_INCH = 7  # of a title
LEGEND_LINE_INCHES = 0.27  # of a legend below a panel
SOURCES = {  # how a series is drawn
  "ours": {"linestyle": "-", "marker": ".", "linewidth": 2},
  "long": {"linestyle": ":", "marker": "", "linewidth": 1.5},  # of long runs, another model, ...
  "peer": {"linestyle": "-.", "marker": "", "linewidth": 1.2},
  "published": {"linestyle": "", "marker": "o", "fillstyle": "none", "markersize": 8},
  "read": {"linestyle": "", "marker": "x", "markersize": 8},
}


class Series(NamedTuple):
  """Points of one curve. Those with the same `colour` (a number) belong together."""

  label: str
  points: Sequence[tuple[float, float]]
  source: str = "ours"  # a key of SOURCES
  colour: int = 0


class Panel(NamedTuple):
  title: str
  x: str
  y: str
  series: Sequence[Series]
  lines: Mapping[str, float] = {}  # horizontal, by label
  is_log_x: bool = False
  is_log_y: bool = False
  falls: bool = False  # x decreases to the right
  ylim: tuple[float | None, float | None] = (None, None)
  xlim: tuple[float | None, float | None] = (None, None)


class Bars(NamedTuple):
  """Groups of bars: `values[group]` has a number or None for each of `names`.

  `published` has marks for some: by (group, name).
  """

  title: str
  y: str
  names: Sequence[str]
  values: Mapping[str, Sequence[float | None]]
  published: Mapping[tuple[str, str], float] = {}
  is_read: bool = False
  is_log_y: bool = False
  lines: Mapping[str, float] = {}
  is_stacked: bool = False  # the names of a group on one another, in one bar


class Lanes(NamedTuple):
  """What was at work when: `lanes[name]` has (start, end, kind), kinds as in `KIND_COLOURS`."""

  title: str
  x: str
  lanes: Mapping[str, Sequence[tuple[float, float, str]]]
  xlim: tuple[float | None, float | None] = (None, None)


def draw(
  panels: Sequence[Panel | Bars | Lanes], path: pathlib.Path, title: str, *, columns: int = 3
) -> Any:
  """Writes all panels, in rows of `columns`, and returns the figure."""
  mpl = _matplotlib()
  columns = min(columns, len(panels))
  rows = math.ceil(len(panels) / columns)
  with mpl.rc_context(STYLE):
    size = (max(8.5, 6.2 * columns), 0.6 + 5.2 * rows)
    figure = mpl.figure.Figure(figsize=size, layout="constrained")
    every = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, panel in zip(every, panels):
      {Bars: _bars, Lanes: _lanes}.get(type(panel), _curves)(axes, panel)
    for axes in every[len(panels) :]:
      axes.set_axis_off()
    title = textwrap.fill(title, int(LETTERS_PER_INCH * size[0]), break_on_hyphens=False)
    figure.suptitle(title, x=0.01, ha="left", weight="bold")
    curves = [axes for axes, panel in zip(every, panels) if isinstance(panel, Panel)]
    _legends_off_data(figure, curves)
    figure.savefig(path, dpi=DPI)
    return figure


def _legends_off_data(figure, curves: Sequence) -> None:
  """Puts legends that would lie over points or curves below their panels, and makes room there."""
  figure.dpi = DPI
  figure.draw_without_rendering()  # only now the places of all are known
  moved: dict[int, int] = {}  # lines of the longest legend, by row of panels
  for axes in curves:
    legend = axes.get_legend()
    if legend is not None and _is_over_data(axes, box := legend.get_window_extent()):
      # A legend wider than its panel would make the panel's column as wide.
      ncols = 2 if 2 * box.width < axes.get_window_extent().width else 1
      row, labels = axes.get_subplotspec().rowspan.start, len(legend.get_texts())
      moved[row] = max(moved.get(row, 0), math.ceil(labels / ncols))
      axes.legend(
        fontsize="small", loc="upper left", bbox_to_anchor=(0, -0.13), ncols=ncols, columnspacing=1
      )
  if moved:
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + LEGEND_LINE_INCHES * sum(moved.values()))


def _is_over_data(axes, box) -> bool:
  """Whether a point or a curve of a panel lies in a box of the drawing."""
  for line in axes.lines:
    if line.get_transform() != axes.transData:
      continue  # a target, which runs behind a legend without harm
    path = line.get_transform().transform_path(line.get_path())
    is_curve = line.get_linestyle() not in ("", "None")
    if is_curve and path.intersects_bbox(box, filled=False):
      return True
    if box.padded(line.get_markersize() / 2).count_contains(path.vertices):
      return True
  return False


def _curves(axes, panel: Panel) -> None:
  for series in panel.series:
    if not series.points:
      continue
    colour = COLOURS[series.colour % len(COLOURS)]
    xs, ys = zip(*series.points)
    axes.plot(xs, ys, color=colour, label=series.label, **SOURCES[series.source])
  for label, value in panel.lines.items():
    axes.axhline(value, color="#666666", linestyle="--", linewidth=1.2, label=label)
  if panel.is_log_x:
    axes.set_xscale("log", base=2 if all(_is_power_of_2(x) for s in panel.series
                                         for x, _ in s.points) else 10)  # fmt: skip
    _label_log(axes.xaxis)
  if panel.is_log_y:
    axes.set_yscale("log")
    _label_log(axes.yaxis)
  axes.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
  axes.set_ylim(*panel.ylim)
  axes.set_xlim(*panel.xlim)
  if panel.falls:
    axes.invert_xaxis()
  axes.grid(alpha=0.3)
  axes.legend(fontsize="small")


def _label_log(axis) -> None:
  """Plain numbers at the powers of a logarithmic axis; where it shows fewer than two of these, also
  between them, as one label says nothing of a scale.
  """

  def between(value: float, _) -> str:
    low, high = sorted(axis.get_view_interval())
    if sum(low <= at <= high for at in axis.get_majorticklocs()) > 1:
      return ""
    digit = value / 10 ** math.floor(math.log10(value))
    labelled = (2, 3, 4, 5, 6, 8) if high <= 10 * low else (2, 5)  # more would run into each other
    is_between_digits = abs(digit - round(digit)) > 1e-6
    return f"{value:g}" if is_between_digits or round(digit) in labelled else ""

  axis.set_major_formatter(lambda value, _: f"{value:g}")
  axis.set_minor_formatter(between)


def _is_power_of_2(x: float) -> bool:
  return x > 0 and math.log2(x).is_integer()


def _bars(axes, panel: Bars) -> None:
  groups = list(panel.values)
  width = 0.8 if panel.is_stacked else 0.8 / len(panel.names)
  bottoms = [0.0] * len(groups)
  for i, name in enumerate(panel.names):
    offset = 0.0 if panel.is_stacked else (i - (len(panel.names) - 1) / 2) * width
    at = [place + offset for place in range(len(groups))]
    heights = [panel.values[group][i] or 0.0 for group in groups]
    colour = COLOURS[i % len(COLOURS)]
    axes.bar(at, heights, width, bottom=bottoms if panel.is_stacked else 0, color=colour,
             label=name)  # fmt: skip
    if panel.is_stacked:
      bottoms = [bottom + height for bottom, height in zip(bottoms, heights)]
      continue
    for place, group in zip(at, groups):
      if panel.values[group][i] is None:
        axes.text(place, 0, " none", rotation=90, va="bottom", ha="center", fontsize="small")
      if (group, name) in panel.published:
        mark = "x" if panel.is_read else "o"
        axes.plot(place, panel.published[group, name], mark, color="black", fillstyle="none",
                  markersize=8)  # fmt: skip
  if panel.published:
    label = "published" + (", read off a plot" if panel.is_read else "")
    axes.plot([], [], "x" if panel.is_read else "o", color="black", fillstyle="none", label=label)
  for label, value in panel.lines.items():
    axes.axhline(value, color="#666666", linestyle="--", linewidth=1.2, label=label)
  if panel.is_log_y:
    axes.set_yscale("log")
    _label_log(axes.yaxis)
  longest = max(map(len, groups))
  turn = {"rotation": 30, "ha": "right"} if len(groups) * longest > 40 else {}
  axes.set_xticks(range(len(groups)), groups, **turn)
  axes.set(title=panel.title, ylabel=panel.y)
  axes.grid(axis="y", alpha=0.3)
  _legend_above(axes)


def _legend_above(axes) -> None:
  """Makes room for the legend above all that is drawn."""
  labels = axes.get_legend_handles_labels()[1]
  columns = 2 if max(map(len, labels)) > 12 else 3
  drawn = 1 - 0.03 - 0.07 * math.ceil(len(labels) / columns)
  low, high = axes.get_ylim()
  if axes.get_yscale() == "log":
    axes.set_ylim(low, low * (high / low) ** (1 / drawn))
  else:
    axes.set_ylim(low, low + (high - low) / drawn)
  axes.legend(fontsize="small", loc="upper left", ncols=columns, columnspacing=1, handlelength=1.5)


def _lanes(axes, panel: Lanes) -> None:
  for place, lane in enumerate(reversed(panel.lanes.values())):
    for kind, colour in KIND_COLOURS.items():
      bars = [(start, end - start) for start, end, own in lane if own == kind]
      axes.broken_barh(bars, (place - 0.35, 0.7), facecolor=colour, edgecolor="white",
                       linewidth=0.5)  # fmt: skip
  for kind in {own: None for lane in panel.lanes.values() for _, _, own in lane}:
    axes.plot([], [], "s", color=KIND_COLOURS[kind], label=kind)
  axes.set_yticks(range(len(panel.lanes)), list(panel.lanes)[::-1])
  axes.set(title=panel.title, xlabel=panel.x)
  axes.set_xlim(*panel.xlim)
  axes.set_ylim(-0.5, len(panel.lanes) - 0.5)
  _legend_above(axes)
