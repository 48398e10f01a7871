"""An engine that pads its steps, as the simulator has it."""

from __future__ import annotations

import numpy as np
import pytest

from configs.hardware import HARDWARE
from configs.models import MODELS
from pdjax.core.costs import StepCounts, count_slices, later
from pdjax.sim.padded import Padded, Padding
from pdjax.sim.roofline import Roofline

pytestmark = pytest.mark.quick

PADDING = Padding(prefill=(64, 128), mixed=(48, 96), rows=(1, 4, 8))
LATENCY = Roofline(model=MODELS["llama3-8b"], device=HARDWARE["a100"])
PADDED = Padded(latency=LATENCY, padding=PADDING)


def prompt(num_tokens: int) -> StepCounts:
  return count_slices(prefill_starts=(0,), prefill_tokens=(num_tokens,), num_emitted=1)


def decodes(num_rows: int, context: int = 100) -> StepCounts:
  return count_slices(decode_positions=(context - 1,) * num_rows, num_emitted=num_rows)


def mixed(num_tokens: int, num_rows: int) -> StepCounts:
  return StepCounts(*map(sum, zip(prompt(num_tokens), decodes(num_rows))))


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


def test_steps_of_one_size_take_the_same_but_for_their_context():
  assert PADDED.terms_of(decodes(2)).linear_s == PADDED.terms_of(decodes(4)).linear_s
  assert PADDED.terms_of(decodes(3, 500)).total_s > PADDED.terms_of(decodes(3, 400)).total_s
  assert Padded(latency=LATENCY, padding=Padding()).terms_of(decodes(3)) == LATENCY.terms_of(
    decodes(3)
  )


def test_many_steps_at_once_are_those_one_at_a_time():
  counts = decodes(3, 700)
  alone = [PADDED.terms_of(later(counts, step)).total_s for step in range(20)]
  np.testing.assert_allclose(PADDED.decode_steps_s(counts, 20), alone, rtol=1e-12)
