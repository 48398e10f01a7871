"""How many requests the simulator serves in a second of one core, event log and metrics included.

    python -m experiments.bench_simulator --requests=FILE [--scales=1,3,10] [--out=DIR]

FILE is a trace (`pdjax.workloads.traces`), served once, then repeated with later arrivals as often
as each of `--scales` says. Where it has columns vidur_ttft_s, vidur_tpot_s and vidur_e2e_s, as the
run of Vidur that the defaults are set for (Llama-2-7B on an A100, Sarathi, chunks of 512, batches
of 128, no host time), their percentiles stand beside ours. Prints tables, writes `bench.json`.
"""

from __future__ import annotations

import csv
import dataclasses
import gc
import json
import os
import pathlib
import platform
import resource
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from absl import flags

from configs.hardware import HARDWARE, LINKS
from configs.models import MODELS
from experiments.program import FLAGS, main, out_folder, whole_file
from experiments.validation.replay import simulate
from pdjax.config import SchedulerOptions, parse_pools
from pdjax.core.events import Step, Stroke
from pdjax.core.names import pick
from pdjax.core.request import Request, SamplingParams
from pdjax.deployment import make_cluster
from pdjax.metrics.goodput import summary
from pdjax.metrics.latency import Summary, percentiles, request_records
from pdjax.scheduling.pages import PageConfig
from pdjax.serving.executor import Nowhere
from pdjax.sim.roofline import Roofline, num_pages
from pdjax.workloads import make_requests
from pdjax.workloads.traces import TraceRow, read_trace

PAGE_SIZE = 16
QUANTILES = (50, 90, 99)


class Checked(NamedTuple):
  rows: Sequence[TraceRow]
  peer: Mapping[str, Summary]  # Vidur's, where the file has some
  scales: Sequence[int]
  latency: Roofline
  pages: PageConfig
  options: SchedulerOptions
  out: pathlib.Path


