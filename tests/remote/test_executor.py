"""A RemoteExecutor against workers that are threads of the test: what goes wrong, and when."""

import itertools
import queue
import threading
import time

import pytest

from pdjax.core.clock import WallClock
from pdjax.core.device_group import DeviceGroup
from pdjax.core.plain import to_plain
from pdjax.core.plan import StepResult
from pdjax.core.request import SamplingParams
from pdjax.remote.executor import NUM_STARTS, RemoteError, RemoteExecutor, start_all
from pdjax.remote.protocol import WorkerReady, WorkerSetup, accept, connect, listen
from pdjax.scheduling.pages import PageConfig
from pdjax.scheduling.probe import probe_plan
from pdjax.serving.executor import Handle, PageShape, PoolLost

pytestmark = pytest.mark.quick
PAGES = PageConfig(num_rows=2, page_size=4, pages_per_row=4, num_pages=8)
PLAN = probe_plan(PAGES, prefills=(3,))
SETUP = WorkerSetup(
  model_path="a model",
  pages=PAGES,
  whole_budget=16,
  chunk_budget=16,
  uses=("prefill",),
  group=DeviceGroup(devices=(0,)),
  copy_timeout_s=0.1,
)
READY = WorkerReady(
  vocab_size=10,
  page_shape=PageShape(page_size=4, num_layers=4, num_kv_heads=1, head_dim=2, dtype="float32"),
  bytes_per_token=64,
  layer_groups=((0, 2), (2, 4)),
  num_stages=1,
  split=(((0, 4), ((0, 1),)),),
  platform="cpu",
  parts=((0, 1),),
)
HANDLE = Handle(
  request_id=7,
  num_tokens=6,
  num_prompt_tokens=6,
  first_token_id=3,
  sampling=SamplingParams(max_tokens=2),
)


class Worker:
  """What a worker process is to its coordinator; the test says what it answers."""

  def __init__(self):
    with listen() as listener:
      self.end = connect("{}:{}".format(*listener.getsockname()))
      self.connection = accept(listener, 5)
    self.got: queue.Queue = queue.Queue()
    self.process_id, self.was_killed = 1, False
    threading.Thread(target=self._run, daemon=True).start()

  def _run(self):
    try:
      self.setup = self.end.receive(5)
      self.end.send({"line": "warm"})
      self.end.send({"ready": to_plain(READY)})
      while True:
        self.got.put(self.end.receive(10))
    except (OSError, EOFError):
      pass

  def next(self, do):
    message = self.got.get(timeout=5)
    assert message["do"] == do
    return message

  def answer(self, do, value):
    self.end.send({"number": self.next(do)["number"], "value": value})

  def kill(self):
    self.was_killed = True
    self.connection.close()

  close = kill


class Machine:
  """Starts workers and remembers them."""

  def __init__(self):
    self.workers = []
    self.may_start = threading.Event()
    self.may_start.set()

  def start(self):
    self.may_start.wait(5)
    self.workers.append(Worker())
    return self.workers[-1]


@pytest.fixture
def pools():
  """Two pools that are up, with the machine of each."""
  uids, machines = itertools.count(), (Machine(), Machine())
  executors = [
    RemoteExecutor(name, SETUP, uids, start=machine.start, step_timeout_s=0.4)
    for name, machine in zip("ab", machines, strict=True)
  ]
  for executor in executors:
    executor.start()
    assert list(executor.wait_until_up()) == ["warm"]
  yield list(zip(executors, machines, strict=True))
  for executor in executors:
    executor.close()


def wait_for(condition):
  end_s = time.monotonic() + 5
  while not condition():
    assert time.monotonic() < end_s, "it never came"
    time.sleep(0.01)


def test_a_step_is_a_message_and_its_answer_the_result(pools):
  (executor, machine), _ = pools
  clock = WallClock()
  ticket = executor.submit(PLAN, 0.0)
  assert clock.wait([ticket], 0.05) == []
  result = StepResult(token_ids=(4,))
  machine.workers[0].answer("submit", to_plain(result))
  assert clock.wait([ticket], 5) == [ticket] and ticket.result() == result


def test_the_facts_of_a_pool_are_those_its_worker_told(pools):
  (executor, _), _ = pools
  facts = ("vocab_size", "page_shape", "bytes_per_token", "layer_groups", "num_stages")
  for name in facts:
    assert getattr(executor, name) == getattr(READY, name)


