"""What kernel_bench measures: the cases, their data, what is right, and what they must cost."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from configs.models import MODELS
from pdjax.core.costs import count_slices, step_costs, total_bytes, total_flops
from pdjax.core.model_config import TINY, ModelConfig
from pdjax.kernels.reference import attention_reference, write_pages_reference
from pdjax.kernels.slices import Slices
from pdjax.kernels.tile_config import Case
from pdjax.scheduling.pages import PageConfig

ROTATED_BYTES = 256e6  # that calls rotate over: twice the largest L2 cache there is
MAX_SETS = 4  # more would only take longer to compile
CHECKED_TOKENS = 256  # at a time, so that the reference's scores fit


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
  """A case: chunks of (tokens, offset) and decodes of so many cached tokens, or a write."""

  name: str
  kernel: str
  chunks: tuple[tuple[int, int], ...] = ()
  contexts: tuple[int, ...] = ()
  written_tokens: int = 0
  page_size: int = 64

  @property
  def num_tokens(self) -> int:
    return sum(n for n, _ in self.chunks) + len(self.contexts) + self.written_tokens

  @property
  def lengths(self) -> list[int]:
    """Cached tokens of each slice, those that it computes included."""
    return [n + offset for n, offset in self.chunks] + list(self.contexts)

  @property
  def is_batch(self) -> bool:
    """Whether a library can take its slices as a batch: one chunk, or decodes alone."""
    return len(self.chunks) + bool(self.contexts) == 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineWork:
  """The steps to measure of one model."""

  model: ModelConfig
  prefill_tokens: int
  decodes: tuple[int, ...]
  context: int
  budget: int  # of the mixed step
  mixed_decodes: int
  page_size: int

  @property
  def chunk(self) -> int:
    """Tokens of the mixed step's prompt."""
    return self.budget - self.mixed_decodes

  def pages(self) -> PageConfig:
    num_rows = max(*self.decodes, self.mixed_decodes + 1)
    pages_per_row = -(-max(self.context, self.prefill_tokens) // self.page_size)
    return PageConfig(
      num_rows=num_rows,
      page_size=self.page_size,
      pages_per_row=pages_per_row,
      num_pages=num_rows * pages_per_row,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
  """All sizes of a run: a GPU's, or tiny ones."""

  num_heads: int
  num_kv_heads: int
  head_dim: int
  dtype: str
  works: tuple[Work, ...]
  num_first: int  # works that come before the engine
  engine: EngineWork | None
  matmul_width: int
  copy_bytes: int
  sample_s: float  # how long one timed program should take, at least
  grid_size: int | None = None  # configs that --tune tries of a case; None for all

  def case(self, work: Work) -> Case:
    return Case(
      kernel=work.kernel,
      num_heads=self.num_heads,
      num_kv_heads=self.num_kv_heads,
      head_dim=self.head_dim,
      page_size=work.page_size,
      dtype=self.dtype,
      cache_dtype=self.dtype,
    )


def gpu_sizes() -> Sizes:
  ragged = np.random.default_rng(0).integers(256, 8192, 64)
  return Sizes(
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    dtype="bfloat16",
    works=(
      Work(name="chunk 2048 of 8k", kernel="prefill", chunks=((2048, 6144),)),
      Work(name="decode 64 x 4k", kernel="decode", contexts=(4096,) * 64),
      Work(name="mixed 512", kernel="mixed", chunks=((480, 1568),), contexts=(2048,) * 32),
      Work(name="fresh 8k", kernel="prefill", chunks=((8192, 0),)),
      Work(name="chunk 512 of 8k", kernel="prefill", chunks=((512, 7680),)),
      Work(name="decode 1 x 32k", kernel="decode", contexts=(32_768,)),
      Work(name="decode 128 x 2k", kernel="decode", contexts=(2048,) * 128),
      Work(name="decode 64 ragged", kernel="decode", contexts=tuple(ragged.tolist())),
      Work(name="decode 64 x 4k, p16", kernel="decode", contexts=(4096,) * 64, page_size=16),
      Work(
        name="ragged chunks",
        kernel="prefill",
        chunks=((700, 0), (1, 511), (512, 4096), (835, 1000)),
      ),
      Work(name="write 2048", kernel="write", written_tokens=2048),
      Work(name="write 64", kernel="write", written_tokens=64),
    ),
    num_first=3,
    engine=EngineWork(
      model=MODELS["llama3-8b"],
      prefill_tokens=2048,
      decodes=(1, 32, 128),
      context=2048,
      budget=512,
      mixed_decodes=32,
      page_size=64,
    ),
    matmul_width=8192,
    copy_bytes=1 << 30,
    sample_s=0.03,
  )


def cpu_sizes() -> Sizes:
  return Sizes(
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    dtype="float32",
    works=(
      Work(name="chunk 16 of 48", kernel="prefill", chunks=((16, 32),), page_size=16),
      Work(name="decode 2 x 48", kernel="decode", contexts=(48, 48), page_size=16),
      Work(name="mixed 9", kernel="mixed", chunks=((8, 8),), contexts=(20,), page_size=16),
      Work(name="fresh 32", kernel="prefill", chunks=((32, 0),), page_size=16),
      Work(name="write 8", kernel="write", written_tokens=8, page_size=16),
    ),
    num_first=3,
    engine=EngineWork(
      model=dataclasses.replace(TINY, name="tiny, one layer", num_layers=1),
      prefill_tokens=32,
      decodes=(2,),
      context=32,
      budget=16,
      mixed_decodes=2,
      page_size=16,
    ),
    matmul_width=256,
    copy_bytes=1 << 20,
    sample_s=0.0,
    grid_size=2,
  )


class Problem:
  """The arrays of one case, and what is right. Changes nothing but what it has yet to compute."""

  def __init__(self, work: Work, sizes: Sizes):
    self.work, self.scale = work, sizes.head_dim**-0.5
    kv_heads, h, size = sizes.num_kv_heads, sizes.head_dim, work.page_size
    counts = [-(-n // size) for n in work.lengths] or [-(-work.written_tokens // size)]
    page_bytes = 2 * size * kv_heads * h * jnp.dtype(sizes.dtype).itemsize
    rotated_pages = math.ceil(ROTATED_BYTES / page_bytes) if sizes.sample_s else 1
    num_sets = min(max(2, -(-rotated_pages // sum(counts))), MAX_SETS)
    if work.written_tokens:  # few, but to places all over a cache
      counts = [max(sum(counts), rotated_pages // num_sets)]
    num_pages = num_sets * sum(counts)
    mean = sum(work.lengths) / max(1, len(work.lengths))
    spread = max(1.0, mean / math.e) ** 0.5  # the squares of n weights sum to about e / n

    shapes = [(work.num_tokens, sizes.num_heads, h)]
    shapes += 2 * [(num_pages, kv_heads, size, h)] + 2 * [(work.num_tokens, kv_heads, h)]

    @jax.jit
    def random(key):
      ends = np.cumsum([math.prod(shape) for shape in shapes])
      flat = jax.random.normal(key, (int(ends[-1]),), sizes.dtype)  # one is soonest compiled
      parts = jnp.split(flat, ends[:-1])
      q, k, v, *new = (part.reshape(shape) for part, shape in zip(parts, shapes))
      return q, (k, (v * spread).astype(v.dtype)), new

    self.q, self.pages, new = random(jax.random.key(1))
    rng = np.random.default_rng(0)
    owned = rng.permutation(num_pages).reshape(num_sets, -1).astype(np.int32)
    if work.written_tokens:
      self.sets = [(*new, self._slots(ids, rng)) for ids in owned]
    else:
      self.sets = [self._slices(ids, counts) for ids in owned]

  def _slots(self, ids, rng) -> jax.Array:
    size = self.work.page_size
    chosen = rng.choice(len(ids) * size, self.work.num_tokens, replace=False)
    return jnp.asarray(ids[chosen // size] * size + chosen % size)

  def _slices(self, ids, counts) -> tuple[Slices | None, Slices | None]:
    """The chunks and the decodes, with the pages `ids`; beyond a context no page exists."""
    num_pages = len(self.pages[0])
    tables = np.full((len(counts), max(counts)), num_pages, np.int32)
    for table, own in zip(tables, np.split(ids, np.cumsum(counts)[:-1])):
      table[: len(own)] = own
    chunks, contexts = self.work.chunks, self.work.contexts
    lengths = np.array([n for n, _ in chunks] + [1] * len(contexts), np.int32)
    offsets = np.array([offset for _, offset in chunks] + [n - 1 for n in contexts], np.int32)
    columns = (np.cumsum(lengths, dtype=np.int32) - lengths, lengths, offsets, tables)

    def part(begin, end):
      return Slices(*(jnp.asarray(x[begin:end]) for x in columns)) if begin < end else None

    return part(0, len(chunks)), part(len(chunks), len(lengths))

  @functools.cached_property
  def expected(self) -> Any:
    """What a call on the first set must give, computed in float32."""
    if self.work.written_tokens:
      return write_pages_reference(self.pages, *self.sets[0])
    both = [slices for slices in self.sets[0] if slices is not None]

    @jax.jit
    def attend(q, pages, both, first):
      slices = Slices(*map(jnp.concatenate, zip(*both)))
      slices = slices._replace(starts=slices.starts - first)
      return attention_reference(q, pages, slices, page_size=self.work.page_size)

    firsts = range(0, len(self.q), CHECKED_TOKENS)
    with jax.default_matmul_precision("highest"):
      parts = [attend(self.q[i : i + CHECKED_TOKENS], self.pages, both, i) for i in firsts]
    return jnp.concatenate(parts)

  @property
  def tolerance(self) -> float:
    """For `error`. Rounding a result costs a few eps of its token's size, any mistake about 1."""
    if self.work.written_tokens:
      return 0.0
    return 1e-4 if self.q.dtype == jnp.float32 else 8 * float(jnp.finfo(self.q.dtype).eps)

  def error(self, out: Any) -> float:
    """The largest difference; of attention, over the root mean square of the token's result."""

    @jax.jit
    def largest(out, expected):
      if self.work.written_tokens:
        return jnp.array([abs(a - b).max() for a, b in zip(out, expected)]).max()
      size = jnp.sqrt(jnp.mean(expected**2, axis=(1, 2), keepdims=True))
      return (abs(out.astype(jnp.float32) - expected) / size).max()

    return float(largest(out, self.expected))

  def costs(self) -> tuple[float, float]:
    """FLOPs and bytes that any way of computing it must spend."""
    work, (num_tokens, num_heads, head_dim) = self.work, self.q.shape
    _, num_kv_heads, _, _ = self.pages[0].shape
    if work.written_tokens:
      return 0, 4 * num_tokens * num_kv_heads * head_dim * self.q.itemsize
    layer = dataclasses.replace(
      TINY, num_layers=1, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim
    )
    counts = count_slices(
      prefill_starts=[offset for _, offset in work.chunks],
      prefill_tokens=[n for n, _ in work.chunks],
      decode_positions=[n - 1 for n in work.contexts],
      num_emitted=0,
    )
    width = self.q.itemsize
    ops = step_costs(counts, layer, bytes_per_kv=width, bytes_per_activation=width)
    ops = [op for op in ops if op.kind.startswith("attention")]
    return total_flops(ops), total_bytes(ops)
