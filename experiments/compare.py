"""THE MAIN JOB: one workload under several strategies with the same number of devices.

    python -m experiments.compare [--config=configs/quickstart.py] [--set a.b=c ...]
      [--strategies=continuous,chunked,disaggregated] [--backend=jax|sim] [--out=DIR]

Prints a table, the interference and a verdict, and under it the same strategies simulated for
Llama-3-8B on as many A100s. Writes summary.json, events.jsonl, timeline.json (open it in Perfetto)
and pictures. Exit status 1: the strategies gave different tokens; 2: wrong input.
"""

from __future__ import annotations

import dataclasses

from absl import flags

from experiments.program import (
  FLAGS,
  ROOT,
  Progress,
  config_from_flags,
  define_flags,
  main,
  out_folder,
)
from experiments.serving import (
  machine,
  report,
  run_experiment,
  token_report,
  write_results,
)
from pdjax.config import ExperimentConfig, load_config

SIMULATED = "configs/llama3_8b_a100.py"


def run() -> int:
  names = FLAGS.strategies.split(",") if FLAGS.strategies else None
  config = config_from_flags(strategies=names and tuple(name.strip() for name in names))
  return report_and_write(config, "compare", also_simulate=config.backend == "jax")


def report_and_write(config: ExperimentConfig, program: str, *, also_simulate: bool) -> int:
  """Runs an experiment, prints and writes its report; returns the exit status."""
  out, progress = out_folder(program), Progress()
  experiment = run_experiment(config, progress)
  text, data = report(experiment)
  tokens_text, tokens_data, is_wrong = token_report(experiment)
  data |= tokens_data | {"machine": machine()}
  print(text)
  if tokens_text:
    print(tokens_text)
  if also_simulate and not experiment.was_interrupted:
    simulated = dataclasses.replace(
      load_config(ROOT / SIMULATED), strategies=config.strategies, num_devices=config.num_devices
    )
    other = run_experiment(simulated, progress)
    text, data["simulated"] = report(other)
    print(text)
  files = write_results(out, experiment, data)
  print(f"\nwrote {', '.join(files)} to {out}")
  return 130 if experiment.was_interrupted else int(is_wrong)


if __name__ == "__main__":
  define_flags("configs/quickstart.py")
  flags.DEFINE_string("strategies", None, "strategies to compare, separated by commas")
  main(run)
