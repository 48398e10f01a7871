"""What limits each step: intensity and time of every operator, the ridge, MFU and MBU, what-ifs.

    python -m experiments.roofline --model=llama3-8b --hardware=a100
    python -m experiments.roofline --model=llama3-70b --hardware=a100,h100 --tp=4,8 --batch=32,128
      --context=2048,8192 --kv_dtype=bfloat16,int8
    python -m experiments.roofline --model=smollm2-135m --measure

The first value of each option is the base, for which every operator of a prefill, a chunk, a
decode and a mixed step is shown; each other value is a what-if, one at a time. FLOPs and bytes are
those of `pdjax/core/costs.py`, times those of a latency model (`--latency`). Writes roofline.csv
(steps over tokens and rows, an operator a line) and roofline.png.

With --measure the real steps of the engine are timed on the device at hand (2 minutes for
SmolLM2 on a CPU) and drawn on its own roof: its peaks are measured, or those of --hardware.
"""

from __future__ import annotations

import csv
import dataclasses
import pathlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from absl import flags

from configs.hardware import HARDWARE, link
from configs.latency import LATENCY
from configs.models import MODELS
from experiments.profile_steps import Checked, time_here
from experiments.program import FLAGS, Progress, main, out_folder, whole_file
from experiments.validation.replay import text_table
from pdjax.analysis.intensity import (
  Ridge,
  StepProfile,
  crossing,
  flop_per_byte,
  profile_step,
  ridge,
  step_of,
)
from pdjax.core.costs import shard_of, step_costs, total_bytes, total_flops
from pdjax.core.model_config import ModelConfig
from pdjax.core.names import pick
from pdjax.scheduling.pages import PageConfig
from pdjax.sim.hardware import Device
from pdjax.sim.latency_model import LatencyModel
from pdjax.sim.roofline import Roofline
from pdjax.sources import resolve

KV_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8": 1}
MOST_TOKENS, MOST_ROWS = 16_384, 1024  # where crossings are looked for, and the picture ends
DEFAULT_HARDWARE = ["a100"]
PAGE_SIZE, MEASURED_ROWS, MEASURED_CHUNK = 16, 16, 128  # of the steps that are timed


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
  """A pool and the steps that it is asked about. `kv_dtype` None: as the device's other values.

  Raises:
    ValueError: nothing is known of the model on such devices, or of another type for K and V.
  """

  model: ModelConfig
  device: Device
  latency_name: str
  link_name: str
  tp: int
  prompt: int
  chunk: int
  batch: int
  context: int
  kv_dtype: str | None = None
  latency: LatencyModel = dataclasses.field(init=False, repr=False)

  def __post_init__(self):
    object.__setattr__(self, "latency", self._make_latency())

  def _make_latency(self) -> LatencyModel:
    make = pick(LATENCY, self.latency_name, "latency model")
    way = self.device.link or link(self.link_name)
    own = make(self.model, self.device, self.tp, 1, way)
    if self.kv_dtype is None:
      return own
    if not isinstance(own, Roofline):
      raise ValueError(f"--kv_dtype={self.kv_dtype} goes with --latency=roofline or one_kernel")
    return dataclasses.replace(own, bytes_per_kv=self.bytes_per_kv)

  @property
  def bytes_per_kv(self) -> float:
    if self.kv_dtype is None:
      return self.device.bytes_per_value
    return pick(KV_BYTES, self.kv_dtype, "type of K and V")

  def profile(self, **step: int) -> StepProfile:
    """One step, as `step_of` makes it."""
    return profile_step(
      step_of(**step),
      self.latency,
      self.model,
      self.device,
      tp=self.tp,
      bytes_per_kv=self.bytes_per_kv,
    )

  def steps(self) -> dict[str, StepProfile]:
    """A step of each kind."""
    decodes = {"rows": self.batch, "context": self.context}
    chunk = {"chunk_tokens": self.chunk, "before": max(0, self.prompt - self.chunk)}
    return {
      f"prefill of {self.prompt} tokens": self.profile(chunk_tokens=self.prompt),
      f"last chunk of {self.chunk} of them": self.profile(**chunk),
      f"decode of {self.batch} rows at {self.context}": self.profile(**decodes),
      "mixed: that chunk and those decodes": self.profile(**chunk, **decodes),
    }


