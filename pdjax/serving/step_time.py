"""How long a pool's steps take, learnt from the steps that it has run. Imports no jax."""

from __future__ import annotations

from collections.abc import Iterable
from operator import mul

from pdjax.core.costs import StepCounts

_EVERY = 8  # observations from one fit to the next
_SWEEPS = 100  # the next fit goes on where these end
_TOLERANCE = 1e-4  # relative, of a prediction
_SMALLEST = (
  1e-200  # below it a term has not been seen for so long that its sums have no digits left
)


class FittedStepTime:
  """A `StepTime` that changes with every step it is told of: one pool's, on one device.

  Seconds are a sum of five terms, none negative: a constant, prefill tokens, prefill pairs, decodes
  and decode keys. Their factors make the squared relative errors least, those of the last steps
  above all: a step counts e times less after `memory_steps` more. `prior` are steps that were
  measured before, oldest first.

  A step that was noticed late makes the next one look short, and relative to so short a time its
  error would outweigh all others: an error is relative to half of what was expected at least.

  Until it has been told of a step, without a prior, it says 0.0: nobody is refused or held back for
  want of knowledge.

  Raises:
    ValueError: `memory_steps` below 1.
  """

  def __init__(
    self, prior: Iterable[tuple[StepCounts, float]] = (), *, memory_steps: float = 300.0
  ):
    if not memory_steps >= 1:
      raise ValueError(f"memory_steps={memory_steps} must be at least 1")
    self._decay = 1 - 1 / memory_steps
    self._products = [[0.0] * 5 for _ in range(5)]  # the normal equations
    self._targets = [0.0] * 5
    self._total = 0.0  # what all observations count together
    self._factors = [0.0] * 5
    self._num_observed = 0
    self._fit_at = 1  # observations
    for counts, step_s in prior:
      self.observe(counts, step_s)

  def __call__(self, counts: StepCounts) -> float:
    """Seconds that a step of these counts will take."""
    if self._num_observed >= self._fit_at:
      self._fit()
      self._fit_at = self._num_observed + min(_EVERY, self._num_observed)
    return sum(map(mul, self._factors, _terms(counts)))

  def observe(self, counts: StepCounts, step_s: float) -> None:
    """Takes in a step that has run. One that took no time to be seen tells nothing."""
    if step_s <= 0:
      return
    terms = _terms(counts)
    unit_s = max(step_s, sum(map(mul, self._factors, terms)) / 2)
    values = [term / unit_s for term in terms]
    target, decay, products = step_s / unit_s, self._decay, self._products
    for i, value in enumerate(values):
      products[i] = [decay * p + value * other for p, other in zip(products[i], values)]
    self._targets = [decay * t + value * target for t, value in zip(self._targets, values)]
    self._total = decay * self._total + 1
    self._num_observed += 1

  def _fit(self) -> None:
    """Non-negative least squares by coordinate descent, from where the last fit ended."""
    factors = self._factors
    small = _TOLERANCE**2 * self._total
    for _ in range(_SWEEPS):
      largest = 0.0
      for i, (products, target) in enumerate(zip(self._products, self._targets)):
        if products[i] < _SMALLEST:
          continue
        old = factors[i]
        factors[i] = new = max(0.0, old + (target - sum(map(mul, products, factors))) / products[i])
        largest = max(largest, (new - old) ** 2 * products[i])
      if largest < small:
        return


def _terms(counts: StepCounts) -> tuple[float, int, int, int, int]:
  prefill_tokens, prefill_pairs, _, decodes, decode_keys, _, _ = counts
  return 1.0, prefill_tokens, prefill_pairs, decodes, decode_keys
