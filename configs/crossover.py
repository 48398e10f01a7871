"""The crossover map's pools on one of its workloads: Llama-3-8B on eight A100s, arXiv's lengths.

    python -m experiments.compare --config=configs/crossover.py
    python -m experiments.reproduce --figure=crossover/map

The first takes 10 s and serves one rate under each strategy as it stands here; the second tunes
each (batch cap, token budget, pools that prefill) for every workload, link and pair of SLOs. What
stands here is what its runs have in common. SLOs are the map's balanced pair: 10 times the
unloaded prefill of the median prompt, and 3 times a decode step of 32 rows behind that prompt.

Lengths are drawn from published quantiles (`configs/workloads.py`), no file is read. Over links
slower than NVLink the map sends KV in four groups of layers while a prompt is computed yet, as
Mooncake does (`--set hand_off.layer_groups=4`).
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
    model="llama3-8b",
    backend="sim",
    hardware="a100",
    link="nvlink",
    num_devices=8,
    strategies=("continuous", "chunked"),
    pools="6xprefill,2xdecode",
    workload=WorkloadConfig(
      arrivals=arxiv.arrivals,
      rate_rps=6.0,
      num_requests=800,
      lengths=arxiv.lengths,
      label=arxiv.label,
    ),
    scheduler=SchedulerOptions(token_budget=1024),
    cache=CacheConfig(layout="paged", num_rows=256, page_size=16),
    slo=SloConfig(ttft_s=5.9, tpot_s=0.088),
  )
