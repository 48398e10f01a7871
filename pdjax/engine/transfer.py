"""The hand-off of KV pages between meshes of any sizes: gather -> copy -> scatter.

A payload is the pieces of each range of layers that lie together, on the stages of a pool.

`jax.device_put` to a mesh of another size stages through the host and blocks until the array is
there. So where the pools of a process differ in size, a gather writes cuts along the heads, of one
size in all these pools, they go device to device, and a scatter reads those that a device got.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Sharding, SingleDeviceSharding

Range = tuple[int, int]  # [start, stop)
Pieces = jax.Array | tuple[jax.Array, ...]  # [2, L, K, positions, h], or its cuts along K
Payload = dict[Range, Pieces]  # by layers
_Cut = tuple[int, jax.Device]  # the number of an array among cuts, and which shard of it
_LAYERS, _HEADS = 1, 2  # axes of pieces
MOST_SPARE_BYTES = 256 << 20


def host_sharding(sharding: Sharding) -> Sharding:
  """The same split in the memory of the host, pinned. That of a CPU is its own."""
  (platform,) = {device.platform for device in sharding.device_set}
  return sharding if platform == "cpu" else sharding.with_memory_kind("pinned_host")


def make_plan(sources: Sequence[Range], targets: Sequence[Range]) -> list[list[int]]:
  """By number, the cuts that each target is made of, in order. Plain data: ranges of heads.

  A target reads each head once. Of several cuts that have it (replicas) the one is read that has
  been read least so far, so that all their links are used.

  Raises:
    ValueError: the cuts do not make up a target.
  """
  num_read = [0] * len(sources)
  plan = []
  for at, end in targets:
    taken: list[int] = []
    while at < end:
      found = [i for i, (first, last) in enumerate(sources) if first == at and last <= end]
      if not found:
        raise ValueError(f"no cut is of heads {at} to {end} at most: {sorted(set(sources))}")
      taken.append(min(found, key=num_read.__getitem__))
      num_read[taken[-1]] += 1
      _, at = sources[taken[-1]]
    plan.append(taken)
  return plan


class Reshard:
  """Copies pieces of other meshes to one sharding. Compiles something only to leave out layers.

  `num_traces` counts its tracings; after warm-up it must not move.
  """

  def __init__(self, target: Sharding):
    self._target = target
    self._plans: dict[tuple, tuple[list[list[_Cut]], list[Sharding]]] = {}
    self.num_traces: collections.Counter[str] = collections.Counter()
    self._slice = jax.jit(self._trace_slice, static_argnames="part")

  def _trace_slice(self, pieces: Pieces, *, part: Range) -> Pieces:
    self.num_traces["take_layers"] += 1  # runs while tracing only
    return jax.tree.map(lambda x: jax.lax.slice_in_dim(x, *part, axis=_LAYERS), pieces)

  def take_layers(self, pieces: Pieces, held: Range, wanted: Range) -> Pieces:
    """Of pieces of the layers `held` those that are `wanted`. Work for the source's devices."""
    if wanted == held:
      return pieces
    return self._slice(pieces, part=(wanted[0] - held[0], wanted[1] - held[0]))

  def send(self, pieces: Pieces) -> Pieces:
    """The same on the target, cut as pools there are; they are ready when the copies have ended.

    Returns at once, also where `pieces` are being computed yet.

    Never donates: `jax.device_put` with `donate=True` between meshes crashes (jax 0.10 to 0.12), so
    the source is freed by dropping the reference.

    Raises:
      ValueError: pieces of a pool that was not built with this one, so they are cut otherwise, or
        that are not split by heads alone.
    """
    if isinstance(pieces, jax.Array) and pieces.sharding == self._target:
      return pieces  # perhaps also on devices of other processes
    arrays = jax.tree.leaves(pieces)
    taken, places = self._plan_of(arrays)
    on = [{s.device: s.data for s in x.addressable_shards} for x in arrays]
    parts = iter(jax.device_put([on[number][to] for own in taken for number, to in own], places))
    on_each = [list(itertools.islice(parts, len(own))) for own in taken]
    num_heads = sum(x.shape[_HEADS] for x in arrays) // len(taken[0])
    shape = _with_heads(arrays[0].shape, num_heads)
    cuts = tuple(
      jax.make_array_from_single_device_arrays(shape, self._target, list(shards))
      for shards in zip(*on_each, strict=True)
    )
    return cuts if len(cuts) > 1 else cuts[0]

  def _plan_of(self, arrays: list[jax.Array]) -> tuple[list[list[_Cut]], list[Sharding]]:
    """Which cuts each device of the target takes, and the places of all these."""
    key = tuple((x.sharding, x.shape) for x in arrays)
    if key not in self._plans:
      cuts, sources = [], []
      for number, x in enumerate(arrays):
        for device, (first, last) in _heads_on(x.sharding, x.shape):
          # A shard of the whole lies cut by cut in the same shard of each array.
          start = first * len(arrays) + number * (last - first)
          cuts.append((number, device))
          sources.append((start, start + last - first))
      shape = _with_heads(arrays[0].shape, sum(x.shape[_HEADS] for x in arrays))
      targets = _heads_on(self._target, shape)
      plan = make_plan(sources, [heads for _, heads in targets])
      taken = [[cuts[i] for i in numbers] for numbers in plan]
      places = [SingleDeviceSharding(to) for (to, _), own in zip(targets, taken) for _ in own]
      self._plans[key] = taken, places
    return self._plans[key]


