"""Measured end-to-end rows of the package aiconfigurator, beside its own estimates of them.

The rows (silicon_sample.csv of aiconfigurator-core 0.12.0, Apache-2.0) are mean TTFT and TPOT of
so many users who each send the next request when the last one has ended. Ours: that loop through
the scheduler, with step times from the package's operator tables (`Silicon`). Theirs: its
`cli_estimate`, which reads the same tables and has no queue. No number is fitted on rows; what to
assume of engines and users, where there was a choice, was settled with 79 of the 1,071 in view.

How a row was served is as its makers publish it, and otherwise the engine's default:

- InferenceMAX (its README): lengths uniform from 0.8 of what the row says, ten requests for each
  user; 8,192 tokens a step.
- Deployments of Dynamo, by the package's generator (0.12.0): all lengths alike, twenty requests for
  each user; a step has room for a prompt, a token of each user and 1,500 more, that of a prefill
  worker the same without users.
- All others: lengths and requests as for Dynamo; 8,192 tokens a step, the default of all three.

vLLM and SGLang cut prompts to the budget, TensorRT-LLM takes them whole beside the decodes. The
host's work for a step is taken to be hidden behind the step before: without it decodes of vLLM 0.19
on another device come out too slow rather than too fast (`vllm.host_of_rtx_4090`). Only vLLM before
0.14 schedules and computes in turns unless told otherwise (its release notes): there it takes what
Vidur's authors measured of such an engine beside an A100 (`configs/hardware.py`).
"""

from __future__ import annotations

import collections
import csv
import dataclasses
import functools
import gzip
import importlib.util
import logging
import pathlib
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from configs.hardware import HARDWARE, LINKS
from experiments.validation.page import Reached, Section
from experiments.validation.replay import cluster_of, error_percent, markdown_table
from pdjax.config import PoolSpec, SchedulerOptions, parse_pools
from pdjax.core.clock import VirtualClock
from pdjax.core.events import EventLog
from pdjax.core.model_config import ModelConfig
from pdjax.core.request import Request, SamplingParams
from pdjax.metrics.latency import request_records
from pdjax.scheduling.pages import PageConfig
from pdjax.serving.cluster import Cluster
from pdjax.serving.inbox import Inbox
from pdjax.serving.loop import serve
from pdjax.sim.roofline import num_pages
from pdjax.sim.silicon import Silicon, systems_folder

Show = Callable[[str], None]
METRICS = ("TTFT", "TPOT")
ROWS = "silicon_sample_all.csv.gz"  # of the data folder; the same as the package's
DENSE = {  # models of the rows: what the package has of the same shape
  "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B",
  "nvidia/Llama-3.1-8B-Instruct-FP8": "meta-llama/Meta-Llama-3.1-8B",
  "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
  "Qwen/Qwen3-32B": "Qwen/Qwen3-32B",
  "nvidia/Qwen3-32B-NVFP4": "Qwen/Qwen3-32B",
}
POLICIES = {"sglang": "fcfs", "trtllm": "hybrid_only", "vllm": "fcfs"}
BYTES_PER_WEIGHT = {"bfloat16": 2, "fp8": 1, "fp8_block": 1, "nvfp4": 9 / 16}
PAGE_SIZE = 32
# From a user's last token to the next request, on average; exponential. As the way into the queue
# of a real vLLM was: 23 ms beyond the quickest, deviation 22 ms (the run in `vllm.py`).
TURNAROUND_S = 23e-3
NUM_AGGREGATED = 240
SEED = 0
TOKEN_BUDGET = 8192  # vLLM's max_num_batched_tokens, TensorRT-LLM's max_num_tokens, SGLang's chunk
LINK = LINKS["nvlink4"]
HOST = HARDWARE["a100"].fit
INFERENCE_MAX = "2026-04-06.csv"  # the file that its rows came in


class Workers(NamedTuple):
  count: int
  tp: int
  batch: int  # most sequences of each


class Row(NamedTuple):
  """One measurement. `decode` is None where workers do both."""

  name: str
  model: str
  system: str
  backend: str
  is_synchronous: bool  # the device waits for the host
  gemm: str
  isl: int
  osl: int
  users: int
  workers: Workers
  decode: Workers | None
  maker: str  # inference_max, dynamo, or "" where nobody says
  ttft_s: float
  tpot_s: float

  @property
  def group(self) -> str:
    kind = "aggregated" if self.decode is None else "disaggregated"
    return f"{self.model.split('/')[1]} {self.gemm}, {self.system}, {self.backend}, {kind}"


