"""Sarathi-Serve's other Falcon-180B: eight A100s of two hosts in one stage (OSDI'24, figure 13).

    python -m experiments.reproduce --figure=sarathi/fig13
    python -m experiments.run --backend=sim --config=configs/sarathi/fig13_tp8.py

Every all-reduce crosses the 100 Gbit/s of Ethernet between the hosts. Nobody published such: they
take their bytes at the same share of that rate as NCCL reaches inside a node of A100s.
The second command takes 5 s. Last seen to hold: 30 Nov 2026.
"""

import dataclasses

from configs.sarathi import fig11_falcon
from pdjax.config import ExperimentConfig


def get_config() -> ExperimentConfig:
  return dataclasses.replace(
    fig11_falcon.get_config(),
    hardware="a100",
    tp_link="100gbe",
    pp_link=None,
    pools="mixed:tp8:sarathi",
  )
