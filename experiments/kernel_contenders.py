"""Who computes a case: ours on every backend and in other tiles, and what JAX users have today."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from experiments.kernel_cases import Problem, Work
from experiments.kernel_timing import Run
from pdjax.kernels.backends import backend
from pdjax.kernels.choice import Tuning, as_run_on, chip_of, choose
from pdjax.kernels.chunked_prefill import chunked_prefill
from pdjax.kernels.mixed import mixed
from pdjax.kernels.paged_decode import paged_decode
from pdjax.kernels.tile_config import Case, Chip, TileConfig
from pdjax.kernels.write_pages import write_pages

BACKENDS = {"cpu": ("triton", "xla"), "gpu": ("mosaic", "triton", "xla")}

_WARPS = {"num_warps": (4, 8)}
_TRITON = {"block_q": (64, 128), "block_k": (32, 64), "num_stages": (2, 3)}
_MOSAIC = {"block_q": (64, 128, 192), "block_k": (64, 128), "num_stages": (2, 4)}
_XLA = {"block_q": (128, 384), "block_k": (128, 256)}
# What --tune tries of each (backend, kernel), beside the default, for the fields that it reads.
# What does not compile or is wrong is passed over.
GRIDS: dict[tuple[str, str], dict[str, tuple[int, ...]]] = {
  ("triton", "prefill"): _TRITON | _WARPS,
  ("triton", "mixed"): _TRITON | _WARPS,
  ("triton", "decode"): {"block_k": (32, 64, 128), "min_split_tokens": (256, 512)} | _WARPS,
  ("triton", "write"): {},
  ("mosaic", "prefill"): _MOSAIC,
  ("mosaic", "mixed"): _MOSAIC,
  ("mosaic", "decode"): {"block_k": (32, 64, 128), "num_stages": (2, 4), "programs": (132, 264)},
  ("mosaic", "write"): {},
  ("xla", "prefill"): _XLA,
  ("xla", "mixed"): _XLA,
  ("xla", "decode"): {"block_k": (128, 256), "decode_rows": (2, 4, 8)},
}


class Contender(NamedTuple):
  name: str
  kind: str  # ours, contiguous, gathered, paged
  build: Callable[[Problem], Run]  # raises where it cannot
  config: TileConfig | None = None
  is_chosen: bool = False  # by the engine


def contenders(chip: Chip, case: Case, work: Work) -> Iterator[Contender]:
  """What the engine runs, ours on the other backends, then libraries."""
  tuning = engine_tuning(chip, case)
  config = getattr(tuning, work.kernel)
  is_fresh = tuning.fresh is not None and is_whole(work)
  if is_fresh:
    yield Contender("pdjax tokamax", "contiguous", fresh, tuning.fresh, True)
  build = functools.partial(ours, config)
  yield Contender(f"pdjax {config.backend}", "ours", build, config, not is_fresh)
  for name in BACKENDS[chip.platform]:
    if name != config.backend:
      yield Contender(f"pdjax {name}", "ours", functools.partial(default, name, case, chip))
  if work.kernel == "mixed":
    build = functools.partial(two_calls, tuning.prefill, tuning.decode)
    yield Contender("pdjax, two calls", "ours", build)
  if not work.is_batch:
    return
  cudnn, xla = (functools.partial(jax_nn, name) for name in ("cudnn", "xla"))
  for name, attend in (("cuDNN", cudnn), ("tokamax", tokamax)):
    yield Contender(name, "contiguous", functools.partial(library, attend, False))
    yield Contender(name, "gathered", functools.partial(library, attend, True))
  yield Contender("jax.nn in XLA", "contiguous", functools.partial(library, xla, False))
  if work.contexts:
    yield Contender("bundled paged", "paged", bundled_paged)
    return
  if not is_fresh:
    yield Contender("pdjax tokamax", "contiguous", fresh)
  yield Contender("bundled Mosaic", "contiguous", bundled_mosaic)


def engine_tuning(chip: Chip, case: Case) -> Tuning:
  """The kernels that the engine runs; on a CPU, those that it would interpret."""
  fields = dataclasses.asdict(case)
  del fields["kernel"]
  return choose(chip, "pallas", **fields)


def is_whole(work: Work) -> bool:
  """Whether it is one prompt that begins and ends in the step."""
  return work.kernel == "prefill" and len(work.chunks) == 1 and not work.chunks[0][1]


# Ours ---------------------------------------------------------------------------------------------


def ours(config: TileConfig, problem: Problem) -> Run:
  work = problem.work
  if work.kernel == "write":
    return Run(problem.pages, problem.sets, functools.partial(write_pages, config=config))
  kernel = {"prefill": chunked_prefill, "decode": paged_decode, "mixed": mixed}[work.kernel]
  call = functools.partial(kernel, page_size=work.page_size, config=config)
  given = [[slices for slices in both if slices is not None] for both in problem.sets]
  return Run(problem.q, [(problem.pages, *slices) for slices in given], call)


def default(name: str, case: Case, chip: Chip, problem: Problem) -> Run:
  """Ours on a backend that was not chosen, with its default."""
  reason = backend(name).refuses(case, chip)
  if reason is not None:
    raise NotImplementedError(reason)
  return ours(interpreted(backend(name).default(case, chip)), problem)


def interpreted(config: TileConfig) -> TileConfig:
  """`config` for this machine: without a GPU, Pallas kernels run in interpret mode."""
  return as_run_on(chip_of(jax.devices()[0]), config)


def tiles(chip: Chip, case: Case) -> Iterator[TileConfig]:
  """Of each backend that serves a case without interpreting: its default, then a grid around it."""
  for name in BACKENDS[chip.platform]:
    grid = GRIDS.get((name, case.kernel))
    if grid is None or (name == "xla") != (chip.platform == "cpu"):
      continue  # what is interpreted is not measured
    if backend(name).refuses(case, chip) is not None:
      continue
    first = backend(name).default(case, chip)
    yield first
    for values in itertools.product(*grid.values()):
      config = dataclasses.replace(first, **dict(zip(grid, values)))
      if config != first:
        yield config


def two_calls(prefill: TileConfig, decode: TileConfig, problem: Problem) -> Run:
  """A mixed step's attention as a call for the chunks and one for the decodes."""
  num_chunked = sum(n for n, _ in problem.work.chunks)
  size = problem.work.page_size

  def call(q, pages, chunks, decodes):
    of_chunks, of_decodes = q
    return (
      chunked_prefill(of_chunks, pages, chunks, page_size=size, config=prefill),
      paged_decode(of_decodes, pages, decodes, page_size=size, config=decode),
    )

  sets = [
    (problem.pages, chunks, decodes._replace(starts=decodes.starts - num_chunked))
    for chunks, decodes in problem.sets
  ]
  state = (problem.q[:num_chunked], problem.q[num_chunked:])
  return Run(state, sets, call, jnp.concatenate)


