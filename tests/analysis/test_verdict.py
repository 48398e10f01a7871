"""The words follow from the numbers: hand-made runs with one thing wrong each."""

from __future__ import annotations

import re

import pytest

from pdjax.analysis.verdict import StrategyRun, analyse, interference_line, verdict
from pdjax.core.events import Arrived, Copied, EventLog, Failed, Finished, Step
from pdjax.metrics.goodput import Slo, attainment
from pdjax.metrics.latency import mean_phases

pytestmark = pytest.mark.quick

SLO = Slo(ttft_s=1.0, tpot_s=0.25)
DECODE_STEP_S = 0.125


class Run:
  """A log of requests with given times, one step per token."""

  def __init__(self):
    self.log, self.step_id, self.num_requests = EventLog(), 0, 0

  def step(self, pool, start_s, end_s, *, prefill=(), decode=(), emits=()):
    self.step_id += 1
    self.log.append(
      Step(
        pool=pool,
        step_id=self.step_id,
        kind="decode" if not prefill else "mixed" if decode else "prefill",
        start_s=start_s,
        end_s=end_s,
        prefill_ids=tuple(r for r, _ in prefill),
        prefill_starts=(0,) * len(prefill),
        prefill_tokens=tuple(n for _, n in prefill),
        decode_ids=tuple(decode),
        decode_positions=(8,) * len(decode),
        emitted_ids=tuple(emits),
        token_ids=(1,) * len(emits),
      )
    )

  def request(
    self, arrival_s, *, queue_s=0.0, prefill_s=0.5, gaps_s=(0.125,) * 4, copy=None, tokens=8,
    finishes=True,
  ):  # fmt: skip
    """`copy` is (wait, duration): the first gap must be longer than both."""
    i, self.num_requests = self.num_requests, self.num_requests + 1
    source = "m" if copy is None else "p"
    self.log.append(
      Arrived(
        time_s=arrival_s,
        request_id=i,
        pool=source,
        num_prompt_tokens=tokens,
        max_tokens=len(gaps_s) + 1,
      )
    )
    now_s = arrival_s + queue_s + prefill_s
    self.step(source, arrival_s + queue_s, now_s, prefill=[(i, tokens)], emits=[i])
    if copy is not None:
      start_s = now_s + copy[0]
      self.log.append(
        Copied(
          request_id=i,
          source="p",
          target="d",
          start_s=start_s,
          end_s=start_s + copy[1],
          num_tokens=tokens,
          num_bytes=64,
        )
      )
    target = "m" if copy is None else "d"
    for gap_s in gaps_s:
      # Short steps: what else lies in a gap is waiting.
      self.step(target, now_s + gap_s - 1 / 64, now_s + gap_s, decode=[i], emits=[i])
      now_s += gap_s
    if finishes:
      self.log.append(Finished(time_s=now_s, request_id=i, pool=target, reason="length"))
    return self

  def requests(self, n, **options):
    for _ in range(n):
      self.request(100.0 * self.num_requests, **options)
    return self

  def fail(self, n):
    for _ in range(n):
      i, self.num_requests = self.num_requests, self.num_requests + 1
      self.log.append(Failed(time_s=100.0 * i, request_id=i, pool=None, reason="refused: too long"))
    return self


def long_prefill_at(run: Run, start_s: float, *, pool: str) -> Run:
  """A long prompt beside whatever runs then."""
  i, run.num_requests = run.num_requests, run.num_requests + 1
  run.log.append(
    Arrived(time_s=start_s, request_id=i, pool=pool, num_prompt_tokens=999, max_tokens=1)
  )
  run.step(pool, start_s, start_s + 0.5, prefill=[(i, 999)], emits=[i])
  run.log.append(Finished(time_s=start_s + 0.5, request_id=i, pool=pool, reason="length"))
  return run


STALL = (0.125, 2.0, 0.125)  # the second gap, from 0.625 s after arrival, is a stall


