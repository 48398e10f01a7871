"""Sarathi-Serve's Figure 1 at this machine's scale: whole prompts stall running answers.

    python -m experiments.compare --config=configs/engine/sarathi_fig1.py
    python -m experiments.reproduce --figure=engine/sarathi-fig1

All requests are there at the start, as in its panel (a); panel (b) has the same ones at rates. The
paper serves Yi-34B on two A100s. Model, lengths, budget and memory here are those of
`sarathi_table4.py`.

Warms up for a minute on two cores, then serves for a quarter of one a strategy. Expected: the
longest gap between two tokens is several times as long with whole prompts, and chunks take no
longer for all requests. Last seen to hold: 30 Nov 2026, on a machine with other programs (12 times,
and 0.85 of the time).
"""

import dataclasses

from configs.engine import sarathi_table4
from pdjax.config import ExperimentConfig


def get_config() -> ExperimentConfig:
  config = sarathi_table4.get_config()
  workload = dataclasses.replace(config.workload, arrivals="all_at_once", num_requests=24)
  return dataclasses.replace(config, strategies=("continuous", "chunked"), workload=workload)
