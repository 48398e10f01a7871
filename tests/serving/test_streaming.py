"""KV caches that are sent while their prompts are prefilled yet, and how much may be under way."""

import collections
import dataclasses

import pytest
from virtual import expected, make_cluster, make_pool, make_requests, run, tokens_of

from pdjax.core.clock import VirtualClock
from pdjax.core.events import Copied, EventLog, Failed, Preempted, Step
from pdjax.core.sequence import State
from pdjax.metrics.latency import request_records
from pdjax.scheduling.hand_off import HandOff
from pdjax.serving.inbox import Inbox
from pdjax.serving.loop import serve
from pdjax.sim.hardware import Link

pytestmark = pytest.mark.quick
CHUNKS = "1xprefill:prefill_chunks,1xdecode"
GROUPS = ((0, 1), (1, 2))
# A part of 8 tokens (64 bytes) takes 5 ms to copy, a step of them 8.2 ms to compute.
LINK = Link(name="test", latency_s=0.0, bytes_per_s=64 / 5e-3)


def streaming(**options):
  options = {"link": LINK, "budget": 8} | options
  cluster = make_cluster(CHUNKS, **options)
  for pool in cluster.pools:
    pool.scheduler.predict_step_s = lambda counts: 8e-3 + 28e-6 * counts.num_prefill_tokens
  return cluster


def copies_of(log):
  return {e.request_id: e for e in log if isinstance(e, Copied)}


@pytest.mark.parametrize(("layer_groups", "num_stages"), [(((0, 2),), 1), (GROUPS, 1), (GROUPS, 2)])
@pytest.mark.parametrize("limits", [{}, {"prefix_cache": True}])
def test_tokens_are_those_of_one_pool_however_a_cache_is_sent(layer_groups, num_stages, limits):
  requests = make_requests(30, seed=50, prompt=(1, 60), output=(1, 6))
  log = run(streaming(layer_groups=layer_groups, num_stages=num_stages, limits=limits), requests)
  assert tokens_of(log) == expected(requests)
  copies = copies_of(log)
  assert copies.keys() == {r.request_id for r in requests if r.sampling.max_tokens > 1}
  ahead = [c for c in copies.values() if c.num_bytes_ahead]
  assert ahead and all(0 < c.num_bytes_ahead < c.num_bytes for c in ahead)
  for copy in copies.values():
    cached = requests[copy.request_id].num_prompt_tokens - copy.num_tokens
    assert copy.num_bytes == 8 * copy.num_tokens and (cached == 0 or limits)


@pytest.mark.parametrize("last", range(1, 9))
@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_for_all_lengths_of_the_last_page_and_chunk(last, max_tokens):
  requests = make_requests(2, seed=51, prompt=(24 + last,) * 2, output=(max_tokens,) * 2)
  log = run(streaming(layer_groups=GROUPS), requests)
  assert tokens_of(log) == expected(requests)
  assert len(copies_of(log)) == (2 if max_tokens > 1 else 0)


def test_nothing_is_sent_before_the_step_that_wrote_it_has_ended():
  """Nor, by layer groups, before these layers are computed."""
  for groups in (((0, 2),), GROUPS):
    requests = make_requests(20, seed=52, prompt=(10, 60), output=(2, 4))
    cluster = streaming(layer_groups=groups)
    target = cluster.decode[0].executor
    sent, import_ = [], target.import_

    def record(handle, import_=import_, sent=sent, **where):
      sent.append((handle, where["now_s"]))
      return import_(handle, **where)

    target.import_ = record
    log = run(cluster, requests)
    computed = collections.defaultdict(dict)  # request -> position -> start and end of its step
    for step in (e for e in log if isinstance(e, Step) and e.pool == "prefill0"):
      for i, start, n in zip(step.prefill_ids, step.prefill_starts, step.prefill_tokens):
        computed[i] |= dict.fromkeys(range(start, start + n), (step.start_s, step.end_s))
    assert len({handle.num_tokens for handle, _ in sent}) > 5
    for handle, now_s in sent:
      own = computed[handle.request_id]
      for position in range(handle.start, handle.num_tokens):
        start_s, end_s = own[position]
        if handle.layers == groups[0] and len(groups) > 1:
          assert handle.payload[0].ready_s >= (start_s + end_s) / 2 - 1e-9
        else:
          assert end_s <= now_s, "sent while it was computed"


