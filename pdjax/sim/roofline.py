"""How long a step takes: a smooth roofline of each operator. Changes nothing."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from pdjax.core.costs import StepCounts, count_plan, shard_of, step_costs
from pdjax.core.device_group import split_layers
from pdjax.core.model_config import ModelConfig
from pdjax.core.plan import StepPlan
from pdjax.sim.hardware import Device, Fit, Link

_IDEAL = Fit()


class StepTerms(NamedTuple):
  """Where the time of a step goes. A tuple, as a simulator makes one per step."""

  linear_s: float = 0.0
  elementwise_s: float = 0.0
  attention_prefill_s: float = 0.0
  attention_decode_s: float = 0.0
  all_reduce_s: float = 0.0
  host_s: float = 0.0

  @property
  def total_s(self) -> float:
    return sum(self)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
  """Step times of one model on one device, or split over `tp` of them, without side effects.

  `fused`: a mixed step sends chunk and decodes through the weights together, as `mixed_step` of
  the engine does. Not fused, it runs two forwards one after the other and reads the weights twice;
  the host still plans it once. Attention of prefill and of decode are separate kernels either way,
  so their times add.

  Over `tp` devices each does its share of an operator at the speed of its fit, and a layer has two
  all-reduces of the hidden states over `link`. Nobody measured those: with `tp` above 1 step times
  are uncalibrated. Those of the embedding and of the logits, once a step, are left out.

  Raises:
    ValueError: a model that `tp` cannot split, or no link between several devices.
  """

  model: ModelConfig
  device: Device
  tp: int = 1
  link: Link | None = None
  fused: bool = True
  bytes_per_weight: float = 2
  bytes_per_kv: float = 2
  bytes_per_activation: float = 2
  _shard: ModelConfig = dataclasses.field(init=False, repr=False)

  def __post_init__(self):
    if self.tp < 1 or (self.tp > 1 and self.link is None):
      raise ValueError(f"tp={self.tp} must be 1, or more with a link between the devices")
    object.__setattr__(self, "_shard", shard_of(self.model, self.tp))

  def step_s(self, plan: StepPlan) -> float:
    return self.terms(plan).total_s

  def terms(self, plan: StepPlan) -> StepTerms:
    return self.terms_of(count_plan(plan))

  def terms_of(self, counts: StepCounts) -> StepTerms:
    """The terms of a step known only by its counts."""
    host_s = (self.device.fit or _IDEAL).host_s
    if self.fused or not (counts.num_prefill_tokens and counts.num_decodes):
      return self._forward(counts)._replace(host_s=host_s)
    halves = [self._forward(half) for half in counts.split()]
    return StepTerms(*map(sum, zip(*halves)))._replace(host_s=host_s)

  def _forward(self, counts: StepCounts) -> StepTerms:
    fit, flops_per_s = self.device.fit or _IDEAL, self.device.peak_flops_per_s
    bytes_per_s = self.device.peak_bytes_per_s
    linear_s = elementwise_s = prefill_s = decode_s = 0.0
    ops = step_costs(
      counts,
      self._shard,
      bytes_per_weight=self.bytes_per_weight,
      bytes_per_kv=self.bytes_per_kv,
      bytes_per_activation=self.bytes_per_activation,
    )
    # An operator's layers are alike, so the norm of their sums is the sum of their norms.
    for op in ops:
      if op.kind == "linear":
        linear_s += op.num_launches * fit.gemm_launch_s + _norm(
          op.flops / (fit.gemm_compute * flops_per_s),
          op.num_bytes / (fit.gemm_memory * bytes_per_s),
          fit.gemm_p,
        )
      elif op.kind == "elementwise":
        elementwise_s += op.num_launches * fit.elementwise_launch_s + op.num_bytes / (
          fit.elementwise_memory * bytes_per_s
        )
      elif op.kind == "attention_prefill":
        prefill_s += op.num_launches * fit.prefill_launch_s + _norm(
          op.flops / (fit.prefill_compute * flops_per_s),
          op.num_bytes / (fit.prefill_memory * bytes_per_s),
          fit.prefill_p,
        )
      else:
        num_pads = counts.num_decodes * fit.decode_pad_tokens
        pad_bytes = num_pads * self._shard.kv_bytes_per_token(1) * self.bytes_per_kv
        decode_s += op.num_launches * fit.decode_launch_s + (op.num_bytes + pad_bytes) / (
          fit.decode_memory * bytes_per_s
        )
    return StepTerms(linear_s, elementwise_s, prefill_s, decode_s, self._all_reduces_s(counts))

  def _all_reduces_s(self, counts: StepCounts) -> float:
    """After attention and after the MLP of each layer.

    2 (tp - 1) / tp of the bytes cross each link: the least that any all-reduce must send, and what
    a ring does (Patarasuk and Yuan 2009). The latency counts once, not once a hop of a ring: inside
    a node small all-reduces are done in one hop.
    """
    if self.tp == 1:
      return 0.0
    num_bytes = counts.num_tokens * self.model.d_model * self.bytes_per_activation
    return 2 * self.model.num_layers * self.link.copy_s(2 * (self.tp - 1) / self.tp * num_bytes)

  def hand_over_s(self, num_tokens: int) -> float:
    """Of a pipeline: hidden states over `link` to the next stage, each device's to its counterpart.

    Raises:
      ValueError: no link.
    """
    if self.link is None:
      raise ValueError("pipeline stages need a link between the devices")
    return self.link.copy_s(num_tokens * self.model.d_model * self.bytes_per_activation)


def _norm(a: float, b: float, p: float) -> float:
  high, low = (a, b) if a > b else (b, a)
  if p == math.inf or not high:
    return high
  return high * (1 + (low / high) ** p) ** (1 / p)


def num_pages(
  *,
  model: ModelConfig,
  device: Device,
  page_size: int,
  tp: int = 1,
  pp: int = 1,
  memory_share: float = 0.9,
  reserve_bytes: float = 0,
  bytes_per_weight: float = 2,
  bytes_per_kv: int = 2,
) -> int:
  """Pages of KV cache that fit beside the weights in `memory_share` of the device's memory.

  Over `tp` devices each holds its share of weights and cache, in `pp` pipeline stages those of its
  layers: the longest stage decides, which has one of the embedding and the output matrix, as the
  first and the last have. `reserve_bytes` is what activations and the runtime need besides.

  Raises:
    ValueError: not one page fits, or `tp` or `pp` cannot split the model.
  """
  usable_bytes = device.memory_bytes * memory_share
  shard = shard_of(model, tp)
  if pp > 1:
    num_layers = max(last - first for first, last in split_layers(model.num_layers, pp))
    shard = dataclasses.replace(shard, num_layers=num_layers, tie_embeddings=True)
  weight_bytes = shard.num_params * bytes_per_weight
  page_bytes = page_size * shard.kv_bytes_per_token(bytes_per_kv)
  pages = int((usable_bytes - weight_bytes - reserve_bytes) // page_bytes)
  if pages < 1:
    where = device.name if tp * pp == 1 else f"one of {tp * pp} x {device.name}"
    raise ValueError(
      f"{model.name} does not fit on {where}: weights {weight_bytes / 1e9:.1f} GB + reserve "
      f"{reserve_bytes / 1e9:.1f} GB + one page {page_bytes / 1e9:.3f} GB, but only "
      f"{usable_bytes / 1e9:.1f} GB usable ({memory_share} of {device.memory_bytes / 1e9:.1f} GB)"
    )
  return pages
