"""The engine on this machine, for `experiments.validate` to set the simulator beside.

    python -m experiments.compare --config=configs/engine_validation.py

The tiny model, as hundreds of its requests fit in seconds: attainment is then good to a point. A
process pinned to a core for each pool, so that pools share no cores, as in the simulator. Takes 1
minute; `validate` serves it at four rates, three times.
"""

from pdjax.config import CacheConfig, ExperimentConfig, SchedulerOptions, WorkloadConfig
from pdjax.workloads.lengths import Mix


def get_config() -> ExperimentConfig:
  return ExperimentConfig(
    model="tiny",
    backend="jax",
    hardware="cpu",
    num_devices=2,
    processes=True,
    pin=True,
    workload=WorkloadConfig(
      arrivals="poisson",
      load=0.7,
      num_requests=300,
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
