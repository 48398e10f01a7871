"""Which devices work as one, and which layers each part of them has. Never changes."""

from __future__ import annotations

import dataclasses
import itertools


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGroup:
  """What a pool runs on: `devices`, by index, in `pp` pipeline stages, listed stage by stage.

  Each stage has an equal share of the devices, over which its layers are split (tensor
  parallelism). `hardware` is a name for the program to look up; None is that of the experiment.

  Raises:
    ValueError: devices that do not make `pp` equal stages.
  """

  devices: tuple[int, ...]
  pp: int = 1
  hardware: str | None = None

  def __post_init__(self):
    if self.pp < 1 or not self.devices or len(self.devices) % self.pp:
      raise ValueError(f"devices={self.devices} do not make pp={self.pp} stages of equal size")

  @property
  def tp(self) -> int:
    """Devices of a stage."""
    return len(self.devices) // self.pp

  @property
  def stages(self) -> tuple[tuple[int, ...], ...]:
    """The devices of each stage."""
    tp = self.tp
    return tuple(self.devices[i : i + tp] for i in range(0, len(self.devices), tp))


def split_layers(num_layers: int, num_parts: int) -> tuple[tuple[int, int], ...]:
  """Ranges [first, last) of as many layers each; where that cannot be, the first have one more.

  Raises:
    ValueError: fewer layers than parts, or no part.
  """
  if not 1 <= num_parts <= num_layers:
    raise ValueError(f"{num_layers} layers cannot be cut into {num_parts} parts")
  each, more = divmod(num_layers, num_parts)
  ends = [each * i + min(i, more) for i in range(num_parts + 1)]
  return tuple(itertools.pairwise(ends))
