"""Cases that every attention kernel has to pass, the check, and mutations that it must catch.

Whatever a kernel must not look at is poison: places of pages beyond a context are NaN (int8: noise
with NaN scales), table entries beyond it are out of range, slices of length 0 hold nonsense, and
queries of no slice are NaN.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pdjax.kernels.reference import attention_reference, write_pages_reference
from pdjax.kernels.slices import Pages, Slices

NONSENSE = 2**30


class Batch(NamedTuple):
  q: jax.Array  # [T, H, h]
  pages: Pages
  prefill: Slices | None
  decode: Slices | None
  owned: np.ndarray  # [T] bool: tokens of a slice

  @property
  def slices(self) -> Slices:
    """Chunks, then decodes."""
    kinds = [kind for kind in (self.prefill, self.decode) if kind is not None]
    return Slices(*(jnp.concatenate(columns) for columns in zip(*kinds, strict=True)))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCase:
  """A batch by its shapes and true lengths; `build` draws the rest.

  `prefill`: (length, offset) of each chunk. `decode`: the context of each row, its own token
  included. 0 is an empty slice; None is a batch without that kind. `pages_per_outer` pages lie side
  by side in one entry of the cache. `forgets` poisons also what is before every window.
  """

  num_heads: int = 8
  num_kv_heads: int = 2
  head_dim: int = 16
  page_size: int = 4
  pages_per_row: int = 8
  pages_per_outer: int = 1
  num_pages: int = 64
  num_tokens: int = 40
  dtype: str = "float32"
  cache_dtype: str | None = None  # that of queries
  prefill: tuple[tuple[int, int], ...] | None = None
  decode: tuple[int, ...] | None = None
  window: int | None = None
  soft_cap: float | None = None
  scale: float | None = None  # h ** -0.5
  forgets: bool = False
  seed: int = 0

  def __post_init__(self):
    if self.num_pages % self.pages_per_outer:
      raise ValueError(f"num_pages={self.num_pages} % pages_per_outer={self.pages_per_outer}")

  @property
  def options(self) -> dict:
    """What `attend` and the reference take beside arrays."""
    scale = self.head_dim**-0.5 if self.scale is None else self.scale
    return dict(page_size=self.page_size, window=self.window, soft_cap=self.soft_cap, scale=scale)

  def build(self) -> Batch:
    """The same arrays for the same case.

    Raises:
      ValueError: it needs more tokens, pages or entries of a table than it has.
    """
    rng = np.random.default_rng(self.seed)
    chunks = [] if self.prefill is None else list(self.prefill)
    rows = [] if self.decode is None else [(min(n, 1), n - 1) for n in self.decode]
    slices = chunks + rows
    starts, owned = self._place([length for length, _ in slices], rng)
    tables, held = self._map([(n, offset) for n, offset in slices], rng)
    columns = [
      np.array(
        [NONSENSE if n == 0 else value for (n, _), value in zip(slices, values, strict=True)]
      )
      for values in (starts, [offset for _, offset in slices])
    ]
    whole = Slices(columns[0], np.array([n for n, _ in slices]), columns[1], tables)

    def part(begin, end, is_there):
      if not is_there:
        return None
      return Slices(*(jnp.asarray(column[begin:end], jnp.int32) for column in whole))

    q = rng.standard_normal((self.num_tokens, self.num_heads, self.head_dim))
    return Batch(
      jnp.asarray(q, self.dtype),
      self._pages(held, rng),
      part(0, len(chunks), self.prefill is not None),
      part(len(chunks), len(slices), self.decode is not None),
      owned,
    )

  def _place(self, lengths, rng):
    """Where each slice starts in T, in random order with random gaps; which tokens are owned."""
    num_free = self.num_tokens - sum(lengths)
    if num_free < 0:
      raise ValueError(f"num_tokens={self.num_tokens} hold no {sum(lengths)} tokens")
    gaps = rng.multinomial(num_free, np.full(len(lengths) + 1, 1 / (len(lengths) + 1)))
    starts, owned, end = [0] * len(lengths), np.zeros(self.num_tokens, bool), 0
    for gap, index in zip(gaps, rng.permutation(len(lengths)), strict=False):
      starts[index] = end + gap
      end = starts[index] + lengths[index]
      owned[starts[index] : end] = True
    return starts, owned

  def _map(self, slices, rng):
    """A table for each slice, and which places of each page [N, page_size] its context holds."""
    nowhere = np.array([self.num_pages, -1, NONSENSE, -NONSENSE])
    tables = rng.choice(nowhere, (len(slices), self.pages_per_row))
    held = np.zeros((self.num_pages, self.page_size), bool)
    free = list(rng.permutation(self.num_pages))
    for table, (length, offset) in zip(tables, slices, strict=True):
      context = offset + length if length else 0
      num_used = -(-context // self.page_size)
      if num_used > min(self.pages_per_row, len(free)):
        raise ValueError(f"a context of {context} does not fit {self}")
      first = 0
      if self.forgets and self.window is not None:
        first = max(0, offset - self.window + 1)
      for i in range(num_used):
        table[i] = free.pop()
        places = i * self.page_size + np.arange(self.page_size)
        held[table[i]] = (places >= first) & (places < context)
    return tables, held

  def _pages(self, held, rng) -> Pages:
    dtype = self.cache_dtype or self.dtype
    shape = (self.num_pages, self.num_kv_heads, self.page_size, self.head_dim)

    def whole(x):  # [N, K, page_size, ...] -> [outer, K, inner, ...]
      x = x.reshape(-1, self.pages_per_outer, *x.shape[1:]).swapaxes(1, 2)
      return x.reshape(*x.shape[:2], -1, *x.shape[4:])

    def values():
      x = rng.standard_normal(shape)
      return jnp.asarray(whole(np.where(held[:, None, :, None], x, np.nan)), dtype)

    if dtype != "int8":
      return values(), values()
    vectors = [whole(rng.integers(-127, 128, shape)) for _ in range(2)]
    scales = [
      whole(np.where(held[:, None], rng.uniform(0.5, 2, shape[:3]) / 64, np.nan)) for _ in range(2)
    ]
    return *(jnp.asarray(x, jnp.int8) for x in vectors), *(
      jnp.asarray(x, "float32") for x in scales
    )


Attend = Callable[..., jax.Array]
"""As a backend's `attend`, with its config bound."""

