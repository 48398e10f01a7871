"""The simulator beside measurements of real systems.

    python -m experiments.validate --requests=FILE --model=llama3-8b --hardware=a100 [--tp=1] [...]
    python -m experiments.validate [--parts=steps,vllm] [--engine=saved] [--out=DIR]

With FILE it replays requests that a real system served: a CSV file, plain or .gz, with the columns
arrival_s, prompt_tokens, output_tokens, ttft_s and tpot_s, in any order beside others, times in
seconds (TTFT: first token - arrival; TPOT: (last token - first) / (output tokens - 1), empty for
one token). Prints the errors of TTFT, TPOT and end-to-end times, writes summary.json and a picture.

Without it runs the validation suite and writes VALIDATION.md and its pictures; what has no data
here is named and left out. Takes a minute, with aiconfigurator five more, on the engine 40 unless
`--engine=saved` shows the runs that were kept (with `--parts` not in this checkout but in runs/).
"""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from absl import flags

from configs.hardware import HARDWARE, link
from configs.latency import LATENCY
from configs.models import MODELS
from experiments.figures.validation import draw_replay
from experiments.program import FLAGS, ROOT, Progress, main, out_folder, whole_file
from experiments.serving import write_summary
from experiments.validation import distserve_parts, engine, silicon, steps_part, vllm
from experiments.validation.page import Section, page
from experiments.validation.replay import Replay, error_rows, simulate, text_table
from experiments.validation.requests import COLUMNS, Measured, doubt, read_requests, to_requests
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
from pdjax.sim.latency_model import LatencyModel
from pdjax.sim.roofline import num_pages

Show = Callable[[str], None]
FILES = "experiments/figures/validation"  # pictures and data, beside VALIDATION.md
MS = 1e3

# A file of requests -------------------------------------------------------------------------------

REPLAY_FLAGS = (
  "model", "hardware", "tp", "strategy", "pools", "token_budget", "prefill_budget", "num_rows",
  "page_size", "num_pages", "reserve_gb", "reservation", "watermark", "latency", "host_ms", "link",
)  # fmt: skip
SUITE_FLAGS = ("parts", "engine")


