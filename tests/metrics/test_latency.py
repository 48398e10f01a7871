from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdjax.core.clock import to_ticks
from pdjax.core.events import Copied, EventLog, Failed, Finished
from pdjax.metrics.latency import (
  Interference,
  RequestRecord,
  Summary,
  enough,
  format_ms,
  interference,
  itls_s,
  mean_phases,
  outcomes,
  percentile,
  percentiles,
  phases,
  request_records,
  tpots_s,
  ttfts_s,
)

pytestmark = pytest.mark.quick


def test_early_stop_counts_the_tokens_that_came(mixed_log):
  record = request_records(mixed_log)[0]
  assert record.max_tokens == 8
  assert record.token_s == (2.0, 3.0, 6.0)
  assert record.token_ids == (0, 1, 3)
  assert record.ttft_s == 1.5  # 2.0 - 0.5: from the arrival, half a second of queue included
  assert record.tpot_s == 2.0  # (6 - 2) / (3 - 1)
  assert record.e2e_s == 5.5
  assert record.finish_reason == "stop"
  assert record.outcome == "finished"


def test_the_first_gap_does_not_contain_ttft(mixed_log):
  record = request_records(mixed_log)[0]
  assert record.itl_s == (1.0, 3.0)
  assert len(record.itl_s) == len(record.token_s) - 1
  assert sum(record.itl_s) == record.token_s[-1] - record.token_s[0]


def test_one_token_has_no_tpot_and_no_gap(mixed_log):
  record = request_records(mixed_log)[1]
  assert record.token_s == (6.0,)  # two chunks, one token: only the last chunk emits
  assert record.ttft_s == 4.0
  assert record.tpot_s is None
  assert record.itl_s == ()


def test_tokens_before_and_after_a_preemption_count_once(mixed_log):
  record = request_records(mixed_log)[2]
  assert record.num_preemptions == 1
  assert record.token_s == (2.0, 8.0)
  assert record.itl_s == (6.0,)  # the gap includes the preemption
  assert record.first_scheduled_s == 1.0  # the first time, not the recomputation


def test_failed_and_unfinished_requests_keep_their_records(mixed_log):
  records = request_records(mixed_log)
  refused, unfinished, cancelled = records[3], records[4], records[5]
  assert (refused.outcome, refused.failed_reason) == ("failed", "prompt too long")
  assert (refused.arrival_s, refused.num_prompt_tokens, refused.pools) == (0.875, None, ())
  assert unfinished.outcome == "unfinished"
  assert unfinished.ttft_s is unfinished.tpot_s is unfinished.e2e_s is None
  assert unfinished.itl_s == ()
  assert (cancelled.outcome, cancelled.failed_s) == ("failed", 2.0)
  assert cancelled.ttft_s == 1.25
  assert cancelled.e2e_s is None
  assert outcomes(records) == {"finished": 3, "failed": 2, "unfinished": 1}
  assert all(phases(r) is None for r in (refused, unfinished, cancelled))


def test_tokens_of_one_step_share_its_end(mixed_log):
  records = request_records(mixed_log)
  assert records[0].token_s[-1] == records[1].token_s[0] == 6.0


def test_a_handed_off_request_has_five_phases(handoff_log):
  records = request_records(handoff_log)
  parts = phases(records[0])
  assert (parts.queue_s, parts.prefill_s) == (1.0, 1.0)
  assert (parts.handoff_wait_s, parts.copy_s, parts.decode_s) == (0.5, 0.75, 1.75)
  assert parts.total_s == records[0].e2e_s == 5.0
  assert records[0].pools == ("p", "d")
  assert records[0].copy_bytes == 1024
  assert records[0].itl_s == (2.0, 1.0)  # the gap to the second token includes wait and copy


