"""Few pages: who gets them, who gives them up, and that everyone gets done, by whatever rule."""

from __future__ import annotations

import collections
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual import expected, make_cluster, make_pool, make_requests, run, tokens_of

from pdjax.core.events import Preempted, Step
from pdjax.core.plan import StepResult
from pdjax.core.request import Request, SamplingParams
from pdjax.core.sequence import Sequence
from pdjax.scheduling.scheduler import RESERVATIONS, Scheduler, SchedulerConfig
from pdjax.serving.cluster import Cluster

pytestmark = pytest.mark.quick
PAGE = 4


def request(request_id, num_prompt, max_tokens=4, arrival_s=0.0):
  return Request(
    request_id=request_id,
    arrival_s=arrival_s,
    num_prompt_tokens=num_prompt,
    prompt_ids=tuple((request_id * 31 + i) % 97 for i in range(num_prompt)),
    sampling=SamplingParams(max_tokens=max_tokens),
  )


def serve_all(requests, *, limits=None, **options):
  cluster = Cluster([make_pool(limits=limits, **options)])
  log = run(cluster, requests)
  assert tokens_of(log) == expected(requests)
  return log, cluster.pools[0]


def preemptions(log):
  return collections.Counter(e.request_id for e in log if isinstance(e, Preempted))


# Progress -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("swap_tokens", [0, 1000])
@pytest.mark.parametrize("reservation", RESERVATIONS)
@pytest.mark.parametrize("policy", ["sarathi", "prefill_first", "fcfs"])
def test_two_prompts_that_only_fit_singly_both_finish(policy, reservation, swap_tokens):
  requests = [request(0, 30, 9), request(1, 28, 9)]
  limits = {"reservation": reservation, "swap_tokens": swap_tokens}
  log, _ = serve_all(requests, policy=policy, num_pages=10, budget=16, limits=limits)
  assert max(preemptions(log).values(), default=0) <= 3


@pytest.mark.once
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
  seed=st.integers(0, 999),
  reservation=st.sampled_from(RESERVATIONS),
  swap_tokens=st.sampled_from([0, 20, 1000]),
  most=st.integers(0, 4),
  prefix_cache=st.booleans(),
  num_pages=st.integers(20, 40),
  steps_in_flight=st.integers(1, 2),
)
def test_nobody_is_preempted_more_often_than_the_limit(
  seed, reservation, swap_tokens, most, prefix_cache, num_pages, steps_in_flight
):
  requests = make_requests(14, seed=seed, prompt=(1, 50), output=(1, 30))
  limits = {
    "reservation": reservation,
    "swap_tokens": swap_tokens,
    "max_preemptions": most,
    "prefix_cache": prefix_cache,
  }
  cluster = Cluster([make_pool(num_pages=num_pages, limits=limits)])
  log = run(cluster, requests, steps_in_flight=steps_in_flight)
  assert tokens_of(log) == expected(requests)
  assert max(preemptions(log).values(), default=0) <= most
  if reservation in ("request", "max_len"):
    assert not preemptions(log), "all that they may need is theirs from the start"


def test_a_request_that_fills_the_pool_to_the_last_slot_runs_and_one_more_is_refused():
  """The last token needs no page: prompt + max_tokens - 1 tokens are cached."""
  most = 10 * PAGE
  for reservation in RESERVATIONS:
    for prompt in (1, 17, most):
      fits = request(0, prompt, most - prompt + 1)
      log, pool = serve_all([fits], num_pages=10, budget=16, limits={"reservation": reservation})
      assert len(tokens_of(log)[0]) == most - prompt + 1
      assert pool.scheduler.refusal(request(1, prompt, most - prompt + 2)) is not None
      assert pool.scheduler.refusal(fits) is None


@pytest.mark.parametrize("limits", [{}, {"swap_tokens": 999}, {"prefix_cache": True}])
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_preemption_before_any_step_changes_no_token(limits, steps_in_flight):
  """In mid-prompt, at its end, and between any two tokens; the newest is the victim."""
  requests = [request(0, 4, 40), request(1, 22, 7, arrival_s=2**-7)]
  victims = set()
  for at in range(1, 20):
    policy = PreemptsOnce(at)
    pool = make_pool(policy=policy, budget=9, limits=limits)
    log = run(Cluster([pool]), requests, steps_in_flight=steps_in_flight)
    assert tokens_of(log) == expected(requests), at
    assert sum(preemptions(log).values()) == policy.has_preempted
    if policy.has_preempted:
      victims.add(at)
  assert len(victims) >= 8, "the case of this test"


