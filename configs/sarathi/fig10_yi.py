"""Sarathi-Serve's capacity of Yi-34B on two A100s that NVLink joins (OSDI'24, figure 10).

    python -m experiments.reproduce --figure=sarathi/fig10
    python -m experiments.compare --backend=sim --config=configs/sarathi/fig10_yi.py

As `fig10_mistral.py`, over two devices, and at 0.5 requests a second; 5 s.
Last seen to hold: 30 Nov 2026.
"""

import dataclasses

from configs.sarathi import fig10_mistral
from configs.slos import SLOS
from pdjax.config import ExperimentConfig


def get_config() -> ExperimentConfig:
  config = fig10_mistral.get_config()
  return dataclasses.replace(
    config,
    model="yi-34b",
    num_devices=2,
    tp=2,
    workload=dataclasses.replace(config.workload, rate_rps=0.5),
    slo=SLOS["sarathi-yi-34b-strict"],
  )
