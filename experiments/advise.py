"""Which strategy to use: searches them all on so many devices, and says what would flip the choice.

    python -m experiments.advise --model=llama3-8b --hardware=a100 --devices=4 --workload=sharegpt
      --ttft_slo_s=1 --tpot_slo_s=0.05 [--link=10gbps] [--quick] [--jobs=2] [--out=DIR]
    python -m experiments.advise --model=... --hardware=... --devices=8 --trace=FILE ...

First the rules that need no simulation: whether a KV cache is sent faster than its prompt is
computed, whether prompts are long enough to be in anybody's way. Then the goodput of continuous
batching, chunked prefill (token budgets) and separate pools (ratios), each with every tensor
parallelism that holds the model, on equal devices. Then the best two with other prompt lengths,
SLOs and links. Without SLOs they follow from the devices (Sarathi-Serve's rule).

Writes advised.py, a config that `experiments.run` and `compare` take as it is, advice.json and
pictures, and prints the like of it in vLLM. Takes some minutes; --quick has short probes. Finished
probes are kept in OUT/probes.jsonl. Exit status 1: nothing meets the SLOs, or a probe failed; 2:
wrong input; 130: interrupted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import sys
import time
from typing import NamedTuple

from absl import flags

from configs.hardware import link
from experiments.program import (
  FLAGS,
  Progress,
  config_from_flags,
  define_flags,
  main,
  out_folder,
  whole_file,
)
from experiments.searching.advising import AdviceGoal
from experiments.searching.drive import Driver, ProbeCache
from experiments.searching.goals import Asked, caveats_of
from experiments.searching.probe import code_version
from experiments.sweep import Sweep, make_sweep
from experiments.traffic import read_traffic
from pdjax.analysis.targets import Attainment
from pdjax.core.plain import to_plain


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
    workload = dataclasses.replace(workload, trace=str(pathlib.Path(workload.trace).absolute()))
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
  return Prepared(goal, out, make_sweep(jobs=FLAGS.jobs, ray=None))


def run(prepared: Prepared) -> int:
  """Searches, prints and writes the advice; returns the exit status."""
  goal, out, progress = prepared.goal, prepared.out, Progress()
  out.mkdir(parents=True, exist_ok=True)
  driver = Driver(prepared.sweep, ProbeCache(out / "probes.jsonl"), progress)
  was_interrupted = False
  with contextlib.closing(prepared.sweep):
    try:
      goal.run(driver, progress)
    except KeyboardInterrupt:
      was_interrupted = True
      progress.done("interrupted: reporting what was found so far")
  text, data = goal.report()
  config = goal.asked.config
  print(f"\n== {config.model} on {FLAGS.devices} x {config.hardware}, simulated ==")
  print(text)
  caveats = caveats_of(driver.searches)
  if caveats:
    print(f"  Not shown: {'; '.join(caveats)}.")
  data |= {
    "caveats": caveats,
    "config": to_plain(config),
    "code": code_version(),
    "interrupted": was_interrupted,
    "date": time.strftime("%Y-%m-%d %H:%M:%S"),
  }
  with whole_file(out / "advice.json") as path:
    path.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")
  files = ["advice.json"]
  if goal.ranked and not was_interrupted:
    goal.write_config(out / "advised.py")
    files.append("advised.py")
  try:
    files += goal.draw(out)
  except ImportError as error:
    print(f"no pictures: {error}")
  print(
    f"{driver.num_simulated} probes simulated, {driver.num_reused} known before; wrote "
    f"{', '.join(files)} to {out}"
  )
  if was_interrupted:
    print(f"run it again with --out={out} to go on", file=sys.stderr)
    return 130
  failed = [search for search in driver.searches if search.failure is not None]
  for search in failed:
    print(f"FAILED {search.name}: {search.failure.message}", file=sys.stderr)
  return int(bool(failed) or not goal.ranked)


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
