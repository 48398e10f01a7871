"""The main job: a real small model on this machine's CPU, short prompts with a few long ones.

    python -m experiments.compare

Every sixth prompt is about eight times as long as the others, so that what a long prefill does to
running answers is plain to see. The rate and the SLOs follow from this machine's step times.
"""

from pdjax.config import CacheConfig, ExperimentConfig, SchedulerOptions, WorkloadConfig
from pdjax.workloads.lengths import Mix


def get_config() -> ExperimentConfig:
  return ExperimentConfig(
    model="smollm2-135m",
    backend="jax",
    hardware="cpu",
    num_devices=2,
    workload=WorkloadConfig(
      arrivals="poisson",
      load=0.7,
      duration_s=24.0,
      lengths=Mix(
        prompt_tokens=(40, 64),
        long_prompt_tokens=(384, 448),
        output_tokens=(12, 32),
        long_every=6,
      ),
    ),
    scheduler=SchedulerOptions(token_budget=64),
    # Rows for all that run at once, also where a single decode pool has to hold them.
    cache=CacheConfig(layout="slots", num_rows=16, page_size=16),
  )
