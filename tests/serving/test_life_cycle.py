"""However a request ends, and wherever it is then, it ends once and gives back all that it held."""

import collections
import dataclasses
import itertools
import math
import random
import threading
import time

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
  RuleBasedStateMachine,
  initialize,
  invariant,
  rule,
  run_state_machine_as_test,
)
from serving.faults import FAULTS, SLOW_S, Fault, make_faulty
from virtual import expected, make_cluster, make_requests, run, tokens_of

from pdjax.core import checksum
from pdjax.core.clock import VirtualClock, WallClock, to_ticks
from pdjax.core.events import Arrived, Copied, EventLog, Failed, Finished, Preempted, Step
from pdjax.core.request import Request, SamplingParams
from pdjax.core.sequence import Sequence, State
from pdjax.scheduling.hand_off import HandOff
from pdjax.scheduling.policies import POLICIES
from pdjax.scheduling.routing import ROLES, Conductor
from pdjax.scheduling.scheduler import length_or_stop
from pdjax.serving.inbox import Inbox
from pdjax.serving.loop import serve

STRATEGIES = ("continuous", "chunked", "disaggregated")


def ends_of(log):
  """Request id -> why it ended; fails if one ended twice."""
  ends = [(e.request_id, e.reason) for e in log if isinstance(e, Finished | Failed)]
  assert len(ends) == len(dict(ends)), f"ended twice: {ends}"
  return dict(ends)


def assert_others_are_right(log, requests, ended_early):
  tokens, want = tokens_of(log), expected(requests)
  for i, ids in want.items():
    assert tokens[i] == (ids[: len(tokens[i])] if i in ended_early else ids), i


# The states -------------------------------------------------------------------------------------


def make_sequence(request_id=0):
  sampling = SamplingParams(max_tokens=4)
  return Sequence(
    Request(
      request_id=request_id,
      arrival_s=0.0,
      num_prompt_tokens=3,
      prompt_ids=(1, 2, 3),
      sampling=sampling,
    )
  )


PATHS = (  # every life a request can have
  (State.QUEUED, State.ENDED),
  (State.QUEUED, State.RUNNING, State.ENDED),
  (State.QUEUED, State.FETCHING, State.QUEUED, State.RUNNING, State.ENDED),
  (State.QUEUED, State.FETCHING, State.ENDED),
  (State.QUEUED, State.RUNNING, State.PREEMPTED, State.RUNNING, State.ENDED),
  (State.QUEUED, State.RUNNING, State.PREEMPTED, State.ENDED),
  (State.QUEUED, State.RUNNING, State.READY, State.ENDED),
  (State.QUEUED, State.RUNNING, State.READY, State.PREEMPTED, State.RUNNING, State.READY),
  (State.QUEUED, State.RUNNING, State.READY, State.MOVING, State.RUNNING, State.ENDED),
  (State.QUEUED, State.RUNNING, State.READY, State.MOVING, State.READY, State.MOVING, State.ENDED),
  (State.QUEUED, State.RUNNING, State.READY, State.MOVING, State.PREEMPTED),
)


@pytest.mark.quick
@pytest.mark.parametrize("path", PATHS)
def test_a_request_may_live_so(path):
  seq = make_sequence()
  for state in path[1:]:
    seq.enter(state)
  assert seq.state is path[-1]


@pytest.mark.quick
def test_any_other_change_of_state_raises_and_changes_nothing():
  allowed = {pair for path in PATHS for pair in itertools.pairwise(path)}
  for before, after in set(itertools.product(State, State)) - allowed:
    seq = make_sequence(7)
    seq.state = before
    with pytest.raises(RuntimeError, match=f"request 7 is {before.value}.*become {after.value}"):
      seq.enter(after)
    assert seq.state is before


@pytest.mark.quick
def test_a_scheduler_moves_a_sequence_only_from_the_state_it_is_in():
  scheduler = make_cluster("chunked").entry[0].scheduler
  seq, other = make_sequence(0), make_sequence(1)
  scheduler.add(seq)
  scheduler.next_step()
  with pytest.raises(RuntimeError, match="is running and cannot become running"):
    scheduler.adopt(seq, scheduler.reserve(8))
  scheduler.add(other)
  with pytest.raises(RuntimeError, match="is queued and cannot become ready"):
    scheduler.detach(other)
  scheduler.drop(0)
  with pytest.raises(RuntimeError, match="is ended and cannot become preempted"):
    scheduler.unseat(seq)


# Every state x (cancel, time-out, failure) ------------------------------------------------------


def is_queued(seq, cluster):
  return seq.state is State.QUEUED


def is_between_chunks(seq, cluster):
  return seq.state is State.RUNNING and 0 < seq.num_computed_tokens < seq.request.num_prompt_tokens


def is_in_a_step(seq, cluster):
  return seq.state is State.RUNNING and seq.num_scheduled_tokens > seq.num_computed_tokens


