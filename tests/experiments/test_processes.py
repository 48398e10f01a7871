"""`--processes`: the tokens and files of one process, and an end that leaves nothing behind."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from remote.small import EXPERIMENT

from experiments.program import Progress
from experiments.serving import check, compare_tokens, machine, report, run_experiment
from pdjax.remote.executor import RemoteExecutor

pytestmark = [pytest.mark.slow, pytest.mark.processes]
ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_tokens_are_those_of_one_process(tmp_path):
  can_pin = len(os.sched_getaffinity(0)) >= EXPERIMENT.num_devices
  tokens = {}
  for processes in (False, True):
    config = dataclasses.replace(EXPERIMENT, processes=processes, pin=processes and can_pin)
    checked = check(config, tmp_path)
    try:
      experiment = run_experiment(checked, Progress())
      num_compared, differences = compare_tokens(experiment)
      assert checked.world.top2_margin(experiment.requests[0].prompt_ids) > 0
    finally:
      checked.world.close()
    assert num_compared and not [d for d in differences if not d.is_tie]
    tokens[processes] = {
      record.request_id: record.token_ids
      for record in experiment.runs["disaggregated"].records.values()
    }
    _, data = report(experiment)
    assert data["config"]["processes"] is processes
    found = machine(experiment)["processes"]
    assert (found is not None) is processes
    if processes and can_pin:
      cores = [core for own in found for core in own["cores"]]
      assert len(found) == 2 and len(set(cores)) == len(cores)
  assert tokens[True] == tokens[False]
  assert len(tokens[True]) == 12 and all(tokens[True].values())


def test_a_pool_that_is_lost_before_or_between_runs_starts_again(tmp_path, monkeypatch):
  checked = check(dataclasses.replace(EXPERIMENT, processes=True), tmp_path)
  reset, calls = RemoteExecutor.reset, []

  def kill_some(executor):
    calls.append(executor.name)
    if len(calls) in (1, 6):  # of both pools after warm-up, and before each of two runs
      os.kill(executor.process_id, signal.SIGKILL)
    reset(executor)

  try:
    monkeypatch.setattr(RemoteExecutor, "reset", kill_some)
    experiment = run_experiment(checked, Progress())
  finally:
    checked.world.close()
  assert len(calls) == 2 * 3 + 2
  for run in experiment.runs.values():
    assert [record.finish_reason for record in run.records.values()] == ["length"] * 12


def children_of(process_id):
  return [
    int(found)
    for task in pathlib.Path(f"/proc/{process_id}/task").iterdir()
    for found in (task / "children").read_text().split()
  ]


def test_ctrl_c_ends_the_workers_and_keeps_what_was_measured(tmp_path):
  command = [sys.executable, "-m", "experiments.compare", "--model=tiny", "--processes",
             "--strategies=continuous", f"--out={tmp_path}", "--set", "workload.num_requests=9999",
             "--set", "cache.num_rows=2", "--set", "cache.max_len=480"]  # fmt: skip
  process = subprocess.Popen(
    command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    start_new_session=True,
  )  # fmt: skip
  try:
    line, workers = "", []
    while not line.startswith("continuous: "):
      line = process.stderr.readline()
      assert line, f"it ended with {process.wait()}"
    workers = children_of(process.pid)
    assert len(workers) == 2
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: all of them get it
    stdout, stderr = process.communicate(timeout=60)
  finally:
    process.kill()
  assert process.returncode == 130, stderr
  summary = json.loads((tmp_path / "summary.json").read_text())
  assert summary["strategies"]["continuous"]["num_requests"] > 0
  assert "interrupted" in stderr and "wrote events.jsonl" in stdout
  end_s = time.monotonic() + 10
  while any(pathlib.Path(f"/proc/{worker}").exists() for worker in workers):
    assert time.monotonic() < end_s, "an orphan"
    time.sleep(0.05)
