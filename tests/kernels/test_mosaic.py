"""The Mosaic kernels, interpreted, are the reference; and compile for Hopper, which is not here.

Interpreted, warpgroups are threads and every operation on memory is a call back into Python, so
shapes are tiny: most tests are slow all the same.
"""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
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
from pdjax.kernels.backends import mosaic, mosaic_attention
from pdjax.kernels.choice import chip_of
from pdjax.kernels.slices import Slices
from pdjax.kernels.tile_config import Case, Chip, TileConfig

needs_mosaic = pytest.mark.skipif(
  jax.__version_info__ < (0, 11), reason=f"Mosaic kernels need jax 0.11, not {jax.__version__}"
)
CONFIG = TileConfig(
  backend="mosaic",
  block_q=64,
  block_k=64,
  num_stages=2,
  min_split_tokens=128,
  programs=4,
  interpret=True,
)
TURNS = dataclasses.replace(CONFIG, block_q=128)  # two compute warpgroups
CHUNKS = AttentionCase(
  num_heads=2,
  num_kv_heads=1,
  head_dim=64,
  page_size=16,
  pages_per_row=10,
  num_pages=24,
  num_tokens=40,
  dtype="bfloat16",
  prefill=((20, 130), (0, 0), (7, 3)),
)
DECODES = dataclasses.replace(CHUNKS, prefill=None, decode=(150, 0, 1, 64))
LIMITS = dict(window=21, soft_cap=4.0, forgets=True)
H100 = Chip(platform="gpu", kind="NVIDIA H100", compute_capability=9.0)


def attend(config: TileConfig):
  return functools.partial(mosaic.attend, config=config)


@needs_mosaic
@pytest.mark.slow
def test_chunks_are_the_reference():
  check(attend(CONFIG), CHUNKS)


@needs_mosaic
@pytest.mark.slow
def test_parts_of_decodes_are_the_reference():
  check(attend(CONFIG), DECODES)


@needs_mosaic
@pytest.mark.slow
def test_what_goes_wrong_in_a_request_stays_there():
  check_isolation(attend(CONFIG), dataclasses.replace(CHUNKS, prefill=((9, 3),), decode=(140, 20)))


SMALL = dataclasses.replace(CHUNKS, prefill=((9, 125), (0, 0)), decode=(140, 0))
SWEEP = {
  "one head a group, f16": (CONFIG, dict(num_heads=1, dtype="float16", pages_per_outer=4)),
  "groups of 3, two kv heads": (CONFIG, dict(num_heads=6, num_kv_heads=2)),
  "groups of 4, head_dim 128": (
    dataclasses.replace(TURNS, num_stages=4),
    dict(num_heads=4, head_dim=128),
  ),
  "groups of 8, pages of 64": (TURNS, dict(num_heads=8, page_size=64)),
  "a group of 11, a page is two blocks": (CONFIG, dict(num_heads=11, page_size=128)),
  "three warpgroups": (dataclasses.replace(CONFIG, block_q=192, num_stages=3), {}),
}


@needs_mosaic
@pytest.mark.slow
@pytest.mark.parametrize("name", SWEEP)
def test_any_shape_is_the_reference(name):
  config, changes = SWEEP[name]
  check(attend(config), dataclasses.replace(SMALL, **changes))


@needs_mosaic
@pytest.mark.slow
@pytest.mark.parametrize("config", [CONFIG, TURNS], ids=["alone", "turns"])
def test_windows_and_soft_caps_are_the_reference(config):
  case = dataclasses.replace(SMALL, prefill=((20, 75),), decode=(150, 0), **LIMITS)
  check(attend(config), case)


@needs_mosaic
@pytest.mark.slow
def test_places_of_no_slice_come_back_finite():
  check_padding(attend(CONFIG), CHUNKS)


@needs_mosaic
@pytest.mark.slow
def test_mixed_is_separate():
  batch = SMALL.build()
  run = functools.partial(attend(CONFIG), batch.q, batch.pages, **SMALL.options)
  both = run(batch.prefill, batch.decode)
  apart = run(batch.prefill, None), run(None, batch.decode)
  np.testing.assert_array_equal(
    np.asarray(both, np.float32), np.asarray(apart[0] + apart[1], np.float32)
  )


