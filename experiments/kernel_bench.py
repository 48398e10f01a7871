"""Every attention kernel against the ceilings of one GPU and against what JAX users have today.

    python -m experiments.kernel_bench [--tune] [--out=DIR] [--limit_s=480]

First two ceilings: a bf16 matmul of random data, and a copy (bytes read plus written). Then each
case: ours on every backend, and libraries on contiguous K and V, after gathering the pages, or on
pages. All are first checked against the float32 reference; what is wrong is not timed, and what a
library refuses is a line that says why. `of ceiling` is the least time that the case's FLOPs and
bytes would take, over the time (what mostly reads may reach more than a copy does); `ratio` is the
time over that of the kernel that the engine runs (marked *), so above 1 the engine's is faster.
Then whole steps of Llama-3-8B with random weights through the engine's own executor
(kernel_steps.py). At last the targets, beside what was reached.

Times are of the device (kernel_timing.py), medians of calls in a row. They rotate over several sets
of pages (or copies of K and V), larger together than the L2 cache. V is scaled so that results are
again of unit variance, like the queries they become (kernel_cases.py).

On a machine without a GPU all sizes are tiny and Pallas kernels run in interpret mode: that proves
the program, and measures nothing. `kernel_bench.json` and `table.txt` are written after every case;
an interrupted run, or one out of time, keeps them and says what it skipped.

`--tune` instead tries a grid of tiles for each kernel and backend, and writes the fastest that are
right to `tuning.json`; copied to `pdjax/kernels/tuned.json`, the engine uses them on that chip.

The exit status is 1 where one of ours is wrong, or what the engine would run does not run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
from absl import flags

from experiments.kernel_cases import Problem, Sizes, Work, cpu_sizes, gpu_sizes
from experiments.kernel_contenders import (
  BACKENDS,
  GRIDS,
  Contender,
  contenders,
  engine_tuning,
  fresh,
  interpreted,
  is_whole,
  ours,
  tiles,
)
from experiments.kernel_steps import bench_engine, peaks_of
from experiments.kernel_timing import (
  Ceilings,
  DeviceLost,
  OutOfTime,
  check_time,
  device_s,
  measure_ceilings,
  refused,
)
from experiments.program import FLAGS, Progress, main, out_folder, whole_file
from pdjax.kernels.choice import chip_of
from pdjax.kernels.tile_config import Case, Chip, TileConfig
from pdjax.kernels.tuning import Tuned, table_text


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
  """What will be measured, and until when."""

  sizes: Sizes
  device: jax.Device
  out: pathlib.Path
  tune: bool
  limit_s: float
  deadline_s: float  # of time.monotonic

  @property
  def chip(self) -> Chip:
    return chip_of(self.device)


# A case -------------------------------------------------------------------------------------------


def measure(bench: Bench, ceilings: Ceilings, problem: Problem, contender: Contender) -> dict:
  """One row. What cannot run, in whatever way, is a row that says why."""
  check_time(bench.deadline_s)
  row: dict[str, Any] = {
    "case": problem.work.name,
    "name": contender.name,
    "kind": contender.kind,
    "is_chosen": contender.is_chosen,
    "config": contender.config and dataclasses.asdict(contender.config),
  }
  try:
    run = contender.build(problem)
    error = problem.error(run.out(jax.jit(run.call)(run.state, *run.sets[0])))
    row |= {"error": error, "tolerance": problem.tolerance}
    if not error <= problem.tolerance:  # nor is NaN
      return row | {"status": "wrong"}
    costs = problem.costs()
    time_s = device_s(run, ceilings.least_s(*costs), bench.sizes.sample_s, ceilings.empty_s)
    return row | ceilings.reached(*costs, time_s)
  except Exception as error:
    return row | refused(error)


def bench_case(bench: Bench, ceilings: Ceilings, work: Work) -> Iterator[dict]:
  """A row for each contender, the engine's choice first, with the ratio of the others to it."""
  problem, chosen_s = Problem(work, bench.sizes), None
  for contender in contenders(bench.chip, bench.sizes.case(work), work):
    row = measure(bench, ceilings, problem, contender)
    if contender.is_chosen:
      chosen_s = row.get("time_s")
    elif chosen_s and "time_s" in row:
      row["ratio"] = row["time_s"] / chosen_s
    yield row


# Tuning -------------------------------------------------------------------------------------------


