"""DistServe's Figure 1 at this machine's scale: what one phase costs the other.

    python -m experiments.compare --config=configs/engine/distserve_fig1.py
    python -m experiments.reproduce --figure=engine/distserve-fig1

The paper serves OPT-13B on an A100, 512 tokens in and 64 out. Here it is SmolLM2-135M, 64 in and 16
out (with 8 no two answers would run side by side), and the memory is that of `sarathi_table4.py`.
`compare` serves it on two devices, which share this machine's cores; `reproduce` gives one device
both phases, prefills alone and decodes alone, at several rates.
"""

import dataclasses

from configs.engine import sarathi_table4
from pdjax.config import ExperimentConfig, WorkloadConfig
from pdjax.workloads.lengths import Fixed


def get_config() -> ExperimentConfig:
  return dataclasses.replace(
    sarathi_table4.get_config(),
    num_devices=2,
    strategies=("continuous", "disaggregated"),
    workload=WorkloadConfig(
      arrivals="poisson",
      load=0.7,
      num_requests=32,
      lengths=Fixed(prompt_tokens=64, output_tokens=16),
      chat=False,
    ),
  )
