"""TTFT by scheduler, technical report, Figure 8: LLaMA2-70B, 8 prefill and 8 decode nodes.

    python -m experiments.reproduce --figure=mooncake/tr-fig8
    python -m experiments.run --config=configs/mooncake/tr_fig8.py \
      --trace=../shared/data/traces/mooncake_fast25_conversation_trace.jsonl.gz \
      --set workload.trace_speed=1.22

The nodes of `fig5.py`. The report's trace is not at hand: the conversation trace stands in for it,
as much faster as gives as many prompt tokens a second.

Last seen on 30 Nov 2026, 1,800 s of the trace in 75 s of one core: mean TTFT 4.37 s with prefixes
fetched, 6.10 without, 71.8 by load, 97.2 at random (published 6.26, 14.36, 60.41, 92.07).
"""

import dataclasses

from configs.mooncake.fig5 import get_config as cluster
from pdjax.config import ExperimentConfig


def get_config() -> ExperimentConfig:
  return dataclasses.replace(cluster(), model="llama2-70b")
