"""Why a run was slow, what to change first, and what that would do.

    python -m experiments.diagnose --events=runs/run-1/events.jsonl [--run=chunked]
    python -m experiments.diagnose --events=result.json --model=llama3-8b --hardware=a100
      [--pools=mixed:fcfs] [--set scheduler.token_budget=2048] [--ttft_slo_s=1 --tpot_slo_s=0.05]
    python -m experiments.diagnose --judge [--num_runs=200] [--seed=0]

Reads our event log, a result of `vllm bench serve`, an AIPerf export, or a CSV file
(`experiments/observed.py`), names the causes of late first tokens, slow tokens and long gaps with
the numbers behind them, and simulates changes against the first cause (against two that cannot be
told apart) on the same requests: as they were measured, simulated before and after. Our log is
simulated as its summary.json says, others as the flags do. Without targets those of the run are
taken, or 3 and 5 times what is seen at the quietest. Writes summary.json and a picture. Exit
status 2: wrong input.

`--judge` diagnoses simulated runs with one injected cause each (`experiments/injected.py`) from
their log, and from what a client saw of them, and prints both confusion matrices (60 s).
Exit status 1: fewer than 90 % from the log are right.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import flags

from configs.hardware import HARDWARE
from configs.models import MODELS
from experiments.injected import INJECTED, draw_case
from experiments.observed import FORMATS, Seen, read_observed
from experiments.program import FLAGS, Progress, main, out_folder, whole_file
from experiments.remedies import (
  ADVICE,
  Row,
  best_of,
  faster_decode,
  for_requests,
  remedies,
  row_of,
  table,
  try_out,
)
from experiments.serving import check, write_summary
from experiments.validation.replay import text_table
from pdjax.analysis.diagnose import (
  Cause,
  Diagnosis,
  PhaseUse,
  diagnose_log,
  opposed_phases,
  phase_use,
)
from pdjax.analysis.signatures import derive_slo, diagnose_requests
from pdjax.analysis.verdict import percent_text, time_text
from pdjax.config import (
  POOLS_FORM,
  CacheConfig,
  ExperimentConfig,
  SchedulerOptions,
  WorkloadConfig,
  num_devices_of,
  override,
  parse_pools,
)
from pdjax.core.plain import to_plain
from pdjax.core.request import Slo
from pdjax.workloads.lengths import Fixed

ASKED = 0.9
DEFAULT = SchedulerOptions(token_budget=2048, reservation="chunk", watermark=0.0, steps_in_flight=1)
DEFAULT_ROWS = 256
"""As vLLM schedules by default on most devices; `--set` changes both."""
UNLIKE = 0.2  # of the requests: if so many more or fewer fare well, another run is simulated


class Checked(NamedTuple):
  """A diagnosis that can be made. `config` None: nothing can be simulated; `why_not` says why.

  `caveats` are what a reader must know of a simulation.
  """

  path: pathlib.Path
  seen: Seen
  slo: Slo
  slo_source: str
  config: ExperimentConfig | None
  why_not: str | None
  out: pathlib.Path
  caveats: Sequence[str] = ()


def prepare() -> Callable[[], int]:
  if FLAGS.judge:
    if FLAGS.events is not None:
      raise ValueError("--judge and --events: give one of them")
    return functools.partial(judge, FLAGS.num_runs, FLAGS.seed, out_folder("diagnose"))
  if FLAGS.events is None:
    raise ValueError(f"--events=FILE is missing: {FORMATS}")
  seen = read_observed(FLAGS.events, FLAGS.run)
  if not seen.requests:
    raise ValueError(f"{FLAGS.events}: none of its requests finished ({seen.num_failed} failed)")
  slo, source = _slo(seen)
  config, why_not = _config(seen, slo)
  caveats = () if config is None else check(config, pathlib.Path()).world.caveats
  path, out = pathlib.Path(FLAGS.events), out_folder("diagnose")
  return functools.partial(run, Checked(path, seen, slo, source, config, why_not, out, caveats))


def _slo(seen: Seen) -> tuple[Slo, str]:
  """The targets, and where they come from."""
  given = {name: getattr(FLAGS, f"{name}_slo_s") for name in ("ttft", "tpot")}
  own, source = seen.slo, "of the run"
  if own is None:
    own = derive_slo(seen.requests, ttft_multiple=3.0, tpot_multiple=5.0)
    source = "3 and 5 times what is seen at the quietest"
  if None not in given.values():
    source = "as given"
  elif set(given.values()) != {None}:
    source = f"as given, else {source}"
  ttft_s, tpot_s = given["ttft"] or own.ttft_s, given["tpot"] or own.tpot_s
  return Slo(ttft_s=ttft_s, tpot_s=tpot_s), source


def _config(seen: Seen, slo: Slo) -> tuple[ExperimentConfig | None, str | None]:
  """What to simulate: the run's own experiment, or what the flags name; or why nothing can be."""
  if any(request.arrival_s is None for request in seen.requests):
    return None, "the file has no arrival times"
  config, strategy = seen.config, seen.strategy
  named = {name: getattr(FLAGS, name) for name in ("model", "hardware")}
  if config is not None:
    if FLAGS.pools is not None:
      raise ValueError(f"--pools={FLAGS.pools}: the run's summary.json says what served it")
    config = dataclasses.replace(config, **{k: v for k, v in named.items() if v is not None})
    if strategy not in config.strategy_names:
      raise ValueError(f"summary.json beside {FLAGS.events} is of {config.strategy_names}")
  elif None in named.values():
    return None, "--model=NAME and --hardware=NAME say what served the requests"
  else:
    strategy = FLAGS.pools or "mixed:fcfs"
    config = ExperimentConfig(
      **named,
      backend="sim",
      strategies=(),
      pools=strategy,
      num_devices=num_devices_of(parse_pools(strategy)),
      workload=WorkloadConfig(lengths=Fixed(prompt_tokens=1, output_tokens=1)),
      scheduler=DEFAULT,
      cache=CacheConfig(layout="paged", num_rows=DEFAULT_ROWS),
    )
  config = override(for_requests(config, strategy, seen.requests, slo), FLAGS.set)
  if config.model not in MODELS:
    return None, f"{config.model} has no entry in configs/models.py; --model=NAME of one like it"
  return config, None


