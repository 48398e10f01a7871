"""Frames, greetings and time-outs of the protocol between coordinator and workers."""

import json
import socket
import threading
import time

import pytest

from pdjax.core.plain import from_plain, to_plain
from pdjax.core.plan import StepPlan
from pdjax.remote import protocol
from pdjax.remote.protocol import Connection, ProtocolError, accept, connect, greet, listen
from pdjax.scheduling.pages import PageConfig
from pdjax.scheduling.probe import probe_plan

pytestmark = pytest.mark.quick


@pytest.fixture
def ends():
  """A coordinator's end and a worker's, on loopback."""
  with listen() as listener:
    worker = connect("{}:{}".format(*listener.getsockname()))
    coordinator = accept(listener, timeout_s=5)
  yield coordinator, worker
  coordinator.close()
  worker.close()


def greet_both(ends, coordinator_secret, worker_secret):
  """What each end raises."""
  raised = {}

  def run(name, end, secret):
    try:
      greet(end, secret, is_worker=name == "worker")
    except Exception as error:
      raised[name] = error
      end.close()

  thread = threading.Thread(target=run, args=("worker", ends[1], worker_secret))
  thread.start()
  run("coordinator", ends[0], coordinator_secret)
  thread.join(10)
  return raised


def test_who_knows_the_secret_is_greeted_and_messages_go_both_ways(ends):
  assert greet_both(ends, "same", "same") == {}
  for sender, receiver in (ends, ends[::-1]):
    sender.send({"do": "something", "list": [1, 2.5, None]})
    assert receiver.receive(5) == {"do": "something", "list": [1, 2.5, None]}


def test_another_secret_is_refused_by_both_ends_and_never_sent(ends, monkeypatch):
  sent = []
  send = Connection.send
  monkeypatch.setattr(Connection, "send", lambda end, m: (sent.append(json.dumps(m)), send(end, m)))
  raised = greet_both(ends, "the coordinator's own", "a stranger's")
  assert isinstance(raised["coordinator"], ProtocolError)
  assert isinstance(raised["worker"], ProtocolError)
  assert "secret" in str(raised["coordinator"])
  assert not [text for text in sent if "coordinator's own" in text or "stranger" in text]


def test_an_old_proof_proves_nothing(ends):
  """A stranger who saw a greeting cannot use it again: the challenge is another one."""
  coordinator, worker = ends
  old = protocol._proof("secret", "worker", {"coordinator": "a" * 32, "worker": "b" * 32})
  worker.send({"pdjax": protocol.VERSION, "role": "worker", "nonce": "b" * 32})
  worker.send({"proof": old})
  with pytest.raises(ProtocolError, match="does not know the secret"):
    greet(coordinator, "secret", is_worker=False)


def test_a_proof_cannot_be_reflected(ends):
  """A stranger who answers with what it was just sent has the wrong role."""
  coordinator, stranger = ends

  def reflect():
    hello = stranger.receive(5)
    stranger.send({**hello, "role": "worker"})
    stranger.send(stranger.receive(5))

  thread = threading.Thread(target=reflect)
  thread.start()
  with pytest.raises(ProtocolError, match="does not know the secret"):
    greet(coordinator, "secret", is_worker=False)
  thread.join(5)


def test_another_version_is_named(ends):
  coordinator, worker = ends
  worker.send({"pdjax": protocol.VERSION + 1, "role": "worker", "nonce": "00"})
  with pytest.raises(ProtocolError, match=rf"version {protocol.VERSION + 1}.*{protocol.VERSION}"):
    greet(coordinator, "secret", is_worker=False)


def test_a_nonce_and_a_proof_that_cannot_be_encoded_are_refused(ends):
  coordinator, stranger = ends
  hello = {"pdjax": protocol.VERSION, "role": "worker"}
  stranger.send(hello | {"nonce": "\ud800"})
  with pytest.raises(ProtocolError, match="was expected to say hello"):
    greet(coordinator, "secret", is_worker=False)
  stranger.send(hello | {"nonce": "00"})
  stranger.send({"proof": "\ud800"})
  with pytest.raises(ProtocolError, match="does not know the secret"):
    greet(coordinator, "secret", is_worker=False)


def test_two_workers_do_not_greet_each_other(ends):
  coordinator, worker = ends
  worker.send({"pdjax": protocol.VERSION, "role": "coordinator", "nonce": "00"})
  with pytest.raises(ProtocolError, match="a worker was expected"):
    greet(coordinator, "secret", is_worker=False)


