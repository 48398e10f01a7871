"""What each policy does on small cases, step by step, worked out by hand."""

import pathlib

import pytest
from scheduling.steps import contents, finish, make_sequence, timeline

import pdjax.scheduling.policies
from pdjax.scheduling.pages import PageConfig
from pdjax.scheduling.policies import POLICIES, make_policy
from pdjax.scheduling.scheduler import Scheduler, SchedulerConfig

pytestmark = pytest.mark.quick


def make_scheduler(policy, *, budget, num_rows=4, options=None):
  """With the limits that the policy asks for."""
  pages = PageConfig(num_rows=num_rows, page_size=4, pages_per_row=8, num_pages=8 * num_rows)
  needs = POLICIES[policy]
  config = SchedulerConfig(
    token_budget=budget,
    chunk_prompts=needs.chunks,
    reservation=needs.reservation,
    decodes=policy != "prefill_only",
    watermark=0.0,
  )
  return Scheduler(make_policy(policy, options), pages, config)


# Sarathi-Serve's Figure 7 -------------------------------------------------------------------------

# A and B decode when C and D arrive. Of C's 6 and D's 4 tokens Sarathi-Serve's budget of 4 takes 2
# beside A and B. From the figure: vLLM prefills C and D while A and B stall; Orca does it beside
# their decodes, in one long step; FasterTransformer lets C and D wait until A and B are done;
# Sarathi-Serve puts chunks of C, then of D, beside decodes that never stall.
A, B, C, D = range(4)
ARRIVALS = {0: [(A, 2, 5), (B, 2, 5)], 2: [(C, 6, 3), (D, 4, 3)]}  # step: id, prompt, max_tokens
START = [
  ([(A, 0, 2), (B, 0, 2)], []),
  ([], [(A, 2), (B, 2)]),
]
FIGURE_7 = {
  "prefill_first": [
    ([(C, 0, 6), (D, 0, 4)], []),
    ([], [(A, 3), (B, 3), (C, 6), (D, 4)]),
    ([], [(A, 4), (B, 4), (C, 7), (D, 5)]),
    ([], [(A, 5), (B, 5)]),
  ],
  "orca": [
    ([(C, 0, 6), (D, 0, 4)], [(A, 3), (B, 3)]),
    ([], [(A, 4), (B, 4), (C, 6), (D, 4)]),
    ([], [(A, 5), (B, 5), (C, 7), (D, 5)]),
  ],
  "faster_transformer": [
    ([], [(A, 3), (B, 3)]),
    ([], [(A, 4), (B, 4)]),
    ([], [(A, 5), (B, 5)]),
    ([(C, 0, 6), (D, 0, 4)], []),
    ([], [(C, 6), (D, 4)]),
    ([], [(C, 7), (D, 5)]),
  ],
  "sarathi": [
    ([(C, 0, 2)], [(A, 3), (B, 3)]),
    ([(C, 2, 2)], [(A, 4), (B, 4)]),
    ([(C, 4, 2)], [(A, 5), (B, 5)]),
    ([(D, 0, 3)], [(C, 6)]),
    ([(D, 3, 1)], [(C, 7)]),
    ([], [(D, 4)]),
    ([], [(D, 5)]),
  ],
}


@pytest.mark.parametrize("policy", FIGURE_7)
def test_figure_7(policy):
  scheduler = make_scheduler(policy, budget=4 if policy == "sarathi" else 12)
  assert timeline(scheduler, ARRIVALS) == START + FIGURE_7[policy]


# More timelines -----------------------------------------------------------------------------------


def test_prefill_first_stalls_every_decode_for_whole_prompts():
  scheduler = make_scheduler("prefill_first", budget=8)
  steps = timeline(scheduler, {0: [(0, 3, 4)], 2: [(1, 6, 2), (2, 5, 2)]})
  assert steps == [
    ([(0, 0, 3)], []),
    ([], [(0, 3)]),
    ([(1, 0, 6)], []),  # 2 tokens left: request 2 is not cut, request 0 waits
    ([(2, 0, 5)], []),  # requests 0 and 1 wait
    ([], [(0, 4), (1, 6), (2, 5)]),
    ([], [(0, 5)]),
  ]


def test_prefill_first_pads_prompts_within_its_limit():
  """Prompts of 4, 6 and 5: as a rectangle of 3 x 6 they have 3 tokens of padding."""
  for padding, budget, first in ((3, 18, 3), (2, 18, 2), (1, 18, 1), (3, 17, 2), (0, 18, 1)):
    scheduler = make_scheduler(
      "prefill_first", budget=budget, options={"max_padding_tokens": padding}
    )
    steps = timeline(scheduler, {0: [(0, 4, 1), (1, 6, 1), (2, 5, 1)]})
    assert len(steps[0][0]) == first, (padding, budget)
    assert [i for prefills, _ in steps for i, _, _ in prefills] == [0, 1, 2], "in order"


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