def test_what_is_decoded_before_a_copy_is_no_wait_for_it(make_step, make_arrival):
  """In a pool that turned to prefill, or in a decode pool whose pages ran out."""
  copy = dict(request_id=7, target="d", num_tokens=4, num_bytes=8)
  log = [
    make_arrival(0.0, 7, 4, 5, pool="p"),
    make_step("p", 0, 1.0, 2.0, prefill=((7, 0, 4),), emits=(7,)),
    Copied(source="p", start_s=2.5, end_s=3.0, **copy),
    make_step("d", 0, 3.0, 6.0, decode=((7, 4),), emits=(7,)),
    make_step("p", 1, 7.0, 8.0, prefill=((7, 0, 5),), emits=(7,)),
    Copied(source="p", start_s=8.25, end_s=9.0, **copy),
    make_step("d", 1, 9.0, 10.0, decode=((7, 6),), emits=(7,)),
    Finished(time_s=10.0, request_id=7, pool="d", reason="length"),
  ]
  record = request_records(log)[7]
  parts = phases(record)
  assert (parts.handoff_wait_s, parts.copy_s, record.copy_bytes) == (0.25, 0.75, 16)
  assert parts.decode_s == (8.0 - 2.0) + (10.0 - 9.0)
  assert parts.total_s == record.e2e_s


def test_without_a_copy_the_handoff_phases_are_zero(handoff_log):
  record = request_records(handoff_log)[2]
  parts = phases(record)
  assert (parts.handoff_wait_s, parts.copy_s, parts.decode_s) == (0.0, 0.0, 0.0)
  assert (record.copy_bytes, record.copy_s, record.pools) == (None, None, ("p",))


def test_mean_phases_sum_to_the_mean_end_to_end_time(handoff_log):
  records = request_records(handoff_log)
  mean = mean_phases(records)
  assert mean.queue_s == pytest.approx((1.0 + 1.5 + 2.0) / 3, rel=1e-15)
  e2e_s = [r.e2e_s for r in records.values()]
  assert mean.total_s == pytest.approx(sum(e2e_s) / 3, rel=1e-15)


gaps_s = st.floats(0, 5e4, allow_nan=False, allow_infinity=False)


@given(st.lists(gaps_s, min_size=6, max_size=6), st.booleans())
def test_phases_sum_to_end_to_end_exactly(make_step, make_arrival, gaps, is_copied):
  stamps, now_s = [], 0.0
  for gap_s in gaps:
    now_s = to_ticks(now_s + gap_s)
    stamps.append(now_s)
  arrival_s, scheduled_s, first_s, copy_start_s, copy_end_s, end_s = stamps
  copy = Copied(
    request_id=7,
    source="p",
    target="d",
    start_s=copy_start_s,
    end_s=copy_end_s,
    num_tokens=4,
    num_bytes=1,
  )
  log = [
    make_arrival(arrival_s, 7, 4, 2, pool="p"),
    make_step("p", 0, scheduled_s, first_s, prefill=((7, 0, 4),), emits=(7,)),
    *([copy] if is_copied else []),
    make_step("d", 0, copy_end_s, end_s, decode=((7, 4),), emits=(7,)),
    Finished(time_s=end_s, request_id=7, pool="d", reason="length"),
  ]
  record = request_records(log)[7]
  parts = phases(record)
  assert parts.total_s == record.e2e_s  # ==, not approx
  assert min(parts.queue_s, parts.prefill_s, parts.handoff_wait_s, parts.copy_s) >= 0
  assert parts.decode_s >= 0


def test_an_event_of_an_unknown_request_is_an_error(make_step):
  with pytest.raises(ValueError, match="request 9 never arrived"):
    request_records([make_step("m", 0, 0.0, 1.0, decode=((9, 4),), emits=(9,))])


def test_finished_and_failed_exclude_each_other(mixed_log):
  late = Failed(time_s=9.0, request_id=0, pool="m", reason="cancelled")
  with pytest.raises(ValueError, match=r"request 0 finished at 6.0 s and failed at 9.0 s"):
    request_records([*mixed_log, late])


def test_finished_without_a_token_is_an_error():
  with pytest.raises(ValueError, match="request 1 finished at 2"):
    RequestRecord(request_id=1, arrival_s=0.0, num_prompt_tokens=1, max_tokens=1, finish_s=2.0)


def test_an_empty_log_gives_none_and_not_zero():
  records = request_records(EventLog())
  assert records == {}
  nothing = Summary(n=0, mean=None, p50=None, p90=None, p99=None, max=None)
  for values in (ttfts_s(records), tpots_s(records), itls_s(records)):
    assert percentiles(values) == nothing
  assert mean_phases(records) is None
  assert interference(EventLog()) is None


