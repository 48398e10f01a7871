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


def _crossings(case: Case) -> dict[str, int | None]:
  """By the first words of their step."""
  found = crossings(case, case.device.ridge_flop_per_byte)
  names = ("prefill", "prefill matrices", "chunk", "mixed", "decode matrices", "decode")
  assert [c.step.split()[0].strip(",:") for c in found] == [name.split()[0] for name in names]
  return {name: c.at for name, c in zip(names, found)}


def test_matrices_of_a_decode_cross_the_ridge_with_as_many_rows_as_a_prefill_has_tokens():
  found = _crossings(_case())
  assert found["prefill matrices"] == pytest.approx(found["decode matrices"], rel=0.1)
  assert found["decode"] is None  # attention keeps it below
  short = _crossings(_case(context=1))
  assert found["decode matrices"] < short["decode"] <= MOST_ROWS


def test_what_has_more_to_read_crosses_the_ridge_later():
  found = _crossings(_case())
  assert found["prefill matrices"] < found["prefill"] < found["mixed"]
  assert found["chunk"] < found["mixed"]


def test_narrower_keys_cross_the_ridge_earlier():
  wide, narrow = _crossings(_case(context=64)), _crossings(_case(context=64, kv_dtype="int8"))
  assert narrow["decode"] < wide["decode"] and narrow["mixed"] < wide["mixed"]
  assert narrow["decode matrices"] == wide["decode matrices"]


def test_memory_is_weights_and_the_keys_of_the_rows():
  case = _case(batch=32, context=2048)
  weights = 2 * case.model.num_params
  kv = 32 * 2048 * 2 * 32 * 8 * 128 * 2  # rows, tokens, K and V, layers, heads, width, bytes
  assert case.memory_share == pytest.approx((weights + kv) / case.device.memory_bytes)
  assert _case(model=MODELS["llama3-70b"]).memory_share > 1 > _case(tp=2).memory_share


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
    times_s = [step.profile.step_s for step in steps if step.kind == kind]
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
  assert {"qkv", "attention_decode", "host"} <= {row["operator"] for row in rows}


def test_a_line_of_the_table_says_which_what_if_it_is_of(tmp_path):
  done = _program("--kv_dtype=bfloat16,int8", "--tp=1,2", "--out=out", cwd=tmp_path)
  assert done.returncode == 0, done.stderr
  with open(tmp_path / "out" / "roofline.csv", newline="") as file:
    rows = [tuple(row.values()) for row in csv.DictReader(file)]
  assert len({row[:9] for row in rows}) == len(set(rows))


def test_what_does_not_fit_is_named(tmp_path):
  done = _program("--model=llama3-70b", "--tp=4,1", "--batch=32,512", "--out=out", cwd=tmp_path)
  assert done.returncode == 0, done.stderr
  notes = [line for line in done.stdout.splitlines() if "does not fit" in line]
  assert len(notes) == 2
  assert "on 1 x a100" in notes[0] and "512 rows" in notes[1]


@pytest.mark.parametrize(
  ("args", "message"),
  [
    (["--hardware=a1000"], "unknown hardware 'a1000'"),
    (["--tp=3"], "num_heads=32 is no multiple of the 3 devices"),
    (["--batch=many"], "--batch=many must be a whole number"),
    (["--kv_dtype=int7"], "int7"),
    (["--prompt=0"], "--prompt=0 must be at least 1"),
    (["--measure", "--model=llama3-8b"], "unknown model 'llama3-8b'"),
    (["--latency=niyama", "--kv_dtype=int8"], "--kv_dtype=int8 goes with --latency=roofline"),
  ],
)
def test_wrong_input_is_one_message(args, message, tmp_path):
  done = _program(*args, cwd=tmp_path)
  assert done.returncode == 2
  assert message in done.stderr and done.stderr.startswith("error: ")
  assert not any(tmp_path.iterdir())
