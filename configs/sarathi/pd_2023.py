"""SARATHI 2023 by the ratio of prompt to output: chunks that carry decodes (arXiv 2308.16369).

    python -m experiments.reproduce --figure=sarathi/2023-pd
    python -m experiments.compare --backend=sim --config=configs/sarathi/pd_2023.py

Offline: 180 requests of 1,024 tokens at once, 18 sequences a step, chunks within 256 tokens.
Prompts of 960 and outputs of 64 tokens are the ratio at which chunks and decodes run out together,
256 / 17. The figure has 6 sequences too, with which the paper gains most, at a ratio of 50.
Stand-ins: OPT-13B for LLaMA-13B (matrices of the same size but for 2 % of the MLP) and the A40 for
the A6000 (the same die at 91 % of the memory's rate). 5 s. Last seen to hold: 30 Nov 2026.
"""

from pdjax.config import (
  CacheConfig,
  ExperimentConfig,
  SchedulerOptions,
  SloConfig,
  WorkloadConfig,
)
from pdjax.workloads.lengths import Fixed


def get_config() -> ExperimentConfig:
  return ExperimentConfig(
    model="opt-13b",
    backend="sim",
    hardware="a40",
    num_devices=1,
    strategies=("faster_transformer", "orca", "chunked"),
    workload=WorkloadConfig(
      arrivals="all_at_once",
      lengths=Fixed(prompt_tokens=960, output_tokens=64),
      num_requests=180,
      rate_rps=1.0,
    ),
    scheduler=SchedulerOptions(token_budget=256),
    cache=CacheConfig(layout="paged", num_rows=18, page_size=16, max_len=1024),
    slo=SloConfig(ttft_s=60.0, tpot_s=0.2),
  )
