"""The two worlds an experiment can run in: this machine's devices, or a model of others."""

from __future__ import annotations

import dataclasses
import gc
import pathlib
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from configs.hardware import HARDWARE, link
from configs.models import MODELS
from pdjax.analysis.capacity import StepTimes, measure, probe_points
from pdjax.config import ExperimentConfig, PoolSpec
from pdjax.core.clock import Clock, VirtualClock, WallClock
from pdjax.core.costs import StepCounts, count_plan
from pdjax.core.model_config import ModelConfig
from pdjax.core.names import pick
from pdjax.core.plan import StepPlan
from pdjax.deployment import largest_budgets, make_pages, uses_of
from pdjax.llm import open_model
from pdjax.scheduling.pages import PageConfig
from pdjax.scheduling.scheduler import StepTime
from pdjax.serving.executor import Executor, PageShape
from pdjax.serving.step_time import FittedStepTime
from pdjax.sim.hardware import Device
from pdjax.sim.roofline import Roofline, num_pages
from pdjax.sim.sim_executor import SimExecutor
from pdjax.sources import WHEEL_FILES, resolve
from pdjax.workloads.traces import Blocks

ENGINE_MODELS = ("tiny", *WHEEL_FILES)


class World(Protocol):
  """A place to serve. `alone` are step times of one pool while the others idle (targets come from
  them), `together` those while all are busy (capacity comes from them): of `typical_pools`, whose
  memory is `pages`.
  """

  label: str
  model: ModelConfig
  pages: PageConfig
  alone: StepTimes
  together: StepTimes
  bytes_per_value: int
  caveats: list[str]

  def load(self) -> None:
    """Reads the weights and finds the devices, the last that can be wrong with the input."""
    ...

  def prepare(self, show: Callable[[str], None]) -> None:
    """Compiles and measures."""
    ...

  def prompts(
    self, lengths, seed: int, *, chat: bool, blocks: Blocks | None
  ) -> list[tuple[int, ...]] | None:
    """What the requests say; None where words make no difference."""
    ...

  def pages_of(self, devices: tuple[int, ...]) -> PageConfig: ...

  def executor(self, devices: tuple[int, ...]) -> Executor: ...

  def clock(self) -> Clock: ...

  def step_time(self, devices: tuple[int, ...]) -> StepTime:
    """How long a step takes there, for policies that plan by time; for one pool and one run."""
    ...

  def top2_margin(self, token_ids: Sequence[int]) -> float | None: ...


def pools_of(config: ExperimentConfig, strategies: Iterable[str] | None = None) -> list[PoolSpec]:
  """The pools of these strategies of an experiment, or of all: they take turns on the devices."""
  names = config.strategy_names if strategies is None else strategies
  return [spec for name in names for spec in config.pools_of(name)]


def typical_pools(config: ExperimentConfig) -> list[PoolSpec]:
  """Those that rates and targets are derived from: of equal size, unless they are all there is."""
  return pools_of(config, config.strategies or None)


def _tp_of(config: ExperimentConfig, kind: str) -> int:
  """Over how many devices the first of `typical_pools` is split that runs such steps."""
  other = {"prefill": "decode", "decode": "prefill"}[kind]
  return next(len(spec.devices) for spec in typical_pools(config) if spec.role != other)


