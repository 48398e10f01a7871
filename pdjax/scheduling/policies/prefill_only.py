from pdjax.scheduling.scheduler import StepBuilder


def prefill_only(step: StepBuilder) -> None:
  """The prefill pool: prompts in order of arrival, as many as fit (DistServe, section 4.3)."""
  step.prefill()
  step.admit()
