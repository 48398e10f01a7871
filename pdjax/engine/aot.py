"""Compiles the steps of a pool for devices that are not there, and reads what they will need.

Nothing runs and no array is made: the model is its shapes, and the devices are a topology that the
compiler knows (the plugin wheels of GPUs and TPUs need no driver for it). The programs are those of
`engine/steps.py` with the inputs of `engine/batch.py`, one of each kind at its largest bucket.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import os
import re
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from pdjax.core.model_config import ModelConfig
from pdjax.engine.batch import RowState, step_inputs
from pdjax.engine.build import default_buckets, make_attention
from pdjax.engine.mesh import ensure_devices, make_mesh
from pdjax.engine.steps import Steps, state_shapes
from pdjax.engine.targets import CpuTarget, Target
from pdjax.models.attention import Attention
from pdjax.models.model import Model, axes_sharding
from pdjax.models.transformer import build, param_shapes
from pdjax.scheduling.pages import PageConfig
from pdjax.scheduling.probe import probe_plan

KINDS = ("prefill", "decode", "mixed")
_SAME_AT_ANY_DEPTH = ("kind", "num_tokens")
_COLLECTIVES = (
  "all-reduce",
  "all-gather",
  "all-to-all",
  "collective-broadcast",
  "collective-permute",
  "reduce-scatter",
)


class TooLarge(Exception):
  """The compiler itself refuses a program because the device cannot hold it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepNeeds:
  """What one compiled step needs on each device, in bytes, and how often devices must meet.

  `arguments_bytes` counts parameters, cache and all other inputs, as laid out on the device.
  `aliased_bytes` of them are updated in place. `fresh_bytes` are outputs that are not.
  """

  kind: str
  num_tokens: int
  arguments_bytes: int
  aliased_bytes: int
  fresh_bytes: int
  temporary_bytes: int
  code_bytes: int
  collectives: dict[str, dict[str, int]]  # place -> collective -> count

  @property
  def total_bytes(self) -> int:
    return self.arguments_bytes + self.fresh_bytes + self.temporary_bytes + self.code_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
  """What a pool needs on each device. Only one step runs at a time, so the largest counts."""

  params_bytes: int
  cache_bytes: int
  steps: tuple[StepNeeds, ...]

  @property
  def largest(self) -> StepNeeds:
    return max(self.steps, key=lambda step: step.total_bytes)

  @property
  def total_bytes(self) -> int:
    return self.largest.total_bytes

  def is_updated_in_place(self, step: StepNeeds) -> bool:
    """Whether the whole cache is donated, so that no step holds it twice."""
    return step.aliased_bytes >= self.cache_bytes


def make_target_mesh(target: Target, num_devices: int) -> Mesh:
  """The mesh of a pool of such devices. They need not exist; the CPU's do.

  Restricts JAX to the CPU in this process, which compiles for others and runs nothing.

  Raises:
    ValueError: there are no so many.
    RuntimeError: the compiler for them is not installed.
  """
  if isinstance(target, CpuTarget):
    return make_mesh(ensure_devices(num_devices))
  options = target.topology_options(num_devices)
  jax.config.update("jax_platforms", "cpu")  # so that the CUDA plugin asks for no driver
  os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # nor libtpu for the machine that it is on
  topology = topologies.get_topology_desc(platform=target.platform, **options)
  return make_mesh(topology.devices[:num_devices])


