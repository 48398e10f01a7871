"""Targets judge a run by what its records say."""

from __future__ import annotations

import pytest

from pdjax.analysis.targets import Attainment, Stalls, outcome_of
from pdjax.core.request import Slo
from pdjax.metrics.latency import RequestRecord

pytestmark = pytest.mark.quick
SLO = Slo(ttft_s=1.0, tpot_s=0.1)


def record(request_id: int, ttft_s: float, tpot_s: float, *, queue_s: float = 0.0, failed=False):
  """Three tokens after its arrival at 10 s."""
  token_s = tuple(10.0 + ttft_s + i * tpot_s for i in range(3))
  ends = dict(failed_s=token_s[-1]) if failed else dict(finish_s=token_s[-1])
  return RequestRecord(
    request_id=request_id,
    arrival_s=10.0,
    num_prompt_tokens=5,
    max_tokens=3,
    first_scheduled_s=10.0 + queue_s,
    token_s=token_s,
    token_ids=(0, 0, 0),
    **ends,
  )


def outcome(*records: RequestRecord):
  return outcome_of({r.request_id: r for r in records}, SLO, 2.0)


FAST, LATE, SLOW = (0.5, 0.05), (3.0, 0.05), (0.5, 0.5)


def test_a_share_may_meet_each_slo_while_few_meet_both():
  """DistServe's text asks for both at once, its code for each alone."""
  found = outcome(*(record(i, *(LATE if i < 2 else SLOW if i < 4 else FAST)) for i in range(20)))
  assert (found.attainment, found.attainment_ttft, found.attainment_tpot) == (0.8, 0.9, 0.9)
  met = {part: Attainment(part=part).is_met(found) for part in ("joint", "separate", "ttft")}
  assert met == {"joint": False, "separate": True, "ttft": True}
  assert Attainment(share=0.8).is_met(found)


def test_a_failed_request_meets_nothing():
  found = outcome(record(0, *FAST), record(1, *FAST, failed=True))
  assert found.num_failed == 1
  assert not Attainment(share=0.9, part="separate").is_met(found)
  assert not Stalls(itl_s=10.0).is_met(found), "no gap is long, but an answer is missing"


def test_capacity_ends_with_long_gaps_or_long_queues():
  smooth = outcome(record(0, *FAST), record(1, *FAST))
  assert Stalls(itl_s=0.06).is_met(smooth) and not Stalls(itl_s=0.04).is_met(smooth)
  queued = outcome(record(0, 3.0, 0.05, queue_s=2.5), record(1, 3.0, 0.05, queue_s=2.5))
  assert not Stalls(itl_s=0.06).is_met(queued)
  assert Stalls(itl_s=0.06, queue_s=2.5).is_met(queued)


@pytest.mark.parametrize(
  ("make", "match"),
  [
    (lambda: Attainment(share=0.0), "share=0.0"),
    (lambda: Attainment(part="both"), "part='both'"),
    (lambda: Stalls(itl_s=0.0), "itl_s=0.0"),
  ],
)
def test_targets_refuse_what_nobody_can_reach(make, match):
  with pytest.raises(ValueError, match=match):
    make()
