from pdjax.scheduling.scheduler import StepBuilder, steady


@steady
def hybrid_only(step: StepBuilder) -> None:
  """Sarathi-Serve without its chunks: decodes beside whole prompts (its Table 4)."""
  step.decode()
  step.prefill()
  step.admit()
