"""Device groups: a pool is a mesh of its own devices."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

import jax
import numpy as np

from pdjax.models.model import TENSOR_AXIS

CPU_DEVICES_PER_CORE = 4


def ensure_devices(num_devices: int) -> list[jax.Device]:
  """The first `num_devices` devices. Splits the CPU where JAX has not started yet.

  A CPU counts for `CPU_DEVICES_PER_CORE` devices a core: more share a core and each has a copy of
  the weights. It is split into a device a core at least, as it cannot be split again when the next
  pool of a notebook needs more. Not into more than that for nothing: XLA has a thread per device,
  and with 8 on two cores a decode step of 8 rows of SmolLM2 took 63 instead of 47 ms.

  Raises:
    ValueError: fewer devices exist than asked for.
  """
  num_cores = os.cpu_count() or 1
  # Only the CPU can be split, and only before the first use of JAX in this process. (That JAX has
  # started already is a RuntimeError here, and no reason to fail if it has devices enough.)
  wanted = min(max(num_devices, num_cores), CPU_DEVICES_PER_CORE * num_cores)
  wanted = max(wanted, jax.config.jax_num_cpu_devices)  # as many as the user says, at least
  with contextlib.suppress(RuntimeError):
    jax.config.update("jax_num_cpu_devices", wanted)
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
