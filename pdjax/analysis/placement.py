"""Where prefill and decode could go, on nodes of several devices each (DistServe, section 4).

Changes nothing, and searches nothing: these are the candidates and the arithmetic around them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator

from pdjax.core.device_group import split_layers
from pdjax.core.model_config import ModelConfig


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Shape:
  """One pool's devices: `tp` in each of `pp` pipeline stages."""

  tp: int = 1
  pp: int = 1

  @property
  def num_devices(self) -> int:
    return self.tp * self.pp

  def text(self, role: str, count: int = 1, policy: str | None = None) -> str:
    """So many such pools, as `parse_pools` reads it."""
    parts = [f"{count}x{role}"]
    parts += [f":{name}{n}" for name, n in (("tp", self.tp), ("pp", self.pp)) if n > 1]
    return "".join(parts) + (f":{policy}" if policy else "")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
  """Equal nodes of several devices each.

  Raises:
    ValueError: no nodes, or nodes without devices.
  """

  num_nodes: int
  devices_per_node: int

  def __post_init__(self):
    for name in ("num_nodes", "devices_per_node"):
      if getattr(self, name) < 1:
        raise ValueError(f"{name}={getattr(self, name)} must be at least 1")

  @property
  def num_devices(self) -> int:
    return self.num_nodes * self.devices_per_node


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
  """Pools for prefill and for decode. `segments` above 0: they are on that many nodes together.

  Then both have so many equal runs of stages, of the same layers, and each node has a run of both,
  so that KV caches stay inside nodes (DistServe's inter-node pipeline). 0: pools are on any nodes.
  """

  prefill: Shape
  decode: Shape
  num_prefill: int = 1
  num_decode: int = 1
  segments: int = 0

  def __post_init__(self):
    if self.segments and (self.prefill.pp % self.segments or self.decode.pp % self.segments):
      raise ValueError(
        f"{self.prefill.pp} and {self.decode.pp} stages do not make segments={self.segments}"
      )

  @property
  def num_devices(self) -> int:
    return self.num_prefill * self.prefill.num_devices + self.num_decode * self.decode.num_devices

  @property
  def pools(self) -> str:
    """As `parse_pools` reads it."""
    return (
      f"{self.prefill.text('prefill', self.num_prefill)},"
      f"{self.decode.text('decode', self.num_decode)}"
    )

  def times(self, count: int) -> Placement:
    """So many of this placement beside each other."""
    return dataclasses.replace(
      self, num_prefill=count * self.num_prefill, num_decode=count * self.num_decode
    )

  def nodes(self, num_layers: int) -> tuple[dict[str, tuple[tuple[int, int], ...]], ...]:
    """For each node of a segmented placement, the layers of the stages that each role has there."""
    found = []
    for i in range(self.segments):
      node = {}
      for role, shape in (("prefill", self.prefill), ("decode", self.decode)):
        each = shape.pp // self.segments
        node[role] = split_layers(num_layers, shape.pp)[i * each : (i + 1) * each]
      found.append(node)
    return tuple(found)


Fits = Callable[[Shape], bool]
"""Whether weights and the longest request fit into the memory of a pool of this shape."""


def _divides(model: ModelConfig, shape: Shape) -> bool:
  """Whether stages are equal and their layers can be split over the devices."""
  try:
    model.check_split(shape.tp)
  except ValueError:
    return False
  return model.num_layers % shape.pp == 0