@pytest.mark.parametrize(
  ("data", "says"),
  [
    (b"GET / HTTP/1.1\r\n\r\n", "another protocol"),
    (b"\x00\x00\x00\x05hello", "no JSON"),
    (b"\x00\x00\x00\x02[]", "no JSON object"),
    (b"\x80\x04\x95.", "another protocol"),  # a pickle
    (b"\x00\x00\x0f\xa0" + b"[" * 4000, "no JSON"),
  ],
)
def test_a_peer_that_speaks_something_else_is_told_apart(ends, data, says):
  coordinator, worker = ends
  worker._socket.sendall(data)
  with pytest.raises(ProtocolError, match=says):
    greet(coordinator, "secret", is_worker=False)


def test_a_hello_cannot_be_large(ends):
  coordinator, worker = ends
  worker.send({"pdjax": protocol.VERSION, "role": "worker", "nonce": "0" * 5000})
  with pytest.raises(ProtocolError, match="at most 4096"):
    greet(coordinator, "secret", is_worker=False)


def test_a_frame_that_is_too_large_is_neither_sent_nor_read(ends, monkeypatch):
  monkeypatch.setattr(protocol, "MAX_FRAME_BYTES", 100)
  coordinator, worker = ends
  with pytest.raises(ProtocolError, match="at most 100"):
    worker.send({"ids": list(range(100))})
  worker._socket.sendall((101).to_bytes(4, "big"))
  with pytest.raises(ProtocolError, match="101 bytes"):
    coordinator.receive(5, max_bytes=100)


def test_waiting_ends_with_the_time_out_and_loses_nothing(ends):
  coordinator, worker = ends
  start_s = time.monotonic()
  assert coordinator.receive(0.1) is None
  assert 0.05 < time.monotonic() - start_s < 2
  data = json.dumps({"a": 1}).encode()
  worker._socket.sendall(len(data).to_bytes(4, "big") + data[:3])
  assert coordinator.receive(0.05) is None
  worker._socket.sendall(data[3:])
  assert coordinator.receive(5) == {"a": 1}


def test_a_peer_that_says_nothing_is_not_waited_for_long(ends, monkeypatch):
  monkeypatch.setattr(protocol, "HELLO_TIMEOUT_S", 0.1)
  with pytest.raises(ProtocolError, match=r"said nothing .* 0.1 s"):
    greet(ends[0], "secret", is_worker=False)


def test_a_peer_that_says_hello_bit_by_bit_is_not_waited_for_long(ends, monkeypatch):
  monkeypatch.setattr(protocol, "HELLO_TIMEOUT_S", 0.3)
  coordinator, stranger = ends

  def drip():
    stranger._socket.sendall((4000).to_bytes(4, "big"))
    for _ in range(60):
      try:
        stranger._socket.sendall(b" ")
      except OSError:
        return
      time.sleep(0.05)

  thread = threading.Thread(target=drip)
  thread.start()
  start_s = time.monotonic()
  with pytest.raises(ProtocolError, match="said nothing whole"):
    greet(coordinator, "secret", is_worker=False)
  assert time.monotonic() - start_s < 2
  coordinator.close()
  thread.join(5)


def test_the_end_of_a_connection_is_told_from_silence(ends):
  coordinator, worker = ends
  worker.close()
  with pytest.raises(EOFError):
    coordinator.receive(5)


def test_messages_of_two_threads_do_not_mix(ends):
  coordinator, worker = ends
  messages = [[{"who": who, "ids": [who] * 5000} for _ in range(50)] for who in range(2)]
  threads = [
    threading.Thread(target=lambda own=own: [worker.send(message) for message in own])
    for own in messages
  ]
  for thread in threads:
    thread.start()
  received = [coordinator.receive(5) for _ in range(100)]
  for thread in threads:
    thread.join(5)
  for who, own in enumerate(messages):
    assert [message for message in received if message["who"] == who] == own


def test_only_this_machine_can_reach_a_listener():
  with listen() as listener:
    host, _ = listener.getsockname()
    assert host == "127.0.0.1"


def test_nobody_calls():
  with listen() as listener, pytest.raises(TimeoutError):
    accept(listener, timeout_s=0.05)


def test_nobody_listens():
  with socket.create_server(("127.0.0.1", 0)) as gone:
    address = "{}:{}".format(*gone.getsockname())
  with pytest.raises(OSError):
    connect(address, timeout_s=1)


def test_a_plan_crosses_unchanged(ends):
  coordinator, worker = ends
  pages = PageConfig(num_rows=4, page_size=4, pages_per_row=8, num_pages=32)
  plan = probe_plan(pages, prefills=(5, 9), decodes=2)
  coordinator.send({"plan": to_plain(plan)})
  assert from_plain(StepPlan, worker.receive(5)["plan"]) == plan