def test_what_goes_wrong_in_a_worker_costs_its_ticket_alone(pools):
  (executor, machine), _ = pools
  ticket = executor.submit(PLAN, 0.0)
  number = machine.workers[0].next("submit")["number"]
  machine.workers[0].end.send({"number": number, "error": "ValueError: no"})
  with pytest.raises(RemoteError, match="ValueError: no"):
    ticket.result()
  assert executor.is_up


def test_all_that_was_asked_of_a_process_that_ends_is_lost(pools):
  (executor, machine), _ = pools
  tickets = [executor.submit(PLAN, 0.0) for _ in range(3)]
  machine.workers[0].end.close()
  for ticket in tickets:
    ticket.block()
    assert ticket.is_ready()
    with pytest.raises(PoolLost):
      ticket.result()
  assert not executor.is_up
  for call in (
    lambda: executor.submit(PLAN, 0.0),
    lambda: executor.export(HANDLE, page_ids=(0, 1), now_s=0.0),
  ):
    with pytest.raises(PoolLost):
      call()


def test_a_process_that_answers_nothing_is_ended(pools):
  (executor, machine), _ = pools
  ticket = executor.submit(PLAN, 0.0)
  ticket.block()
  with pytest.raises(PoolLost, match="did not answer for 0"):
    ticket.result()
  assert machine.workers[0].was_killed and not executor.is_up


def test_a_process_that_answers_others_is_not_ended(pools):
  """It works in order: what it was asked last waits for what it was asked before."""
  (executor, machine), _ = pools
  tickets = [executor.submit(PLAN, 0.0) for _ in range(4)]
  for ticket in tickets:
    time.sleep(0.25)
    machine.workers[0].answer("submit", to_plain(StepResult(token_ids=(1,))))
    ticket.result()
  assert executor.is_up


def test_a_silent_process_that_is_asked_nothing_is_left_alone(pools):
  (executor, _), _ = pools
  time.sleep(0.7)
  assert executor.is_up


def test_a_lost_pool_comes_back_in_the_background(pools):
  (executor, machine), _ = pools
  ticket = executor.submit(PLAN, 0.0)
  machine.may_start.clear()
  machine.workers[0].end.close()
  with pytest.raises(PoolLost):
    ticket.result()
  start_s = time.monotonic()
  assert executor.recover() and executor.recover(), "its K and V are lost"
  assert time.monotonic() - start_s < 0.3, "it waited for the new process"
  assert not executor.is_up
  machine.may_start.set()
  wait_for(lambda: executor.is_up)
  assert len(machine.workers) == 2, "asked twice, started once"
  ticket = executor.submit(PLAN, 0.0)
  machine.workers[1].answer("submit", to_plain(StepResult(token_ids=(5,))))
  assert ticket.result().token_ids == (5,)


def test_a_pool_that_is_alive_recovers_as_its_worker_says(pools):
  (executor, machine), _ = pools
  for lost in (True, False):
    threading.Thread(target=machine.workers[0].answer, args=("recover", lost)).start()
    assert executor.recover() is lost
  assert len(machine.workers) == 1


def test_a_process_that_cannot_start_says_why():
  def start():
    raise OSError("no more processes")

  other = RemoteExecutor("c", SETUP, itertools.count(), start=start)
  with pytest.raises(PoolLost, match="no more processes"):
    list(start_all([other]))
  with pytest.raises(PoolLost):
    _ = other.is_up


def test_a_handle_goes_from_worker_to_worker_and_the_pages_are_taken_after_they_are_offered(pools):
  (source, at_source), (target, at_target) = pools
  handle = source.export(HANDLE, page_ids=(3, 1), now_s=0.0)
  assert handle.num_bytes == 6 * READY.bytes_per_token
  exported = at_source.workers[0].next("export")
  assert (exported["handle"]["request_id"], exported["page_ids"]) == (7, [3, 1])
  ticket = target.import_(handle, row=1, page_ids=(5, 6), now_s=0.0)
  with pytest.raises(queue.Empty):
    at_target.workers[0].got.get(timeout=0.1)
  at_source.workers[0].answer("offer", {"where": "it lies"})
  message = at_target.workers[0].next("import")
  assert (message["row"], message["page_ids"]) == (1, [5, 6])
  assert message["offer"] == {"where": "it lies"}
  assert not ticket.is_ready()
  at_target.workers[0].end.send({"number": message["number"], "value": None})
  assert ticket.result() is None
  source.drop(handle)
  assert at_source.workers[0].next("drop")["export_id"] == exported["export_id"]


