"""The checksum model in virtual time: real pages, real tokens, no weights.

Whatever scheduling, paging, chunking, preemption or hand-off gets wrong shows as a wrong token:
compare with `pdjax.core.checksum.generate`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from pdjax.core import checksum
from pdjax.core.plan import StepPlan, StepResult
from pdjax.serving.executor import Handle, PageShape
from pdjax.sim.hardware import Link
from pdjax.sim.sim_executor import SimExecutor, SimTicket


class ChecksumExecutor(SimExecutor):
  """Keeps K and V of every slot, a page table and a last token per row, as an engine does.

  Work takes effect in the order of submission, as on a device's stream; a copy lands before the
  first step submitted at or after its end. `fails(request_id)` is why the request's next token
  cannot be computed, or None: then the result has None for it, and the others go on.
  """

  vocab_size = checksum.VOCAB_SIZE

  def __init__(
    self,
    *,
    num_pages: int,
    page_size: int,
    step_s: Callable[[StepPlan], float],
    link: Link,
    kv_bytes_per_token: int = 8,
    fails: Callable[[int], str | None] = lambda request_id: None,
  ):
    super().__init__(
      step_s=step_s,
      link=link,
      kv_bytes_per_token=kv_bytes_per_token,
      page_shape=PageShape(
        page_size=page_size, num_layers=1, num_kv_heads=1, head_dim=1, dtype="uint32"
      ),
    )
    self._page_size = page_size
    self._fails = fails
    self._keys = [[0] * page_size for _ in range(num_pages)]  # [page][slot]
    self._values = [[0] * page_size for _ in range(num_pages)]
    self._table: dict[tuple[int, int], int] = {}  # (row, index) -> page
    self._last_token: dict[int, int] = {}  # by row
    self._swapped: dict[int, list[tuple[list[int], list[int]]]] = {}  # request id -> its pages
    self._copies: list[tuple[float, Handle, int, tuple[int, ...]]] = []  # not yet landed

  def submit(self, plan: StepPlan, now_s: float) -> SimTicket:
    """Runs a step at once; only its time is in the future.

    Raises:
      ValueError: a prefill slice without token ids.
      KeyError: a row whose page table or last token was never set.
    """
    self._land(now_s)
    self._swap(plan)
    updates = plan.page_updates
    for row, index, page in zip(updates.rows, updates.indices, updates.page_ids, strict=True):
      self._table[row, index] = page
    ends = []  # request id, row and last position of every slice that gets a token
    for s in plan.prefills:
      if s.token_ids is None:
        raise ValueError(f"request {s.request_id}: the checksum model needs prompt ids")
      self._write(s.row, s.start, s.token_ids)
      if s.emits_token:
        ends.append((s.request_id, s.row, s.start + s.num_tokens - 1))
    decodes = plan.decodes
    for request_id, row, position in zip(
      decodes.request_ids, decodes.rows, decodes.positions, strict=True
    ):
      self._write(row, position, (self._last_token[row],))
      ends.append((request_id, row, position))

    token_ids, errors = [], []
    for request_id, row, position in ends:
      reason = self._fails(request_id)
      token_id = checksum.next_token(self._attend(row, position + 1)) if reason is None else 0
      self._last_token[row] = token_id  # of a failed request too: a step in flight may read it
      token_ids.append(token_id if reason is None else None)
      if reason is not None:
        errors.append((request_id, reason))
    result = StepResult(token_ids=tuple(token_ids), errors=tuple(errors))
    return SimTicket(finish_s=self._step_end_s(plan, now_s), value=result)

  def export(self, handle: Handle, *, page_ids: tuple[int, ...], now_s: float) -> Handle:
    """Copies the pages out, so the source may change them afterwards."""
    self._land(now_s)
    handle = super().export(handle, page_ids=page_ids, now_s=now_s)
    pages = page_ids[: -(-(handle.num_tokens - handle.start) // self._page_size)]
    payload = tuple((tuple(self._keys[page]), tuple(self._values[page])) for page in pages)
    return dataclasses.replace(handle, payload=payload)

  def import_(
    self, handle: Handle, *, row: int, page_ids: tuple[int, ...], now_s: float
  ) -> SimTicket:
    """Copies the handed-over pages in; the row's page table becomes `page_ids`."""
    ticket = self._receive(handle.num_bytes, 1, now_s)
    self._copies.append((ticket.finish_s, handle, row, page_ids))
    return ticket

  def _swap(self, plan: StepPlan) -> None:
    for request_id in plan.swap_drops:
      self._swapped.pop(request_id, None)  # of a plan that failed there may be none
    for swap in plan.swap_outs:
      pages = swap.page_ids
      self._swapped[swap.request_id] = [(self._keys[p][:], self._values[p][:]) for p in pages]
    for swap in plan.swap_ins:
      swapped = self._swapped.pop(swap.request_id)
      for page, (keys, values) in zip(swap.page_ids, swapped, strict=True):
        self._keys[page][:], self._values[page][:] = keys, values

  def _land(self, now_s: float) -> None:
    landed = [copy for copy in self._copies if copy[0] <= now_s]
    self._copies = [copy for copy in self._copies if copy[0] > now_s]
    for _, handle, row, page_ids in landed:
      for index, page in enumerate(page_ids):
        self._table[row, index] = page
      for page, (keys, values) in zip(page_ids[handle.start // self._page_size :], handle.payload):
        self._keys[page][:], self._values[page][:] = keys, values
      self._last_token[row] = handle.first_token_id

  def _write(self, row: int, start: int, token_ids: tuple[int, ...]) -> None:
    for position, token_id in enumerate(token_ids, start):
      index, slot = divmod(position, self._page_size)
      page = self._table[row, index]
      self._keys[page][slot] = checksum.key(token_id)
      self._values[page][slot] = checksum.value(token_id)

  def _attend(self, row: int, num_tokens: int) -> int:
    pages = [self._table[row, i] for i in range(-(-num_tokens // self._page_size))]
    keys = [key for page in pages for key in self._keys[page]]
    values = [value for page in pages for value in self._values[page]]
    return checksum.attend(keys[:num_tokens], values[:num_tokens])
