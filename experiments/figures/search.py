"""Pictures of searches: frontiers, placements, budgets. Need the extra `[figures]`.

Every function writes a picture to `path` (the ending chooses the format).
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence

from experiments.searching.drive import RateSearch
from pdjax.analysis.replan import Window
from pdjax.analysis.targets import Stalls

# Okabe and Ito's palette
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#000000")
LIMIT = "#D55E00"
MOST_BARS = 24


def _figure(rows: int = 1, **sizes):
  try:
    from matplotlib.figure import Figure
  except ImportError as error:
    raise ImportError("pictures need matplotlib: pip install 'pdjax[figures]'") from error
  figure = Figure(layout="constrained", **sizes)
  return figure, figure.subplots(rows, sharex=rows > 1)


def draw_frontier(searches: Sequence[RateSearch], path: pathlib.Path) -> None:
  """What each search saw over the rate a device, and the limit. Filled: it passed."""
  figure, axes = _figure(figsize=(8, 5))
  for i, search in enumerate(searches):
    colour = COLOURS[i % len(COLOURS)]
    points = sorted(
      (o.rate_rps / search.num_devices, value, search.target.is_met(o))
      for o in search.outcomes
      if (value := search.target.value(o)) is not None
    )
    if not points:
      continue
    axes.plot(*zip(*((rate, value) for rate, value, _ in points)), color=colour, label=search.name)
    for rate, value, is_met in points:
      axes.plot(rate, value, "o", color=colour, fillstyle="full" if is_met else "none")
    if search.per_device_rps is not None:
      axes.axvline(search.per_device_rps, color=colour, linestyle=":", linewidth=1)
  target = searches[0].target
  axes.axhline(target.limit, color=LIMIT, linestyle="--", label=target.label)
  axes.set_xscale("log")
  most = max((o.rate_rps / s.num_devices for s in searches for o in s.outcomes), default=1.0)
  axes.set_xlim(left=most / 64)  # without the points of next to no load
  axes.set_xlabel("requests a second and device")
  is_itl = isinstance(target, Stalls)
  if is_itl:
    axes.set_yscale("log")
  axes.set_ylabel("ITL p99 (s)" if is_itl else "share of requests")
  axes.legend(fontsize="small")
  axes.set_title(f"{searches[0].template.config.model}: filled points pass")
  figure.savefig(path, dpi=120)


def draw_bars(
  groups: Mapping[str, Mapping[str, float]], label: str, title: str, path: pathlib.Path
) -> None:
  """A bar for each name of each group, the largest first."""
  bars = [(value, name, group) for group, own in groups.items() for name, value in own.items()]
  bars = sorted(bars, reverse=True)[:MOST_BARS]
  figure, axes = _figure(figsize=(8, 1.5 + 0.28 * len(bars)))
  for colour, group in zip(COLOURS, groups):
    own = [(place, value) for place, (value, _, of) in enumerate(bars) if of == group]
    axes.barh([place for place, _ in own], [v for _, v in own], color=colour, label=group)
  axes.set_yticks(range(len(bars)), [name for _, name, _ in bars])
  axes.invert_yaxis()
  axes.set_xlabel(label)
  axes.set_title(title)
  axes.tick_params(axis="y", labelsize="small")
  axes.legend(fontsize="small")
  figure.savefig(path, dpi=120)


def draw_budgets(
  step_s: Mapping[int, float], capacity_rps: Mapping[int, float], itl_s: float, path: pathlib.Path
) -> None:
  """The longest step and the capacity over the token budget."""
  figure, axes = _figure(figsize=(8, 5))
  axes.plot(list(step_s), list(step_s.values()), "o-", color=COLOURS[0], label="longest step")
  axes.axhline(itl_s, color=LIMIT, linestyle="--", label=f"ITL SLO {itl_s:.3g} s")
  axes.set_xscale("log", base=2)
  axes.set_xticks(list(step_s), [str(budget) for budget in step_s])
  axes.set_xlabel("token budget")
  axes.set_ylabel("longest step (s)")
  axes.set_ylim(bottom=0)
  right = axes.twinx()
  right.plot(
    list(capacity_rps), list(capacity_rps.values()), "s-", color=COLOURS[2], label="capacity"
  )
  right.set_ylabel("capacity (requests a second)")
  right.set_ylim(bottom=0)
  figure.legend(loc="outside upper center", ncols=3)
  figure.savefig(path, dpi=120)


def draw_windows(every: Sequence[Window], planned: Sequence[Window], path: pathlib.Path) -> None:
  """Rate and mean lengths over time; where a placement was searched."""
  names = {
    "rate_rps": "requests a second",
    "mean_prompt_tokens": "prompt tokens",
    "mean_output_tokens": "output tokens",
  }
  figure, rows = _figure(rows=3, figsize=(8, 6))
  for axes, (name, label) in zip(rows, names.items(), strict=True):
    axes.plot([w.start_s for w in every], [getattr(w, name) for w in every], ".-", color=COLOURS[0])
    for window in planned:
      axes.axvline(window.start_s, color=LIMIT, linestyle=":")
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0)
  rows[-1].set_xlabel("time (s); dotted: a placement was searched")
  figure.savefig(path, dpi=120)
