"""A drift is a change of rate or mean lengths beyond the threshold, up or down, and no other."""

from __future__ import annotations

import pytest

from pdjax.analysis.replan import Drift, Seen, Window, drifts, first_drift, seen_in, windows
from pdjax.core.events import Arrived, EventLog, Failed, Finished, Step

pytestmark = pytest.mark.quick


def window(rate_rps: float, prompt: int, output: int, start_s: float = 0.0) -> Window:
  requests = tuple(
    Seen(start_s + i / rate_rps, prompt, output) for i in range(round(100 * rate_rps))
  )
  return Window(start_s=start_s, end_s=start_s + 100.0, requests=requests)


PLANNED = window(2.0, 400, 100)


@pytest.mark.parametrize(
  ("rate_rps", "prompt", "output", "expected"),
  [
    (2.0, 400, 100, set()),
    (2.5, 500, 80, set()),  # all by a quarter
    (2.7, 400, 100, {"rate_rps"}),
    (1.5, 400, 100, {"rate_rps"}),
    (2.0, 300, 131, {"mean_prompt_tokens", "mean_output_tokens"}),
  ],
)
def test_what_leaves_the_threshold_is_named(rate_rps, prompt, output, expected):
  found = drifts(PLANNED, window(rate_rps, prompt, output), 0.3)
  assert {drift.name for drift in found} == expected
  for drift in found:
    assert drift.before == getattr(PLANNED, drift.name)
    assert drift.after == pytest.approx(getattr(window(rate_rps, prompt, output), drift.name))


def test_a_drift_says_by_how_much():
  assert str(Drift(name="rate_rps", before=2.0, after=3.0)) == "rate_rps 2 -> 3 (+50%)"


def test_the_first_window_that_drifted_is_found():
  later = [window(2.1, 400, 100, 100.0), window(0.5, 400, 100, 200.0), window(4.0, 400, 100, 300.0)]
  assert first_drift(PLANNED, later, 0.3)[0] is later[1]
  assert first_drift(PLANNED, later[:1], 0.3) is None
  following = iter(later)
  first_drift(PLANNED, following, 0.3)
  assert list(following) == later[2:], "the next one is looked for behind it"


def test_of_too_few_requests_the_rate_counts_and_their_lengths_do_not():
  fallen = window(0.5, 4000, 100, 200.0)
  (found, what) = first_drift(PLANNED, [fallen], 0.3, least_requests=100)
  assert [drift.name for drift in what] == ["rate_rps"]
  assert (found.rate_rps, found.mean_prompt_tokens) == (0.5, 400)
  assert first_drift(PLANNED, [window(1.8, 4000, 100)], 0.3, least_requests=500) is None
  # Fifty against seventy is chance; against two hundred it is not.
  after = [window(rate_rps, 4000, 100) for rate_rps in (0.5, 0.7, 2.0)]
  assert first_drift(found, after[:2], 0.3, least_requests=100) is None
  assert first_drift(found, after, 0.3, least_requests=100)[0] is after[2]


def test_windows_hold_every_request_once_and_only_whole_ones_are_kept():
  requests = [Seen(0.5 * i, 10 + i, 5) for i in range(45)]  # until 22 s
  found = windows(requests, 5.0)
  assert [(w.start_s, w.end_s) for w in found] == [(0, 5), (5, 10), (10, 15), (15, 20)]
  assert [r for w in found for r in w.requests] == requests[:40]
  assert all(w.rate_rps == 2.0 for w in found)
  assert len(windows(requests, 100.0)) == 1, "the only window is kept"
  late = windows([Seen(r.arrival_s + 52.5, 10, 5) for r in requests], 5.0)
  assert [w.rate_rps for w in late] == [2.0] * 4, "a window began before anybody came"
  assert late[0].start_s == 52.5
  with pytest.raises(ValueError, match="width_s=0"):
    windows(requests, 0.0)


def test_a_log_says_what_a_trace_says():
  """Finished requests, with the tokens that they got."""
  log = EventLog()
  for i, arrival_s in enumerate((1.0, 0.25, 3.0)):
    log.append(
      Arrived(time_s=arrival_s, request_id=i, pool="m0", num_prompt_tokens=7 + i, max_tokens=9)
    )
  for step in range(2):
    log.append(
      Step(
        pool="m0",
        step_id=step,
        kind="prefill" if step == 0 else "decode",
        start_s=4.0 + step,
        end_s=5.0 + step,
        prefill_ids=(0, 1) if step == 0 else (),
        prefill_starts=(0, 0) if step == 0 else (),
        prefill_tokens=(7, 8) if step == 0 else (),
        decode_ids=() if step == 0 else (0,),
        decode_positions=() if step == 0 else (7,),
        emitted_ids=(0, 1) if step == 0 else (0,),
        token_ids=(0, 0) if step == 0 else (0,),
      )
    )
  log.append(Finished(time_s=5.0, request_id=1, pool="m0", reason="stop"))
  log.append(Finished(time_s=6.0, request_id=0, pool="m0", reason="length"))
  log.append(Failed(time_s=6.0, request_id=2, pool="m0", reason="cancelled"))
  assert seen_in(log) == [Seen(0.25, 8, 1), Seen(1.0, 7, 2)]
