"""Costs are exact counts: chunks add up to the whole, weights are read once."""

import dataclasses
import itertools
import operator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdjax.core.costs import (
  KINDS,
  StepCounts,
  cost_rates,
  count_plan,
  count_slices,
  step_costs,
  total_bytes,
  total_flops,
)
from pdjax.core.model_config import TINY, ModelConfig
from pdjax.core.plan import DecodeSlices, Slice, StepPlan
from pdjax.core.request import SamplingParams

pytestmark = pytest.mark.quick

PLAIN_MLP = dataclasses.replace(
  TINY, name="plain", num_kv_heads=8, gated_mlp=False, tie_embeddings=False
)
CONFIGS = (TINY, PLAIN_MLP)


def prefill(start: int, num_tokens: int, *, emits: bool = False) -> StepCounts:
  return count_slices(
    prefill_starts=[start], prefill_tokens=[num_tokens], num_emitted=1 if emits else 0
  )


def by_name(counts: StepCounts, config: ModelConfig = TINY, **bytes_per):
  return {op.name: op for op in step_costs(counts, config, **bytes_per)}


chunks = st.lists(st.integers(1, 300), min_size=1, max_size=8)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.name)
@given(sizes=chunks)
def test_chunks_of_a_prompt_cost_the_flops_of_the_whole(config, sizes):
  starts = [0, *itertools.accumulate(sizes)][:-1]
  parts = [
    by_name(prefill(start, size, emits=start + size == sum(sizes)), config)
    for start, size in zip(starts, sizes, strict=True)
  ]
  whole = by_name(prefill(0, sum(sizes), emits=True), config)
  for name, op in whole.items():
    assert op.flops == sum(part[name].flops for part in parts if name in part)


@given(sizes=chunks)
def test_chunks_read_the_weights_and_the_earlier_keys_again(sizes):
  starts = [0, *itertools.accumulate(sizes)][:-1]
  parts = [step_costs(prefill(s, n), TINY) for s, n in zip(starts, sizes, strict=True)]
  whole = step_costs(prefill(0, sum(sizes)), TINY)
  weights = 2 * TINY.num_layers * (TINY.attention_params + TINY.mlp_params)
  keys = TINY.kv_bytes_per_token() * sum(starts)
  assert sum(map(total_bytes, parts)) - total_bytes(whole) == (len(sizes) - 1) * weights + keys


@given(start=st.integers(0, 50), num_tokens=st.integers(1, 50))
def test_prefill_pairs_are_those_under_the_causal_mask(start, num_tokens):
  pairs = [(q, k) for q in range(start, start + num_tokens) for k in range(start + num_tokens)]
  causal = sum(k <= q for q, k in pairs)
  op = by_name(prefill(start, num_tokens))["attention_prefill"]
  assert op.flops == 4 * TINY.num_layers * TINY.num_heads * TINY.head_dim * causal


@given(positions=st.lists(st.integers(0, 1000), min_size=1, max_size=20))
def test_decode_reads_the_keys_and_values_of_every_position_so_far(positions):
  op = by_name(count_slices(decode_positions=positions, num_emitted=len(positions)))[
    "attention_decode"
  ]
  cached = sum(p + 1 for p in positions) * TINY.kv_bytes_per_token()
  q_bytes = 2 * TINY.num_layers * TINY.num_heads * TINY.head_dim * len(positions)
  assert op.read_bytes == cached + q_bytes
  assert op.written_bytes == q_bytes


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.name)
def test_a_decode_step_reads_each_weight_once(config):
  counts = count_slices(decode_positions=[10, 20, 30], num_emitted=3)
  # With activations and cache of no size only the weights are left.
  ops = step_costs(counts, config, bytes_per_kv=0, bytes_per_activation=0)
  lm_head = config.vocab_size * config.d_model
  layers = config.num_layers * (config.attention_params + config.mlp_params)
  assert total_bytes(ops) == 2 * (layers + lm_head)


