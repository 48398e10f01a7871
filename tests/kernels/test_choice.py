"""Which backend serves what on which chip, and what is said of those that do not."""

import dataclasses
import functools
import importlib.util
import types

import jax
import jax.numpy as jnp
import pytest

from pdjax import config
from pdjax.kernels import choice
from pdjax.kernels.choice import chip_of, choose
from pdjax.kernels.tile_config import Case, Chip, TileConfig
from pdjax.kernels.tuning import Tuned, tuned
from pdjax.kernels.write_pages import write_pages

pytestmark = pytest.mark.quick
CPU = Chip(platform="cpu", kind="cpu")
V100 = Chip(platform="gpu", kind="Tesla V100", compute_capability=7.0)
A100 = Chip(platform="gpu", kind="NVIDIA A100", compute_capability=8.0)
H200 = Chip(platform="gpu", kind="NVIDIA H200", compute_capability=9.0)
AMD = Chip(platform="gpu", kind="AMD Instinct MI300X")
TPU = Chip(platform="tpu", kind="TPU v5 lite")
OTHER = Chip(platform="abacus", kind="wooden")
LLAMA = dict(num_heads=32, num_kv_heads=8, head_dim=128, page_size=16, dtype="bfloat16",
             cache_dtype="bfloat16")  # fmt: skip
KERNELS = ("prefill", "decode", "mixed", "write")
HOPPER = "mosaic" if jax.__version_info__ >= (0, 11) else "triton"


@pytest.fixture
def pick(monkeypatch, caplog):
  """`choose` for Llama-3-8B by a table of its own; returns its choice and the lines it logged."""

  def pick(chip, attention="auto", *, table=(), **changes):
    monkeypatch.setattr(choice, "tuned", functools.partial(tuned, table=table))
    caplog.clear()
    tuning = choose.__wrapped__(chip, attention, **LLAMA | changes)
    return tuning, [record.getMessage() for record in caplog.records]

  return pick


def backends(tuning):
  return {getattr(tuning, kernel).backend for kernel in KERNELS}


def entry(chip, kernel, **tiles):
  return Tuned(
    chip=chip.kind,
    case=Case(kernel=kernel, **LLAMA),
    config=TileConfig(**tiles),
    measured_s=1e-3,
    date="2026-11-29",
    jax_version="0.11.2",
  )


@pytest.mark.parametrize(
  ("chip", "attention", "changes", "backend", "passed_over"),
  [
    (CPU, "auto", {}, "xla", ()),
    (CPU, "pallas", {}, "triton", ()),
    (CPU, "pallas", {"head_dim": 80}, "xla", ("triton: head_dim 80",)),
    (V100, "auto", {}, "xla", ("mosaic: ", "triton: needs compute capability 8.0, not 7.0")),
    (A100, "auto", {}, "triton", ("mosaic: ",)),
    (A100, "xla", {}, "xla", ()),
    (A100, "pallas", {"head_dim": 80}, "xla", ("mosaic: ", "triton: head_dim 80")),
    (H200, "auto", {}, HOPPER, () if HOPPER == "mosaic" else ("mosaic: needs jax 0.11",)),
    (H200, "pallas", {"dtype": "float32", "cache_dtype": "float32"}, "triton", ("mosaic: ",)),
    (AMD, "auto", {}, "triton", ("mosaic: ",)),
    (TPU, "auto", {}, "tpu", ()),
    (TPU, "xla", {}, "xla", ()),
    (TPU, "pallas", {"head_dim": 64}, "xla", ("tpu: head_dim 64 is not 128",)),
    (OTHER, "pallas", {}, "xla", ()),
  ],
)
def test_the_first_that_serves_a_case_is_chosen_and_a_line_says_why_each_other_is_not(
  pick, chip, attention, changes, backend, passed_over
):
  tuning, lines = pick(chip, attention, **changes)
  assert backends(tuning) == {backend}
  assert len(lines) == len(passed_over)
  for line, reason in zip(lines, passed_over, strict=True):
    assert f"attention is not run by {reason}" in line
    assert line.endswith("; instead " + ", ".join(f"{kernel} by {backend}" for kernel in KERNELS))
  is_interpreted = chip is CPU and backend == "triton"
  assert {getattr(tuning, kernel).interpret for kernel in KERNELS} == {is_interpreted}
  assert tuning.interleaves == (backend == "tpu")


def test_a_line_is_logged_once(monkeypatch, caplog):
  monkeypatch.setattr(choice, "tuned", functools.partial(tuned, table=()))
  odd = LLAMA | {"head_dim": 72}  # that no other test asks for
  assert choose(A100, "auto", **odd) is choose(A100, "auto", **odd)
  assert len(caplog.records) == 2


