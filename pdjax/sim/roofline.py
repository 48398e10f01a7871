"""How long a step takes: a smooth roofline of each operator. Changes nothing."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, TypeVar

import numpy as np

from pdjax.core.costs import OpRates, StepCounts, cost_rates, shard_of
from pdjax.core.device_group import split_layers
from pdjax.core.model_config import ModelConfig
from pdjax.sim.hardware import Device, Fit, Link, crossing_bytes
from pdjax.sim.latency_model import LatencyModel, StepTerms, over_link_s

T = TypeVar("T")

_IDEAL = Fit()
_MOST_KNOWN = 1 << 16  # sizes of steps; prefill of whole prompts could give more


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Roofline(LatencyModel):
  """Step times of one model on one device, or split over `tp` of them, without side effects.

  `fused`: a mixed step sends chunk and decodes through the weights together, as `mixed_step` of
  the engine does. Not fused, it runs two forwards one after the other and reads the weights twice;
  the host still plans it once. Attention of prefill and of decode are separate kernels either way,
  so their times add, but for an engine that has `one_kernel` for both (vLLM with FlashAttention),
  which is slower than two where there are many decodes.

  Over `tp` devices each does its share of an operator at the speed of its fit, and a layer has two
  all-reduces of the hidden states over `link`. Those of the embedding and of the logits, once a
  step, are left out.

  Raises:
    ValueError: a model that `tp` cannot split, no link between several devices, or one kernel for
      both on a device where nobody measured it.
  """

  model: ModelConfig
  device: Device
  tp: int = 1
  link: Link | None = None
  fused: bool = True
  one_kernel: bool = False
  bytes_per_weight: float = 2
  bytes_per_kv: float = 2
  bytes_per_activation: float = 2
  _fit: Fit = dataclasses.field(init=False, repr=False)
  _ops: OpTimes = dataclasses.field(init=False, repr=False)
  # What a step takes beside attention, by its tokens and by its rows that emit: steps repeat these.
  _body_s: dict[int, tuple[float, float, float]] = dataclasses.field(
    init=False, repr=False, compare=False, default_factory=dict
  )
  _head_s: dict[int, float] = dataclasses.field(
    init=False, repr=False, compare=False, default_factory=dict
  )

  def __post_init__(self):
    if self.tp < 1 or (self.tp > 1 and self.link is None):
      raise ValueError(f"tp={self.tp} must be 1, or more with a link between the devices")
    if self.one_kernel and (self.device.fit is None or self.device.fit.mixed_rows is None):
      raise ValueError(f"one_kernel: nobody measured one for both kinds on {self.device.name}")
    ops = op_times(
      shard_of(self.model, self.tp),
      self.device,
      bytes_per_weight=self.bytes_per_weight,
      bytes_per_kv=self.bytes_per_kv,
      bytes_per_activation=self.bytes_per_activation,
    )
    object.__setattr__(self, "_ops", ops)
    fit = self.device.fit or _IDEAL
    # Over another link all-reduces are as much slower as its rate says.
    curves = fit.all_reduces if self.link == self.device.link else ()
    own = tuple((devices, curve) for devices, curve in curves if devices == self.tp)
    object.__setattr__(self, "_fit", dataclasses.replace(fit, all_reduces=own))

  @property
  def caveats(self) -> tuple[str, ...]:
    fit, name = self.device.fit, self.device.name
    if fit is None:
      return (f"step times of {name} are those of its data sheet: too fast by a third or more",)
    found = []
    if self.tp > 1 and fit.all_reduce_share is None:
      found.append(f"nobody measured all-reduces of {name}: they take what {self.link.name} says")
    elif self.tp > 1 and self.device.link not in (None, self.link):
      found.append(
        f"all-reduces of {name} were measured over {self.device.link.name}, not {self.link.name}"
      )
    elif self.tp > 1 and fit.all_reduces and not self._fit.all_reduces:
      found.append(
        f"nobody measured all-reduces over {self.tp} x {name}: they take what a fit says"
      )
    if not fit.host_s:
      found.append(f"nobody measured host time per step on {name}: it takes none")
    return tuple(found)

  def terms_of(self, counts: StepCounts) -> StepTerms:
    fit = self._fit
    num_prefills = counts.num_prefills or bool(counts.num_prefill_tokens)
    host_s = fit.host_s + fit.host_row_s * (counts.num_decodes + num_prefills)
    if self.fused or not (counts.num_prefill_tokens and counts.num_decodes):
      return StepTerms(*self._forward(counts), host_s)
    halves = [self._forward(half) for half in counts.split()]
    return StepTerms(*map(sum, zip(*halves)), host_s)

  def decode_steps_s(self, counts: StepCounts, num_steps: int) -> np.ndarray:
    if self.one_kernel and counts.num_prefill_tokens:
      return LatencyModel.decode_steps_s(self, counts, num_steps)
    # Of all terms only decode attention depends on the keys, and it is linear in them.
    fit, key_s = self._fit, self._ops.attention[3]
    more_s = fit.decode_s(0, counts.num_decodes * key_s, 0)
    return self.terms_of(counts).total_s + more_s * np.arange(num_steps)

  def _forward(self, counts: StepCounts) -> tuple[float, float, float, float, float]:
    fit, ops = self._fit, self._ops
    prefill_tokens, pairs, keys, decodes, decode_keys, emitted, prefills = counts
    tokens = prefill_tokens + decodes
    prefill_s = decode_s = 0.0
    body_s, head_s = self._body_s.get(tokens), self._head_s.get(emitted)
    if body_s is None:
      body_s = _kept(self._body_s, tokens, self._layers_without_attention(tokens))
    if head_s is None:
      head_s = _kept(self._head_s, emitted, self._lm_head_s(emitted))
    linear_s, elementwise_s, all_reduce_s = body_s
    linear_s += head_s
    if prefill_tokens:
      launches, compute_s, token_s, key_s, heads = ops.attention
      memory_s = prefill_tokens * token_s + keys * key_s
      prefill_s = fit.prefill_s(launches, pairs * compute_s, memory_s, heads * prefill_tokens)
    if decodes and prefill_tokens and self.one_kernel:
      one = max(1, prefills)
      longest = max((keys - prefill_tokens / 2) / one, decode_keys / decodes)
      both_s = fit.mixed_s(
        launches,
        pairs * compute_s,
        decode_keys * compute_s,
        memory_s + decodes * token_s + decode_keys * key_s,
        heads * prefill_tokens,
        heads * decodes,
        longest * compute_s / heads,
        launches * heads * decodes * prefill_tokens / one,
      )
      decode_s = max(0.0, both_s - prefill_s)
    elif decodes:
      launches, _, token_s, key_s, _ = ops.attention
      decode_s = fit.decode_s(launches, decodes * token_s + decode_keys * key_s, decodes * key_s)
    return linear_s, elementwise_s, prefill_s, decode_s, all_reduce_s

  def _layers_without_attention(self, num_tokens: int) -> tuple[float, float, float]:
    """Matrices, elementwise operators and all-reduces of all layers."""
    fit, ops = self._fit, self._ops
    linear_s = elementwise_s = 0.0
    # An operator's layers are alike, so the norm of their sums is the sum of their norms.
    if num_tokens:
      for launches, compute_s, memory_s, fixed_s in ops.linears:
        linear_s += fit.gemm_s(launches, num_tokens * compute_s, num_tokens * memory_s + fixed_s)
      launches, memory_s = ops.elementwise
      elementwise_s = fit.elementwise_s(launches, num_tokens * memory_s)
    return linear_s, elementwise_s, self._all_reduces_s(num_tokens)

  def _lm_head_s(self, num_emitted: int) -> float:
    if not num_emitted:
      return 0.0
    launches, compute_s, memory_s, fixed_s = self._ops.lm_head
    return self._fit.gemm_s(launches, num_emitted * compute_s, num_emitted * memory_s + fixed_s)

  def _all_reduces_s(self, num_tokens: int) -> float:
    """After attention and after the MLP of each layer."""
    if self.tp == 1 or not num_tokens:
      return 0.0
    launches, link = 2 * self.model.num_layers, self.link
    num_bytes = num_tokens * self.model.d_model * self.bytes_per_activation
    if self._fit.all_reduce_share is None:
      return launches * link.copy_s(crossing_bytes(num_bytes, self.tp))
    return float(self._fit.all_reduce_s(launches, num_bytes, self.tp, link.bytes_per_s))

  def hand_over_s(self, num_tokens: int) -> float:
    """Of a pipeline: hidden states over `link` to the next stage, each device's to its counterpart.

    Raises:
      ValueError: no link.
    """
    return over_link_s(self.link, num_tokens * self.model.d_model * self.bytes_per_activation)


def _kept(known: dict[int, T], size: int, value: T) -> T:
  if len(known) >= _MOST_KNOWN:
    known.clear()
  known[size] = value
  return value


class OpTimes(NamedTuple):
  """Seconds at a device's peaks of a model's operators over all layers; see `op_times`."""

  linears: tuple[tuple[int, float, float, float], ...]  # launches, per row twice, of the weights
  lm_head: tuple[int, float, float, float]
  elementwise: tuple[int, float]  # launches, per token
  attention: tuple[int, float, float, float, int]  # launches, per pair, token, key; heads


def op_times(
  shard: ModelConfig,
  device: Device,
  *,
  bytes_per_weight: float = 2,
  bytes_per_kv: float = 2,
  bytes_per_activation: float = 2,
) -> OpTimes:
  """What `step_costs` says of one device's share of a model, as seconds at the peaks.

  Linear operators: compute and memory for each row, then memory for the weights. Attention: compute
  for each pair of a query and a key, memory for each query and for each key.
  """
  rates = cost_rates(
    shard,
    bytes_per_weight=bytes_per_weight,
    bytes_per_kv=bytes_per_kv,
    bytes_per_activation=bytes_per_activation,
  )
  flops_s, bytes_s = 1 / device.peak_flops_per_s, 1 / device.peak_bytes_per_s

  def linear(op: OpRates, row: str) -> tuple[int, float, float, float]:
    row_s = getattr(op.flops, row) * flops_s, getattr(op.num_bytes, row) * bytes_s
    return op.num_launches, *row_s, op.fixed_bytes * bytes_s

  head, elementwise = rates["lm_head"], rates["elementwise"]
  attention = rates["attention_prefill"]
  body = [op for op in rates.values() if op.kind == "linear" and op is not head]
  return OpTimes(
    linears=tuple(linear(op, "num_prefill_tokens") for op in body),
    lm_head=linear(head, "num_emitted"),
    elementwise=(elementwise.num_launches, elementwise.num_bytes.num_prefill_tokens * bytes_s),
    attention=(
      attention.num_launches,
      attention.flops.num_prefill_pairs * flops_s,
      attention.num_bytes.num_prefill_tokens * bytes_s,
      attention.num_bytes.num_prefill_keys * bytes_s,
      shard.num_heads,
    ),
  )


def num_pages(
  *,
  model: ModelConfig,
  device: Device,
  page_size: int,
  tp: int = 1,
  pp: int = 1,
  step_tokens: int = 0,
  memory_share: float = 0.9,
  reserve_bytes: float = 0,
  bytes_per_weight: float = 2,
  bytes_per_kv: int = 2,
  bytes_per_activation: float = 2,
) -> int:
  """Pages of KV cache that fit beside weights and activations in a share of the device's memory.

  Over `tp` devices each holds its share of weights and cache, in `pp` pipeline stages those of its
  layers: the longest stage decides, which has one of the embedding and the output matrix, as the
  first and the last have. Activations are those of a step of `step_tokens` where it is widest: two
  of the MLP's and five hidden states. `reserve_bytes` is what the runtime needs besides.

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
  step_bytes = step_tokens * (2 * shard.d_ff + 5 * shard.d_model) * bytes_per_activation
  pages = int((usable_bytes - weight_bytes - step_bytes - reserve_bytes) // page_bytes)
  if pages < 1:
    where = device.name if tp * pp == 1 else f"one of {tp * pp} x {device.name}"
    raise ValueError(
      f"{model.name} does not fit on {where}: weights {weight_bytes / 1e9:.1f} GB + activations "
      f"{step_bytes / 1e9:.1f} GB + reserve {reserve_bytes / 1e9:.1f} GB + one page "
      f"{page_bytes / 1e9:.3f} GB, but only {usable_bytes / 1e9:.1f} GB usable ({memory_share} of "
      f"{device.memory_bytes / 1e9:.1f} GB)"
    )
  return pages
