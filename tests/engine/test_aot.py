"""Steps compiled for devices that are not there need what the engine's own steps need."""

from __future__ import annotations

import dataclasses
import math

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.hardware import HARDWARE
from configs.models import MODELS
from configs.targets import TARGETS
from pdjax.core.model_config import TINY
from pdjax.engine import aot
from pdjax.engine.aot import KINDS, Deployment, at_depth, count_collectives, largest_fit
from pdjax.engine.build import build_executors, default_buckets
from pdjax.engine.mesh import make_mesh
from pdjax.engine.steps import Steps
from pdjax.engine.targets import GpuTarget, TpuTarget, missing_packages
from pdjax.models.transformer import from_arrays, random_arrays
from pdjax.scheduling.pages import PageConfig
from pdjax.scheduling.probe import probe_plan

BUDGET = 32
PAGES = PageConfig(num_rows=4, page_size=4, pages_per_row=8, num_pages=1024)
SMALL = dataclasses.replace(TINY, num_layers=2)


def deployment(config=SMALL, tp=2, layout="paged", dtype="float32") -> Deployment:
  mesh = make_mesh(jax.devices("cpu")[:tp])
  return Deployment(
    config=config, mesh=mesh, platform="cpu", dtype=dtype, layout=layout, token_budget=BUDGET
  )


@pytest.fixture(scope="module")
def needs():
  return deployment().needs(PAGES)


def test_the_steps_are_those_that_the_engine_runs(needs):
  """Compiled from shapes and from an executor with its arrays, they need the same to the byte."""
  model = from_arrays(SMALL, random_arrays(SMALL, 0))
  buckets = default_buckets(PAGES, whole_budget=BUDGET, chunk_budget=BUDGET)
  group = jax.devices("cpu")[:2]
  (executor,) = build_executors(model, PAGES, buckets, [group], layout="paged")
  plans = {
    "prefill": probe_plan(PAGES, prefills=(BUDGET,)),
    "decode": probe_plan(PAGES, decodes=PAGES.num_rows),
    "mixed": probe_plan(PAGES, prefills=(BUDGET - 1,), decodes=1),
  }
  assert tuple(step.kind for step in needs.steps) == KINDS
  for step in needs.steps:
    compiled = executor.lower(plans[step.kind]).compile()
    memory = compiled.memory_analysis()
    assert step.arguments_bytes == memory.argument_size_in_bytes
    assert step.aliased_bytes == memory.alias_size_in_bytes
    assert step.temporary_bytes == memory.temp_size_in_bytes
    assert step.aliased_bytes + step.fresh_bytes == memory.output_size_in_bytes
    assert step.collectives == count_collectives(compiled.as_text())


def test_arguments_are_parameters_cache_and_little_else(needs):
  config, tp = SMALL, 2
  split = config.num_params * 4 // tp
  assert split <= needs.params_bytes < 1.02 * split  # norms are copied
  assert needs.cache_bytes * tp == PAGES.num_pages * PAGES.page_size * config.kv_bytes_per_token(4)
  for step in needs.steps:
    rest = step.arguments_bytes - needs.params_bytes - needs.cache_bytes
    assert 0 < rest < 20_000
    assert needs.is_updated_in_place(step)
    assert step.temporary_bytes < needs.cache_bytes / 2
  assert needs.total_bytes == max(step.total_bytes for step in needs.steps)


def test_a_cache_that_is_not_donated_is_noticed(monkeypatch, plain_sampling):
  class Copying(Steps):
    def _jit(self, name, function, donate, **options):
      return super()._jit(name, function, (), **options)

  monkeypatch.setattr(aot, "Steps", Copying)
  needs = deployment().needs(PAGES, ("decode",))
  (step,) = needs.steps
  assert not needs.is_updated_in_place(step)
  # and it costs a second cache
  assert step.total_bytes > needs.params_bytes + 2 * needs.cache_bytes


def test_two_depths_stand_for_all(plain_sampling):
  one, two, four = (
    deployment(dataclasses.replace(TINY, num_layers=n)).needs(PAGES, ("decode",)) for n in (1, 2, 4)
  )
  guessed = at_depth(one, two, (1, 2), 4)
  assert guessed.params_bytes == four.params_bytes
  assert guessed.cache_bytes == four.cache_bytes
  (step,), (wanted,) = guessed.steps, four.steps
  assert step.collectives == wanted.collectives
  for field in ("arguments_bytes", "aliased_bytes", "fresh_bytes"):
    assert getattr(step, field) == getattr(wanted, field)
  assert aot.collectives_per_layer(one, four, (1, 4)) == [{"all-reduce": 2}]


