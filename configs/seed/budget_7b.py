"""The token budget of chunked prefill: Mistral-7B on one A100, lengths like ShareGPT's.

    python -m experiments.run --backend=sim --strategy=chunked --config=configs/seed/budget_7b.py
    python -m experiments.reproduce --figure=seed/budget

Takes 2 s. Load is 0.6 of the capacity that step times promise with this budget. The second command
serves the same requests at the same rate with budgets from 256 to 8,192.
"""

from configs.workloads import WORKLOADS
from pdjax.config import CacheConfig, ExperimentConfig, SchedulerOptions, WorkloadConfig


def get_config() -> ExperimentConfig:
  sharegpt = WORKLOADS["sharegpt"]
  return ExperimentConfig(
    model="mistral-7b",
    backend="sim",
    hardware="a100",
    num_devices=1,
    strategies=("chunked",),
    workload=WorkloadConfig(
      arrivals="poisson",
      load=0.6,
      num_requests=600,
      lengths=sharegpt.lengths,
      label=sharegpt.label,
    ),
    scheduler=SchedulerOptions(token_budget=2048),
    cache=CacheConfig(layout="paged", num_rows=128, page_size=16),
  )
