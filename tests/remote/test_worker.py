"""Pools in processes of their own, with the tiny model: the same tokens, the same bytes, and ends.

Compiled shapes are kept in a folder, so that a worker that is started again is soon warm.
"""

import dataclasses
import itertools
import os
import pathlib
import signal
import threading
import time

import numpy as np
import pytest
from engine.pools import Engine, make_cluster, request, serve_all
from remote.small import BUDGET, PAGES, mixed_pool

from pdjax.core.clock import WallClock
from pdjax.core.device_group import DeviceGroup
from pdjax.core.request import SamplingParams
from pdjax.engine.copies import make_copies
from pdjax.remote.executor import Answer, RemoteError, RemoteExecutor, start_all
from pdjax.remote.protocol import WorkerSetup
from pdjax.scheduling.probe import probe_plan
from pdjax.serving.executor import Handle, PoolLost
from pdjax.sources import resolve

pytestmark = [pytest.mark.slow, pytest.mark.processes]
COPY_TIMEOUT_S = 3.0


def setup(tp, uses, copies, cores):
  return WorkerSetup(
    model_path=str(resolve("tiny")),
    pages=PAGES,
    whole_budget=BUDGET,
    chunk_budget=BUDGET,
    uses=uses,
    group=DeviceGroup(devices=tuple(range(tp))),
    cores=cores,
    copies=copies,
    copy_timeout_s=COPY_TIMEOUT_S,
  )


@pytest.fixture(scope="module", params=["shared_memory", "transfer"])
def pools(request):
  """A prefill pool of one device and a decode pool of two, on cores of their own if there are."""
  cores = sorted(os.sched_getaffinity(0))
  uids = itertools.count(1)
  executors = [
    RemoteExecutor(name, setup(tp, uses, request.param, (core,)), uids)
    for name, tp, uses, core in (
      ("prefill", 1, ("prefill", "gather"), cores[0]),
      ("decode", 2, ("decode", "scatter", "gather"), cores[-1]),
    )
  ]
  for _ in start_all(executors):
    pass
  yield executors
  for executor in executors:
    executor.close()


@pytest.fixture(scope="module")
def here(tiny):
  return mixed_pool(tiny)


@pytest.fixture(autouse=True)
def up(pools):
  """Both pools, empty, also after a test that ended one."""
  for executor in pools:
    try:
      executor.reset()
    except PoolLost:  # perhaps it was killed a moment ago, and this is how it is noticed
      bring_back(executor)


def bring_back(executor):
  assert executor.recover(), "K and V of a process that is gone are lost"
  end_s = time.monotonic() + 60
  while not executor.is_up:
    assert time.monotonic() < end_s, executor._why_down
    time.sleep(0.05)


def hand_over(num_tokens=11, **changes):
  fields = dict(
    request_id=5,
    num_tokens=num_tokens,
    num_prompt_tokens=num_tokens,
    first_token_id=123,
    sampling=SamplingParams(max_tokens=4),
  )
  return Handle(**fields | changes)


def read(executor, here, page_ids):
  """The bytes [2, L, K, positions, h] of pages of a worker, as this process fetches them."""
  handle = hand_over(num_tokens=len(page_ids) * PAGES.page_size)
  exported = executor.export(handle, page_ids=page_ids, now_s=0.0)
  own = here.executors[0].pieces_like(handle)
  offer = offer_of(executor, exported)
  payload = make_copies(executor.setup).fetch(offer, own)
  executor.drop(exported)
  (pieces,) = payload.values()
  return np.asarray(pieces)[:, :, :, : handle.num_tokens]


def offer_of(executor, exported):
  ask = dict(export_id=exported.payload.export_id, uid=next(executor._uids))
  split = (((0, 4), ((0, 2),)),)
  answer = executor._ask("offer", Answer(list), 10.0, **ask, split=split, each=False)
  (offer,) = answer.result()
  return offer


def prefill(executor, seed=0):
  """Computes a prompt of 11 tokens in row 0, so that its pages hold something."""
  plan = probe_plan(PAGES, prefills=(11,))
  (part,) = plan.prefills
  ids = tuple(int(i) for i in np.random.default_rng(seed).integers(0, 1000, 11))
  plan = dataclasses.replace(plan, prefills=(dataclasses.replace(part, token_ids=ids),))
  executor.submit(plan, 0.0).result()


