"""The checksum model in virtual time: wrong scheduling, paging or hand-off gives a wrong token."""

import dataclasses
import json

import pytest
from virtual import expected, make_cluster, make_pool, make_requests, run, tokens_of

from pdjax.core.checksum import generate
from pdjax.core.clock import VirtualClock
from pdjax.core.events import Copied, EventLog, Failed, Finished, Preempted, Step
from pdjax.core.plain import from_plain, to_plain
from pdjax.core.plan import StepPlan
from pdjax.core.request import Request, SamplingParams
from pdjax.serving.cluster import Cluster
from pdjax.serving.executor import PageShape
from pdjax.serving.inbox import Inbox
from pdjax.serving.loop import serve

pytestmark = pytest.mark.quick
STRATEGIES = ("continuous", "chunked", "disaggregated")


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_gives_the_checksum_tokens(strategy, contiguous, steps_in_flight):
  requests = make_requests(60, seed=1)
  cluster = make_cluster(strategy, contiguous=contiguous)
  log = run(cluster, requests, steps_in_flight=steps_in_flight)
  assert tokens_of(log) == expected(requests)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("strategy", ["continuous", "chunked"])
def test_preempted_requests_give_the_same_tokens(strategy, steps_in_flight):
  requests = make_requests(40, seed=2, rate_rps=500, prompt=(8, 40), output=(10, 30))
  cluster = make_cluster(strategy, num_pages=24)
  log = run(cluster, requests, steps_in_flight=steps_in_flight)
  assert any(isinstance(e, Preempted) for e in log), "no pressure: the test shows nothing"
  assert tokens_of(log) == expected(requests)


def test_a_full_decode_pool_means_waiting_not_loss():
  requests = make_requests(30, seed=3, rate_rps=1000, prompt=(20, 60), output=(10, 30))
  cluster = make_cluster("disaggregated", num_pages=30)
  log = run(cluster, requests)
  assert tokens_of(log) == expected(requests)
  assert not any(isinstance(e, Preempted) for e in log), "a decode pool never preempts"
  copies = [(e.start_s, e.request_id) for e in log if isinstance(e, Copied)]
  ids = [request_id for _, request_id in sorted(copies)]
  assert ids == sorted(ids) and len(ids) == 30, "hand-offs begin in order"


def test_one_token_never_transfers():
  requests = make_requests(10, seed=4, output=(1, 1))
  log = run(make_cluster("disaggregated"), requests)
  assert tokens_of(log) == expected(requests)
  assert not [e for e in log if isinstance(e, Copied)]


def test_a_stop_at_the_first_token_never_transfers():
  (request,) = make_requests(1, seed=5, output=(9, 9))
  first = generate(request.prompt_ids, 1)[0]
  stop = SamplingParams(max_tokens=9, stop_ids=(first,))
  request = Request(
    request_id=0,
    arrival_s=0.0,
    num_prompt_tokens=request.num_prompt_tokens,
    prompt_ids=request.prompt_ids,
    sampling=stop,
  )
  log = run(make_cluster("disaggregated"), [request])
  assert [e.reason for e in log if isinstance(e, Finished)] == ["stop"]
  assert not [e for e in log if isinstance(e, Copied)]


@pytest.mark.parametrize("residue", range(4))
def test_prompts_of_any_length_modulo_the_page_size_hand_off_whole(residue):
  requests = [
    Request(
      request_id=i,
      arrival_s=0.0,
      num_prompt_tokens=8 + residue,
      prompt_ids=tuple(range(i, i + 8 + residue)),
      sampling=SamplingParams(max_tokens=2 + i),
    )
    for i in range(3)
  ]
  log = run(make_cluster("disaggregated"), requests)
  assert tokens_of(log) == expected(requests)
  assert [e.num_tokens for e in log if isinstance(e, Copied)] == [8 + residue] * 3


