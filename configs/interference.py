"""What a long prompt does to running answers, with a process pinned to a core for each pool.

    python -m experiments.compare --config=configs/interference.py

Two mixed processes under continuous batching against one that prefills and one that decodes: the
same requests, the same two cores. Every fourth prompt is long; the load is low, so that what is
seen is interference and not a queue. In one process JAX's devices would share both cores, and a
busy prefill pool would slow its neighbour down; here only caches and memory are shared, and this
program's own process, which schedules.

Takes 4 minutes. Expected: ITL p99 and max of the mixed pools are those of a whole long prefill, of
the decode pool a few decode steps (WORKSPACE.md, "Interference", has the table and the picture).
"""

from pdjax.config import CacheConfig, ExperimentConfig, SchedulerOptions, WorkloadConfig
from pdjax.workloads.lengths import Mix


def get_config() -> ExperimentConfig:
  return ExperimentConfig(
    model="smollm2-135m",
    backend="jax",
    hardware="cpu",
    num_devices=2,
    processes=True,
    pin=True,
    strategies=("continuous", "disaggregated"),
    workload=WorkloadConfig(
      arrivals="poisson",
      load=0.4,
      duration_s=60.0,
      lengths=Mix(
        prompt_tokens=(24, 48),
        long_prompt_tokens=(384, 448),
        output_tokens=(32, 64),
        long_every=4,
      ),
    ),
    scheduler=SchedulerOptions(token_budget=64),
    cache=CacheConfig(layout="slots", num_rows=8, page_size=16),
  )
