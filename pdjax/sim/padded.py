"""Step times of an engine that pads every step to one of a few sizes. Changes nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from pdjax.core.costs import StepCounts
from pdjax.sim.latency_model import LatencyModel, StepTerms


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
  """The sizes that steps are compiled for, in tokens, ascending, by kind of step.

  `rows` are those of steps of decodes alone. A step that is larger than all is taken as it is.
  """

  prefill: tuple[int, ...] = ()
  mixed: tuple[int, ...] = ()
  rows: tuple[int, ...] = ()

  def __call__(self, counts: StepCounts) -> StepCounts:
    """What a step computes: what is added goes through the weights and attends to nothing.

    Rows of decodes that are added are sampled too.
    """
    sizes = {"prefill": self.prefill, "mixed": self.mixed, "decode": self.rows}[_kind(counts)]
    num_tokens = counts.num_tokens
    num_more = next((size for size in sizes if size >= num_tokens), num_tokens) - num_tokens
    if counts.num_prefill_tokens:
      return counts._replace(num_prefill_tokens=counts.num_prefill_tokens + num_more)
    return counts._replace(
      num_decodes=counts.num_decodes + num_more, num_emitted=counts.num_emitted + num_more
    )


class SizeTimes(NamedTuple):
  """Seconds of the steps of one size: of each, and for each of what they have."""

  step_s: float
  prefill_s: float  # a slice of a prompt
  prefill_pair_s: float  # a query of a prompt and a key
  decode_s: float  # a row that decodes
  decode_key_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PaddedSteps(LatencyModel):
  """Step times of an engine that pads, from whole steps that it took, by their kind and size.

  Raises:
    KeyError: a step of a size that was not timed.
  """

  padding: Padding
  times: Mapping[tuple[str, int], SizeTimes]

  @classmethod
  def of(cls, padding: Padding, timings: Iterable[tuple[StepCounts, float]]) -> PaddedSteps:
    """Least squares of the relative errors in each size; nothing takes less than no time."""
    by_size: dict[tuple[str, int], list[tuple[StepCounts, float]]] = {}
    for counts, seconds in timings:
      by_size.setdefault(_size(padding(counts)), []).append((counts, seconds))
    times = {}
    for size, own in by_size.items():
      rows = np.array([(1, *_parts(counts)) for counts, _ in own], float)
      seconds = np.array([seconds for _, seconds in own])
      found, _ = nnls(rows / seconds[:, None], np.ones(len(own)))
      times[size] = SizeTimes(*found.tolist())
    return cls(padding=padding, times=times)

  def terms_of(self, counts: StepCounts) -> StepTerms:
    times = self.times[_size(self.padding(counts))]
    prefills, pairs, decodes, keys = _parts(counts)
    return StepTerms(
      linear_s=times.step_s,
      attention_prefill_s=prefills * times.prefill_s + pairs * times.prefill_pair_s,
      attention_decode_s=decodes * times.decode_s + keys * times.decode_key_s,
    )

  def blend(self, others: Iterable[tuple[PaddedSteps, float]]) -> PaddedSteps:
    """Steps that take what each of `others` says for such a share of their time, of the same sizes.

    For what the shares leave they take what these take.
    """
    others = tuple(others)
    own_share = 1 - sum(share for _, share in others)
    steps, shares = zip((self, own_share), *others)
    times = {
      size: SizeTimes(*np.dot(shares, [its.times[size] for its in steps]).tolist())
      for size in self.times
    }
    return dataclasses.replace(self, times=times)

  def hand_over_s(self, num_tokens: int) -> float:
    raise ValueError("no step was timed that goes through the stages of a pipeline")


def _kind(counts: StepCounts) -> str:
  if not counts.num_prefill_tokens:
    return "decode"
  return "mixed" if counts.num_decodes else "prefill"


def _size(padded: StepCounts) -> tuple[str, int]:
  return _kind(padded), padded.num_tokens


def _parts(counts: StepCounts) -> tuple[int, int, int, int]:
  """What a step may take longer for than another of its size; the fields of `SizeTimes`."""
  return (
    counts.num_prefills,
    counts.num_prefill_pairs,
    counts.num_decodes,
    counts.num_decode_keys,
  )
