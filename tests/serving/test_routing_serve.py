"""What a router decides, served to the end: who is told no at once, who is never handed over."""

from __future__ import annotations

import pytest
from virtual import expected, make_pool, make_requests, run, step_s, tokens_of

from pdjax.core.events import Arrived, Copied, Failed, Step
from pdjax.core.plan import StepPlan
from pdjax.scheduling.routing import ROUTERS, Conductor, make_router
from pdjax.serving.cluster import Cluster

pytestmark = pytest.mark.quick


def predict_step_s(counts):
  """What `virtual.step_s` takes."""
  return 8e-3 + 28e-6 * counts.num_tokens


def pools(roles, *, budget=16, num_pages=64, **limits):
  made = []
  for i, role in enumerate(roles):
    policy = "prefill_only" if role == "prefill" else "sarathi"
    limits_of = {"prefix_cache": True} | limits
    if role == "decode":
      limits_of["reservation"] = "request"
    pool = make_pool(
      f"{role}{i}", role=role, policy=policy, budget=budget, num_pages=num_pages, limits=limits_of
    )
    pool.scheduler.predict_step_s = predict_step_s
    made.append(pool)
  return made


@pytest.mark.parametrize("roles", [("mixed",) * 3, ("prefill", "prefill", "decode", "decode")])
@pytest.mark.parametrize("name", sorted(ROUTERS))
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_every_router_serves_everyone_their_tokens(roles, name, steps_in_flight):
  requests = make_requests(40, seed=3, rate_rps=200)
  cluster = Cluster(pools(roles), make_router(name))
  log = run(cluster, requests, steps_in_flight=steps_in_flight)
  assert tokens_of(log) == expected(requests)
  used = {event.pool for event in log if isinstance(event, Arrived)}
  assert used == {pool.name for pool in cluster.entry}


def test_short_prompts_prefill_where_they_decode_and_are_never_handed_over():
  requests = make_requests(30, seed=5, rate_rps=20, prompt=(1, 40), output=(2, 6))
  cluster = Cluster(pools(("prefill", "decode")), Conductor(local_prefill_tokens=10, tpot_s=1.0))
  log = run(cluster, requests)
  assert tokens_of(log) == expected(requests)
  moved = {event.request_id for event in log if isinstance(event, Copied)}
  short = {r.request_id for r in requests if r.num_prompt_tokens <= 10}
  assert short and moved == {r.request_id for r in requests} - short
  assert {e.kind for e in log if isinstance(e, Step) and e.pool == "decode1"} >= {"decode", "mixed"}


@pytest.mark.parametrize("rejects", ["early", "predicted"])
def test_who_is_rejected_is_told_at_once_and_costs_nothing(rejects):
  requests = make_requests(80, seed=7, rate_rps=400, prompt=(20, 60), output=(5, 20))
  router = Conductor(rejects=rejects, ttft_s=0.1, tpot_s=0.02, decode_s=0.2)
  log = run(Cluster(pools(("prefill", "decode")), router), requests)
  failed = {event.request_id: event for event in log if isinstance(event, Failed)}
  assert 10 < len(failed) < 75
  arrival_s = {r.request_id: r.arrival_s for r in requests}
  seen_s = {e.request_id: e.seen_s for e in log if isinstance(e, Arrived)}
  for request_id, event in failed.items():
    assert event.reason.startswith("rejected: overload: predicted T")
    assert event.time_s == seen_s[request_id] >= arrival_s[request_id]
  steps = [event for event in log if isinstance(event, Step)]
  assert not failed.keys() & {i for e in steps for i in e.prefill_ids + e.decode_ids}
  tokens = tokens_of(log)
  served = [r for r in requests if r.request_id not in failed]
  assert {r.request_id: tokens[r.request_id] for r in served} == expected(served)


def test_rejection_keeps_the_promise_to_those_who_are_let_in():
  """Under twice the load that can be served, without rejection nearly everyone waits too long."""

  def late(rejects):
    requests = make_requests(150, seed=9, rate_rps=150, prompt=(30, 60), output=(1, 4))
    router = Conductor(rejects=rejects, ttft_s=0.3, tpot_s=1.0)
    log = run(Cluster(pools(("prefill", "decode")), router), requests)
    first = {}
    for e in log:
      if isinstance(e, Step):
        for i in e.emitted_ids:
          first.setdefault(i, e.end_s)
    waits = [first[r.request_id] - r.arrival_s for r in requests if r.request_id in first]
    return sum(wait > 0.4 for wait in waits) / len(waits), len(waits)

  share, served = late("early")
  assert share < 0.1 and served > 20
  assert late("never")[0] > 0.5


def test_the_predicted_step_is_the_one_that_runs():
  plan = StepPlan(step_id=0)
  assert step_s(plan) == 8e-3