_compiled = functools.partial(
  jax.jit,
  static_argnames=("page_size", "scale"),  # a window and a cap of any size take the same program
  compiler_options={"xla_backend_optimization_level": 0},  # compiles faster; runs are tiny
)(attention_reference)


def _reference(q, pages, slices, **options) -> jax.Array:
  return _compiled(q, pages, slices, **options)


def tolerance(case: AttentionCase, batch: Batch) -> np.ndarray:
  """How far each value [T, H, h] of a correct kernel may be from the reference.

  A kernel of 16 bits rounds the weights, at most u = eps / 2 of each, and the output. So with
  weights p it is off by u (sum p |v| + |sum p v|). All else is float32: scores are sums over h and
  the exponent makes absolute errors of them relative ones of weights, so a few ulp more.
  """
  absolute = (batch.pages[0], jnp.abs(batch.pages[1]), *batch.pages[2:])
  spread = np.asarray(_reference(batch.q, absolute, batch.slices, **case.options))
  unit = float(jnp.finfo(case.dtype).eps) / 2
  rounding = 0 if case.dtype == "float32" else 2 * unit
  return (rounding + 32 * float(jnp.finfo("float32").eps)) * spread


def check(attend: Attend, case: AttentionCase, *, reference: Attend = _reference) -> None:
  """Asserts that `attend` is the reference wherever there is a slice."""
  batch = case.build()
  owned = batch.owned
  poisoned = jnp.where(owned[:, None, None], batch.q, jnp.nan)
  out = attend(poisoned, batch.pages, batch.prefill, batch.decode, **case.options)
  assert out.dtype == case.dtype and out.shape == batch.q.shape
  expected = np.asarray(reference(batch.q, batch.pages, batch.slices, **case.options))
  excess = np.abs(np.asarray(out, np.float32) - expected) - tolerance(case, batch)
  wrong = owned & ~(excess <= 0).all((1, 2))  # NaN is wrong
  assert not wrong.any(), f"{case}: off by {excess[owned].max()} too much, tokens {wrong.nonzero()}"


def check_padding(attend: Attend, case: AttentionCase) -> None:
  """Asserts that tokens of no slice come back finite."""
  batch = case.build()
  out = attend(batch.q, batch.pages, batch.prefill, batch.decode, **case.options)
  assert not batch.owned.all(), f"{case} has no padding"
  assert np.isfinite(np.asarray(out, np.float32)).all()


