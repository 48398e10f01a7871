from __future__ import annotations

import itertools

from pdjax.scheduling.scheduler import StepBuilder, steady


@steady
class FasterTransformer:
  """Request-level batching: a batch decodes to its end before the next one starts.

  When nothing runs, those that wait by then become the batch, as many as there is room for
  (Sarathi-Serve, Algorithm 1). All of them prefill before the first decodes: in one step or, a
  deviation, in several where the token budget asks for that. Keeps whether its batch is complete.
  """

  def __init__(self):
    self._is_filling, self._start_s = False, 0.0

  def __call__(self, step: StepBuilder) -> None:
    if not step.running:
      self._is_filling, self._start_s = True, step.now_s
    if self._is_filling:
      step.prefill()
      step.admit(
        itertools.takewhile(lambda seq: seq.request.arrival_s <= self._start_s, step.waiting)
      )
      self._is_filling = not step.is_empty
    if step.is_empty:
      step.decode()