class SimWorld:
  """Devices as a latency model sees them, in virtual time. Imports no jax."""

  bytes_per_value = 2

  def __init__(self, config: ExperimentConfig, longest: tuple[int, int], context: int):
    self.model = pick(MODELS, config.model, "model")
    device: Device = pick(HARDWARE, config.hardware, "hardware")
    self._config, self._longest, self._context = config, longest, context
    self._link = link(config.link)
    sizes = sorted({len(spec.devices) for spec in pools_of(config)})
    self._latency = {
      tp: Roofline(model=self.model, device=device, tp=tp, link=self._link) for tp in sizes
    }
    self._pages = {tp: self._make_pages(device, tp) for tp in sizes}
    self.pages = self._pages[_tp_of(config, "decode")]
    self.label = (
      f"simulated {self.model.name} on {config.num_devices} x {device.label}{_each(config)}"
    )
    caveat = "step times are a latency model's, not measured"
    if not device.is_calibrated:
      caveat += ", and from data-sheet peaks: too fast by a third or more"
    split = " and ".join(f"tp={tp}" for tp in sizes if tp > 1)
    if split:
      caveat += (
        f"; what {split} costs is uncalibrated: a share of each operator and a link's data sheet"
      )
    self.caveats = [caveat, *_beyond_training(self.model, longest)]

  def _make_pages(self, device: Device, tp: int) -> PageConfig:
    cache = self._config.cache
    fits = num_pages(model=self.model, device=device, page_size=cache.page_size, tp=tp)
    pages = _make_pages(self._config, self._longest, None if cache.layout == "slots" else fits)
    if pages.num_pages > fits:
      raise ValueError(
        f"{pages.num_pages} pages of {cache.page_size} tokens do not fit beside the "
        f"weights of {self.model.name} on {device.name}: {fits} do"
      )
    return pages

  def load(self) -> None:
    pass

  def prepare(self, show: Callable[[str], None]) -> None:
    latency = {kind: self._latency[_tp_of(self._config, kind)] for kind in ("prefill", "decode")}
    self.alone = self.together = measure(
      self.pages,
      lambda plan: latency[plan.kind].step_s(plan),
      longest_prompt=self._longest[0],
      context=self._context,
    )

  def prompts(self, lengths, seed: int, *, chat: bool, blocks: Blocks | None) -> None:
    return None

  def pages_of(self, devices: tuple[int, ...]) -> PageConfig:
    return self._pages[len(devices)]

  def executor(self, devices: tuple[int, ...]) -> SimExecutor:
    tp, model = len(devices), self.model
    return SimExecutor(
      step_s=self._latency[tp].step_s,
      link=self._link,
      kv_bytes_per_token=model.kv_bytes_per_token(self.bytes_per_value),
      # Each device of a pool sends its kv heads to its counterpart in the other, all at once.
      num_links=min(tp, model.num_kv_heads),
      page_shape=PageShape(
        page_size=self.pages.page_size,
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype="bfloat16",
      ),
    )

  def clock(self) -> VirtualClock:
    return VirtualClock()

  def step_time(self, devices: tuple[int, ...]) -> StepTime:
    latency = self._latency[len(devices)]

    def predict_step_s(counts: StepCounts) -> float:
      return latency.terms_of(counts).total_s

    return predict_step_s

  def top2_margin(self, token_ids: Sequence[int]) -> None:
    return None


