"""What limits a step: intensity, time and utilisation of its operators. Changes nothing.

FLOPs and bytes are those of `core/costs.py`, times those of a latency model, both of one device's
share of the model.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Iterable
from typing import NamedTuple

from pdjax.core.costs import (
  KINDS,
  OpCost,
  StepCounts,
  count_slices,
  shard_of,
  step_costs,
  total_bytes,
  total_flops,
)
from pdjax.core.model_config import ModelConfig
from pdjax.sim.hardware import Device
from pdjax.sim.latency_model import LatencyModel, StepTerms


def step_of(
  *, chunk_tokens: int = 0, before: int = 0, rows: int = 0, context: int = 0
) -> StepCounts:
  """A step of one chunk, which ends its prompt, behind `before` cached tokens, and of `rows`
  decodes that read `context` tokens each, their own included. Either may be absent.

  Raises:
    ValueError: a negative number, an empty step, or decodes that read nothing.
  """
  for name, value in (("chunk_tokens", chunk_tokens), ("before", before), ("rows", rows)):
    if value < 0:
      raise ValueError(f"{name}={value} must be 0 or more")
  if not chunk_tokens and not rows:
    raise ValueError("a step needs a chunk or decodes")
  if rows and context < 1:
    raise ValueError(f"context={context} must be at least 1: a decode reads its own token")
  return count_slices(
    prefill_starts=(before,) if chunk_tokens else (),
    prefill_tokens=(chunk_tokens,) if chunk_tokens else (),
    decode_positions=(context - 1,) * rows,
    num_emitted=rows + bool(chunk_tokens),
  )


class OpProfile(NamedTuple):
  """An operator over all layers of one step, on one device."""

  name: str
  kind: str
  flops: int
  num_bytes: float
  time_s: float

  @property
  def flop_per_byte(self) -> float:
    return self.flops / self.num_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
  """One step on one device of a pool. `terms` are the latency model's."""

  counts: StepCounts
  ops: tuple[OpProfile, ...]
  terms: StepTerms
  device: Device

  @property
  def step_s(self) -> float:
    return self.terms.total_s

  @property
  def flops(self) -> int:
    return sum(op.flops for op in self.ops)

  @property
  def num_bytes(self) -> float:
    return sum(op.num_bytes for op in self.ops)

  @property
  def flop_per_byte(self) -> float:
    return self.flops / self.num_bytes

  @property
  def mfu(self) -> float:
    return self.flops / self.step_s / self.device.peak_flops_per_s

  @property
  def mbu(self) -> float:
    return self.num_bytes / self.step_s / self.device.peak_bytes_per_s


def profile_step(
  counts: StepCounts,
  latency: LatencyModel,
  model: ModelConfig,
  device: Device,
  *,
  tp: int = 1,
  bytes_per_kv: float | None = None,
) -> StepProfile:
  """The operators of a step of `model` over `tp` devices, whose times `latency` gives.

  `bytes_per_kv` is the width of K and V, None for the device's; `latency` has to know it too.

  It says what operators of a kind take together. Each has of that the share that it would have at
  the peaks.

  Raises:
    ValueError: a model that `tp` cannot split.
  """
  costs = _costs(counts, shard_of(model, tp), device.bytes_per_value, bytes_per_kv)
  terms = latency.terms_of(counts)
  peak_s = {
    op.name: max(op.flops / device.peak_flops_per_s, op.num_bytes / device.peak_bytes_per_s)
    for op in costs
  }
  shares = {kind: sum(peak_s[op.name] for op in costs if op.kind == kind) for kind in KINDS}
  ops = tuple(
    OpProfile(
      op.name,
      op.kind,
      op.flops,
      op.num_bytes,
      getattr(terms, f"{op.kind}_s") * peak_s[op.name] / shares[op.kind],
    )
    for op in costs
  )
  return StepProfile(counts=counts, ops=ops, terms=terms, device=device)


def _costs(
  counts: StepCounts,
  shard: ModelConfig,
  bytes_per_value: float,
  bytes_per_kv: float | None = None,
) -> tuple[OpCost, ...]:
  return step_costs(
    counts,
    shard,
    bytes_per_weight=bytes_per_value,
    bytes_per_kv=bytes_per_kv or bytes_per_value,
    bytes_per_activation=bytes_per_value,
  )


def flop_per_byte(
  counts: StepCounts,
  model: ModelConfig,
  *,
  kinds: Iterable[str] = KINDS,
  tp: int = 1,
  bytes_per_value: float = 2,
  bytes_per_kv: float | None = None,
) -> float:
  """Arithmetic intensity of the operators of some kinds in a step, all together.

  `bytes_per_kv` is the width of K and V, None for that of all else.

  Raises:
    ValueError: the step has none of them, or a model that `tp` cannot split.
  """
  kinds = set(kinds)
  costs = _costs(counts, shard_of(model, tp), bytes_per_value, bytes_per_kv)
  ops = [op for op in costs if op.kind in kinds]
  if not ops:
    raise ValueError(f"a step of {counts} has no operators of the kinds {sorted(kinds)}")
  return total_flops(ops) / total_bytes(ops)


def matrix_flop_per_byte(
  num_rows: float, width_in: int, width_out: int, *, bytes_per_value: float = 2
) -> float:
  """Arithmetic intensity of `num_rows` rows times one matrix, read and written once each."""
  num_values = width_in * width_out + num_rows * (width_in + width_out)
  return 2 * num_rows * width_in * width_out / (bytes_per_value * num_values)


class Ridge(NamedTuple):
  """Where arithmetic and memory traffic balance, in FLOP per byte: at the data sheet's peaks, and
  at the rates that matrices reach, of a long prompt (FLOP/s) and of a single decode (bytes/s).
  """

  peak: float
  achieved: float
  flops_per_s: float
  bytes_per_s: float


def ridge(
  latency: LatencyModel, model: ModelConfig, device: Device, *, tp: int = 1, long_tokens: int = 8192
) -> Ridge:
  """The ridge of a device, for this model.

  Raises:
    ValueError: a latency model that gives matrices no time.
  """
  rates = {}
  for name, counts in (
    ("flops", step_of(chunk_tokens=long_tokens)),
    ("num_bytes", step_of(rows=1, context=1)),
  ):
    profile = profile_step(counts, latency, model, device, tp=tp)
    linear = [op for op in profile.ops if op.kind == "linear"]
    if not profile.terms.linear_s > 0:
      raise ValueError(f"linear_s={profile.terms.linear_s} of {counts} must be positive")
    rates[name] = sum(getattr(op, name) for op in linear) / profile.terms.linear_s
  return Ridge(
    device.ridge_flop_per_byte, rates["flops"] / rates["num_bytes"], rates["flops"],
    rates["num_bytes"],
  )  # fmt: skip


def crossing(intensity: Callable[[int], float], limit: float, most: int) -> int | None:
  """The least n from 1 to `most` at which `intensity`, which rises with n, reaches `limit`."""
  n = 1 + bisect.bisect_left(range(1, most + 1), limit, key=intensity)
  return n if n <= most else None