@pytest.mark.parametrize("layer_groups", [((0, 2),), GROUPS])
def test_the_source_is_told_with_each_step_what_a_stream_will_send_of_it(layer_groups):
  """So that it reads the pages behind the step: all but what was there when the stream began."""
  (request,) = make_requests(1, seed=53, prompt=(62, 62), output=(3, 3))
  cluster = streaming(layer_groups=layer_groups, num_pages=40)
  source = cluster.pools[0].executor
  submit, export, told, late = source.submit, source.export, [], []

  def part_of(handle, page_ids):
    return handle.start, handle.num_tokens, handle.layers, page_ids

  def record(plan, now_s, exports):
    told[:] = [part_of(handle, page_ids) for handle, page_ids in exports]
    return submit(plan, now_s, exports)

  def compare(handle, *, page_ids, now_s):
    if (part := part_of(handle, page_ids)) in told:
      told.remove(part)
    else:
      late.append(part)
    return export(handle, page_ids=page_ids, now_s=now_s)

  source.submit, source.export = record, compare
  log = run(cluster, [request])
  assert not told and len(late) <= 1 and all(start == 0 for start, *_ in late)
  assert copies_of(log)[0].num_bytes_ahead
  assert tokens_of(log) == expected([request])


@pytest.mark.parametrize(("layer_groups", "most"), [(((0, 2),), 0.2), (GROUPS, 0.1)])
def test_little_of_a_long_prompts_copy_is_exposed(layer_groups, most):
  """Of a prompt of eight chunks, against sending it at its end."""
  exposed_s = {}
  for streams in (False, True):
    (request,) = make_requests(1, seed=53, prompt=(64, 64), output=(3, 3))
    log = run(
      streaming(layer_groups=layer_groups, hand_off=HandOff(streams=streams), num_pages=40),
      [request],
    )
    record = request_records(log)[0]
    assert record.copy_start_s == record.token_s[0]
    exposed_s[streams] = record.copy_s
    assert bool(copies_of(log)[0].num_bytes_ahead) is streams
  assert exposed_s[False] == pytest.approx(8 * 5e-3, rel=1e-6)
  assert exposed_s[True] < most * exposed_s[False]


def test_a_prompt_in_one_step_is_streamed_by_its_layer_groups():
  requests = make_requests(8, seed=54, prompt=(8, 40), output=(2, 3))
  log = run(make_cluster("disaggregated", link=LINK, layer_groups=GROUPS), requests)
  assert tokens_of(log) == expected(requests)
  for copy in copies_of(log).values():
    assert copy.num_bytes_ahead == copy.num_bytes / 2


def test_a_decode_pool_reserves_for_a_stream_no_earlier_than_the_copy_needs():
  """What it reserves lies idle until the prompt is prefilled."""
  reserved_at = {}
  for name, latency_s, rate in (("fast", 1e-5, 1e9), ("slow", 0.0, 64 / 20e-3)):
    warm, late = make_requests(2, seed=55, rate_rps=1.0, prompt=(64, 64), output=(2, 2))
    cluster = streaming(link=Link(name=name, latency_s=latency_s, bytes_per_s=rate))
    computed, reserve = {}, cluster.reserve

    def note(seq, computed=computed, reserve=reserve):
      computed.setdefault(seq.request_id, seq.num_computed_tokens)
      return reserve(seq)

    cluster.reserve = note
    run(cluster, [warm, late])
    reserved_at[name] = computed[1]
  assert reserved_at["fast"] == 56, "one chunk is left"
  assert reserved_at["slow"] == 8, "as soon as there was something to send"


def test_finished_prompts_come_before_streams():
  """One row to decode in: it goes to whoever waits in the outbox, never to a stream."""
  requests = make_requests(12, seed=56, rate_rps=1e6, prompt=(9, 30), output=(4, 8))
  cluster = streaming(budget=8)
  cluster.decode[0].scheduler = make_pool(role="decode", policy="decode_only", num_rows=1).scheduler
  reserve, num_waited = cluster.reserve, [0]

  def never_past_the_outbox(seq):
    assert not (cluster.outbox and seq.state is State.RUNNING)
    num_waited[0] += len(cluster.outbox) > 1
    return reserve(seq)

  cluster.reserve = never_past_the_outbox
  log = run(cluster, requests)
  assert tokens_of(log) == expected(requests)
  copied = [e.request_id for e in log if isinstance(e, Copied)]
  assert num_waited[0] and copied == sorted(copied), "in the order in which they were prefilled"


