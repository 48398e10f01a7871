"""Pictures of served runs: latency distributions, timelines, phases. Need the extra `[figures]`.

A run is `request_records(log)` under the name of its strategy. Every function writes a picture to
`path` (the ending chooses the format) and returns the figure. Colours mean the same in all of them.
"""

from __future__ import annotations

import itertools
import pathlib
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from pdjax.analysis.verdict import is_hand_off
from pdjax.core.events import Arrived, Copied, Event, Failed, Preempted, each_step
from pdjax.metrics.goodput import Slo
from pdjax.metrics.latency import (
  RequestRecord,
  interference,
  itls_s,
  mean_phases,
  outcomes,
  request_records,
  ttfts_s,
)
from pdjax.metrics.utilisation import pool_usage, span_s

Runs = Mapping[str, Mapping[int, RequestRecord]]

# Okabe and Ito's palette, safe for colour-blind readers (jfly.uni-koeln.de/color).
KIND_COLOURS = {"prefill": "#E69F00", "decode": "#0072B2", "mixed": "#009E73"}
COPY_COLOUR = "#CC79A7"
PHASES = {  # field of Phases: (name, colour)
  "queue_s": ("queue", "#999999"),
  "prefill_s": ("prefill", KIND_COLOURS["prefill"]),
  "handoff_wait_s": ("hand-off wait", "#F0E442"),
  "copy_s": ("copy", COPY_COLOUR),
  "decode_s": ("decode", KIND_COLOURS["decode"]),
}
STRATEGY_STYLES = (  # told apart by line too, for print without colour
  {"color": "#000000", "linestyle": "-"},
  {"color": "#D55E00", "linestyle": "--"},
  {"color": "#56B4E9", "linestyle": "-."},
  {"color": "#882255", "linestyle": ":"},
  {"color": "#117733", "linestyle": (0, (5, 1, 1, 1, 1, 1))},
)
SLO_COLOUR = "#666666"
GAP_COLOUR = "#B30000"
LANE_HEIGHT = 0.5  # of the 1 between lanes
_LEGEND_ORDER = (*KIND_COLOURS, "long", "copy", "preempted", "failed")
STYLE = {
  "font.size": 13,
  "axes.titlesize": 15,
  "axes.titlelocation": "left",
  "axes.spines.top": False,
  "axes.spines.right": False,
  "axes.axisbelow": True,
  "xtick.major.pad": 7,
  "legend.frameon": False,
  "legend.fontsize": 12,
  "figure.titlesize": 17,
}


def draw_latency(runs: Runs, slo: Slo | None, path: pathlib.Path) -> Any:
  """Writes the distributions of TTFT and ITL, a curve per strategy.

  TTFT counts all requests: a curve that ends below 100 % lacks those that got no token.
  """
  mpl = _matplotlib()
  with mpl.rc_context(STYLE):
    ncols = 2 if max(map(len, runs), default=0) <= 20 else 1  # of the legends below
    num_rows = (len(runs) + (slo is not None) + ncols - 1) // ncols
    size = (13, 5.4 + 0.3 * num_rows)
    figure = mpl.figure.Figure(figsize=size, layout="constrained")
    left, right = figure.subplots(1, 2)
    for (name, records), style in zip(runs.items(), itertools.cycle(STRATEGY_STYLES)):
      itl_s = itls_s(records)
      _draw_shares(left, ttfts_s(records), len(records), 1, name, style)
      _draw_shares(right, itl_s, len(itl_s), 1e3, name, style)
    if slo is not None:
      line = {"color": SLO_COLOUR, "linewidth": 1.5, "zorder": 1}
      left.axvline(slo.ttft_s, label=f"SLO: TTFT {_seconds(slo.ttft_s)}", **line)
      right.axvline(slo.tpot_s * 1e3, label=f"SLO: TPOT {slo.tpot_s * 1e3:.3g} ms", **line)
    left.set(title="Time to first token", xlabel="TTFT (s)", ylabel="share of requests")
    right.set(title="Time between tokens", xlabel="ITL (ms)", ylabel="share of gaps")
    for axes in (left, right):
      axes.set(xscale="log", ylim=(0, 1.02))
      low, high = axes.get_xlim()
      subs = (1, 2, 5) if high < 1e3 * low else (1,)  # as many labels as have room
      axes.xaxis.set_major_locator(mpl.ticker.LogLocator(subs=subs, numticks=99))
      axes.xaxis.set_major_formatter(mpl.ticker.FuncFormatter(lambda x, _: f"{x:g}"))
      axes.xaxis.set_minor_formatter(mpl.ticker.NullFormatter())
      axes.yaxis.set_major_formatter(mpl.ticker.PercentFormatter(1))
      axes.grid(alpha=0.3)
      axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=ncols)
    figure.suptitle("How long users wait", x=0.01, ha="left", weight="bold")
    return _save(figure, path)


