"""The engine on this machine, for `experiments.validate` to set the simulator beside.

    python -m experiments.compare --config=configs/engine_validation.py

A process pinned to a core for each pool, so that pools share no cores, as in the simulator; steps
of tens of milliseconds, so that this program's own process, which schedules on the same cores,
takes a small share of them (with the tiny model, whose steps take 2 ms, it takes a third). Takes 3
minutes; `validate` serves it at four rates, three times.
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
    workload=WorkloadConfig(
      arrivals="poisson",
      load=0.7,
      num_requests=40,
      chat=False,
      lengths=Mix(
        prompt_tokens=(40, 64),
        long_prompt_tokens=(384, 448),
        output_tokens=(12, 32),
        long_every=6,
      ),
    ),
    scheduler=SchedulerOptions(token_budget=64),
    cache=CacheConfig(layout="slots", num_rows=16, page_size=16),
  )
