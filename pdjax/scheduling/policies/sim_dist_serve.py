from __future__ import annotations

import dataclasses

from pdjax.core.sequence import Sequence
from pdjax.scheduling.scheduler import StepBuilder


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class SimDistServe:
  """All prompts that wait, whole; else decodes in turn, up to so many tokens of context.

  A worker of DistServe's simulator (simdistserve, base/worker.py): decodes stand in a queue, those
  of a step return to its end behind those that came meanwhile, and a step takes from its front.
  Deviation: it takes one at least.

  Keeps the queue.

  Raises:
    ValueError: `max_decode_tokens` below 1.
  """

  max_decode_tokens: int = 50_000
  _queue: dict[int, Sequence] = dataclasses.field(init=False, repr=False, default_factory=dict)
  _taken: dict[int, Sequence] = dataclasses.field(init=False, repr=False, default_factory=dict)

  def __post_init__(self):
    if self.max_decode_tokens < 1:
      raise ValueError(f"max_decode_tokens={self.max_decode_tokens} must be at least 1")

  def __call__(self, step: StepBuilder) -> None:
    here = {seq.request_id: seq for seq in step.decoding}
    new = {i: seq for i, seq in here.items() if i not in self._queue and i not in self._taken}
    queue = {i: here[i] for i in (*self._queue, *new, *self._taken) if i in here}
    self._queue, self._taken = queue, {}
    step.prefill()
    step.admit()
    if not step.is_empty:
      return
    left = self.max_decode_tokens
    for i, seq in list(queue.items()):
      left -= seq.num_scheduled_tokens + 1
      if left < 0 and self._taken:
        break
      if step.advance(seq, preempt=True):
        self._taken[i] = queue.pop(i)
