"""The picture of a fit: whole steps as measured and as the latency model has them."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.figures.serving import KIND_COLOURS, STYLE


def draw_fit(
  points: Sequence[Any], predicted_s: Sequence[float], path: pathlib.Path, title: str
) -> Any:
  """Writes the times of all steps against those fitted, and the errors over the times."""
  import matplotlib as mpl
  import matplotlib.figure

  with mpl.rc_context(STYLE):
    figure = mpl.figure.Figure(figsize=(11, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for kind, colour in KIND_COLOURS.items():
      own = [i for i, point in enumerate(points) if point.kind == kind]
      if not own:
        continue
      measured_ms = np.array([points[i].seconds * 1e3 for i in own])
      fitted_ms = np.array([predicted_s[i] * 1e3 for i in own])
      style = dict(color=colour, marker="o", linestyle="none", markersize=6, label=kind)
      left.plot(measured_ms, fitted_ms, **style)
      right.plot(measured_ms, 100 * (fitted_ms / measured_ms - 1), **style)
    ends_ms = [1e3 * f(point.seconds for point in points) for f in (min, max)]
    left.plot(ends_ms, ends_ms, color="#888888", linewidth=1, zorder=0)
    left.set(xscale="log", yscale="log", xlabel="measured (ms)", ylabel="fitted (ms)", title=title)
    right.set(xscale="log", xlabel="measured (ms)", ylabel="error (%)", title="Error of the fit")
    right.axhline(0, color="#888888", linewidth=1, zorder=0)
    for axes in (left, right):
      axes.grid(color="#dddddd")
      axes.legend()
    figure.savefig(path, dpi=120)
  return figure
