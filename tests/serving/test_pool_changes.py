"""Pools that are lost, come back, are gone for good, or take another role while they serve."""

import dataclasses

import pytest
from serving.faults import make_faulty
from virtual import expected, make_cluster, make_requests, run, tokens_of

from pdjax.core.clock import VirtualClock
from pdjax.core.costs import StepCounts
from pdjax.core.events import Copied, EventLog, Failed, PoolChanged, Preempted, Step
from pdjax.core.sequence import State
from pdjax.scheduling.hand_off import HandOff
from pdjax.scheduling.planner import SlackPlanner, make_planner
from pdjax.scheduling.policies import make_policy
from pdjax.serving.inbox import Inbox
from pdjax.serving.loop import serve

pytestmark = pytest.mark.quick
FOUR = "2xprefill:prefill_chunks,2xdecode"


def changes(log):
  return [(e.pool, e.reason) for e in log if isinstance(e, PoolChanged)]


def run_killing(cluster, requests, name, at_turn, **kill):
  num_turns = [0]
  (pool,) = [p for p in cluster.pools if p.name == name]

  def count(turn):
    num_turns[0] += 1
    if num_turns[0] == at_turn:
      pool.executor.kill(**kill)

  return run(cluster, requests, each_turn=count)


# Lost ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["prefill0", "prefill1", "decode0", "decode1"])
@pytest.mark.parametrize("at_turn", [1, 5, 9, 14, 20, 33])
def test_killed_at_any_moment_no_request_is_lost_and_no_token_comes_twice(name, at_turn):
  requests = make_requests(16, seed=70, rate_rps=400.0, prompt=(1, 40), output=(1, 12))
  cluster = make_faulty(make_cluster(FOUR, budget=8), donates=False)
  log = run_killing(cluster, requests, name, at_turn)
  assert tokens_of(log) == expected(requests)  # each once, those before the loss kept
  assert changes(log) == [(name, "lost: its process ended"), (name, "it is back")] or changes(
    log
  ) == [(name, "lost: killed by a test"), (name, "it is back")]
  assert not [e for e in log if isinstance(e, Failed)]


def test_the_others_go_on_while_a_pool_is_down():
  requests = make_requests(20, seed=71, rate_rps=400.0, prompt=(10, 40), output=(4, 12))
  cluster = make_faulty(make_cluster(FOUR, budget=8), donates=False)
  log = list(run_killing(cluster, requests, "decode0", 20))
  lost, back = (i for i, e in enumerate(log) if isinstance(e, PoolChanged))
  between = [e.pool for e in log[lost:back] if isinstance(e, Step)]
  assert {"prefill0", "prefill1", "decode1"} <= set(between)
  assert "decode0" not in [e.pool for e in log[lost + 1 : back] if isinstance(e, Step)]
  assert "decode0" in [e.pool for e in log[back:] if isinstance(e, Step)], "it is used again"


@pytest.mark.parametrize("strategy", ["continuous", "chunked", "disaggregated"])
def test_a_pool_without_another_of_its_kind_is_waited_for(strategy):
  requests = make_requests(10, seed=72, rate_rps=400.0, output=(4, 8))
  for number in (0, 1):
    cluster = make_faulty(make_cluster(strategy), donates=False)
    log = run_killing(cluster, requests, cluster.pools[number].name, 6)
    assert tokens_of(log) == expected(requests)


def test_gone_for_good_its_requests_fail_only_where_nobody_else_can_serve_them():
  requests = make_requests(12, seed=73, rate_rps=400.0, output=(3, 8))
  cluster = make_faulty(make_cluster(FOUR, budget=8), donates=False)
  log = run_killing(cluster, requests, "prefill0", 8, for_good=True)
  assert tokens_of(log) == expected(requests)
  assert [reason.split(":")[0] for _, reason in changes(log)] == ["lost", "gone"]

  cluster = make_faulty(make_cluster("disaggregated"), donates=False)
  log = run_killing(cluster, requests, "decode0", 8, for_good=True)
  failures = {e.request_id: e.reason for e in log if isinstance(e, Failed)}
  assert failures and all("no decode pool is left" in r for r in failures.values())
  tokens, want = tokens_of(log), expected(requests)
  for i, ids in want.items():
    assert tokens.get(i, ()) == ids[: len(tokens.get(i, ()))]
    assert i in failures or tokens[i] == ids

  cluster = make_faulty(make_cluster("disaggregated"), donates=False)
  log = run_killing(cluster, requests, "prefill0", 4, for_good=True)
  failures = [e.reason for e in log if isinstance(e, Failed)]
  assert failures and all("no pool that could prefill it is left" in r for r in failures)


