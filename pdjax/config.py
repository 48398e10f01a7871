"""What an experiment is: frozen dataclasses, from a Python file, changed by `--set a.b=c`."""

from __future__ import annotations

import ast
import collections
import dataclasses
import importlib.util
import itertools
import math
import pathlib
import re
import sys
import traceback
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pdjax.core.device_group import DeviceGroup
from pdjax.core.names import pick
from pdjax.core.plain import from_plain, to_plain
from pdjax.core.request import SamplingParams
from pdjax.scheduling.hand_off import HandOff
from pdjax.scheduling.planner import PLANNERS, make_planner
from pdjax.scheduling.policies import POLICIES, make_policy
from pdjax.scheduling.routing import ROLES, ROUTERS, check_roles, make_router
from pdjax.scheduling.scheduler import SchedulerConfig
from pdjax.workloads.lengths import Fixed, LogNormal, Mix, Quantiles, Sampled, Uniform


def _check_positive(part: str, config: Any, *names: str) -> None:
  for name in names:
    value = getattr(config, name)
    if value is not None and not 0 < value < math.inf:
      raise ValueError(f"{part}.{name}={value} must be positive")


def _check_at_least_1(part: str, config: Any, *names: str) -> None:
  for name in names:
    value = getattr(config, name)
    if value is not None and value < 1:
      raise ValueError(f"{part}.{name}={value} must be at least 1")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadConfig:
  """Who asks, when, and how much.

  `rate_rps` None is `load` times the capacity that the step times promise. `num_requests` None is
  as many as arrive in `duration_s`. `label` is printed: where `lengths` come from. `length_scale`
  divides the lengths, for a small model.

  A `trace` (a file of any kind in `pdjax.workloads.traces`) replaces `lengths`, and the arrivals if
  it has some: all of them, or `num_requests`, or those before `trace_limit_s`; `trace_speed` times
  as fast; each moved back by up to `trace_spread_s`, where the file has ticks of so much.
  """

  arrivals: str = "poisson"
  rate_rps: float | None = None
  load: float = 0.7
  cv: float = 2.0  # of the gaps, for arrivals="gamma"
  lengths: Mix | LogNormal | Uniform | Fixed | Quantiles | Sampled
  label: str | None = None
  length_scale: int = 1
  num_requests: int | None = None
  duration_s: float = 40.0
  trace: str | None = None
  trace_limit_s: float | None = None
  trace_speed: float = 1.0
  trace_spread_s: float | None = None
  seed: int = 0
  chat: bool = True  # put prompts into the model's chat template; not those of a trace with blocks

  def __post_init__(self):
    _check_positive("workload", self, "rate_rps", "load", "cv", "duration_s")
    _check_positive("workload", self, "trace_limit_s", "trace_speed", "trace_spread_s")
    if self.rate_rps is not None and self.rate_rps < 1e-6:
      raise ValueError(f"workload.rate_rps={self.rate_rps} is less than a request in 11 days")
    _check_at_least_1("workload", self, "num_requests", "length_scale")
    if self.seed < 0:
      raise ValueError(f"workload.seed={self.seed} must be 0 or more")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
  """Limits of a step, who gets memory, which pool takes a request, and options of either.

  `policy` replaces that of mixed pools, to try a new one. `options` are of policies, routers and
  planners, written "name.option=value"; those of one that nobody uses change nothing.

  `token_budget` is that of policies that cut prompts; the others take whole prompts, and theirs is
  `prefill_budget`, None for the longest request. The rest is as `SchedulerConfig` says:
  `reservation` None is the policy's own, and `long_prompt_share` is of policies that cut prompts.

  `planner` gives pools other roles while they serve; `role_changes` does at fixed times, written
  "pool=role@seconds". `changes_roles` makes pools that can take any role, for changes by hand.
  """

  policy: str | None = None
  router: str = "least_loaded"
  options: tuple[str, ...] = ()
  token_budget: int = 128
  prefill_budget: int | None = None
  reservation: str | None = None
  watermark: float = 0.01
  max_preemptions: int = 3
  swap_tokens: int = 0
  look_ahead: int = 0
  max_partial_prefills: int | None = None
  long_prompt_tokens: int | None = None
  long_prompt_share: float = 1.0
  prefix_cache: bool = False
  eviction: str = "lru"
  steps_in_flight: int = 2
  planner: str | None = None
  role_changes: tuple[str, ...] = ()
  changes_roles: bool = False

  def __post_init__(self):
    _check_at_least_1("scheduler", self, "prefill_budget")
    if self.steps_in_flight not in (1, 2):
      raise ValueError(f"scheduler.steps_in_flight={self.steps_in_flight} must be 1 or 2")
    try:
      self.limits(token_budget=self.token_budget, chunk_prompts=True)
    except ValueError as error:
      raise ValueError(f"scheduler.{error}") from error
    try:
      make_router(self.router)
    except ValueError as error:
      raise ValueError(f"scheduler.router: {error}") from error
    if self.planner is not None:
      pick(PLANNERS, self.planner, "scheduler.planner")
    for text in self.role_changes:
      parse_role_change(text)
    for text in self.options:
      try:
        name = _option(text)[0]
        if name in ROUTERS:
          make_router(name, self.options_of(name))
        elif name in PLANNERS:
          make_planner(name, self.options_of(name))
        else:
          make_policy(name, self.options_of(name))
      except ValueError as error:
        raise ValueError(f"scheduler.options: {error}") from error

  @property
  def needs_all_roles(self) -> bool:
    """Whether every pool must be able to take every role."""
    return self.changes_roles or self.planner is not None or bool(self.role_changes)

  def options_of(self, member: str) -> dict[str, Any]:
    """What `options` says about the policy, router or planner of this name."""
    options = map(_option, self.options)
    return {option: value for name, option, value in options if name == member}

  def limits(self, **changes: Any) -> SchedulerConfig:
    """The scheduler's limits as these options say, but for `changes`."""
    own = {field.name for field in dataclasses.fields(self)}
    names = [f.name for f in dataclasses.fields(SchedulerConfig) if f.name in own]
    values = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
    return SchedulerConfig(**values | changes)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
  """The KV cache of each pool. `max_len` None is the workload's longest request, and is rounded up
  to whole pages; `num_pages` None is a full row each (on the engine) or what the memory holds (in
  simulation).
  """

  layout: str = "slots"
  num_rows: int = 8
  page_size: int = 16
  max_len: int | None = None
  num_pages: int | None = None

  def __post_init__(self):
    if self.layout not in ("slots", "paged"):
      raise ValueError(f"cache.layout={self.layout!r} must be 'slots' or 'paged'")
    _check_at_least_1("cache", self, "num_rows", "page_size", "max_len", "num_pages")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
  """As `SamplingParams`, the same for all requests; 0 is greedy."""

  temperature: float = 0.0
  top_k: int | None = None
  top_p: float = 1.0
  min_p: float = 0.0
  repetition_penalty: float = 1.0

  def __post_init__(self):
    try:
      self.params()
    except ValueError as error:
      raise ValueError(f"sampling.{error}") from error

  def params(self) -> SamplingParams:
    """These for a single token; a workload gives each request its own `max_tokens`."""
    return SamplingParams(max_tokens=1, **to_plain(self))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SloConfig:
  """Targets. None derives one from this device by Sarathi-Serve's rule: a multiple of a decode step
  with all rows busy (TPOT), and of an unloaded prefill of the longest prompt (TTFT).
  """

  ttft_s: float | None = None
  tpot_s: float | None = None
  ttft_multiple: float = 3.0
  tpot_multiple: float = 5.0

  def __post_init__(self):
    _check_positive("slo", self, "ttft_s", "tpot_s", "ttft_multiple", "tpot_multiple")