def by_end(run: Run) -> Run:
  """Sorts a log by the ends of what happened, as a loop writes it."""
  run.log = EventLog(
    sorted(run.log, key=lambda e: e.end_s if isinstance(e, Step | Copied) else e.time_s)
  )
  return run


def intruded(n, *, pool="m") -> Run:
  """`n` requests stall while a long prompt is prefilled in `pool`, 2 n are left in peace."""
  run = Run().requests(n, gaps_s=STALL).requests(2 * n)
  for k in range(n):
    long_prefill_at(run, 100.0 * k + 1.0, pool=pool)
  return by_end(run)


def analysed(**runs: Run) -> dict[str, StrategyRun]:
  return {name: analyse(name, run.log, SLO) for name, run in runs.items()}


def words(num_requests=None, caveats=(), **runs: Run) -> str:
  found = analysed(**runs)
  n = num_requests if num_requests is not None else max(len(r.records) for r in found.values())
  return verdict(found, SLO, DECODE_STEP_S, list(caveats), num_requests=n)


# The symptom --------------------------------------------------------------------------------------


def test_all_is_well():
  text = words(chunked=Run().requests(20))
  assert "TTFT and TPOT normal." in text
  assert "chunked: 20 of 20 requests (100%) meet both SLOs." in text


def test_waiting_for_the_first_step_is_called_queueing():
  text = words(a=Run().requests(10).requests(10, queue_s=3.0))
  assert "High TTFT (50% miss it), normal TPOT: prefill queues." in text
  assert "a: 10 of 20 requests (50%) meet both SLOs; misses TTFT on 50%." in text


def test_a_long_prefill_of_its_own_is_not_called_queueing():
  text = words(a=Run().requests(10).requests(10, prefill_s=3.0))
  assert "High TTFT (50% miss it), normal TPOT: prefill itself takes long." in text


def test_a_stall_beside_a_prefill_is_called_intrusion():
  text = words(a=intruded(10))
  assert "High TPOT (25% miss it), normal TTFT: prefill intrudes on decode" in text
  assert "the longest gap, 2.00 s, is 16 decode steps" in text


def test_slow_decode_without_any_prefill_beside_it_is_short_of_time():
  text = words(a=Run().requests(10, gaps_s=(0.5,) * 4))
  assert "High TPOT (100% miss it), normal TTFT: decode itself is short of time" in text
  assert "intrudes" not in text


def test_a_stall_while_another_device_prefills_is_said_so():
  text = words(a=intruded(10, pool="elsewhere"))
  assert "decode stalls while another device prefills" in text
  assert "intrudes" not in text


def test_a_slow_copy_is_called_the_hand_off():
  slow = Run().requests(10, copy=(1.0, 1.0), gaps_s=(2.25, 0.125, 0.125, 0.125))
  text = words(a=slow)
  assert "High TPOT (100% miss it), normal TTFT: the hand-off delays the second token" in text
  assert "hand-off wait 1.00 s" in text and "copy 1.00 s" in text


def test_both_targets_missed_gives_both_causes():
  text = words(a=Run().requests(10, queue_s=3.0, gaps_s=(0.5,) * 4))
  assert "TTFT and TPOT high (100% and 100% miss them): prefill queues, and decode itself" in text


def test_gaps_show_what_means_hide():
  """One stall among many tokens: the mean is in time."""
  hidden = Run().requests(1, gaps_s=(0.125, 2.0, *(0.125,) * 60)).requests(2)
  text = words(a=by_end(long_prefill_at(hidden, 1.0, pool="m")))
  assert "TTFT and TPOT normal, but prefill intrudes on decode: the longest gap, 2.00 s" in text
  assert "but prefill" not in words(a=Run().requests(3))


def test_few_misses_are_no_symptom_but_are_counted():
  text = words(a=Run().requests(99).requests(1, queue_s=3.0))
  assert "TTFT and TPOT normal." in text
  assert "99 of 100 requests (99%) meet both SLOs; misses TTFT on 1%." in text


