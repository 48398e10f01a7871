"""Pages lie where the tables say; hand-offs move them byte by byte; donation is in place."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from models.model_passes import make_tables

from pdjax.engine.aot import count_collectives
from pdjax.engine.mesh import make_mesh
from pdjax.kernels.backends import tpu
from pdjax.kernels.backends.xla import fetch_block
from pdjax.kernels.tile_config import TileConfig
from pdjax.kernels.write_pages import write_pages_reference
from pdjax.models import kv_cache
from pdjax.models.kv_cache import KVLayout

pytestmark, once, slow = pytest.mark.quick, pytest.mark.once, pytest.mark.slow

PAGE_SIZE, PAGES_PER_ROW, NUM_ROWS = 4, 6, 3
KINDS = ["slots", "paged", "interleaved"]


def make_layout(kind, **changes):
  fields = dict(
    kind=kind,
    num_layers=2,
    num_kv_heads=2,
    head_dim=8,
    dtype="float32",
    num_rows=NUM_ROWS,
    page_size=PAGE_SIZE,
    pages_per_row=PAGES_PER_ROW,
    num_pages=NUM_ROWS * PAGES_PER_ROW + (0 if kind == "slots" else 5),
  )
  return KVLayout(**(fields | changes))


def random_cache(layout, seed):
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), kv_cache.init_cache(layout)
  )


def tokens_of(layout, cache, table):
  """What a row holds, read page by page in numpy: [2, L, K, max_len, h]."""
  pages_per_outer = layout.pages_per_outer
  out = []
  for i in range(2):
    for layer in cache:
      x = np.asarray(layer[0][:, :, i::2].swapaxes(1, 2) if len(layer) == 1 else layer[i])
      pages = []
      for page in table:
        at = page % pages_per_outer * PAGE_SIZE
        pages.append(x[page // pages_per_outer, :, at : at + PAGE_SIZE])
      out.append(np.concatenate(pages, axis=1))
  return np.stack(out).reshape(2, layout.num_layers, *out[0].shape)


def tables_for(layout, seed=0):
  kind = "slots" if layout.kind == "slots" else "paged"  # pages in random places
  return make_tables(dataclasses.replace(layout, kind=kind), seed)


def write_for(layout):
  if layout.kind == "interleaved":
    return functools.partial(tpu.write, config=TileConfig(backend="tpu"))
  return write_pages_reference


@pytest.mark.parametrize("kind", KINDS)
def test_written_tokens_are_fetched_and_padding_changes_nothing(kind):
  layout = make_layout(kind)
  tables = tables_for(layout)
  cache = random_cache(layout, 0)
  rng = np.random.default_rng(1)
  positions = np.stack([rng.permutation(layout.max_len)[:7] for _ in range(NUM_ROWS)])
  pages = np.take_along_axis(tables, positions // PAGE_SIZE, axis=1)
  slots = pages * PAGE_SIZE + positions % PAGE_SIZE
  slots[:, 3], positions[:, 3] = (-1, -5, layout.num_pages * PAGE_SIZE)[:NUM_ROWS], -1
  k, v = rng.standard_normal((2, positions.size, 2, 8)).astype(np.float32)
  write = write_for(layout)
  written = tuple(write(layer, k, v, slots.ravel()) for layer in cache)
  for row, table in enumerate(tables):
    expected = tokens_of(layout, cache, table)
    for i, position in enumerate(positions[row]):
      if position >= 0:
        expected[0, :, :, position] = k[row * 7 + i]
        expected[1, :, :, position] = v[row * 7 + i]
    np.testing.assert_array_equal(tokens_of(layout, written, table), expected)
    if kind == "interleaved":  # which plain XLA does not read
      continue
    for start, size in ((0, 8), (4, 12), (16, 8), (0, layout.max_len)):
      for layer, layer_cache in enumerate(written):
        block = fetch_block(layer_cache, tables[row : row + 1], start, size, PAGE_SIZE)
        for got, want in zip(block, expected[:, layer], strict=True):
          np.testing.assert_array_equal(got[0], want[:, start : start + size])


@pytest.mark.parametrize(
  "bucket", [2, pytest.param(6, marks=once), *(pytest.param(n, marks=slow) for n in (1, 4))]
)
@pytest.mark.parametrize("target_kind", KINDS)
@pytest.mark.parametrize("source_kind", KINDS)
def test_a_hand_off_moves_exactly_the_pages(source_kind, target_kind, bucket):
  source, target = make_layout(source_kind), make_layout(target_kind)
  source_cache, target_cache = random_cache(source, 0), random_cache(target, 1)
  for used in range(1, bucket + 1):
    pages, target_pages = np.full((2, bucket), source.num_pages, np.int32)
    target_pages[:] = target.num_pages
    from_table, to_table = tables_for(source, 2)[1], tables_for(target, 3)[2]
    pages[:used], target_pages[:used] = from_table[:used], to_table[:used]
    pieces = kv_cache.gather(source, source_cache, pages)
    assert pieces.shape == (2, 2, 2, bucket * PAGE_SIZE, 8)
    moved = kv_cache.scatter(target, target_cache, target_pages, [pieces])
    want = tokens_of(target, target_cache, to_table)
    want[:, :, :, : used * PAGE_SIZE] = tokens_of(source, source_cache, from_table)[
      :, :, :, : used * PAGE_SIZE
    ]
    np.testing.assert_array_equal(tokens_of(target, moved, to_table), want)
    for table in tables_for(target, 3)[:2]:  # rows of others
      np.testing.assert_array_equal(
        tokens_of(target, moved, table), tokens_of(target, target_cache, table)
      )


@pytest.mark.parametrize("kind", KINDS)
def test_scatter_and_write_are_in_place_when_donated(kind):
  layout = make_layout(kind, num_kv_heads=4, head_dim=64, page_size=16)
  cache = jax.eval_shape(lambda: kv_cache.init_cache(layout))
  pages = jax.ShapeDtypeStruct((2,), jnp.int32)
  gather, scatter = (functools.partial(f, layout) for f in (kv_cache.gather, kv_cache.scatter))
  pieces = jax.eval_shape(gather, cache, pages)
  stats = jax.jit(scatter, donate_argnums=0).lower(cache, pages, [pieces]).compile()
  stats = stats.memory_analysis()
  assert stats.alias_size_in_bytes == layout.num_bytes
  assert stats.temp_size_in_bytes < layout.num_bytes / 4

  places, token = jax.ShapeDtypeStruct((3,), jnp.int32), jax.ShapeDtypeStruct((3, 4, 64), "float32")
  write = jax.jit(write_for(layout), donate_argnums=0)
  stats = write.lower(cache[0], token, token, places).compile().memory_analysis()
  assert stats.alias_size_in_bytes == layout.num_bytes / 2
  assert stats.temp_size_in_bytes < layout.num_bytes / 100


def test_gather_moves_no_whole_row():
  layout = make_layout("slots", pages_per_row=64, num_pages=NUM_ROWS * 64)
  cache = jax.eval_shape(lambda: kv_cache.init_cache(layout))
  gather = jax.jit(functools.partial(kv_cache.gather, layout))
  compiled = gather.lower(cache, jax.ShapeDtypeStruct((1,), jnp.int32)).compile()
  row_bytes = layout.num_bytes / NUM_ROWS / layout.num_layers / 2
  assert compiled.memory_analysis().temp_size_in_bytes < row_bytes


@pytest.mark.parametrize("kind", KINDS)
def test_copies_of_heads_are_neighbours_and_leave_no_trace_in_pieces(kind):
  single, double = make_layout(kind), make_layout(kind, kv_copies=2)
  pages = tables_for(single)[1]
  pieces = kv_cache.gather(single, random_cache(single, 0), pages)
  copied = kv_cache.scatter(double, kv_cache.init_cache(double), pages, [pieces])
  np.testing.assert_array_equal(kv_cache.gather(double, copied, pages), pieces)
  k, v = tokens_of(double, copied, pages)
  np.testing.assert_array_equal(k, np.repeat(pieces[0], 2, axis=1))
  np.testing.assert_array_equal(v, np.repeat(pieces[1], 2, axis=1))


@pytest.mark.parametrize("kv_copies", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_mesh_heads_stay_on_their_device(kind, kv_copies):
  """Pieces of copied heads are whole on every device, others are split by heads."""
  layout = make_layout(kind, num_kv_heads=2 // kv_copies, kv_copies=kv_copies)
  mesh = make_mesh(jax.devices("cpu")[:2])
  (axis,) = mesh.axis_names
  by_heads = NamedSharding(mesh, layout.split(axis))
  pieces_sharding = NamedSharding(mesh, P(None, None, axis if kv_copies == 1 else None))
  gather, scatter = (functools.partial(f, layout) for f in (kv_cache.gather, kv_cache.scatter))
  cache, pages, others = random_cache(layout, 0), tables_for(layout)[1], tables_for(layout)[2]
  pieces = gather(cache, pages)

  cache_on_mesh = jax.device_put(cache, by_heads)
  gather_on_mesh = jax.jit(gather, out_shardings=pieces_sharding)
  pieces_on_mesh = gather_on_mesh(cache_on_mesh, pages)
  np.testing.assert_array_equal(pieces_on_mesh, pieces)
  scatter_on_mesh = jax.jit(scatter, out_shardings=by_heads)
  moved = scatter_on_mesh(cache_on_mesh, others, [pieces_on_mesh])
  jax.tree.map(np.testing.assert_array_equal, moved, scatter(cache, others, [pieces]))

  compiled = [scatter_on_mesh.lower(cache_on_mesh, others, [pieces_on_mesh]).compile()]
  if kv_copies == 1:
    compiled.append(gather_on_mesh.lower(cache_on_mesh, pages).compile())
  for program in compiled:
    assert not any(count_collectives(program.as_text()).values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
  ("num_shards", "num_cuts"), [(2, 4), *(pytest.param(*n, marks=once) for n in [(1, 4), (2, 2)])]
)
def test_cuts_are_gathered_and_joined_as_they_are_read_and_written(kind, num_shards, num_cuts):
  """In all the heads of each device in turn; not by a copy more, nor by one between devices."""
  layout = make_layout(kind, num_kv_heads=8)
  mesh = make_mesh(jax.devices("cpu")[:num_shards])
  by_heads = NamedSharding(mesh, layout.split(*mesh.axis_names))
  cache, pages, others = random_cache(layout, 0), tables_for(layout)[1], tables_for(layout)[2]
  on_mesh = jax.device_put(cache, by_heads)

  @jax.jit
  def gather(cache, pages):
    how = {"num_shards": num_shards, "num_cuts": num_cuts}
    return [kv_cache.gather(layout, cache, pages, cut=cut, **how) for cut in range(num_cuts)]

  @functools.partial(jax.jit, donate_argnums=0)
  def scatter(cache, pages, cuts):
    return kv_cache.scatter(layout, cache, pages, cuts, num_shards=num_shards)

  cuts = gather(on_mesh, pages)
  pieces = kv_cache.gather(layout, cache, pages)
  by_cut = np.asarray(pieces).reshape(2, 2, num_shards, num_cuts, -1, *pieces.shape[3:])
  for cut, got in enumerate(cuts):
    np.testing.assert_array_equal(got, by_cut[:, :, :, cut].reshape(got.shape))

  programs = {
    "gather": gather.lower(on_mesh, pages).compile(),
    "scatter": scatter.lower(on_mesh, others, cuts).compile(),
  }
  want = kv_cache.scatter(layout, cache, others, [pieces])
  moved = scatter(jax.tree.map(jnp.copy, on_mesh), others, cuts)
  jax.tree.map(np.testing.assert_array_equal, moved, want)
  for program in programs.values():
    assert not any(count_collectives(program.as_text()).values())
  if kind == "slots":  # by page ids, a scatter makes a copy of its updates
    for name, program in programs.items():
      assert program.memory_analysis().temp_size_in_bytes < pieces.nbytes / num_shards / 8, name


@pytest.mark.parametrize("bucket", [2, 6])
def test_a_window_of_slots_that_reaches_beyond_its_row_begins_earlier(bucket):
  """Every place and number of pages of a row, and none at all; other pages stay as they were."""
  layout = make_layout("slots")
  source, target = random_cache(layout, 0), random_cache(layout, 1)
  scatter = jax.jit(functools.partial(kv_cache.scatter, layout))
  table = tables_for(layout)[1]
  for first in range(PAGES_PER_ROW):
    for num_used in range(min(bucket, PAGES_PER_ROW - first) + 1):
      pages = np.full(bucket, layout.num_pages, np.int32)
      pages[:num_used] = table[first : first + num_used]
      moved = scatter(target, pages, [kv_cache.gather(layout, source, pages)])
      for own in tables_for(layout):
        want = tokens_of(layout, target, own)
        if own[0] == table[0]:
          at = slice(first * PAGE_SIZE, (first + num_used) * PAGE_SIZE)
          want[:, :, :, at] = tokens_of(layout, source, own)[:, :, :, at]
        np.testing.assert_array_equal(tokens_of(layout, moved, own), want)


def test_num_bytes_counts_the_arrays():
  for kind in KINDS:
    for dtype in ("float32", "bfloat16"):
      layout = make_layout(kind, dtype=dtype)
      arrays = jax.tree.leaves(kv_cache.init_cache(layout))
      assert layout.num_bytes == sum(x.nbytes for x in arrays)


def test_bad_layouts_are_refused():
  with pytest.raises(ValueError, match="kind='rows'"):
    make_layout("rows")
  with pytest.raises(ValueError, match="num_pages=17"):
    make_layout("slots", num_pages=17)
  with pytest.raises(ValueError, match="page_size=0"):
    make_layout("paged", page_size=0)