@pytest.mark.parametrize("name", ["mixed0", "mixed1"])
def test_what_a_lost_pool_had_queued_keeps_its_order(name):
  """Preempted sequences oldest first, then those that never ran."""
  requests = make_requests(30, seed=80, rate_rps=1e6, prompt=(8, 12), output=(20, 30))
  cluster = make_faulty(make_cluster("2xmixed", num_pages=24, pages_per_row=24), donates=False)
  (pool,) = [p for p in cluster.pools if p.name == name]
  (other,) = [p for p in cluster.pools if p is not pool]
  queued, moved = [], []

  def kill_when_two_were_preempted(turn):
    states = [seq.state for seq in pool.scheduler.waiting.values()]
    if not queued and states.count(State.PREEMPTED) > 1:
      queued.extend(pool.scheduler.waiting)
      pool.executor.kill()
    elif queued and not moved:
      moved.extend(i for i in other.scheduler.waiting if i in queued)

  log = run(cluster, requests, each_turn=kill_when_two_were_preempted)
  assert tokens_of(log) == expected(requests)
  assert queued and moved == queued


# Another role -------------------------------------------------------------------------------------


def run_changing(cluster, requests, *changes_asked, **options):
  inbox = Inbox(requests)
  for at_s, pool, role in changes_asked:
    inbox.change_role(pool, role, at_s=at_s)
  return run(cluster, inbox, **options)


@pytest.mark.parametrize("at_s", [0.0, 0.03, 0.06])
@pytest.mark.parametrize(
  ("pool", "role"),
  [
    ("prefill1", "mixed"),
    ("prefill1", "decode"),
    ("decode1", "mixed"),
    ("decode1", "prefill"),
  ],
)
def test_any_pool_takes_any_role_while_it_serves_and_nothing_is_computed_twice(pool, role, at_s):
  requests = make_requests(30, seed=74, rate_rps=300.0, prompt=(1, 40), output=(1, 12))
  log = run_changing(make_cluster(FOUR, budget=8), requests, (at_s, pool, role))
  assert tokens_of(log) == expected(requests)
  assert changes(log) == [(pool, f"asked to be {role}"), (pool, f"it is {role} now")]
  assert not [e for e in log if isinstance(e, Preempted)], "K and V stay usable"
  at = next(i for i, e in enumerate(log) if getattr(e, "reason", "").endswith("now"))
  kinds = {e.kind for e in list(log)[at:] if isinstance(e, Step) and e.pool == pool}
  assert kinds <= {"prefill": {"prefill"}, "decode": {"decode"}}.get(
    role, {"prefill", "decode", "mixed"}
  ) or (role == "prefill" and kinds == {"prefill", "decode"})  # one decode was in flight


def test_a_mixed_pool_that_turns_to_prefill_hands_over_what_it_decodes():
  requests = make_requests(8, seed=75, rate_rps=1e6, prompt=(4, 8), output=(20, 30))
  cluster = make_cluster("1xmixed,1xprefill,1xdecode", budget=16, num_rows=12)
  log = run_changing(cluster, requests, (0.06, "mixed0", "prefill"))
  assert tokens_of(log) == expected(requests)
  moved = [e for e in log if isinstance(e, Copied) and e.source == "mixed0"]
  lengths = {r.request_id: r.num_prompt_tokens for r in requests}
  assert moved and all(e.num_tokens > lengths[e.request_id] for e in moved)
  assert not [e for e in log if isinstance(e, Preempted)]


def test_what_is_computed_again_when_its_pool_turns_to_prefill_goes_on_with_the_right_token():
  requests = make_requests(20, seed=0, rate_rps=1e6, prompt=(4, 12), output=(20, 30))
  options = dict(budget=16, num_rows=12, num_pages=20)
  log = list(run(make_cluster("1xmixed,1xprefill,1xdecode", **options), requests))
  preempted = [e for e in log if isinstance(e, Preempted) and e.pool == "mixed0"]
  assert preempted
  for event in preempted:
    again = next(
      e
      for e in log
      if isinstance(e, Step)
      and e.pool == "mixed0"
      and e.start_s >= event.time_s
      and event.request_id in e.prefill_ids
      and event.request_id in e.emitted_ids
    )
    at_s = (again.start_s + again.end_s) / 2  # while its last chunk is in flight
    cluster = make_cluster("1xmixed,1xprefill,1xdecode", **options)
    assert tokens_of(run_changing(cluster, requests, (at_s, "mixed0", "prefill"))) == expected(
      requests
    )


def test_streams_of_a_pool_that_prefills_no_more_are_given_up():
  """They would copy on for as long as their sequences decode where they are."""
  requests = make_requests(8, seed=1, rate_rps=1e6, prompt=(30, 60), output=(30, 40))
  streamed = set()
  for at_s in (0.02, 0.04, 0.06):
    cluster = make_cluster(FOUR, budget=12, num_rows=12, num_pages=300)
    (pool,) = [p for p in cluster.pools if p.name == "prefill0"]

    def note(turn, cluster=cluster, pool=pool):
      is_streaming = any(t.is_ahead and t.source is pool and not t.parts for t in cluster.transfers)
      streamed.add((pool.role, is_streaming))

    log = run_changing(cluster, requests, (at_s, "prefill0", "mixed"), each_turn=note)
    assert tokens_of(log) == expected(requests)
  assert ("prefill", True) in streamed and ("mixed", True) not in streamed


