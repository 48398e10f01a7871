"""How full and how busy pools are over time, for timelines. Changes nothing."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from pdjax.core.events import (
  Arrived,
  Copied,
  Event,
  Failed,
  Fetched,
  Finished,
  Preempted,
  Step,
  Stroke,
)
from pdjax.metrics.utilisation import Work


class Peaks(NamedTuple):
  """Of all devices of a pool together."""

  flops_per_s: float
  bytes_per_s: float


class Count(NamedTuple):
  """From `time_s` on a pool's counter has these values, until its next."""

  time_s: float
  pool: str
  name: str
  values: Mapping[str, float]


@dataclasses.dataclass(slots=True)
class _Filled:
  """Who waits in a pool, and whose tokens lie in its cache."""

  waiting: set[int] = dataclasses.field(default_factory=set)
  num_tokens: dict[int, int] = dataclasses.field(default_factory=dict)
  num_pages: int = 0

  def put(self, request_id: int, num_tokens: int, page_size: int) -> None:
    before = self.num_tokens.pop(request_id, 0)
    self.num_pages += -(-num_tokens // page_size) - -(-before // page_size)
    if num_tokens:
      self.num_tokens[request_id] = num_tokens


def step_counts(
  works: Iterable[tuple[Step | Stroke, Work]], *, peaks: Mapping[str, Peaks] | None = None
) -> Iterator[Count]:
  """Tokens of each step, and where its work has them FLOP/s and bytes/s: in percent of `peaks` for
  pools that have some. 0 while a pool has no step. `works` are those of `utilisation`.
  """
  last_end_s: dict[str, float] = {}
  names: dict[str, tuple[str, ...]] = {}
  for event, work in works:
    pool = event.pool
    if pool in last_end_s and last_end_s[pool] < event.start_s:
      yield from _nothing(last_end_s[pool], pool, names[pool])
    per_step = work.num_steps
    yield Count(
      event.start_s,
      pool,
      "tokens per step",
      {
        "prefill": work.num_prefill_tokens / per_step,
        "decode": work.num_decode_tokens / per_step,
      },
    )
    names[pool] = ("tokens per step",)
    if work.flops_per_s is not None:
      peak = (peaks or {}).get(pool)
      for name, value, most in (
        ("FLOP/s", work.flops_per_s, peak and peak.flops_per_s),
        ("bytes/s", work.bytes_per_s, peak and peak.bytes_per_s),
      ):
        name, value = (f"{name}, % of peak", 100 * value / most) if most else (name, value)
        yield Count(event.start_s, pool, name, {"": value})
        names[pool] += (name,)
    last_end_s[pool] = event.end_s
  for pool, end_s in last_end_s.items():
    yield from _nothing(end_s, pool, names[pool])


def _nothing(time_s: float, pool: str, names: Iterable[str]) -> Iterator[Count]:
  for name in names:
    values = ("prefill", "decode") if name == "tokens per step" else ("",)
    yield Count(time_s, pool, name, dict.fromkeys(values, 0))


def fill_counts(log: Iterable[Event], *, page_size: int) -> Iterator[Count]:
  """How many requests wait in each pool, and on how many pages tokens lie.

  Pages that are reserved and empty are not counted, those that requests share are for each.
  """
  pools: dict[str, _Filled] = collections.defaultdict(_Filled)

  def queue(time_s: float, pool: str) -> Count:
    return Count(time_s, pool, "requests that wait", {"": len(pools[pool].waiting)})

  def pages(time_s: float, pool: str) -> Count:
    return Count(time_s, pool, "pages in use", {"": pools[pool].num_pages})

  for event in log:
    match event:
      case Arrived(pool=str(pool)):
        pools[pool].waiting.add(event.request_id)
        yield queue(event.time_s, pool)
      case Step():
        own = pools[event.pool]
        began = own.waiting.intersection(event.prefill_ids)
        if began:
          own.waiting -= began
          yield queue(event.start_s, event.pool)
        for i, start, n in zip(event.prefill_ids, event.prefill_starts, event.prefill_tokens):
          own.put(i, start + n, page_size)
        for i, position in zip(event.decode_ids, event.decode_positions):
          own.put(i, position + 1, page_size)
        yield pages(event.end_s, event.pool)
      case Stroke():
        own, num_steps = pools[event.pool], len(event.ends_s)
        for i, position in zip(event.decode_ids, event.decode_positions):
          own.put(i, position + num_steps, page_size)
        yield pages(event.end_s, event.pool)
      case Fetched():
        pools[event.pool].put(event.request_id, event.num_tokens, page_size)
        yield pages(event.time_s, event.pool)
      case Copied():
        num_tokens = pools[event.source].num_tokens.get(event.request_id, event.num_tokens)
        pools[event.source].put(event.request_id, 0, page_size)
        pools[event.target].put(event.request_id, num_tokens, page_size)
        yield pages(event.end_s, event.source)
        yield pages(event.end_s, event.target)
      case Preempted():
        pools[event.pool].put(event.request_id, 0, page_size)
        pools[event.pool].waiting.add(event.request_id)
        yield queue(event.time_s, event.pool)
        yield pages(event.time_s, event.pool)
      case Finished() | Failed():
        for pool, own in pools.items():
          if event.request_id in own.waiting:
            own.waiting.discard(event.request_id)
            yield queue(event.time_s, pool)
          if event.request_id in own.num_tokens:
            own.put(event.request_id, 0, page_size)
            yield pages(event.time_s, pool)
