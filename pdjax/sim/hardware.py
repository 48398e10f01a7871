"""Devices and links, as data sheets say and as measured. Nothing here changes."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import TypeVar

import numpy as np

T = TypeVar("T")  # a number or an array of them
Curve = tuple[tuple[float, float], ...]  # (bytes of a message, seconds), ascending

MAX_P = 20.0
"""Of a p-norm: above it, short times to the power of p are lost below the smallest number."""

LONG_S = 5e-4
"""Where a launch begins to be long: about here clocks fall in the tables of H100, H200 and L40S."""

MAX_CACHED = 100.0
"""How many times faster than the memory elementwise operators may come out."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
  """How far a device and its kernels fall short of the data sheet. The defaults are ideal.

  With C and M the seconds that an operator's arithmetic and its memory traffic take at the peaks,
  it takes

    launches * launch_s + ((C / compute)**p + (M / memory)**p)**(1/p)

  `compute` and `memory` are shares of the peaks. `p` says how well arithmetic and memory traffic
  overlap: 1 is not at all, infinity perfectly. A matrix that goes on for long meets the limit of
  the device's power: its arithmetic takes up to `gemm_throttle` longer, by half of that where it
  would take `LONG_S`.

  Elementwise operators and decode attention have memory traffic alone. That of the former may come
  out faster than the memory, as what an operator left in the cache is never read from there, or was
  fused away. The latter is as if every context were `decode_pad_tokens` longer.

  Prefill attention works at queries of each head side by side: with fewer than `prefill_fill_rows`
  of them a part of the device has nothing to do, and its arithmetic takes as long as with so many.

  An engine may launch one kernel for the chunks and the decodes of a step. Like prefill attention
  it works at tiles of queries, in which a decode takes the place of `mixed_rows`; tiles that have
  nothing to do for a decode, as its chunk is longer, take `mixed_idle_s` for each query of theirs;
  and it takes as long as its longest context does alone. None: nobody measured such a kernel.

  An all-reduce over as many devices as `all_reduces` has takes what was measured there, linear
  between sizes and beyond the largest; below the smallest it takes as long as that. (Libraries
  change their algorithms with the size of a message, by leaps.) Over others it takes
  `all_reduce_launch_s`, `all_reduce_hop_s` for each device but one, and as long as the bytes that
  cross each link at `all_reduce_share` of its rate between two devices; with every doubling of the
  devices these take `all_reduce_growth` times as long: 1 through a switch, 2 on a bus that all
  share, more across sockets. Absent, nobody measured it, and the link is taken at its word.

  The methods take seconds at the peaks, numbers or arrays of them.

  Raises:
    ValueError: a parameter outside its range, with its value.
  """

  gemm_compute: float = 1.0
  gemm_memory: float = 1.0
  gemm_launch_s: float = 0.0
  gemm_p: float = math.inf
  gemm_throttle: float = 0.0
  elementwise_memory: float = 1.0
  elementwise_launch_s: float = 0.0
  prefill_compute: float = 1.0
  prefill_memory: float = 1.0
  prefill_launch_s: float = 0.0
  prefill_p: float = math.inf
  prefill_fill_rows: float = 0.0
  decode_memory: float = 1.0
  decode_launch_s: float = 0.0
  decode_pad_tokens: float = 0.0
  mixed_rows: float | None = None
  mixed_idle_s: float = 0.0
  all_reduce_share: float | None = None
  all_reduce_launch_s: float | None = None
  all_reduce_hop_s: float = 0.0
  all_reduce_growth: float = 1.0
  all_reduces: tuple[tuple[int, Curve], ...] = ()  # of so many devices
  host_s: float = 0.0  # per step: scheduling, preparing inputs, reading results
  host_row_s: float = 0.0  # the same for each of its sequences

  def __post_init__(self):
    for field in dataclasses.fields(self):
      name, value = field.name, getattr(self, field.name)
      if value is None or name == "all_reduces":
        continue
      if name.endswith(("_compute", "_memory", "_share")):
        most = MAX_CACHED if name == "elementwise_memory" else 1
        if not 0 < value <= most:
          raise ValueError(f"{name}={value} must be a share of the peak, in (0, {most}]")
      elif name == "all_reduce_growth":
        if not 0.25 <= value <= 8:
          raise ValueError(f"{name}={value} must be 0.25 to 8, for each doubling of the devices")
      elif name.endswith("_p"):
        if not (1 <= value <= MAX_P or value == math.inf):
          raise ValueError(f"{name}={value} must be 1 to {MAX_P}, or infinite")
      elif not 0 <= value < math.inf:
        raise ValueError(f"{name}={value} must be 0 or more")
    if (self.all_reduce_share is None) != (self.all_reduce_launch_s is None):
      raise ValueError(
        f"all_reduce_share={self.all_reduce_share} and "
        f"all_reduce_launch_s={self.all_reduce_launch_s}: both or neither"
      )
    if self.all_reduces and self.all_reduce_share is None:
      raise ValueError("all_reduces without all_reduce_share, which says what others take")
    for devices, curve in self.all_reduces:
      sizes, seconds = [size for size, _ in curve], [seconds for _, seconds in curve]
      if devices < 2 or len(curve) < 2 or sizes != sorted(set(sizes)):
        raise ValueError(f"all_reduces: {devices} devices, sizes {sizes}: two or more, ascending")
      if seconds[0] <= 0 or seconds != sorted(seconds):
        raise ValueError(
          f"all_reduces over {devices} devices take {seconds} s by size: must be positive, not fall"
        )

  def gemm_s(self, num_launches: T, compute_s: T, memory_s: T) -> T:
    compute_s = compute_s / self.gemm_compute
    each_s = compute_s / num_launches
    compute_s = compute_s * (1 + self.gemm_throttle * each_s / (each_s + LONG_S))
    return num_launches * self.gemm_launch_s + smooth_max(
      compute_s, memory_s / self.gemm_memory, self.gemm_p
    )

  def elementwise_s(self, num_launches: T, memory_s: T) -> T:
    return num_launches * self.elementwise_launch_s + memory_s / self.elementwise_memory

  def prefill_s(self, num_launches: T, compute_s: T, memory_s: T, num_rows: T) -> T:
    """`num_rows`: queries times heads, of each launch."""
    lack = self.prefill_fill_rows / num_rows - 1
    compute_s = compute_s * (1 + (lack + abs(lack)) / 2)  # times the larger of 1 and fill / rows
    return num_launches * self.prefill_launch_s + smooth_max(
      compute_s / self.prefill_compute, memory_s / self.prefill_memory, self.prefill_p
    )

  def decode_s(self, num_launches: T, memory_s: T, row_memory_s: T) -> T:
    """`row_memory_s`: of one token of context more in every row."""
    return (
      num_launches * self.decode_launch_s
      + (memory_s + self.decode_pad_tokens * row_memory_s) / self.decode_memory
    )

  def mixed_s(
    self,
    num_launches: T,
    compute_s: T,  # of chunks
    decode_compute_s: T,
    memory_s: T,  # of both
    num_rows: T,  # of each launch, as for `prefill_s`
    num_decode_rows: T,
    longest_s: T,  # of one row that has the longest context, over all launches
    num_idle: T,  # queries of chunks in the tiles of decodes, over all launches
  ) -> T:
    work_s = self.prefill_s(
      num_launches,
      compute_s + self.mixed_rows * decode_compute_s,
      memory_s,
      num_rows + self.mixed_rows * num_decode_rows,
    )
    work_s = work_s + self.mixed_idle_s * num_idle
    alone_s = num_launches * self.prefill_launch_s + (
      longest_s * self.prefill_fill_rows / self.prefill_compute
    )
    return (work_s + alone_s + abs(work_s - alone_s)) / 2  # the longer one

  def all_reduce_s(self, num_launches: T, num_bytes: T, tp: T, bytes_per_s: T) -> T:
    """`num_bytes`: of each message. `bytes_per_s`: of the link. Only where it was fitted.

    2 (tp - 1) / tp of the bytes cross each link: the least that any all-reduce must send, and what
    a ring does (Patarasuk and Yuan 2009). The latency counts once, not once a hop of a ring: inside
    a node small all-reduces are done in one hop.
    """
    slowdown = (tp / 2) ** math.log2(self.all_reduce_growth) / self.all_reduce_share
    each_s = self.all_reduce_launch_s + self.all_reduce_hop_s * (tp - 1)
    each_s = each_s + crossing_bytes(num_bytes, tp) / bytes_per_s * slowdown
    for devices, curve in self.all_reduces:
      sizes, seconds = np.array(curve).T
      own_s = on_lines(sizes, seconds, np.maximum(sizes[0], num_bytes))
      each_s = np.where(tp == devices, own_s, each_s)
    return num_launches * each_s


