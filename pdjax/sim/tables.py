"""How long a step takes: measured tables, linear between their points. Changes nothing."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from pdjax.core.costs import StepCounts
from pdjax.core.model_config import ModelConfig
from pdjax.sim.hardware import Link, on_lines
from pdjax.sim.latency_model import LatencyModel, StepTerms, over_link_s


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Grid:
  """Values at all points of a grid, multilinear between them and linear beyond its ends.

  Linear, not in logarithms: what an operator takes is a sum of such terms, and between points twice
  apart the logarithm is 12 to 14 % too slow on average (LLMServingSim's change log).

  `is_measured` is False where a value was itself extrapolated, as nobody could measure it.

  Raises:
    ValueError: an axis without two ascending values, or values of another shape.
  """

  axes: tuple[tuple[float, ...], ...]
  values: np.ndarray
  is_measured: np.ndarray

  def __post_init__(self):
    for axis in self.axes:
      if len(axis) < 2 or any(a >= b for a, b in itertools.pairwise(axis)):
        raise ValueError(f"an axis needs two or more ascending values: {axis}")
    shape = tuple(map(len, self.axes))
    if self.values.shape != shape or self.is_measured.shape != shape:
      raise ValueError(f"values of shape {self.values.shape} on axes of shape {shape}")

  @classmethod
  def of(
    cls,
    points: Mapping[tuple[float, ...], float],
    axes: Sequence[Sequence[float]] | None = None,
  ) -> Grid:
    """The grid of measured points; with `axes`, of those points that lie on it.

    A point that is missing gets the value of the line through its nearest neighbours along one
    axis, the last one that has two.

    Raises:
      ValueError: an axis with fewer than two values, or a point that cannot be filled in.
    """
    if axes is None:
      axes = [sorted(set(values)) for values in zip(*points)]
    places = [{value: i for i, value in enumerate(axis)} for axis in axes]
    values = np.full(tuple(map(len, axes)), np.nan)
    for key, value in points.items():
      if all(k in place for k, place in zip(key, places)):
        values[tuple(place[k] for k, place in zip(key, places))] = value
    is_measured = ~np.isnan(values)
    for dim in reversed(range(len(axes))):
      lines = np.moveaxis(values, dim, -1)  # a view
      axis = np.array(axes[dim], float)
      for line in map(lines.__getitem__, np.ndindex(lines.shape[:-1])):
        known = ~np.isnan(line)
        if 2 <= known.sum() < len(axis):
          line[~known] = on_lines(axis[known], line[known], axis[~known])
    if np.isnan(values).any():
      raise ValueError(f"{int(np.isnan(values).sum())} points have no two measured neighbours")
    return cls(axes=tuple(tuple(axis) for axis in axes), values=values, is_measured=is_measured)

  def at(self, *place: float) -> float:
    """The value at one place. Not below 0, which a line may reach beyond the grid."""
    total = 0.0
    for index, share in self._corners(place):
      total += share * self.values.item(*index)
    return max(0.0, total)

  def along(self, *place: float, last: np.ndarray) -> np.ndarray:
    """The values at many places that differ in the last coordinate. [len(last)]"""
    values = np.zeros(len(self.axes[-1]))
    for index, share in self._corners(place):
      values += share * self.values[index]
    return np.maximum(0.0, on_lines(np.array(self.axes[-1], float), values, last))

  def is_beyond(self, *place: float) -> bool:
    """Whether a place is outside the grid or touches a point that nobody measured."""
    for axis, x in zip(self.axes, place):
      if not axis[0] <= x <= axis[-1]:
        return True
    return not all(self.is_measured[index] for index, share in self._corners(place) if share)

  def _corners(self, place: Sequence[float]) -> list[tuple[tuple[int, ...], float]]:
    """Grid points around a place (in as many axes as it has), with their shares of it."""
    corners: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    for axis, x in zip(self.axes, place):
      i = min(max(bisect.bisect_right(axis, x) - 1, 0), len(axis) - 2)
      share = (x - axis[i]) / (axis[i + 1] - axis[i])
      pairs = ((i, 1.0 - share), (i + 1, share))
      corners = [
        ((*index, at), weight * part) for index, weight in corners for at, part in pairs if part
      ]
    return corners


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tables(LatencyModel):
  """Step times of one model on one pool's devices from what its operators took there.

  Seconds of a layer, of one device's share: `linear` (all matrices) and `elementwise` by tokens,
  `prefill` by (chunk, cached tokens before it), `decode` by (sequences, keys of each), and, where
  one kernel does both, `mixed` by (chunk, before, sequences, keys of each); without it their times
  add. Seconds of a step: `lm_head` by rows. `all_reduce` is one of two in a layer, by tokens.

  Sequences of a step that differ count as if they were alike: decodes as so many with the mean
  context; chunks as one of as many pairs of a query and a key.
  """

  model: ModelConfig
  linear: Grid
  elementwise: Grid | None = None
  lm_head: Grid | None = None
  prefill: Grid
  decode: Grid
  mixed: Grid | None = None
  all_reduce: Grid | None = None
  host_s: float = 0.0
  link: Link | None = None
  bytes_per_activation: float = 2

  @property
  def caveats(self) -> tuple[str, ...]:
    missing = [name for name in ("elementwise", "lm_head") if getattr(self, name) is None]
    if not missing:
      return ()
    return (f"nobody measured {' and '.join(missing)} operators: they take no time",)

  def beyond(self, counts: StepCounts) -> tuple[str, ...]:
    found = []
    tokens, chunk = counts.num_tokens, _one_chunk(counts)
    decodes = _alike(counts)
    if self.linear.is_beyond(tokens):
      found.append(f"{tokens} tokens in a step")
    if chunk and self.prefill.is_beyond(*chunk):
      found.append("a chunk of {:.0f} tokens behind {:.0f}".format(*chunk))
    if decodes and self.decode.is_beyond(*decodes):
      found.append("{} decodes of {:.0f} keys".format(*decodes))
    if self.mixed is not None and chunk and decodes and self.mixed.is_beyond(*chunk, *decodes):
      found.append("both in one step")
    return tuple(found)

  def terms_of(self, counts: StepCounts) -> StepTerms:
    layers, tokens = self.model.num_layers, counts.num_tokens
    elementwise_s = all_reduce_s = prefill_s = decode_s = 0.0
    linear_s = layers * self.linear.at(tokens) if tokens else 0.0
    if self.elementwise is not None and tokens:
      elementwise_s = layers * self.elementwise.at(tokens)
    if self.all_reduce is not None and tokens:
      all_reduce_s = 2 * layers * self.all_reduce.at(tokens)
    if self.lm_head is not None and counts.num_emitted:
      linear_s += self.lm_head.at(counts.num_emitted)
    chunk, decodes = _one_chunk(counts), _alike(counts)
    if chunk:
      prefill_s = layers * self.prefill.at(*chunk)
    if decodes and chunk and self.mixed is not None:
      decode_s = max(0.0, layers * self.mixed.at(*chunk, *decodes) - prefill_s)
    elif decodes:
      decode_s = layers * self.decode.at(*decodes)
    return StepTerms(linear_s, elementwise_s, prefill_s, decode_s, all_reduce_s, self.host_s)

  def decode_steps_s(self, counts: StepCounts, num_steps: int) -> np.ndarray:
    if counts.num_prefill_tokens or not counts.num_decodes:
      return LatencyModel.decode_steps_s(self, counts, num_steps)
    terms = self.terms_of(counts)
    keys = counts.num_decode_keys / counts.num_decodes + np.arange(num_steps)
    decode_s = self.model.num_layers * self.decode.along(counts.num_decodes, last=keys)
    return decode_s + (terms.total_s - terms.attention_decode_s)

  def hand_over_s(self, num_tokens: int) -> float:
    return over_link_s(self.link, num_tokens * self.model.d_model * self.bytes_per_activation)


def _one_chunk(counts: StepCounts) -> tuple[float, float] | None:
  """A chunk and what is cached before it, of as many tokens and pairs as all chunks of a step.

  Many short prompts have too few pairs for one of as many tokens: then of as many pairs.
  """
  tokens, pairs = counts.num_prefill_tokens, counts.num_prefill_pairs
  if not tokens:
    return None
  before = pairs / tokens - (tokens + 1) / 2
  if before >= 0:
    return tokens, before
  return (math.sqrt(1 + 8 * pairs) - 1) / 2, 0.0


def _alike(counts: StepCounts) -> tuple[int, float] | None:
  if not counts.num_decodes:
    return None
  return counts.num_decodes, counts.num_decode_keys / counts.num_decodes
