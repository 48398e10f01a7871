"""How long steps take: what every latency model says, and what follows from it. Changes nothing."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from pdjax.core.costs import StepCounts, count_plan, later
from pdjax.core.plan import StepPlan
from pdjax.sim.hardware import Link


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


class LatencyModel(Protocol):
  """Step times of one model on the devices of one pool, without side effects.

  A model subclasses it and writes `terms_of` and `hand_over_s`; the rest follows.
  """

  __slots__ = ()

  def terms_of(self, counts: StepCounts) -> StepTerms:
    """The terms of a step known only by its counts."""
    ...

  def hand_over_s(self, num_tokens: int) -> float:
    """Of a pipeline: what a step's hidden states take from one stage to the next.

    Raises:
      ValueError: the model knows no way between stages.
    """
    ...

  @property
  def caveats(self) -> tuple[str, ...]:
    """What a reader of its times must know: what nobody measured. A program prints them."""
    return ()

  def beyond(self, counts: StepCounts) -> tuple[str, ...]:
    """In what a step lies outside all that was measured, so that its time is extrapolated."""
    return ()

  def terms(self, plan: StepPlan) -> StepTerms:
    return self.terms_of(count_plan(plan))

  def step_s(self, plan: StepPlan) -> float:
    return self.terms_of(count_plan(plan)).total_s

  def steps_s(self, plan: StepPlan, num_steps: int) -> np.ndarray:
    """Seconds of a plan of decodes and of those that follow it. [num_steps]"""
    return self.decode_steps_s(count_plan(plan), num_steps)

  def decode_steps_s(self, counts: StepCounts, num_steps: int) -> np.ndarray:
    """Seconds of so many consecutive steps. [num_steps]

    The first has `counts`; each reads `num_decodes` decode keys more than the one before.
    """
    return np.array([self.terms_of(later(counts, step)).total_s for step in range(num_steps)])


def has_range(model: LatencyModel) -> bool:
  """Whether it knows what lies beyond all that was measured."""
  return type(model).beyond is not LatencyModel.beyond


def over_link_s(link: Link | None, num_bytes: float) -> float:
  """What a pipeline takes for so many bytes from a stage to the next, each device's its own way.

  Raises:
    ValueError: no link.
  """
  if link is None:
    raise ValueError("pipeline stages need a link between the devices")
  return link.copy_s(num_bytes)
