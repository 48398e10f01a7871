"""Devices and links, as data sheets say and as measured. Nothing here changes."""

from __future__ import annotations

import dataclasses
import math
import re


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
  """How far a device and its kernels fall short of the data sheet. The defaults are ideal.

  An operator takes, with C = flops / (compute * peak) and M = bytes / (memory * peak),

    launches * launch_s + (C**p + M**p)**(1/p)

  `compute` and `memory` are shares of the peaks. `p` says how well arithmetic and memory traffic
  overlap: 1 is not at all, infinity perfectly. Elementwise operators and decode attention have
  memory traffic alone; the latter as if every context were `decode_pad_tokens` longer.

  Raises:
    ValueError: a parameter outside its range, with its value.
  """

  gemm_compute: float = 1.0
  gemm_memory: float = 1.0
  gemm_launch_s: float = 0.0
  gemm_p: float = math.inf
  elementwise_memory: float = 1.0
  elementwise_launch_s: float = 0.0
  prefill_compute: float = 1.0
  prefill_memory: float = 1.0
  prefill_launch_s: float = 0.0
  prefill_p: float = math.inf
  decode_memory: float = 1.0
  decode_launch_s: float = 0.0
  decode_pad_tokens: float = 0.0
  host_s: float = 0.0  # per step: scheduling, preparing inputs, reading results

  def __post_init__(self):
    for field in dataclasses.fields(self):
      name, value = field.name, getattr(self, field.name)
      if name.endswith(("_compute", "_memory")):
        if not 0 < value <= 1:
          raise ValueError(f"{name}={value} must be a share of the peak, in (0, 1]")
      elif name.endswith("_p"):
        if not value >= 1:
          raise ValueError(f"{name}={value} must be at least 1")
      elif not 0 <= value < math.inf:
        raise ValueError(f"{name}={value} must be 0 or more")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Device:
  """One accelerator. Peaks are dense 16-bit FLOP/s and bytes/s, in powers of ten.

  `fit` None is a device that nobody measured: its times are what the data sheet promises, which
  is 30 to 60 % too fast, and must be shown as uncalibrated.

  Raises:
    ValueError: a peak or a memory size that is not positive.
  """

  name: str
  peak_flops_per_s: float
  peak_bytes_per_s: float
  memory_bytes: float
  fit: Fit | None = None

  def __post_init__(self):
    for field in ("peak_flops_per_s", "peak_bytes_per_s", "memory_bytes"):
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
