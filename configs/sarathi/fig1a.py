"""Sarathi-Serve's generation stalls: Yi-34B, 128 arXiv requests at once (OSDI'24, figure 1a).

    python -m experiments.reproduce --figure=sarathi/fig1a
    python -m experiments.compare --backend=sim --config=configs/sarathi/fig1a.py

At most 256 sequences, a budget of 1,536 tokens, as in the authors' artifact. Lengths are synthetic:
the arXiv sample was never published (`configs/workloads.py`). 5 s. Last seen to hold: 30 Nov 2026.
"""

import dataclasses

from configs.sarathi import fig10_yi
from configs.workloads import WORKLOADS
from pdjax.config import ExperimentConfig


def get_config() -> ExperimentConfig:
  config = fig10_yi.get_config()
  return dataclasses.replace(
    config,
    strategies=("continuous", "chunked"),
    workload=dataclasses.replace(
      config.workload,
      arrivals="all_at_once",
      lengths=WORKLOADS["arxiv"].lengths,
      label=WORKLOADS["arxiv"].label,
      num_requests=128,
    ),
    scheduler=dataclasses.replace(config.scheduler, token_budget=1536),
    cache=dataclasses.replace(config.cache, num_rows=256, max_len=16_384),
  )