class JaxWorld:
  """This machine's devices, a real model, real time.

  In float32 on a CPU, where it is faster than bfloat16 in jax 0.10 and exact to compare; in
  bfloat16 elsewhere, which kernels are made for.
  """

  def __init__(self, config: ExperimentConfig, longest: tuple[int, int], context: int):
    self._config, self._longest, self._context = config, longest, context
    # A wrong name or a broken file fails before jax is even imported.
    self._path = _find(config.model)
    self.pages = _make_pages(config, longest)
    self._executors: dict[tuple[int, ...], Executor] = {}

  def load(self) -> None:
    config, num_devices = self._config, self._config.num_devices
    checkpoint, self._tokenizer = open_model(self._path, check_weights=config.check_weights)
    self.model = checkpoint.config

    from pdjax.engine.mesh import ensure_devices, make_mesh

    devices = ensure_devices(num_devices)
    self._groups = {spec.devices: [devices[i] for i in spec.devices] for spec in pools_of(config)}
    platform = devices[0].platform
    dtype, self.bytes_per_value = ("float32", 4) if platform == "cpu" else ("bfloat16", 2)
    target = make_mesh(next(iter(self._groups.values())))
    self._model = checkpoint.load(dtype=dtype, target=target)
    name = pathlib.Path(config.model).name
    plural = "s" if num_devices > 1 else ""
    self.label = f"{name} on {num_devices} {platform} device{plural}{_each(config)}"
    self.caveats = _beyond_training(self.model, self._longest)
    if platform == "cpu" and num_devices > 1:
      self.caveats.insert(
        0, "the CPU devices share the same cores and memory, so a busy pool slows the others down"
      )

  def prepare(self, show: Callable[[str], None]) -> None:
    from pdjax.engine.build import build_executors, default_buckets, warm_up

    config, specs = self._config, pools_of(self._config)
    show(f"warm-up: compiling for {config.num_devices} devices{_each(config)}")
    whole_budget, chunk_budget = largest_budgets(specs, config.scheduler, self.pages)
    buckets = default_buckets(self.pages, whole_budget=whole_budget, chunk_budget=chunk_budget)
    uses = uses_of(specs, config.scheduler)
    executors = build_executors(
      self._model,
      self.pages,
      buckets,
      [self._groups[group] for group in uses],
      layout=config.cache.layout,
      attention=config.attention,
    )
    self._executors = dict(zip(uses, executors, strict=True))
    self._typical = {spec.devices for spec in typical_pools(config)}
    self._able = {  # by kind of step; a shape that no pool uses is not compiled to be timed
      kind: [self._executors[g] for g, own in uses.items() if kind in own and g in self._typical]
      for kind in ("prefill", "decode")
    }
    for number, line in enumerate(warm_up(executors, list(uses.values())), 1):
      show(f"warm-up, shape {number}: {line}")
    # No step here takes more: where all pools cut prompts, the longest is as many chunks.
    most = min(self._longest[0], whole_budget)
    where = dict(longest_prompt=most, context=self._context)
    show("timing steps, one pool at a time")
    alone = measure(
      self.pages, lambda plan: _time(self._able[plan.kind][:1], plan), **where, repeats=3
    )
    show("timing steps, all pools together")
    together = measure(
      self.pages, lambda plan: _time(self._able[plan.kind], plan), **where, repeats=3
    )
    took_s = {"prefill": together.prefill_s, "decode": together.decode_s}
    self._measured = [
      (count_plan(plan), took_s[kind](size))
      for kind, size, plan in probe_points(self.pages, **where)
    ]
    self.alone = _in_chunks(alone, self._longest[0])
    self.together = _in_chunks(together, self._longest[0])
    for executor in executors:
      executor.reset()
    # What compiling left behind is never garbage: a full collection in a run would be a gap.
    gc.collect()
    gc.freeze()

  def prompts(
    self, lengths, seed: int, *, chat: bool, blocks: Blocks | None
  ) -> list[tuple[int, ...]]:
    from pdjax.workloads.prompts import block_prompts, text_prompts

    if blocks is not None:
      return block_prompts(self._tokenizer, lengths, blocks, seed)
    return text_prompts(self._tokenizer, lengths, seed, chat=chat)

  def pages_of(self, devices: tuple[int, ...]) -> PageConfig:
    return self.pages

  def executor(self, devices: tuple[int, ...]) -> Executor:
    self._executors[devices].reset()
    return self._executors[devices]

  def clock(self) -> WallClock:
    return WallClock()

  def step_time(self, devices: tuple[int, ...]) -> FittedStepTime:
    return FittedStepTime(self._measured if devices in self._typical else ())

  def top2_margin(self, token_ids: Sequence[int]) -> float:
    return next(iter(self._executors.values())).top2_margin(token_ids)


def _time(executors: Sequence[Executor], plan: StepPlan) -> float:
  start_s = time.perf_counter()
  for ticket in [executor.submit(plan, 0.0) for executor in executors]:
    ticket.result()
  return time.perf_counter() - start_s


def _in_chunks(times: StepTimes, longest_prompt: int) -> StepTimes:
  """With what the longest prompt takes, in steps of the largest size that was timed."""
  most, most_s = times.prefill[-1]
  if longest_prompt <= most:
    return times
  whole = (longest_prompt, most_s * longest_prompt / most)
  return dataclasses.replace(times, prefill=(*times.prefill, whole))


def _make_pages(
  config: ExperimentConfig, longest: tuple[int, int], num_pages: int | None = None
) -> PageConfig:
  return make_pages(config.cache, sum(longest) - 1, num_pages)  # the last output is never cached


def _each(config: ExperimentConfig) -> str:
  return "" if config.tp == 1 or not config.strategies else f", {config.tp} a pool"


def _find(name: str) -> pathlib.Path:
  """The path of a model's checkpoint, downloaded if need be."""
  if name in MODELS and name not in ENGINE_MODELS:
    raise ValueError(
      f"model {name!r} has no weights here: the engine runs {', '.join(ENGINE_MODELS)}, the path "
      f"of a checkpoint or a Hugging Face repo id; --backend=sim simulates any model"
    )
  return resolve(name, show=lambda line: print(line, file=sys.stderr))


def _beyond_training(model: ModelConfig, longest: tuple[int, int]) -> list[str]:
  """The caveat about sequences that the model was never trained for, if there may be any."""
  if sum(longest) <= model.max_len:
    return []
  return [
    f"sequences of up to {sum(longest)} tokens are longer than the {model.max_len} that "
    f"{model.name} was trained for, so its words would be poor"
  ]


def make_world(config: ExperimentConfig, longest: tuple[int, int], context: int) -> World:
  """The world of an experiment whose decodes have `context` tokens on average."""
  return (JaxWorld if config.backend == "jax" else SimWorld)(config, longest, context)
