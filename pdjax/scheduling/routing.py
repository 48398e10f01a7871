"""Which pool takes a request, or why none does.

A router is a callable of a `Routing`, which is all that it may look at. It gives the index of a
pool in `routing.pools`, `Fetch`, or `Rejected`. One with a method `at_hand_off` is asked once more
when a prefill pool has prefilled the prompt.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

from pdjax.core.costs import StepCounts, count_slices
from pdjax.core.names import make, pick
from pdjax.core.request import Request, Slo
from pdjax.core.sequence import Sequence
from pdjax.scheduling.scheduler import Scheduler

ROLES = ("prefill", "decode", "mixed")


def check_roles(roles: Iterable[str]) -> None:
  """Checks that a request can go through pools of these roles to its end.

  Mixed pools serve it alone; a prefill pool hands it over to a decode pool.

  Raises:
    ValueError: pools of one half without the other, or no pools at all.
  """
  roles = set(roles)
  if not roles:
    raise ValueError("no pools")
  if "prefill" in roles and "decode" not in roles:
    raise ValueError("prefill pools need a decode pool to hand over to")
  if "decode" in roles and "prefill" not in roles:
    raise ValueError("decode pools need a prefill pool that hands over to them")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
  """Nobody takes the request, and whoever asked is told so at once."""

  reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
  """Entry pool number `pool` takes the request, after a copy of what number `source` has of it."""

  pool: int
  source: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
  """A request that has arrived, and the pools that could take it.

  `entry` are the pools that prompts go to, mixed or prefill; `decode` those that prefill pools hand
  over to, which can also prefill a prompt themselves. `handing_over` are the sequences between the
  two; `fetching` those that are queued when a part of their prefix has been copied to their pool:
  the pool, the sequence, how much of it will be there. `copy_s_per_token` is what copies between
  pools took of late, 0 before the first.
  """

  seq: Sequence
  now_s: float
  entry: Seq[Scheduler]
  decode: Seq[Scheduler] = ()
  handing_over: Seq[Sequence] = ()
  fetching: Seq[tuple[Scheduler, Sequence, int]] = ()
  copy_s_per_token: float = 0.0

  @property
  def request(self) -> Request:
    return self.seq.request

  @property
  def pools(self) -> Seq[Scheduler]:
    """Entry pools, then decode pools."""
    return (*self.entry, *self.decode)

  def num_cached_tokens(self, pool: Scheduler) -> int:
    """How much of the prompt the pool's prefix cache has."""
    return len(pool.cached_keys(self.seq)) * pool.pages.config.page_size

  def prefill_s(self, pool: Scheduler, num_cached: int = 0) -> float:
    """Predicted time of prefilling what is not cached."""
    num_tokens = self.seq.num_tokens - num_cached
    return _prefill_s(
      pool,
      count_slices(prefill_starts=(num_cached,), prefill_tokens=(num_tokens,), num_emitted=1),
    )

  def queue_s(self, pool: Scheduler) -> float:
    """Predicted time of prefilling what is queued and in progress there, or about to be.

    As many tokens as are left, in prompts of the mean length of those queued.
    """
    fetching = [seq.num_tokens - cached for own, seq, cached in self.fetching if own is pool]
    left = pool.prefill_tokens_left + sum(fetching)
    if not left:
      return 0.0
    num_prompts = len(pool.waiting) + len(pool.prefilling) + len(fetching) or 1
    return _prefill_s(
      pool,
      StepCounts(
        num_prefill_tokens=left,
        num_prefill_pairs=left * (left // num_prompts + 1) // 2,
        num_prefill_keys=left,
        num_emitted=num_prompts,
      ),
    )

  def tpot_s(self, pool: Scheduler, beside: Iterable[Sequence]) -> float:
    """Predicted time of a decode step there of this request beside others."""
    seqs = [*beside, self.seq]
    return _predict(
      pool,
      StepCounts(
        num_decodes=len(seqs),
        num_decode_keys=sum(seq.num_tokens for seq in seqs),
        num_emitted=len(seqs),
      ),
    )


def _prefill_s(pool: Scheduler, counts: StepCounts) -> float:
  """Predicted time of so much prefill, in the steps that the pool's budget cuts it into.

  Beside the decodes that run there now.
  """
  decoding = pool.decoding.values() if pool.config.decodes else ()
  room = max(1, pool.config.token_budget - len(decoding))
  num_steps = -(-counts.num_prefill_tokens // room)
  one = StepCounts(*(n // num_steps for n in counts))._replace(
    num_decodes=len(decoding), num_decode_keys=sum(seq.num_tokens for seq in decoding)
  )
  return num_steps * _predict(pool, one._replace(num_emitted=one.num_emitted + len(decoding)))


def _predict(pool: Scheduler, counts: StepCounts) -> float:
  if pool.predict_step_s is None:
    raise ValueError("this router needs to know how long steps take, and nobody knows here")
  return pool.predict_step_s(counts)


Router = Callable[[Routing], int | Fetch | Rejected]


# Baselines ----------------------------------------------------------------------------------------


def least_loaded(routing: Routing) -> int:
  """The pool with the fewest prompt and output tokens left to compute; the first among equals."""
  left = [_load(pool) for pool in routing.entry]
  return left.index(min(left))


@dataclasses.dataclass(slots=True, kw_only=True)
class RandomPool:
  """A pool at random, each as likely."""

  seed: int = 0

  def __call__(self, routing: Routing) -> int:
    return _draw(self.seed, routing).randrange(len(routing.entry))


@dataclasses.dataclass(slots=True, kw_only=True)
class PowerOfTwo:
  """The less loaded of two pools drawn at random (Mitzenmacher 2001)."""

  seed: int = 0

  def __call__(self, routing: Routing) -> int:
    entry = routing.entry
    drawn = _draw(self.seed, routing).sample(range(len(entry)), min(2, len(entry)))
    return min(drawn, key=lambda i: (_load(entry[i]), i))


def local_cache(routing: Routing) -> int:
  """The pool with fewest tokens left to compute, those of this prompt that it has cached left out.

  By the cache alone one pool would get all whose prompts begin with the system's.
  """
  left = [_load(pool) - routing.num_cached_tokens(pool) for pool in routing.entry]
  return left.index(min(left))


def _load(pool: Scheduler) -> int:
  return pool.prefill_tokens_left + pool.output_tokens_left


def _draw(seed: int, routing: Routing) -> random.Random:
  """By request, so that a draw depends on nothing that happened before."""
  return random.Random(f"{seed} {routing.request.request_id}")


# Mooncake -----------------------------------------------------------------------------------------

REJECTIONS = ("never", "after_prefill", "early", "predicted")


@dataclasses.dataclass(slots=True, kw_only=True)
class Conductor:
  """The pool with the least predicted TTFT, its prefix cache counted (Mooncake, Algorithm 1).

  TTFT is the prefills queued there and that of the part which is not cached. Where another pool has
  more than `balancing_threshold` times as much of the prompt, it is copied from there first, which
  also spreads hot prefixes; None: never. Targets are those of
  the request (`Request.slo`), or these. `rejects` under overload (tech report, section 7): `never`;
  `after_prefill` whoever would miss the target of prefill on arrival, and that of decode when the
  prompt has been prefilled, in vain then; `early` on arrival whoever would miss either as things
  stand; `predicted` likewise, but with the decode pools as they will be when this prefill ends:
  with those that arrive there by then, and without those that have decoded for `decode_s`.

  `local_prefill_tokens` lets prompts with no more than so many tokens uncached prefill on a decode
  pool that has room now, if the step beside its decodes stays within the TPOT target (conditional
  disaggregation of NVIDIA Dynamo, and PPD's append-prefill): they are not handed over. 0: none.
  """

  balancing_threshold: float | None = None
  ttft_s: float | None = None
  tpot_s: float | None = None
  rejects: str = "never"
  decode_s: float = 10.0
  local_prefill_tokens: int = 0

  def __post_init__(self):
    if self.rejects not in REJECTIONS:
      raise ValueError(f"rejects={self.rejects!r} must be one of {', '.join(REJECTIONS)}")
    for name in ("balancing_threshold", "ttft_s", "tpot_s", "decode_s"):
      value = getattr(self, name)
      if value is not None and not value > 0:
        raise ValueError(f"{name}={value} must be positive")
    if self.local_prefill_tokens < 0:
      raise ValueError(f"local_prefill_tokens={self.local_prefill_tokens} must be 0 or more")

  def __call__(self, routing: Routing) -> int | Fetch | Rejected:
    slo = self._slo(routing)
    local = self._local(routing, slo)
    if local is not None:
      return local
    cached = [routing.num_cached_tokens(pool) for pool in routing.entry]
    most = max(cached)
    fetches = [self._is_worth_a_copy(most, own) for own in cached]
    ttfts_s = []
    for pool, own, fetch in zip(routing.entry, cached, fetches, strict=True):
      copy_s = routing.copy_s_per_token * (most - own) if fetch else 0.0
      prefill_s = routing.prefill_s(pool, most if fetch else own)
      ttfts_s.append(copy_s + routing.queue_s(pool) + prefill_s)
    ttft_s = min(ttfts_s)
    if self.rejects != "never":
      if ttft_s > slo.ttft_s:
        return Rejected(reason=f"overload: predicted TTFT {ttft_s:.3g} s is over {slo.ttft_s:g} s")
      if self.rejects != "after_prefill" and (late := self._late_decode(routing, slo, ttft_s)):
        return late
    chosen = ttfts_s.index(ttft_s)
    return Fetch(pool=chosen, source=cached.index(most)) if fetches[chosen] else chosen

  def at_hand_off(self, routing: Routing) -> Rejected | None:
    """Why a request whose prompt has just been prefilled goes no further, if it does not."""
    if self.rejects != "after_prefill":
      return None
    return self._late_decode(routing, self._slo(routing), 0.0)

  def _slo(self, routing: Routing) -> Slo:
    return routing.request.slo or Slo(ttft_s=self.ttft_s or 1e9, tpot_s=self.tpot_s or 1e9)

  def _late_decode(self, routing: Routing, slo: Slo, prefill_s: float) -> Rejected | None:
    tpot_s = self._tpot_s(routing, prefill_s)
    if tpot_s <= slo.tpot_s:
      return None
    return Rejected(reason=f"overload: predicted TPOT {tpot_s:.3g} s is over {slo.tpot_s:g} s")

  def _is_worth_a_copy(self, most: int, own: int) -> bool:
    threshold = self.balancing_threshold
    return threshold is not None and most > own and most > threshold * own

  def _tpot_s(self, routing: Routing, prefill_s: float) -> float:
    """Predicted time of a decode step in the pool where it will be shortest."""
    pools = routing.decode or routing.entry
    coming = self._coming(routing, prefill_s) if self.rejects == "predicted" else []
    tpots_s = []
    for i, pool in enumerate(pools):
      beside = list(pool.decoding.values())
      if self.rejects == "predicted":
        now_s = routing.tpot_s(pool, beside)
        beside = [s for s in beside if len(s.output_ids) * now_s + prefill_s < self.decode_s]
        beside += coming[i :: len(pools)]
      tpots_s.append(routing.tpot_s(pool, beside))
    return min(tpots_s)

  def _coming(self, routing: Routing, within_s: float) -> list[Sequence]:
    """Sequences that reach the decode pools by then: handed over, or prefilled in time."""
    coming = list(routing.handing_over)
    for pool in routing.entry:
      queued = [*pool.prefilling.values(), *pool.waiting.values()]
      num_left = within_s / max(routing.queue_s(pool), 1e-9) * pool.prefill_tokens_left
      for seq in queued:
        num_left -= seq.num_tokens - seq.num_computed_tokens
        if num_left < 0:
          break
        coming.append(seq)
    return coming

  def _local(self, routing: Routing, slo: Slo) -> int | None:
    """The decode pool that prefills this prompt itself, if one should."""
    if not self.local_prefill_tokens:
      return None
    if routing.handing_over:
      return None  # they wait for room there already
    for i, pool in enumerate(routing.decode, len(routing.entry)):
      keys = pool.cached_keys(routing.seq)
      cached = routing.num_cached_tokens(pool)
      if routing.seq.num_tokens - cached > self.local_prefill_tokens or pool.waiting:
        continue
      most = routing.request.max_cached_tokens
      if not pool.pages.num_free_rows or not pool.pages.has_room(None, most, keys=keys):
        continue
      if routing.prefill_s(pool, cached) <= slo.tpot_s and pool.refusal(routing.request) is None:
        return i
    return None


ROUTERS: dict[str, Router | type] = {
  "least_loaded": least_loaded,
  "random": RandomPool,
  "power_of_two": PowerOfTwo,
  "local_cache": local_cache,
  "conductor": Conductor,
}


def make_router(name: str, options: Mapping[str, Any] | None = None) -> Router:
  """The router called `name`.

  Raises:
    ValueError: no such router or option, or an option of the wrong type or out of range.
  """
  return make(pick(ROUTERS, name, "router"), options or {}, f"router {name}")
