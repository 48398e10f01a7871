"""tokamax under our arguments: equal to the reference in plain XLA, and compiled for Hopper."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from kernels.cases import check, check_padding
from kernels.fresh import FRESH, FRESH_CASES, FRESH_MUTATIONS, fresh

from configs.targets import TARGETS
from pdjax.engine.aot import make_target_mesh
from pdjax.engine.targets import missing_packages
from pdjax.kernels.backends import tokamax
from pdjax.kernels.slices import Slices
from pdjax.kernels.tile_config import Case, Chip, TileConfig

CHIP = Chip(platform="gpu", kind="NVIDIA H200", compute_capability=9.0, num_cores=132)
CASE = Case(
  kernel="fresh",
  num_heads=32,
  num_kv_heads=8,
  head_dim=128,
  page_size=16,
  dtype="bfloat16",
  cache_dtype="bfloat16",
)
needs_tokamax = pytest.mark.skipif(
  importlib.util.find_spec("tokamax") is None, reason="needs tokamax: Python 3.12, pdjax[gpu]"
)
IN_XLA = fresh(
  functools.partial(tokamax.attend_fresh, config=TileConfig(backend="tokamax", interpret=True))
)


@needs_tokamax
@pytest.mark.parametrize("name", FRESH_CASES)
def test_tokamax_is_the_reference(name):
  check(IN_XLA, dataclasses.replace(FRESH, **FRESH_CASES[name]))


@needs_tokamax
@pytest.mark.parametrize("name", FRESH_MUTATIONS)
def test_the_check_sees_each_mistake(name):
  case = dataclasses.replace(FRESH, **FRESH_CASES["window, cap"])
  with pytest.raises(AssertionError, match="off by"):
    check(IN_XLA, case, reference=FRESH_MUTATIONS[name])


@needs_tokamax
def test_padding_is_finite():
  check_padding(IN_XLA, FRESH)


@needs_tokamax
def test_a_prefill_of_llama3_8b_compiles_for_hopper():
  """Without its scores: 2,048 x 2,048 x 32 of them would be 512 MB."""
  missing = missing_packages(TARGETS["h200"])
  if missing:
    pytest.skip(f"needs {' and '.join(missing)}, installed with --no-deps")
  mesh = make_target_mesh(TARGETS["h200"], 1)

  def shape(dims, dtype):
    return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

  column = shape((16,), "int32")
  slices = Slices(column, column, column, shape((16, 512), "int32"))
  q, k = (shape((2048, num_heads, 128), "bfloat16") for num_heads in (32, 8))
  run = functools.partial(
    tokamax.attend_fresh, window=None, soft_cap=None, scale=128**-0.5,
    config=tokamax.default(CASE, CHIP),
  )  # fmt: skip
  # It asks the default device, and no mesh, which kernels there are.
  with jax.default_device(mesh.devices.flat[0]), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    compiled = jax.jit(run).trace(q, k, k, slices).lower(lowering_platforms=("cuda",)).compile()
  assert "mosaic_gpu" in compiled.as_text()
  assert compiled.memory_analysis().temp_size_in_bytes < 2**20


@needs_tokamax
def test_without_a_kernel_for_the_device_it_says_why():
  q = jax.ShapeDtypeStruct((16, 4, 64), "bfloat16")
  column = jax.ShapeDtypeStruct((2,), "int32")
  slices = Slices(column, column, column, jax.ShapeDtypeStruct((2, 3), "int32"))
  config = tokamax.default(CASE, CHIP)
  run = functools.partial(
    tokamax.attend_fresh, window=None, soft_cap=None, scale=0.125, config=config
  )
  with pytest.raises(NotImplementedError, match=r"mosaic_gpu: .*; triton: "):
    jax.eval_shape(run, q, q, q, slices)


@needs_tokamax
@pytest.mark.parametrize(
  ("changes", "reason"),
  [
    (dict(platform="tpu"), "not for a tpu"),
    (dict(compute_capability=7.5), "not 7.5"),
    (dict(kernel="prefill"), "no pages"),
    (dict(dtype="float32"), "queries of float32"),
  ],
)
def test_what_it_cannot_do_is_refused(changes, reason):
  def changed(x):
    names = {field.name for field in dataclasses.fields(x)}
    return dataclasses.replace(x, **{k: v for k, v in changes.items() if k in names})

  assert tokamax.refuses(CASE, CHIP) is None
  assert reason in tokamax.refuses(changed(CASE), changed(CHIP))


@pytest.mark.quick
def test_its_absence_is_a_reason_and_no_error(monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  assert "not installed" in tokamax.refuses(CASE, CHIP)
