"""Who is rejected under overload, technical report, section 7: 8 + 8 nodes at twice the speed.

    python -m experiments.reproduce --figure=mooncake/tr-table3
    python -m experiments.run --config=configs/mooncake/tr_table3.py \
      --trace=../shared/data/traces/mooncake_fast25_conversation_trace.jsonl.gz \
      --set workload.trace_speed=2.43

The nodes and the stand-in trace of `tr_fig8.py`; targets TTFT 30 s, TBT 0.1 s. The rule is the one
with prediction. Its constant time of a decode is not published: 9.5 s are the trace's 343 tokens of
output at the 28 ms of a decode step with 16 rows of 12k tokens.

Last seen on 30 Nov 2026, 1,800 s of the trace in two minutes of a core: 5.9 % are rejected by each
of the three rules, as decode turns nobody away; with a target of 24 ms 9.7 % when its load is seen
after prefill (3.6 % in vain), 10.1 % early, 12.2 % with prediction.
"""

import dataclasses

from configs.mooncake.tr_fig8 import get_config as cluster
from pdjax.config import ExperimentConfig


def get_config() -> ExperimentConfig:
  config = cluster()
  options = (
    *config.scheduler.options,
    "conductor.rejects=predicted",
    "conductor.decode_s=9.5",
  )
  return dataclasses.replace(
    config, scheduler=dataclasses.replace(config.scheduler, options=options)
  )
