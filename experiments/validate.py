"""The simulator beside measurements of real systems.

    python -m experiments.validate --requests=FILE --model=llama3-8b --hardware=a100 [--tp=1] [...]
    python -m experiments.validate [--data_dir=../shared/data] [--out=DIR]

With FILE it replays requests that a real system served: a CSV file, plain or .gz, with the columns
arrival_s, prompt_tokens, output_tokens, ttft_s and tpot_s, in any order beside others, times in
seconds (TTFT: first token - arrival; TPOT: (last token - first) / (output tokens - 1), empty for
one token). Prints the errors of TTFT, TPOT and end-to-end times, writes summary.json and a picture.

Without it runs the validation suite and writes VALIDATION.md and its pictures; what has no data
here is named and left out.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from absl import flags

from configs.hardware import HARDWARE, link
from configs.models import MODELS
from experiments.figures.validation import draw_replay
from experiments.program import FLAGS, ROOT, Progress, main, out_folder, whole_file
from experiments.serving import write_summary
from experiments.validation import distserve, distserve_parts, silicon, steps_part, vllm
from experiments.validation.page import Section, page
from experiments.validation.replay import Replay, error_rows, simulate, text_table
from experiments.validation.requests import COLUMNS, Measured, read_requests, to_requests
from pdjax.config import (
  POOLS_FORM,
  STRATEGIES,
  PoolSpec,
  SchedulerOptions,
  num_devices_of,
  parse_pools,
)
from pdjax.core.model_config import ModelConfig
from pdjax.core.names import pick
from pdjax.core.plain import to_plain
from pdjax.deployment import make_cluster
from pdjax.scheduling.pages import PageConfig
from pdjax.serving.executor import Nowhere
from pdjax.sim.hardware import Device, Link
from pdjax.sim.roofline import Roofline, num_pages

Show = Callable[[str], None]
PICTURES = "experiments/figures/validation"  # beside VALIDATION.md
MS = 1e3

# A file of requests -------------------------------------------------------------------------------


class Checked(NamedTuple):
  """A replay that can run."""

  name: str
  rows: Sequence[Measured]
  specs: Sequence[PoolSpec]
  options: SchedulerOptions
  model: ModelConfig
  latency: Mapping[str, Roofline]
  pages: Mapping[str, PageConfig]
  link: Link
  out: pathlib.Path


def check_replay() -> Checked:
  """Reads the file that the flags name, and what to serve it on."""
  if FLAGS.model is None or FLAGS.hardware is None:
    raise ValueError("--requests needs --model=NAME and --hardware=NAME: what served them")
  rows = read_requests(FLAGS.requests)
  model = pick(MODELS, FLAGS.model, "model")
  between = link(FLAGS.link)
  if FLAGS.pools and FLAGS["tp"].present:
    raise ValueError(f"--pools={FLAGS.pools} and --tp={FLAGS.tp}: pools say their tp themselves")
  specs = parse_pools(FLAGS.pools) if FLAGS.pools else _strategy(FLAGS.strategy, FLAGS.tp)
  longest = max(row.prompt_tokens + row.output_tokens - 1 for row in rows)
  latency, pages = {}, {}
  for spec in specs:
    device = _device(spec.hardware or FLAGS.hardware)
    own = Roofline(
      model=model,
      device=device,
      tp=spec.group.tp,
      link=between,
      one_kernel=FLAGS.one_kernel,
    )
    fits = num_pages(
      model=model,
      device=device,
      page_size=FLAGS.page_size,
      tp=spec.group.tp,
      pp=spec.pp,
      step_tokens=FLAGS.token_budget,
      reserve_bytes=FLAGS.reserve_gb * 1e9,
    )
    latency[spec.name] = own
    pages[spec.name] = PageConfig(
      num_rows=FLAGS.num_rows,
      page_size=FLAGS.page_size,
      pages_per_row=-(-longest // FLAGS.page_size),
      num_pages=FLAGS.num_pages or fits,
    )
  options = SchedulerOptions(
    token_budget=FLAGS.token_budget,
    prefill_budget=FLAGS.prefill_budget,
    reservation=FLAGS.reservation,
    watermark=FLAGS.watermark,
    steps_in_flight=1,
  )
  named = {spec.group: pages[spec.name] for spec in specs}
  cluster = make_cluster(specs, options, named.__getitem__, lambda group: Nowhere())
  for request in to_requests(rows):
    if (reason := cluster.refusal(request)) is not None:
      raise ValueError(f"{FLAGS.requests}: request {request.request_id} cannot run: {reason}")
  out = out_folder("validate")
  return Checked(
    pathlib.Path(FLAGS.requests).name, rows, specs, options, model, latency, pages, between, out
  )


def _strategy(name: str, tp: int) -> Sequence[PoolSpec]:
  return pick(STRATEGIES, name, "strategy")((2 if name == "disaggregated" else 1) * tp, tp)


def _device(name: str) -> Device:
  device = pick(HARDWARE, name, "hardware")
  return device if FLAGS.host_ms is None else vllm.with_host(device, FLAGS.host_ms / MS)


def run_replay(checked: Checked) -> int:
  log = simulate(
    to_requests(checked.rows),
    checked.specs,
    checked.options,
    checked.model,
    lambda spec: checked.latency[spec.name],
    lambda spec: checked.pages[spec.name],
    checked.link,
  )
  replay = Replay.of(checked.rows, log)
  devices = ", ".join(dict.fromkeys(own.device.label for own in checked.latency.values()))
  title = (
    f"{checked.model.name} on {num_devices_of(checked.specs)} x {devices}: "
    f"{len(checked.rows)} requests"
  )
  print(f"{title}\nsimulated / measured (error)\n{text_table(error_rows(replay))}")
  for caveat in dict.fromkeys(c for own in checked.latency.values() for c in own.caveats):
    print(f"note: {caveat}")
  checked.out.mkdir(parents=True, exist_ok=True)
  summaries = replay.summaries()
  data = {
    "requests": checked.name,
    "model": checked.model.name,
    "pools": [to_plain(spec) for spec in checked.specs],
    "scheduler": to_plain(checked.options),
    "pages": {name: to_plain(own) for name, own in checked.pages.items()},
    **{
      metric: {"measured": to_plain(measured), "simulated": to_plain(simulated)}
      for metric, (measured, simulated) in summaries.items()
    },
  }
  write_summary(checked.out, data)
  picture = functools.partial(draw_replay, replay, title=title)
  files = ["summary.json", *_draw(checked.out, {"replay.png": picture})]
  print(f"wrote {', '.join(files)} in {checked.out}")
  return 0


def _draw(
  folder: pathlib.Path, pictures: Mapping[str, Callable[[pathlib.Path], object]]
) -> list[str]:
  """Writes pictures; returns the names of those there are."""
  drawn = []
  try:
    for name, draw in pictures.items():
      with whole_file(folder / name) as path:
        draw(path)
      drawn.append(name)
  except ImportError as error:
    print(f"no picture {name}: {error}")
  return drawn


# The suite ----------------------------------------------------------------------------------------


PARTS: tuple[Callable[[pathlib.Path, Show], Section], ...] = (
  steps_part.part,
  vllm.part,
  distserve_parts.as_served,
  distserve_parts.as_simdistserve,
  silicon.part,
)
"""The suite: a line for each part, in the order of the page."""


class Suite(NamedTuple):
  data_dir: pathlib.Path
  out: pathlib.Path


def check_suite() -> Suite:
  data_dir = pathlib.Path(FLAGS.data_dir)
  if not data_dir.is_dir():
    raise ValueError(f"--data_dir={data_dir} is no folder; it holds distserve/ and measured/")
  return Suite(data_dir, ROOT if FLAGS.out is None else out_folder("validate"))


def run_suite(suite: Suite) -> int:
  progress = Progress()
  sections = []
  for part in PARTS:
    section = part(suite.data_dir, progress.update)
    sections.append(section)
    progress.done(
      f"{section.title}: {f'not run: {section.missing}' if section.missing else 'done'}"
    )
    for found in section.reached:
      met = {True: "", False: "  NOT MET", None: ""}[found.is_met]
      print(f"  {found.what}: {found.reached} (asked: {found.asked}){met}")
  pictures = suite.out / PICTURES
  pictures.mkdir(parents=True, exist_ok=True)
  for section in sections:
    _draw(pictures, section.pictures)
  with whole_file(suite.out / "VALIDATION.md") as path:
    path.write_text(page(sections, PICTURES))
  print(f"wrote {suite.out / 'VALIDATION.md'} and its pictures in {PICTURES}")
  return 0


def run_fit() -> int:
  """Prints how far vLLM is from Figure 8 by factors of its step times."""
  folder = pathlib.Path(FLAGS.data_dir) / "distserve"
  rows = distserve.read_runs(folder)["vllm-100-1"]
  facts = distserve.read_facts(folder)
  factors = [1 + i / 20 for i in range(9)]
  found = sorted(distserve.fit_to_figure_8(facts, rows, factors))
  print("points   prompts x   decodes x")
  for points, prefill, decode in found[:10]:
    print(f"{points:6.2f}{prefill:12.2f}{decode:12.2f}")
  return 0


def prepare() -> Callable[[], int]:
  if FLAGS.requests is not None:
    return functools.partial(run_replay, check_replay())
  suite = check_suite()
  return run_fit if FLAGS.fit_figure_8 else functools.partial(run_suite, suite)


if __name__ == "__main__":
  columns = "; ".join(f"{name}: {meaning}" for name, meaning in COLUMNS.items())
  flags.DEFINE_string("requests", None, f"CSV file of requests as served. Columns: {columns}")
  flags.DEFINE_string("model", None, "a model by name")
  flags.DEFINE_string("hardware", None, "the device that served them, by name")
  flags.DEFINE_integer("tp", 1, "devices of a pool", lower_bound=1)
  flags.DEFINE_string("strategy", "fcfs", f"of {', '.join(STRATEGIES)}; fcfs is vLLM's since v1")
  flags.DEFINE_string("pools", None, f"pools of any shape instead: {POOLS_FORM}")
  flags.DEFINE_integer("token_budget", 2048, "most tokens of a step", lower_bound=1)
  flags.DEFINE_integer("prefill_budget", None, "the same of policies that take prompts whole")
  flags.DEFINE_integer("num_rows", 128, "most sequences of a pool", lower_bound=1)
  flags.DEFINE_integer("page_size", 16, "tokens of a page", lower_bound=1)
  flags.DEFINE_integer("num_pages", None, "pages of a pool; default: what its memory holds")
  flags.DEFINE_float("reserve_gb", 0.0, "memory for the runtime, beside 10 %")
  flags.DEFINE_string("reservation", None, "as scheduler.reservation; default: the policy's")
  flags.DEFINE_float("watermark", 0.0, "share of pages that admission leaves free")
  flags.DEFINE_float("host_ms", None, "the host's time per step; default: the device's own")
  flags.DEFINE_bool(
    "one_kernel", False, "attention of prompts and decodes is one kernel, as in vLLM"
  )
  flags.DEFINE_string("link", "nvlink", "between devices")
  flags.DEFINE_string("data_dir", str(ROOT.parent / "shared" / "data"), "published measurements")
  flags.DEFINE_bool("fit_figure_8", False, "fit vLLM's step times to DistServe's Figure 8; ends")
  flags.DEFINE_string("out", None, "folder; default: this checkout, or runs/validate-TIME")
  main(prepare, lambda run: run())
