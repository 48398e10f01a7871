"""An engine that pads its steps, as the simulator has it."""

from __future__ import annotations

import numpy as np
import pytest

from pdjax.core.costs import StepCounts, count_slices, later
from pdjax.sim.padded import PaddedSteps, Padding

pytestmark = pytest.mark.quick

PADDING = Padding(prefill=(64, 128), mixed=(48, 96), rows=(1, 4, 8))


def prompt(num_tokens: int) -> StepCounts:
  return count_slices(prefill_starts=(0,), prefill_tokens=(num_tokens,), num_emitted=1)


def decodes(num_rows: int, context: int = 100) -> StepCounts:
  return count_slices(decode_positions=(context - 1,) * num_rows, num_emitted=num_rows)


def mixed_at(num_tokens: int, num_rows: int, context: int) -> StepCounts:
  return StepCounts(*map(sum, zip(prompt(num_tokens), decodes(num_rows, context))))


def mixed(num_tokens: int, num_rows: int) -> StepCounts:
  return mixed_at(num_tokens, num_rows, 100)


@pytest.mark.parametrize(
  ("counts", "num_tokens"),
  [(prompt(1), 64), (prompt(64), 64), (prompt(65), 128), (prompt(200), 200), (decodes(1), 1),
   (decodes(2), 4), (decodes(8), 8), (mixed(40, 8), 48), (mixed(41, 8), 96)],
)  # fmt: skip
def test_a_step_grows_to_the_next_size_of_its_kind_and_attends_to_no_more(counts, num_tokens):
  padded = PADDING(counts)
  assert padded.num_tokens == num_tokens
  for name in ("num_prefill_pairs", "num_prefill_keys", "num_decode_keys"):
    assert getattr(padded, name) == getattr(counts, name)
  assert bool(padded.num_decodes) == bool(counts.num_decodes)


def prompts(*num_tokens: int) -> StepCounts:
  return count_slices(
    prefill_starts=(0,) * len(num_tokens), prefill_tokens=num_tokens, num_emitted=len(num_tokens)
  )


STEPS = [
  *(prompts(*each) for each in ((64,), (30, 30), (16, 16, 16), (128,), (64, 60), (40, 40, 40))),
  *(decodes(rows, context) for rows in (1, 2, 4, 5, 8) for context in (10, 300, 900)),
  *(mixed(n, rows) for n, rows in ((20, 2), (44, 2), (40, 8), (60, 2), (80, 3), (80, 8))),
  *(mixed_at(n, 8, 500) for n in (30, 80)),
]


def true_s(counts: StepCounts) -> float:
  """Of an engine whose steps take what their size says, and something for what they attend to."""
  attention_s = 1e-6 * counts.num_prefill_pairs + 3e-6 * counts.num_decode_keys
  slices_s = 5e-3 * counts.num_prefills + 7e-4 * counts.num_decodes
  return 1e-3 * PADDING(counts).num_tokens + slices_s + attention_s


@pytest.fixture
def steps() -> PaddedSteps:
  return PaddedSteps.of(PADDING, [(counts, true_s(counts)) for counts in STEPS])


@pytest.mark.parametrize(
  "counts", [prompt(50), prompts(30, 20, 40), decodes(2, 700), mixed(30, 3), mixed(70, 6)]
)
def test_steps_that_were_not_timed_follow_from_those_of_their_size(steps, counts):
  assert steps.terms_of(counts).total_s == pytest.approx(true_s(counts), rel=1e-6)


def test_of_steps_that_differ_in_nothing_the_time_lies_between():
  steps = PaddedSteps.of(PADDING, [(decodes(1), 1.0), (decodes(1), 1.2), (decodes(8), 7.0)])
  assert 1.0 < steps.terms_of(decodes(1)).total_s < 1.2
  assert steps.terms_of(decodes(8)).total_s == pytest.approx(7.0)


def test_no_step_is_the_faster_for_more_to_attend_to():
  rng = np.random.default_rng(0)
  for _ in range(100):
    noise = [(counts, 1e-3 * rng.random()) for counts in STEPS]
    steps = PaddedSteps.of(PADDING, noise)
    assert steps.terms_of(decodes(8, 900)).total_s >= steps.terms_of(decodes(8, 100)).total_s


def test_many_steps_at_once_are_those_one_at_a_time(steps):
  counts = decodes(3, 700)
  alone = [steps.terms_of(later(counts, step)).total_s for step in range(20)]
  np.testing.assert_allclose(steps.decode_steps_s(counts, 20), alone, rtol=1e-12)


def test_shares_of_other_steps_lie_in_between(steps):
  two, four = (
    PaddedSteps.of(PADDING, [(counts, times * true_s(counts)) for counts in STEPS])
    for times in (2, 4)
  )
  for a, b in ((0.0, 0.0), (0.25, 0.5), (0.0, 1.0)):
    own = steps.blend([(two, a), (four, b)])
    for counts in STEPS:
      expected_s = (1 + a + 3 * b) * true_s(counts)
      assert own.terms_of(counts).total_s == pytest.approx(expected_s, rel=1e-6)


def test_what_nobody_timed_is_not_guessed(steps):
  with pytest.raises(KeyError):
    steps.terms_of(prompt(129))
  with pytest.raises(ValueError, match="pipeline"):
    steps.hand_over_s(10)