def test_failed_requests_are_named_and_are_misses():
  text = words(a=Run().requests(15).fail(5))
  assert "5 of 20 requests failed." in text
  assert "15 of 20 requests (75%) meet both SLOs" in text


def test_nothing_finished():
  text = words(a=Run().fail(3), b=Run().fail(3))
  assert text.count("nothing finished. 3 of 3 requests failed.") == 2
  assert "No choice: under no strategy does any of 3 requests meet both SLOs" in text


def test_no_request_at_all():
  text = words(a=Run(), b=Run())
  assert "nothing finished." in text and "No choice" in text
  assert interference_line(analysed(a=Run())).count("no running request met a long prompt") == 1


# The numbers --------------------------------------------------------------------------------------


def test_the_phases_in_the_text_are_those_of_the_records():
  run = Run().requests(10, queue_s=0.25, copy=(0.25, 0.5), gaps_s=(1.0, 0.125))
  (line,) = (li for li in words(a=run).splitlines() if "end to end" in li)
  mean = mean_phases(analysed(a=run)["a"].records)
  total_s = float(re.search(r"on average ([\d.]+) s end to end", line)[1])
  assert total_s == pytest.approx(mean.total_s, abs=0.005)
  named = {
    "queue": mean.queue_s,
    "prefill": mean.prefill_s,
    "hand-off wait": mean.handoff_wait_s,
    "copy": mean.copy_s,
    "decode": mean.decode_s,
  }
  found = re.findall(r"(queue|prefill|hand-off wait|copy|decode) (\d+) ms \((\d+)%\)", line)
  assert [name for name, _, _ in found] == list(named)
  for name, value_ms, percent in found:
    assert int(value_ms) / 1e3 == pytest.approx(named[name], abs=0.0005), name
    assert int(percent) == pytest.approx(100 * named[name] / mean.total_s, abs=0.51), name
  assert sum(int(percent) for _, _, percent in found) == pytest.approx(100, abs=2)


def test_percentages_are_the_attainment_of_the_metrics():
  runs = {
    "a": Run().requests(12).requests(5, queue_s=3.0).fail(3),
    "b": Run().requests(7).requests(13, gaps_s=(0.5,) * 4),
  }
  text = words(**runs)
  for name, run in analysed(**runs).items():
    share = attainment(run.records, SLO)
    assert re.search(rf"{name}.{{0,30}}\({share:.0%}\)", text), (name, share)


def test_what_is_not_all_is_not_called_100_percent():
  text = words(a=Run().requests(999).requests(1, queue_s=3.0))
  assert "999 of 1000 requests (99.9%)" in text and "100%" not in text.split("meet both")[0][-20:]


# The choice ---------------------------------------------------------------------------------------


def test_the_highest_attainment_wins_and_the_runner_up_is_named():
  text = words(
    poor=Run().requests(5).requests(15, queue_s=3.0),
    best=Run().requests(18).requests(2, queue_s=3.0),
    good=Run().requests(12).requests(8, gaps_s=(0.5,) * 4),
  )
  choice = next(line for line in text.splitlines() if "Choose" in line)
  assert "Choose best: 18 of 20 requests (90%) meet both SLOs, 6 more than under good." in choice
  assert "good (60%) misses TPOT on 40%." in choice
  assert "poor (25%) misses TTFT on 75%." in choice
  assert choice.index("good (60%)") < choice.index("poor (25%)")


def test_a_tie_within_one_request_goes_to_the_shorter_tail():
  even = Run().requests(19).requests(1, queue_s=3.0)
  spiky = Run().requests(20, gaps_s=(0.125, 0.125, 0.375, 0.125))
  text = words(spiky=spiky, even=even)
  assert "Choose even: 19 of 20 requests (95%) meet both SLOs, level with spiky (100%)" in text
  assert "Its ITL p99 is 125 ms against 375 ms for spiky." in text


