"""One comparison from configuration to files: in simulation, interrupted, and on the engine."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import time

import numpy as np
import pytest

from configs.hardware import HARDWARE, LINKS
from configs.workloads import WORKLOADS
from experiments import compare, serving
from experiments.program import Progress
from experiments.serving import Experiment, check, compare_tokens, run_experiment, token_report
from experiments.worlds import SimWorld
from pdjax.analysis.verdict import analyse
from pdjax.config import (
  ExperimentConfig,
  WorkloadConfig,
  load_config,
  num_devices_of,
  parse_pools,
)
from pdjax.core.clock import VirtualClock
from pdjax.core.costs import count_plan, count_slices
from pdjax.core.device_group import DeviceGroup
from pdjax.core.events import (
  Arrived,
  Copied,
  EventLog,
  Failed,
  Finished,
  Step,
  each_step,
  read_events,
)
from pdjax.core.request import Request, SamplingParams
from pdjax.metrics.goodput import Slo, attainment, summary
from pdjax.metrics.latency import outcomes, phases, request_records
from pdjax.scheduling.probe import probe_plan
from pdjax.serving.executor import Handle, PoolLost
from pdjax.sim.roofline import Roofline, num_pages
from pdjax.workloads.lengths import Fixed

ROOT = pathlib.Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.py"
STRATEGIES = ("continuous", "chunked", "disaggregated")
SCHEMA = {
  "ttft_s": {"p50", "p90", "p99", "n"},
  "tpot_s": {"p50", "p90", "p99", "n"},
  "itl_s": {"p50", "p90", "p99", "max", "n"},
  "attainment": float,
  "output_tokens_per_s": float,
  "num_requests": int,
  "num_failed": int,
  "handoff_bytes": int,
  "copy_s": float | int,
  "prefill_s": float | int,
}
TOP = {"strategies", "tokens_identical", "num_tokens_compared", "backend", "config", "slo",
       "verdict"}  # fmt: skip


def sim_config(*overrides: str) -> ExperimentConfig:
  return load_config(QUICKSTART, ["backend=sim", "workload.num_requests=60", *overrides])


def read_summary(out: pathlib.Path) -> dict:
  def refuse(name):
    raise ValueError(f"{name} is not JSON")

  return json.loads((out / "summary.json").read_text(), parse_constant=refuse)


def check_files(out: pathlib.Path, strategies) -> dict:
  """Checks the results in a folder against each other; returns the summary."""
  data = read_summary(out)
  assert data.keys() >= TOP
  assert list(data["strategies"]) == list(strategies)
  slo = Slo(**data["slo"])
  logs = read_events(out / "events.jsonl")
  assert list(logs) == [name for name, s in data["strategies"].items() if s["num_requests"]]
  for name, found in data["strategies"].items():
    log = logs.get(name, EventLog())  # no event leaves no line
    for key, kind in SCHEMA.items():
      if isinstance(kind, set):
        assert found[key].keys() == kind, (name, key)
      else:
        assert found[key] is None or isinstance(found[key], kind), (name, key)
    records = request_records(log)
    again = summary(records, log, slo=slo)
    assert json.loads(json.dumps(again)) == found, "the log says something else than the summary"
    for record in records.values():
      parts = phases(record)
      assert parts is None or parts.total_s == record.e2e_s
  trace = json.loads((out / "timeline.json").read_text())["traceEvents"]
  steps = [row for row in trace if row.get("cat") == "step"]
  num_steps = sum(1 for log in logs.values() for _ in each_step(log))
  assert sum(row["args"]["steps"] for row in steps) == num_steps
  assert all({"tokens", "flop_per_byte"} <= row["args"].keys() for row in steps)
  counters = {row["name"] for row in trace if row["ph"] == "C"}
  assert not steps or {"FLOP/s, % of peak", "bytes/s, % of peak"} <= counters
  names = {"events.jsonl", "summary.json", "timeline.json"}
  names |= {"latency.png", "phases.png", "timeline.png"}
  assert {p.name for p in out.iterdir()} == names
  for path in out.glob("*.png"):
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000
  return data


# In simulation ------------------------------------------------------------------------------------


def test_a_simulated_comparison_writes_files_that_agree(tmp_path, capsys):
  pytest.importorskip("matplotlib")
  out = tmp_path / "deep" / "out"
  assert compare.run((check(sim_config(), out), None)) == 0
  data = check_files(out, STRATEGIES)
  assert (data["backend"], data["tokens_identical"]) == ("sim", None)
  assert all(s["num_requests"] == 60 for s in data["strategies"].values())
  assert data["config"]["num_devices"] == 2
  text = capsys.readouterr().out
  assert data["verdict"] in text
  assert "Longest gap of a running request" in text
  for name in STRATEGIES:
    assert f"\n{name}" in text


def test_the_slos_are_the_stated_multiples_and_the_rate_follows_from_capacity(tmp_path):
  config = sim_config("slo.ttft_multiple=4", "slo.tpot_multiple=7", "workload.load=0.5")
  experiment = run_experiment(check(config, tmp_path), Progress())
  alone, pages = experiment.world.alone, experiment.world.pages
  assert experiment.slo.ttft_s == pytest.approx(4 * alone.prefill_s(448))
  assert experiment.slo.tpot_s == pytest.approx(7 * alone.decode_s(pages.num_rows))
  assert experiment.rate_rps == pytest.approx(0.5 * experiment.capacity_rps)


def test_arrivals_follow_absolute_times_and_the_achieved_rate_is_reported(tmp_path):
  """However busy the devices are, each request arrives when it was due."""
  config = sim_config("workload.load=3.0", "workload.num_requests=400", "strategies=continuous")
  experiment = run_experiment(check(config, tmp_path), Progress())
  run = experiment.runs["continuous"]
  due = {r.request_id: r.arrival_s for r in experiment.requests}
  assert {e.request_id: e.time_s for e in run.log if isinstance(e, Arrived)} == due
  text, data = serving.report(experiment)
  rate = data["rate_rps"]
  assert rate["asked"] == pytest.approx(3 * rate["capacity"])
  span_s = max(due.values()) - min(due.values())
  assert rate["achieved"] == pytest.approx((len(due) - 1) / span_s)
  assert rate["achieved"] == pytest.approx(rate["asked"], rel=0.25)  # 5 / sqrt(400)
  assert f"asked {rate['asked']:.3g}/s, achieved {rate['achieved']:.3g}/s" in text


@pytest.mark.parametrize("layout", ["slots", "paged"])
def test_requests_exactly_as_long_as_the_cache_finish(tmp_path, layout):
  config = sim_config(
    'workload.lengths={"prompt_tokens": 90, "output_tokens": 7}',
    "cache.page_size=8",
    "cache.max_len=96",
    f"cache.layout={layout}",
  )
  experiment = run_experiment(check(config, tmp_path), Progress())
  assert experiment.world.pages.capacity_tokens == 90 + 7 - 1
  for run in experiment.runs.values():
    assert outcomes(run.records) == {"finished": 60, "failed": 0, "unfinished": 0}
    assert {len(r.token_s) for r in run.records.values()} == {7}


def test_a_trace_gives_arrivals_and_lengths(tmp_path):
  rows = [(0.0, 30, 4), (0.25, 300, 2), (0.25, 7, 1), (9.5, 40, 9)]
  path = tmp_path / "trace.csv"
  lines = ["arrival_s,prompt_tokens,output_tokens", *(",".join(map(str, row)) for row in rows)]
  path.write_text("\n".join(lines))
  config = sim_config("workload.num_requests=None", f"workload.trace={str(path)!r}")
  experiment = run_experiment(check(config, tmp_path), Progress())
  for run in experiment.runs.values():
    records = run.records.values()
    assert [(r.arrival_s, r.num_prompt_tokens, len(r.token_s)) for r in records] == rows
  text, data = serving.report(experiment)
  assert "asked the trace" in text and data["rate_rps"]["asked"] is None


def test_a_model_over_several_devices_is_simulated_with_pools_of_them(tmp_path):
  one = ["model=llama3-70b", "hardware=a100", "cache.layout=paged", "num_devices=8"]
  with pytest.raises(ValueError, match="llama3-70b does not fit on a100"):
    check(sim_config(*one), tmp_path)
  experiment = run_experiment(check(sim_config(*one, "tp=4"), tmp_path), Progress())
  for name, run in experiment.runs.items():
    assert outcomes(run.records) == {"finished": 60, "failed": 0, "unfinished": 0}
    pools = {e.pool for e in each_step(run.log)}
    assert len(pools) == 2, name
  _, data = serving.report(experiment)
  assert data["label"] == "simulated llama3-70b on 8 x a100, 4 a pool"
  assert "all-reduces" not in data["verdict"], "those of an A100 were measured"


def test_devices_of_a_pool_hand_over_at_the_same_time():
  tokens, seconds = 1000, {}
  for tp in (1, 4):
    config = sim_config("model=llama3-8b", "hardware=a100", "num_devices=8", f"tp={tp}")
    world = SimWorld(config, config.workload.lengths.longest, 30)
    executor = world.executor(DeviceGroup(devices=tuple(range(tp))))
    handle = Handle(
      request_id=0,
      num_tokens=tokens,
      num_prompt_tokens=tokens,
      first_token_id=0,
      sampling=SamplingParams(max_tokens=2),
    )
    handle = executor.export(handle, page_ids=(), now_s=0.0)
    assert handle.num_bytes == tokens * world.model.kv_bytes_per_token()
    latency_s = LINKS[config.link].latency_s
    seconds[tp] = executor.import_(handle, row=0, page_ids=(), now_s=0.0).finish_s - latency_s
  assert seconds[4] == pytest.approx(seconds[1] / 4, rel=1e-4)


def test_pools_of_any_shape_are_compared_on_as_many_devices(tmp_path):
  """Each pool has the step times and the memory of its own devices; the others have theirs."""
  pools = "2xprefill:tp2,1xdecode:tp4"
  config = sim_config(
    "model=llama3-8b", "hardware=a100", "cache.layout=paged", "num_devices=8", f"pools={pools}"
  )
  experiment = run_experiment(check(config, tmp_path), Progress())
  assert list(experiment.runs) == [*STRATEGIES, pools]
  for name, run in experiment.runs.items():
    assert outcomes(run.records) == {"finished": 60, "failed": 0, "unfinished": 0}
    names = {spec.name for spec in config.pools_of(name)}
    assert {e.pool for e in each_step(run.log)} == names, "a pool that never ran"
  copies = [e for e in experiment.runs[pools].log if isinstance(e, Copied)]
  assert {(e.source, e.target) for e in copies} == {
    ("prefill0", "decode0"),
    ("prefill1", "decode0"),
  }
  world = experiment.world
  groups = [config.pools_of(name)[0].group for name in ("chunked", pools)]
  groups.append(config.pools_of(pools)[-1].group)
  fits = [world.pages_of(group).num_pages for group in groups]
  # The weights are split too, so twice the devices hold more than twice as much.
  assert fits[1] > 2 * fits[0] and fits[2] > 2 * fits[1]
  link = LINKS[config.link]
  waits_s = [  # for the copy before; two devices send to four
    copy.end_s - copy.start_s - link.latency_s - copy.num_bytes / (2 * link.bytes_per_s)
    for copy in copies
  ]
  assert min(waits_s) == pytest.approx(0, abs=1e-8)
  decode_s = {
    name: statistics.median(
      e.end_s - e.start_s for e in each_step(experiment.runs[name].log) if e.kind == "decode"
    )
    for name in ("disaggregated", pools)
  }
  # Half of the weights on each device, but all of the host and two all-reduces a layer.
  assert decode_s["disaggregated"] / 2 < decode_s[pools] < decode_s["disaggregated"] / 1.3
  assert (
    world.alone
    == run_experiment(
      check(dataclasses.replace(config, pools=None), tmp_path), Progress()
    ).world.alone
  ), "targets would move with the pools that are compared"
  counts = count_slices(decode_positions=(99,) * 8, num_emitted=8)
  took_s = [world.step_time(group)(counts) for group in groups]
  assert took_s[0] > took_s[1] > took_s[2]
  _, data = serving.report(experiment)
  assert "pipeline stages" not in data["verdict"]


LLAMA = ("model=llama3-8b", "hardware=a100", "cache.layout=paged")


def pools_config(pools: str, *overrides: str) -> ExperimentConfig:
  """Llama-3-8B under these pools alone."""
  num_devices = num_devices_of(parse_pools(pools))
  config = sim_config(*LLAMA, f"num_devices={num_devices}", f"pools={pools}", *overrides)
  return dataclasses.replace(config, strategies=())


def step_times_s(experiment: Experiment, pools: str, name: str) -> list[float]:
  """Of the steps of a pool, per token of its prompts."""
  return [
    (event.end_s - event.start_s) / sum(event.prefill_tokens)
    for event in experiment.runs[pools].log
    if isinstance(event, Step) and event.pool == name and event.prefill_tokens
  ]


def test_each_pool_has_the_hardware_that_it_names(tmp_path):
  pools = "prefill@h100,prefill,decode@b200"
  config = pools_config(pools)
  experiment = run_experiment(check(config, tmp_path), Progress())
  run, world = experiment.runs[pools], experiment.world
  assert outcomes(run.records) == {"finished": 60, "failed": 0, "unfinished": 0}
  by_name = {spec.name: spec.group for spec in config.pools_of(pools)}
  counts = count_slices(prefill_starts=(0,), prefill_tokens=(448,), num_emitted=1)
  for name, hardware in (("prefill0", "h100"), ("prefill1", "a100"), ("decode0", "b200")):
    latency = Roofline(model=world.model, device=HARDWARE[hardware])
    assert world.step_time(by_name[name])(counts) == latency.terms_of(counts).total_s
    fits = num_pages(
      model=world.model,
      device=HARDWARE[hardware],
      page_size=16,
      # Prompts are whole, with the room of a whole request; decodes keep to the budget.
      step_tokens=448 + 32 if "prefill" in name else config.scheduler.token_budget,
    )
    assert world.pages_of(by_name[name]).num_pages == fits
  fast_s, slow_s = (statistics.median(step_times_s(experiment, pools, f"prefill{i}")) for i in "01")
  assert 1.5 * fast_s < slow_s
  assert world.label == ("simulated llama3-8b on 1 x h100 and 1 x a100 and 1 x b200 (uncalibrated)")
  assert "step times of b200 are those of its data sheet" in world.caveats[0]
  # Targets are of the pools that run such steps.
  assert world.alone.prefill_s(448) == world.step_time(by_name["prefill0"])(
    count_plan(probe_plan(world.pages, prefills=(448,)))
  )
  assert world.pages == world.pages_of(by_name["decode0"])
  # All prefill pools together: a whole and the share of one that the slower is.
  rates = [1 / world.step_time(by_name[f"prefill{i}"])(counts) for i in "01"]
  assert 2 / world.together.prefill_s(448) == pytest.approx(sum(rates))


def test_pools_on_other_hardware_are_not_compared_as_equals(tmp_path):
  def caveats(pools):
    config = sim_config(*LLAMA, f"pools={pools}")
    world = SimWorld(config, config.workload.lengths.longest, 30)
    return world.label, [text for text in world.caveats if "not equal devices" in text]

  label, (caveat,) = caveats("prefill@h100,decode")
  assert label.endswith("on 2 x a100, or 1 x h100 and 1 x a100")
  assert "runs on a100 and h100, the other strategies on as many devices of a100" in caveat
  assert caveats("prefill,decode") == ("simulated llama3-8b on 2 x a100", [])
  assert caveats("prefill@a100,decode@a100") == ("simulated llama3-8b on 2 x a100", [])


def test_a_pipeline_is_simulated_stage_by_stage(tmp_path):
  pools, one = "prefill:pp4,decode", "prefill:prefill_chunks,decode"
  worlds = {}
  for text in (pools, one):
    experiment = run_experiment(check(pools_config(text), tmp_path), Progress())
    run = experiment.runs[text]
    assert outcomes(run.records) == {"finished": 60, "failed": 0, "unfinished": 0}
    worlds[text] = experiment.world
  piped, single = (worlds[text] for text in (pools, one))
  groups = {text: parse_pools(text)[0].group for text in (pools, one)}
  executor = piped.executor(groups[pools])
  assert executor.num_stages == 4 and executor.layer_groups[-1] == (24, 32)
  # A step is no shorter for being cut into stages, but another begins when the first stage is free.
  plan = probe_plan(piped.pages, prefills=(256,))
  counts = count_plan(plan)
  whole_s = single.step_time(groups[one])(counts)
  hand_over_s = piped.step_time(groups[pools])(counts) - whole_s
  assert 0 < hand_over_s < whole_s / 10
  ends_s = [executor.submit(plan, 0.0).finish_s for _ in range(8)]
  assert ends_s[0] == pytest.approx(whole_s + hand_over_s)
  assert ends_s[-1] == pytest.approx(whole_s * (8 + 3) / 4 + hand_over_s, rel=1e-3)
  # Its stages hold more than four times the pages of one device, whose weights they share.
  assert piped.pages_of(groups[pools]).num_pages > 4 * single.pages_of(groups[one]).num_pages
  assert "pipeline stages take their share of the layers" in piped.caveats[0]
  assert piped.alone.prefill_s(448) > single.alone.prefill_s(448)
  assert piped.together.prefill_s(448) == pytest.approx(single.together.prefill_s(448) / 4)


def test_a_long_prompt_takes_its_chunks_through_the_stages(tmp_path):
  """C chunks over S stages take about (C + S - 1) / (C S) of the time of one device."""
  num_chunks, ttft_s = 8, {}
  for pp in (1, 2, 4):
    pools = f"prefill:prefill_chunks:pp{pp},decode"
    config = pools_config(pools, "scheduler.token_budget=512", "workload.num_requests=1")
    lengths = Fixed(prompt_tokens=512 * num_chunks, output_tokens=2)
    workload = dataclasses.replace(config.workload, lengths=lengths)
    config = dataclasses.replace(config, workload=workload)
    run = run_experiment(check(config, tmp_path), Progress()).runs[pools]
    chunks = [e.prefill_tokens for e in each_step(run.log) if e.pool == "prefill0"]
    assert chunks == [(512,)] * num_chunks
    ttft_s[pp] = run.records[0].ttft_s
  for pp in (2, 4):
    share = (num_chunks + pp - 1) / (num_chunks * pp)
    assert ttft_s[pp] == pytest.approx(share * ttft_s[1], rel=0.05)


def test_pools_alone_are_held_to_what_they_can_do_themselves(tmp_path):
  """A model that fits no single device; targets from the pools that run such steps."""
  config = dataclasses.replace(
    sim_config("model=llama3-70b", "hardware=a100", "cache.layout=paged", "num_devices=12",
               "strategies=chunked", "tp=4"),
    strategies=(), pools="1xprefill:tp8,1xdecode:tp4", tp=1,
  )  # fmt: skip
  experiment = run_experiment(check(config, tmp_path), Progress())
  (run,) = experiment.runs.values()
  assert outcomes(run.records) == {"finished": 60, "failed": 0, "unfinished": 0}
  model, alone = experiment.world.model, experiment.world.alone
  by_tp = {
    tp: Roofline(model=model, device=HARDWARE["a100"], tp=tp, link=LINKS["nvlink"]) for tp in (4, 8)
  }
  pages = experiment.world.pages
  prompt = probe_plan(pages, prefills=(448,))
  assert alone.prefill_s(448) == by_tp[8].step_s(prompt) < by_tp[4].step_s(prompt)
  plan = probe_plan(pages, decodes=pages.num_rows, context=experiment.world._context)
  assert alone.decode_s(pages.num_rows) == by_tp[4].step_s(plan)
  prefill_s = statistics.fmean(alone.prefill_s(p) for p, _ in config.workload.lengths.pairs(
    4000, np.random.default_rng(0)))  # fmt: skip
  assert experiment.capacity_rps <= 1.05 / prefill_s, "more than its prefill pool can take in"


def test_simulation_imports_no_jax_and_starts_at_once(tmp_path):
  (tmp_path / "jax.py").write_text("raise SystemError('jax was imported')")
  (tmp_path / "flax.py").write_text("raise SystemError('flax was imported')")
  argv = ["--backend=sim", "--set", "workload.num_requests=20", f"--out={tmp_path / 'out'}"]
  env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
  command = [sys.executable, "-m", "experiments.run", *argv]
  start_s = time.monotonic()
  with subprocess.Popen(
    command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
  ) as process:
    first = process.stderr.readline()
    first_s = time.monotonic() - start_s
    out, err = process.communicate(timeout=60)
  assert process.returncode == 0, err
  assert first.startswith("simulated smollm2-135m"), first
  assert first_s < 3, "a simulation should serve within a second on an idle machine"
  assert "Verdict" in out


# Interrupted --------------------------------------------------------------------------------------


class ImpatientClock(VirtualClock):
  """The user presses Ctrl-C while the loop waits for the n-th time."""

  def __init__(self, num_waits: int):
    super().__init__()
    self.num_waits = num_waits

  def wait(self, tickets, until_s):
    self.num_waits -= 1
    if not self.num_waits:
      raise KeyboardInterrupt
    return super().wait(tickets, until_s)


class InterruptedWorld(SimWorld):
  """Interrupts the run number `run` at its wait number `num_waits`."""

  run, num_waits = 1, 60

  def clock(self):
    self.run -= 1
    return ImpatientClock(self.num_waits) if self.run == 0 else super().clock()


def interrupted(tmp_path, kind=InterruptedWorld, **when):
  checked = check(sim_config(), tmp_path / "out")
  world = kind(checked.config, checked.config.workload.lengths.longest, 30)
  for name, value in when.items():
    setattr(world, name, value)
  return dataclasses.replace(checked, world=world)


@pytest.mark.parametrize(("run", "expected"), [(1, STRATEGIES[:1]), (2, STRATEGIES[:2])])
def test_ctrl_c_writes_what_was_measured(tmp_path, capsys, run, expected):
  pytest.importorskip("matplotlib")
  assert compare.run((interrupted(tmp_path, run=run), None)) == 130
  data = check_files(tmp_path / "out", expected)
  assert data["interrupted"] is True
  assert "No choice: interrupted" in data["verdict"]
  assert "interrupted" in capsys.readouterr().err
  *whole, partial = data["strategies"].values()
  assert all(s["num_requests"] == 60 for s in whole)
  records = request_records(read_events(tmp_path / "out" / "events.jsonl")[expected[-1]])
  counts = outcomes(records)
  assert counts["unfinished"] > 0 and counts["finished"] > 0
  assert partial["num_requests"] == sum(counts.values())
  assert partial["attainment"] == attainment(records, Slo(**data["slo"]))
  assert partial["attainment"] <= counts["finished"] / sum(counts.values()), "not counted as misses"


class LosingWorld(SimWorld):
  """Has no pool left for the run number `run`."""

  run = 1

  def clock(self):
    self.run -= 1
    if self.run == 0:
      raise PoolLost("devices 0: no more processes")
    return super().clock()


def test_a_pool_that_cannot_start_again_leaves_the_runs_before_it(tmp_path, capsys):
  pytest.importorskip("matplotlib")
  second, first = (interrupted(tmp_path, LosingWorld, run=run) for run in (2, 1))
  assert compare.run((second, first)) == 1
  assert check_files(tmp_path / "out", STRATEGIES[:1])["interrupted"] is True
  assert "devices 0: no more processes: reporting" in capsys.readouterr().err
  with pytest.raises(PoolLost):
    compare.run((first, None))


def test_ctrl_c_before_the_first_request_writes_empty_results(tmp_path):
  pytest.importorskip("matplotlib")
  assert compare.run((interrupted(tmp_path, num_waits=1), None)) == 130
  data = check_files(tmp_path / "out", STRATEGIES[:1])
  assert data["strategies"]["continuous"]["attainment"] is None


def test_ctrl_c_while_the_twin_is_simulated_keeps_the_measured_results(tmp_path):
  pytest.importorskip("matplotlib")
  twin = interrupted(tmp_path)
  assert compare.run((check(sim_config(), tmp_path / "out"), twin)) == 130
  data = check_files(tmp_path / "out", STRATEGIES)
  assert data["interrupted"] is False and data["simulated"]["interrupted"] is True


def test_ctrl_c_during_warm_up_writes_nothing(tmp_path):
  checked = check(sim_config(), tmp_path / "out")

  class Slow(SimWorld):
    def prepare(self, show):
      raise KeyboardInterrupt

  world = Slow(checked.config, checked.config.workload.lengths.longest, 30)
  with pytest.raises(KeyboardInterrupt):
    compare.run((dataclasses.replace(checked, world=world), None))
  assert not (tmp_path / "out").exists()


def test_ctrl_c_while_results_are_written_leaves_none_half_written(tmp_path, monkeypatch):
  def stop(path, logs, *args, **options):
    path.write_text("{half")
    raise KeyboardInterrupt

  monkeypatch.setattr(serving, "write_chrome_trace", stop)
  with pytest.raises(KeyboardInterrupt):
    compare.run((check(sim_config(), tmp_path / "out"), None))
  assert {p.name for p in (tmp_path / "out").iterdir()} == {"events.jsonl", "summary.json"}
  assert read_summary(tmp_path / "out")["strategies"].keys() == set(STRATEGIES)


def test_a_real_ctrl_c_ends_a_program_with_130_and_its_results(tmp_path):
  argv = ["--backend=sim", "--set", "workload.num_requests=20000", f"--out={tmp_path / 'out'}"]
  command = [sys.executable, "-m", "experiments.run", *argv]
  with subprocess.Popen(
    command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
  ) as process:
    first = process.stderr.readline()  # said when serving begins
    assert first.startswith("simulated"), first
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
  assert process.returncode == 130, err
  assert "interrupted" in err and "Traceback" not in err
  data = read_summary(tmp_path / "out")
  assert data["interrupted"] is True
  assert 0 < data["strategies"]["chunked"]["num_requests"] < 20_000
  assert "No choice: interrupted" in out


# Are the tokens the same? -------------------------------------------------------------------------


@pytest.mark.slow
def test_a_real_ctrl_c_during_warm_up_ends_with_130_and_no_crash(tmp_path):
  """XLA compiles in threads then."""
  program = subprocess.Popen(
    [sys.executable, "-m", "experiments.compare", "--model=tiny", f"--out={tmp_path / 'out'}"],
    cwd=ROOT,
    env=os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "0"},
    stderr=subprocess.PIPE,
    text=True,
  )
  for line in program.stderr:
    if "shape" in line:
      break
  program.send_signal(signal.SIGINT)
  _, rest = program.communicate(timeout=60)
  assert program.returncode == 130, rest
  assert "interrupted" in rest and not (tmp_path / "out").exists()


class ScriptedWorld:
  """A world of which only the margins matter; remembers what it was asked."""

  bytes_per_value = 4

  def __init__(self, margin: float | None):
    self.margin, self.asked = margin, []

  def top2_margin(self, token_ids):
    self.asked.append(token_ids)
    return self.margin


PROMPT = (7, 0, 9)


def experiment_with(margin, stops=False, **streams) -> Experiment:
  """Runs that gave these token ids: a strategy -> a stream per request.

  Fewer than 5 tokens: the request failed, or with `stops` ended by a stop id.
  """
  slo, runs = Slo(ttft_s=1.0, tpot_s=1.0), {}
  for name, per_request in streams.items():
    log = EventLog()
    for i, ids in enumerate(per_request):
      log.append(
        Arrived(time_s=0.0, request_id=i, pool="m", num_prompt_tokens=len(PROMPT), max_tokens=9)
      )
      for k, token_id in enumerate(ids):
        log.append(
          Step(
            pool="m",
            step_id=k,
            kind="decode" if k else "prefill",
            start_s=k * 0.5,
            end_s=k * 0.5 + 0.5,
            prefill_ids=() if k else (i,),
            prefill_starts=() if k else (0,),
            prefill_tokens=() if k else (len(PROMPT),),
            decode_ids=(i,) if k else (),
            decode_positions=(len(PROMPT) + k - 1,) if k else (),
            emitted_ids=(i,),
            token_ids=(token_id,),
          )
        )
      if len(ids) == 5 or stops:
        log.append(Finished(time_s=3.0, request_id=i, pool="m", reason="length"))
      else:
        log.append(Failed(time_s=3.0, request_id=i, pool="m", reason="step failed"))
    runs[name] = analyse(name, log, slo)
  num_requests = len(next(iter(streams.values())))
  return Experiment(
    config=ExperimentConfig(
      workload=WorkloadConfig(lengths=Fixed(prompt_tokens=len(PROMPT), output_tokens=5))
    ),
    world=ScriptedWorld(margin),
    slo=slo,
    rate_rps=1.0,
    capacity_rps=2.0,
    requests=tuple(
      Request(
        request_id=i,
        arrival_s=0.0,
        num_prompt_tokens=len(PROMPT),
        prompt_ids=PROMPT,
        sampling=SamplingParams(max_tokens=5),
      )
      for i in range(num_requests)
    ),
    runs=runs,
  )


SAME = ((1, 2, 3, 4, 5), (6, 7, 8, 9, 0))
OTHER = ((1, 2, 3, 4, 5), (6, 7, 99, 98, 97))  # request 1 differs from its third token on


def test_equal_tokens_are_identical():
  experiment = experiment_with(0.0, a=SAME, b=SAME, c=SAME)
  text, data, is_wrong = token_report(experiment)
  assert (data["tokens_identical"], data["num_tokens_compared"]) == (True, 10)
  assert not is_wrong and "identical" in text
  assert not experiment.world.asked, "margins are worth their cost only where tokens differ"


@pytest.mark.parametrize(
  ("margin", "is_tie"), [(0.0, True), (9e-4, True), (1e-3, False), (2.5, False), (None, False)]
)
def test_a_difference_is_a_tie_only_below_a_margin_of_a_thousandth(margin, is_tie):
  experiment = experiment_with(margin, a=SAME, b=SAME, c=OTHER)
  text, data, is_wrong = token_report(experiment)
  assert is_wrong is not is_tie
  assert data["tokens_identical"] is False
  (difference,) = data["token_differences"]
  assert difference == {
    "request_id": 1,
    "position": 2,
    "strategies": ["a", "c"],
    "token_ids": [8, 99],
    "margin": margin,
    "tie_margin": 1e-3,
    "is_tie": is_tie,
  }
  # The margin is that between the tokens that could follow what both still agree on.
  assert experiment.world.asked == [(*PROMPT, 6, 7)]
  for part in ("request 1", "output token 2", "a 8", "c 99", "margin"):
    assert part in text
  assert ("FAILED" in text, "(a tie)" in text) == (not is_tie, is_tie)


def test_in_bfloat16_a_tie_is_wider():
  experiment = experiment_with(0.1, a=SAME, b=OTHER)
  _, _, is_wrong = token_report(experiment)
  experiment.world.bytes_per_value = 2
  _, (difference,) = compare_tokens(experiment)
  assert is_wrong and difference.is_tie


def test_streams_that_broke_off_are_compared_as_far_as_they_go():
  num_compared, differences = compare_tokens(experiment_with(0.0, a=SAME, b=(SAME[0], (6, 7))))
  assert (num_compared, differences) == (5 + 2, [])
  num_compared, differences = compare_tokens(experiment_with(0.0, a=SAME, b=(SAME[0], ())))
  assert (num_compared, differences) == (5, [])
  num_compared, (found,) = compare_tokens(experiment_with(5.0, a=SAME, b=(SAME[0], (6, 1))))
  assert (num_compared, found.position, found.token_ids) == (5 + 2, 1, (7, 1))


def test_a_stream_that_ended_early_differs_from_one_that_went_on():
  experiment = experiment_with(0.0, stops=True, a=SAME, b=(SAME[0], (6, 7)))
  _, data, is_wrong = token_report(experiment)
  assert is_wrong and data["tokens_identical"] is False
  (found,) = data["token_differences"]
  assert (found["position"], found["token_ids"]) == (2, [8, None])


def test_nothing_to_compare_is_not_called_identical():
  _, data, is_wrong = token_report(experiment_with(0.0, a=((), ()), b=((), ())))
  assert (data["tokens_identical"], is_wrong) == (None, False)


def test_one_strategy_has_nothing_to_compare_with():
  text, data, is_wrong = token_report(experiment_with(0.0, a=SAME))
  assert (text, data["tokens_identical"], is_wrong) == ("", None, False)


# On the engine ------------------------------------------------------------------------------------

# So small that few shapes must be compiled; long prompts still take two chunks.
SMALL = """
from pdjax.config import CacheConfig, ExperimentConfig, SchedulerOptions, WorkloadConfig
from pdjax.workloads.lengths import Mix

