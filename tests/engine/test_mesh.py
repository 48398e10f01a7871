"""Splitting the CPU into devices, which works only before JAX starts."""

import os
import subprocess
import sys

import jax
import pytest

from pdjax.core.device_group import DeviceGroup
from pdjax.engine.mesh import ensure_devices, find_devices

pytestmark = pytest.mark.quick


def test_more_devices_than_jax_started_with_are_refused():
  devices = ensure_devices(2)
  assert len(devices) == 2 == len(set(devices))
  assert ensure_devices(1) == devices[:1]
  num_devices = len(jax.devices()) + 99
  with pytest.raises(ValueError, match=rf"{num_devices} devices asked for, but JAX sees \d+ "):
    ensure_devices(num_devices)


def test_groups_of_a_platform_share_its_devices_in_the_order_of_their_indices():
  """By name or as JAX's own choice; indices of another platform do not count."""
  cpus = jax.devices("cpu")
  groups = [
    DeviceGroup(devices=(3,), hardware="cpu"),
    DeviceGroup(devices=(0,), hardware=None if jax.default_backend() == "cpu" else "cpu"),
  ]
  assert find_devices(groups) == [[cpus[1]], [cpus[0]]]
  assert find_devices(groups[:1]) == [[cpus[0]]]
  pipeline = DeviceGroup(devices=(1, 0), pp=2, hardware="cpu")
  assert find_devices([pipeline]) == [[cpus[1], cpus[0]]]


def test_a_platform_that_is_not_here_is_refused():
  with pytest.raises(ValueError, match="pools on @abacus, but JAX sees no abacus here, only"):
    find_devices([DeviceGroup(devices=(0,), hardware="abacus")])


@pytest.mark.once
@pytest.mark.parametrize(
  ("num_devices", "printed"), [(3, "3"), (10_000, "10000 devices asked for, but JAX sees")]
)
def test_a_fresh_process_splits_its_cpu_within_reason(num_devices, printed):
  code = (
    "from pdjax.engine.mesh import ensure_devices\n"
    f"try: print(len(set(ensure_devices({num_devices}))))\n"
    "except ValueError as error: print(error)"
  )
  assert run_fresh(code).startswith(printed)


def test_a_fresh_process_has_no_fewer_devices_than_it_was_told():
  num_devices = 4 * (os.cpu_count() or 1) + 1
  code = (
    "import jax\nfrom pdjax.engine.mesh import ensure_devices\n"
    "print(len(ensure_devices(1)), len(jax.devices()))"
  )
  told = {"JAX_NUM_CPU_DEVICES": str(num_devices)}
  assert run_fresh(code, **told).split() == ["1", str(num_devices)]


def run_fresh(code, **told):
  fresh = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
  run = subprocess.run(
    [sys.executable, "-c", code],
    env={**fresh, "JAX_PLATFORMS": "cpu", **told},
    capture_output=True,
    text=True,
    timeout=60,
    check=True,
  )
  return run.stdout
