"""What one step of one pool computes. Plain data: a plan can cross a process boundary."""

from __future__ import annotations

import dataclasses

from pdjax.core.request import SamplingParams


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
  """Positions [start, start + num_tokens) of one sequence, whose ids the host knows: prefill.

  `token_ids` is None where the prompt is only a length. `emits_token`: the slice reaches the last
  known token, so a new one is sampled. The prompt has `num_prompt_tokens`: what a slice recomputes
  beyond it, after a preemption, is output. `cached_ids` are those before `start` that came from the
  prefix cache, on the first slice of a row whose sampling looks back at them.
  """

  request_id: int
  generation: int
  row: int
  num_prompt_tokens: int
  start: int
  num_tokens: int
  token_ids: tuple[int, ...] | None
  emits_token: bool
  sampling: SamplingParams
  cached_ids: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSlices:
  """One token each of many sequences, as columns. The ids are on the device: `last_token[row]`.

  `positions[i]` is the position that row i computes, so its context is `positions[i] + 1` tokens.
  """

  request_ids: tuple[int, ...] = ()
  generations: tuple[int, ...] = ()
  rows: tuple[int, ...] = ()
  positions: tuple[int, ...] = ()

  def __len__(self) -> int:
    return len(self.request_ids)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PageUpdates:
  """Page table entries new since the last plan, as columns: table[row][index] = page_id."""

  rows: tuple[int, ...] = ()
  indices: tuple[int, ...] = ()
  page_ids: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
  """K and V of the first `num_tokens` of a sequence, between `page_ids` and the host's memory."""

  request_id: int
  num_tokens: int
  page_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
  """One step: prefill slices, decode slices, and what changed in the page tables before it.

  Also before it, copies in the host's memory of the requests in `swap_drops` are forgotten, then
  pages of `swap_outs` are copied there, then those of `swap_ins` back, which ends their copy.
  """

  step_id: int
  prefills: tuple[Slice, ...] = ()
  decodes: DecodeSlices = DecodeSlices()
  page_updates: PageUpdates = PageUpdates()
  preempted: tuple[int, ...] = ()  # request ids that lost their row to make room
  swap_outs: tuple[Swap, ...] = ()
  swap_ins: tuple[Swap, ...] = ()
  swap_drops: tuple[int, ...] = ()

  @property
  def num_prefill_tokens(self) -> int:
    return sum(s.num_tokens for s in self.prefills)

  @property
  def num_tokens(self) -> int:
    return self.num_prefill_tokens + len(self.decodes)

  @property
  def num_swapped_tokens(self) -> int:
    """Tokens whose K and V cross between the device and the host."""
    return sum(swap.num_tokens for swap in self.swap_outs + self.swap_ins)

  @property
  def kind(self) -> str:
    """`prefill`, `decode` or `mixed`."""
    if not self.prefills:
      return "decode"
    return "mixed" if len(self.decodes) else "prefill"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
  """Log-probabilities at one place of the output: of the chosen token and of the likeliest ids.

  As many likeliest as the request asked for, likeliest first; the chosen one may be among them.
  """

  logprob: float
  top_ids: tuple[int, ...] = ()
  top_logprobs: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
  """The sampled token of each prefill slice that emits one, in order, then of each decode slice.

  A token of None is a request that failed in this step; `errors` has (request_id, reason) for each.
  `logprobs` is in parallel to the tokens, None for those that did not ask; empty if none did.
  """

  token_ids: tuple[int | None, ...]
  logprobs: tuple[TokenLogprobs | None, ...] = ()
  errors: tuple[tuple[int, str], ...] = ()
