"""THE MAIN JOB: one workload under several strategies with the same number of devices.

    python -m experiments.compare [--config=configs/quickstart.py] [--set a.b=c ...]
      [--strategies=continuous,chunked,disaggregated] [--pools=2xprefill:tp2,1xdecode:tp4]
      [--backend=jax|sim] [--processes [--pin] | --hosts=configs/hosts.toml] [--out=DIR]

Prints a table, the interference and a verdict, and under it the same strategies simulated for
Llama-3-8B with as many pools of an A100 each (or --hardware), or with --pools as many devices.
Writes summary.json, events.jsonl, timeline.json (open it in Perfetto) and pictures. Exit status 1:
different tokens, or nothing finished; 2: wrong input; 130: interrupted, with what was measured
until then.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import re
import sys

from absl import flags

from configs.models import MODELS
from experiments.live import Live
from experiments.program import (
  FLAGS,
  ROOT,
  Progress,
  config_from_flags,
  define_flags,
  main,
  named_workload,
  out_folder,
)
from experiments.serving import (
  Checked,
  Profiled,
  check,
  machine,
  report,
  run_experiment,
  token_report,
  write_results,
  write_summary,
)
from experiments.worlds import pools_of
from pdjax.config import ExperimentConfig, load_config
from pdjax.deployment import check_split
from pdjax.metrics.latency import outcomes

SIMULATED = "configs/llama3_8b_a100.py"


def prepare() -> tuple[Checked, Checked | None]:
  names = None if FLAGS.strategies is None else _split(FLAGS.strategies)
  return check_with_twin(config_from_flags(strategies=names), "compare")


def check_with_twin(config: ExperimentConfig, program: str) -> tuple[Checked, Checked | None]:
  """The experiment, and its simulated twin where it runs on the engine."""
  out = out_folder(program)
  if FLAGS.profile is not None and (config.backend != "jax" or config.processes or config.hosts):
    raise ValueError(
      f"--profile={FLAGS.profile} profiles the engine in this process, so it goes with "
      f"--backend=jax, without --processes and --hosts"
    )
  twin, without = None, why_no_twin(config)
  if config.backend == "jax" and without is None:
    simulated = twin_of(config, FLAGS.hardware, FLAGS.workload)
    try:
      twin = check(simulated, out)
    except ValueError as error:
      if config.workload.trace is None:
        raise
      without = str(error)  # a trace that only the small model can serve, or that nobody can
  checked = check(config, out)
  if config.backend == "jax" and without is not None:
    print(f"not simulated as well: {without}", file=sys.stderr)
  return checked, twin


def twin_of(
  config: ExperimentConfig, hardware: str | None, workload: str | None
) -> ExperimentConfig:
  """The simulated experiment with pools like those of `config`.

  It is asked the same trace, or what `workload` is called, or else prompts of its own length.
  """
  simulated = load_config(ROOT / SIMULATED)
  alike = dict(num_devices=config.num_devices // config.tp)
  if config.pools is not None:  # they say how many devices each has
    alike = dict(pools=config.pools, num_devices=config.num_devices, tp=config.tp)
  asked = simulated.workload
  if config.workload.trace is not None:
    names = (
      "trace",
      "trace_limit_s",
      "trace_speed",
      "trace_spread_s",
      "num_requests",
      "duration_s",
    )
    asked = dataclasses.replace(asked, **{name: getattr(config.workload, name) for name in names})
  elif workload is not None:
    asked = named_workload(asked, workload)
  return dataclasses.replace(
    simulated,
    hardware=hardware or simulated.hardware,
    strategies=config.strategies,
    workload=asked,
    **alike,
  )


def why_no_twin(config: ExperimentConfig) -> str | None:
  """Why the simulated model cannot be served by the pools of `config`, or None."""
  if config.pools is None:
    return None
  model = MODELS[load_config(ROOT / SIMULATED).model]
  specs = pools_of(config)
  if platforms := sorted({spec.hardware for spec in specs} - {None}):
    return f"@{', @'.join(platforms)} are devices of this machine"
  try:
    check_split(specs, model)
  except ValueError as error:
    return str(error)
  return None


def _split(names: str) -> tuple[str, ...]:
  return tuple(name.strip() for name in names.split(",")) if names.strip() else ()


def run_as_asked(prepared: tuple[Checked, Checked | None]) -> int:
  """Runs an experiment with the view and under the profiler that the flags ask for."""
  return run(prepared, Live() if FLAGS.live else Progress(), _profiled)


def run(
  prepared: tuple[Checked, Checked | None],
  progress: Progress | None = None,
  profiled: Profiled = lambda strategy: contextlib.nullcontext(),
) -> int:
  """Runs an experiment and its twin, prints and writes the report; returns the exit status."""
  checked, twin = prepared
  progress = progress or Progress()
  try:
    experiment = run_experiment(checked, progress, profiled)
    text, data = report(experiment)
    tokens_text, tokens_data, is_wrong = token_report(experiment)
  finally:
    checked.world.close()
  data |= tokens_data | {"machine": machine(experiment)}
  print(text)
  if tokens_text:
    print(tokens_text)
  print("", flush=True)
  files = write_results(checked.out, experiment, data)
  print(f"wrote {', '.join(files)} to {checked.out}", flush=True)
  if twin is not None and not experiment.cut_short:
    other = run_experiment(twin, progress)
    text, data["simulated"] = report(other)
    print(text)
    write_summary(checked.out, data)
    print(f"\nadded the simulated strategies to {checked.out / 'summary.json'}")
    if other.cut_short:
      return other.cut_short
  if experiment.cut_short:
    return experiment.cut_short
  all_failed = any(not outcomes(run.records)["finished"] for run in experiment.runs.values())
  return int(is_wrong or all_failed)


def _profiled(strategy: str) -> contextlib.AbstractContextManager:
  """Under JAX's profiler, into a folder of the strategy's own, where `--profile` asks for it."""
  if FLAGS.profile is None:
    return contextlib.nullcontext()
  from pdjax.engine.profiler import profiled

  return profiled(pathlib.Path(FLAGS.profile) / re.sub(r"[^\w.-]+", "_", strategy))


def define_run_flags() -> None:
  """Of the programs that serve and report."""
  define_flags("configs/quickstart.py")
  flags.DEFINE_string(
    "profile",
    None,
    "folder for what jax.profiler saw of the engine: XProf opens it, ui.perfetto.dev its "
    "perfetto_trace.json.gz",
  )
  flags.DEFINE_bool("live", False, "show queues, pages, latencies and tokens/s of a run as it goes")


if __name__ == "__main__":
  define_run_flags()
  flags.DEFINE_string("strategies", None, "strategies to compare, separated by commas")
  main(prepare, run_as_asked)