# Libraries ----------------------------------------------------------------------------------------


def gather(x: jax.Array, tables: jax.Array) -> jax.Array:  # [N, K, page_size, h] -> [B, S, K, h]
  found = x.at[tables].get(mode="clip").swapaxes(2, 3)  # [B, P, page_size, K, h]
  num_rows, num_pages, size, *rest = found.shape
  return found.reshape(num_rows, num_pages * size, *rest)


def library(attend: Callable[..., jax.Array], is_gathered: bool, problem: Problem) -> Run:
  """`attend(q [B, t, H, h], k, v [B, S, K, h], work)` on contiguous K and V, or after a gather."""
  work, q = problem.work, problem.q
  q = q[None] if work.chunks else q[:, None]

  def on_pages(q, pages, tables):
    return attend(q, *(gather(x, tables) for x in pages), work)

  def on_contiguous(q, k, v):
    return attend(q, k, v, work)

  tables = [(chunks or decodes).tables for chunks, decodes in problem.sets]
  if is_gathered:
    sets, call = [(problem.pages, table) for table in tables], on_pages
  else:
    sets = [tuple(gather(x, table) for x in problem.pages) for table in tables]
    call = on_contiguous
  return Run(q, sets, call, lambda out: out.reshape(problem.q.shape))


def jax_nn(implementation: str, q, k, v, work: Work) -> jax.Array:
  """jax.nn.dot_product_attention. Causal there means from position 0: else a mask has to say it."""

  def begun(num_tokens: int, num_keys: int, offset: int) -> dict[str, Any]:
    return {"mask": jnp.tri(num_tokens, num_keys, offset, dtype=bool)[None, None]}

  return jax.nn.dot_product_attention(
    q, k, v, implementation=implementation, **seen(k, work, begun)
  )


