"""Does it fit? Compiles the steps of a deployment for devices that need not be here.

    python -m experiments.fit_check --model=llama3-70b --hardware=h200 --tp=4 [--num_pages=N]

Prints what each device holds (parameters, cache, temporaries of the largest prefill, decode and
mixed step), whether the cache is updated in place, the collectives, whether it all fits in 0.9 of
the device's memory, and the largest cache that does, checked by compiling with it. Exit status 1:
it does not fit; 2: wrong input. GPUs and TPUs need their compilers, which the program names when
they are missing; --hardware=cpu needs nothing.

Expected: for a GPU minutes, at the model's full depth (Llama-3-70B on 4 H200: 7 min beside other
programs, 3 min of CPU time; 29 Nov 2026, jax 0.10.2). TPU steps take minutes to
compile each, so two shallow models stand for the whole unless --full_depth is given.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import pathlib
import time

from absl import flags

from configs.hardware import HARDWARE
from configs.models import MODELS
from configs.targets import TARGETS
from experiments.program import FLAGS, Progress, main
from pdjax.core.model_config import ModelConfig
from pdjax.core.names import pick
from pdjax.engine.targets import Target, install_command, missing_packages
from pdjax.scheduling.pages import PageConfig
from pdjax.sim.hardware import Device

MEMORY_SHARE = 0.9  # as in pdjax.sim.roofline.num_pages
TPU_DEPTHS = (2, 6)
LAYOUTS = ("paged", "slots")
DTYPES = ("bfloat16", "float32")
ATTENTION = ("auto", "xla")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Question:
  """What the user asks, checked as far as it can be without compiling.

  What is counted are pages, or rows in slots, where a row has all its pages. `asked` None: only the
  largest count is asked for.
  """

  model: ModelConfig
  device: Device
  target: Target
  tp: int
  num_rows: int
  page_size: int
  pages_per_row: int
  asked: int | None
  token_budget: int
  dtype: str
  layout: str
  attention: str
  depths: tuple[int, int]  # the second is all layers, unless layers are extrapolated

  @property
  def unit(self) -> str:
    return "rows" if self.layout == "slots" else "pages"

  @property
  def tokens_each(self) -> int:
    return self.page_size * (self.pages_per_row if self.layout == "slots" else 1)

  @property
  def usable_bytes(self) -> float:
    return MEMORY_SHARE * self.device.memory_bytes

  def pages(self, count: int) -> PageConfig:
    is_slots = self.layout == "slots"
    return PageConfig(
      num_rows=count if is_slots else self.num_rows,
      page_size=self.page_size,
      pages_per_row=self.pages_per_row,
      num_pages=count * self.pages_per_row if is_slots else count,
      contiguous=is_slots,
    )


def prepare() -> Question:
  model = _model(FLAGS.model)
  device = pick(HARDWARE, FLAGS.hardware, "hardware")
  target = pick(TARGETS, FLAGS.hardware, "hardware to compile for")
  for name in ("tp", "page_size", "num_rows", "token_budget", "num_pages", "max_len"):
    value = getattr(FLAGS, name)
    if value is not None and value < 1:
      raise ValueError(f"--{name}={value} must be at least 1")
  per_row = math.ceil((FLAGS.max_len or min(model.max_len, 8192)) / FLAGS.page_size)
  asked = FLAGS.num_pages
  if FLAGS.layout == "slots":
    if asked not in (None, FLAGS.num_rows * per_row):
      raise ValueError(
        f"--num_pages={asked} goes with --layout=paged; in slots each of the {FLAGS.num_rows} rows "
        f"has {per_row} pages of its own"
      )
    asked = FLAGS.num_rows
  model.check_split(FLAGS.tp)
  missing = missing_packages(target)
  if missing:
    raise ImportError(f"--hardware={FLAGS.hardware} needs its compiler: {install_command(missing)}")
  question = Question(
    model=model,
    device=device,
    target=target,
    tp=FLAGS.tp,
    num_rows=FLAGS.num_rows,
    page_size=FLAGS.page_size,
    pages_per_row=per_row,
    asked=asked,
    token_budget=FLAGS.token_budget,
    dtype=FLAGS.dtype or ("float32" if target.platform == "cpu" else "bfloat16"),
    layout=FLAGS.layout,
    attention=FLAGS.attention,
    depths=_depths(model, target),
  )

  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # XLA misses the GPU whenever it would ask it
  from pdjax.engine.aot import make_target_mesh

  make_target_mesh(target, question.tp)  # refuses more devices than there can be
  return question


def _model(name: str | None) -> ModelConfig:
  if name is None:
    raise ValueError(f"--model is missing: {', '.join(MODELS)} or a folder with a config.json")
  file = pathlib.Path(name) / "config.json"
  return ModelConfig.from_hf(file) if file.is_file() else pick(MODELS, name, "model")


def _depths(model: ModelConfig, target: Target) -> tuple[int, int]:
  is_whole = FLAGS.full_depth
  if is_whole is None:
    is_whole = target.platform != "tpu"
  if is_whole or model.num_layers <= max(TPU_DEPTHS):
    return (1 if model.num_layers > 1 else 2), model.num_layers
  return TPU_DEPTHS


class Compiler:
  """Compiles the steps of one deployment with any number of pages (or rows), and remembers."""

  def __init__(self, question: Question, progress: Progress):
    from pdjax.engine import aot

    self._aot, self._question, self._progress = aot, question, progress
    self._mesh = aot.make_target_mesh(question.target, question.tp)
    self._compile = functools.cache(self._compile_anew)

  def deployment(self, depth: int | None = None):
    """That of the question, or of a model of so many layers that is like it otherwise."""
    q = self._question
    return self._aot.Deployment(
      config=dataclasses.replace(q.model, num_layers=depth or q.model.num_layers),
      mesh=self._mesh,
      platform=q.target.platform,
      dtype=q.dtype,
      layout=q.layout,
      token_budget=q.token_budget,
      attention=q.attention,
    )

  def _compile_anew(self, depth: int, count: int, kinds: tuple[str, ...]):
    text = f"compiling {', '.join(kinds)}: {depth} layers, {count} {self._question.unit}"
    self._progress.update(text)
    start_s = time.perf_counter()
    needs = self.deployment(depth).needs(self._question.pages(count), kinds)
    self._progress.done(f"{text}: {time.perf_counter() - start_s:.0f} s")
    return needs

  def needs(self, count: int, kind: str | None = None):
    """What its steps need, or the one of a kind. Raises `TooLarge` where the compiler does."""
    kinds = self.deployment().kinds(self._question.pages(count))
    if kind is not None:
      kinds = (kind if kind in kinds else "prefill",)  # of one row nothing is mixed
    low, high = self._question.depths
    deep = self._compile(high, count, kinds)
    if high == self._question.model.num_layers:
      return deep
    shallow = self._compile(low, count, kinds)
    return self._aot.at_depth(shallow, deep, (low, high), self._question.model.num_layers)

  def collectives_per_layer(self, count: int, needs) -> list[dict[str, float]]:
    """Those that each layer adds to each step of `needs`."""
    kinds = tuple(step.kind for step in needs.steps)
    shallow, deep = (self._compile(depth, count, kinds) for depth in self._question.depths)
    return self._aot.collectives_per_layer(shallow, deep, self._question.depths)


def run(question: Question) -> int:
  from pdjax.engine.aot import TooLarge, largest_fit

  q = question
  compiler = Compiler(q, Progress())
  _print_question(q)
  params_bytes = compiler.deployment().params_bytes()
  bytes_each = compiler.deployment().cache_bytes(q.pages(1))
  room = int((q.usable_bytes - params_bytes) // bytes_each)
  if room < 1:
    least = math.ceil(q.tp * params_bytes / q.usable_bytes)
    print(
      f"\ndoes not fit: the parameters alone are {_gb(params_bytes)} on each device; at least "
      f"--tp={least} is needed"
    )
    return 1
  first = min(q.asked or room, room)
  while True:
    try:
      needs = compiler.needs(first)
      break
    except TooLarge:
      if first == 1:
        raise
      first //= 2
  _print_needs(q, first, needs)
  if q.tp > 1:
    _print_collectives(q, needs, compiler.collectives_per_layer(first, needs))

  kind = needs.largest.kind

  def needed_bytes(count: int) -> int | None:
    try:
      return (needs if count == first else compiler.needs(count, kind)).total_bytes
    except TooLarge:
      return None

  largest = largest_fit(
    needed_bytes, usable_bytes=q.usable_bytes, first=first, bytes_each=bytes_each
  )
  print()
  slope = bytes_each
  if largest is not None and largest != first:
    other = compiler.needs(largest, kind)
    slope = max(slope, (other.total_bytes - needs.total_bytes) / (largest - first))
    _print_growth(q, first, needs, largest, other)
  if q.asked is not None:
    total = needs.total_bytes + (q.asked - first) * slope
    if largest is not None and q.asked <= largest:
      print(f"fits: {q.asked} {q.unit} need {_gb(total)} of {_gb(q.usable_bytes)}")
    else:
      over = _gb(total - q.usable_bytes)
      print(f"does not fit: {q.asked} {q.unit} need {_gb(total)}, {over} more than usable")
  if largest is None:
    print(f"not one of the {q.unit} fits beside parameters and temporaries")
    return 1
  num_tokens = largest * q.tokens_each
  print(
    f"largest that fits: {largest} {q.unit} = {num_tokens} tokens = "
    f"{num_tokens / (q.page_size * q.pages_per_row):.1f} sequences of "
    f"{q.page_size * q.pages_per_row}, with {_gb(needed_bytes(largest))} (compiled: {kind})"
  )
  return int(q.asked is not None and q.asked > largest)


def _gb(num_bytes: float) -> str:
  return f"{num_bytes / 1e9:.3f} GB" if num_bytes < 1e9 else f"{num_bytes / 1e9:.1f} GB"


def _print_question(q: Question) -> None:
  print(
    f"{q.model.name}, {q.model.num_layers} layers, {q.dtype}, on {q.tp} x {q.device.name}: "
    f"{q.num_rows} rows of {q.page_size * q.pages_per_row} tokens, {q.layout}, pages of "
    f"{q.page_size}, steps of up to {q.token_budget} tokens"
  )
  print(
    f"each device has {_gb(q.device.memory_bytes)}, of which {_gb(q.usable_bytes)} are usable: "
    f"{MEMORY_SHARE}, as the runtime and its libraries need the rest"
  )
  if q.depths[1] < q.model.num_layers:
    print(
      f"compiled with {q.depths[0]} and {q.depths[1]} layers and extrapolated to "
      f"{q.model.num_layers}, which are alike; --full_depth compiles all"
    )


def _print_needs(q: Question, count: int, needs) -> None:
  why = "" if count == q.asked else " (all that parameters leave room for)"
  print(f"\nper device with {count} {q.unit}{why}, in GB")
  print("step      tokens  parameters   cache   other  temporaries   total  cache in place")
  for step in needs.steps:
    other_bytes = step.total_bytes - needs.params_bytes - needs.cache_bytes - step.temporary_bytes
    columns = (needs.params_bytes, needs.cache_bytes, other_bytes, step.temporary_bytes,
               step.total_bytes)  # fmt: skip
    numbers = "".join(
      f"{x / 1e9:{width}.3f}" for x, width in zip(columns, (12, 8, 8, 13, 8), strict=True)
    )
    in_place = "yes" if needs.is_updated_in_place(step) else "NO"
    in_place += f" ({_gb(step.aliased_bytes)} donated)"
    print(f"{step.kind:8}{step.num_tokens:8}{numbers}  {in_place}")


def _print_collectives(q: Question, needs, per_layer: list[dict[str, float]]) -> None:
  print("\ncollectives of each step")
  for step, layer in zip(needs.steps, per_layer, strict=True):
    places = step.collectives
    parts = []
    for name, count in places["always"].items():
      each = layer.get(name, 0)
      rest = count - each * q.model.num_layers
      parts.append(f"{count} {name} ({each:g} a layer, {rest:g} elsewhere)")
    for place, what in (("branches", "branches, not all taken"), ("loops", "loops")):
      if places[place]:
        listed = ", ".join(f"{count} {name}" for name, count in places[place].items())
        parts.append(f"in {what}: {listed}")
    print(f"{step.kind:8}  {'; '.join(parts) or 'none'}")


def _print_growth(q: Question, first: int, needs, largest: int, other) -> None:
  """Warns where a step holds more the larger the cache is, which is no cache but a copy of it."""
  (step,) = other.steps
  before = next(s for s in needs.steps if s.kind == step.kind)
  grown = (step.temporary_bytes - before.temporary_bytes) / (largest - first)
  if grown * max(first, largest) > 0.01 * other.cache_bytes:
    print(
      f"temporaries of {step.kind} grow by {grown / 1e6:.3f} MB for each of the {q.unit}: a step "
      "copies some of the cache"
    )


if __name__ == "__main__":
  flags.DEFINE_string("model", None, "a name in configs/models.py, or a folder with a config.json")
  flags.DEFINE_string("hardware", "h200", f"one of {', '.join(TARGETS)}")
  flags.DEFINE_integer("tp", 1, "devices of tensor parallelism")
  flags.DEFINE_integer("num_pages", None, "pages of the cache; default: as many as fit")
  flags.DEFINE_integer("page_size", 16, "tokens in a page")
  flags.DEFINE_integer("num_rows", 64, "sequences that decode together")
  flags.DEFINE_integer("max_len", None, "longest sequence; default: the model's, 8192 at most")
  flags.DEFINE_integer("token_budget", 2048, "most tokens in a step")
  flags.DEFINE_enum("dtype", None, DTYPES, "of parameters and cache; default: float32 on cpu only")
  flags.DEFINE_enum("layout", "paged", LAYOUTS, "of the cache; in slots rows are counted")
  flags.DEFINE_enum("attention", "auto", ATTENTION, "auto: the device's best kernels")
  flags.DEFINE_bool("full_depth", None, "compile all layers; default: not for TPUs")
  main(prepare, run)
