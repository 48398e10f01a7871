"""From a workload's config to what will be asked: drawn, or read from a trace."""

from __future__ import annotations

import dataclasses
import pathlib

import numpy as np

from pdjax.config import WorkloadConfig
from pdjax.core.names import pick
from pdjax.workloads.arrivals import ARRIVALS
from pdjax.workloads.lengths import LengthFamily, Lengths, Sampled, Scaled, longest_of
from pdjax.workloads.traces import Trace, read_trace

_TRACE_OPTIONS = (("trace_limit_s", None), ("trace_speed", 1.0), ("trace_spread_s", None))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
  """What a workload will ask. `label` is printed: what it was drawn from, or which file it is."""

  lengths: LengthFamily | None  # to draw from; None: the rows of the trace, as they arrived
  trace: Trace | None
  label: str | None

  @property
  def longest(self) -> Lengths:
    if self.lengths is None:
      return longest_of([row.lengths for row in self.trace.rows])
    return self.lengths.longest

  def sample(self, seed: int) -> list[Lengths]:
    """Lengths that stand for the workload: many draws, not only those that will be served."""
    if self.lengths is None:
      return [row.lengths for row in self.trace.rows]
    return self.lengths.pairs(1000, np.random.default_rng(seed))


def read_traffic(workload: WorkloadConfig) -> Traffic:
  """Reads the trace, if there is one, and cuts and changes it as asked.

  Raises:
    ValueError: what is wrong with it, or an option that it has no use for.
  """
  scale = workload.length_scale
  if workload.trace is None:
    _check_drawn(workload, "needs --trace=FILE")
    lengths, label = workload.lengths, workload.label
    if scale != 1:
      lengths = Scaled(lengths=lengths, scale=scale)
      label = f"{label or type(workload.lengths).__name__}; lengths divided by {scale}"
    return Traffic(lengths=lengths, trace=None, label=label)
  trace = read_trace(workload.trace)
  try:
    trace = trace if scale == 1 else trace.scaled(scale)
    if trace.has_arrivals:
      lengths, trace = None, _replayed(trace, workload)
    else:
      _check_drawn(workload, "needs arrivals, but the file has lengths only")
      lengths = Sampled(recorded=tuple(row.lengths for row in trace.rows))
  except ValueError as error:
    raise ValueError(f"{workload.trace}: {error}") from error
  parts = [f"{pathlib.Path(workload.trace).name}, a trace ({trace.kind})", *trace.changes]
  if lengths is not None:
    parts.append("in random order, arrivals drawn")
  return Traffic(lengths=lengths, trace=trace, label="; ".join(parts))


def _replayed(trace: Trace, workload: WorkloadConfig) -> Trace:
  if workload.trace_limit_s is not None:
    trace = trace.until(workload.trace_limit_s)
  if workload.num_requests is not None:
    trace = trace.first(workload.num_requests)
  if workload.trace_spread_s is not None:
    trace = trace.spread(workload.trace_spread_s, np.random.default_rng(workload.seed))
  return trace if workload.trace_speed == 1 else trace.faster(workload.trace_speed)


def _check_drawn(workload: WorkloadConfig, why: str) -> None:
  """Refuses arrivals and options that only a recording of arrivals can have."""
  pick(ARRIVALS, workload.arrivals, "arrivals")
  if workload.arrivals == "trace":
    raise ValueError(f"workload.arrivals=trace {why}")
  for name, unset in _TRACE_OPTIONS:
    if getattr(workload, name) != unset:
      raise ValueError(f"workload.{name}={getattr(workload, name)} {why}")