class Checked(NamedTuple):
  """A replay that can run."""

  name: str
  rows: Sequence[Measured]
  specs: Sequence[PoolSpec]
  options: SchedulerOptions
  model: ModelConfig
  devices: Mapping[str, Device]  # by pool, as what follows
  latency: Mapping[str, LatencyModel]
  pages: Mapping[str, PageConfig]
  bytes_per_value: float  # of K and V
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
  make = pick(LATENCY, FLAGS.latency, "latency model")
  devices = {spec.name: _device(spec.hardware or FLAGS.hardware) for spec in specs}
  # Pages are exchanged, so all pools have one type.
  bytes_per_value = max(device.bytes_per_value for device in devices.values())
  latency, pages = {}, {}
  for spec in specs:
    device = devices[spec.name]
    latency[spec.name] = make(model, device, spec.group.tp, spec.pp, between)
    fits = num_pages(
      model=model,
      device=device,
      page_size=FLAGS.page_size,
      tp=spec.group.tp,
      pp=spec.pp,
      step_tokens=FLAGS.token_budget,
      reserve_bytes=FLAGS.reserve_gb * 1e9,
      bytes_per_weight=device.bytes_per_value,
      bytes_per_kv=bytes_per_value,
      bytes_per_activation=device.bytes_per_value,
    )
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
  return Checked(
    pathlib.Path(FLAGS.requests).name,
    rows,
    specs,
    options,
    model,
    devices,
    latency,
    pages,
    bytes_per_value,
    between,
    out_folder("validate"),
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
    bytes_per_value=checked.bytes_per_value,
  )
  replay = Replay.of(checked.rows, log)
  devices = ", ".join(dict.fromkeys(device.label for device in checked.devices.values()))
  title = (
    f"{checked.model.name} on {num_devices_of(checked.specs)} x {devices}: "
    f"{len(checked.rows)} requests"
  )
  print(f"{title}\nsimulated / measured (error)\n{text_table(error_rows(replay))}")
  caveats = [caveat for own in checked.latency.values() for caveat in own.caveats]
  for note in dict.fromkeys(filter(None, [*caveats, doubt(checked.rows)])):
    print(f"note: {note}")
  checked.out.mkdir(parents=True, exist_ok=True)
  summaries = replay.summaries()
  data = {
    "requests": checked.name,
    "model": checked.model.name,
    "devices": {name: device.label for name, device in checked.devices.items()},
    "latency": FLAGS.latency,
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


Part = Callable[[pathlib.Path, Show], Section]
PARTS: dict[str, Part] = {
  "steps": steps_part.part,
  "vllm": vllm.part,
  "distserve": distserve_parts.as_served,
  "simdistserve": distserve_parts.as_simdistserve,
  "silicon": silicon.part,
  "engine": engine.part,
}
"""The suite: a line for each part, in the order of the page."""


class Suite(NamedTuple):
  data_dir: pathlib.Path
  out: pathlib.Path
  parts: Mapping[str, Part]


def check_suite() -> Suite:
  """Reads which parts the flags name; the page of some of them is no page for the checkout."""
  data_dir = pathlib.Path(FLAGS.data_dir)
  if not data_dir.is_dir():
    raise ValueError(f"--data_dir={data_dir} is no folder; it holds distserve/ and measured/")
  for name in FLAGS.parts:
    pick(PARTS, name, "part")
  parts = {name: part for name, part in PARTS.items() if name in (FLAGS.parts or PARTS)}
  if "engine" in parts and FLAGS.engine == "saved":
    parts["engine"] = functools.partial(engine.saved, ROOT / FILES / engine.SAVED)
  in_place = FLAGS.out is None and parts.keys() == PARTS.keys()
  return Suite(data_dir, ROOT if in_place else out_folder("validate"), parts)


def run_suite(suite: Suite) -> int:
  progress = Progress()
  files = suite.out / FILES
  files.mkdir(parents=True, exist_ok=True)
  sections = []
  for name, part in suite.parts.items():
    section = section_of(name, part, suite.data_dir, progress.update)
    sections.append(section)
    progress.done(
      f"{section.title}: {f'not run: {section.missing}' if section.missing else 'done'}"
    )
    for found in section.reached:
      met = {True: "", False: "  NOT MET", None: ""}[found.is_met]
      print(f"  {found.what}: {found.reached} (asked: {found.asked}){met}")
    for file, data in section.data.items():  # at once: it may have taken long
      with whole_file(files / file) as path:
        path.write_text(json.dumps(to_plain(data)) + "\n")
    _draw(files, section.pictures)
  with whole_file(suite.out / "VALIDATION.md") as path:
    path.write_text(page(sections, FILES))
  print(f"wrote {suite.out / 'VALIDATION.md'} and its pictures in {FILES}")
  return 0


def section_of(name: str, part: Part, data_dir: pathlib.Path, show: Show) -> Section:
  """What a part found; a file that it lacks ends no other."""
  try:
    return part(data_dir, show)
  except FileNotFoundError as error:
    file = pathlib.Path(error.filename or "file").name
    return Section(title=name, missing=f"there is no {file}")


def prepare() -> Callable[[], int]:
  is_replay = FLAGS.requests is not None
  for name in SUITE_FLAGS if is_replay else REPLAY_FLAGS:
    if FLAGS[name].present:  # half an hour of something else than was asked for
      raise ValueError(
        f"--{name}={FLAGS[name].value} is of "
        + (
          "the suite, but --requests of a replay"
          if is_replay
          else "a replay, whose --requests=FILE is missing; the suite has its own"
        )
      )
  if is_replay:
    return functools.partial(run_replay, check_replay())
  return functools.partial(run_suite, check_suite())


if __name__ == "__main__":
  columns = "; ".join(f"{name}: {meaning}" for name, meaning in COLUMNS.items())
  flags.DEFINE_string("requests", None, f"CSV file of requests as served. Columns: {columns}")
  flags.DEFINE_string("model", None, "a model by name")
  flags.DEFINE_string("hardware", None, "the device that served them, by name")
  flags.DEFINE_integer("tp", 1, "devices of a pool", lower_bound=1)
  flags.DEFINE_string("strategy", "fcfs", f"of {', '.join(STRATEGIES)}; fcfs is vLLM's since v1")
  flags.DEFINE_string("pools", None, f"pools of any shape instead: {POOLS_FORM}")
  flags.DEFINE_integer("token_budget", 2048, "most tokens of a step", lower_bound=1)
  flags.DEFINE_integer(
    "prefill_budget", None, "the same of policies that take prompts whole", lower_bound=1
  )
  flags.DEFINE_integer("num_rows", 128, "most sequences of a pool", lower_bound=1)
  flags.DEFINE_integer("page_size", 16, "tokens of a page", lower_bound=1)
  flags.DEFINE_integer(
    "num_pages", None, "pages of a pool; default: what its memory holds", lower_bound=1
  )
  flags.DEFINE_float("reserve_gb", 0.0, "memory for the runtime, beside 10 %", lower_bound=0)
  flags.DEFINE_string("reservation", None, "as scheduler.reservation; default: the policy's")
  flags.DEFINE_float("watermark", 0.0, "share of pages that admission leaves free")
  flags.DEFINE_string("latency", "roofline", f"step times by name: {', '.join(LATENCY)}")
  flags.DEFINE_float(
    "host_ms",
    None,
    "the host's time per step, of latency models that add it; default: the device's",
  )
  flags.DEFINE_string("link", "nvlink", "between devices")
  flags.DEFINE_string("data_dir", str(ROOT.parent / "shared" / "data"), "published measurements")
  flags.DEFINE_list("parts", [], f"of the suite, some of {','.join(PARTS)}; default: all")
  flags.DEFINE_enum(
    "engine", "measure", ("measure", "saved"), "the engine's runs: 40 minutes, or those kept"
  )
  flags.DEFINE_string("out", None, "folder; default: this checkout, or runs/validate-TIME")
  main(prepare, lambda run: run())