def check_isolation(attend: Attend, case: AttentionCase) -> None:
  """Asserts that a slice whose own values went wrong is NaN, and that no other is any different.

  Each page is of one slice in these cases, and one page is one entry of the cache.
  """
  batch = case.build()
  run = functools.partial(attend, batch.q, prefill=batch.prefill, decode=batch.decode)
  before = np.asarray(run(pages=batch.pages, **case.options), np.float32)
  for start, length, _, table in zip(*map(np.asarray, batch.slices), strict=True):
    if length:
      wrong = tuple(x.at[table[0]].set(jnp.nan) for x in batch.pages)
      after = np.asarray(run(pages=wrong, **case.options), np.float32)
      own = np.isin(np.arange(case.num_tokens), start + np.arange(length))
      assert np.isnan(after[own]).all(), f"{case}: the slice at {start} hides what went wrong"
      others = batch.owned & ~own
      np.testing.assert_array_equal(after[others], before[others])


def _mutation(change: Callable[..., tuple]) -> Attend:
  """A reference that is wrong by `change`, with zeros for poison: so NaN gives nothing away."""

  def mutated(q, pages, slices, **options):
    pages = tuple(jnp.nan_to_num(x) for x in pages)
    q, pages, slices, options = change(q, pages, slices, options)
    return _reference(q, pages, slices, **options)

  return mutated


def _shift(by: int):
  return _mutation(lambda q, pages, s, o: (q, pages, s._replace(offsets=s.offsets + by), o))


def _widen(by: int):
  def change(q, pages, slices, options):
    return q, pages, slices, options | dict(window=options["window"] + by)

  return _mutation(change)


def _whole_last_page(q, pages, slices, options):
  size = options["page_size"]
  ends = slices.offsets + slices.lengths
  rest = -(-ends // size) * size - ends
  return q, pages, slices._replace(offsets=slices.offsets + rest), options


def _interleaved(q, pages, slices, **options):
  """Query head i reads kv head i % K, not i // G."""
  _, num_heads, _ = q.shape
  _, num_kv_heads, *_ = pages[0].shape
  order = np.arange(num_heads).reshape(-1, num_kv_heads).T.ravel()
  out = _reference(q[:, order], pages, slices, **options)
  return out[:, np.argsort(order)]


MUTATIONS: dict[str, Attend] = {
  "keys and values swapped": _mutation(
    lambda q, p, s, o: (q, (p[1], p[0], *p[3:1:-1]), s, o),
  ),
  "scale dropped": _mutation(lambda q, p, s, o: (q.astype("float32") / o["scale"], p, s, o)),
  "soft cap dropped": _mutation(lambda q, p, s, o: (q, p, s, o | dict(soft_cap=None))),
  "causal mask one key further": _shift(1),
  "causal mask one key short": _shift(-1),
  "window one key wider": _widen(1),
  "window one key narrower": _widen(-1),
  "the rest of the last page unmasked": _mutation(_whole_last_page),
  "heads interleaved": _interleaved,
}
"""Wrong references. `check` against each must fail for a case with a window and a soft cap."""


def check_write(
  write: Callable[..., Pages],
  *,
  num_kv_heads: int = 2,
  head_dim: int = 16,
  inner: int = 8,
  num_outer: int = 6,
  num_tokens: int = 21,
  dtype: str = "float32",
  seed: int = 0,
) -> None:
  """Asserts that `write(pages, k, v, slots)` is the reference bit by bit, and drops as it does."""
  rng = np.random.default_rng(seed)
  num_slots = num_outer * inner
  shape = (num_outer, num_kv_heads, inner, head_dim)
  pages = tuple(jnp.asarray(rng.standard_normal(shape), dtype) for _ in range(2))
  k, v = (
    jnp.asarray(rng.standard_normal((num_tokens, num_kv_heads, head_dim)), dtype) for _ in range(2)
  )
  dropped = [-1, -NONSENSE, num_slots, num_slots + 3, NONSENSE]
  slots = np.concatenate([rng.permutation(num_slots)[: num_tokens - len(dropped)], dropped])
  slots = jnp.asarray(rng.permutation(slots), jnp.int32)
  expected = write_pages_reference(pages, k, v, slots)
  for new, old, right in zip(write(pages, k, v, slots), pages, expected, strict=True):
    assert new.dtype == dtype
    assert not np.array_equal(old, right)
    np.testing.assert_array_equal(np.asarray(new, np.float32), np.asarray(right, np.float32))
