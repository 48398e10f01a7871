"""What tests of pools in processes share: little memory and few requests."""

from engine.pools import Engine, cpus

from pdjax.config import CacheConfig, ExperimentConfig, SchedulerOptions, WorkloadConfig
from pdjax.engine.build import build_executors, default_buckets
from pdjax.scheduling.pages import PageConfig
from pdjax.workloads.lengths import Mix

PAGES = PageConfig(num_rows=2, page_size=4, pages_per_row=4, num_pages=8, contiguous=True)
BUDGET = 16  # of a prefill step
EXPERIMENT = ExperimentConfig(
  model="tiny",
  strategies=("continuous", "disaggregated"),
  workload=WorkloadConfig(
    num_requests=12,
    load=0.5,
    lengths=Mix(
      prompt_tokens=(5, 20), long_prompt_tokens=(25, 32), output_tokens=(1, 8), long_every=4
    ),
  ),
  scheduler=SchedulerOptions(token_budget=16),
  cache=CacheConfig(num_rows=2, page_size=8),
)


def mixed_pool(model) -> Engine:
  """The model in this process, in a warm pool that does all."""
  buckets = default_buckets(PAGES, whole_budget=BUDGET, chunk_budget=BUDGET)
  executors = build_executors(model, PAGES, buckets, cpus(1), layout="slots")
  for _ in executors[0].warm_up({"prefill", "decode"}):
    pass
  return Engine(executors=executors, steps=executors[0].steps, pages=PAGES, buckets=buckets)
