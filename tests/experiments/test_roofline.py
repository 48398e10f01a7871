"""What limits a step, as the program says it."""

from __future__ import annotations

import csv
import subprocess
import sys

import pytest

from configs.hardware import HARDWARE
from configs.models import MODELS
from experiments.program import ROOT
from experiments.roofline import MOST_ROWS, Case, crossings, sweep
from pdjax.analysis.intensity import ridge

pytestmark = pytest.mark.quick


def _case(**changes) -> Case:
  fields = dict(
    model=MODELS["llama3-8b"],
    device=HARDWARE["a100"],
    latency_name="roofline",
    link_name="nvlink",
    tp=1,
    prompt=2048,
    chunk=512,
    batch=32,
    context=2048,
  )
  return Case(**fields | changes)


def test_operators_add_up_to_the_step():
  case = _case(tp=2)
  for profile in case.steps().values():
    outside_s = profile.terms.all_reduce_s + profile.terms.host_s
    assert sum(op.time_s for op in profile.ops) + outside_s == pytest.approx(profile.step_s)
    assert 0 < profile.mfu < 1 and 0 < profile.mbu < 1


def test_a_prefill_is_limited_by_arithmetic_and_a_decode_by_memory():
  case = _case()
  own = ridge(case.latency, case.model, case.device)
  prefill, chunk, decode, mixed = case.steps().values()
  assert prefill.flop_per_byte > chunk.flop_per_byte > own.peak > decode.flop_per_byte
  assert decode.flop_per_byte < mixed.flop_per_byte < prefill.flop_per_byte


def test_matrices_of_a_decode_cross_the_ridge_with_as_many_rows_as_a_prefill_has_tokens():
  case = _case()
  found = crossings(case, case.device.ridge_flop_per_byte)
  assert found.prefill_tokens == pytest.approx(found.decode_matrix_rows, rel=0.1)
  assert found.decode_rows is None  # attention keeps it below
  short = crossings(_case(context=1), case.device.ridge_flop_per_byte)
  assert found.decode_matrix_rows < short.decode_rows <= MOST_ROWS


def test_narrower_keys_make_decodes_faster_and_leave_matrices_alone():
  wide, narrow = _case(batch=128), _case(batch=128, kv_dtype="int8")
  (*_, a, _), (*_, b, _) = wide.steps().values(), narrow.steps().values()
  assert b.step_s < a.step_s and b.num_bytes < a.num_bytes and b.flops == a.flops
  assert b.terms.linear_s == a.terms.linear_s
  assert b.terms.attention_decode_s < 0.6 * a.terms.attention_decode_s


def test_a_sweep_has_every_kind_and_grows():
  steps = list(sweep(_case()))
  assert {kind for kind, *_ in steps} == {"prefill", "chunk", "decode", "mixed"}
  for kind in ("prefill", "decode"):
    times_s = [p.step_s for k, _, _, p in steps if k == kind]
    assert times_s == sorted(times_s)


def _program(*args, cwd) -> subprocess.CompletedProcess:
  command = [sys.executable, "-m", "experiments.roofline", *args]
  environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
  return subprocess.run(
    command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120
  )


def test_the_program_writes_a_table_a_line_an_operator(tmp_path):
  done = _program("--hardware=a100,h100", "--batch=8,16", "--out=out", cwd=tmp_path)
  assert done.returncode == 0, done.stderr
  assert "ridge 153 FLOP/byte" in done.stdout and "hardware=h100" in done.stdout
  with open(tmp_path / "out" / "roofline.csv", newline="") as file:
    rows = list(csv.DictReader(file))
  assert {row["hardware"] for row in rows} == {"a100", "h100"}
  assert {"qkv", "attention_decode"} <= {row["operator"] for row in rows}


@pytest.mark.parametrize(
  ("args", "message"),
  [
    (["--hardware=a1000"], "unknown hardware 'a1000'"),
    (["--tp=3"], "num_heads=32 is no multiple of the 3 devices"),
    (["--batch=many"], "--batch=many must be a whole number"),
    (["--kv_dtype=int7"], "int7"),
    (["--prompt=0"], "--prompt=0 must be at least 1"),
    (["--latency=niyama", "--kv_dtype=int8"], "--kv_dtype=int8 goes with --latency=roofline"),
  ],
)
def test_wrong_input_is_one_message(args, message, tmp_path):
  done = _program(*args, cwd=tmp_path)
  assert done.returncode == 2
  assert message in done.stderr and done.stderr.startswith("error: ")
  assert not any(tmp_path.iterdir())
