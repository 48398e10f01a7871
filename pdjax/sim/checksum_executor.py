"""The checksum model in virtual time: real pages, real tokens, no weights.

Whatever scheduling, paging, chunking, preemption or hand-off gets wrong shows as a wrong token:
compare with `pdjax.core.checksum.generate`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from pdjax.core import checksum
from pdjax.core.plan import StepPlan, StepResult
from pdjax.serving.executor import Handle, PageShape
from pdjax.sim.hardware import Link
from pdjax.sim.sim_executor import SimExecutor, SimTicket


class ChecksumExecutor(SimExecutor):
  """Keeps K and V of every slot, a page table and a last token per row, as an engine does.

  It has two layers, one of keys and one of values, so that a hand-off can be sent by layer groups.

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
    bytes_per_token: int = 8,
    layer_groups: tuple[tuple[int, int], ...] = ((0, 2),),
    num_stages: int = 1,
    fails: Callable[[int], str | None] = lambda request_id: None,
  ):
    super().__init__(
      step_s=step_s,
      link=link,
      bytes_per_token=bytes_per_token,
      layer_groups=layer_groups,
      num_stages=num_stages,
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

  def submit(
    self,
    plan: StepPlan,
    now_s: float,
    exports: Sequence[tuple[Handle, tuple[int, ...]]] = (),
  ) -> SimTicket:
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
    return dataclasses.replace(super().submit(plan, now_s, exports), value=result)

  def export(self, handle: Handle, *, page_ids: tuple[int, ...], now_s: float) -> Handle:
    """Copies the pages out, so the source may change them afterwards."""
    self._land(now_s)
    handle = super().export(handle, page_ids=page_ids, now_s=now_s)
    pages = page_ids[: -(-(handle.num_tokens - handle.start) // self._page_size)]
    layers = tuple(tuple(tuple(layer[page]) for page in pages) for layer in self._layers_of(handle))
    return dataclasses.replace(handle, payload=(handle.payload, layers))

  def _layers_of(self, handle: Handle) -> list[list[list[int]]]:
    """The caches [page][slot] of the layers that a handle is for."""
    return [self._keys, self._values][slice(*(handle.layers or (None,)))]

  def import_(
    self, handle: Handle, *, row: int, page_ids: tuple[int, ...], now_s: float
  ) -> SimTicket:
    """Copies the handed-over pages in; the row's page table becomes `page_ids`."""
    timing, layers = handle.payload
    timed = dataclasses.replace(handle, payload=timing)
    ticket = super().import_(timed, row=row, page_ids=page_ids, now_s=now_s)
    landing = dataclasses.replace(handle, payload=layers)
    self._copies.append((ticket.finish_s, landing, row, page_ids))
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
      for layer, sent in zip(self._layers_of(handle), handle.payload, strict=True):
        for page, values in zip(page_ids[handle.start // self._page_size :], sent):
          layer[page][:] = values
      if handle.first_token_id is not None:
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