def still_works(pools, here):
  """A copy from the first to the second pool arrives."""
  source, target = pools
  prefill(source)
  exported = source.export(hand_over(), page_ids=(0, 1, 2), now_s=0.0)
  target.import_(exported, row=0, page_ids=(0, 1, 2), now_s=0.0).result()
  source.drop(exported)
  return np.array_equal(read(source, here, (0, 1)), read(target, here, (0, 1)))


# What must be the same ----------------------------------------------------------------------------


def test_tokens_are_those_of_one_process_and_nothing_is_compiled(pools, here):
  rng = np.random.default_rng(1)
  requests = [
    request(i, rng.integers(0, 1000, length).tolist(), max_tokens=max_tokens)
    for i, (length, max_tokens) in enumerate(
      itertools.product((1, 3, 4, 5, 7, 8, 9, 12), (1, 2, 5))
    )
  ]
  before = [executor.stats() for executor in pools]
  engine = Engine(executors=pools, steps=None, pages=here.pages, buckets=here.buckets)
  tokens = {}
  for strategy, own in (("continuous", here), ("disaggregated", engine)):
    log = serve_all(make_cluster(own, strategy), requests)
    assert not [event for event in log if type(event).__name__ == "Failed"]
    tokens[strategy] = streams(log)
  assert tokens["disaggregated"] == tokens["continuous"]
  assert [len(tokens["continuous"][r.request_id]) for r in requests] == [1, 2, 5] * 8
  assert [executor.stats() for executor in pools] == before
  assert not any(stats["warnings"] for stats in before)


@pytest.mark.parametrize("killed", [0, 1])
def test_a_run_survives_a_worker_that_is_killed(pools, here, killed):
  """Tokens that were emitted are kept and not repeated; the others are computed again."""
  rng = np.random.default_rng(2)
  requests = [
    request(i, rng.integers(0, 1000, 9).tolist(), arrival_s=0.02 * i, max_tokens=8)
    for i in range(12)
  ]
  expected = streams(serve_all(make_cluster(here, "continuous"), requests))
  engine = Engine(executors=pools, steps=None, pages=here.pages, buckets=here.buckets)
  timer = threading.Timer(0.15, os.kill, (pools[killed].process_id, signal.SIGKILL))
  timer.start()
  log = serve_all(make_cluster(engine, "disaggregated"), requests)
  timer.join()
  assert not [event for event in log if type(event).__name__ == "Failed"]
  assert streams(log) == expected
  assert [event for event in log if type(event).__name__ == "PoolChanged"], "it came too late"


def streams(log):
  found = {}
  for event in log:
    if type(event).__name__ == "Step":
      for request_id, token_id in zip(event.emitted_ids, event.token_ids, strict=True):
        found.setdefault(request_id, []).append(token_id)
  return found


def test_bytes_are_the_same_after_a_copy_to_twice_as_many_devices(pools, here):
  source, target = pools
  prefill(source)
  exported = source.export(hand_over(), page_ids=(0, 1, 2), now_s=0.0)
  assert exported.num_bytes == 11 * source.bytes_per_token
  ticket = target.import_(exported, row=1, page_ids=(4, 5, 6), now_s=0.0)
  assert WallClock().wait([ticket], 10.0) == [ticket]
  assert ticket.result() is None
  source.drop(exported)
  sent, got = read(source, here, (0, 1, 2)), read(target, here, (4, 5, 6))
  assert np.array_equal(sent[:, :, :, :11], got[:, :, :, :11])
  keys, values = sent[0, :, :, :11], sent[1, :, :, :11]
  assert keys.any() and values.any() and not np.array_equal(keys, values)


def test_parts_of_a_sequence_arrive_part_by_part(pools, here):
  source, target = pools
  prefill(source)
  parts = [
    hand_over(8, num_prompt_tokens=11, first_token_id=None, layers=(0, 4)),
    hand_over(11, start=8),
  ]
  for part, pages in zip(parts, ((0, 1), (2,)), strict=True):
    exported = source.export(part, page_ids=pages, now_s=0.0)
    target.import_(exported, row=1, page_ids=(4, 5, 6), now_s=0.0).result()
    source.drop(exported)
  sent, got = read(source, here, (0, 1, 2)), read(target, here, (4, 5, 6))
  assert np.array_equal(sent[:, :, :, :11], got[:, :, :, :11])


# What must fail, and nothing else -----------------------------------------------------------------


