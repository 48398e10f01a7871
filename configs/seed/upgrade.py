"""One device that prefills and one that decodes, either an A100 or an H100: Llama-3-8B.

    python -m experiments.run --backend=sim --config=configs/seed/upgrade.py
    python -m experiments.reproduce --figure=seed/upgrade

Takes 2 s. Here both are A100s, 200 Gbit/s apart, with lengths like ShareGPT's; the second command
replaces one or both, and looks for the goodput of each pair also with arXiv's lengths.
"""

from configs.workloads import WORKLOADS
from pdjax.config import CacheConfig, ExperimentConfig, SchedulerOptions, WorkloadConfig


def get_config() -> ExperimentConfig:
  sharegpt = WORKLOADS["sharegpt"]
  return ExperimentConfig(
    model="llama3-8b",
    backend="sim",
    hardware="a100",
    link="hdr200",
    num_devices=2,
    strategies=(),
    pools="1xprefill@a100,1xdecode@a100",
    workload=WorkloadConfig(
      arrivals=sharegpt.arrivals,
      rate_rps=3.0,
      num_requests=400,
      lengths=sharegpt.lengths,
      label=sharegpt.label,
    ),
    scheduler=SchedulerOptions(token_budget=512),
    cache=CacheConfig(layout="paged", num_rows=256, page_size=16),
  )