def check_attention(name: str) -> None:
  """Raises ValueError for what `kernels.choice` does not know, before anything is loaded."""
  if name not in ("auto", "xla", "pallas"):
    raise ValueError(f"attention={name!r} must be 'auto', 'xla' or 'pallas'")


def check_platforms(specs: Iterable[PoolSpec]) -> None:
  """Raises ValueError for pools on hardware that only a simulation can have."""
  for spec in specs:
    if spec.hardware not in (None, *PLATFORMS):
      raise ValueError(
        f"{spec.name} runs on @{spec.hardware}, but the engine runs on this machine's "
        f"devices, of which @{', @'.join(PLATFORMS)} choose; simulate it (--backend=sim)"
      )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentConfig:
  """One experiment. `model`, `hardware` and the links are names that the program looks up.

  `num_devices` counts all devices; each pool of the `strategies` has `tp` of them, over which the
  model is split (tensor parallelism). `pools` is one more strategy, with pools that say themselves
  how many devices they have, and which (`parse_pools`): together as many. `attention` is run by the
  kernels that are best on the device ("auto"), by Pallas kernels ("pallas", which a CPU interprets:
  slow, for tests), or by plain XLA ("xla"). `check_weights` refuses weights that are not finite,
  for a pass over them. `processes` serves each pool in a process of its own; `pin` gives each an
  equal share of the cores. `hosts` is the start-up file of machines that serve the pools instead of
  this one (`pdjax/remote/hosts.py`).

  In simulation `latency` says how long steps take (`configs/latency.py`), `link` joins pools,
  `tp_link` the devices of a stage and `pp_link` the stages of a pool; None is as the devices of a
  node are joined, or as `link` where that is not known.
  """

  model: str = "smollm2-135m"
  hardware: str = "cpu"
  latency: str = "roofline"
  link: str = "nvlink"
  tp_link: str | None = None
  pp_link: str | None = None
  backend: str = "jax"
  num_devices: int = 2
  tp: int = 1
  attention: str = "auto"
  check_weights: bool = False
  processes: bool = False
  pin: bool = False
  hosts: str | None = None
  strategies: tuple[str, ...] = ("continuous", "chunked", "disaggregated")
  pools: str | None = None
  workload: WorkloadConfig
  scheduler: SchedulerOptions = SchedulerOptions()
  hand_off: HandOff = HandOff()
  cache: CacheConfig = CacheConfig()
  sampling: SamplingConfig = SamplingConfig()
  slo: SloConfig = SloConfig()

  def __post_init__(self):
    if self.backend not in ("jax", "sim"):
      raise ValueError(f"backend={self.backend!r} must be 'jax' or 'sim'")
    if self.processes and self.backend != "jax":
      raise ValueError(f"processes=True goes with backend='jax', not {self.backend!r}")
    if self.pin and not self.processes:
      raise ValueError("pin=True pins processes to cores, so it goes with processes=True")
    if self.hosts is not None:
      self._check_hosts()
    check_attention(self.attention)
    if not self.strategies and self.pools is None:
      raise ValueError("strategies is empty; name at least one")
    if self.tp < 1:
      raise ValueError(f"tp={self.tp} must be at least 1")
    if self.pools is not None:
      self._check_devices_of_pools()
    else:
      device_groups(self.num_devices, self.tp)
    for name in self.strategies:
      pick(STRATEGIES, name, "strategy")
    if len(set(self.strategies)) != len(self.strategies):
      raise ValueError(f"strategies={self.strategies} names one twice")

  def _check_hosts(self) -> None:
    if self.backend != "jax":
      raise ValueError(f"hosts={self.hosts!r} goes with backend='jax', not {self.backend!r}")
    if self.pin:
      raise ValueError("pin=True pins processes of this machine, not those of hosts")

  def _check_devices_of_pools(self) -> None:
    num_devices = num_devices_of(parse_pools(self.pools))
    if num_devices != self.num_devices:
      raise ValueError(
        f"pools={self.pools} have {num_devices} devices, but num_devices={self.num_devices}: "
        f"strategies are compared on equal devices"
      )
    if self.strategies and num_devices % self.tp:
      raise ValueError(
        f"pools={self.pools} have {num_devices} devices, which {', '.join(self.strategies)} cannot "
        f"have too, in pools of tp={self.tp}: strategies are compared on equal devices"
      )

  @property
  def strategy_names(self) -> tuple[str, ...]:
    """Those to serve under, in order; that of `pools` is their text."""
    return self.strategies if self.pools is None else (*self.strategies, self.pools)

  def pools_of(self, strategy: str) -> tuple[PoolSpec, ...]:
    """The pools of one of `strategy_names`.

    Raises:
      ValueError: the devices do not suffice for it.
    """
    if strategy == self.pools:
      return parse_pools(strategy)
    return STRATEGIES[strategy](self.num_devices, self.tp)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
  """One pool of a strategy: what it does, and the parts of its `DeviceGroup`."""

  name: str
  role: str
  policy: str
  devices: tuple[int, ...]
  pp: int = 1
  hardware: str | None = None

  def __post_init__(self):
    DeviceGroup(devices=self.devices, pp=self.pp)  # or its ValueError

  @property
  def group(self) -> DeviceGroup:
    """What the pool runs on: all that executors, memory and step times depend on."""
    return DeviceGroup(devices=self.devices, pp=self.pp, hardware=self.hardware)


