"""The hand-off of KV pages between meshes of any sizes: gather -> cut, copy, join -> scatter.

A payload is the pieces of each range of layers that lie together, on the stages of a pool.

`jax.device_put` to a mesh of another size stages through the host and blocks until the array is
there. So each device of the source cuts its shard into what the target's devices want (nothing to
cut where the sizes are equal), the cuts go device to device, and a target device joins what it got.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Sharding, SingleDeviceSharding

Range = tuple[int, int]  # [start, stop)
Box = tuple[Range, ...]  # of a shard, along each axis of the array
Payload = dict[Range, jax.Array]  # layers -> their pieces [2, L, K, positions, h]
_LAYER_AXIS = 1


def host_sharding(sharding: Sharding) -> Sharding:
  """The same split in the memory of the host, pinned. That of a CPU is its own."""
  (platform,) = {device.platform for device in sharding.device_set}
  return sharding if platform == "cpu" else sharding.with_memory_kind("pinned_host")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReshardPlan:
  """Which part of which shard goes where. Plain data: shards by number, parts along one axis.

  `cuts` has the ranges that each source shard is cut into, none where nobody reads it; `takes` the
  (source shard, number of the cut) that each target shard is joined from, in order.
  """

  axis: int
  cuts: tuple[tuple[Range, ...], ...]
  takes: tuple[tuple[tuple[int, int], ...], ...]


def make_plan(sources: Sequence[Box], targets: Sequence[Box]) -> ReshardPlan:
  """The plan for shards that are these boxes of one array.

  A target shard reads each of its elements once. Of several source shards that hold it (replicas)
  the one reads that has been read least so far, so that all their links are used.

  Raises:
    ValueError: shards that are cut along more than one axis, or that do not cover a target.
  """
  split = [axis for axis, ranges in enumerate(zip(*sources, *targets)) if len(set(ranges)) > 1]
  if len(split) > 1:
    raise ValueError(f"shards must be split along one axis, the same on both sides, not {split}")
  axis = split[0] if split else 0
  cuts: list[list[Range]] = [[] for _ in sources]
  num_read = [0] * len(sources)

  def take(at: int, end: int) -> tuple[int, int, int]:
    """Source, cut and end of the first part of [at, end)."""
    holders = [i for i, box in enumerate(sources) if box[axis][0] <= at < box[axis][1]]
    if not holders:
      raise ValueError(f"no source shard holds {at} of axis {axis}: {sources}")
    source = min(holders, key=num_read.__getitem__)
    first, last = sources[source][axis]
    stop = min(end, last)
    cut = (at - first, stop - first)
    num_read[source] += stop - at
    if cut not in cuts[source]:
      cuts[source].append(cut)
    return source, cuts[source].index(cut), stop

  takes = []
  for box in targets:
    at, end = box[axis]
    taken = []
    while at < end:
      source, cut, at = take(at, end)
      taken.append((source, cut))
    takes.append(tuple(taken))
  return ReshardPlan(axis=axis, cuts=tuple(map(tuple, cuts)), takes=tuple(takes))


class Reshard:
  """Copies arrays of other meshes to one sharding. Compiles a cut or a join when it first meets it.

  `num_traces` counts their tracings; after warm-up it must not move.
  """

  def __init__(self, target: Sharding):
    self._target = target
    self._plans: dict[tuple[Sharding, tuple[int, ...]], tuple[list, list, ReshardPlan]] = {}
    self.num_traces: collections.Counter[str] = collections.Counter()
    self._cut = jax.jit(self._trace_cut, static_argnames=("axis", "ranges"))
    self._join = jax.jit(self._trace_join, static_argnames="axis")

  def _trace_cut(self, shard: jax.Array, *, axis: int, ranges: tuple[Range, ...]):
    self.num_traces["cut"] += 1  # runs while tracing only
    return [jax.lax.slice_in_dim(shard, *cut, axis=axis) for cut in ranges]

  def _trace_join(self, parts: list[jax.Array], *, axis: int):
    self.num_traces["join"] += 1
    return jnp.concatenate(parts, axis)

  def take_layers(self, pieces: jax.Array, held: Range, wanted: Range) -> jax.Array:
    """Of pieces of the layers `held` those that are `wanted`. Work for the source's devices."""
    if wanted == held:
      return pieces
    part = (wanted[0] - held[0], wanted[1] - held[0])
    return self._cut(pieces, axis=_LAYER_AXIS, ranges=(part,))[0]

  def send(self, x: jax.Array) -> list[jax.Array]:
    """Starts the copies of the parts; returns at once, also where `x` is being computed yet.

    Never donates: `jax.device_put` with `donate=True` between meshes crashes (jax 0.10 to 0.12), so
    the source is freed by dropping the reference.
    """
    if x.sharding == self._target:  # perhaps also with devices of other processes
      return [x]
    sources, targets, plan = self._plan_of(x.sharding, x.shape)
    shard_on = {shard.device: shard.data for shard in x.addressable_shards}
    cut = [
      self._cut_up(shard_on[device], plan.axis, ranges)
      for device, ranges in zip(sources, plan.cuts, strict=True)
    ]
    parts = [cut[source][number] for taken in plan.takes for source, number in taken]
    places = [place for place, taken in zip(targets, plan.takes, strict=True) for _ in taken]
    return jax.device_put(parts, places)

  def join(self, parts: Iterable[jax.Array], like: jax.Array) -> jax.Array:
    """`like` on the target, from what `send` gave for it. Work for the target's devices.

    So not before the parts are there: it would hold up every step behind the copy.
    """
    left = iter(parts)
    if like.sharding == self._target:
      return next(left)
    _, _, plan = self._plan_of(like.sharding, like.shape)
    shards = [[next(left) for _ in taken] for taken in plan.takes]
    shards = [s[0] if len(s) == 1 else self._join(s, axis=plan.axis) for s in shards]
    return jax.make_array_from_single_device_arrays(like.shape, self._target, shards)

  def _cut_up(self, shard: jax.Array, axis: int, ranges: tuple[Range, ...]) -> list[jax.Array]:
    is_whole = ranges in ((), ((0, shard.shape[axis]),))
    return [shard] if is_whole else self._cut(shard, axis=axis, ranges=ranges)

  def _plan_of(self, source: Sharding, shape: tuple[int, ...]):
    """The source's devices, the places on the target's, and the plan between them."""
    if (source, shape) not in self._plans:
      devices, boxes = _boxes(source, shape)
      target_devices, target_boxes = _boxes(self._target, shape)
      places = list(map(SingleDeviceSharding, target_devices))
      self._plans[source, shape] = devices, places, make_plan(boxes, target_boxes)
    return self._plans[source, shape]


