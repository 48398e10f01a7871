from __future__ import annotations

import dataclasses

from pdjax.core.sequence import Sequence
from pdjax.scheduling.scheduler import StepBuilder, steady


@steady
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sarathi:
  """Stall-free batching: every decode, then chunks of prompts (Sarathi-Serve, Algorithm 3).

  Chunks of started prompts come before new prompts, until the token budget is gone.

  With `tile_tokens` a step that its decodes do not fill has at most the largest multiple of it that
  the budget holds, decodes counted: matrix products cost whole tiles (section 4.3).

  With `first_chunk_tokens` the chunks of a prompt shrink from it to `last_chunk_tokens`, linearly
  over `stages` stages of `stage_tokens` positions, as attention to what is cached grows (the
  authors' scheduler has it, off by default). Deviation: decodes do not count against a chunk; there
  a step with as many of them left nothing for a prompt.

  Raises:
    ValueError: a size below 1, or chunks that grow.
  """

  tile_tokens: int | None = None
  first_chunk_tokens: int | None = None
  last_chunk_tokens: int = 128
  stages: int = 16
  stage_tokens: int = 8192

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if value is not None and value < 1:
        raise ValueError(f"{field.name}={value} must be at least 1")
    if self.first_chunk_tokens is not None and self.first_chunk_tokens < self.last_chunk_tokens:
      raise ValueError(
        f"first_chunk_tokens={self.first_chunk_tokens} must be at least "
        f"last_chunk_tokens={self.last_chunk_tokens}"
      )

  def __call__(self, step: StepBuilder) -> None:
    budget = step.tokens_left
    step.decode()
    if self.tile_tokens is not None:
      beyond = budget % self.tile_tokens
      if step.tokens_left > beyond:
        step.tokens_left -= beyond
    if self.first_chunk_tokens is None:
      step.prefill()
    else:
      for seq in step.prefilling:
        step.advance(seq, self.chunk_tokens(seq), preempt=True)
    step.admit(max_tokens=self.first_chunk_tokens)

  def chunk_tokens(self, seq: Sequence) -> int:
    """The most that a prompt gets of a step where it has come to, with `first_chunk_tokens`."""
    stage = min(seq.num_scheduled_tokens // self.stage_tokens, self.stages - 1)
    fall = (self.first_chunk_tokens - self.last_chunk_tokens) * stage // max(1, self.stages - 1)
    return self.first_chunk_tokens - fall
