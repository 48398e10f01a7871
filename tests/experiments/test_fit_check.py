"""`python -m experiments.fit_check`: the arithmetic of what fits, what it prints, wrong input."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest

from configs.targets import TARGETS
from experiments.fit_check import MEMORY_SHARE, Question, run
from pdjax.core.model_config import TINY
from pdjax.engine import aot
from pdjax.engine.mesh import make_mesh
from pdjax.engine.targets import install_command, missing_packages
from pdjax.sim.hardware import Device

ROOT = pathlib.Path(__file__).resolve().parents[2]
SMALL = dataclasses.replace(TINY, num_layers=1)
PAGE_BYTES = 2 * 2 * 4 * TINY.head_dim * 4 // 2  # K and V of 2 heads, pages of 4, over 2 devices


def question(*, memory_bytes: float, asked: int | None, layout="paged", tp=2) -> Question:
  return Question(
    model=SMALL,
    device=Device(
      name="cpu", peak_flops_per_s=1e12, peak_bytes_per_s=1e12, memory_bytes=memory_bytes
    ),
    target=TARGETS["cpu"],
    tp=tp,
    num_rows=2,
    page_size=4,
    pages_per_row=8,
    asked=asked,
    token_budget=16,
    dtype="float32",
    attention="auto",
    layout=layout,
    depths=(2, 1),
  )


def needed_bytes(q: Question, count: int, kind: str = "mixed") -> int:
  """By a step compiled anew."""
  mesh = make_mesh(jax.devices("cpu")[: q.tp])
  deployment = aot.Deployment(
    config=q.model,
    mesh=mesh,
    platform="cpu",
    dtype=q.dtype,
    layout=q.layout,
    token_budget=q.token_budget,
  )
  return deployment.needs(q.pages(count), (kind,)).total_bytes


def numbers(text: str, pattern: str) -> tuple[int, ...]:
  (match,) = re.findall(pattern, text)
  return tuple(map(int, (match,) if isinstance(match, str) else match))


@pytest.mark.slow
def test_the_largest_page_count_fits_and_one_page_more_does_not(capsys, plain_sampling):
  q = question(memory_bytes=6e6, asked=1000)
  assert run(q) == 0
  out = capsys.readouterr().out
  largest, num_tokens = numbers(out, r"largest that fits: (\d+) pages = (\d+) tokens")
  assert num_tokens == 4 * largest
  assert largest > 1000 and "fits: 1000 pages need" in out
  usable = MEMORY_SHARE * 6e6
  assert q.usable_bytes == usable
  assert needed_bytes(q, largest) <= usable < needed_bytes(q, largest + 1)
  # parameters and cache explain it but for the temporaries of these small steps
  assert largest * PAGE_BYTES > 0.6 * (usable - SMALL.num_params * 4 / 2)

  # what it says of the collectives and of the cache, for each kind of step
  for kind in ("prefill", "decode", "mixed"):
    (line,) = re.findall(rf"^{kind} .* GB donated\)$|^{kind} .* MB donated\)$", out, re.M)
    assert " yes (" in line
    (line,) = re.findall(rf"^{kind} .*all-reduce .*$", out, re.M)
    total, each, rest = map(
      int, re.search(r"(\d+) all-reduce \((\d+) a layer, (\d+) elsewhere\)", line).groups()
    )
    assert (each, total) == (2, 2 * SMALL.num_layers + rest)
  assert "grow" not in out


@pytest.mark.slow
def test_too_many_rows_are_told_by_how_much_and_how_many_fit(capsys, plain_sampling):
  q = question(memory_bytes=60e6, asked=5000, layout="slots", tp=1)
  assert run(q) == 1
  out = capsys.readouterr().out
  largest, num_tokens = numbers(out, r"largest that fits: (\d+) rows = (\d+) tokens")
  assert num_tokens == 32 * largest
  (kind,) = re.findall(r"\(compiled: (\w+)\)", out)  # the step that needs most
  assert needed_bytes(q, largest, kind) <= q.usable_bytes < needed_bytes(q, largest + 1, kind)
  need, over = re.search(
    r"does not fit: 5000 rows need ([\d.]+) GB, ([\d.]+) GB more", out
  ).groups()
  row_bytes = 8 * 2 * PAGE_BYTES
  assert float(over) * 1e9 > (5000 - largest - 1) * row_bytes - 1e6
  assert float(over) * 1e9 == pytest.approx(needed_bytes(q, 5000, kind) - q.usable_bytes, rel=0.05)
  assert float(need) - float(over) == pytest.approx(q.usable_bytes / 1e9, abs=0.002)
  assert "collectives" not in out


def test_parameters_that_do_not_fit_compile_nothing(capsys, monkeypatch):
  monkeypatch.setattr(aot.Deployment, "needs", None)
  assert run(question(memory_bytes=1e5, asked=None)) == 1
  out = capsys.readouterr().out
  least = numbers(out, r"at least --tp=(\d+) is needed")[0]
  assert "the parameters alone are" in out
  assert (least - 1) * 0.9e5 < SMALL.num_params * 4 * 1.02 and least * 0.9e5 >= SMALL.num_params * 4


class Copying(aot.Steps):
  """Steps that hold a copy of the cache for a while."""

  def _step(self, params, cache, last_token, seen, inputs, hidden, layers):
    cache = jax.tree.map(lambda x: x + x[::-1], cache)
    return super()._step(params, cache, last_token, seen, inputs, hidden, layers)


class Keeping(aot.Steps):
  """Steps that donate nothing."""

  def _jit(self, name, function, donate, **options):
    return super()._jit(name, function, (), **options)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [Copying, Keeping])
def test_a_cache_that_is_there_twice_is_told_and_counted(
  steps, capsys, monkeypatch, plain_sampling
):
  monkeypatch.setattr(aot, "Steps", steps)
  q = question(memory_bytes=6e6, asked=None, tp=1)
  run(q)
  out = capsys.readouterr().out
  largest = numbers(out, r"largest that fits: (\d+) pages")[0]
  assert needed_bytes(q, largest) <= q.usable_bytes < needed_bytes(q, largest + 10)
  assert largest < 0.75 * (q.usable_bytes - 4 * SMALL.num_params) / (2 * PAGE_BYTES)
  assert ("copies some of the cache" in out) == (steps is Copying)
  assert out.count(" NO (") == (3 if steps is Keeping else 0)


# Programs, as a user starts them ------------------------------------------------------------------


def start(*argv: str, env=None) -> subprocess.CompletedProcess:
  return subprocess.run(
    [sys.executable, "-m", "experiments.fit_check", *argv],
    cwd=ROOT,
    env=os.environ | (env or {}),
    capture_output=True,
    text=True,
    timeout=200,
  )


CASES = {
  "no model": ([], ["--model is missing", "llama3-70b", "config.json"]),
  "model": (["--model=llama3-80b"], ["'llama3-80b'", "did you mean llama3-8b"]),
  "hardware": (["--model=tiny", "--hardware=h20"], ["'h20'", "did you mean h200"]),
  "tp of 0": (["--model=tiny", "--tp=0"], ["--tp=0 must be at least 1"]),
  "heads": (["--model=tiny", "--tp=3"], ["num_heads=8 is no multiple of the 3 devices"]),
  "pages": (["--model=tiny", "--num_pages=-5"], ["--num_pages=-5 must be at least 1"]),
  "pages in slots": (
    ["--model=tiny", "--layout=slots", "--num_pages=5", "--max_len=64", "--num_rows=3"],
    ["--num_pages=5", "--layout=paged", "3 rows has 4 pages"],
  ),
  "dtype": (["--model=tiny", "--dtype=int4"], ["dtype", "bfloat16"]),
}


@pytest.mark.quick
@pytest.mark.parametrize("case", CASES)
def test_wrong_input_ends_with_one_message_before_jax_is_imported(case, tmp_path):
  argv, parts = CASES[case]
  (tmp_path / "jax.py").write_text("raise SystemError('jax was imported')")
  path = os.pathsep.join([str(tmp_path), str(ROOT)])
  check_refused(start(*argv, env={"PYTHONPATH": path}), parts)


def check_refused(done: subprocess.CompletedProcess, parts: list[str]) -> None:
  assert done.returncode == 2, done.stderr
  assert done.stdout == ""
  (line,) = done.stderr.splitlines()
  assert line.startswith("error: ")
  for part in parts:
    assert part in line


def test_more_devices_than_there_are_are_refused():
  model = "--model=opt-175b"  # 96 heads
  check_refused(start(model, "--hardware=cpu", "--tp=96"), ["96 devices asked for"])


@pytest.mark.quick
@pytest.mark.parametrize("name", ["h200", "tpu-v5e"])
def test_the_command_that_gets_a_compiler_names_exact_versions(name):
  command = install_command(TARGETS[name].packages)
  assert command.startswith("pip install --no-deps ")
  for package in TARGETS[name].packages:
    assert re.search(rf"[ ']{package}==\d+\.\d+\.", command)
  if name == "h200":
    assert f"jax-cuda13-plugin=={jax.__version__} " in command


@pytest.mark.quick
@pytest.mark.parametrize("name", ["h200", "tpu-v5e"])
def test_a_missing_compiler_is_refused_with_the_command(name):
  packages = missing_packages(TARGETS[name])
  if not packages:
    pytest.skip("the compiler is installed")
  done = start("--model=llama3-8b", f"--hardware={name}")
  check_refused(done, [f"--hardware={name}", install_command(packages)])


def test_a_folder_with_a_config_json_is_a_model(tmp_path):
  (tmp_path / "config.json").write_text("{}")
  check_refused(start(f"--model={tmp_path}", "--hardware=cpu"), ["config.json"])


@pytest.mark.slow
def test_a_gpu_without_one(tmp_path):
  missing = missing_packages(TARGETS["h200"])
  if missing:
    pytest.skip(f"needs {' and '.join(missing)}, installed with --no-deps")
  done = start("--model=tiny", "--hardware=h200", "--tp=2", "--num_pages=1000", "--max_len=256")
  assert done.returncode == 0, done.stderr
  assert done.stdout.count(" yes (") == 3
  assert "fits: 1000 pages" in done.stdout and "2 a layer" in done.stdout
  assert "largest that fits:" in done.stdout
