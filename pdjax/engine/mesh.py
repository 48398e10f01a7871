"""Device groups: a pool is a mesh of its own devices."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

import jax
import numpy as np

from pdjax.core.device_group import DeviceGroup
from pdjax.models.model import TENSOR_AXIS

CPU_DEVICES_PER_CORE = 4


def ensure_devices(num_devices: int) -> list[jax.Device]:
  """The first `num_devices` devices of JAX's own choice. Splits the CPU as `find_devices` does.

  Raises:
    ValueError: fewer devices exist than asked for.
  """
  return find_devices([DeviceGroup(devices=tuple(range(num_devices)))])[0]


def find_devices(groups: Sequence[DeviceGroup]) -> list[list[jax.Device]]:
  """The devices of each group. Splits the CPU where JAX has not started yet.

  `hardware` of a group is a platform, None that of JAX's own choice. The lowest index that groups
  of a platform have is its first device, the next one its second.

  A CPU counts for `CPU_DEVICES_PER_CORE` devices a core: more share a core and each has a copy of
  the weights. It is split into a device a core at least, as it cannot be split again when the next
  pool of a notebook needs more. Not into more than that for nothing: XLA has a thread per device,
  and with 8 on two cores a decode step of 8 rows of SmolLM2 took 63 instead of 47 ms.

  Raises:
    ValueError: fewer devices exist than asked for, or none of a platform.
  """
  num_cores = os.cpu_count() or 1
  # Only the CPU can be split, and only before the first use of JAX in this process. (That JAX has
  # started already is a RuntimeError here, and no reason to fail if it has devices enough.)
  wanted = len({i for g in groups if g.hardware in (None, "cpu") for i in g.devices})
  wanted = min(max(wanted, num_cores), CPU_DEVICES_PER_CORE * num_cores)
  wanted = max(wanted, jax.config.jax_num_cpu_devices)  # as many as the user says, at least
  with contextlib.suppress(RuntimeError):
    jax.config.update("jax_num_cpu_devices", wanted)
  platforms = [g.hardware or jax.default_backend() for g in groups]
  found: dict[tuple[str, int], jax.Device] = {}
  for platform in dict.fromkeys(platforms):
    indices = {i for g, own in zip(groups, platforms) if own == platform for i in g.devices}
    devices = _devices_of(platform)
    if len(devices) < len(indices):
      raise ValueError(
        f"{len(indices)} devices asked for, but JAX sees {len(devices)} {platform} "
        f"device(s); ask for fewer devices, or start a fresh process"
      )
    found |= {(platform, i): device for i, device in zip(sorted(indices), devices)}
  return [
    [found[platform, i] for i in g.devices] for g, platform in zip(groups, platforms, strict=True)
  ]


def _devices_of(platform: str) -> list[jax.Device]:
  try:
    return jax.devices(platform)
  except RuntimeError as error:
    raise ValueError(
      f"pools on @{platform}, but JAX sees no {platform} here, only {jax.default_backend()}"
    ) from error


def make_mesh(devices: Sequence[jax.Device]) -> jax.sharding.Mesh:
  """A pool's mesh: its devices along the tensor axis."""
  return jax.sharding.Mesh(np.array(devices), (TENSOR_AXIS,))
