"""One pool on real devices: its cache, its rows, and its compiled steps."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from pdjax.core.device_group import split_layers
from pdjax.core.plan import PageUpdates, StepPlan, StepResult, TokenLogprobs
from pdjax.core.request import SamplingParams
from pdjax.engine.batch import RowState, StepInputs, step_inputs
from pdjax.engine.buckets import Buckets, pick_bucket
from pdjax.engine.steps import Steps, state_shapes
from pdjax.engine.transfer import (
  Payload,
  Pieces,
  Reshard,
  SpareMemory,
  TransferTicket,
  host_sharding,
)
from pdjax.models.kv_cache import Cache, KVLayout
from pdjax.models.model import LayerRange, Model, Params, axes_sharding
from pdjax.models.sampling import Sampled
from pdjax.scheduling.pages import PageConfig
from pdjax.scheduling.probe import probe_plan
from pdjax.serving.executor import Handle, PageShape, export_bytes


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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
  """Devices of a pool that have these layers, and their pages. A plain pool is one stage."""

  layers: LayerRange
  mesh: jax.sharding.Mesh
  params: Params
  pieces_sharding: Sharding
  reshard: Reshard  # to it

  @property
  def whole(self) -> Sharding:
    """All of an array on each device."""
    return NamedSharding(self.mesh, PartitionSpec())

  def overlap(self, layers: LayerRange) -> LayerRange | None:
    """Those of `layers` that it has."""
    both = max(self.layers[0], layers[0]), min(self.layers[1], layers[1])
    return both if both[0] < both[1] else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
  """Layers of a stage that are computed by one call."""

  stage: Stage
  layers: LayerRange
  params: Params


class JaxExecutor:
  """Runs the plans of one pool, whose layers lie one after another on `meshes`, its stages.

  Each stage goes through its layers in `groups_per_stage` calls; decodes, in one. All calls of a
  step are made at once, so steps that are submitted one after another follow each other through
  the stages. Not thread-safe: one loop owns it. Pages go to pools of other sizes in `num_cuts` cuts
  of what each device has: see `build_executors`.

  Raises:
    ValueError: fewer layers than stages or groups.
  """

  is_up = True  # its devices are those of this process
  repeats = False

  def __init__(
    self,
    model: Model,
    steps: Steps,
    pages: PageConfig,
    buckets: Buckets,
    meshes: Sequence[jax.sharding.Mesh],
    *,
    groups_per_stage: int = 1,
    num_cuts: int = 1,
  ):
    self.steps = steps
    self._num_cuts = num_cuts
    layout = steps.attention.layout
    self._pages, self._layout, self._buckets = pages, layout, buckets
    self._all_layers = (0, layout.num_layers)
    self._stages = tuple(
      _make_stage(model, layout, layers, mesh)
      for layers, mesh in zip(split_layers(layout.num_layers, len(meshes)), meshes, strict=True)
    )
    groups = _cut(model, self._stages, groups_per_stage)
    self._groups = {"prefill": groups, "mixed": groups, "decode": _cut(model, self._stages, 1)}
    self.layer_groups = tuple(group.layers for group in groups)
    self.num_stages = len(self._stages)
    self._swapped: dict[int, Payload] = {}  # request id -> its pieces, in the host's memory
    self._gathered: dict[tuple, Payload] = {}  # what `submit` was told to gather, until `export`
    self._spare = SpareMemory(meshes[0].devices.flat[0].platform)
    stages = [(stage.layers, stage.mesh) for stage in self._stages]
    self._state_shapes = state_shapes(model, layout, stages)
    self._cache, self._last_token, self._seen = self._new_state()
    self.vocab_size: int = model.config.vocab_size
    self.bytes_per_token = layout.bytes_per_token
    self.page_shape = PageShape(
      page_size=layout.page_size,
      num_layers=layout.num_layers,
      num_kv_heads=layout.num_kv_heads,
      head_dim=layout.head_dim,
      dtype=layout.dtype,
    )
    self._rows = self._new_rows()

  @property
  def num_traces(self) -> collections.Counter[str]:
    """How often each compiled function was traced, for whichever pool; after warm-up constant."""
    of_copies = (stage.reshard.num_traces for stage in self._stages)
    return sum(of_copies, collections.Counter(self.steps.num_traces))

  @property
  def num_kept(self) -> dict[str, int]:
    """What it keeps of requests beside the cache: swapped out, and gathered for exports."""
    return {"swapped": len(self._swapped), "gathered": len(self._gathered)}

  def _new_state(self):
    return jax.tree.map(
      lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), self._state_shapes
    )

  def _new_rows(self) -> RowState:
    return RowState(self._pages, self.vocab_size)

  def submit(
    self,
    plan: StepPlan,
    now_s: float,
    exports: Sequence[tuple[Handle, tuple[int, ...]]] = (),
  ) -> StepTicket:
    self._gathered.clear()  # what was not asked for since the last step
    self._swap(plan)
    for s in plan.prefills:
      if s.sampling.repetition_penalty != 1:
        cached_ids = s.cached_ids or ()
        self._add_seen(s.row, cached_ids + s.token_ids, anew=s.start == len(cached_ids))
    inputs = self._inputs(plan)
    hidden, group = self._run_up_to_last(plan.kind, inputs, exports)
    step = getattr(self.steps, f"{plan.kind}_step")
    cache, self._last_token, self._seen, sampled = step(
      *self._state(group), inputs, hidden, group.layers
    )
    self._replace(group.layers, cache)
    self._gather_early(exports, group)
    is_used = inputs.sample_rows < self._pages.num_rows
    num_logprobs = [self._rows.logprobs[row] for row in inputs.sample_rows[is_used]]
    return StepTicket(sampled, plan, is_used, num_logprobs)

  def _run_up_to_last(
    self,
    kind: str,
    inputs: StepInputs,
    exports: Sequence[tuple[Handle, tuple[int, ...]]] = (),
  ) -> tuple[jax.Array | None, LayerGroup]:
    """Starts all groups of layers of a step but the last; gives that and what it goes on from."""
    *others, last = self._groups[kind]
    hidden, stage, last_token = None, last.stage, None
    if others and inputs.batch.decode is not None:  # only then: chunks need not wait for it
      last_token = _move(self._last_token, last.stage, others[0].stage)
    for group in others:
      run, cache = getattr(self.steps, f"{kind}_layers"), self._cache_of(group.layers)
      hidden = _move(hidden, stage, group.stage)
      cache, hidden = run(group.params, cache, last_token, inputs, hidden, group.layers)
      stage, last_token = group.stage, None
      self._replace(group.layers, cache)
      self._gather_early(exports, group)
    return _move(hidden, stage, last.stage), last

  def _state(self, group: LayerGroup):
    """What a step begins with where `group` is its last."""
    return group.params, self._cache_of(group.layers), self._last_token, self._seen

  def _cache_of(self, layers: LayerRange) -> Cache:
    return self._cache[slice(*layers)]

  def _replace(self, layers: LayerRange, cache: Cache) -> None:
    first, last = layers
    self._cache = (*self._cache[:first], *cache, *self._cache[last:])

  def _gather_early(
    self, exports: Sequence[tuple[Handle, tuple[int, ...]]], group: LayerGroup
  ) -> None:
    """Gathers what `group` has completed, before the devices are given anything else to do."""
    for handle, page_ids in exports:
      _, last = handle.layers or self._all_layers
      if group.layers[0] < last <= group.layers[1]:
        self._gathered[_key(handle)] = self._gather_positions(handle, page_ids)

  def _swap(self, plan: StepPlan) -> None:
    """Copies pages to the host and back, in the order of the device's work. Waits for nothing."""
    for request_id in plan.swap_drops:
      self._spare.give(self._swapped.pop(request_id, {}))  # of a plan that failed there may be none
    for swap in plan.swap_outs:
      pieces = self._gather(None, swap.page_ids)
      to = {stage.layers: host_sharding(stage.pieces_sharding) for stage in self._stages}
      self._swapped[swap.request_id] = jax.device_put(pieces, to)
    for swap in plan.swap_ins:
      to = {stage.layers: stage.pieces_sharding for stage in self._stages}
      pieces = jax.device_put(self._swapped.pop(swap.request_id), to)
      for layers, piece in pieces.items():
        self._scatter(layers, swap.page_ids, piece)
      self._spare.give(pieces)

  def _gather(self, layers: LayerRange | None, page_ids: tuple[int, ...]) -> Payload:
    """Starts to read pages of `layers`, those of each stage on its devices."""
    padded, payload = self._pad(page_ids), {}
    for stage, own in self._overlaps(layers):
      like = self._pieces_like(stage, own, len(padded), self._num_cuts)
      into = tuple(self._spare.take(like) for _ in range(self._num_cuts))
      cuts = self.steps.gather_pages(self._cache_of(own), padded, into, self._num_cuts)
      payload[own] = cuts if self._num_cuts > 1 else cuts[0]
    return payload

  def _overlaps(self, layers: LayerRange | None) -> Iterator[tuple[Stage, LayerRange]]:
    """The stages that have some of `layers`, None for all, and which."""
    for stage in self._stages:
      if (own := stage.overlap(layers or self._all_layers)) is not None:
        yield stage, own

  def _pieces_like(
    self, stage: Stage, layers: LayerRange, num_pages: int, num_cuts: int = 1
  ) -> jax.ShapeDtypeStruct:
    """What a gather from a stage gives: pieces, or one of so many cuts of them."""
    first, last = layers
    shape = self._layout.of_layers(last - first).pieces_shape(num_pages, num_cuts)
    return jax.ShapeDtypeStruct(shape, self._layout.dtype, sharding=stage.pieces_sharding)

  def _scatter(self, layers: LayerRange, page_ids: tuple[int, ...], pieces: Pieces) -> None:
    cuts = pieces if isinstance(pieces, tuple) else (pieces,)
    cache = self.steps.scatter_pages(self._cache_of(layers), self._pad(page_ids), cuts)
    self._replace(layers, cache)

  def lower(self, plan: StepPlan) -> jax.stages.Lowered:
    """The step of a plan, to be compiled and looked at. Runs nothing, but seats its rows.

    For pools that compute it by one call.
    """
    (group,) = self._groups[plan.kind]
    step = getattr(self.steps, f"{plan.kind}_step")
    return step.lower(*self._state(group), self._inputs(plan), None, group.layers)

  def _inputs(self, plan: StepPlan) -> StepInputs:
    serves_fresh = self.steps.attention.tuning.fresh is not None
    return step_inputs(plan, self._buckets, self._rows, serves_fresh=serves_fresh)

  def _add_seen(self, row: int, token_ids: tuple[int, ...], *, anew: bool) -> None:
    ids = np.zeros(self.vocab_size, bool)
    ids[list(token_ids)] = True
    self._seen = self.steps.add_seen(self._seen, np.int32(row), ids, np.bool_(anew))

  def export(self, handle: Handle, *, page_ids: tuple[int, ...], now_s: float) -> Handle:
    payload = self._gathered.pop(_key(handle), None)
    if payload is None:
      payload = self._gather_positions(handle, page_ids)
    return dataclasses.replace(handle, num_bytes=export_bytes(self, handle), payload=payload)

  def _gather_positions(self, handle: Handle, page_ids: tuple[int, ...]) -> Payload:
    num_pages = -(-(handle.num_tokens - handle.start) // self._layout.page_size)
    if not num_pages:
      return {}
    return self._gather(handle.layers, page_ids[:num_pages])

  def import_(
    self, handle: Handle, *, row: int, page_ids: tuple[int, ...], now_s: float
  ) -> TransferTicket:
    page_size = self._layout.page_size
    moved = page_ids[handle.start // page_size : -(-handle.num_tokens // page_size)]
    is_last = handle.first_token_id is not None
    sent: Payload = {
      own: stage.reshard.send(stage.reshard.take_layers(pieces, layers, own))
      for layers, pieces in handle.payload.items()
      for stage, own in self._overlaps(layers)
    }
    self._rows.update_pages(
      PageUpdates(rows=(row,) * len(page_ids), indices=tuple(range(len(page_ids))),
                  page_ids=page_ids)
    )  # fmt: skip
    if is_last:
      self._rows.seat(row, handle.request_id, handle.num_prompt_tokens, handle.sampling)

    def insert(arrived: Payload) -> None:
      for layers, pieces in arrived.items():
        self._scatter(layers, moved, pieces)
      if is_last:
        self._last_token = self.steps.set_last_token(
          self._last_token, np.int32(row), np.int32(handle.first_token_id)
        )
      if handle.token_ids is not None:
        self._add_seen(row, handle.token_ids, anew=True)

    return TransferTicket(sent, insert)

  def pieces_like(self, handle: Handle) -> dict[LayerRange, jax.ShapeDtypeStruct]:
    """What an export by such a handle is made of here, uncut, which an import takes as it is."""
    num_pages = -(-(handle.num_tokens - handle.start) // self._layout.page_size)
    if not num_pages:
      return {}
    padded = pick_bucket(self._buckets.pages, num_pages)
    return {
      own: self._pieces_like(stage, own, padded) for stage, own in self._overlaps(handle.layers)
    }

  def drop(self, handle: Handle) -> None:
    self._spare.give(handle.payload or {})

  def _pad(self, page_ids: tuple[int, ...]) -> np.ndarray:
    padded = np.full(pick_bucket(self._buckets.pages, len(page_ids)), self._layout.num_pages)
    padded[: len(page_ids)] = page_ids
    return padded.astype(np.int32)

  def recover(self) -> bool:
    """Makes a new cache and forgets every row if a failed step has taken the cache along.

    Waits for what was submitted: a step that consumed the cache of a failed one fails after it.
    """
    self._gathered.clear()
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
    self._spare.clear()
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
        hidden, group = self._run_up_to_last("prefill", inputs)
        cache = self._cache_of(group.layers)
        logits = self.steps.last_logits(group.params, cache, inputs, hidden, group.layers)[0]
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
      for layers in source._ranges:
        self._import_pages(num_pages, source._export_pages(num_pages, layers))
      jax.block_until_ready((self._cache, self._last_token))
      yield f"copy {num_pages} pages"
    self.reset()

  @property
  def _ranges(self) -> tuple[LayerRange | None, ...]:
    """What a handle of its own may hand over: all layers, or a group of them."""
    return (None, *(self.layer_groups if len(self.layer_groups) > 1 else ()))

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
        yield f"gather {num_pages} pages", lambda n=num_pages: self._export_each(n)
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

  def _hand_over(self, num_pages: int, layers: LayerRange | None = None) -> Handle:
    """A handle of so many whole pages."""
    return Handle(
      request_id=0,
      num_tokens=num_pages * self._layout.page_size,
      num_prompt_tokens=num_pages * self._layout.page_size,
      first_token_id=0,
      sampling=SamplingParams(max_tokens=1),
      layers=layers,
    )

  def _export_pages(self, num_pages: int, layers: LayerRange | None) -> Handle:
    pages = tuple(range(num_pages))
    return self.export(self._hand_over(num_pages, layers), page_ids=pages, now_s=0.0)

  def _export_each(self, num_pages: int) -> None:
    for layers in self._ranges:
      jax.block_until_ready(self._export_pages(num_pages, layers).payload)

  def _import_pages(self, num_pages: int, handle: Handle) -> None:
    self.import_(handle, row=0, page_ids=tuple(range(num_pages)), now_s=0.0).result()

  def _own_pages(self, num_pages: int) -> Handle:
    """What another executor like this one would export."""
    handle, payload = self._hand_over(num_pages), {}
    for stage, layers in self._overlaps(None):
      like = self._pieces_like(stage, layers, num_pages, self._num_cuts)
      cut = jnp.zeros(like.shape, like.dtype, device=like.sharding)
      payload[layers] = (cut,) * self._num_cuts if self._num_cuts > 1 else cut
    return dataclasses.replace(handle, payload=payload)


def _make_stage(
  model: Model, layout: KVLayout, layers: LayerRange, mesh: jax.sharding.Mesh
) -> Stage:
  first, last = layers
  shape = layout.of_layers(last - first).pieces_shape(1)
  pieces_sharding = axes_sharding("2 L K P h", shape, mesh)
  part = dataclasses.replace(model, params=model.params_of(layers))
  return Stage(
    layers=layers,
    mesh=mesh,
    params=part.to(mesh).params,
    pieces_sharding=pieces_sharding,
    reshard=Reshard(pieces_sharding),
  )


def _cut(model: Model, stages: Sequence[Stage], num_groups: int) -> tuple[LayerGroup, ...]:
  """The layers of each stage in so many groups."""
  groups = []
  for stage in stages:
    start, end = stage.layers
    part = dataclasses.replace(model, params=stage.params)
    for first, last in split_layers(end - start, num_groups):
      layers = (start + first, start + last)
      groups.append(LayerGroup(stage=stage, layers=layers, params=part.params_of(layers)))
  return tuple(groups)


def _move(x: jax.Array | None, source: Stage, target: Stage) -> jax.Array | None:
  """Starts a copy to another stage; returns at once, also where `x` is being computed yet."""
  return x if source is target or x is None else jax.device_put(x, target.whole)


def _key(handle: Handle) -> tuple:
  return handle.request_id, handle.start, handle.num_tokens, handle.layers
