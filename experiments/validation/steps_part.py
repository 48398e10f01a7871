"""The part of the validation suite about single steps."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

from experiments.validation.page import Reached, Section
from experiments.validation.replay import markdown_table
from experiments.validation.steps import TARGETS, step_rows


def part(data_dir: pathlib.Path, show: Callable[[str], None]) -> Section:
  """A row for each source, group and kind of step."""
  title = "Step times"
  folder = data_dir / "measured"
  if not folder.is_dir():
    return Section(title=title, missing="there is no folder measured")
  show("step times: fitting half of the operators of each source")
  rows, missing = step_rows(data_dir)
  if not rows:
    return Section(title=title, missing="; ".join(missing))
  words = {True: "yes", False: "**no**", None: ""}
  table = [
    ("source", "steps", "kind", "models", "n", "error, %: median / p95", "bias, %", "asked", "met")
  ]
  table += [
    (
      row.source,
      row.group,
      row.kind,
      row.models,
      f"{row.errors.num_points:,}",
      f"{row.errors.median:.1f} / {row.errors.p95:.1f}",
      f"{row.errors.bias:+.1f}",
      "" if row.target is None else "{:g} / {:g}".format(*row.target),
      words[row.is_reached],
    )
    for row in rows
  ]
  reached = []
  for group, (median, p95) in TARGETS.items():
    verdicts = [row.is_reached for row in rows if row.group == group]
    if verdicts:
      reached.append(
        Reached(
          f"Step times, {group}: absolute error, median / p95",
          f"{median:g} / {p95:g} %",
          f"by {sum(verdicts)} of {len(verdicts)} rows",
          all(verdicts),
        )
      )
  text = f"""Steps of an engine, or sums of what their operators took. Of each source (a device and
an engine) half of the points of one model's operators were fitted, and half of the points of what
belongs to no model: elementwise operators and all-reduces. Of the latter a fit keeps what they take
by size; it sees both ends and one of every two sizes that the model's steps have. (aiconfigurator
timed messages of 2 ** n bytes: what a size between them takes is read off the line from one to the
next, here and in what is fitted.) The steps:

- held out: of the other half. Of Splitwise, whole iterations over 2, 4 and 8 devices together.
- other TP: the same model over other numbers of devices. Operators of their sizes were not fitted,
  and all-reduces of as many bytes as some that were are left away.
- other models: those of the column, the same left away. aiconfigurator's matrices of all models are
  interpolated in one table of sizes, of which the fitted model's are a part.
- apart: contexts that a model was not made for, and Splitwise's TP 2, batch 64 rows.
- fused: one kernel for the attention of prompts and decodes, by its measured table (every second
  point of it), by a fit, or taken for two kernels.
- held, tables: the held-out steps by tables of the fitted half.

A row has all models of its column together. Fits begin with priors, round figures of these very
fits, which decide only what the timings leave open. Which files are read, and how, is in
`experiments/validation/steps.py`.

{markdown_table(table)}"""
  if missing:
    text += "\n\nNot run: " + "; ".join(missing) + "."
  return Section(title=title, reached=reached, text=text)
