"""From measured times to a `Fit`: least squares of the log error. Changes nothing."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares

from pdjax.core.costs import OpRates, StepCounts, cost_rates, shard_of
from pdjax.core.model_config import ModelConfig
from pdjax.sim.hardware import MAX_CACHED, Curve, Device, Fit, Link, on_lines


class Prior(NamedTuple):
  """What a parameter is likely to be before anything is measured: typical, give or take a factor.

  A fit that the data decide does not notice it. One step has many constants and their sum is all
  that a few whole steps show: there it says how they share.
  """

  typical: float
  factor: float
  lowest: float
  highest: float


PRIORS = {
  "gemm_compute": Prior(0.6, 3.0, 0.01, 1.0),
  "gemm_memory": Prior(0.8, 2.0, 0.01, 1.0),
  "gemm_launch_s": Prior(4e-6, 4.0, 1e-7, 1e-2),
  "gemm_p": Prior(1.6, 1.5, 1.0, 8.0),
  "gemm_throttle": Prior(0.05, 4.0, 1e-4, 1.0),
  "elementwise_memory": Prior(0.5, 4.0, 0.01, MAX_CACHED),
  "elementwise_launch_s": Prior(2e-6, 4.0, 1e-7, 1e-2),
  "prefill_compute": Prior(0.5, 3.0, 0.01, 1.0),
  "prefill_memory": Prior(0.4, 2.0, 0.01, 1.0),
  "prefill_launch_s": Prior(1e-5, 4.0, 1e-7, 1e-2),
  "prefill_p": Prior(1.2, 1.5, 1.0, 8.0),
  "prefill_fill_rows": Prior(7000.0, 3.0, 1.0, 1e6),
  "decode_memory": Prior(0.7, 2.0, 0.01, 1.0),
  "decode_launch_s": Prior(1e-5, 4.0, 1e-7, 1e-2),
  "decode_pad_tokens": Prior(30.0, 4.0, 0.1, 2000.0),
  "mixed_rows": Prior(32.0, 3.0, 1.0, 1000.0),
  "mixed_idle_s": Prior(5e-11, 5.0, 1e-14, 1e-6),
  "all_reduce_share": Prior(0.5, 2.0, 0.01, 1.0),
  "all_reduce_launch_s": Prior(1e-5, 4.0, 1e-7, 1e-2),
  "all_reduce_hop_s": Prior(1e-6, 4.0, 1e-9, 1e-2),
  "all_reduce_growth": Prior(1.0, 2.0, 0.25, 8.0),
  "host_s": Prior(2e-3, 5.0, 1e-6, 1.0),
  "host_row_s": Prior(2e-5, 5.0, 1e-9, 1e-1),
}
"""Priors and bounds of all parameters: round figures of the fits in `configs/hardware.py`."""

_APART = 2  # so many times lie sizes of a curve of all-reduces from each other, at least
_LEAST_S = 1e-9  # that one of these takes more than the one before
_NOISE = 0.05  # relative error of a good timing: what a prior is weighed against
_KINDS = {  # which parameters an operator of a kind has
  "linear": ("gemm_compute", "gemm_memory", "gemm_launch_s", "gemm_p", "gemm_throttle"),
  "elementwise": ("elementwise_memory", "elementwise_launch_s"),
  "attention_prefill": (
    "prefill_compute",
    "prefill_memory",
    "prefill_launch_s",
    "prefill_p",
    "prefill_fill_rows",
  ),
  "attention_decode": ("decode_memory", "decode_launch_s", "decode_pad_tokens"),
  "attention_mixed": ("mixed_rows", "mixed_idle_s"),
  "all_reduce": (
    "all_reduce_share",
    "all_reduce_launch_s",
    "all_reduce_hop_s",
    "all_reduce_growth",
  ),
  "host": ("host_s", "host_row_s"),
}


class Timing(NamedTuple):
  """Seconds that some operators of one step of a model took on each of `tp` devices.

  `ops` are names of `step_costs`, `all_reduce` (all of the step), `host`, and `attention_mixed`,
  one kernel for prefill and decode.
  """

  model: ModelConfig
  tp: int
  counts: StepCounts
  ops: tuple[str, ...]
  seconds: float


class Errors(NamedTuple):
  """Absolute relative errors of predictions, in percent, and which way they lean."""

  num_points: int
  median: float
  p95: float
  bias: float  # median of the signed errors

  @classmethod
  def of(cls, predicted_s: Sequence[float], measured_s: Sequence[float]) -> Errors:
    signed = 100 * (np.asarray(predicted_s) / np.asarray(measured_s) - 1)
    size = np.abs(signed)
    return cls(len(signed), *map(float, (np.median(size), np.percentile(size, 95))),
               float(np.median(signed)))  # fmt: skip

  def __str__(self) -> str:
    return f"{self.median:.1f} / {self.p95:.1f} %"


class Fitted(NamedTuple):
  fit: Fit
  errors: Errors  # on what it was fitted on


class _Column(NamedTuple):
  """All operators of one kind in a list of timings, as what the formulas of `Fit` take."""

  timing: np.ndarray  # index of the timing that each belongs to
  args: tuple[np.ndarray, ...]


def fit(
  timings: Sequence[Timing], device: Device, *, link: Link | None = None, start: Fit | None = None
) -> Fitted:
  """The parameters that bring `device` nearest to the timings.

  Those of operators that no timing has are `start`'s, the device's own without one. The size of a
  timing's error is that of its logarithm, large ones count by their size and not its square. The
  more timings an octave of an operator's sizes has, the less each of them counts.

  Raises:
    ValueError: no timing, or an all-reduce without a link.
  """
  if not timings:
    raise ValueError("no timings to fit")
  start = start or device.fit or Fit()
  columns = _columns(timings, device, link)
  if "all_reduce" in columns:  # what was measured alone would hide its parameters
    start = dataclasses.replace(start, all_reduces=())
  free = [name for kind in columns for name in _KINDS[kind]]
  measured_s = np.array([timing.seconds for timing in timings])
  weights = _weights(timings)
  priors = [PRIORS[name] for name in free]

  def made(logs: np.ndarray) -> Fit:
    return dataclasses.replace(start, **dict(zip(free, map(float, np.exp(logs)))))

  def residuals(logs: np.ndarray) -> np.ndarray:
    data = weights * np.log(_predict(made(logs), columns, len(timings)) / measured_s) / _NOISE
    prior = [(x - math.log(p.typical)) / math.log(p.factor) for x, p in zip(logs, priors)]
    return np.concatenate([data, prior])

  found = least_squares(
    residuals,
    [math.log(p.typical) for p in priors],
    bounds=([math.log(p.lowest) for p in priors], [math.log(p.highest) for p in priors]),
    loss="soft_l1",
  )
  fitted = made(found.x)
  return Fitted(fitted, Errors.of(_predict(fitted, columns, len(timings)), measured_s))


def all_reduce_curves(timings: Sequence[Timing], device: Device) -> tuple[tuple[int, Curve], ...]:
  """`Fit.all_reduces` of all-reduces that were timed alone.

  Of sizes that were timed those stay that lie `_APART` times from each other, with the seconds that
  bring the lines between them nearest to all timings and never fall; errors and weights are as in
  `fit`.
  """
  alone: dict[int, list[Timing]] = {}
  for timing in timings:
    if timing.ops == ("all_reduce",):
      alone.setdefault(timing.tp, []).append(timing)
  curves = ((tp, _curve(own, device)) for tp, own in sorted(alone.items()))
  return tuple((tp, curve) for tp, curve in curves if len(curve) > 1)


def _curve(timings: Sequence[Timing], device: Device) -> Curve:
  num_bytes = np.array([_message_bytes(t.counts, t.model, device) for t in timings])
  measured_s = np.array([t.seconds / (2 * t.model.num_layers) for t in timings])
  order = np.argsort(num_bytes)
  sizes = [num_bytes.min()]
  for size in num_bytes[order]:
    if size >= _APART * sizes[-1]:
      sizes.append(size)
  sizes[max(1, len(sizes) - 1) :] = [num_bytes.max()]  # lines go on beyond the last two
  if sizes[0] == sizes[-1]:
    return ()
  sizes, weights = np.array(sizes), _weights(timings)

  def curve_s(logs: np.ndarray) -> np.ndarray:  # of the first and of what each next one adds
    return np.cumsum(np.exp(logs))

  def residuals(logs: np.ndarray) -> np.ndarray:
    predicted_s = on_lines(sizes, curve_s(logs), num_bytes)
    return weights * np.log(predicted_s / measured_s) / _NOISE

  start_s = np.maximum.accumulate(np.interp(sizes, num_bytes[order], measured_s[order]))
  added_s = np.maximum(np.diff(start_s, prepend=0.0), 2 * _LEAST_S)
  found = least_squares(
    residuals, np.log(added_s), bounds=(math.log(_LEAST_S), math.inf), loss="soft_l1"
  )
  return tuple(zip(map(int, sizes), curve_s(found.x).tolist()))


def fit_steps(
  points: Iterable[tuple[StepCounts, float]],
  model: ModelConfig,
  device: Device,
  *,
  tp: int = 1,
  link: Link | None = None,
  hides_host: bool = False,
) -> Fitted:
  """The same form from whole steps as they ran: some 45 are enough. See `whole_step`.

  Raises:
    ValueError: no point, or several devices without a link.
  """
  steps = [whole_step(model, tp, *point, hides_host=hides_host) for point in points]
  return fit(steps, device, link=link)


def whole_step(
  model: ModelConfig, tp: int, counts: StepCounts, seconds: float, *, hides_host: bool = False
) -> Timing:
  """A step as it ran, from planning to results.

  `hides_host`: without the host's time, which the step before it covered. Nothing but a prior
  would tell it from what the weights take to read: both are the same in every step.
  """
  active = {
    "attention_prefill": counts.num_prefill_tokens,
    "attention_decode": counts.num_decodes,
    "lm_head": counts.num_emitted,
  }
  ops = [name for name in cost_rates(model) if active.get(name, counts.num_tokens)]
  if tp > 1:
    ops.append("all_reduce")
  if not hides_host:
    ops.append("host")
  return Timing(model, tp, counts, tuple(ops), seconds)


def predict(
  fitted: Fit, timings: Sequence[Timing], device: Device, link: Link | None = None
) -> np.ndarray:
  """What the operators of each timing take by a fit. [len(timings)]"""
  return _predict(fitted, _columns(timings, device, link), len(timings))


def _predict(fitted: Fit, columns: dict[str, _Column], num_timings: int) -> np.ndarray:
  formulas = {
    "linear": fitted.gemm_s,
    "elementwise": fitted.elementwise_s,
    "attention_prefill": fitted.prefill_s,
    "attention_decode": fitted.decode_s,
    "attention_mixed": fitted.mixed_s,
    "all_reduce": fitted.all_reduce_s,
    "host": lambda rows: fitted.host_s + rows * fitted.host_row_s,
  }
  total_s = np.zeros(num_timings)
  for kind, column in columns.items():
    total_s += np.bincount(column.timing, formulas[kind](*column.args), num_timings)
  return total_s


def _columns(timings: Sequence[Timing], device: Device, link: Link | None) -> dict[str, _Column]:
  @functools.cache
  def rates_of(model: ModelConfig, tp: int) -> dict[str, OpRates]:
    width = device.bytes_per_value
    return cost_rates(
      shard_of(model, tp),
      bytes_per_weight=width,
      bytes_per_kv=width,
      bytes_per_activation=width,
    )

  rows: dict[str, list[tuple[float, ...]]] = {}
  for i, (model, tp, counts, ops, _) in enumerate(timings):
    for name in ops:
      if name == "host":
        rows.setdefault(name, []).append((i, counts.num_decodes + counts.num_prefills))
        continue
      if name == "all_reduce":
        if link is None:
          raise ValueError(f"an all-reduce over {tp} devices needs a link between them")
        launches, num_bytes = 2 * model.num_layers, _message_bytes(counts, model, device)
        rows.setdefault(name, []).append((i, launches, num_bytes, tp, link.bytes_per_s))
        continue
      if name == "attention_mixed":
        args = _mixed_args(counts, shard_of(model, tp), rates_of(model, tp), device)
        rows.setdefault(name, []).append((i, model.num_layers, *args))
        continue
      op = rates_of(model, tp)[name]
      compute_s = _dot(op.flops, counts) / device.peak_flops_per_s
      memory_s = (op.fixed_bytes + _dot(op.num_bytes, counts)) / device.peak_bytes_per_s
      num_rows = counts.num_prefill_tokens * model.num_heads // tp
      args = {
        "elementwise": (memory_s,),
        "attention_prefill": (compute_s, memory_s, num_rows),
        "attention_decode": (
          memory_s,
          counts.num_decodes * op.num_bytes.num_decode_keys / device.peak_bytes_per_s,
        ),
      }.get(op.kind, (compute_s, memory_s))
      rows.setdefault(op.kind, []).append((i, op.num_launches, *args))
  columns = {}
  for kind in [kind for kind in _KINDS if kind in rows]:
    timing, *args = np.array(rows[kind]).T
    columns[kind] = _Column(timing.astype(int), tuple(args))
  return columns


def _message_bytes(counts: StepCounts, model: ModelConfig, device: Device) -> float:
  return counts.num_tokens * model.d_model * device.bytes_per_value


def _mixed_args(
  counts: StepCounts, shard: ModelConfig, rates: dict[str, OpRates], device: Device
) -> tuple[float, ...]:
  """What `Fit.mixed_s` takes, but for the launches."""
  prefill, decode = rates["attention_prefill"], rates["attention_decode"]
  pair_s = prefill.flops.num_prefill_pairs / device.peak_flops_per_s
  num_bytes = _dot(prefill.num_bytes, counts) + _dot(decode.num_bytes, counts)
  heads, tokens, decodes = shard.num_heads, counts.num_prefill_tokens, counts.num_decodes
  prefills = max(1, counts.num_prefills)
  longest = max((counts.num_prefill_keys - tokens / 2) / prefills, counts.num_decode_keys / decodes)
  return (
    counts.num_prefill_pairs * pair_s,
    counts.num_decode_keys * pair_s,
    num_bytes / device.peak_bytes_per_s,
    heads * tokens,
    heads * decodes,
    longest * pair_s / heads,
    shard.num_layers * heads * decodes * tokens / prefills,
  )


def _dot(rates: StepCounts, counts: StepCounts) -> float:
  return sum(a * b for a, b in zip(rates, counts))


def _weights(timings: Sequence[Timing]) -> np.ndarray:
  """So that squares of small errors in each octave of sizes sum alike; their mean square is 1."""

  def octave(timing: Timing) -> tuple:
    counts = timing.counts
    size = max(counts.num_tokens, counts.num_prefill_pairs, counts.num_decode_keys)
    return timing.ops, int(size).bit_length()

  groups = [octave(timing) for timing in timings]
  sizes = Counter(groups)
  return np.array([math.sqrt(len(timings) / len(sizes) / sizes[group]) for group in groups])
