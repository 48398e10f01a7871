"""Causes told from a log exactly, and from what clients saw by their marks."""

from __future__ import annotations

import dataclasses
import random

import pytest

from configs.hardware import HARDWARE
from configs.models import MODELS
from pdjax.analysis.diagnose import (
  FEWEST,
  Cause,
  Loss,
  Observed,
  PhaseUse,
  Seconds,
  Symptom,
  conclude,
  diagnose_log,
  observe,
  observe_by_id,
  opposed_phases,
  phase_use,
  symptoms,
)
from pdjax.analysis.signatures import AT_ONCE_S, Quiet, derive_slo, diagnose_requests
from pdjax.core.events import Arrived, Copied, EventLog, Finished, Preempted, Step
from pdjax.core.request import Slo
from pdjax.metrics.latency import request_records

pytestmark = pytest.mark.quick

SLO = Slo(ttft_s=1.0, tpot_s=0.1)
STEP_S = 1 / 64
N = 40


def seen(arrival_s=0.0, prompt=100, ttft_s=0.1, gaps_s=(STEP_S,) * 10):
  n = len(gaps_s)
  return Observed(
    arrival_s=arrival_s,
    prompt_tokens=prompt,
    output_tokens=n + 1,
    ttft_s=ttft_s,
    tpot_s=sum(gaps_s) / n if n else None,
    itl_s=tuple(gaps_s),
  )


# What both share ----------------------------------------------------------------------------------


def test_seconds_within_a_span_are_those_of_a_sum_over_intervals():
  rng = random.Random(0)
  for _ in range(50):
    spans = []
    for _ in range(rng.randrange(8)):
      start_s = rng.uniform(0, 10)
      spans.append((start_s, start_s + rng.uniform(0, 3), rng.choice((0.25, 1.0))))
    a, b = sorted(rng.uniform(-1, 12) for _ in range(2))
    plain = sum(w * max(0.0, min(b, end) - max(a, start)) for start, end, w in spans)
    assert Seconds(spans).within(a, b) == pytest.approx(min(plain, b - a), abs=1e-9)


@pytest.mark.parametrize(
  ("request_", "expected"),
  [
    (seen(), []),
    (seen(ttft_s=1.5), [Symptom.LATE]),
    (seen(gaps_s=(0.15,) * 10), [Symptom.SLOW]),
    (seen(gaps_s=(0.25, *(STEP_S,) * 9)), [Symptom.STALLED]),
    (seen(ttft_s=2.0, gaps_s=(0.25,) * 4), [Symptom.LATE, Symptom.SLOW, Symptom.STALLED]),
    (seen(ttft_s=0.5, gaps_s=()), []),
  ],
)
def test_symptoms_are_those_of_the_targets(request_, expected):
  assert symptoms(request_, SLO) == expected


def loss(request_id, symptom=Symptom.LATE, **lost_s):
  return Loss(
    request_id=request_id,
    symptom=symptom,
    at_s=1.0,
    lost_s={Cause[name]: value for name, value in lost_s.items()},
  )


def test_requests_and_their_symptoms_count_alike_however_long_they_took():
  losses = [
    loss(0, QUEUEING=100.0),
    loss(1, MEMORY=0.5, QUEUEING=0.5),
    loss(2, MEMORY=1.0),
    loss(2, Symptom.STALLED, PREEMPTION=9.0),
  ]
  found = conclude(losses, SLO, num_requests=N, facts={})
  shares = {f.cause: f.share for f in found.findings}
  third = pytest.approx(1 / 3)
  assert shares == {Cause.QUEUEING: pytest.approx(0.5), Cause.MEMORY: third,
                    Cause.PREEMPTION: pytest.approx(1 / 6)}  # fmt: skip
  assert found.cause == Cause.QUEUEING and found.num_troubled == 3


@pytest.mark.parametrize(("memory_s", "is_ambiguous"), [(0.5, False), (0.9, True)])
def test_two_causes_with_like_evidence_are_called_so(memory_s, is_ambiguous):
  losses = [loss(i, QUEUEING=1.0, MEMORY=memory_s) for i in range(N)]
  found = conclude(losses, SLO, num_requests=N, facts={})
  assert found.is_ambiguous == is_ambiguous == ("Ambiguous" in str(found))


