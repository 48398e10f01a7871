"""DistServe's Figure 8, OPT-175B: ShareGPT at 0.125 requests a second for each GPU.

    python -m experiments.run --backend=sim --config=configs/distserve/fig8_175b.py
    python -m experiments.reproduce --figure=distserve/fig8c

The first takes 3 s: 93 % of the 525 requests meet TTFT 4 s and TPOT 200 ms (the paper: 99 %). Last
seen to hold on 30 Nov 2026.

Step times are SYNTHETIC (`latency=distserve_synthetic`): nobody published those of OPT-175B. The
placement of Table 5, whole prompts in its three stages, 25 requests a GPU; the rest as in
fig8_13b.py. Stages of prefill and decode that hold the same layers share a node there, so copies
go over NVLink.
"""

import dataclasses

from configs.distserve.fig8_13b import get_config as served
from configs.slos import SLOS
from pdjax.config import ExperimentConfig


def get_config() -> ExperimentConfig:
  config = served()
  return dataclasses.replace(
    config,
    model="opt-175b",
    latency="distserve_synthetic",
    pools="prefill:tp3:pp3:prefill_only,decode:tp4:pp3",
    num_devices=21,
    workload=dataclasses.replace(config.workload, rate_rps=21 * 0.125, num_requests=21 * 25),
    slo=SLOS["distserve-chatbot-175b"],
  )
