"""Sarathi-Serve's capacity of Mistral-7B on an A100, ShareGPT (OSDI'24, figure 10).

    python -m experiments.reproduce --figure=sarathi/fig10
    python -m experiments.compare --backend=sim --config=configs/sarathi/fig10_mistral.py

The first searches the capacity of Orca, vLLM and Sarathi-Serve; the second serves one rate under
all three, in 5 s. Limits are those of the authors' runs: 128 sequences a step, whole prompts up to
the longest (vLLM) or chunks within 512 tokens. Orca has 16 sequences there, and in the figure; not
here, where all have equal rows. Lengths are synthetic, from the quantiles of ShareGPT's file
(`configs/workloads.py`).
Last seen to hold: 30 Nov 2026.
"""

from configs.slos import SLOS
from configs.workloads import WORKLOADS
from pdjax.config import CacheConfig, ExperimentConfig, SchedulerOptions, WorkloadConfig


def get_config() -> ExperimentConfig:
  return ExperimentConfig(
    model="mistral-7b",
    backend="sim",
    hardware="a100",
    num_devices=1,
    strategies=("orca", "continuous", "chunked"),
    workload=WorkloadConfig(
      lengths=WORKLOADS["sharegpt"].lengths,
      label=WORKLOADS["sharegpt"].label,
      rate_rps=1.0,
      num_requests=256,
    ),
    scheduler=SchedulerOptions(token_budget=512),
    cache=CacheConfig(layout="paged", num_rows=128, page_size=16, max_len=8192),
    slo=SLOS["sarathi-mistral-7b-strict"],
  )
