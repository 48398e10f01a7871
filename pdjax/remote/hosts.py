"""Pools on other machines, where workers wait for a coordinator. Imports no jax.

On every host, with the same pdjax and the model at the same path:

  python -m pdjax.engine.worker --listen=10.0.0.1:7001 --secret-file=FILE

The coordinator reads a start-up file (TOML), which says where they wait:

  secret_file = "secret"        # beside it, unless absolute; nobody but its owner may read it

  [[hosts]]
  address = "10.0.0.1:7001"     # where its worker waits
  devices = 2                   # how many devices of the cluster are there; 1 if not given
  data_address = "10.1.0.1"     # where other hosts reach it for K, V and collectives; if not
                                # given, the address at which the coordinator reached it

The devices of the cluster are those of the first host, then those of the second, and so on; a pool
whose devices lie on several hosts has a process on each, and `jax.distributed` makes them one. What
crosses between hosts is authenticated where it is control (both ends prove that they know the
secret), and never encrypted: the network must be trusted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import pathlib
import queue
import stat
import threading
import tomllib
from collections.abc import Sequence

from pdjax.core.device_group import DeviceGroup
from pdjax.core.plain import from_plain, to_plain
from pdjax.remote.protocol import (
  HELLO_TIMEOUT_S,
  Connection,
  Message,
  ProtocolError,
  WorkerPlace,
  connect,
  greet,
  split_address,
)

MIN_SECRET_CHARACTERS = 16


def read_secret(path: pathlib.Path) -> str:
  """What a file of a secret holds.

  Raises:
    OSError: it cannot be read.
    ValueError: others can read it too, or it is too short to be one.
  """
  mode = stat.S_IMODE(path.stat().st_mode)
  if mode & 0o077:
    raise ValueError(f"{path} has mode {mode:03o}, so others can read the secret: chmod 600 it")
  secret = path.read_text().strip()
  if len(secret) < MIN_SECRET_CHARACTERS:
    raise ValueError(
      f"{path} holds {len(secret)} characters; a secret has {MIN_SECRET_CHARACTERS} or more"
    )
  return secret


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Host:
  """A machine where a worker waits at `address`, with so many `devices`.

  Raises:
    ValueError: an address that is not HOST:PORT, or no devices.
  """

  address: str
  devices: int = 1
  data_address: str | None = None

  def __post_init__(self):
    split_address(self.address)
    if self.devices < 1:
      raise ValueError(f"{self.address}: devices={self.devices} must be at least 1")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
  """What a start-up file says.

  Raises:
    ValueError: no hosts, or one twice.
  """

  secret_file: str
  hosts: tuple[Host, ...]

  def __post_init__(self):
    addresses = [host.address for host in self.hosts]
    if not addresses or len(set(addresses)) < len(addresses):
      raise ValueError(f"hosts={addresses} must name at least one host, and none twice")

  @property
  def num_devices(self) -> int:
    return sum(host.devices for host in self.hosts)

  def parts_of(self, group: DeviceGroup) -> list[tuple[Host, tuple[int, ...]]]:
    """The hosts of a group, with the devices that it has there, counted from 0 on each.

    Raises:
      ValueError: devices that no host has, or that are not listed host by host, or pipeline stages
        on several hosts.
    """
    owners = [(host, i) for host in self.hosts for i in range(host.devices)]
    if max(group.devices) >= len(owners):
      raise ValueError(
        f"device {max(group.devices)} is on no host: {len(self.hosts)} hosts have {len(owners)}"
      )
    own = [owners[device] for device in group.devices]
    parts = [
      (host, tuple(i for _, i in pairs))
      for host, pairs in itertools.groupby(own, key=lambda pair: pair[0])
    ]
    names = [host.address for host, _ in parts]
    if len(set(names)) < len(names):
      raise ValueError(f"devices {group.devices} are not listed host by host: {names}")
    if len(parts) > 1 and group.pp > 1:
      raise ValueError(
        f"devices {group.devices} are {group.pp} pipeline stages on {' and '.join(names)}; a pool "
        f"on several hosts can only be split by tp"
      )
    return parts


def read_hosts(path: pathlib.Path) -> tuple[Hosts, str]:
  """A start-up file, and the secret that it points to.

  Raises:
    OSError: either cannot be read.
    ValueError: it says something else than the head of this module, there is no secret, or others
      can read it.
  """
  try:
    hosts = from_plain(Hosts, tomllib.loads(path.read_text()))
  except (TypeError, ValueError) as error:  # also of TOML
    raise ValueError(
      f"{path} is no start-up file as pdjax/remote/hosts.py says: {error}"
    ) from error
  secret_file = path.parent / hosts.secret_file
  if not secret_file.exists():
    raise ValueError(
      f"{path}: its secret_file {secret_file} is not there; write a secret of "
      f"{MIN_SECRET_CHARACTERS} or more characters to it (chmod 600), the same on every host"
    )
  return hosts, read_secret(secret_file)


class HostProcesses:
  """The processes of a pool on other machines, and one connection to all. They end with it."""

  process_id = None  # not of this machine

  def __init__(self, connections: Sequence[Connection]):
    self.connection = connections[0] if len(connections) == 1 else Together(connections)

  def kill(self) -> None:
    self.connection.close()

  close = kill


def start_on_hosts(parts: Sequence[tuple[Host, tuple[int, ...]]], secret: str) -> HostProcesses:
  """Calls the workers that wait on the hosts of a pool; returns when all have answered.

  Raises:
    ProtocolError: nobody waits there, or who does is not ours, and which.
  """
  with contextlib.ExitStack() as undo:
    connections = []
    for host, _ in parts:
      connections.append(call(host.address, secret))
      undo.callback(connections[-1].close)
    meet_at = None
    for number, ((host, devices), connection) in enumerate(zip(parts, connections, strict=True)):
      place = WorkerPlace(
        devices=devices,
        host=host.data_address or connection.peer_host,
        process_id=number,
        num_processes=len(parts),
        meet_at=meet_at,
      )
      connection.send({"place": to_plain(place)})
      if len(parts) > 1 and meet_at is None:
        meet_at = _meeting_place(connection, host)
    undo.pop_all()
  return HostProcesses(connections)


def call(address: str, secret: str) -> Connection:
  """A connection to a worker that waits at `address`, and a process of it that knows us.

  Raises:
    ProtocolError: nobody waits there, or who does is not ours.
  """
  try:
    connection = connect(address)
  except OSError as error:
    raise ProtocolError(
      f"no worker waits at {address}: {error}; start one there: python -m pdjax.engine.worker "
      f"--listen={address} --secret-file=FILE"
    ) from error
  try:
    greet(connection, secret, is_worker=False)
  except (ProtocolError, OSError) as error:
    connection.close()
    raise ProtocolError(f"who waits at {address} is not our worker: {error}") from error
  return connection


def _meeting_place(connection: Connection, host: Host) -> str:
  """What the first process of a pool chose."""
  message = connection.receive(HELLO_TIMEOUT_S)
  if message is None or "meet_at" not in message:
    what = "nothing" if message is None else message.get("error", message)
    raise ProtocolError(f"{host.address} did not say where processes meet, but {what}")
  return message["meet_at"]


class Together:
  """Connections to all processes of a pool, as one.

  All are told the same in the same order, and an answer is there when all have given theirs: it is
  an error if one of them is. Of values that are lists each has a part; others are the first
  process's. The end of one connection is the end of all.
  """

  def __init__(self, connections: Sequence[Connection]):
    self._connections = connections
    self._send_lock = threading.Lock()
    self._news: queue.SimpleQueue[tuple[int, Message | Exception]] = queue.SimpleQueue()
    self._parts: dict[int | str, dict[int, Message]] = {}  # answers of some, not of all
    for who in range(len(connections)):
      threading.Thread(target=self._listen, args=(who,), daemon=True).start()

  def _listen(self, who: int) -> None:
    try:
      while True:
        self._news.put((who, self._connections[who].receive(None)))
    except Exception as error:  # raised again by who receives
      self._news.put((who, error))

  def send(self, message: Message) -> None:
    with self._send_lock:
      for connection in self._connections:
        connection.send(message)

  def receive(self, timeout_s: float | None) -> Message | None:
    """The next message of all; None if nobody said anything for `timeout_s`."""
    while True:
      try:
        who, message = self._news.get(timeout=timeout_s)
      except queue.Empty:
        return None
      if isinstance(message, Exception):
        raise type(message)(f"process {who} of the pool: {message}")
      if (whole := self._add(who, message)) is not None:
        return whole

  def _add(self, who: int, message: Message) -> Message | None:
    """What all have said, once they have."""
    if "line" in message:
      return message if who == 0 else None
    if "number" not in message and "error" in message:
      return {"error": f"process {who} of the pool: {message['error']}"}
    key = message.get("number", "ready")
    parts = self._parts.setdefault(key, {})
    parts[who] = message
    if len(parts) < len(self._connections):
      return None
    del self._parts[key]
    return _join([parts[who] for who in range(len(self._connections))])

  def close(self) -> None:
    for connection in self._connections:
      connection.close()


def _join(messages: Sequence[Message]) -> Message:
  for message in messages:
    if "error" in message:
      return message
  first = messages[0]
  value = first.get("value")
  if isinstance(value, list):
    value = list(itertools.chain(*(message["value"] for message in messages)))
  elif isinstance(value, bool) and any(message["value"] != value for message in messages):
    raise ProtocolError(f"the processes of the pool disagree: {[m['value'] for m in messages]}")
  return {**first, "value": value}
