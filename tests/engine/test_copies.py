"""Offers in shared memory: whose memory is written again, and when. Connections to sources."""

import os
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pdjax.engine import copies
from pdjax.engine.copies import SharedMemory, TransferServer, split_of

pytestmark = pytest.mark.quick


def like(positions=64):
  sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  return {(0, 2): jax.ShapeDtypeStruct((2, 2, 2, positions, 8), jnp.float32, sharding=sharding)}


def payload(value):
  return {layers: jnp.full(x.shape, value, x.dtype) for layers, x in like().items()}


def offer(source, uid):
  return source.offer(uid, payload(float(uid)), split_of(like()))


def value_of(fetched):
  (pieces,) = fetched.values()
  return set(np.array(pieces).ravel().tolist())


def test_memory_is_used_again_once_it_is_read_no_longer():
  source, target = SharedMemory(), SharedMemory()
  first = offer(source, 1)
  fetched = target.fetch(first, like())
  source.forget(1)
  second = offer(source, 2)
  assert second["fd"] != first["fd"] and value_of(fetched) == {1.0}
  del fetched
  assert offer(source, 3)["fd"] == first["fd"]


def test_who_comes_too_late_does_not_free_the_memory_that_another_reads():
  """A copy took too long, and was given up just when its target had found the offer."""
  source, target = SharedMemory(), SharedMemory()
  later = []

  class Uid(int):  # which the target looks at once it has seen whose memory it is
    def to_bytes(self, *args):
      source.forget(1)
      later.append(offer(source, 2))
      return super().to_bytes(*args)

  late = target.fetch(offer(source, 1) | {"uid": Uid(1)}, like())
  fetched = target.fetch(later[0], like())
  del late
  source.forget(2)
  offer(source, 3)
  assert value_of(fetched) == {2.0}


def test_memory_that_targets_read_when_they_ended_is_not_kept_for_ever():
  source = SharedMemory()
  before = len(os.listdir("/proc/self/fd"))
  for uid in range(1, 100):
    found = offer(source, uid)
    with open(f"/proc/self/fd/{found['fd']}", "r+b") as file:
      file.seek(copies._STATE)
      file.write(bytes([copies._READ]))
    source.forget(uid)
  assert len(os.listdir("/proc/self/fd")) - before <= 2 * copies.MOST_SPARE


def test_sources_that_were_started_again_and_again_are_forgotten(monkeypatch):
  made = []

  class Server:
    def connect(self, address):
      made.append(address)
      return types.SimpleNamespace(pull=lambda uid, wanted: payload(0.0).values())

  transfer = pytest.importorskip("jax.experimental.transfer")
  monkeypatch.setattr(transfer, "start_transfer_server", lambda *_: Server())
  target = TransferServer("127.0.0.1", 1.0)
  for life in range(100):
    for address in ("stays", f"life {life}"):
      target.fetch({"uid": 1, "address": address}, like())
  assert made == ["stays", *(f"life {life}" for life in range(100))]
  assert len(target._connections) == copies.MOST_CONNECTIONS
