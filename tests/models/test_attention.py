"""Paged = slots = plain dense causal attention, whatever lies in unused places."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from models.model_passes import decode_batch, make_tables, prefill_batch, step_batch

from pdjax.engine.mesh import make_mesh
from pdjax.kernels.backends import xla
from pdjax.kernels.choice import Tuning
from pdjax.kernels.slices import Slices
from pdjax.kernels.tile_config import TileConfig
from pdjax.kernels.write_pages import write_pages_reference
from pdjax.models import kv_cache
from pdjax.models.attention import Attention
from pdjax.models.kv_cache import KVLayout

pytestmark, once = pytest.mark.quick, pytest.mark.once

H, K, HEAD_DIM = 6, 2, 16
TOLERANCE = 2e-6  # float32: a few units of the last place of values of order 1


def make_layout(kind, page_size=4, pages_per_row=7, num_rows=3):
  return KVLayout(
    kind=kind,
    num_layers=1,
    num_kv_heads=K,
    head_dim=HEAD_DIM,
    dtype="float32",
    num_rows=num_rows,
    page_size=page_size,
    pages_per_row=pages_per_row,
    num_pages=num_rows * pages_per_row + (3 if kind == "paged" else 0),
  )


def dense(q, k, v, positions, *, scale=HEAD_DIM**-0.5, shift=0):
  """One row in float64: q [t, H, h], k and v [S, K, h]."""
  out = np.zeros(q.shape)
  for i, position in enumerate(positions):
    seen = position + 1 + shift
    for head in range(H):
      kv_head = head // (H // K)
      scores = k[:seen, kv_head].astype(float) @ q[i, head].astype(float) * scale
      weights = np.exp(scores - scores.max())
      out[i, head] = weights @ v[:seen, kv_head].astype(float) / weights.sum()
  return out


def filled_cache(layout, tables, keys, values):
  """A cache of NaN but for the rows' keys and values, each [S_row, K, h]."""
  cache = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), kv_cache.init_cache(layout))[0]
  for row, (k, v) in enumerate(zip(keys, values, strict=True)):
    batch, _ = prefill_batch(layout, tables, [(row, 0, range(len(k)))], num_tokens=len(k))
    cache = write_pages_reference(cache, k, v, batch.slots)
  return cache


@pytest.fixture(scope="module")
def case():
  rng = np.random.default_rng(0)
  lengths = (5, 28, 13)
  keys, values = (
    [rng.standard_normal((n, K, HEAD_DIM)).astype(np.float32) for n in lengths] for _ in range(2)
  )
  # the last 3 positions of each row, of the second one less
  positions = np.array([[n - 3, n - 2, n - 1] for n in lengths])
  positions[1, 2] = -1
  q = 2 * rng.standard_normal((3, 3, H, HEAD_DIM)).astype(np.float32)
  return q, positions, keys, values


