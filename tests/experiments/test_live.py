"""The view of a run while it goes."""

from __future__ import annotations

import io
import re

import pytest

from experiments.live import WINDOW_S, Live, _Seen
from experiments.program import Status
from pdjax.core.clock import VirtualClock
from pdjax.core.events import EventLog
from pdjax.metrics.latency import itls_s, request_records, ttfts_s
from pdjax.serving.inbox import Inbox
from pdjax.serving.loop import serve
from tests.virtual import make_cluster, make_requests

pytestmark = pytest.mark.quick


class _Terminal(io.StringIO):
  def isatty(self) -> bool:
    return True


def _served(live: Live, *, strategy="disaggregated", n=20):
  """Serves some requests and shows every turn."""
  cluster, log = make_cluster(strategy), EventLog()
  num_ended = num_tokens = 0
  for turn in serve(cluster, Inbox(make_requests(n, seed=1)), VirtualClock(), log):
    num_ended += len(turn.ended)
    num_tokens += turn.num_tokens
    live.serving(
      Status(
        strategy=strategy,
        num_ended=num_ended,
        num_requests=n,
        num_tokens=num_tokens,
        now_s=turn.now_s,
        cluster=cluster,
        log=log,
      )
    )
  return log


def test_what_it_reads_as_the_log_grows_is_what_the_log_says():
  cluster, log = make_cluster("chunked"), EventLog()
  seen = _Seen(log)
  now_s = 0.0
  for turn in serve(cluster, Inbox(make_requests(30, seed=2)), VirtualClock(), log):
    seen.read_on()
    now_s = turn.now_s
  assert now_s < WINDOW_S
  records = request_records(log)
  assert sorted(seen.ttft_s.values(now_s)) == sorted(ttfts_s(records))
  assert sorted(seen.itl_s.values(now_s)) == pytest.approx(sorted(itls_s(records)))
  total = sum(sum(window.values(now_s)) for window in seen.tokens.values())
  assert total == sum(len(record.token_s) for record in records.values())


def test_what_is_older_than_the_window_counts_no_more():
  seen = _Seen(EventLog())
  seen.itl_s.add(1.0, 5.0)
  seen.itl_s.add(9.0, 7.0)
  assert seen.itl_s.values(2.0 + WINDOW_S) == [7.0]


def test_without_a_terminal_it_is_one_line_a_second_that_names_every_pool():
  now_s, stream = [0.0], io.StringIO()
  live = Live(stream, now_s=lambda: now_s[0])
  log = _served(live)
  assert len(stream.getvalue().splitlines()) == 1  # the clock stands still
  now_s[0] = 1.5
  live._seen = None
  log = _served(live)
  lines = stream.getvalue().splitlines()
  assert len(lines) == 2 and len(log) > 2
  assert all(re.search(r"prefill0: queue \d+, rows \d+, pages \d+%", line) for line in lines)
  assert all("decode0" in line and "ITL p50" in line for line in lines)


def test_on_a_terminal_it_is_drawn_over_itself():
  stream, now_s = _Terminal(), [0.0]

  def later() -> float:
    now_s[0] += 1.0
    return now_s[0]

  live = Live(stream, now_s=later)
  _served(live, n=5)
  text = stream.getvalue()
  height = 3 + 2  # and a line for each pool
  assert text.count(f"\x1b[{height}A") == text.count("tokens/s, ") - 1
  live.done("the end")
  assert stream.getvalue().endswith("the end\n")


def test_on_a_low_terminal_it_is_no_higher_than_that(monkeypatch):
  monkeypatch.setenv("LINES", "8")
  monkeypatch.setenv("COLUMNS", "40")
  stream = _Terminal()
  _served(Live(stream, now_s=lambda: 0.0), strategy="9xmixed", n=5)
  first, *others = stream.getvalue().split("\x1b[7A")
  assert others
  for frame in (first, *others):
    lines = [line.removeprefix("\r\x1b[K") for line in frame.split("\n")[:-1]]
    assert len(lines) == 7 and all(len(line) < 40 for line in lines)
    assert lines[-1] == "and 6 more pools"


def test_another_run_begins_with_nothing():
  live = Live(io.StringIO(), now_s=lambda: 0.0)
  first = _served(live)
  second = _served(live, strategy="chunked")
  assert live._seen.log is second is not first
