"""Device groups: a pool is a mesh of its own devices."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

import jax
import numpy as np

from pdjax.models.model import TENSOR_AXIS

CPU_DEVICES_PER_CORE = 4
SPARE_CPU_DEVICES = 8


def ensure_devices(num_devices: int) -> list[jax.Device]:
  """The first `num_devices` devices. Splits the CPU where JAX has not started yet.

  A CPU counts for `CPU_DEVICES_PER_CORE` devices a core: more share a core and each has a copy of
  the weights. It is split into as many at once, or up to `SPARE_CPU_DEVICES`: it cannot be split
  again when the next pool of a notebook needs more, and a device that nobody uses costs nothing.

  Raises:
    ValueError: fewer devices exist than asked for.
  """
  most = CPU_DEVICES_PER_CORE * (os.cpu_count() or 1)
  # Only the CPU can be split, and only before the first use of JAX in this process. (That JAX has
  # started already is a RuntimeError here, and no reason to fail if it has devices enough.)
  with contextlib.suppress(RuntimeError):
    jax.config.update("jax_num_cpu_devices", min(max(num_devices, SPARE_CPU_DEVICES), most))
  devices = jax.devices()
  if len(devices) < num_devices:
    raise ValueError(
      f"{num_devices} devices asked for, but JAX sees {len(devices)} {devices[0].platform} "
      f"device(s); ask for fewer devices, or start a fresh process"
    )
  return devices[:num_devices]


def make_mesh(devices: Sequence[jax.Device]) -> jax.sharding.Mesh:
  """A pool's mesh: its devices along the tensor axis."""
  return jax.sharding.Mesh(np.array(devices), (TENSOR_AXIS,))
