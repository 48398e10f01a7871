"""Devices and links by name. Peaks are the vendors' dense bf16 figures, in powers of ten.

Those that have a fit, but for the CPU's, were fitted to published operator timings by

    python -m experiments.calibrate --data=../shared/data --hardware=NAME

which prints the entry, its errors, and those of steps that it never saw (last seen to give what
stands here on 1 Dec 2026). All others run at data-sheet peaks and are labelled uncalibrated: B200
has attention in these tables and no matrices. Each fit saw one model's operators, a random half of
the points of each. Errors on what was fitted, median / 95th percentile, in percent:

  device        matrices    elementwise  prefill      decode       all-reduce
  a100          3.9 / 16    6.4 / 13     11 / 32      3.6 / 16     2.3 / 11
  a100-vllm     4.6 / 20    7.1 / 15     3.8 / 35     5.9 / 35     0.1 / 26
  a100-pairs    3.9 / 16    6.4 / 13     11 / 32      3.6 / 16     1.4 / 7.5
  a40           4.6 / 16    4.4 / 35
  h100          3.6 / 11    6.2 / 18     3.1 / 25     4.9 / 29     0.4 / 4.4
  h200          3.9 / 12    6.2 / 18     3.5 / 27     4.6 / 21     0.4 / 3.6
  l40s          6.5 / 20    18 / 32      8.5 / 65     11 / 152     0.2 / 8.0
  rtx-pro-6000  5.3 / 17    25 / 34      3.4 / 16     3.7 / 12
  rtx-4090      2.7 / 13    18 / 32      4.8 / 16     6.5 / 28
  tpu-v6e       4.3 / 12    6.3 / 18     3.3 / 18     1.9 / 16
  cpu           whole steps, as this engine pads them: prefill 3.4 / 18, decode 7.5 / 22, mixed
                5.4 / 15

The large errors are those of sizes that take little of a step: prompts and contexts below 128
tokens. What of each source was used:

  a100          Vidur (MIT): Llama-2-7B's layers, NCCL inside a DGX; attention is Frontier's (MIT),
                FlashInfer on an A800, the same die. Kernels of 2024.
  a100-vllm     aiconfigurator-core 0.12 (Apache-2.0), vLLM 0.14: Llama-3.1-8B's matrices, attention
                of 32 heads on 8, vLLM's own all-reduce. Elementwise operators are Vidur's. Matrices
                above 256 tokens take a fifth less time than Vidur's.
  a100-pairs    as a100, with all-reduces over 2 and 4 A100s of a host where NVLink joins pairs and
                PCIe these (Sarathi-Serve's hosts): over four they take ten times as long. Those
                are PCIe cards, whose memory is 5 % slower than the SXM module's.
  a40           Vidur: Llama-2-7B's layers. Nobody published attention or all-reduces of an A40 that
                could be read: attention is the A100's in shares of the peaks, all-reduces are those
                of a100-pairs, to be had with `tp_link="nvlink"`.
  h100          the same of vLLM 0.24; elementwise from Vidur's H100
  h200          the same of vLLM 0.24; all-reduce by NCCL; elementwise from Vidur's H100
  l40s          the same of vLLM 0.24; all-reduce by NCCL over PCIe; elementwise from the RTX 4090.
                Its 96 MB of cache hold what a benchmark repeats: weights of TP 4 and 8 and short
                contexts come out faster there than they will be in a step.
  rtx-*         LLMServingSim (MIT), vLLM 0.19, Llama-3.1-8B; also attention of chunks and decodes
                in one kernel (`mixed_rows`, `mixed_idle_s`)
  tpu-v6e       LLMServingSim (MIT), Llama-3.1-8B in XLA; prefill attention is far from any peak

All-reduces are kept by size (`Fit.all_reduces`): vLLM's own ends between 2 and 4 MB, above that and
elsewhere NCCL takes one of its protocols, by leaps that no one form has. Vidur's timings below 1 MB
scatter by a factor of two. Over other links and other numbers of devices the fitted form is taken.

What of these operators makes a layer is in `experiments/validation/measured.py`, steps made of them
against the fits are in VALIDATION.md.

Memory is what CUDA reports of A100, H100, H200 and B200 (see configs/targets.py; with the A100's
DistServe's published capacities come out within 0.5 %), the data sheet's of others.

Host time is Vidur's of a 2024 Python engine on an A100: scheduling, inputs, sampling and outputs of
Llama-2-7B at 13 batch sizes, 1.2 ms at 8 to 6.2 ms at 128, a line within 3 %; on the A40's host 1.6
to 8.0 ms, a line within 23 %. What Ray takes there from two devices on, a worker each, is in no
entry: 4 to 7 ms a step (the same files). An engine that hides host time behind two steps in flight
has `dataclasses.replace(fit, host_s=0.0, host_row_s=0.0)`.
Of other devices nobody published it: it is 0, and a simulation says so.

No end-to-end run took part in any of this.
"""

