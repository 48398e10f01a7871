"""Fits a device to published operator timings and prints its entry for `configs/hardware.py`.

    python -m experiments.calibrate --data=../shared/data --hardware=h100

`--data` is the folder that has `measured` in it. `--check=false` leaves out the table of steps that
the fit never saw. Takes 10 s. `experiments.profile_steps` fits the device at hand instead.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import NamedTuple

from absl import flags

from configs.hardware import FITTED_FROM
from experiments.program import FLAGS, ROOT, main
from experiments.validation.steps import Source, compared, rows_of, source_of, table
from pdjax.core.names import pick
from pdjax.sim.fitting import Errors, Timing, predict
from pdjax.sim.hardware import Fit


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
  values = {k: v if v is None else float(f"{v:.3g}") for k, v in dataclasses.asdict(fitted).items()}
  return Fit(**values)


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
  lines = [
    f"  {field.name}={getattr(fitted, field.name)!r},"
    for field in dataclasses.fields(Fit)
    if getattr(fitted, field.name) != getattr(ideal, field.name)
  ]
  return "\n".join(["Fit(", *lines, ")"])


if __name__ == "__main__":
  define_flags()
  main(prepare, run)