Strategy = Callable[..., tuple[PoolSpec, ...]]
"""The pools of `num_devices` in groups of `tp`."""


def device_groups(num_devices: int, tp: int) -> list[tuple[int, ...]]:
  """Devices 0, 1, ... in groups of `tp`.

  Raises:
    ValueError: a number below 1, or devices that are left over.
  """
  for name, value in (("num_devices", num_devices), ("tp", tp)):
    if value < 1:
      raise ValueError(f"{name}={value} must be at least 1")
  if num_devices % tp:
    raise ValueError(
      f"num_devices={num_devices} is no multiple of tp={tp}: every pool has tp devices, and "
      f"num_devices counts those of all pools"
    )
  return [tuple(range(start, start + tp)) for start in range(0, num_devices, tp)]


def num_devices_of(specs: Iterable[PoolSpec]) -> int:
  return len({device for spec in specs for device in spec.devices})


def _pools(groups: Iterable[tuple[int, ...]], role: str, policy: str) -> tuple[PoolSpec, ...]:
  return tuple(
    PoolSpec(name=f"{role}{i}", role=role, policy=policy, devices=devices)
    for i, devices in enumerate(groups)
  )


def _mixed(policy: str) -> Strategy:
  def pools(num_devices: int, tp: int = 1) -> tuple[PoolSpec, ...]:
    return _pools(device_groups(num_devices, tp), "mixed", policy)

  pools.__doc__ = f"Mixed pools alone, under {policy}."
  return pools


