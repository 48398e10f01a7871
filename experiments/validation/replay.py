"""Requests through the simulator, beside what was measured of them. Imports no jax."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from experiments.validation.requests import Measured
from pdjax.config import PoolSpec, SchedulerOptions
from pdjax.core.clock import VirtualClock
from pdjax.core.device_group import DeviceGroup
from pdjax.core.events import EventLog
from pdjax.core.garbage import no_collection
from pdjax.core.model_config import ModelConfig
from pdjax.core.request import Request
from pdjax.deployment import make_cluster
from pdjax.metrics.latency import RequestRecord, Summary, percentiles, request_records
from pdjax.scheduling.hand_off import HandOff
from pdjax.scheduling.pages import PageConfig
from pdjax.scheduling.scheduler import StepTime
from pdjax.serving.cluster import Cluster
from pdjax.serving.inbox import Inbox
from pdjax.serving.loop import serve
from pdjax.sim.hardware import Link
from pdjax.sim.latency_model import LatencyModel
from pdjax.sim.sim_executor import SimExecutor

METRICS = ("ttft_s", "tpot_s", "e2e_s")
STATISTICS = ("mean", "p50", "p90", "p99")


def cluster_of(
  specs: Sequence[PoolSpec],
  options: SchedulerOptions,
  model: ModelConfig,
  latency: Callable[[PoolSpec], LatencyModel],
  pages: Callable[[PoolSpec], PageConfig],
  link: Link,
  hand_off: HandOff = HandOff(),
  make_executor: Callable[..., SimExecutor] = SimExecutor,
  bytes_per_value: float = 2,
) -> Cluster:
  """Simulated pools, empty.

  `latency` and `pages` give the latency model and the memory of a pool; `link` is the way of each
  device to its counterpart in another pool, `bytes_per_value` those of K and V that go over it.
  `make_executor` is called as `SimExecutor` is made.
  """
  of = {spec.group: spec for spec in specs}

  def executor(group: DeviceGroup) -> SimExecutor:
    own = latency(of[group])
    return make_executor(
      step_s=own.step_s,
      steps_s=own.steps_s,
      link=link,
      bytes_per_token=model.kv_bytes_per_token(bytes_per_value),
      num_links=min(group.tp, model.num_kv_heads),
      layer_groups=tuple((i, i + 1) for i in range(group.pp)),
      num_stages=group.pp,
      hand_over_s=own.hand_over_s,
    )

  def step_time(group: DeviceGroup) -> StepTime:
    own = latency(of[group])
    return lambda counts: own.terms_of(counts).total_s

  return make_cluster(specs, options, lambda group: pages(of[group]), executor, step_time, hand_off)


def simulate(
  requests: Iterable[Request], specs: Sequence[PoolSpec], options: SchedulerOptions, *args, **more
) -> EventLog:
  """The history of these requests in virtual time, through the loop that the engine runs.

  All but `requests` is as for `cluster_of`.
  """
  log, cluster = EventLog(), cluster_of(specs, options, *args, **more)
  turns = serve(
    cluster, Inbox(requests), VirtualClock(), log, steps_in_flight=options.steps_in_flight
  )
  with no_collection():
    collections.deque(turns, maxlen=0)
  return log


class Replay(NamedTuple):
  """What was measured of each request and its record in the simulation, in the same order."""

  measured: Sequence[Measured]
  records: Sequence[RequestRecord]

  @classmethod
  def of(cls, measured: Sequence[Measured], log: EventLog) -> Replay:
    """Of requests that were numbered in this order.

    Raises:
      ValueError: a request that did not end in the simulation, and why.
    """
    records = request_records(log)
    for number, row in enumerate(measured):
      record = records[number]
      if record.outcome != "finished":
        raise ValueError(
          f"request {number} ({row.prompt_tokens} prompt, {row.output_tokens} output tokens) "
          f"{record.outcome} in the simulation: {record.failed_reason}"
        )
    return cls(measured, [records[number] for number in range(len(measured))])

  def columns(self, metric: str) -> tuple[list[float], list[float]]:
    """Measured and simulated, of those requests that have it."""
    pairs = [(getattr(m, metric), getattr(r, metric)) for m, r in zip(*self)]
    pairs = [pair for pair in pairs if None not in pair]
    return [m for m, _ in pairs], [s for _, s in pairs]

  def summaries(self) -> dict[str, tuple[Summary, Summary]]:
    return {metric: tuple(map(percentiles, self.columns(metric))) for metric in METRICS}

  def mean_s(self, metric: str) -> float:
    """Simulated."""
    return self.summaries()[metric][1].mean

  def attainments(self, ttft_s: float, tpot_s: float) -> tuple[float, float]:
    """Percent of requests that met both, measured and simulated."""

    def share(rows: Iterable[Measured | RequestRecord]) -> float:
      met = [r.ttft_s <= ttft_s and (r.tpot_s is None or r.tpot_s <= tpot_s) for r in rows]
      return 100 * sum(met) / len(met)

    return share(self.measured), share(self.records)


def error_percent(simulated: float | None, measured: float | None) -> float | None:
  """None where there is nothing to compare with."""
  if simulated is None or not measured:
    return None
  return 100 * (simulated / measured - 1)


def error_rows(replay: Replay) -> list[tuple[str, ...]]:
  """A header, then a row for each metric: simulated, measured and the error of each statistic."""
  rows = [("", *STATISTICS)]
  for metric, (measured, simulated) in replay.summaries().items():
    cells = []
    for name in STATISTICS:
      ours, theirs = getattr(simulated, name), getattr(measured, name)
      error = error_percent(ours, theirs)
      if ours is None or theirs is None:
        cells.append("n/a")
      else:
        percent = "" if error is None else f" ({error:+.1f} %)"
        cells.append(f"{_time(ours)} / {_time(theirs)}{percent}")
    rows.append((metric.removesuffix("_s").upper(), *cells))
  return rows


def text_table(rows: Sequence[Sequence[str]]) -> str:
  widths = [max(map(len, column)) for column in zip(*rows)]
  return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
  header, *body = ["| " + " | ".join(row) + " |" for row in rows]
  return "\n".join([header, "| " + " | ".join("---" for _ in rows[0]) + " |", *body])


def _time(seconds: float) -> str:
  return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