def attend_case(layout, tables, cache, q, positions, block_k):
  """q [3, 3, H, h] as slices of three rows, those of position -1 left out."""
  slices = Slices(np.arange(0, 9, 3), (positions >= 0).sum(1), positions[:, 0], np.asarray(tables))
  slices = Slices(*(x.astype(np.int32) for x in slices))
  run = jax.jit(xla.attend, static_argnames=("page_size", "scale", "config"))
  config = TileConfig(backend="xla", block_q=2 * H // K, block_k=block_k)
  out = run(q.reshape(9, H, HEAD_DIM), cache, slices, None, page_size=layout.page_size,
            scale=HEAD_DIM**-0.5, config=config)  # fmt: skip
  return np.asarray(out).reshape(q.shape)


@pytest.mark.parametrize("block_k", [12, *(pytest.param(n, marks=once) for n in (1, 8, 256))])
@pytest.mark.parametrize("kind", ["slots", "paged"])
def test_attend_is_dense_causal_attention(kind, block_k, case):
  q, positions, keys, values = case
  layout = make_layout(kind)
  tables = make_tables(layout)
  cache = filled_cache(layout, tables, keys, values)
  for row, keys_of_row in enumerate(keys):  # pages that a row does not have
    tables[row, -(-len(keys_of_row) // layout.page_size) :] = layout.num_pages
  out = attend_case(layout, tables, cache, q, positions, block_k)
  assert np.isfinite(out).all()
  for row in range(3):
    valid = positions[row] >= 0
    want = dense(q[row, valid], keys[row], values[row], positions[row, valid])
    np.testing.assert_allclose(out[row, valid], want, rtol=0, atol=TOLERANCE)


def test_the_tolerance_catches_mistakes(case):
  q, positions, keys, values = case
  right = dense(q[0], keys[0], values[0], positions[0] - 1)
  for wrong in (
    dense(q[0], values[0], keys[0], positions[0] - 1),
    dense(q[0], keys[0], values[0], positions[0] - 1, scale=1.0),
    dense(q[0], keys[0], values[0], positions[0] - 1, shift=1),
    dense(q[0], keys[0], values[0], positions[0] - 1, shift=-1),
    dense(q[0][:, ::-1], keys[0], values[0], positions[0] - 1),
  ):
    assert np.abs(wrong - right).max(axis=(1, 2)).min() > 1000 * TOLERANCE


@pytest.mark.parametrize("kind", ["slots", "paged"])
def test_only_padding_gives_no_nan(kind, case):
  q, positions, _, _ = case
  layout = make_layout(kind)
  tables = np.full((3, layout.pages_per_row), layout.num_pages, np.int32)
  cache = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), kv_cache.init_cache(layout))[0]
  out = attend_case(layout, tables, cache, q, np.full_like(positions, -1), 8)
  assert np.isfinite(out).all()


@pytest.mark.parametrize("kind", [pytest.param("slots", marks=once), "paged"])
def test_a_mixed_step_is_its_two_halves(kind):
  layout = make_layout(kind, page_size=4, pages_per_row=5, num_rows=4)
  tables = make_tables(layout)
  rng = np.random.default_rng(1)
  keys, values = rng.standard_normal((2, 4, 20, K, HEAD_DIM)).astype(np.float32)
  cache = filled_cache(layout, tables, keys[:, :6], values[:, :6])
  prefill, places = prefill_batch(
    layout, tables, [(2, 6, range(7)), (0, 4, range(3))], num_tokens=16
  )
  decode = decode_batch(layout, tables, [(3, 6, 0), (1, 5, 0)], num_rows=3)
  num_prefill, num_decode = len(prefill.tokens), len(decode.tokens)
  q = rng.standard_normal((num_prefill + num_decode, H, HEAD_DIM)).astype(np.float32)
  k, v = rng.standard_normal((2, num_prefill + num_decode, K, HEAD_DIM)).astype(np.float32)

  def step(prefill, decode, part, cache):
    batch = jax.tree.map(jnp.asarray, step_batch(prefill, decode))
    tiles = TileConfig(backend="xla", block_q=4 * H // K)  # as products round by their shape
    tuning = Tuning(prefill=tiles, decode=tiles, mixed=tiles, write=tiles)
    attend = Attention(layout=layout, tuning=tuning)(batch)
    return attend(*(jnp.asarray(x[part]) for x in (q, k, v)), cache, None)

  mixed, mixed_cache = step(prefill, decode, slice(None), cache)
  first, two_caches = step(prefill, None, slice(num_prefill), cache)
  second, two_caches = step(None, decode, slice(num_prefill, None), two_caches)
  np.testing.assert_array_equal(mixed, np.concatenate([first, second]))
  jax.tree.map(np.testing.assert_array_equal, mixed_cache, two_caches)

  # and both are dense attention over what was written
  used = [*places, num_prefill, num_prefill + 1]
  rows = [2] * 7 + [0] * 3 + [3, 1]
  positions = [*range(6, 13), *range(4, 7), 6, 5]
  for i, row, position in zip(used, rows, positions, strict=True):
    keys[row, position], values[row, position] = k[i], v[i]
  for i, row, position in zip(used, rows, positions, strict=True):
    want = dense(q[i : i + 1], keys[row], values[row], [position])
    np.testing.assert_allclose(mixed[i : i + 1], want, rtol=0, atol=TOLERANCE)
  assert np.isfinite(mixed).all()


@pytest.mark.parametrize("tp", [pytest.param(2, marks=pytest.mark.slow), 6])
@pytest.mark.parametrize("backend", ["xla", "triton"])
def test_devices_attend_with_their_heads_what_one_does_with_all(backend, tp):
  """With 6 devices and 2 kv heads, each of which three devices have."""
  layout = make_layout("paged")
  tables, rng = make_tables(layout), np.random.default_rng(2)
  keys, values = rng.standard_normal((2, 3, 6, K, HEAD_DIM)).astype(np.float32)
  cache = filled_cache(layout, tables, keys, values)
  prefill, _ = prefill_batch(layout, tables, [(2, 6, range(7))], num_tokens=8)
  batch = step_batch(prefill, decode_batch(layout, tables, [(1, 6, 0)], num_rows=2))
  batch = jax.tree.map(jnp.asarray, batch)
  q = rng.standard_normal((10, H, HEAD_DIM)).astype(np.float32)
  k, v = rng.standard_normal((2, 10, K, HEAD_DIM)).astype(np.float32)
  tiles = TileConfig(backend=backend, interpret=backend == "triton")
  tuning = Tuning(prefill=tiles, decode=tiles, mixed=tiles, write=tiles)

  def run(layout, cache, mesh=None):
    attention = Attention(layout=layout, tuning=tuning, mesh=mesh)
    return jax.jit(lambda *args: attention(batch)(*args, None))(q, k, v, cache)

  want, want_cache = run(layout, cache)
  copies = max(1, tp // K)
  mesh = make_mesh(jax.devices("cpu")[:tp])
  sharding = NamedSharding(mesh, layout.split(*mesh.axis_names))
  cache = tuple(jax.device_put(np.repeat(x, copies, axis=1), sharding) for x in cache)
  out, new_cache = run(dataclasses.replace(layout, kv_copies=copies), cache, mesh.abstract_mesh)
  np.testing.assert_allclose(out[:9], want[:9], rtol=0, atol=TOLERANCE)
  for x, y in zip(new_cache, want_cache, strict=True):
    assert x.sharding.is_equivalent_to(sharding, x.ndim)
    np.testing.assert_array_equal(x, np.repeat(y, copies, axis=1))


def test_paged_and_slots_give_the_same_bytes(case):
  q, positions, keys, values = case
  outs = []
  for kind in ("slots", "paged"):
    layout = make_layout(kind)
    tables = make_tables(layout)
    cache = filled_cache(layout, tables, keys, values)
    outs.append(attend_case(layout, tables, cache, q, positions, 12))
  valid = positions >= 0
  np.testing.assert_array_equal(outs[0][valid], outs[1][valid])
