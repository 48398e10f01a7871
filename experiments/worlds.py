"""The two worlds an experiment can run in: this machine's devices, or a model of others."""

from __future__ import annotations

import math
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from configs.hardware import HARDWARE, link
from configs.models import MODELS
from experiments.fetch_model import CHECKPOINTS, fetch
from pdjax.analysis.capacity import StepTimes, measure
from pdjax.config import STRATEGIES, ExperimentConfig
from pdjax.core.clock import Clock, VirtualClock, WallClock
from pdjax.core.model_config import ModelConfig
from pdjax.core.names import pick
from pdjax.core.plan import StepPlan
from pdjax.scheduling.pages import PageConfig
from pdjax.scheduling.policies import POLICIES
from pdjax.scheduling.scheduler import Scheduler, SchedulerConfig
from pdjax.serving.cluster import Cluster, Pool
from pdjax.serving.executor import Executor
from pdjax.sim.hardware import Device
from pdjax.sim.roofline import Roofline, num_pages
from pdjax.sim.sim_executor import SimExecutor


class World(Protocol):
  """A place to serve. `alone` are step times of one device while the others idle (targets come
  from them), `together` those while all are busy (capacity comes from them).
  """

  label: str
  model: ModelConfig
  pages: PageConfig
  alone: StepTimes
  together: StepTimes
  bytes_per_value: int
  caveats: list[str]

  def prepare(self, show: Callable[[str], None]) -> None:
    """Loads, compiles and measures."""
    ...

  def prompts(self, lengths, seed: int, *, chat: bool) -> list[tuple[int, ...]] | None: ...

  def executor(self, device: int) -> Executor: ...

  def clock(self) -> Clock: ...

  def top2_margin(self, token_ids: Sequence[int]) -> float | None: ...


def make_pages(config: ExperimentConfig, longest: tuple[int, int], pages: int | None) -> PageConfig:
  """The cache of each pool, from the config and the longest (prompt, output) of the workload."""
  cache = config.cache
  max_len = cache.max_len or sum(longest) - 1  # the last output token is never cached
  per_row = math.ceil(max_len / cache.page_size)
  return PageConfig(
    num_rows=cache.num_rows,
    page_size=cache.page_size,
    pages_per_row=per_row,
    num_pages=cache.num_pages or pages or cache.num_rows * per_row,
    contiguous=cache.layout == "slots",
  )


def make_cluster(
  config: ExperimentConfig,
  strategy: str,
  pages: PageConfig,
  executor: Callable[[int], Executor],
) -> Cluster:
  """The pools of a strategy, one device each."""
  whole = config.scheduler.prefill_budget or max(pages.capacity_tokens, pages.num_rows)
  pools = []
  for device, spec in enumerate(pick(STRATEGIES, strategy, "strategy")(config.num_devices)):
    limits = SchedulerConfig(
      token_budget=whole if spec.takes_whole_prompts else config.scheduler.token_budget,
      chunk_prompts=not spec.takes_whole_prompts,
      watermark=config.scheduler.watermark,
    )
    scheduler = Scheduler(pick(POLICIES, spec.policy, "policy"), pages, limits)
    pools.append(Pool(spec.name, spec.role, scheduler, executor(device)))
  return Cluster(pools)


class SimWorld:
  """Devices as a latency model sees them, in virtual time. Imports no jax."""

  bytes_per_value = 2

  def __init__(self, config: ExperimentConfig, longest: tuple[int, int]):
    self.model = pick(MODELS, config.model, "model")
    device: Device = pick(HARDWARE, config.hardware, "hardware")
    self._link = link(config.link)
    self._longest = longest
    self._latency = Roofline(model=self.model, device=device)
    fits = num_pages(model=self.model, device=device, page_size=config.cache.page_size)
    self.pages = make_pages(config, longest, None if config.cache.layout == "slots" else fits)
    if self.pages.num_pages > fits:
      raise ValueError(
        f"{self.pages.num_pages} pages of {config.cache.page_size} tokens do not fit beside the "
        f"weights of {self.model.name} on {device.name}: {fits} do"
      )
    self.label = f"simulated {self.model.name} on {config.num_devices} x {device.label}"
    self.caveats = [
      "step times are a latency model's, not measured"
      + ("" if device.is_calibrated else ", and from data-sheet peaks: too fast by a third or more")
    ]

  def prepare(self, show: Callable[[str], None]) -> None:
    prompt, output = self._longest
    self.alone = self.together = measure(
      self.pages, self._latency.step_s, longest_prompt=prompt, context=prompt // 4 + output // 2
    )

  def prompts(self, lengths, seed: int, *, chat: bool) -> None:
    return None

  def executor(self, device: int) -> SimExecutor:
    return SimExecutor(
      step_s=self._latency.step_s,
      link=self._link,
      kv_bytes_per_token=self.model.kv_bytes_per_token(self.bytes_per_value),
    )

  def clock(self) -> VirtualClock:
    return VirtualClock()

  def top2_margin(self, token_ids: Sequence[int]) -> None:
    return None