def is_preempted(seq, cluster):
  return seq.state is State.PREEMPTED


def is_ready(seq, cluster):
  return seq.state is State.READY


def is_moving(seq, cluster):
  return seq.state is State.MOVING


def is_decoding(seq, cluster):
  holders = cluster.decode or cluster.entry
  return any(seq.request_id in p.scheduler.running for p in holders) and len(seq.output_ids) > 1


CELLS = [
  *(("chunked", where) for where in (is_queued, is_between_chunks, is_in_a_step, is_preempted)),
  ("chunked", is_decoding),
  *(("continuous", where) for where in (is_queued, is_in_a_step, is_preempted, is_decoding)),
  *(("disaggregated", where) for where in (is_queued, is_ready, is_moving, is_decoding)),
]


def crowd():
  """More than fits at once, so that some wait everywhere."""
  return make_requests(14, seed=31, rate_rps=2000, prompt=(20, 50), output=(6, 12))


def make_crowded(strategy, *, donates=False):
  rows = dict(num_rows=2) if strategy == "disaggregated" else dict(num_rows=6)
  return make_faulty(make_cluster(strategy, num_pages=40, **rows), donates=donates, latency_s=0.05)


def sequences_of(cluster):
  for pool in cluster.pools:
    for queue in (pool.scheduler.waiting, pool.scheduler.running, pool.scheduler.leaving):
      yield from queue.values()


def run_until(strategy, where, act, *, donates=False, requests=None):
  """Serves a crowd; as soon as a request is `where`, calls act(cluster, inbox, id, now_s)."""
  cluster, requests = make_crowded(strategy, donates=donates), requests or crowd()
  inbox, chosen = Inbox(requests), []

  def each_turn(turn):
    for seq in sequences_of(cluster):
      if not chosen and where(seq, cluster):
        chosen.append(seq.request_id)
        act(cluster, inbox, seq.request_id, turn.now_s)

  log = run(cluster, inbox, each_turn=each_turn, steps_in_flight=2)  # every page came back
  assert chosen, "nobody was there: the test shows nothing"
  return cluster, log, chosen[0]


@pytest.mark.quick
@pytest.mark.parametrize(("strategy", "where"), CELLS)
@pytest.mark.parametrize("after_s", [0.0, 0.003])
def test_a_cancel_ends_it_there(strategy, where, after_s):
  requests = crowd()

  def cancel(cluster, inbox, request_id, now_s):
    inbox.cancel(request_id, at_s=now_s + after_s)
    inbox.cancel(request_id, at_s=now_s + after_s)

  _, log, chosen = run_until(strategy, where, cancel)
  ends = ends_of(log)
  assert {i for i, reason in ends.items() if reason == "cancelled"} == {chosen}
  assert len(ends) == len(requests)
  assert_others_are_right(log, requests, {chosen})


@pytest.mark.quick
@pytest.mark.parametrize(("strategy", "where"), CELLS)
def test_a_time_out_ends_it_there(strategy, where):
  """Time is virtual and so the same twice: first it is seen when a request is there."""
  seen = []
  run_until(strategy, where, lambda *args: seen.append(args[2:]))
  (request_id, now_s) = seen[0]
  requests = crowd()
  timeout_s = to_ticks(now_s + 1e-3 - requests[request_id].arrival_s)
  requests[request_id] = dataclasses.replace(requests[request_id], timeout_s=timeout_s)
  _, log, chosen = run_until(strategy, where, lambda *args: None, requests=requests)
  assert chosen == request_id
  (failure,) = [e for e in log if isinstance(e, Failed)]
  assert (failure.request_id, failure.reason) == (chosen, f"timed out after {timeout_s} s")
  assert failure.time_s == requests[chosen].arrival_s + timeout_s, "neither early nor late"
  assert len(ends_of(log)) == len(requests)
  assert_others_are_right(log, requests, {chosen})


@pytest.mark.quick
@pytest.mark.parametrize(("strategy", "where"), CELLS)
@pytest.mark.parametrize("donates", [False, True])
def test_a_failure_ends_it_there(strategy, where, donates):
  """The first work that has to do with it from then on fails, and takes the cache along or not."""
  requests = crowd()

  def break_it(cluster, inbox, request_id, now_s):
    for pool in cluster.pools:
      pool.executor.broken.add(request_id)

  cluster, log, chosen = run_until(strategy, where, break_it, donates=donates)
  ends = ends_of(log)
  failed = {i for i, reason in ends.items() if "Fault" in reason}
  assert chosen in failed and len(ends) == len(requests)
  with_it = {chosen}
  for e in log:
    if isinstance(e, Step) and chosen in (*e.prefill_ids, *e.decode_ids) and not e.emitted_ids:
      with_it |= {*e.prefill_ids, *e.decode_ids}
  assert failed <= with_it, "only those of the step that failed"
  assert_others_are_right(log, requests, failed)
  if donates and strategy != "disaggregated":
    assert sum(pool.executor.num_recoveries for pool in cluster.pools) == 1


