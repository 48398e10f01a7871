"""The policy of DistServe's simulator: prompts first and whole, decodes in turn up to a context."""

import pytest
from scheduling.steps import contents, finish, make_sequence, timeline

from pdjax.scheduling.pages import PageConfig
from pdjax.scheduling.policies import make_policy
from pdjax.scheduling.scheduler import Scheduler, SchedulerConfig

pytestmark = pytest.mark.quick


def make_scheduler(max_decode_tokens):
  pages = PageConfig(num_rows=8, page_size=4, pages_per_row=20, num_pages=160)
  policy = make_policy("sim_dist_serve", {"max_decode_tokens": max_decode_tokens})
  return Scheduler(policy, pages, SchedulerConfig(token_budget=400, chunk_prompts=False))


def turns(scheduler, arrivals):
  """Who is in each step: prompts, then decodes in their order."""
  return [
    ([i for i, _, _ in prefills], [i for i, _ in decodes])
    for prefills, decodes in timeline(scheduler, arrivals)
  ]


def test_all_prompts_come_first_and_together():
  steps = turns(make_scheduler(1000), {0: [(0, 30, 3), (1, 20, 3)], 2: [(2, 10, 2)]})
  assert steps == [([0, 1], []), ([], [0, 1]), ([2], []), ([], [0, 1, 2])]


def test_decodes_beyond_the_context_wait_for_their_turn():
  """Three contexts of 11, then 11 + 12 + 12 fit into 35 tokens; then only two of 12."""
  steps = turns(make_scheduler(35), {0: [(i, 10, 4) for i in range(4)]})
  assert steps[1:4] == [([], [0, 1, 2]), ([], [3, 0, 1]), ([], [2, 3])]


def test_who_came_during_a_step_stands_before_those_who_were_in_it():
  """As in a decode pool, where sequences come in while a step runs."""
  scheduler = make_scheduler(25)
  sequences = [make_sequence(i, 10, 9) for i in range(3)]

  def adopt(seq):
    """As one that was prefilled elsewhere."""
    seq.num_computed_tokens = seq.num_scheduled_tokens = 10
    seq.output_ids.append(7)
    scheduler.adopt(seq, scheduler.reserve(18))

  adopt(sequences[0])
  adopt(sequences[1])
  plan = scheduler.next_step()
  assert contents(plan) == ([], [(0, 10), (1, 10)])
  adopt(sequences[2])
  finish(scheduler, plan)
  assert contents(scheduler.next_step()) == ([], [(2, 10), (0, 11)])


def test_one_decode_is_taken_however_long_it_is():
  steps = turns(make_scheduler(5), {0: [(0, 30, 3), (1, 30, 2)]})
  assert steps == [([0, 1], []), ([], [0]), ([], [1]), ([], [0])]


def test_no_context_at_all_is_refused():
  with pytest.raises(ValueError, match="max_decode_tokens=0"):
    make_policy("sim_dist_serve", {"max_decode_tokens": 0})