class PreemptsOnce:
  """Takes the row of the newest sequence before step number `at`, if another goes on."""

  def __init__(self, at):
    self.num_left, self.has_preempted = at, False

  def __call__(self, step):
    self.num_left -= 1
    if self.num_left == 0 and len(step.running) > 1:
      self.has_preempted = step._preempt_newest(keep=None)
    step.decode()
    step.prefill()
    step.admit()


# Reservation --------------------------------------------------------------------------------------


def admitted(reservation, num_prompt, max_tokens, budget=16):
  """Free pages of a pool of 64 after the first step of one request."""
  pool = make_pool(budget=budget, limits={"reservation": reservation})
  pool.scheduler.add(Sequence(request(0, num_prompt, max_tokens)))
  pool.scheduler.next_step()
  return 64 - pool.scheduler.pages.num_free_pages


def test_pages_at_admission_are_those_of_the_chunk_the_prompt_the_request_or_the_row():
  pages = {name: admitted(name, 41, 20) for name in RESERVATIONS}
  assert pages == {"chunk": 4, "prompt": 11, "request": 15, "max_len": 32}


def test_pages_by_chunk_let_more_prompts_start_at_once():
  def running(reservation):
    pool = make_pool(num_pages=12, budget=16, limits={"reservation": reservation}, watermark=0.0)
    for i in range(2):
      pool.scheduler.add(Sequence(request(i, 40)))
    scheduler = pool.scheduler
    plan = scheduler.next_step()
    scheduler.commit(plan, StepResult(token_ids=()))
    scheduler.next_step()
    return list(scheduler.running)

  assert running("chunk") == running("prompt") == [0]
  pool = make_pool(num_pages=12, budget=48, limits={"reservation": "chunk"}, watermark=0.0)
  for i in range(2):
    pool.scheduler.add(Sequence(request(i, 40)))
  assert [s.num_tokens for s in pool.scheduler.next_step().prefills] == [40, 8]


# Swapping -----------------------------------------------------------------------------------------


def test_what_was_swapped_out_is_not_computed_again():
  requests = [request(i, 8, 20) for i in range(3)]

  def computed(swap_tokens):
    log, pool = serve_all(requests, num_pages=14, budget=16, limits={"swap_tokens": swap_tokens})
    assert preemptions(log), "the case of this test"
    assert pool.scheduler.num_swapped_tokens == 0
    return sum(sum(e.prefill_tokens) for e in log if isinstance(e, Step))

  prompts, num_again = (
    24,
    sum(preemptions(serve_all(requests, num_pages=14, budget=16)[0]).values()),
  )
  assert computed(0) > prompts + num_again
  log, _ = serve_all(requests, num_pages=14, budget=16, limits={"swap_tokens": 1000})
  # The last known token was never computed: one slice of one token for each return.
  assert computed(1000) == prompts + sum(preemptions(log).values())


def test_a_full_host_memory_means_computing_again():
  requests = [request(i, 8, 20) for i in range(3)]
  log, _ = serve_all(requests, num_pages=14, budget=16, limits={"swap_tokens": 8})
  assert preemptions(log)
  assert sum(sum(e.prefill_tokens) for e in log if isinstance(e, Step)) > 24 + 2


def test_a_swapped_request_that_is_cancelled_leaves_nothing_in_the_host_memory():
  pool = make_pool(num_pages=6, budget=16, watermark=0.0, limits={"swap_tokens": 1000})
  scheduler, executor = pool.scheduler, pool.executor
  seqs = [Sequence(request(i, 8, 17)) for i in range(2)]
  for seq in seqs:
    scheduler.add(seq)
  while not scheduler.num_swapped_tokens:
    plan = scheduler.next_step()
    scheduler.commit(plan, executor.submit(plan, 0.0).value)
  assert executor._swapped.keys() == {1}
  scheduler.drop(1)
  assert scheduler.num_swapped_tokens == 0
  plan = scheduler.next_step()
  scheduler.commit(plan, executor.submit(plan, 0.0).value)
  assert plan.swap_drops == (1,) and not executor._swapped
  scheduler.check()


def test_pages_that_wait_to_be_swapped_out_are_given_to_nobody():
  """A row reserved for a copy may be written to before the step that swaps them out."""
  pool = make_pool(num_pages=6, budget=16, watermark=0.0, limits={"swap_tokens": 1000})
  scheduler, executor = pool.scheduler, pool.executor
  for i in range(2):
    scheduler.add(Sequence(request(i, 8, 17)))
  in_flight = []
  while True:
    plan = scheduler.next_step()
    if plan is not None:
      in_flight.append((plan, executor.submit(plan, 0.0).value))
    if plan is None and scheduler.num_swapped_tokens:
      break  # its pages are busy, so the step was empty, and the swap is still to come
    if len(in_flight) == 2 or plan is None:
      scheduler.commit(*in_flight.pop(0))
  while in_flight:
    scheduler.commit(*in_flight.pop(0))
  assert scheduler.pages.num_free_pages >= 2 and scheduler.reserve(4) is None
  plan = scheduler.next_step()
  assert plan.swap_outs, "and now they are anyone's"


