"""Whether traffic is still that for which pools were placed (DistServe, section 4.3).

Changes nothing: pure functions of arrivals and lengths, from a log or from a trace.
"""

from __future__ import annotations

import dataclasses
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
  """The traffic of some time: at least one request."""

  start_s: float
  end_s: float
  requests: tuple[Seen, ...]

  @property
  def rate_rps(self) -> float:
    return len(self.requests) / (self.end_s - self.start_s)

  @property
  def mean_prompt_tokens(self) -> float:
    return statistics.fmean(r.prompt_tokens for r in self.requests)

  @property
  def mean_output_tokens(self) -> float:
    return statistics.fmean(r.output_tokens for r in self.requests)


def windows(requests: Sequence[Seen], width_s: float) -> list[Window]:
  """Cuts requests, in order of arrival, into windows of `width_s`; the last, cut short, is left out
  unless it is the only one. Windows without requests are left out as well.

  Raises:
    ValueError: a width that is not positive.
  """
  if not width_s > 0:
    raise ValueError(f"width_s={width_s} must be positive")
  found: dict[int, list[Seen]] = {}
  for request in requests:
    found.setdefault(int(request.arrival_s // width_s), []).append(request)
  if len(found) > 1:
    found.pop(max(found))
  return [
    Window(start_s=i * width_s, end_s=(i + 1) * width_s, requests=tuple(own))
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


def drifts(planned: Window, now: Window, threshold: float) -> list[Drift]:
  """What changed by more than a share of `threshold`, up or down by the same factor.

  Raises:
    ValueError: a threshold that is not positive.
  """
  if not threshold > 0:
    raise ValueError(f"threshold={threshold} must be positive")
  found = []
  for name in ("rate_rps", "mean_prompt_tokens", "mean_output_tokens"):
    before, after = getattr(planned, name), getattr(now, name)
    if max(after / before, before / after) > 1 + threshold:
      found.append(Drift(name=name, before=before, after=after))
  return found


def first_drift(
  planned: Window, later: Iterable[Window], threshold: float, *, least_requests: int = 1
) -> tuple[Window, list[Drift]] | None:
  """The first window of enough requests that drifted, and how; None where all stayed.

  A mean over n requests moves by chance, a rate by about 1 / sqrt(n): too few show nothing.
  """
  for window in later:
    if len(window.requests) >= least_requests and (found := drifts(planned, window, threshold)):
      return window, found
  return None