@pytest.mark.quick
@pytest.mark.parametrize("fault", ["export", "import", "copy"])
@pytest.mark.parametrize("donates", [False, True])
def test_a_hand_off_that_fails_ends_its_request_alone(fault, donates):
  requests = crowd()

  def arm(cluster, inbox, request_id, now_s):
    for pool in cluster.pools:
      pool.executor.armed.add(fault)

  _, log, _ = run_until("disaggregated", is_ready, arm, donates=donates)
  ends = ends_of(log)
  (failed,) = [i for i, reason in ends.items() if reason.startswith("hand-off failed: Fault")]
  assert len(ends) == len(requests)
  assert_others_are_right(log, requests, {failed})


# A cache is lost --------------------------------------------------------------------------------


def arm_while_others_hold_rows(pool, fault):
  """The first step that leaves out a request which has pages there will fail."""
  submit, scheduler = pool.executor.submit, pool.scheduler
  left_out = []

  def submit_and_break(plan, now_s, exports):
    in_it = {s.request_id for s in plan.prefills} | set(plan.decodes.request_ids)
    ready = [i for i, seq in scheduler.leaving.items() if seq.state is State.READY]
    others = [i for i in (*scheduler.running, *ready) if i not in in_it]
    if others and not left_out:
      left_out.extend(others)
      pool.executor.armed.add(fault)
    return submit(plan, now_s, exports)

  pool.executor.submit = submit_and_break
  return left_out


@pytest.mark.quick
@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("fault", ["submit", "step"])
@pytest.mark.parametrize("strategy", ["continuous", "disaggregated"])
def test_with_a_step_the_cache_is_lost_and_the_rest_is_computed_again(
  strategy, fault, steps_in_flight
):
  cluster = make_faulty(make_cluster(strategy, num_rows=4), donates=True, latency_s=0.05)
  requests = crowd()
  left_out = arm_while_others_hold_rows(cluster.entry[0], fault)
  log = run(cluster, requests, steps_in_flight=steps_in_flight)
  reason, ends = f"step failed: {Fault(fault)!r}", ends_of(log)
  failed = {i for i, why in ends.items() if why == reason}
  assert failed and set(ends.values()) == {"length", reason} and len(ends) == len(requests)
  assert left_out and failed.isdisjoint(left_out)
  assert set(left_out) & {e.request_id for e in log if isinstance(e, Preempted)}
  assert_others_are_right(log, requests, failed)
  executor = cluster.entry[0].executor
  assert executor.num_recoveries == 1 and executor.num_deleted_uses == 0


@pytest.mark.quick
def test_no_step_is_planned_on_top_of_one_that_did_not_start():
  """It would lack what the first did not write, and fail those that are in the second alone."""
  requests = make_requests(8, seed=38, rate_rps=1e6, prompt=(10, 14), output=(3, 5))
  requests = [dataclasses.replace(r, arrival_s=0.0) for r in requests]
  cluster = make_faulty(make_cluster("chunked"), donates=False)
  cluster.pools[0].executor.armed.add("submit")
  log = run(cluster, requests, steps_in_flight=2)
  (first, *_) = [e for e in log if isinstance(e, Step) and not e.emitted_ids]
  assert len(first.prefill_ids) == 2 and first.prefill_tokens[1] < 10, "a chunk is in it"
  reason = f"step failed: {Fault('submit')!r}"
  assert {i for i, why in ends_of(log).items() if why == reason} == set(first.prefill_ids)
  assert_others_are_right(log, requests, set(first.prefill_ids))


@pytest.mark.quick
def test_a_step_that_cannot_start_while_all_else_waits_for_room_is_no_stall():
  """Hand-offs of that turn came before the step, and found a full decode pool."""
  requests, broken = crowd(), []
  cluster = make_faulty(make_cluster("disaggregated", num_rows=2), donates=True)

  def each_turn(turn):
    waits = len(cluster.outbox) == 2 and not cluster.transfers and not cluster.entry[0].in_flight
    if waits and not broken:
      broken.extend(cluster.decode[0].scheduler.running)
      cluster.decode[0].executor.armed.add("submit")

  log = run(cluster, requests, each_turn=each_turn)
  failed = {e.request_id for e in log if isinstance(e, Failed)}
  assert failed == set(broken) and len(broken) == 2 and len(ends_of(log)) == len(requests)