def get_config():
  lengths = Mix(
    prompt_tokens=(2, 3), long_prompt_tokens=(12, 12), output_tokens=(3, 5), long_every=4
  )
  return ExperimentConfig(
    model="tiny",
    workload=WorkloadConfig(lengths=lengths, num_requests=16, load=1.0),
    scheduler=SchedulerOptions(token_budget=8),
    cache=CacheConfig(num_rows=2),
  )
"""


def serve_small(tmp_path, program, *argv):
  pytest.importorskip("matplotlib")
  (tmp_path / "small.py").write_text(SMALL)
  command = [sys.executable, "-m", f"experiments.{program}", "--config=small.py", "--out=out"]
  # What is compiled runs for milliseconds, so it is compiled fast.
  fast = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
  env = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": fast}
  done = subprocess.run(
    [*command, *argv], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240
  )
  assert done.returncode == 0, done.stderr
  return done


@pytest.mark.slow
@pytest.mark.parametrize(
  ("program", "argv", "names"),
  [("compare", ["--strategies=chunked"], ["chunked"]), ("run", [], [])],
)
def test_pools_of_any_shape_serve_on_the_engine(tmp_path, program, argv, names):
  """With the tokens of mixed pools, beside or without them."""
  pools = "1xprefill:tp2,2xdecode:tp1"
  done = serve_small(tmp_path, program, f"--pools={pools}", *argv)
  data = check_files(tmp_path / "out", [*names, pools])
  assert data["tokens_identical"] is (True if names else None)
  assert data["strategies"][pools]["num_failed"] == 0
  assert data["strategies"][pools]["handoff_bytes"] > 0
  assert data["config"]["num_devices"] == 4
  log = read_events(tmp_path / "out" / "events.jsonl")[pools]
  assert {e.pool for e in each_step(log)} == {"prefill0", "decode0", "decode1"}
  assert list(data["simulated"]["strategies"]) == [*names, pools]
  assert "simulated llama3-8b on 4 x a100" in done.stdout


@pytest.mark.slow
def test_a_pipeline_on_a_named_platform_gives_the_same_tokens(tmp_path):
  pools = "1xprefill:pp2@cpu,1xdecode:pp2"
  done = serve_small(tmp_path, "compare", f"--pools={pools}", "--strategies=chunked")
  data = check_files(tmp_path / "out", ["chunked", pools])
  assert data["tokens_identical"] is True
  assert data["strategies"][pools]["num_failed"] == 0
  assert data["strategies"][pools]["handoff_bytes"] > 0
  assert data["label"].endswith("on 4 cpu devices")
  assert "simulated" not in data
  assert "not simulated as well: @cpu are devices of this machine" in done.stderr


def test_pools_that_the_simulated_model_cannot_have_run_on_the_engine_alone():
  """SmolLM2 has 9 heads, Llama-3-8B 32."""
  for pools, num_devices, reason in (
    ("1xprefill:tp3,1xdecode", 4, "llama3-8b: num_heads=32 is no multiple of the 3 devices"),
    ("1xprefill:tp2,2xdecode", 4, None),
    ("prefill:pp4,decode", 5, None),
    ("prefill:pp33,decode", 34, "prefill0: 32 layers cannot be cut into 33 parts"),
    ("prefill@cpu,decode@gpu", 2, "@cpu, @gpu are devices of this machine"),
    (None, 3, None),  # then its pools have a device each
  ):
    config = load_config(QUICKSTART, [f"num_devices={num_devices}", f"pools={pools}"])
    found = compare.why_no_twin(config)
    assert found is None if reason is None else reason in found


def test_the_simulated_model_is_asked_the_same_trace_or_prompts_of_its_own():
  own = load_config(ROOT / "configs/llama3_8b_a100.py").workload
  config = load_config(QUICKSTART, ["workload.num_requests=7", "workload.trace_speed=2"])
  assert compare.twin_of(config, None, None).workload == own
  traced = dataclasses.replace(config, workload=dataclasses.replace(config.workload, trace="x.csv"))
  twin = compare.twin_of(traced, "h100", None)
  asked = twin.workload
  assert (asked.trace, asked.num_requests, asked.trace_speed) == ("x.csv", 7, 2)
  assert (twin.hardware, twin.model, asked.length_scale) == ("h100", "llama3-8b", 1)
  named = compare.twin_of(config, None, "sharegpt").workload
  assert named.lengths == WORKLOADS["sharegpt"].lengths and named.num_requests == own.num_requests


def test_a_comparison_on_the_engine_gives_the_same_tokens_everywhere(tmp_path):
  done = serve_small(tmp_path, "compare")
  data = check_files(tmp_path / "out", STRATEGIES)
  assert data["tokens_identical"] is True
  logs = read_events(tmp_path / "out" / "events.jsonl")
  num_tokens = sum(len(r.token_ids) for r in request_records(logs["chunked"]).values())
  assert data["num_tokens_compared"] == num_tokens >= 16 * 3
  assert all(s["num_failed"] == 0 for s in data["strategies"].values())
  assert data["strategies"]["disaggregated"]["handoff_bytes"] > 0
  assert data["strategies"]["chunked"]["handoff_bytes"] == 0
  assert data["simulated"]["strategies"].keys() == set(STRATEGIES)
  assert "simulated llama3-8b on 2 x a100" in done.stdout
  assert "identical under all strategies" in done.stdout
  assert "share the same cores" in data["verdict"]
  assert "warm-up" in done.stderr and "of 16 requests" in done.stderr
