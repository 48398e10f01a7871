"""Sarathi-Serve's gaps between tokens by load: Yi-34B, ShareGPT (OSDI'24, figure 1b).

    python -m experiments.reproduce --figure=sarathi/fig1b
    python -m experiments.compare --backend=sim --config=configs/sarathi/fig1b.py

The highest of its three loads, 1 request a second, and a budget of 1,536 tokens. The caption says
arXiv, the artifact runs ShareGPT, as here. 5 s. Last seen to hold: 30 Nov 2026.
"""

import dataclasses

from configs.sarathi import fig10_yi
from pdjax.config import ExperimentConfig


def get_config() -> ExperimentConfig:
  config = fig10_yi.get_config()
  return dataclasses.replace(
    config,
    strategies=("continuous", "chunked"),
    workload=dataclasses.replace(config.workload, rate_rps=1.0),
    scheduler=dataclasses.replace(config.scheduler, token_budget=1536),
  )
