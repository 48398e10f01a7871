"""The hand-off of KV pages between meshes: gather -> `jax.device_put` -> scatter."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import jax


def host_sharding(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
  """The same split in the memory of the host, pinned. That of a CPU is its own."""
  (platform,) = {device.platform for device in sharding.device_set}
  return sharding if platform == "cpu" else sharding.with_memory_kind("pinned_host")


class TransferTicket:
  """Pieces on their way to a mesh. Inserts them into the target cache as soon as they are there.

  Not before: the cache is threaded through the target's steps, so a scatter submitted early would
  hold up every step behind the copy. `jax.device_put` with `donate=True` between meshes crashes
  (jax 0.10 to 0.12), so the source is freed by dropping the reference.
  """

  finish_s = None

  def __init__(self, pieces: jax.Array, sharding: jax.sharding.Sharding, insert: Callable):
    self._moved: jax.Array | None = jax.device_put(pieces, sharding)
    self._insert = insert
    self._error: Exception | None = None

  def is_ready(self) -> bool:
    if self._moved is None:
      return True
    if not self._moved.is_ready():
      return False
    self._finish()
    return True

  def block(self) -> None:
    """Waits for the copy; inserts nothing, as another thread may call it."""
    moved = self._moved
    if moved is not None:
      with contextlib.suppress(Exception):  # `result` raises it
        moved.block_until_ready()

  def result(self) -> None:
    """Waits for the copy; raises why it failed, and then nothing was inserted."""
    if self._moved is not None:
      self._finish()
    if self._error is not None:
      raise self._error

  def _finish(self) -> None:
    moved, self._moved = self._moved, None
    try:
      moved.block_until_ready()  # ready is not success: a failed copy raises here
      self._insert(moved)
    except Exception as error:
      self._error = error
