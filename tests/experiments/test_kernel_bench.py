"""The kernel benchmark runs whole on a CPU, catches wrong kernels, and keeps what it has."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import kernel_bench, kernel_cases, kernel_contenders
from experiments.kernel_bench import Bench
from experiments.kernel_cases import Problem, Work, cpu_sizes, gpu_sizes
from experiments.kernel_contenders import contenders, jax_nn, library, two_calls
from experiments.kernel_steps import engine_plans, peaks_of
from experiments.kernel_timing import Ceilings, DeviceLost, Run, device_s, repeated
from pdjax.kernels import choice
from pdjax.kernels.tile_config import Chip, TileConfig
from pdjax.kernels.tuning import read_table, tuned

ROOT = pathlib.Path(__file__).resolve().parents[2]
CEILINGS = Ceilings(flops_per_s=1e11, bytes_per_s=1e10, empty_s=0.0)
DECODE = Work(name="decode", kernel="decode", contexts=(5, 40, 17), page_size=16)
CHUNK = Work(name="chunk", kernel="prefill", chunks=((6, 13),), page_size=16)
FRESH = Work(name="fresh", kernel="prefill", chunks=((20, 0),), page_size=16)
MIXED = Work(name="mixed", kernel="mixed", chunks=((4, 3), (2, 0)), contexts=(20,), page_size=16)
WRITE = Work(name="write", kernel="write", written_tokens=7, page_size=16)


def make_bench(out: pathlib.Path, *works: Work, **changes) -> Bench:
  sizes = dataclasses.replace(cpu_sizes(), works=works, engine=None)
  bench = Bench(
    sizes=sizes,
    device=jax.devices()[0],
    out=out,
    tune=False,
    limit_s=480.0,
    deadline_s=math.inf,
  )
  return dataclasses.replace(bench, **changes)


def written(bench: Bench) -> dict:
  return json.loads((bench.out / "kernel_bench.json").read_text())


@pytest.fixture
def quick(monkeypatch):
  """No time is spent on ceilings, and every call takes as long as `times_s` says, or a second."""
  times_s: dict[str, float] = {}
  monkeypatch.setattr(kernel_bench, "measure_ceilings", lambda sizes: CEILINGS)

  def measure(bench, ceilings, problem, contender):
    row = {
      "case": problem.work.name,
      "name": contender.name,
      "kind": contender.kind,
      "is_chosen": contender.is_chosen,
      "status": "ok",
      "time_s": times_s.get(contender.name, 1.0),
      "of_ceiling": 0.5,
      "flops_per_s": 1.0,
      "bytes_per_s": 1.0,
    }
    return row

  monkeypatch.setattr(kernel_bench, "measure", measure)
  return times_s


# The whole program --------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_program_runs_whole_on_a_cpu(tmp_path, capsys):
  sizes = cpu_sizes()
  bench = make_bench(tmp_path / "out", sizes=dataclasses.replace(sizes, num_first=1))
  assert kernel_bench.run(bench) == 0
  result, table = written(bench), (bench.out / "table.txt").read_text()
  rows = result["rows"]
  assert table.startswith("CPU: not a measurement of a GPU\n")
  assert result["is_measurement"] is False and result["skipped"] == []
  assert all(value > 0 for value in result["ceilings"].values())
  cases = [work.name for work in sizes.works]
  assert {row["case"] for row in rows} == {*cases, "engine"}
  for row in rows:
    assert row["name"] in table
    if row["status"] == "ok" and row["kind"] not in ("step", "saving"):
      assert 0 <= row["error"] <= row["tolerance"] and row["time_s"] > 0 and row["of_ceiling"] > 0
  for case in cases:
    own = [row for row in rows if row["case"] == case and row["kind"] == "ours"]
    assert [row["status"] for row in own] == ["ok"] * len(own)
    (first,) = [row for row in own if row["is_chosen"]]
    assert first["config"]["backend"] == "triton" and first["config"]["interpret"]
    for row in own[1:]:
      assert row["ratio"] == pytest.approx(row["time_s"] / first["time_s"])
  refused = [row for row in rows if row["name"] == "cuDNN"]
  assert refused and all("cudnn" in row["reason"].lower() for row in refused)
  assert any(row["name"] == "jax.nn in XLA" and row["status"] == "ok" for row in rows)
  assert any(row["name"] == "bundled paged" and row["status"] == "ok" for row in rows)
  steps = {row["name"]: row for row in rows if row["case"] == "engine"}
  assert all(row["mfu"] is None for row in steps.values() if row["kind"] == "step")
  (saving,) = [row for row in steps.values() if row["kind"] == "saving"]
  apart_s = steps["prefill 14"]["time_s"] + steps["decode 2"]["time_s"]
  assert saving["saved_s"] == pytest.approx(apart_s - steps["mixed 16"]["time_s"])
  assert f"{steps['decode 2']['time_s'] * 1e3:,.2f} ms" in table
  printed = capsys.readouterr().out
  assert all(case in printed for case in cases) and "targets on an H200" in printed


@pytest.mark.parametrize(
  ("argv", "message"),
  [
    (["--limit_s=0"], "--limit_s=0.0 must be positive"),
    (["--out=a_file"], "a_file is a file"),
    (["--limit=3"], "limit"),
  ],
)
def test_a_wrong_flag_is_one_message(tmp_path, argv, message):
  (tmp_path / "a_file").touch()
  env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
  command = [sys.executable, "-m", "experiments.kernel_bench", *argv]
  done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
  assert done.returncode == 2 and message in done.stderr
  assert "Traceback" not in done.stderr and [*tmp_path.iterdir()] == [tmp_path / "a_file"]


# What is right ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("work", "is_gathered"),
  [
    (DECODE, True),
    (CHUNK, False),
    (FRESH, False),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in [(DECODE, False), (CHUNK, True)]),
  ],
  ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_library_computes_the_same_case(work, is_gathered):
  problem = Problem(work, cpu_sizes())
  run = library(functools.partial(jax_nn, "xla"), is_gathered, problem)
  for operands in run.sets:
    out = run.out(run.call(run.state, *operands))
    error = problem.error(out)
    assert (error <= problem.tolerance) == (operands is run.sets[0]), "each set has its own pages"


def test_two_calls_are_one_mixed_call():
  problem = Problem(MIXED, cpu_sizes())
  config = TileConfig(backend="xla")
  run = two_calls(config, config, problem)
  assert problem.error(run.out(run.call(run.state, *run.sets[0]))) <= problem.tolerance


@pytest.mark.slow
@pytest.mark.parametrize("work", [DECODE, MIXED, WRITE], ids=lambda work: work.name)
def test_a_wrong_kernel_is_not_timed_and_fails_the_run(work, tmp_path, monkeypatch):
  monkeypatch.setattr(kernel_bench, "measure_ceilings", lambda sizes: CEILINGS)
  name = {"decode": "paged_decode", "write": "write_pages"}.get(work.kernel, work.kernel)
  right = getattr(kernel_contenders, name)

  def wrong(*arguments, config, **options):
    if config.backend != "xla":
      return right(*arguments, config=config, **options)
    if work.kernel == "write":
      return arguments[0]
    return right(*arguments, config=config, **options | {"scale": 1.0})

  monkeypatch.setattr(kernel_contenders, name, wrong)
  monkeypatch.setattr(kernel_contenders, "two_calls", lambda *_: 1 / 0)
  bench = make_bench(tmp_path, work)
  assert kernel_bench.run(bench) == 1
  rows = {row["name"]: row for row in written(bench)["rows"] if row["kind"] == "ours"}
  assert rows["pdjax triton"]["status"] == "ok"
  row = rows["pdjax xla"]
  assert row["status"] == "wrong" and row["error"] > row["tolerance"] and "time_s" not in row
  assert "WRONG" in (tmp_path / "table.txt").read_text()


def test_nan_is_wrong():
  problem = Problem(DECODE, cpu_sizes())
  out = problem.expected.at[0, 0, 0].set(jnp.nan)
  assert problem.error(problem.expected) == 0
  assert not problem.error(out) <= problem.tolerance


@pytest.mark.parametrize(
  "work", [pytest.param(DECODE, marks=pytest.mark.slow), MIXED], ids=lambda work: work.name
)
def test_the_reference_in_parts_is_the_reference(work, monkeypatch):
  problem = Problem(work, cpu_sizes())
  monkeypatch.setattr(kernel_cases, "CHECKED_TOKENS", 2)
  parts = Problem(work, cpu_sizes()).expected
  np.testing.assert_allclose(parts, problem.expected, rtol=1e-5, atol=1e-5)


def test_sets_share_no_page_and_name_none_beyond_a_context():
  for work in (DECODE, CHUNK, MIXED):
    problem = Problem(work, cpu_sizes())
    num_pages = len(problem.pages[0])
    seen = []
    for both in problem.sets:
      tables = [table for slices in both if slices for table in np.asarray(slices.tables)]
      for table, length in zip(tables, work.lengths, strict=True):
        used = -(-length // work.page_size)
        assert (table[used:] == num_pages).all() and (table[:used] < num_pages).all()
        seen += table[:used].tolist()
    assert len(problem.sets) > 1 and len(set(seen)) == len(seen)
  problem = Problem(WRITE, cpu_sizes())
  slots = np.concatenate([slots for _, _, slots in problem.sets])
  assert len({*slots.tolist()}) == len(slots)
  assert slots.min() >= 0 and slots.max() < len(problem.pages[0]) * WRITE.page_size


def test_costs_are_those_of_the_pairs_that_are_seen():
  sizes = cpu_sizes()
  flops, num_bytes = Problem(CHUNK, sizes).costs()
  pairs = sum(13 + i + 1 for i in range(6))
  assert flops == 4 * sizes.num_heads * sizes.head_dim * pairs
  vectors = 2 * 6 * sizes.num_heads + 2 * 19 * sizes.num_kv_heads
  assert num_bytes == vectors * sizes.head_dim * 4
  flops, num_bytes = Problem(WRITE, sizes).costs()
  assert (flops, num_bytes) == (0, 7 * 2 * 2 * sizes.num_kv_heads * sizes.head_dim * 4)


# Who computes it ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("work", "serves_fresh", "name"),
  [
    (FRESH, True, "pdjax tokamax"),
    (FRESH, False, "pdjax triton"),
    (CHUNK, True, "pdjax triton"),
    (MIXED, True, "pdjax triton"),
  ],
  ids=lambda value: getattr(value, "name", str(value)),
)
def test_what_the_engine_would_run_comes_first(monkeypatch, work, serves_fresh, name):
  chip, case = choice.chip_of(jax.devices()[0]), cpu_sizes().case(work)
  tuning = kernel_contenders.engine_tuning(chip, case)
  fresh = TileConfig(backend="tokamax") if serves_fresh else None
  tuning = dataclasses.replace(tuning, fresh=fresh)
  monkeypatch.setattr(kernel_contenders, "engine_tuning", lambda chip, case: tuning)
  first, *others = contenders(chip, case, work)
  assert (first.name, first.is_chosen) == (name, True)
  assert not any(other.is_chosen for other in others)
  listed = [(contender.name, contender.kind) for contender in (first, *others)]
  assert len({*listed}) == len(listed)


def test_what_the_engine_would_run_and_cannot_fails_the_run(tmp_path, monkeypatch, quick):
  measure = kernel_bench.measure

  def refuse(name, *arguments):
    row = measure(*arguments)
    if row["name"] != name:
      return row
    del row["time_s"]
    return row | {"status": "refused", "reason": "no such instruction"}

  for name, status in (("pdjax triton", 1), ("pdjax xla", 0), ("cuDNN", 0)):
    monkeypatch.setattr(kernel_bench, "measure", functools.partial(refuse, name))
    assert kernel_bench.run(make_bench(tmp_path, DECODE)) == status
    rows = written(make_bench(tmp_path))["rows"]
    assert all("ratio" not in row for row in rows) == (name == "pdjax triton")


# Time ---------------------------------------------------------------------------------------------


def test_calls_follow_each_other_and_rotate_over_the_sets():
  run = Run(jnp.array(1), [(2,), (3,), (5,)], lambda state, x: state * 7 + x)
  wanted = 1
  for x in (2, 3, 5, 2, 3, 5):
    wanted = wanted * 7 + x
  assert int(repeated(run, 2)(jnp.copy(run.state), run.sets)) == wanted


def test_a_time_is_that_of_one_call_and_leaves_the_inputs_alone():
  x = jnp.eye(200)

  def multiply(x, w):
    return x @ w

  times = [
    device_s(Run(x, [(x,)] * num_sets, multiply), 1.0, num_calls)
    for num_sets, num_calls in ((1, 1), (2, 40), (4, 400))
  ]
  assert max(times[1:]) < 4 * min(times[1:]), "as long however many calls are made"
  np.testing.assert_array_equal(x, np.eye(200))


# The engine ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [cpu_sizes(), gpu_sizes()], ids=["cpu", "gpu"])
def test_a_mixed_step_is_the_two_steps_that_it_is_compared_with(sizes):
  work, plans = sizes.engine, engine_plans(sizes.engine)
  prefill, decode = plans[f"prefill {work.chunk}"], plans[f"decode {work.mixed_decodes}"]
  mixed = plans[f"mixed {work.budget}"]
  assert mixed.num_tokens == work.budget
  assert mixed.decodes == decode.decodes
  assert [s.num_tokens for s in mixed.prefills] == [s.num_tokens for s in prefill.prefills]
  ids = mixed.prefills[0].token_ids
  assert len({*ids}) > len(ids) / 2 and max(ids) < work.model.vocab_size


@pytest.mark.parametrize(
  ("kind", "name"),
  [
    ("NVIDIA H200", "h200"),
    ("NVIDIA H100 80GB HBM3", "h100"),
    ("NVIDIA A100-SXM4-80GB", "a100"),
    ("NVIDIA A100-SXM4-40GB", None),
    ("NVIDIA H100 PCIe", None),
    ("NVIDIA GH200 480GB", None),
    ("NVIDIA L4", None),
  ],
)
def test_a_chip_has_the_peaks_of_its_own_data_sheet_or_none(kind, name):
  peaks = peaks_of(Chip(platform="gpu", kind=kind))
  assert (peaks and peaks.name) == name


# Interrupted --------------------------------------------------------------------------------------


def test_ctrl_c_keeps_the_rows_and_says_what_was_skipped(tmp_path, monkeypatch, quick, capsys):
  measure, count = kernel_bench.measure, 0

  def interrupted(*arguments):
    nonlocal count
    count += 1
    if count == 5:
      raise KeyboardInterrupt
    return measure(*arguments)

  monkeypatch.setattr(kernel_bench, "measure", interrupted)
  bench = make_bench(tmp_path, WRITE, DECODE, MIXED)
  assert kernel_bench.run(bench) == 130
  result = written(bench)
  assert [row["case"] for row in result["rows"]] == ["write"] * 2 + ["decode"] * 2
  assert result["skipped"] == ["interrupted", "decode", "mixed"]
  for text in (capsys.readouterr().out, (tmp_path / "table.txt").read_text()):
    assert "skipped: interrupted; decode; mixed" in text


def test_what_does_not_fit_the_limit_is_skipped(tmp_path, monkeypatch):
  monkeypatch.setattr(kernel_bench, "measure_ceilings", lambda sizes: CEILINGS)
  bench = make_bench(tmp_path, WRITE, DECODE, deadline_s=0.0)
  assert kernel_bench.run(bench) == 0
  result = written(bench)
  assert result["rows"] == []
  assert result["skipped"] == ["out of time (--limit_s=480)", "write", "decode"]


def test_files_are_written_after_every_case(tmp_path, monkeypatch, quick):
  files = []
  whole = kernel_bench.Results.write

  def write(results):
    files.append(sorted({row["case"] for row in results.rows}))
    return whole(results)

  monkeypatch.setattr(kernel_bench.Results, "write", write)
  kernel_bench.run(make_bench(tmp_path, WRITE, DECODE))
  assert files[:2] == [["write"], ["decode", "write"]]


def test_a_lost_device_ends_the_run_with_what_there_is(tmp_path, monkeypatch, quick):
  def lose(*_):
    raise DeviceLost("an illegal address")

  monkeypatch.setattr(kernel_bench, "measure", lose)
  bench = make_bench(tmp_path, WRITE)
  assert kernel_bench.run(bench) == 1
  assert written(bench)["skipped"] == ["the device is lost after an illegal address", "write"]


# Tuning and targets -------------------------------------------------------------------------------


def test_tuning_keeps_the_fastest_that_is_right(tmp_path, monkeypatch, quick):
  sizes = dataclasses.replace(cpu_sizes(), works=(CHUNK, FRESH), engine=None, grid_size=None)
  bench = make_bench(tmp_path, sizes=sizes, tune=True)
  quick["xla block_q=128 block_k=256"] = 0.3
  quick["xla block_q=128 block_k=128"] = 0.1
  measure = kernel_bench.measure

  def one_is_wrong(bench, ceilings, problem, contender):
    row = measure(bench, ceilings, problem, contender)
    if contender.name == "xla block_q=128 block_k=128" and problem.work is FRESH:
      row |= {"status": "wrong", "error": 1.0, "tolerance": 0.1}
    return row

  monkeypatch.setattr(kernel_bench, "measure", one_is_wrong)
  assert kernel_bench.run(bench) == 0
  table = read_table(tmp_path / "tuning.json")
  (entry,) = [entry for entry in table if entry.case.kernel == "prefill"]
  assert (entry.config.block_q, entry.config.block_k, entry.measured_s) == (128, 256, 0.3)
  assert tuned(bench.chip, bench.sizes.case(CHUNK), table) == entry.config


def test_tuning_that_is_interrupted_keeps_the_best_so_far(tmp_path, monkeypatch, quick):
  sizes = dataclasses.replace(cpu_sizes(), works=(DECODE, CHUNK), engine=None, grid_size=None)
  bench = make_bench(tmp_path, sizes=sizes, tune=True)
  quick["xla block_k=128 decode_rows=4"] = 0.3
  measure = kernel_bench.measure

  def interrupted(bench, ceilings, problem, contender):
    if contender.name == "xla block_k=256 decode_rows=8":
      raise KeyboardInterrupt
    return measure(bench, ceilings, problem, contender)

  monkeypatch.setattr(kernel_bench, "measure", interrupted)
  assert kernel_bench.run(bench) == 130
  (entry,) = read_table(tmp_path / "tuning.json")
  assert (entry.config.block_k, entry.config.decode_rows, entry.measured_s) == (128, 4, 0.3)
  assert len(written(bench)["skipped"]) == 3, "the reason, this case and the next"


@pytest.mark.parametrize("library_s", [0.5, 2.0])
def test_the_library_serves_whole_prompts_only_where_it_was_faster(tmp_path, quick, library_s):
  quick["tokamax"] = library_s
  sizes = dataclasses.replace(cpu_sizes(), works=(FRESH,), engine=None)
  kernel_bench.run(make_bench(tmp_path, sizes=sizes, tune=True))
  table = read_table(tmp_path / "tuning.json")
  fresh = [entry.config.backend for entry in table if entry.case.kernel == "fresh"]
  assert fresh == (["tokamax"] if library_s < 1 else [])


def test_targets_compare_with_the_best_of_the_others(tmp_path, quick):
  names = [work.name for work in gpu_sizes().works]
  works = [dataclasses.replace(FRESH, name="fresh 8k"),
           dataclasses.replace(CHUNK, name="chunk 2048 of 8k"),
           dataclasses.replace(DECODE, name="decode 64 x 4k")]  # fmt: skip
  assert {work.name for work in works} <= {*names}
  quick |= {"cuDNN": 1.5, "tokamax": 0.8, "jax.nn in XLA": 9.0, "bundled paged": 3.0}
  bench = make_bench(tmp_path, *works)
  kernel_bench.run(bench)
  reached = [target["reached"] for target in written(bench)["targets"]]
  assert reached == pytest.approx([0.5, 0.8, 0.8, 0.5, 3.0, None])
  table = (tmp_path / "table.txt").read_text()
  assert "at least 0.6: 0.50, MISSED" in table and "at least 2.0: 3.00, reached" in table
  assert "at least 0.7: not measured" in table
