"""Counters of a run: what its pools hold, and how busy they are."""

from __future__ import annotations

import itertools

import pytest
from virtual import make_cluster, make_requests

from pdjax.core.clock import VirtualClock
from pdjax.core.events import EventLog
from pdjax.core.model_config import TINY
from pdjax.metrics.counters import Peaks, fill_counts, step_counts
from pdjax.metrics.utilisation import pool_usage, works
from pdjax.serving.inbox import Inbox
from pdjax.serving.loop import serve

pytestmark = pytest.mark.quick


def _last(counts, name):
  """The last value of each pool at each time, in order of time."""
  found: dict[tuple[str, float], float] = {}
  for count in sorted((c for c in counts if c.name == name), key=lambda c: c.time_s):
    found[count.pool, count.time_s] = count.values[""]
  return found


@pytest.mark.parametrize("strategy", ["chunked", "disaggregated"])
def test_pages_and_queues_are_those_of_the_pools(strategy):
  """Where pages are taken as tokens come, those that hold tokens are all that are held."""
  limits = {"limits": {"reservation": "chunk"}} if strategy == "chunked" else {}
  cluster, log = make_cluster(strategy, **limits), EventLog()
  page_size = cluster.pools[0].scheduler.pages.config.page_size
  seen = []
  for turn in serve(cluster, Inbox(make_requests(40, seed=3)), VirtualClock(), log):
    held = {
      pool.name: sum(pool.scheduler.pages.num_held(row) for row in pool.scheduler.pages.held_rows)
      for pool in cluster.pools
    }
    waiting = {pool.name: len(pool.scheduler.waiting) for pool in cluster.pools}
    seen.append((turn.now_s, len(log), held, waiting))
  events = list(log)
  is_full_at_some_time = False
  for _, num_events, held, waiting in seen:
    queue, pages = {}, {}
    for count in fill_counts(events[:num_events], page_size=page_size):
      (queue if count.name == "requests that wait" else pages)[count.pool] = count.values[""]
    for pool, number in held.items():
      assert pages.get(pool, 0) <= number  # what is reserved, or planned, has no tokens yet
      is_full_at_some_time |= pages.get(pool, 0) == number > 0
    for pool, number in waiting.items():
      assert queue.get(pool, 0) >= number  # who is in a step that runs has begun, for the pool
  assert is_full_at_some_time
  final = list(fill_counts(events, page_size=page_size))
  for name in ("requests that wait", "pages in use"):
    last = {}
    for count in final:
      if count.name == name:
        last[count.pool] = count.values[""]
    assert set(last.values()) == {0}


def test_what_a_pool_does_adds_up_to_what_it_did():
  cluster, log = make_cluster("chunked"), EventLog()
  for _ in serve(cluster, Inbox(make_requests(30, seed=4)), VirtualClock(), log):
    pass
  counts = list(step_counts(works(log, TINY, bytes_per_value=4)))
  for pool, usage in pool_usage(log, TINY, bytes_per_value=4).items():
    own = sorted((c for c in counts if c.pool == pool and c.name == "FLOP/s"), key=_time)
    flops = sum(a.values[""] * (b.time_s - a.time_s) for a, b in itertools.pairwise(own))
    assert flops == pytest.approx(usage.total.flops)
    assert own[-1].values[""] == 0


def _time(count) -> float:
  return count.time_s


def test_with_peaks_it_is_percent_of_them():
  cluster, log = make_cluster("chunked"), EventLog()
  for _ in serve(cluster, Inbox(make_requests(5, seed=5)), VirtualClock(), log):
    pass
  plain = [c for c in step_counts(works(log, TINY)) if c.name == "FLOP/s"]
  peaks = {plain[0].pool: Peaks(1e9, 1e9)}
  shares = [c for c in step_counts(works(log, TINY), peaks=peaks) if c.name == "FLOP/s, % of peak"]
  own = [c for c in plain if c.pool == plain[0].pool]
  assert [c.values[""] for c in shares] == pytest.approx([c.values[""] / 1e7 for c in own])
