"""Which strategy to use: searches them all on so many devices, and says what would flip the choice.

    python -m experiments.advise --model=llama3-8b --hardware=a100 --devices=4 --workload=sharegpt
      --ttft_slo_s=1 --tpot_slo_s=0.05 [--link=10gbps] [--quick] [--jobs=2] [--out=DIR]
    python -m experiments.advise --model=... --hardware=... --devices=8 --trace=FILE ...

First the rules that need no simulation: whether a KV cache is sent faster than its prompt is
computed, whether prompts are long enough to be in anybody's way. Then the goodput of continuous
batching, chunked prefill (token budgets) and separate pools (ratios), each with every tensor
parallelism that holds the model, on equal devices. Then the best of each with other prompt lengths,
SLOs and links. Without SLOs they follow from the devices (Sarathi-Serve's rule).

Writes advised.py, a config that `experiments.run` and `compare` take as it is, advice.json and
pictures, and prints the like of it in vLLM. Takes some minutes; --quick has short probes. Finished
probes are kept in OUT/probes.jsonl. Exit status 1: nothing meets the SLOs, or a probe failed; 2:
wrong input; 130: interrupted.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import NamedTuple

from absl import flags

from configs.hardware import link
from experiments.program import (
  FLAGS,
  config_from_flags,
  define_flags,
  main,
  out_folder,
)
from experiments.searching.advising import AdviceGoal
from experiments.searching.carrying_out import carry_out
from experiments.searching.goals import Asked
from experiments.sweep import Sweep, as_configured, make_sweep
from experiments.traffic import read_traffic
from pdjax.analysis.targets import Attainment


class Prepared(NamedTuple):
  """Advice that can be sought."""

  goal: AdviceGoal
  out: pathlib.Path
  sweep: Sweep


def prepare() -> Prepared:
  for name in ("model", "hardware", "devices"):
    if getattr(FLAGS, name) is None:
      raise ValueError(f"--{name} is missing: advice is about a model on some devices")
  if FLAGS.workload is None and FLAGS.trace is None:
    raise ValueError("give --workload=NAME or --trace=FILE: advice is about some traffic")
  if FLAGS.pools is not None:
    raise ValueError(f"--pools={FLAGS.pools}: pools are what advice searches; leave it out")
  if FLAGS.backend not in (None, "sim"):
    raise ValueError(f"--backend={FLAGS.backend}: advice simulates; leave it out")
  if FLAGS.jobs < 1:
    raise ValueError(f"--jobs={FLAGS.jobs} must be at least 1")
  for name in ("ttft_slo_s", "tpot_slo_s"):
    value_s = getattr(FLAGS, name)
    if value_s is not None and not value_s > 0:
      raise ValueError(f"--{name}={value_s} must be positive")
  out = out_folder("advise").absolute()
  config = config_from_flags(backend="sim")
  slo = dataclasses.replace(
    config.slo,
    ttft_s=FLAGS.ttft_slo_s or config.slo.ttft_s,
    tpot_s=FLAGS.tpot_slo_s or config.slo.tpot_s,
  )
  if FLAGS.link is not None:
    link(FLAGS.link)
    config = dataclasses.replace(config, link=FLAGS.link)
  workload = config.workload
  if workload.trace is not None:
    path = str(pathlib.Path(workload.trace).absolute())
    workload = dataclasses.replace(workload, trace=path, num_requests=None)  # all that it has
  config = dataclasses.replace(config, slo=slo, workload=workload, pools=None)
  has_lengths = read_traffic(workload).lengths is not None
  length = dict(requests_per_device=100, least_s=30.0) if FLAGS.quick else {}
  asked = Asked(
    config=config,
    target=Attainment(share=FLAGS.share),
    out=out,
    confirms=has_lengths and not FLAGS.quick,
    **length,
  )
  goal = AdviceGoal(asked, num_devices=FLAGS.devices, quick=FLAGS.quick)
  sweep = make_sweep(jobs=FLAGS.jobs, ray=None, begin=as_configured(FLAGS.config))
  return Prepared(goal, out, sweep)


def run(prepared: Prepared) -> int:
  """Searches, prints and writes the advice; returns the exit status."""
  goal, config = prepared.goal, prepared.goal.asked.config

  def write_config(out: pathlib.Path) -> list[str]:
    if not goal.ranked:
      return []
    goal.write_config(out / "advised.py")
    return ["advised.py"]

  return carry_out(
    goal,
    prepared.sweep,
    prepared.out,
    name="advice",
    title=f"{config.model} on {FLAGS.devices} x {config.hardware}",
    config=config,
    has_found=lambda searches: bool(goal.ranked),
    write_more=write_config,
  )


if __name__ == "__main__":
  define_flags("configs/llama3_8b_a100.py")
  flags.DEFINE_integer("devices", None, "how many, for every strategy")
  flags.DEFINE_float("ttft_slo_s", None, "target to the first token")
  flags.DEFINE_float("tpot_slo_s", None, "target for each token after it")
  flags.DEFINE_string("link", None, "between pools: a name, or a rate such as 10gbps")
  flags.DEFINE_float("share", 0.9, "of the requests that have to meet both")
  flags.DEFINE_bool("quick", False, "short probes, and no long runs to hold their rates against")
  flags.DEFINE_integer("jobs", 1, "processes to run probes in")
  main(prepare, run)