def test_a_token_costs_two_flops_per_weight():
  tied = dataclasses.replace(TINY, tie_embeddings=True)  # an untied embedding is only looked up
  ops = step_costs(count_slices(decode_positions=[0], num_emitted=1), tied)
  assert total_flops(op for op in ops if op.kind == "linear") == 2 * tied.num_params


def test_a_mixed_step_reads_the_weights_once_where_two_steps_read_them_twice():
  counts = count_slices(
    prefill_starts=[64], prefill_tokens=[32], decode_positions=[9, 99], num_emitted=2
  )
  mixed = step_costs(counts, TINY)
  separate = [op for half in counts.split() for op in step_costs(half, TINY)]
  assert total_flops(mixed) == total_flops(separate)
  weights = 2 * TINY.num_layers * (TINY.attention_params + TINY.mlp_params)
  assert total_bytes(separate) - total_bytes(mixed) == weights


@pytest.mark.parametrize("num_emitted", [0, 1, 3])
def test_only_rows_that_emit_go_through_the_lm_head(num_emitted):
  counts = count_slices(prefill_starts=[0] * 3, prefill_tokens=[100] * 3, num_emitted=num_emitted)
  ops = by_name(counts)
  flops = ops["lm_head"].flops if "lm_head" in ops else 0
  assert flops == 2 * num_emitted * TINY.d_model * TINY.vocab_size


def test_a_plan_is_counted_as_its_columns_are():
  def slice_(row, start, num_tokens, emits_token):
    return Slice(
      request_id=row,
      generation=0,
      row=row,
      num_prompt_tokens=start + num_tokens,
      start=start,
      num_tokens=num_tokens,
      token_ids=None,
      emits_token=emits_token,
      sampling=SamplingParams(max_tokens=5),
    )

  plan = StepPlan(
    step_id=0,
    prefills=(slice_(0, 0, 7, False), slice_(1, 32, 5, True)),
    decodes=DecodeSlices(
      request_ids=(2, 3, 4), generations=(0, 0, 0), rows=(2, 3, 4), positions=(8, 20, 40)
    ),
  )
  counts = count_slices(
    prefill_starts=(0, 32), prefill_tokens=(7, 5), decode_positions=(8, 20, 40), num_emitted=4
  )
  assert count_plan(plan) == counts
  assert counts.num_tokens == plan.num_tokens == 15


def test_an_empty_step_costs_nothing():
  assert step_costs(count_slices(num_emitted=0), TINY) == ()


def test_every_operator_is_of_a_known_kind_and_moves_bytes():
  counts = count_slices(prefill_starts=[3], prefill_tokens=[4], decode_positions=[5], num_emitted=2)
  ops = step_costs(counts, TINY)
  assert {op.kind for op in ops} == set(KINDS)
  assert all(op.num_bytes > 0 and op.num_launches > 0 for op in ops)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.name)
@given(
  chunks=st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 3000)), max_size=4),
  positions=st.lists(st.integers(0, 9000), max_size=40),
  bytes_per=st.tuples(*[st.sampled_from([0, 0.5, 1, 2, 4])] * 3),
)
def test_rates_say_what_the_costs_of_any_step_are(config, chunks, positions, bytes_per):
  counts = count_slices(
    prefill_starts=[start for start, _ in chunks],
    prefill_tokens=[size for _, size in chunks],
    decode_positions=positions,
    num_emitted=len(chunks) + len(positions),
  )
  widths = dict(
    zip(("bytes_per_weight", "bytes_per_kv", "bytes_per_activation"), bytes_per, strict=True)
  )
  rates = cost_rates(config, **widths)
  for op in step_costs(counts, config, **widths):
    rate = rates[op.name]
    assert (rate.kind, rate.num_launches) == (op.kind, op.num_launches)
    assert sum(map(operator.mul, rate.flops, counts)) == op.flops
    moved = rate.fixed_bytes + sum(map(operator.mul, rate.num_bytes, counts))
    assert moved == pytest.approx(op.num_bytes, rel=1e-12)