def shapes(model: ModelConfig, cluster: Nodes, fits: Fits) -> list[Shape]:
  """The shapes that a pool may have where nodes do not matter (DistServe, algorithm 1).

  Tensor parallelism stays inside a node. Fewest devices first.
  """
  found = [
    shape
    for tp in range(1, cluster.devices_per_node + 1)
    for pp in range(1, cluster.num_devices // tp + 1)
    if _divides(model, shape := Shape(tp=tp, pp=pp)) and fits(shape)
  ]
  return sorted(found, key=lambda s: (s.num_devices, s))


def segmented(
  model: ModelConfig, cluster: Nodes, fits: Fits, *, most_pools: int = 1
) -> list[Placement]:
  """The placements that keep KV caches inside nodes (DistServe, algorithm 2). Smallest first.

  Prefill and decode have a run of stages on each of the same nodes. The paper has one pool of each
  role there; here up to `most_pools`, if the node has room for them. Of placements with the same
  pools that on the fewest nodes is kept: it sends least between nodes.
  """
  found: dict[str, Placement] = {}
  for num_nodes in range(1, cluster.num_nodes + 1):
    for prefill, decode in itertools.product(_segments(model, cluster, num_nodes, fits), repeat=2):
      for num_prefill, num_decode in _coprime(most_pools):
        placement = Placement(
          prefill=prefill,
          decode=decode,
          num_prefill=num_prefill,
          num_decode=num_decode,
          segments=num_nodes,
        )
        if placement.num_devices <= num_nodes * cluster.devices_per_node:
          found.setdefault(placement.pools, placement)
  return sorted(found.values(), key=lambda p: (p.num_devices, p.pools))


def _segments(model: ModelConfig, cluster: Nodes, num_nodes: int, fits: Fits) -> Iterator[Shape]:
  for tp in range(1, cluster.devices_per_node):
    for pp in range(1, cluster.devices_per_node // tp + 1):
      shape = Shape(tp=tp, pp=pp * num_nodes)
      if _divides(model, shape) and fits(shape):
        yield shape


def _coprime(most: int) -> list[tuple[int, int]]:
  """Pairs up to `most` that are no multiple of a smaller pair, which is replicated instead."""
  numbers = range(1, most + 1)
  return [(a, b) for a, b in itertools.product(numbers, repeat=2) if math.gcd(a, b) == 1]


def pools_for_rate(rate_rps: float, goodput_rps: float) -> int:
  """How many pools of this goodput serve `rate_rps`."""
  return max(1, math.ceil(rate_rps / goodput_rps))


def units_on(cluster: Nodes, unit: Placement) -> int:
  """How many of a segmented placement the nodes hold, each within a group of its `segments`."""
  per_group = cluster.devices_per_node * unit.segments // unit.num_devices
  return cluster.num_nodes // unit.segments * per_group


def holds(cluster: Nodes, placement: Placement) -> bool:
  """Whether every stage of every pool has its devices on one node.

  Stages take the first node with room, the largest first, which may miss the only way.
  """
  free = [cluster.devices_per_node] * cluster.num_nodes
  pools = [placement.prefill] * placement.num_prefill + [placement.decode] * placement.num_decode
  for tp in sorted((shape.tp for shape in pools for _ in range(shape.pp)), reverse=True):
    node = next((i for i, num_free in enumerate(free) if num_free >= tp), None)
    if node is None:
      return False
    free[node] -= tp
  return True


def most_on(
  cluster: Nodes,
  prefill: Iterable[tuple[Shape, float]],
  decode: Iterable[tuple[Shape, float]],
) -> Placement | None:
  """The placement that serves most on the cluster, of shapes with the goodput of a pool each.

  The slower role decides. Of equal ones that with fewest devices; None where none fits.
  """
  num_devices = cluster.num_devices
  best: tuple[float, int, Placement] | None = None
  for (p, prefill_rps), (d, decode_rps) in itertools.product(prefill, list(decode)):
    for n in range(1, (num_devices - d.num_devices) // p.num_devices + 1):
      most = (num_devices - n * p.num_devices) // d.num_devices
      most = min(most, pools_for_rate(n * prefill_rps, decode_rps))  # more would be idle
      for m in range(most, 0, -1):
        placement = Placement(prefill=p, decode=d, num_prefill=n, num_decode=m)
        if holds(cluster, placement):
          served_rps = min(n * prefill_rps, m * decode_rps)
          if best is None or (served_rps, -placement.num_devices) > best[:2]:
            best = served_rps, -placement.num_devices, placement
          break
  return None if best is None else best[2]
