from pdjax.scheduling.scheduler import StepBuilder


def sarathi(step: StepBuilder) -> None:
  """Stall-free batching (Sarathi-Serve, Algorithm 3).

  Every decode, then chunks of started prompts, then new prompts, until the token budget is gone.
  """
  for seq in step.decoding:
    step.advance(seq, preempt=True)
  for seq in step.prefilling:
    step.advance(seq)
  for seq in step.waiting:
    if not step.advance(seq):
      break
