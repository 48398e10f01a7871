"""One point of a search: an experiment of one strategy at one rate, simulated. Picklable."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from configs.hardware import HARDWARE, link
from configs.latency import LATENCY
from configs.models import MODELS
from experiments.program import ROOT
from experiments.serving import Experiment, log_of, unserved
from experiments.worlds import INSTANT, pools_of
from pdjax.analysis.targets import Outcome, outcome_of
from pdjax.config import ExperimentConfig
from pdjax.core.names import pick
from pdjax.core.plain import to_plain
from pdjax.metrics.latency import RequestRecord, request_records
from pdjax.scheduling.planner import PLANNERS
from pdjax.scheduling.policies import POLICIES
from pdjax.scheduling.routing import ROUTERS
from pdjax.workloads.traces import read_trace

# The code that an outcome depends on.
_CODE = (
  *(f"pdjax/{part}" for part in ("core", "metrics", "scheduling", "serving", "sim", "workloads")),
  *("pdjax/config.py", "pdjax/deployment.py", "pdjax/analysis/targets.py"),
  *("configs/latency.py", "configs/linear.py"),
  *("experiments/serving.py", "experiments/traffic.py", "experiments/worlds.py"),
  "experiments/searching/probe.py",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
  """A simulated experiment with one strategy, SLOs and a number of requests; `rate_rps` is its own.

  A trace with arrivals is sped up to the rate. With the same seed all rates have the same requests,
  and gaps that differ by a factor; a probe of fewer requests has the first of them.

  `half` is what counts where pools of the other role are `INSTANT`: of `prefill`, first tokens
  alone, so requests end there; of `decode`, all the time since a request arrived, as its prompt
  took none.

  Raises:
    ValueError: what a probe cannot do without is missing.
  """

  config: ExperimentConfig
  rate_rps: float
  half: str | None = None

  def __post_init__(self):
    slo, workload = self.config.slo, self.config.workload
    if self.config.backend != "sim" or len(self.config.strategy_names) != 1:
      raise ValueError("a probe simulates one strategy")
    if slo.ttft_s is None or slo.tpot_s is None or workload.num_requests is None:
      raise ValueError("a probe needs slo.ttft_s, slo.tpot_s and workload.num_requests")
    if self.half not in (None, "prefill", "decode"):
      raise ValueError(f"half={self.half!r} must be prefill or decode")

  @property
  def strategy(self) -> str:
    return self.config.strategy_names[0]

  @property
  def label(self) -> str:
    half = f", {self.half} alone" if self.half else ""
    return f"{self.strategy}{half} at {self.rate_rps:.4g}/s"

  @property
  def at_rate(self) -> ExperimentConfig:
    """The experiment with arrivals at the rate."""
    workload, speed = self.config.workload, None
    if workload.trace is not None:
      recorded_rps = _recorded_rps(workload.trace, workload.num_requests)
      speed = recorded_rps and self.rate_rps / recorded_rps
    changes = dict(rate_rps=self.rate_rps) if speed is None else dict(trace_speed=speed)
    return dataclasses.replace(self.config, workload=dataclasses.replace(workload, **changes))

  def key(self) -> str:
    """A digest of all that the outcome depends on: also what names stand for, and the code."""
    return key_of({"probe": to_plain(self), **meanings(self.config), "code": code_version()})


def meanings(config: ExperimentConfig) -> dict[str, Any]:
  """What the names in an experiment stand for, as plain data."""
  trace = config.workload.trace
  names = {spec.hardware or config.hardware for spec in pools_of(config)} - {INSTANT}
  return {
    "model": to_plain(pick(MODELS, config.model, "model")),
    "hardware": {name: to_plain(pick(HARDWARE, name, "hardware")) for name in sorted(names)},
    "links": [
      to_plain(link(name or config.link)) for name in (config.link, config.tp_link, config.pp_link)
    ],
    "trace": None if trace is None else _digest(trace),
    "code_of_names": _code_of_names(config),
  }


def _code_of_names(config: ExperimentConfig) -> list[str]:
  """Digests of files beyond `_CODE` that say what policies and such do: a config file, perhaps."""
  options, policies = config.scheduler, {spec.policy for spec in pools_of(config)}
  entries = [
    *(POLICIES[name].policy for name in policies | {options.policy} - {None}),
    ROUTERS[options.router],
    *([] if options.planner is None else [PLANNERS[options.planner]]),
    LATENCY[config.latency],
  ]
  entries = [entry.func if isinstance(entry, functools.partial) else entry for entry in entries]
  codes = [getattr(entry, "__code__", None) or entry.__call__.__code__ for entry in entries]
  files = {pathlib.Path(code.co_filename).absolute() for code in codes}
  known = [ROOT / name for name in _CODE]
  return sorted(
    _digest(file)
    for file in files
    if file.is_file() and not any(file.is_relative_to(path) for path in known)
  )


def key_of(parts: Mapping[str, Any]) -> str:
  return hashlib.sha256(json.dumps(parts, sort_keys=True, default=repr).encode()).hexdigest()


@functools.cache
def code_version() -> str:
  """A digest of the source of all code that takes part in a simulation, and of its tables."""
  digest = hashlib.sha256(_tables_version().encode())
  for name in _CODE:
    path = ROOT / name
    for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
      digest.update(file.read_bytes())
  return digest.hexdigest()


def _tables_version() -> str:
  """The version of the package with measured operators; none where it is not installed."""
  try:
    return importlib.metadata.version("aiconfigurator-core")
  except importlib.metadata.PackageNotFoundError:
    return "none"


def _digest(path: str) -> str:
  return hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()


def _recorded_rps(path: str, num_requests: int) -> float | None:
  """The mean rate of the first requests of a trace; None where it has no arrivals."""
  trace = read_trace(path).first(num_requests)
  if not trace.has_arrivals:
    return None
  over_s = trace.rows[-1].arrival_s - trace.rows[0].arrival_s
  return (len(trace.rows) - 1) / over_s if over_s else None


def simulate(probe: Probe) -> Outcome:
  """Serves the probe's requests in virtual time.

  Raises:
    ValueError: an experiment that cannot run.
  """
  experiment = unserved(probe.at_rate)
  if probe.half == "prefill":
    experiment.requests = [
      dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, max_tokens=1))
      for r in experiment.requests
    ]
  log = log_of(experiment)
  records: Mapping[int, RequestRecord] = request_records(log)
  if probe.half == "decode":
    records = {i: _since_arrival(record) for i, record in records.items()}
  world = experiment.world
  return dataclasses.replace(
    outcome_of(records, experiment.slo, probe.rate_rps),
    caveats=tuple(world.caveats),
    extrapolated=tuple(world.extrapolated({probe.strategy: log})),
  )


def _since_arrival(record: RequestRecord) -> RequestRecord:
  """As if its first token had come with the request."""
  return dataclasses.replace(record, token_s=(record.arrival_s, *record.token_s[1:]))


def unloaded(config: ExperimentConfig) -> Experiment:
  """The experiment before it serves: its SLOs, and the capacity that step times promise.

  Of a recording all requests count, of others one is drawn: what they are like is known without.

  Raises:
    ValueError: an experiment that cannot run.
  """
  workload = dataclasses.replace(config.workload, rate_rps=1.0)
  if workload.trace is None:
    workload = dataclasses.replace(workload, num_requests=1)
  return unserved(dataclasses.replace(config, workload=workload))