@pytest.mark.quick
def test_what_was_reserved_for_the_last_request_comes_back_when_its_step_cannot_start():
  """Its stream is opened for that very step, and there is no other turn."""
  (request,) = make_requests(1, seed=58, prompt=(40, 40), output=(3, 3))
  cluster = make_cluster(STREAMED, budget=8, layer_groups=((0, 1), (1, 2)))
  make_faulty(cluster, donates=True).entry[0].executor.armed.add("submit")
  log = run(cluster, [request])
  assert ends_of(log) == {0: f"step failed: {Fault('submit')!r}"}


@pytest.mark.quick
def test_a_sequence_that_lost_its_row_in_one_pool_goes_on_at_once_in_another():
  """Step numbers are each pool's own."""
  one, other = (pool.scheduler for pool in make_cluster("chunked").entry)
  seq = make_sequence()
  one.add(seq)
  one.next_step()
  assert one.lose_cache(None, "").preempted == [seq]
  one.check()
  other.add(seq)
  (part,) = other.next_step().prefills
  assert (part.request_id, part.start, part.num_tokens) == (0, 0, 3)


def break_copies_once_some_decode(cluster):
  """A copy that fails half-way takes the decode pool's cache along, and nothing else."""

  def each_turn(turn):
    executor = cluster.decode[0].executor
    if len(cluster.decode[0].scheduler.running) > 2 and not executor.num_recoveries:
      executor.armed.add("copy")

  return each_turn


@pytest.mark.quick
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_what_a_decode_pool_lost_goes_through_a_prefill_pool_again(steps_in_flight):
  requests = make_requests(14, seed=31, rate_rps=2000, prompt=(20, 50), output=(6, 12))
  cluster = make_faulty(make_cluster("disaggregated"), donates=True)
  each_turn = break_copies_once_some_decode(cluster)
  log = run(cluster, requests, each_turn=each_turn, steps_in_flight=steps_in_flight)
  failed = {e.request_id for e in log if isinstance(e, Failed)}
  lost = {e.request_id for e in log if isinstance(e, Preempted) and e.pool == "decode0"}
  assert len(failed) == 1 and len(lost) > 2 and lost.isdisjoint(failed)
  copies = collections.Counter(e.request_id for e in log if isinstance(e, Copied))
  assert all(copies[i] == 1 for i in set(range(14)) - failed - lost)
  assert any(copies[i] == 2 for i in lost), (
    "the rest got their last token where they were prefilled"
  )
  assert_others_are_right(log, requests, failed)


@pytest.mark.quick
def test_what_was_gathered_before_the_source_lost_its_cache_still_arrives():
  requests = crowd()

  def break_source(cluster, inbox, request_id, now_s):
    cluster.entry[0].executor.armed.add("step")

  _, log, moving = run_until("disaggregated", is_moving, break_source, donates=True)
  assert [e.reason for e in log if isinstance(e, Finished) and e.request_id == moving]
  assert len([e for e in log if isinstance(e, Copied) and e.request_id == moving]) == 1
  assert_others_are_right(log, requests, {e.request_id for e in log if isinstance(e, Failed)})


@pytest.mark.quick
def test_a_copy_into_a_cache_that_was_lost_meanwhile_begins_anew():
  requests = crowd()
  moving = []

  def is_moving_while_others_decode(seq, cluster):
    return seq.state is State.MOVING and bool(cluster.decode[0].in_flight)

  def break_target(cluster, inbox, request_id, now_s):
    cluster.decode[0].executor.armed.add("step")
    moving.append(request_id)

  _, log, _ = run_until("disaggregated", is_moving_while_others_decode, break_target, donates=True)
  assert moving[0] not in {e.request_id for e in log if isinstance(e, Failed)}
  assert not [e for e in log if isinstance(e, Preempted) and e.request_id == moving[0]]
  assert_others_are_right(log, requests, {e.request_id for e in log if isinstance(e, Failed)})


@pytest.mark.quick
def test_what_cannot_be_computed_again_ends_with_the_reason():
  """A prefill pool that takes prompts whole may have no room for a prompt and its output."""
  requests = make_requests(6, seed=33, rate_rps=2000, prompt=(24, 24), output=(9, 9))
  cluster = make_faulty(make_cluster("disaggregated", num_rows=6), donates=True)
  prefill = cluster.entry[0].scheduler
  prefill.config = dataclasses.replace(prefill.config, token_budget=24)
  log = run(cluster, requests, each_turn=break_copies_once_some_decode(cluster))
  lost = [e for e in log if isinstance(e, Failed) and "lost for good" in e.reason]
  assert len(lost) > 2 and all("never fit token_budget=24" in e.reason for e in lost)
  assert len(ends_of(log)) == 6
  assert_others_are_right(log, requests, {e.request_id for e in log if isinstance(e, Failed)})


