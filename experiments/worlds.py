"""The two worlds an experiment can run in: this machine's devices, or a model of others."""

from __future__ import annotations

import gc
import math
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from configs.hardware import HARDWARE, link
from configs.models import MODELS
from experiments.fetch_model import CHECKPOINTS, fetch
from pdjax.analysis.capacity import StepTimes, measure
from pdjax.config import STRATEGIES, ExperimentConfig, PoolSpec
from pdjax.core.clock import Clock, VirtualClock, WallClock
from pdjax.core.model_config import ModelConfig
from pdjax.core.names import pick
from pdjax.core.plan import StepPlan
from pdjax.scheduling.pages import PageConfig
from pdjax.scheduling.policies import HALF, POLICIES, UNMIXED
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

  def load(self) -> None:
    """Reads the weights and finds the devices, the last that can be wrong with the input."""
    ...

  def prepare(self, show: Callable[[str], None]) -> None:
    """Compiles and measures."""
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
  if cache.layout == "slots" and cache.num_pages not in (None, cache.num_rows * per_row):
    raise ValueError(
      f"cache.num_pages={cache.num_pages} goes with cache.layout=paged; in slots each of the "
      f"{cache.num_rows} rows has {per_row} pages of its own"
    )
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
  pools = []
  for device, spec in enumerate(pick(STRATEGIES, strategy, "strategy")(config.num_devices)):
    policy = pick(POLICIES, policy_name(config, spec), "policy")
    scheduler = Scheduler(policy, pages, limits(config, spec, pages))
    pools.append(Pool(spec.name, spec.role, scheduler, executor(device)))
  return Cluster(pools)


def policy_name(config: ExperimentConfig, spec: PoolSpec) -> str:
  """The policy of a pool.

  Raises:
    ValueError: `scheduler.policy` names one that cannot serve a mixed pool.
  """
  if spec.role != "mixed" or config.scheduler.policy is None:
    return spec.policy
  if config.scheduler.policy in HALF:
    raise ValueError(
      f"scheduler.policy={config.scheduler.policy} serves only half of a request, and mixed pools "
      f"have nobody to hand it to; try {', '.join(sorted(POLICIES.keys() - HALF))}"
    )
  return config.scheduler.policy


def limits(config: ExperimentConfig, spec: PoolSpec, pages: PageConfig) -> SchedulerConfig:
  """The limits of a pool's steps: the scheduler keeps them, the engine compiles shapes for them."""
  whole = config.scheduler.prefill_budget or max(pages.capacity_tokens, pages.num_rows)
  return SchedulerConfig(
    token_budget=whole if spec.takes_whole_prompts else config.scheduler.token_budget,
    chunk_prompts=not spec.takes_whole_prompts,
    decodes=spec.role != "prefill",
    watermark=config.scheduler.watermark,
  )


def largest_budgets(config: ExperimentConfig, pages: PageConfig) -> tuple[int, int]:
  """The most tokens of any step, and of any that mixes prefill and decode, over all strategies."""
  budgets, mixing = [], [pages.num_rows]
  for strategy in config.strategies:
    for spec in STRATEGIES[strategy](config.num_devices):
      budgets.append(limits(config, spec, pages).token_budget)
      if policy_name(config, spec) not in UNMIXED:
        mixing.append(budgets[-1])
  return max(budgets), max(mixing)


