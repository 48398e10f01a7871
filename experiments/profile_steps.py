"""Times some 45 steps of a model on the device at hand and fits the simulator's latency model.

    python -m experiments.profile_steps [--model=smollm2-135m] [--hardware=NAME] [--tp=1]

Any JAX backend. `--hardware` names an entry of `configs/hardware.py` for the peaks that the fit's
shares refer to; without one they are twice what a large matmul and a stream reach. Prints the
error of the fit by kind of step and the entry for `configs/hardware.py`; writes steps.csv, fit.json
and fit.png (measured beside fitted). Takes 2 minutes on a CPU with SmolLM2.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import pathlib
import platform
import time
from typing import NamedTuple

from absl import flags

from configs.hardware import HARDWARE, LINKS
from experiments.calibrate import entry, rounded
from experiments.profiling import (
  Point,
  ceiling_of,
  errors_by_kind,
  fit_points,
  measured_device,
  padding_of,
  predictions_s,
  rows_of,
  steps_to_time,
  time_steps,
)
from experiments.program import FLAGS, Progress, main, out_folder, whole_file
from pdjax.core.model_config import ModelConfig
from pdjax.core.names import pick
from pdjax.scheduling.pages import PageConfig
from pdjax.sim.hardware import Device
from pdjax.sim.padded import Padding
from pdjax.sources import resolve

KINDS = ("prefill", "decode", "mixed")


class Checked(NamedTuple):
  path: pathlib.Path
  device: Device | None  # None: its peaks are measured
  tp: int
  pages: PageConfig
  budget: int
  out: pathlib.Path


def prepare() -> Checked:
  out = out_folder("profile_steps")
  for name in ("tp", "num_rows", "max_len", "page_size", "token_budget"):
    if getattr(FLAGS, name) < 1:
      raise ValueError(f"--{name}={getattr(FLAGS, name)} must be at least 1")
  if FLAGS.token_budget < FLAGS.num_rows:
    raise ValueError(
      f"--token_budget={FLAGS.token_budget} cannot hold a decode of --num_rows={FLAGS.num_rows}"
    )
  device = FLAGS.hardware and pick(HARDWARE, FLAGS.hardware, "hardware")
  pick(LINKS, FLAGS.link, "link")
  per_row = -(-FLAGS.max_len // FLAGS.page_size)
  pages = PageConfig(
    num_rows=FLAGS.num_rows,
    page_size=FLAGS.page_size,
    pages_per_row=per_row,
    num_pages=per_row * FLAGS.num_rows,
    contiguous=FLAGS.layout == "slots",
  )
  path = resolve(FLAGS.model, show=print)
  if FLAGS.tp > 1:
    from pdjax.engine.mesh import ensure_devices
    from pdjax.models.checkpoints.checkpoint import open_checkpoint

    open_checkpoint(path).config.check_split(FLAGS.tp)
    ensure_devices(FLAGS.tp)
  return Checked(path, device, FLAGS.tp, pages, FLAGS.token_budget, out)


class Timed(NamedTuple):
  """Steps of an engine on the device at hand. `device` has its peaks, or what was reached there."""

  model: ModelConfig
  dtype: str
  device: Device
  padding: Padding
  points: list[Point]


def time_here(checked: Checked, progress: Progress) -> Timed:
  """Loads the model, compiles its steps and times some 45 of them."""
  from pdjax.engine.build import build_executors, default_buckets, warm_up
  from pdjax.engine.mesh import ensure_devices, make_mesh
  from pdjax.models.checkpoints.checkpoint import open_checkpoint

  pages, tp = checked.pages, checked.tp
  devices = ensure_devices(tp)[:tp]
  is_cpu = devices[0].platform == "cpu"
  dtype, width = ("float32", 4) if is_cpu else ("bfloat16", 2)
  model = open_checkpoint(checked.path).load(dtype=dtype, target=make_mesh(devices))
  longest = min(pages.capacity_tokens, 4 * checked.budget)
  buckets = default_buckets(pages, whole_budget=longest, chunk_budget=checked.budget)
  layout = "slots" if pages.contiguous else "paged"
  (executor,) = build_executors(model, pages, buckets, [devices], layout=layout)
  for line in warm_up([executor], [set(KINDS)]):
    progress.update(f"warm-up: {line}")
  device = checked.device
  if device is None:
    progress.update("measuring a matmul and a stream")
    device = measured_device(devices[0], dtype)
  device = dataclasses.replace(device, bytes_per_value=width, fit=None)
  plans = steps_to_time(pages, prefill_tokens=longest, mixed_tokens=checked.budget, kinds=KINDS)
  points = time_steps(executor, plans, show=progress.update)
  progress.done(f"timed {len(points)} steps")
  return Timed(model.config, dtype, device, padding_of(buckets), points)


def run(checked: Checked) -> int:
  model, dtype, device, padding, points = time_here(checked, Progress())
  if checked.device is None:
    device = ceiling_of(device)
  tp, link = checked.tp, LINKS[FLAGS.link]
  where = dict(tp=tp, link=link if tp > 1 else None)
  fitted = fit_points(points, model, device, padding, **where)
  fit = rounded(fitted.fit)
  predicted_s = predictions_s(points, fit, model, device, padding, **where)
  errors = errors_by_kind(points, predicted_s)
  print(f"{model.name} in {dtype} on {tp} x {device.name}, load {os.getloadavg()[0]:.1f}")
  for kind, found in errors.items():
    print(f"  {kind:8} {found.num_points:3} steps  {found} (median / 95th percentile)")
  print(f"\n{device_entry(device, entry(fit))}")
  checked.out.mkdir(parents=True, exist_ok=True)
  rows = rows_of(points, predicted_s)
  with whole_file(checked.out / "steps.csv") as path, open(path, "w", newline="") as file:
    writer = csv.DictWriter(file, rows[0])
    writer.writeheader()
    writer.writerows(rows)
  result = {
    "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    "date": time.strftime("%Y-%m-%d %H:%M"),
    "model": model.name,
    "device": dataclasses.asdict(dataclasses.replace(device, fit=fit)),
    "padding": dataclasses.asdict(padding),
    "errors": {kind: found._asdict() for kind, found in errors.items()},
  }
  with whole_file(checked.out / "fit.json") as path:
    path.write_text(json.dumps(result, indent=1) + "\n")
  files = ["steps.csv", "fit.json"]
  try:
    from experiments.figures.profile import draw_fit

    with whole_file(checked.out / "fit.png") as path:
      draw_fit(points, predicted_s, path, f"{model.name} on {device.name}")
    files.append("fit.png")
  except ImportError as error:
    print(f"no picture: {error}")
  print(f"wrote {', '.join(files)} in {checked.out}")
  return 0


def device_entry(device: Device, fit: str) -> str:
  """The lines for `configs/hardware.py`."""
  lines = [
    f"  name={device.name!r},",
    f"  peak_flops_per_s={device.peak_flops_per_s:.3g},",
    f"  peak_bytes_per_s={device.peak_bytes_per_s:.3g},",
    f"  memory_bytes={device.memory_bytes:.3g},",
    f"  bytes_per_value={device.bytes_per_value},",
  ]
  return "\n".join(["Device(", *lines, "  fit=" + fit.replace("\n", "\n  ") + ",", ")"])


def define_flags() -> None:
  flags.DEFINE_string("model", "smollm2-135m", "a name, a path, or a Hugging Face repo id")
  flags.DEFINE_string("hardware", None, "an entry with the device's peaks; default: measured")
  flags.DEFINE_integer("tp", 1, "devices to split the model over")
  flags.DEFINE_string("link", "nvlink", "what connects them, for its data sheet")
  flags.DEFINE_integer("num_rows", 16, "most requests running")
  flags.DEFINE_integer("max_len", 1024, "longest sequence")
  flags.DEFINE_integer("page_size", 16, "tokens of a page")
  flags.DEFINE_integer("token_budget", 128, "most tokens of a step of chunks and decodes")
  flags.DEFINE_enum("layout", "slots", ["slots", "paged"], "how the cache lies in memory")
  flags.DEFINE_string("out", None, "folder for the results; default: runs/profile_steps-TIME")


if __name__ == "__main__":
  define_flags()
  main(prepare, run)
