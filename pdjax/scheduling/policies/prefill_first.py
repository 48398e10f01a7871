from pdjax.scheduling.scheduler import StepBuilder


def prefill_first(step: StepBuilder) -> None:
  """Prompts before decodes: a step is all prefill or all decode (vLLM before chunking).

  Continuous batching as vLLM first had it (Sarathi-Serve, Algorithm 2). With `chunk_prompts` off,
  prompts are taken whole; every running decode waits meanwhile, which is the interference.
  """
  for seq in step.prefilling:
    step.advance(seq)
  for seq in step.waiting:
    if not step.advance(seq):
      break
  if step.is_empty:
    for seq in step.decoding:
      step.advance(seq, preempt=True)