def _disaggregated(num_devices: int, tp: int = 1) -> tuple[PoolSpec, ...]:
  """Disaggregation (DistServe): half of the pools prefill, half decode."""
  groups = device_groups(num_devices, tp)
  half = len(groups) // 2
  if not half:
    each = "" if tp == 1 else f" (two pools of tp={tp})"
    raise ValueError(
      f"disaggregated needs at least {2 * tp} devices{each}, not num_devices={num_devices}"
    )
  return (
    *_pools(groups[:half], "prefill", "prefill_only"),
    *_pools(groups[half:], "decode", "decode_only"),
  )


# A new one is a line here; a policy that serves whole requests is one by itself.
STRATEGIES: dict[str, Strategy] = {
  "continuous": _mixed("prefill_first"),  # continuous batching as vLLM first had it
  "chunked": _mixed("sarathi"),  # chunked prefill
  "disaggregated": _disaggregated,
  **{name: _mixed(name) for name, spec in POLICIES.items() if not spec.half},
}


# Pools of any shape ------------------------------------------------------------------------------

# What `@HARDWARE` can be on the engine.
PLATFORMS = ("cpu", "gpu", "tpu")
# The policy of a pool whose text names none.
ROLE_POLICIES = {"prefill": "prefill_only", "decode": "decode_only", "mixed": "sarathi"}
POOLS_FORM = (
  "COUNTxROLE[:tpN][:ppN][:POLICY][@HARDWARE],..., as in 2xprefill:tp2,1xdecode:tp4 or "
  "prefill:pp4@a100,decode@h100"
)


