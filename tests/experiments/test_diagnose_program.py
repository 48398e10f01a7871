"""The program on files of runs, and how often it is right about injected causes."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from experiments import diagnose, remedies
from experiments.injected import INJECTED, draw_case
from experiments.remedies import for_requests, simulate, try_out
from pdjax.analysis.diagnose import Cause, is_troubled, observe
from pdjax.config import CacheConfig, ExperimentConfig, SchedulerOptions, WorkloadConfig
from pdjax.core.events import write_events
from pdjax.core.plain import to_plain
from pdjax.core.request import Slo
from pdjax.workloads.lengths import Mix

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEVELOPED_ON = 1000  # seeds from here on; the judged ones lie below


def config(**changes) -> ExperimentConfig:
  """Long prompts that are computed whole beside running requests."""
  return ExperimentConfig(
    **dict(
      model="llama3-8b",
      hardware="a100",
      backend="sim",
      num_devices=1,
      strategies=("continuous",),
      workload=WorkloadConfig(
        load=0.4,
        num_requests=40,
        lengths=Mix(
          prompt_tokens=(100, 300),
          long_prompt_tokens=(6000, 7000),
          output_tokens=(60, 100),
          long_every=6,
        ),
      ),
      scheduler=SchedulerOptions(token_budget=512, steps_in_flight=1),
      cache=CacheConfig(layout="paged", num_rows=64),
    )
    | changes
  )


SLO = Slo(ttft_s=3.0, tpot_s=0.05)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> pathlib.Path:
  """A run as `experiments.run` leaves it, as far as a diagnosis reads it."""
  folder = tmp_path_factory.mktemp("run")
  write_events(folder / "events.jsonl", {"continuous": simulate(config()).log})
  summary = {"slo": to_plain(SLO), "config": to_plain(config())}
  (folder / "summary.json").write_text(json.dumps(summary))
  return folder


def program(*argv: str, cwd: pathlib.Path) -> subprocess.CompletedProcess:
  command = [sys.executable, "-m", "experiments.diagnose", *argv, f"--out={cwd / 'out'}"]
  return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_our_log_is_diagnosed_and_the_change_is_simulated(run_folder, tmp_path):
  done = program(f"--events={run_folder / 'events.jsonl'}", cwd=tmp_path)
  assert done.returncode == 0, done.stderr
  assert "1. interference:" in done.stdout and "before, simulated" in done.stdout
  data = json.loads((tmp_path / "out" / "summary.json").read_text())
  measured, before, *changes = data["simulated"]
  # Simulated as it was: the same requests fare the same.
  names = ("num_requests", "num_met", "num_calm")
  assert [measured[n] for n in names] == [before[n] for n in names]
  assert max(row["num_calm"] for row in changes) > before["num_calm"]
  assert any("chunked prefill" in row["name"] for row in changes)
  assert any("apart" in row["name"] for row in changes)


def test_opposed_phases_are_recognised_and_faster_memory_is_tried_for_decode(tmp_path):
  apart = config(strategies=("disaggregated",), num_devices=2)
  write_events(tmp_path / "events.jsonl", {"disaggregated": simulate(apart).log})
  summary = {"slo": to_plain(Slo(ttft_s=0.3, tpot_s=0.05)), "config": to_plain(apart)}
  (tmp_path / "summary.json").write_text(json.dumps(summary))
  done = program(f"--events={tmp_path / 'events.jsonl'}", cwd=tmp_path)
  assert done.returncode == 0, done.stderr
  assert "Prefill is near the peak FLOP/s" in done.stdout
  data = json.loads((tmp_path / "out" / "summary.json").read_text())
  assert any("decode pools on h200" in row["name"] for row in data["simulated"])


def test_a_foreign_file_is_simulated_as_the_flags_say(run_folder, tmp_path):
  records = simulate(config()).records
  lines = ["arrival_s,prompt_tokens,output_tokens,ttft_s,itl_s"]
  for r in observe(records.values()):
    gaps = " ".join(map(str, r.itl_s))
    lines.append(f"{r.arrival_s},{r.prompt_tokens},{r.output_tokens},{r.ttft_s},{gaps}")
  path = tmp_path / "seen.csv"
  path.write_text("\n".join(lines))
  flags = ("--ttft_slo_s=3", "--tpot_slo_s=0.05")
  done = program(f"--events={path}", *flags, cwd=tmp_path)
  assert done.returncode == 0 and "1. interference:" in done.stdout
  assert "Not simulated: --model=NAME and --hardware=NAME" in done.stdout
  named = ("--model=llama3-8b", "--hardware=a100", "--pools=mixed:prefill_first")
  done = program(f"--events={path}", *flags, *named, cwd=tmp_path)
  assert done.returncode == 0 and "chunked prefill" in done.stdout
  assert "it is not what served them" not in done.stdout
  named = ("--model=llama3-70b", "--hardware=h200", "--pools=4xmixed:tp2:prefill_first")
  done = program(f"--events={path}", *flags, *named, cwd=tmp_path)
  assert done.returncode == 0 and "it is not what served them" in done.stdout


@pytest.mark.parametrize(
  ("argv", "message"),
  [
    ((), "--events=FILE is missing"),
    (("--events=nothing.csv",), "nothing.csv does not exist"),
    (("--judge", "--events=x"), "give one of them"),
    (("--events={log}", "--run=b"), "run 'b'"),
    (("--events={log}", "--hardware=b100"), "b100"),
    (("--events={csv}",), ":2: ttft_s=-1.0: its first token came before its arrival"),
    (("--events={log}", "--set", "link=fast"), "fast"),
  ],
)
def test_wrong_input_is_one_message_and_nothing_is_written(run_folder, tmp_path, argv, message):
  csv = tmp_path / "seen.csv"
  csv.write_text("arrival_s,prompt_tokens,output_tokens,ttft_s,itl_s\n0,1,1,-1,\n")
  done = program(
    *(text.format(log=run_folder / "events.jsonl", csv=csv) for text in argv), cwd=tmp_path
  )
  assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
  assert done.stderr.startswith("error: ") and message in done.stderr
  assert not (tmp_path / "out").exists()


# What helps ---------------------------------------------------------------------------------------


def test_a_config_for_requests_serves_the_same_pools_in_simulation():
  run = simulate(config(strategies=("disaggregated",), num_devices=2))
  requests = observe(run.records.values())
  found = for_requests(config(strategies=("disaggregated",), num_devices=2), "disaggregated",
                       requests, SLO)  # fmt: skip
  roles = [(s.role, s.policy) for s in found.pools_of(found.pools)]
  assert roles == [("prefill", "prefill_only"), ("decode", "decode_only")]
  (row,), refused = try_out([("same", found)], requests, SLO)
  assert not refused and row.num_requests == len(requests)
  assert [r.itl_s for r in row.requests] == [r.itl_s for r in requests]


def one_of_each() -> list[ExperimentConfig]:
  requests = observe(simulate(config()).records.values())
  kinds = [
    config(),
    config(strategies=("chunked",), num_devices=2),
    config(strategies=(), pools="2xprefill,2xdecode@l40s", num_devices=4, link="10gbps"),
    config(strategies=(), pools="prefill:tp2,decode", num_devices=3),
  ]
  return [for_requests(kind, kind.strategy_names[0], requests, SLO) for kind in kinds]


def test_every_remedy_is_another_experiment_and_none_takes_devices_away():
  for own in one_of_each():
    for cause in Cause:
      for what, changed in remedies.remedies(cause, own):
        assert changed != own, what
        assert changed.num_devices >= own.num_devices, what
  assert set(remedies.ADVICE) == set(Cause)


def test_a_setting_comes_before_devices_that_are_not_there():
  """All of them help as much; of settings that do the one that keeps farthest from its targets."""
  own = dataclasses.replace(one_of_each()[0], cache=CacheConfig(layout="paged", num_rows=2))
  requests = observe(simulate(config()).records.values())
  slo = Slo(ttft_s=3.0, tpot_s=1.0)
  tried = [("before", own), *remedies.remedies(Cause.MEMORY, own)]
  (before, *rows), _ = try_out(tried, requests, slo)
  by_name = {row.name: row for row in rows}
  assert by_name["one more mixed pool"].num_new == 1 and by_name["mixed pools on h200"].num_new == 1
  assert before.num_calm < before.num_requests
  assert {row.num_calm for row in rows} == {before.num_requests}
  assert remedies.best_of(rows).name == "8 rows"
  near, far = (before._replace(num_calm=9, nearest=nearest) for nearest in (0.9, 0.4))
  assert remedies.best_of([near, far]) is far


def test_faster_decode_moves_only_pools_that_decode():
  (_, _, apart, _) = one_of_each()
  ((what, changed),) = remedies.faster_decode(apart)
  hardware = {s.role: s.hardware for s in changed.pools_of(changed.pools)}
  assert hardware == {"prefill": None, "decode": "h200"} and "h200" in what
  assert not list(remedies.faster_decode(changed))


# The judgement ------------------------------------------------------------------------------------


def test_cases_depend_on_their_seed_alone():
  first, again = (draw_case(Cause.QUEUEING, np.random.default_rng([5, 1])) for _ in range(2))
  assert list(first.log) == list(again.log) and first.requests == again.requests
  other = draw_case(Cause.QUEUEING, np.random.default_rng([5, 2]))
  assert list(other.log) != list(first.log)


def test_a_healthy_case_has_no_symptoms_and_a_faulty_one_has():
  healthy = draw_case(Cause.HEALTHY, np.random.default_rng([5, 3]))
  assert sum(is_troubled(r, healthy.slo) for r in healthy.requests) <= 0.05 * len(healthy.requests)
  faulty = draw_case(Cause.LINK, np.random.default_rng([5, 4]))
  assert sum(is_troubled(r, faulty.slo) for r in faulty.requests) >= 0.2 * len(faulty.requests)


def test_the_program_prints_both_matrices_and_judges_by_the_log(tmp_path):
  done = program("--judge", "--num_runs=3", f"--seed={DEVELOPED_ON}", cwd=tmp_path)
  data = json.loads((tmp_path / "out" / "summary.json").read_text())
  assert done.returncode == (data["right"]["our log"] < diagnose.ASKED)
  assert done.stdout.count("Rows: injected") == 2
  assert [run["injected"] for run in data["runs"]] == list(INJECTED[:3])


@pytest.mark.slow
def test_nine_of_ten_injected_causes_are_found():
  matrices, runs = diagnose.confusion(30, seed=0)
  for name, asked in (("our log", 0.9), ("clients", 0.75)):
    right = sum(count for (cause, found), count in matrices[name].items() if cause == found)
    assert right >= asked * len(runs), (name, runs)