def test_too_few_requests_and_health_are_said_before_any_cause():
  few = [loss(i, QUEUEING=1.0) for i in range(FEWEST - 1)]
  assert conclude(few, SLO, num_requests=FEWEST - 1, facts={}).cause == Cause.TOO_FEW
  assert conclude(few[:2], SLO, num_requests=N, facts={}).cause == Cause.HEALTHY
  assert conclude(few[:3], SLO, num_requests=N, facts={}).cause == Cause.QUEUEING


def test_failed_requests_are_trouble_that_nothing_explains():
  found = conclude([], SLO, num_requests=N, num_failed=10, facts={})
  assert found.cause == Cause.UNEXPLAINED and found.num_troubled == 10


def test_the_words_name_cause_share_and_worst_request():
  losses = [loss(i, QUEUEING=float(i + 1)) for i in range(N)]
  text = str(conclude(losses, SLO, num_requests=N, facts={Cause.QUEUEING: "Ten a second."}))
  assert f"{N} of {N} requests are late" in text
  assert "1. prefill queueing: 100% of what was lost" in text
  assert f"most: request {N - 1}, {float(N):.2f} s" in text and "Ten a second." in text


@pytest.mark.parametrize("row", [dict(ttft_s=-0.1), dict(gaps_s=(0.1, -0.1, 0.1))])
def test_time_does_not_go_back(row):
  with pytest.raises(ValueError, match=r"came before"):
    seen(**row)


# From a log ---------------------------------------------------------------------------------------


class Script:
  """A log as it would be written: steps of a pool follow one another."""

  def __init__(self):
    self.log, self.now_s, self.position = EventLog(), {}, {}
    self.num_steps = 0

  def arrive(self, request_id, at_s, *, pool="m", prompt=100, seen_s=None):
    self.log.append(
      Arrived(time_s=at_s, request_id=request_id, pool=pool, num_prompt_tokens=prompt,
              max_tokens=100, seen_s=at_s if seen_s is None else seen_s)
    )  # fmt: skip

  def step(self, took_s, *, pool="m", prefill=(), decode=(), start_s=None):
    """`prefill` are (request, tokens) of whole prompts."""
    start_s = self.now_s.get(pool, 0.0) if start_s is None else start_s
    end_s = self.now_s[pool] = start_s + took_s
    self.log.append(
      Step(
        pool=pool,
        step_id=self.num_steps,
        kind="prefill" if not decode else "mixed" if prefill else "decode",
        start_s=start_s,
        end_s=end_s,
        prefill_ids=tuple(i for i, _ in prefill),
        prefill_starts=(0,) * len(prefill),
        prefill_tokens=tuple(n for _, n in prefill),
        decode_ids=tuple(decode),
        decode_positions=(100,) * len(decode),
        emitted_ids=(*(i for i, _ in prefill), *decode),
        token_ids=(0,) * (len(prefill) + len(decode)),
      )
    )
    self.num_steps += 1
    return end_s

  def finish(self, *ids, pool="m"):
    for i in ids:
      self.log.append(Finished(time_s=self.now_s[pool], request_id=i, pool=pool, reason="length"))


def test_waiting_while_prompts_are_computed_is_queueing():
  script = Script()
  for i in range(N):
    script.arrive(i, 0.0)
  for i in range(N):
    script.step(0.125, prefill=[(i, 100)])
    script.finish(i)
  found = diagnose_log(script.log, SLO)
  assert [f.cause for f in found.findings] == [Cause.QUEUEING]
  assert found.num_troubled == N - 8  # 8 steps of an eighth of a second are in time


def test_waiting_while_only_decodes_run_is_memory():
  script = Script()
  script.arrive(0, 0.0)
  script.step(STEP_S, prefill=[(0, 100)])
  for i in range(1, N):
    script.arrive(i, 0.0)
  for _ in range(128):
    script.step(STEP_S, decode=[0])
  script.finish(0)
  script.step(STEP_S, prefill=[(i, 100) for i in range(1, N)])
  script.finish(*range(1, N))
  found = diagnose_log(script.log, SLO)
  assert found.cause == Cause.MEMORY and found.num_troubled == N - 1


def decoding(script, ids, num_steps, step_s=STEP_S, pool="m"):
  for _ in range(num_steps):
    script.step(step_s, decode=ids, pool=pool)


def started(script, ids=range(N), pool="m"):
  for i in ids:
    script.arrive(i, 0.0, pool=pool)
  script.step(STEP_S, prefill=[(i, 100) for i in ids], pool=pool)


