"""How long requests are.

Each family has `pairs(n, rng)`: n times (prompt tokens, output tokens), all at least 1, and
`longest`, a bound on both. Prompt and output are drawn independently.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import numpy as np

_Z90 = 1.2815515655446004  # 90th percentile of the standard normal distribution


class Lengths(NamedTuple):
  prompt_tokens: int
  output_tokens: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
  """Every request alike.

  Raises:
    ValueError: a length below 1.
  """

  prompt_tokens: int
  output_tokens: int

  def __post_init__(self):
    for name in ("prompt_tokens", "output_tokens"):
      _check_rising(name, (getattr(self, name),))

  @property
  def longest(self) -> Lengths:
    return Lengths(self.prompt_tokens, self.output_tokens)

  def pairs(self, n: int, rng: np.random.Generator) -> list[Lengths]:
    return [Lengths(self.prompt_tokens, self.output_tokens)] * n


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Uniform:
  """Each length uniform over (lo, hi), both included.

  Raises:
    ValueError: not 1 <= lo <= hi.
  """

  prompt_tokens: tuple[int, int]  # lo, hi
  output_tokens: tuple[int, int]

  def __post_init__(self):
    for name in ("prompt_tokens", "output_tokens"):
      _check_rising(name, getattr(self, name), "lo, hi")

  @property
  def longest(self) -> Lengths:
    return Lengths(self.prompt_tokens[-1], self.output_tokens[-1])

  def pairs(self, n: int, rng: np.random.Generator) -> list[Lengths]:
    prompts, outputs = (_uniform(r, n, rng) for r in (self.prompt_tokens, self.output_tokens))
    return [Lengths(*pair) for pair in zip(prompts, outputs)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogNormal:
  """Each length log-normal with a published median and 90th percentile, cut off at max.

  Raises:
    ValueError: not 1 <= median <= p90 <= max.
  """

  prompt_tokens: tuple[int, int, int]  # median, p90, max
  output_tokens: tuple[int, int, int]

  def __post_init__(self):
    for name in ("prompt_tokens", "output_tokens"):
      _check_rising(name, getattr(self, name), "median, p90, max")

  @property
  def longest(self) -> Lengths:
    return Lengths(self.prompt_tokens[-1], self.output_tokens[-1])

  def pairs(self, n: int, rng: np.random.Generator) -> list[Lengths]:
    columns = []
    for median, p90, most in (self.prompt_tokens, self.output_tokens):
      draws = rng.lognormal(math.log(median), math.log(p90 / median) / _Z90, n)
      columns.append(np.clip(np.rint(draws), 1, most).astype(int).tolist())
    return [Lengths(*pair) for pair in zip(*columns)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
  """Short prompts with a long one among every `long_every`, evenly spread.

  The long ones are placed, not drawn, so that even thirty requests hold several and what they do
  to the others is plain to see. Lengths are uniform over (lo, hi), both included.

  Raises:
    ValueError: not 1 <= lo <= hi, or `long_every` below 1.
  """

  prompt_tokens: tuple[int, int]  # lo, hi of the short ones
  long_prompt_tokens: tuple[int, int]
  output_tokens: tuple[int, int]
  long_every: int

  def __post_init__(self):
    for name in ("prompt_tokens", "long_prompt_tokens", "output_tokens"):
      _check_rising(name, getattr(self, name), "lo, hi")
    if self.long_every < 1:
      raise ValueError(f"long_every={self.long_every} must be at least 1")

  @property
  def longest(self) -> Lengths:
    prompt = max(self.prompt_tokens[-1], self.long_prompt_tokens[-1])
    return Lengths(prompt, self.output_tokens[-1])

  def pairs(self, n: int, rng: np.random.Generator) -> list[Lengths]:
    prompts = _uniform(self.prompt_tokens, n, rng)
    long_prompts = _uniform(self.long_prompt_tokens, n, rng)
    outputs = _uniform(self.output_tokens, n, rng)
    # In the middle of each group, so that the first meets running decodes and the last is met.
    for i in range(self.long_every // 2, n, self.long_every):
      prompts[i] = long_prompts[i]
    return [Lengths(*pair) for pair in zip(prompts, outputs)]


LENGTHS = {"fixed": Fixed, "uniform": Uniform, "lognormal": LogNormal, "mix": Mix}


def _uniform(bounds: tuple[int, int], n: int, rng: np.random.Generator) -> list[int]:
  return rng.integers(*bounds, n, endpoint=True).tolist()


def _check_rising(name: str, values: tuple[int, ...], meaning: str | None = None) -> None:
  if meaning is None:
    if values[0] < 1:
      raise ValueError(f"{name}={values[0]} must be at least 1")
  elif len(values) != meaning.count(",") + 1 or list(values) != sorted(values) or values[0] < 1:
    raise ValueError(f"{name}={tuple(values)} must be ({meaning}), rising from at least 1")
