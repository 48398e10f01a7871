"""Pictures of a diagnosis, and of how often one is right. Need the extra `[figures]`.

Every function writes a picture to `path` (the ending chooses the format) and returns the figure.
"""

from __future__ import annotations

import collections
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.figures.serving import COPY_COLOUR, KIND_COLOURS, PHASES, STYLE, _matplotlib
from pdjax.analysis.diagnose import STALL_GAPS, Cause, Diagnosis, Observed, Symptom

MOST_BINS = 60
LEAST_DRAWN = 1e-3  # of all bars: what is less cannot be seen, and has no place in the legend
# Those of phases where a cause is one; the others of Okabe and Ito's palette.
COLOURS = {
  Cause.QUEUEING: PHASES["queue_s"][1],
  Cause.INTERFERENCE: KIND_COLOURS["mixed"],
  Cause.MEMORY: KIND_COLOURS["decode"],
  Cause.PREEMPTION: "#D55E00",
  Cause.HANDOFF_WAIT: PHASES["handoff_wait_s"][1],
  Cause.LINK: COPY_COLOUR,
  Cause.CLIENT: "#000000",
  Cause.OWN_PREFILL: KIND_COLOURS["prefill"],
  Cause.UNEXPLAINED: "#882255",
}
FINE = "#DDDDDD"


def draw_diagnosis(
  by_id: Mapping[int, Observed], found: Diagnosis, path: pathlib.Path, title: str
) -> Any:
  """Writes TTFT over the time of arrival, with what late requests lost by cause, and long gaps.

  `by_id` are the requests by the ids that the losses have; without arrivals their order is time.
  """
  mpl = _matplotlib()
  with mpl.rc_context(STYLE):
    figure = mpl.figure.Figure(figsize=(13, 8), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    at_s = {i: float(n) if r.arrival_s is None else r.arrival_s
            for n, (i, r) in enumerate(by_id.items())}  # fmt: skip
    shown = _draw_ttfts(above, by_id, at_s, found)
    shown |= _draw_gaps(below, by_id, at_s, found)
    named = [cause for cause in COLOURS if cause in shown]
    handles = [mpl.patches.Patch(color=COLOURS[cause], label=str(cause)) for cause in named]
    figure.legend(handles=handles, loc="outside right upper")
    has_arrivals = all(r.arrival_s is not None for r in by_id.values())
    below.set_xlabel("time (s)" if has_arrivals else "requests in their order")
    figure.suptitle(title)
    figure.savefig(path)
    return figure


def _draw_ttfts(axes, by_id, at_s, found: Diagnosis) -> set[Cause]:
  """Means of bins of the time of arrival, each cut into what was lost to whom and the rest."""
  edges = np.linspace(min(at_s.values()), max(at_s.values()) + 1e-9, MOST_BINS + 1)
  bin_of = {i: min(MOST_BINS - 1, int(np.searchsorted(edges, at, side="right")) - 1)
            for i, at in at_s.items()}  # fmt: skip
  counts = np.bincount(list(bin_of.values()), minlength=MOST_BINS)
  parts: dict[Cause, np.ndarray] = collections.defaultdict(lambda: np.zeros(MOST_BINS))
  rest = np.zeros(MOST_BINS)
  for i, request in by_id.items():
    rest[bin_of[i]] += request.ttft_s
  for loss in found.losses:
    if loss.symptom is Symptom.LATE:
      scale = min(1.0, by_id[loss.request_id].ttft_s / max(sum(loss.lost_s.values()), 1e-12))
      for cause, lost_s in loss.lost_s.items():
        parts[cause][bin_of[loss.request_id]] += scale * lost_s
        rest[bin_of[loss.request_id]] -= scale * lost_s
  bottom = np.zeros(MOST_BINS)
  each = np.maximum(counts, 1)
  bars = [(FINE, rest), *((COLOURS[c], parts[c]) for c in COLOURS if c in parts)]
  for colour, seconds in bars:
    height = np.maximum(seconds, 0.0) / each
    axes.bar(edges[:-1], height, np.diff(edges), bottom, align="edge", color=colour)
    bottom += height
  axes.axhline(found.slo.ttft_s, color="#666666", linestyle="--")
  axes.set(
    title="TTFT, and what late requests lost to each cause (dashed: target)", ylabel="mean (s)"
  )
  least_s = LEAST_DRAWN * (rest.sum() + sum(seconds.sum() for seconds in parts.values()))
  return {cause for cause, seconds in parts.items() if seconds.sum() > least_s}


def _draw_gaps(axes, by_id, at_s, found: Diagnosis) -> set[Cause]:
  """The longest gap of each request; of those that are stalled in the colour of what did it."""
  stalled = {loss.request_id: loss for loss in found.losses if loss.symptom is Symptom.STALLED}
  fine = [(at_s[i], r.longest_gap_s) for i, r in by_id.items() if i not in stalled and r.itl_s]
  if fine:
    axes.plot(*zip(*fine), "o", markersize=3, color=FINE)
  by_cause: dict[Cause, list[tuple[float, float]]] = collections.defaultdict(list)
  for i, loss in stalled.items():
    at = at_s[i] if loss.at_s is None else loss.at_s
    by_cause[loss.main].append((at, by_id[i].longest_gap_s))
  for cause, points in by_cause.items():
    axes.plot(*zip(*points), "o", markersize=5, color=COLOURS[cause])
  axes.axhline(STALL_GAPS * found.slo.tpot_s, color="#666666", linestyle="--")
  axes.set(
    title=f"Longest gap of each request (dashed: {STALL_GAPS:g} TPOT targets, a stall)",
    ylabel="gap (s)",
  )
  if fine or by_cause:
    axes.set_yscale("log")
  return set(by_cause)


def draw_confusion(
  matrices: Mapping[str, Mapping[tuple[Cause, Cause], int]],
  causes: Sequence[Cause],
  path: pathlib.Path,
) -> Any:
  """Writes how often what was injected (a row) was called what (a column), for each way to look."""
  mpl = _matplotlib()
  columns = [*causes, *sorted({f for m in matrices.values() for _, f in m} - set(causes))]
  with mpl.rc_context(STYLE):
    figure = mpl.figure.Figure(figsize=(9 * len(matrices), 8), layout="constrained")
    for axes, (name, counts) in zip(
      figure.subplots(1, len(matrices), sharey=True, squeeze=False)[0], matrices.items()
    ):
      values = np.array([[counts.get((row, column), 0) for column in columns] for row in causes])
      axes.imshow(values, cmap="Blues", vmin=0)
      for (row, column), value in np.ndenumerate(values):
        if value:
          colour = "white" if value > values.max() / 2 else "black"
          axes.text(column, row, str(value), ha="center", va="center", color=colour)
      right = sum(counts.get((cause, cause), 0) for cause in causes)
      axes.set(title=f"{name}: {right} of {values.sum()} right", xlabel="diagnosed")
      axes.set_xticks(range(len(columns)), columns, rotation=50, ha="right")
      axes.set_yticks(range(len(causes)), causes)
      axes.spines[:].set_visible(False)
    figure.axes[0].set_ylabel("injected")
    figure.savefig(path)
    return figure
