"""From a strategy's pools to schedulers, a cluster and the sizes to compile. Imports no jax.

`pdjax.LLM` and the experiments build what they serve with here, on the engine and in simulation.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping

from pdjax.config import CacheConfig, PoolSpec, SchedulerOptions, role_policy
from pdjax.core.device_group import DeviceGroup, split_layers
from pdjax.core.model_config import ModelConfig
from pdjax.core.names import pick
from pdjax.scheduling.hand_off import HandOff
from pdjax.scheduling.pages import PageConfig
from pdjax.scheduling.planner import Planner, make_planner
from pdjax.scheduling.policies import POLICIES, make_policy
from pdjax.scheduling.routing import ROLES, Conductor, make_router
from pdjax.scheduling.scheduler import Policy, Scheduler, SchedulerConfig, StepTime
from pdjax.serving.cluster import Cluster, Pool
from pdjax.serving.executor import Executor


def make_pages(cache: CacheConfig, longest_tokens: int, num_pages: int | None = None) -> PageConfig:
  """The memory of each pool.

  `longest_tokens` is the longest sequence to hold where `cache.max_len` does not say, `num_pages`
  what the device holds where `cache.num_pages` does not say.

  Raises:
    ValueError: `cache.num_pages` in a layout that has no choice.
  """
  per_row = math.ceil((cache.max_len or longest_tokens) / cache.page_size)
  if cache.layout == "slots" and cache.num_pages not in (None, cache.num_rows * per_row):
    raise ValueError(
      f"cache.num_pages={cache.num_pages} goes with cache.layout=paged; in slots each of the "
      f"{cache.num_rows} rows has {per_row} pages of its own"
    )
  return PageConfig(
    num_rows=cache.num_rows,
    page_size=cache.page_size,
    pages_per_row=per_row,
    num_pages=cache.num_pages or num_pages or cache.num_rows * per_row,
    contiguous=cache.layout == "slots",
  )


def check_split(specs: Iterable[PoolSpec], model: ModelConfig, layer_groups: int = 1) -> None:
  """Raises ValueError for a pool whose devices and stages the model cannot be split over.

  Nor its stages into so many `layer_groups`.
  """
  for spec in specs:
    try:
      model.check_split(spec.group.tp)
      for first, last in split_layers(model.num_layers, spec.pp):
        split_layers(last - first, layer_groups)
    except ValueError as error:
      raise ValueError(f"{spec.name}: {error}") from error


def make_cluster(
  specs: Iterable[PoolSpec],
  options: SchedulerOptions,
  pages: Callable[[DeviceGroup], PageConfig],
  executor: Callable[[DeviceGroup], Executor],
  step_time: Callable[[DeviceGroup], StepTime] | None = None,
  hand_off: HandOff = HandOff(),
) -> Cluster:
  """The pools of a strategy, empty. `pages` and `executor` give those of a group of devices.

  `step_time` gives what tells policies and routers that plan by time how long a step takes there.
  What learns from a pool's steps must be its own.

  Raises:
    ValueError: limits that cannot serve, a policy or router that does not exist or does not fit, or
      pools that cannot serve together.
  """
  pools = []
  for spec in specs:
    predict_step_s = None if step_time is None else step_time(spec.group)
    own_pages = pages(spec.group)
    as_role = functools.partial(_as_role, spec, options, own_pages)
    policy, own_limits = as_role(spec.role)
    scheduler = Scheduler(policy, own_pages, own_limits, predict_step_s)
    pool = Pool(spec.name, spec.role, scheduler, executor(spec.group))
    if options.needs_all_roles:
      pool.as_role = as_role
    pools.append(pool)
  return Cluster(pools, make_router(options.router, options.options_of(options.router)), hand_off)


def planner_of(options: SchedulerOptions) -> Planner | None:
  """A planner for one run, if there is to be one."""
  if options.planner is None:
    return None
  return make_planner(options.planner, options.options_of(options.planner))


def layer_groups_of(uses: Mapping[DeviceGroup, Collection[str]], hand_off: HandOff) -> list[int]:
  """Into how many parts the layers of each group's stages are cut: where pages are sent from."""
  return [hand_off.layer_groups if "gather" in own else 1 for own in uses.values()]


