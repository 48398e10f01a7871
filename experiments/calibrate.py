"""Fits a device to published operator timings and prints its entry for `configs/hardware.py`.

    python -m experiments.calibrate --data=../shared/data --hardware=h100

`--data` is the folder that has `measured` in it. `--check=false` leaves out the table of steps that
the fit never saw. Takes 10 s. `experiments.profile_steps` fits the device at hand instead.
"""

from __future__ import annotations

import dataclasses
import pathlib
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from absl import flags

from configs.hardware import FITTED_FROM
from experiments.program import FLAGS, ROOT, main
from experiments.validation.steps import Source, compared, rows_of, source_of, table
from pdjax.core.names import pick
from pdjax.sim.fitting import Errors, Timing, predict
from pdjax.sim.hardware import Curve, Fit


class Job(NamedTuple):
  name: str
  source: Source
  check: bool


def define_flags() -> None:
  flags.DEFINE_string("hardware", None, f"one of {', '.join(FITTED_FROM)}")
  flags.DEFINE_string("data", str(ROOT.parent / "shared" / "data"), "the folder of published data")
  flags.DEFINE_bool("check", True, "show how far off steps are that the fit never saw")


def prepare() -> Job:
  if FLAGS.hardware is None:
    raise ValueError(f"--hardware is missing: one of {', '.join(FITTED_FROM)}")
  data = pathlib.Path(FLAGS.data)
  if not (data / "measured").is_dir():
    raise ValueError(f"--data={data} has no folder 'measured'")
  source = pick(FITTED_FROM, FLAGS.hardware, "calibrated device")
  return Job(FLAGS.hardware, source_of(source, data), FLAGS.check)


def run(job: Job) -> int:
  timings, fitted = job.source.timings(), rounded(job.source.fit())
  print(f"{job.name}: {len(timings)} timings of {job.source.name}\n")
  for ops, errors in errors_by_operator(job.source, fitted, timings).items():
    print(f"  {' + '.join(ops):<42}{errors.num_points:>6}  {errors}")
  print(f"\n{entry(fitted)}")
  if job.check:
    print(f"\nsteps that were not fitted\n\n{table(rows_of(compared(job.source, fitted)))}")
  return 0


def rounded(fitted: Fit) -> Fit:
  """A copy with three significant digits: more is noise."""

  def short(value: Any) -> Any:
    if isinstance(value, tuple):
      return tuple(map(short, value))
    return float(f"{value:.3g}") if isinstance(value, float) else value

  return Fit(
    **{field.name: short(getattr(fitted, field.name)) for field in dataclasses.fields(Fit)}
  )


def errors_by_operator(
  source: Source, fitted: Fit, timings: list[Timing]
) -> dict[tuple[str, ...], Errors]:
  by_ops: dict[tuple[str, ...], list[Timing]] = {}
  for timing in timings:
    by_ops.setdefault(timing.ops, []).append(timing)
  return {
    ops: Errors.of(
      predict(fitted, group, source.device, source.link), [timing.seconds for timing in group]
    )
    for ops, group in by_ops.items()
  }


def entry(fitted: Fit) -> str:
  """The lines that go into `configs/hardware.py`: what differs from an ideal device."""
  ideal = Fit()
  lines = []
  for field in dataclasses.fields(Fit):
    value = getattr(fitted, field.name)
    if field.name == "all_reduces" and value:
      lines += ["  all_reduces=(", *_curve_lines(value), "  ),"]
    elif value != getattr(ideal, field.name):
      lines.append(f"  {field.name}={value!r},")
  return "\n".join(["Fit(", *lines, ")"])


def _curve_lines(curves: Iterable[tuple[int, Curve]]) -> Iterator[str]:
  for devices, curve in curves:
    points = ", ".join(f"({size},\0{seconds!r})" for size, seconds in curve)
    whole = f"    ({devices},\0({points})),"
    for line in textwrap.wrap(whole, 96, subsequent_indent=" " * 9):
      yield line.replace("\0", " ")


if __name__ == "__main__":
  define_flags()
  main(prepare, run)
