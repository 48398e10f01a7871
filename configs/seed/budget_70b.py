"""The token budget of chunked prefill: Llama-3-70B on four A100s, lengths like ShareGPT's.

    python -m experiments.run --backend=sim --strategy=chunked --config=configs/seed/budget_70b.py
    python -m experiments.reproduce --figure=seed/budget

Takes 2 s. As configs/seed/budget_7b.py, but with tensor parallelism over four devices.
"""

import dataclasses

from configs.seed import budget_7b
from pdjax.config import ExperimentConfig


def get_config() -> ExperimentConfig:
  return dataclasses.replace(
    budget_7b.get_config(), model="llama3-70b", link="nvlink", num_devices=4, tp=4
  )
