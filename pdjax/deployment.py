"""From a strategy's pools to schedulers, a cluster and the sizes to compile. Imports no jax.

`pdjax.LLM` and the experiments build what they serve with here, on the engine and in simulation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from pdjax.config import CacheConfig, PoolSpec, SchedulerOptions
from pdjax.core.names import pick
from pdjax.scheduling.pages import PageConfig
from pdjax.scheduling.policies import POLICIES, make_policy
from pdjax.scheduling.routing import Conductor, make_router
from pdjax.scheduling.scheduler import Scheduler, SchedulerConfig, StepTime
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


def make_cluster(
  specs: Iterable[PoolSpec],
  options: SchedulerOptions,
  pages: Callable[[tuple[int, ...]], PageConfig],
  executor: Callable[[tuple[int, ...]], Executor],
  step_time: Callable[[tuple[int, ...]], StepTime] | None = None,
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
    name = policy_name(spec, options)
    policy = make_policy(name, options.options_of(name))
    predict_step_s = None if step_time is None else step_time(spec.devices)
    own_pages = pages(spec.devices)
    scheduler = Scheduler(policy, own_pages, limits(spec, options, own_pages), predict_step_s)
    pools.append(Pool(spec.name, spec.role, scheduler, executor(spec.devices)))
  return Cluster(pools, make_router(options.router, options.options_of(options.router)))


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
    reservation = "request"  # as what is handed over: nobody there is ever preempted
  changes = dict(decodes=spec.role != "prefill", reservation=reservation)
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
  for spec in specs:
    budgets.append(limits(spec, options, pages).token_budget)
    if POLICIES[policy_name(spec, options)].mixes:
      mixing.append(budgets[-1])
  return max(budgets), max(mixing)


def uses_of(
  specs: Iterable[PoolSpec], options: SchedulerOptions
) -> dict[tuple[int, ...], set[str]]:
  """Every group of devices, in order, with what its pools need compiled.

  Kinds of step, and `gather` and `scatter` of pages for hand-offs, swaps and copies of prefixes.
  """
  uses: dict[tuple[int, ...], set[str]] = {}
  conductor = _conductor(options)
  for spec in specs:
    own = uses.setdefault(spec.devices, set())
    policy = POLICIES[policy_name(spec, options)]
    own |= {"prefill": {"prefill", "gather"}, "decode": {"decode", "scatter"}}.get(
      spec.role, {"prefill", "decode"}
    )
    if spec.role != "prefill" and policy.mixes:
      own |= {"prefill", "mixed"}
    copies_prefixes = conductor is not None and conductor.balancing_threshold is not None
    if options.swap_tokens or (copies_prefixes and spec.role != "decode"):
      own |= {"gather", "scatter"}
  return dict(sorted(uses.items()))