from __future__ import annotations

import re

from pdjax.core.names import pick
from pdjax.sim.hardware import PCIE_4, Curve, Device, Fit, Link, parse_link

FITTED_FROM = {
  "a100": "a100 vidur",
  "a100-vllm": "a100-vllm aiconfigurator",
  "a100-pairs": "a100-pairs vidur",
  "a40": "a40 vidur",
  "h100": "h100 aiconfigurator",
  "h200": "h200 aiconfigurator",
  "l40s": "l40s aiconfigurator",
  "rtx-pro-6000": "rtx-pro-6000 llmservingsim",
  "rtx-4090": "rtx-4090 llmservingsim",
  "tpu-v6e": "tpu-v6e llmservingsim",
}
"""Device -> source of `experiments.validation.steps` whose half its fit is."""

# One direction, between one pair of devices. Latencies are assumptions: 10 us inside a node and
# over InfiniBand (aiconfigurator's A100 system file, which calls it unofficial), 50 us
# over Ethernet. Rates of NVLink, InfiniBand and PCIe 4.0 x16 are from the same file and its H100
# sibling, those of Ethernet are their names.
LINKS: dict[str, Link] = {
  link.name: link
  for link in (
    Link(name="nvlink", latency_s=10e-6, bytes_per_s=300e9),  # A100, third generation
    Link(name="nvlink4", latency_s=10e-6, bytes_per_s=450e9),  # H100, H200
    Link(name="hdr200", latency_s=10e-6, bytes_per_s=25e9),
    PCIE_4,
    Link(name="100gbe", latency_s=50e-6, bytes_per_s=12.5e9),
    Link(name="25gbe", latency_s=50e-6, bytes_per_s=3.125e9),  # DistServe's between nodes
    Link(name="10gbe", latency_s=50e-6, bytes_per_s=1.25e9),
  )
}

