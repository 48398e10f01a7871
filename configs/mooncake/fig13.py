"""TTFT by the bandwidth between nodes: FAST'25, Figure 13, synthetic trace.

    python -m experiments.reproduce --figure=mooncake/fig13
    python -m experiments.run --config=configs/mooncake/fig13.py --set link=24gbps \
      --trace=../shared/data/traces/mooncake_fast25_synthetic_trace.jsonl.gz

The cluster of `fig5.py`. Without the trace `run` draws lengths from the conversation trace's
quantiles, and nothing is fetched.

Last seen on 30 Nov 2026, the whole trace in 15 s a bandwidth with its control: mean TTFT 2.04 s at
100 Gbps, 2 % more than at 400 and 4 % less than at 24, where the second token takes 11 times as
long (published: below 2 s from 100 Gbps on, rising below).
"""

from configs.mooncake.fig5 import get_config as cluster
from pdjax.config import ExperimentConfig


def get_config() -> ExperimentConfig:
  return cluster()