def tune_case(bench: Bench, ceilings: Ceilings, works: list[Work], found: list) -> Iterator[dict]:
  """Tries the grid on up to two works of one case; appends the fastest to `found`.

  Fastest by the geometric mean of the times; a config that is refused or wrong on one is out.
  """
  case, chip = bench.sizes.case(works[0]), bench.chip
  problems = [Problem(work, bench.sizes) for work in works[:2]]
  best = None
  try:
    for config in itertools.islice(tiles(chip, case), bench.sizes.grid_size):
      names = GRIDS[config.backend, case.kernel]
      label = " ".join([config.backend, *(f"{name}={getattr(config, name)}" for name in names)])
      contender = Contender(label, "ours", functools.partial(ours, interpreted(config)), config)
      times = []
      for problem in problems:
        row = measure(bench, ceilings, problem, contender)
        yield row
        if row["status"] != "ok":
          break
        times.append(row["time_s"])
      else:
        if best is None or math.prod(times) < best[0]:
          best = (math.prod(times), config, times[0])
  finally:  # also when interrupted
    if best is not None:
      _, config, measured_s = best
      found.append(tuned_entry(chip, case, config, measured_s))


def tune_fresh(bench: Bench, ceilings: Ceilings, work: Work, found: list) -> Iterator[dict]:
  """Appends an entry to `found` if the library serves whole prompts faster than our tiles."""
  case, problem = bench.sizes.case(work), Problem(work, bench.sizes)
  config = next((entry.config for entry in found if entry.case == case), None)
  own = functools.partial(ours, config or engine_tuning(bench.chip, case).prefill)
  times = []
  for contender in (Contender("pdjax", "ours", own), Contender("tokamax", "contiguous", fresh)):
    row = measure(bench, ceilings, problem, contender)
    yield row
    times.append(row.get("time_s", math.inf))
  if times[1] < times[0]:
    case = dataclasses.replace(case, kernel="fresh")
    found.append(tuned_entry(bench.chip, case, TileConfig(backend="tokamax"), times[1]))


def tuned_entry(chip: Chip, case: Case, config: TileConfig, measured_s: float) -> Tuned:
  return Tuned(
    chip=chip.kind,
    case=case,
    config=config,
    measured_s=measured_s,
    date=time.strftime("%Y-%m-%d"),
    jax_version=jax.__version__,
  )


# Tables -------------------------------------------------------------------------------------------


def chosen(rows: list[dict], case: str, key: str) -> float | None:
  return next((row.get(key) for row in rows if row["case"] == case and row.get("is_chosen")), None)


def least_ratio(rows: list[dict], cases: tuple[str, ...], **wanted: str) -> float | None:
  """The smallest ratio of such rows: the best of the others."""
  ratios = [
    row["ratio"]
    for row in rows
    if row["case"] in cases and "ratio" in row
    if all(row[key] == value for key, value in wanted.items())
  ]
  return min(ratios, default=None)


def targets(rows: list[dict]) -> list[dict]:
  """What was aimed at on an H200, and what was reached; None where it was not measured."""
  prefill, decode = "chunk 2048 of 8k", "decode 64 x 4k"
  step = next((row for row in rows if row["case"] == "engine" and row["name"] == "decode 32"), {})
  both = (prefill, "fresh 8k")
  return [
    {"target": f"{prefill}: of the matmul rate", "wanted": 0.6,
     "reached": chosen(rows, prefill, "of_ceiling")},
    {"target": f"{' and '.join(both)}: speed over the best library on contiguous K and V",
     "wanted": 0.9, "reached": least_ratio(rows, both, kind="contiguous")},
    {"target": f"{' and '.join(both)}: speed over gathering first", "wanted": 1.0,
     "reached": least_ratio(rows, both, kind="gathered")},
    {"target": f"{decode}: of the copy rate", "wanted": 0.85,
     "reached": chosen(rows, decode, "of_ceiling")},
    {"target": f"{decode}: speed over the bundled paged attention", "wanted": 2.0,
     "reached": least_ratio(rows, (decode,), name="bundled paged")},
    {"target": "engine, decode 32: MBU", "wanted": 0.7, "reached": step.get("mbu")},
  ]  # fmt: skip


def row_label(row: dict) -> str:
  kind = f", {row['kind']}" if row["kind"] in ("contiguous", "gathered") else ""
  return f"  {'*' if row.get('is_chosen') else ' '} {row['name']}{kind}"


