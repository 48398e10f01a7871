"""How long prompts must be for separate pools to pay: Llama-3-8B on four A100s, prompts all alike.

    python -m experiments.compare --config=configs/seed/lengths.py
    python -m experiments.reproduce --figure=seed/lengths

Takes 5 s. Here prompts have 2,048 tokens and answers 128; the second command goes from 128 to
16,384, tunes each strategy, and looks for its goodput over links of 10 and 200 Gbit/s.
"""

from pdjax.config import CacheConfig, ExperimentConfig, SchedulerOptions, WorkloadConfig
from pdjax.scheduling.hand_off import HandOff
from pdjax.workloads.lengths import Fixed


def get_config() -> ExperimentConfig:
  return ExperimentConfig(
    model="llama3-8b",
    backend="sim",
    hardware="a100",
    link="hdr200",
    num_devices=4,
    strategies=("continuous", "chunked"),
    pools="2xprefill,2xdecode",
    workload=WorkloadConfig(
      arrivals="poisson",
      rate_rps=8.0,
      num_requests=400,
      lengths=Fixed(prompt_tokens=2048, output_tokens=128),
    ),
    scheduler=SchedulerOptions(token_budget=512),
    hand_off=HandOff(layer_groups=8),
    cache=CacheConfig(layout="paged", num_rows=256, page_size=16),
  )