# One run ------------------------------------------------------------------------------------------


def run(checked: Checked) -> int:
  seen, slo, progress = checked.seen, checked.slo, Progress()
  num_requests = len(seen.requests) + seen.num_failed
  print(
    f"{checked.path.name} ({seen.kind}): {num_requests} requests, {seen.num_failed} failed; "
    f"targets TTFT {time_text(slo.ttft_s)}, TPOT {time_text(slo.tpot_s)} ({checked.slo_source})"
  )
  if seen.log is not None:
    found = diagnose_log(seen.log, slo, notes=seen.notes)
  else:
    found = diagnose_requests(
      seen.requests, slo, ids=list(seen.by_id), num_failed=seen.num_failed, notes=seen.notes
    )
  uses = _uses(seen, checked.config)
  print(found)
  for line in _roofs(uses):
    print(line)
  print(f"\nChange first: {'; or '.join(ADVICE[cause] for cause in found.first_causes)}.")
  rows, refused = [], []
  if checked.config is None:
    print(f"Not simulated: {checked.why_not}.\n")
    measured = row_of("as measured", None, seen.requests, seen.num_failed, slo)
    print(text_table(table([measured])))
  elif found.cause is not Cause.TOO_FEW and (
    found.cause is not Cause.HEALTHY or opposed_phases(uses) is not None
  ):
    rows, refused = _simulate(checked, found, uses, progress)
    _print_rows(rows, refused, checked)
    for line in _unlike(*rows[:2], found.cause):
      print(line)
    if found.cause is not Cause.HEALTHY and len(rows) > 2:
      print(_best(*rows[1:]))
  data = {
    "file": checked.path.name,
    "kind": seen.kind,
    "num_failed": seen.num_failed,
    "slo": to_plain(slo),
    "findings": [to_plain(finding) for finding in found.findings],
    "is_ambiguous": found.is_ambiguous,
    "num_requests": found.num_requests,
    "num_troubled": found.num_troubled,
    "notes": list(found.notes),
    "phases": [to_plain(use) for use in uses],
    "simulated": [
      {"name": row.name, "num_devices": row.num_devices, "num_requests": row.num_requests,
       "num_met": row.num_met, "num_calm": row.num_calm}
      for row in rows
    ],
    "not_simulated": refused,
  }  # fmt: skip
  checked.out.mkdir(parents=True, exist_ok=True)
  write_summary(checked.out, data)
  title = f"{checked.path.name}: {' or '.join(found.first_causes)}"
  files = ["summary.json", *_draw(checked.out, "draw_diagnosis", seen.by_id, found, title=title)]
  print(f"\nwrote {', '.join(files)} to {checked.out}")
  return 0


