"""Devices and links by name. Peaks are the vendors' dense bf16 figures, in powers of ten.

Only the A100 has a fit; all others run at data-sheet peaks and are labelled uncalibrated. What each
number was fitted on, and how far off it is (median / 95th percentile of the absolute error):

  gemm         Vidur's A100 operator timings of Llama-3-8B, TP 1: 4 matrices x 456 token counts, 1
               to 32,768, each octave of token counts weighted alike: 4.5 / 13 %. Sum over a
               layer's matrices: Llama-3-8B 2.5 / 9 %; not fitted: Llama-2-7B 2.6 / 13 %,
               Llama-2-70B 4.0 / 11 %. Without the weights (.73, .96, 8 us, p 1.3) the many large
               counts win: 512 tokens come out 16 % slow, Llama-2-70B below 32 tokens 15 % fast.
               What is left is tile steps: 264 tokens take 40 % longer than 256.
  elementwise  the same file: two norms, RoPE, activation, two adds, summed: 1.3 / 13 %; not
               fitted: Llama-2-7B 5.0 / 16 %, Llama-2-70B 2.5 / 22 %.
  prefill      aiconfigurator 0.12, A100, vLLM 0.14 context attention, 32 heads on 8, from 128
               tokens: 1.4 / 11 %, with p set to 1, better than 1.3 or 2. Shorter: 24 % fast.
               Not fitted: FlashInfer chunks behind a cached prefix, A800, 32 on 32: 20 / 46 %, 13 %
               fast.
  decode       the same source, generation attention, 32 heads on 8, from 128 cached tokens:
               4.0 / 14 %. Shorter contexts: 20 % fast. Not fitted: FlashInfer, A800, 32 on 32:
               17 / 21 %, 16 % slow.
  host         Vidur's A100 table of a 2024 Python engine: scheduling, inputs, sampling and outputs
               of Llama-2-7B, 1.2 ms at batch 8 to 6.2 ms at batch 128; the median. An engine that
               hides it behind two steps in flight has `dataclasses.replace(fit, host_s=0.0)`.

No end-to-end run took part in any of this.
"""

from __future__ import annotations

import re

from pdjax.core.names import pick
from pdjax.sim.hardware import PCIE_4, Device, Fit, Link, parse_link

_A100_FIT = Fit(
  gemm_compute=0.720,
  gemm_memory=0.806,
  gemm_launch_s=4.5e-6,
  gemm_p=1.58,
  elementwise_memory=0.502,
  elementwise_launch_s=1.9e-6,
  prefill_compute=0.583,
  prefill_memory=0.397,
  prefill_launch_s=10.5e-6,
  prefill_p=1.0,
  decode_memory=0.758,
  decode_launch_s=19.7e-6,
  decode_pad_tokens=11.5,
  host_s=3.1e-3,
)

HARDWARE: dict[str, Device] = {
  "a100": Device(  # SXM, 80 GB
    name="a100",
    peak_flops_per_s=312e12,
    peak_bytes_per_s=2.039e12,
    memory_bytes=80e9,
    fit=_A100_FIT,
  ),
  "h100": Device(  # SXM
    name="h100", peak_flops_per_s=989e12, peak_bytes_per_s=3.35e12, memory_bytes=80e9
  ),
  "h200": Device(  # SXM
    name="h200", peak_flops_per_s=989e12, peak_bytes_per_s=4.8e12, memory_bytes=141e9
  ),
  "b200": Device(  # SXM, 180 GB
    name="b200", peak_flops_per_s=2.25e15, peak_bytes_per_s=8e12, memory_bytes=180e9
  ),
  "tpu-v5e": Device(
    name="tpu-v5e", peak_flops_per_s=197e12, peak_bytes_per_s=819e9, memory_bytes=16e9
  ),
  "tpu-v6e": Device(
    name="tpu-v6e", peak_flops_per_s=918e12, peak_bytes_per_s=1.64e12, memory_bytes=32e9
  ),
  # An example of two server cores, not a machine: 2 x 3 GHz x 32 FLOP a cycle, one memory channel.
  "cpu": Device(name="cpu", peak_flops_per_s=192e9, peak_bytes_per_s=20e9, memory_bytes=8e9),
}

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


def link(name: str) -> Link:
  """A link by name, or of a rate such as `40gbps`.

  Raises:
    ValueError: neither, with near matches.
  """
  if name not in LINKS and re.fullmatch(r"[\d.]+\s*gbps", name.strip().lower()):
    return parse_link(name)
  return pick(LINKS, name, "link (or a rate such as '10gbps')")
