"""What is said before anything is simulated."""

from __future__ import annotations

import pytest

from pdjax.analysis.rules import rules

pytestmark = pytest.mark.quick


def _rules(lengths, *, prefill_token_s=1e-4, step_s=0.02, copy_token_s=1e-6, tpot_slo_s=0.1):
  found = rules(
    lengths,
    prefill_s=lambda tokens: tokens * prefill_token_s,
    decode_step_s=step_s,
    copy_s=lambda tokens: tokens * copy_token_s,
    tpot_slo_s=tpot_slo_s,
  )
  return {rule.name: rule for rule in found}


def test_long_prompts_on_a_fast_link_speak_for_separate_pools():
  found = _rules([(4096, 100)] * 10)
  assert all(rule.speaks_for_separation for rule in found.values())


def test_a_copy_that_is_slower_than_its_prefill_cannot_hide():
  assert _rules([(1000, 10)], copy_token_s=0.9e-4)["transfer"].speaks_for_separation
  found = _rules([(1000, 10)], copy_token_s=1.1e-4)["transfer"]
  assert not found.speaks_for_separation and "cannot hide" in found.says


@pytest.mark.parametrize(("num_short", "speaks"), [(5, True), (6, False)])
def test_prompts_are_short_where_more_than_half_are(num_short, speaks):
  lengths = [(511, 1)] * num_short + [(512, 1)] * (10 - num_short)
  assert _rules(lengths)["length"].speaks_for_separation is speaks


def test_short_prompts_of_a_small_model_on_a_slow_link_speak_against_separate_pools():
  found = _rules([(200, 100)] * 10, prefill_token_s=1e-5, step_s=5e-3, copy_token_s=5e-5)
  assert not any(rule.speaks_for_separation for rule in found.values())
  assert "200 tokens" in found["transfer"].says


def test_rules_may_disagree():
  found = _rules([(400, 100)] * 10, prefill_token_s=1e-3, step_s=0.02, tpot_slo_s=0.05)
  assert not found["length"].speaks_for_separation and found["target"].speaks_for_separation
