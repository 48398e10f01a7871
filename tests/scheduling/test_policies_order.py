"""Shortest prefill first with ageing: who goes first, how long one may wait, what a step costs."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling.steps import contents, finish, make_sequence

from pdjax.scheduling.pages import PageConfig
from pdjax.scheduling.policies import make_policy
from pdjax.scheduling.policies.ranking import Ranking
from pdjax.scheduling.scheduler import Scheduler, SchedulerConfig

pytestmark = pytest.mark.quick


def make_scheduler(policy, *, budget=8, num_rows=4, num_pages=200, **limits):
  pages = PageConfig(num_rows=num_rows, page_size=4, pages_per_row=25, num_pages=num_pages)
  config = SchedulerConfig(token_budget=budget, watermark=0.0, **limits)
  return Scheduler(policy, pages, config)


def shortest(ageing_tokens_per_s=1.0):
  return make_policy("shortest_prefill_first", {"ageing_tokens_per_s": ageing_tokens_per_s})


def starts(scheduler, arrivals, *, step_s=1.0):
  """The order of first slices: (request id, when it started, when it could have at the soonest).

  `arrivals` are (arrival_s, prompt tokens), in order; every request asks for one token.
  """
  arrivals, now_s, first, seen = list(enumerate(arrivals)), 0.0, {}, {}
  while arrivals or scheduler.waiting or scheduler.running:
    while arrivals and arrivals[0][1][0] <= now_s:
      i, (arrival_s, num_tokens) = arrivals.pop(0)
      scheduler.add(make_sequence(i, num_tokens, 1, arrival_s=arrival_s))
      seen[i] = now_s
    if (plan := scheduler.next_step(now_s)) is not None:
      for s in plan.prefills:
        first.setdefault(s.request_id, now_s)
      finish(scheduler, plan)
    now_s += step_s
  return [(i, start_s, seen[i]) for i, start_s in first.items()]


def test_the_prompt_with_the_least_left_goes_first_started_or_not():
  scheduler = make_scheduler(shortest(), budget=8)
  scheduler.add(make_sequence(0, 30, 1))
  scheduler.add(make_sequence(1, 12, 1))
  plan = scheduler.next_step()
  assert contents(plan) == ([(1, 0, 8)], [])
  finish(scheduler, plan)
  scheduler.add(make_sequence(2, 5, 1))
  scheduler.add(make_sequence(3, 3, 1))
  steps = []
  while (plan := scheduler.next_step()) is not None:
    steps.append(contents(plan)[0])
    finish(scheduler, plan)
  assert steps[:3] == [[(3, 0, 3), (1, 8, 4), (2, 0, 1)], [(2, 1, 4), (0, 0, 4)], [(0, 4, 8)]]


def test_decodes_come_before_any_prompt():
  scheduler = make_scheduler(shortest(), budget=4)
  scheduler.add(make_sequence(0, 1, 3))
  finish(scheduler, scheduler.next_step())
  scheduler.add(make_sequence(1, 1, 1))
  scheduler.add(make_sequence(2, 9, 1))
  assert contents(scheduler.next_step()) == ([(1, 0, 1), (2, 0, 2)], [(0, 1)])


@settings(max_examples=150, derandomize=True, deadline=None)
@given(
  gaps_s=st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=1, max_size=40),
  seed=st.integers(0, 1000),
  ageing=st.sampled_from([0.5, 2.0, 10.0]),
  num_rows=st.integers(1, 4),
)
def test_a_prompt_is_overtaken_by_none_that_comes_later_than_its_length_allows(
  gaps_s, seed, ageing, num_rows
):
  rng, arrival_s, arrivals = random.Random(seed), 0.0, []
  for gap_s in gaps_s:
    arrival_s += gap_s
    arrivals.append((arrival_s, rng.choice([1, 2, 5, 20, 40])))
  scheduler = make_scheduler(shortest(ageing), budget=4, num_rows=num_rows)
  order = starts(scheduler, arrivals)
  assert len(order) == len(arrivals), "one never started"
  for i, start_s, seen_s in order:
    arrival_s, num_tokens = arrivals[i]
    for j, other_start_s, _ in order:
      if seen_s <= other_start_s < start_s:
        assert arrivals[j][0] < arrival_s + num_tokens / ageing


def test_under_a_stream_of_short_prompts_a_long_one_starts_when_it_has_aged_enough():
  """Short ones take every token of every step: without ageing it would start after the last."""
  stream = [(float(t), 4) for t in range(60)]
  arrivals = [(0.0, 40), *stream]
  for ageing, overtaken in ((4.0, 9), (2.0, 18)):  # by those that arrive before second 36 / ageing
    order = starts(make_scheduler(shortest(ageing), budget=4), arrivals)
    assert [i for i, _, _ in order[: overtaken + 1]] == [*range(1, overtaken + 1), 0]
  order = starts(make_scheduler(shortest(1e-6), budget=4), arrivals)
  assert order[-1][0] == 0, "this load starves nobody"


def test_a_preempted_sequence_goes_before_shorter_ones():
  scheduler = make_scheduler(shortest(), budget=20, num_rows=3, num_pages=7)
  for i in range(2):
    scheduler.add(make_sequence(i, 11, 9))
  while not (plan := scheduler.next_step()).preempted:  # two of 11 + 8 tokens do not fit 28
    finish(scheduler, plan)
  assert plan.preempted == (1,)
  finish(scheduler, plan)
  scheduler.add(make_sequence(2, 1, 1))
  order = []
  while (plan := scheduler.next_step()) is not None:
    order += [s.request_id for s in plan.prefills]
    finish(scheduler, plan)
  assert order == [1, 2]


def test_an_id_used_again_after_a_cancel_is_served():
  scheduler = make_scheduler(shortest(), budget=4, num_rows=1)
  scheduler.add(make_sequence(0, 40, 1))
  finish(scheduler, scheduler.next_step())
  scheduler.add(make_sequence(5, 3, 1))
  finish(scheduler, scheduler.next_step())  # now the ranking knows it
  scheduler.drop(5)
  scheduler.add(make_sequence(5, 3, 1))
  scheduler.drop(0)
  assert contents(scheduler.next_step()) == ([(5, 0, 3)], [])


# The ranking --------------------------------------------------------------------------------------


class Counted:
  """The policy, counting how often the key of a sequence is asked for."""

  def __init__(self):
    self.num_asked = 0
    self.ranking = Ranking(self._key)

  def _key(self, seq):
    self.num_asked += 1
    return float(seq.num_tokens)

  def __call__(self, step):
    step.decode()
    self.ranking.offer(step)


class Step:
  """As much of a step as a ranking looks at; counts what it looks at in the queue."""

  prefilling = ()

  def __init__(self, queue):
    self.queue, self.num_looked_at = queue, 0

  @property
  def waiting(self):
    return self

  @property
  def mapping(self):
    return self.queue

  def __len__(self):
    return len(self.queue)

  def __iter__(self):
    return self._counted(self.queue.values())

  def __reversed__(self):
    return self._counted(reversed(self.queue.values()))

  def _counted(self, sequences):
    for seq in sequences:
      self.num_looked_at += 1
      yield seq


def test_one_that_was_preempted_after_a_look_is_a_candidate_once():
  ranking = Ranking(lambda seq: -1.0 if seq.num_preemptions else float(seq.num_tokens))
  queue = {i: make_sequence(i, 3 + i, 9) for i in range(3)}
  step = Step(queue)
  assert [s.request_id for s in ranking.candidates(step)] == [0, 1, 2]
  seq = queue.pop(1)  # it runs, as `look_ahead` may let it, and is preempted before the next look
  seq.row = 0
  seq.lose_row()
  seq.num_preemptions += 1
  step.queue = {1: seq, **queue}
  assert [s.request_id for s in ranking.candidates(step)] == [1, 0, 2]
  step.queue = {}
  assert not list(ranking.candidates(step))
  assert not ranking._known and not ranking._entries, "it holds on to what is gone"


def test_a_look_at_the_queue_ends_at_what_is_known():
  ranking, step = Ranking(lambda seq: float(seq.num_tokens)), Step({})
  for i in range(500):
    step.queue[i] = make_sequence(i, 3 + i, 9)
  list(ranking.candidates(step))
  step.num_looked_at = 0
  step.queue[500] = make_sequence(500, 1, 1)
  assert next(ranking.candidates(step)).request_id == 500
  assert step.num_looked_at == 3  # the first, which is known; the last, and the one before it


def test_a_step_costs_what_is_new_however_many_wait():
  asked = []
  for num_waiting in (100, 10_000):
    policy = Counted()
    scheduler = make_scheduler(policy, budget=4, num_rows=2)
    for i in range(num_waiting):
      scheduler.add(make_sequence(i, 40 + i % 7, 1))
    finish(scheduler, scheduler.next_step())
    before = policy.num_asked
    for i in range(20):
      scheduler.add(make_sequence(num_waiting + i, 50, 1))
      finish(scheduler, scheduler.next_step())
    asked.append(policy.num_asked - before)
  assert asked[0] == asked[1] < 20 * 10


def test_what_left_the_queue_from_its_middle_is_forgotten():
  policy = Counted()
  scheduler = make_scheduler(policy, budget=4, num_rows=1)
  scheduler.add(make_sequence(0, 80, 1))
  finish(scheduler, scheduler.next_step())
  for i in range(1, 1001):
    scheduler.add(make_sequence(i, 90, 1))
  finish(scheduler, scheduler.next_step())
  assert len(policy.ranking._entries) >= 1000
  for i in range(2, 1001):
    scheduler.drop(i)
  finish(scheduler, scheduler.next_step())
  assert len(policy.ranking._entries) == len(policy.ranking._known) == 1


@settings(max_examples=150, derandomize=True, deadline=None)
@given(
  actions=st.lists(
    st.tuples(st.sampled_from(["add", "drop", "step"]), st.integers(0, 30)), max_size=60
  )
)
def test_candidates_are_all_that_wait_or_prefill_in_the_order_of_their_keys(actions):
  seen = []

  class Check(Counted):
    def __call__(self, step):
      candidates = list(self.ranking.candidates(step))
      assert len(set(candidates)) == len(candidates)
      assert set(candidates) == {*step.waiting, *step.prefilling}
      keys = [self._key(s) for s in candidates]
      assert keys == sorted(keys)
      seen.append(len(candidates))
      super().__call__(step)

  scheduler = make_scheduler(Check(), budget=6, num_rows=3, num_pages=25)
  next_id = 0
  for action, number in actions:
    if action == "add":
      scheduler.add(make_sequence(next_id, 1 + number, 1 + number % 5))
      next_id += 1
    elif action == "drop" and next_id:
      scheduler.drop(number % next_id)
    elif (plan := scheduler.next_step()) is not None:
      finish(scheduler, plan)
  while (plan := scheduler.next_step()) is not None:
    finish(scheduler, plan)
  assert not scheduler.waiting and not scheduler.running
