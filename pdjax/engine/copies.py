"""How K and V come from one process to another: by memory that both map, or by JAX's own server.

A source makes an offer of pages it has gathered, which is plain data; a target fetches it. An offer
is fetched once at most, and forgotten by its source afterwards. `fetch` gives a payload as the
target's own exports are (`JaxExecutor.pieces_like`), so what follows is an import like any other.

On two cores of one machine 64 MiB came at 6 to 8 GB/s by shared memory that had been used before
(1.3 when it was new), at 0.3 to 1.0 by the transfer server, and at 2 to 3 as a stream of loopback
TCP (jax 0.10, `experiments.bench_handoff`).
"""

from __future__ import annotations

import datetime
import itertools
import math
import mmap
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from pdjax.engine.transfer import MOST_SPARE_BYTES, Payload
from pdjax.remote.executor import STEP_TIMEOUT_S
from pdjax.remote.protocol import Heads, LayerRange, Split, WorkerSetup

Like = Mapping[LayerRange, jax.ShapeDtypeStruct]
LAYERS, HEADS = 1, 2  # axes of pieces [2, L, K, positions, h]


class Copies(Protocol):
  """Any thread may call it. `num_offers` counts those it holds memory for."""

  num_offers: int

  def offer(self, uid: int, payload: Payload, split: Split) -> dict[str, Any]:
    """Offers pages to a pool that holds its own by `split`. May wait until they are gathered."""
    ...

  def fetch(self, offer: Mapping[str, Any], like: Like) -> Payload:
    """Starts to take what another process offered, onto the devices of `like`.

    Raises:
      ValueError: the offer is not what it says, or of pages that are shaped otherwise.
    """
    ...

  def forget(self, uid: int) -> None:
    """Forgets an offer, fetched or not."""
    ...


def split_of(like: Like) -> Split:
  """How pages lie on the devices of `like`."""
  return tuple(
    (layers, tuple(box[HEADS] for box in _boxes(pieces))) for layers, pieces in like.items()
  )


def parts_of(like: Like) -> tuple[Heads, ...]:
  """The kv heads that each process of a pool gives to others: together all, none twice."""
  pieces = next(iter(like.values()))  # stages split them alike
  devices = pieces.sharding.devices_indices_map(pieces.shape)
  parts, at = [], 0
  by_process = itertools.groupby(
    zip(devices, _boxes(pieces), strict=True), key=lambda pair: pair[0].process_index
  )
  for _, own in by_process:  # heads that several have are given by the first of them
    end = max(at, *(box[HEADS][1] for _, box in own))
    parts.append((at, end))
    at = end
  return tuple(parts)


def _boxes(pieces: jax.Array | jax.ShapeDtypeStruct) -> list[tuple[tuple[int, int], ...]]:
  """What each device holds of pieces."""
  indices = pieces.sharding.devices_indices_map(pieces.shape).values()
  return [tuple(s.indices(n)[:2] for s, n in zip(index, pieces.shape)) for index in indices]


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int] | None:
  both = max(a[0], b[0]), min(a[1], b[1])
  return both if both[0] < both[1] else None


def _wanted(payload: Payload, split: Split) -> list[tuple[LayerRange, tuple[int, int]]]:
  """The layers and heads of what each device of the target will hold of a payload."""
  if not payload:
    return []
  held = min(first for first, _ in payload), max(last for _, last in payload)
  return [
    (own, heads)
    for layers, devices in split
    if (own := _overlap(layers, held)) is not None
    for heads in devices
  ]


def _part_shape(
  payload: Payload, layers: LayerRange, heads: tuple[int, int]
) -> tuple[int, int, int, int, int]:
  _, _, _, positions, head_dim = next(iter(payload.values())).shape
  return 2, layers[1] - layers[0], heads[1] - heads[0], positions, head_dim


def _on_each_device(like: Like) -> list[jax.ShapeDtypeStruct]:
  """What each device holds of `like`, in the order of `_wanted`."""
  return [
    jax.ShapeDtypeStruct(
      tuple(last - first for first, last in box),
      pieces.dtype,
      sharding=jax.sharding.SingleDeviceSharding(device),
    )
    for pieces in like.values()
    for device, box in zip(
      pieces.sharding.devices_indices_map(pieces.shape), _boxes(pieces), strict=True
    )
  ]


def _join(like: Like, parts: Sequence[jax.Array]) -> Payload:
  """A payload from what each device holds."""
  left = iter(parts)
  return {
    layers: jax.make_array_from_single_device_arrays(
      pieces.shape,
      pieces.sharding,
      list(itertools.islice(left, len(pieces.sharding.addressable_devices))),
    )
    for layers, pieces in like.items()
  }