def prepare() -> Checked:
  if FLAGS.requests is None:
    raise ValueError("--requests=FILE is missing: the trace to serve")
  trace = read_trace(FLAGS.requests)
  if not trace.has_arrivals:
    raise ValueError(f"{FLAGS.requests} has no arrivals")
  scales = [int(n) if n.isdecimal() else 0 for n in FLAGS.scales]
  if not scales or min(scales) < 1:
    raise ValueError(f"--scales={','.join(FLAGS.scales)} must be whole numbers of at least 1")
  model, device = pick(MODELS, FLAGS.model, "model"), pick(HARDWARE, FLAGS.hardware, "hardware")
  if device.fit is not None:
    device = dataclasses.replace(
      device, fit=dataclasses.replace(device.fit, host_s=FLAGS.host_ms / 1e3)
    )
  longest = max(row.prompt_tokens + row.output_tokens - 1 for row in trace.rows)
  pages = PageConfig(
    num_rows=FLAGS.num_rows,
    page_size=PAGE_SIZE,
    pages_per_row=-(-longest // PAGE_SIZE),
    num_pages=num_pages(model=model, device=device, page_size=PAGE_SIZE),
  )
  options = SchedulerOptions(
    policy=FLAGS.policy, token_budget=FLAGS.token_budget, steps_in_flight=1
  )
  # Whether such a pool can be, as `simulate` will make one.
  make_cluster(parse_pools("mixed"), options, lambda group: pages, lambda group: Nowhere())
  return Checked(
    trace.rows,
    _peer(FLAGS.requests),
    scales,
    Roofline(model=model, device=device),
    pages,
    options,
    out_folder("bench_simulator"),
  )


def _peer(path: str) -> dict[str, Summary]:
  if path.endswith(".gz"):
    return {}
  with open(path, newline="") as file:
    records = list(csv.DictReader(file))
  names = ("ttft_s", "tpot_s", "e2e_s")
  if not all(f"vidur_{name}" in records[0] for name in names):
    return {}
  return {name: percentiles([float(r[f"vidur_{name}"]) for r in records]) for name in names}


def repeated(rows: Sequence[TraceRow], times: int) -> tuple[Request, ...]:
  """The requests so many times one after another, a mean gap apart."""
  period_s = rows[-1].arrival_s * len(rows) / max(1, len(rows) - 1)
  return make_requests(
    [row.arrival_s + k * period_s for k in range(times) for row in rows],
    [row.lengths for row in rows] * times,
    None,
    SamplingParams(max_tokens=1),
  )


def measure(checked: Checked, scale: int) -> dict:
  """Serves the requests and takes the metrics; CPU seconds are of both, not of reading the file."""
  requests = repeated(checked.rows, scale)
  gc.collect()
  start_s = time.process_time()
  log = simulate(
    requests,
    parse_pools("mixed"),
    checked.options,
    checked.latency.model,
    lambda spec: checked.latency,
    lambda spec: checked.pages,
    LINKS["nvlink"],
  )
  served_s = time.process_time()
  records = request_records(log)
  data = summary(records, log)
  data["e2e_s"] = dataclasses.asdict(
    percentiles([r.e2e_s for r in records.values() if r.e2e_s is not None])
  )
  end_s = time.process_time()
  num_steps = sum(isinstance(event, Step) for event in log)
  num_steps += sum(len(event.ends_s) for event in log if isinstance(event, Stroke))
  return {
    "scale": scale,
    "num_requests": len(requests),
    "num_finished": data["e2e_s"]["n"],
    "num_events": len(log),
    "num_steps": num_steps,
    "num_tokens": sum(len(r.token_s) for r in records.values()),
    "serve_s": served_s - start_s,
    "metrics_s": end_s - served_s,
    "cpu_s": end_s - start_s,
    "requests_per_cpu_s": len(requests) / (end_s - start_s),
    "steps_per_cpu_s": num_steps / (end_s - start_s),
    "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    "summary": data,
  }


def run(checked: Checked) -> int:
  rows = [measure(checked, scale) for scale in checked.scales]
  result = {
    "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    "python": platform.python_version(),
    "load_average": os.getloadavg()[0],
    "date": time.strftime("%Y-%m-%d %H:%M"),
    "runs": rows,
  }
  print(table(result))
  print(percentile_table(rows[0]["summary"], checked.peer))
  checked.out.mkdir(parents=True, exist_ok=True)
  with whole_file(checked.out / "bench.json") as part:
    part.write_text(json.dumps(result, indent=2) + "\n")
  print(f"wrote {checked.out / 'bench.json'}")
  return 0


def table(result: dict) -> str:
  lines = [
    f"Python {result['python']}, {result['machine']}, load {result['load_average']:.1f}, "
    f"{result['date']}; seconds of CPU time",
    f"{'scale':>5}{'requests':>10}{'steps':>10}{'tokens':>11}{'serve':>8}{'metrics':>9}{'both':>8}"
    f"{'us/request':>12}{'requests/s':>12}{'steps/s':>10}{'peak RSS':>10}",
  ]
  for row in result["runs"]:
    lines.append(
      f"{row['scale']:>5}{row['num_requests']:>10,}{row['num_steps']:>10,}"
      f"{row['num_tokens']:>11,}{row['serve_s']:>8.2f}{row['metrics_s']:>9.2f}"
      f"{row['cpu_s']:>8.2f}{1e6 / row['requests_per_cpu_s']:>12,.0f}"
      f"{row['requests_per_cpu_s']:>12,.0f}{row['steps_per_cpu_s']:>10,.0f}"
      f"{row['peak_rss_mb']:>7,.0f} MB"
    )
  return "\n".join(lines)


def percentile_table(ours: Mapping, peer: Mapping[str, Summary]) -> str:
  """Ours of the first scale, in ms, beside those of the file."""
  lines = ["", f"{'ms':8}" + "".join(f"{f'p{q}':>10}" for q in QUANTILES)]
  for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s"):
    label = name.removesuffix("_s").upper()
    lines.append(f"{label:8}" + "".join(f"{ours[name][f'p{q}'] * 1e3:10.1f}" for q in QUANTILES))
    if name in peer:
      found = [getattr(peer[name], f"p{q}") for q in QUANTILES]
      lines.append(f"{'  Vidur':8}" + "".join(f"{value * 1e3:10.1f}" for value in found))
  return "\n".join(lines)


if __name__ == "__main__":
  flags.DEFINE_string("requests", None, "the trace to serve")
  flags.DEFINE_list("scales", ["1", "3", "10"], "how often to repeat it")
  flags.DEFINE_string("model", "llama2-7b", "a model by name")
  flags.DEFINE_string("hardware", "a100", "a device by name")
  flags.DEFINE_string("policy", "sarathi", "a policy by name")
  flags.DEFINE_integer("token_budget", 512, "most tokens of a step", lower_bound=1)
  flags.DEFINE_integer("num_rows", 128, "most sequences at a time", lower_bound=1)
  flags.DEFINE_float("host_ms", 0.0, "the host's time per step; Vidur has none", lower_bound=0.0)
  flags.DEFINE_string("out", None, "folder for bench.json; default: runs/bench_simulator-TIME")
  main(prepare, run)
