from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from pdjax.core.sequence import Sequence
from pdjax.scheduling.scheduler import StepBuilder, steady


@steady
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PrefillFirst:
  """Prompts before decodes: a step is all prefill or all decode (vLLM before chunking).

  Continuous batching as vLLM first had it (Sarathi-Serve, Algorithm 2). Prompts are taken whole;
  every running decode waits meanwhile, which is the interference.

  `max_padding_tokens` is of an engine that computes the prompts of a step at the length of the
  longest: a step takes them in order of arrival until that would add more than so many tokens, and
  its budget is of all tokens so computed (vLLM 0.2.2 to 0.3, 256 by default). None: no padding.

  Raises:
    ValueError: `max_padding_tokens` below 0.
  """

  max_padding_tokens: int | None = None

  def __post_init__(self):
    if self.max_padding_tokens is not None and self.max_padding_tokens < 0:
      raise ValueError(f"max_padding_tokens={self.max_padding_tokens} must be at least 0")

  def __call__(self, step: StepBuilder) -> None:
    step.prefill()
    step.admit(None if self.max_padding_tokens is None else self._alike(step))
    if step.is_empty:
      step.decode()

  def _alike(self, step: StepBuilder) -> Iterator[Sequence]:
    """The first of the queue, as far as they fit into one rectangle."""
    budget, longest, num_tokens = step.tokens_left, 0, 0
    for i, seq in enumerate(step.waiting, 1):
      longest = max(longest, seq.num_unscheduled_tokens)
      num_tokens += seq.num_unscheduled_tokens
      if i * longest > budget or i * longest - num_tokens > self.max_padding_tokens:
        return
      yield seq