def test_what_is_not_known_is_refused_before_and_behind_the_door():
  with pytest.raises(ValueError, match="attention='cuda' must be one of auto, xla, pallas"):
    choose(CPU, "cuda", **LLAMA)
  for name in choice.ATTENTION:
    config.check_attention(name)
  with pytest.raises(ValueError, match="attention='cuda' must be 'auto', 'xla' or 'pallas'"):
    config.check_attention("cuda")


def test_what_was_measured_comes_before_the_order_and_the_defaults(pick):
  table = (
    entry(A100, "prefill", backend="triton", block_q=32, block_k=16),
    entry(A100, "decode", backend="xla", block_k=48),
    entry(H200, "mixed", backend="triton", block_q=16),
  )
  tuning, _ = pick(A100, table=table)
  assert (tuning.prefill, tuning.decode) == (table[0].config, table[1].config)
  untuned, _ = pick(A100)
  assert (tuning.mixed, tuning.write) == (untuned.mixed, untuned.write)
  only_xla, lines = pick(A100, "xla", table=table)
  assert backends(only_xla) == {"xla"} and only_xla.decode == table[1].config and not lines
  kernels, _ = pick(A100, "pallas", table=table)
  assert kernels.decode == untuned.decode, "plain XLA is not what was asked for"


def test_what_was_measured_but_cannot_run_here_is_passed_over(pick):
  """As entries of jax 0.11 on 0.10, or of a backend of another platform."""
  untuned, _ = pick(A100)
  wrong = entry(A100, "decode", backend="mosaic", block_k=16)
  tuning, lines = pick(A100, table=(wrong, entry(A100, "prefill", backend="tpu")))
  assert tuning == untuned
  assert [line.split(":")[0] for line in lines] == ["attention is not run by mosaic"]


def test_on_a_tpu_all_kernels_read_one_order_of_the_cache(pick):
  tuning, _ = pick(TPU, table=(entry(TPU, "decode", backend="xla"),))
  assert backends(tuning) == {"xla"} and not tuning.interleaves


def test_pages_of_int8_are_read_by_kernels_and_written_by_nobody(pick):
  tuning, lines = pick(A100, cache_dtype="int8")
  assert tuning.decode.backend == "triton" and any("does not quantize" in line for line in lines)
  pages = (jnp.zeros((2, 1, 4, 8), jnp.int8),) * 2 + (jnp.ones((2, 1, 4)),) * 2
  new = jnp.ones((1, 1, 8))
  with pytest.raises(ValueError, match="pages of int8 with scales cannot be written"):
    write_pages(pages, new, new, jnp.zeros(1, jnp.int32), config=tuning.write)


# Prompts that begin in a step ---------------------------------------------------------------------


@pytest.fixture
def with_tokamax(monkeypatch):
  def install(is_there):
    find = importlib.util.find_spec
    monkeypatch.setattr(
      importlib.util, "find_spec", lambda name: is_there if name == "tokamax" else find(name)
    )

  return install


def test_on_a_tpu_splash_serves_prompts_that_begin_in_a_step(pick):
  assert pick(TPU)[0].fresh.backend == "splash"
  assert pick(TPU, "xla")[0].fresh is None
  tuning, lines = pick(TPU, dtype="float16", cache_dtype="float16")
  assert tuning.fresh is None and backends(tuning) == {"xla"}
  assert "not attended by splash: queries of float16" in lines[-1]


def test_on_a_gpu_a_library_serves_them_where_it_was_measured_to_win(pick, with_tokamax):
  won = entry(H200, "fresh", backend="tokamax", block_q=128)
  with_tokamax(object())
  assert pick(H200)[0].fresh is None
  assert pick(H200, table=(won,))[0].fresh == won.config
  assert pick(H200, "xla", table=(won,))[0].fresh is None
  assert pick(A100, table=(won,))[0].fresh is None
  assert pick(CPU, "pallas")[0].fresh is None
  other = dataclasses.replace(won, config=TileConfig(backend=HOPPER))
  assert pick(H200, table=(other,))[0].fresh is None, "paged kernels won"
  with_tokamax(None)
  tuning, lines = pick(H200, table=(won,))
  assert tuning.fresh is None and "tokamax is not installed" in lines[-1]


# Chips --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("said", "capability"), [({"compute_capability": "9.0"}, 9.0), ({}, None),
                           ({"compute_capability": "gfx942"}, None)]
)  # fmt: skip
def test_a_chip_is_what_jax_says_of_it(said, capability):
  device = types.SimpleNamespace(platform="gpu", device_kind="X1", core_count=132, **said)
  assert chip_of(device) == Chip(
    platform="gpu", kind="X1", compute_capability=capability, num_cores=132
  )


def test_the_devices_here_are_chips():
  assert chip_of(jax.devices("cpu")[0]).platform == "cpu"