def test_a_copy_that_a_failed_step_was_to_bring_back_does_not_hide_a_newer_one():
  """Swapped in by one plan, out again by the next; then the first one fails."""
  pool = make_pool(num_pages=16, budget=16, limits={"swap_tokens": 1000})
  scheduler, executor = pool.scheduler, pool.executor
  scheduler.add(Sequence(request(0, 8, 20)))
  seq = Sequence(request(1, 8, 20))
  scheduler.add(seq)

  def step():
    plan = scheduler.next_step()
    return plan, executor.submit(plan, 0.0).value

  scheduler.commit(*step())
  scheduler.preempt(seq)
  scheduler.waiting[1] = seq
  first, _ = step()
  assert [swap.request_id for swap in first.swap_ins] == [1]
  second = step()
  scheduler.abort(first, "broken")
  scheduler.commit(*second)
  assert seq.state.value == "ended" and not scheduler.num_swapped_tokens
  scheduler.check()


@pytest.mark.parametrize("strategy", ["continuous", "chunked", "disaggregated"])
@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=st.integers(0, 999), steps_in_flight=st.integers(1, 2), swap=st.integers(0, 200))
def test_swapping_changes_no_token(strategy, seed, steps_in_flight, swap):
  requests = make_requests(12, seed=seed, prompt=(1, 40), output=(1, 20))
  cluster = make_cluster(strategy, num_pages=20, limits={"swap_tokens": swap})
  assert tokens_of(run(cluster, requests, steps_in_flight=steps_in_flight)) == expected(requests)


# Fairness -----------------------------------------------------------------------------------------


def first_token_s(log):
  first = {}
  for e in log:
    if isinstance(e, Step):
      for i in e.emitted_ids:
        first.setdefault(i, e.end_s)
  return first


def test_look_ahead_lets_a_short_one_pass_a_head_that_finds_no_room():
  """12 pages; the first request holds 8 of them for long, the second needs 8, the third 1."""
  requests = [request(0, 25, 8), request(1, 30, 2, 0.001), request(2, 2, 2, 0.002)]

  def order(look_ahead):
    log, _ = serve_all(
      requests, num_pages=12, budget=64, limits={"look_ahead": look_ahead}, watermark=0.0
    )
    first = first_token_s(log)
    return sorted(first, key=first.get)

  assert order(0) == [0, 1, 2], "strict FCFS"
  assert order(1) == [0, 2, 1]


def test_look_ahead_passes_no_more_than_it_says():
  requests = [request(0, 25, 8)] + [request(i, 30, 2, i / 1000) for i in (1, 2)]
  requests.append(request(3, 2, 2, 0.003))
  limits = {"look_ahead": 1}
  log, _ = serve_all(requests, num_pages=12, budget=64, limits=limits, watermark=0.0)
  first = first_token_s(log)
  assert first[3] >= first[1], "two stood before it"


def test_however_many_come_later_the_head_is_passed_no_more_often_than_it_says():
  """It needs the whole pool; short ones come for ever."""

  def first_token_of_head(num_later):
    requests = [request(0, 25, 8), request(1, 40, 2, 0.001)]
    requests += [request(i, 2, 2, 0.002 + i / 1000) for i in range(2, 2 + num_later)]
    limits = {"look_ahead": 2}
    log, _ = serve_all(requests, num_pages=12, budget=64, limits=limits, watermark=0.0)
    return first_token_s(log)[1]

  assert first_token_of_head(20) == first_token_of_head(200)


def test_at_most_so_many_prompts_are_in_progress():
  requests = [request(i, 40, 2) for i in range(4)]

  def most_in_progress(limit):
    log, _ = serve_all(
      requests, budget=7, num_rows=6, policy=spread, limits={"max_partial_prefills": limit}
    )
    left = {i: 40 for i in range(4)}
    most = 0
    for e in log:
      if isinstance(e, Step):
        for i, n in zip(e.prefill_ids, e.prefill_tokens):
          left[i] -= n
        most = max(most, sum(0 < n < 40 for n in left.values()))
    return most

  assert most_in_progress(None) == 4
  assert [most_in_progress(n) for n in (1, 2, 3)] == [1, 2, 3]