@needs_mosaic
@pytest.mark.slow
def test_the_check_catches_every_mutation():
  case = dataclasses.replace(
    SMALL, num_heads=4, num_kv_heads=2, prefill=((20, 75),), decode=(70,), **LIMITS
  )
  outs = []

  def once(*args, **options):
    if not outs:
      outs.append(attend(CONFIG)(*args, **options))
    return outs[0]

  check(once, case)
  for name, mutation in MUTATIONS.items():
    with pytest.raises(AssertionError, match="off by"):
      check(once, case, reference=mutation)
      pytest.fail(f"{name} was not seen")


@needs_mosaic
@pytest.mark.slow
@pytest.mark.parametrize("inner", [8, 32])
def test_writes_are_the_reference(inner):
  check_write(functools.partial(mosaic.write, config=CONFIG), inner=inner, dtype="bfloat16")


def case_of(kernel: str, **changes) -> Case:
  case = Case(
    kernel=kernel,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    page_size=16,
    dtype="bfloat16",
    cache_dtype="bfloat16",
  )
  return dataclasses.replace(case, **changes)


@needs_mosaic
@pytest.mark.slow
@pytest.mark.parametrize(
  "chip, changes, reason",
  [
    (dict(compute_capability=8.0), {}, "not 8.0"),
    (dict(compute_capability=10.0), {}, "not 10.0"),
    (dict(platform="cpu"), {}, "not for a cpu"),
    ({}, dict(head_dim=96), "head_dim 96"),
    ({}, dict(dtype="float32", cache_dtype="float32"), "float32"),
    ({}, dict(cache_dtype="int8"), "int8"),
    ({}, dict(page_size=24), "pages of 24"),
    ({}, dict(kernel="fresh"), "from pages"),
  ],
)
def test_what_it_cannot_serve_it_refuses_with_a_reason(chip, changes, reason):
  kernel = changes.get("kernel", "mixed")
  assert mosaic.refuses(case_of("mixed"), H100) is None
  refusal = mosaic.refuses(
    case_of(kernel, **{k: v for k, v in changes.items() if k != "kernel"}),
    dataclasses.replace(H100, **chip),
  )
  assert reason in refusal


@needs_mosaic
@pytest.mark.slow
def test_a_config_that_cannot_work_is_an_error():
  batch = DECODES.build()
  for changes, message in [
    (dict(block_q=96), "block_q=96"),
    (dict(block_q=128, num_stages=3), "num_stages=3"),
    (dict(block_k=24), "block_k=24"),
  ]:
    config = dataclasses.replace(CONFIG, **changes)
    with pytest.raises(ValueError, match=message):
      attend(config)(batch.q, batch.pages, None, batch.decode, **DECODES.options)


@pytest.mark.quick
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 11, 71, 128])
@pytest.mark.parametrize("block_q", [64, 128, 192])
def test_tiles_hold_every_head_once(group, block_q):
  heads = mosaic_attention.Heads.of_chunks(group, block_q)
  assert heads.heads * heads.groups >= group > heads.heads * (heads.groups - 1)
  assert heads.tokens >= 8 and heads.tokens % 8 == 0
  assert heads.heads * heads.tokens <= block_q
  assert heads.tokens % heads.piece == 0 == mosaic_attention.ROWS % heads.piece


def mesh_of(name: str):
  target = TARGETS[name]
  missing = missing_packages(target)
  if missing:
    pytest.skip(f"needs {', '.join(missing)}")
  return make_target_mesh(target, 1)


def struct(*shape, dtype="int32"):
  return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def slices_of(rows: int, pages_per_row: int) -> Slices:
  return Slices(struct(rows), struct(rows), struct(rows), struct(rows, pages_per_row))


def compiled(mesh, capfd, monkeypatch, function, *arguments):
  """What `function` needs with its first argument donated, and its PTX with what ptxas says."""
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  arguments = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments
  )
  monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
  monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
  capfd.readouterr()
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    traced = jax.jit(function, donate_argnums=0).trace(*arguments)
    program = traced.lower(lowering_platforms=("cuda",)).compile()
  return program.memory_analysis(), "".join(capfd.readouterr())