@pytest.mark.parametrize("most_bytes", [1, 64, 200])
@pytest.mark.parametrize("layer_groups", [((0, 2),), GROUPS])
def test_no_more_bytes_are_under_way_than_may_be(most_bytes, layer_groups):
  requests = make_requests(16, seed=57, prompt=(4, 60), output=(2, 6))
  cluster = streaming(
    hand_off=HandOff(most_bytes=most_bytes), layer_groups=layer_groups, num_rows=6
  )
  counts = set()

  def count(turn):
    parts = [part.handle.num_bytes for t in cluster.transfers for part in t.parts]
    counts.add(len(parts))
    assert len(parts) <= 1 or sum(parts) <= most_bytes

  log = run(cluster, requests, each_turn=count)
  assert tokens_of(log) == expected(requests) and len(copies_of(log)) == 16
  assert all(c.num_bytes == 8 * c.num_tokens for c in copies_of(log).values()), "sent twice"
  assert max(counts) == 1 if most_bytes == 1 else max(counts) > 1 or most_bytes == 64


@pytest.mark.parametrize("most_bytes", [64, 100, 200])
def test_nor_where_a_step_sends_several_prompts_by_their_layers(most_bytes):
  requests = make_requests(40, seed=57, rate_rps=500.0, prompt=(4, 20), output=(2, 6))
  hand_off = HandOff(most_bytes=most_bytes)
  cluster = streaming(hand_off=hand_off, layer_groups=GROUPS, num_rows=12, budget=60)

  def never_more(turn):
    parts = [part.handle.num_bytes for t in cluster.transfers for part in t.parts]
    assert len(parts) <= 1 or sum(parts) <= most_bytes

  log = run(cluster, requests, each_turn=never_more)
  assert tokens_of(log) == expected(requests)


@pytest.mark.parametrize("streams", [False, True])
def test_a_large_cache_is_not_passed_for_ever_by_small_ones(streams):
  """The link is always busy, and nothing else fits beside the large one."""
  small = make_requests(100, seed=61, rate_rps=100.0, prompt=(8, 8), output=(2, 2))
  (large,) = make_requests(1, seed=62, prompt=(60, 60), output=(3, 3))
  large = dataclasses.replace(large, request_id=1000, arrival_s=0.2)
  cluster = make_cluster(
    "disaggregated",
    link=Link(name="slow", latency_s=0.0, bytes_per_s=64 / 11e-3),
    hand_off=HandOff(streams=streams, most_bytes=200),
    num_rows=30,
    num_pages=300,
    budget=30,
  )
  log = run(cluster, [*small, large])
  records = request_records(log)
  arrived = sorted(records.values(), key=lambda r: r.token_s[0])
  started_s = [r.copy_start_s for r in arrived]
  assert started_s == sorted(started_s)
  assert arrived[-1].request_id != 1000 and max(started_s) - started_s[0] > 0.5


@pytest.mark.parametrize("streams", [False, True])
def test_a_stream_never_waits_for_pages_of_those_that_wait_for_it(streams):
  """Where prompts take pages as they grow, a short one overtakes a long one in progress."""
  limits = dict(reservation="chunk", long_prompt_tokens=16, long_prompt_share=0.5)
  for seed in range(12):
    requests = make_requests(10, seed=seed, rate_rps=1e6, prompt=(4, 44), output=(3, 4))
    cluster = make_cluster(
      CHUNKS,
      hand_off=HandOff(streams=streams),
      num_pages=12,
      pages_per_row=12,
      num_rows=4,
      watermark=0.0,
      limits=limits,
    )
    log = run(cluster, requests)
    assert tokens_of(log) == expected(requests)


def test_what_a_step_brings_back_from_the_host_is_not_sent_before_it_has():
  requests = make_requests(4, seed=64, rate_rps=1e6, prompt=(40, 44), output=(3, 4))
  cluster = streaming(limits={"swap_tokens": 200})
  scheduler, num_swapped = cluster.entry[0].scheduler, [0]

  def preempt_the_first_half_way(turn):
    for seq in list(scheduler.prefilling.values()):
      if seq.num_computed_tokens >= 16 and not seq.num_preemptions:
        scheduler.preempt(seq)
        scheduler.waiting[seq.request_id] = seq  # behind others, who get its pages
        num_swapped[0] += 1

  log = run(cluster, requests, each_turn=preempt_the_first_half_way)
  assert tokens_of(log) == expected(requests)
  assert num_swapped[0] == 4


def test_how_long_copies_take_is_told_without_the_steps_that_some_wait_for():
  requests = make_requests(1, seed=63, prompt=(64, 64), output=(2, 2))
  cluster = streaming(layer_groups=GROUPS)
  run(cluster, requests)
  assert cluster.copy_s_per_token == pytest.approx(5e-3 / 8, rel=1e-6)


