"""The real workload against vLLM: technical report, Figure 13, the 75 % headline.

    python -m experiments.reproduce --figure=mooncake/tr-fig13
    python -m experiments.run --config=configs/mooncake/tr_fig13.py \
      --trace=../shared/data/traces/mooncake_fast25_conversation_trace.jsonl.gz \
      --set workload.trace_speed=1.22

10 prefill and 10 decode nodes of `tr_fig8.py` and its stand-in trace, against 20 nodes that do
both (`pools=20xmixed:tp8:prefill_first`, least loaded first, no prefix cache).

Last seen on 30 Nov 2026, 1,200 s of the trace in 8 s of one core: 127 % more requests within both
targets; vLLM keeps that of TBT for 44 % (published 75 % and 57 %).
"""

import dataclasses

from configs.mooncake.tr_fig8 import get_config as cluster
from pdjax.config import ExperimentConfig


def get_config() -> ExperimentConfig:
  return dataclasses.replace(
    cluster(), num_devices=160, pools="10xprefill:tp8:prefill_chunks,10xdecode:tp8"
  )
