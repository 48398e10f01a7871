"""Files of four formats: what is read, and what is refused with its row."""

from __future__ import annotations

import dataclasses
import gzip
import json
import pathlib

import pytest

from experiments.observed import read_observed
from pdjax.analysis.diagnose import Observed
from pdjax.core.events import Arrived, EventLog, Finished, Step, write_events
from pdjax.core.plain import to_plain
from pdjax.core.request import Slo

pytestmark = pytest.mark.quick

GAPS_S = (0.02, 0.03)
EXPECTED = Observed(
  arrival_s=0.0, prompt_tokens=100, output_tokens=3, ttft_s=0.25, tpot_s=0.025, itl_s=GAPS_S
)


def vllm(**changes) -> dict:
  """As `vllm bench serve` writes it; the second request came first, the third failed."""
  return {
    "backend": "vllm",
    "completed": 2,
    "mean_ttft_ms": 300.0,
    "input_lens": [100, 40, 7],
    "output_lens": [3, 1, 0],
    "ttfts": [0.25, 0.35, 0.0],
    "itls": [list(GAPS_S), [], []],
    "start_times": [1001.5, 1001.0, 1002.0],
    "errors": ["", "", "refused"],
  } | changes


def aiperf(start_ns=10**18, **changes) -> dict:
  metrics = {
    "input_sequence_length": {"value": 100, "unit": "tokens"},
    "output_sequence_length": {"value": 3, "unit": "tokens"},
    "time_to_first_token": {"value": 250.0, "unit": "ms"},
    "inter_chunk_latency": {"value": [20.0, 30.0], "unit": "ms"},
    "inter_token_latency": {"value": 25.0, "unit": "ms"},
  } | changes
  metadata = {
    "request_start_ns": start_ns,
    "request_end_ns": start_ns + 300_000_000,
    "benchmark_phase": "profiling",
    "was_cancelled": False,
  }
  metrics = {name: value for name, value in metrics.items() if value is not None}
  return {"metadata": metadata, "metrics": metrics, "error": None}


def credit(issued_ns: int) -> dict:
  record = aiperf()
  record["metadata"]["credit_issued_ns"] = issued_ns
  return record


def event_log() -> EventLog:
  step = dict(
    pool="m", step_id=0, kind="prefill", prefill_starts=(0,), prefill_tokens=(100,), decode_ids=(),
    decode_positions=(), token_ids=(5,), prefill_ids=(0,), emitted_ids=(0,)
  )  # fmt: skip
  return EventLog(
    [
      Arrived(time_s=1.0, request_id=0, pool="m", num_prompt_tokens=100, max_tokens=1),
      Step(**step, start_s=1.0, end_s=1.25),
      Finished(time_s=1.25, request_id=0, pool="m", reason="length"),
    ]
  )


def write(tmp_path: pathlib.Path, content, name="seen") -> pathlib.Path:
  path = tmp_path / name
  if isinstance(content, list):
    content = "\n".join(map(json.dumps, content)) + "\n"
  path.write_text(content if isinstance(content, str) else json.dumps(content))
  return path


def equal(found: Observed, expected: Observed) -> bool:
  return all(
    getattr(found, name) == pytest.approx(getattr(expected, name), abs=1e-6)
    for name in Observed.__slots__
  )


# What is read -------------------------------------------------------------------------------------


def test_a_result_of_vllm_is_read_in_order_of_its_start_times(tmp_path):
  seen = read_observed(write(tmp_path, vllm()))
  assert seen.num_failed == 1 and [r.prompt_tokens for r in seen.requests] == [40, 100]
  assert [r.arrival_s for r in seen.requests] == [0.0, 0.5]
  assert seen.requests[0].tpot_s is None and seen.requests[1].itl_s == GAPS_S


def test_an_older_result_of_vllm_has_no_arrivals(tmp_path):
  result = vllm()
  del result["start_times"]
  assert [r.arrival_s for r in read_observed(write(tmp_path, result)).requests] == [None, None]


def test_chunks_of_several_tokens_are_noted(tmp_path):
  seen = read_observed(write(tmp_path, vllm(output_lens=[5, 1, 0])))
  assert any("several tokens in a chunk" in note for note in seen.notes)
  assert seen.requests[1].tpot_s == pytest.approx(sum(GAPS_S) / 4)