def _heads_on(sharding: Sharding, shape: tuple[int, ...]) -> list[tuple[jax.Device, Range]]:
  """The devices of a sharding, and what heads each holds.

  Raises:
    ValueError: it splits something else.
  """
  num_heads, on_each = shape[_HEADS], sharding.shard_shape(shape)
  if on_each != _with_heads(shape, on_each[_HEADS]):
    raise ValueError(f"pieces {shape} must be split by their heads alone, not into {on_each}")
  indices = sharding.devices_indices_map(shape).items()
  return [(device, index[_HEADS].indices(num_heads)[:2]) for device, index in indices]


def _with_heads(shape: tuple[int, ...], num_heads: int) -> tuple[int, ...]:
  return (*shape[:_HEADS], num_heads, *shape[_HEADS + 1 :])


class SpareMemory:
  """What ended hand-offs were gathered into, for the next ones of the same shape.

  On a CPU each large array is mapped anew, and the system clears its pages as they are written: so
  64 MiB are gathered at 3 to 4 GB/s, and at 13 or more into memory that was used before
  (`experiments.bench_handoff`). Accelerators keep what was freed themselves, so there it keeps
  nothing.
  """

  def __init__(self, platform: str):
    self._most_bytes = MOST_SPARE_BYTES if platform == "cpu" else 0
    self._arrays: list[jax.Array] = []  # oldest first

  def take(self, like: jax.ShapeDtypeStruct) -> jax.Array | None:
    """An array of this shape, which holds anything; None where nothing is kept."""
    if not self._most_bytes:
      return None
    for i, x in enumerate(self._arrays):
      if x.shape == like.shape and x.sharding == like.sharding:
        return self._arrays.pop(i)
    return jnp.zeros(like.shape, like.dtype, device=like.sharding)

  def give(self, gathered: Payload | Pieces) -> None:
    """Takes what nobody will read any more; who writes it waits for those that still do.

    Leaves what is not computed, or not without an error, which who writes it would have.
    """
    for x in jax.tree.leaves(gathered):
      if not x.is_deleted() and x.is_ready():
        with contextlib.suppress(Exception):
          self._arrays.append(x.block_until_ready())
    while sum(x.nbytes for x in self._arrays) > self._most_bytes:
      del self._arrays[0]

  def clear(self) -> None:
    self._arrays.clear()


class TransferTicket:
  """Pieces on their way to a mesh. Inserts them into the target cache as soon as they are there.

  Not before: the cache is threaded through the target's steps, so a scatter submitted early would
  hold up every step behind the copy.
  """

  finish_s = None

  def __init__(self, sent: Payload, insert: Callable[[Payload], None]):
    self._sent: Payload | None = sent
    self._insert = insert
    self._error: Exception | None = None

  def is_ready(self) -> bool:
    if self._sent is None:
      return True
    if not all(x.is_ready() for x in jax.tree.leaves(self._sent)):
      return False
    self._finish()
    return True

  def block(self) -> None:
    """Waits for the copy; inserts nothing, as another thread may call it."""
    for x in jax.tree.leaves(self._sent):
      with contextlib.suppress(Exception):  # `result` raises it
        x.block_until_ready()

  def result(self) -> None:
    """Waits for the copy; raises why it failed, and then nothing was inserted."""
    if self._sent is not None:
      self._finish()
    if self._error is not None:
      raise self._error

  def _finish(self) -> None:
    sent, self._sent = self._sent, None
    try:
      for x in jax.tree.leaves(sent):
        x.block_until_ready()  # ready is not success: a failed copy raises here
      self._insert(sent)
    except Exception as error:
      self._error = error
