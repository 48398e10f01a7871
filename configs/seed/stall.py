"""A prompt of 2,048 tokens beside running answers: Llama-3-8B on one A100.

    python -m experiments.compare --config=configs/seed/stall.py
    python -m experiments.reproduce --figure=seed/stall

Takes 3 s. Every sixteenth prompt has 2,048 tokens, the others 64. A budget of 544 tokens is a chunk
of 512 and room for 32 decodes, so a long prompt is four chunks. Expected: the longest gap of a
running answer is a whole prefill (some 160 ms) under continuous batching and a chunk (some 50 ms)
with chunks, last seen on 30 Nov 2026.
"""

from pdjax.config import CacheConfig, ExperimentConfig, SchedulerOptions, WorkloadConfig
from pdjax.workloads.lengths import Mix


def get_config() -> ExperimentConfig:
  return ExperimentConfig(
    model="llama3-8b",
    backend="sim",
    hardware="a100",
    num_devices=1,
    strategies=("continuous", "chunked"),
    workload=WorkloadConfig(
      arrivals="poisson",
      rate_rps=2.0,
      num_requests=320,
      lengths=Mix(
        prompt_tokens=(64, 64),
        long_prompt_tokens=(2048, 2048),
        output_tokens=(256, 256),
        long_every=16,
      ),
    ),
    scheduler=SchedulerOptions(token_budget=544),
    cache=CacheConfig(layout="paged", num_rows=32, page_size=16),
  )
