"""Traces and named workloads as a user runs them: what is asked, and what the report calls it."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from configs.hardware import HARDWARE, LINKS
from configs.models import MODELS
from configs.workloads import WORKLOADS
from experiments.catalogue import catalogue, first_sentence
from experiments.program import Progress, named_workload
from experiments.serving import check, report, run_experiment
from experiments.traffic import read_traffic
from pdjax.config import STRATEGIES, WorkloadConfig, load_config
from pdjax.core.clock import to_ticks
from pdjax.core.events import read_events
from pdjax.core.plain import from_plain, to_plain
from pdjax.metrics.latency import request_records
from pdjax.scheduling.policies import POLICIES
from pdjax.scheduling.routing import ROUTERS
from pdjax.workloads.lengths import Fixed, Lengths

ROOT = pathlib.Path(__file__).resolve().parents[2]
A100 = ROOT / "configs" / "llama3_8b_a100.py"
LENGTHS = Fixed(prompt_tokens=100, output_tokens=10)
MOONCAKE = [  # timestamp, input_length, output_length, hash_ids
  (0, 600, 40, [0, 1]),
  (0, 1024, 7, [0, 2]),
  (3000, 1500, 90, [0, 2, 3]),
  (3000, 513, 1, [0, 4]),
  (6000, 512, 64, [0]),
]


@pytest.fixture
def mooncake(tmp_path) -> pathlib.Path:
  names = ("timestamp", "input_length", "output_length", "hash_ids")
  path = tmp_path / "mooncake.jsonl"
  path.write_text("".join(json.dumps(dict(zip(names, row))) + "\n" for row in MOONCAKE))
  return path


@pytest.fixture
def lengths_only(tmp_path) -> pathlib.Path:
  path = tmp_path / "lengths.csv"
  rows = "".join(f"{i},{i + 1}\n" for i in range(1, 31))
  path.write_text("num_prefill_tokens,num_decode_tokens\n" + rows)
  return path


def simulate(*overrides: str):
  config = load_config(A100, ["strategies=chunked", *overrides])
  return run_experiment(check(config, pathlib.Path("unused")), Progress())


@pytest.mark.quick
def test_a_mooncake_trace_is_replayed_with_its_blocks(mooncake):
  experiment = simulate(f"workload.trace={mooncake}")
  requests = experiment.requests
  assert [r.arrival_s for r in requests] == [0.0, 0.0, 3.0, 3.0, 6.0]
  assert [r.num_prompt_tokens for r in requests] == [row[1] for row in MOONCAKE]
  assert [r.sampling.max_tokens for r in requests] == [row[2] for row in MOONCAKE]
  assert [r.prefix_hashes for r in requests] == [tuple(row[3]) for row in MOONCAKE]
  assert {r.prefix_block_tokens for r in requests} == {512}
  text, data = report(experiment)
  assert "Workload: mooncake.jsonl, a trace (mooncake)\n" in text
  assert data["workload"] == "mooncake.jsonl, a trace (mooncake)"


@pytest.mark.quick
def test_every_option_of_a_trace_is_applied_and_named(mooncake):
  options = ["length_scale=32", "trace_limit_s=6", "num_requests=3", "trace_spread_s=3",
             "trace_speed=2"]  # fmt: skip
  experiment = simulate(f"workload.trace={mooncake}", *(f"workload.{o}" for o in options))
  requests = experiment.requests
  assert [r.num_prompt_tokens for r in requests] == [19, 32, 47]
  assert [r.sampling.max_tokens for r in requests] == [1, 1, 3]
  assert [r.prefix_hashes for r in requests] == [(0, 1), (0, 2), (0, 2, 3)]
  assert {r.prefix_block_tokens for r in requests} == {16}
  assert 0 < requests[0].arrival_s < requests[1].arrival_s <= 1.5 < requests[2].arrival_s <= 3
  assert (
    "Workload: mooncake.jsonl, a trace (mooncake); lengths divided by 32; the first 6 s; the first "
    "3 of 4 requests; arrivals spread over 3 s; 2 times as fast\n"
  ) in report(experiment)[0]


@pytest.mark.quick
def test_lengths_without_arrivals_are_taken_in_random_order_at_the_rate_asked_for(lengths_only):
  experiment = simulate(f"workload.trace={lengths_only}", "workload.num_requests=30",
                        "workload.rate_rps=5")  # fmt: skip
  pairs = [(r.num_prompt_tokens, r.sampling.max_tokens) for r in experiment.requests]
  assert sorted(pairs) == [(i, i + 1) for i in range(1, 31)]
  assert pairs != sorted(pairs)
  assert experiment.rate_rps == 5
  assert len({r.arrival_s for r in experiment.requests}) == 30
  assert "lengths.csv, a trace (lengths); in random order, arrivals drawn" in report(experiment)[0]


@pytest.mark.quick
def test_a_row_that_cannot_run_is_named_by_its_line_also_where_order_is_random(lengths_only):
  config = load_config(A100, [f"workload.trace={lengths_only}", "cache.max_len=48"])
  with pytest.raises(ValueError, match=r"lengths.csv:26 \(25 prompt, 26 output tokens\)"):
    check(config, pathlib.Path("unused"))


@pytest.mark.quick
@pytest.mark.parametrize("name", WORKLOADS)
def test_a_named_workload_is_drawn_and_labelled_synthetic(name):
  workload = named_workload(WorkloadConfig(lengths=LENGTHS, load=0.5), name)
  traffic = read_traffic(workload)
  assert traffic.lengths == WORKLOADS[name].lengths
  assert traffic.label == WORKLOADS[name].label
  assert (workload.arrivals, workload.cv) == (WORKLOADS[name].arrivals, WORKLOADS[name].cv)
  assert workload.load == 0.5
  assert from_plain(WorkloadConfig, json.loads(json.dumps(to_plain(workload)))) == workload


@pytest.mark.quick
def test_the_length_scale_divides_what_is_drawn():
  workload = named_workload(WorkloadConfig(lengths=LENGTHS, length_scale=32), "arxiv")
  traffic = read_traffic(workload)
  rng = np.random.default_rng(0)
  unscaled = WORKLOADS["arxiv"].lengths.pairs(100, np.random.default_rng(0))
  assert traffic.lengths.pairs(100, rng) == [
    (-(-prompt // 32), max(1, round(output / 32))) for prompt, output in unscaled
  ]
  assert traffic.label.endswith("table 2; lengths divided by 32")
  fixed = read_traffic(WorkloadConfig(lengths=LENGTHS, length_scale=2))
  assert fixed.sample(0)[0] == Lengths(50, 5)
  assert fixed.label == "Fixed; lengths divided by 2"


@pytest.mark.quick
def test_a_workload_without_a_name_has_no_label():
  experiment = simulate("workload.num_requests=3")
  assert experiment.workload_label is None
  assert "Workload:" not in report(experiment)[0]
  assert experiment.requests[0].prefix_hashes is None
  assert experiment.requests[0].arrival_s == to_ticks(experiment.requests[0].arrival_s)


CONFIG = """
from pdjax.config import CacheConfig, ExperimentConfig, SchedulerOptions, WorkloadConfig
from pdjax.workloads.lengths import Fixed

