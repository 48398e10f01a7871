from pdjax.scheduling.scheduler import StepBuilder


def prefill_chunks(step: StepBuilder) -> None:
  """The prefill pool, a budget at a time: prompts in progress, then new ones in what is left.

  Chunks can be handed over as they come, or follow one another through a pipeline (Mooncake,
  chunked pipeline parallelism).
  """
  step.prefill()
  step.admit()
