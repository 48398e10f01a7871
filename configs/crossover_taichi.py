"""TaiChi's table of attainments (arXiv 2508.01989): Llama-2-70B, arXiv's lengths, 12 requests/s.

    python -m experiments.compare --config=configs/crossover_taichi.py
    python -m experiments.reproduce --figure=crossover/taichi

The paper's groups have four devices; it names neither these nor how many groups there were. Here
stand 24 groups of A100s, one of the sizes that the second command sweeps. Of its three pairs of
targets these are the one that neither strategy meets there.
"""

from configs.workloads import WORKLOADS
from pdjax.config import (
  CacheConfig,
  ExperimentConfig,
  SchedulerOptions,
  SloConfig,
  WorkloadConfig,
)


def get_config() -> ExperimentConfig:
  arxiv = WORKLOADS["arxiv"]
  return ExperimentConfig(
    model="llama2-70b",
    backend="sim",
    hardware="a100",
    link="nvlink",
    num_devices=96,
    tp=4,
    strategies=("chunked",),
    pools="18xprefill:tp4,6xdecode:tp4",
    workload=WorkloadConfig(
      arrivals="poisson",
      rate_rps=12.0,
      num_requests=600,
      lengths=arxiv.lengths,
      label=arxiv.label,
    ),
    scheduler=SchedulerOptions(token_budget=1024),
    cache=CacheConfig(layout="paged", num_rows=128, page_size=16),
    slo=SloConfig(ttft_s=6.0, tpot_s=0.1),
  )
