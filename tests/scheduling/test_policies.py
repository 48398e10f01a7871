"""What each policy does on small cases, step by step, worked out by hand."""

import pytest

from pdjax.core.plan import StepResult
from pdjax.core.request import Request, SamplingParams
from pdjax.core.sequence import Sequence
from pdjax.scheduling.pages import PageConfig
from pdjax.scheduling.policies import POLICIES
from pdjax.scheduling.scheduler import Scheduler, SchedulerConfig

pytestmark = pytest.mark.quick


def make_scheduler(policy, *, budget, chunk_prompts=True, num_rows=4):
  pages = PageConfig(num_rows=num_rows, page_size=4, pages_per_row=8, num_pages=32)
  config = SchedulerConfig(token_budget=budget, chunk_prompts=chunk_prompts)
  return Scheduler(POLICIES[policy], pages, config)


def make_sequence(request_id, num_prompt_tokens, max_tokens):
  return Sequence(
    Request(
      request_id=request_id,
      arrival_s=0.0,
      num_prompt_tokens=num_prompt_tokens,
      sampling=SamplingParams(max_tokens=max_tokens),
    )
  )


def timeline(scheduler, arrivals):
  """Each step as ([(request, start, tokens) of a prefill], [(request, position) of a decode]).

  `arrivals` maps a step number to the (request id, prompt tokens, max tokens) that come before it.
  """
  steps = []
  while True:
    for arrival in arrivals.get(len(steps), ()):
      scheduler.add(make_sequence(*arrival))
    if (plan := scheduler.next_step()) is None:
      return steps
    steps.append(
      (
        [(s.request_id, s.start, s.num_tokens) for s in plan.prefills],
        list(zip(plan.decodes.request_ids, plan.decodes.positions, strict=True)),
      )
    )
    num_tokens = sum(s.emits_token for s in plan.prefills) + len(plan.decodes)
    scheduler.commit(plan, StepResult(token_ids=(7,) * num_tokens))
    scheduler.check()


def test_prefill_first_stalls_every_decode_for_whole_prompts():
  scheduler = make_scheduler("prefill_first", budget=8, chunk_prompts=False)
  steps = timeline(scheduler, {0: [(0, 3, 4)], 2: [(1, 6, 2), (2, 5, 2)]})
  assert steps == [
    ([(0, 0, 3)], []),
    ([], [(0, 3)]),
    ([(1, 0, 6)], []),  # 2 tokens left: request 2 is not cut, request 0 waits
    ([(2, 0, 5)], []),  # requests 0 and 1 wait
    ([], [(0, 4), (1, 6), (2, 5)]),
    ([], [(0, 5)]),
  ]


def test_sarathi_takes_decodes_then_the_started_prompt_then_a_new_one():
  scheduler = make_scheduler("sarathi", budget=4)
  steps = timeline(scheduler, {0: [(0, 3, 4)], 1: [(1, 5, 2), (2, 2, 1)]})
  assert steps == [
    ([(0, 0, 3)], []),
    ([(1, 0, 3)], [(0, 3)]),  # budget 4 less one decode: a chunk of 3
    ([(1, 3, 2), (2, 0, 1)], [(0, 4)]),  # the started prompt first, the rest to the new one
    ([(2, 1, 1)], [(0, 5), (1, 5)]),  # a last chunk of one token is prefill, not decode
  ]


@pytest.mark.parametrize("num_decodes", [0, 1, 3, 5])
def test_sarathi_leaves_chunks_the_budget_less_the_decodes(num_decodes):
  scheduler = make_scheduler("sarathi", budget=6, num_rows=6)
  for i in range(num_decodes):
    scheduler.adopt(prefilled(i), scheduler.reserve(8))
  scheduler.add(make_sequence(99, 20, 2))
  plan = scheduler.next_step()
  assert len(plan.decodes) == num_decodes
  assert [(s.request_id, s.num_tokens) for s in plan.prefills] == [(99, 6 - num_decodes)]


def test_sarathi_gives_a_full_budget_of_decodes_everything():
  scheduler = make_scheduler("sarathi", budget=4)
  for i in range(3):
    scheduler.adopt(prefilled(i), scheduler.reserve(8))
  scheduler.adopt(prefilled(3), scheduler.reserve(8))
  scheduler.add(make_sequence(99, 20, 2))
  plan = scheduler.next_step()
  assert plan.decodes.request_ids == (0, 1, 2, 3) and plan.prefills == ()
  assert 99 in scheduler.waiting


def test_prefill_only_packs_prompts_in_order_and_never_decodes():
  scheduler = make_scheduler("prefill_only", budget=4)
  steps = timeline(scheduler, {0: [(0, 6, 9), (1, 3, 9)]})
  assert steps == [
    ([(0, 0, 4)], []),
    ([(0, 4, 2), (1, 0, 2)], []),
    ([(1, 2, 1)], []),
  ]
  assert [s.request_id for s in scheduler.running.values()] == [0, 1], "both wait for a hand-off"


def test_decode_only_decodes_what_it_was_given_and_starts_nothing():
  scheduler = make_scheduler("decode_only", budget=4)
  scheduler.adopt(prefilled(0, max_tokens=3), scheduler.reserve(5))
  scheduler.adopt(prefilled(1, max_tokens=2), scheduler.reserve(4))
  steps = timeline(scheduler, {0: [(2, 2, 2)]})
  assert steps == [([], [(0, 3), (1, 3)]), ([], [(0, 4)])]
  assert list(scheduler.waiting) == [2]


def prefilled(request_id, max_tokens=4):
  """A sequence of 3 prompt tokens with its first output token, as it comes out of a hand-off."""
  seq = make_sequence(request_id, 3, max_tokens)
  seq.output_ids.append(7)
  seq.num_computed_tokens = seq.num_scheduled_tokens = 3
  return seq
