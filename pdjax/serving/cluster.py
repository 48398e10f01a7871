"""Pools, and the sequences between them."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence as Seq

from pdjax.core.clock import Ticket
from pdjax.core.plan import StepPlan
from pdjax.core.request import Request
from pdjax.core.sequence import Sequence, State
from pdjax.scheduling.routing import (
  Fetch,
  Rejected,
  Router,
  Routing,
  check_roles,
  least_loaded,
)
from pdjax.scheduling.scheduler import Scheduler
from pdjax.serving.executor import Executor, Handle, PageShape


@dataclasses.dataclass(slots=True, eq=False)
class Pool:
  """A device group with one role, its scheduler, and its steps in flight."""

  name: str
  role: str
  scheduler: Scheduler
  executor: Executor
  in_flight: collections.deque[tuple[StepPlan, Ticket, float]] = dataclasses.field(
    default_factory=collections.deque
  )  # plan, ticket, submit time; oldest first
  last_end_s: float = 0.0
  predicted_s: float = 0.0  # time of the newest step in flight; 0 where nobody knows
  host_s: float = 0.0  # time to plan and to start a step, of late


@dataclasses.dataclass(slots=True, eq=False)
class Transfer:
  """A KV cache on its way. The sequence owns pages in both pools until the copy ends.

  That holds too when the request has ended meanwhile. A pool that loses its cache under way takes
  its side of the copy along: `is_source_lost`, `is_target_lost`.
  """

  seq: Sequence
  source: Pool
  target: Pool
  target_row: int
  handle: Handle
  ticket: Ticket
  start_s: float
  is_source_lost: bool = False
  is_target_lost: bool = False


@dataclasses.dataclass(slots=True, eq=False)
class Prefetch:
  """Cached pages of a prefix on their way to the pool where `seqs` will be prefilled.

  Rows of both pools hold them meanwhile, `keys` says what they are.
  """

  seqs: list[Sequence]
  source: Pool
  source_row: int
  target: Pool
  target_row: int
  keys: tuple[bytes, ...]
  handle: Handle
  ticket: Ticket
  start_s: float
  is_target_lost: bool = False


class Cluster:
  """All pools of a run: mixed ones, prefill and decode pools, or all three.

  Hand-off is pulled (DistServe, section 4.3): a prefilled sequence keeps its pages and waits in
  `outbox` until a decode pool has reserved room for all it may become. No room is back-pressure.

  Raises:
    ValueError: roles that cannot serve a request to its end, names used twice, or pools whose pages
      differ.
  """

  def __init__(self, pools: Seq[Pool], router: Router = least_loaded):
    self.pools = list(pools)
    self.router = router
    self.entry = [p for p in pools if p.role != "decode"]
    self.decode = [p for p in pools if p.role == "decode"]
    self.outbox: collections.deque[tuple[Pool, Sequence]] = collections.deque()
    self.transfers: list[Transfer] = []
    self.prefetches: list[Prefetch] = []
    self.copy_s_per_token = 0.0  # of copies between pools, of late
    check_roles(p.role for p in pools)
    if len({p.name for p in pools}) != len(self.pools):
      raise ValueError(f"pool names are not unique: {[p.name for p in pools]}")
    _check_pages(self.pools)

  def refusal(self, request: Request) -> str | None:
    """Why `request` can never be served here, or None."""
    for pool in self.pools:
      vocab_size = pool.executor.vocab_size
      if request.prompt_ids is not None and vocab_size is not None:
        lowest, highest = min(request.prompt_ids), max(request.prompt_ids)
        if lowest < 0 or highest >= vocab_size:
          bad = lowest if lowest < 0 else highest
          return f"token id {bad} is outside the vocabulary [0, {vocab_size})"
    # Any entry pool may be routed to, and any decode pool may be picked: all must do.
    hands_off = bool(self.decode) and request.sampling.max_tokens > 1
    for pool in self.entry + (self.decode if hands_off else []):
      reason = pool.scheduler.refusal(request)
      if reason is not None:
        return f"{pool.name}: {reason}"
    return None

  def route(self, seq: Sequence, now_s: float) -> tuple[Pool, Pool | None] | Rejected:
    """The pool that a sequence goes to, and one to copy its prefix from first, or why to none.

    Changes nothing.
    """
    choice = self.router(self._routing(seq, now_s))
    if isinstance(choice, Rejected):
      return choice
    if isinstance(choice, Fetch):
      return self.entry[choice.pool], self.entry[choice.source]
    return (*self.entry, *self.decode)[choice], None

  def route_again(self, seq: Sequence, now_s: float) -> Pool:
    """Where a sequence that was let in long ago is prefilled again: nobody rejects it now."""
    return self.entry[least_loaded(self._routing(seq, now_s))]

  def _routing(self, seq: Sequence, now_s: float) -> Routing:
    return Routing(
      seq=seq,
      now_s=now_s,
      entry=[p.scheduler for p in self.entry],
      decode=[p.scheduler for p in self.decode],
      handing_over=[seq for _, seq in self.outbox] + [t.seq for t in self.transfers],
      copy_s_per_token=self.copy_s_per_token,
    )

  def reserve_prefix(
    self, source: Pool, keys: tuple[bytes, ...], target: Pool, own: tuple[bytes, ...]
  ) -> tuple[int, int] | None:
    """Rows of both pools for a prefix of which `source` has `keys` and `target` the first, `own`.

    None where there is no room or no need.
    """
    num_tokens = len(keys) * source.scheduler.pages.config.page_size
    if len(keys) <= len(own):
      return None
    target_row = target.scheduler.reserve(num_tokens, own)
    if target_row is None:
      return None
    source_row = source.scheduler.reserve(num_tokens, keys)
    if source_row is None:
      target.scheduler.give_back(target_row)
      return None
    return source_row, target_row

  def note_copy(self, num_tokens: int, copy_s: float) -> None:
    """What a copy between pools took, for routers."""
    if num_tokens:
      took_s = copy_s / num_tokens
      lately_s = self.copy_s_per_token or took_s
      self.copy_s_per_token = lately_s + (took_s - lately_s) / 8

  def reserve(self, seq: Sequence) -> tuple[Pool, int, int] | None:
    """A decode pool, a row there with room for prompt + max_tokens - 1 tokens, and how many of its
    tokens the prefix cache of that pool has; None: wait."""
    left = {p.name: p.scheduler.output_tokens_left for p in self.decode}
    for transfer in self.transfers:  # not adopted yet, so its scheduler does not count it
      left[transfer.target.name] += transfer.seq.request.sampling.max_tokens - 1
    for pool in sorted(self.decode, key=lambda p: left[p.name]):
      if pool.scheduler.waiting:
        continue  # prompts that it prefills itself came first
      keys = pool.scheduler.cached_keys(seq)
      row = pool.scheduler.reserve(seq.request.max_cached_tokens, keys)
      if row is not None:
        return pool, row, len(keys) * pool.scheduler.pages.config.page_size
    return None

  def check(self) -> None:
    """Raises AssertionError unless every pool adds up and every sequence is in one place."""
    for pool in self.pools:
      pool.scheduler.check()
    owners = collections.Counter(
      seq.request_id
      for pool in self.pools
      for queue in (pool.scheduler.waiting, pool.scheduler.running, pool.scheduler.leaving)
      for seq in queue.values()
    )
    assert all(n == 1 for n in owners.values()), f"sequences in two places: {owners}"
    fetching = [seq for prefetch in self.prefetches for seq in prefetch.seqs]
    assert all(seq.state in (State.FETCHING, State.ENDED) for seq in fetching)
    assert not owners.keys() & {seq.request_id for seq in fetching}
    ready = [seq for _, seq in self.outbox]
    moving = [transfer.seq for transfer in self.transfers]
    leaving = [(p, seq) for p in self.pools for seq in p.scheduler.leaving.values()]
    assert all(seq.state is State.READY for seq in ready)
    assert all(seq.state in (State.MOVING, State.ENDED) for seq in moving)
    sources = [*self.outbox, *((t.source, t.seq) for t in self.transfers)]
    assert len(sources) == len(leaving) and all(item in leaving for item in sources)


def _check_pages(pools: Seq[Pool]) -> None:
  """Raises ValueError unless every pool could use the pages of every other: all that differs."""
  shapes = {}
  for pool in pools:
    shapes[pool.name] = {"page_size": pool.scheduler.pages.config.page_size}
    if (shape := pool.executor.page_shape) is not None:
      if shape.page_size != shapes[pool.name]["page_size"]:
        raise ValueError(
          f"{pool.name} plans pages of {shapes[pool.name]['page_size']} tokens, but its executor "
          f"has pages of {shape.page_size}"
        )
      shapes[pool.name] = dataclasses.asdict(shape)
  differences = []
  for field in dataclasses.fields(PageShape):
    values = {name: shape[field.name] for name, shape in shapes.items() if field.name in shape}
    if len(set(values.values())) > 1:
      each = ", ".join(f"{value} in {name}" for name, value in values.items())
      differences.append(f"{field.name} is {each}")
  if differences:
    raise ValueError(f"pools exchange pages, so these must be alike: {'; '.join(differences)}")
