"""When a pool should take another role, while it serves.

A planner is a callable of a `Planning`, which is all that it may look at; it gives the names of
pools and the roles that they should take. What cannot be is refused by the loop, and logged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

from pdjax.core.costs import StepCounts, count_slices
from pdjax.core.names import make, pick
from pdjax.core.sequence import Sequence
from pdjax.scheduling.scheduler import Scheduler


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolState:
  """A pool as a planner sees it; `role` is the one it has or is drained for."""

  name: str
  role: str
  scheduler: Scheduler


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Planning:
  """The pools that are up, and the prefilled sequences that wait for room in a decode pool.

  `is_changing`: a pool is being drained for another role.
  """

  now_s: float
  pools: Seq[PoolState]
  handing_over: Seq[Sequence] = ()
  is_changing: bool = False

  def with_role(self, role: str) -> list[PoolState]:
    return [pool for pool in self.pools if pool.role == role]


Planner = Callable[[Planning], Seq[tuple[str, str]]]


@dataclasses.dataclass(slots=True, kw_only=True)
class SlackPlanner:
  """Moves a pool to the half that misses its target, from the half that has slack.

  Prefill pools are late when the prompts queued there would wait longer than `ttft_s` (on average
  over the pools); decode pools when a step takes longer than `tpot_s`, or sequences wait for room
  there. A half has slack when it could do its work with one pool less within `slack` of its target.
  It looks every `interval_s`, waits `cooldown_s` after a change, and leaves each half one pool.

  It needs to know how long steps take; where nobody does it changes nothing.

  Raises:
    ValueError: a time or a share that is not positive.
  """

  ttft_s: float = 1.0
  tpot_s: float = 0.1
  slack: float = 0.7
  interval_s: float = 0.5
  cooldown_s: float = 5.0
  _next_s: float = dataclasses.field(default=0.0, init=False)

  def __post_init__(self):
    for name in ("ttft_s", "tpot_s", "slack", "interval_s", "cooldown_s"):
      if not getattr(self, name) > 0:
        raise ValueError(f"{name}={getattr(self, name)} must be positive")

  def __call__(self, planning: Planning) -> list[tuple[str, str]]:
    if planning.now_s < self._next_s or planning.is_changing:
      return []
    self._next_s = planning.now_s + self.interval_s
    prefill, decode = planning.with_role("prefill"), planning.with_role("decode")
    if not prefill or not decode:
      return []
    if any(pool.scheduler.predict_step_s is None for pool in (*prefill, *decode)):
      return []
    wait_s = sum(map(_queue_s, prefill))
    step_s = sum(map(_decode_s, decode))
    late_prefill = wait_s / len(prefill) > self.ttft_s
    late_decode = bool(planning.handing_over) or step_s / len(decode) > self.tpot_s
    change = None
    if late_prefill and not late_decode and len(decode) > 1:
      if step_s / (len(decode) - 1) <= self.slack * self.tpot_s and _fits_elsewhere(decode):
        change = (_emptiest(decode).name, "prefill")
    elif (
      late_decode
      and not late_prefill
      and len(prefill) > 1
      and wait_s / (len(prefill) - 1) <= self.slack * self.ttft_s
    ):
      change = (_emptiest(prefill).name, "decode")
    if change is None:
      return []
    self._next_s = planning.now_s + self.cooldown_s
    return [change]


def _queue_s(pool: PoolState) -> float:
  """Predicted time to prefill all that is queued and in progress, in steps of the whole budget."""
  scheduler = pool.scheduler
  left, budget = scheduler.prefill_tokens_left, scheduler.config.token_budget
  if not left:
    return 0.0
  num_steps = -(-left // budget)
  counts = count_slices(prefill_starts=(0,), prefill_tokens=(left // num_steps,), num_emitted=1)
  return num_steps * scheduler.predict_step_s(counts)


def _decode_s(pool: PoolState) -> float:
  """Predicted time of a decode step of all that run there."""
  running = pool.scheduler.running.values()
  if not running:
    return 0.0
  return pool.scheduler.predict_step_s(
    StepCounts(
      num_decodes=len(running),
      num_decode_keys=sum(seq.num_tokens for seq in running),
      num_emitted=len(running),
    )
  )


def _fits_elsewhere(pools: Seq[PoolState]) -> bool:
  """Whether the rows of all but the emptiest could take what that one runs."""
  leaving = _emptiest(pools)
  free = sum(pool.scheduler.pages.num_free_rows for pool in pools if pool is not leaving)
  return free >= len(leaving.scheduler.running)


def _emptiest(pools: Seq[PoolState]) -> PoolState:
  return min(
    pools, key=lambda p: (p.scheduler.prefill_tokens_left + p.scheduler.output_tokens_left, p.name)
  )


PLANNERS: dict[str, Planner | type] = {"slack": SlackPlanner}


def make_planner(name: str, options: Mapping[str, Any] | None = None) -> Planner:
  """The planner called `name`, for one run.

  Raises:
    ValueError: no such planner or option, or an option of the wrong type or out of range.
  """
  return make(pick(PLANNERS, name, "planner"), options or {}, f"planner {name}")
