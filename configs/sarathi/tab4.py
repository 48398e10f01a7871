"""Sarathi-Serve without one half of it: Yi-34B on two A100s (OSDI'24, table 4).

    python -m experiments.reproduce --figure=sarathi/tab4
    python -m experiments.compare --backend=sim --config=configs/sarathi/tab4.py

Decodes beside whole prompts, chunks that never mix with decodes, and both. 128 requests of ShareGPT
at 1 a second; the figure has arXiv at 0.5 too. The budget is 512 tokens, as in the authors' script;
the caption says 1,024. 5 s. Last seen to hold: 30 Nov 2026.
"""

import dataclasses

from configs.sarathi import fig10_yi
from pdjax.config import ExperimentConfig


def get_config() -> ExperimentConfig:
  config = fig10_yi.get_config()
  return dataclasses.replace(
    config,
    strategies=("hybrid_only", "simple_chunking", "chunked"),
    workload=dataclasses.replace(config.workload, rate_rps=1.0, num_requests=128),
  )
