from pdjax.scheduling.scheduler import StepBuilder, steady


@steady
def decode_only(step: StepBuilder) -> None:
  """The decode pool: one token of every sequence.

  Its pages were reserved at the hand-off; or it grows, and the newest makes room for older ones.
  """
  step.decode()
