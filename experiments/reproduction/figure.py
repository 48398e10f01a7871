"""A figure or a table of a paper, made again: what it claims, and what was found.

A new one is a function that makes `Found` and a `Figure` in the `FIGURES` of its module.
"""

from __future__ import annotations

import dataclasses
import pathlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from experiments.reproduction.bench import Bench

HOLDS, IN_PART, NOT, MISSING = VERDICTS = ("holds", "in part", "does not hold", "missing")
KINDS = ("simulated", "analytic", "engine")


class Judged(NamedTuple):
  """What became of a claim. `why` is a sentence with the numbers behind it."""

  verdict: str
  why: str


class Compared(NamedTuple):
  """One published number and ours. `is_read`: read off a plot by eye, good to 10 or 20 %."""

  what: str
  published: float
  ours: float | None  # None: ours does not get there
  unit: str = ""
  is_read: bool = False

  @property
  def error_percent(self) -> float | None:
    """None where there is nothing to divide by."""
    if self.ours is None or not self.published:
      return None
    return 100 * (self.ours / self.published - 1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
  """What a figure came to: a table, a picture, numbers beside the published ones, and verdicts.

  `judged` answers the figure's claims, in their order. `notes` say what a reader must know: what
  stands in for something that was never published, what is synthetic, what was cut by `--quick`.
  """

  columns: Sequence[str]
  rows: Sequence[Sequence[Any]]
  judged: Sequence[Judged]
  compared: Sequence[Compared] = ()
  draw: Callable[[pathlib.Path], object] | None = None
  notes: Sequence[str] = ()

  def __post_init__(self):
    for row in self.rows:
      if len(row) != len(self.columns):
        raise ValueError(f"{row} has not the columns {tuple(self.columns)}")
    for judged in self.judged:
      if judged.verdict not in VERDICTS:
        raise ValueError(f"verdict={judged.verdict!r} must be one of {VERDICTS}")

  @property
  def errors_percent(self) -> list[float]:
    """Sizes of the errors that there are, without those of numbers read off plots by eye."""
    own = [c.error_percent for c in self.compared if not c.is_read]
    return [abs(error) for error in own if error is not None]

  @property
  def error_words(self) -> str:
    """Median and largest error, in words; empty where nothing was compared."""
    errors = self.errors_percent
    if not errors:
      return ""
    return (
      f"{len(errors)} published numbers, error median {statistics.median(errors):.3g} %, "
      f"largest {max(errors):.3g} %"
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
  """`name` is PAPER/FIGURE. `kind` says what made its numbers: one of `KINDS`.

  `claims` are what the paper says with it, in our words; what `make` finds judges each. `configs`
  are the files that `run` and `compare` take. Headlines come first on the page.

  Raises:
    ValueError: no such kind, or no claims.
  """

  name: str
  title: str
  kind: str
  claims: Sequence[str]
  make: Callable[[Bench], Found]
  configs: Sequence[str] = ()
  is_headline: bool = False

  def __post_init__(self):
    if self.kind not in KINDS:
      raise ValueError(f"figure {self.name}: kind={self.kind!r} must be one of {KINDS}")
    if not self.claims:
      raise ValueError(f"figure {self.name} claims nothing, so nothing can be judged")

  @property
  def file(self) -> str:
    """What its files begin with."""
    return self.name.replace("/", "-")


class Missing(Exception):
  """A figure cannot be made here: data or an extra that it needs is not there."""
