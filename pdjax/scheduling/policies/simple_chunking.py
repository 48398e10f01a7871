from __future__ import annotations

from pdjax.scheduling.scheduler import StepBuilder, steady


@steady
class SimpleChunking:
  """Chunks that never mix with decodes: a prefill turn, a decode turn (Sarathi-Serve, Table 4).

  A prefill turn goes to prompts in progress, or else to new ones. A turn that finds nothing to do
  is the other's at once. Keeps whose turn it is.
  """

  def __init__(self):
    self._is_prefill_turn = True

  def __call__(self, step: StepBuilder) -> None:
    turns = (_prefill, StepBuilder.decode)
    for turn in turns if self._is_prefill_turn else reversed(turns):
      turn(step)
      if not step.is_empty:
        self._is_prefill_turn = turn is not _prefill
        return


def _prefill(step: StepBuilder) -> None:
  step.prefill()
  if step.is_empty:
    step.admit()
