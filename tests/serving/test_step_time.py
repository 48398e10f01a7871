"""Step times are learnt from steps, and plans by them keep the targets of decodes."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual import expected, make_pool, make_requests, run, tokens_of

from pdjax.core.costs import StepCounts, count_plan, count_slices
from pdjax.core.events import Step
from pdjax.scheduling.policies import make_policy
from pdjax.serving.cluster import Cluster
from pdjax.serving.step_time import FittedStepTime

pytestmark = pytest.mark.quick


def linear(*factors):
  """Seconds by a constant, prefill tokens, prefill pairs, decodes and decode keys."""

  def step_s(counts):
    terms = (
      1,
      counts.num_prefill_tokens,
      counts.num_prefill_pairs,
      counts.num_decodes,
      counts.num_decode_keys,
    )
    return sum(factor * term for factor, term in zip(factors, terms, strict=True))

  return step_s


TRUE = linear(5e-3, 4e-5, 3e-8, 2e-4, 4e-7)


def draw(rng):
  """The counts of a step of prompts, of decodes, or of both."""
  num_prefills, num_decodes = rng.choice([(0, 1), (1, 0), (2, 0), (0, 8), (1, 4), (2, 16)])
  return count_slices(
    prefill_starts=[rng.choice((0, 128, 512)) for _ in range(num_prefills)],
    prefill_tokens=[rng.randint(1, 400) for _ in range(num_prefills)],
    decode_positions=[rng.randint(1, 1500) for _ in range(num_decodes)],
    num_emitted=num_prefills + num_decodes,
  )


def teach(model, true, rng, num_steps, noise=0.05):
  for _ in range(num_steps):
    counts = draw(rng)
    model.observe(counts, true(counts) * max(0.5, rng.gauss(1, noise)))
    model(counts)


def errors(model, true):
  """Relative ones, of steps that it was not told of."""
  rng = random.Random("held out")
  return [abs(model(counts) / true(counts) - 1) for counts in (draw(rng) for _ in range(200))]


# What it learns -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
  "true", [TRUE, linear(2e-2, 0, 0, 1e-4, 0), linear(1e-3, 1e-5, 1e-8, 0, 1e-7)]
)
def test_it_finds_a_linear_model_under_noise(true, seed):
  model = FittedStepTime()
  teach(model, true, random.Random(seed), 300)
  assert statistics.median(errors(model, true)) < 0.02
  assert max(errors(model, true)) < 0.08


def test_it_follows_a_change_and_needs_few_steps_to():
  slower = linear(9e-3, 1e-4, 2e-8, 2e-4, 9e-7)
  rng, model = random.Random(1), FittedStepTime(memory_steps=50)
  teach(model, TRUE, rng, 500)
  for true in (slower, TRUE):  # up and down
    assert max(errors(model, true)) > 0.3
    teach(model, true, rng, 200)
    assert statistics.median(errors(model, true)) < 0.05
    assert max(errors(model, true)) < 0.15


def test_it_remembers_prefills_through_any_number_of_decodes():
  rng, model = random.Random(2), FittedStepTime(memory_steps=2)
  teach(model, TRUE, rng, 100, noise=0)
  prompt = count_slices(prefill_tokens=[200], prefill_starts=[0], num_emitted=1)
  before_s = model(prompt)
  assert before_s == pytest.approx(TRUE(prompt), rel=0.05)
  for _ in range(3000):
    counts = count_slices(decode_positions=[rng.randint(1, 1500)], num_emitted=1)
    model.observe(counts, TRUE(counts))
  assert model(prompt) == pytest.approx(before_s, rel=0.2)


def test_steps_noticed_late_do_not_hide_the_others():
  """The one after a step that was noticed late seems to take next to nothing, or nothing."""
  rng, model = random.Random(3), FittedStepTime()
  teach(model, TRUE, rng, 100)
  for _ in range(10):
    teach(model, TRUE, rng, 40)
    model.observe(draw(rng), 1e-6)
    model.observe(draw(rng), 0.0)
  assert statistics.median(errors(model, TRUE)) < 0.25


@settings(max_examples=100, derandomize=True, deadline=None)
@given(
  steps=st.lists(
    st.tuples(*[st.integers(0, 2000)] * 6, st.floats(0, 1e3, allow_subnormal=False)), max_size=40
  ),
  asked=st.tuples(*[st.integers(0, 10**6)] * 6),
)
def test_it_is_never_negative_and_more_work_never_takes_less(steps, asked):
  model = FittedStepTime()
  for *counts, step_s in steps:
    model.observe(StepCounts(*counts), step_s)
    assert 0 <= model(StepCounts(*asked)) <= model(StepCounts(*(n + 1 for n in asked))) < 1e30


# Before the first step ----------------------------------------------------------------------------


def test_without_knowledge_it_says_nothing_takes_any_time():
  assert FittedStepTime()(StepCounts(num_prefill_tokens=100)) == 0.0


def test_a_prior_is_used_before_the_first_step_and_gives_way_to_steps():
  points = [
    count_slices(prefill_starts=[0], prefill_tokens=[n], num_emitted=1) for n in (50, 200, 400)
  ] + [count_slices(decode_positions=[99] * n, num_emitted=n) for n in (1, 8)]
  model = FittedStepTime((counts, TRUE(counts)) for counts in points)
  for counts in points:
    assert model(counts) == pytest.approx(TRUE(counts), rel=0.02)
  between = count_slices(prefill_starts=[0], prefill_tokens=[300], num_emitted=1)
  assert model(between) == pytest.approx(TRUE(between), rel=0.05)
  slower = linear(9e-3, 1e-4, 2e-8, 2e-4, 9e-7)
  teach(model, slower, random.Random(4), 200)
  assert statistics.median(errors(model, slower)) < 0.05


@pytest.mark.parametrize("memory_steps", [0, 0.5, float("nan")])
def test_a_memory_of_less_than_a_step_is_refused(memory_steps):
  with pytest.raises(ValueError, match=f"memory_steps={memory_steps} must be at least 1"):
    FittedStepTime(memory_steps=memory_steps)


# In the loop --------------------------------------------------------------------------------------


class Kept:
  def __init__(self):
    self.steps = []

  def __call__(self, counts):
    return 0.0

  def observe(self, counts, step_s):
    self.steps.append((counts, step_s))


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_it_is_told_of_every_step_of_its_own_pool_with_the_time_it_took(steps_in_flight):
  def step_s(plan):
    return TRUE(count_plan(plan))

  pools = [
    make_pool("p", role="prefill", policy="prefill_only", step_s=step_s),
    make_pool("d", role="decode", policy="decode_only", step_s=lambda plan: 2 * step_s(plan)),
  ]
  kept = [Kept(), Kept()]
  for pool, own in zip(pools, kept):
    pool.scheduler.predict_step_s = own
  log = run(Cluster(pools), make_requests(20, seed=1), steps_in_flight=steps_in_flight)
  for pool, own, times in zip(pools, kept, (1, 2)):
    steps = [event for event in log if isinstance(event, Step) and event.pool == pool.name]
    assert len(own.steps) == len(steps) > 10
    for (counts, took_s), event in zip(own.steps, steps):
      assert counts.num_prefill_tokens == sum(event.prefill_tokens)
      assert counts.num_decodes == len(event.decode_ids)
      assert took_s == pytest.approx(times * TRUE(counts), abs=1e-8)


def test_it_is_not_told_of_steps_that_fail():
  pool = make_pool()
  pool.scheduler.predict_step_s = kept = Kept()
  submit, num_submitted = pool.executor.submit, 0

  def every_third_breaks(plan, now_s, exports):
    nonlocal num_submitted
    num_submitted += 1
    if num_submitted % 3 == 0:
      raise RuntimeError("no such luck")
    return submit(plan, now_s, exports)

  pool.executor.submit = every_third_breaks
  log = run(Cluster([pool]), make_requests(20, seed=1))
  assert num_submitted == sum(isinstance(event, Step) for event in log)
  assert len(kept.steps) == num_submitted - num_submitted // 3 < num_submitted


# A policy that plans by it ------------------------------------------------------------------------

TPOT_S = 0.02
LEARNT_S = 2.0  # from then on a request counts
HARD = linear(2e-3, 1e-3, 0, 2e-4, 1e-6)  # a budget of prompt takes three targets


def serve_by_deadlines(predict_step_s):
  """The TPOTs of requests that come once it could have learnt, and the log."""
  rng = random.Random(5)
  pool = make_pool(
    policy=make_policy("deadline", {"tpot_s": TPOT_S, "ttft_s": 1.0, "grid_tokens": 4}),
    budget=64,
    num_pages=192,  # of six rows of the longest: nobody is preempted
    step_s=lambda plan: HARD(count_plan(plan)) * rng.uniform(0.95, 1.05),
  )
  pool.scheduler.predict_step_s = predict_step_s
  requests = make_requests(150, seed=6, rate_rps=16, prompt=(20, 100), output=(5, 20))
  log = run(Cluster([pool]), requests)
  assert tokens_of(log) == expected(requests)
  token_s = {request.request_id: [] for request in requests}
  for event in log:
    if isinstance(event, Step):
      for request_id in event.emitted_ids:
        token_s[request_id].append(event.end_s)
  tpots_s = [
    (times[-1] - times[0]) / (len(times) - 1)
    for request, times in zip(requests, token_s.values())
    if request.arrival_s > LEARNT_S
  ]
  assert len(tpots_s) > 100
  return tpots_s, log


def test_deadlines_by_a_fitted_model_keep_decodes_within_their_target():
  by_none, _ = serve_by_deadlines(lambda counts: 0.0)
  assert sum(tpot_s > TPOT_S for tpot_s in by_none) > 0.5 * len(by_none), "too easy"
  by_fitted, log = serve_by_deadlines(FittedStepTime())
  assert max(by_fitted) <= TPOT_S
  # Not by small chunks alone: it gives prompts what one that knows the truth gives them.
  _, log_known = serve_by_deadlines(HARD)
  num_steps, num_known = (sum(isinstance(e, Step) for e in each) for each in (log, log_known))
  assert num_steps == pytest.approx(num_known, rel=0.05)