def test_a_model_that_cannot_be_split_is_refused():
  with pytest.raises(ValueError, match="num_heads=8 is no multiple of the 3 devices"):
    deployment(tp=3).params_bytes()


# Collectives in compiled text ---------------------------------------------------------------------

PROGRAM = """\
HloModule jit_step

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%inner (x: f32[8]) -> f32[8] {
  ROOT %all-gather.9 = f32[8]{0} all-gather(%x), dimensions={0}
}

%body (x: (s32[], f32[8])) -> (s32[], f32[8]) {
  %all-reduce.3 = f32[8]{0} all-reduce(%x), to_apply=%add, metadata={op_name="a, all-reduce("}
  %call.1 = f32[8]{0} call(%x), to_apply=%inner
}

%condition (x: (s32[], f32[8])) -> pred[] {
  ROOT %less = pred[] compare(%x, %x), direction=LT
}

%taken (x: f32[8]) -> f32[8] {
  %while.2 = (s32[], f32[8]{0}) while(%x), condition=%condition.2, body=%body.2
  ROOT %ar = f32[8]{0} all-reduce(%x), to_apply=%add
}

%body.2 (x: (s32[], f32[8])) -> (s32[], f32[8]) {
  ROOT %permute = f32[8]{0} collective-permute(%x), source_target_pairs={{0,1}}
}

%other (x: f32[8]) -> f32[8] {
  ROOT %copy = f32[8]{0} copy(%x)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %ar-start = f32[8]{0:T(128)} all-reduce-start(%x), to_apply=%add
  %ar-done = f32[8]{0:T(128)} all-reduce-done(%ar-start)
  %ag = ((f32[8]{0}), (f32[16]{0})) all-gather-start(%ar-done), dimensions={0}
  %while.1 = (s32[], f32[8]{0}) while(%all-reduce.3), condition=%condition, body=%body
  ROOT %if = f32[8]{0} conditional(%x, %x, %x), branch_computations={%taken, %other}
}
"""


@pytest.mark.quick
def test_collectives_are_told_apart_by_where_they_stand():
  assert count_collectives(PROGRAM) == {
    "always": {"all-gather": 1, "all-reduce": 1},
    "branches": {"all-reduce": 1},
    "loops": {"all-gather": 1, "all-reduce": 1, "collective-permute": 1},
  }


# The largest count that fits ----------------------------------------------------------------------


