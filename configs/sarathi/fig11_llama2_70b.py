"""Sarathi-Serve's capacity of LLaMA2-70B on eight A40s: two stages of four (OSDI'24, figure 11).

    python -m experiments.reproduce --figure=sarathi/fig11
    python -m experiments.run --backend=sim --config=configs/sarathi/fig11_llama2_70b.py

The second serves one rate under Sarathi-Serve, in 5 s; `--pools=mixed:tp4:pp2:orca` and
`mixed:tp4:pp2:prefill_first` are the others. Matrices of the A40 were measured; its attention is
the A100's in shares of the peaks, and all-reduces of four are those of A100s that NVLink joins in
pairs (`configs/hardware.py`), so their way here is named after that. PCIe joins the stages.
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
    model="llama2-70b",
    hardware="a40",
    tp_link="nvlink",
    pp_link="pcie4",
    num_devices=8,
    strategies=(),
    pools="mixed:tp4:pp2:sarathi",
    workload=dataclasses.replace(config.workload, rate_rps=0.3),
    slo=SLOS["sarathi-llama2-70b-strict"],
  )