class JaxWorld:
  """This machine's devices, a real model, real time."""

  bytes_per_value = 4  # float32: faster than bfloat16 on CPU in jax 0.10, and exact to compare

  def __init__(self, config: ExperimentConfig, longest: tuple[int, int]):
    self._config, self._longest = config, longest
    self._checkpoint = _find_checkpoint(config.model)  # a wrong name fails before jax starts
    self.pages = make_pages(config, longest, None)
    self._executors: list[Executor] = []

  def prepare(self, show: Callable[[str], None]) -> None:
    from pdjax.engine.build import build_executors, default_buckets, warm_up
    from pdjax.engine.mesh import ensure_devices

    config, num_devices = self._config, self._config.num_devices
    devices = ensure_devices(num_devices)
    show(f"loading {config.model}")
    self._model, self._tokenizer = _load(config.model, self._checkpoint)
    self.model = self._model.config
    platform = devices[0].platform
    self.label = f"{config.model} on {num_devices} {platform} devices"
    self.caveats = (
      ["the CPU devices share the same cores and memory, so a busy pool slows the others down"]
      if platform == "cpu"
      else []
    )
    whole = config.scheduler.prefill_budget or self.pages.capacity_tokens
    buckets = default_buckets(
      self.pages, whole_budget=whole, chunk_budget=config.scheduler.token_budget
    )
    self._executors, self._steps = build_executors(
      self._model, self.pages, buckets, devices, layout=config.cache.layout
    )
    roles = [set() for _ in devices]
    for strategy in config.strategies:
      for device, spec in enumerate(STRATEGIES[strategy](num_devices)):
        roles[device].add(spec.role)
    for number, line in enumerate(warm_up(self._executors, roles), 1):
      show(f"warm-up, shape {number}: {line}")
    prompt, output = self._longest
    where = dict(longest_prompt=prompt, context=prompt // 4 + output // 2, repeats=3)
    show("timing steps, one device at a time")
    self.alone = measure(self.pages, lambda plan: self._time([0], plan), **where)
    show("timing steps, all devices together")
    self.together = measure(
      self.pages, lambda plan: self._time(list(range(num_devices)), plan), **where
    )
    for executor in self._executors:
      executor.reset()

  def _time(self, devices: list[int], plan: StepPlan) -> float:
    start_s = time.perf_counter()
    for ticket in [self._executors[device].submit(plan, 0.0) for device in devices]:
      ticket.result()
    return time.perf_counter() - start_s

  def prompts(self, lengths, seed: int, *, chat: bool) -> list[tuple[int, ...]]:
    from pdjax.workloads.prompts import text_prompts

    return text_prompts(self._tokenizer, lengths, seed, chat=chat)

  def executor(self, device: int) -> Executor:
    self._executors[device].reset()
    return self._executors[device]

  def clock(self) -> WallClock:
    return WallClock()

  def top2_margin(self, token_ids: Sequence[int]) -> float:
    return self._executors[0].top2_margin(token_ids)

  @property
  def num_traces(self) -> int:
    return self._steps.num_traces.total()


def _find_checkpoint(name: str) -> pathlib.Path | None:
  """The GGUF file of a model, fetched if need be; None for the tiny model, which has no file."""
  if name.endswith(".gguf"):
    path = pathlib.Path(name)
    if not path.is_file():
      raise ValueError(f"model file {name} does not exist")
    return path
  pick(MODELS, name, "model")
  if name == "tiny":
    return None
  if name not in CHECKPOINTS:
    runs = ", ".join(["tiny", *CHECKPOINTS])
    raise ValueError(
      f"model {name!r} has no weights here: the engine runs {runs} or a .gguf file; "
      f"--backend=sim simulates any model"
    )
  return fetch(name)


def _load(name: str, checkpoint: pathlib.Path | None):
  from pdjax.models.checkpoints.gguf import load_gguf
  from pdjax.models.transformer import from_arrays, random_arrays
  from pdjax.tokenizer import ByteTokenizer, Tokenizer

  if checkpoint is None:
    config = MODELS[name]
    return from_arrays(config, random_arrays(config, seed=0)), ByteTokenizer(config.vocab_size)
  config, arrays = load_gguf(checkpoint)
  return from_arrays(config, arrays), Tokenizer.from_gguf(checkpoint)


def make_world(config: ExperimentConfig, longest: tuple[int, int]) -> World:
  return (JaxWorld if config.backend == "jax" else SimWorld)(config, longest)
