"""What a user asks for. Never changes."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
  """How tokens are chosen and when to stop.

  `temperature` 0 is greedy. `top_k` None and `top_p` 1 keep the whole vocabulary. The random key of
  a token is folded from (`seed`, position), so it never depends on batch-mates; `seed` None takes
  the request id. A token of `stop_ids` ends the request and is its last token.

  Raises:
    ValueError: a value outside its range, with the value.
  """

  max_tokens: int
  temperature: float = 0.0
  top_k: int | None = None
  top_p: float = 1.0
  seed: int | None = None
  stop_ids: tuple[int, ...] = ()

  def __post_init__(self):
    if self.max_tokens < 1:
      raise ValueError(f"max_tokens={self.max_tokens} must be at least 1")
    if not self.temperature >= 0:
      raise ValueError(f"temperature={self.temperature} must be 0 (greedy) or positive")
    if self.top_k is not None and self.top_k < 1:
      raise ValueError(f"top_k={self.top_k} must be at least 1, or None for no limit")
    if not 0 < self.top_p <= 1:
      raise ValueError(f"top_p={self.top_p} must be in (0, 1]")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
  """One prompt with its arrival.

  `prompt_ids` None is a request of which only the length is known: enough for a simulation.
  `arrival_s` counts from the start of the run.

  Raises:
    ValueError: an empty prompt, or `prompt_ids` of another length than `num_prompt_tokens`.
  """

  request_id: int
  arrival_s: float
  num_prompt_tokens: int
  sampling: SamplingParams
  prompt_ids: tuple[int, ...] | None = None

  def __post_init__(self):
    if self.num_prompt_tokens < 1:
      raise ValueError(
        f"request {self.request_id}: empty prompt (num_prompt_tokens={self.num_prompt_tokens})"
      )
    if self.prompt_ids is not None and len(self.prompt_ids) != self.num_prompt_tokens:
      raise ValueError(
        f"request {self.request_id}: {len(self.prompt_ids)} prompt_ids but "
        f"num_prompt_tokens={self.num_prompt_tokens}"
      )
    if not self.arrival_s >= 0:
      raise ValueError(f"request {self.request_id}: arrival_s={self.arrival_s} must be 0 or later")

  @property
  def max_cached_tokens(self) -> int:
    """Most tokens whose K and V are ever cached: the last output token needs no slot."""
    return self.num_prompt_tokens + self.sampling.max_tokens - 1
