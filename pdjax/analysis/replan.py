"""Whether traffic is still that for which pools were placed (DistServe, section 4.3).

Changes nothing: pure functions of arrivals and lengths, from a log or from a trace.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pdjax.core.events import Event
from pdjax.metrics.latency import request_records


class Seen(NamedTuple):
  """One request as a profiler sees it."""

  arrival_s: float
  prompt_tokens: int
  output_tokens: int


def seen_in(log: Iterable[Event]) -> list[Seen]:
  """The finished requests of a log, in order of arrival."""
  found = [
    Seen(r.arrival_s, r.num_prompt_tokens, len(r.token_s))
    for r in request_records(log).values()
    if r.outcome == "finished"
  ]
  return sorted(found)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Window:
  """The traffic of some time: at least one request.

  `lengths_of` are requests whose lengths stand for its own, where these are too few.
  """

  start_s: float
  end_s: float
  requests: tuple[Seen, ...]
  lengths_of: tuple[Seen, ...] | None = None

  @property
  def rate_rps(self) -> float:
    return len(self.requests) / (self.end_s - self.start_s)

  @property
  def sample(self) -> tuple[Seen, ...]:
    """Requests with its lengths."""
    return self.requests if self.lengths_of is None else self.lengths_of

  @property
  def mean_prompt_tokens(self) -> float:
    return statistics.fmean(r.prompt_tokens for r in self.sample)

  @property
  def mean_output_tokens(self) -> float:
    return statistics.fmean(r.output_tokens for r in self.sample)


def windows(requests: Sequence[Seen], width_s: float) -> list[Window]:
  """Cuts requests, in order of arrival, into windows of `width_s` from the first arrival on.

  The last, cut short, is left out unless it is the only one, and so are windows without requests.

  Raises:
    ValueError: a width that is not positive.
  """
  if not width_s > 0:
    raise ValueError(f"width_s={width_s} must be positive")
  first_s = requests[0].arrival_s if requests else 0.0
  found: dict[int, list[Seen]] = {}
  for request in requests:
    found.setdefault(int((request.arrival_s - first_s) // width_s), []).append(request)
  if len(found) > 1:
    found.pop(max(found))
  return [
    Window(start_s=first_s + i * width_s, end_s=first_s + (i + 1) * width_s, requests=tuple(own))
    for i, own in found.items()
  ]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
  """A mean that left what it was by more than the threshold."""

  name: str  # rate_rps, mean_prompt_tokens, mean_output_tokens
  before: float
  after: float

  @property
  def change(self) -> float:
    return self.after / self.before - 1

  def __str__(self) -> str:
    return f"{self.name} {self.before:.3g} -> {self.after:.3g} ({self.change:+.0%})"


def check_threshold(threshold: float) -> None:
  """Raises ValueError for a threshold that is not positive."""
  if not threshold > 0:
    raise ValueError(f"threshold={threshold} must be positive")


def drifts(planned: Window, now: Window, threshold: float) -> list[Drift]:
  """What changed by more than a share of `threshold`, up or down by the same factor.

  Raises:
    ValueError: a threshold that is not positive.
  """
  check_threshold(threshold)
  found = []
  for name in ("rate_rps", "mean_prompt_tokens", "mean_output_tokens"):
    before, after = getattr(planned, name), getattr(now, name)
    if max(after / before, before / after) > 1 + threshold:
      found.append(Drift(name=name, before=before, after=after))
  return found


def first_drift(
  planned: Window, later: Iterable[Window], threshold: float, *, least_requests: int = 1
) -> tuple[Window, list[Drift]] | None:
  """The first window that drifted, and how; None where all stayed. Takes `later` up to that one.

  A mean over n requests moves by chance: of fewer than `least_requests` the lengths are taken to be
  those that were planned for, and their rate counts if it differs by more than chance.
  """
  for window in later:
    if len(window.requests) < least_requests:
      window = dataclasses.replace(window, lengths_of=planned.sample)
    found = drifts(planned, window, threshold)
    if min(len(planned.requests), len(window.requests)) < least_requests:
      found = [drift for drift in found if drift.name != "rate_rps" or _differ(planned, window)]
    if found:
      return window, found
  return None


def _differ(a: Window, b: Window) -> bool:
  """Whether the numbers of requests of two windows as wide differ by more than chance would have
  it: by three standard deviations of the difference of two Poisson counts.
  """
  num_a, num_b = len(a.requests), len(b.requests)
  return abs(num_a - num_b) > 3 * math.sqrt(num_a + num_b)
