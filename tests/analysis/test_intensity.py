"""Arithmetic intensity, time and utilisation of steps."""

from __future__ import annotations

import pytest

from configs.hardware import HARDWARE
from configs.latency import distserve, roofline
from configs.models import MODELS
from pdjax.analysis.intensity import (
  crossing,
  flop_per_byte,
  matrix_flop_per_byte,
  profile_step,
  ridge,
  step_of,
)
from pdjax.core.costs import KINDS

pytestmark = pytest.mark.quick

A100, H100 = HARDWARE["a100"], HARDWARE["h100"]
LLAMA = MODELS["llama3-8b"]
STEPS = {
  "prefill": step_of(chunk_tokens=2048),
  "chunk": step_of(chunk_tokens=512, before=1536),
  "decode": step_of(rows=32, context=1024),
  "mixed": step_of(chunk_tokens=512, before=512, rows=31, context=1024),
}


def _latency(model=LLAMA, device=A100, tp=1):
  return roofline(model, device, tp, 1, device.link)


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("tp", [1, 4])
def test_operators_take_what_the_latency_model_says_of_their_kind(kind, tp):
  latency = _latency(tp=tp)
  profile = profile_step(STEPS[kind], latency, LLAMA, A100, tp=tp)
  terms = latency.terms_of(STEPS[kind])
  for name in KINDS:
    own = sum(op.time_s for op in profile.ops if op.kind == name)
    assert own == pytest.approx(getattr(terms, f"{name}_s"))
  assert profile.step_s == terms.total_s
  assert (terms.all_reduce_s > 0) == (tp > 1)


def test_a_step_does_two_operations_for_each_weight_and_token():
  profile = profile_step(STEPS["prefill"], _latency(), LLAMA, A100)
  linear = sum(op.flops for op in profile.ops if op.kind == "linear")
  embedding = LLAMA.vocab_size * LLAMA.d_model
  body = LLAMA.num_params - 2 * embedding
  assert linear == 2 * (2048 * body + embedding)  # one row goes through the output matrix


def test_devices_share_the_flops_of_a_step():
  alone = profile_step(STEPS["mixed"], _latency(), LLAMA, A100)
  shared = profile_step(STEPS["mixed"], _latency(tp=4), LLAMA, A100, tp=4)
  linear, quarter = (sum(op.flops for op in p.ops if op.kind == "linear") for p in (alone, shared))
  assert linear == 4 * quarter


@pytest.mark.parametrize("kind", STEPS)
def test_nothing_runs_above_the_peaks(kind):
  profile = profile_step(STEPS[kind], _latency(), LLAMA, A100)
  assert 0 < profile.mfu < 1 and 0 < profile.mbu < 1
  # the same step by its intensity: how far arithmetic is used depends on memory by it alone
  share = profile.flop_per_byte / A100.ridge_flop_per_byte
  assert profile.mfu / profile.mbu == pytest.approx(share)


def test_a_matrix_tends_to_its_rows_and_to_half_its_width():
  assert matrix_flop_per_byte(1, 4096, 4096) == pytest.approx(1, rel=1e-3)
  assert matrix_flop_per_byte(1e9, 4096, 4096) == pytest.approx(2048, rel=1e-3)
  assert matrix_flop_per_byte(1, 4096, 4096, bytes_per_value=1) == pytest.approx(2, rel=1e-3)


def test_prefill_is_above_the_ridge_and_decode_below():
  limit = A100.ridge_flop_per_byte
  assert flop_per_byte(STEPS["prefill"], LLAMA) > limit > flop_per_byte(STEPS["decode"], LLAMA)
  linear = flop_per_byte(STEPS["decode"], LLAMA, kinds=("linear",))
  assert flop_per_byte(STEPS["decode"], LLAMA) < linear  # keys are read by one row each


def test_batching_does_not_help_attention_of_decodes():
  few, many = (
    flop_per_byte(step_of(rows=n, context=4096), LLAMA, kinds=("attention_decode",))
    for n in (1, 128)
  )
  assert few == pytest.approx(many)
  group = LLAMA.num_heads / LLAMA.num_kv_heads
  assert few == pytest.approx(group, rel=0.01)  # a multiply and an add for each two bytes read


def test_the_achieved_ridge_is_that_of_the_rates_reached():
  for device in (A100, H100):
    found = ridge(_latency(device=device), LLAMA, device)
    assert found.peak == device.ridge_flop_per_byte
    assert found.achieved == pytest.approx(found.flops_per_s / found.bytes_per_s)
    assert found.flops_per_s < device.peak_flops_per_s
    assert found.bytes_per_s < device.peak_bytes_per_s


def test_a_crossing_is_the_first_that_reaches_the_limit():
  assert crossing(lambda n: n / 10, 1.0, 100) == 10
  assert crossing(lambda n: n / 10, 1.01, 100) == 11
  assert crossing(lambda n: n / 10, 10.1, 100) is None
  assert crossing(lambda n: n, 0.5, 100) == 1


def test_a_linear_model_gives_no_time_to_kinds_that_it_does_not_know():
  opt = MODELS["opt-13b"]
  latency = distserve(opt, A100, 1, 1, A100.link)
  profile = profile_step(STEPS["decode"], latency, opt, A100)
  times = {op.kind: op.time_s for op in profile.ops}
  assert times["elementwise"] == 0 < times["attention_decode"]
  assert sum(op.time_s for op in profile.ops) + profile.terms.host_s == pytest.approx(
    profile.step_s
  )


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    ({}, "a step needs a chunk or decodes"),
    ({"chunk_tokens": -1}, "chunk_tokens=-1"),
    ({"rows": 4}, "context=0 must be at least 1"),
    ({"rows": -4, "context": 8}, "rows=-4"),
  ],
)
def test_wrong_steps_are_named(changes, words):
  with pytest.raises(ValueError, match=words):
    step_of(**changes)


def test_a_step_without_an_operator_has_no_intensity_of_it():
  with pytest.raises(ValueError, match="no operators of the kinds"):
    flop_per_byte(STEPS["decode"], LLAMA, kinds=("attention_prefill",))
