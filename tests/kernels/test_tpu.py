"""The kernels for TPUs that come with JAX, under our arguments: equal to the reference, compiled.

None can run here. Splash attention has an interpret mode. Ragged paged attention does not run in
that of TPUs, which cannot reshape a reference; Pallas' plain interpreter runs it if its masked
stores are written out, so a private copy of its module is given that.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from kernels.cases import MUTATIONS, AttentionCase, check, check_padding, check_write
from kernels.fresh import FRESH, FRESH_CASES, FRESH_MUTATIONS, fresh

from configs.targets import TARGETS
from pdjax.engine.aot import make_target_mesh
from pdjax.engine.mesh import make_mesh
from pdjax.engine.targets import missing_packages
from pdjax.kernels.backends import splash, tpu
from pdjax.kernels.slices import Slices
from pdjax.kernels.tile_config import Case, Chip, TileConfig

TPUS = ["tpu-v5e", "tpu-v6e"]
TILES = TileConfig(backend="tpu", block_q=16, block_k=16, interpret=True)
WHOLE = P()
HEADS = P(None, "tensor", None)
PAGES = P(None, None, "tensor", None)
CHIP = Chip(platform="tpu", kind="TPU v5 lite")
LLAMA3_8B = Case(
  kernel="mixed",
  num_heads=32,
  num_kv_heads=8,
  head_dim=128,
  page_size=16,
  dtype="bfloat16",
  cache_dtype="bfloat16",
)


def interleave(pages):
  """(k, v) [N, K, page_size, h] as (kv,) [N, page_size, 2 K, h]: k0, v0, k1, v1, .."""
  k, v = (x.swapaxes(1, 2) for x in pages)
  num_pages, page_size, _, head_dim = k.shape
  return (jnp.stack([k, v], axis=3).reshape(num_pages, page_size, -1, head_dim),)


def deinterleave(pages):
  (kv,) = pages
  return tuple(kv[:, :, i::2].swapaxes(1, 2) for i in range(2))


@pytest.fixture(scope="module")
def interpreted_kernel():
  """A copy of the module of the kernel that runs on a CPU."""
  spec = importlib.util.find_spec(tpu.rpa.__name__)
  kernel = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(kernel)

  def store(ref, value, *, mask):  # Pallas' discharge rule for masked stores fails on `ref.at[i]`
    ref[...] = jnp.where(mask, value, ref[...])

  interpreted = functools.partial(pl.pallas_call, interpret=True)
  kernel.pl = types.SimpleNamespace(**vars(pl) | dict(pallas_call=interpreted))
  kernel.pltpu = types.SimpleNamespace(**vars(pltpu) | dict(store=store))
  return kernel


@pytest.fixture
def attend(interpreted_kernel, monkeypatch):
  """`tpu.attend` on pages of the reference's layout; as traced for `interpret` alone."""
  monkeypatch.setattr(tpu, "rpa", interpreted_kernel)

  def run(q, pages, prefill, decode, **options):
    return tpu.attend(q, interleave(pages), prefill, decode, config=TILES, **options)

  return run


BASE = AttentionCase(head_dim=128, num_kv_heads=2, num_heads=4, page_size=4, num_pages=48)
MIXED = dict(prefill=((9, 3), (0, 0), (6, 0)), decode=(0, 14, 1, 0, 29))

RPA_CASES = {
  "prefill": dict(page_size=16, pages_per_row=2, prefill=((10, 5), (0, 0), (1, 16), (16, 0))),
  "decode": dict(num_heads=3, num_kv_heads=1, decode=(0, 1, 32, 0, 17, 4)),
  "mixed": MIXED,
  "no gap, bfloat16": dict(num_tokens=18, dtype="bfloat16", num_heads=8, **MIXED),
  "window, cap": dict(window=5, soft_cap=2.0, scale=0.3, **MIXED),
}


def case(changes) -> AttentionCase:
  return dataclasses.replace(BASE, **changes)


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=[pytest.mark.slow] * (name in ("prefill", "decode")))
    for name in RPA_CASES
  ],
)  # "mixed" has both
def test_ragged_paged_attention_is_the_reference(attend, name):
  check(attend, case(RPA_CASES[name]))


def test_every_order_and_gap_gives_the_reference(attend):
  for seed in range(1, 12):
    check(attend, case(RPA_CASES["mixed"] | dict(seed=seed)))


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_check_sees_each_mistake(attend, name):
  with pytest.raises(AssertionError, match="off by"):
    check(attend, case(RPA_CASES["window, cap"]), reference=MUTATIONS[name])


