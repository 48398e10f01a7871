"""The progress of one request. Mutable; owned by exactly one scheduler or by the hand-off queue."""

from __future__ import annotations

import dataclasses
import enum
import sys

from pdjax.core.plan import TokenLogprobs
from pdjax.core.request import Request


class State(enum.Enum):
  """Where a request is. Says nothing of its tokens: prompt or output, it runs."""

  QUEUED = "queued"  # since its arrival
  FETCHING = "fetching"  # waits for a prefix that is being copied to its pool
  RUNNING = "running"  # holds a row that steps are planned for
  PREEMPTED = "preempted"  # queued again: what was computed is lost, or in the host's memory
  READY = "ready"  # prefilled; keeps its row and waits in the outbox
  MOVING = "moving"  # its pages are being copied; holds rows in two pools
  ENDED = "ended"  # finished or failed, once


_NEXT = {
  State.QUEUED: {State.FETCHING, State.RUNNING, State.ENDED},
  State.FETCHING: {State.QUEUED, State.ENDED},
  State.RUNNING: {State.PREEMPTED, State.READY, State.ENDED},
  State.PREEMPTED: {State.RUNNING, State.ENDED},
  State.READY: {State.MOVING, State.PREEMPTED, State.ENDED},
  State.MOVING: {State.RUNNING, State.READY, State.PREEMPTED, State.ENDED},
  State.ENDED: set(),
}
"""What may follow what. Back from READY and MOVING: a cache was lost, here or at the target."""


@dataclasses.dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
  """Counts tokens; knows no phase.

  With plans in flight `num_scheduled_tokens` runs ahead of `num_computed_tokens`, and tokens being
  sampled (`num_pending_tokens`) count as known, so that the next plan can be made at once.

    0 ........ num_computed ........ num_scheduled ........ num_tokens
      K/V in cache        plans in flight        not yet planned

  `output_logprobs` is in parallel to `output_ids`, or empty where none were asked for. A finish
  rule that ends the request at a stop string sets `num_kept_tokens`: both are cut to it.
  """

  request: Request
  state: State = State.QUEUED
  output_ids: list[int] = dataclasses.field(default_factory=list)
  output_logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
  num_kept_tokens: int | None = None  # of the output, when it has ended; None for all
  num_computed_tokens: int = 0
  num_scheduled_tokens: int = 0
  num_prefill_tokens: int = 0  # known to the host when it got its row: these are not decodes
  row: int | None = None
  generation: int = 0  # raised when it loses or changes its row: older results are ignored
  num_preemptions: int = 0
  last_step: int = -1  # of this pool: the last plan with a slice of it
  page_keys: list[bytes] = dataclasses.field(default_factory=list)  # see scheduling/prefix.py
  num_passes: int = 0  # others admitted past it while it found no room
  publish_at_tokens: int = sys.maxsize  # computed by when the prefix cache is to know a page more
  num_swapped_tokens: int = 0  # whose K and V are in the host's memory while it has no row
  room_tokens: int = 0  # decodes of positions below this need no page and are not past the end
  request_id: int = 0  # these two as the request's, for the hot path
  max_cached_tokens: int = 0
  may_end_tokens: int = 0  # of the output: with fewer neither a stop id nor its length ends it

  def __post_init__(self):
    self.num_prefill_tokens = self.request.num_prompt_tokens
    self.request_id = self.request.request_id
    self.max_cached_tokens = self.request.max_cached_tokens
    sampling = self.request.sampling
    self.may_end_tokens = sampling.max_tokens
    if sampling.stop_ids:
      self.may_end_tokens = min(sampling.min_tokens + 1, sampling.max_tokens)

  @property
  def num_tokens(self) -> int:
    """Tokens known, those being sampled included."""
    num_known = self.request.num_prompt_tokens + len(self.output_ids)
    return max(num_known, self.num_scheduled_tokens + 1) if self.is_decoding else num_known

  @property
  def num_pending_tokens(self) -> int:
    return self.num_tokens - self.request.num_prompt_tokens - len(self.output_ids)

  @property
  def num_unscheduled_tokens(self) -> int:
    """Tokens that the next plan may compute; 0 once the last token is computed or in flight."""
    num_tokens = self.num_tokens
    return 0 if num_tokens > self.max_cached_tokens else num_tokens - self.num_scheduled_tokens

  @property
  def is_decoding(self) -> bool:
    """Whether the next slice is a decode: its token id lives on the device, not on the host.

    Says nothing about lengths: the last chunk of a prompt may be one token and is still prefill,
    and after a preemption generated tokens are recomputed as prefill.
    """
    return self.num_scheduled_tokens >= self.num_prefill_tokens

  def known_ids(self, start: int, end: int) -> tuple[int, ...] | None:
    """Token ids of positions [start, end), or None where the prompt is only a length."""
    prompt = self.request.prompt_ids
    if prompt is None:
      return None
    num_prompt = len(prompt)
    if end <= num_prompt:
      return prompt[start:end]
    return prompt[start:] + tuple(self.output_ids[max(0, start - num_prompt) : end - num_prompt])

  def enter(self, state: State) -> None:
    """Changes the state; whoever owns the sequence calls it as it changes hands.

    Raises:
      RuntimeError: `state` may not follow the present one.
    """
    if state not in _NEXT[self.state]:
      raise RuntimeError(
        f"request {self.request_id} is {self.state.value} and cannot become {state.value}"
      )
    self.state = state

  def cut(self) -> None:
    """Keeps the first `num_kept_tokens` of the output, once the request has ended."""
    if self.num_kept_tokens is not None:
      del self.output_ids[self.num_kept_tokens :]
      del self.output_logprobs[self.num_kept_tokens :]

  def lose_row(self) -> None:
    """Forgets what was computed and scheduled: everything known is prefill again."""
    self.row = None
    self.generation += 1
    self.num_computed_tokens = self.num_scheduled_tokens = 0
    self.num_prefill_tokens = self.request.num_prompt_tokens + len(self.output_ids)
