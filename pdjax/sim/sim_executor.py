"""An executor in virtual time: durations come from a latency model, tokens are all 0."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from pdjax.core.clock import to_ticks
from pdjax.core.plan import StepPlan, StepResult
from pdjax.serving.executor import Handle, PageShape
from pdjax.sim.hardware import PCIE_4, Link


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SimTicket:
  """Work whose end is known when it begins. The virtual clock decides when that is reached."""

  finish_s: float
  value: Any = None

  def is_ready(self) -> bool:
    return True

  def result(self) -> Any:
    return self.value


class SimExecutor:
  """One pool's device. Keeps when its last step ends; steps queue, copies run beside them.

  `step_s` is the latency model, `link` the way in from other pools: one copy after another. A copy
  of n tokens moves n * `kv_bytes_per_token` bytes, over as many links at once as both pools have
  devices that send and receive (`num_links`). A step waits for the swaps before it, which go over
  `host_link`.
  """

  vocab_size: int | None = None

  def __init__(
    self,
    *,
    step_s: Callable[[StepPlan], float],
    link: Link,
    kv_bytes_per_token: int,
    num_links: int = 1,
    host_link: Link = PCIE_4,
    page_shape: PageShape | None = None,
  ):
    self.page_shape = page_shape
    self._step_s = step_s
    self._link, self._host_link = link, host_link
    self._kv_bytes_per_token = kv_bytes_per_token
    self._num_links = num_links
    self._busy_until_s = 0.0
    self._link_busy_until_s = 0.0

  def submit(self, plan: StepPlan, now_s: float) -> SimTicket:
    num_emitted = sum(s.emits_token for s in plan.prefills) + len(plan.decodes)
    result = StepResult(token_ids=(0,) * num_emitted)
    return SimTicket(finish_s=self._step_end_s(plan, now_s), value=result)

  def export(self, handle: Handle, *, page_ids: tuple[int, ...], now_s: float) -> Handle:
    num_tokens = handle.num_tokens - handle.start
    num_bytes = num_tokens * self._kv_bytes_per_token
    return dataclasses.replace(handle, num_bytes=num_bytes, payload=self._num_links)

  def import_(
    self, handle: Handle, *, row: int, page_ids: tuple[int, ...], now_s: float
  ) -> SimTicket:
    return self._receive(handle.num_bytes, min(self._num_links, handle.payload), now_s)

  def drop(self, handle: Handle) -> None:
    pass  # nothing was kept

  def recover(self) -> bool:
    return False

  def _receive(self, num_bytes: int, num_links: int, now_s: float) -> SimTicket:
    start_s = max(now_s, self._link_busy_until_s)
    self._link_busy_until_s = to_ticks(start_s + self._link.copy_s(num_bytes / num_links))
    return SimTicket(finish_s=self._link_busy_until_s)

  def _step_end_s(self, plan: StepPlan, now_s: float) -> float:
    start_s = max(now_s, self._busy_until_s)
    swap_s = 0.0
    if plan.num_swapped_tokens:
      swap_s = self._host_link.copy_s(plan.num_swapped_tokens * self._kv_bytes_per_token)
    self._busy_until_s = to_ticks(start_s + swap_s + self._step_s(plan))
    return self._busy_until_s
