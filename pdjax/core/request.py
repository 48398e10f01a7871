"""What a user asks for. Never changes."""

from __future__ import annotations

import dataclasses
import math
import numbers

MAX_LOGPROBS = 20  # a step gives so many likeliest ids of each row that asks; a static shape
MAX_HELD_STOP_IDS = 8  # stop ids of a row that a step can mask before `min_tokens`; likewise


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
  """How tokens are chosen and when to stop.

  The order is that of transformers: `repetition_penalty` over the ids of the prompt and of the
  output so far (positive logits are divided by it, others multiplied); the mask that holds back
  `stop_ids` before `min_tokens` tokens; `temperature` (0 is greedy); `top_k`; `top_p` of what that
  leaves; `min_p`, which keeps ids at least so many times as likely as the likeliest. (vLLM has
  `min_p` before `top_k` since its V1 engine: its `top_p` is of less.) `top_k` None, `top_p` 1,
  `min_p` 0 and `repetition_penalty` 1 change nothing. The random key of a token is folded from
  (`seed`, position), so it never depends on batch-mates; `seed` None takes the request id.

  A token of `stop_ids` ends the request and is its last token; ids that the model does not have
  never come. A string of `stop` ends it too, and is cut away: `pdjax.stopping` says how. Neither
  ends it before `min_tokens` tokens of other text. `ignore_eos` leaves the tokenizer's end-of-text
  out of the stop ids (`pdjax.stopping.with_eos` puts it in).

  `logprobs` asks for log-probabilities under the raw logits, before all of the above, as vLLM and
  OpenAI give them: 0 for those of the chosen tokens, n also for the n likeliest at each place.

  Raises:
    ValueError: a value outside its range or of another type, with the value: in a step it would
      fail all that are in it.
  """

  max_tokens: int
  min_tokens: int = 0
  temperature: float = 0.0
  top_k: int | None = None
  top_p: float = 1.0
  min_p: float = 0.0
  repetition_penalty: float = 1.0
  seed: int | None = None
  stop_ids: tuple[int, ...] = ()
  stop: tuple[str, ...] = ()
  ignore_eos: bool = False
  logprobs: int | None = None

  def __post_init__(self):
    for name in ("max_tokens", "min_tokens", "top_k", "seed", "logprobs"):
      value = getattr(self, name)
      if value is None and name not in ("max_tokens", "min_tokens"):
        continue
      if not isinstance(value, numbers.Integral):
        raise ValueError(f"{name}={value!r} must be a whole number")
    for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
      if not isinstance(getattr(self, name), numbers.Real):
        raise ValueError(f"{name}={getattr(self, name)!r} must be a number")
    ids = self.stop_ids
    if not isinstance(ids, tuple) or not all(isinstance(i, numbers.Integral) for i in ids):
      raise ValueError(f"stop_ids={ids!r} must be a tuple of token ids")
    if self.max_tokens < 1:
      raise ValueError(f"max_tokens={self.max_tokens} must be at least 1")
    if not 0 <= self.min_tokens <= self.max_tokens:
      raise ValueError(f"min_tokens={self.min_tokens} must be in [0, max_tokens={self.max_tokens}]")
    if not self.temperature >= 0:
      raise ValueError(f"temperature={self.temperature} must be 0 (greedy) or positive")
    if self.top_k is not None and self.top_k < 1:
      raise ValueError(f"top_k={self.top_k} must be at least 1, or None for no limit")
    if not 0 < self.top_p <= 1:
      raise ValueError(f"top_p={self.top_p} must be in (0, 1]")
    if not 0 <= self.min_p <= 1:
      raise ValueError(f"min_p={self.min_p} must be in [0, 1]")
    if not 0 < self.repetition_penalty < math.inf:
      raise ValueError(
        f"repetition_penalty={self.repetition_penalty} must be positive, 1 for no penalty"
      )
    if not isinstance(self.stop, tuple | list) or not all(
      isinstance(s, str) and s for s in self.stop
    ):
      raise ValueError(f"stop={self.stop!r} must be a tuple of strings, none of them empty")
    if self.min_tokens and len(self.stop_ids) > MAX_HELD_STOP_IDS:
      raise ValueError(
        f"min_tokens={self.min_tokens} can hold back {MAX_HELD_STOP_IDS} stop ids at most, not "
        f"{len(self.stop_ids)} (the tokenizer's end-of-text counts)"
      )
    if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
      raise ValueError(
        f"logprobs={self.logprobs} must be in [0, {MAX_LOGPROBS}], or None for none at all"
      )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
  """A promise: a time to the first token and a time per token after it.

  `name` is of the class of requests that share it, if they have one.

  Raises:
    ValueError: a target that is not positive.
  """

  ttft_s: float
  tpot_s: float
  name: str | None = None

  def __post_init__(self):
    if not (self.ttft_s > 0 and self.tpot_s > 0):
      raise ValueError(f"SLO ttft_s={self.ttft_s}, tpot_s={self.tpot_s}: both must be positive")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
  """One prompt with its arrival.

  `prompt_ids` None is a request of which only the length is known: enough for a simulation.
  `arrival_s` counts from the start of the run. A request that has not ended `timeout_s` after its
  arrival fails, wherever it is; None waits for ever. `slo` is what it was promised, for policies
  that know of promises.

  `prefix_hashes` tells a prefix cache what `prompt_ids` would: one id for each
  `prefix_block_tokens` tokens of the prompt, the last block perhaps cut short. Equal ids stand for
  equal tokens, in whichever request. Both are None where nothing is known of it.

  Raises:
    ValueError: an empty prompt, `prompt_ids` or `prefix_hashes` of another length than
      `num_prompt_tokens`, or a time that is not finite: a loop would wait for it and for nothing
      else.
  """

  request_id: int
  arrival_s: float
  num_prompt_tokens: int
  sampling: SamplingParams
  prompt_ids: tuple[int, ...] | None = None
  slo: Slo | None = None
  timeout_s: float | None = None
  prefix_hashes: tuple[int, ...] | None = None
  prefix_block_tokens: int | None = None

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
    if (self.prefix_hashes is None) != (self.prefix_block_tokens is None):
      raise ValueError(
        f"request {self.request_id}: prefix_hashes={self.prefix_hashes} goes with "
        f"prefix_block_tokens={self.prefix_block_tokens}: both or neither"
      )
    if self.prefix_hashes is not None:
      if self.prefix_block_tokens < 1:
        raise ValueError(
          f"request {self.request_id}: prefix_block_tokens={self.prefix_block_tokens} must be at "
          f"least 1"
        )
      num_blocks = -(-self.num_prompt_tokens // self.prefix_block_tokens)
      if len(self.prefix_hashes) != num_blocks:
        raise ValueError(
          f"request {self.request_id}: {len(self.prefix_hashes)} prefix_hashes, but "
          f"num_prompt_tokens={self.num_prompt_tokens} are {num_blocks} blocks of "
          f"{self.prefix_block_tokens}"
        )
    if not 0 <= self.arrival_s < math.inf:
      raise ValueError(
        f"request {self.request_id}: arrival_s={self.arrival_s} must be 0 or later, and finite"
      )
    if self.timeout_s is not None and not 0 < self.timeout_s < math.inf:
      raise ValueError(
        f"request {self.request_id}: timeout_s={self.timeout_s} must be positive and finite, or "
        f"None to wait for ever"
      )

  @property
  def max_cached_tokens(self) -> int:
    """Most tokens whose K and V are ever cached: the last output token needs no slot."""
    return self.num_prompt_tokens + self.sampling.max_tokens - 1