@pytest.mark.quick
def test_what_fits_only_some_pools_is_computed_again_in_one_of_those():
  requests = make_requests(8, seed=33, rate_rps=2000, prompt=(24, 24), output=(9, 9))
  cluster = make_faulty(make_cluster("2xprefill,1xdecode", num_rows=6), donates=True)
  prefill = cluster.entry[0].scheduler
  prefill.config = dataclasses.replace(prefill.config, token_budget=24)
  log = run(cluster, requests, each_turn=break_copies_once_some_decode(cluster))
  failed = {e.request_id for e in log if isinstance(e, Failed)}
  lost = {e.request_id for e in log if isinstance(e, Preempted) and e.pool == "decode0"}
  assert len(failed) == 1 and len(lost - failed) > 2
  assert_others_are_right(log, requests, failed)


# Waits that do not end --------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("fault", ["endless copy", "slow copy"])
def test_a_copy_that_does_not_end_holds_up_nobody_else(fault):
  requests = crowd()
  requests[0] = dataclasses.replace(requests[0], timeout_s=0.5)
  cluster, clock, log = make_crowded("disaggregated"), VirtualClock(), EventLog()
  cluster.decode[0].executor.armed.add(fault)
  for _ in serve(cluster, Inbox(requests), clock, log, grace_s=2 * SLOW_S):
    cluster.check()
  ends = ends_of(log)
  assert ends[0] == "timed out after 0.5 s"
  assert all(ends[i] == "length" for i in range(1, len(requests)))
  last_s = max(e.time_s for e in log if isinstance(e, Finished))
  pools = [pool.scheduler.pages for pool in cluster.pools]
  if fault == "endless copy":
    assert last_s < 30 and clock.now_s() == to_ticks(clock.now_s()) < last_s + 2 * SLOW_S + 1
    assert [t.seq.request_id for t in cluster.transfers] == [0], "its pages stay held"
    assert all(pages.num_free_rows == pages.config.num_rows - 1 for pages in pools)
  else:
    assert SLOW_S < clock.now_s() < SLOW_S + 1 and not cluster.transfers
    assert all(pages.num_free_pages == pages.config.num_pages for pages in pools)


@pytest.mark.quick
def test_a_step_that_does_not_end_fails_its_requests_when_their_time_is_up():
  requests = [dataclasses.replace(r, timeout_s=2.0) for r in crowd()]
  cluster, clock, log = make_crowded("chunked"), VirtualClock(), EventLog()
  cluster.pools[0].executor.armed.add("slow step")
  for _ in serve(cluster, Inbox(requests), clock, log, grace_s=1.0):
    cluster.check()
  on_it = {e.request_id for e in log if isinstance(e, Arrived) and e.pool == "mixed0"}
  ends = ends_of(log)
  assert on_it and on_it < set(range(len(requests)))
  for i in range(len(requests)):
    assert ends[i] == ("timed out after 2.0 s" if i in on_it else "length")
  assert clock.now_s() < 2.0 + 1.0 + 0.1, "nor does the run wait for it"


@pytest.mark.quick
def test_work_that_never_ends_and_has_no_time_limit_is_a_loud_stall():
  cluster = make_crowded("disaggregated")
  cluster.decode[0].executor.armed.add("endless copy")
  with pytest.raises(RuntimeError, match=r"no pool can move: .*1 copies that never end"):
    run(cluster, crowd()[:1])


@pytest.mark.quick
@pytest.mark.parametrize("timeout_s", [0.0, -1.0, math.nan])
def test_a_time_limit_is_positive(timeout_s):
  with pytest.raises(ValueError, match=f"request 0: timeout_s={timeout_s} must be positive"):
    dataclasses.replace(crowd()[0], timeout_s=timeout_s)


@pytest.mark.quick
def test_a_time_limit_that_is_not_reached_changes_nothing():
  """Nor does the run last until it is over."""
  requests = crowd()
  logs = []
  for timeout_s in (None, 1e4):
    clock = VirtualClock()
    limited = [dataclasses.replace(r, timeout_s=timeout_s) for r in requests]
    logs.append((list(run(make_crowded("chunked"), limited, clock=clock)), clock.now_s()))
  assert logs[0] == logs[1]


# Ids, threads, late results ---------------------------------------------------------------------


@pytest.mark.quick
def test_an_id_is_refused_while_it_is_in_use_and_after():
  """Also after: results may still be under way, and the log would tell of two by one name."""
  (request,) = make_requests(1, seed=34, output=(3, 3))
  inbox, cluster = Inbox(is_open=True), make_cluster("chunked")
  inbox.submit(request)
  refused = 0
  for turn in serve(cluster, inbox, VirtualClock(), log := EventLog()):
    with pytest.raises(ValueError, match="request id 0 was submitted before"):
      inbox.submit(request)
    refused += 1
    if turn.ended:
      inbox.close()
  assert refused > 2 and tokens_of(log) == expected([request])