def spread(step):
  """A token or two for everyone."""
  step.decode()
  step.prefill(2)
  step.admit(max_tokens=2)


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_long_prompts_get_no_more_than_their_share_and_short_ones_wait_less(share):
  """A long prompt comes first, short ones while it runs: their wait is bounded by the share."""
  budget = 16
  requests = [request(0, 120, 2)] + [request(i, 8, 2, 0.001) for i in range(1, 5)]
  limits = {"long_prompt_tokens": 50, "long_prompt_share": share}
  log, _ = serve_all(requests, budget=budget, limits=limits)
  for e in log:
    if isinstance(e, Step):
      assert sum(n for i, n in zip(e.prefill_ids, e.prefill_tokens) if i == 0) <= share * budget
  first = first_token_s(log)
  assert (max(first[i] for i in range(1, 5)) < first[0]) == (share < 1)


# Option -> limits, and the steps after which a short request that arrives behind two long prompts
# has its first token at the latest: 2 x 100 + 4 tokens in chunks of 15 beside a decode; 100 + 4
# where it passes the second, which finds no room; at once where half of the budget is for it.
FAIRNESS = {
  "strict": ({}, 15),
  "look_ahead": ({"look_ahead": 1}, 7),
  "max_partial_prefills": ({"max_partial_prefills": 1}, 15),
  "long_prompt_share": ({"long_prompt_tokens": 50, "long_prompt_share": 0.5}, 2),
}


@pytest.mark.parametrize("option", FAIRNESS)
def test_a_short_request_and_a_running_decode_wait_no_longer_than_the_option_says(option):
  """Under every option the gap of a running answer is one step of the budget."""
  limits, most_steps = FAIRNESS[option]
  budget, longest_step_s = 16, 8e-3 + 28e-6 * 16  # virtual.step_s
  num_pages = 34 if option == "look_ahead" else 200  # room for one long prompt, not for two
  requests = [request(0, 4, 60)] + [request(i, 100, 2, 0.02) for i in (1, 2)]
  requests.append(request(3, 4, 2, 0.021))
  log, _ = serve_all(requests, budget=budget, num_pages=num_pages, limits=limits, watermark=0.0)
  ends = [e.end_s for e in log if isinstance(e, Step) and 0 in e.emitted_ids]
  assert max(b - a for a, b in itertools.pairwise(ends)) <= longest_step_s + 1e-6
  # One step more: it arrives while one runs.
  assert first_token_s(log)[3] - 0.021 <= (most_steps + 1) * longest_step_s + 1e-6


# Wrong limits -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("limits", "message"),
  [
    ({"reservation": "most"}, "reservation='most' must be one of chunk, prompt, request, max_len"),
    ({"max_preemptions": -1}, "max_preemptions=-1"),
    ({"swap_tokens": -1}, "swap_tokens=-1"),
    ({"look_ahead": -1}, "look_ahead=-1"),
    ({"max_partial_prefills": 0}, "max_partial_prefills=0"),
    ({"long_prompt_tokens": 0}, "long_prompt_tokens=0"),
    ({"long_prompt_share": 0.0}, "long_prompt_share=0.0"),
    ({"long_prompt_share": 0.5, "chunk_prompts": False}, "chunk_prompts is off"),
    ({"watermark": 1.0}, "watermark=1.0"),
  ],
)
def test_limits_out_of_range_are_named(limits, message):
  with pytest.raises(ValueError, match=message):
    SchedulerConfig(token_budget=16, **limits)


def test_an_eviction_rule_that_does_not_exist_is_named():
  pages = make_pool().scheduler.pages.config
  with pytest.raises(ValueError, match=r"'fifo'.*lru, lfu, length"):
    Scheduler(lambda step: None, pages, SchedulerConfig(token_budget=16, eviction="fifo"))


def test_a_lowered_budget_is_kept_and_nobody_outside_it_takes_pages():
  """Three decodes, all at the end of their pages, room for one token: nobody is preempted."""
  lowered = False

  def policy(step):
    if lowered:
      step.tokens_left = 1
    step.decode()
    step.prefill()
    step.admit()

  pool = make_pool(policy=policy, num_pages=4, budget=16, watermark=0.0)
  scheduler = pool.scheduler
  for i in range(3):
    scheduler.add(Sequence(request(i, PAGE, 9)))
  scheduler.commit(scheduler.next_step(), StepResult(token_ids=(1, 2, 3)))
  lowered = True
  plan = scheduler.next_step()
  assert plan.decodes.request_ids == (0,) and plan.preempted == ()
  assert set(plan.page_updates.rows) == set(plan.decodes.rows)
  scheduler.check()