class Crossings(NamedTuple):
  """Where a phase becomes limited by arithmetic; None: not up to `MOST_TOKENS`, `MOST_ROWS`."""

  prefill_tokens: int | None
  decode_matrix_rows: int | None  # of the matrices alone
  decode_rows: int | None  # with attention, at the case's context


def crossings(case: Case, limit: float) -> Crossings:
  where = {"tp": case.tp, "bytes_per_value": case.device.bytes_per_value}

  def linear(**step: int) -> float:
    return flop_per_byte(step_of(**step), case.model, kinds=("linear",), **where)

  return Crossings(
    crossing(lambda n: linear(chunk_tokens=n), limit, MOST_TOKENS),
    crossing(lambda n: linear(rows=n, context=1), limit, MOST_ROWS),
    crossing(
      lambda n: flop_per_byte(step_of(rows=n, context=case.context), case.model, **where),
      limit,
      MOST_ROWS,
    ),
  )


def prepare() -> tuple[Case, list[tuple[str, Case]], pathlib.Path]:
  """The base and the what-ifs, with what each changes."""
  out = out_folder("roofline")
  model = pick(MODELS, FLAGS.model, "model")
  values = {
    "device": [pick(HARDWARE, name, "hardware") for name in FLAGS.hardware],
    "tp": _numbers("tp"),
    "batch": _numbers("batch"),
    "context": _numbers("context"),
    "kv_dtype": list(FLAGS.kv_dtype) or [None],
  }
  for name in ("prompt", "chunk"):
    if getattr(FLAGS, name) < 1:
      raise ValueError(f"--{name}={getattr(FLAGS, name)} must be at least 1")
  if not values["device"]:
    raise ValueError("--hardware is empty; name a device")
  base = Case(
    model=model,
    latency_name=FLAGS.latency,
    link_name=FLAGS.link,
    prompt=FLAGS.prompt,
    chunk=min(FLAGS.chunk, FLAGS.prompt),
    **{name: own[0] for name, own in values.items()},
  )
  others = []
  for name, own in values.items():
    for value in own[1:]:
      shown = value.name if name == "device" else value
      label = "hardware" if name == "device" else name
      others.append((f"{label}={shown}", dataclasses.replace(base, **{name: value})))
  return base, others, out


def _numbers(name: str) -> list[int]:
  found = []
  for text in getattr(FLAGS, name):
    if not text.isdecimal() or not int(text):
      raise ValueError(f"--{name}={text} must be a whole number of at least 1")
    found.append(int(text))
  if not found:
    raise ValueError(f"--{name} is empty; give a number")
  return found


def run(prepared: tuple[Case, list[tuple[str, Case]], pathlib.Path]) -> int:
  base, others, out = prepared
  own = ridge(base.latency, base.model, base.device, tp=base.tp)
  print(_head(base, own))
  for name, profile in base.steps().items():
    print(f"\n{name}: {_step_line(profile)}\n{text_table(_op_rows(profile, own))}")
  print(f"\n{_crossing_lines(base, own)}")
  if others:
    print(f"\nWhat if\n{text_table(_what_if_rows(base, others))}")
  for caveat in base.latency.caveats:
    print(f"note: {caveat}")
  measured = measure(base, Progress()) if FLAGS.measure else None
  if measured is not None:
    print(f"\n{measured.label}\n{text_table(measured.rows())}")
  swept = [(case, list(sweep(case))) for case in (base, *(case for _, case in others))]
  out.mkdir(parents=True, exist_ok=True)
  with whole_file(out / "roofline.csv") as path, open(path, "w", newline="") as file:
    writer = csv.writer(file)
    writer.writerow(("hardware", "tp", "kind", "tokens", "rows", "context", "operator", "flops",
                     "bytes", "flop_per_byte", "time_s"))  # fmt: skip
    for case, steps in swept:
      writer.writerows(_csv_rows(case, steps))
  files = ["roofline.csv"]
  try:
    from experiments.figures.roofline import draw_roofline

    with whole_file(out / "roofline.png") as path:
      draw_roofline([case for case, _ in swept], swept[0][1], measured, path)
    files.append("roofline.png")
  except ImportError as error:
    print(f"no picture: {error}")
  print(f"wrote {', '.join(files)} in {out}")
  return 0


