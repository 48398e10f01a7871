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
SmolLM2 on a CPU) and drawn under its own roof: what a large matmul and a stream over memory reach
there, or the peaks of --hardware where that is given.
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
from experiments.program import FLAGS, SILENT, Progress, main, out_folder, whole_file
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
from pdjax.core.costs import KINDS, shard_of, step_costs, total_bytes, total_flops
from pdjax.core.model_config import ModelConfig
from pdjax.core.names import pick
from pdjax.scheduling.pages import PageConfig
from pdjax.sim.hardware import Device
from pdjax.sim.latency_model import LatencyModel
from pdjax.sim.roofline import Roofline
from pdjax.sources import resolve

KV_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8": 1}
MOST_TOKENS, MOST_ROWS = 16_384, 1024  # where crossings are looked for, and the picture ends
PAGE_SIZE, MEASURED_ROWS = 16, 16  # of the steps that are timed
COLUMNS = ("hardware", "tp", "bytes_per_kv", "kind", "tokens", "before", "rows", "context",
           "operator", "flops", "bytes", "flop_per_byte", "time_s")  # fmt: skip


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

  @property
  def memory_share(self) -> float:
    """Of a device: the weights, and K and V of the rows that decode; above 1 they do not fit."""
    shard = shard_of(self.model, self.tp)
    kv_bytes = self.batch * self.context * shard.kv_bytes_per_token(self.bytes_per_kv)
    weight_bytes = shard.num_params * self.device.bytes_per_value
    return (weight_bytes + kv_bytes) / self.device.memory_bytes

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


class Crossing(NamedTuple):
  """From how many of its `unit` arithmetic limits a step; None: from no number up to `most`."""

  step: str
  unit: str
  most: int
  at: int | None

  def __str__(self) -> str:
    return f"from {self.at} {self.unit}" if self.at else f"not up to {self.most} {self.unit}"


def crossings(case: Case, limit: float) -> list[Crossing]:
  """Where each phase reaches an intensity of `limit` FLOP/byte, and where its matrices do."""
  before = max(0, case.prompt - case.chunk)
  decodes = {"rows": case.batch, "context": case.context}
  beside = f"beside {case.batch} decodes at {case.context}"
  phases = {
    "prefill": ("tokens", lambda n: step_of(chunk_tokens=n), KINDS),
    "prefill, its matrices": ("tokens", lambda n: step_of(chunk_tokens=n), ("linear",)),
    f"chunk behind {before} tokens": (
      "tokens", lambda n: step_of(chunk_tokens=n, before=before), KINDS,
    ),
    f"mixed: that chunk {beside}": (
      "tokens", lambda n: step_of(chunk_tokens=n, before=before, **decodes), KINDS,
    ),
    "decode, its matrices": ("rows", lambda n: step_of(rows=n, context=1), ("linear",)),
    f"decode at {case.context} tokens": (
      "rows", lambda n: step_of(rows=n, context=case.context), KINDS,
    ),
  }  # fmt: skip
  widths = {"bytes_per_value": case.device.bytes_per_value, "bytes_per_kv": case.bytes_per_kv}
  found = []
  for name, (unit, step, kinds) in phases.items():

    def intensity(n: int, step=step, kinds=kinds) -> float:
      return flop_per_byte(step(n), case.model, kinds=kinds, tp=case.tp, **widths)

    most = MOST_TOKENS if unit == "tokens" else MOST_ROWS
    found.append(Crossing(name, unit, most, crossing(intensity, limit, most)))
  return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
  """The base, the what-ifs by what each changes, and what to time: a checkpoint, or nothing."""

  base: Case
  ridge: Ridge
  others: list[tuple[str, Case]]
  checkpoint: pathlib.Path | None
  out: pathlib.Path


