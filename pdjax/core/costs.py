"""FLOPs and bytes of each operator of a step: written once, used by roofline, timelines, MFU, MBU.

Bytes are what must cross the memory bus at least once: weights once per step, K and V once per
sequence, activations in and out of each operator. What a kernel moves beyond that shows up as an
efficiency below 1 in a fit, not here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pdjax.core.model_config import ModelConfig
from pdjax.core.plan import StepPlan

KINDS = ("linear", "elementwise", "attention_prefill", "attention_decode")


class StepCounts(NamedTuple):
  """All that the cost of a step depends on. A tuple, as a simulator makes one per step.

  `num_prefill_pairs`: (query, key) pairs under the causal mask. `num_prefill_keys` and
  `num_decode_keys`: cached tokens that the slices read, their own included. `num_emitted`: rows
  that go through the LM head, one per decode and per prefill slice that ends its prompt.
  `num_prefills`: slices of prompts; who estimates a step may leave it 0: some number of them.
  """

  num_prefill_tokens: int = 0
  num_prefill_pairs: int = 0
  num_prefill_keys: int = 0
  num_decodes: int = 0
  num_decode_keys: int = 0
  num_emitted: int = 0
  num_prefills: int = 0

  @property
  def num_tokens(self) -> int:
    return self.num_prefill_tokens + self.num_decodes

  def split(self) -> tuple[StepCounts, StepCounts]:
    """The prefill half and the decode half, as two steps."""
    num_decodes_emitted = min(self.num_decodes, self.num_emitted)
    prefill = self._replace(
      num_decodes=0, num_decode_keys=0, num_emitted=self.num_emitted - num_decodes_emitted
    )
    decode = StepCounts(
      num_decodes=self.num_decodes,
      num_decode_keys=self.num_decode_keys,
      num_emitted=num_decodes_emitted,
    )
    return prefill, decode


class OpCost(NamedTuple):
  """One operator over all layers of one step. `num_launches`: kernels started for it."""

  name: str
  kind: str  # one of KINDS
  flops: int
  read_bytes: float
  written_bytes: float
  num_launches: int

  @property
  def num_bytes(self) -> float:
    return self.read_bytes + self.written_bytes


def count_slices(
  *,
  prefill_starts: Sequence[int] = (),
  prefill_tokens: Sequence[int] = (),
  decode_positions: Sequence[int] = (),
  num_emitted: int,
) -> StepCounts:
  """Counts from the columns of a plan or of a `Step` event."""
  num_tokens = num_pairs = num_keys = 0  # a loop: most steps have few prefills, or none
  for start, n in zip(prefill_starts, prefill_tokens):
    num_tokens += n
    num_pairs += start * n + n * (n + 1) // 2
    num_keys += start + n
  num_decodes = len(decode_positions)
  return StepCounts(
    num_tokens,
    num_pairs,
    num_keys,
    num_decodes,
    sum(decode_positions) + num_decodes,
    num_emitted,
    len(prefill_tokens),
  )


def count_plan(plan: StepPlan) -> StepCounts:
  prefills, positions = plan.prefills, plan.decodes.positions
  return count_slices(
    prefill_starts=[s.start for s in prefills],
    prefill_tokens=[s.num_tokens for s in prefills],
    decode_positions=positions,
    num_emitted=sum([s.emits_token for s in prefills]) + len(positions),
  )


def later(counts: StepCounts, num_steps: int) -> StepCounts:
  """The counts of the same decodes, so many steps later."""
  return counts._replace(num_decode_keys=counts.num_decode_keys + num_steps * counts.num_decodes)


def step_costs(
  counts: StepCounts,
  config: ModelConfig,
  *,
  bytes_per_weight: float = 2,
  bytes_per_kv: float = 2,
  bytes_per_activation: float = 2,
) -> tuple[OpCost, ...]:
  """The operators of one step. Weights are read once however many slices the step has."""
  layers, d, f = config.num_layers, config.d_model, config.d_ff
  q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
  up_width = 2 * f if config.gated_mlp else f
  tokens = counts.num_tokens

  def linear(name: str, repeats: int, rows: int, width_in: int, width_out: int) -> OpCost:
    weights = width_in * width_out
    return OpCost(
      name,
      "linear",
      2 * repeats * rows * weights,
      repeats * (weights * bytes_per_weight + rows * width_in * bytes_per_activation),
      repeats * rows * width_out * bytes_per_activation,
      repeats,
    )

  def attention(name: str, rows: int, pairs: int, keys: int) -> OpCost:
    return OpCost(
      name,
      name,
      4 * layers * q_width * pairs,  # a multiply and an add, for the scores and for the values
      layers * (rows * q_width * bytes_per_activation + keys * 2 * kv_width * bytes_per_kv),
      layers * rows * q_width * bytes_per_activation,
      layers,
    )

  ops = []
  if tokens:
    ops += [
      linear("qkv", layers, tokens, d, q_width + 2 * kv_width),
      linear("attn_out", layers, tokens, q_width, d),
      linear("mlp_up", layers, tokens, d, up_width),
      linear("mlp_down", layers, tokens, f, d),
      _elementwise(counts, config, bytes_per_kv, bytes_per_activation),
    ]
  if counts.num_emitted:
    ops.append(linear("lm_head", 1, counts.num_emitted, d, config.vocab_size))
  if counts.num_prefill_tokens:
    ops.append(
      attention(
        "attention_prefill",
        counts.num_prefill_tokens,
        counts.num_prefill_pairs,
        counts.num_prefill_keys,
      )
    )
  if counts.num_decodes:
    keys = counts.num_decode_keys
    ops.append(attention("attention_decode", counts.num_decodes, keys, keys))
  return tuple(ops)


def _elementwise(
  counts: StepCounts, config: ModelConfig, bytes_per_kv: float, bytes_per_activation: float
) -> OpCost:
  """Per layer two norms, RoPE, the write of K and V, the activation and two residual adds.

  Then the embedding rows and the final norm, once. An arithmetic operation per value read.
  """
  layers, d, f = config.num_layers, config.d_model, config.d_ff
  q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
  up_width = 2 * f if config.gated_mlp else f
  # values in: norms 2 d, RoPE q + k, K and V to write, activation, adds 4 d
  values_read = layers * (6 * d + q_width + 3 * kv_width + up_width) + 2 * d
  values_written = layers * (4 * d + q_width + kv_width + f) + 2 * d
  return OpCost(
    "elementwise",
    "elementwise",
    counts.num_tokens * values_read,
    counts.num_tokens * values_read * bytes_per_activation,
    counts.num_tokens
    * (values_written * bytes_per_activation + layers * 2 * kv_width * bytes_per_kv),
    7 * layers + 2,
  )


class OpRates(NamedTuple):
  """An operator taken apart: FLOPs and bytes for each unit of each field of `StepCounts`.

  `fixed_bytes` are those that every step pays which has any work for it: the weights.
  """

  name: str
  kind: str
  num_launches: int
  flops: StepCounts
  num_bytes: StepCounts
  fixed_bytes: float


def cost_rates(
  config: ModelConfig,
  *,
  bytes_per_weight: float = 2,
  bytes_per_kv: float = 2,
  bytes_per_activation: float = 2,
) -> dict[str, OpRates]:
  """What `step_costs` is made of, by name: its FLOPs and bytes are linear in the counts."""

  def costs(counts: StepCounts) -> tuple[OpCost, ...]:
    return step_costs(
      counts,
      config,
      bytes_per_weight=bytes_per_weight,
      bytes_per_kv=bytes_per_kv,
      bytes_per_activation=bytes_per_activation,
    )

  ones = StepCounts(*[1] * len(StepCounts._fields))
  base = costs(ones)
  more = [costs(ones._replace(**{field: 2})) for field in StepCounts._fields]
  rates = {}
  for i, op in enumerate(base):
    flops = StepCounts(*(ops[i].flops - op.flops for ops in more))
    num_bytes = StepCounts(*(ops[i].num_bytes - op.num_bytes for ops in more))
    fixed_bytes = op.num_bytes - sum(num_bytes)
    rates[op.name] = OpRates(op.name, op.kind, op.num_launches, flops, num_bytes, fixed_bytes)
  return rates


def shard_of(config: ModelConfig, tp: int) -> ModelConfig:
  """What one of `tp` devices holds and computes of a model (the Megatron split).

  Heads, the MLP and the vocabulary are split; kv heads are copied where there are too few, the
  vocabulary where it does not divide. Norms and residuals, all of width `d_model`, are everywhere.

  Raises:
    ValueError: as `ModelConfig.check_split`.
  """
  config.check_split(tp)
  return dataclasses.replace(
    config,
    num_heads=config.num_heads // tp,
    num_kv_heads=max(1, config.num_kv_heads // tp),
    d_ff=config.d_ff // tp,
    vocab_size=config.vocab_size // (1 if config.vocab_size % tp else tp),
  )


def total_flops(ops: Iterable[OpCost]) -> int:
  return sum(op.flops for op in ops)


def total_bytes(ops: Iterable[OpCost]) -> float:
  return sum(op.read_bytes + op.written_bytes for op in ops)