# Shared memory ------------------------------------------------------------------------------------

_HEADER_BYTES = mmap.PAGESIZE
_MAGIC = b"pdjax-kv"
_ALIGNMENT = 64  # XLA on a CPU uses memory that is aligned so as it is
_STATE = 16  # where in the header a byte says how far the target is
_OFFERED, _READ, _DONE = range(3)
MOST_SPARE = 64  # two file descriptors each; what a target read when it ended stays so for ever


class _Segment:
  """Anonymous memory that another process can map. The system frees it after the last of both."""

  def __init__(self, num_bytes: int):
    self.fd = os.memfd_create("pdjax-kv", os.MFD_CLOEXEC)
    self._close = weakref.finalize(self, os.close, self.fd)
    os.ftruncate(self.fd, _HEADER_BYTES + num_bytes)
    self.num_bytes = num_bytes
    self.memory = mmap.mmap(self.fd, _HEADER_BYTES + num_bytes)

  @property
  def state(self) -> int:
    return self.memory[_STATE]

  def begin(self, uid: int) -> np.ndarray:
    """Its bytes, for a new offer."""
    self.memory[:_STATE] = _MAGIC + uid.to_bytes(8, "big")
    self.memory[_STATE] = _OFFERED
    return np.frombuffer(self.memory, np.uint8, self.num_bytes, _HEADER_BYTES)


