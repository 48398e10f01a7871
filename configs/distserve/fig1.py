"""DistServe's Figure 1: OPT-13B on one A100, prompts of 512 tokens, outputs of 64.

    python -m experiments.run --backend=sim --config=configs/distserve/fig1.py
    python -m experiments.reproduce --figure=distserve/fig1

The first takes 1 s: at 2 requests a second 85 % meet TTFT 400 ms and TPOT 40 ms; all miss the
latter alone. Last seen to hold on 30 Nov 2026.

One pool that prefills first, as vLLM, by its step times; 500 requests, as the paper does not say
how many. The other curves of the figure, of one phase alone, are by DistServe's engine.
"""

import dataclasses

from configs.distserve.fig8_13b import get_config as served
from pdjax.config import ExperimentConfig, SloConfig
from pdjax.workloads.lengths import Fixed


def get_config() -> ExperimentConfig:
  config = served()
  return dataclasses.replace(
    config,
    latency="distserve_vllm",
    pools="mixed:prefill_first",
    num_devices=1,
    workload=dataclasses.replace(
      config.workload,
      lengths=Fixed(prompt_tokens=512, output_tokens=64),
      label="512 + 64 tokens",
      rate_rps=2.0,
      num_requests=500,
    ),
    scheduler=dataclasses.replace(config.scheduler, prefill_budget=16_384, watermark=0.01),
    cache=dataclasses.replace(config.cache, num_rows=256),
    slo=SloConfig(ttft_s=0.4, tpot_s=0.04),
  )