def read_rows(folder: pathlib.Path) -> tuple[Row, ...]:
  """The rows of dense models. Of several workers that do both, what one of them has."""
  with gzip.open(folder / ROWS, "rt", newline="") as file:
    records = [r for r in csv.DictReader(file) if r["model_path"] in DENSE]
  return tuple(map(_row, records))


def _row(record: Mapping[str, str]) -> Row:
  def workers(prefix: str) -> Workers:
    values = (record[f"{prefix}{name}"] for name in ("tp_size", "batch_size"))
    return Workers(_int(record.get(f"{prefix}num_workers") or "1"), *map(_int, values))

  source = dict(
    item.strip().partition("=")[::2] for item in record["silicon_data_source"].split(";")
  )
  if record["mode"] == "agg":
    first, decode = workers(""), None
    users = first.batch
  else:
    first, decode = workers("prefill_"), workers("decode_")
    users = _int(source.get("silicon_concurrency") or str(decode.count * decode.batch))
  maker = "dynamo" if "dynamo_version" in source else ""
  if source.get("source_file") == INFERENCE_MAX:
    maker = "inference_max"
  return Row(
    name=record["id"],
    model=record["model_path"],
    system=record["system"],
    backend=record["backend"],
    is_synchronous=record["backend"] == "vllm"
    and maker != "inference_max"
    and tuple(map(int, record["backend_version"].split(".")[:2])) < (0, 14),
    gemm=record["gemm_quant_mode"] or "bfloat16",
    isl=int(record["isl"]),
    osl=int(record["osl"]),
    users=users,
    workers=first,
    decode=decode,
    maker=maker,
    ttft_s=float(record["silicon_ttft_ms"]) / 1e3,
    tpot_s=float(record["silicon_tpot_ms"]) / 1e3,
  )


def _int(text: str) -> int:
  return int(float(text))


def choose(rows: Sequence[Row], seed: int = SEED) -> list[Row]:
  """So many aggregated rows by chance, and all disaggregated ones, of which there are few."""
  aggregated = sorted((row for row in rows if row.decode is None), key=lambda row: row.name)
  chosen = random.Random(seed).sample(aggregated, min(NUM_AGGREGATED, len(aggregated)))
  chosen += [row for row in rows if row.decode is not None]
  return sorted(chosen, key=lambda row: (row.group, row.name))


# Ours ---------------------------------------------------------------------------------------------


def lengths_of(row: Row) -> list[tuple[int, int]]:
  """(prompt, output) tokens of the requests of a run."""
  if row.maker != "inference_max":
    return [(row.isl, row.osl)] * (20 * row.users)
  draw = random.Random(row.name)
  return [
    (draw.randint(int(0.8 * row.isl), row.isl), draw.randint(int(0.8 * row.osl), row.osl))
    for _ in range(10 * row.users)
  ]


def closed_loop(
  cluster: Cluster, lengths: Iterable[tuple[int, int]], users: int, draw: random.Random
) -> EventLog:
  """Serves requests of these lengths for so many users, who all begin at once.

  Without a time from one request to the next that varies, users who once end in the same step would
  do so for ever.
  """
  requests = (
    Request(
      request_id=i,
      arrival_s=0.0,
      num_prompt_tokens=prompt_tokens,
      sampling=SamplingParams(max_tokens=output_tokens),
    )
    for i, (prompt_tokens, output_tokens) in enumerate(lengths)
  )
  log, inbox = EventLog(), Inbox(is_open=True)
  for _, request in zip(range(users), requests):
    inbox.submit(request)
  for turn in serve(cluster, inbox, VirtualClock(), log):
    for _ in (*turn.ended, *turn.failed):
      if (request := next(requests, None)) is None:
        inbox.close()
      else:
        later_s = draw.expovariate(1 / TURNAROUND_S)
        inbox.submit(dataclasses.replace(request, arrival_s=turn.now_s + later_s))
  return log


