"""Logs written and read back are equal; a line that is no event is named."""

import json

import pytest
from virtual import make_cluster, make_requests, run

from pdjax.core.events import (
  Arrived,
  Copied,
  EventLog,
  Failed,
  Finished,
  Preempted,
  Step,
  read_events,
  write_events,
)
from pdjax.serving.inbox import Inbox

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def logs():
  """One run of each strategy, with a cancel; between them every kind of event."""
  requests = make_requests(12, seed=1, rate_rps=1000, prompt=(8, 40), output=(10, 30))
  logs = {}
  for strategy in ("chunked", "disaggregated"):
    inbox = Inbox(requests)
    inbox.cancel(5, at_s=0.1)
    logs[strategy] = run(make_cluster(strategy, num_pages=24), inbox)
  return logs


def test_several_runs_written_and_read_back_are_equal(logs, tmp_path):
  kinds = {type(e) for log in logs.values() for e in log}
  assert kinds == {Arrived, Step, Preempted, Copied, Finished, Failed}, "a kind is not tested"
  write_events(tmp_path / "events.jsonl", logs)
  copies = read_events(tmp_path / "events.jsonl")
  assert list(copies) == list(logs)
  for name in logs:
    assert list(copies[name]) == list(logs[name])


def test_a_line_is_one_json_object_run_and_event_first(logs, tmp_path):
  write_events(tmp_path / "events.jsonl", logs)
  lines = (tmp_path / "events.jsonl").read_text().splitlines()
  assert len(lines) == sum(map(len, logs.values()))
  for line in lines:
    assert list(json.loads(line))[:2] == ["run", "event"]


GOOD = {"run": "a", "event": "preempted", "time_s": 0.5, "request_id": 1, "pool": "m"}


@pytest.mark.parametrize(
  ("bad", "reason"),
  [
    ("{", "Expecting"),
    ("[1]", "TypeError"),
    ("7", "AttributeError"),
    (json.dumps(GOOD | {"event": "exploded"}), "exploded"),
    (json.dumps({k: v for k, v in GOOD.items() if k != "run"}), "run"),
    (json.dumps({k: v for k, v in GOOD.items() if k != "pool"}), "pool"),
    (json.dumps(GOOD | {"request_id": "one"}), "'one' is not int"),
    (json.dumps(GOOD | {"colour": 1}), "colour"),
  ],
)
def test_a_bad_line_is_named_with_file_and_number(tmp_path, bad, reason):
  path = tmp_path / "events.jsonl"
  path.write_text(f"{json.dumps(GOOD)}\n{json.dumps(GOOD)}\n{bad}\n")
  with pytest.raises(ValueError) as error:
    read_events(path)
  assert str(error.value).startswith(f"{path}:3: not a pdjax event (") and reason in str(
    error.value
  )


def test_a_log_keeps_what_is_appended_in_order():
  first = Preempted(time_s=0.5, request_id=1, pool="m")
  log = EventLog([first])
  log.append(second := Preempted(time_s=0.25, request_id=2, pool="m"))
  assert list(log) == [first, second] and len(log) == 2
