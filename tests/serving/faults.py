"""An executor in virtual time that fails on demand, and takes its cache along as a device does."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from virtual import step_s

from pdjax.scheduling.pages import PageConfig
from pdjax.serving.executor import PoolLost
from pdjax.sim.checksum_executor import ChecksumExecutor
from pdjax.sim.hardware import Link

FAULTS = ("submit", "step", "slow step", "export", "import", "copy", "slow copy")
SLOW_S = 40.0


class Fault(Exception):
  """What a test broke."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FailingTicket:
  finish_s: float
  error: Exception

  def is_ready(self) -> bool:
    return True

  def result(self) -> None:
    raise self.error


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LosableTicket:
  """Work that is lost with any of the executors that it needs."""

  ticket: object
  needs: tuple[tuple[FaultyExecutor, int], ...]  # and their lives when it began
  undo: Callable[[], None] = lambda: None  # what it would still have done

  @property
  def is_lost(self) -> bool:
    return any(executor.life != life for executor, life in self.needs)

  @property
  def finish_s(self) -> float:
    return 0.0 if self.is_lost else self.ticket.finish_s

  def is_ready(self) -> bool:
    return True

  def result(self):
    if self.is_lost:
      self.undo()
      raise PoolLost("killed by a test")
    return self.ticket.result()


class FaultyExecutor(ChecksumExecutor):
  """The checksum model, whose next call named in `armed` fails, and all work of `broken` requests.

  `kill` ends its process, as it were: it comes back when it has been looked at a few times after
  `recover`, unless it was killed for good.

  With `donates` a step or a copy that fails has taken the cache with it: all that follows fails
  too, what is gathered from it as well, until `recover` brings an empty one.
  """

  def __init__(self, pages: PageConfig, *, donates: bool, latency_s: float = 1e-3, **options):
    link = Link(name="test", latency_s=latency_s, bytes_per_s=1e6)
    super().__init__(
      num_pages=pages.num_pages, page_size=pages.page_size, step_s=step_s, link=link, **options
    )
    self._pages, self._donates = pages, donates
    self._is_lost = self._is_deleted = False  # the second from the call on
    self.armed: set[str] = set()
    self.broken: set[int] = set()
    self.num_recoveries = 0
    self.num_deleted_uses = 0  # of a cache that a failed call has taken along
    self.life = 0
    self._looks_left: int | None = 0  # until it is up; None: for ever
    self._is_killed = False

  @property
  def is_up(self):
    if self._is_killed:
      if self._looks_left is None:
        raise PoolLost("killed for good")
      return False
    self._looks_left = max(0, self._looks_left - 1)
    return not self._looks_left

  def kill(self, *, for_good=False):
    self.life += 1
    self._is_killed = True
    self._looks_left = None if for_good else 20

  def submit(self, plan, now_s, exports=()):
    self._check_alive()
    return LosableTicket(ticket=self._submit(plan, now_s, exports), needs=((self, self.life),))

  def _check_alive(self):
    if self._is_killed:
      raise PoolLost("killed by a test")
    assert not self._looks_left, "used before it was back"

  def _submit(self, plan, now_s, exports):
    self.num_deleted_uses += self._is_deleted
    ids = {s.request_id for s in plan.prefills} | set(plan.decodes.request_ids)
    if self._takes("submit"):
      self._is_lost = self._is_deleted = self._donates
      raise Fault("submit")
    if self._is_lost:
      return FailingTicket(finish_s=self._group_ends_s(plan, now_s)[-1], error=Fault("step before"))
    ticket = super().submit(plan, now_s, exports)
    if self._takes("step") or ids & self.broken:
      self._is_lost = self._donates
      return FailingTicket(finish_s=ticket.finish_s, error=Fault("step"))
    if self._takes("slow step"):
      self._busy_until_s[-1] += SLOW_S
      return dataclasses.replace(ticket, finish_s=ticket.finish_s + SLOW_S)
    return ticket

  def export(self, handle, *, page_ids, now_s):
    self._check_alive()
    self.num_deleted_uses += self._is_deleted
    if self._takes("export") or handle.request_id in self.broken:
      raise Fault("export")
    handle = super().export(handle, page_ids=page_ids, now_s=now_s)
    # The gather fails behind a step that is in its way and fails.
    payload = self._busy_until_s[-1] if self._is_lost else handle.payload
    return dataclasses.replace(handle, payload=(self, self.life, payload))

  def import_(self, handle, *, row, page_ids, now_s):
    self._check_alive()
    source, life, payload = handle.payload
    handle = dataclasses.replace(handle, payload=payload)
    before = len(self._copies)
    ticket = self._import(handle, row=row, page_ids=page_ids, now_s=now_s)
    copies = self._copies[before:]

    def undo():  # its pages are free now, and others may have them when it would have landed
      self._copies = [copy for copy in self._copies if not any(copy is own for own in copies)]

    return LosableTicket(ticket=ticket, needs=((self, self.life), (source, life)), undo=undo)

  def _import(self, handle, *, row, page_ids, now_s):
    if self._takes("import"):
      raise Fault("import")
    if isinstance(handle.payload, float):
      return FailingTicket(finish_s=max(now_s, handle.payload), error=Fault("gather"))
    ticket = super().import_(handle, row=row, page_ids=page_ids, now_s=now_s)
    was_lost = self._is_lost
    if self._takes("copy") or was_lost:
      self._copies.pop()
      self._is_lost = self._donates
      error = Fault("copy before" if was_lost else "copy")
      return FailingTicket(finish_s=ticket.finish_s, error=error)
    for slow, wait_s in (("slow copy", SLOW_S), ("endless copy", math.inf)):
      if self._takes(slow):
        end_s = ticket.finish_s + wait_s
        self._copies[-1] = (end_s, *self._copies[-1][1:])
        return dataclasses.replace(ticket, finish_s=end_s)
    return ticket

  def recover(self):
    if not self._is_lost and not self._is_killed:
      return False
    if self._is_killed:
      self._swapped = {}
    self._is_killed = self._is_killed and self._looks_left is None
    fresh = FaultyExecutor(self._pages, donates=True)
    self._computed_s = {}
    self._keys, self._values = fresh._keys, fresh._values
    self._table, self._last_token, self._copies = {}, {}, []
    self._is_lost = self._is_deleted = False
    self.num_recoveries += 1
    return True

  def _takes(self, call: str) -> bool:
    if call in self.armed:
      self.armed.remove(call)
      return True
    return False


def make_faulty(cluster, *, donates: bool, latency_s: float = 1e-3):
  """Gives every pool of `cluster` such an executor."""
  for pool in cluster.pools:
    pool.executor = FaultyExecutor(
      pool.scheduler.pages.config,
      donates=donates,
      latency_s=latency_s,
      layer_groups=pool.executor.layer_groups,
      num_stages=pool.executor.num_stages,
    )
  return cluster