class SimWorld:
  """Devices as a latency model sees them, in virtual time. Imports no jax."""

  bytes_per_value = 2

  def __init__(self, config: ExperimentConfig, longest: tuple[int, int], context: int):
    self.model = pick(MODELS, config.model, "model")
    device: Device = pick(HARDWARE, config.hardware, "hardware")
    self._link = link(config.link)
    self._longest, self._context = longest, context
    self._latency = Roofline(model=self.model, device=device)
    fits = num_pages(model=self.model, device=device, page_size=config.cache.page_size)
    self.pages = make_pages(config, longest, None if config.cache.layout == "slots" else fits)
    if self.pages.num_pages > fits:
      raise ValueError(
        f"{self.pages.num_pages} pages of {config.cache.page_size} tokens do not fit beside the "
        f"weights of {self.model.name} on {device.name}: {fits} do"
      )
    self.label = f"simulated {self.model.name} on {config.num_devices} x {device.label}"
    caveat = "step times are a latency model's, not measured"
    if not device.is_calibrated:
      caveat += ", and from data-sheet peaks: too fast by a third or more"
    self.caveats = [caveat, *_beyond_training(self.model, longest)]

  def load(self) -> None:
    pass

  def prepare(self, show: Callable[[str], None]) -> None:
    self.alone = self.together = measure(
      self.pages,
      self._latency.step_s,
      longest_prompt=self._longest[0],
      context=self._context,
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

  def __init__(self, config: ExperimentConfig, longest: tuple[int, int], context: int):
    self._config, self._longest, self._context = config, longest, context
    # A wrong name or a broken file fails before jax is even imported.
    self._checkpoint = _find_checkpoint(config.model)
    self.pages = make_pages(config, longest, None)
    self._executors: list[Executor] = []

  def load(self) -> None:
    config, num_devices = self._config, self._config.num_devices
    (self.model, weights), self._tokenizer = _read(config.model, self._checkpoint)

    from pdjax.engine.mesh import ensure_devices
    from pdjax.models.transformer import from_arrays, random_arrays

    self._devices = ensure_devices(num_devices)
    if weights is None:
      weights = random_arrays(self.model, seed=0)
    self._model = from_arrays(self.model, weights)
    platform = self._devices[0].platform
    name = pathlib.Path(config.model).name
    self.label = f"{name} on {num_devices} {platform} device{'s' if num_devices > 1 else ''}"
    self.caveats = _beyond_training(self.model, self._longest)
    if platform == "cpu" and num_devices > 1:
      self.caveats.insert(
        0, "the CPU devices share the same cores and memory, so a busy pool slows the others down"
      )

  def prepare(self, show: Callable[[str], None]) -> None:
    from pdjax.engine.build import build_executors, default_buckets, warm_up

    config, devices = self._config, self._devices
    num_devices = len(devices)
    show(f"warm-up: compiling for {num_devices} devices")
    whole_budget, chunk_budget = largest_budgets(config, self.pages)
    buckets = default_buckets(self.pages, whole_budget=whole_budget, chunk_budget=chunk_budget)
    self._executors, _ = build_executors(
      self._model, self.pages, buckets, devices, layout=config.cache.layout
    )
    roles = [set() for _ in devices]
    for strategy in config.strategies:
      for device, spec in enumerate(STRATEGIES[strategy](num_devices)):
        roles[device].add(spec.role)
    self._able = {  # by kind of step; a shape that no pool uses is not compiled to be timed
      kind: [i for i, own in enumerate(roles) if own & {kind, "mixed"}]
      for kind in ("prefill", "decode")
    }
    for number, line in enumerate(warm_up(self._executors, roles), 1):
      show(f"warm-up, shape {number}: {line}")
    where = dict(longest_prompt=self._longest[0], context=self._context, repeats=3)
    show("timing steps, one device at a time")
    self.alone = measure(
      self.pages, lambda plan: self._time(self._able[plan.kind][:1], plan), **where
    )
    show("timing steps, all devices together")
    self.together = measure(
      self.pages, lambda plan: self._time(self._able[plan.kind], plan), **where
    )
    for executor in self._executors:
      executor.reset()
    # What compiling left behind is never garbage: a full collection in a run would be a gap.
    gc.collect()
    gc.freeze()

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


def _find_checkpoint(name: str) -> pathlib.Path | None:
  """The GGUF file of a model, fetched if need be; None for the tiny model, which has no file."""
  if name.endswith(".gguf"):
    path = pathlib.Path(name)
    if not path.is_file():
      raise ValueError(f"model file {name} does not exist; give the path of a .gguf file")
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


def _read(name: str, checkpoint: pathlib.Path | None):
  """((shape, weights or None for random ones), tokenizer) of a model. Imports no jax."""
  from pdjax.tokenizer import ByteTokenizer, Tokenizer

  if checkpoint is None:
    return (MODELS[name], None), ByteTokenizer(MODELS[name].vocab_size)
  from pdjax.models.checkpoints.gguf import load_gguf

  return load_gguf(checkpoint), Tokenizer.from_gguf(checkpoint)


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