def draw_timeline(
  logs: Mapping[str, Iterable[Event]],
  path: pathlib.Path,
  title: str,
  *,
  window_s: tuple[float, float] | None = None,
) -> Any:
  """Writes what each pool did when: a panel per run on one time axis, a lane per pool in it.

  Marked in each panel: steps that prefill a long prompt, copies as arrows between lanes, and the
  longest gap that a running request saw beside a long prompt (`metrics.latency.interference`).
  `window_s` shows a part of the runs; counts and busy shares still are those of the whole.
  """
  mpl = _matplotlib()
  logs = {name: list(log) for name, log in logs.items()}
  usages = {name: pool_usage(log) for name, log in logs.items()}
  num_lanes = [max(1, len(usage)) for usage in usages.values()]
  with mpl.rc_context(STYLE):
    size = (16, 1.8 + sum(0.5 + 0.75 * n for n in num_lanes))
    figure = mpl.figure.Figure(figsize=size, layout="constrained")
    panels = figure.subplots(
      len(logs), sharex=True, squeeze=False, gridspec_kw={"height_ratios": num_lanes}
    )[:, 0]
    handles: dict[str, Any] = {}
    for axes, (name, log) in zip(panels, logs.items()):
      _draw_lanes(mpl, axes, log, usages[name], window_s, handles)
      axes.set_title(name)
      axes.margins(x=0.01)
    panels[-1].set_xlabel("time (s)")
    if window_s is not None:
      panels[-1].set_xlim(*window_s)
    for axes, log in zip(panels, logs.values()):  # only now is it known what is in view
      _draw_longest_gap(axes, log)
    figure.suptitle(title, x=0.01, ha="left", weight="bold")
    if handles:
      shown = [handles[key] for key in _LEGEND_ORDER if key in handles]
      figure.legend(handles=shown, loc="outside lower center", ncols=len(shown))
    return _save(figure, path)


def _draw_lanes(
  mpl: Any,
  axes: Any,
  log: Sequence[Event],
  usage: Mapping[str, Any],
  window_s: tuple[float, float] | None,
  handles: dict[str, Any],
) -> None:
  """Draws one run; adds what it drew to the legend's `handles`."""
  lanes = {pool: -i for i, pool in enumerate(usage)}
  start_s, end_s = window_s or (0.0, span_s(log))
  steps = list(each_step(log))
  for kind, colour in KIND_COLOURS.items():
    of_kind = [e for e in steps if e.kind == kind]
    # White edges part the steps, but would bleach those that are thin as a line.
    step_s = np.median([e.end_s - e.start_s for e in of_kind]) if of_kind else 0.0
    edge = 0.5 if step_s > 0.003 * (end_s - start_s) else 0.0
    for pool, y in lanes.items():
      bars = [(e.start_s, e.end_s - e.start_s) for e in of_kind if e.pool == pool]
      where = (y - LANE_HEIGHT / 2, LANE_HEIGHT)
      axes.broken_barh(bars, where, facecolor=colour, edgecolor="white", linewidth=edge)
    if of_kind:
      handles[kind] = mpl.patches.Patch(color=colour, label=f"{kind} step")
  long = _long_prompts(log)
  for pool, y in lanes.items():
    bars = [
      (e.start_s, e.end_s - e.start_s)
      for e in steps
      if e.pool == pool and long.intersection(e.prefill_ids)
    ]
    where = (y - LANE_HEIGHT / 2 - 0.1, 0.1)
    axes.broken_barh(bars, where, facecolor="black")
  if long:
    handles["long"] = mpl.patches.Patch(color="black", label="long prompt")
  copies = [e for e in log if isinstance(e, Copied) and {e.source, e.target} <= set(lanes)]
  for copy in copies:
    down = 1 if lanes[copy.source] > lanes[copy.target] else -1
    arrow = axes.annotate(
      "",
      xy=(copy.end_s, lanes[copy.target] + down * LANE_HEIGHT / 2),
      xytext=(copy.start_s, lanes[copy.source] - down * LANE_HEIGHT / 2),
      arrowprops={
        "arrowstyle": "-|>",
        "color": COPY_COLOUR,
        "lw": 1.4,
        "shrinkA": 0,
        "shrinkB": 0,
      },
    )
    arrow.arrow_patch.set_clip_box(axes.bbox)
  if copies:
    style = {"color": COPY_COLOUR, "linewidth": 2, "marker": ">", "markersize": 8}
    handles["copy"] = mpl.lines.Line2D([], [], label="copy", **style)
  for kind, name, marker in ((Preempted, "preempted", "v"), (Failed, "failed", "X")):
    found = [(e.time_s, lanes[e.pool]) for e in log if isinstance(e, kind) and e.pool in lanes]
    if found:
      handles[name] = axes.plot(
        [time_s for time_s, _ in found],
        [y + LANE_HEIGHT / 2 + 0.09 for _, y in found],
        marker,
        color="black",
        markersize=8,
        label=name,
      )[0]
  labels = [f"{pool}\nbusy {used.busy_share:.0%}" for pool, used in usage.items()]
  axes.set_yticks(list(lanes.values()), labels)
  axes.tick_params(axis="y", length=0)
  axes.spines["left"].set_visible(False)
  axes.set(ylim=(0.6 - len(lanes), 0.55) if lanes else (-1, 1))
  axes.grid(axis="x", alpha=0.3)