def test_two_requests_apart_is_no_tie():
  text = words(spiky=Run().requests(20, gaps_s=(0.125, 0.375)),
               even=Run().requests(18).requests(2, queue_s=3.0))  # fmt: skip
  assert "Choose spiky: 20 of 20" in text and "level" not in text


def test_a_winner_whose_mean_hides_stalls_is_told_so():
  spiky, late = Run().requests(20, gaps_s=(0.0625,) * 7 + (0.5,)), Run().requests(20, queue_s=3.0)
  text = words(spiky=spiky, late=late)
  assert "Choose spiky: 20 of 20" in text
  assert "But its ITL p99 is 500 ms against 125 ms under late: a mean over tokens hides" in text
  assert "But its ITL" not in words(even=Run().requests(20), late=late)


def test_a_tail_within_the_target_is_no_stall():
  tail = Run().requests(20, gaps_s=(0.0625,) * 7 + (0.1875,))
  assert "But its ITL" not in words(tail=tail, late=Run().requests(20, queue_s=3.0))


def test_a_full_decode_pool_is_not_called_a_prefill_queue():
  """Back-pressure: prompts wait for a place to go, not for the prefill before them."""
  full = Run().requests(20, queue_s=0.75, gaps_s=(3.0, *(0.125,) * 40), copy=(2.5, 0.125))
  text = words(full=full)
  assert "the decode pool is full, and prefill waits behind it" in text
  assert "prefill queues" not in text


def test_a_strategy_that_failed_throughout_ties_with_nobody():
  text = words(works=Run().requests(1), fails=Run().fail(1))
  assert "Choose works: 1 of 1" in text and "level" not in text


def test_without_gaps_a_tie_goes_to_the_shorter_ttft():
  text = words(slow=Run().requests(5, gaps_s=(), prefill_s=0.75),
               fast=Run().requests(5, gaps_s=(), prefill_s=0.25))  # fmt: skip
  assert "Choose fast" in text
  assert "Its median TTFT is 250 ms against 750 ms for slow." in text


def test_equal_runs_are_called_equal():
  text = words(a=Run().requests(5), b=Run().requests(5))
  assert "Choose a" in text and "Nothing tells them apart: the ITL p99 is 125 ms for both." in text


def test_an_interrupted_run_is_not_chosen():
  text = words(num_requests=20, a=Run().requests(20), b=Run().requests(3))
  assert "No choice: interrupted; b answered 3 of 20 requests." in text
  unfinished = Run().requests(19).requests(1, finishes=False)
  text = words(num_requests=20, a=unfinished)
  assert "1 of 20 requests did not finish." in text
  assert "No choice: interrupted; a answered 19 of 20 requests." in text


# What is not shown, and interference --------------------------------------------------------------


def test_it_says_what_the_numbers_do_not_show():
  text = words(caveats=["devices share cores"], a=Run().requests(25))
  assert "Not shown: devices share cores; another draw of arrivals" in text
  assert "over 25 requests moves by up to 10 points" in text  # sqrt(1/4/25)
  assert "p99 over 25 requests is close to the slowest one alone" in text
  assert "close to the slowest" not in words(a=Run().requests(100))


def test_interference_tells_the_own_device_from_another():
  runs = analysed(own=intruded(2), other=intruded(2, pool="elsewhere"), none=Run().requests(2))
  line = interference_line(runs)
  assert "own 2.00 s (beside a 999-token prompt on its own device)" in line
  assert "other 2.00 s (while another device prefilled 999 tokens)" in line
  assert "none: no running request met a long prompt" in line
  assert "\n" not in line


def test_a_gap_that_is_a_hand_off_is_called_so():
  handed = Run().requests(3, copy=(1.0, 0.5), gaps_s=(2.0, 0.125, 0.125))
  long_prefill_at(handed, 1.0, pool="elsewhere")
  runs = analysed(a=by_end(handed))
  assert "a 2.00 s (in its hand-off, while another device prefilled 999" in interference_line(runs)
  text = words(a=handed)
  assert "the hand-off delays the second token" in text and "stalls" not in text