def role_policy(role: str, pp: int) -> str:
  """The policy of a pool of `pp` stages for which none was named.

  Raises:
    ValueError: there is no such role.
  """
  policy = pick(ROLE_POLICIES, role, "role")
  # Chunks fill the stages of a pipeline; a whole prompt is in one at a time.
  return "prefill_chunks" if role == "prefill" and pp > 1 else policy


def parse_pools(text: str) -> tuple[PoolSpec, ...]:
  """The pools that `text` lists, on devices 0, 1, ... in its order: see `POOLS_FORM`.

  Roles are `prefill`, `decode` and `mixed`; COUNT and N are 1 where they are not given. A pool has
  tp devices in each of its pp pipeline stages. POLICY is one that does what the role needs; prefill
  pools of several stages cut prompts into chunks if it is not given.
  HARDWARE, where the pool does not run on that of the experiment, is a name that the program looks
  up.

  Raises:
    ValueError: another form, an unknown role or policy, or no pools that a request can go through
      to its end.
  """
  specs: list[PoolSpec] = []
  free, numbers = itertools.count(), collections.defaultdict(itertools.count)
  try:
    for item in text.split(","):
      count, tp, parts = _parse_item(item.strip())
      for _ in range(count):
        name = f"{parts['role']}{next(numbers[parts['role']])}"
        devices = tuple(itertools.islice(free, tp * parts["pp"]))
        specs.append(PoolSpec(name=name, devices=devices, **parts))
    check_roles(spec.role for spec in specs)
  except ValueError as error:
    raise ValueError(f"pools={text!r}: {error}; write {POOLS_FORM}") from error
  return tuple(specs)


def _parse_item(item: str) -> tuple[int, int, dict[str, Any]]:
  """(count, tp, what the specs of the item have in common)."""
  words, at, hardware = (part.strip() for part in item.partition("@"))
  if at and not re.fullmatch(r"[\w.-]+", hardware):
    raise ValueError(f"{hardware!r} of {item!r} is no name of hardware, which comes last")
  head, *options = (part.strip() for part in words.split(":"))
  match = re.fullmatch(r"(?:(\d+)x)?(\w+)", head)
  if match is None:
    raise ValueError(f"{item!r} does not begin with a count and a role")
  count, role = int(match[1] or 1), match[2]
  pick(ROLE_POLICIES, role, "role")
  values: dict[str, str] = {}
  for option in options:
    kind = option[:2] if option.startswith(("tp", "pp")) else "policies"
    if kind in values:
      raise ValueError(f"{item!r} has two {kind}")
    values[kind] = option if kind == "policies" else option[2:]
  tp, pp = values.get("tp", "1"), values.get("pp", "1")
  if not count or not all(n.isdecimal() and int(n) for n in (tp, pp)):
    raise ValueError(f"count, tp and pp of {item!r} must be whole numbers of at least 1")
  policy = values.get("policies", role_policy(role, int(pp)))
  if pick(POLICIES, policy, "policy").half not in (None, role):
    raise ValueError(f"policy {policy} does not do what a {role} pool has to do")
  return count, int(tp), dict(role=role, policy=policy, pp=int(pp), hardware=hardware or None)


# Files and overrides -----------------------------------------------------------------------------


