"""What crosses between the coordinator and a worker: frames of JSON over a socket, never pickle.

A frame is its length (4 bytes, big-endian) and a JSON object. Both ends first prove that they know
the shared secret: each answers the other's challenge with an HMAC over both, so the secret itself
is never sent and an old answer proves nothing. Then messages go both ways. Nothing that a peer
sends is executed.

  to the worker, first     a `WorkerPlace`, if it waited for its coordinator on another machine
  to the worker, then      a `WorkerSetup`              -> lines of progress, then a `WorkerReady`
  to the worker, numbered  submit import recover reset  -> the number, and a result or an error
                           offer meet stats holds top2_margin
  to the worker            export drop                  (no answer: an offer says what went wrong)
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import json
import math
import operator
import secrets
import select
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

from pdjax.core.device_group import DeviceGroup
from pdjax.scheduling.pages import PageConfig
from pdjax.serving.executor import PageShape

VERSION = 2
MAX_FRAME_BYTES = 64 << 20  # a plan of a million prompt tokens is 8 MB
MAX_HELLO_BYTES = 4096
HELLO_TIMEOUT_S = 10.0
SEND_TIMEOUT_S = 30.0  # a peer that reads nothing for so long is gone

Message = Mapping[str, Any]


class ProtocolError(Exception):
  """The peer does not speak as it must: another version, another secret, another protocol."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
  """What a worker makes its pool of.

  `group` has indices of the machine's devices (the CPU is split into as many as it takes).
  `layer_groups` is into how many groups the layers of a stage are cut. `dtype` None is float32 on a
  CPU and bfloat16 elsewhere. `cores` pins the process to them, XLA's threads included; None lets it
  run anywhere. `copies` is how K and V come to other processes: by `shared_memory` of one machine,
  or by the `transfer` server of JAX. A copy that takes longer than `copy_timeout_s` fails.

  Raises:
    ValueError: an unknown way to copy, or a time-out that is not positive.
  """

  model_path: str
  dtype: str | None = None
  pages: PageConfig
  whole_budget: int
  chunk_budget: int
  layout: str = "slots"
  attention: str = "auto"
  uses: tuple[str, ...]
  group: DeviceGroup
  layer_groups: int = 1
  cores: tuple[int, ...] | None = None
  check_weights: bool = False
  copies: str = "shared_memory"
  copy_timeout_s: float = 30.0

  def __post_init__(self):
    if self.copies not in ("shared_memory", "transfer"):
      raise ValueError(f"copies={self.copies!r} must be 'shared_memory' or 'transfer'")
    if not self.copy_timeout_s > 0:
      raise ValueError(f"copy_timeout_s={self.copy_timeout_s} must be positive")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlace:
  """What processes of a pool do not have in common: said to each before the setup, which they have.

  `devices` are those that it has of its machine, by index. `host` is where other machines reach it:
  the transfer server and `jax.distributed` are bound to it. It is the process `process_id` of
  `num_processes`, which meet at `meet_at`, HOST:PORT of the first; None asks that one to choose.
  """

  devices: tuple[int, ...]
  host: str = "127.0.0.1"
  process_id: int = 0
  num_processes: int = 1
  meet_at: str | None = None


