"""Long prompts, half of each cached, against vLLM: technical report, Figure 12, the 525 % headline.

    python -m experiments.reproduce --figure=mooncake/tr-fig12
    python -m experiments.compare --config=configs/mooncake/tr_fig12.py --set num_devices=32

Four nodes of `tr_fig8.py`, three of which prefill; prompts of 16k to 128k tokens, 512 of output,
Poisson. The figure gives each prompt a first half in common with others (a trace that it writes);
`run` and `compare` draw prompts with nothing in common. vLLM is `continuous` on the same nodes,
without a prefix cache, as it was then, taking as many requests as come or one at a time, whatever
serves more.

Last seen on 30 Nov 2026, in a minute of one core: 717 % more than vLLM at 16k tokens, 348 % at 32k,
146 % at 64k, 82 % at 128k (published: 50 to 525 %).
"""

import dataclasses

from configs.mooncake.tr_fig8 import get_config as cluster
from pdjax.config import ExperimentConfig, WorkloadConfig
from pdjax.workloads.lengths import Fixed


def get_config() -> ExperimentConfig:
  return dataclasses.replace(
    cluster(),
    num_devices=32,
    pools="3xprefill:tp8:prefill_chunks,1xdecode:tp8",
    workload=WorkloadConfig(
      rate_rps=1.0,
      num_requests=200,
      lengths=Fixed(prompt_tokens=16_384, output_tokens=512),
      label="synthetic, as the report's simulated data, nothing cached",
    ),
  )