def test_a_chunk_without_a_token_is_no_gap(tmp_path):
  """A chat's first chunk is its role; some servers end with a chunk that says why."""
  itls = [[1e-4, *GAPS_S], [1e-4], []]
  early, late = read_observed(write(tmp_path, vllm(itls=itls))).requests
  assert equal(late, dataclasses.replace(EXPECTED, arrival_s=0.5, ttft_s=0.25 + 1e-4))
  assert early.itl_s == () and early.ttft_s == pytest.approx(0.35 + 1e-4)
  seen = read_observed(write(tmp_path, vllm(itls=[[1e-4, *GAPS_S, 2e-4], [], []])))
  assert seen.requests[1].itl_s == GAPS_S
  assert any("1 requests have a chunk for each token and one more" in note for note in seen.notes)


def test_answers_in_one_chunk_have_no_time_per_token(tmp_path):
  seen = read_observed(write(tmp_path, vllm(itls=[[], [], []])))
  assert seen.requests[1].tpot_s is None
  metrics = {"inter_chunk_latency": None, "inter_token_latency": {"value": 0.0, "unit": "ms"}}
  assert read_observed(write(tmp_path, [aiperf(**metrics)])).requests[0].tpot_s is None


def test_what_waited_in_vllms_client_was_due_before_it_was_sent(tmp_path):
  queue = {"queue_times": [1.0, 0.25, 0.0]}
  seen = read_observed(write(tmp_path, vllm(request_rate=4.0, **queue)))
  assert list(seen.by_id) == [0, 1]  # the first was due at 1000.5
  assert [r.arrival_s for r in seen.requests] == [0.0, 0.25]
  assert [r.ttft_s for r in seen.requests] == [1.25, 0.6]
  assert [r.served_s for r in seen.requests] == pytest.approx([0.25, 0.35])
  assert any("counts from when a request was due" in note for note in seen.notes)
  at_once = read_observed(write(tmp_path, vllm(request_rate="inf", **queue)))
  assert {r.sent_late_s for r in at_once.requests} == {0.0}
  assert any("not from when it was due" in note for note in at_once.notes)


def test_what_aiperf_sent_late_was_due_with_its_credit(tmp_path):
  late = aiperf()
  late["metadata"]["credit_issued_ns"] = 10**18 - 500_000_000
  (request,) = read_observed(write(tmp_path, [late])).requests
  assert (request.ttft_s, request.served_s) == pytest.approx((0.75, 0.25), abs=1e-6)


def test_requests_are_called_by_their_place_in_the_file(tmp_path):
  seen = read_observed(write(tmp_path, vllm()))
  assert {i: r.prompt_tokens for i, r in seen.by_id.items()} == {1: 40, 0: 100}
  assert list(read_observed(write(tmp_path, [aiperf(2 * 10**18), aiperf()])).by_id) == [1, 0]


def test_what_most_failures_say_is_noted(tmp_path):
  trace = "Traceback:\n  line 1\nTimeoutError: too slow\n"
  seen = read_observed(write(tmp_path, vllm(errors=["", trace, trace])))
  assert any("2 of 2 failed requests say: TimeoutError: too slow" in note for note in seen.notes)
  failed = aiperf() | {"error": {"type": "Cancelled", "message": "after 1 s"}, "metrics": None}
  seen = read_observed(write(tmp_path, [aiperf(), failed]))
  assert any("say: Cancelled: after 1 s" in note for note in seen.notes)


def test_a_quickest_first_token_that_is_slow_is_asked_about(tmp_path):
  for ttft_s, is_asked in ((12.0, True), (0.3, False)):
    path = write(tmp_path, f"{HEAD}itl_s\n0,9,2,{ttft_s},0.02\n")
    assert any("if that is in ms" in note for note in read_observed(path).notes) is is_asked


@pytest.mark.parametrize(("unit", "scale"), [("ms", 1), ("us", 1e3), ("ns", 1e6), ("s", 1e-3)])
def test_units_of_aiperf_are_those_of_each_metric(tmp_path, unit, scale):
  changes = {
    "time_to_first_token": {"value": 250.0 * scale, "unit": unit},
    "inter_chunk_latency": {"value": [20.0 * scale, 30.0 * scale], "unit": unit},
  }
  seen = read_observed(write(tmp_path, [aiperf(**changes), aiperf(10**18 + 10**9)]))
  assert equal(seen.requests[0], EXPECTED) and seen.requests[1].arrival_s == pytest.approx(1.0)