@given(st.lists(st.floats(0, 100), min_size=1, max_size=50))
def test_percentiles_interpolate_between_the_nearest_ranks(values):
  found = percentiles(values)
  assert found.n == len(values)
  assert found.max == max(values)
  ordered = sorted(values)
  for q, value in ((50, found.p50), (90, found.p90), (99, found.p99)):
    rank = q / 100 * (len(values) - 1)
    low, high = ordered[int(rank)], ordered[min(int(rank) + 1, len(values) - 1)]
    assert value == pytest.approx(low + (high - low) * (rank - int(rank)), rel=1e-9, abs=1e-9)
    assert value == percentile(values, q)


def test_samples_leave_out_what_has_no_value(mixed_log):
  records = request_records(mixed_log)
  assert sorted(ttfts_s(records)) == [1.25, 1.25, 1.5, 4.0]
  assert sorted(tpots_s(records)) == [2.0, 6.0]
  assert sorted(itls_s(records)) == [1.0, 3.0, 6.0]
  assert np.mean(itls_s(records)) == 10 / 3  # 3 gaps, not 6 tokens


@pytest.mark.parametrize(("q", "least"), [(50, 2), (90, 10), (99, 100), (99.9, 1000)])
def test_a_percentile_needs_one_value_beyond_it(q, least):
  assert enough(least, q)
  assert not enough(least - 1, q)


def test_a_percentile_of_too_few_is_flagged():
  assert format_ms(0.0123, n=40, q=99) == "12.3 ms (n=40!)"
  assert format_ms(0.0123, n=40, q=90) == "12.3 ms"
  assert format_ms(None, n=0, q=99) == "n/a"


def test_interference_is_the_longest_gap_that_overlaps_a_long_prompt(mixed_log):
  # The gap of request 2 (6 s) is longer than that of request 0 (3 s) and overlaps prompt 1 too.
  assert interference(mixed_log, long_tokens=64) == Interference(
    pool="m", request_id=2, gap_s=6.0, prompt_id=1, prompt_tokens=64
  )
  without_2 = [e for e in mixed_log if getattr(e, "time_s", 0) < 6.5 and _start_s(e) != 7.0]
  found = interference(without_2, long_tokens=64)
  assert (found.request_id, found.gap_s) == (0, 3.0)


def test_long_is_four_median_prompts_unless_given(mixed_log):
  # Prompts 4, 4, 4, 64, 4: long is 16 tokens or more.
  assert interference(mixed_log) == interference(mixed_log, long_tokens=16)
  assert interference(mixed_log, long_tokens=65) is None


def test_touching_a_long_prefill_is_no_overlap(make_step, make_arrival):
  # The only gap is 1 to 2 s: one long prefill ends when it begins, another begins when it ends.
  log = [
    make_arrival(0.0, 0, 4, 3),
    make_arrival(0.0, 1, 64, 1),
    make_arrival(0.0, 2, 64, 1),
    make_step("m", 0, 0.0, 1.0, prefill=((1, 0, 64), (0, 0, 4)), emits=(1, 0)),
    make_step("m", 1, 1.0, 2.0, decode=((0, 4),), emits=(0,)),
    make_step("m", 2, 2.0, 3.0, prefill=((2, 0, 64),), emits=(2,)),
  ]
  assert interference(log, long_tokens=64) is None


def test_a_long_prompt_on_another_pool_does_not_interfere(handoff_log):
  # Request 0 waits from 2 to 4 s for its second token while `p` prefills 80 tokens: not on `d`.
  assert interference(handoff_log, long_tokens=80) is None


def test_a_request_does_not_interfere_with_itself(make_step, make_arrival):
  log = [
    make_arrival(0.0, 0, 64, 3),
    make_step("m", 0, 0.0, 1.0, prefill=((0, 0, 64),), emits=(0,)),
    make_step("m", 1, 1.0, 9.0, prefill=((0, 0, 65),), emits=(0,)),  # recomputed
  ]
  assert interference(log, long_tokens=64) is None


def _start_s(event) -> float | None:
  return getattr(event, "start_s", None)