def test_a_worker_killed_in_a_step_is_lost_and_comes_back(pools, here):
  source, _ = pools
  tickets = [source.submit(probe_plan(PAGES, prefills=(16,)), 0.0) for _ in range(20)]
  os.kill(source.process_id, signal.SIGKILL)
  with pytest.raises(PoolLost):
    tickets[-1].result()
  assert not source.is_up
  bring_back(source)
  assert still_works(pools, here)
  before = source.stats()
  assert still_works(pools, here)
  assert source.stats() == before, "a worker that came back compiled while it served"


@pytest.mark.parametrize("killed", [0, 1])
def test_a_copy_whose_worker_is_killed_is_never_used(pools, here, killed):
  source, target = pools
  prefill(source)
  before = read(target, here, (0, 1))
  exported = source.export(hand_over(), page_ids=(0, 1, 2), now_s=0.0)
  ticket = target.import_(exported, row=0, page_ids=(0, 1, 2), now_s=0.0)
  os.kill(pools[killed].process_id, signal.SIGKILL)
  assert WallClock().wait([ticket], 4 * COPY_TIMEOUT_S) == [ticket], "nobody says that it failed"
  try:
    ticket.result()
    arrived = True
  except (PoolLost, RemoteError):
    arrived = False
  if killed == 1:
    assert not arrived or not target.is_up
  elif not arrived:
    assert np.array_equal(read(target, here, (0, 1)), before)


def test_a_target_that_hung_for_longer_than_a_copy_may_take_still_finds_the_offer(pools, here):
  """Else it would wait for ever, with a thread and the pages that it asked for."""
  source, target = pools
  prefill(source)
  exported = source.export(hand_over(), page_ids=(0, 1, 2), now_s=0.0)
  os.kill(target.process_id, signal.SIGSTOP)
  try:
    ticket = target.import_(exported, row=0, page_ids=(4, 5, 6), now_s=0.0)
    time.sleep(COPY_TIMEOUT_S + 1)
  finally:
    os.kill(target.process_id, signal.SIGCONT)
  assert ticket.result() is None
  source.drop(exported)
  assert np.array_equal(read(source, here, (0, 1)), read(target, here, (4, 5)))


def test_pages_that_were_never_offered_fail_in_time_and_change_nothing(pools, here):
  source, target = pools
  prefill(source)
  before = read(target, here, (0, 1))
  exported = source.export(hand_over(), page_ids=(0, 1, 2), now_s=0.0)
  offer = offer_of(source, exported)
  never = {**offer, "uid": next(source._uids)}
  start_s = time.monotonic()
  ticket = take(target, never)
  with pytest.raises(RemoteError, match=r"not there|Timeout"):
    ticket.result()
  assert time.monotonic() - start_s < COPY_TIMEOUT_S + 3
  assert target.is_up and np.array_equal(read(target, here, (0, 1)), before)
  assert still_works(pools, here)


def test_an_offer_of_a_worker_that_has_ended_is_never_used(pools, here):
  source, target = pools
  prefill(source)
  assert still_works(pools, here), "they know each other"
  before = read(target, here, (0, 1))
  prefill(source, seed=3)
  exported = source.export(hand_over(), page_ids=(0, 1, 2), now_s=0.0)
  offer = offer_of(source, exported)
  os.kill(source.process_id, signal.SIGKILL)
  while source.is_up:
    time.sleep(0.01)
  with pytest.raises(RemoteError):
    take(target, offer).result()
  assert target.is_up and np.array_equal(read(target, here, (0, 1)), before)


def take(target, offer):
  """Tells a worker to take what somebody is said to offer."""
  handle = dataclasses.asdict(hand_over())
  ask = dict(handle=handle, row=0, page_ids=(0, 1, 2), offer=[offer])
  return target._ask("import", Answer(lambda data: data), 30.0, **ask)


def test_a_worker_that_hangs_is_ended(pools):
  source, _ = pools
  source._step_timeout_s = 1.0
  try:
    os.kill(source.process_id, signal.SIGSTOP)
    ticket = source.submit(probe_plan(PAGES, prefills=(16,)), 0.0)
    with pytest.raises(PoolLost, match="did not answer"):
      ticket.result()
    assert not source.is_up
  finally:
    source._step_timeout_s = 60.0


def test_workers_have_the_cores_they_were_given(pools):
  for executor in pools:
    status = pathlib.Path(f"/proc/{executor.process_id}/task")
    for thread in status.iterdir():
      (allowed,) = [
        line.split()[1]
        for line in (thread / "status").read_text().splitlines()
        if line.startswith("Cpus_allowed_list")
      ]
      assert (int(allowed),) == executor.setup.cores