def test_warm_up_and_failures_of_aiperf_are_left_out_and_counted(tmp_path):
  warm_up, failed = aiperf(), aiperf()
  warm_up["metadata"]["benchmark_phase"] = "warmup"
  failed |= {"error": {"code": 499}, "metrics": {}}
  seen = read_observed(write(tmp_path, [warm_up, aiperf(), failed]))
  assert len(seen.requests) == 1 and seen.num_failed == 1
  assert any("1 requests of the warm-up" in note for note in seen.notes)


def test_aiperf_without_chunks_gives_means(tmp_path):
  (request,) = read_observed(write(tmp_path, [aiperf(inter_chunk_latency=None)])).requests
  assert request.itl_s is None and request.tpot_s == pytest.approx(0.025)


@pytest.mark.parametrize("separator", [" ", ";", "; "])
def test_a_csv_has_gaps_or_their_mean(tmp_path, separator):
  head = "arrival_s,prompt_tokens,output_tokens,ttft_s,"
  gaps = separator.join(map(str, GAPS_S))
  (request,) = read_observed(write(tmp_path, f"{head}itl_s\n0,100,3,0.25,{gaps}\n")).requests
  assert equal(request, EXPECTED)
  (request,) = read_observed(write(tmp_path, f"{head}tpot_s\n0,100,3,0.25,0.025\n")).requests
  assert request.itl_s is None and request.tpot_s == 0.025


def test_our_log_is_read_with_its_summary_and_by_name(tmp_path):
  path = tmp_path / "events.jsonl"
  write_events(path, {"a": event_log(), "b": event_log()})
  with pytest.raises(ValueError, match="several runs; choose one: --run=a or b"):
    read_observed(path)
  seen = read_observed(path, "b")
  assert seen.strategy == "b" and seen.requests[0].ttft_s == 0.25 and seen.slo is None
  (tmp_path / "summary.json").write_text(json.dumps({"slo": to_plain(Slo(ttft_s=1, tpot_s=2))}))
  with pytest.raises(ValueError, match="not the summary of a run"):
    read_observed(path, "b")


def test_the_requests_of_a_log_keep_their_ids(tmp_path):
  path = tmp_path / "events.jsonl"
  arrived, step, finished = event_log()
  others = [dataclasses.replace(event, request_id=7) for event in (arrived, finished)]
  both = dataclasses.replace(
    step, prefill_ids=(7, 0), prefill_starts=(0, 0), prefill_tokens=(100, 100), token_ids=(5, 5),
    emitted_ids=(7, 0)
  )  # fmt: skip
  write_events(path, {"a": [arrived, others[0], both, finished, others[1]]})
  assert list(read_observed(path).by_id) == [0, 7]


def test_a_packed_log_is_read(tmp_path):
  path = tmp_path / "events.jsonl"
  write_events(path, {"a": event_log()})
  packed = tmp_path / "packed.jsonl.gz"
  packed.write_bytes(gzip.compress(path.read_bytes()))
  assert read_observed(packed).requests == read_observed(path).requests


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path):
  for content in (json.dumps(vllm()), HEAD + "itl_s\n0,100,3,0.25,0.02 0.03\n"):
    marked = write(tmp_path, "\ufeff" + content, "marked")
    assert read_observed(marked).requests == read_observed(write(tmp_path, content)).requests


def test_a_packed_file_is_read_as_it_would_be(tmp_path):
  path = tmp_path / "seen.gz"
  path.write_bytes(gzip.compress(json.dumps(vllm()).encode()))
  assert read_observed(path) == read_observed(write(tmp_path, vllm()))


# What is refused ----------------------------------------------------------------------------------