def test_prefill_only_packs_whole_prompts_in_order_and_never_decodes():
  scheduler = make_scheduler("prefill_only", budget=6)
  steps = timeline(scheduler, {0: [(0, 3, 9), (1, 2, 9), (2, 2, 9)]})
  assert steps == [
    ([(0, 0, 3), (1, 0, 2)], []),  # 1 token left: request 2 is not cut
    ([(2, 0, 2)], []),
  ]
  assert list(scheduler.running) == [0, 1, 2], "all wait for a hand-off"


def test_decode_only_decodes_what_it_was_given_and_starts_nothing():
  scheduler = make_scheduler("decode_only", budget=4)
  scheduler.adopt(prefilled(0, max_tokens=3), scheduler.reserve(5))
  scheduler.adopt(prefilled(1, max_tokens=2), scheduler.reserve(4))
  steps = timeline(scheduler, {0: [(2, 2, 2)]})
  assert steps == [([], [(0, 3), (1, 3)]), ([], [(0, 4)])]
  assert list(scheduler.waiting) == [2]


def test_faster_transformer_admits_nobody_to_a_batch_that_has_started():
  """Not to a row that frees. Until then a batch may take two steps to fill."""
  scheduler = make_scheduler("faster_transformer", budget=6, num_rows=3)
  for i in range(4):
    scheduler.add(make_sequence(i, 3, 2 + i % 2))
  steps = []
  for now_s in range(8):
    if now_s == 1:
      scheduler.add(make_sequence(9, 1, 1, arrival_s=0.5))
    if (plan := scheduler.next_step(float(now_s))) is not None:
      steps.append(contents(plan))
      finish(scheduler, plan)
  assert steps == [
    ([(0, 0, 3), (1, 0, 3)], []),
    ([(2, 0, 3)], []),  # the third row; request 9 came too late for this batch in any case
    ([], [(0, 3), (1, 3), (2, 3)]),
    ([], [(1, 4)]),  # two rows are free
    ([(3, 0, 3), (9, 0, 1)], []),
    ([], [(3, 3)]),
    ([], [(3, 4)]),
  ]


def test_faster_transformer_is_joined_by_nobody_who_comes_while_its_batch_fills():
  scheduler = make_scheduler("faster_transformer", budget=6)
  scheduler.add(make_sequence(0, 3, 2))
  first = scheduler.next_step(1.0)
  finish(scheduler, first)
  scheduler.add(make_sequence(1, 3, 1, arrival_s=1.5))
  assert contents(scheduler.next_step(2.0)) == ([], [(0, 3)])


def test_simple_chunking_takes_turns_and_a_turn_without_work_is_the_others():
  scheduler = make_scheduler("simple_chunking", budget=4)
  steps = timeline(scheduler, {0: [(0, 3, 5)], 2: [(1, 6, 2), (2, 3, 1)]})
  assert steps == [
    ([(0, 0, 3)], []),
    ([], [(0, 3)]),
    ([(1, 0, 4)], []),
    ([], [(0, 4)]),
    ([(1, 4, 2)], []),  # in progress: 2 of the budget are left, and request 2 is new
    ([], [(0, 5), (1, 6)]),
    ([(2, 0, 3)], []),
    ([], [(0, 6)]),
  ]


def test_hybrid_only_puts_whole_prompts_beside_decodes():
  scheduler = make_scheduler("hybrid_only", budget=8)
  steps = timeline(scheduler, {0: [(0, 3, 4)], 1: [(1, 6, 2), (2, 5, 1)]})
  assert steps == [
    ([(0, 0, 3)], []),
    ([(1, 0, 6)], [(0, 3)]),
    ([(2, 0, 5)], [(0, 4), (1, 6)]),
    ([], [(0, 5)]),
  ]
  steps = timeline(make_scheduler("hybrid_only", budget=8), {0: [(0, 3, 3)], 1: [(1, 8, 1)]})
  assert steps == [
    ([(0, 0, 3)], []),
    ([], [(0, 3)]),  # the decode comes first, and 7 tokens are left
    ([], [(0, 4)]),
    ([(1, 0, 8)], []),
  ]


def test_fcfs_gives_an_earlier_prompt_the_budget_of_later_decodes():
  scheduler = make_scheduler("fcfs", budget=4)
  scheduler.add(make_sequence(0, 9, 1))
  finish(scheduler, scheduler.next_step())
  scheduler.adopt(prefilled(1), scheduler.reserve(8))
  steps = timeline(scheduler, {})
  assert steps == [
    ([(0, 4, 4)], []),  # request 1 stalls
    ([(0, 8, 1)], [(1, 3)]),
    ([], [(1, 4)]),
    ([], [(1, 5)]),
  ]


# Options of Sarathi-Serve -------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("num_decodes", "chunk"),
  [
    (0, 8),  # 8 of a budget of 11
    (3, 5),
    (7, 1),
    (8, 3),  # the decodes fill a tile: all that is left
    (10, 1),
    (11, 0),
  ],
)
def test_a_tile_aligned_budget_counts_decodes(num_decodes, chunk):
  scheduler = make_scheduler("sarathi", budget=11, num_rows=11, options={"tile_tokens": 4})
  for i in range(num_decodes):
    scheduler.adopt(prefilled(i), scheduler.reserve(4))
  scheduler.add(make_sequence(99, 20, 2))
  plan = scheduler.next_step()
  assert len(plan.decodes) == num_decodes
  assert plan.num_prefill_tokens == chunk