def abstract_model(config: ModelConfig, mesh: Mesh, *, dtype: str) -> Model:
  """A model on `mesh` whose parameters are shapes.

  Raises:
    ValueError: the mesh does not divide the model.
  """
  config.check_split(mesh.size)
  names = build(config, (), dtype=dtype)
  shapes = param_shapes(config).values()
  params = tuple(
    jax.ShapeDtypeStruct(shape, np.dtype(dtype), sharding=axes_sharding(axes, shape, mesh))
    for axes, shape in zip(names.param_axes, shapes, strict=True)
  )
  return dataclasses.replace(names, params=params)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
  """A pool to be: what is compiled and for what."""

  config: ModelConfig
  mesh: Mesh
  platform: str  # cpu, cuda, tpu
  dtype: str
  layout: str
  token_budget: int
  attention: str = "auto"

  def params_bytes(self) -> int:
    """On each device, without the padding of its layout."""
    return _device_bytes(self._model().params)

  def cache_bytes(self, pages: PageConfig) -> int:
    """On each device, without the padding of its layout."""
    cache, *_ = self._state(pages)
    return _device_bytes(cache)

  def kinds(self, pages: PageConfig) -> tuple[str, ...]:
    """The steps of such a pool: KINDS, but of one row nothing mixed.

    Where a kernel of its own serves prompts that begin in a step, "fresh" is a prefill of such.
    """
    more = () if self.attention_of(pages).tuning.fresh is None else ("fresh",)
    return more + (KINDS if pages.num_rows > 1 else KINDS[:2])

  def needs(self, pages: PageConfig, kinds: tuple[str, ...] | None = None) -> Needs:
    """Compiles a step of each kind, or of all that the pool has. Takes seconds to minutes.

    Raises:
      TooLarge: the compiler sees that the device cannot hold it.
      ValueError: a mixed step of a pool with one row, which has none.
    """
    model = self._model()
    steps = Steps(model, self.attention_of(pages))
    kinds = kinds or self.kinds(pages)
    arguments = (model.params, *self._state(pages))
    return Needs(
      params_bytes=self.params_bytes(),
      cache_bytes=self.cache_bytes(pages),
      steps=tuple(self._compile(steps, arguments, kind, pages) for kind in kinds),
    )

  def _model(self) -> Model:
    return abstract_model(self.config, self.mesh, dtype=self.dtype)

  def attention_of(self, pages: PageConfig) -> Attention:
    """How its steps attend, by which kernels."""
    return make_attention(self._model(), pages, self.mesh, self.layout, self.attention)

  def _state(self, pages: PageConfig):
    stages = (((0, self.config.num_layers), self.mesh),)
    return state_shapes(self._model(), self.attention_of(pages).layout, stages)

  def _compile(self, steps: Steps, arguments, kind: str, pages: PageConfig) -> StepNeeds:
    buckets = default_buckets(pages, whole_budget=self.token_budget, chunk_budget=self.token_budget)
    largest = dataclasses.replace(
      buckets, prefill=buckets.prefill[-1:], mixed=buckets.mixed[-1:], rows=buckets.rows[-1:]
    )
    plan = probe_plan(
      pages,
      prefills=() if kind == "decode" else (1,),
      decodes=1 if kind in ("decode", "mixed") else 0,
    )
    rows = RowState(pages, self.config.vocab_size)
    inputs = step_inputs(plan, largest, rows, serves_fresh=kind == "fresh")
    (num_tokens,) = inputs.batch.tokens.shape
    step = getattr(steps, f"{plan.kind}_step")
    with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):  # kernels ask it for the chip
      whole = (None, (0, self.config.num_layers))
      lowered = step.trace(*arguments, inputs, *whole).lower(lowering_platforms=(self.platform,))
    try:
      compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
      if "RESOURCE_EXHAUSTED" in str(error):
        raise TooLarge(str(error)) from error
      raise
    memory = compiled.memory_analysis()
    return StepNeeds(
      kind=kind,
      num_tokens=num_tokens,
      arguments_bytes=memory.argument_size_in_bytes,
      aliased_bytes=memory.alias_size_in_bytes,
      fresh_bytes=memory.output_size_in_bytes - memory.alias_size_in_bytes,
      temporary_bytes=memory.temp_size_in_bytes,
      code_bytes=memory.generated_code_size_in_bytes,
      collectives=count_collectives(compiled.as_text()),
    )


def _device_bytes(shapes) -> int:
  """Of arrays on one device, without the padding of its layout."""
  return sum(
    int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize
    for x in jax.tree.leaves(shapes)
  )