def _as_role(
  spec: PoolSpec, options: SchedulerOptions, pages: PageConfig, role: str
) -> tuple[Policy, SchedulerConfig]:
  """The policy and the limits of a pool in a role."""
  spec = in_role(spec, role)
  name = policy_name(spec, options)
  return make_policy(name, options.options_of(name)), limits(spec, options, pages)


def in_role(spec: PoolSpec, role: str) -> PoolSpec:
  """The pool with another role, and its policy.

  Raises:
    ValueError: there is no such role.
  """
  policy = role_policy(role, spec.pp)
  return spec if role == spec.role else dataclasses.replace(spec, role=role, policy=policy)


def _in_all_roles(specs: Iterable[PoolSpec], options: SchedulerOptions) -> list[PoolSpec]:
  """The pools, and where they may change what they would be then."""
  if not options.needs_all_roles:
    return list(specs)
  return [in_role(spec, role) for spec in specs for role in ROLES]


def policy_name(spec: PoolSpec, options: SchedulerOptions) -> str:
  """The policy of a pool. A decode pool that a router sends prompts to needs one that takes them.

  Raises:
    ValueError: `options.policy` does not exist, or cannot serve a mixed pool.
  """
  conductor = _conductor(options)
  if spec.role == "decode" and conductor is not None and conductor.local_prefill_tokens:
    return "sarathi"
  if spec.role != "mixed" or options.policy is None:
    return spec.policy
  if pick(POLICIES, options.policy, "policy").half:
    whole = [name for name, policy in POLICIES.items() if not policy.half]
    raise ValueError(
      f"scheduler.policy={options.policy} serves only half of a request, and mixed pools "
      f"have nobody to hand it to; try {', '.join(whole)}"
    )
  return options.policy


def _conductor(options: SchedulerOptions) -> Conductor | None:
  router = make_router(options.router, options.options_of(options.router))
  return router if isinstance(router, Conductor) else None


def limits(spec: PoolSpec, options: SchedulerOptions, pages: PageConfig) -> SchedulerConfig:
  """The limits of a pool's steps: the scheduler keeps them, the engine compiles shapes for them."""
  policy = POLICIES[policy_name(spec, options)]
  reservation = options.reservation or policy.reservation
  if spec.role == "decode":
    reservation = "request"  # of prompts it prefills itself; `HandOff` says it of those handed over
  changes = dict(decodes=spec.role != "prefill", reservation=reservation, micro_batches=spec.pp)
  if not policy.chunks:
    # Beside decodes of all rows there is still room for the longest prompt.
    beside = pages.num_rows if policy.mixes else 0
    whole = options.prefill_budget or max(pages.capacity_tokens + beside, pages.num_rows)
    changes |= dict(token_budget=whole, chunk_prompts=False, long_prompt_share=1.0)
  return options.limits(**changes)


def largest_budgets(
  specs: Iterable[PoolSpec], options: SchedulerOptions, pages: PageConfig
) -> tuple[int, int]:
  """The most tokens of any step of these pools, and of any that mixes prefill and decode."""
  budgets, mixing = [], [pages.num_rows]
  for spec in _in_all_roles(specs, options):
    budgets.append(limits(spec, options, pages).token_budget)
    if POLICIES[policy_name(spec, options)].mixes:
      mixing.append(budgets[-1])
  return max(budgets), max(mixing)


def uses_of(specs: Iterable[PoolSpec], options: SchedulerOptions) -> dict[DeviceGroup, set[str]]:
  """Every group of devices, in order, with what its pools need compiled.

  Kinds of step, and `gather` and `scatter` of pages for hand-offs, swaps and copies of prefixes.
  """
  uses: dict[DeviceGroup, set[str]] = {}
  conductor = _conductor(options)
  for spec in _in_all_roles(specs, options):
    own = uses.setdefault(spec.group, set())
    policy = POLICIES[policy_name(spec, options)]
    own |= {"prefill": {"prefill", "gather"}, "decode": {"decode", "scatter"}}.get(
      spec.role, {"prefill", "decode"}
    )
    if spec.role != "prefill" and policy.mixes:
      own |= {"prefill", "mixed"}
    copies_prefixes = conductor is not None and conductor.balancing_threshold is not None
    if (
      options.swap_tokens or options.needs_all_roles or (copies_prefixes and spec.role != "decode")
    ):
      own |= {"gather", "scatter"}
  return dict(sorted(uses.items(), key=lambda use: (use[0].devices, use[0].pp)))