def get_config():
  return ExperimentConfig(
    model="tiny",
    num_devices=1,
    workload=WorkloadConfig(
      lengths=Fixed(prompt_tokens=4, output_tokens=4), length_scale=32, trace_speed=1e3
    ),
    scheduler=SchedulerOptions(token_budget=8),
    cache=CacheConfig(num_rows=2),
  )
"""


@pytest.mark.slow
def test_a_scaled_trace_runs_on_the_engine_in_chunks_shorter_than_its_prompts(tmp_path, mooncake):
  (tmp_path / "small.py").write_text(CONFIG)
  command = [sys.executable, "-m", "experiments.run", "--config=small.py", f"--trace={mooncake}",
             "--out=out"]  # fmt: skip
  # What is compiled runs for milliseconds, so it is compiled fast.
  fast = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
  env = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": fast}
  done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
  assert done.returncode == 0, done.stderr
  data = json.loads((tmp_path / "out" / "summary.json").read_text())
  assert data["workload"].startswith("mooncake.jsonl, a trace (mooncake); lengths divided by 32")
  assert data["strategies"]["chunked"]["num_failed"] == 0
  log = read_events(tmp_path / "out" / "events.jsonl")["chunked"]
  outputs = {r.request_id: len(r.token_ids) for r in request_records(log).values()}
  assert outputs == {i: max(1, round(row[2] / 32)) for i, row in enumerate(MOONCAKE)}


# --list -------------------------------------------------------------------------------------------


@pytest.mark.quick
def test_the_list_has_a_line_for_every_name():
  sections = {}
  for section in catalogue().split("\n\n"):
    title, *lines = section.split("\n")
    sections[title.split()[0]] = dict(line.split(maxsplit=1) for line in lines)
  expected = {
    "strategies": STRATEGIES, "policies": POLICIES, "routers": ROUTERS, "workloads": WORKLOADS,
    "models": MODELS, "hardware": HARDWARE, "links": LINKS,
  }  # fmt: skip
  for title, table in expected.items():
    assert sections[title].keys() == table.keys()
    for name, line in sections[title].items():
      assert len(line) > 5, f"{name} says nothing"
      assert "new function with partial application" not in line
  assert all("synthetic" in line for line in sections["workloads"].values())
  assert "32 layers of 4096, 32 heads on 8, 8.03 B parameters" in sections["models"]["llama3-8b"]
  assert sections["hardware"]["a100"] == "312 TFLOP/s, 2.039 TB/s, 84.99 GB; step times fitted"


@pytest.mark.quick
def test_a_line_is_the_first_sentence_however_it_is_broken():
  def documented():
    """One sentence over
    two lines: of vLLM. Another one.

    A paragraph.
    """

  assert first_sentence(documented) == "One sentence over two lines: of vLLM"


@pytest.mark.quick
def test_the_list_needs_no_jax_and_runs_nothing(tmp_path):
  (tmp_path / "jax.py").write_text("raise SystemError('jax was imported')")
  done = subprocess.run(
    [sys.executable, "-m", "experiments.run", "--list"],
    cwd=tmp_path,
    env={"PYTHONPATH": f"{tmp_path}:{ROOT}"},
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert (done.returncode, done.stderr) == (0, "")
  assert done.stdout == catalogue() + "\n"
  assert [path.name for path in tmp_path.iterdir() if path.name == "runs"] == []