def test_parts_cross_as_they_are(pools):
  (source, at_source), _ = pools
  part = Handle(
    request_id=7,
    start=4,
    num_tokens=8,
    num_prompt_tokens=9,
    first_token_id=None,
    sampling=SamplingParams(max_tokens=2),
    layers=(0, 2),
  )
  handle = source.export(part, page_ids=(3,), now_s=0.0)
  assert handle.num_bytes == 4 * READY.bytes_per_token / 2
  assert at_source.workers[0].next("export")["handle"] == to_plain(part)
  source.submit(PLAN, 0.0, [(part, (3,))])
  assert at_source.workers[0].next("submit")["exports"] == [[to_plain(part), [3]]]


@pytest.mark.parametrize("dies", ["source", "target"])
def test_a_copy_whose_pool_dies_is_lost_and_never_used(pools, dies):
  (source, at_source), (target, at_target) = pools
  handle = source.export(HANDLE, page_ids=(0, 1), now_s=0.0)
  ticket = target.import_(handle, row=0, page_ids=(0, 1), now_s=0.0)
  at_source.workers[0].next("export")
  (at_source if dies == "source" else at_target).workers[0].end.close()
  if dies == "target":
    wait_for(lambda: not target.is_up)
    at_source.workers[0].answer("offer", {})
  with pytest.raises(PoolLost):
    ticket.result()
  assert (target if dies == "source" else source).is_up
  assert at_target.workers[0].got.empty(), "it was told to take pages"


def test_pages_are_not_taken_by_a_process_that_was_started_since(pools):
  """Its rows are another's: what was reserved in the old one means nothing to it."""
  (source, at_source), (target, at_target) = pools
  handle = source.export(HANDLE, page_ids=(0, 1), now_s=0.0)
  ticket = target.import_(handle, row=0, page_ids=(0, 1), now_s=0.0)
  at_source.workers[0].next("export")
  at_target.workers[0].end.close()
  wait_for(lambda: not target.is_up)
  target.recover()
  wait_for(lambda: target.is_up)
  at_source.workers[0].answer("offer", {})
  with pytest.raises(PoolLost):
    ticket.result()
  assert at_target.workers[1].got.empty()


def test_what_an_older_process_exported_is_lost(pools):
  (source, at_source), (target, _) = pools
  handle = source.export(HANDLE, page_ids=(0, 1), now_s=0.0)
  at_source.workers[0].end.close()
  wait_for(lambda: not source.is_up)
  source.recover()
  wait_for(lambda: source.is_up)
  with pytest.raises(PoolLost):
    target.import_(handle, row=0, page_ids=(0, 1), now_s=0.0)
  source.drop(handle)
  assert at_source.workers[1].got.empty()


def test_numbers_of_offers_are_never_used_twice(pools):
  (a, at_a), (b, at_b) = pools
  seen = []
  for source, at_source, target in ((a, at_a, b), (b, at_b, a), (a, at_a, b)):
    handle = source.export(HANDLE, page_ids=(0, 1), now_s=0.0)
    target.import_(handle, row=0, page_ids=(0, 1), now_s=0.0)
    seen.append(at_source.workers[-1].next("export")["export_id"])
    seen.append(at_source.workers[-1].next("offer")["uid"])
  assert len(set(seen)) == len(seen)


def test_a_closed_pool_stays_closed(pools):
  (executor, machine), _ = pools
  ticket = executor.submit(PLAN, 0.0)
  executor.close()
  with pytest.raises(PoolLost, match="closed"):
    ticket.result()
  executor.recover()
  time.sleep(0.1)
  assert len(machine.workers) == 1
  with pytest.raises(PoolLost, match="closed"):
    _ = executor.is_up


def test_a_pool_that_cannot_be_started_again_is_gone_for_good(pools):
  (executor, machine), _ = pools
  tries = []

  def start():
    tries.append(1)
    raise OSError("no more processes")

  executor._start = start
  machine.workers[0].end.close()
  wait_for(lambda: not executor.is_up)
  executor.recover()

  def is_gone():
    try:
      return not executor.is_up and False
    except PoolLost as error:
      return "no more processes" in str(error)

  wait_for(is_gone)
  assert len(tries) == NUM_STARTS