def test_an_unbounded_hand_off_has_more_under_way():
  requests = make_requests(16, seed=57, rate_rps=1e6, prompt=(4, 60), output=(2, 6))
  cluster = streaming(link=Link(name="slow", latency_s=0.1, bytes_per_s=1e9))
  most = [0]

  def count(turn):
    most[0] = max(most[0], sum(len(t.parts) for t in cluster.transfers))

  run(cluster, requests, each_turn=count)
  assert most[0] > 3


@pytest.mark.parametrize("at", ["cancel", "fails"])
def test_a_stream_whose_request_ends_before_its_prompt_frees_both_pools(at):
  (request,) = make_requests(1, seed=58, prompt=(64, 64), output=(3, 3))
  cluster = streaming()
  inbox, log, clock = Inbox([request], is_open=True), EventLog(), VirtualClock()
  seen = []
  for _ in serve(cluster, inbox, clock, log):
    cluster.check()
    if cluster.transfers and not seen:
      seen.append(cluster.transfers[0])
      assert seen[0].is_ahead and seen[0].seq.state is State.RUNNING
      if at == "cancel":
        inbox.cancel(0)
      else:
        cluster.entry[0].executor._fails = lambda i: "broken"
    if inbox.num_left == 0:
      inbox.close()
  assert [e.reason for e in log if isinstance(e, Failed)] == [
    "cancelled" if at == "cancel" else "broken"
  ]
  assert not copies_of(log) and not cluster.transfers
  for pool in cluster.pools:
    assert pool.scheduler.pages.num_free_pages == pool.scheduler.pages.config.num_pages


def test_more_requests_share_a_decode_pool_that_grows_and_the_newest_are_computed_again():
  requests = make_requests(10, seed=59, rate_rps=1e6, prompt=(8, 12), output=(30, 40))
  most, preempted = {}, {}
  for reservation in ("request", "prompt"):
    cluster = make_cluster(
      "disaggregated",
      hand_off=HandOff(reservation=reservation),
      num_pages=40,
      num_rows=10,
      link=LINK,
    )
    counts = [0]

    def count(turn, cluster=cluster, counts=counts):
      counts[0] = max(counts[0], len(cluster.decode[0].scheduler.running))

    log = run(cluster, requests, each_turn=count)
    assert tokens_of(log) == expected(requests)
    most[reservation] = counts[0]
    preempted[reservation] = sum(isinstance(e, Preempted) for e in log)
    order = [e.pool for e in log if isinstance(e, Preempted)]
    assert set(order) <= {"decode0"}
  assert most["prompt"] > most["request"]
  assert preempted["request"] == 0 < preempted["prompt"]


def test_one_that_was_computed_again_often_enough_gets_all_it_may_need():
  requests = make_requests(10, seed=59, rate_rps=1e6, prompt=(8, 12), output=(30, 40))
  num_preemptions = {}
  for most in (0, 1, 3):
    cluster = make_cluster(
      "disaggregated",
      hand_off=HandOff(reservation="prompt"),
      num_pages=24,
      num_rows=10,
      link=LINK,
      limits={"max_preemptions": most},
    )
    records = request_records(log := run(cluster, requests)).values()
    assert tokens_of(log) == expected(requests)
    num_preemptions[most] = max(r.num_preemptions for r in records)
  assert num_preemptions[0] == 0 < num_preemptions[1] <= 1 < num_preemptions[3] <= 3


@pytest.mark.parametrize(
  ("options", "message"),
  [
    (dict(reservation="hope"), "hand_off.reservation='hope' must be 'request' or 'prompt'"),
    (dict(most_bytes=0), "hand_off.most_bytes=0 must be at least 1"),
    (dict(layer_groups=0), "hand_off.layer_groups=0 must be at least 1"),
  ],
)
def test_a_wrong_option_is_named(options, message):
  with pytest.raises(ValueError, match=message):
    HandOff(**options)


def test_chunks_of_one_prompt_are_in_both_stages_of_a_pipeline_at_once():
  (request,) = make_requests(1, seed=60, prompt=(64, 64), output=(1, 1))
  took_s = {}
  for num_stages in (1, 2):
    cluster = streaming(layer_groups=GROUPS, num_stages=num_stages)
    log = run(cluster, [request])
    took_s[num_stages] = request_records(log)[0].prefill_s
  step_s = 8e-3 + 28e-6 * 8  # `virtual.step_s`
  assert took_s[1] == pytest.approx(8 * step_s, rel=1e-6)
  assert took_s[2] == pytest.approx(9 * step_s / 2, rel=1e-6)