HEAD = "arrival_s,prompt_tokens,output_tokens,ttft_s,"
REFUSED = {
  "an empty file": ("", "is empty"),
  "blank lines": ("\n\n", "is empty"),
  "other JSON": ({"a": 1}, "JSON of another format"),
  "a JSON list": ("[1, 2]", "JSON of another format"),
  "broken JSON": ('{"ttfts": [', ":1: broken JSON, perhaps cut off"),
  "broken JSON over lines": ('{\n "ttfts": [1,\n', ":3: broken JSON, perhaps cut off"),
  "other CSV": ("a,b\n1,2\n", ":1: "),
  "CSV without TTFT": ("arrival_s,prompt_tokens,output_tokens\n0,1,1\n", "no column ttft_s"),
  "CSV without rows": (HEAD + "itl_s\n", "seen"),
  "a gap that is no number": (HEAD + "itl_s\n0,9,3,0.1,0.1 soon\n", ":2: itl_s='soon'"),
  "a gap back in time": (HEAD + "itl_s\n0,9,3,0.1,0.1 -0.1\n", ":2: itl_s=-0.1: a token came"),
  "no gaps": (HEAD + "itl_s\n0,9,3,0.1,\n", ":2: itl_s is missing: 3 output tokens"),
  "too many gaps": (HEAD + "itl_s\n0,9,2,0.1,0.1 0.1\n", ":2: itl_s has 2 gaps, but 2 output"),
  "a first token before its arrival": (HEAD + "itl_s\n0,9,1,-1,\n", ":2: ttft_s=-1.0: its first"),
  "milliseconds": (HEAD + "itl_s\n0,9,2,250,20\n5,9,2,200,20\n", ":3: ttft_s=200 .* milliseconds"),
  "gaps in milliseconds": (HEAD + "itl_s\n0,9,2,0.2,20\n", ":2: tpot_s=20 .* milliseconds"),
  "vllm, not detailed": ({"mean_ttft_ms": 3.0, "completed": 4}, "without --save-detailed"),
  "vllm, two results": ([vllm(), vllm()], "has 2 results"),
  "vllm, uneven lists": (vllm(ttfts=[0.1]), "lists of different lengths"),
  "vllm, milliseconds": (
    vllm(ttfts=[2.5, 3.5, 0], mean_ttft_ms=3.0), "mean_ttft_ms is 3: milliseconds"
  ),
  "vllm, a word": (vllm(ttfts=[0.1, "x", 0]), "request 1: ttfts='x' is not a number"),
  "vllm, mixed clocks": (vllm(ttfts=[0.1, -0.2, 0]), "request 1: .* before its arrival"),
  "vllm, no streaming": (vllm(ttfts=[0, 0, 0]), "all ttfts are 0: .* does not stream"),
  "vllm, sent before due": (
    vllm(queue_times=[0, -1, 0], request_rate=1.0), "request 1: sent 1.0 s before it was due"
  ),
  "vllm, empty lists": (vllm(ttfts=[]), "ttfts is no list with an item for each request"),
  "vllm, all failed": (vllm(errors=["a", "b", "c"]), "none of 3 requests succeeded"),
  "vllm, half a token": (vllm(input_lens=[1.5, 1, 1]), "request 0: input_lens=1.5"),
  "aiperf, an unknown unit": (
    [aiperf(), aiperf(time_to_first_token={"value": 1, "unit": "days"})],
    ":2: time_to_first_token has the unit 'days'",
  ),
  "aiperf, no streaming": ([aiperf(time_to_first_token=None)], ":1: .* missing .*--streaming"),
  "aiperf, two clocks": (
    [aiperf(time_to_first_token={"value": 9, "unit": "s"})], ":1: its first token came 9 s after"
  ),
  "aiperf, due after it was sent": ([credit(10**18 + 10**9)], ":1: sent 1 s before it was due"),
  "aiperf, another line": ([aiperf(), {"x": 1}], ":2: no record of AIPerf"),
  "aiperf, a line cut off": (json.dumps(aiperf()) + '\n{"metadata": {', ":2: no JSON object"),
  "aiperf, only failures": ([aiperf() | {"error": "x"}], "no request of the phase profiling"),
  "events of nobody": (
    [{"run": "a", "event": "failed", "time_s": 1, "request_id": 5, "pool": "m", "reason": "x"},
     {"run": "a", "event": "preempted", "time_s": 1, "request_id": 6, "pool": "m"}],
    "request 6 never arrived",
  ),
  "an event of another kind": ([{"run": "a", "event": "lunch"}], ":1: not a pdjax event"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_file_is_refused_in_one_line_with_its_row(tmp_path, name):
  content, message = REFUSED[name]
  path = write(tmp_path, content)
  with pytest.raises(ValueError, match=message) as error:
    read_observed(path)
  assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_a_log_whose_first_token_precedes_its_arrival_is_refused(tmp_path):
  arrived, step, finished = event_log()
  late = Arrived(time_s=2.0, request_id=0, pool="m", num_prompt_tokens=100, max_tokens=1)
  path = tmp_path / "events.jsonl"
  write_events(path, {"a": [late, step, finished]})
  with pytest.raises(ValueError, match=r"request 0: its first token came at 1.25 s, before"):
    read_observed(path)
  assert arrived.time_s == 1.0


def test_no_file_and_a_run_of_another_format_are_refused(tmp_path):
  with pytest.raises(ValueError, match="does not exist"):
    read_observed(tmp_path / "nothing.csv")
  with pytest.raises(ValueError, match=r"goes with our events\.jsonl"):
    read_observed(write(tmp_path, vllm()), "a")
