from pdjax.scheduling.scheduler import StepBuilder


def prefill_only(step: StepBuilder) -> None:
  """The prefill pool: prompts in order of arrival, as many as fit (DistServe, section 4.3)."""
  for seq in step.prefilling:
    step.advance(seq)
  for seq in step.waiting:
    if not step.advance(seq):
      break