def prepare() -> Prepared:
  out = out_folder("roofline")
  model = pick(MODELS, FLAGS.model, "model")
  values = {
    "device": [pick(HARDWARE, name, "hardware") for name in FLAGS.hardware],
    "tp": _numbers("tp"),
    "batch": _numbers("batch"),
    "context": _numbers("context"),
    "kv_dtype": list(FLAGS.kv_dtype) or [None],
  }
  for name in ("prompt", "chunk", "measured_len"):
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
  own = ridge(base.latency, model, base.device, tp=base.tp)
  checkpoint = resolve(FLAGS.model, show=print) if FLAGS.measure else None
  return Prepared(base=base, ridge=own, others=others, checkpoint=checkpoint, out=out)


def _numbers(name: str) -> list[int]:
  found = []
  for text in getattr(FLAGS, name):
    if not text.isdecimal() or not int(text):
      raise ValueError(f"--{name}={text} must be a whole number of at least 1")
    found.append(int(text))
  if not found:
    raise ValueError(f"--{name} is empty; give a number")
  return found


def run(prepared: Prepared) -> int:
  base, own, others = prepared.base, prepared.ridge, prepared.others
  print(_head(base, own))
  for name, profile in base.steps().items():
    print(f"\n{name}: {_step_line(profile)}\n{text_table(_op_rows(profile, own))}")
  print(f"\n{text_table(_crossing_rows(base, own))}")
  if others:
    print(f"\nWhat if\n{text_table(_what_if_rows(base, others))}")
  cases = [base, *(case for _, case in others)]
  for caveat in dict.fromkeys(caveat for case in cases for caveat in _caveats(case)):
    print(f"note: {caveat}")
  measured = None
  if prepared.checkpoint is not None:
    device = base.device if FLAGS["hardware"].present else None
    measured = measure(
      prepared.checkpoint,
      device=device,
      tp=base.tp,
      longest=FLAGS.measured_len,
      progress=Progress(),
    )
    print(f"\n{measured.label}\n{text_table(measured.rows())}")
  swept = [(case, list(sweep(case))) for case in cases]
  files = write(prepared.out, base, own, swept, measured)
  print(f"wrote {', '.join(files)} in {prepared.out}")
  return 0


def write(
  out: pathlib.Path,
  base: Case,
  own: Ridge,
  swept: Sequence[tuple[Case, Sequence[Swept]]],
  measured: Measured | None,
) -> list[str]:
  """Writes the table and, with the extra `[figures]`, the picture; the names of the files."""
  out.mkdir(parents=True, exist_ok=True)
  with whole_file(out / "roofline.csv") as path, open(path, "w", newline="") as file:
    writer = csv.writer(file)
    writer.writerow(COLUMNS)
    for case, steps in swept:
      writer.writerows(_csv_rows(case, steps))
  try:
    from experiments.figures.roofline import draw_roofline

    with whole_file(out / "roofline.png") as path:
      cases = [case for case, _ in swept]
      draw_roofline(cases, own, swept[0][1], measured, _message(base, own), path)
  except ImportError as error:
    print(f"no picture: {error}")
    return ["roofline.csv"]
  return ["roofline.csv", "roofline.png"]


def _head(case: Case, own: Ridge) -> str:
  device = case.device
  return (
    f"== {case.model.name} on {case.tp} x {device.label}, latency={case.latency_name} ==\n"
    f"Peaks {device.peak_flops_per_s / 1e12:.4g} TFLOP/s and "
    f"{device.peak_bytes_per_s / 1e12:.4g} TB/s: ridge {own.peak:.0f} FLOP/byte. Reached by "
    f"matrices {own.flops_per_s / 1e12:.4g} TFLOP/s and {own.bytes_per_s / 1e12:.4g} TB/s: ridge "
    f"{own.achieved:.0f}.\n"
    f"Weights, and K and V of {case.batch} rows at {case.context} tokens, take "
    f"{case.memory_share:.0%} of a device's {device.memory_bytes / 1e9:.4g} GB."
  )