def simulate_row(
  row: Row, model: ModelConfig, latency: Callable[..., Silicon]
) -> tuple[float, float]:
  """Mean TTFT and TPOT in seconds.

  Raises:
    ValueError: nobody measured the operators, or the model does not fit.
  """
  budget = TOKEN_BUDGET
  if row.decode is None:
    workers = {"mixed": row.workers}
    pools = f"mixed:tp{row.workers.tp}:{POLICIES[row.backend]}"
  else:
    workers = {"prefill": row.workers, "decode": row.decode}
    pools = ",".join(f"{w.count}x{role}:tp{w.tp}" for role, w in workers.items())
  if row.maker == "dynamo":
    budget = row.isl + 1500 + (row.users if row.decode is None else 0)
  specs = parse_pools(pools)
  models = {
    role: latency(row.model, row.system, row.backend, row.gemm, own.tp, row.is_synchronous)
    for role, own in workers.items()
  }

  def pages_of(spec: PoolSpec) -> PageConfig:
    per_row = -(-(row.isl + row.osl) // PAGE_SIZE)
    fits = num_pages(
      model=model,
      device=models[spec.role].device,
      page_size=PAGE_SIZE,
      tp=spec.group.tp,
      step_tokens=budget,
      bytes_per_weight=BYTES_PER_WEIGHT[row.gemm],
    )
    num_rows = max(workers[spec.role].batch, row.users if spec.role == "prefill" else 0)
    return PageConfig(
      num_rows=num_rows,
      page_size=PAGE_SIZE,
      pages_per_row=per_row,
      num_pages=min(fits, num_rows * per_row),
    )

  options = SchedulerOptions(
    token_budget=max(budget, *(w.batch for w in workers.values())),
    prefill_budget=max(budget, row.isl + row.osl),  # the least that takes any prompt whole
    reservation="request" if row.backend == "trtllm" else None,
    watermark=0.0,
    steps_in_flight=1,
  )
  cluster = cluster_of(specs, options, model, lambda spec: models[spec.role], pages_of, LINK)
  log = closed_loop(cluster, lengths_of(row), row.users, random.Random(row.name))
  records = request_records(log).values()
  for record in records:
    if record.outcome != "finished":
      raise ValueError(record.failed_reason)
  ttft_s, tpot_s = ([getattr(r, name) for r in records] for name in ("ttft_s", "tpot_s"))
  return statistics.fmean(ttft_s), statistics.fmean(tpot_s)


# Theirs -------------------------------------------------------------------------------------------


def estimate_row(row: Row, version: str) -> tuple[float, float]:
  """The same by the package's own estimator, with its tables of a backend's version.

  Raises:
    Exception: whatever it raises, of its own or not.
  """
  from aiconfigurator.cli.api import cli_estimate

  own: dict[str, Any] = {"batch_size": row.workers.batch, "tp_size": row.workers.tp, "mode": "agg"}
  if row.decode is not None:
    own = {"mode": "disagg"}
    for role, workers in (("prefill", row.workers), ("decode", row.decode)):
      own |= {
        f"{role}_tp_size": workers.tp,
        f"{role}_batch_size": workers.batch,
        f"{role}_num_workers": workers.count,
      }
  found = cli_estimate(
    DENSE[row.model],
    row.system,
    backend_name=row.backend,
    backend_version=version,
    isl=row.isl,
    osl=row.osl,
    gemm_quant_mode=row.gemm,
    **own,
  )
  return found.ttft / 1e3, found.tpot / 1e3


# Side by side -------------------------------------------------------------------------------------


class Compared(NamedTuple):
  """Errors in percent of TTFT and TPOT, ours and theirs; None where there are none, and why not."""

  row: Row
  ours: tuple[float, float] | None
  theirs: tuple[float, float] | None
  why_not: str


def compare(rows: Iterable[Row], show: Show) -> Iterator[Compared]:
  configs = systems_folder().parent / "model_configs"

  @functools.cache
  def model_of(name: str) -> ModelConfig:
    return ModelConfig.from_hf(configs / f"{DENSE[name].replace('/', '--')}_config.json")

  @functools.cache
  def latency(
    name: str, system: str, backend: str, gemm: str, tp: int, is_synchronous: bool
  ) -> Silicon:
    return Silicon(
      model=model_of(name),
      system=system,
      backend=backend,
      gemm=gemm,
      tp=tp,
      host_s=HOST.host_s if is_synchronous else 0.0,
      host_row_s=HOST.host_row_s if is_synchronous else 0.0,
    )

  @functools.cache
  def newest(system: str, backend: str) -> str:
    from aiconfigurator_core.sdk.perf_database import get_latest_database_version

    return get_latest_database_version(system=system, backend=backend)

  def errors(row: Row, times: Callable[[], tuple[float, float]]) -> tuple[float, float] | str:
    try:
      ttft_s, tpot_s = times()
    except (ValueError, RuntimeError, KeyError) as error:
      return f"{error}".partition("\n")[0]
    return error_percent(ttft_s, row.ttft_s), error_percent(tpot_s, row.tpot_s)

  for row in rows:
    show(row.name)
    theirs = errors(row, lambda row=row: estimate_row(row, newest(row.system, row.backend)))
    if isinstance(theirs, str):
      yield Compared(row, None, None, f"estimated: {theirs}")
      continue
    ours = errors(row, lambda row=row: simulate_row(row, model_of(row.model), latency))
    if isinstance(ours, str):
      yield Compared(row, None, theirs, f"simulated: {ours}")
    else:
      yield Compared(row, ours, theirs, "")


def table(compared: Sequence[Compared]) -> list[tuple[str, ...]]:
  """A header, then medians of absolute errors: a row for each group, then all."""
  groups: dict[str, list[Compared]] = {}
  for one in compared:
    groups.setdefault(one.row.group, []).append(one)
  columns = [f"{metric} {who}" for metric in METRICS for who in ("simulated", "estimated")]
  rows = [("", "rows", *columns)]
  for name, own in [*groups.items(), ("all", compared)]:
    cells = [f"{median:.0f} / {p95:.0f}" for pair in sizes(own) for median, p95 in pair]
    rows.append((name, str(len(own)), *cells))
  return rows


def sizes(compared: Sequence[Compared]) -> list[list[tuple[float, float]]]:
  """Median and p95 of absolute errors [TTFT, TPOT][ours, theirs]."""
  return [
    [
      tuple(np.percentile([abs(errors[i]) for errors in who], (50, 95)).tolist())
      for who in ([one.ours for one in compared], [one.theirs for one in compared])
    ]
    for i in range(len(METRICS))
  ]


def part(data_dir: pathlib.Path, show: Show) -> Section:
  """Of the suite."""
  title = "End to end: dense models in aiconfigurator's rows, beside its own estimates"
  if importlib.util.find_spec("aiconfigurator") is None:
    return Section(title=title, missing="it needs `pip install aiconfigurator==0.12.0`")
  folder = data_dir / "measured" / "aiconfigurator"
  if not (folder / ROWS).is_file():
    return Section(title=title, missing=f"there is no {ROWS} in measured/aiconfigurator")
  for name in ("aiconfigurator", "aiconfigurator_core"):
    logging.getLogger(name).setLevel(logging.ERROR)  # it tells of every table it reads
  rows = read_rows(folder)
  every = list(compare(choose(rows), show))
  both = [one for one in every if one.ours is not None and one.theirs is not None]
  found = sizes(both)
  reached = [
    Reached(
      f"aiconfigurator's measured rows: median error of {metric} (how engines are set was settled "
      f"with 79 of {len(rows):,} rows in view)",
      f"below its own {theirs[0]:.1f} %",
      f"{ours[0]:.1f} %",
      ours[0] < theirs[0],
    )
    for metric, (ours, theirs) in zip(METRICS, found)
  ]
  closer = [sum(abs(one.ours[i]) < abs(one.theirs[i]) for one in both) for i in range(len(METRICS))]
  left_out = collections.Counter(
    one.why_not.partition(". ")[0].partition(" (")[0] for one in every if one not in both
  )
  num_disaggregated = sum(row.decode is not None for row in rows)
  text = f"""
Rows are mean TTFT and TPOT of users in a closed loop. Of {len(rows)} of dense models
{NUM_AGGREGATED} aggregated ones by chance (seed {SEED}) and all {num_disaggregated} disaggregated
ones. Simulated: that loop through the scheduler, step times from the package's operator tables.
Estimated: the package's `cli_estimate`, from the same tables. No number was fitted on rows; which
published settings of engines to assume was settled with 79 rows in view. Absolute errors in
percent, median / p95:

{markdown_table(table(both))}

The simulation is nearer in {closer[0]} (TTFT) and {closer[1]} (TPOT) of {len(both)} rows.
"""
  if left_out:
    lines = [f"- {count} rows: {why_not}" for why_not, count in sorted(left_out.items())]
    text += "\nLeft out, as one of the two has no answer:\n\n" + "\n".join(lines)
  return Section(title=title, reached=reached, text=text)