# Devices, then bytes of a message and seconds of an all-reduce over them.
_ALL_REDUCES: dict[str, tuple[tuple[int, Curve], ...]] = {
  "a100": (
    (2, ((24576, 5.57e-05), (49152, 5.57e-05), (196608, 5.57e-05), (458752, 5.57e-05),
         (917504, 5.57e-05), (1900544, 5.57e-05), (3801088, 6.17e-05), (7667712, 9.04e-05),
         (15597568, 0.000133), (33554432, 0.000246))),
    (4, ((24576, 2.01e-05), (49152, 2.01e-05), (196608, 3.51e-05), (458752, 3.51e-05),
         (917504, 5.11e-05), (1900544, 5.11e-05), (3801088, 7.93e-05), (7667712, 0.00013),
         (15597568, 0.000195), (33554432, 0.00032))),
    (8, ((24576, 2.96e-05), (49152, 3.67e-05), (196608, 3.67e-05), (458752, 4.64e-05),
         (917504, 5.19e-05), (1900544, 6.85e-05), (3801088, 8.93e-05), (7667712, 0.000142),
         (15597568, 0.000258), (33554432, 0.000417))),
  ),
  "a100-vllm": (
    (2, ((8192, 5.28e-06), (16384, 5.28e-06), (65536, 5.74e-06), (131072, 6.57e-06),
         (524288, 1.07e-05), (1310720, 1.74e-05), (4194304, 8.61e-05), (8388608, 0.000126),
         (16777216, 0.000222), (67108864, 0.000746))),
    (4, ((8192, 6e-06), (16384, 6e-06), (65536, 7.78e-06), (131072, 9.91e-06),
         (524288, 1.84e-05), (1310720, 2.93e-05), (4194304, 0.000114), (8388608, 0.000182),
         (16777216, 0.000288), (67108864, 0.000996))),
    (8, ((8192, 6.54e-06), (16384, 6.91e-06), (65536, 1.14e-05), (131072, 1.71e-05),
         (524288, 2.16e-05), (1310720, 3.16e-05), (4194304, 0.000125), (8388608, 0.000214),
         (16777216, 0.000364), (67108864, 0.00116))),
  ),
  "a100-pairs": (
    (2, ((24576, 5.89e-05), (49152, 5.89e-05), (196608, 5.89e-05), (458752, 5.89e-05),
         (917504, 6.3e-05), (1900544, 6.3e-05), (3801088, 6.3e-05), (7667712, 6.81e-05),
         (15597568, 0.000113), (33554432, 0.000212))),
    (4, ((24576, 3.26e-05), (49152, 6.17e-05), (196608, 6.86e-05), (458752, 8.78e-05),
         (917504, 0.000119), (1900544, 0.000181), (3801088, 0.000302), (7667712, 0.000536),
         (15597568, 0.00106), (33554432, 0.00218))),
  ),
  "h100": (
    (2, ((8192, 4.46e-06), (16384, 4.46e-06), (32768, 4.52e-06), (65536, 4.75e-06),
         (131072, 5.18e-06), (262144, 6.31e-06), (655360, 9.38e-06), (1572864, 1.62e-05),
         (4194304, 4.5e-05), (10485760, 9.83e-05), (20971520, 0.000206), (67108864, 0.000482),
         (134217728, 0.000885), (268435456, 0.00171))),
    (4, ((8192, 4.83e-06), (16384, 4.9e-06), (32768, 5.23e-06), (65536, 5.8e-06),
         (131072, 7.18e-06), (262144, 1.13e-05), (655360, 1.42e-05), (1572864, 2.44e-05),
         (4194304, 5.32e-05), (10485760, 0.000123), (20971520, 0.000227), (67108864, 0.000616),
         (134217728, 0.00118), (268435456, 0.00231))),
    (8, ((8192, 5.31e-06), (16384, 5.58e-06), (32768, 6.41e-06), (65536, 7.86e-06),
         (131072, 1.08e-05), (262144, 1.2e-05), (655360, 1.6e-05), (1572864, 2.49e-05),
         (4194304, 5.09e-05), (10485760, 0.000112), (20971520, 0.000229), (67108864, 0.00059),
         (134217728, 0.00109), (268435456, 0.00212))),
  ),
  "h200": (
    (2, ((8192, 7.27e-06), (16384, 7.28e-06), (32768, 7.43e-06), (65536, 7.53e-06),
         (131072, 8.69e-06), (262144, 1.03e-05), (655360, 1.79e-05), (1572864, 3.06e-05),
         (4194304, 4.54e-05), (10485760, 9.24e-05), (20971520, 0.000168), (67108864, 0.000463),
         (134217728, 0.000886), (268435456, 0.0017))),
    (4, ((8192, 1.09e-05), (16384, 1.13e-05), (32768, 1.13e-05), (65536, 1.13e-05),
         (131072, 1.17e-05), (262144, 1.43e-05), (655360, 2.06e-05), (1572864, 3.43e-05),
         (4194304, 6.03e-05), (10485760, 0.000117), (20971520, 0.000211), (67108864, 0.000615),
         (134217728, 0.00118), (268435456, 0.00231))),
    (8, ((8192, 1.83e-05), (16384, 1.84e-05), (32768, 2e-05), (65536, 2.08e-05),
         (131072, 2.08e-05), (262144, 2.08e-05), (655360, 2.93e-05), (1572864, 4.51e-05),
         (4194304, 7.84e-05), (10485760, 0.000142), (20971520, 0.000229), (67108864, 0.000564),
         (134217728, 0.00105), (268435456, 0.00204))),
  ),
  "l40s": (
    (2, ((8192, 7.54e-06), (16384, 9.1e-06), (32768, 1.26e-05), (65536, 1.88e-05),
         (131072, 3.07e-05), (262144, 5.01e-05), (655360, 8.6e-05), (1572864, 0.00017),
         (4194304, 0.000429), (10485760, 0.00106), (20971520, 0.0021), (67108864, 0.00672),
         (134217728, 0.0134), (268435456, 0.0267))),
    (4, ((8192, 1.61e-05), (16384, 2.01e-05), (32768, 3.22e-05), (65536, 5.77e-05),
         (131072, 0.00011), (262144, 0.000161), (655360, 0.000356), (1572864, 0.000942),
         (4194304, 0.00246), (10485760, 0.00615), (20971520, 0.0123), (67108864, 0.0393),
         (134217728, 0.0784), (268435456, 0.156))),
    (8, ((8192, 4.17e-05), (16384, 9.03e-05), (32768, 0.000164), (65536, 0.00028),
         (131072, 0.000426), (262144, 0.000495), (655360, 0.00131), (1572864, 0.00403),
         (4194304, 0.00978), (10485760, 0.0254), (20971520, 0.0404), (67108864, 0.133),
         (134217728, 0.324), (268435456, 0.649))),
  ),
}  # fmt: skip