@pytest.mark.quick
def test_a_scheduler_refuses_a_sequence_whose_id_it_has():
  scheduler = make_cluster("chunked").entry[0].scheduler
  scheduler.add(make_sequence(3))
  for _ in range(2):  # queued, then running
    with pytest.raises(ValueError, match="request id 3 is in use"):
      scheduler.add(make_sequence(3))
    scheduler.next_step()
  scheduler.check()


@pytest.mark.quick
def test_a_late_result_reaches_nobody():
  """Its row and its pages go to the next request only when the step in flight has ended."""
  requests = make_requests(2, seed=35, rate_rps=1e6, prompt=(8, 8), output=(6, 6))
  cluster = make_cluster("chunked", num_rows=1, num_pages=8, pages_per_row=8)
  del cluster.pools[1:]
  inbox, tokens = Inbox(requests), collections.defaultdict(list)

  def each_turn(turn):
    for request_id, token in turn.tokens:
      tokens[request_id].append(token)
    if len(tokens[0]) == 3:
      inbox.cancel(0)

  log = run(cluster, inbox, each_turn=each_turn, steps_in_flight=2)
  want = expected(requests)
  assert ends_of(log) == {0: "cancelled", 1: "length"}
  assert tuple(tokens[0]) == want[0][:3] and tuple(tokens[1]) == want[1]


class SlowTicket:
  """A step that takes a minute."""

  finish_s = None

  def __init__(self):
    self._event = threading.Event()

  def end(self):
    self._event.set()

  def is_ready(self):
    return self._event.is_set()

  def block(self):
    self._event.wait(60)

  def result(self):
    raise ConnectionError("ended by the test")


@pytest.mark.quick
def test_requests_and_cancels_from_another_thread_are_noticed_while_a_step_runs():
  """On a wall clock; the step in flight would hold the loop up for a minute."""
  requests = make_requests(2, seed=36, rate_rps=1e6, output=(3, 3))
  cluster = make_cluster("chunked")
  tickets = []
  for pool in cluster.pools:

    def hang(plan, now_s, exports):
      tickets.append(SlowTicket())
      return tickets[-1]

    pool.executor.submit = hang
  inbox, log, clock = Inbox(is_open=True), EventLog(), WallClock()
  turns = serve(cluster, inbox, clock, log)
  thread = threading.Thread(target=collections.deque, args=(turns, 0), daemon=True)
  thread.start()

  def until(is_so):
    end_s = time.monotonic() + 10
    while not is_so():
      assert time.monotonic() < end_s, f"not noticed while a step ran: {list(log)}"
      time.sleep(1e-3)

  def has(kind, request_id):
    return any(isinstance(e, kind) and e.request_id == request_id for e in list(log))

  for number, request in enumerate(requests, 1):
    inbox.submit(dataclasses.replace(request, arrival_s=clock.now_s()))
    until(lambda n=number: len(tickets) == n)  # each pool is at work on one
  inbox.cancel(0)
  until(lambda: has(Failed, 0))
  for ticket in tickets:
    ticket.end()
  until(lambda: has(Failed, 1))
  inbox.close()
  thread.join(5)
  assert not thread.is_alive()
  assert {i: r.split(":")[0] for i, r in ends_of(log).items()} == {0: "cancelled", 1: "step failed"}
  for pool in cluster.pools:
    pool.scheduler.check()
    assert pool.scheduler.pages.num_free_pages == pool.scheduler.pages.config.num_pages


@pytest.mark.quick
def test_many_threads_feed_one_inbox_and_nothing_is_lost():
  requests = make_requests(200, seed=37, rate_rps=1e6, prompt=(1, 8), output=(1, 4))
  requests = [dataclasses.replace(r, arrival_s=0.0) for r in requests]
  inbox, clock, log = Inbox(is_open=True), VirtualClock(), EventLog()

  def feed(part):
    for request in part:
      inbox.submit(request)
      if request.request_id % 3 == 0:
        inbox.cancel(request.request_id)

  threads = [threading.Thread(target=feed, args=(requests[i::8],)) for i in range(8)]
  closer = threading.Thread(target=lambda: [*map(threading.Thread.join, threads), inbox.close()])
  for thread in [*threads, closer]:
    thread.start()
  cluster = make_cluster("disaggregated")
  for _ in serve(cluster, inbox, clock, log):
    cluster.check()
  ends = ends_of(log)
  assert len(ends) == 200 and set(ends.values()) <= {"length", "cancelled"}
  assert all(ends[i] == "length" for i in range(200) if i % 3)
  assert_others_are_right(log, requests, {i for i, why in ends.items() if why == "cancelled"})


# Everything at random ---------------------------------------------------------------------------

