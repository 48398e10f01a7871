"""One pool on real devices: its cache, its rows, and its compiled steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from pdjax.core.plan import DecodeSlices, PageUpdates, Slice, StepPlan, StepResult
from pdjax.core.request import SamplingParams
from pdjax.engine.batch import RowState, padded_prefill_tokens, step_inputs
from pdjax.engine.buckets import Buckets, pick_bucket
from pdjax.engine.mesh import replicated
from pdjax.engine.steps import Steps
from pdjax.engine.transfer import TransferTicket
from pdjax.models.kv_cache import KVLayout, init_cache
from pdjax.models.model import Model
from pdjax.serving.executor import Handle


class StepTicket:
  """A step on the device."""

  finish_s = None

  def __init__(self, ids: jax.Array, plan: StepPlan, num_emit_slots: int):
    self._ids, self._plan, self._num_emit_slots = ids, plan, num_emit_slots

  def is_ready(self) -> bool:
    return self._ids.is_ready()

  def result(self) -> StepResult:
    ids = np.asarray(self._ids)
    owners = [s.request_id for s in self._plan.prefills if s.emits_token]
    num_decodes, first_decode = len(self._plan.decodes), self._num_emit_slots
    tokens = [*ids[: len(owners)], *ids[first_decode : first_decode + num_decodes]]
    owners += self._plan.decodes.request_ids
    failed = [owner for owner, token in zip(owners, tokens, strict=True) if token < 0]
    return StepResult(
      token_ids=tuple(int(token) if token >= 0 else None for token in tokens),
      errors=tuple((owner, "the model gave logits that are not finite") for owner in failed),
    )


class JaxExecutor:
  """Runs the plans of one pool on `mesh`. Not thread-safe: one loop owns it."""

  def __init__(
    self,
    model: Model,
    steps: Steps,
    layout: KVLayout,
    buckets: Buckets,
    mesh: jax.sharding.Mesh,
  ):
    self._sharding = replicated(mesh)
    self._params = jax.device_put(model.params, self._sharding)
    self._steps, self._layout, self._buckets = steps, layout, buckets
    self._cache = init_cache(layout, self._sharding)
    self._last_token = jax.device_put(jnp.zeros(layout.num_rows, jnp.int32), self._sharding)
    self.vocab_size: int = model.config.vocab_size
    self._rows = self._new_rows()

  def _new_rows(self) -> RowState:
    layout = self._layout
    return RowState(layout.num_rows, layout.pages_per_row, layout.num_pages, self.vocab_size)

  def submit(self, plan: StepPlan, now_s: float) -> StepTicket:
    prefill, decode = step_inputs(plan, self._buckets, self._rows)
    state = (self._params, self._cache, self._last_token)
    if decode is None:
      outputs = self._steps.prefill_step(*state, prefill)
    elif prefill is None:
      outputs = self._steps.decode_step(*state, decode)
    else:
      outputs = self._steps.mixed_step(*state, prefill, decode)
    self._cache, self._last_token, ids = outputs
    return StepTicket(ids, plan, 0 if prefill is None else len(prefill.emit_row))

  def export(
    self,
    *,
    request_id: int,
    generation: int,
    row: int,
    page_ids: tuple[int, ...],
    num_tokens: int,
    first_token_id: int,
    sampling: SamplingParams,
    now_s: float,
  ) -> Handle:
    used = page_ids[: -(-num_tokens // self._layout.page_size)]
    return Handle(
      request_id=request_id,
      generation=generation,
      num_tokens=num_tokens,
      num_bytes=num_tokens * self._layout.bytes_per_token,
      first_token_id=first_token_id,
      sampling=sampling,
      payload=self._steps.gather_pages(self._cache, self._pad(used)),
    )

  def import_(
    self, handle: Handle, *, row: int, page_ids: tuple[int, ...], now_s: float
  ) -> TransferTicket:
    num_used = -(-handle.num_tokens // self._layout.page_size)
    self._rows.update_pages(
      PageUpdates(rows=(row,) * len(page_ids), indices=tuple(range(len(page_ids))),
                  page_ids=page_ids)
    )  # fmt: skip
    self._rows.seat(row, handle.request_id, handle.sampling)

    def insert(pieces: jax.Array) -> None:
      self._cache, self._last_token = self._steps.scatter_pages(
        self._cache,
        self._last_token,
        self._pad(page_ids[:num_used]),
        pieces,
        np.int32(row),
        np.int32(handle.first_token_id),
      )

    return TransferTicket(handle.payload, self._sharding, insert)

  def drop(self, handle: Handle) -> None:
    """The payload goes with the last reference to the handle."""

  def _pad(self, page_ids: tuple[int, ...]) -> np.ndarray:
    padded = np.full(pick_bucket(self._buckets.pages, len(page_ids)), self._layout.num_pages)
    padded[: len(page_ids)] = page_ids
    return padded.astype(np.int32)

  # Warm-up -------------------------------------------------------------------------------------

  def warm_up(self) -> Iterator[str]:
    """Runs every bucket once through the serving path; yields what was compiled, for progress.

    Overwrites the cache, so it is for the time before the first request.
    """
    for name, run in self._warm_up_calls():
      start_s = time.perf_counter()
      run()
      jax.block_until_ready((self._cache, self._last_token))
      yield f"{name} ({time.perf_counter() - start_s:.1f} s)"
    self._rows = self._new_rows()

  def _warm_up_calls(self) -> Iterator[tuple[str, Callable[[], object]]]:
    for num_tokens in self._buckets.prefill:
      plan = probe_plan(self._layout, prefill=min(num_tokens, self._layout.max_len))
      yield f"prefill {num_tokens}", lambda p=plan: self.submit(p, 0.0).result()
    for num_rows in self._buckets.rows:
      plan = probe_plan(self._layout, decodes=num_rows)
      yield f"decode {num_rows}", lambda p=plan: self.submit(p, 0.0).result()
    for num_tokens in self._buckets.mixed:
      plan = probe_plan(self._layout, prefill=min(num_tokens, self._layout.max_len - 1), decodes=1)
      yield f"mixed {num_tokens}", lambda p=plan: self.submit(p, 0.0).result()
    for num_pages in self._buckets.pages:
      yield f"hand-off {num_pages} pages", lambda n=num_pages: self._hand_over(n)

  def _hand_over(self, num_pages: int) -> None:
    pages = tuple(range(num_pages))
    handle = self.export(
      request_id=0,
      generation=0,
      row=0,
      page_ids=pages,
      num_tokens=num_pages * self._layout.page_size,
      first_token_id=0,
      sampling=SamplingParams(max_tokens=1),
      now_s=0.0,
    )
    ticket = self.import_(handle, row=0, page_ids=pages, now_s=0.0)
    while not ticket.is_ready():
      time.sleep(1e-4)
    ticket.result()


def probe_plan(
  layout: KVLayout, *, prefill: int = 0, decodes: int = 0, context: int = 1
) -> StepPlan:
  """A plan to warm up or to time: one prompt in row 0, `decodes` rows of `context` tokens after.

  In a paged pool with too few pages for all of them, rows share pages: what is computed is
  meaningless, its cost is not.
  """
  rows = tuple(range(layout.num_rows - decodes, layout.num_rows))
  used_rows = sorted({*rows, *((0,) if prefill else ())})
  per_row = layout.pages_per_row
  entries = [(row, i, (row * per_row + i) % layout.num_pages)
             for row in used_rows for i in range(per_row)]  # fmt: skip
  update_rows, indices, page_ids = zip(*entries, strict=True)
  prefills = ()
  if prefill:
    s = Slice(
      request_id=-1,
      generation=0,
      row=0,
      start=0,
      num_tokens=prefill,
      token_ids=(0,) * prefill,
      emits_token=True,
      sampling=SamplingParams(max_tokens=1),
    )
    prefills = (s,)
  return StepPlan(
    step_id=0,
    prefills=prefills,
    decodes=DecodeSlices(
      request_ids=rows,
      generations=(0,) * decodes,
      rows=rows,
      positions=(context - 1,) * decodes,
    ),
    page_updates=PageUpdates(rows=update_rows, indices=indices, page_ids=page_ids),
  )
