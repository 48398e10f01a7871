"""DistServe's chatbot: OPT-13B on nodes of eight A100s, 25 Gbps between nodes (OSDI'24, section 6).

    python -m experiments.search --goal=goodput --config=configs/opt13b_a100.py
    python -m experiments.search --goal=placement --config=configs/opt13b_a100.py --nodes=4

The first takes 90 s. The paper's pair serves 5.58 requests a second, of which 5.31 hold in
three draws of 4,200 requests (last seen on 30 Nov 2026).

Lengths are the quantiles of the 1,600 ShareGPT pairs that DistServe's repository has with its
measured runs (Apache-2.0), prompt and output drawn independently; together at most OPT's 2,048
tokens. SLOs are its table 1's. The paper's placement (table 5) is prefill with TP 2 and decode with
one GPU, and its runs have 100 requests a GPU (`--requests_per_device=100 --least_s=0`).
"""

from configs.slos import SLOS
from pdjax.config import CacheConfig, ExperimentConfig, SchedulerOptions, WorkloadConfig
from pdjax.workloads.lengths import Quantiles

_SHARES = (0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1)


def get_config() -> ExperimentConfig:
  return ExperimentConfig(
    model="opt-13b",
    backend="sim",
    hardware="a100",
    link="nvlink",
    num_devices=3,
    strategies=("continuous", "chunked"),
    pools="prefill:tp2,decode",
    workload=WorkloadConfig(
      arrivals="poisson",
      lengths=Quantiles(
        prompt_tokens=tuple(zip(_SHARES, (2, 89, 311, 680, 1147, 1543, 1922, 2031))),
        output_tokens=tuple(zip(_SHARES, (1, 9, 18, 77, 304, 507, 968, 1809))),
        max_total_tokens=2048,
      ),
      label="synthetic, from the quantiles of DistServe's ShareGPT sample",
    ),
    scheduler=SchedulerOptions(token_budget=512),
    cache=CacheConfig(layout="paged", num_rows=256, page_size=16),
    slo=SLOS["distserve-chatbot-13b"],
  )
