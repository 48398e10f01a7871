"""The same comparison simulated where it matters: Llama-3-8B on A100s, prompts of the same shape.

    python -m experiments.compare --config=configs/llama3_8b_a100.py

`experiments.compare` prints it under every run on the engine, with as many devices.
"""

from pdjax.config import CacheConfig, ExperimentConfig, SchedulerOptions, WorkloadConfig
from pdjax.workloads.lengths import Mix


def get_config() -> ExperimentConfig:
  return ExperimentConfig(
    model="llama3-8b",
    backend="sim",
    hardware="a100",
    link="nvlink",
    num_devices=2,
    workload=WorkloadConfig(
      arrivals="poisson",
      load=0.7,
      num_requests=500,
      lengths=Mix(
        prompt_tokens=(512, 1024),
        long_prompt_tokens=(6144, 7168),
        output_tokens=(128, 256),
        long_every=6,
      ),
    ),
    scheduler=SchedulerOptions(token_budget=512),
    cache=CacheConfig(layout="paged", num_rows=128, page_size=16),
  )
