from __future__ import annotations

import json

import pytest

from pdjax.core.events import Arrived, EventLog
from pdjax.metrics.goodput import (
  Slo,
  achieved_rate_rps,
  attainment,
  attainment_tpot,
  attainment_ttft,
  output_tokens_per_s,
  summary,
)
from pdjax.metrics.latency import request_records

pytestmark = pytest.mark.quick

GENEROUS = Slo(ttft_s=1000.0, tpot_s=1000.0)


def test_failed_and_unfinished_requests_are_misses(mixed_log):
  # Requests 0, 1, 2 finish; 3 and 5 fail; 4 is unfinished. No SLO makes up for that.
  records = request_records(mixed_log)
  assert attainment(records, GENEROUS) == 3 / 6
  assert attainment_ttft(records, GENEROUS) == 3 / 6
  assert attainment_tpot(records, GENEROUS) == 3 / 6


def test_both_targets_must_be_met(mixed_log):
  # (ttft, tpot): request 0 (1.5, 2), 1 (4, none), 2 (1.25, 6).
  records = request_records(mixed_log)
  slo = Slo(ttft_s=1.5, tpot_s=2.0)  # a target met exactly is met
  assert attainment_ttft(records, slo) == 2 / 6
  assert attainment_tpot(records, slo) == 2 / 6
  assert attainment(records, slo) == 1 / 6


def test_one_token_is_judged_on_ttft_alone(mixed_log):
  records = {1: request_records(mixed_log)[1]}
  assert attainment(records, Slo(ttft_s=4.0, tpot_s=1e-9)) == 1.0
  assert attainment(records, Slo(ttft_s=3.9, tpot_s=1000.0)) == 0.0


@pytest.mark.parametrize(("ttft_s", "tpot_s"), [(0.0, 1.0), (1.0, -1.0), (float("nan"), 1.0)])
def test_an_slo_is_positive(ttft_s, tpot_s):
  with pytest.raises(ValueError, match=f"ttft_s={ttft_s}"):
    Slo(ttft_s=ttft_s, tpot_s=tpot_s)


def test_rates_count_gaps_and_output(handoff_log):
  records = request_records(handoff_log)
  assert achieved_rate_rps(handoff_log) == 2.0  # two gaps in one second
  assert output_tokens_per_s(records) == 6 / 5  # 3 + 2 + 1 tokens, 0 to 5 s


def test_tokens_of_failed_requests_are_no_output(mixed_log):
  # 3 + 1 + 2 tokens of the finished, 0.5 to 8 s; the token of request 5 does not count.
  assert output_tokens_per_s(request_records(mixed_log)) == 6 / 7.5


def test_an_empty_log_gives_none_and_not_zero():
  records = request_records(EventLog())
  for share in (attainment, attainment_ttft, attainment_tpot):
    assert share(records, GENEROUS) is None
  assert achieved_rate_rps(EventLog()) is None
  assert output_tokens_per_s(records) is None
  data = summary(records, EventLog(), slo=GENEROUS)
  assert data["num_requests"] == data["num_failed"] == data["handoff_bytes"] == 0
  assert data["ttft_s"] == {"p50": None, "p90": None, "p99": None, "n": 0}
  assert data["phases"] is data["attainment"] is data["output_tokens_per_s"] is None


def test_one_arrival_has_no_rate(handoff_log):
  first = next(e for e in handoff_log if isinstance(e, Arrived))
  assert achieved_rate_rps([first]) is None


def test_the_achieved_rate_is_that_of_the_loop_not_of_the_draw():
  """Due every second, taken in every two: a loop that lags shows."""
  log = [
    Arrived(
      time_s=float(i), request_id=i, pool="m", num_prompt_tokens=1, max_tokens=1, seen_s=2.0 * i
    )
    for i in range(5)
  ]
  assert achieved_rate_rps(log) == 0.5


def test_summary_is_json_with_the_agreed_keys(handoff_log):
  records = request_records(handoff_log)
  data = summary(records, handoff_log, slo=Slo(ttft_s=2.0, tpot_s=2.0))
  assert json.loads(json.dumps(data)) == data
  assert set(data) == {
    "ttft_s",
    "tpot_s",
    "itl_s",
    "output_tokens_per_s",
    "num_requests",
    "num_failed",
    "num_preemptions",
    "prefix_hit_share",
    "handoff_bytes",
    "handoff_bytes_ahead",
    "copy_s",
    "prefill_s",
    "phases",
    "attainment",
  }
  assert data["attainment"] == 1 / 3  # TTFTs 2, 2.5, 2.5
  assert data["ttft_s"]["p50"] == 2.5
  assert data["ttft_s"]["n"] == 3
  assert data["itl_s"]["max"] == 2.0
  assert data["itl_s"]["n"] == 3  # 2 + 1 + 0 gaps
  assert data["tpot_s"]["n"] == 2
  assert data["handoff_bytes"] == 2048
  assert data["copy_s"] == 0.75 + 1.0
  assert data["prefill_s"] == 1.0 + 1.0 + 0.5
  assert set(data["phases"]) == {"queue_s", "prefill_s", "handoff_wait_s", "copy_s", "decode_s"}
  assert "attainment" not in summary(records, handoff_log)