def test_a_prompt_beside_decodes_is_interference():
  script = Script()
  started(script)
  decoding(script, range(N), 30)
  script.arrive(N, script.now_s["m"], prompt=9000)
  script.step(0.75, prefill=[(N, 9000)], decode=range(N))
  decoding(script, range(N), 5)
  script.finish(*range(N + 1))
  found = diagnose_log(script.log, SLO)
  assert found.cause == Cause.INTERFERENCE and found.findings[0].share > 0.95
  assert "9000 tokens" in found.findings[0].says
  (lost,) = {round(own.lost_s[Cause.INTERFERENCE], 6) for own in found.losses}
  assert lost == pytest.approx(0.75 - STEP_S)


def test_steps_that_grow_without_a_prompt_are_memory():
  script = Script()
  started(script)
  for i in range(60):
    script.step(STEP_S * (1 + i / 4), decode=range(N))
  script.finish(*range(N))
  found = diagnose_log(script.log, SLO)
  assert found.cause == Cause.MEMORY and found.findings[0].share > 0.9


def test_a_preempted_request_and_those_behind_it_lose_by_preemption():
  script = Script()
  started(script, range(20))
  at_s = script.now_s["m"]
  for i in range(10):
    script.log.append(Preempted(time_s=at_s, request_id=i, pool="m"))
  for i in range(20, 40):
    script.arrive(i, at_s)
  decoding(script, range(10, 20), 100)
  script.step(STEP_S, prefill=[(i, 101) for i in range(10)])
  script.step(STEP_S, prefill=[(i, 100) for i in range(20, 40)])
  script.finish(*range(40))
  found = diagnose_log(script.log, SLO)
  assert found.cause == Cause.PREEMPTION and found.num_troubled == 30
  assert "10 preemptions of 10 requests" in found.findings[0].says


@pytest.mark.parametrize(
  ("wait_s", "copy_s", "cause"), [(2.0, 0.01, Cause.HANDOFF_WAIT), (0.01, 2.0, Cause.LINK)]
)
def test_a_hand_off_is_a_wait_or_a_copy(wait_s, copy_s, cause):
  script = Script()
  started(script, pool="p")
  start_s = script.now_s["p"] + wait_s
  for i in range(N):
    script.log.append(
      Copied(request_id=i, source="p", target="d", start_s=start_s, end_s=start_s + copy_s,
             num_tokens=100, num_bytes=1000)
    )  # fmt: skip
  script.step(STEP_S, pool="d", decode=range(N), start_s=start_s + copy_s)
  decoding(script, range(N), 200, pool="d")
  script.finish(*range(N), pool="d")
  found = diagnose_log(script.log, SLO)
  assert found.cause == cause and found.num_troubled == N
  assert {own.symptom for own in found.losses} == {Symptom.STALLED}


def test_a_request_that_is_seen_late_is_the_clients():
  script = Script()
  for i in range(N):
    script.arrive(i, 2.0 * i, seen_s=2.0 * i + 1.5)
    script.step(STEP_S, prefill=[(i, 100)], start_s=2.0 * i + 1.5)
    script.finish(i)
  found = diagnose_log(script.log, SLO)
  assert found.cause == Cause.CLIENT and found.findings[0].share == pytest.approx(1.0)


def test_what_was_sent_late_in_a_bunch_queues_because_of_its_client():
  script = Script()
  for i in range(N):
    script.arrive(i, 0.125 * i, seen_s=8.0)
  for i in range(N):
    script.step(0.125, prefill=[(i, 100)], start_s=8.0 + 0.125 * i)
    script.finish(i)
  found = diagnose_log(script.log, SLO)
  assert [f.cause for f in found.findings] == [Cause.CLIENT]


def test_a_prompt_that_alone_takes_too_long_is_no_queue():
  script = Script()
  for i in range(N):
    script.arrive(i, 4.0 * i)
    script.step(1.5, prefill=[(i, 5000)], start_s=4.0 * i)
    script.finish(i)
  found = diagnose_log(script.log, SLO)
  assert [f.cause for f in found.findings] == [Cause.OWN_PREFILL]


