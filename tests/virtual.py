"""Clusters of the checksum model in virtual time, for tests."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from typing import Any

from pdjax.config import STRATEGIES, parse_pools
from pdjax.core import checksum
from pdjax.core.clock import VirtualClock, to_ticks
from pdjax.core.events import EventLog
from pdjax.core.request import Request, SamplingParams
from pdjax.scheduling.hand_off import HandOff
from pdjax.scheduling.pages import PageConfig
from pdjax.scheduling.policies import POLICIES, make_policy
from pdjax.scheduling.routing import least_loaded
from pdjax.scheduling.scheduler import Scheduler, SchedulerConfig
from pdjax.serving.cluster import Cluster, Pool
from pdjax.serving.inbox import Inbox
from pdjax.serving.loop import serve
from pdjax.sim.checksum_executor import ChecksumExecutor
from pdjax.sim.hardware import Link


def step_s(plan) -> float:
  return 8e-3 + 28e-6 * plan.num_tokens


def make_requests(
  n: int, *, seed: int, rate_rps: float = 50.0, prompt=(1, 60), output=(1, 20)
) -> list[Request]:
  rng = random.Random(seed)
  now_s, requests = 0.0, []
  for i in range(n):
    now_s += rng.expovariate(rate_rps)
    ids = tuple(rng.randrange(checksum.VOCAB_SIZE) for _ in range(rng.randint(*prompt)))
    requests.append(
      Request(
        request_id=i,
        arrival_s=to_ticks(now_s),
        num_prompt_tokens=len(ids),
        prompt_ids=ids,
        sampling=SamplingParams(max_tokens=rng.randint(*output)),
      )
    )
  return requests


def make_pool(
  name: str = "mixed0",
  *,
  role: str = "mixed",
  policy="sarathi",
  budget: int = 16,
  chunk_prompts: bool = True,
  num_rows: int = 6,
  num_pages: int = 64,
  pages_per_row: int = 32,
  page_size: int = 4,
  contiguous: bool = False,
  watermark: float = 0.01,
  step_s=step_s,
  link: Link = Link(name="test", latency_s=1e-3, bytes_per_s=1e6),  # noqa: B008 (frozen)
  limits: Mapping[str, Any] | None = None,
  **executor,
) -> Pool:
  if contiguous:
    num_pages = num_rows * pages_per_row
  pages = PageConfig(
    num_rows=num_rows,
    page_size=page_size,
    pages_per_row=pages_per_row,
    num_pages=num_pages,
    contiguous=contiguous,
  )
  config = SchedulerConfig(
    token_budget=budget,
    chunk_prompts=chunk_prompts,
    decodes=role != "prefill",
    watermark=watermark,
    **(limits or {}),
  )

  def as_role(role):
    """Prompts are cut where they were, or there is room for the longest."""
    name = {"prefill": "prefill_chunks", "decode": "decode_only", "mixed": "sarathi"}[role]
    if not chunk_prompts:
      name = {"prefill": "prefill_only", "mixed": "prefill_first"}.get(role, name)
    return make_policy(name), dataclasses.replace(config, decodes=role != "prefill")

  policy = make_policy(policy) if isinstance(policy, str) else policy
  return Pool(
    name,
    role,
    Scheduler(policy, pages, config),
    ChecksumExecutor(
      num_pages=num_pages, page_size=page_size, step_s=step_s, link=link, **executor
    ),
    as_role=as_role,
  )


def make_cluster(
  strategy: str,
  *,
  budget: int = 16,
  router=least_loaded,
  hand_off: HandOff = HandOff(),
  **options,
) -> Cluster:
  """The pools of a strategy on two devices, or of a text as `parse_pools` takes it.

  Whole prompts get a budget that holds any sequence. Routers other than the default are told how
  long steps take.
  """
  pools = []
  for spec in STRATEGIES[strategy](2) if strategy in STRATEGIES else parse_pools(strategy):
    needs = POLICIES[spec.policy]
    pools.append(
      make_pool(
        spec.name,
        role=spec.role,
        policy=spec.policy,
        budget=budget if needs.chunks else 200,
        chunk_prompts=needs.chunks,
        **{"limits": {"reservation": needs.reservation}} | options,
      )
    )
    if router is not least_loaded:
      pools[-1].scheduler.predict_step_s = step_s  # which looks at the number of tokens only
  return Cluster(pools, router, hand_off)


def run(cluster: Cluster, requests, *, clock=None, each_turn=None, **options) -> EventLog:
  """Serves to the end, in virtual time by default, checking every invariant at every turn."""
  log = EventLog()
  inbox = requests if isinstance(requests, Inbox) else Inbox(requests)
  for turn in serve(cluster, inbox, clock or VirtualClock(), log, **options):
    cluster.check()
    if each_turn is not None:
      each_turn(turn)
  for pool in cluster.pools:
    scheduler = pool.scheduler
    assert scheduler.pages.num_free_pages == scheduler.pages.config.num_pages, pool.name
    assert scheduler.pages.num_free_rows == scheduler.pages.config.num_rows, pool.name
    assert not (scheduler.waiting or scheduler.running or scheduler.leaving or pool.in_flight)
    assert scheduler.prefill_tokens_left == scheduler.output_tokens_left == 0
  assert not cluster.outbox and not cluster.transfers and not cluster.prefetches
  return log


def tokens_of(log: EventLog) -> dict[int, tuple[int, ...]]:
  from pdjax.metrics.latency import request_records

  return {i: record.token_ids for i, record in request_records(log).items()}


def expected(requests) -> dict[int, tuple[int, ...]]:
  return {r.request_id: checksum.generate(r.prompt_ids, r.sampling.max_tokens) for r in requests}