def _draw_longest_gap(axes: Any, log: Sequence[Event]) -> None:
  """Draws the longest gap of a running request beside a long prompt over its lane, if in view."""
  found = interference(log) or interference(log, any_pool=True)
  if found is None:
    return
  record = request_records(log)[found.request_id]
  where = " (in its hand-off)" if is_hand_off(record, found.gap_s) else ""
  axes.set_title(
    f"longest gap of a running request beside a long prompt: {_seconds(found.gap_s)}{where}",
    loc="right",
    fontsize=13,
    color=GAP_COLOUR,
  )
  start_s, end_s = gap_span_s(record, found.gap_s)
  low_s, high_s = axes.get_xlim()
  if not low_s <= start_s <= end_s <= high_s:
    return
  lanes = {pool: -i for i, pool in enumerate(pool_usage(log))}
  y = lanes[found.pool] + LANE_HEIGHT / 2 + 0.06
  axes.plot([start_s, end_s], [y, y], color=GAP_COLOUR, marker="|", linewidth=3, markersize=9)


def gap_span_s(record: RequestRecord, gap_s: float) -> tuple[float, float]:
  """From when to when the request waited its gap of `gap_s`."""
  i = record.itl_s.index(gap_s)
  return record.token_s[i], record.token_s[i + 1]


def _long_prompts(log: Sequence[Event]) -> set[int]:
  """Requests whose prompt is long beside the others: four times the median, as `interference`."""
  tokens = {e.request_id: e.num_prompt_tokens for e in log if isinstance(e, Arrived)}
  if not tokens:
    return set()
  least = 4 * statistics.median(tokens.values())
  return {request_id for request_id, n in tokens.items() if n >= least}


def draw_phases(runs: Runs, path: pathlib.Path) -> Any:
  """Writes where the time of a mean finished request went: a stacked bar per strategy."""
  mpl = _matplotlib()
  means = {name: mean_phases(records) for name, records in runs.items()}
  longest_s = max((mean.total_s for mean in means.values() if mean), default=0.0) or 1.0
  with mpl.rc_context(STYLE):
    figure = mpl.figure.Figure(figsize=(13, 2.6 + 0.9 * max(1, len(runs))), layout="constrained")
    axes = figure.subplots()
    for y, (name, mean) in enumerate(means.items()):
      left_s = 0.0
      for field, (_, colour) in PHASES.items():
        phase_s = getattr(mean, field) if mean else 0.0
        axes.barh(y, phase_s, left=left_s, height=0.6, color=colour)
        if phase_s > 0.08 * longest_s:  # room for the number
          dark = field == "decode_s"
          axes.text(
            left_s + phase_s / 2,
            y,
            _seconds(phase_s),
            ha="center",
            va="center",
            color="white" if dark else "black",
          )
        left_s += phase_s
      counts = outcomes(runs[name])
      total = f"{_seconds(left_s)}  (n={counts['finished']})" if mean else "nothing finished"
      axes.text(left_s + 0.01 * longest_s, y, total, va="center", weight="bold")
    axes.set_yticks(range(len(means)), list(means))
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set(xlabel="mean time per finished request (s)", xlim=(0, 1.22 * longest_s))
    axes.grid(axis="x", alpha=0.3)
    handles = [mpl.patches.Patch(color=colour, label=name) for name, colour in PHASES.values()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    figure.suptitle("Where the time of a request goes", x=0.01, ha="left", weight="bold")
    return _save(figure, path)


def _draw_shares(
  axes: Any, values: Sequence[float], n: int, scale: float, name: str, style: dict[str, Any]
) -> None:
  """A step at each value. `n` may count more than the values; then the curve ends below 1."""
  shares = np.arange(1, len(values) + 1) / max(1, n)
  x = np.sort(np.asarray(values, float)) * scale
  axes.step(
    np.concatenate([x[:1], x]),
    np.concatenate([[0.0], shares]) if len(x) else [],
    where="post",
    label=f"{name} (n={n})",
    linewidth=2.5,
    **style,
  )


def _seconds(time_s: float) -> str:
  if time_s >= 1:
    return f"{time_s:.2f} s"
  return f"{time_s * 1e3:.0f} ms" if time_s >= 0.01 else f"{time_s * 1e3:.1f} ms"


def _save(figure: Any, path: pathlib.Path) -> Any:
  figure.get_layout_engine().set(w_pad=0.12, h_pad=0.08)
  figure.savefig(path, dpi=130)
  return figure


def _matplotlib() -> Any:
  """matplotlib without pyplot: a figure belongs to who made it and needs no display.

  Raises:
    ImportError: matplotlib is missing, with what to install.
  """
  try:
    import matplotlib
    import matplotlib.figure
    import matplotlib.lines
    import matplotlib.patches
    import matplotlib.ticker
  except ImportError as error:
    raise ImportError("pictures need matplotlib: pip install 'pdjax[figures]'") from error
  return matplotlib
