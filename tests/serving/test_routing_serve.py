"""What a router decides, served to the end: who is told no at once, who is never handed over."""

from __future__ import annotations

import dataclasses

import pytest
from virtual import expected, make_pool, make_requests, run, step_s, tokens_of

from pdjax.core.events import Arrived, Copied, Failed, Fetched, Step
from pdjax.core.plan import StepPlan
from pdjax.scheduling.routing import ROUTERS, Conductor, Fetch, make_router
from pdjax.serving.cluster import Cluster
from pdjax.serving.inbox import Inbox

pytestmark = pytest.mark.quick


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
    pool.scheduler.predict_step_s = step_s  # which looks at the number of tokens only
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


def test_who_is_rejected_after_prefill_was_prefilled_in_vain_and_leaves_nothing_behind():
  requests = make_requests(80, seed=7, rate_rps=400, prompt=(20, 60), output=(5, 20))
  router = Conductor(rejects="after_prefill", ttft_s=9.0, tpot_s=8.07e-3)
  cluster = Cluster(pools(("prefill", "decode")), router)
  log = run(cluster, requests)
  failed = {event.request_id for event in log if isinstance(event, Failed)}
  assert 10 < len(failed) < 75
  tokens = tokens_of(log)
  assert {len(tokens[i]) for i in failed} == {1}, "the token of its prefill is out already"
  served = [r for r in requests if r.request_id not in failed]
  assert {r.request_id: tokens[r.request_id] for r in served} == expected(served)
  cluster.check()
  for pool in cluster.pools:
    assert not pool.scheduler.running and not pool.scheduler.leaving
    assert not pool.scheduler.pages.held_rows, "pages of a rejected request are free again"


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


def conversation(num_turns, *, seed, common=40):
  """Requests that begin alike, one after another, with something of their own each."""
  stem = make_requests(1, seed=seed, prompt=(common, common))[0].prompt_ids
  made = make_requests(num_turns, seed=seed + 1, rate_rps=4, prompt=(1, 8), output=(1, 5))
  return [
    dataclasses.replace(
      r, prompt_ids=stem + r.prompt_ids, num_prompt_tokens=common + r.num_prompt_tokens
    )
    for r in made
  ]


def test_those_who_come_at_once_and_fetch_are_spread_though_none_of_them_is_queued_yet():
  first, *others = conversation(13, seed=13)
  burst = [dataclasses.replace(r, arrival_s=5.0) for r in others]
  log = run(Cluster(pools(("mixed",) * 4), Conductor(balancing_threshold=1.0)), [first, *burst])
  assert any(isinstance(event, Fetched) for event in log)
  used = [event.pool for event in log if isinstance(event, Arrived) and event.request_id]
  assert max(map(used.count, used)) <= 5, "a fair share is 3"


@pytest.mark.parametrize("roles", [("mixed",) * 2, ("prefill", "prefill", "decode")])
def test_a_prefix_that_another_pool_has_is_copied_and_then_found_there(roles):
  """Sent to pool 1 while pool 0 has it: copied once, and every later request finds it locally."""
  requests = conversation(4, seed=11)
  targets = iter([0, Fetch(pool=1, source=0), Fetch(pool=1, source=0), 0])
  log = run(Cluster(pools(roles, budget=64), lambda routing: next(targets)), requests)
  assert tokens_of(log) == expected(requests)
  (fetched,) = [event for event in log if isinstance(event, Fetched)]
  assert (fetched.request_id, fetched.num_tokens) == (1, 40)
  assert (fetched.source, fetched.pool) == (f"{roles[0]}0", f"{roles[1]}1")
  starts = {}
  for event in log:
    if isinstance(event, Step):
      for i, start in zip(event.prefill_ids, event.prefill_starts):
        starts.setdefault(i, start)
  assert starts == {0: 0, 1: 40, 2: 40, 3: 40}


def test_the_conductor_copies_hot_prefixes_to_where_the_queue_is_short():
  requests = conversation(40, seed=13, common=100)
  # One pool has computed the prefix when the others come, all at once.
  requests = [
    dataclasses.replace(r, arrival_s=0.1 + i / 1024 if i else 0.0) for i, r in enumerate(requests)
  ]

  def serve(threshold):
    router = Conductor(balancing_threshold=threshold)
    made = pools(("mixed",) * 3, budget=64, num_pages=256)
    cluster = Cluster(made, router)
    log = run(cluster, requests)
    assert tokens_of(log) == expected(requests)
    copies = [event for event in log if isinstance(event, Fetched)]
    return log, copies, {event.pool for event in log if isinstance(event, Arrived)}

  _, copies, used = serve(1.5)
  assert 1 <= len(copies) <= 4 and len(used) == 3, "a prefix goes to each pool about once"
  assert not serve(None)[1]


def test_a_request_that_ends_while_its_prefix_is_copied_gives_all_pages_back():
  """`run` checks the pages of all pools."""
  requests = conversation(3, seed=17)
  targets = iter([0, Fetch(pool=1, source=0), 1])
  inbox = Inbox(requests)
  inbox.cancel(1, at_s=requests[1].arrival_s + 1e-3)  # the copy takes longer
  log = run(Cluster(pools(("mixed", "mixed"), budget=64), lambda routing: next(targets)), inbox)
  (failure,) = [event for event in log if isinstance(event, Failed)]
  assert (failure.request_id, failure.reason) == (1, "cancelled")
  assert [e.request_id for e in log if isinstance(e, Fetched)] == [1], "what was copied is kept"
  assert tokens_of(log)[2] == expected(requests)[2]


def test_without_room_for_a_copy_the_prefix_is_computed():
  requests = conversation(2, seed=19)
  routes = iter([0, Fetch(pool=1, source=0)])
  cluster = Cluster(pools(("mixed", "mixed"), budget=64), lambda routing: next(routes))
  target = cluster.pools[1].scheduler
  has_room, target.reserve = target.reserve, lambda num_tokens, keys=(): None
  log = run(cluster, requests)
  assert tokens_of(log) == expected(requests)
  assert has_room(4) is not None and not any(isinstance(event, Fetched) for event in log)


def test_the_predicted_step_is_the_one_that_runs():
  plan = StepPlan(step_id=0)
  assert step_s(plan) == 8e-3
