from __future__ import annotations

import dataclasses

import pytest

from pdjax.core.events import Arrived, EventLog
from pdjax.core.model_config import ModelConfig
from pdjax.metrics.utilisation import overlaps, pool_usage, prefix_hits, span_s, step_work

pytestmark = pytest.mark.quick

SMALL = ModelConfig(
  name="tiny",
  num_layers=2,
  d_model=8,
  num_heads=2,
  num_kv_heads=1,
  head_dim=4,
  d_ff=16,
  vocab_size=32,
  max_len=128,
)


def test_busy_share_is_time_in_steps_over_time_of_the_run(handoff_log, mixed_log):
  usage = pool_usage(handoff_log)
  assert span_s(handoff_log) == 5.0
  assert list(usage) == ["p", "d"]
  assert usage["p"].busy_share == 2.5 / 5
  assert usage["d"].busy_share == 1.75 / 5
  assert pool_usage(mixed_log)["m"].busy_share == 6 / 7.5  # idle 0.5 to 1 and 6 to 7


def test_tokens_are_counted_by_kind_of_step(mixed_log):
  kinds = pool_usage(mixed_log)["m"].by_kind
  assert set(kinds) == {"prefill", "decode", "mixed"}
  assert kinds["prefill"].num_steps == 3
  assert kinds["prefill"].tokens_per_step == (12 + 32 + 5) / 3
  assert (kinds["mixed"].num_prefill_tokens, kinds["mixed"].num_decode_tokens) == (32, 1)
  assert kinds["decode"].num_tokens == 1


def test_kinds_sum_to_the_total(mixed_log):
  usage = pool_usage(mixed_log, SMALL)["m"]
  for field in ("num_steps", "busy_s", "num_tokens", "flops", "num_bytes"):
    whole = getattr(usage.total, field)
    assert whole == sum(getattr(work, field) for work in usage.by_kind.values()) > 0


def test_without_a_model_there_are_no_flops(mixed_log):
  total = pool_usage(mixed_log)["m"].total
  assert total.flops is total.num_bytes is total.flop_per_byte is None
  assert total.flops_per_s is total.bytes_per_s is None


def test_flops_of_a_decode_are_two_per_weight_and_four_per_cached_value(make_step):
  work = step_work(make_step("m", 0, 0.0, 0.5, decode=((0, 9),), emits=(0,)), SMALL)
  matmul = 2 * (SMALL.num_layers * (SMALL.attention_params + SMALL.mlp_params) + 32 * 8)
  attention = 4 * SMALL.num_layers * 10 * 8  # 10 tokens in the cache, 2 heads of 4
  assert matmul + attention <= work.flops < 1.5 * (matmul + attention)  # then the elementwise part
  assert work.flops_per_s == work.flops / 0.5
  weights = 2 * matmul / 2
  assert work.num_bytes > weights
  half = step_work(make_step("m", 0, 0.0, 0.5, decode=((0, 9),)), SMALL, bytes_per_value=1)
  assert half.num_bytes == work.num_bytes / 2


def test_only_the_chunk_that_ends_a_prompt_goes_through_the_lm_head(make_step):
  chunk = step_work(make_step("m", 0, 0.0, 1.0, prefill=((0, 0, 4),)), SMALL)
  whole = step_work(make_step("m", 0, 0.0, 1.0, prefill=((0, 0, 4),), emits=(0,)), SMALL)
  assert whole.flops - chunk.flops == 2 * SMALL.d_model * SMALL.vocab_size


def test_prefill_does_more_flops_per_byte_than_decode(make_step):
  wide = dataclasses.replace(SMALL, d_model=512, num_heads=8, head_dim=64, d_ff=2048)
  prefill = step_work(make_step("m", 0, 0.0, 1.0, prefill=((0, 0, 64),), emits=(0,)), wide)
  decode = step_work(make_step("m", 1, 0.0, 1.0, decode=((0, 64),), emits=(0,)), wide)
  assert prefill.flop_per_byte > 10 * decode.flop_per_byte


def test_overlap_is_the_share_of_a_pools_steps_beside_those_of_others_by_their_kind(make_step):
  decode, prefill = {"decode": ((0, 9),)}, {"prefill": ((1, 0, 4),)}
  log = EventLog()
  for pool, step_id, start_s, end_s, what in (
    ("a", 0, 0.0, 4.0, decode),
    ("b", 1, 1.0, 2.0, prefill),
    ("c", 2, 1.5, 3.0, decode),
    ("a", 3, 5.0, 6.0, decode),
    ("b", 4, 6.0, 7.0, decode),  # just behind: not beside
    ("d", 5, 9.0, 10.0, prefill),
  ):
    log.append(make_step(pool, step_id, start_s, end_s, **what))
  assert overlaps(log) == {
    # 1 to 1.5 beside b, to 2 beside both, to 3 beside c
    "a": {"prefill": pytest.approx(0.75 / 5), "decode": pytest.approx(1.25 / 5)},
    "b": {"decode": 1 / 2},
    "c": {"decode": pytest.approx((0.25 + 1) / 1.5), "prefill": pytest.approx(0.25 / 1.5)},
    "d": {},
  }
  assert overlaps(EventLog()) == {}


def test_an_empty_log_has_no_pools():
  assert span_s(EventLog()) == 0.0
  assert pool_usage(EventLog(), SMALL) == {}


def test_prefix_hits_are_where_first_slices_start_against_all_prompt_tokens(make_step):
  """Request 0 begins at 8 of 20, request 1 at 0 of 10; what 0 finds again later is its own."""
  arrived = [
    Arrived(time_s=0.0, request_id=i, pool="m", num_prompt_tokens=n, max_tokens=2)
    for i, n in ((0, 20), (1, 10), (2, 99))
  ]
  steps = [
    make_step("m", 0, 0.0, 1.0, prefill=((0, 8, 6), (1, 0, 10)), emits=(1,)),
    make_step("m", 1, 1.0, 2.0, prefill=((0, 14, 6),), emits=(0,)),
    make_step("m", 2, 2.0, 3.0, prefill=((0, 16, 5),), emits=(0,)),  # after a preemption
  ]
  assert prefix_hits(EventLog([*arrived, *steps])) == (8, 30)
  assert prefix_hits(EventLog(arrived)) == (0, 0)
