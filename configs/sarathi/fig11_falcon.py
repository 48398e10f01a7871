"""Sarathi-Serve's capacity of Falcon-180B on two hosts of four A100s (OSDI'24, figures 11 and 13).

    python -m experiments.reproduce --figure=sarathi/fig11
    python -m experiments.run --backend=sim --config=configs/sarathi/fig11_falcon.py

A stage is the four A100s of a host, which NVLink joins in pairs and PCIe else; between the stages
are 100 Gbit/s of Ethernet. The second command takes 5 s; for other systems see
`fig11_llama2_70b.py`. Last seen to hold: 30 Nov 2026.
"""

import dataclasses

from configs.sarathi import fig11_llama2_70b
from configs.slos import SLOS
from pdjax.config import ExperimentConfig


def get_config() -> ExperimentConfig:
  return dataclasses.replace(
    fig11_llama2_70b.get_config(),
    model="falcon-180b",
    hardware="a100-pairs",
    tp_link=None,
    pp_link="100gbe",
    slo=SLOS["sarathi-falcon-180b-strict"],
  )