# What the machine runs on: a cluster by the options of `virtual.make_cluster`. A new strategy,
# layout or limit of the scheduler is a line here.
STREAMED = "1xprefill:prefill_chunks,1xdecode"
SCENARIOS = {
  "continuous": dict(strategy="continuous"),
  "continuous, few pages": dict(strategy="continuous", num_pages=20),
  "chunked": dict(strategy="chunked"),
  "chunked, few pages": dict(strategy="chunked", num_pages=20),
  "chunked, slots": dict(strategy="chunked", contiguous=True, num_rows=3, pages_per_row=16),
  "disaggregated": dict(strategy="disaggregated"),
  "disaggregated, few pages": dict(strategy="disaggregated", num_pages=20),
  "disaggregated, few rows": dict(strategy="disaggregated", num_rows=2),
  "pages by the chunk": dict(strategy="chunked", num_pages=20, limits=dict(reservation="chunk")),
  "swapping": dict(strategy="chunked", num_pages=20, limits=dict(swap_tokens=60)),
  "swapping, prefix cache": dict(
    strategy="continuous", num_pages=20, limits=dict(swap_tokens=60, prefix_cache=True)
  ),
  "prefix cache": dict(strategy="chunked", limits=dict(prefix_cache=True)),
  "prefix cache, few pages": dict(
    strategy="continuous", num_pages=20, limits=dict(prefix_cache=True, eviction="length")
  ),
  "prefix cache, disaggregated": dict(
    strategy="disaggregated", num_pages=30, limits=dict(prefix_cache=True)
  ),
  "swapped": dict(strategy="chunked", num_pages=20, limits=dict(swap_tokens=200)),
  "swapped, whole prompts": dict(strategy="fcfs", num_pages=20, limits=dict(swap_tokens=40)),
  "swapped and shared": dict(
    strategy="chunked",
    num_pages=20,
    limits=dict(swap_tokens=60, prefix_cache=True, reservation="chunk", look_ahead=2),
  ),
  "prefixes copied": dict(
    strategy="chunked", limits=dict(prefix_cache=True), router=Conductor(balancing_threshold=1.0)
  ),
  "streamed": dict(strategy=STREAMED, budget=8),
  "streamed by layers, few pages": dict(
    strategy=STREAMED, budget=8, num_pages=20, layer_groups=((0, 1), (1, 2))
  ),
  "streamed from a pipeline": dict(
    strategy=STREAMED, budget=8, layer_groups=((0, 1), (1, 2)), num_stages=2
  ),
  "streamed, few bytes at once": dict(
    strategy=STREAMED, budget=8, hand_off=HandOff(most_bytes=100), limits=dict(prefix_cache=True)
  ),
  "layers of whole prompts": dict(strategy="disaggregated", layer_groups=((0, 1), (1, 2))),
  "streamed, growing": dict(
    strategy=STREAMED, budget=8, num_pages=20, hand_off=HandOff(reservation="prompt")
  ),
  "four pools that change": dict(strategy="2xprefill:prefill_chunks,2xdecode", budget=8),
  "growing": dict(
    strategy="1xprefill,2xdecode", num_pages=14, hand_off=HandOff(reservation="prompt")
  ),
  "overload": dict(strategy="disaggregated", router=Conductor(rejects="predicted", ttft_s=0.05)),
  "overload, seen late": dict(
    strategy=STREAMED,
    budget=8,
    router=Conductor(rejects="after_prefill", ttft_s=0.5, tpot_s=8.05e-3),
  ),
  **{
    policy: dict(strategy=policy, num_pages=24)
    for policy, spec in POLICIES.items()
    if not spec.half and policy not in ("sarathi", "prefill_first")
  },
}
EXPECTED_FAILURES = ("cancelled", "timed out", "broken on purpose", "finish rule failed: Fault",
                     "step failed: Fault", "hand-off failed: Fault", "rejected: overload",
                     "its K and V are lost for good: overload")  # fmt: skip
OPERATIONS_PER_RUN = 100


