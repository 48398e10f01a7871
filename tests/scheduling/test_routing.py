"""Which pool takes a request, by load, by chance, by cache, by predicted times; and who is refused.

The counts that routers read follow every step.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual import make_pool

from pdjax.core.plan import StepResult
from pdjax.core.request import Request, SamplingParams, Slo
from pdjax.core.sequence import Sequence
from pdjax.scheduling.routing import (
  ROUTERS,
  Conductor,
  PowerOfTwo,
  RandomPool,
  Rejected,
  Routing,
  least_loaded,
  local_cache,
)

pytestmark = pytest.mark.quick


def make_request(request_id, num_prompt_tokens, max_tokens):
  return Request(
    request_id=request_id,
    arrival_s=0.0,
    num_prompt_tokens=num_prompt_tokens,
    sampling=SamplingParams(max_tokens=max_tokens),
  )


def route(pools, request, router=least_loaded, **more):
  return router(Routing(seq=Sequence(request), now_s=0.0, entry=pools, **more))


def step(scheduler):
  plan = scheduler.next_step()
  num_tokens = sum(s.emits_token for s in plan.prefills) + len(plan.decodes)
  scheduler.commit(plan, StepResult(token_ids=(7,) * num_tokens))


def test_the_least_loaded_pool_wins_and_the_first_among_equals():
  pools = [make_pool(f"mixed{i}").scheduler for i in range(3)]
  new = make_request(9, 1, 1)
  assert route(pools, new) == 0
  pools[0].add(Sequence(make_request(0, 10, 5)))  # 15 tokens left
  assert route(pools, new) == 1
  pools[1].add(Sequence(make_request(1, 2, 12)))  # 14
  pools[2].add(Sequence(make_request(2, 13, 3)))  # 16
  assert route(pools, new) == 1
  step(pools[0])  # computes 10 prompt tokens and gives 1: 4 left
  assert route(pools, new) == 0


def test_a_prefill_pool_counts_no_output_that_another_pool_will_decode():
  pools = [
    make_pool(f"prefill{i}", role="prefill", policy="prefill_only").scheduler for i in (0, 1)
  ]
  pools[0].add(Sequence(make_request(0, 4, 100)))
  pools[1].add(Sequence(make_request(1, 5, 1)))
  assert route(pools, make_request(9, 1, 1)) == 0


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


@pytest.mark.once
@settings(max_examples=50, derandomize=True)
@given(sizes=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=20))
def test_pools_end_up_within_one_request_of_each_other(sizes):
  pools = [make_pool(f"mixed{i}").scheduler for i in range(3)]
  for i, size in enumerate(sizes):
    request = make_request(i, *size)
    pools[route(pools, request)].add(Sequence(request))
  left = [p.prefill_tokens_left + p.output_tokens_left for p in pools]
  assert sum(left) == sum(map(sum, sizes))
  assert max(left) - min(left) <= max(map(sum, sizes))


# By chance and by cache ---------------------------------------------------------------------------


def test_a_random_pool_is_each_as_often_and_always_the_same_for_a_request():
  pools = [make_pool(f"mixed{i}").scheduler for i in range(4)]
  requests = [make_request(i, 1, 1) for i in range(800)]
  drawn = [route(pools, r, RandomPool(seed=1)) for r in requests]
  assert all(150 < drawn.count(i) < 250 for i in range(4))
  assert drawn == [route(pools, r, RandomPool(seed=1)) for r in requests]
  assert drawn != [route(pools, r, RandomPool(seed=2)) for r in requests]


def test_the_better_of_two_is_never_the_fullest_pool_and_not_always_the_emptiest():
  pools = [make_pool(f"mixed{i}").scheduler for i in range(4)]
  for i, pool in enumerate(pools):
    pool.add(Sequence(make_request(i, 10 * (i + 1), 1)))
  drawn = [route(pools, make_request(i, 1, 1), PowerOfTwo()) for i in range(4, 400)]
  assert set(drawn) == {0, 1, 2} and drawn.count(0) > drawn.count(1) > drawn.count(2)
  assert route(pools[:1], make_request(500, 1, 1), PowerOfTwo()) == 0


def with_ids(request_id, ids, max_tokens=2, slo=None):
  return Request(
    request_id=request_id,
    arrival_s=0.0,
    num_prompt_tokens=len(ids),
    prompt_ids=tuple(ids),
    sampling=SamplingParams(max_tokens=max_tokens),
    slo=slo,
  )


def cached_pool(name, prompts, *, role="mixed", predict=None, budget=64):
  """A pool that has computed `prompts` and is idle again."""
  policy = {"mixed": "sarathi", "prefill": "prefill_only", "decode": "sarathi"}[role]
  pool = make_pool(name, role=role, policy=policy, budget=budget, limits={"prefix_cache": True})
  scheduler = pool.scheduler
  scheduler.predict_step_s = predict
  for i, ids in enumerate(prompts):
    scheduler.add(Sequence(with_ids(1000 + i, ids, max_tokens=1)))
    while scheduler.waiting or scheduler.running:
      step(scheduler)
  return scheduler


def test_what_a_pool_has_in_its_cache_counts_like_load_that_it_does_not_have():
  prompt = range(20)
  pools = [cached_pool("a", []), cached_pool("b", [range(9)]), cached_pool("c", [range(17)])]
  assert route(pools, with_ids(0, prompt), local_cache) == 2, "16 of its tokens are there"
  pools[2].add(Sequence(make_request(1, 4, 3)))
  assert route(pools, with_ids(0, prompt), local_cache) == 2, "7 - 16 against 0 - 8"
  pools[2].add(Sequence(make_request(2, 1, 1)))
  assert route(pools, with_ids(0, prompt), local_cache) == 1, "9 - 16 against 0 - 8"
  assert route(pools, with_ids(0, range(50, 70)), local_cache) == 0, "nobody has it"


# Mooncake's Conductor -----------------------------------------------------------------------------


def step_s(counts):
  """A millisecond a prompt token; a decode step of 10 ms and one more for each sequence."""
  decode_s = 1e-3 * (10 + counts.num_decodes) if counts.num_decodes else 0.0
  return 1e-3 * counts.num_prefill_tokens + decode_s


def test_the_conductor_weighs_the_cache_against_the_queue():
  pools = [cached_pool("a", [], predict=step_s), cached_pool("b", [range(17)], predict=step_s)]
  conductor = Conductor()
  assert route(pools, with_ids(0, range(20)), conductor) == 1, "16 of 20 tokens are there"
  pools[1].add(Sequence(make_request(1, 15, 1)))
  assert route(pools, with_ids(0, range(20)), conductor) == 1, "15 + 4 ms against 20"
  pools[1].add(Sequence(make_request(2, 2, 1)))
  assert route(pools, with_ids(0, range(20)), conductor) == 0, "17 + 4 ms against 20"


def test_the_conductor_counts_those_whose_prefix_is_on_its_way_to_a_pool():
  """Of many that arrive at once, not all are sent to the pool that was idle before the first."""
  pools = [cached_pool(name, [], predict=step_s) for name in "ab"]
  fetching = [(pools[0], Sequence(make_request(1, 20, 1)), 16)]
  assert route(pools, with_ids(0, range(20)), Conductor()) == 0
  assert route(pools, with_ids(0, range(20)), Conductor(), fetching=fetching) == 1
  pools[1].add(Sequence(make_request(2, 5, 1)))
  assert route(pools, with_ids(0, range(20)), Conductor(), fetching=fetching) == 0, "4 ms against 5"


def test_early_rejection_tells_who_would_miss_a_target_of_either_phase():
  prefill = cached_pool("p", [], role="prefill", predict=step_s)
  decode = cached_pool("d", [], role="decode", predict=step_s)
  slo = Slo(ttft_s=0.030, tpot_s=0.012)

  def ask(num_tokens, rejects="early"):
    request = with_ids(0, range(num_tokens), slo=slo)
    return route([prefill], request, Conductor(rejects=rejects), decode=[decode])

  assert ask(30) == 0
  assert "TTFT 0.031 s is over 0.03 s" in ask(31).reason
  assert ask(31, "never") == 0
  run_one(decode, 50)
  assert ask(30) == 0, "two sequences take 12 ms"
  run_one(decode, 51)
  assert isinstance(ask(30), Rejected) and "TPOT 0.013 s" in ask(30).reason


def test_decode_load_can_be_asked_about_only_when_the_prompt_has_been_prefilled():
  """Mooncake's baseline: a prompt is prefilled that will then find no room among the decodes."""
  prefill = cached_pool("p", [], role="prefill", predict=step_s)
  decode = cached_pool("d", [], role="decode", predict=step_s)
  slo = Slo(ttft_s=0.030, tpot_s=0.012)

  def ask(rejects, num_tokens=30):
    """On arrival, and when it has been prefilled."""
    request = with_ids(0, range(num_tokens), slo=slo)
    router = Conductor(rejects=rejects)
    routing = Routing(seq=Sequence(request), now_s=0.0, entry=[prefill], decode=[decode])
    return router(routing), router.at_hand_off(routing)

  assert ask("after_prefill") == (0, None)
  assert "TTFT 0.031 s" in ask("after_prefill", 31)[0].reason
  run_one(decode, 50), run_one(decode, 51)
  on_arrival, prefilled = ask("after_prefill")
  assert on_arrival == 0 and "TPOT 0.013 s is over 0.012 s" in prefilled.reason
  on_arrival, prefilled = ask("early")
  assert isinstance(on_arrival, Rejected) and prefilled is None, "asked once is enough"
  assert ask("never") == (0, None)


