"""A hand-off that fails, is cancelled or has a choice: nothing is lost, held or freed twice."""

import collections

import pytest
from serving.faults import make_faulty
from virtual import expected, make_cluster, make_pool, make_requests, run, tokens_of

from pdjax.core.events import Arrived, Copied, Failed, Finished, Step
from pdjax.serving.cluster import Cluster
from pdjax.serving.inbox import Inbox
from pdjax.sim.hardware import Link

pytestmark = pytest.mark.quick
SLOW = Link(name="slow", latency_s=0.5, bytes_per_s=1e9)


def test_an_import_that_cannot_begin_fails_its_request_alone_and_frees_both_pools():
  requests = make_requests(6, seed=10, output=(4, 6))
  cluster = make_cluster("disaggregated")
  target = cluster.decode[0].executor
  import_ = target.import_

  def breaks(handle, **where):
    if handle.request_id == 2:
      raise ConnectionError("no route to peer")
    return import_(handle, **where)

  target.import_ = breaks
  log = run(cluster, requests)  # checks that every page came back
  (failure,) = [e for e in log if isinstance(e, Failed)]
  assert failure.request_id == 2 and "no route to peer" in failure.reason
  tokens, want = tokens_of(log), expected(requests)
  assert tokens.pop(2) == want.pop(2)[:1] and tokens == want


def test_a_copy_that_takes_the_cache_along_fails_its_request_and_not_those_copied_behind_it():
  requests = make_requests(6, seed=11, rate_rps=1e6, prompt=(10, 12), output=(5, 6))
  cluster = make_faulty(make_cluster("disaggregated"), donates=True, latency_s=0.1)
  cluster.decode[0].executor.armed.add("copy")
  most = [0]

  def count(turn):
    most[0] = max(most[0], len(cluster.transfers))

  log = run(cluster, requests, each_turn=count)
  assert most[0] > 1
  (failure,) = [e for e in log if isinstance(e, Failed)]
  assert "Fault('copy')" in failure.reason
  tokens, want = tokens_of(log), expected(requests)
  del tokens[failure.request_id], want[failure.request_id]
  assert tokens == want


@pytest.mark.parametrize("num_cancels", [1, 2, 3])
def test_cancelled_during_its_copy_a_request_ends_once_and_holds_its_pages_to_the_end(num_cancels):
  requests = make_requests(2, seed=20, rate_rps=1e6, prompt=(20, 20), output=(5, 5))
  cluster = make_cluster("disaggregated", link=SLOW)
  inbox = Inbox(requests)
  for i in range(num_cancels):
    inbox.cancel(0, at_s=0.1 + i / 100)
  held = []

  def copies_keep_their_pages(turn):
    for transfer in cluster.transfers:
      held.append(transfer.source.scheduler.pages.table(transfer.seq.row))

  log = run(cluster, inbox, each_turn=copies_keep_their_pages)
  assert held and all(held)
  assert [(e.request_id, e.reason) for e in log if isinstance(e, Failed)] == [(0, "cancelled")]
  assert [e.request_id for e in log if isinstance(e, Finished)] == [1]
  assert [e.request_id for e in log if isinstance(e, Copied)] == [1]


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_cancel_never_overtakes_its_request(share):
  """Asked for between the same two turns as the request, or before the request is due."""
  request = make_requests(1, seed=21, rate_rps=1.0, output=(9, 9))[0]
  inbox = Inbox([request])
  inbox.cancel(0, at_s=share * request.arrival_s)
  log = list(run(make_cluster("chunked"), inbox))
  assert [e.time_s for e in log if isinstance(e, Arrived)] == [request.arrival_s]
  (failure,) = [e for e in log if isinstance(e, Failed)]
  assert failure.reason == "cancelled" and failure.time_s >= request.arrival_s
  assert not [e for e in log if isinstance(e, Step)], "it was gone before a step was planned"


def test_a_cancel_of_nobody_changes_nothing():
  requests = make_requests(3, seed=22)
  inbox = Inbox(requests)
  inbox.cancel(77)
  inbox.cancel(1, at_s=1e3)  # long after its end
  log = run(make_cluster("disaggregated"), inbox)
  assert tokens_of(log) == expected(requests)


def test_copies_under_way_count_as_load_of_their_decode_pool():
  """Or all that is prefilled during one slow copy would go to the same pool."""
  requests = make_requests(8, seed=23, rate_rps=1e6, prompt=(10, 10), output=(6, 6))
  pools = [make_pool("prefill0", role="prefill", policy="prefill_only", budget=80, num_rows=8)]
  pools += [
    make_pool(f"decode{i}", role="decode", policy="decode_only", num_rows=8, link=SLOW)
    for i in range(2)
  ]
  log = run(Cluster(pools), requests)
  assert tokens_of(log) == expected(requests)
  targets = collections.Counter(e.target for e in log if isinstance(e, Copied))
  assert targets == {"decode0": 4, "decode1": 4}


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("policy", ["prefill_only", "prefill_first", "sarathi"])
def test_a_decode_in_flight_on_the_prefill_pool_is_forgotten_at_the_hand_off(
  policy, steps_in_flight
):
  """With two steps in flight a policy that decodes plans one before the sequence leaves."""
  requests = make_requests(20, seed=24, prompt=(1, 30), output=(1, 9))
  pools = [
    make_pool("prefill0", role="prefill", policy=policy, budget=40),
    make_pool("decode0", role="decode", policy="decode_only"),
  ]
  log = run(Cluster(pools), requests, steps_in_flight=steps_in_flight)
  assert tokens_of(log) == expected(requests)
