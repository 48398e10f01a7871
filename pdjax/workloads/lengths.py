"""How long requests are.

Each family has `pairs(n, rng)`: n times (prompt tokens, output tokens), all at least 1, and
`longest`: no prompt is longer than its prompt and no request than both together. Prompt and output
are drawn independently.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

_Z90 = 1.2815515655446004  # 90th percentile of the standard normal distribution


class Lengths(NamedTuple):
  prompt_tokens: int
  output_tokens: int


class LengthFamily(Protocol):
  @property
  def longest(self) -> Lengths: ...

  def pairs(self, n: int, rng: np.random.Generator) -> list[Lengths]: ...


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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
  """Each length through published quantiles, its logarithm linear in the share between them.

  Points are (share of the requests, length), from the shortest at 0 to the longest at 1. A request
  of more than `max_total_tokens` is shrunk to it, prompt and output in proportion, as Sarathi's
  generator does, which moves the upper quantiles of both; with `cuts_prompts` its prompt is cut, as
  a context is that leaves room for the answer.

  Raises:
    ValueError: points that do not rise from share 0 to share 1 and from length 1, or a total of
      less than a token each.
  """

  prompt_tokens: tuple[tuple[float, int], ...]  # share, length
  output_tokens: tuple[tuple[float, int], ...]
  max_total_tokens: int | None = None
  cuts_prompts: bool = False

  def __post_init__(self):
    for name in ("prompt_tokens", "output_tokens"):
      points = getattr(self, name)
      shares, lengths = [share for share, _ in points], [length for _, length in points]
      if shares[:1] + shares[-1:] != [0, 1] or any(a >= b for a, b in itertools.pairwise(shares)):
        raise ValueError(f"{name}={points} must be (share, length) with shares rising from 0 to 1")
      if lengths != sorted(lengths) or lengths[0] < 1:
        raise ValueError(f"{name}={points} must be (share, length) with lengths rising from 1 up")
    if self.max_total_tokens is not None and self.max_total_tokens < 2:
      raise ValueError(f"max_total_tokens={self.max_total_tokens} must be at least 2")

  @property
  def longest(self) -> Lengths:
    prompt, output = self.prompt_tokens[-1][1], self.output_tokens[-1][1]
    total = min(prompt + output, self.max_total_tokens or math.inf)
    prompt = min(prompt, total - 1)
    return Lengths(prompt, total - prompt)

  def pairs(self, n: int, rng: np.random.Generator) -> list[Lengths]:
    columns = []
    for points in (self.prompt_tokens, self.output_tokens):
      shares, lengths = zip(*points)
      draws = np.exp(np.interp(rng.random(n), shares, np.log(lengths)))
      columns.append(np.rint(draws).astype(int).tolist())
    return [self._within_total(*pair) for pair in zip(*columns)]

  def _within_total(self, prompt: int, output: int) -> Lengths:
    most, total = self.max_total_tokens, prompt + output
    if most is None or total <= most:
      return Lengths(prompt, output)
    if self.cuts_prompts:
      output = min(output, most - 1)
      return Lengths(most - output, output)
    output = min(max(1, output * most // total), most - 1)
    return Lengths(min(max(1, prompt * most // total), most - output), output)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
  """Recorded pairs in random order, each once before any comes twice.

  Raises:
    ValueError: no pairs.
  """

  recorded: tuple[Lengths, ...]

  def __post_init__(self):
    if not self.recorded:
      raise ValueError("recorded=() must hold at least one pair")

  @property
  def longest(self) -> Lengths:
    return longest_of(self.recorded)

  def pairs(self, n: int, rng: np.random.Generator) -> list[Lengths]:
    order: list[int] = []
    while len(order) < n:
      order += rng.permutation(len(self.recorded)).tolist()
    return [self.recorded[i] for i in order[:n]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
  """The lengths of another family divided by `scale`, for a small model.

  Raises:
    ValueError: a scale below 1.
  """

  lengths: LengthFamily
  scale: int

  def __post_init__(self):
    _check_rising("scale", (self.scale,))

  @property
  def longest(self) -> Lengths:
    prompt = -(-self.lengths.longest.prompt_tokens // self.scale)
    # Prompts are rounded up and outputs to the nearest: together less than two tokens.
    return Lengths(prompt, sum(self.lengths.longest) // self.scale + 2 - prompt)

  def pairs(self, n: int, rng: np.random.Generator) -> list[Lengths]:
    return [scaled(pair, self.scale) for pair in self.lengths.pairs(n, rng)]


def scaled(lengths: Lengths, scale: int) -> Lengths:
  """A prompt rounded up, so that it fills as many blocks of a `scale`-th; an output at least 1."""
  return Lengths(-(-lengths.prompt_tokens // scale), max(1, round(lengths.output_tokens / scale)))


def longest_of(recorded: Sequence[Lengths]) -> Lengths:
  """The longest prompt, and what the longest request, perhaps another, leaves beside it."""
  prompt = max(pair.prompt_tokens for pair in recorded)
  return Lengths(prompt, max(map(sum, recorded)) - prompt)


LENGTHS = {
  "fixed": Fixed,
  "uniform": Uniform,
  "lognormal": LogNormal,
  "mix": Mix,
  "quantiles": Quantiles,
}


def _uniform(bounds: tuple[int, int], n: int, rng: np.random.Generator) -> list[int]:
  return rng.integers(*bounds, n, endpoint=True).tolist()


def _check_rising(name: str, values: tuple[int, ...], meaning: str | None = None) -> None:
  if meaning is None:
    if values[0] < 1:
      raise ValueError(f"{name}={values[0]} must be at least 1")
  elif len(values) != meaning.count(",") + 1 or list(values) != sorted(values) or values[0] < 1:
    raise ValueError(f"{name}={tuple(values)} must be ({meaning}), rising from at least 1")
