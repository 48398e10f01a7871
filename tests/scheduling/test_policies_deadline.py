"""The deadline policy: a budget from the slack of decodes, an order by targets, relegation once."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling.steps import contents, finish, make_sequence

from pdjax.scheduling.pages import PageConfig
from pdjax.scheduling.policies import make_policy
from pdjax.scheduling.policies.deadline import Deadline
from pdjax.scheduling.scheduler import Scheduler, SchedulerConfig

pytestmark = pytest.mark.quick
GRID, SAFETY = 8, 1.25


def step_s(counts):
  """10 ms, and 1 ms for each prompt token."""
  return 0.01 + 0.001 * counts.num_prefill_tokens


def make_scheduler(*, budget=64, num_rows=4, predict_step_s=step_s, **options):
  pages = PageConfig(num_rows=num_rows, page_size=4, pages_per_row=250, num_pages=250 * num_rows)
  options = {"grid_tokens": GRID, "safety": SAFETY} | options
  policy = make_policy("deadline", options)
  config = SchedulerConfig(token_budget=budget, watermark=0.0)
  return Scheduler(policy, pages, config, predict_step_s)


def with_a_decode(scheduler, *, tpot_s, now_s=0.0, request_id=0):
  """Adds a request of one prompt token and takes the step that gives it its first output token."""
  scheduler.add(make_sequence(request_id, 1, 99, slo=(100.0, tpot_s)))
  finish(scheduler, scheduler.next_step(now_s))


# The budget ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("tpot_s", "chunk"),
  [
    (0.001, 8),  # cannot be met: the least chunk
    (0.022, 8),  # 1.25 * (10 + 8) = 22.5 ms is too long already
    (0.023, 8),
    (0.0326, 16),  # 1.25 * (10 + 16) = 32.5 ms
    (0.0324, 8),
    (0.05, 24),
    (0.0925, 63),  # 1.25 * (10 + 63) = 91.25 ms: all that a budget of 64 leaves beside a decode
    (9.0, 63),
  ],
)
def test_the_chunk_is_the_largest_that_lets_the_next_token_come_in_time(tpot_s, chunk):
  scheduler = make_scheduler()
  with_a_decode(scheduler, tpot_s=tpot_s, now_s=1.0)
  scheduler.add(make_sequence(1, 500, 1))
  plan = scheduler.next_step(1.0)  # the first token came at 1.0
  assert contents(plan) == ([(1, 0, chunk)], [(0, 1)])


@settings(max_examples=150, derandomize=True, deadline=None)
@given(
  tpots_s=st.lists(st.floats(0.001, 0.2), min_size=1, max_size=3),
  prompts=st.lists(st.integers(1, 100), min_size=1, max_size=4),
  waited_s=st.floats(0.0, 0.1),
)
def test_a_chunk_fits_and_the_next_larger_does_not(tpots_s, prompts, waited_s):
  scheduler = make_scheduler(num_rows=8)
  for i, tpot_s in enumerate(tpots_s):
    with_a_decode(scheduler, tpot_s=tpot_s, request_id=i)
  finish(scheduler, scheduler.next_step(0.0))
  # All this took no time: they are ahead of their targets.
  ahead = {s.request_id: len(s.output_ids) for s in scheduler.running.values()}
  for i, num_tokens in enumerate(prompts):
    scheduler.add(make_sequence(10 + i, num_tokens, 2))
  slack_s = min(ahead[i] * tpot_s for i, tpot_s in enumerate(tpots_s)) - waited_s
  plan = scheduler.next_step(waited_s)
  chunk, most = plan.num_prefill_tokens, min(sum(prompts), 64 - len(tpots_s))
  assert len(plan.decodes) == len(tpots_s)
  assert chunk <= max(GRID, 1000 * (slack_s / SAFETY - 0.01) + 1e-9)
  next_larger = min((chunk // GRID + 1) * GRID, most)
  assert chunk == most or SAFETY * (0.01 + 0.001 * next_larger) > slack_s


def test_a_decode_that_is_ahead_lends_its_slack_and_one_behind_takes_it_back():
  scheduler = make_scheduler(budget=200)
  with_a_decode(scheduler, tpot_s=0.03)
  scheduler.add(make_sequence(1, 900, 1))
  chunks = []
  for now_s in (0.0, 0.01, 0.02, 0.03, 0.2, 0.21):  # the token of the last step came at each
    plan = scheduler.next_step(now_s)
    chunks.append(plan.num_prefill_tokens)
    finish(scheduler, plan)
  # Due at 30, 60, 90, 120, 150 and 180 ms.
  slacks_ms = (30, 50, 70, 90, -50, -30)
  assert chunks == [max(8, (slack / 1.25 - 10) // 8 * 8) for slack in slacks_ms]


def test_the_tightest_of_two_classes_counts():
  for tpots_s in ((0.05, 9.0), (9.0, 0.05)):
    scheduler = make_scheduler()
    for i in (0, 1):
      scheduler.add(make_sequence(i, 1, 99, slo=(100.0, tpots_s[i])))
    finish(scheduler, scheduler.next_step())
    scheduler.add(make_sequence(2, 500, 1))
    assert scheduler.next_step().num_prefill_tokens == 24


@pytest.mark.parametrize("case", ["no decode", "no target", "no prediction"])
def test_without_a_limit_in_time_the_budget_is_the_pools(case):
  scheduler = make_scheduler(predict_step_s=None if case == "no prediction" else step_s)
  if case == "no prediction":
    with_a_decode(scheduler, tpot_s=0.001)
  elif case == "no target":
    scheduler.add(make_sequence(0, 1, 99))
    finish(scheduler, scheduler.next_step())
  scheduler.add(make_sequence(1, 500, 1))
  assert scheduler.next_step().num_tokens == 64


def test_requests_without_a_target_have_that_of_the_options():
  scheduler = make_scheduler(tpot_s=0.05)
  scheduler.add(make_sequence(0, 1, 99))
  finish(scheduler, scheduler.next_step())
  scheduler.add(make_sequence(1, 500, 1))
  assert scheduler.next_step().num_prefill_tokens == 24


def test_with_a_step_in_flight_the_next_starts_when_that_ends():
  scheduler = make_scheduler()
  with_a_decode(scheduler, tpot_s=0.05)
  scheduler.add(make_sequence(1, 500, 1))
  first = scheduler.next_step(0.0)
  # It will end at 34 ms; the token after its own is due at 100.
  assert first.num_prefill_tokens == 24
  second = scheduler.next_step(0.034)
  assert second.num_prefill_tokens == (66 / 1.25 - 10) // 8 * 8 == 40
  finish(scheduler, first)
  finish(scheduler, second)


def test_a_prediction_counts_what_the_chunk_reads_and_emits():
  asked = []

  def predict(counts):
    asked.append(counts)
    return 1e-6

  scheduler = make_scheduler(predict_step_s=predict)
  with_a_decode(scheduler, tpot_s=0.05)
  scheduler.add(make_sequence(1, 100, 1))
  finish(scheduler, scheduler.next_step())
  asked.clear()
  scheduler.add(make_sequence(2, 20, 1))
  plan = scheduler.next_step()
  assert contents(plan)[0] == [(2, 0, 20), (1, 63, 37)] and plan.num_tokens == 58
  largest = max(asked, key=lambda counts: counts.num_prefill_tokens)
  assert asked[-1] == largest, "what was tried last is what was planned"
  assert largest.num_prefill_tokens == 57 and largest.num_decodes == 1
  assert largest.num_prefill_pairs == sum(range(1, 21)) + sum(range(64, 101))
  assert largest.num_prefill_keys == 20 + 100 and largest.num_emitted == 3


# The order ----------------------------------------------------------------------------------------


def starts(scheduler, *, now_s=0.0, step_s=1.0, most=200):
  """Request ids in the order of their first slices, with the times of those."""
  first = {}
  for _ in range(most):
    if (plan := scheduler.next_step(now_s)) is None:
      break
    for s in plan.prefills:
      first.setdefault(s.request_id, now_s)
    finish(scheduler, plan)
    now_s += step_s
  return first


def test_an_urgent_class_goes_before_a_patient_one_that_came_first():
  scheduler = make_scheduler(budget=10, token_s=1e-6)
  for i, ttft_s in enumerate((1800.0, 600.0, 6.0, 600.0)):
    scheduler.add(make_sequence(i, 10, 1, arrival_s=float(i), slo=(ttft_s, 1.0)))
  assert list(starts(scheduler, now_s=4.0, step_s=0.1)) == [2, 1, 3, 0]


def test_of_equal_targets_the_shorter_prompt_goes_first_by_its_tokens():
  scheduler = make_scheduler(budget=40, num_rows=1, token_s=0.1)
  scheduler.add(make_sequence(0, 40, 1, arrival_s=0.0, slo=(10.0, 1.0)))
  scheduler.add(make_sequence(1, 11, 1, arrival_s=2.8, slo=(10.0, 1.0)))  # 0.1 s more urgent
  scheduler.add(make_sequence(2, 11, 1, arrival_s=3.0, slo=(10.0, 1.0)))  # 0.1 s less
  assert list(starts(scheduler, now_s=3.0, step_s=0.1)) == [1, 0, 2]


def warmed_up(tokens_per_s=10.0, num_rows=1, **options):
  """A pool that has seen its prefill rate, at second 100."""
  scheduler = make_scheduler(budget=10, num_rows=num_rows, token_s=1e-6, **options)
  scheduler.add(make_sequence(1000, 10, 1, slo=(1e6, 1.0)))
  finish(scheduler, scheduler.next_step(100.0 - 10 / tokens_per_s))
  assert scheduler.next_step(100.0) is None
  return scheduler


def test_who_cannot_make_it_is_relegated_and_still_finishes():
  """10 tokens a second: 50 take 5 s, and 4 are left."""
  scheduler = warmed_up(relegated_s=1000.0)
  scheduler.add(make_sequence(0, 50, 1, arrival_s=100.0, slo=(4.0, 1.0)))
  scheduler.add(make_sequence(1, 50, 1, arrival_s=100.0, slo=(6.0, 1.0)))
  scheduler.add(make_sequence(2, 10, 1, arrival_s=100.0, slo=(50.0, 1.0)))
  assert starts(scheduler, now_s=100.0) == {1: 100.0, 2: 105.0, 0: 106.0}


def test_before_any_rate_is_seen_nobody_is_relegated():
  scheduler = make_scheduler(budget=10, num_rows=1, token_s=1e-6)
  scheduler.add(make_sequence(0, 50, 1, arrival_s=100.0, slo=(4.0, 1.0)))
  scheduler.add(make_sequence(1, 10, 1, arrival_s=100.0, slo=(6.0, 1.0)))
  assert list(starts(scheduler, now_s=200.0)) == [0, 1]


def test_a_relegated_request_is_relegated_once():
  """Behind all whose targets end within `relegated_s` of its own, before those that come later."""
  scheduler = warmed_up(relegated_s=30.0)
  scheduler.add(make_sequence(0, 50, 1, arrival_s=100.0, slo=(4.0, 1.0)))  # 104, then 134
  now_s, order = 100.0, []
  for i in range(1, 60):
    # One a second, of a second each, due 5 s after it came: no room for anybody else.
    scheduler.add(make_sequence(i, 10, 1, arrival_s=now_s, slo=(5.0, 1.0)))
    plan = scheduler.next_step(now_s)
    order += [s.request_id for s in plan.prefills if s.start == 0]
    finish(scheduler, plan)
    now_s += 1.0
  # The last to go before it comes at 129: it is due at 134 as well, and shorter.
  assert order.index(0) == 30


def test_what_has_started_is_not_relegated():
  scheduler = warmed_up(relegated_s=1000.0, num_rows=2)
  scheduler.add(make_sequence(0, 50, 1, arrival_s=100.0, slo=(6.0, 1.0)))
  finish(scheduler, scheduler.next_step(100.0))
  scheduler.add(make_sequence(1, 10, 1, arrival_s=100.0, slo=(900.0, 1.0)))
  assert contents(scheduler.next_step(500.0)) == ([(0, 10, 10)], [])  # late by 394 s


def test_a_preempted_sequence_goes_before_more_urgent_ones():
  scheduler = warmed_up()
  scheduler.add(seq := make_sequence(0, 50, 1, arrival_s=100.0, slo=(900.0, 1.0)))
  finish(scheduler, scheduler.next_step(100.0))
  scheduler.add(make_sequence(1, 10, 1, arrival_s=100.0, slo=(6.0, 1.0)))
  scheduler.preempt(seq)
  scheduler.waiting[0] = seq
  scheduler.waiting.move_to_end(0, last=False)
  assert contents(scheduler.next_step(101.0)) == ([(0, 0, 10)], [])


def test_who_is_relegated_is_not_looked_at_again(monkeypatch):
  """A queue of late ones costs a step no more than any other."""
  asked, ttft_s = [], Deadline._ttft_s

  def counted(policy, seq):
    asked.append(seq)
    return ttft_s(policy, seq)

  monkeypatch.setattr(Deadline, "_ttft_s", counted)
  scheduler = warmed_up()
  for i in range(300):
    scheduler.add(make_sequence(i, 50, 1, arrival_s=100.0, slo=(4.0, 1.0)))
  finish(scheduler, scheduler.next_step(100.0))
  asked.clear()
  finish(scheduler, scheduler.next_step(101.0))
  assert 0 < len(asked) < 20


def test_under_overload_more_prompts_are_in_time_than_in_the_order_of_arrival():
  """Twice as much as fits: those that cannot make it do not take others with them."""
  in_time = {}
  for relegated_s in (1e-9, 1e6):
    scheduler = warmed_up(relegated_s=relegated_s)
    now_s, first, due_s = 100.0, {}, {}
    for i in range(200):
      scheduler.add(make_sequence(i, 20, 1, arrival_s=now_s, slo=(8.0, 1.0)))
      due_s[i] = now_s + 8.0
      plan = scheduler.next_step(now_s)
      now_s += 1.0
      for s in plan.prefills:
        if s.emits_token:
          first[s.request_id] = now_s
      finish(scheduler, plan)
    in_time[relegated_s] = sum(first.get(i, math.inf) <= due_s[i] for i in due_s)
  assert in_time[1e6] > 90 and in_time[1e-9] < 20
