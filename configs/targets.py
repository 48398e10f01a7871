"""What to compile for, under the names of configs/hardware.py.

GPUs: the specifications that XLA publishes (github.com/openxla/xla, xla/backends/gpu/target_config/
specs/{a100_sxm_80,h100_sxm,h200,b200}.txtpb, read in November 2026). Only what tells them apart is
here. TPUs: libtpu knows them by name.
"""

from __future__ import annotations

from pdjax.engine.targets import CpuTarget, GpuTarget, Target, TpuTarget

TARGETS: dict[str, Target] = {
  "cpu": CpuTarget(),
  "a100": GpuTarget(
    device_name="NVIDIA A100-SXM4-80GB",
    compute_capability=8,
    has_accelerated_features=False,
    num_cores=108,
    fp32_units_per_core=64,
    clock_ghz=1.41,
    memory_bytes=85_100_068_864,
    memory_bytes_per_s=2_039_040_000_000,
    l2_bytes=41_943_040,
    shared_bytes_per_core=167_936,
    max_shared_bytes_per_block=166_912,
  ),
  "h100": GpuTarget(
    device_name="NVIDIA H100 80GB HBM3",
    compute_capability=9,
    has_accelerated_features=True,
    num_cores=132,
    fp32_units_per_core=128,
    clock_ghz=1.98,
    memory_bytes=84_942_979_072,
    memory_bytes_per_s=3_352_320_000_000,
    l2_bytes=52_428_800,
    shared_bytes_per_core=233_472,
    max_shared_bytes_per_block=232_448,
  ),
  "h200": GpuTarget(
    device_name="NVIDIA H200",
    compute_capability=9,
    has_accelerated_features=True,
    num_cores=132,
    fp32_units_per_core=128,
    clock_ghz=1.98,
    memory_bytes=151_397_597_184,
    memory_bytes_per_s=4_800_000_000_000,
    l2_bytes=52_428_800,
    shared_bytes_per_core=233_472,
    max_shared_bytes_per_block=232_448,
  ),
  "b200": GpuTarget(
    device_name="NVIDIA B200",
    compute_capability=10,
    has_accelerated_features=True,
    num_cores=148,
    fp32_units_per_core=128,
    clock_ghz=1.965,
    memory_bytes=191_514_411_008,
    memory_bytes_per_s=7_672_320_000_000,
    l2_bytes=132_644_864,
    shared_bytes_per_core=233_472,
    max_shared_bytes_per_block=232_448,
  ),
  "tpu-v5e": TpuTarget(generation="v5e"),
  "tpu-v6e": TpuTarget(generation="v6e"),
}
