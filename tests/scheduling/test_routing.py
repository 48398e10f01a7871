"""A request goes to the pool with the fewest tokens left; the counts follow every step."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual import make_pool

from pdjax.core.plan import StepResult
from pdjax.core.request import Request, SamplingParams
from pdjax.core.sequence import Sequence
from pdjax.scheduling.routing import ROUTERS, least_outstanding_tokens

pytestmark = pytest.mark.quick


def make_request(request_id, num_prompt_tokens, max_tokens):
  return Request(
    request_id=request_id,
    arrival_s=0.0,
    num_prompt_tokens=num_prompt_tokens,
    sampling=SamplingParams(max_tokens=max_tokens),
  )


def step(scheduler):
  plan = scheduler.next_step()
  num_tokens = sum(s.emits_token for s in plan.prefills) + len(plan.decodes)
  scheduler.commit(plan, StepResult(token_ids=(7,) * num_tokens))


def test_the_least_loaded_pool_wins_and_the_first_among_equals():
  pools = [make_pool(f"mixed{i}").scheduler for i in range(3)]
  new = make_request(9, 1, 1)
  assert least_outstanding_tokens(pools, new) == 0
  pools[0].add(Sequence(make_request(0, 10, 5)))  # 15 tokens left
  assert least_outstanding_tokens(pools, new) == 1
  pools[1].add(Sequence(make_request(1, 2, 12)))  # 14
  pools[2].add(Sequence(make_request(2, 13, 3)))  # 16
  assert least_outstanding_tokens(pools, new) == 1
  step(pools[0])  # computes 10 prompt tokens and gives 1: 4 left
  assert least_outstanding_tokens(pools, new) == 0


def test_a_prefill_pool_counts_no_output_that_another_pool_will_decode():
  pools = [
    make_pool(f"prefill{i}", role="prefill", policy="prefill_only").scheduler for i in (0, 1)
  ]
  pools[0].add(Sequence(make_request(0, 4, 100)))
  pools[1].add(Sequence(make_request(1, 5, 1)))
  assert least_outstanding_tokens(pools, make_request(9, 1, 1)) == 0


def test_the_counts_follow_progress():
  scheduler = make_pool(budget=6).scheduler
  scheduler.add(Sequence(make_request(0, 10, 3)))
  seen = [(scheduler.prefill_tokens_left, scheduler.output_tokens_left)]
  for _ in range(4):
    step(scheduler)
    seen.append((scheduler.prefill_tokens_left, scheduler.output_tokens_left))
  assert seen == [(10, 3), (4, 3), (0, 2), (0, 1), (0, 0)]


def test_a_dropped_request_counts_no_more_and_a_preempted_one_counts_again():
  scheduler = make_pool(budget=6).scheduler
  scheduler.add(Sequence(make_request(0, 5, 4)))
  step(scheduler)
  step(scheduler)
  scheduler.preempt(seq := scheduler.running[0])
  scheduler.waiting[0] = seq
  assert (scheduler.prefill_tokens_left, scheduler.output_tokens_left) == (7, 2)
  scheduler.drop(0)
  assert (scheduler.prefill_tokens_left, scheduler.output_tokens_left) == (0, 0)


@settings(max_examples=50, derandomize=True)
@given(sizes=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=20))
def test_pools_end_up_within_one_request_of_each_other(sizes):
  pools = [make_pool(f"mixed{i}").scheduler for i in range(3)]
  for i, size in enumerate(sizes):
    request = make_request(i, *size)
    pools[ROUTERS["least_outstanding_tokens"](pools, request)].add(Sequence(request))
  left = [p.prefill_tokens_left + p.output_tokens_left for p in pools]
  assert sum(left) == sum(map(sum, sizes))
  assert max(left) - min(left) <= max(map(sum, sizes))
