"""What a compiler must know of a device that is not there. Nothing here changes; imports no jax."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import re
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CpuTarget:
  """The CPU of this machine, split into devices."""

  platform = "cpu"
  packages = ()

  def topology_options(self, num_devices: int) -> dict[str, str]:
    raise ValueError("the CPU is here: it needs no topology")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GpuTarget:
  """An NVIDIA GPU, in the units of XLA's `GpuTargetConfigProto`. Devices share a node."""

  platform = "cuda"
  packages = ("jax-cuda13-plugin", "jax-cuda13-pjrt")

  device_name: str
  compute_capability: int  # major
  has_accelerated_features: bool  # sm_90a, not sm_90
  num_cores: int
  fp32_units_per_core: int
  clock_ghz: float
  memory_bytes: int
  memory_bytes_per_s: int
  l2_bytes: int
  shared_bytes_per_core: int
  max_shared_bytes_per_block: int

  def topology_options(self, num_devices: int) -> dict[str, str]:
    """The arguments of `get_topology_desc` for so many of them."""
    return {"target_config": self.description(), "topology": f"1x1x{num_devices}"}

  def description(self) -> str:
    """A `GpuTargetConfigProto` in text form. Limits that all these GPUs share stand in it."""
    features = "ACCELERATED_FEATURES" if self.has_accelerated_features else "NONE"
    return f"""
      platform_name: "CUDA"
      device_description_str: "{self.device_name}"
      dnn_version_info {{ major: 9 minor: 12 }}
      gpu_device_info {{
        name: "{self.device_name}"
        device_vendor: "NVIDIA Corporation"
        cuda_compute_capability {{
          major: {self.compute_capability} feature_extension: {features}
        }}
        core_count: {self.num_cores}
        fpus_per_core: {self.fp32_units_per_core}
        clock_rate_ghz: {self.clock_ghz}
        device_memory_size: {self.memory_bytes}
        memory_bandwidth: {self.memory_bytes_per_s}
        l2_cache_size: {self.l2_bytes}
        shared_memory_per_core: {self.shared_bytes_per_core}
        shared_memory_per_block_optin: {self.max_shared_bytes_per_block}
        shared_memory_per_block: 49152
        registers_per_core_limit: 65536
        registers_per_block_limit: 65536
        threads_per_warp: 32
        threads_per_core_limit: 2048
        threads_per_block_limit: 1024
        thread_dim_limit_x: 1024
        thread_dim_limit_y: 1024
        thread_dim_limit_z: 64
        block_dim_limit_x: 2147483647
        block_dim_limit_y: 65535
        block_dim_limit_z: 65535
        device_address_bits: 64
        ecc_enabled: true
        dnn_version: "9.12.0"
        driver_version: "13.0.0"
        runtime_version: "13.0.0"
        compile_time_toolkit_version: "13.0.0"
      }}
    """


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TpuTarget:
  """A generation of TPUs whose slices are rectangles of chips, one device each."""

  platform = "tpu"
  packages = ("libtpu",)

  generation: str  # as libtpu calls it: v5e, v6e
  _slices = ((4, "2x2"), (8, "2x4"), (16, "4x4"), (32, "4x8"), (64, "8x8"))

  def topology_options(self, num_devices: int) -> dict[str, str]:
    """The arguments of `get_topology_desc` for the smallest slice that has so many.

    Raises:
      ValueError: no slice has.
    """
    for size, shape in self._slices:
      if num_devices <= size:
        return {"topology_name": f"{self.generation}:{shape}"}
    raise ValueError(f"{num_devices} TPU {self.generation} are more than a slice of {size}")


Target = CpuTarget | GpuTarget | TpuTarget

_MODULES = {
  "jax-cuda13-plugin": "jax_cuda13_plugin",
  "jax-cuda13-pjrt": "jax_plugins.xla_cuda13",
  "libtpu": "libtpu",
}


def missing_packages(target: Target) -> tuple[str, ...]:
  """Which packages compiling for `target` needs and this Python has not. Imports none of them."""
  return tuple(name for name in target.packages if not _is_installed(_MODULES[name]))


def install_command(packages: Iterable[str]) -> str:
  """How to get them for the jax that is installed, without drivers and CUDA libraries."""
  exact = {}  # what jax asks for by an exact version that is not its own
  for line in importlib.metadata.requires("jax") or ():
    if match := re.match(r"([\w-]+)(==[^;\s]+)", line):
      exact[match[1]] = f"'{match[0]}'"
  version = importlib.metadata.version("jax")
  wanted = (exact.get(name, f"{name}=={version}") for name in packages)
  return f"pip install --no-deps {' '.join(wanted)}"


def _is_installed(module: str) -> bool:
  try:
    return importlib.util.find_spec(module) is not None
  except ModuleNotFoundError:  # its parent package is missing
    return False