def test_the_last_decode_pool_that_is_left_stays_one():
  requests = make_requests(30, seed=1, rate_rps=100.0, prompt=(10, 40), output=(25, 30))
  cluster = make_faulty(
    make_cluster("1xprefill,2xdecode", num_rows=8), donates=False, latency_s=0.05
  )
  decode0, decode1 = cluster.decode

  def kill(turn):
    if decode1.next_role and not decode0.is_gone:
      decode0.executor.kill(for_good=True)

  log = run_changing(cluster, requests, (0.1, "decode1", "prefill"), each_turn=kill)
  assert tokens_of(log) == expected(requests)
  reasons = [reason for name, reason in changes(log) if name == "decode1"]
  assert reasons[0] == "asked to be prefill" and reasons[1].startswith("it stays decode: prefill")


def test_a_pool_that_is_lost_again_before_anyone_saw_it_is_started_again():
  requests = make_requests(8, seed=84, rate_rps=300.0, output=(3, 8))
  cluster = make_faulty(make_cluster("disaggregated"), donates=False)
  pool = cluster.entry[0]
  num_kills = [0]

  def kill(turn):
    if num_kills[0] == 0 or (num_kills[0] == 1 and not pool.is_up):
      num_kills[0] += 1
      pool.executor.kill()

  log = run(cluster, requests, each_turn=kill)
  assert num_kills == [2] and tokens_of(log) == expected(requests)


def test_a_run_does_not_wait_for_changes_that_nobody_would_see():
  requests = make_requests(3, seed=81)
  clock = VirtualClock()
  log = run_changing(make_cluster(FOUR), requests, (1e3, "decode1", "mixed"), clock=clock)
  assert tokens_of(log) == expected(requests) and clock.now_s() < 10 and not changes(log)


def test_what_waits_in_a_pool_that_turns_to_decode_goes_to_others_at_once():
  requests = make_requests(12, seed=85, rate_rps=1e6, prompt=(30, 40), output=(2, 3))
  cluster = make_cluster(FOUR, budget=8)
  (pool,) = [p for p in cluster.pools if p.name == "prefill1"]
  num_waiting = {}

  def note(turn):
    num_waiting[pool.next_role or pool.role] = max(
      num_waiting.get(pool.next_role or pool.role, 0), len(pool.scheduler.waiting)
    )

  log = run_changing(cluster, requests, (0.02, "prefill1", "decode"), each_turn=note)
  assert tokens_of(log) == expected(requests)
  assert num_waiting["prefill"] > 0 and num_waiting["decode"] == 0


@pytest.mark.parametrize("role", ["prefill", "mixed"])
def test_a_pool_has_done_what_it_could_not_do_in_its_next_role_before_it_takes_that(role):
  """It will take prompts whole, and has some that are longer than its budget then."""
  requests = make_requests(8, seed=2, rate_rps=1000, prompt=(40, 60), output=(4, 9))
  late = dataclasses.replace(requests[0], request_id=8, arrival_s=0.05)
  cluster = make_cluster("prefill:prefill_chunks,decode,mixed")
  pool = cluster.pools[0 if role == "mixed" else -1]
  config = dataclasses.replace(
    pool.scheduler.config, token_budget=32, chunk_prompts=False, decodes=role == "mixed"
  )
  policy = "prefill_first" if role == "mixed" else "prefill_only"
  pool.as_role = lambda role: (make_policy(policy), config)
  if role == "mixed":  # somebody must prefill for the decode pool
    cluster.pools[-1].role = "prefill"
    cluster.pools[-1].scheduler.become(*cluster.pools[-1].as_role("prefill"))
  log = run_changing(cluster, [*requests, late], (0.02, pool.name, role))
  assert changes(log)[-1] == (pool.name, f"it is {role} now")
  (failed,) = [e for e in log if isinstance(e, Failed)]
  assert failed.request_id == 8 and "never fit token_budget=32 in one step" in failed.reason
  assert {i: ids for i, ids in tokens_of(log).items() if i != 8} == expected(requests)


