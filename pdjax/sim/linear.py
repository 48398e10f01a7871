"""Latency models that are linear in a few sums, as others fitted them. Change nothing.

What a form does not tell apart is in `linear_s`.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from pdjax.core.costs import StepCounts, count_plan, later
from pdjax.core.plan import StepPlan
from pdjax.sim.latency_model import LatencyModel, StepTerms


class _LinearModel(LatencyModel):
  """Decode steps in a row: an arithmetic progression, as they differ in their keys alone."""

  __slots__ = ()

  def decode_steps_s(self, counts: StepCounts, num_steps: int) -> np.ndarray:
    first_s, second_s = (self.terms_of(later(counts, i)).total_s for i in (0, 1))
    return first_s + (second_s - first_s) * np.arange(num_steps)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DistServeFit:
  """Seconds as DistServe fits them for one model on one number of devices (Appendix A, its code).

  A step of prompts takes a + b (their tokens) + c (the sum of their squared lengths). One of
  decodes takes a + b (the sum of their contexts) + c (their number), by other coefficients from
  `many_decodes` on. Each triple is (a, b, c).
  """

  prefill_s: tuple[float, float, float]
  few_decodes_s: tuple[float, float, float]
  many_decodes_s: tuple[float, float, float]
  many_decodes: int = 95


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DistServeForm(_LinearModel):
  """DistServe's linear form, in `pp` stages that take as long each.

  A step of prompts takes `stage_s` besides for each of the `pp`, on every stage. Every step takes
  `host_s` besides and `host_token_s` for each token of a prompt or cached before a decode; in a
  pipeline the first stage alone does, here all have their share.

  `pads_prompts`: an engine that computes all prompts of a step at the length of the longest. Only a
  plan tells their lengths, so `terms_of` leaves that out.

  A chunk behind cached tokens counts what it adds to its prompt's squared length. Steps that mix
  prompts and decodes are not in the form: they take what two steps would.

  Raises:
    ValueError: `pp` below 1.
  """

  fit: DistServeFit
  pp: int = 1
  stage_s: float = 0.0
  host_s: float = 0.0
  host_token_s: float = 0.0
  pads_prompts: bool = False

  def __post_init__(self):
    if self.pp < 1:
      raise ValueError(f"pp={self.pp} must be at least 1")

  @property
  def caveats(self) -> tuple[str, ...]:
    return ("steps that mix prompts and decodes take what two steps would",)

  def terms_of(self, counts: StepCounts) -> StepTerms:
    linear_s = prefill_s = decode_s = 0.0
    tokens, decodes = counts.num_prefill_tokens, counts.num_decodes
    num_before = tokens + counts.num_decode_keys - decodes
    host_s = self.host_s + self.host_token_s * num_before
    if tokens:
      a, b, c = self.fit.prefill_s
      linear_s += a + b * tokens
      prefill_s = c * (2 * counts.num_prefill_pairs - tokens)  # n**2 of a whole prompt
      host_s += self.stage_s * self.pp * self.pp
    if decodes:
      is_few = decodes < self.fit.many_decodes
      a, b, c = self.fit.few_decodes_s if is_few else self.fit.many_decodes_s
      linear_s += a + c * decodes
      decode_s = b * counts.num_decode_keys
    return StepTerms(
      linear_s=linear_s,
      attention_prefill_s=prefill_s,
      attention_decode_s=decode_s,
      host_s=host_s,
    )

  def terms(self, plan: StepPlan) -> StepTerms:
    counts = count_plan(plan)
    if self.pads_prompts and plan.prefills:
      n, longest = len(plan.prefills), max(s.start + s.num_tokens for s in plan.prefills)
      counts = counts._replace(
        num_prefill_tokens=n * longest, num_prefill_pairs=n * longest * (longest + 1) // 2
      )
    return self.terms_of(counts)

  def step_s(self, plan: StepPlan) -> float:
    return self.terms(plan).total_s

  def hand_over_s(self, num_tokens: int) -> float:
    return 0.0  # stages were timed with what they send


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NiyamaFit:
  """Seconds of a step: a constant and what each token and key adds.

  Keys are those of all decodes, their own included, and of chunks those cached before them.
  """

  base_s: float
  token_s: float
  prefill_token_s: float
  decode_token_s: float
  decode_key_s: float
  prefill_key_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NiyamaForm(_LinearModel):
  """The predictor of Niyama's chunk sizes: linear, by other coefficients above `few_tokens`."""

  few: NiyamaFit
  many: NiyamaFit
  few_tokens: int = 512

  def terms_of(self, counts: StepCounts) -> StepTerms:
    fit = self.few if counts.num_tokens <= self.few_tokens else self.many
    num_cached = counts.num_prefill_keys - counts.num_prefill_tokens
    return StepTerms(
      linear_s=fit.base_s
      + fit.token_s * counts.num_tokens
      + fit.prefill_token_s * counts.num_prefill_tokens
      + fit.decode_token_s * counts.num_decodes,
      attention_prefill_s=fit.prefill_key_s * num_cached,
      attention_decode_s=fit.decode_key_s * counts.num_decode_keys,
    )

  def hand_over_s(self, num_tokens: int) -> float:
    raise ValueError("Niyama's form is of one stage: it knows no way to another")
