"""The picture of a training run. Needs the extra `[figures]`."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np

from experiments.figures.serving import STYLE

_MEAN_STEPS = 50


def draw_losses(
  train: np.ndarray,  # [num_steps], NaN for steps to come
  held_out: np.ndarray,  # [num_steps + 1], NaN where not measured
  path: pathlib.Path,
) -> Any:
  """Writes the losses over the steps: of each step, their running mean, and on held-out text."""
  import matplotlib as mpl
  import matplotlib.figure

  train = train[~np.isnan(train)]
  measured = np.flatnonzero(~np.isnan(held_out))
  with mpl.rc_context(STYLE):
    figure = mpl.figure.Figure(figsize=(9, 5.4), layout="constrained")
    axes = figure.subplots()
    axes.plot(
      np.arange(len(train)), train, color="#56B4E9", linewidth=0.6, alpha=0.6, label="each step"
    )
    width = min(_MEAN_STEPS, len(train))
    if width > 1:
      mean = np.convolve(train, np.full(width, 1 / width), mode="valid")
      steps = np.arange(len(mean)) + (width - 1) / 2
      axes.plot(steps, mean, color="#0072B2", linewidth=2, label=f"mean of {width} steps")
    axes.plot(measured, held_out[measured], color="#D55E00", marker="o", markersize=4,
              linestyle="--", label="held out")  # fmt: skip
    axes.set(xlabel="step", ylabel="loss (nats a token)", title="Training the tiny model")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color="#dddddd")
    axes.legend()
    figure.savefig(path, dpi=120)
  return figure
