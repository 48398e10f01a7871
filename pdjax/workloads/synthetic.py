"""Workloads drawn from published figures of real ones."""

from __future__ import annotations

import dataclasses

from pdjax.core.names import pick
from pdjax.workloads.arrivals import ARRIVALS
from pdjax.workloads.lengths import Quantiles


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Synthetic:
  """Lengths and arrivals like those of `source`, which is where the figures were published.

  Not a recording: prompts and outputs are drawn independently, and no prompt begins like another.

  Raises:
    ValueError: unknown arrivals.
  """

  name: str
  source: str
  lengths: Quantiles
  arrivals: str = "poisson"
  cv: float = 1.0  # of the gaps, for arrivals="gamma"

  def __post_init__(self):
    pick(ARRIVALS, self.arrivals, "arrivals")

  @property
  def label(self) -> str:
    return f"{self.name}: synthetic, from the quantiles of {self.source}"
