"""What the pools did with their time. Changes nothing: pure functions of the event log."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator

from pdjax.core.costs import StepCounts, count_slices, later, step_costs, total_bytes, total_flops
from pdjax.core.events import Arrived, Copied, Event, Step, Stroke
from pdjax.core.model_config import ModelConfig


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
  """A sum over steps. `flops` and `num_bytes` are None where the model was not given."""

  num_steps: int = 0
  busy_s: float = 0.0
  num_prefill_tokens: int = 0
  num_decode_tokens: int = 0
  flops: int | None = None
  num_bytes: float | None = None

  def __add__(self, other: Work) -> Work:
    def add(a, b):
      return None if a is None or b is None else a + b

    return Work(
      **{f.name: add(getattr(self, f.name), getattr(other, f.name))
         for f in dataclasses.fields(Work)}
    )  # fmt: skip

  @property
  def num_tokens(self) -> int:
    return self.num_prefill_tokens + self.num_decode_tokens

  @property
  def tokens_per_step(self) -> float | None:
    return self.num_tokens / self.num_steps if self.num_steps else None

  @property
  def flop_per_byte(self) -> float | None:
    return self.flops / self.num_bytes if self.num_bytes else None

  @property
  def flops_per_s(self) -> float | None:
    """FLOP/s while busy: over the peak of the pool's devices it is the MFU of these steps."""
    return None if self.flops is None or not self.busy_s else self.flops / self.busy_s

  @property
  def bytes_per_s(self) -> float | None:
    """Bytes/s while busy: over the peak of the pool's devices it is the MBU of these steps."""
    return None if self.num_bytes is None or not self.busy_s else self.num_bytes / self.busy_s


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolUsage:
  """What one pool did in a run. `by_kind` has the kinds of step that occurred."""

  pool: str
  span_s: float  # of the run, the same for every pool
  total: Work
  by_kind: dict[str, Work]

  @property
  def busy_share(self) -> float | None:
    """Time inside steps / time of the run. Steps of a pool never overlap, so at most 1."""
    return self.total.busy_s / self.span_s if self.span_s else None


def first_and_last(step: Step | Stroke) -> tuple[StepCounts, StepCounts]:
  """What the first and the last step of a stroke count; of a step, its own twice."""
  if isinstance(step, Stroke):
    num_decodes = len(step.decode_ids)
    first = count_slices(decode_positions=step.decode_positions, num_emitted=num_decodes)
    return first, later(first, len(step.ends_s) - 1)
  # Every decode row goes through the LM head, also one whose token nobody waits for any more.
  emitted = set(step.emitted_ids)
  num_prefills_emitted = sum(request_id in emitted for request_id in step.prefill_ids)
  counts = count_slices(
    prefill_starts=step.prefill_starts,
    prefill_tokens=step.prefill_tokens,
    decode_positions=step.decode_positions,
    num_emitted=len(step.decode_ids) + num_prefills_emitted,
  )
  return counts, counts


def step_work(
  step: Step | Stroke, config: ModelConfig | None = None, *, bytes_per_value: float = 2
) -> Work:
  """The work of one step, or of those in a stroke; FLOPs and bytes where the model is given.

  `bytes_per_value` is the width of weights, K, V and activations.
  """
  num_steps = len(step.ends_s) if isinstance(step, Stroke) else 1
  first, last = first_and_last(step)
  flops = num_bytes = None
  if config is not None:
    # What a step costs grows by the same with each: the sum is that of the first and the last.
    ends = [_cost(first, config, bytes_per_value)]
    ends.append(ends[0] if last is first else _cost(last, config, bytes_per_value))
    both_flops, both_bytes = map(sum, zip(*ends))
    flops, num_bytes = num_steps * both_flops // 2, num_steps * both_bytes / 2
  return Work(
    num_steps=num_steps,
    busy_s=step.end_s - step.start_s,
    num_prefill_tokens=first.num_prefill_tokens,
    num_decode_tokens=num_steps * first.num_decodes,
    flops=flops,
    num_bytes=num_bytes,
  )


