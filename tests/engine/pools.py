"""Pools of the real engine for tests: compiled once, then given to any cluster."""

from __future__ import annotations

import dataclasses
import random
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from virtual import run

from pdjax.config import STRATEGIES, parse_pools
from pdjax.core.clock import WallClock
from pdjax.core.events import EventLog
from pdjax.core.request import Request, SamplingParams
from pdjax.engine.buckets import Buckets
from pdjax.engine.build import build_executors, warm_up
from pdjax.engine.jax_executor import JaxExecutor
from pdjax.engine.steps import Steps
from pdjax.models.model import Model
from pdjax.scheduling.hand_off import HandOff
from pdjax.scheduling.pages import PageConfig
from pdjax.scheduling.policies import POLICIES, make_policy
from pdjax.scheduling.scheduler import Scheduler, SchedulerConfig
from pdjax.serving.cluster import Cluster, Pool

ROWS, PAGE_SIZE, PAGES_PER_ROW = 6, 4, 20
CAPACITY = PAGE_SIZE * PAGES_PER_ROW


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
  """Warm executors, for a prefill or mixed pool and for a decode pool, and their steps."""

  executors: list[JaxExecutor]
  steps: Steps
  pages: PageConfig
  buckets: Buckets


def build(
  model: Model,
  layout: str,
  buckets: Buckets,
  groups,
  pages: PageConfig | None = None,
  attention: str = "auto",
  uses: Sequence[set[str]] | None = None,
  **cuts,
):
  """An `Engine` with `cuts` into stages and groups; an unusable donated buffer is an error.

  `uses` are the calls that each executor is warm for, by default all of either pool.
  """
  pages = pages or PageConfig(
    num_rows=ROWS,
    page_size=PAGE_SIZE,
    pages_per_row=PAGES_PER_ROW,
    num_pages=ROWS * PAGES_PER_ROW,
    contiguous=layout == "slots",
  )
  how = dict(layout=layout, attention=attention, **cuts)
  executors = build_executors(model, pages, buckets, groups, **how)
  with warnings.catch_warnings():
    warnings.filterwarnings("error", message=".*donated.*")
    steps, copies = {"prefill", "decode", "mixed"}, {"gather", "scatter"}
    uses = uses or [steps | copies, {"decode", "scatter"}][: len(executors)]
    for _ in warm_up(executors, uses):
      pass
  return Engine(executors=executors, steps=executors[0].steps, pages=pages, buckets=buckets)


def make_cluster(
  engine: Engine,
  strategy: str,
  *,
  budget: int = 16,
  num_pages: int | None = None,
  shuffle=None,
  limits: Mapping[str, Any] | None = None,
  hand_off: HandOff = HandOff(),
) -> Cluster:
  """The pools of a strategy or a text: one mixed pool, or a prefill and a decode pool.

  `num_pages` lets the scheduler use only so many; `shuffle` is the seed that orders free pages;
  `limits` are more of the scheduler's.
  """
  pages = dataclasses.replace(engine.pages, num_pages=num_pages or engine.pages.num_pages)
  pools = []
  specs = parse_pools(strategy) if strategy not in STRATEGIES else None
  for spec in specs or STRATEGIES[strategy](2 if strategy == "disaggregated" else 1):
    executor = engine.executors[spec.role == "decode"]
    executor.reset()
    policy = POLICIES[spec.policy]
    config = SchedulerConfig(
      token_budget=budget if policy.chunks else engine.pages.capacity_tokens,
      chunk_prompts=policy.chunks,
      decodes=spec.role != "prefill",
      **({"reservation": policy.reservation} | dict(limits or {})),
    )
    scheduler = Scheduler(make_policy(spec.policy), pages, config)
    if shuffle is not None and not pages.contiguous:
      random.Random(shuffle).shuffle(scheduler.pages._free_pages)
    pools.append(Pool(spec.name, spec.role, scheduler, executor))
  return Cluster(pools, hand_off=hand_off)


def serve_all(cluster: Cluster, requests, **options) -> EventLog:
  """Serves to the end in real time, checking every invariant at every turn."""
  return run(cluster, requests, clock=WallClock(), **options)


def request(request_id: int, prompt_ids, arrival_s: float = 0.0, **sampling) -> Request:
  return Request(
    request_id=request_id,
    arrival_s=arrival_s,
    num_prompt_tokens=len(prompt_ids),
    prompt_ids=tuple(prompt_ids),
    sampling=SamplingParams(**sampling),
  )


def cpus(*sizes: int) -> list[list[jax.Device]]:
  """Groups of so many of the CPU devices that `tests/conftest.py` asks for, one after another."""
  devices, groups = list(jax.devices("cpu")), []
  assert sum(sizes) <= len(devices), (
    "JAX started with fewer CPU devices than tests/conftest.py sets"
  )
  for size in sizes:
    groups.append(devices[:size])
    devices = devices[size:]
  return groups