def crossing_bytes(num_bytes: T, tp: T) -> T:
  """Of a message of an all-reduce over `tp` devices, what crosses each link."""
  return num_bytes * 2 * (tp - 1) / tp


def on_lines(axis: np.ndarray, values: np.ndarray, x: T) -> T:
  """The values at `x`, linear between those at two or more ascending places and beyond them."""
  i = np.clip(np.searchsorted(axis, x, side="right") - 1, 0, len(axis) - 2)
  share = (x - axis[i]) / (axis[i + 1] - axis[i])
  return values[i] + share * (values[i + 1] - values[i])


def smooth_max(a: T, b: T, p: float) -> T:
  """The p-norm of two times: their sum for p = 1, the longer one for infinity (numbers only)."""
  if p == math.inf:
    return max(a, b)
  return (a**p + b**p) ** (1 / p)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Device:
  """One accelerator. Peaks are dense 16-bit FLOP/s and bytes/s, in powers of ten.

  Weights, K, V and activations have `bytes_per_value` there. `link` joins the devices of a node:
  what a fit says of all-reduces is of this one.

  `fit` None is a device that nobody measured: its times are what the data sheet promises, which is
  30 to 60 % too fast, and must be shown as uncalibrated.

  Raises:
    ValueError: a peak or a size that is not positive.
  """

  name: str
  peak_flops_per_s: float
  peak_bytes_per_s: float
  memory_bytes: float
  bytes_per_value: float = 2
  link: Link | None = None
  fit: Fit | None = None

  def __post_init__(self):
    for field in ("peak_flops_per_s", "peak_bytes_per_s", "memory_bytes", "bytes_per_value"):
      if not 0 < getattr(self, field) < math.inf:
        raise ValueError(f"device {self.name}: {field}={getattr(self, field)} must be positive")

  @property
  def is_calibrated(self) -> bool:
    return self.fit is not None

  @property
  def label(self) -> str:
    return self.name if self.is_calibrated else f"{self.name} (uncalibrated)"

  @property
  def ridge_flop_per_byte(self) -> float:
    """Arithmetic intensity at which the peaks balance."""
    return self.peak_flops_per_s / self.peak_bytes_per_s


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Link:
  """A way between two pools, one direction. A pool's copies take turns on it.

  Raises:
    ValueError: a negative latency or a rate that is not positive.
  """

  name: str
  latency_s: float
  bytes_per_s: float

  def __post_init__(self):
    if not 0 <= self.latency_s < math.inf:
      raise ValueError(f"link {self.name}: latency_s={self.latency_s} must be 0 or more")
    if not self.bytes_per_s > 0:
      raise ValueError(f"link {self.name}: bytes_per_s={self.bytes_per_s} must be positive")

  def copy_s(self, num_bytes: float) -> float:
    return self.latency_s + num_bytes / self.bytes_per_s


PCIE_4 = Link(name="pcie4", latency_s=10e-6, bytes_per_s=32e9)
"""PCIe 4.0 x16 by its data sheet: an A100's way to its host's memory."""


def parse_link(text: str, *, latency_s: float = 50e-6) -> Link:
  """The link of so many gigabits per second, as in `10gbps`.

  The latency is an assumption: a message of one packet over a data-centre network.

  Raises:
    ValueError: `text` has another form.
  """
  match = re.fullmatch(r"(\d+(?:\.\d+)?)gbps", text.strip().lower())
  if not match or not float(match[1]):
    raise ValueError(f"link {text!r} is not a rate such as '10gbps' (gigabits per second)")
  return Link(name=text.strip().lower(), latency_s=latency_s, bytes_per_s=float(match[1]) * 1e9 / 8)