HARDWARE: dict[str, Device] = {
  "a100": Device(  # SXM, 80 GB
    name="a100",
    peak_flops_per_s=312e12,
    peak_bytes_per_s=2.039e12,
    memory_bytes=84.99e9,
    link=LINKS["nvlink"],
    fit=Fit(
      gemm_compute=0.704,
      gemm_memory=0.822,
      gemm_launch_s=4.82e-06,
      gemm_p=1.77,
      gemm_throttle=0.00369,
      elementwise_memory=0.751,
      elementwise_launch_s=2e-06,
      prefill_compute=0.409,
      prefill_launch_s=2.89e-05,
      prefill_p=1.0,
      prefill_fill_rows=1800.0,
      decode_memory=0.916,
      decode_launch_s=1.37e-05,
      decode_pad_tokens=84.6,
      all_reduce_share=0.553,
      all_reduce_launch_s=4.11e-05,
      all_reduce_hop_s=1.21e-08,
      all_reduce_growth=1.1,
      all_reduces=_ALL_REDUCES["a100"],
      host_s=0.83e-3,
      host_row_s=4.2e-5,
    ),
  ),
  "a100-vllm": Device(  # the same, with the kernels of 2026
    name="a100-vllm",
    peak_flops_per_s=312e12,
    peak_bytes_per_s=2.039e12,
    memory_bytes=84.99e9,
    link=LINKS["nvlink"],
    fit=Fit(
      gemm_compute=0.889,
      gemm_memory=0.802,
      gemm_launch_s=5.74e-06,
      gemm_p=1.64,
      gemm_throttle=0.0311,
      elementwise_memory=0.765,
      elementwise_launch_s=2.14e-06,
      prefill_compute=0.555,
      prefill_memory=0.305,
      prefill_launch_s=1.26e-05,
      prefill_p=1.28,
      prefill_fill_rows=4100.0,
      decode_memory=0.789,
      decode_launch_s=1.76e-05,
      decode_pad_tokens=95.4,
      all_reduce_share=0.283,
      all_reduce_launch_s=4.56e-06,
      all_reduce_hop_s=4.86e-07,
      all_reduce_growth=1.02,
      all_reduces=_ALL_REDUCES["a100-vllm"],
      host_s=0.83e-3,
      host_row_s=4.2e-5,
    ),
  ),
  "a100-pairs": Device(  # four in a host, NVLink in pairs, PCIe between these
    name="a100-pairs",
    peak_flops_per_s=312e12,
    peak_bytes_per_s=2.039e12,
    memory_bytes=84.99e9,
    link=LINKS["nvlink"],
    fit=Fit(
      gemm_compute=0.704,
      gemm_memory=0.822,
      gemm_launch_s=4.82e-06,
      gemm_p=1.77,
      gemm_throttle=0.00372,
      elementwise_memory=0.751,
      elementwise_launch_s=2e-06,
      prefill_compute=0.409,
      prefill_launch_s=2.89e-05,
      prefill_p=1.0,
      prefill_fill_rows=1810.0,
      decode_memory=0.916,
      decode_launch_s=1.37e-05,
      decode_pad_tokens=84.6,
      all_reduce_share=0.645,
      all_reduce_launch_s=3.96e-05,
      all_reduce_hop_s=6.24e-06,
      all_reduce_growth=8.0,
      all_reduces=_ALL_REDUCES["a100-pairs"],
      host_s=0.83e-3,
      host_row_s=4.2e-5,
    ),
  ),
  "a40": Device(
    name="a40",
    peak_flops_per_s=149.7e12,
    peak_bytes_per_s=696e9,
    memory_bytes=48e9,
    fit=Fit(
      gemm_compute=0.768,
      gemm_memory=0.819,
      gemm_launch_s=4.04e-06,
      gemm_p=1.54,
      gemm_throttle=0.00437,
      elementwise_memory=1.06,
      elementwise_launch_s=1.56e-06,
      prefill_compute=0.409,
      prefill_launch_s=2.89e-05,
      prefill_p=1.0,
      prefill_fill_rows=1810.0,
      decode_memory=0.916,
      decode_launch_s=1.37e-05,
      decode_pad_tokens=84.6,
      all_reduce_share=0.645,
      all_reduce_launch_s=3.96e-05,
      all_reduce_hop_s=6.24e-06,
      all_reduce_growth=8.0,
      host_s=1.81e-3,
      host_row_s=4.9e-5,
    ),
  ),
  "h100": Device(  # SXM
    name="h100",
    peak_flops_per_s=989e12,
    peak_bytes_per_s=3.35e12,
    memory_bytes=84.94e9,
    link=LINKS["nvlink4"],
    fit=Fit(
      gemm_compute=0.887,
      gemm_memory=0.828,
      gemm_launch_s=2.9e-06,
      gemm_p=2.47,
      gemm_throttle=0.21,
      elementwise_memory=0.881,
      elementwise_launch_s=1.82e-06,
      prefill_compute=0.638,
      prefill_memory=0.404,
      prefill_launch_s=1.24e-05,
      prefill_p=1.23,
      prefill_fill_rows=7140.0,
      decode_memory=0.945,
      decode_launch_s=1.13e-05,
      decode_pad_tokens=144.0,
      all_reduce_share=0.261,
      all_reduce_launch_s=3.57e-06,
      all_reduce_hop_s=6.2e-07,
      all_reduce_growth=0.818,
      all_reduces=_ALL_REDUCES["h100"],
    ),
  ),
  "h200": Device(  # SXM
    name="h200",
    peak_flops_per_s=989e12,
    peak_bytes_per_s=4.8e12,
    memory_bytes=151.4e9,
    link=LINKS["nvlink4"],
    fit=Fit(
      gemm_compute=0.941,
      gemm_memory=0.848,
      gemm_launch_s=4.23e-06,
      gemm_p=1.83,
      gemm_throttle=0.396,
      elementwise_memory=0.615,
      elementwise_launch_s=1.82e-06,
      prefill_compute=0.637,
      prefill_memory=0.303,
      prefill_launch_s=1.22e-05,
      prefill_p=1.16,
      prefill_fill_rows=7540.0,
      decode_memory=0.908,
      decode_launch_s=1.13e-05,
      decode_pad_tokens=202.0,
      all_reduce_share=0.293,
      all_reduce_launch_s=5.48e-06,
      all_reduce_hop_s=2.03e-06,
      all_reduce_growth=0.845,
      all_reduces=_ALL_REDUCES["h200"],
    ),
  ),
  "b200": Device(  # SXM, 180 GB
    name="b200",
    peak_flops_per_s=2.25e15,
    peak_bytes_per_s=8e12,
    memory_bytes=191.5e9,
  ),
  "l40s": Device(
    name="l40s",
    peak_flops_per_s=362e12,
    peak_bytes_per_s=864e9,
    memory_bytes=48e9,
    link=LINKS["pcie4"],
    fit=Fit(
      gemm_compute=0.658,
      gemm_memory=0.763,
      gemm_launch_s=2.12e-07,
      gemm_p=2.54,
      gemm_throttle=0.0694,
      elementwise_memory=2.95,
      elementwise_launch_s=9.06e-07,
      prefill_compute=0.501,
      prefill_memory=0.778,
      prefill_launch_s=8.89e-06,
      prefill_p=1.28,
      prefill_fill_rows=4100.0,
      decode_memory=0.841,
      decode_launch_s=9.99e-06,
      decode_pad_tokens=28.9,
      all_reduce_share=0.298,
      all_reduce_launch_s=6.73e-06,
      all_reduce_hop_s=2.47e-06,
      all_reduce_growth=3.61,
      all_reduces=_ALL_REDUCES["l40s"],
    ),
  ),
  "rtx-pro-6000": Device(  # server edition; an eighth of its 4 PFLOP/s of sparse FP4
    name="rtx-pro-6000",
    peak_flops_per_s=500e12,
    peak_bytes_per_s=1.597e12,
    memory_bytes=96e9,
    fit=Fit(
      gemm_compute=0.785,
      gemm_memory=0.964,
      gemm_launch_s=4.85e-06,
      gemm_p=1.68,
      gemm_throttle=0.00447,
      elementwise_memory=3.54,
      elementwise_launch_s=1.07e-06,
      prefill_compute=0.549,
      prefill_memory=0.626,
      prefill_launch_s=6.2e-06,
      prefill_p=1.0,
      prefill_fill_rows=9240.0,
      decode_memory=0.916,
      decode_launch_s=1.22e-05,
      decode_pad_tokens=33.6,
      mixed_rows=25.7,
      mixed_idle_s=4.73e-11,
    ),
  ),
  "rtx-4090": Device(  # with sums in float32
    name="rtx-4090",
    peak_flops_per_s=165e12,
    peak_bytes_per_s=1.008e12,
    memory_bytes=24e9,
    fit=Fit(
      gemm_compute=0.974,
      gemm_memory=0.939,
      gemm_launch_s=4.84e-06,
      gemm_p=2.22,
      gemm_throttle=0.0123,
      elementwise_memory=2.53,
      elementwise_launch_s=9.08e-07,
      prefill_compute=0.855,
      prefill_memory=0.921,
      prefill_launch_s=7.86e-06,
      prefill_p=1.0,
      prefill_fill_rows=7300.0,
      decode_memory=0.928,
      decode_launch_s=1.24e-05,
      decode_pad_tokens=39.7,
      mixed_rows=65.7,
      mixed_idle_s=9.79e-11,
    ),
  ),
  "tpu-v5e": Device(
    name="tpu-v5e",
    peak_flops_per_s=197e12,
    peak_bytes_per_s=819e9,
    memory_bytes=16e9,
  ),
  "tpu-v6e": Device(
    name="tpu-v6e",
    peak_flops_per_s=918e12,
    peak_bytes_per_s=1.64e12,
    memory_bytes=32e9,
    fit=Fit(
      gemm_compute=0.828,
      gemm_launch_s=3.66e-07,
      gemm_p=4.79,
      gemm_throttle=0.0422,
      elementwise_memory=29.0,
      elementwise_launch_s=1.52e-07,
      prefill_compute=0.0605,
      prefill_memory=0.171,
      prefill_launch_s=4.5e-06,
      prefill_p=1.2,
      prefill_fill_rows=1020.0,
      decode_memory=0.29,
      decode_launch_s=4.55e-06,
      decode_pad_tokens=278.0,
    ),
  ),
  # Two cores of an AMD EPYC with this project's engine, by whole steps of SmolLM2-135M in float32
  # (`python -m experiments.profile_steps`, 30 Nov 2026, load 1.8; peaks: twice what was reached).
  "cpu": Device(
    name="cpu",
    peak_flops_per_s=4.11e11,
    peak_bytes_per_s=1.75e11,
    memory_bytes=2.53e10,
    bytes_per_value=4,
    fit=Fit(
      gemm_compute=0.367,
      gemm_memory=0.112,
      gemm_launch_s=4.2e-06,
      gemm_p=1.0,
      gemm_throttle=0.0303,
      elementwise_memory=0.497,
      elementwise_launch_s=2.09e-06,
      prefill_compute=0.837,
      prefill_memory=0.398,
      prefill_launch_s=1.16e-05,
      prefill_p=1.18,
      prefill_fill_rows=3450.0,
      decode_memory=0.0839,
      decode_launch_s=1.22e-05,
      decode_pad_tokens=374.0,
    ),
  ),
}


def link(name: str) -> Link:
  """A link by name, or of a rate such as `40gbps`.

  Raises:
    ValueError: neither, with near matches.
  """
  if name not in LINKS and re.fullmatch(r"[\d.]+\s*gbps", name.strip().lower()):
    return parse_link(name)
  return pick(LINKS, name, "link (or a rate such as '10gbps')")