def _head(case: Case, own: Ridge) -> str:
  device = case.device
  return (
    f"== {case.model.name} on {case.tp} x {device.label}, latency={case.latency_name} ==\n"
    f"Peaks {device.peak_flops_per_s / 1e12:.4g} TFLOP/s and "
    f"{device.peak_bytes_per_s / 1e12:.4g} TB/s: ridge {own.peak:.0f} FLOP/byte. Reached by "
    f"matrices {own.flops_per_s / 1e12:.4g} TFLOP/s and {own.bytes_per_s / 1e12:.4g} TB/s: ridge "
    f"{own.achieved:.0f}."
  )


def _step_line(profile: StepProfile) -> str:
  return (
    f"{profile.step_s * 1e3:.4g} ms, {profile.flop_per_byte:.1f} FLOP/byte, MFU {profile.mfu:.0%}, "
    f"MBU {profile.mbu:.0%}"
  )


def _op_rows(profile: StepProfile, own: Ridge) -> list[tuple[str, ...]]:
  rows = [("", "GFLOP", "GB", "FLOP/byte", "ms", "of the step", "limited by")]
  for op in profile.ops:
    rows.append(
      (
        f"  {op.name}",
        f"{op.flops / 1e9:.4g}",
        f"{op.num_bytes / 1e9:.3g}",
        f"{op.flop_per_byte:.1f}",
        f"{op.time_s * 1e3:.3g}",
        f"{op.time_s / profile.step_s:.0%}",
        "arithmetic" if op.flop_per_byte > own.achieved else "memory",
      )
    )
  for name in ("all_reduce_s", "host_s"):
    value_s = getattr(profile.terms, name)
    if value_s:
      share = f"{value_s / profile.step_s:.0%}"
      rows.append((f"  {name[:-2]}", "", "", "", f"{value_s * 1e3:.3g}", share, ""))
  return rows


def _crossing_lines(case: Case, own: Ridge) -> str:
  lines = []
  for name, limit in (("peak", own.peak), ("achieved", own.achieved)):
    found = crossings(case, limit)
    lines.append(
      f"Limited by arithmetic, {name} ridge of {limit:.0f}: prefill from "
      f"{_or_never(found.prefill_tokens, MOST_TOKENS, 'tokens')}; the matrices of a decode from "
      f"{_or_never(found.decode_matrix_rows, MOST_ROWS, 'rows')}; a decode with its attention at "
      f"{case.context} tokens from {_or_never(found.decode_rows, MOST_ROWS, 'rows')}."
    )
  return "\n".join(lines)


def _or_never(number: int | None, most: int, what: str) -> str:
  return f"no number of {what} up to {most}" if number is None else f"{number} {what}"


def _what_if_rows(base: Case, others: Sequence[tuple[str, Case]]) -> list[tuple[str, ...]]:
  rows = [("", "prefill", "MFU", "decode", "MBU", "tokens/s", "mixed", "prefill, decode of base's")]
  first: list[StepProfile] | None = None
  for name, case in [("base", base), *others]:
    prefill, _, decode, mixed = case.steps().values()
    first = first or [prefill, decode]
    rows.append(
      (
        name,
        f"{prefill.step_s * 1e3:.4g} ms",
        f"{prefill.mfu:.0%}",
        f"{decode.step_s * 1e3:.4g} ms",
        f"{decode.mbu:.0%}",
        f"{case.batch / decode.step_s:.0f}",
        f"{mixed.step_s * 1e3:.4g} ms",
        f"{prefill.step_s / first[0].step_s:.2f}, {decode.step_s / first[1].step_s:.2f}",
      )
    )
  return rows


Swept = tuple[str, int, int, StepProfile]
"""Of a sweep: kind, prompt tokens, rows, step."""


def sweep(case: Case) -> Iterator[Swept]:
  """Steps over tokens and rows."""
  for exponent in range(15):
    tokens = 1 << exponent
    if tokens <= MOST_TOKENS:
      yield "prefill", tokens, 0, case.profile(chunk_tokens=tokens)
    if tokens <= min(MOST_TOKENS, case.prompt):
      before = case.prompt - tokens
      yield "chunk", tokens, 0, case.profile(chunk_tokens=tokens, before=before)
      yield (
        "mixed",
        tokens,
        case.batch,
        case.profile(chunk_tokens=tokens, before=before, rows=case.batch, context=case.context),
      )
    if tokens <= MOST_ROWS:
      yield "decode", 0, tokens, case.profile(rows=tokens, context=case.context)