def row_text(row: dict) -> str:
  """What stands behind the label."""
  if row["status"] == "refused":
    return f"refused: {row['reason'][:120]}"
  if row["status"] == "wrong":
    return f"WRONG: error {row['error']:.2g}, allowed {row['tolerance']:.2g}"
  if row["kind"] == "saving":
    saved_s, apart_s = row["saved_s"], row["apart_s"]
    return f"saves {saved_s * 1e3:.2f} ms of {apart_s * 1e3:.2f} ms, {saved_s / apart_s:.0%}"
  is_step = row["kind"] == "step"
  text = f"{row['time_s'] * 1e3:11,.2f} ms" if is_step else f"{row['time_s'] * 1e6:11,.1f} us"
  text += f"{row['of_ceiling']:8.1%} of ceiling"
  text += f"{row['flops_per_s'] / 1e12:9.1f} TFLOP/s{row['bytes_per_s'] / 1e9:9.1f} GB/s"
  if "error" in row:
    text += f"  error {row['error']:.1e}"
  if "ratio" in row:
    text += f"  ratio {row['ratio']:.2f}"
  for name in ("mfu", "mbu"):
    if row.get(name) is not None:
      text += f"  {name.upper()} {row[name]:.1%}"
  return text


class Results:
  """The rows so far and their files. Grows, and is written after every case."""

  def __init__(self, bench: Bench):
    self.rows: list[dict] = []
    self.found: list[Tuned] = []
    self.ceilings: Ceilings | None = None
    self.skipped: list[str] = []
    self._bench = bench
    self._head = {
      "device": bench.device.device_kind,
      "is_measurement": bench.chip.platform == "gpu",
      "jax": jax.__version__,
      "date": time.strftime("%Y-%m-%d %H:%M"),
      "load_average": os.getloadavg()[0],
    }

  def head_text(self) -> str:
    label = "" if self._head["is_measurement"] else "CPU: not a measurement of a GPU\n"
    text = f"{label}{self._head['device']}, jax {self._head['jax']}, {self._head['date']}"
    if self.ceilings is not None:
      text += (
        f"\nceilings: matmul {self.ceilings.flops_per_s / 1e12:.1f} TFLOP/s, copy "
        f"{self.ceilings.bytes_per_s / 1e9:.1f} GB/s (read + written); an empty program takes "
        f"{self.ceilings.empty_s * 1e6:.0f} us"
      )
    return text

  def case_text(self, case: str) -> str:
    sizes = self._bench.sizes
    work = next((work for work in sizes.works if work.name == case), None)
    if work is not None:
      about = f"{work.kernel}, H {sizes.num_heads}, K {sizes.num_kv_heads}, h {sizes.head_dim}"
      about += f", {sizes.dtype}, pages of {work.page_size}"
    else:
      about = f"{sizes.engine.model.name}, {sizes.dtype}, steps in flight"
      peaks = peaks_of(self._bench.chip)
      if peaks is not None:
        about += f"; MFU and MBU of the data sheet's {peaks.peak_flops_per_s / 1e12:.0f} TFLOP/s "
        about += f"and {peaks.peak_bytes_per_s / 1e9:.0f} GB/s ({peaks.name})"
    rows = [row for row in self.rows if row["case"] == case]
    width = max(44, *(len(row_label(row)) for row in rows))
    lines = [f"{row_label(row):{width}} {row_text(row)}" for row in rows]
    return "\n".join([f"{case}: {about}", *lines])

  def end_text(self) -> str:
    lines = []
    if not self._bench.tune:
      lines = ["targets on an H200"]
      for target in targets(self.rows):
        reached, wanted = target["reached"], target["wanted"]
        verdict = "not measured"
        if reached is not None:
          verdict = f"{reached:.2f}, {'reached' if reached >= wanted else 'MISSED'}"
        lines.append(f"    {target['target']}, at least {wanted}: {verdict}")
    if self.skipped:
      lines.append(f"skipped: {'; '.join(self.skipped)}")
    return "\n".join(lines)

  def write(self) -> list[pathlib.Path]:
    result = self._head | {
      "ceilings": self.ceilings and self.ceilings._asdict(),
      "rows": self.rows,
      "targets": [] if self._bench.tune else targets(self.rows),
      "skipped": self.skipped,
    }
    cases = dict.fromkeys(row["case"] for row in self.rows)
    parts = [self.head_text(), *(self.case_text(case) for case in cases), self.end_text()]
    files = {
      "kernel_bench.json": json.dumps(result, indent=2) + "\n",
      "table.txt": "\n\n".join(part for part in parts if part) + "\n",
    }
    if self._bench.tune:
      files["tuning.json"] = table_text(self.found)
    self._bench.out.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
      with whole_file(self._bench.out / name) as part:
        part.write_text(text)
    return [self._bench.out / name for name in files]