def load_config(path: str | pathlib.Path, overrides: Iterable[str] = ()) -> ExperimentConfig:
  """Runs `get_config()` of a Python file and applies overrides such as `workload.rate_rps=2`.

  Raises:
    ValueError: no such file, a file without `get_config`, or an override that names nothing or has
      a value of the wrong type.
  """
  path = pathlib.Path(path)
  if not path.is_file():
    raise ValueError(f"config file {path} does not exist")
  # A name of its own, as that of the file alone may be of a module that others import.
  spec = importlib.util.spec_from_file_location(f"config {path.absolute()}", path)
  if spec is None:
    raise ValueError(f"config file {path} is not a Python file (.py)")
  module = importlib.util.module_from_spec(spec)
  sys.modules[spec.name] = module  # where dataclasses look for what their annotations name
  try:
    spec.loader.exec_module(module)
    get_config = getattr(module, "get_config", None)
    config = get_config() if get_config is not None else None
  except Exception as error:  # whatever a user's code may raise
    raise ValueError(f"config file {path}: {_where(error, path)}{error!r}") from error
  if get_config is None:
    raise ValueError(f"config file {path} has no function get_config()")
  if not isinstance(config, ExperimentConfig):
    raise ValueError(f"{path}: get_config() gave a {type(config).__name__}, not ExperimentConfig")
  try:  # dataclasses take anything; a value of the wrong type would be found an hour in
    from_plain(ExperimentConfig, to_plain(config))
  except TypeError as error:
    raise ValueError(f"config file {path}: {error}") from error
  return override(config, overrides)


def _where(error: Exception, path: pathlib.Path) -> str:
  """The line of the file that raised, if one did."""
  lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
  return f"line {lines[-1]}: " if lines else ""


def override(config: ExperimentConfig, assignments: Iterable[str]) -> ExperimentConfig:
  """A copy with `path=value` assignments applied. Raises ValueError as `load_config` does."""
  for assignment in assignments:
    path, equals, text = assignment.partition("=")
    if not equals:
      raise ValueError(f"--set {assignment!r} is not of the form path=value")
    config = _replace(config, path.strip().split("."), text.strip(), path.strip())
  return config


def _replace(node: Any, names: list[str], text: str, path: str) -> Any:
  fields: Mapping[str, Any] = typing.get_type_hints(type(node))
  name, rest = names[0], names[1:]
  hint = pick(fields, name, f"--set name in {path!r}:")
  if rest:
    child = getattr(node, name)
    if not dataclasses.is_dataclass(child):
      raise ValueError(f"--set {path!r}: {name} has no parts")
    value = _replace(child, rest, text, path)
  else:
    value = _parse(hint, text, path)
  return dataclasses.replace(node, **{name: value})


def _parse(hint: Any, text: str, path: str) -> Any:
  is_tuple = typing.get_origin(hint) is tuple
  if is_tuple and not text.startswith(("(", "[")):
    text = f"({text},)" if text else "()"
  candidates = [_literal(text), text]
  if is_tuple and candidates[0] is text:  # names without quotes: a,b
    candidates.insert(0, [part.strip() for part in text.strip("()[],").split(",")])
  for candidate in candidates:
    try:
      return from_plain(hint, candidate)
    except (TypeError, AttributeError):
      continue
  raise ValueError(f"--set {path}={text}: not a value of type {_type_name(hint)}")


def parse_role_change(text: str) -> tuple[str, str, float]:
  """The pool, its new role, and when, of "pool=role@seconds".

  Raises:
    ValueError: another form, or no such role.
  """
  match = re.fullmatch(r"(\w+)=(\w+)@(\d+(?:\.\d+)?)", text.strip())
  if match is None or match[2] not in ROLES:
    raise ValueError(
      f"scheduler.role_changes: {text!r} is not pool=role@seconds, as in decode1=prefill@10; roles "
      f"are {', '.join(ROLES)}"
    )
  return match[1], match[2], float(match[3])


def _option(text: str) -> tuple[str, str, Any]:
  path, equals, value = text.partition("=")
  name, dot, option = path.strip().partition(".")
  if not (equals and dot):
    raise ValueError(f"{text!r} is not name.option=value")
  return name, option, _literal(value.strip())


def _literal(text: str) -> Any:
  """The Python value that `text` is, or `text` itself."""
  if text in ("true", "false"):
    return text == "true"
  try:
    return ast.literal_eval(text)
  except (ValueError, SyntaxError):
    return text


def _type_name(hint: Any) -> str:
  return hint.__name__ if isinstance(hint, type) else str(hint)
