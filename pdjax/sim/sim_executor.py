"""An executor in virtual time: durations come from a latency model, tokens are all 0."""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pdjax.core.clock import to_ticks
from pdjax.core.plan import StepPlan, StepResult
from pdjax.serving.executor import Handle, PageShape, export_bytes
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


class SimStroke:
  """A `StrokeTicket` of one device, which is busy until its end."""

  def __init__(self, ends_s: list[float], busy_until_s: list[float]):
    self._busy_until_s = busy_until_s
    self._set(ends_s)

  def cut(self, now_s: float) -> None:
    self._set(self.ends_s[: 1 + bisect.bisect_left(self.ends_s, now_s)])

  def is_ready(self) -> bool:
    return True

  def result(self) -> None:
    return None

  def _set(self, ends_s: list[float]) -> None:
    self.ends_s = ends_s
    self.finish_s = self._busy_until_s[0] = ends_s[-1]


class Way:
  """One direction of a pool's links, which a copy has for itself while it lasts. Keeps when."""

  def __init__(self):
    self._busy_s: list[tuple[float, float]] = []  # [start, end) of copies, ascending

  def free_s(self, start_s: float, took_s: float) -> float:
    """When so much time is free, from `start_s` on: the first gap that it fits in."""
    for busy_s, until_s in self._busy_s:
      if start_s + took_s <= busy_s:
        break
      start_s = max(start_s, until_s)
    return start_s

  def take(self, start_s: float, end_s: float, now_s: float) -> None:
    self._busy_s = [busy for busy in self._busy_s if busy[1] > now_s]
    bisect.insort(self._busy_s, (start_s, end_s))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SimPages:
  """What an export hands to the import: when its pages are all computed, and links to send over."""

  ready_s: float
  num_links: int
  way: Way  # out of the pool that has them