GPU_CASES = {
  "prefill": case_of("prefill"),
  "prefill, 33 tokens": case_of("prefill"),
  "prefill, pages of 64": case_of("prefill", page_size=64),
  "prefill, pages of 128": case_of("prefill", page_size=128),
  "decode": case_of("decode"),
  "decode, pages of 64": case_of("decode", page_size=64),
  "decode, pages of 128": case_of("decode", page_size=128),
  "mixed": case_of("mixed"),
  "mixed, pages of 64": case_of("mixed", page_size=64),
  "mixed, pages of 128": case_of("mixed", page_size=128),
  "mixed, h 64, f16": case_of("mixed", head_dim=64, dtype="float16", cache_dtype="float16"),
  "mixed, h 256": case_of("mixed", head_dim=256, page_size=256),
  "mixed, a group of 71": case_of("mixed", num_heads=71, num_kv_heads=1, head_dim=64),
}


@needs_mosaic
@pytest.mark.slow
@pytest.mark.parametrize(
  "target, name",
  [("h200", name) for name in GPU_CASES]
  + [("h100", name) for name in ("prefill", "decode, pages of 64", "mixed, pages of 128")],
)
def test_defaults_fit_hopper_and_copy_no_cache(target, name, capfd, monkeypatch):
  mesh, case = mesh_of(target), GPU_CASES[name]
  chip = chip_of(mesh.devices.flat[0])
  assert mosaic.refuses(case, chip) is None
  tokens = {"prefill": 2048, "decode": 64, "mixed": 512}[case.kernel]
  tokens = 33 if "33 tokens" in name else tokens  # the last bucket is the budget itself
  dtype, num_pages = case.dtype, 64 * 8192 // case.page_size
  page = struct(num_pages, case.num_kv_heads, case.page_size, case.head_dim, dtype=dtype)
  chunks = slices_of(8, 8192 // case.page_size) if case.kernel != "decode" else None
  decodes = slices_of(64, 8192 // case.page_size) if case.kernel != "prefill" else None
  options = dict(
    page_size=case.page_size,
    window=4096,
    soft_cap=30.0,
    scale=case.head_dim**-0.5,
    config=mosaic.default(case, chip),
  )
  memory, text = compiled(
    mesh,
    capfd,
    monkeypatch,
    functools.partial(mosaic.attend, **options),
    struct(tokens, case.num_heads, case.head_dim, dtype=dtype),
    (page, page),
    chunks,
    decodes,
  )
  cache_bytes = 2 * page.size * page.dtype.itemsize
  assert memory.temp_size_in_bytes < cache_bytes / 4
  assert "wgmma.mma_async" in text
  assert "cp.async.bulk.tensor" in text
  assert "setmaxnreg.inc" in text
  spilled = [int(n) for n in re.findall(r"(\d+) bytes spill", text)]
  # The results of head_dim 256 take 128 registers of 232; beside two kinds of program, some spill.
  assert spilled and max(spilled) <= (128 if case.head_dim == 256 else 0)


@needs_mosaic
@pytest.mark.slow
@pytest.mark.parametrize(("target", "num_kv_heads"), [("h100", 8), ("h200", 8), ("h200", 64)])
def test_writes_are_in_place(target, num_kv_heads, capfd, monkeypatch):
  mesh = mesh_of(target)
  page = struct(4096, num_kv_heads, 64, 128, dtype="bfloat16")
  new = struct(64, num_kv_heads, 128, dtype="bfloat16")
  memory, text = compiled(
    mesh,
    capfd,
    monkeypatch,
    functools.partial(mosaic.write, config=mosaic.default(case_of("write"), H100)),
    (page, page),
    new,
    new,
    struct(64),
  )
  assert memory.alias_size_in_bytes == 2 * page.size * page.dtype.itemsize
  # K and V may be padded to whole programs.
  assert memory.temp_size_in_bytes < 3 * new.size * new.dtype.itemsize
  assert "cp.async.bulk.tensor" in text