def _uses(seen: Seen, config: ExperimentConfig | None) -> list[PhaseUse]:
  """MFU and MBU of the steps of our log, where it is known which devices made them."""
  is_known = seen.config is not None and (seen.config.backend == "sim" or FLAGS.hardware)
  if seen.log is None or config is None or not is_known:
    return []
  devices = {
    spec.name: (HARDWARE[spec.hardware or config.hardware], len(spec.devices))
    for spec in config.pools_of(config.pools)
  }
  return phase_use(seen.log, MODELS[config.model], devices)


def _roofs(uses: Sequence[PhaseUse]) -> list[str]:
  lines = [
    f"{use.pool}, {use.kind} steps: MFU {use.mfu:.0%}, MBU {use.mbu:.0%}, {use.flop_per_byte:.0f} "
    f"FLOP/byte (ridge {use.ridge_flop_per_byte:.0f})"
    for use in uses
  ]
  if (opposed := opposed_phases(uses)) is not None:
    prefill, decode = opposed
    lines.append(
      f"Prefill is near the peak FLOP/s (MFU {prefill.mfu:.0%}) and decode is memory-bound (MBU "
      f"{decode.mbu:.0%}, MFU {decode.mfu:.0%}): devices that decode gain by bandwidth, those that "
      f"prefill do not."
    )
  return lines


def _simulate(
  checked: Checked, found: Diagnosis, uses: Sequence[PhaseUse], progress: Progress
) -> tuple[list[Row], list[str]]:
  """The table: as measured, simulated before, and with each change; and what was refused."""
  seen, slo, config = checked.seen, checked.slo, checked.config
  tried = [("before, simulated", config)]
  tried += [remedy for cause in found.first_causes for remedy in remedies(cause, config)]
  if opposed_phases(uses) is not None:
    tried += faster_decode(config)
  tried = list({what: change for what, change in tried}.items())
  rows, refused = try_out(tried, seen.requests, slo, progress.update)
  measured = row_of("as measured", None, seen.requests, seen.num_failed, slo)
  return [measured, *rows], refused


def _print_rows(rows: Sequence[Row], refused: Sequence[str], checked: Checked) -> None:
  config = checked.config
  print(
    f"The same requests simulated: {config.model} on {config.hardware}, {config.pools}, token "
    f"budget {config.scheduler.token_budget}, {config.cache.num_rows} rows\n"
  )
  print(text_table(table(rows)))
  print("(calm: no late first token, no slow tokens, no long gap)")
  for line in refused:
    print(f"not simulated: {line}")
  print(f"Not shown: {'; '.join(checked.caveats)}.")


def _unlike(measured: Row, before: Row, cause: Cause) -> list[str]:
  """Whether the simulation is of what was measured: if not, its changes say little."""
  shares = [row.num_calm / row.num_requests for row in (measured, before)]
  if abs(shares[0] - shares[1]) <= UNLIKE:
    return []
  text = f"{shares[1]:.0%} of the requests are calm as simulated, {shares[0]:.0%} as measured"
  if cause is Cause.CLIENT:
    return [f"{text}: a simulation has no client that is late."]
  return [
    f"{text}: it is not what served them, so its changes say little. --model, --hardware, --pools "
    f"and --set link=, scheduler.token_budget=, cache.num_rows=, cache.num_pages= say what did."
  ]


def _best(before: Row, *changes: Row) -> str:
  """The change that helps most with the devices there are, and one with others that does more."""
  there = [row for row in changes if not row.num_new]
  best = {row.name: row for row in (best_of(own) for own in (there, changes) if own)}
  texts = [
    f"{row.name}: requests without trouble {percent_text(before.num_calm, before.num_requests)} -> "
    f"{percent_text(row.num_calm, row.num_requests)} in simulation"
    for row in best.values()
    if row.num_calm > before.num_calm
  ]
  return "\n".join(f"Try {text}." for text in texts) or "None of these helps in simulation."