def tokamax(q, k, v, work: Work) -> jax.Array:
  """As tokamax chooses by itself. A window that reaches `offset` ahead is a causal mask there."""
  import tokamax

  def begun(num_tokens: int, num_keys: int, offset: int) -> dict[str, Any]:
    return {"local_window_size": (num_keys, offset)}

  return tokamax.dot_product_attention(q, k, v, **seen(k, work, begun))


def seen(k, work: Work, begun: Callable[[int, int, int], dict[str, Any]]) -> dict[str, Any]:
  """What tells a library which keys are seen; `begun` does where a prompt began in a step before.

  Contexts that fill `k` need not be told.
  """
  _, num_keys, _, _ = k.shape
  if work.contexts:
    is_full = {*work.contexts} == {num_keys}
    return {} if is_full else {"key_value_seq_lengths": jnp.array(work.contexts, jnp.int32)}
  ((num_tokens, offset),) = work.chunks
  if not offset and num_tokens == num_keys:
    return {"is_causal": True}
  return begun(num_tokens, num_keys, offset)


def fresh(problem: Problem) -> Run:
  """As the engine serves prompts that begin in a step where that was measured to win."""
  if not is_whole(problem.work):
    raise NotImplementedError("one whole prompt only")
  config, (slices, _) = interpreted(TileConfig(backend="tokamax")), problem.sets[0]
  num_tokens = problem.work.num_tokens
  attend = functools.partial(
    backend("tokamax").attend_fresh,
    slices=slices,
    window=None,
    soft_cap=None,
    scale=problem.scale,
    config=config,
  )
  return library(
    lambda q, k, v, _: attend(q[0], k[0, :num_tokens], v[0, :num_tokens])[None], False, problem
  )


def bundled_mosaic(problem: Problem) -> Run:
  """jax.experimental's attention for Hopper, which wants float16 and no scale: K has it."""
  from jax.experimental.pallas.ops.gpu import attention_mgpu

  if not is_whole(problem.work):
    raise NotImplementedError("one whole prompt only: it knows neither offsets nor lengths")
  config = attention_mgpu.TuningConfig(
    block_q=64, block_kv=128, max_concurrent_steps=2, causal=True
  )
  run = library(lambda q, k, v, _: attention_mgpu.attention(q, k, v, config), False, problem)
  sets = [(k * problem.scale, v) for k, v in run.sets]
  return run._replace(
    **jax.tree.map(lambda x: x.astype(jnp.float16), {"state": run.state, "sets": sets})
  )


def bundled_paged(problem: Problem) -> Run:
  """jax.experimental's paged attention, on pages in its own order. K has the scale again."""
  from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

  k, v = (jnp.swapaxes(x, 0, 1) for x in problem.pages)
  k = (k * problem.scale).astype(k.dtype)
  lengths = jnp.array(problem.work.contexts, jnp.int32)
  _, num_pages, _, _ = k.shape
  is_interpreted = jax.default_backend() == "cpu"
  k_splits, tables = 16, []  # its default, which has to divide a table
  for _, decodes in problem.sets:
    _, pages_per_row = decodes.tables.shape
    existing = jnp.minimum(decodes.tables, num_pages - 1)
    tables.append(jnp.pad(existing, ((0, 0), (0, -pages_per_row % k_splits))))

  def call(q, k, v, tables):
    _, pages_per_row = tables.shape
    return paged_attention(
      q, k, v, tables, lengths,
      pages_per_compute_block=math.gcd(8, pages_per_row // k_splits), k_splits=k_splits,
      interpret=is_interpreted,
    )  # fmt: skip

  return Run(problem.q, [(k, v, table) for table in tables], call)