def run_one(scheduler, request_id, num_tokens=4, max_tokens=40):
  scheduler.add(Sequence(make_request(request_id, num_tokens, max_tokens)))
  while not any(s.request_id == request_id for s in scheduler.decoding.values()):
    step(scheduler)


def test_prediction_counts_who_will_have_come_and_who_will_have_gone():
  """Mooncake's point: the decode pool of now is not the one that this prompt will meet."""
  prefill = cached_pool("p", [], role="prefill", predict=step_s)
  decode = cached_pool("d", [], role="decode", predict=step_s)
  slo = Slo(ttft_s=9.0, tpot_s=0.012)

  def ask(rejects, decode_s=10.0):
    request = with_ids(0, range(20), slo=slo)
    router = Conductor(rejects=rejects, decode_s=decode_s)
    return route([prefill], request, router, decode=[decode])

  assert ask("early") == ask("predicted") == 0
  for i in range(2):  # both will be in the decode pool when this prompt gets there
    prefill.add(Sequence(make_request(10 + i, 10, 5)))
  assert ask("early") == 0 and isinstance(ask("predicted"), Rejected)
  prefill.drop(10), prefill.drop(11)
  run_one(decode, 50), run_one(decode, 51)
  assert isinstance(ask("early"), Rejected) and isinstance(ask("predicted"), Rejected)
  assert ask("predicted", decode_s=0.02) == 0, "they will be gone"


