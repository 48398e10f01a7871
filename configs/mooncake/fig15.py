"""How many nodes should prefill: FAST'25, Figure 15, targets TTFT 10 s and TBT 0.1 s.

    python -m experiments.reproduce --figure=mooncake/fig15
    python -m experiments.run --config=configs/mooncake/fig15.py \
      --set pools=5xprefill:tp8:prefill_chunks,11xdecode:tp8 \
      --trace=../shared/data/traces/mooncake_fast25_synthetic_trace.jsonl.gz

The cluster of `fig5.py`, with 8 + 8 nodes as it stands; all 16 in every ratio.

Last seen on 30 Nov 2026, 1,200 s of the traces in 100 s of one core: with 8 nodes 95.5 % of the
conversation trace's requests are effective and 94.6 % of the synthetic one's; most are with 11 and
with 10 (96.6 and 96.1 %).
"""

import dataclasses

from configs.mooncake.fig5 import get_config as cluster
from pdjax.config import ExperimentConfig, SloConfig


def get_config() -> ExperimentConfig:
  return dataclasses.replace(cluster(), slo=SloConfig(ttft_s=10.0, tpot_s=0.1))