def test_phases_under_opposite_roofs_are_recognised():
  script = Script()
  script.arrive(0, 0.0, prompt=4096)
  script.step(0.35, prefill=[(0, 4096)])
  decoding(script, [0], 20, step_s=0.01)
  uses = phase_use(script.log, MODELS["llama3-8b"], {"m": (HARDWARE["a100"], 1)})
  prefill, decode = opposed_phases(uses)
  assert (prefill.kind, decode.kind) == ("prefill", "decode")
  # By hand: 2 FLOP a weight and token, of 7.5e9 weights in matrices; all weights read per step.
  assert prefill.mfu == pytest.approx(2 * 7e9 * 4096 / 0.35 / 312e12, rel=0.1)
  assert decode.mbu == pytest.approx(2 * 7.5e9 / 0.01 / 2.039e12, rel=0.1)
  assert opposed_phases([decode]) is None
  assert opposed_phases([dataclasses.replace(prefill, mfu=0.1), decode]) is None
  assert isinstance(prefill, PhaseUse)


# From what clients saw ----------------------------------------------------------------------------


def flow(n=N, every_s=0.5, **more):
  return [seen(arrival_s=every_s * i, **more) for i in range(n)]


def test_targets_follow_from_the_quietest_moments():
  requests = [*flow(prompt=100, ttft_s=0.1), seen(prompt=1000, ttft_s=0.5)]
  slo = derive_slo(requests, ttft_multiple=3, tpot_multiple=5)
  assert slo.ttft_s == pytest.approx(3 * 1000 * 0.5 / 1000) and slo.tpot_s == 5 * STEP_S
  assert Quiet.of(requests).prompt_s(requests[0]) == pytest.approx(0.1)


def test_nothing_wrong_is_said_of_a_quiet_run():
  assert diagnose_requests(flow(), SLO).cause == Cause.HEALTHY
  assert diagnose_requests(flow(5), SLO).cause == Cause.TOO_FEW
  assert diagnose_requests([], SLO, num_failed=3).cause == Cause.TOO_FEW


def test_first_tokens_that_follow_one_another_are_a_queue():
  requests = [seen(0.1 * i, ttft_s=0.2 + 0.1 * i) for i in range(N)]  # one done each 0.2 s
  found = diagnose_requests(requests, SLO)
  assert found.cause == Cause.QUEUEING


def test_late_first_tokens_while_nothing_is_computed_are_no_queue():
  quick = [seen(float(i)) for i in range(N)]
  waiting = [seen(10 * i + 0.5, ttft_s=8.0) for i in range(4)]
  assert diagnose_requests([*quick, *waiting], SLO).cause == Cause.MEMORY


def test_gaps_of_all_that_end_with_anothers_first_token_are_interference():
  stall = (*(STEP_S,) * 64, 0.5, *(STEP_S,) * 20)
  running = [seen(0.0, gaps_s=stall) for _ in range(N)]
  prompt = seen(0.1 + 1.0, prompt=500, ttft_s=0.5)
  found = diagnose_requests([*running, prompt], SLO)
  assert found.cause == Cause.INTERFERENCE


@pytest.mark.parametrize(("place", "cause"), [(20, Cause.PREEMPTION), (0, Cause.HANDOFF_WAIT)])
def test_a_lone_gap_is_a_preemption_or_if_it_is_the_first_a_hand_off(place, cause):
  going = [seen(0.0, gaps_s=(STEP_S,) * 300) for _ in range(N)]
  gaps = [STEP_S] * 40
  gaps[place] = 1.0
  stopped = [seen(0.1 * i, gaps_s=tuple(gaps)) for i in range(5)]
  found = diagnose_requests([*going, *stopped], SLO)
  assert found.cause == cause and found.num_troubled == 5


@pytest.mark.parametrize(("grows", "cause"), [(True, Cause.LINK), (False, Cause.HANDOFF_WAIT)])
def test_a_first_gap_that_grows_with_the_prompt_is_the_link(grows, cause):
  rng = random.Random(1)
  going = [seen(0.0, gaps_s=(STEP_S,) * 900) for _ in range(10)]
  stopped = []
  for i in range(N):
    prompt = rng.randint(200, 2000)
    first_s = prompt * 1e-3 if grows else rng.choice((0.0, 1.0, 2.0))
    gaps_s = (first_s + STEP_S, *(STEP_S,) * 20)
    stopped.append(seen(0.2 * i, prompt=prompt, ttft_s=prompt * 1e-3, gaps_s=gaps_s))
  found = diagnose_requests([*going, *stopped], Slo(ttft_s=9.0, tpot_s=0.1))
  assert found.cause == cause


