"""Sarathi-Serve's Table 4 at this machine's scale: hybrid batches, chunks, and both.

    python -m experiments.compare --config=configs/engine/sarathi_table4.py
    python -m experiments.reproduce --figure=engine/sarathi-table4

The paper serves Yi-34B on two A100s, ShareGPT at a rate of 1 a second. Here it is SmolLM2-135M on
one device, and the lengths are those of its ShareGPT over 20: synthetic, from their quantiles. The
budget is the 1,024 tokens of the table's caption over 16 (the artifact's script has 512).

Warms up for a minute on two cores, then serves for half a minute a strategy. Expected: P99 of the
gaps several times as high with hybrid batches only, lowest with both. Last seen to hold: 30 Nov
2026, on a machine with other programs (7.5 times; TTFT was not lowest with hybrid batches).
"""

from configs.workloads import WORKLOADS
from pdjax.config import CacheConfig, ExperimentConfig, SchedulerOptions, WorkloadConfig


def get_config() -> ExperimentConfig:
  return ExperimentConfig(
    model="smollm2-135m",
    backend="jax",
    hardware="cpu",
    num_devices=1,
    strategies=("hybrid_only", "simple_chunking", "chunked"),
    workload=WorkloadConfig(
      arrivals="poisson",
      load=0.7,
      num_requests=32,
      lengths=WORKLOADS["sharegpt"].lengths,
      label=WORKLOADS["sharegpt"].label,
      length_scale=20,
      chat=False,
    ),
    scheduler=SchedulerOptions(token_budget=64, prefill_budget=512),
    cache=CacheConfig(layout="slots", num_rows=8, page_size=16, max_len=416),
  )