def _caveats(case: Case) -> tuple[str, ...]:
  """What a reader of its numbers must know."""
  if case.memory_share <= 1:
    return case.latency.caveats
  return (
    *case.latency.caveats,
    f"{case.model.name} with {case.batch} rows at {case.context} tokens does not fit on "
    f"{case.tp} x {case.device.name}: it would take {case.memory_share:.0%} of the memory",
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
  for name, time_s in _outside_s(profile):
    share = f"{time_s / profile.step_s:.0%}"
    rows.append((f"  {name}", "", "", "", f"{time_s * 1e3:.3g}", share, ""))
  return rows


def _outside_s(profile: StepProfile) -> list[tuple[str, float]]:
  """What links and the host take of a step, where they take any time."""
  outside = {"all_reduce": profile.terms.all_reduce_s, "host": profile.terms.host_s}
  return [(name, time_s) for name, time_s in outside.items() if time_s]


def _message(case: Case, own: Ridge) -> str:
  """What limits a prefill and a decode, in a line."""
  prefill, *_, decode = crossings(case, own.peak)
  words = ["memory limits all prefills"]
  if prefill.at:
    words = [f"arithmetic limits a prefill from {prefill.at} tokens on"]
  if decode.at:
    words.append(f"a decode at {case.context} from {decode.at} rows on")
  else:
    words.append(f"memory a decode at {case.context} of up to {decode.most} rows")
  return f"{case.model.name} on {case.tp} x {case.device.label}: {', '.join(words)}"


def _crossing_rows(case: Case, own: Ridge) -> list[tuple[str, ...]]:
  header = ("Limited by arithmetic", f"peak ridge {own.peak:.0f}",
            f"achieved ridge {own.achieved:.0f}")  # fmt: skip
  both = zip(crossings(case, own.peak), crossings(case, own.achieved), strict=True)
  return [header, *((f"  {peak.step}", str(peak), str(achieved)) for peak, achieved in both)]


def _what_if_rows(base: Case, others: Sequence[tuple[str, Case]]) -> list[tuple[str, ...]]:
  rows = [
    ("", "prefill", "MFU", "of base's", "decode", "MBU", "of base's", "tokens/s", "mixed", "memory")
  ]
  base_prefill, _, base_decode, _ = base.steps().values()
  for name, case in [("base", base), *others]:
    prefill, _, decode, mixed = case.steps().values()
    rows.append(
      (
        name,
        f"{prefill.step_s * 1e3:.4g} ms",
        f"{prefill.mfu:.0%}",
        f"{prefill.step_s / base_prefill.step_s:.2f}",
        f"{decode.step_s * 1e3:.4g} ms",
        f"{decode.mbu:.0%}",
        f"{decode.step_s / base_decode.step_s:.2f}",
        f"{case.batch / decode.step_s:.0f}",
        f"{mixed.step_s * 1e3:.4g} ms",
        f"{case.memory_share:.0%}" + "!" * (case.memory_share > 1),
      )
    )
  return rows


class Swept(NamedTuple):
  """A step of a sweep: `tokens` of a prompt behind `before` others, `rows` that read `context`."""

  kind: str
  tokens: int
  before: int
  rows: int
  context: int
  profile: StepProfile


def sweep(case: Case) -> Iterator[Swept]:
  """Steps over tokens and rows."""

  def step(kind: str, tokens: int = 0, before: int = 0, rows: int = 0) -> Swept:
    context = case.context if rows else 0
    profile = case.profile(chunk_tokens=tokens, before=before, rows=rows, context=context)
    return Swept(kind, tokens, before, rows, context, profile)

  for exponent in range(MOST_TOKENS.bit_length()):
    number = 1 << exponent
    yield step("prefill", number)
    if number <= case.prompt:
      yield step("chunk", number, case.prompt - number)
      yield step("mixed", number, case.prompt - number, case.batch)
    if number <= MOST_ROWS:
      yield step("decode", rows=number)


def _csv_rows(case: Case, steps: Sequence[Swept]) -> Iterator[tuple]:
  """An operator a line, then what links and the host take, where they do."""
  for *step, profile in steps:
    where = (case.device.name, case.tp, case.bytes_per_kv, *step)
    for op in profile.ops:
      yield (*where, op.name, op.flops, op.num_bytes, op.flop_per_byte, op.time_s)
    for name, time_s in _outside_s(profile):
      yield (*where, name, 0, 0, "", time_s)


# On the device at hand ----------------------------------------------------------------------------


class MeasuredStep(NamedTuple):
  """A step of the engine: what was asked of it, without what it was padded with."""

  kind: str
  prompts: int
  prompt_tokens: int  # of all of them
  rows: int
  keys: int  # tokens in the cache that its slices read, their own included
  flops: float
  num_bytes: float
  seconds: float

  @property
  def flop_per_byte(self) -> float:
    return self.flops / self.num_bytes

  @property
  def flops_per_s(self) -> float:
    return self.flops / self.seconds

  @property
  def bytes_per_s(self) -> float:
    return self.num_bytes / self.seconds


class Measured(NamedTuple):
  """Steps of the engine, with the peaks of the device that ran them."""

  label: str
  device: Device
  steps: Sequence[MeasuredStep]

  def rows(self) -> list[tuple[str, ...]]:
    rows = [("", "prompts", "tokens", "rows", "keys", "FLOP/byte", "ms", "GFLOP/s", "GB/s", "MFU",
             "MBU")]  # fmt: skip
    for step in self.steps:
      rows.append(
        (
          f"  {step.kind}",
          f"{step.prompts}",
          f"{step.prompt_tokens}",
          f"{step.rows}",
          f"{step.keys}",
          f"{step.flop_per_byte:.1f}",
          f"{step.seconds * 1e3:.3g}",
          f"{step.flops_per_s / 1e9:.3g}",
          f"{step.bytes_per_s / 1e9:.3g}",
          f"{step.flops_per_s / self.device.peak_flops_per_s:.0%}",
          f"{step.bytes_per_s / self.device.peak_bytes_per_s:.0%}",
        )
      )
    return rows


def measure(
  checkpoint: pathlib.Path,
  *,
  device: Device | None = None,
  tp: int = 1,
  longest: int = 1024,
  chunk: int = 128,
  progress: Progress = SILENT,
) -> Measured:
  """Times some 45 steps of the engine on the device at hand, as `experiments.profile_steps` does.

  `device` has the peaks to compare with; None: what a matmul and a stream reach here. Sequences
  are up to `longest` tokens, steps with decodes up to `chunk`.
  """
  per_row = -(-longest // PAGE_SIZE)
  pages = PageConfig(
    num_rows=MEASURED_ROWS,
    page_size=PAGE_SIZE,
    pages_per_row=per_row,
    num_pages=per_row * MEASURED_ROWS,
    contiguous=True,
  )
  timed = time_here(Checked(checkpoint, device, tp, pages, chunk, checkpoint), progress)
  shard, width = shard_of(timed.model, tp), timed.device.bytes_per_value
  widths = dict(bytes_per_weight=width, bytes_per_kv=width, bytes_per_activation=width)
  steps = []
  for kind, counts, seconds in sorted(timed.points):
    ops = step_costs(counts, shard, **widths)
    keys = counts.num_prefill_keys + counts.num_decode_keys
    steps.append(
      MeasuredStep(
        kind,
        counts.num_prefills,
        counts.num_prefill_tokens,
        counts.num_decodes,
        keys,
        total_flops(ops),
        total_bytes(ops),
        seconds,
      )
    )
  what = "a matmul and a stream reach" if device is None else "its data sheet says"
  label = (
    f"Measured: {timed.model.name} in {timed.dtype} on {tp} x {timed.device.name}, of whose peaks "
    f"{what} {timed.device.peak_flops_per_s / 1e9:.4g} GFLOP/s and "
    f"{timed.device.peak_bytes_per_s / 1e9:.4g} GB/s"
  )
  return Measured(label, timed.device, steps)


if __name__ == "__main__":
  flags.DEFINE_string("model", "llama3-8b", "a model by name")
  flags.DEFINE_list("hardware", ["a100"], "devices by name, the base first")
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