def one_by_one(spacing_s) -> list[Observed]:
  """All have their first tokens early; the second ones come one after another, then they decode."""
  rng, end_s, found = random.Random(3), 0.0, []
  for number in range(N):
    prompt, first_s = rng.randrange(200, 2000), 0.05 * number + 0.1
    end_s = max(first_s, end_s) + spacing_s(prompt, rng)
    gaps_s = (end_s - first_s, *(STEP_S,) * 60)
    found.append(seen(arrival_s=0.05 * number, prompt=prompt, gaps_s=gaps_s))
  return found


@pytest.mark.parametrize(
  ("spacing_s", "cause"),
  [
    (lambda prompt, rng: 5e-4 * prompt, Cause.LINK),
    (lambda prompt, rng: rng.uniform(0.1, 1.0), Cause.HANDOFF_WAIT),
  ],
)
def test_hand_offs_for_which_nearly_all_wait_are_still_hand_offs(spacing_s, cause):
  assert diagnose_requests(one_by_one(spacing_s), SLO).cause is cause


def test_first_gaps_that_end_together_are_no_hand_offs():
  """A burst of prompts that come before any decode, while another pool decodes."""
  burst = [
    seen(arrival_s=0.2 * i, ttft_s=0.2, gaps_s=(0.2 * (N - i), *(STEP_S,) * 20)) for i in range(N)
  ]
  others = [seen(arrival_s=0.0, prompt=90, gaps_s=(STEP_S,) * 700) for _ in range(4)]
  found = diagnose_requests([*burst, *others], SLO)
  assert found.cause not in (Cause.HANDOFF_WAIT, Cause.LINK)


def test_tokens_that_come_at_once_after_a_gap_are_the_clients():
  bunch = (*(STEP_S,) * 5, 0.5, *(0.0,) * 30, *(STEP_S,) * 5)
  found = diagnose_requests(flow(gaps_s=bunch), SLO)
  assert found.cause == Cause.CLIENT
  steps = tuple(max(gap_s, 2 * AT_ONCE_S) for gap_s in bunch)
  assert diagnose_requests(flow(gaps_s=steps), SLO).cause != Cause.CLIENT


def test_what_its_client_sent_late_is_the_clients():
  requests = [dataclasses.replace(r, sent_late_s=4.0, ttft_s=r.ttft_s + 4.0) for r in flow()]
  found = diagnose_requests(requests, SLO)
  assert found.cause is Cause.CLIENT
  assert "sent 4.00 s after they were due" in found.findings[0].says
  assert dataclasses.astuple(Quiet.of(requests)) == pytest.approx(
    dataclasses.astuple(Quiet.of(flow()))
  )


def test_requests_have_the_names_that_are_given():
  late = [dataclasses.replace(r, ttft_s=5.0) for r in flow()]
  found = diagnose_requests(late, SLO, ids=range(100, 100 + len(late)))
  assert {loss.request_id for loss in found.losses} == set(range(100, 100 + len(late)))


def test_what_cannot_be_seen_is_said():
  means = [dataclasses.replace(r, itl_s=None) for r in flow()]
  assert any("no gaps" in note for note in diagnose_requests(means, SLO).notes)
  unplaced = [dataclasses.replace(r, arrival_s=None, ttft_s=3.0) for r in flow()]
  found = diagnose_requests(unplaced, SLO)
  assert any("no arrival times" in note for note in found.notes)
  assert found.cause == Cause.UNEXPLAINED


def test_a_record_is_seen_as_it_was_served():
  script = Script()
  script.arrive(7, 0.5)
  script.arrive(3, 0.25, prompt=200)
  script.step(0.5, prefill=[(7, 100)], start_s=1.0)
  script.step(0.5, prefill=[(3, 200)])
  script.step(0.25, decode=[7])
  script.finish(7, 3)
  by_arrival = observe(request_records(script.log).values())
  assert [(r.prompt_tokens, r.ttft_s, r.itl_s) for r in by_arrival] == [
    (200, 1.75, ()), (100, 1.0, (0.75,))
  ]  # fmt: skip
  assert [r.token_s[-1] for r in by_arrival] == [2.0, 2.25] and by_arrival[1].tpot_s == 0.75
  assert list(observe_by_id(request_records(script.log).values())) == [3, 7]