def test_prefill_is_never_computed_again_on_the_decode_pool():
  requests = make_requests(20, seed=6, output=(2, 9))
  log = run(make_cluster("disaggregated"), requests)
  for e in log:
    if isinstance(e, Step) and e.pool.startswith("decode"):
      assert not e.prefill_ids
  computed = sum(sum(e.prefill_tokens) for e in log if isinstance(e, Step))
  assert computed == sum(r.num_prompt_tokens for r in requests)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_failing_request_fails_alone(strategy):
  requests = make_requests(20, seed=7, output=(3, 9))
  cluster = make_cluster(strategy, fails=lambda i: "broken on purpose" if i == 5 else None)
  log = run(cluster, requests)
  assert [(e.request_id, e.reason) for e in log if isinstance(e, Failed)] == [
    (5, "broken on purpose")
  ]
  want = expected(requests)
  assert {i: t for i, t in tokens_of(log).items() if i != 5} == {
    i: t for i, t in want.items() if i != 5
  }


def test_a_failing_finish_rule_fails_its_request_alone():
  requests = make_requests(8, seed=8, output=(4, 4))

  def rule(seq):
    if seq.request_id == 3 and len(seq.output_ids) == 2:
      raise RuntimeError("decoder fell over")
    return "length" if len(seq.output_ids) == 4 else None

  log = run(make_cluster("chunked"), requests, finish_reason=rule)
  (failure,) = [e for e in log if isinstance(e, Failed)]
  assert failure.request_id == 3 and "decoder fell over" in failure.reason
  assert len([e for e in log if isinstance(e, Finished)]) == 7


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_that_breaks_fails_its_requests_and_the_service_goes_on(strategy):
  requests = make_requests(12, seed=9, output=(3, 6))
  cluster = make_cluster(strategy)
  submit, broken = cluster.pools[0].executor.submit, []

  def breaks_once(plan, now_s, exports):
    ticket = submit(plan, now_s, exports)
    if plan.step_id != 3:
      return ticket
    broken.extend(s.request_id for s in plan.prefills)
    broken.extend(plan.decodes.request_ids)
    return _FailingTicket(ticket.finish_s)

  cluster.pools[0].executor.submit = breaks_once
  log = run(cluster, requests)
  failed = {e.request_id for e in log if isinstance(e, Failed)}
  assert failed == set(broken) and failed
  assert len([e for e in log if isinstance(e, Finished)]) == 12 - len(failed)


@pytest.mark.parametrize("call", ["submit", "export", "import_"])
def test_a_device_that_refuses_a_call_fails_only_what_it_was_asked_for(call):
  requests = make_requests(12, seed=19, output=(3, 6))
  cluster = make_cluster("disaggregated")
  pool = cluster.decode[0] if call == "import_" else cluster.entry[0]
  original, num_calls = getattr(pool.executor, call), 0

  def refuses_once(*args, **where):
    nonlocal num_calls
    num_calls += 1
    if num_calls == 2:
      raise MemoryError("device is full")
    return original(*args, **where)

  setattr(pool.executor, call, refuses_once)
  log = run(cluster, requests)  # `run` checks that every page came back
  failures = [e for e in log if isinstance(e, Failed)]
  assert failures and all("device is full" in e.reason for e in failures)
  assert len([e for e in log if isinstance(e, Finished)]) == 12 - len(failures)


def test_a_failed_copy_fails_its_request_alone_and_frees_both_pools():
  requests = make_requests(6, seed=10, output=(4, 6))
  cluster = make_cluster("disaggregated")
  target = cluster.decode[0].executor
  import_ = target.import_

  def breaks(handle, **where):
    ticket = import_(handle, **where)
    return _FailingTicket(ticket.finish_s) if handle.request_id == 2 else ticket

  target.import_ = breaks
  log = run(cluster, requests)  # `run` checks that every page came back
  (failure,) = [e for e in log if isinstance(e, Failed)]
  assert failure.request_id == 2 and "peer died" in failure.reason
  assert {i: t for i, t in tokens_of(log).items() if i != 2} == {
    i: t for i, t in expected(requests).items() if i != 2
  }


class _FailingTicket:
  def __init__(self, finish_s):
    self.finish_s = finish_s

  def is_ready(self):
    return True

  def result(self):
    raise ConnectionError("peer died")


def test_exactly_at_capacity_runs_and_one_more_is_refused():
  def request(num_prompt_tokens, max_tokens):
    return Request(
      request_id=max_tokens,
      arrival_s=0.0,
      num_prompt_tokens=num_prompt_tokens,
      prompt_ids=(1,) * num_prompt_tokens,
      sampling=SamplingParams(max_tokens=max_tokens),
    )

  for strategy in STRATEGIES:
    cluster = make_cluster(strategy, num_pages=8, pages_per_row=8, page_size=4)
    assert cluster.refusal(request(20, 14)) is not None
    fits = request(20, 13)  # 20 + 13 - 1 = 32 = 8 pages of 4
    assert cluster.refusal(fits) is None
    assert tokens_of(run(cluster, [fits])) == expected([fits])