@pytest.mark.parametrize("seed", [15, 16, 29])
def test_a_preemption_is_told_once_also_of_a_step_that_came_to_nothing(seed):
  """With a step in flight a victim's pages are busy yet, and its pool may be another by then."""
  requests = make_requests(12, seed=seed, rate_rps=300, prompt=(5, 16), output=(8, 20))
  cluster = make_cluster(
    "prefill,2xdecode", num_pages=12, pages_per_row=10, num_rows=3,
    hand_off=HandOff(reservation="prompt"),
  )  # fmt: skip
  asked = [(0.02 * i, f"decode{i % 2}", ("mixed", "decode")[i // 2 % 2]) for i in range(30)]
  seqs = {}

  def note(turn):
    for pool in cluster.pools:
      seqs.update(pool.scheduler.waiting | pool.scheduler.running)

  log = run_changing(cluster, requests, *asked, each_turn=note, steps_in_flight=2)
  told = [e.request_id for e in log if isinstance(e, Preempted)]
  assert told and all(told.count(i) == seq.num_preemptions for i, seq in seqs.items())


def test_there_and_back_again():
  requests = make_requests(60, seed=76, rate_rps=200.0, prompt=(1, 30), output=(1, 12))
  asked = [
    (0.05, "decode1", "prefill"),
    (0.12, "decode1", "mixed"),
    (0.2, "prefill0", "decode"),
    (0.25, "decode1", "decode"),
    (0.3, "prefill0", "prefill"),
  ]
  log = run_changing(make_cluster(FOUR, budget=8), requests, *asked)
  assert tokens_of(log) == expected(requests)
  assert sum("now" in reason for _, reason in changes(log)) == len(asked)


@pytest.mark.parametrize(
  ("pool", "role", "reason"),
  [
    ("decode0", "prefill", "prefill pools need a decode pool to hand over to"),
    ("prefill0", "decode", "decode pools need a prefill pool"),
    ("prefill0", "train", "role 'train' must be one of prefill, decode, mixed"),
    ("prefill7", "decode", "there is no pool 'prefill7', only prefill0, decode0"),
  ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(pool, role, reason):
  requests = make_requests(5, seed=77)
  log = run_changing(make_cluster("disaggregated"), requests, (0.0, pool, role))
  ((_, said),) = changes(log)
  assert said.startswith("refused") and reason in said
  assert tokens_of(log) == expected(requests)


def test_a_change_that_is_asked_for_and_taken_back_never_happens():
  requests = make_requests(8, seed=78, rate_rps=1e6, prompt=(30, 40), output=(2, 3))
  cluster = make_cluster(FOUR, budget=8)
  log = run_changing(cluster, requests, (0.01, "prefill1", "decode"), (0.02, "prefill1", "prefill"))
  assert tokens_of(log) == expected(requests)
  assert [p.role for p in cluster.pools] == ["prefill", "prefill", "decode", "decode"]
  assert not any("now" in reason for _, reason in changes(log))


# A planner ----------------------------------------------------------------------------------------


def predict_step_s(counts: StepCounts) -> float:
  return 8e-3 + 28e-6 * (counts.num_prefill_tokens + counts.num_decodes)


def planned(requests, **options):
  cluster = make_cluster("1xprefill:prefill_chunks,3xdecode", budget=8, num_rows=8)
  for pool in cluster.pools:
    pool.scheduler.predict_step_s = predict_step_s
  log = EventLog()
  planner = SlackPlanner(
    **(dict(ttft_s=0.1, tpot_s=0.05, interval_s=0.02, cooldown_s=0.2) | options)
  )
  for _ in serve(cluster, Inbox(requests), VirtualClock(), log, planner=planner):
    cluster.check()
  assert tokens_of(log) == expected(requests)
  return cluster, log


def test_a_planner_moves_pools_to_the_half_that_is_late():
  burst = make_requests(40, seed=79, rate_rps=200.0, prompt=(30, 60), output=(2, 3))
  cluster, log = planned(burst)
  assert [p.role for p in cluster.pools].count("prefill") > 1
  assert len([p for p in cluster.pools if p.role == "decode"]) >= 1
  _, still = planned(burst, ttft_s=1e3)
  assert changes(still) == []
  last_s = {name: max(e.end_s for e in one if isinstance(e, Step)) for name, one in
            (("planned", log), ("fixed", still))}  # fmt: skip
  assert last_s["planned"] < 0.8 * last_s["fixed"]


def test_a_planner_waits_between_changes():
  burst = make_requests(40, seed=79, rate_rps=200.0, prompt=(30, 60), output=(2, 3))
  _, log = planned(burst, cooldown_s=0.3)
  asked_s = [e.time_s for e in log if isinstance(e, PoolChanged) and "asked" in e.reason]
  assert len(asked_s) == 2 and asked_s[1] - asked_s[0] >= 0.3


def test_a_planner_by_name_and_wrong_options():
  assert make_planner("slack", {"ttft_s": 2.0}).ttft_s == 2.0
  with pytest.raises(ValueError, match="slack=0 must be positive"):
    SlackPlanner(slack=0)
  with pytest.raises(ValueError, match="unknown planner 'slac'; did you mean slack"):
    make_planner("slac")