def test_short_or_well_cached_prompts_prefill_where_they_decode_if_its_steps_stay_in_time():
  prefill = cached_pool("p", [], role="prefill", predict=step_s)
  decode = cached_pool("d", [range(17)], role="decode", predict=step_s)
  slo = Slo(ttft_s=9.0, tpot_s=0.020)

  def ask(ids, limit=8):
    router = Conductor(local_prefill_tokens=limit)
    return route([prefill], with_ids(0, ids, slo=slo), router, decode=[decode])

  assert ask(range(100, 108)) == 1, "8 new tokens: 8 + 11 ms"
  assert ask(range(100, 109)) == 0, "9 are too many"
  assert ask(range(20)) == 1, "16 of its 20 tokens are cached there"
  assert ask(range(100, 108), limit=0) == 0
  for i in range(3):
    run_one(decode, 50 + i)
  assert ask(range(100, 108)) == 0, "14 + 8 ms are over the target of the running decodes"


def test_who_plans_by_time_says_so_where_nobody_knows_it():
  with pytest.raises(ValueError, match="how long steps take"):
    route([cached_pool("a", [])], with_ids(0, range(5)), Conductor())


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"rejects": "late"}, "rejects='late' must be one of never, after_prefill, early"),
    ({"ttft_s": 0.0}, "ttft_s=0.0 must be positive"),
    ({"local_prefill_tokens": -1}, "local_prefill_tokens=-1"),
  ],
)
def test_wrong_options_are_named(options, message):
  with pytest.raises(ValueError, match=message):
    Conductor(**options)


def test_every_router_has_a_line_of_description():
  assert all(router.__doc__.split("\n")[0].endswith((".", ").")) for router in ROUTERS.values())