def count_collectives(text: str) -> dict[str, dict[str, int]]:
  """How often each collective stands in a compiled program: place -> collective -> count.

  Places: `always`; `branches`, which a step may skip; `loops`, whose trip counts are not known.
  """
  found: dict[str, collections.Counter[str]] = {}
  called: dict[str, set[str]] = {}
  places: dict[str, set[str]] = {"branches": set(), "loops": set()}
  for name, line in _instructions(text):
    match = re.search(rf"\s({'|'.join(_COLLECTIVES)})(-start)?\(", line)
    if match:
      found.setdefault(name, collections.Counter())[match[1]] += 1
    callees = set(re.findall(r"(?:calls|to_apply|body|condition|computation)=%?([\w.\-]+)", line))
    for branches in re.findall(r"branch_computations=\{([^}]*)\}", line):
      callees |= {branch.strip().lstrip("%") for branch in branches.split(",")}
    called.setdefault(name, set()).update(callees)
    for place, opcode in (("loops", "while"), ("branches", "conditional")):
      if re.search(rf"\s{opcode}\(", line):
        places[place] |= callees
  for names in places.values():  # and what they call
    unseen = set(names)
    while unseen:
      unseen = {callee for name in unseen for callee in called.get(name, ())} - names
      names |= unseen
  counts = {place: collections.Counter() for place in ("always", "branches", "loops")}
  for name, counter in found.items():
    place = next((p for p in ("loops", "branches") if name in places[p]), "always")
    counts[place].update(counter)
  return {place: dict(sorted(counter.items())) for place, counter in counts.items()}


def _instructions(text: str) -> Iterator[tuple[str, str]]:
  """(computation, instruction) of each line of HLO text that is an instruction."""
  name = ""
  for line in text.splitlines():
    header = re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line)
    if header:
      name = header[1]
    elif line.startswith(" ") and " = " in line:
      yield name, line.split(", metadata=")[0]


def at_depth(shallow: Needs, deep: Needs, depths: tuple[int, int], num_layers: int) -> Needs:
  """What `num_layers` layers need, on the line through two depths: layers are alike."""
  low, high = depths

  def line(a, b):
    if isinstance(a, dict):
      return {name: line(a.get(name, 0), b.get(name, 0)) for name in sorted(a.keys() | b.keys())}
    return a + round((b - a) * (num_layers - low) / (high - low))

  def step(a: StepNeeds, b: StepNeeds) -> StepNeeds:
    names = [field.name for field in dataclasses.fields(a) if field.name not in _SAME_AT_ANY_DEPTH]
    return dataclasses.replace(
      b, **{name: line(getattr(a, name), getattr(b, name)) for name in names}
    )

  return dataclasses.replace(
    deep,
    params_bytes=line(shallow.params_bytes, deep.params_bytes),
    cache_bytes=line(shallow.cache_bytes, deep.cache_bytes),
    steps=tuple(map(step, shallow.steps, deep.steps)),
  )


def collectives_per_layer(
  shallow: Needs, deep: Needs, depths: tuple[int, int]
) -> list[dict[str, float]]:
  """What each layer adds to the collectives of a step, in the order of the steps."""
  low, high = depths
  each = []
  for a, b in zip(shallow.steps, deep.steps, strict=True):
    few, many = a.collectives["always"], b.collectives["always"]
    more = {name: many.get(name, 0) - few.get(name, 0) for name in sorted(few.keys() | many.keys())}
    each.append({name: count / (high - low) for name, count in more.items() if count})
  return each


def largest_fit(
  needed_bytes: Callable[[int], int | None],
  *,
  usable_bytes: float,
  first: int,
  bytes_each: float,
  max_tries: int = 10,
) -> int | None:
  """The largest count whose `needed_bytes` are at most `usable_bytes`; None if not even 1 fits.

  `needed_bytes` is asked as seldom as possible, but always for the answer. It grows with the count
  by at least `bytes_each`, on a line if the answer is to be exact, and is None for what the device
  can hold in no way.
  """
  low, low_bytes = 0, 0  # the largest that is known to fit; 0 is none
  high, high_bytes = math.inf, None  # the smallest that is known not to
  slope, guess = bytes_each, first
  for _ in range(max_tries):
    guess_bytes = needed_bytes(guess)
    if low and guess_bytes is not None:
      slope = max(bytes_each, (guess_bytes - low_bytes) / (guess - low))
    if guess_bytes is not None and guess_bytes <= usable_bytes:
      low, low_bytes = guess, guess_bytes
    else:
      high, high_bytes = guess, guess_bytes
    if high - low == 1 or (low and usable_bytes - low_bytes < bytes_each):
      break
    if high == guess and guess_bytes is None:
      guess = (low + high) // 2
    elif low:
      if high_bytes is not None:
        slope = max(bytes_each, (high_bytes - low_bytes) / (high - low))
      guess = min(low + max(1, int((usable_bytes - low_bytes) // slope)), high - 1)
    else:
      guess = max(1, guess - math.ceil((guess_bytes - usable_bytes) / slope))
  return low or None
