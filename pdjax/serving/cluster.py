"""Pools, and the sequences between them."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from collections.abc import Sequence as Seq

from pdjax.core.clock import Ticket
from pdjax.core.costs import count_slices
from pdjax.core.plan import StepPlan
from pdjax.core.request import Request
from pdjax.core.sequence import Sequence, State
from pdjax.scheduling.hand_off import HandOff
from pdjax.scheduling.routing import (
  ROLES,
  Fetch,
  Rejected,
  Router,
  Routing,
  check_roles,
  least_loaded,
)
from pdjax.scheduling.scheduler import Policy, Scheduler, SchedulerConfig
from pdjax.serving.executor import Executor, Handle, PageShape, StrokeTicket


@dataclasses.dataclass(slots=True, eq=False)
class StrokeInFlight:
  """Steps in flight in one stroke, of which the scheduler knows the first `num_done`.

  It goes on as long as the scheduler has seen `num_changes`, as when it began.
  """

  plan: StepPlan
  ticket: StrokeTicket
  num_changes: int
  num_done: int = 0


@dataclasses.dataclass(slots=True, eq=False)
class Pool:
  """A device group with one role, its scheduler, and its steps in flight.

  `next_role` is the one that it is drained for. `as_role` gives the policy and the limits of a
  role; None: it cannot change. One that is down (`is_up` False) was lost and may come back, unless
  it `is_gone`.
  """

  name: str
  role: str
  scheduler: Scheduler
  executor: Executor
  in_flight: collections.deque[tuple[StepPlan, Ticket, float]] = dataclasses.field(
    default_factory=collections.deque
  )  # plan, ticket, submit time; oldest first
  stroke: StrokeInFlight | None = None  # then that is what is in flight
  last_end_s: float = 0.0
  predicted_s: float = 0.0  # time of the newest step in flight; 0 where nobody knows
  host_s: float = 0.0  # time to plan and to start a step, of late
  next_role: str | None = None
  as_role: Callable[[str], tuple[Policy, SchedulerConfig]] | None = None
  is_up: bool = True
  is_gone: bool = False


@dataclasses.dataclass(slots=True, eq=False)
class Part:
  """A copy in flight: some positions of a sequence, of all layers or of some."""

  handle: Handle
  ticket: Ticket
  start_s: float


@dataclasses.dataclass(slots=True, eq=False)
class Transfer:
  """A KV cache on its way, in parts. Its sequence owns pages in both pools until all have ended.

  It is a stream (`is_ahead`) while its prompt is prefilled yet and its source pool owns it; then it
  owns the sequence. Pages stay busy also when the request has ended meanwhile. A pool that loses
  its cache under way takes its side of the copy along: `is_source_lost`, `is_target_lost`.

  All layers of positions before `num_sent_tokens` are in the target's cache or under way.
  `begun` has what steps in flight send beyond that, a layer group at a time: step id and end of
  each; `due` those of steps that have ended, whose last layer group is yet to be sent.
  """

  seq: Sequence
  source: Pool
  target: Pool
  target_row: int
  num_sent_tokens: int
  is_ahead: bool
  generation: int
  parts: list[Part] = dataclasses.field(default_factory=list)
  begun: collections.deque[tuple[int, int]] = dataclasses.field(default_factory=collections.deque)
  due: collections.deque[int] = dataclasses.field(default_factory=collections.deque)
  is_whole: bool = False  # the last part was sent
  is_held: bool = False  # there is something to send, when others have arrived
  num_tokens: int = 0  # sent, and their bytes
  num_bytes: int = 0
  num_bytes_ahead: int = 0  # while the prompt was prefilled
  first_start_s: float | None = None  # of its parts
  last_start_s: float | None = None
  error: Exception | None = None
  is_source_lost: bool = False
  is_target_lost: bool = False

  @property
  def num_begun_tokens(self) -> int:
    """Positions of which at least one layer group was sent."""
    return self.begun[-1][1] if self.begun else self.due[-1] if self.due else self.num_sent_tokens

  @property
  def is_abandoned(self) -> bool:
    """Whether nobody will use it: nothing more is sent."""
    if self.error is not None or self.is_source_lost or self.is_target_lost:
      return True
    if self.is_ahead and self.source.role != "prefill":
      return True  # it keeps its sequences now
    owned = State.RUNNING if self.is_ahead else State.MOVING
    return self.seq.state is not owned or self.seq.generation != self.generation

  @property
  def has_ended(self) -> bool:
    return not self.parts and (self.is_whole or self.is_abandoned)


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
  `outbox` until a decode pool has reserved room for it. No room is back-pressure. A stream reserves
  before its prompt is prefilled, but never before those in the outbox.

  Raises:
    ValueError: roles that cannot serve a request to its end, names used twice, or pools whose pages
      differ.
  """

  def __init__(
    self,
    pools: Seq[Pool],
    router: Router = least_loaded,
    hand_off: HandOff = HandOff(),
  ):
    self.pools = list(pools)
    self.router = router
    self.hand_off = hand_off
    self.outbox: collections.deque[tuple[Pool, Sequence]] = collections.deque()
    self.transfers: list[Transfer] = []
    self.prefetches: list[Prefetch] = []
    self.copy_s_per_token = 0.0  # of copies between pools, of late
    check_roles(p.role for p in pools)
    if len({p.name for p in pools}) != len(self.pools):
      raise ValueError(f"pool names are not unique: {[p.name for p in pools]}")
    _check_pages(self.pools)

  @property
  def entry(self) -> list[Pool]:
    """The pools that prompts may go to, those that are down only where no other is."""
    pools = [p for p in self.pools if (p.next_role or p.role) != "decode" and p.role != "decode"]
    return _best(pools) or _best([p for p in self.pools if p.next_role in ("prefill", "mixed")])

  @property
  def decode(self) -> list[Pool]:
    """The pools that prefill pools may hand over to, those that are down only where no other is."""
    return _best([p for p in self.pools if p.role == "decode" and p.next_role is None])

  @property
  def decode_later(self) -> list[Pool]:
    """The pools that are or will be for decode: hand-offs can wait for them."""
    return self.decode or _best([p for p in self.pools if p.next_role == "decode"])

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
    entry, decode = self.entry, self.decode_later
    if not entry:
      return "no pool that could prefill it is left"
    if request.sampling.max_tokens <= 1:
      decode = []
    elif not decode and any(p.role == "prefill" for p in entry):
      return "no decode pool is left"
    for pool in entry + decode:
      reason = pool.scheduler.refusal(request)
      if reason is None and pool.next_role is not None:  # else it might never be drained
        _, limits = pool.as_role(pool.next_role)
        reason = pool.scheduler.refusal(request, config=limits)
      if reason is not None:
        return f"{pool.name}: {reason}"
    return None

  def route(self, seq: Sequence, now_s: float) -> tuple[Pool, Pool | None] | Rejected:
    """The pool that a sequence goes to, and one to copy its prefix from first, or why to none.

    Changes nothing.
    """
    entry, decode = self.entry, self.decode
    choice = self.router(self._routing(seq, now_s, entry, decode))
    if isinstance(choice, Rejected):
      return choice
    if isinstance(choice, Fetch):
      return entry[choice.pool], entry[choice.source]
    return (*entry, *decode)[choice], None

  def rejection(self, seq: Sequence, now_s: float) -> Rejected | None:
    """Why the router does not let a sequence on that was just prefilled. Changes nothing."""
    ask = getattr(self.router, "at_hand_off", None)
    return None if ask is None else ask(self._routing(seq, now_s, self.entry, self.decode))

  def route_again(self, seq: Sequence, now_s: float) -> Pool | None:
    """Where a sequence that was let in long ago is prefilled again: nobody rejects it now.

    Where it fits, if it fits anywhere; None: no pool is left.
    """
    entry = self.entry
    if not entry:
      return None
    num_output_tokens = len(seq.output_ids)
    fit = [p for p in entry if p.scheduler.refusal(seq.request, num_output_tokens) is None]
    entry = fit or entry
    return entry[least_loaded(self._routing(seq, now_s, entry, self.decode))]

  def why_not(self, pool: Pool, role: str) -> str | None:
    """Why `pool` cannot take that role, or None."""
    if role not in ROLES:
      return f"role {role!r} must be one of {', '.join(ROLES)}"
    if pool.as_role is None:
      return "it was not made to change its role"
    if pool.is_gone:
      return "it is gone"
    others = [p for p in self.pools if p is not pool and not p.is_gone]
    try:
      check_roles([role, *(p.next_role or p.role for p in others)])
    except ValueError as error:
      return str(error)
    # One that is drained of what it prefilled must be able to hand it over, or never is.
    takes = any(p.role == "decode" and p.next_role is None for p in others)
    if role != "decode" and pool.role == "decode" and not takes:
      prefilling = [p.name for p in others if p.role == "prefill"]
      if prefilling:
        return f"{', '.join(prefilling)} can hand over to no other pool yet"
    return None

  def is_drained(self, pool: Pool) -> bool:
    """Whether nothing is left in the pool that its next role cannot go on with."""
    scheduler, role = pool.scheduler, pool.next_role
    if role != "decode" and self._has_too_long(pool, role):
      return False
    if role == "mixed":
      return True
    if role == "prefill":  # those it decodes are handed over
      return not any(t.target is pool for t in self.transfers)
    if any(prefetch.target is pool for prefetch in self.prefetches):
      return False
    left = scheduler.running if pool.role == "prefill" else scheduler.prefilling
    has_prefills = any(plan.prefills for plan, *_ in pool.in_flight)
    return not (scheduler.waiting or scheduler.leaving or left or has_prefills)

  def _has_too_long(self, pool: Pool, role: str) -> bool:
    """Whether the pool has, or will have, a sequence that it could never compute in that role.

    A role that takes prompts whole has a budget that they must fit.
    """
    scheduler = pool.scheduler
    _, limits = pool.as_role(role)
    staying = [*scheduler.waiting.values(), *scheduler.prefilling.values()]
    staying += [seq for p in self.prefetches if p.target is pool for seq in p.seqs]
    if role == "mixed":  # those that decode may have to be computed again
      staying += scheduler.decoding.values()
      staying += [t.seq for t in self.transfers if t.target is pool]
    return any(scheduler.refusal(s.request, len(s.output_ids), limits) for s in staying)

  def _routing(self, seq: Sequence, now_s: float, entry: list[Pool], decode: list[Pool]) -> Routing:
    return Routing(
      seq=seq,
      now_s=now_s,
      entry=[p.scheduler for p in entry],
      decode=[p.scheduler for p in decode],
      handing_over=[seq for _, seq in self.outbox] + [t.seq for t in self.transfers],
      fetching=[
        (p.target.scheduler, seq, p.handle.num_tokens) for p in self.prefetches for seq in p.seqs
      ],
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
    """A decode pool, a row there with the pages that `HandOff.reservation` asks for, and how many
    tokens of it the prefix cache there has; None: wait."""
    decode = self.decode
    left = collections.Counter({p.name: p.scheduler.output_tokens_left for p in decode})
    for transfer in self.transfers:  # not adopted yet, so its scheduler does not count it
      left[transfer.target.name] += transfer.seq.request.sampling.max_tokens - 1
    for pool in sorted(decode, key=lambda p: left[p.name]):
      if pool.scheduler.waiting or not pool.is_up:
        continue  # prompts that it prefills itself came first
      keys = pool.scheduler.cached_keys(seq)
      row = pool.scheduler.reserve(self._tokens_to_reserve(seq, pool), keys)
      if row is not None:
        return pool, row, len(keys) * pool.scheduler.pages.config.page_size
    return None

  def _tokens_to_reserve(self, seq: Sequence, pool: Pool) -> int:
    often = seq.num_preemptions >= pool.scheduler.config.max_preemptions
    if often or self.hand_off.reservation == "request":
      return seq.max_cached_tokens
    return min(seq.num_tokens + 1, seq.max_cached_tokens)

  def stream_of(self, seq: Sequence) -> Transfer | None:
    """The stream of a sequence that is prefilled yet."""
    for transfer in self.transfers:
      if transfer.seq is seq and transfer.is_ahead and not transfer.is_abandoned:
        return transfer
    return None

  def wants_stream(self, source: Pool, seq: Sequence) -> bool:
    """Whether the decode pool should reserve before the step that was planned for `seq`.

    As late as will do, since what it reserves lies idle until the prompt is prefilled: if the rest
    of the prompt, after this step, takes less than twice as long as to copy all that is there then.
    Nobody knows: at once. Never for a prompt that may yet wait for pages: those who have them may
    wait for what it reserved.
    """
    scheduler = source.scheduler
    page_size = scheduler.pages.config.page_size
    if scheduler.pages.num_missing(seq.row, seq.num_prefill_tokens):
      return False
    has_pages = seq.num_computed_tokens >= page_size
    if seq.request.sampling.max_tokens <= len(seq.output_ids) + 1 or not (
      has_pages or len(source.executor.layer_groups) > 1
    ):
      return False
    done, num_left = seq.num_scheduled_tokens, seq.num_prefill_tokens - seq.num_scheduled_tokens
    predict_step_s = scheduler.predict_step_s
    if num_left <= 0 or not self.copy_s_per_token or predict_step_s is None:
      return True
    left_s = predict_step_s(
      count_slices(prefill_starts=(done,), prefill_tokens=(num_left,), num_emitted=1)
    )
    return left_s <= 2 * self.copy_s_per_token * done

  def may_send(self, transfer: Transfer, coming: Seq[int]) -> bool:
    """Whether parts of so many bytes may join those on their way to the same pool.

    Not past a sequence that is held up there: in the order of `transfers`, streams last.
    """
    most = self.hand_off.most_bytes
    if most is None:
      return True
    others = [t for t in self.transfers if t.target is transfer.target]
    first = others if transfer.is_ahead else others[: others.index(transfer)]
    if any(t.is_held and not t.is_ahead and not t.is_abandoned for t in first):
      return False
    parts = [*coming, *(part.handle.num_bytes for t in others for part in t.parts)]
    return len(parts) <= 1 or sum(parts) <= most

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
    moving = [transfer for transfer in self.transfers if not transfer.is_ahead]
    leaving = [(p, seq) for p in self.pools for seq in p.scheduler.leaving.values()]
    assert all(seq.state is State.READY for seq in ready)
    assert all(t.seq.state in (State.MOVING, State.ENDED) for t in moving)
    sources = [*self.outbox, *((t.source, t.seq) for t in moving)]
    assert len(sources) == len(leaving) and all(item in leaving for item in sources)
    streamed = [t.seq.request_id for t in self.transfers if t.is_ahead and not t.is_abandoned]
    assert len(streamed) == len(set(streamed)), "two streams of one sequence"
    for t in self.transfers:
      assert t.target_row in t.target.scheduler.pages.held_rows
      if t.is_ahead and not t.is_abandoned and t.num_tokens:
        assert t.num_sent_tokens <= t.seq.num_computed_tokens, "sent before it was computed"


def _best(pools: Seq[Pool]) -> list[Pool]:
  """Those that are up; if none is, those that may come back."""
  return [p for p in pools if p.is_up] or [p for p in pools if not p.is_gone]


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
