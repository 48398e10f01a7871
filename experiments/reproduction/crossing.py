"""Where curves cross a target: linear between two points, as the papers' scripts read it off."""

from __future__ import annotations

import itertools
from typing import NamedTuple


class Curve(NamedTuple):
  """Points (x, y) of what gets harder from point to point, so that y falls.

  One whose y rises is taken with the other sign, and so is its target.
  """

  points: tuple[tuple[float, float], ...]

  def crossing(self, target: float) -> Crossing:
    """Where it first falls below the target."""
    if self.points[0][1] < target:
      return Crossing(self.points[0][0], "below everywhere")
    for (x0, y0), (x1, y1) in itertools.pairwise(self.points):
      if y1 < target:
        return Crossing(x0 + (x1 - x0) * (y0 - target) / (y0 - y1), "crosses")
    return Crossing(self.points[-1][0], "above everywhere")


class Crossing(NamedTuple):
  """`x` is the first point of a curve that is below everywhere, as in DistServe, and the last of
  one that is above everywhere.
  """

  x: float
  kind: str

  @property
  def value(self) -> float | None:
    """None where the curve does not cross."""
    return self.x if self.kind == "crosses" else None

  def __str__(self) -> str:
    words = {"below everywhere": "not even ", "above everywhere": "still "}
    return f"{words.get(self.kind, '')}{self.x:.3g}"