def _csv_rows(case: Case, steps: Sequence[Swept]) -> Iterator[tuple]:
  for kind, tokens, rows, profile in steps:
    for op in profile.ops:
      yield (case.device.name, case.tp, kind, tokens, rows, case.context, op.name, op.flops,
             op.num_bytes, op.flop_per_byte, op.time_s)  # fmt: skip


# On the device at hand ----------------------------------------------------------------------------


class MeasuredStep(NamedTuple):
  kind: str
  num_tokens: int
  flops: float
  num_bytes: float
  seconds: float

  @property
  def flop_per_byte(self) -> float:
    return self.flops / self.num_bytes


class Measured(NamedTuple):
  """Steps of the engine, with the peaks of the device that ran them."""

  label: str
  device: Device
  steps: Sequence[MeasuredStep]

  def rows(self) -> list[tuple[str, ...]]:
    rows = [("", "tokens", "FLOP/byte", "ms", "GFLOP/s", "GB/s", "MFU", "MBU")]
    for step in sorted(self.steps, key=lambda s: (s.kind, s.num_tokens)):
      flops_per_s, bytes_per_s = step.flops / step.seconds, step.num_bytes / step.seconds
      rows.append(
        (
          f"  {step.kind}",
          f"{step.num_tokens}",
          f"{step.flop_per_byte:.1f}",
          f"{step.seconds * 1e3:.3g}",
          f"{flops_per_s / 1e9:.3g}",
          f"{bytes_per_s / 1e9:.3g}",
          f"{flops_per_s / self.device.peak_flops_per_s:.0%}",
          f"{bytes_per_s / self.device.peak_bytes_per_s:.0%}",
        )
      )
    return rows


def measure(case: Case, progress: Progress) -> Measured:
  """Times steps of the engine on the device at hand, as `experiments.profile_steps` does."""
  per_row = -(-FLAGS.measured_len // PAGE_SIZE)
  pages = PageConfig(
    num_rows=MEASURED_ROWS,
    page_size=PAGE_SIZE,
    pages_per_row=per_row,
    num_pages=per_row * MEASURED_ROWS,
    contiguous=True,
  )
  device = None if FLAGS.hardware == DEFAULT_HARDWARE else case.device
  path = resolve(FLAGS.model, show=print)
  timed = time_here(Checked(path, device, case.tp, pages, MEASURED_CHUNK, path), progress)
  model, dtype, device, padding, points = timed
  shard = shard_of(model, case.tp)
  steps = []
  for point in points:
    ops = step_costs(
      padding(point.counts),
      shard,
      bytes_per_weight=device.bytes_per_value,
      bytes_per_kv=device.bytes_per_value,
      bytes_per_activation=device.bytes_per_value,
    )
    flops, num_bytes = total_flops(ops), total_bytes(ops)
    steps.append(MeasuredStep(point.kind, point.counts.num_tokens, flops, num_bytes, point.seconds))
  label = (
    f"Measured: {model.name} in {dtype} on {case.tp} x {device.name}, whose peaks are taken as "
    f"{device.peak_flops_per_s / 1e9:.4g} GFLOP/s and {device.peak_bytes_per_s / 1e9:.4g} GB/s"
  )
  return Measured(label, device, steps)


if __name__ == "__main__":
  flags.DEFINE_string("model", "llama3-8b", "a model by name")
  flags.DEFINE_list("hardware", DEFAULT_HARDWARE, "devices by name, the base first")
  flags.DEFINE_list("tp", ["1"], "devices of a pool")
  flags.DEFINE_list("batch", ["32"], "rows that decode")
  flags.DEFINE_list("context", ["2048"], "tokens that each of them reads")
  flags.DEFINE_list("kv_dtype", [], f"of K and V: {', '.join(KV_BYTES)}; default: the device's")
  flags.DEFINE_integer("prompt", 2048, "tokens of a prompt")
  flags.DEFINE_integer("chunk", 512, "tokens of a chunk")
  flags.DEFINE_string("latency", "roofline", f"step times by name: {', '.join(LATENCY)}")
  flags.DEFINE_string("link", "nvlink", "of the devices of a pool, where theirs is not known")
  flags.DEFINE_bool("measure", False, "time the engine's steps here, and draw them on the roof")
  flags.DEFINE_integer("measured_len", 1024, "longest sequence of the steps that are timed")
  flags.DEFINE_string("out", None, "folder; default: runs/roofline-TIME")
  main(prepare, run)