def works(
  log: Iterable[Event], config: ModelConfig | None = None, *, bytes_per_value: float = 2
) -> Iterator[tuple[Step | Stroke, Work]]:
  """The steps and strokes of a log, each with its work."""
  for event in log:
    if isinstance(event, Step | Stroke):
      yield event, step_work(event, config, bytes_per_value=bytes_per_value)


def _cost(counts: StepCounts, config: ModelConfig, bytes_per_value: float) -> tuple[int, float]:
  ops = step_costs(
    counts,
    config,
    bytes_per_weight=bytes_per_value,
    bytes_per_kv=bytes_per_value,
    bytes_per_activation=bytes_per_value,
  )
  return total_flops(ops), total_bytes(ops)


def span_s(log: Iterable[Event]) -> float:
  """From the first arrival, step or copy to the end of the last event; 0 for an empty log."""
  starts_s, ends_s = [], []
  for event in log:
    extended = isinstance(event, Step | Stroke | Copied)
    ends_s.append(event.end_s if extended else event.time_s)
    if extended or isinstance(event, Arrived):
      starts_s.append(event.start_s if extended else event.time_s)
  return max(ends_s) - min(starts_s) if starts_s else 0.0


def pool_usage(
  log: Iterable[Event], config: ModelConfig | None = None, *, bytes_per_value: float = 2
) -> dict[str, PoolUsage]:
  """The usage of each pool that made a step, in order of first step. Does not change the log."""
  log = list(log)
  by_pool: dict[str, dict[str, Work]] = {}
  for step, work in works(log, config, bytes_per_value=bytes_per_value):
    kinds = by_pool.setdefault(step.pool, {})
    kinds[step.kind] = kinds[step.kind] + work if step.kind in kinds else work
  run_s = span_s(log)
  return {
    pool: PoolUsage(
      pool=pool, span_s=run_s, total=_sum(kinds.values()), by_kind=dict(sorted(kinds.items()))
    )
    for pool, kinds in by_pool.items()
  }


def _sum(works: Iterable[Work]) -> Work:
  first, *rest = works
  for work in rest:
    first = first + work
  return first


def overlaps(log: Iterable[Event]) -> dict[str, dict[str, float]]:
  """Of the time that each pool spends in steps, the shares in which another is in one, by its kind.

  Kinds are those of `Step`. Where several others are in steps they share the time.
  """
  changes = []
  for event in log:
    if isinstance(event, Step | Stroke):
      changes += [(event.start_s, 1, event.pool, event.kind)]
      changes += [(event.end_s, -1, event.pool, event.kind)]
  in_steps: collections.Counter[tuple[str, str]] = collections.Counter()  # of a pool and a kind
  total_s: collections.Counter[str] = collections.Counter()
  beside_s: dict[str, collections.Counter[str]] = {
    pool: collections.Counter() for _, _, pool, _ in changes
  }
  before_s = 0.0
  for time_s, change, pool, kind in sorted(changes):
    busy = [key for key, number in in_steps.items() if number]
    for name in {name for name, _ in busy}:
      others = [its for other, its in busy if other != name]
      total_s[name] += time_s - before_s
      for its in others:
        beside_s[name][its] += (time_s - before_s) / len(others)
    in_steps[pool, kind] += change
    before_s = time_s
  return {
    pool: {kind: seconds / total_s[pool] for kind, seconds in own.items() if seconds}
    for pool, own in beside_s.items()
  }


def prefix_hits(log: Iterable[Event]) -> tuple[int, int]:
  """Prompt tokens that came from a prefix cache, and all prompt tokens of requests that started.

  Counted when a request first gets a slice: what it finds again after a preemption is its own.
  """
  lengths: dict[int, int] = {}
  num_hits = num_tokens = 0
  for event in log:
    if isinstance(event, Arrived):
      lengths[event.request_id] = event.num_prompt_tokens
    elif isinstance(event, Step):
      for request_id, start in zip(event.prefill_ids, event.prefill_starts):
        if request_id in lengths:
          num_tokens += lengths.pop(request_id)
          num_hits += start
  return num_hits, num_tokens
