from pdjax.scheduling.scheduler import StepBuilder, steady


@steady
def fcfs(step: StepBuilder) -> None:
  """Iteration-level first come, first served: running ones as admitted, then the queue.

  What a sequence needs makes no difference (vLLM v1), so a long prompt in chunks takes the budget
  from the decodes of all that came after it.
  """
  for seq in step.running:
    step.advance(seq, preempt=True)
  step.admit()
