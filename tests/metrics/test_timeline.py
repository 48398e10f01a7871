from __future__ import annotations

import collections
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdjax.core.clock import to_ticks
from pdjax.core.events import Copied, EventLog
from pdjax.core.model_config import ModelConfig
from pdjax.metrics.timeline import chrome_trace, write_chrome_trace

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
KEYS = {  # what the trace event format requires of each phase
  "X": {"name", "cat", "ts", "dur", "pid", "tid"},
  "i": {"name", "ts", "pid", "tid", "s"},
  "s": {"name", "cat", "id", "ts", "pid", "tid"},
  "t": {"name", "cat", "id", "ts", "pid", "tid"},
  "f": {"name", "cat", "id", "ts", "pid", "tid", "bp"},
  "M": {"name", "pid", "args"},
  "C": {"name", "ts", "pid", "args"},
}


def check_format(trace: dict) -> None:
  rows = trace["traceEvents"]
  tracks = collections.defaultdict(list)
  for row in rows:
    assert KEYS[row["ph"]] <= set(row), row
    if row["ph"] != "M":
      tracks[row["pid"], row["tid"]].append(row)
  named = {(r["pid"], r["tid"]) for r in rows if r["name"] == "thread_name"}
  assert named == set(tracks)
  assert {r["pid"] for r in rows if r["name"] == "process_name"} == {pid for pid, _ in tracks}
  for track in tracks.values():
    assert all(a["ts"] <= b["ts"] for a, b in itertools.pairwise(track))
    slices = [row for row in track if row["ph"] == "X"]
    for a, b in itertools.pairwise(slices):  # in whole nanoseconds, as a viewer reads them
      assert round((a["ts"] + a["dur"]) * 1e3) <= round(b["ts"] * 1e3)
    for row in track:
      if row["ph"] in "stf":  # an arrow needs a slice to hold on to
        assert any(s["ts"] <= row["ts"] < s["ts"] + s["dur"] for s in slices), row
  arrows = collections.defaultdict(list)
  for row in rows:
    if row["ph"] in "stf":
      arrows[row["id"]].append(row)
  for arrow in arrows.values():
    assert [row["ph"] for row in arrow] in (["s", "f"], ["s", "t", "f"])
    assert len({(row["name"], row["cat"]) for row in arrow}) == 1


def slices_of(trace: dict, cat: str) -> list[dict]:
  return [r for r in trace["traceEvents"] if r["ph"] == "X" and r["cat"] == cat]


def process_names(trace: dict) -> dict[int, str]:
  rows = trace["traceEvents"]
  return {r["pid"]: r["args"]["name"] for r in rows if r["name"] == "process_name"}


def test_a_run_with_everything_is_valid(mixed_log, handoff_log):
  for log in (mixed_log, handoff_log):
    for config in (None, SMALL):
      check_format(chrome_trace(log, config))


def test_each_step_is_a_slice_in_microseconds_with_its_work(mixed_log):
  trace = chrome_trace(mixed_log, SMALL)
  steps = slices_of(trace, "step")
  assert [s["name"] for s in steps] == ["prefill", "decode", "prefill", "mixed", "prefill"]
  mixed = steps[3]
  assert (mixed["ts"], mixed["dur"]) == (4.5e6, 1.5e6)
  args = mixed["args"]
  assert (args["step_id"], args["prefill_tokens"], args["decode_rows"], args["tokens"]) == (
    3,
    32,
    1,
    33,
  )
  assert args["flop_per_byte"] == args["flops"] / args["bytes"] > 0
  assert "flops" not in slices_of(chrome_trace(mixed_log), "step")[0]["args"]


def test_preemptions_and_failures_are_instants(mixed_log):
  rows = [r for r in chrome_trace(mixed_log)["traceEvents"] if r["ph"] == "i"]
  assert {(r["name"], r["ts"], r["s"]) for r in rows} == {
    ("preempted 2", 2.0e6, "p"),
    ("failed 5", 2.0e6, "p"),
    ("failed 3", 0.875e6, "g"),  # reached no pool
  }


def test_an_arrow_leads_from_prefill_over_the_copy_to_decode(handoff_log):
  trace = chrome_trace(handoff_log)
  names = process_names(trace)
  arrow = [r for r in trace["traceEvents"] if r["ph"] in "stf" and r["name"] == "hand-off 0"]
  assert [names[r["pid"]] for r in arrow] == ["pool p", "hand-off", "pool d"]
  start, through, finish = arrow
  assert 1.0e6 < start["ts"] < 2.0e6  # inside the step that ends at 2 s
  assert start["ts"] == pytest.approx(2.0e6, abs=2)
  assert (through["ts"], finish["ts"]) == (2.5e6, 3.25e6)


def test_copies_at_the_same_time_lie_on_different_lanes(handoff_log):
  first, second = slices_of(chrome_trace(handoff_log), "hand-off")
  assert (first["ts"], first["dur"]) == (2.5e6, 0.75e6)
  assert first["args"]["bytes"] == 1024
  assert first["tid"] != second["tid"]


def test_a_copy_whose_decode_never_ran_ends_its_arrow_at_the_copy(handoff_log):
  log = [e for e in handoff_log if getattr(e, "pool", "") != "d"]
  trace = chrome_trace(log)
  check_format(trace)
  arrow = [r for r in trace["traceEvents"] if r["ph"] in "stf" and r["name"] == "hand-off 0"]
  assert [(r["ph"], process_names(trace)[r["pid"]]) for r in arrow] == [
    ("s", "pool p"),
    ("f", "hand-off"),
  ]


@given(st.lists(st.tuples(st.floats(0, 2), st.floats(1e-8, 2)), max_size=30))
def test_steps_that_follow_each_other_never_overlap(make_step, make_arrival, times):
  log, now_s = [make_arrival(0.0, 0, 4, 99)], 0.0
  for i, (idle_s, busy_s) in enumerate(times):
    start_s = to_ticks(now_s + idle_s)
    now_s = to_ticks(start_s + busy_s)
    log.append(make_step("m", i, start_s, now_s, decode=((0, 4 + i),), emits=(0,)))
  check_format(chrome_trace(log))


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(1e-6, 3)), min_size=1, max_size=20))
def test_copies_never_share_a_lane(make_arrival, times):
  log = [make_arrival(0.0, i, 4, 2, pool="p") for i in range(len(times))]
  for i, (start_s, copy_s) in enumerate(times):
    log.append(
      Copied(
        request_id=i,
        source="p",
        target="d",
        start_s=to_ticks(start_s),
        end_s=to_ticks(start_s + copy_s),
        num_tokens=4,
        num_bytes=1,
      )
    )
  check_format(chrome_trace(log))


def test_two_runs_in_one_file_keep_their_own_tracks_and_arrows(handoff_log, mixed_log, tmp_path):
  path = tmp_path / "trace.json"
  write_chrome_trace(path, {"a": handoff_log, "b": mixed_log, "c": handoff_log}, SMALL)
  trace = json.loads(path.read_text())
  check_format(trace)
  alone = [chrome_trace(log, SMALL)["traceEvents"] for log in (handoff_log, mixed_log, handoff_log)]
  assert len(trace["traceEvents"]) == sum(map(len, alone))
  names = list(process_names(trace).values())
  assert len(set(names)) == len(names)
  assert {name.partition(": ")[0] for name in names} == {"a", "b", "c"}


def test_an_empty_log_is_an_empty_trace():
  assert chrome_trace(EventLog())["traceEvents"] == []
