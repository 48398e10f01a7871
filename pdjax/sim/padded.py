"""Step times of an engine that pads every step to one of a few sizes. Changes nothing."""

from __future__ import annotations

import dataclasses

from pdjax.core.costs import StepCounts
from pdjax.sim.latency_model import LatencyModel, StepTerms


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
  """The sizes that steps are compiled for, in tokens, ascending, by kind of step.

  `rows` are those of steps of decodes alone. A step that is larger than all is taken as it is.
  """

  prefill: tuple[int, ...] = ()
  mixed: tuple[int, ...] = ()
  rows: tuple[int, ...] = ()

  def __call__(self, counts: StepCounts) -> StepCounts:
    """What a step computes: what is added goes through the weights and attends to nothing.

    Rows of decodes that are added are sampled too.
    """
    sizes = self.rows
    if counts.num_prefill_tokens:
      sizes = self.mixed if counts.num_decodes else self.prefill
    num_tokens = counts.num_tokens
    num_more = next((size for size in sizes if size >= num_tokens), num_tokens) - num_tokens
    if counts.num_prefill_tokens:
      return counts._replace(num_prefill_tokens=counts.num_prefill_tokens + num_more)
    return counts._replace(
      num_decodes=counts.num_decodes + num_more, num_emitted=counts.num_emitted + num_more
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Padded(LatencyModel):
  """The times of `latency` for what an engine makes of each step."""

  latency: LatencyModel
  padding: Padding

  @property
  def caveats(self) -> tuple[str, ...]:
    return self.latency.caveats

  def beyond(self, counts: StepCounts) -> tuple[str, ...]:
    return self.latency.beyond(self.padding(counts))

  def terms_of(self, counts: StepCounts) -> StepTerms:
    return self.latency.terms_of(self.padding(counts))

  def hand_over_s(self, num_tokens: int) -> float:
    return self.latency.hand_over_s(num_tokens)
