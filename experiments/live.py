"""`--live`: a run while it goes: a small dashboard, or a line a second where there is no terminal.

Tokens a second, TTFT and ITL are of the last `WINDOW_S` of the run's own time; the rest is of now.
"""

from __future__ import annotations

import collections
import dataclasses
import shutil

from experiments.program import Progress, Status
from pdjax.analysis.verdict import time_text
from pdjax.core.events import Arrived, EventLog, Failed, Finished, each_step
from pdjax.metrics.latency import percentiles
from pdjax.serving.cluster import Pool

WINDOW_S = 10.0
MOST_SAMPLES = 20_000  # of the newest, where a simulation has more in its window
BAR = 10


@dataclasses.dataclass(slots=True)
class _Window:
  """Values of the last `WINDOW_S`, with their times."""

  samples: collections.deque = dataclasses.field(
    default_factory=lambda: collections.deque(maxlen=MOST_SAMPLES)
  )

  def add(self, time_s: float, value: float) -> None:
    self.samples.append((time_s, value))

  def values(self, now_s: float) -> list[float]:
    while self.samples and self.samples[0][0] < now_s - WINDOW_S:
      self.samples.popleft()
    return [value for _, value in self.samples]


class _Seen:
  """What has been read of one log so far."""

  def __init__(self, log: EventLog):
    self.log = log
    self.num_failed = 0
    self.ttft_s, self.itl_s = _Window(), _Window()
    self.tokens: dict[str, _Window] = {}
    self._num_read = 0
    self._arrival_s: dict[int, float] = {}
    self._last_token_s: dict[int, float] = {}

  def read_on(self) -> None:
    """Takes in what happened since the last look."""
    events = self.log.since(self._num_read)
    self._num_read += len(events)
    for event in events:
      match event:
        case Arrived():
          self._arrival_s.setdefault(event.request_id, event.time_s)
        case Finished() | Failed():
          self.num_failed += isinstance(event, Failed)
          self._arrival_s.pop(event.request_id, None)
          self._last_token_s.pop(event.request_id, None)
        case _:
          for step in each_step([event]):
            self._read_step(step)

  def _read_step(self, step) -> None:
    end_s = step.end_s
    self.tokens.setdefault(step.pool, _Window()).add(end_s, len(step.emitted_ids))
    for request_id in step.emitted_ids:
      last_s = self._last_token_s.get(request_id)
      if last_s is not None:
        self.itl_s.add(end_s, end_s - last_s)
      elif request_id in self._arrival_s:
        self.ttft_s.add(end_s, end_s - self._arrival_s[request_id])
      self._last_token_s[request_id] = end_s


class Live(Progress):
  """Progress that shows what the pools do. Reads the log as it grows; changes nothing."""

  every_s = 1.0

  def __init__(self, stream=None, **clock):
    super().__init__(stream, **clock)
    self._seen: _Seen | None = None
    self._height = 0  # of the dashboard that stands on the terminal

  def serving(self, status: Status) -> None:
    if self._seen is None or self._seen.log is not status.log:
      self._seen = _Seen(status.log)
    self._seen.read_on()
    if not self._is_terminal:
      self.update("; ".join((str(status), self._latencies(status.now_s), *self._short(status))))
      return
    columns, height = shutil.get_terminal_size()
    lines = [line[: columns - 1] for line in self._dashboard(status, height - 1)]
    up = f"\x1b[{self._height}A" if self._height else ""
    self._stream.write(up + "".join(f"\r\x1b[K{line}\n" for line in lines))
    self._stream.flush()
    self._height = len(lines)
    self.shown()

  def done(self, text: str) -> None:
    self._height = 0  # what stands there stays
    super().done(text)

  def update(self, text: str) -> None:
    self._height = 0
    super().update(text)

  def _latencies(self, now_s: float) -> str:
    parts = []
    for name, window in (("TTFT", self._seen.ttft_s), ("ITL", self._seen.itl_s)):
      found = percentiles(window.values(now_s))
      parts.append(f"{name} p50 {_time(found.p50)} p99 {_time(found.p99)}")
    return ", ".join(parts)

  def _tokens_per_s(self, pool: str, now_s: float) -> float:
    window = self._seen.tokens.get(pool)
    over_s = min(WINDOW_S, now_s)
    return sum(window.values(now_s)) / over_s if window is not None and over_s else 0.0

  def _short(self, status: Status) -> list[str]:
    return [
      f"{pool.name}: queue {len(pool.scheduler.waiting)}, rows {_rows(pool)}, pages "
      f"{_page_share(pool):.0%}, {self._tokens_per_s(pool.name, status.now_s):.1f} tokens/s"
      for pool in status.cluster.pools
    ]

  def _dashboard(self, status: Status, height: int) -> list[str]:
    """At most `height` lines: what scrolls off a terminal cannot be drawn over."""
    lines = [
      f"{status}, {self._seen.num_failed} failed",
      f"{self._latencies(status.now_s)} (last {WINDOW_S:g} s)",
      f"{'pool':<12}{'role':<9}{'queue':>6}{'rows':>6}  {'pages':<{BAR + 7}}{'tokens/s':>10}",
    ]
    for pool in status.cluster.pools:
      share = _page_share(pool)
      bar = ("#" * round(BAR * share)).ljust(BAR, ".")
      role = pool.role if pool.is_up else "down"
      lines.append(
        f"{pool.name:<12}{role:<9}{len(pool.scheduler.waiting):>6}{_rows(pool):>6}  "
        f"{bar} {share:>5.0%} {self._tokens_per_s(pool.name, status.now_s):>10.1f}"
      )
    if len(lines) > height:
      lines[height - 1 :] = [f"and {len(lines) - height + 1} more pools"]
    return lines


def _rows(pool: Pool) -> int:
  return len(pool.scheduler.running) + len(pool.scheduler.leaving)


def _page_share(pool: Pool) -> float:
  pages = pool.scheduler.pages
  return 1 - pages.num_free_pages / pages.config.num_pages


def _time(value_s: float | None) -> str:
  return "n/a" if value_s is None else time_text(value_s)