def test_tokens_of_no_slice_come_back_finite(attend):
  check_padding(attend, case(RPA_CASES["mixed"]))
  nothing = dict(prefill=((0, 0),) * 3, decode=(0,) * 5)
  check_padding(attend, case(nothing))


@pytest.mark.quick
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_writes_are_those_of_the_reference(dtype):
  def write(pages, k, v, slots):
    return deinterleave(tpu.write(interleave(pages), k, v, slots, config=TILES))

  check_write(write, num_kv_heads=3, dtype=dtype)


@pytest.mark.once
@pytest.mark.quick
def test_each_device_writes_its_own_heads():
  """The axis of heads is split in half, and each half is the keys and values of whole heads."""
  rng = np.random.default_rng(0)
  kv = jnp.asarray(rng.standard_normal((6, 4, 8, 16)), "float32")
  k, v = jnp.asarray(rng.standard_normal((2, 7, 4, 16)), "float32")
  slots = jnp.asarray(rng.permutation(24)[:7], jnp.int32)
  write = functools.partial(tpu.write, config=TILES)
  split = jax.shard_map(
    write,
    mesh=make_mesh(jax.devices("cpu")[:2]),
    in_specs=((PAGES,), HEADS, HEADS, WHOLE),
    out_specs=(PAGES,),
  )
  np.testing.assert_array_equal(split((kv,), k, v, slots), write((kv,), k, v, slots))


SPLASH = fresh(
  functools.partial(
    splash.attend_fresh,
    config=TileConfig(backend="splash", block_q=256, block_k=128, interpret=True),
  )
)
WINDOWED = dataclasses.replace(FRESH, **FRESH_CASES["window, cap"])


@pytest.mark.parametrize("name", FRESH_CASES)
def test_splash_attention_is_the_reference(name):
  check(SPLASH, dataclasses.replace(FRESH, **FRESH_CASES[name]))


@pytest.mark.parametrize("name", FRESH_MUTATIONS)
def test_the_check_sees_each_mistake_in_fresh_prompts(name):
  with pytest.raises(AssertionError, match="off by"):
    check(SPLASH, WINDOWED, reference=FRESH_MUTATIONS[name])


def test_padding_of_fresh_prompts_is_finite():
  check_padding(SPLASH, FRESH)


def compile_for(target, run, num_devices, shapes, **options):
  """`run` on each of so many absent devices: its memory as the compiler sees it."""
  missing = missing_packages(TARGETS[target])
  if missing:
    pytest.skip(f"needs {' and '.join(missing)}, installed with --no-deps")
  mesh = make_target_mesh(TARGETS[target], num_devices)
  specs = jax.tree.map(lambda x: x.sharding.spec, shapes(mesh))
  split = jax.shard_map(
    run, mesh=mesh, in_specs=specs, out_specs=options.pop("out_specs"), check_vma=False
  )
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    traced = jax.jit(split, **options).trace(*shapes(mesh))
    return traced.lower(lowering_platforms=("tpu",)).compile().memory_analysis()


def shape(mesh, dims, dtype, spec=WHOLE):
  return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, spec))


def slices_shape(mesh, num_slices, pages_per_row):
  column = shape(mesh, (num_slices,), "int32")
  return Slices(column, column, column, shape(mesh, (num_slices, pages_per_row), "int32"))


LLAMA3_8B_STEPS = {  # kernel, page size, T, devices
  "prefill": ("prefill", 16, 2048, 1),
  "decode": ("decode", 64, 64, 1),
  "mixed": ("mixed", 128, 512, 1),
  "mixed on 4": ("mixed", 16, 512, 4),
}


@pytest.mark.slow
@pytest.mark.parametrize("step", LLAMA3_8B_STEPS)
@pytest.mark.parametrize("target", TPUS)
def test_a_step_of_llama3_8b_writes_in_place_and_copies_no_cache(target, step):
  kernel, page_size, num_tokens, num_devices = LLAMA3_8B_STEPS[step]
  compile_step(
    target, dataclasses.replace(LLAMA3_8B, kernel=kernel, page_size=page_size), num_tokens,
    num_devices,
  )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
  ("num_heads", "num_kv_heads", "dtype"),
  [
    (64, 8, "bfloat16"),
    (28, 4, "bfloat16"),
    (7, 1, "bfloat16"),
    (6, 2, "bfloat16"),
    (1, 1, "bfloat16"),
    (8, 2, "float32"),
  ],
)
def test_heads_that_are_not_refused_compile(num_heads, num_kv_heads, dtype):
  heads = dict(num_heads=num_heads, num_kv_heads=num_kv_heads, dtype=dtype, cache_dtype=dtype)
  compile_step("tpu-v5e", dataclasses.replace(LLAMA3_8B, **heads), 256, 1)