class SimExecutor:
  """One pool's device. Keeps when its steps end; steps queue, copies run beside them.

  `step_s` is the latency model; `steps_s(plan, num_steps)` that of a decode step and those after
  it, without which it takes no strokes. `link` is the way to and from other pools, one copy after
  another in each direction. A copy of n tokens moves n * `bytes_per_token` bytes, or the share of
  its layers, over as many links at once as both pools have devices that send and receive:
  `num_links` in each stage that has some of the layers. A step waits for the swaps before it, which
  go over `host_link`.

  A step computes the layers of one of `layer_groups` after those of another, in shares of its time.
  In a pipeline of `num_stages` each stage has as many groups and is busy on its own: steps follow
  one another from stage to stage, `hand_over_s(num_tokens)` apart. A decode waits for the step
  that computes its token.

  Raises:
    ValueError: layer groups that do not make equally many for each stage.
  """

  vocab_size: int | None = None
  is_up = True

  def __init__(
    self,
    *,
    step_s: Callable[[StepPlan], float],
    steps_s: Callable[[StepPlan, int], np.ndarray] | None = None,
    link: Link,
    bytes_per_token: int,
    num_links: int = 1,
    host_link: Link = PCIE_4,
    page_shape: PageShape | None = None,
    layer_groups: tuple[tuple[int, int], ...] = ((0, 1),),
    num_stages: int = 1,
    hand_over_s: Callable[[int], float] = lambda num_tokens: 0.0,
  ):
    if num_stages < 1 or len(layer_groups) % num_stages:
      raise ValueError(f"layer_groups={layer_groups} do not make num_stages={num_stages}")
    self.page_shape = page_shape
    self.bytes_per_token = bytes_per_token
    self.layer_groups, self.num_stages = layer_groups, num_stages
    self.repeats = steps_s is not None and num_stages == 1
    self._step_s, self._steps_s, self._hand_over_s = step_s, steps_s, hand_over_s
    self._link, self._host_link = link, host_link
    self._num_links = num_links
    self._busy_until_s = [0.0] * num_stages
    self._token_s: dict[int, float] = {}  # request id -> when its newest token is there, if later
    self._computed_s: dict[tuple, float] = {}  # exports announced -> when they are computed
    self._way_in, self._way_out = Way(), Way()

  def submit(
    self,
    plan: StepPlan,
    now_s: float,
    exports: Sequence[tuple[Handle, tuple[int, ...]]] = (),
  ) -> SimTicket:
    num_emitted = len(plan.decodes.request_ids)
    for s in plan.prefills:
      num_emitted += s.emits_token
    ends_s = self._group_ends_s(plan, now_s)
    if exports or self._computed_s:
      self._computed_s = {
        _key(handle): max(end_s for end_s, own in zip(ends_s, self._holds(handle)) if own)
        for handle, _ in exports
      }
    return SimTicket(finish_s=ends_s[-1], value=_zeros(num_emitted))

  def submit_stroke(
    self, plan: StepPlan, now_s: float, num_steps: int, until_s: float | None
  ) -> SimStroke:
    at_s = max(now_s, self._busy_until_s[0])
    ends_s = []
    for step_s in self._steps_s(plan, num_steps).tolist():
      at_s += to_ticks(step_s)
      ends_s.append(at_s)
      if until_s is not None and at_s > until_s:
        break
    return SimStroke(ends_s, self._busy_until_s)

  def export(self, handle: Handle, *, page_ids: tuple[int, ...], now_s: float) -> Handle:
    return dataclasses.replace(
      handle,
      num_bytes=export_bytes(self, handle),
      payload=SimPages(
        ready_s=self._computed_s.get(_key(handle), now_s),
        num_links=self._links_of(handle),
        way=self._way_out,
      ),
    )

  def import_(
    self, handle: Handle, *, row: int, page_ids: tuple[int, ...], now_s: float
  ) -> SimTicket:
    return self._receive(handle, handle.payload, now_s)

  def drop(self, handle: Handle) -> None:
    pass  # nothing was kept

  def recover(self) -> bool:
    return False

  def _holds(self, handle: Handle) -> list[bool]:
    """Of each layer group, whether it has some of the handle's layers."""
    first, last = handle.layers or (0, self.layer_groups[-1][1])
    return [start < last and first < end for start, end in self.layer_groups]

  def _links_of(self, handle: Handle) -> int:
    per_stage = len(self.layer_groups) // self.num_stages
    return self._num_links * len(
      {i // per_stage for i, own in enumerate(self._holds(handle)) if own}
    )

  def _receive(self, handle: Handle, pages: SimPages, now_s: float) -> SimTicket:
    """A copy over the links, as soon as both pools have theirs free for it."""
    num_links = min(self._links_of(handle), pages.num_links)
    took_s = to_ticks(self._link.copy_s(handle.num_bytes / num_links))
    ways, start_s = (pages.way, self._way_in), max(now_s, to_ticks(pages.ready_s))
    while (free_s := max(way.free_s(start_s, took_s) for way in ways)) > start_s:
      start_s = free_s
    for way in ways:
      way.take(start_s, start_s + took_s, now_s)
    return SimTicket(finish_s=start_s + took_s)

  def _group_ends_s(self, plan: StepPlan, now_s: float) -> list[float]:
    """When a step submitted now has computed each layer group."""
    took_s = self._step_s(plan)
    if plan.swap_outs or plan.swap_ins:
      took_s += self._host_link.copy_s(plan.num_swapped_tokens * self.bytes_per_token)
    if len(self.layer_groups) == 1:
      end_s = self._busy_until_s[0] = max(now_s, self._busy_until_s[0]) + to_ticks(took_s)
      return [end_s]
    at_s = now_s
    if self.num_stages > 1:
      at_s = max([now_s, *(self._token_s.get(i, 0.0) for i in plan.decodes.request_ids)])
    per_stage, num_layers = len(self.layer_groups) // self.num_stages, self.layer_groups[-1][1]
    ends_s = []
    for stage in range(self.num_stages):
      if stage:
        at_s += to_ticks(self._hand_over_s(plan.num_tokens))
      start_s = at_s = max(at_s, self._busy_until_s[stage])
      groups = self.layer_groups[stage * per_stage : (stage + 1) * per_stage]
      for _, last in groups:
        at_s = start_s + to_ticks(took_s * ((last - groups[0][0]) / num_layers))
        ends_s.append(at_s)
      self._busy_until_s[stage] = at_s
    if self.num_stages > 1:
      emitting = [s.request_id for s in plan.prefills if s.emits_token]
      self._token_s = {i: token_s for i, token_s in self._token_s.items() if token_s > now_s}
      self._token_s |= dict.fromkeys((*emitting, *plan.decodes.request_ids), at_s)
    return ends_s


@functools.cache
def _zeros(num_tokens: int) -> StepResult:
  """The result of a step with so many tokens; made once, as a log keeps those of every step."""
  return StepResult(token_ids=(0,) * num_tokens)


def _key(handle: Handle) -> tuple:
  return handle.request_id, handle.start, handle.num_tokens, handle.layers
