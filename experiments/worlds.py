"""What an experiment can run in: this machine, in one process or several, or a model of others."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import gc
import itertools
import math
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from configs.hardware import HARDWARE, link
from configs.latency import LATENCY
from configs.models import MODELS
from pdjax.analysis.capacity import StepTimes, measure, probe_points
from pdjax.config import ExperimentConfig, PoolSpec, check_platforms
from pdjax.core.clock import Clock, VirtualClock, WallClock
from pdjax.core.costs import StepCounts, count_plan
from pdjax.core.device_group import DeviceGroup, split_layers
from pdjax.core.events import Event, Step, Stroke
from pdjax.core.model_config import ModelConfig
from pdjax.core.names import pick
from pdjax.core.plan import StepPlan
from pdjax.deployment import (
  check_split,
  largest_budgets,
  layer_groups_of,
  make_pages,
  policy_name,
  uses_of,
)
from pdjax.llm import open_model
from pdjax.metrics.counters import Peaks
from pdjax.metrics.utilisation import first_and_last
from pdjax.remote.executor import RemoteExecutor, start_all
from pdjax.remote.hosts import call, read_hosts, start_on_hosts
from pdjax.remote.process import WorkerProcess, start_process
from pdjax.remote.protocol import ProtocolError, WorkerSetup
from pdjax.scheduling.pages import PageConfig
from pdjax.scheduling.policies import POLICIES
from pdjax.scheduling.scheduler import StepTime
from pdjax.serving.executor import Executor, PageShape, PoolLost
from pdjax.serving.step_time import FittedStepTime
from pdjax.sim.hardware import Device, Link
from pdjax.sim.latency_model import LatencyModel, has_range
from pdjax.sim.roofline import num_pages
from pdjax.sim.sim_executor import SimExecutor
from pdjax.sources import WHEEL_FILES, resolve
from pdjax.workloads.traces import Blocks

if TYPE_CHECKING:  # it imports jax
  from pdjax.models.checkpoints.checkpoint import Checkpoint

ENGINE_MODELS = ("tiny", *WHEEL_FILES)
INSTANT = "instant"  # in simulation, hardware of pools whose work takes no time: see `_instant`


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
  processes: list[dict[str, Any]] | None  # devices and cores of each pool; None: all in this one

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

  def pages_of(self, group: DeviceGroup) -> PageConfig: ...

  def executor(self, group: DeviceGroup) -> Executor: ...

  def clock(self) -> Clock: ...

  def step_time(self, group: DeviceGroup) -> StepTime:
    """How long a step takes there, for policies that plan by time; for one pool and one run."""
    ...

  def top2_margin(self, token_ids: Sequence[int]) -> float | None: ...

  def extrapolated(self, runs: Mapping[str, Iterable[Event]]) -> list[str]:
    """The caveat about steps of these runs whose times nobody measured the like of, if any."""
    ...

  def peaks_of(self, spec: PoolSpec) -> Peaks | None:
    """Of the devices of a pool together; None where they are not known."""
    ...

  def close(self) -> None:
    """Ends what was started to serve."""
    ...


def pools_of(config: ExperimentConfig, strategies: Iterable[str] | None = None) -> list[PoolSpec]:
  """The pools of these strategies of an experiment, or of all: they take turns on the devices."""
  names = config.strategy_names if strategies is None else strategies
  return [spec for name in names for spec in config.pools_of(name)]


def typical_pools(config: ExperimentConfig) -> list[PoolSpec]:
  """Those that rates and targets are derived from: of equal size, unless they are all there is."""
  return pools_of(config, config.strategies or None)


def _able(config: ExperimentConfig, kind: str) -> list[PoolSpec]:
  """Those of `typical_pools` that run such steps."""
  other = {"prefill": "decode", "decode": "prefill"}[kind]
  return [spec for spec in typical_pools(config) if spec.role != other]


def _all_hardware(
  config: ExperimentConfig, name: Callable[[str | None], str], form: str = "{1} x {0}"
) -> str:
  """How many devices of what the strategies have; those of pools that have others come last."""
  texts = []
  for strategy in config.strategy_names:
    specs = config.pools_of(strategy)
    kinds = {device: name(spec.hardware) for spec in specs for device in spec.devices}
    counts = collections.Counter(kinds.values())
    texts.append(" and ".join(form.format(*count) for count in counts.items()))
  return ", or ".join(dict.fromkeys(texts))


class SimWorld:
  """Devices as a latency model sees them, in virtual time. Imports no jax."""

  processes = None

  def __init__(self, config: ExperimentConfig, longest: tuple[int, int], context: int):
    self.model = pick(MODELS, config.model, "model")
    self._config, self._longest, self._context = config, longest, context
    self._link = link(config.link)
    specs = pools_of(config)
    check_split(specs, self.model, config.hand_off.layer_groups)
    groups = dict.fromkeys(spec.group for spec in specs)
    widths = {group: self._device(group.hardware).bytes_per_value for group in groups}
    self.bytes_per_value = max(widths.values())  # pages are exchanged, so pools have one type
    self._latency = {
      group: self._make_latency(group, self._inside(config.tp_link, group)) for group in groups
    }
    self._hand_over_s = {group: self._make_hand_over(group) for group in groups}
    self._pages = {spec.group: self._make_pages(spec.group) for spec in specs}
    self.pages = self._pages[_able(config, "decode")[0].group]
    labels = _all_hardware(config, lambda name: self._device(name).label)
    self.label = f"simulated {self.model.name} on {labels}{_each(config)}"
    if config.latency != "roofline":
      self.label += f", step times by {config.latency}"
    self.caveats = [self._caveat(), *_unequal(config), *_beyond_training(self.model, longest)]

  def _inside(self, name: str | None, group: DeviceGroup) -> Link:
    """What joins devices of a pool: as it is said, or as the device's are joined."""
    return link(name) if name else self._device(group.hardware).link or self._link

  def _make_hand_over(self, group: DeviceGroup) -> Callable[[int], float]:
    """What a step takes from one stage to the next, by its tokens."""
    if group.pp == 1:
      return self._latency[group].hand_over_s
    return self._make_latency(group, self._inside(self._config.pp_link, group)).hand_over_s

  def _device(self, name: str | None) -> Device:
    if name == INSTANT:
      return _instant(self._device(None))
    return pick(HARDWARE, name or self._config.hardware, "hardware")

  def _make_latency(self, group: DeviceGroup, link: Link) -> LatencyModel:
    name = self._config.latency
    if group.hardware == INSTANT:  # what its devices send each other takes no time either
      name, link = "roofline", dataclasses.replace(link, latency_s=0.0, bytes_per_s=math.inf)
    make = pick(LATENCY, name, "latency model")
    return make(self.model, self._device(group.hardware), group.tp, group.pp, link)

  def _caveat(self) -> str:
    own = [latency for group, latency in self._latency.items() if group.hardware != INSTANT]
    found = [caveat for latency in own for caveat in latency.caveats]
    if any(group.pp > 1 for group in self._latency):
      found.append("pipeline stages take their share of the layers, and hand over as the link says")
    return "; ".join(["step times are a latency model's, not measured", *dict.fromkeys(found)])

  def extrapolated(self, runs: Mapping[str, Iterable[Event]]) -> list[str]:
    num_steps, beyond = 0, collections.Counter()  # those that are, by what
    for strategy, log in runs.items():
      models = {spec.name: self._latency[spec.group] for spec in self._config.pools_of(strategy)}
      models = {name: own for name, own in models.items() if has_range(own)}
      for event in log:
        if isinstance(event, Step | Stroke) and event.pool in models:
          # Keys only grow in a stroke: as it begins and as it ends stand for half of it each.
          each = len(event.ends_s) / 2 if isinstance(event, Stroke) else 0.5
          num_steps += 2 * each
          for counts in first_and_last(event):
            if found := models[event.pool].beyond(counts):
              beyond[found[0]] += each
    if not beyond:
      return []
    (example, _), *_ = beyond.most_common(1)
    share = beyond.total() / num_steps
    return [f"{share:.0%} of steps lie beyond what was measured ({example}, for one): extrapolated"]

  def _make_pages(self, group: DeviceGroup) -> PageConfig:
    cache, device = self._config.cache, self._device(group.hardware)
    fits = num_pages(
      model=self.model,
      device=device,
      page_size=cache.page_size,
      tp=group.tp,
      pp=group.pp,
      step_tokens=largest_step(
        self._config,
        [spec for spec in pools_of(self._config) if spec.group == group],
        self._longest,
      ),
      bytes_per_weight=device.bytes_per_value,
      bytes_per_kv=self.bytes_per_value,
      bytes_per_activation=device.bytes_per_value,
    )
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
    able = {kind: _able(self._config, kind) for kind in ("prefill", "decode")}
    where = dict(longest_prompt=self._longest[0], context=self._context)

    def alone_s(plan: StepPlan) -> float:
      return self.step_time(able[plan.kind][0].group)(count_plan(plan))

    def together_s(plan: StepPlan) -> float:
      return statistics.harmonic_mean(self._every_s(spec, plan) for spec in able[plan.kind])

    # What a step takes does not depend on pages, and tables of one a row are quickly made.
    rows = dataclasses.replace(
      self.pages,
      page_size=self.pages.capacity_tokens,
      pages_per_row=1,
      num_pages=self.pages.num_rows,
    )
    self.alone = measure(rows, alone_s, **where)
    self.together = measure(rows, together_s, **where)

  def _every_s(self, spec: PoolSpec, plan: StepPlan) -> float:
    """How long after one such step a busy pool can begin the next.

    Chunks follow one another through the stages of a pool, the longest of which decides. Its
    decodes are cut into a share for each stage: all have their tokens when the longest stage has
    had every share, and not before a share has gone through all of them.
    """
    counts, pp = count_plan(plan), spec.pp
    latency, longest = self._latency[spec.group], _longest_share(self.model, spec.pp)
    if plan.kind == "prefill":
      return latency.terms_of(counts).total_s * longest
    share = StepCounts(*(-(-n // pp) for n in counts))
    in_turn_s = pp * latency.terms_of(share).total_s * longest
    return max(in_turn_s, self.step_time(spec.group)(share))

  def prompts(self, lengths, seed: int, *, chat: bool, blocks: Blocks | None) -> None:
    return None

  def pages_of(self, group: DeviceGroup) -> PageConfig:
    return self._pages[group]

  def executor(self, group: DeviceGroup) -> SimExecutor:
    latency, model = self._latency[group], self.model
    return SimExecutor(
      step_s=latency.step_s,
      steps_s=latency.steps_s,
      link=self._link,
      bytes_per_token=model.kv_bytes_per_token(self.bytes_per_value),
      num_links=num_links(self._link, model, group.tp),
      page_shape=PageShape(
        page_size=self.pages.page_size,
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype="bfloat16",
      ),
      layer_groups=self._layer_groups(group),
      num_stages=group.pp,
      hand_over_s=self._hand_over_s[group],
    )

  def _layer_groups(self, group: DeviceGroup) -> tuple[tuple[int, int], ...]:
    """The parts of each stage."""
    num_parts = self._config.hand_off.layer_groups
    return tuple(
      (first + a, first + b)
      for first, last in split_layers(self.model.num_layers, group.pp)
      for a, b in split_layers(last - first, num_parts)
    )

  def clock(self) -> VirtualClock:
    return VirtualClock()

  def step_time(self, group: DeviceGroup) -> StepTime:
    """Of one through all stages, with what it takes from each to the next."""
    latency = self._latency[group]

    def predict_step_s(counts: StepCounts) -> float:
      step_s = latency.terms_of(counts).total_s
      if group.pp > 1:
        step_s += (group.pp - 1) * self._hand_over_s[group](counts.num_tokens)
      return step_s

    return predict_step_s

  def top2_margin(self, token_ids: Sequence[int]) -> None:
    return None

  def peaks_of(self, spec: PoolSpec) -> Peaks:
    return _peaks(self._device(spec.hardware), len(spec.devices))

  def close(self) -> None:
    pass


class JaxWorld:
  """This machine's devices, a real model, real time.

  In float32 on a CPU, where it is faster than bfloat16 in jax 0.10 and exact to compare; in
  bfloat16 elsewhere, which kernels are made for.
  """

  processes = None

  def __init__(self, config: ExperimentConfig, longest: tuple[int, int], context: int):
    self._config, self._longest, self._context = config, longest, context
    # A wrong name or a broken file fails before jax is even imported.
    check_platforms(pools_of(config))
    self._path = _find(config.model)
    self.pages = _make_pages(config, longest)
    self._executors: dict[DeviceGroup, Executor] = {}

  def load(self) -> None:
    config, checkpoint = self._config, self._open()

    from pdjax.engine.mesh import find_devices, make_mesh

    groups = list(dict.fromkeys(spec.group for spec in pools_of(config)))
    self._groups = dict(zip(groups, find_devices(groups), strict=True))
    platforms = {device.platform for devices in self._groups.values() for device in devices}
    # Pages are exchanged, so all pools have one type: where a CPU takes part, that of the CPU.
    dtype, self.bytes_per_value = ("float32", 4) if "cpu" in platforms else ("bfloat16", 2)
    target = make_mesh(self._groups[groups[0]][: groups[0].tp])
    self._model = checkpoint.load(dtype=dtype, target=target)
    self._describe({group.hardware: d[0].platform for group, d in self._groups.items()})
    if "cpu" in platforms and config.num_devices > 1:
      self.caveats.insert(
        0, "the CPU devices share the same cores and memory, so a busy pool slows the others down"
      )

  def _open(self) -> Checkpoint:
    """What the checkpoint says of itself, without its weights."""
    checkpoint, self._tokenizer = open_model(self._path, check_weights=self._config.check_weights)
    self.model = checkpoint.config
    check_split(pools_of(self._config), self.model, self._config.hand_off.layer_groups)
    return checkpoint

  def _describe(self, platform_of: Mapping[str | None, str]) -> None:
    config = self._config
    devices = _all_hardware(config, platform_of.__getitem__, "{1} {0}")
    name, plural = pathlib.Path(config.model).name, "s" if config.num_devices > 1 else ""
    self.label = f"{name} on {devices} device{plural}{_each(config)}"
    self.caveats = [*_unequal(config), *_beyond_training(self.model, self._longest)]

  def _start(self, uses: Mapping[DeviceGroup, set[str]], budgets: tuple[int, int]) -> Iterator[str]:
    """Makes and warms up the executors; yields a line for each shape."""
    from pdjax.engine.build import build_executors, default_buckets, warm_up

    whole_budget, chunk_budget = budgets
    buckets = default_buckets(self.pages, whole_budget=whole_budget, chunk_budget=chunk_budget)
    executors = build_executors(
      self._model,
      self.pages,
      buckets,
      [self._groups[group] for group in uses],
      layout=self._config.cache.layout,
      attention=self._config.attention,
      stages=[group.pp for group in uses],
      layer_groups=layer_groups_of(uses, self._config.hand_off),
    )
    self._executors = dict(zip(uses, executors, strict=True))
    return warm_up(executors, list(uses.values()))

  def prepare(self, show: Callable[[str], None]) -> None:
    config, specs = self._config, pools_of(self._config)
    show(f"warm-up: compiling for {config.num_devices} devices{_each(config)}")
    uses = uses_of(specs, config.scheduler)
    whole_budget, chunk_budget = largest_budgets(specs, config.scheduler, self.pages)
    for number, line in enumerate(self._start(uses, (whole_budget, chunk_budget)), 1):
      show(f"warm-up, shape {number}: {line}")
    self._typical = {spec.group for spec in typical_pools(config)}
    self._able = {  # by kind of step; a shape that no pool uses is not compiled to be timed
      kind: [self._executors[g] for g, own in uses.items() if kind in own and g in self._typical]
      for kind in ("prefill", "decode")
    }
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
    for group in self._executors:
      self.executor(group)  # for a new run
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

  def pages_of(self, group: DeviceGroup) -> PageConfig:
    return self.pages

  def executor(self, group: DeviceGroup) -> Executor:
    self._executors[group].reset()
    return self._executors[group]

  def clock(self) -> WallClock:
    return WallClock()

  def step_time(self, group: DeviceGroup) -> FittedStepTime:
    return FittedStepTime(self._measured if group in self._typical else ())

  def top2_margin(self, token_ids: Sequence[int]) -> float:
    return next(iter(self._executors.values())).top2_margin(token_ids)

  def extrapolated(self, runs: Mapping[str, Iterable[Event]]) -> list[str]:
    return []

  def peaks_of(self, spec: PoolSpec) -> Peaks | None:
    """By data sheet of GPUs that `configs/hardware.py` knows; of a CPU what it reaches."""
    from experiments.kernel_steps import peaks_of
    from pdjax.kernels.choice import chip_of

    devices = self._groups[spec.group]
    if devices[0].platform == "cpu":
      return _reached_by(devices[0])  # once: CPU devices share the cores
    known = peaks_of(chip_of(devices[0]))
    return known and _peaks(known, len(devices))

  def close(self) -> None:
    pass


class ProcessWorld(JaxWorld):
  """This machine's devices with a process for each pool, which has its weights and its own JAX.

  This process schedules and keeps time. It needs neither weights nor devices.
  """

  def load(self) -> None:
    self._open()
    groups = list(dict.fromkeys(spec.group for spec in pools_of(self._config)))
    cores = _cores_of(groups, self._config.num_devices) if self._config.pin else {}
    self._cores = {group: cores.get(group) for group in groups}
    self.processes = [
      {"devices": list(group.devices), "cores": own and list(own)}
      for group, own in self._cores.items()
    ]

  def _start(self, uses: Mapping[DeviceGroup, set[str]], budgets: tuple[int, int]) -> Iterator[str]:
    config, uids = self._config, itertools.count()
    # Pages are exchanged, so all pools have one type: where a CPU takes part, that of the CPU.
    dtype = "float32" if any(group.hardware == "cpu" for group in uses) else None
    copies = "shared_memory" if config.hosts is None else "transfer"
    cuts = dict(zip(uses, layer_groups_of(uses, config.hand_off), strict=True))
    self._executors = {
      group: RemoteExecutor(
        f"devices {','.join(map(str, group.devices))}",
        WorkerSetup(
          model_path=str(self._path),
          dtype=dtype,
          check_weights=config.check_weights,
          pages=self.pages,
          whole_budget=budgets[0],
          chunk_budget=budgets[1],
          layout=config.cache.layout,
          attention=config.attention,
          uses=tuple(sorted(own)),
          group=_of_its_platform(group, uses),
          cores=self._cores[group],
          layer_groups=cuts[group],
          copies=copies,
        ),
        uids,
        start=self._start_of(group),
      )
      for group, own in uses.items()
    }
    yield from start_all(list(self._executors.values()))
    platforms = {g.hardware: executor.platform for g, executor in self._executors.items()}
    (dtype,) = {executor.page_shape.dtype for executor in self._executors.values()}
    self.bytes_per_value = {"float32": 4, "bfloat16": 2}[dtype]
    self._describe(platforms)
    self.label += self._where()
    if self._is_shared() and "cpu" in platforms.values() and len(uses) > 1:
      shared = "caches and memory" if config.pin else "cores and memory"
      self.caveats.insert(
        0, f"the pools' processes share the same {shared}, so a busy pool slows the others down"
      )

  def _start_of(self, group: DeviceGroup) -> Callable[[], WorkerProcess]:
    """What starts a process of the pool, and starts it again."""
    return start_process

  def peaks_of(self, spec: PoolSpec) -> None:
    return None  # this process has none of the devices

  def _where(self) -> str:
    pinned = ", pinned to cores of their own" if self._config.pin else ""
    return f", a process each pool{pinned}"

  def _is_shared(self) -> bool:
    """Whether pools are on one machine."""
    return True

  def executor(self, group: DeviceGroup) -> Executor:
    executor = self._executors[group]
    while True:
      executor.start()  # unless it is up: it may have been lost in the run before
      for _ in executor.wait_until_up():
        pass
      with contextlib.suppress(PoolLost):  # just now: again
        return super().executor(group)

  def top2_margin(self, token_ids: Sequence[int]) -> float | None:
    for executor in self._executors.values():
      with contextlib.suppress(PoolLost):
        return executor.top2_margin(token_ids)
    return None

  def close(self) -> None:
    for executor in self._executors.values():
      executor.close()


class HostsWorld(ProcessWorld):
  """The devices of other machines, where workers wait, with a process for each pool on each.

  The model lies at the same path there.
  """

  def __init__(self, config: ExperimentConfig, longest: tuple[int, int], context: int):
    self._hosts, self._secret = read_hosts(pathlib.Path(config.hosts))
    if config.num_devices > self._hosts.num_devices:
      raise ValueError(
        f"--hosts={config.hosts} lists {self._hosts.num_devices} devices, but the pools have "
        f"{config.num_devices}: add hosts, or devices of a host"
      )
    self._parts = {spec.group: self._hosts.parts_of(spec.group) for spec in pools_of(config)}
    super().__init__(config, longest, context)

  def load(self) -> None:
    super().load()
    for address in {host.address for parts in self._parts.values() for host, _ in parts}:
      try:
        call(address, self._secret).close()
      except ProtocolError as error:
        raise ValueError(f"--hosts={self._config.hosts}: {error}") from error
    self.processes = [
      {"host": host.address, "devices": list(devices)}
      for parts in self._parts.values()
      for host, devices in parts
    ]

  def _start_of(self, group: DeviceGroup) -> Callable[[], WorkerProcess]:
    return functools.partial(start_on_hosts, self._parts[group], self._secret)

  def _where(self) -> str:
    return f", on {len({process['host'] for process in self.processes})} hosts"

  def _is_shared(self) -> bool:
    hosts = [host for parts in self._parts.values() for host, _ in parts]
    return len(set(hosts)) < len(hosts)


def largest_step(
  config: ExperimentConfig, specs: Iterable[PoolSpec], longest: tuple[int, int]
) -> int:
  """Tokens of the largest step of these pools: a budget of chunks and decodes, or whole prompts."""
  scheduler, most = config.scheduler, []
  for spec in specs:
    policy = POLICIES[policy_name(spec, scheduler)]
    beside = config.cache.num_rows if policy.mixes else 0
    whole = scheduler.prefill_budget or sum(longest) + beside
    most.append(scheduler.token_budget if policy.chunks else whole)
  return max(most)


def _peaks(device: Device, num_devices: int) -> Peaks:
  return Peaks(num_devices * device.peak_flops_per_s, num_devices * device.peak_bytes_per_s)


@functools.cache
def _reached_by(device) -> Peaks:
  """Of a JAX device: a large matmul and a stream over memory, in float32 as a CPU serves."""
  from experiments.profiling import measured_device

  return _peaks(measured_device(device, "float32"), 1)


def num_links(way: Link, model: ModelConfig, tp: int) -> int:
  """Over how many such links a stage of `tp` devices sends KV caches at once.

  Each device sends its kv heads to its counterpart in the other pool. A link that no device has
  inside its node is the node's, one for all of them.
  """
  is_own = way in {device.link for device in HARDWARE.values()}
  return min(tp, model.num_kv_heads) if is_own else 1


def _instant(device: Device) -> Device:
  """A device of no step time and much memory: beside it the other half of serving is alone."""
  return dataclasses.replace(
    device,
    name=INSTANT,
    peak_flops_per_s=1e6 * device.peak_flops_per_s,
    peak_bytes_per_s=1e6 * device.peak_bytes_per_s,
    memory_bytes=16 * device.memory_bytes,
    fit=None,
  )


def _of_its_platform(group: DeviceGroup, groups: Iterable[DeviceGroup]) -> DeviceGroup:
  """With its devices counted among those of its platform, as `find_devices` does."""
  indices = sorted({i for g in groups if g.hardware == group.hardware for i in g.devices})
  return dataclasses.replace(group, devices=tuple(map(indices.index, group.devices)))


def _cores_of(
  groups: Iterable[DeviceGroup], num_devices: int
) -> dict[DeviceGroup, tuple[int, ...]]:
  """An equal share of the cores that this process may use for each device.

  Raises:
    ValueError: more devices than cores.
  """
  cores = sorted(os.sched_getaffinity(0))
  each = len(cores) // num_devices
  if not each:
    raise ValueError(
      f"pin=true needs a core for each of {num_devices} devices, but there are {len(cores)}"
    )
  return {
    group: tuple(cores[i] for d in group.devices for i in range(d * each, (d + 1) * each))
    for group in groups
  }


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


def _longest_share(model: ModelConfig, num_stages: int) -> float:
  """Of a step: that of the stage with most layers."""
  stages = split_layers(model.num_layers, num_stages)
  return max(last - first for first, last in stages) / model.num_layers


def _unequal(config: ExperimentConfig) -> list[str]:
  """The caveat about pools that are compared with strategies on other devices, if they are."""
  if not config.strategies or config.pools is None:
    return []
  own = {spec.hardware or config.hardware for spec in config.pools_of(config.pools)}
  if own <= {config.hardware}:
    return []
  return [
    f"{config.pools} runs on {' and '.join(sorted(own))}, the other strategies on as many devices "
    f"of {config.hardware}: these are not equal devices"
  ]


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
  if config.backend == "sim":
    return SimWorld(config, longest, context)
  if config.hosts is not None:
    return HostsWorld(config, longest, context)
  return (ProcessWorld if config.processes else JaxWorld)(config, longest, context)