def compile_step(target, case, num_tokens, num_devices):
  num_pages = 65536 // case.page_size
  context, num_rows = 8192, 64
  on_one = dataclasses.replace(
    case, num_heads=case.num_heads // num_devices, num_kv_heads=case.num_kv_heads // num_devices
  )
  assert tpu.refuses(on_one, CHIP) is None
  config = tpu.default(on_one, CHIP)
  scale = case.head_dim**-0.5

  def shapes(mesh):
    slices = slices_shape(mesh, num_rows, context // case.page_size)
    k = shape(mesh, (num_tokens, case.num_kv_heads, case.head_dim), case.dtype, HEADS)
    pages = (num_pages, case.page_size, 2 * case.num_kv_heads, case.head_dim)
    return (
      (shape(mesh, pages, case.cache_dtype, PAGES),),
      shape(mesh, (num_tokens, case.num_heads, case.head_dim), case.dtype, HEADS),
      k,
      k,
      None if case.kernel == "decode" else slices,
      None if case.kernel == "prefill" else slices,
      shape(mesh, (num_tokens,), "int32"),
    )

  def run(pages, q, k, v, prefill, decode, slots):
    pages = tpu.write(pages, k, v, slots, config=config)
    options = dict(page_size=case.page_size, window=None, soft_cap=None, scale=scale)
    return tpu.attend(q, pages, prefill, decode, config=config, **options), pages

  memory = compile_for(
    target, run, num_devices, shapes, donate_argnums=0, out_specs=(HEADS, (PAGES,))
  )
  values = 65536 * 2 * on_one.num_kv_heads * case.head_dim
  cache_bytes = values * jnp.dtype(case.cache_dtype).itemsize
  assert memory.alias_size_in_bytes == cache_bytes
  assert memory.temp_size_in_bytes < cache_bytes / 20


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [1, 4])
@pytest.mark.parametrize("target", TPUS)
def test_fresh_prompts_of_llama3_8b_compile(target, num_devices):
  """Without their scores: 2,048 x 2,048 x 32 of them would be 512 MB."""
  num_tokens, config = 2048, splash.default(LLAMA3_8B, CHIP)
  options = dict(window=None, soft_cap=None, scale=128**-0.5, config=config)

  def shapes(mesh):
    q, k = (shape(mesh, (num_tokens, n, 128), "bfloat16", HEADS) for n in (32, 8))
    return q, k, k, slices_shape(mesh, 64, 512)

  run = functools.partial(splash.attend_fresh, **options)
  memory = compile_for(target, run, num_devices, shapes, out_specs=HEADS)
  assert memory.temp_size_in_bytes < 2**21


@pytest.mark.quick
@pytest.mark.parametrize(
  ("changes", "reason"),
  [
    (dict(head_dim=64), "head_dim 64"),
    (dict(head_dim=256), "head_dim 256"),
    (dict(num_heads=9, num_kv_heads=3), "3 kv heads"),
    (dict(dtype="float16", cache_dtype="float16"), "queries of float16"),
    (dict(cache_dtype="int8"), "a cache of int8"),
    (dict(kernel="fresh"), "from pages only"),
  ],
)
def test_what_the_kernel_cannot_do_is_refused(changes, reason):
  assert reason in tpu.refuses(dataclasses.replace(LLAMA3_8B, **changes), CHIP)


@pytest.mark.quick
def test_other_platforms_are_refused():
  gpu = Chip(platform="gpu", kind="NVIDIA H200", compute_capability=9.0)
  assert "not for a gpu" in tpu.refuses(LLAMA3_8B, gpu)
  fresh_case = dataclasses.replace(LLAMA3_8B, kernel="fresh")
  assert "not for a gpu" in splash.refuses(fresh_case, gpu)
  assert splash.refuses(fresh_case, CHIP) is None
  assert "no pages" in splash.refuses(LLAMA3_8B, CHIP)