def test_a_tile_above_the_budget_changes_nothing():
  scheduler = make_scheduler("sarathi", budget=11, options={"tile_tokens": 16})
  scheduler.add(make_sequence(0, 20, 2))
  assert scheduler.next_step().num_prefill_tokens == 11


def test_dynamic_chunks_shrink_along_the_prompt_and_leave_the_rest_to_others():
  options = dict(first_chunk_tokens=8, last_chunk_tokens=2, stages=4, stage_tokens=6)
  scheduler = make_scheduler("sarathi", budget=9, options=options)
  steps = timeline(scheduler, {0: [(0, 27, 1)], 3: [(1, 4, 1)]})
  # Stages begin at 0, 6, 12 and 18, with chunks of 8, 6, 4 and 2.
  assert [prefills for prefills, _ in steps] == [
    [(0, 0, 8)],
    [(0, 8, 6)],
    [(0, 14, 4)],
    [(0, 18, 2), (1, 0, 4)],
    [(0, 20, 2)],
    [(0, 22, 2)],
    [(0, 24, 2)],
    [(0, 26, 1)],
  ]


# Names and options --------------------------------------------------------------------------------


def test_every_policy_is_a_file_of_its_name():
  """Or a policy is not in the table, and nobody can name it."""
  folder = pathlib.Path(pdjax.scheduling.policies.__file__).parent
  for name, spec in POLICIES.items():
    assert spec.policy.__module__ == f"pdjax.scheduling.policies.{name}"
    assert spec.policy.__name__.lower() == name.replace(
      "_", "" if spec.policy.__name__ != name else "_"
    )
  shared = {"__init__", "ranking"}
  assert {path.stem for path in folder.glob("*.py")} - shared == POLICIES.keys()


def test_what_a_policy_keeps_is_of_one_pool():
  one, other = (make_scheduler("simple_chunking", budget=4) for _ in range(2))
  for scheduler in (one, other):
    scheduler.adopt(prefilled(0), scheduler.reserve(8))
  one.add(make_sequence(1, 4, 2))
  assert one.next_step().kind == "prefill"  # so the next turn of this pool is a decode's
  other.add(make_sequence(1, 4, 2))
  assert other.next_step().kind == "prefill"


def test_options_reach_the_policy():
  policy = make_policy("shortest_prefill_first", {"ageing_tokens_per_s": 7})
  assert policy.ageing_tokens_per_s == 7.0 and isinstance(policy.ageing_tokens_per_s, float)
  assert make_policy("sarathi", {"tile_tokens": None}) == make_policy("sarathi")


@pytest.mark.parametrize(
  ("name", "options", "parts"),
  [
    ("saratih", {}, ["unknown policy 'saratih'", "did you mean sarathi", "decode_only"]),
    ("sarathi", {"tile": 4}, ["option of policy sarathi", "'tile'", "tile_tokens", "stages"]),
    ("sarathi", {"tile_tokens": "x"}, ["sarathi", "tile_tokens='x'", "int | None", "stages"]),
    ("sarathi", {"tile_tokens": True}, ["tile_tokens=True", "int | None"]),
    ("sarathi", {"tile_tokens": 2.5}, ["tile_tokens=2.5", "int | None"]),
    ("sarathi", {"stages": 0}, ["sarathi", "stages=0", "at least 1"]),
    (
      "sarathi",
      {"first_chunk_tokens": 8, "last_chunk_tokens": 9},
      ["first_chunk_tokens=8", "last_chunk_tokens=9"],
    ),
    ("orca", {"tile_tokens": 4}, ["policy orca has no options", "'tile_tokens'"]),
    ("simple_chunking", {"turn": 4}, ["policy simple_chunking has no options", "'turn'"]),
    ("deadline", {"_tokens": 4.0}, ["option of policy deadline", "'_tokens'", "ttft_s"]),
    ("deadline", {"safety": 0.0}, ["deadline", "safety=0.0", "positive"]),
    ("deadline", {"ttft_s": float("nan")}, ["deadline", "ttft_s=nan", "positive"]),
    ("shortest_prefill_first", {"ageing_tokens_per_s": 0}, ["ageing_tokens_per_s=0", "positive"]),
    ("prefill_first", {"max_padding_tokens": -1}, ["max_padding_tokens=-1", "at least 0"]),
  ],
)
def test_what_is_wrong_with_a_policy_is_one_message(name, options, parts):
  with pytest.raises(ValueError) as error:
    make_policy(name, options)
  message = str(error.value)
  assert "\n" not in message
  for part in parts:
    assert part in message


def prefilled(request_id, max_tokens=4):
  """A sequence of 3 prompt tokens with its first output token, as it comes out of a hand-off."""
  seq = make_sequence(request_id, 3, max_tokens)
  seq.output_ids.append(7)
  seq.num_computed_tokens = seq.num_scheduled_tokens = 3
  return seq