def _draw(folder: pathlib.Path, name: str, *args: Any, **more: Any) -> list[str]:
  """Draws a picture of `figures.diagnose`; returns its file, or none without matplotlib."""
  try:
    from experiments.figures import diagnose as figures

    with whole_file(folder / "diagnose.png") as path:
      getattr(figures, name)(*args, path=path, **more)
  except ImportError as error:
    print(f"no picture: {error}")
    return []
  return ["diagnose.png"]


# The judgement ------------------------------------------------------------------------------------

Matrix = dict[tuple[Cause, Cause], int]
"""(injected, diagnosed) -> how many runs."""


def confusion(
  num_runs: int, seed: int, show: Callable[[str], None] = lambda text: None
) -> tuple[dict[str, Matrix], list[dict[str, Any]]]:
  """Injects each cause in turn: matrices by the log and by what clients saw, and every run."""
  matrices: dict[str, Matrix] = {"our log": collections.Counter(), "clients": collections.Counter()}
  runs = []
  for number in range(num_runs):
    cause = INJECTED[number % len(INJECTED)]
    case = draw_case(cause, np.random.default_rng([seed, number]))
    found = {
      "our log": diagnose_log(case.log, case.slo),
      "clients": diagnose_requests(case.requests, case.slo),
    }
    row: dict[str, Any] = {"injected": str(cause), "run": case.label}
    for name, own in found.items():
      matrices[name][cause, own.cause] += 1
      row[name] = {"diagnosed": str(own.cause), "is_ambiguous": own.is_ambiguous}
    runs.append(row)
    show(f"{number + 1} of {num_runs} runs")
  return matrices, runs


def judge(num_runs: int, seed: int, out: pathlib.Path) -> int:
  progress = Progress()
  matrices, runs = confusion(num_runs, seed, progress.update)
  shares = {}
  for name, matrix in matrices.items():
    right = sum(count for (injected, found), count in matrix.items() if injected == found)
    ambiguous = sum(run[name]["is_ambiguous"] for run in runs)
    shares[name] = right / num_runs
    print(
      f"\nFrom {name}: {right} of {num_runs} right ({percent_text(right, num_runs)}); {ambiguous} "
      f"called ambiguous. Rows: injected; columns: diagnosed, numbered alike."
    )
    print(text_table(_matrix_rows(matrix)))
  out.mkdir(parents=True, exist_ok=True)
  write_summary(out, {"num_runs": num_runs, "seed": seed, "right": shares, "runs": runs})
  files = ["summary.json", *_draw(out, "draw_confusion", matrices, INJECTED)]
  print(f"\nwrote {', '.join(files)} to {out}")
  return int(shares["our log"] < ASKED)


def _matrix_rows(matrix: Matrix) -> list[tuple[str, ...]]:
  others = sorted({found for _, found in matrix} - set(INJECTED))
  columns = [*INJECTED, *others]
  rows = [("", "", *(str(n) for n in range(1, len(columns) + 1)))]
  for number, cause in enumerate(columns, 1):
    counts = (matrix.get((cause, found), 0) for found in columns)
    rows.append((str(number), str(cause), *(str(count or ".") for count in counts)))
  return rows


if __name__ == "__main__":
  flags.DEFINE_string("events", None, f"what a run left behind: {FORMATS}; plain or .gz")
  flags.DEFINE_string("run", None, "one of several runs in an events.jsonl")
  flags.DEFINE_float("ttft_slo_s", None, "target for the first token", lower_bound=1e-6)
  flags.DEFINE_float("tpot_slo_s", None, "target for each token after it", lower_bound=1e-6)
  flags.DEFINE_string("model", None, "what was served, by name; default: as the run's summary says")
  flags.DEFINE_string("hardware", None, "the device that served it, by name; default likewise")
  flags.DEFINE_string("pools", None, f"what served it, mixed:fcfs (vLLM's) if not: {POOLS_FORM}")
  flags.DEFINE_multi_string(
    "set", [], "change one value of what is simulated, as in --set link=100gbe"
  )
  flags.DEFINE_bool("judge", False, "how often a diagnosis is right on simulated runs")
  flags.DEFINE_integer("num_runs", 200, "runs to judge by", lower_bound=1)
  flags.DEFINE_integer("seed", 0, "of the runs to judge by", lower_bound=0)
  flags.DEFINE_string("out", None, "folder for results; default: runs/diagnose-TIME")
  main(prepare, lambda run: run())