def test_refused_requests_fail_alone_with_the_reason():
  requests = make_requests(5, seed=11)
  bad = Request(
    request_id=99,
    arrival_s=0.0,
    num_prompt_tokens=2,
    prompt_ids=(3, 997),
    sampling=SamplingParams(max_tokens=2),
  )
  log = run(make_cluster("chunked"), [bad, *requests])
  (failure,) = [e for e in log if isinstance(e, Failed)]
  assert failure.request_id == 99 and "997" in failure.reason
  tokens = tokens_of(log)
  assert tokens.pop(99) == () and tokens == expected(requests)


def test_token_id_0_is_valid():
  request = Request(
    request_id=0,
    arrival_s=0.0,
    num_prompt_tokens=3,
    prompt_ids=(0, 0, 0),
    sampling=SamplingParams(max_tokens=3),
  )
  assert tokens_of(run(make_cluster("disaggregated"), [request])) == expected([request])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("at_s", [0.0, 0.004, 0.02, 0.05, 0.1])
def test_a_cancelled_request_returns_everything_it_held(strategy, at_s):
  requests = make_requests(12, seed=12, rate_rps=1000, prompt=(30, 60), output=(9, 12))
  inbox = Inbox(requests)
  for i in (0, 4, 7):
    inbox.cancel(i, at_s=max(at_s, requests[i].arrival_s))
  log = run(make_cluster(strategy), inbox)
  cancelled = {e.request_id for e in log if isinstance(e, Failed)}
  assert cancelled <= {0, 4, 7} and cancelled
  tokens, want = tokens_of(log), expected(requests)
  for i in set(range(12)) - cancelled:
    assert tokens[i] == want[i]
  for i in cancelled:
    assert tokens[i] == want[i][: len(tokens[i])]


def test_an_open_inbox_is_fed_between_turns():
  requests = make_requests(4, seed=13, output=(3, 3))
  cluster, inbox, log = make_cluster("chunked"), Inbox(is_open=True), EventLog()
  to_submit, num_ended = list(requests), 0
  for turn in serve(cluster, inbox, VirtualClock(), log):
    num_ended += len(turn.ended)
    if not cluster.entry[0].scheduler.running and to_submit:
      inbox.submit(to_submit.pop())
    elif num_ended == 4:
      inbox.close()
  assert tokens_of(log) == expected(requests)


def test_a_request_id_is_used_once():
  requests = make_requests(2, seed=14)
  inbox = Inbox(requests)
  with pytest.raises(ValueError, match="request id 1 was submitted before"):
    inbox.submit(requests[1])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_plans_cross_a_process_boundary_as_plain_data(strategy):
  """Every plan written as JSON and read back is equal, and is what the executor runs."""
  requests = make_requests(20, seed=15)
  cluster = make_cluster(strategy)
  num_plans = 0
  for pool in cluster.pools:

    def through_json(plan, now_s, exports, submit=pool.executor.submit):
      nonlocal num_plans
      num_plans += 1
      copy = from_plain(StepPlan, json.loads(json.dumps(to_plain(plan))))
      assert copy == plan
      return submit(copy, now_s, exports)

    pool.executor.submit = through_json
  assert tokens_of(run(cluster, requests)) == expected(requests)
  assert num_plans > 20


def test_a_policy_that_does_nothing_is_a_loud_stall():
  cluster = Cluster([make_pool(policy=lambda step: None)])
  with pytest.raises(RuntimeError, match=r"no pool can move: .*mixed0.*1 waiting"):
    run(cluster, make_requests(1, seed=16))


def test_two_runs_of_the_same_workload_are_identical():
  requests = make_requests(40, seed=17)
  logs = [list(run(make_cluster("chunked", num_pages=24), requests)) for _ in range(2)]
  assert logs[0] == logs[1]


