from pdjax.scheduling.scheduler import StepBuilder, steady


@steady
def orca(step: StepBuilder) -> None:
  """Iteration-level batching: decodes beside whole new prompts (Orca; Sarathi-Serve, Algorithm 2).

  Each sequence holds room for the longest one from its admission on, so none is ever preempted, and
  few run at once.
  """
  step.decode()
  step.prefill()
  step.admit()
