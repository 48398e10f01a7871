from __future__ import annotations

import dataclasses
import math

from pdjax.core.sequence import Sequence
from pdjax.scheduling.policies.ranking import Ranking
from pdjax.scheduling.scheduler import StepBuilder, steady


@steady
@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class ShortestPrefillFirst:
  """Every decode, then the prompt with the least left, started or not, with ageing.

  Waiting a second counts as much as being `ageing_tokens_per_s` tokens shorter. So a prompt of n
  tokens is overtaken by none that arrives n / `ageing_tokens_per_s` seconds after it or later: what
  it may have to wait for is known from then on. A preempted sequence goes before all. Keeps its
  ranking of the queue, to which a step adds what is new.

  Raises:
    ValueError: ageing that is not positive.
  """

  ageing_tokens_per_s: float = 500.0
  _ranking: Ranking = dataclasses.field(init=False, repr=False)

  def __post_init__(self):
    if not 0 < self.ageing_tokens_per_s < math.inf:
      raise ValueError(f"ageing_tokens_per_s={self.ageing_tokens_per_s} must be positive")
    self._ranking = Ranking(self._key)

  def __call__(self, step: StepBuilder) -> None:
    step.decode()
    self._ranking.offer(step)

  def _key(self, seq: Sequence) -> float:
    # Every key falls alike as time passes, so their order stays and `now` is left out.
    if seq.num_preemptions:
      return -math.inf
    num_left = seq.num_prefill_tokens - seq.num_scheduled_tokens
    return num_left + self.ageing_tokens_per_s * seq.request.arrival_s