class LifeCycle(RuleBasedStateMachine):
  """A cluster that is fed, cancelled and broken between turns, checked after every operation."""

  num_operations: list[int]  # one number; set by the test

  @initialize(
    scenario=st.sampled_from(sorted(SCENARIOS)),
    steps_in_flight=st.sampled_from((1, 2)),
    donates=st.booleans(),
  )
  def begin(self, scenario, steps_in_flight, donates):
    options = dict(SCENARIOS[scenario])
    self.cluster = make_faulty(make_cluster(options.pop("strategy"), **options), donates=donates)
    for pool in self.cluster.pools:
      pool.executor._fails = lambda i: "broken on purpose" if i % 23 == 22 else None
    self.inbox, self.clock = Inbox(is_open=True), VirtualClock()
    self.turns = serve(
      self.cluster,
      self.inbox,
      self.clock,
      EventLog(),
      finish_reason=self.finish_reason,
      steps_in_flight=steps_in_flight,
      grace_s=10 * SLOW_S,
    )
    self.prompts = [(1,)]
    self.want, self.tokens, self.ends = [], [], {}

  def finish_reason(self, seq):
    if seq.request_id % 19 == 18:
      raise Fault("finish rule")
    return length_or_stop(seq)

  @rule(seed=st.integers(0, 2**16), num=st.integers(1, 6))
  def submit(self, seed, num):
    rng = random.Random(seed)
    for _ in range(num):
      ids = tuple(rng.randrange(checksum.VOCAB_SIZE) for _ in range(rng.randint(1, 40)))
      if rng.random() < 0.5:  # the beginning of an earlier one, then other text or none
        shared = rng.choice(self.prompts)[: rng.choice((8, 16, 40))]
        ids = (shared + ids)[: rng.randint(len(shared), 40)]
      self.prompts.append(ids)
      sampling = SamplingParams(max_tokens=rng.randint(1, 16))
      request = Request(
        request_id=len(self.want),
        arrival_s=to_ticks(self.clock.now_s() + rng.choice((0.0, 0.0, 0.01))),
        num_prompt_tokens=len(ids),
        prompt_ids=ids,
        sampling=sampling,
        timeout_s=rng.choice((None,) * 12 + (1e-3, 0.03, 0.1, 0.3)),
      )
      self.inbox.submit(request)
      self.want.append(checksum.generate(ids, sampling.max_tokens))
      self.tokens.append([])

  @rule(number=st.integers(0, 2**16), after_s=st.sampled_from((0.0, 0.004, 0.05)))
  def cancel(self, number, after_s):
    """The newest are the likeliest to be alive."""
    newest = number % min(12, max(1, len(self.want)))
    self.inbox.cancel(len(self.want) - 1 - newest, at_s=self.clock.now_s() + after_s)

  @rule(fault=st.sampled_from(FAULTS), number=st.integers(0, 3))
  def break_next(self, fault, number):
    pools = self.cluster.pools
    pools[number % len(pools)].executor.armed.add(fault)

  @rule(number=st.integers(0, 3), is_likely=st.integers(0, 3))
  def kill(self, number, is_likely):
    pools = self.cluster.pools
    if not is_likely and pools[number % len(pools)].is_up:
      pools[number % len(pools)].executor.kill()

  @rule(number=st.integers(0, 3), role=st.sampled_from(ROLES), after_s=st.sampled_from((0.0, 0.01)))
  def change_role(self, number, role, after_s):
    pools = self.cluster.pools
    pool = pools[number % len(pools)]
    self.inbox.change_role(pool.name, role, at_s=self.clock.now_s() + after_s)

  @rule(num=st.integers(1, 8))
  def turn(self, num):
    for _ in range(num):
      self.hear(next(self.turns))

  @rule(num=st.integers(1, 8))
  def turn_on(self, num):
    """So that turns are as likely as requests and trouble together."""
    self.turn(num)

  def hear(self, turn):
    for request_id, token in turn.tokens:
      assert request_id not in self.ends, "a token after the end"
      tokens, want = self.tokens[request_id], self.want[request_id]
      assert token == want[len(tokens)], f"request {request_id}: {tokens}, {token}; not {want}"
      tokens.append(token)
    for request_id, reason in turn.ended + turn.failed:
      assert request_id not in self.ends, "ended twice"
      self.ends[request_id] = reason
    for request_id, reason in turn.ended:
      assert reason == "length" and tuple(self.tokens[request_id]) == self.want[request_id]
    for _, reason in turn.failed:
      assert reason.startswith(EXPECTED_FAILURES), reason

  @invariant()
  def everything_adds_up(self):
    self.cluster.check()
    assert not any(pool.executor.num_deleted_uses for pool in self.cluster.pools)
    self.num_operations[0] += 1

  def teardown(self):
    for pool in self.cluster.pools:
      pool.executor.armed.clear()
    self.inbox.close()
    for turn in self.turns:
      self.hear(turn)
    assert len(self.ends) == len(self.want), "a request never ended"
    assert not self.cluster.outbox and not self.cluster.transfers and not self.cluster.prefetches
    for pool in self.cluster.pools:
      scheduler, pages = pool.scheduler, pool.scheduler.pages
      scheduler.check()
      assert pages.num_free_pages == pages.config.num_pages
      assert pages.num_free_rows == pages.config.num_rows
      assert not (scheduler.waiting or scheduler.running or scheduler.leaving or pool.in_flight)


def test_whatever_happens_every_request_ends_once_with_its_tokens_and_every_page_comes_back(
  request,
):
  wanted = request.config.getoption("--operations")
  LifeCycle.num_operations = counted = [0]
  run_state_machine_as_test(
    LifeCycle,
    settings=settings(
      max_examples=wanted * 6 // (5 * OPERATIONS_PER_RUN) + 1,  # some end early
      stateful_step_count=OPERATIONS_PER_RUN,
      deadline=None,
      derandomize=True,
      database=None,
      suppress_health_check=list(HealthCheck),
    ),
  )
  assert counted[0] >= wanted