LayerRange = tuple[int, int]  # [first, last)
Heads = tuple[int, int]  # kv heads [first, last)
Split = tuple[tuple[LayerRange, tuple[Heads, ...]], ...]
"""How a pool holds pages: for each stage its layers, and the kv heads [first, last) of each device.

What another pool must know to cut pages for it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReady:
  """What a worker says of its pool once it is warm: the facts of an `Executor`, and its `Split`.

  `parts` are the kv heads that each of its processes gives to others.
  """

  vocab_size: int
  page_shape: PageShape
  bytes_per_token: int
  layer_groups: tuple[LayerRange, ...]
  num_stages: int
  split: Split
  platform: str
  parts: tuple[Heads, ...]


class Connection:
  """A socket between two ends that trust each other. Any thread may send; one receives."""

  def __init__(self, sock: socket.socket):
    self._socket = sock
    self._send_lock = threading.Lock()
    self._received = bytearray()
    sock.settimeout(SEND_TIMEOUT_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a machine may go without a word
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
      if hasattr(socket, option):
        sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

  @property
  def peer_host(self) -> str:
    """The address of the peer's machine."""
    return self._socket.getpeername()[0]

  def send(self, message: Message) -> None:
    """Sends one message whole.

    Raises:
      ProtocolError: it is larger than a frame may be.
      OSError: the connection is gone, or the peer took nothing for as long as the time-out.
    """
    # A workload may have drawn its token ids with numpy, whose integers JSON does not know.
    text = json.dumps(message, separators=(",", ":"), allow_nan=False, default=operator.index)
    data = text.encode()
    if len(data) > MAX_FRAME_BYTES:
      raise ProtocolError(f"a message of {len(data)} bytes; at most {MAX_FRAME_BYTES} can be sent")
    with self._send_lock:
      try:
        self._socket.sendall(len(data).to_bytes(4, "big") + data)
      except BaseException:  # also Ctrl-C: a part of a frame has spoilt the stream
        self.close()
        raise

  def receive(
    self,
    timeout_s: float | None,
    max_bytes: int = MAX_FRAME_BYTES,
    most_s: float = math.inf,
  ) -> Message | None:
    """The next message; None if nothing came for `timeout_s`, or not all of it within `most_s`.

    A part that came is kept.

    Raises:
      ProtocolError: what came is no message.
      OSError: the connection is gone (EOFError: its end was reached).
    """
    end_s = time.monotonic() + most_s
    if not self._fill(4, timeout_s, end_s):
      return None
    num_bytes = int.from_bytes(self._received[:4], "big")
    if num_bytes > max_bytes:
      raise ProtocolError(
        f"a frame of {num_bytes} bytes, but at most {max_bytes} are allowed: the peer speaks "
        f"another protocol"
      )
    if not self._fill(4 + num_bytes, timeout_s, end_s):
      return None
    data = bytes(self._received[4 : 4 + num_bytes])
    del self._received[: 4 + num_bytes]
    try:
      message = json.loads(data)
    except (ValueError, RecursionError) as error:  # strangers are read before they prove anything
      raise ProtocolError(f"a frame that is no JSON: {data[:40]!r}") from error
    if not isinstance(message, dict):
      raise ProtocolError(f"a frame that is no JSON object: {data[:40]!r}")
    return message

  def _fill(self, num_bytes: int, timeout_s: float | None, end_s: float) -> bool:
    """Receives until so many bytes are there; False if nothing came for `timeout_s`, or late."""
    poll = select.poll()  # not the socket's time-out, which is for those who send
    try:
      poll.register(self._socket, select.POLLIN)
    except ValueError as error:  # a closed socket has no file descriptor
      raise OSError("the connection was closed at this end") from error
    while len(self._received) < num_bytes:
      left_s = end_s - time.monotonic()
      if left_s <= 0 or not poll.poll(None if timeout_s is None else 1e3 * min(timeout_s, left_s)):
        return False
      data = self._socket.recv(max(num_bytes - len(self._received), 1 << 16))
      if not data:
        raise EOFError("the peer closed the connection")
      self._received += data
    return True

  def close(self) -> None:
    """Ends the connection for both ends; a thread that receives finds out."""
    with contextlib.suppress(OSError):
      self._socket.shutdown(socket.SHUT_RDWR)
    self._socket.close()


def greet(connection: Connection, secret: str, *, is_worker: bool) -> None:
  """Finds out whether the peer speaks this protocol and knows the secret, and proves the same.

  Raises:
    ProtocolError: it does not, and why.
    OSError: the connection is gone.
  """
  us, them = ("worker", "coordinator") if is_worker else ("coordinator", "worker")
  own = secrets.token_hex(16)
  connection.send({"pdjax": VERSION, "role": us, "nonce": own})
  hello = _hello(connection, us)
  if hello.get("pdjax") != VERSION:
    raise ProtocolError(
      f"the {them} speaks version {hello.get('pdjax')!r} of the protocol, this {us} {VERSION}"
    )
  if hello.get("role") != them or not _is_text(hello.get("nonce")):
    raise ProtocolError(f"a {them} was expected to say hello, not {hello}")
  nonces = {us: own, them: hello["nonce"]}
  connection.send({"proof": _proof(secret, us, nonces)})
  proof = _hello(connection, us).get("proof")
  if not (_is_text(proof) and hmac.compare_digest(proof, _proof(secret, them, nonces))):
    raise ProtocolError(f"the {them} does not know the secret of this {us}")


def _is_text(value: Any) -> bool:
  """Whether it can be encoded: JSON may also name halves of a pair of surrogates."""
  return isinstance(value, str) and value.isascii()


def _hello(connection: Connection, us: str) -> Message:
  try:
    message = connection.receive(HELLO_TIMEOUT_S, MAX_HELLO_BYTES, HELLO_TIMEOUT_S)
  except EOFError as error:
    raise ProtocolError(f"the peer hung up on this {us}: it may know another secret") from error
  if message is None:
    raise ProtocolError(f"the peer said nothing whole to this {us} for {HELLO_TIMEOUT_S} s")
  return message


def _proof(secret: str, role: str, nonces: Mapping[str, str]) -> str:
  text = f"pdjax {VERSION} {role} {nonces['coordinator']} {nonces['worker']}"
  return hmac.new(secret.encode(), text.encode(), hashlib.sha256).hexdigest()


def listen(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
  """A socket that waits for a worker; by default only programs of this machine can reach it."""
  return socket.create_server((host, port))


def accept(listener: socket.socket, timeout_s: float) -> Connection:
  """The next connection.

  Raises:
    TimeoutError: nobody called.
  """
  listener.settimeout(timeout_s)
  sock, _ = listener.accept()
  return Connection(sock)


def connect(address: str, timeout_s: float = HELLO_TIMEOUT_S) -> Connection:
  """A connection to `address`, HOST:PORT.

  Raises:
    OSError: nobody listens there.
  """
  return Connection(socket.create_connection(split_address(address), timeout_s))


def split_address(address: str) -> tuple[str, int]:
  """Host and port of HOST:PORT.

  Raises:
    ValueError: it has another form.
  """
  host, _, port = address.rpartition(":")
  if not (host and port.isdecimal() and int(port) < 1 << 16):
    raise ValueError(f"address={address!r} must be HOST:PORT")
  return host.strip("[]"), int(port)
