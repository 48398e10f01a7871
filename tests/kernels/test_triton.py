"""The Triton kernels, interpreted, are the reference; and compile for GPUs that are not here."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.cases import (
  MUTATIONS,
  AttentionCase,
  check,
  check_isolation,
  check_padding,
  check_write,
)

from configs.targets import TARGETS
from pdjax.engine.aot import make_target_mesh
from pdjax.engine.targets import missing_packages
from pdjax.kernels.backends import triton
from pdjax.kernels.choice import chip_of
from pdjax.kernels.slices import Slices
from pdjax.kernels.tile_config import Case, Chip, TileConfig

CONFIG = TileConfig(
  backend="triton", block_q=16, block_k=8, min_split_tokens=8, programs=8, interpret=True
)
MIXED = AttentionCase(
  prefill=((9, 0), (0, 0), (7, 5), (1, 13)),
  decode=(29, 0, 1, 16),
)
DTYPES = ("float32", "bfloat16", "float16")
LIMITS = dict(window=9, soft_cap=4.0, forgets=True)


@functools.cache
def kernel(config: TileConfig = CONFIG):
  return jax.jit(
    functools.partial(triton.attend, config=config),
    static_argnames=("page_size", "window", "soft_cap", "scale"),
    compiler_options={"xla_backend_optimization_level": 0},  # compiles faster; runs are tiny
  )


def shapes(**changes) -> AttentionCase:
  """`MIXED` with other shapes, and contexts that reach into several pages of any size."""
  size = changes.get("page_size", 4)
  if size > 8:
    prefill = ((9, 0), (0, 0), (7, size - 3), (1, 2 * size))
    changes |= dict(
      pages_per_row=3, num_pages=12, prefill=prefill, decode=(2 * size, 0, 1, size + 1)
    )
  return dataclasses.replace(MIXED, **changes)


SWEEP = {
  "one head a group": shapes(num_heads=2, head_dim=32, page_size=8),
  "groups of 2": shapes(num_heads=4, head_dim=64, page_size=16, dtype="bfloat16"),
  "groups of 3": shapes(num_heads=3, num_kv_heads=1, head_dim=128, page_size=32, dtype="float16"),
  "groups of 5": shapes(num_heads=5, num_kv_heads=1, head_dim=256, page_size=64, dtype="bfloat16"),
  "groups of 6": shapes(num_heads=12, page_size=128, dtype="bfloat16"),
  "groups of 7": shapes(num_heads=7, num_kv_heads=1, head_dim=64, page_size=256),
  "groups of 8": shapes(num_heads=16, page_size=16, dtype="float16"),
  "one group of 71": shapes(num_heads=71, num_kv_heads=1, dtype="bfloat16"),
  "window": shapes(window=6, forgets=True),
  "soft cap and scale": shapes(soft_cap=1.5, scale=0.7),
  "pages side by side": shapes(pages_per_outer=8, window=11),
  "large pages side by side": shapes(page_size=16, pages_per_outer=3, dtype="bfloat16"),
  "int8": shapes(cache_dtype="int8", dtype="bfloat16"),
  "int8 side by side": shapes(cache_dtype="int8", pages_per_outer=8, **LIMITS),
  "queries wider than the cache": shapes(cache_dtype="bfloat16"),
}


@pytest.mark.quick
def test_kernel_is_reference():
  check(kernel(), MIXED)


@pytest.mark.parametrize(
  "name",
  [pytest.param(name, marks=[pytest.mark.slow] * (i > 2)) for i, name in enumerate(SWEEP)],
)
def test_kernel_is_reference_in_every_shape(name):
  check(kernel(), SWEEP[name])


@pytest.mark.parametrize(
  "dtype",
  [pytest.param(dtype, marks=[pytest.mark.slow] * (i > 0)) for i, dtype in enumerate(DTYPES)],
)
def test_the_check_catches_mutations(dtype):
  case = dataclasses.replace(MIXED, dtype=dtype, **LIMITS)
  check(kernel(), case)
  for name, mutated in MUTATIONS.items():
    with pytest.raises(AssertionError, match="off by"):
      check(kernel(), case, reference=mutated)
      pytest.fail(f"{dtype}: {name} passes")


@pytest.mark.quick
def test_what_goes_wrong_in_a_request_stays_there():
  check_isolation(kernel(), MIXED)


@pytest.mark.quick
def test_padding_and_empty_batches_come_back_finite():
  check_padding(kernel(), MIXED)
  check_padding(kernel(), dataclasses.replace(MIXED, prefill=((0, 0),) * 4, decode=(0,) * 4))


@pytest.mark.quick
@pytest.mark.parametrize("offset", [0, 3, 4, 5, 7, 8, 9])  # around borders of pages and key blocks
def test_offsets_and_lengths_at_borders(offset):
  # A tile has 4 tokens.
  lengths = (3, 4, 5, 8)
  decode = tuple(max(0, offset + i) for i in (-1, 0, 1, 2))
  check(kernel(), dataclasses.replace(
    MIXED, prefill=tuple((n, offset) for n in lengths), decode=decode, num_tokens=40
  ))  # fmt: skip


@pytest.mark.quick
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_ragged_batch(data):
  prefill = []
  for _ in range(4):
    length = data.draw(st.integers(0, 9))
    prefill.append((length, data.draw(st.integers(0, 32 - length))))
  decode = data.draw(st.lists(st.integers(0, 32), min_size=4, max_size=4))
  seed = data.draw(st.integers(0, 99))
  check(kernel(), dataclasses.replace(
    MIXED, prefill=tuple(prefill), decode=tuple(decode), seed=seed
  ))  # fmt: skip


@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.slow), 13])
@pytest.mark.parametrize(
  ("programs", "min_split_tokens"),
  [(1, 1), (1000, 256), (1000, 1), (7, 12)],
  ids=["never split", "too short to split", "split at every block", "split a little"],
)
def test_any_number_of_parts_is_the_same(programs, min_split_tokens, window):
  config = dataclasses.replace(CONFIG, programs=programs, min_split_tokens=min_split_tokens)
  for seed in range(5):
    lengths = np.random.default_rng(seed).integers(0, 201, 3)
    case = AttentionCase(
      decode=(*map(int, lengths), 200), pages_per_row=50, num_pages=200, num_tokens=6,
      window=window, forgets=True, seed=seed,
    )  # fmt: skip
    check(kernel(config), case)


def test_a_mixed_step_is_a_prefill_and_a_decode():
  batch = dataclasses.replace(MIXED, **LIMITS).build()
  options = dataclasses.replace(MIXED, **LIMITS).options
  mixed = kernel()(batch.q, batch.pages, batch.prefill, batch.decode, **options)
  apart = kernel()(batch.q, batch.pages, batch.prefill, None, **options)
  apart = kernel()(apart, batch.pages, None, batch.decode, **options)  # keeps what is not its own
  np.testing.assert_allclose(mixed, apart, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
  ("block_q", "block_k"), [(1, 16), (24, 4), (64, 32)]
)  # one token a tile; rows not a power of two; a tile longer than every chunk
def test_tiles_of_any_size_are_the_same(block_q, block_k):
  check(kernel(dataclasses.replace(CONFIG, block_q=block_q, block_k=block_k)), MIXED)


@pytest.mark.quick
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("inner", "num_outer"), [(4, 12), (24, 2)])
def test_write_is_reference(dtype, inner, num_outer):
  write = functools.partial(triton.write, config=CONFIG)
  check_write(write, inner=inner, num_outer=num_outer, dtype=dtype)


def case_of(kernel: str = "prefill", **changes) -> Case:
  shape = dict(num_heads=32, num_kv_heads=8, head_dim=128, page_size=16)
  return Case(
    **{"kernel": kernel, "dtype": "bfloat16", "cache_dtype": "bfloat16"} | shape | changes
  )


@pytest.mark.quick
def test_refuses_what_it_cannot_do_and_says_why():
  gpu = Chip(platform="gpu", kind="NVIDIA A100", compute_capability=8.0)
  refused = [
    (case_of(head_dim=96), gpu),
    (case_of(head_dim=8), gpu),
    (case_of(dtype="float64"), gpu),
    (case_of(cache_dtype="float8_e4m3fn"), gpu),
    (case_of("write", cache_dtype="int8"), gpu),
    (case_of("fresh"), gpu),
    (case_of(), Chip(platform="tpu", kind="TPU v5 lite")),
    (case_of(), dataclasses.replace(gpu, compute_capability=7.5)),
  ]
  for case, chip in refused:
    assert triton.refuses(case, chip), (case, chip)
  for kernel in ("prefill", "decode", "mixed", "write"):
    assert triton.refuses(case_of(kernel), gpu) is None
    assert triton.refuses(case_of(kernel), Chip(platform="cpu", kind="cpu")) is None


@pytest.fixture(scope="module", params=["a100", "h200"])
def mesh(request):
  missing = missing_packages(TARGETS[request.param])
  if missing:
    pytest.skip(f"compiling for {request.param} needs {', '.join(missing)}")
  return make_target_mesh(TARGETS[request.param], 1)


def compiled(mesh, function, *arguments, may_spill=False):
  """`function` with its first argument donated, and what it needs in memory."""
  arguments = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    ),
    arguments,
  )
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    traced = jax.jit(function, donate_argnums=0).trace(*arguments)
    program = traced.lower(lowering_platforms=("cuda",)).compile(
      {"xla_gpu_fail_ptx_compilation_on_register_spilling": not may_spill}
    )
  return program, program.memory_analysis()


def struct(*shape, dtype="int32"):
  return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def slices_of(rows: int, pages_per_row: int) -> Slices:
  return Slices(struct(rows), struct(rows), struct(rows), struct(rows, pages_per_row))


GPU_CASES = {
  "prefill": case_of("prefill"),
  "decode": case_of("decode", page_size=64),
  "mixed": case_of("mixed"),
  "mixed, h 64": case_of("mixed", head_dim=64),
  "mixed, h 256": case_of("mixed", head_dim=256, page_size=256),
  "mixed, float32": case_of("mixed", dtype="float32", cache_dtype="float32"),
  "mixed, int8": case_of("mixed", cache_dtype="int8"),
  "prefill, one group of 71": case_of("prefill", num_heads=71, num_kv_heads=1, head_dim=64),
}


@pytest.mark.aot
@pytest.mark.parametrize("name", GPU_CASES)
def test_defaults_fit_gpus_and_copy_no_cache(mesh, name):
  case = GPU_CASES[name]
  tokens = {"prefill": 2048, "decode": 64, "mixed": 512}[case.kernel]
  config = triton.default(case, chip_of(mesh.devices.flat[0]))
  assert not config.interpret
  shape = (65536 // case.page_size, case.num_kv_heads, case.page_size, case.head_dim)
  pages = (struct(*shape, dtype=case.cache_dtype),) * 2
  if case.cache_dtype == "int8":
    pages += (struct(*shape[:-1], dtype="float32"),) * 2
  pages_per_row = 8192 // case.page_size
  attend = functools.partial(
    triton.attend, page_size=case.page_size, window=None, soft_cap=None, scale=0.1, config=config
  )
  q = struct(tokens, case.num_heads, case.head_dim, dtype=case.dtype)
  program, memory = compiled(
    mesh, attend, q, pages,
    None if case.kernel == "decode" else slices_of(4, pages_per_row),
    None if case.kernel == "prefill" else slices_of(64, pages_per_row),
    may_spill=case.dtype == "float32",
  )  # fmt: skip
  q_bytes = q.size * q.dtype.itemsize
  assert memory.alias_size_in_bytes == memory.output_size_in_bytes == q_bytes
  one_layer_bytes = pages[0].size * pages[0].dtype.itemsize
  assert memory.temp_size_in_bytes < one_layer_bytes / 8
  attends = program.as_text().count('custom_call_target="__gpu$xla.gpu.triton"')
  assert attends == (1 if case.kernel == "prefill" else 2)  # the second merges parts


@pytest.mark.aot
def test_writes_are_in_place_on_gpus(mesh):
  pages = (struct(4096, 8, 16, 128, dtype="bfloat16"),) * 2
  new = struct(512, 8, 128, dtype="bfloat16")
  config = triton.default(case_of("write"), chip_of(mesh.devices.flat[0]))
  write = functools.partial(triton.write, config=config)
  _, memory = compiled(mesh, write, pages, new, new, struct(512))
  cache_bytes = 2 * pages[0].size * pages[0].dtype.itemsize
  assert memory.alias_size_in_bytes == cache_bytes
  assert memory.temp_size_in_bytes == 0


@pytest.mark.aot
def test_equal_layers_are_lowered_once(mesh):
  case = case_of("mixed")
  config = triton.default(case, chip_of(mesh.devices.flat[0]))
  pages = (struct(4096, 8, 16, 128, dtype="bfloat16"),) * 2

  def layers(q, pages, prefill, decode):
    for layer in pages:
      q = triton.attend(
        q, layer, prefill, decode, page_size=16, window=None, soft_cap=None, scale=0.1,
        config=config,
      )  # fmt: skip
    return q

  counts = []
  for num_layers in (1, 3):
    arguments = (
      struct(512, 32, 128, dtype="bfloat16"), [pages] * num_layers,
      slices_of(4, 512), slices_of(64, 512),
    )  # fmt: skip
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      lowered = jax.jit(layers).trace(*arguments).lower(lowering_platforms=("cuda",))
    counts.append(lowered.as_text().count("__gpu$xla.gpu.triton"))
  assert counts == [2, 2]
