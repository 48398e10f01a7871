from pdjax.scheduling.scheduler import StepBuilder, steady


@steady
def prefill_first(step: StepBuilder) -> None:
  """Prompts before decodes: a step is all prefill or all decode (vLLM before chunking).

  Continuous batching as vLLM first had it (Sarathi-Serve, Algorithm 2). Prompts are taken whole;
  every running decode waits meanwhile, which is the interference.
  """
  step.prefill()
  step.admit()
  if step.is_empty:
    step.decode()