def test_steps_of_a_pool_never_overlap_and_start_when_the_one_before_ended():
  requests = make_requests(30, seed=18)
  log = run(make_cluster("chunked"), requests, steps_in_flight=2)
  last_end_s = {}
  for e in log:
    if isinstance(e, Step):
      assert e.start_s >= last_end_s.get(e.pool, 0.0) and e.end_s > e.start_s
      last_end_s[e.pool] = e.end_s


@pytest.mark.parametrize(
  ("roles", "message"),
  [
    (["prefill"], "prefill pools need a decode pool"),
    (["prefill", "mixed"], "prefill pools need a decode pool"),
    (["decode"], "decode pools need a prefill pool"),
    (["mixed", "decode", "decode"], "decode pools need a prefill pool"),
    ([], "no pools"),
  ],
)
def test_roles_that_serve_no_request_to_its_end_are_refused(roles, message):
  with pytest.raises(ValueError, match=message):
    Cluster([make_pool(f"pool{i}", role=role) for i, role in enumerate(roles)])


def test_pools_whose_pages_differ_are_refused_with_all_that_differs():
  page = PageShape(page_size=4, num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32")

  def pool(name, **changes):
    made = make_pool(name, page_size=changes.get("page_size", 4))
    made.executor.page_shape = dataclasses.replace(page, **changes)
    return made

  Cluster([pool("a"), pool("b")])
  with pytest.raises(ValueError) as error:
    Cluster([pool("a"), pool("b", dtype="bfloat16", page_size=8), pool("c", num_kv_heads=4)])
  assert str(error.value) == (
    "pools exchange pages, so these must be alike: page_size is 4 in a, 8 in b, 4 in c; "
    "num_kv_heads is 2 in a, 2 in b, 4 in c; dtype is float32 in a, bfloat16 in b, float32 in c"
  )
  for field in dataclasses.fields(PageShape):
    other = {field.name: "int8" if field.name == "dtype" else 64}
    with pytest.raises(ValueError, match=f"alike: {field.name} is"):
      Cluster([pool("a"), pool("b", **other)])


def test_a_pool_that_knows_no_pages_fits_any_of_the_same_size():
  pools = [make_pool("a"), make_pool("b")]
  pools[1].executor.page_shape = None
  Cluster(pools)
  other = make_pool("c", page_size=8)
  other.executor.page_shape = None
  with pytest.raises(ValueError, match=r"alike: page_size is 4 in a, 4 in b, 8 in c$"):
    Cluster([*pools, other])
  other.executor.page_shape = pools[0].executor.page_shape
  with pytest.raises(ValueError, match=r"c plans pages of 8 tokens, .* executor has pages of 4"):
    Cluster([other])


def test_mixed_pools_serve_beside_prefill_and_decode_pools():
  requests = make_requests(40, seed=31, rate_rps=200.0)
  pools = [
    make_pool("mixed0", num_rows=3),
    *(make_pool(f"prefill{i}", role="prefill", policy="prefill_only", budget=80) for i in range(2)),
    *(make_pool(f"decode{i}", role="decode", policy="decode_only") for i in range(3)),
  ]
  log = run(Cluster(pools), requests)
  assert tokens_of(log) == expected(requests)
  assert {e.pool for e in log if isinstance(e, Step)} == {pool.name for pool in pools}
  assert {e.source for e in log if isinstance(e, Copied)} == {"prefill0", "prefill1"}


def test_the_second_step_is_planned_just_before_the_first_one_ends():
  """Where step times are known, whoever arrives during a step is in the next one."""

  def admitted_after(predict):
    pool = make_pool(budget=16)
    pool.scheduler.predict_step_s = predict
    requests = make_requests(2, seed=3, prompt=(4, 4), output=(9, 9))
    first, second = requests
    requests = [
      dataclasses.replace(first, arrival_s=0.0),
      dataclasses.replace(second, arrival_s=2**-9),  # within the first step of 8 ms
    ]
    log = run(Cluster([pool]), requests, steps_in_flight=2)
    assert tokens_of(log) == expected(requests)
    steps = [event for event in log if isinstance(event, Step)]
    return next(i for i, step in enumerate(steps) if second.request_id in step.prefill_ids)

  assert admitted_after(None) == 2, "the step behind the first was full of plans already"
  assert admitted_after(lambda counts: 8e-3 + 28e-6 * counts.num_tokens) == 1