def _boxes(sharding: Sharding, shape: tuple[int, ...]) -> tuple[list[jax.Device], list[Box]]:
  """The devices of a sharding, and what part of an array each holds."""
  indices = sharding.devices_indices_map(shape)
  boxes = [tuple(s.indices(n)[:2] for s, n in zip(index, shape)) for index in indices.values()]
  return list(indices), boxes


class TransferTicket:
  """Parts on their way to a mesh. Inserts them into the target cache as soon as they are there.

  Not before: the cache is threaded through the target's steps, so a scatter submitted early would
  hold up every step behind the copy.
  """

  finish_s = None

  def __init__(self, parts: Sequence[jax.Array], insert: Callable[[Sequence[jax.Array]], None]):
    self._parts: Sequence[jax.Array] | None = parts
    self._insert = insert
    self._error: Exception | None = None

  def is_ready(self) -> bool:
    if self._parts is None:
      return True
    if not all(part.is_ready() for part in self._parts):
      return False
    self._finish()
    return True

  def block(self) -> None:
    """Waits for the copy; inserts nothing, as another thread may call it."""
    for part in self._parts or ():
      with contextlib.suppress(Exception):  # `result` raises it
        part.block_until_ready()

  def result(self) -> None:
    """Waits for the copy; raises why it failed, and then nothing was inserted."""
    if self._parts is not None:
      self._finish()
    if self._error is not None:
      raise self._error

  def _finish(self) -> None:
    parts, self._parts = self._parts, None
    try:
      for part in parts:
        part.block_until_ready()  # ready is not success: a failed copy raises here
      self._insert(parts)
    except Exception as error:
      self._error = error