class SharedMemory:
  """Offers lie in memory that the target maps: one copy, made by the source.

  It writes what each device of the target will hold in one piece, so that a CPU need not copy it.
  Memory is used again once the target reads it no longer, as the system clears every new page.
  """

  def __init__(self):
    self._lock = threading.Lock()
    self._offered: dict[int, _Segment] = {}
    self._spare: list[_Segment] = []  # forgotten, oldest first; a target may still read

  @property
  def num_offers(self) -> int:
    return len(self._offered)

  def offer(self, uid: int, payload: Payload, split: Split) -> dict[str, Any]:
    dtype = next((str(pieces.dtype) for pieces in payload.values()), "uint8")
    parts, num_bytes = [], 0
    for layers, heads in _wanted(payload, split):
      shape = _part_shape(payload, layers, heads)
      parts.append({"shape": shape, "offset": num_bytes})
      num_bytes += -(-_num_bytes(shape, dtype) // _ALIGNMENT) * _ALIGNMENT
    segment = self._new_segment(num_bytes)
    memory = segment.begin(uid)
    for part, (layers, heads) in zip(parts, _wanted(payload, split), strict=True):
      _write(_view(memory, part, dtype), payload, layers, heads)
    with self._lock:
      self._offered[uid] = segment
    where = {"process_id": os.getpid(), "fd": segment.fd}
    return {"uid": uid, **where, "dtype": dtype, "parts": parts}

  def _new_segment(self, num_bytes: int) -> _Segment:
    with self._lock:
      for segment in self._spare:
        if segment.num_bytes == num_bytes and segment.state == _DONE:
          self._spare.remove(segment)
          return segment
    return _Segment(num_bytes)

  def fetch(self, offer: Mapping[str, Any], like: Like) -> Payload:
    path = f"/proc/{int(offer['process_id'])}/fd/{int(offer['fd'])}"
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
      memory = mmap.mmap(fd, 0)
    finally:
      os.close(fd)
    if memory[:_STATE] != _MAGIC + offer["uid"].to_bytes(8, "big"):
      raise ValueError(f"offer {offer['uid']} is not there any more")
    memory[_STATE] = _READ
    data = np.frombuffer(memory, np.uint8, offset=_HEADER_BYTES)
    weakref.finalize(data, _mark_done, memory)  # when no device array is made of it any more
    wanted = _on_each_device(like)
    got = [(tuple(part["shape"]), offer["dtype"]) for part in offer["parts"]]
    if got != [(part.shape, str(part.dtype)) for part in wanted]:
      raise ValueError(f"pages of {got}, not {[(part.shape, part.dtype) for part in wanted]}")
    views = [_view(data, part, offer["dtype"]) for part in offer["parts"]]
    return _join(like, jax.device_put(views, [part.sharding for part in wanted]))

  def forget(self, uid: int) -> None:
    with self._lock:
      segment = self._offered.pop(uid, None)
      # What was never fetched yet may be by a target that is late: it must find no other's there.
      if segment is not None and segment.state != _OFFERED:
        self._spare.append(segment)
      while (
        len(self._spare) > MOST_SPARE
        or sum(spare.num_bytes for spare in self._spare) > MOST_SPARE_BYTES
      ):
        del self._spare[0]


def _mark_done(memory: mmap.mmap) -> None:
  memory[_STATE] = _DONE


def _num_bytes(shape: tuple[int, ...], dtype: str) -> int:
  return math.prod(shape) * jnp.dtype(dtype).itemsize


def _view(memory: np.ndarray, part: Mapping[str, Any], dtype: str) -> np.ndarray:
  """A part of an offer in its memory."""
  shape, start = tuple(part["shape"]), part["offset"]
  own = memory[start : start + _num_bytes(shape, dtype)]
  return own.view(jnp.dtype(dtype)).reshape(shape)


def _write(view: np.ndarray, payload: Payload, layers: LayerRange, heads: tuple[int, int]) -> None:
  """Fills a part from the shards that have something of it. Waits for them."""
  for held, pieces in payload.items():
    for shard in pieces.addressable_shards:
      held_heads = shard.index[HEADS].indices(pieces.shape[HEADS])[:2]
      both = (_overlap(layers, held), _overlap(heads, held_heads))
      if shard.replica_id == 0 and None not in both:
        to = tuple(slice(a - low, b - low) for (a, b), (low, _) in zip(both, (layers, heads)))
        of = tuple(slice(a - low, b - low) for (a, b), (low, _) in zip(both, (held, held_heads)))
        view[:, *to] = np.asarray(shard.data)[:, *of]


# The transfer server ------------------------------------------------------------------------------

MOST_PARTS = 1 << 10  # of an offer
MOST_CONNECTIONS = 32  # to sources; a process that ended keeps its sockets until it is forgotten
NUM_SOCKETS = 4  # 1.3 GB/s, against 0.9 by one (256 MB, jax 0.11, two processes on two cores)


class TransferServer:
  """Offers are pulled by JAX's transfer server, also from another machine.

  It cannot split pages otherwise than they are, so the source cuts a part for each device of the
  target. A pull that was never offered, or from a process that is gone, stays pending for ever, and
  becomes ready when a connection breaks; so its ticket needs a time-out, and must be read.
  """

  num_offers = 0  # the server's: it lets go of them by itself

  def __init__(self, host: str, offer_timeout_s: float):
    from jax.experimental import transfer  # has what only some builds of jaxlib have

    device = jax.local_devices()[0]
    self._server = transfer.start_transfer_server(
      device.client, f"{host}:0", [f"{host}:0"] * NUM_SOCKETS
    )
    self._offer_timeout_s = offer_timeout_s
    self._lock = threading.Lock()
    self._connections: dict[str, Any] = {}  # by address, that used last at the end
    self._slice = jax.jit(jax.lax.slice, static_argnums=(1, 2))
    self._concatenate = jax.jit(jnp.concatenate, static_argnums=1)

  def offer(self, uid: int, payload: Payload, split: Split) -> dict[str, Any]:
    parts = self.cut(payload, split)
    if parts:
      self._await_pull(uid, 0, parts)
    return {"uid": uid, "address": self._server.address()}

  def offer_each(self, uid: int, payload: Payload, split: Split) -> dict[str, Any]:
    """As `offer`, where a pool has several processes: what this one gives, device by device."""
    parts = self.cut_each(payload, split)
    for number, _, part in parts:
      self._await_pull(uid, number, [part])
    heads_of = [(number, heads) for number, heads, _ in parts]
    return {"uid": uid, "address": self._server.address(), "parts_of_each": heads_of}

  def _await_pull(self, uid: int, number: int, parts: list[jax.Array]) -> None:
    # The server takes a time of day, until when it keeps what nobody pulls.
    until = datetime.datetime.now() + datetime.timedelta(seconds=self._offer_timeout_s)
    self._server.await_pull(uid * MOST_PARTS + number, parts, timeout=until)

  def cut(self, payload: Payload, split: Split) -> list[jax.Array]:
    """A part for each device of the target, each on one device here."""
    return [self._part(payload, layers, heads) for layers, heads in _wanted(payload, split)]

  def cut_each(self, payload: Payload, split: Split) -> list[tuple[int, Heads, jax.Array]]:
    """For devices of the target, by number, what this process has of their heads."""
    if not payload:
      return []
    own = parts_of(payload)[jax.process_index()]
    return [
      (number, both, self._part(payload, layers, both))
      for number, (layers, heads) in enumerate(_wanted(payload, split))
      if (both := _overlap(heads, own)) is not None
    ]

  def _part(self, payload: Payload, layers: LayerRange, heads: tuple[int, int]) -> jax.Array:
    by_layers = []
    for held, pieces in sorted(payload.items()):
      if (both := _overlap(layers, held)) is not None:
        by_layers.append(self._heads(pieces, (both[0] - held[0], both[1] - held[0]), heads))
    return self._joined(by_layers, LAYERS)

  def _heads(self, pieces: jax.Array, layers: LayerRange, heads: tuple[int, int]) -> jax.Array:
    shards = {s.index[HEADS].indices(pieces.shape[HEADS])[:2]: s.data
              for s in pieces.addressable_shards}  # fmt: skip
    found = []
    for held, shard in sorted(shards.items()):
      if (both := _overlap(heads, held)) is not None:
        start, limit = [0] * shard.ndim, list(shard.shape)
        start[LAYERS], limit[LAYERS] = layers
        start[HEADS], limit[HEADS] = both[0] - held[0], both[1] - held[0]
        is_whole = tuple(limit) == shard.shape and not any(start)
        found.append(shard if is_whole else self._slice(shard, tuple(start), tuple(limit)))
    return self._joined(found, HEADS)

  def _joined(self, parts: list[jax.Array], axis: int) -> jax.Array:
    if len(parts) == 1:
      return parts[0]
    (device,) = parts[0].devices()
    return self._concatenate(jax.device_put(parts, device), axis)

  def fetch(self, offer: Mapping[str, Any], like: Like) -> Payload:
    wanted = _on_each_device(like)
    if not wanted:
      return {}
    pulled = self._connect(offer["address"]).pull(offer["uid"] * MOST_PARTS, wanted)
    return _join(like, pulled)

  def fetch_each(self, offers: Sequence[Mapping[str, Any]], like: Like) -> Payload:
    """As `fetch`, of what each process of a pool offered, for the devices of this process.

    Waits for what has to be joined.
    """
    parts = []
    for number, wanted, heads in _on_own_devices(like):
      pulled, at = [], heads[0]
      for first, last, who in sorted(
        (*own, who)
        for who, offer in enumerate(offers)
        for of_number, own in offer["parts_of_each"]
        if of_number == number
      ):
        server = self._connect(offers[who]["address"])
        part = jax.ShapeDtypeStruct(
          _with_heads(wanted.shape, (first, last)), wanted.dtype, sharding=wanted.sharding
        )
        pulled += server.pull(offers[who]["uid"] * MOST_PARTS + number, [part])
        at = last if first == at else heads[1] + 1
      if at != heads[1]:
        raise ValueError(f"kv heads {heads} of a device are not what is offered: {offers}")
      if len(pulled) > 1:
        jax.block_until_ready(pulled)
      parts.append(self._joined(pulled, HEADS))
    return _join(like, parts)

  def join_zeros(self, like: Like, parts: Sequence[Heads]) -> None:
    """Compiles what `fetch_each` needs for pages from processes that give these heads."""
    for _, wanted, heads in _on_own_devices(like):
      found = filter(None, (_overlap(heads, part) for part in parts))
      shapes = (_with_heads(wanted.shape, own) for own in found)
      zeros = [jnp.zeros(shape, wanted.dtype, device=wanted.sharding) for shape in shapes]
      self._joined(zeros, HEADS).block_until_ready()

  def _connect(self, address: str) -> Any:
    with self._lock:
      connection = self._connections.pop(address, None)
      if connection is None:
        connection = self._server.connect(address)
      self._connections[address] = connection
      if len(self._connections) > MOST_CONNECTIONS:  # what it pulls yet still comes
        del self._connections[next(iter(self._connections))]
      return connection

  def forget(self, uid: int) -> None:
    """The server lets go of what was pulled, and after a time of what was not."""


def _on_own_devices(like: Like) -> list[tuple[int, jax.ShapeDtypeStruct, Heads]]:
  """What each device of this process holds of `like`, its number among all, and its heads."""
  devices = [
    (device, box[HEADS])
    for pieces in like.values()
    for device, box in zip(
      pieces.sharding.devices_indices_map(pieces.shape), _boxes(pieces), strict=True
    )
  ]
  return [
    (number, wanted, heads)
    for number, (wanted, (device, heads)) in enumerate(
      zip(_on_each_device(like), devices, strict=True)
    )
    if device.process_index == jax.process_index()
  ]


def _with_heads(shape: tuple[int, ...], heads: Heads) -> tuple[int, ...]:
  return (*shape[:HEADS], heads[1] - heads[0], *shape[HEADS + 1 :])


def make_copies(setup: WorkerSetup, host: str = "127.0.0.1") -> Copies:
  if setup.copies == "shared_memory":
    return SharedMemory()
  # Not a copy's time-out: its target may have hung for nearly as long as a coordinator lets it, and
  # what is pulled when the server has let go of it stays pending for ever.
  return TransferServer(host, setup.copy_timeout_s + STEP_TIMEOUT_S)