# The program --------------------------------------------------------------------------------------


def jobs(bench: Bench, results: Results) -> list[tuple[str, Callable[[Ceilings], Iterator[dict]]]]:
  """Name and rows of everything to measure, what matters most first."""
  works = bench.sizes.works
  if bench.tune:
    cases: dict[Case, list[Work]] = {}
    for work in works:
      cases.setdefault(bench.sizes.case(work), []).append(work)
    listed = [
      (
        f"tiles of {case.kernel}, pages of {case.page_size}",
        functools.partial(tune_case, bench, works=own, found=results.found),
      )
      for case, own in cases.items()
    ]
    return listed + [
      (
        f"{work.name}: the library",
        functools.partial(tune_fresh, bench, work=work, found=results.found),
      )
      for work in works
      if is_whole(work)
    ]
  listed = [(work.name, functools.partial(bench_case, bench, work=work)) for work in works]
  if bench.sizes.engine is not None:
    steps = functools.partial(bench_engine, bench.sizes, bench.device, deadline_s=bench.deadline_s)
    listed.insert(bench.sizes.num_first, ("engine", steps))
  return listed


def prepare() -> Bench:
  begin_s = time.monotonic()
  if not FLAGS.limit_s > 0:
    raise ValueError(f"--limit_s={FLAGS.limit_s} must be positive")
  out = out_folder("kernel_bench")
  device = jax.devices()[0]
  if device.platform not in BACKENDS:
    raise ValueError(f"JAX runs on {device.platform}: this program measures GPUs, or tries a CPU")
  return Bench(
    sizes=gpu_sizes() if device.platform == "gpu" else cpu_sizes(),
    device=device,
    out=out,
    tune=FLAGS.tune,
    limit_s=FLAGS.limit_s,
    deadline_s=begin_s + FLAGS.limit_s,
  )


def run(bench: Bench) -> int:
  progress, results = Progress(), Results(bench)
  status, waiting, num_shown = 0, jobs(bench, results), 0

  def show() -> None:
    nonlocal num_shown
    for case in dict.fromkeys(row["case"] for row in results.rows[num_shown:]):
      print("\n" + results.case_text(case), flush=True)
    num_shown = len(results.rows)

  try:
    progress.update("measuring the ceilings")
    results.ceilings = measure_ceilings(bench.sizes)
    print(results.head_text(), flush=True)
    while waiting:
      name, rows = waiting[0]
      with contextlib.closing(rows(ceilings=results.ceilings)) as rows:
        for row in rows:
          results.rows.append(row)
          progress.update(f"{name}: {row['name']}")
      waiting.pop(0)
      results.write()
      show()
  except OutOfTime:
    results.skipped = [f"out of time (--limit_s={bench.limit_s:g})"]
  except KeyboardInterrupt:
    status, results.skipped = 130, ["interrupted"]
  except DeviceLost as error:
    status, results.skipped = 1, [f"the device is lost after {error}"]
  results.skipped += [name for name, _ in waiting]
  files = results.write()
  show()
  print("\n" + results.end_text())
  print(f"wrote {', '.join(map(str, files))}", flush=True)
  return status or int(any(map(is_fault, results.rows)) and not bench.tune)


def is_fault(row: dict) -> bool:
  """Whether one of ours is wrong, or what the engine would run does not run."""
  if row["status"] == "wrong":
    return row["name"].startswith("pdjax")
  return row["status"] == "refused" and row.get("is_chosen", False)


if __name__ == "__main__":
  flags.DEFINE_bool("tune", False, "try tiles for each kernel, and write the best to tuning.json")
  flags.DEFINE_string("out", None, "folder for results; default: runs/kernel_bench-TIME")
  flags.DEFINE_float("limit_s", 480.0, "when to stop and write what there is, in seconds")
  main(prepare, run)
