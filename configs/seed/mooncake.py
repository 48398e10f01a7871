"""Mooncake's cluster of its report (arXiv 2407.00079): 20 nodes of eight A800s, Llama-2-70B.

    python -m experiments.compare --config=configs/seed/mooncake.py
    python -m experiments.reproduce --figure=seed/headlines

Takes 20 s. Ten nodes prefill and ten decode, or all do both, whole prompts first, as vLLM did. An
A800 computes as an A100; its network of 800 Gbit/s a node is 100 for each device. The lengths are
drawn from the quantiles of the conversation trace that Mooncake published later, at that trace's
rate: synthetic, without common prefixes, so nothing is reused. Targets are the report's 30 s and
0.1 s a token. The second command also takes four of the nodes and prompts of 16k to 128k.
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
  conversation = WORKLOADS["mooncake-conversation"]
  return ExperimentConfig(
    model="llama2-70b",
    backend="sim",
    hardware="a100",
    link="100gbps",
    num_devices=160,
    tp=8,
    strategies=("continuous",),
    pools="10xprefill:tp8,10xdecode:tp8",
    workload=WorkloadConfig(
      arrivals="poisson",
      rate_rps=3.4,
      num_requests=1000,
      lengths=conversation.lengths,
      label=conversation.label,
    ),
    scheduler=SchedulerOptions(token_budget=8192),
    cache=CacheConfig(layout="paged", num_rows=128, page_size=256),
    slo=SloConfig(ttft_s=30.0, tpot_s=0.1),
  )
