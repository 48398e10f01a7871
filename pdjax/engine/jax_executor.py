"""One pool on real devices: its cache, its rows, and its compiled steps."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pdjax.core.plan import PageUpdates, StepPlan, StepResult, TokenLogprobs
from pdjax.core.request import SamplingParams
from pdjax.engine.batch import RowState, step_inputs
from pdjax.engine.buckets import Buckets, pick_bucket
from pdjax.engine.steps import Steps, state_shapes
from pdjax.engine.transfer import Reshard, TransferTicket, host_sharding
from pdjax.models.model import Model, axes_sharding
from pdjax.models.sampling import Sampled
from pdjax.scheduling.pages import PageConfig
from pdjax.scheduling.probe import probe_plan
from pdjax.serving.executor import Handle, PageShape


class StepTicket:
  """A step on the device."""

  finish_s = None

  def __init__(
    self,
    sampled: Sampled,
    plan: StepPlan,
    is_used: np.ndarray,
    num_logprobs: list[int | None],  # of each sample that is used
  ):
    self._sampled, self._plan, self._is_used = sampled, plan, is_used
    self._num_logprobs = num_logprobs

  def is_ready(self) -> bool:
    return self._sampled.ids.is_ready()

  def block(self) -> None:
    with contextlib.suppress(Exception):  # `result` raises it
      self._sampled.ids.block_until_ready()

  def result(self) -> StepResult:
    tokens = np.asarray(self._sampled.ids)[self._is_used].tolist()
    owners = [s.request_id for s in self._plan.prefills if s.emits_token]
    owners += self._plan.decodes.request_ids
    failed = [owner for owner, token in zip(owners, tokens, strict=True) if token < 0]
    return StepResult(
      token_ids=tuple(token if token >= 0 else None for token in tokens),
      logprobs=self._logprobs(tokens),
      errors=tuple((owner, "the model gave logits that are not finite") for owner in failed),
    )

  def _logprobs(self, tokens: list[int]) -> tuple[TokenLogprobs | None, ...]:
    """Leaves them on the device where nobody asked."""
    if all(n is None for n in self._num_logprobs):
      return ()
    columns = [np.asarray(column)[self._is_used].tolist() for column in self._sampled[1:]]
    return tuple(
      None
      if n is None or token < 0
      else TokenLogprobs(
        logprob=logprob, top_ids=tuple(top_ids[:n]), top_logprobs=tuple(top_logprobs[:n])
      )
      for n, token, logprob, top_ids, top_logprobs in zip(
        self._num_logprobs, tokens, *columns, strict=True
      )
    )


class JaxExecutor:
  """Runs the plans of one pool on `mesh`. Not thread-safe: one loop owns it."""

  def __init__(
    self,
    model: Model,
    steps: Steps,
    pages: PageConfig,
    buckets: Buckets,
    mesh: jax.sharding.Mesh,
  ):
    self.steps = steps
    self._params = model.to(mesh).params
    layout = steps.attention.layout
    self._pages, self._layout, self._buckets = pages, layout, buckets
    self._pieces_sharding = axes_sharding("2 L K P h", layout.pieces_shape(1), mesh)
    self._host_sharding = host_sharding(self._pieces_sharding)
    self.reshard = Reshard(self._pieces_sharding)
    self._swapped: dict[int, jax.Array] = {}  # request id -> its pieces, in the host's memory
    self._state_shapes = state_shapes(model, layout, mesh)
    self._cache, self._last_token, self._seen = self._new_state()
    self.vocab_size: int = model.config.vocab_size
    self.page_shape = PageShape(
      page_size=layout.page_size,
      num_layers=layout.num_layers,
      num_kv_heads=layout.num_kv_heads,
      head_dim=layout.head_dim,
      dtype=layout.dtype,
    )
    self._rows = self._new_rows()

  def _new_state(self):
    return jax.tree.map(
      lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), self._state_shapes
    )

  def _new_rows(self) -> RowState:
    return RowState(self._pages, self.vocab_size)

  def submit(self, plan: StepPlan, now_s: float) -> StepTicket:
    self._swap(plan)
    for s in plan.prefills:
      if s.sampling.repetition_penalty != 1:
        cached_ids = s.cached_ids or ()
        self._add_seen(s.row, cached_ids + s.token_ids, anew=s.start == len(cached_ids))
    step, arguments = self._call(plan)
    self._cache, self._last_token, self._seen, sampled = step(*arguments)
    sample_rows = arguments[-1].sample_rows
    is_used = sample_rows < self._pages.num_rows
    num_logprobs = [self._rows.logprobs[row] for row in sample_rows[is_used]]
    return StepTicket(sampled, plan, is_used, num_logprobs)

  def _swap(self, plan: StepPlan) -> None:
    """Copies pages to the host and back, in the order of the device's work. Waits for nothing."""
    for request_id in plan.swap_drops:
      self._swapped.pop(request_id, None)  # of a plan that failed there may be none
    for swap in plan.swap_outs:
      pieces = self.steps.gather_pages(self._cache, self._pad(swap.page_ids))
      self._swapped[swap.request_id] = jax.device_put(pieces, self._host_sharding)
    for swap in plan.swap_ins:
      pieces = jax.device_put(self._swapped.pop(swap.request_id), self._pieces_sharding)
      self._cache, self._last_token = self.steps.scatter_pages(
        self._cache,
        self._last_token,
        self._pad(swap.page_ids),
        pieces,
        np.int32(self._pages.num_rows),  # no row: the next token is known to the host
        np.int32(0),
      )

  def lower(self, plan: StepPlan) -> jax.stages.Lowered:
    """The step of a plan, to be compiled and looked at. Runs nothing, but seats its rows."""
    step, arguments = self._call(plan)
    return step.lower(*arguments)

  def _call(self, plan: StepPlan):
    """The step of a plan and its arguments, the last of which are its `StepInputs`."""
    step = {
      "prefill": self.steps.prefill_step,
      "decode": self.steps.decode_step,
      "mixed": self.steps.mixed_step,
    }[plan.kind]
    inputs = self._inputs(plan)
    return step, (self._params, self._cache, self._last_token, self._seen, inputs)

  def _inputs(self, plan: StepPlan):
    serves_fresh = self.steps.attention.tuning.fresh is not None
    return step_inputs(plan, self._buckets, self._rows, serves_fresh=serves_fresh)

  def _add_seen(self, row: int, token_ids: tuple[int, ...], *, anew: bool) -> None:
    ids = np.zeros(self.vocab_size, bool)
    ids[list(token_ids)] = True
    self._seen = self.steps.add_seen(self._seen, np.int32(row), ids, np.bool_(anew))

  def export(self, handle: Handle, *, page_ids: tuple[int, ...], now_s: float) -> Handle:
    num_tokens = handle.num_tokens - handle.start
    used = page_ids[: -(-num_tokens // self._layout.page_size)]
    return dataclasses.replace(
      handle,
      num_bytes=num_tokens * self._layout.bytes_per_token,
      payload=self.steps.gather_pages(self._cache, self._pad(used)),
    )

  def import_(
    self, handle: Handle, *, row: int, page_ids: tuple[int, ...], now_s: float
  ) -> TransferTicket:
    page_size = self._layout.page_size
    moved = page_ids[handle.start // page_size : -(-handle.num_tokens // page_size)]
    self._rows.update_pages(
      PageUpdates(rows=(row,) * len(page_ids), indices=tuple(range(len(page_ids))),
                  page_ids=page_ids)
    )  # fmt: skip
    self._rows.seat(row, handle.request_id, handle.num_prompt_tokens, handle.sampling)

    def insert(parts: Sequence[jax.Array]) -> None:
      pieces = self.reshard.join(parts, handle.payload)
      self._cache, self._last_token = self.steps.scatter_pages(
        self._cache,
        self._last_token,
        self._pad(moved),
        pieces,
        np.int32(row),
        np.int32(handle.first_token_id),
      )
      if handle.token_ids is not None:
        self._add_seen(row, handle.token_ids, anew=True)

    return TransferTicket(self.reshard.send(handle.payload), insert)

  def drop(self, handle: Handle) -> None:
    """The payload goes with the last reference to the handle."""

  def _pad(self, page_ids: tuple[int, ...]) -> np.ndarray:
    padded = np.full(pick_bucket(self._buckets.pages, len(page_ids)), self._layout.num_pages)
    padded[: len(page_ids)] = page_ids
    return padded.astype(np.int32)

  def recover(self) -> bool:
    """Makes a new cache and forgets every row if a failed step has taken the cache along.

    Waits for what was submitted: a step that consumed the cache of a failed one fails after it.
    """
    state = jax.tree.leaves((self._cache, self._last_token, self._seen))
    if not any(x.is_deleted() for x in state):
      try:
        jax.block_until_ready(state)
        return False
      except Exception:  # the failed step's own error, which its ticket raises
        pass
    del state
    self._cache = self._last_token = self._seen = None  # first: there may be no room for two
    self._cache, self._last_token, self._seen = self._new_state()
    self._rows = self._new_rows()
    return True

  def reset(self) -> None:
    """Forgets every row, for a new run. A cache that is intact keeps its bytes, unread."""
    self._swapped.clear()
    if not self.recover():
      self._rows = self._new_rows()

  def last_logits(self, token_ids: Sequence[int]) -> np.ndarray:  # [V]
    """The logits after `token_ids`. Overwrites row 0: only between runs."""
    largest = self._buckets.prefill[-1]
    for start in range(0, len(token_ids), largest):
      ids = tuple(token_ids[start : start + largest])
      plan = probe_plan(self._pages, prefills=(len(ids),))
      part = dataclasses.replace(plan.prefills[0], start=start, token_ids=ids)
      plan = dataclasses.replace(plan, prefills=(part,))
      if start + largest >= len(token_ids):
        inputs = self._inputs(plan)
        logits = self.steps.last_logits(self._params, self._cache, inputs)[0]
      else:
        self.submit(plan, 0.0).result()
    self.reset()
    return np.asarray(logits)

  def top2_margin(self, token_ids: Sequence[int]) -> float:
    """How far the likeliest next token is ahead of the second, in logits. Overwrites row 0.

    Only between runs: it explains why two strategies chose different tokens.
    """
    second, first = np.sort(self.last_logits(token_ids))[-2:]
    return float(first - second)

  # Warm-up -------------------------------------------------------------------------------------

  def warm_up(self, uses: Collection[str]) -> Iterator[str]:
    """Runs every bucket of `uses` once, through the serving path; yields its name.

    Uses are kinds of step (`prefill`, `decode`, `mixed`), and `gather` and `scatter` of pages.

    Overwrites the cache, so it is for the time before the first request.
    """
    for name, run in self._warm_up_calls(uses):
      run()
      jax.block_until_ready((self._cache, self._last_token, self._seen))
      yield name
    self.reset()

  def warm_up_from(self, source: JaxExecutor) -> Iterator[str]:
    """Hands over every bucket of pages once, from `source`; yields its name.

    What is compiled then depends on how both pools are split. Overwrites the cache.
    """
    for num_pages in self._buckets.pages:
      self._import_pages(num_pages, source._export_pages(num_pages))
      jax.block_until_ready((self._cache, self._last_token))
      yield f"copy {num_pages} pages"
    self.reset()

  def _warm_up_calls(self, uses: Collection[str]) -> Iterator[tuple[str, Callable[[], object]]]:
    buckets, num_rows = self._buckets, self._pages.num_rows
    plans: list[tuple[str, StepPlan]] = []
    if "prefill" in uses:
      for num_tokens in buckets.prefill:
        prompts = self._split(num_tokens, num_rows)
        plans.append((f"prefill {num_tokens}", probe_plan(self._pages, prefills=prompts)))
        if self.steps.attention.tuning.fresh is not None and self._pages.capacity_tokens > 1:
          plans.append((f"chunks {num_tokens}", self._with_one_begun(prompts)))
    if "decode" in uses:
      for rows in buckets.rows:
        plans.append((f"decode {rows}", probe_plan(self._pages, decodes=rows)))
    if "mixed" in uses and num_rows > 1:
      for num_tokens in buckets.mixed:
        prefills = self._split(num_tokens - 1, num_rows - 1)
        plans.append((f"mixed {num_tokens}", probe_plan(self._pages, prefills=prefills, decodes=1)))
    for name, plan in plans:
      yield name, lambda p=plan: self.submit(p, 0.0).result()
    yield "seen ids", lambda: self._add_seen(0, (), anew=True)
    for num_pages in buckets.pages:
      if "gather" in uses:
        yield f"gather {num_pages} pages", lambda n=num_pages: self._export_pages(n)
      if "scatter" in uses:
        yield (
          f"scatter {num_pages} pages",
          lambda n=num_pages: self._import_pages(n, self._own_pages(n)),
        )

  def _split(self, num_tokens: int, num_rows: int) -> list[int]:
    """Prompts that fill a bucket, as few as possible; less than full where the rows end."""
    longest = self._pages.capacity_tokens
    whole, rest = divmod(num_tokens, longest)
    return ([longest] * whole + [rest] * (rest > 0))[:num_rows]

  def _with_one_begun(self, prompts: list[int]) -> StepPlan:
    """Of as many tokens, if rows can hold them, but the last prompt began in a step before."""
    *others, last = prompts
    if last == self._pages.capacity_tokens:
      prompts = [*others, last - 1, 1][: self._pages.num_rows]
    plan = probe_plan(self._pages, prefills=prompts)
    *others, last = plan.prefills
    last = dataclasses.replace(last, start=1, num_prompt_tokens=1 + last.num_tokens)
    return dataclasses.replace(plan, prefills=(*others, last))

  def _hand_over(self, num_pages: int) -> Handle:
    """A handle of so many whole pages."""
    return Handle(
      request_id=0,
      num_tokens=num_pages * self._layout.page_size,
      num_prompt_tokens=num_pages * self._layout.page_size,
      first_token_id=0,
      sampling=SamplingParams(max_tokens=1),
    )

  def _export_pages(self, num_pages: int) -> Handle:
    pages = tuple(range(num_pages))
    return self.export(self._hand_over(num_pages), page_ids=pages, now_s=0.0)

  def _import_pages(self, num_pages: int, handle: Handle) -> None:
    self.import_(handle, row=0, page_ids=tuple(range(num_pages)), now_s=0.0).result()

  def _own_pages(self, num_pages: int) -> Handle:
    """What another executor like this one would export."""
    shape = jax.eval_shape(self.steps.gather_pages, self._cache, self._pad(tuple(range(num_pages))))
    payload = jnp.zeros(shape.shape, shape.dtype, device=self._pieces_sharding)
    return dataclasses.replace(self._hand_over(num_pages), payload=payload)
