"""What a scheduler was asked on the engine, asked again without one, gives the same plans."""

import copy
import random

import pytest
from engine.pools import CAPACITY, PAGE_SIZE, make_cluster, request, serve_all

from pdjax.core.plan import StepPlan
from pdjax.core.sequence import Sequence
from pdjax.scheduling.policies import make_policy
from pdjax.scheduling.scheduler import Scheduler

FEW = CAPACITY // PAGE_SIZE + 6
CALLS = ("add", "reserve", "adopt", "detach", "release", "drop", "next_step", "commit")
MEMORY = {
  "plenty": {},
  "few pages": dict(num_pages=FEW),
  "shared and swapped": dict(
    num_pages=FEW, limits={"prefix_cache": True, "swap_tokens": 200, "reservation": "chunk"}
  ),
}


def record(scheduler):
  """Wraps a scheduler's methods; returns the list of calls that they will fill.

  Of a sequence that comes from elsewhere a copy is kept, as it was then; calls that a scheduler
  makes to itself are its own business.
  """
  calls, depth = [], 0

  def wrap(name):
    method = getattr(scheduler, name)

    def called(*args):
      nonlocal depth
      kept = [
        copy.deepcopy(arg) if name in ("add", "adopt") and i == 0 else arg
        for i, arg in enumerate(args)
      ]
      depth += 1
      result = method(*args)
      depth -= 1
      if not depth:
        calls.append((name, kept, result))
      return result

    setattr(scheduler, name, called)

  for name in CALLS:
    wrap(name)
  return calls


def replay(calls, scheduler):
  """Asks a fresh scheduler the same. Returns its plans and those of the recording."""
  ours: dict[int, Sequence] = {}
  plans, recorded, in_flight = [], [], {}
  for name, args, result in calls:
    if name in ("add", "adopt"):
      ours[args[0].request_id] = args[0]
    args = [ours[a.request_id] if isinstance(a, Sequence) else a for a in args]
    args = [in_flight.pop(a.step_id) if isinstance(a, StepPlan) else a for a in args]
    got = getattr(scheduler, name)(*args)
    if name == "next_step":
      plans.append(got)
      recorded.append(result)
      if got is not None:
        in_flight[got.step_id] = got
  return plans, recorded


@pytest.mark.parametrize("strategy", ["sarathi", "prefill_first", "orca", "disaggregated"])
@pytest.mark.parametrize("memory", MEMORY)
def test_recorded_calls_replay_to_identical_plans(tiny_paged, strategy, memory):
  rng = random.Random(3)
  stem = [rng.randrange(512) for _ in range(30)]
  requests = [
    request(
      i,
      stem[: rng.choice([4, 12, 30])] + [rng.randrange(512) for _ in range(rng.choice([1, 9]))],
      i * 2e-3,
      max_tokens=rng.randint(1, 16),
    )
    for i in range(12)
  ]
  cluster = make_cluster(tiny_paged, strategy, budget=10, **MEMORY[memory])
  recordings = [record(pool.scheduler) for pool in cluster.pools]
  serve_all(cluster, requests, steps_in_flight=2)
  for pool, calls in zip(cluster.pools, recordings, strict=True):
    name = {"prefill": "prefill_only", "decode": "decode_only"}.get(pool.role, strategy)
    scheduler = pool.scheduler
    fresh = Scheduler(make_policy(name), scheduler.pages.config, scheduler.config)
    plans, recorded = replay(calls, fresh)
    assert plans == recorded and sum(plan is not None for plan in plans) >= 5
    fresh.check()