@pytest.mark.quick
@settings(deadline=None, max_examples=300)
@given(
  fixed=st.integers(0, 10**6),
  each=st.integers(1, 10**4),
  copied=st.sampled_from([0.0, 0.5, 1.0, 2.0]),  # of each, in temporaries
  usable=st.integers(1, 10**8),
  first=st.floats(0.01, 1.0),
  refuses_above=st.none() | st.floats(0.3, 2.0),
)
def test_the_largest_count_fits_and_one_more_does_not(
  fixed, each, copied, usable, first, refuses_above
):
  asked = []
  limit = math.inf if refuses_above is None else refuses_above * usable

  def needed(count):
    asked.append(count)
    total = fixed + count * each + int(count * each * copied)
    return total if total <= limit else None

  room = max(1, usable // each)
  found = largest_fit(
    needed, usable_bytes=usable, first=max(1, int(first * room)), bytes_each=each, max_tries=60
  )
  assert len(asked) <= 60 and min(asked) >= 1
  if found is None:
    assert (needed(1) or math.inf) > usable
  else:
    assert found in asked
    assert needed(found) <= usable
    assert (needed(found + 1) or math.inf) > usable


@pytest.mark.quick
def test_temporaries_that_do_not_grow_need_two_compilations():
  asked = []

  def needed(count):
    asked.append(count)
    return 1000 + 10 * count

  assert largest_fit(needed, usable_bytes=5005, first=100, bytes_each=10) == 400
  assert asked == [100, 400]


# Descriptions of devices --------------------------------------------------------------------------


@pytest.mark.quick
def test_every_target_is_a_device_with_the_same_peaks():
  for name, target in TARGETS.items():
    device = HARDWARE[name]
    if isinstance(target, GpuTarget):  # the data sheet's round numbers and XLA's exact ones
      assert target.memory_bytes == pytest.approx(device.memory_bytes, rel=0.08)
      assert target.memory_bytes_per_s == pytest.approx(device.peak_bytes_per_s, rel=0.05)


@pytest.mark.quick
def test_a_slice_of_tpus_has_enough_chips():
  target = TpuTarget(generation="v5e")
  for num_devices in (1, 4, 5, 8, 9, 64):
    name = target.topology_options(num_devices)["topology_name"]
    width, height = map(int, name.removeprefix("v5e:").split("x"))
    assert num_devices <= width * height < max(5, 2 * num_devices)
  with pytest.raises(ValueError, match="65 TPU v5e"):
    target.topology_options(65)


def skip_without_wheels(name: str) -> None:
  missing = missing_packages(TARGETS[name])
  if missing:
    pytest.skip(f"needs {' and '.join(missing)}, installed with --no-deps")


@pytest.mark.parametrize("name", [name for name in TARGETS if name != "cpu"])
def test_the_compiler_knows_the_device(name):
  skip_without_wheels(name)
  mesh = aot.make_target_mesh(TARGETS[name], 4)
  assert mesh.size == 4
  (kind,) = {device.device_kind for device in mesh.devices.flat}
  assert kind == getattr(TARGETS[name], "device_name", kind)
  assert kind.startswith(("NVIDIA", "TPU"))


def compile_for(name, model, tp, depths, kinds):
  """Needs at two depths, with 8,192 tokens of cache to a row."""
  mesh = aot.make_target_mesh(TARGETS[name], tp)
  pages = PageConfig(num_rows=64, page_size=16, pages_per_row=128, num_pages=8192)
  return [
    Deployment(
      config=dataclasses.replace(MODELS[model], num_layers=depth),
      mesh=mesh,
      platform=TARGETS[name].platform,
      dtype="bfloat16",
      layout="paged",
      token_budget=2048,
    ).needs(pages, kinds)
    for depth in depths
  ]


def check_needs(shallow, deep, depths, model, tp):
  config = MODELS[model]
  per_layer = (deep.params_bytes - shallow.params_bytes) / (depths[1] - depths[0])
  # no layer is left whole on a device, but for its norms and biases
  weights = 2 * (config.attention_params + config.mlp_params) / tp
  assert weights <= per_layer < 1.001 * weights
  assert all(each == {"all-reduce": 2} for each in aot.collectives_per_layer(shallow, deep, depths))
  for step in deep.steps:
    assert deep.is_updated_in_place(step)
    # the logits of 128 samples in float32 several times over, but no weights and no cache
    assert step.temporary_bytes < 0.2e9 + 8 * 128 * config.vocab_size * 4
  for a, b in zip(shallow.steps, deep.steps):
    # temporaries are used again from layer to layer
    assert b.temporary_bytes - a.temporary_bytes < 0.1 * (deep.cache_bytes - shallow.cache_bytes)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("model", "tp"),
  [("llama3-8b", 1), ("llama3-70b", 4), ("opt-13b", 2), ("opt-66b", 4), ("yi-34b", 2)],
)
def test_published_models_compile_for_a_gpu(model, tp):
  """Layers are alike (see above), so that few stand for all."""
  skip_without_wheels("h200")
  shallow, deep = compile_for("h200", model, tp, (2, 4), KINDS)
  if tp == 1:
    assert all(not any(step.collectives.values()) for step in deep.steps)
    shallow, deep = (dataclasses.replace(n, steps=()) for n in (shallow, deep))
  check_needs(shallow, deep, (2, 4), model, tp)


@pytest.mark.aot
@pytest.mark.parametrize(
  ("name", "tp"),
  [("a100", 1), ("a100", 4), ("h100", 1), ("h200", 4), ("tpu-v5e", 1), ("tpu-v6e", 4)],
)
def test_the_steps_compile_with_the_kernels_of_the_device(name, tp, plain_sampling):
  """In place, with nothing of the size of a layer's cache. The compilers check shared memory."""
  skip_without_wheels(name)
  hopper = "mosaic" if jax.__version_info__ >= (0, 11) else "triton"
  backend = {"a": "triton", "h": hopper, "t": "tpu"}[name[0]]
  deployment = Deployment(
    config=dataclasses.replace(MODELS["llama3-8b"], num_layers=2),
    mesh=aot.make_target_mesh(TARGETS[name], tp),
    platform=TARGETS[name].platform,
    dtype="bfloat16",
    layout="paged",
    token_budget=512,
  )
  pages = PageConfig(num_rows=64, page_size=16, pages_per_row=512, num_pages=32768)
  tuning = deployment.attention_of(pages).tuning
  assert {tuning.prefill.backend, tuning.decode.backend, tuning.mixed.backend} == {backend}
  needs = deployment.needs(pages)
  for step in needs.steps:
    assert needs.is_updated_in_place(step)
    assert step.temporary_bytes < needs.cache_bytes / 2 / 2 / 2, "half of a layer's keys"


@pytest.mark.slow
def test_a_published_model_compiles_for_a_tpu():
  skip_without_wheels("tpu-v5e")
  shallow, deep = compile_for("tpu-v5e", "llama3-8b", 4, (1, 2), ("decode",))
  check_needs(shallow, deep, (1, 2), "llama3-8b", 4)
