"""Mooncake's cluster and its Conductor: FAST'25, Figure 5, mean TTFT by scheduler.

    python -m experiments.reproduce --figure=mooncake/fig5
    python -m experiments.run --config=configs/mooncake/fig5.py \
      --trace=../shared/data/traces/mooncake_fast25_conversation_trace.jsonl.gz

Without the trace `run` draws lengths from its quantiles, and no prompt shares a prefix.

16 nodes of 8 A800s, an instance each. An A800 is an A100 with NVLink at 400 GB/s, which is
`tp_link`; `link` is the node's four network cards of 200 Gbps. LLaMA3-70B's weights were dummies.
Half of the nodes prefill: the figure does not say how many did. Not published, and chosen before
anything was run: chunks of 8,192 tokens (the report says more than 1,000), and a prefix is fetched
where another node has 1.5 times as much of it. The prefix cache is what the devices' memory holds,
1.4 million tokens a node; theirs is the host's, about 3 million.

Last seen on 30 Nov 2026, the hour in three minutes of one core: mean TTFT 2.79 s with prefixes
fetched, 3.00 without, 4.71 by load, 27.8 at random (published 3.07, 3.58, 5.27, 19.65); with the
3 s ticks of the stamps spread 1.98, 2.43, 4.19 and 27.5.
"""

from configs.workloads import WORKLOADS
from pdjax.config import CacheConfig, ExperimentConfig, SchedulerOptions, SloConfig, WorkloadConfig


def get_config() -> ExperimentConfig:
  return ExperimentConfig(
    model="llama3-70b",
    backend="sim",
    hardware="a100",
    link="800gbps",
    tp_link="1600gbps",
    num_devices=128,
    strategies=(),
    pools="8xprefill:tp8:prefill_chunks,8xdecode:tp8",
    workload=WorkloadConfig(
      rate_rps=3.4,
      num_requests=500,
      lengths=WORKLOADS["mooncake-conversation"].lengths,
      label="synthetic, from the quantiles of Mooncake's conversation trace",
    ),
    scheduler=SchedulerOptions(
      router="conductor",
      options=("conductor.balancing_threshold=1.5",),
      token_budget=8192,
      prefix_cache=True,
    ),
    cache=CacheConfig(layout="paged", num_rows=256, page_size=512),
    slo=SloConfig(ttft_s=30.0, tpot_s=0.1),
  )
