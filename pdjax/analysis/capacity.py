"""From the step times of a device to its capacity and to targets that mean something on it."""

from __future__ import annotations

import bisect
import dataclasses
import statistics
from collections.abc import Callable, Iterable, Sequence

from pdjax.core.plan import StepPlan
from pdjax.metrics.goodput import Slo
from pdjax.scheduling.pages import PageConfig
from pdjax.scheduling.probe import probe_plan


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
  """Measured steps of one pool: `prefill` (tokens, seconds) of whole prompts, `decode` (rows,
  seconds) at a typical context. Both ascending. Between points times are interpolated linearly.
  """

  prefill: tuple[tuple[int, float], ...]
  decode: tuple[tuple[int, float], ...]

  def prefill_s(self, num_tokens: float) -> float:
    return _interpolate(self.prefill, num_tokens)

  def decode_s(self, num_rows: float) -> float:
    return _interpolate(self.decode, num_rows)


def _interpolate(points: Sequence[tuple[int, float]], x: float) -> float:
  """Linear between points and, with the slope of the nearest two, beyond them; at least 0."""
  if len(points) == 1:
    return points[0][1]
  i = min(max(1, bisect.bisect_left(points, (x,))), len(points) - 1)
  (x0, y0), (x1, y1) = points[i - 1], points[i]
  return max(0.0, y0 + (y1 - y0) * (x - x0) / (x1 - x0))


def probe_points(
  pages: PageConfig, longest_prompt: int, context: int
) -> Iterable[tuple[str, int, StepPlan]]:
  """The steps to time: (prefill or decode, tokens or rows, plan)."""
  longest_prompt = min(longest_prompt, pages.capacity_tokens)
  for num_tokens in sorted({max(1, longest_prompt // 8), longest_prompt // 2, longest_prompt}):
    if num_tokens:
      yield "prefill", num_tokens, probe_plan(pages, prefills=(num_tokens,))
  for num_rows in sorted({1, pages.num_rows}):
    plan = probe_plan(pages, decodes=num_rows, context=min(context, pages.capacity_tokens))
    yield "decode", num_rows, plan


def measure(
  pages: PageConfig,
  time_step_s: Callable[[StepPlan], float],
  *,
  longest_prompt: int,
  context: int,
  repeats: int = 1,
) -> StepTimes:
  """Times the probe steps; the median of `repeats` each."""
  points: dict[str, list[tuple[int, float]]] = {"prefill": [], "decode": []}
  for kind, size, plan in probe_points(pages, longest_prompt, context):
    times_s = [time_step_s(plan) for _ in range(repeats)]
    points[kind].append((size, statistics.median(times_s)))
  return StepTimes(prefill=tuple(points["prefill"]), decode=tuple(points["decode"]))


def capacity_rps(
  times: StepTimes,
  lengths: Sequence[tuple[int, int]],
  *,
  num_pools: int = 0,
  num_prefill_pools: int = 0,
  num_decode_pools: int = 0,
  num_rows: int,
) -> float:
  """Requests a second that pools could sustain with all rows busy and nothing waiting.

  A request costs a pool its prefill and, for each further token, its share of a decode step of all
  rows. An upper bound where prefill and decode cost the same in one step as in two. A mixed step,
  which reads the weights once for both, may beat it, in simulation by a per cent.

  `num_pools` are mixed; of those that do one half, the slower half decides.
  """
  row_s = times.decode_s(num_rows) / num_rows
  prefill_s = statistics.fmean(times.prefill_s(prompt) for prompt, _ in lengths)
  decode_s = statistics.fmean((output - 1) * row_s for _, output in lengths)
  halves_rps = [num_prefill_pools / prefill_s]
  if decode_s:
    halves_rps.append(num_decode_pools / decode_s)
  return num_pools / (prefill_s + decode_s) + min(halves_rps)


def derive_slo(
  times: StepTimes,
  *,
  num_rows: int,
  longest_prompt: int,
  ttft_multiple: float,
  tpot_multiple: float,
) -> Slo:
  """Targets as multiples of what this device does without any load.

  Sarathi-Serve, section 5.1: the TBT target is 5 (strict) or 25 (relaxed) times a decode step of
  32 rows without prefills; here of all rows. TTFT likewise, of the prefill of the longest prompt.
  """
  return Slo(
    ttft_s=ttft_multiple * times.prefill_s(longest_prompt),
    tpot_s=tpot_multiple * times.decode_s(num_rows),
  )
