"""Searches find what there is to find, say what they tried, and never try it twice."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import io
import json
import math
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest

from configs.hardware import HARDWARE, LINKS
from configs.latency import LATENCY
from experiments import search
from experiments.program import Progress
from experiments.searching import carrying_out
from experiments.searching import probe as probe_module
from experiments.searching.budgeting import TILE, BudgetGoal
from experiments.searching.drive import LONGER, NUM_DRAWS, Driver, ProbeCache, RateSearch
from experiments.searching.goals import (
  Asked,
  StrategiesGoal,
  caveats_of,
  found,
  make_search,
  with_pools,
  with_slo,
)
from experiments.searching.placing import WAVE, PlacementGoal
from experiments.searching.probe import Probe, simulate, unloaded
from experiments.searching.replanning import ReplanGoal
from experiments.serving import DRAWN, check, serve_strategy, set_up
from experiments.sweep import Processes, Serial
from experiments.validation import distserve
from pdjax.analysis.placement import Nodes, Shape
from pdjax.analysis.replan import Seen
from pdjax.analysis.targets import Attainment, Outcome, Stalls
from pdjax.config import ExperimentConfig, SloConfig, load_config, parse_pools
from pdjax.core.costs import StepCounts, count_slices
from pdjax.core.device_group import split_layers
from pdjax.core.events import EventLog
from pdjax.metrics.latency import request_records
from pdjax.scheduling.policies import POLICIES
from pdjax.workloads import lengths as lengths_module
from pdjax.workloads.lengths import Fixed

pytestmark = pytest.mark.quick
SILENT = Progress(io.StringIO())
ROOT = pathlib.Path(__file__).resolve().parents[2]
LLAMA = ROOT / "configs" / "llama3_8b_a100.py"
SLO = SloConfig(ttft_s=1.0, tpot_s=0.05)


def small(*overrides: str, **changes) -> ExperimentConfig:
  """Two pools with short prompts."""
  config = load_config(LLAMA, ["workload.arrivals=poisson", *overrides])
  lengths = dataclasses.replace(
    config.workload.lengths, prompt_tokens=(64, 512), output_tokens=(4, 24)
  )
  workload = dataclasses.replace(config.workload, lengths=lengths)
  return dataclasses.replace(config, **{"workload": workload, "slo": SLO, **changes})


def asked(out: pathlib.Path, config: ExperimentConfig | None = None, target=None) -> Asked:
  return Asked(
    config=config or small(),
    target=target or Attainment(),
    out=out,
    requests_per_device=15,
    least_s=0.0,
    tolerance=0.4,
  )


def a_probe(rate_rps: float = 5.0, half: str | None = None, **changes) -> Probe:
  config = small(**{"strategies": ("chunked",), **changes})
  workload = dataclasses.replace(config.workload, num_requests=30)
  return Probe(config=dataclasses.replace(config, workload=workload), rate_rps=rate_rps, half=half)


class Counting:
  """Simulates, and keeps what it was asked for."""

  def __init__(self, fails=lambda probe: False, most: float = float("inf")):
    self.probes: list[Probe] = []
    self._fails, self._most = fails, most

  def __call__(self, probe: Probe):
    if len(self.probes) >= self._most:
      raise KeyboardInterrupt
    if self._fails(probe):
      raise ValueError("a fault of ours")
    self.probes.append(probe)
    return simulate(probe)


def outcome_at(probe: Probe, highest_rps: float) -> Outcome:
  """That of a run at the probe's rate which passes up to `highest_rps`."""
  met = float(probe.rate_rps <= highest_rps)
  values = dict.fromkeys((f.name for f in dataclasses.fields(Outcome)), 1.0 - met)
  return Outcome(
    **values
    | dict(rate_rps=probe.rate_rps, num_requests=probe.config.workload.num_requests, num_failed=0)
    | dict(attainment=met, attainment_ttft=met, attainment_tpot=met, queue_p50_s=0.0)
    | dict(caveats=(), extrapolated=())
  )


def driver(out: pathlib.Path, simulate=simulate, sweep=None) -> Driver:
  return Driver(sweep or Serial(), ProbeCache(out / "probes.jsonl"), Progress(), simulate)


# Probes -------------------------------------------------------------------------------------------


def test_at_all_rates_the_same_requests_come_only_faster_or_slower(tmp_path):
  slow, fast = (
    set_up(check(a_probe(rate).at_rate, tmp_path), Progress()).requests for rate in (2.0, 8.0)
  )
  assert [(r.num_prompt_tokens, r.sampling) for r in slow] == [
    (r.num_prompt_tokens, r.sampling) for r in fast
  ]
  assert [r.arrival_s for r in slow] == pytest.approx([4 * r.arrival_s for r in fast], abs=1e-7)


@pytest.mark.once
@pytest.mark.parametrize("arrivals", ["poisson", "gamma"])
@pytest.mark.parametrize("name", ["Mix", "Quantiles", "Uniform", "LogNormal", "Sampled"])
def test_fewer_requests_are_the_first_of_more(tmp_path, name, arrivals):
  """Whatever the pools and the rate: so what is compared differs by what it is, not by its draw."""
  workload = dataclasses.replace(small(f"workload.arrivals={arrivals}").workload)
  tokens = {
    "Quantiles": ((0, 5), (0.5, 40), (1, 300)),
    "Uniform": (5, 300),
    "LogNormal": (40, 90, 300),
  }
  if name == "Sampled":
    path = tmp_path / "lengths.csv"
    rows = "\n".join(f"{5 + i},{3 + i}" for i in range(50))
    path.write_text(f"num_prefill_tokens,num_decode_tokens\n{rows}\n")
    workload = dataclasses.replace(workload, trace=str(path))
  elif name != "Mix":
    family = getattr(lengths_module, name)
    lengths = family(prompt_tokens=tokens[name], output_tokens=tokens[name])
    workload = dataclasses.replace(workload, lengths=lengths)

  def drawn(num_requests: int, strategy: str) -> list[tuple]:
    config = small(
      strategies=(strategy,), workload=dataclasses.replace(workload, num_requests=num_requests)
    )
    requests = set_up(check(Probe(config=config, rate_rps=2.0).at_rate, tmp_path), SILENT).requests
    assert len(requests) == num_requests
    return [(r.arrival_s, r.num_prompt_tokens, r.sampling.max_tokens) for r in requests]

  most = drawn(DRAWN + 40, "continuous")
  assert len({row[1:] for row in most}) > 20
  for num_requests in (1, 30, DRAWN + 1):
    assert drawn(num_requests, "chunked") == most[:num_requests]


def test_a_trace_is_sped_up_to_the_rate(tmp_path):
  path = tmp_path / "trace.csv"
  rows = [f"{0.5 * i},{100 + i},5" for i in range(40)]
  path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]))
  probe = a_probe(rate_rps=8.0)
  workload = dataclasses.replace(probe.config.workload, trace=str(path))
  probe = dataclasses.replace(probe, config=dataclasses.replace(probe.config, workload=workload))
  requests = set_up(check(probe.at_rate, tmp_path), Progress()).requests
  assert len(requests) == 30, "of the trace, as many as a probe has"
  assert [r.arrival_s for r in requests] == pytest.approx([0.125 * i for i in range(30)], abs=1e-7)
  assert simulate(probe).rate_rps == 8.0


@pytest.mark.once
def test_a_half_alone_is_at_least_as_good_as_beside_the_other():
  pools = dict(num_devices=2, strategies=())
  for rate in (5.0, 60.0):
    both = simulate(a_probe(rate, pools="prefill,decode", **pools))
    prefill = simulate(a_probe(rate, "prefill", pools="prefill,decode@instant", **pools))
    decode = simulate(a_probe(rate, "decode", pools="prefill@instant,decode", **pools))
    assert prefill.attainment_ttft >= both.attainment_ttft
    assert prefill.ttft_p50_s == pytest.approx(both.ttft_p50_s, rel=0.2), "prefill is not its own"
    # A half is not free: its first tokens and its gaps take what steps take.
    assert prefill.ttft_p50_s > 0.005 and decode.tpot_p50_s > 0.005
    assert decode.ttft_p50_s == 0.0 and prefill.tpot_p50_s is None


def test_what_is_instant_waits_for_no_link_between_its_devices():
  pools = "prefill:tp8@instant,decode:tp8"
  config = small(pools=pools, num_devices=16, strategies=(), link="10gbe", tp_link="10gbe")
  world = unloaded(config).world
  instant, real = (world.step_time(s.group) for s in config.pools_of(pools))
  prompt = count_slices(prefill_starts=[0], prefill_tokens=[755], num_emitted=1)
  assert instant(prompt) < 1e-5 < 1e-2 < real(prompt)
  assert "instant" not in " ".join(world.caveats)


def test_devices_of_a_node_share_its_way_out(tmp_path):
  """KV caches go over the NVLink of each device, or all over the one link of the node."""

  def copy_s(tp: int, link: str) -> float:
    pools = f"prefill:tp{tp},decode:tp{tp}"
    config = small(pools=pools, num_devices=2 * tp, strategies=(), link=link)
    workload = dataclasses.replace(config.workload, num_requests=1)
    probe = Probe(config=dataclasses.replace(config, workload=workload), rate_rps=1.0)
    experiment, log = set_up(check(probe.at_rate, tmp_path), SILENT), EventLog()
    serve_strategy(experiment, pools, log, SILENT)
    (record,) = request_records(log).values()
    return record.copy_s

  latency_s = LINKS["25gbe"].latency_s
  assert copy_s(4, "25gbe") - latency_s == pytest.approx(copy_s(1, "25gbe") - latency_s, rel=1e-6)
  latency_s = LINKS["nvlink"].latency_s
  assert 4 * (copy_s(4, "nvlink") - latency_s) == pytest.approx(
    copy_s(1, "nvlink") - latency_s, rel=1e-2
  )


@pytest.mark.parametrize("times", ["shipped", "profiled"])
@pytest.mark.parametrize("system", ["distserve", "vllm"])
def test_published_step_times_by_name_are_those_that_are_validated(system, times):
  name = "_".join(
    ["distserve", *["vllm"] * (system == "vllm"), *["profiled"] * (times != "shipped")]
  )
  validated = distserve._forms(system, shipped=times == "shipped")
  (spec,) = parse_pools("mixed:tp2")
  assert validated(spec) == LATENCY[name](
    distserve.MODEL, HARDWARE["a100"], spec.group.tp, spec.pp, LINKS["nvlink"]
  )


def a_probe_of(config_changes=None, **changes) -> Probe:
  return dataclasses.replace(a_probe(**(config_changes or {})), **changes)


def test_the_key_of_a_probe_is_of_all_that_it_depends_on(tmp_path, monkeypatch):
  path = tmp_path / "trace.csv"
  head = "num_prefill_tokens,num_decode_tokens\n"

  def traced(text: str) -> Probe:
    path.write_text(head + text)
    workload = dataclasses.replace(a_probe().config.workload, trace=str(path))
    return a_probe(workload=workload)

  key = a_probe().key()
  assert key == a_probe().key()
  keys = {
    key,
    a_probe(rate_rps=5.1).key(),
    a_probe_of(half="decode").key(),
    a_probe(model="llama2-7b").key(),
    a_probe(link="25gbe").key(),
    a_probe(tp_link="25gbe").key(),
    traced("5,5\n").key(),
    traced("5,6\n").key(),
  }
  assert len(keys) == 8
  faster = dataclasses.replace(HARDWARE["a100"], peak_bytes_per_s=3e12)
  with monkeypatch.context() as patch:
    patch.setitem(HARDWARE, "a100", faster)
    assert a_probe().key() != key, "the device behind the name changed"
  slower = dataclasses.replace(LINKS["nvlink"], bytes_per_s=1e9)
  with monkeypatch.context() as patch:
    patch.setitem(LINKS, "nvlink", slower)
    assert a_probe().key() != key, "the link behind the name changed"
  monkeypatch.setattr(probe_module, "code_version", lambda: "other code")
  assert a_probe().key() != key


def test_the_key_of_a_probe_is_of_a_policy_that_stands_in_a_config_file(tmp_path, monkeypatch):
  path = tmp_path / "mine.py"
  keys = set()
  for budget in (64, 96):
    path.write_text(f"""
from configs.llama3_8b_a100 import get_config
from pdjax.scheduling.policies import POLICIES, PolicySpec

def mine(step):
  step.tokens_left = {budget}
  step.admit()

POLICIES["mine"] = PolicySpec(policy=mine, chunks=True, mixes=True)
""")
    monkeypatch.setitem(POLICIES, "mine", None)  # and taken away again
    load_config(path)
    scheduler = dataclasses.replace(a_probe().config.scheduler, policy="mine")
    keys.add(a_probe(scheduler=scheduler).key())
  assert len(keys | {a_probe().key()}) == 3


def test_the_code_that_a_probe_depends_on_has_its_latency_models_and_their_tables(
  tmp_path, monkeypatch
):
  def version() -> str:
    return probe_module.code_version.__wrapped__()

  for name in ("configs", "pdjax", "experiments"):
    shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
  before = version()
  monkeypatch.setattr(probe_module, "ROOT", tmp_path)
  assert version() == before
  versions = {before}
  for name in ("configs/latency.py", "configs/linear.py", "pdjax/sim/roofline.py"):
    with (tmp_path / name).open("a") as file:
      file.write("# changed\n")
    versions.add(version())
  monkeypatch.setattr(importlib.metadata, "version", lambda package: f"another {package}")
  versions.add(version())
  assert len(versions) == 5


# Driving ------------------------------------------------------------------------------------------


def test_a_resumed_search_runs_only_what_is_missing(tmp_path):
  simulated = Counting()
  first = StrategiesGoal(asked(tmp_path))
  first.run(driver(tmp_path, simulated), Progress())
  assert len(simulated.probes) == sum(len(s.outcomes) for s in first.searches) > 6
  again = Counting()
  second = StrategiesGoal(asked(tmp_path))
  second.run(driver(tmp_path, again), Progress())
  assert not again.probes, "known probes were run again"
  assert second.report() == first.report()

  path = tmp_path / "probes.jsonl"
  lines = path.read_text().splitlines()
  path.write_text("\n".join([*lines[:-2], lines[-1][:40]]))  # one lost, one cut off
  third = StrategiesGoal(asked(tmp_path))
  third.run(driver(tmp_path, again), Progress())
  assert len(again.probes) == 2
  assert third.report() == first.report()
  assert len(ProbeCache(path)) == len(lines)


def test_searches_that_ask_for_the_same_share_it(tmp_path):
  def twin() -> RateSearch:
    return RateSearch("it", a_probe(), Attainment(), start_rps=20.0, tolerance=0.4)

  simulated, twins = Counting(), [twin(), twin(), twin()]
  both = driver(tmp_path, simulated)
  both.run(twins[:2])
  assert len(simulated.probes) == len(twins[0].outcomes) and twins[0].bound is not None
  both.run(twins[2:])
  assert len(simulated.probes) == len(twins[0].outcomes)
  assert len({t.bound for t in twins}) == 1 and twins[1].outcomes == twins[2].outcomes


@pytest.mark.once
def test_an_interrupted_search_reports_and_goes_on(tmp_path, monkeypatch, capsys):
  def run(simulate) -> tuple[int, dict]:
    monkeypatch.setattr(carrying_out, "Driver", functools.partial(Driver, simulate=simulate))
    goal = StrategiesGoal(asked(tmp_path))
    prepared = search.Prepared(
      name="goodput", goal=goal, config=small(), out=tmp_path, sweep=Serial()
    )
    return search.run(prepared), json.loads((tmp_path / "search.json").read_text())

  simulated = Counting(most=4)
  status, data = run(simulated)
  assert status == 130 and data["interrupted"] and data["num_probes"]["simulated"] == 4
  assert "interrupted" in capsys.readouterr().out
  rest = Counting()
  status, data = run(rest)
  assert status == 0 and not data["interrupted"]
  assert not {p.key() for p in rest.probes} & {p.key() for p in simulated.probes}
  assert all(s["bound"]["passed_rps"] for s in data["searches"])
  out = capsys.readouterr().out
  assert data["verdict"] in out and "search.json" in out


def test_two_processes_find_what_one_finds(tmp_path):
  reports = []
  for name, sweep in (("one", Serial()), ("two", Processes(2))):
    (tmp_path / name).mkdir()
    with contextlib.closing(sweep):
      goal = StrategiesGoal(asked(tmp_path / name, small(strategies=("continuous", "chunked"))))
      goal.run(driver(tmp_path / name, sweep=sweep), Progress())
    reports.append(goal.report())
  assert reports[0] == reports[1]
  assert all(s["bound"]["passed_rps"] for s in reports[0][1]["searches"])


def test_a_probe_that_fails_is_named_and_the_others_go_on(tmp_path, capsys):
  goal = StrategiesGoal(asked(tmp_path))
  failing = Counting(fails=lambda probe: probe.strategy == "chunked")
  goal.run(driver(tmp_path, failing), Progress())
  of_name = {s.name: s for s in goal.searches}
  assert "a fault of ours" in of_name["chunked"].failure.message
  assert of_name["continuous"].passed_rps and of_name["disaggregated"].passed_rps
  assert "chunked at" in capsys.readouterr().err
  text, data = goal.report()
  assert "failed: ValueError: a fault of ours" in text
  assert json.dumps(data, allow_nan=False)


# Capacity and goodput -----------------------------------------------------------------------------


def found_rps(tmp_path, config: ExperimentConfig, target) -> float:
  one = make_search(asked(tmp_path, config, target), "it", config)
  driver(tmp_path).run([one])
  return one.passed_rps or 0.0


def test_a_capacity_has_as_many_requests_as_come_in_half_an_hour_and_no_more_than_asked(tmp_path):
  config, seen = small(strategies=("chunked",)), Counting()
  published = dataclasses.replace(
    asked(tmp_path, config, Stalls(itl_s=0.001)), num_requests=40, most_s=1800.0
  )
  driver(tmp_path, seen).run([make_search(published, "it", config)])
  for probe in seen.probes:
    assert probe.config.workload.num_requests == min(40, math.ceil(1800 * probe.rate_rps))
  assert len({probe.config.workload.num_requests for probe in seen.probes}) == 2


@pytest.mark.parametrize("falls", [False, True])
def test_what_is_found_holds_in_longer_runs_or_is_searched_again(tmp_path, falls):
  """Here pools serve less the longer a run is: 10 a second, and more by 1,000 over its requests."""
  seen = []

  def served(probe: Probe) -> Outcome:
    seen.append(probe)
    num_requests = probe.config.workload.num_requests
    return outcome_at(probe, 10.0 + (1000.0 / num_requests if falls else 0.0))

  config = small(strategies=("chunked",))
  careful = dataclasses.replace(
    asked(tmp_path, config), num_requests=100, confirms=True, tolerance=0.05
  )
  one = make_search(careful, "it", config)
  driver(tmp_path, served).run([one])
  *_, last = one.long_runs
  assert one.is_confirmed and " holds in 3 draws" in found(one)
  assert last.num_requests == LONGER * one.outcomes[-1].num_requests
  assert last.rate_rps == pytest.approx(one.passed_rps / 1.05)
  assert one.passed_rps / 1.05 <= 10.0 + (1000.0 / last.num_requests if falls else 0.0)
  assert bool(one.earlier) == falls and one.num_probes == len(seen)
  seeds = [
    p.config.workload.seed for p in seen if p.config.workload.num_requests == last.num_requests
  ]
  assert len(set(seeds[-NUM_DRAWS:])) == NUM_DRAWS, "the runs are of the same requests"


def test_what_no_longer_run_holds_is_said(tmp_path):
  config = small(strategies=("chunked",))
  careful = dataclasses.replace(asked(tmp_path, config), num_requests=100, confirms=True)
  one = make_search(careful, "it", config)
  falling = lambda probe: outcome_at(probe, 3000.0 / probe.config.workload.num_requests)  # noqa: E731
  driver(tmp_path, falling).run([one])
  assert one.is_over and not one.is_confirmed and "does NOT hold" in found(one)


def test_what_a_reader_must_know_of_step_times_is_told(tmp_path):
  config = small(strategies=("chunked",), hardware="b200")
  one = make_search(asked(tmp_path, config), "it", config)

  def extrapolating(probe: Probe) -> Outcome:
    outcome = simulate(probe)
    return dataclasses.replace(outcome, extrapolated=(f"beyond at {probe.rate_rps:.4g}",))

  driver(tmp_path, extrapolating).run([one])
  told = caveats_of([one])
  *of_all, beyond = told
  assert any("step times of b200 are those of its data sheet" in text for text in of_all)
  assert beyond == f"it at {one.passed_rps:.4g}/s: beyond at {one.passed_rps:.4g}"
  assert len(set(told)) == len(told), "the same is told twice"
  assert len(caveats_of([one] * 9)) == len(of_all) + 4, "a line for each of many"


@pytest.mark.once
def test_a_tighter_slo_leaves_less_capacity(tmp_path):
  config = small(strategies=("chunked",))
  rates = [found_rps(tmp_path, config, Stalls(itl_s=itl_s)) for itl_s in (0.2, 0.04, 0.022)]
  assert rates == sorted(rates, reverse=True) and rates[0] > 1.5 * rates[-1] > 0
  waits = [found_rps(tmp_path, config, Stalls(itl_s=0.2, queue_s=q)) for q in (2.0, 0.001)]
  assert waits[0] > waits[1]


def test_more_requests_in_time_are_asked_for_at_a_lower_rate(tmp_path):
  config = small(strategies=("continuous",))
  rates = [found_rps(tmp_path, config, Attainment(share=share)) for share in (0.5, 0.9, 1.0)]
  assert rates == sorted(rates, reverse=True) and rates[0] > rates[-1] > 0


def test_slos_that_nothing_can_meet_are_told_with_what_there_is(tmp_path):
  goal = StrategiesGoal(asked(tmp_path, small(slo=SloConfig(ttft_s=1e-4, tpot_s=0.05))))
  simulated = Counting()
  goal.run(driver(tmp_path, simulated), Progress())
  assert len(simulated.probes) == 3 * len(goal.searches), "it went on though nothing can pass"
  text, data = goal.report()
  assert data["verdict"].startswith("Nothing reaches it")
  assert "TTFT p90 is" in text and "(SLO 0.0001 s)" in text


def test_slos_that_nobody_gave_are_those_of_the_devices(tmp_path):
  config = with_slo(small(slo=SloConfig(ttft_s=7.0)))
  assert (
    config.slo.ttft_s == 7.0 and config.slo.tpot_s == unloaded(small(slo=SloConfig())).slo.tpot_s
  )


# Placement ----------------------------------------------------------------------------------------


@pytest.mark.once
def test_every_candidate_for_a_placement_can_run_and_the_best_is_chosen(tmp_path):
  goal = PlacementGoal(
    asked(tmp_path), Nodes(num_nodes=1, devices_per_node=3), affinity="low", node_link="25gbe"
  )
  goal.run(driver(tmp_path), Progress())
  (_, together), *_ = goal.searches.items()
  passed = [s for s in together if s.passed_rps is not None]
  assert goal.placement.num_devices <= 3 and passed
  best = max(passed, key=lambda s: s.per_device_rps)
  assert goal.placement.pools.startswith(best.name)
  assert goal.baseline.num_devices <= goal.placement.num_devices
  text, data = goal.report()
  (node,) = data["placement"]["nodes"]
  for role in ("prefill", "decode"):
    stages = split_layers(32, getattr(goal.placement, role).pp)
    assert node[role] == [list(layers) for layers in stages]
  assert goal.placement.pools in text and goal.baseline.name in text
  assert json.dumps(data, allow_nan=False)


def density_rps(config: ExperimentConfig, seed: int) -> float:
  """Requests a second and device that pools of this kind serve here: drawn."""
  (strategy,) = config.strategy_names
  kinds = {(s.role, s.group.tp, s.pp, s.policy or "") for s in config.pools_of(strategy)}
  text = f"{seed} {sorted(kinds)} {config.scheduler.token_budget}"
  return 0.5 * 16 ** random.Random(text).random()


def by_density(seed: int, favourites: Sequence[str] = ()) -> Callable[[Probe], Outcome]:
  """As if all pools of a kind served that much; of `favourites` more than any other."""

  def served(probe: Probe) -> Outcome:
    pools = re.sub(r"\d+x", "", probe.strategy)
    rate_rps = 20.0 if pools in favourites else density_rps(probe.config, seed)
    specs = [s for s in probe.config.pools_of(probe.strategy) if probe.half in (None, s.role)]
    return outcome_at(probe, rate_rps * sum(len(s.devices) for s in specs))

  return served


def place(out: pathlib.Path, served, *sizes: int, **options) -> PlacementGoal:
  """Placed on so many nodes of so many devices."""
  goal = PlacementGoal(
    dataclasses.replace(asked(out), tolerance=0.05),
    Nodes(num_nodes=sizes[0], devices_per_node=sizes[1]),
    **dict(affinity="low", node_link="25gbe") | options,
  )
  goal.run(driver(out, served), Progress())
  return goal


@pytest.mark.once
@pytest.mark.parametrize("seed", range(3))
def test_the_best_is_found_though_most_are_only_held_against_another(tmp_path, seed):
  goal = place(tmp_path, by_density(seed), 2, 4)
  (units,) = goal.candidates().values()
  assert len(units) > WAVE and sum(s.is_beaten for own in goal.searches.values() for s in own) > 5
  assert goal.final.per_device_rps >= max(density_rps(c.config, seed) for c in units) / 1.05**2
  num_devices = goal.placement.num_devices
  colocated = [
    c.weight * c.thing[0].num_devices * density_rps(c.config, seed)
    for c in goal._colocated(num_devices)
  ]
  assert goal.baseline.passed_rps / num_devices >= max(colocated) / 1.05**2


@pytest.mark.once
def test_nodes_are_filled_with_units_and_with_colocated_pools(tmp_path):
  goal = place(tmp_path, by_density(0, ["prefill,decode", "mixed:prefill_first"]), 2, 4)
  assert goal.placement.pools == "4xprefill,4xdecode"
  assert goal.baseline.template.strategy == "8xmixed:prefill_first"
  assert goal.final.num_devices == goal.baseline.num_devices == 8


@pytest.mark.once
def test_units_that_the_nodes_do_not_hold_are_told(tmp_path):
  """Units of three stay inside nodes of five: two nodes hold two, ten devices would hold three."""
  served = by_density(0, ["prefill:tp2,decode"])
  for rate_rps, count, is_told in ((100.0, 2, False), (150.0, 3, True)):
    goal = place(tmp_path, served, 2, 5, rate_rps=rate_rps, baselines=False)
    assert goal.placement.pools == f"{count}xprefill:tp2,{count}xdecode"
    assert ("2 nodes of 5 devices do not hold it: only 2 x" in goal.verdict()) == is_told


@pytest.mark.once
def test_to_fill_a_cluster_the_rate_of_every_shape_is_known(tmp_path):
  goal = place(tmp_path, by_density(1), 2, 4, affinity="high", baselines=False)
  halves = [s for what, own in goal.searches.items() if what != "all pools" for s in own]
  assert all(search.passed_rps for search in halves)
  many = place(tmp_path, by_density(1), 2, 4, affinity="high", baselines=False, rate_rps=100.0)
  assert any(s.is_beaten for own in many.searches.values() for s in own)
  assert "2 nodes of 4 devices do not hold it." in many.verdict()


def test_shapes_without_step_times_are_no_candidates(tmp_path):
  """DistServe published OPT-13B on one, two and four devices a stage."""
  config = small("workload.length_scale=4", model="opt-13b", latency="distserve")
  cluster = Nodes(num_nodes=1, devices_per_node=8)
  goal = PlacementGoal(asked(tmp_path, config), cluster, affinity="high", node_link="25gbe")
  assert {shape.tp for shape in goal.shapes} == {1, 2, 4}
  assert "are no candidates, as latency=distserve does not know them" in goal.report()[0]
  config = dataclasses.replace(config, model="opt-175b")
  with pytest.raises(ValueError, match="unknown linear model 'distserve opt-175b"):
    PlacementGoal(asked(tmp_path, config), cluster, affinity="low", node_link="25gbe")


@pytest.mark.parametrize(
  ("options", "message"),
  [(dict(rate_rps=-1.0), "rate_rps=-1.0 must be positive"), (dict(most_pools=0), "most_pools=0")],
)
def test_numbers_out_of_range_are_refused_before_anything_runs(tmp_path, options, message):
  with pytest.raises(ValueError, match=message):
    place(tmp_path, None, 1, 2, **options)


@pytest.mark.once
@pytest.mark.parametrize("affinity", ["low", "high"])
def test_no_candidate_is_larger_than_memory(tmp_path, affinity):
  """OPT-66B's weights need two A100s: what has fewer is refused when it is set up, not tried."""
  config = small("workload.length_scale=4", model="opt-66b")
  cluster = Nodes(num_nodes=2, devices_per_node=4)
  goal = PlacementGoal(asked(tmp_path, config), cluster, affinity=affinity, node_link="25gbe")
  assert Shape() not in goal.shapes and Shape(tp=2) in goal.shapes
  with pytest.raises(ValueError, match="does not fit on a100"):
    unloaded(with_pools(config, "prefill,decode:tp2"))
  candidates = [c for own in goal.candidates().values() for c in own]
  assert candidates
  for candidate in candidates:
    unloaded(candidate.config)


def test_a_pool_that_cannot_hold_the_longest_request_is_no_candidate(tmp_path):
  """The cache of OPT-13B holds some 50,000 tokens on one A100, as its weights are in the way."""
  config = small(model="opt-13b")
  lengths = dataclasses.replace(config.workload.lengths, long_prompt_tokens=(90_000, 90_000))
  config = dataclasses.replace(
    config, workload=dataclasses.replace(config.workload, lengths=lengths)
  )
  cluster = Nodes(num_nodes=1, devices_per_node=4)
  goal = PlacementGoal(asked(tmp_path, config), cluster, affinity="low", node_link="25gbe")
  assert Shape() not in goal.shapes and Shape(tp=2) in goal.shapes


def test_links_between_nodes_are_taken_by_what_crosses_them(tmp_path):
  def links(affinity: str) -> set[tuple[str, str, str]]:
    goal = PlacementGoal(
      asked(tmp_path),
      Nodes(num_nodes=2, devices_per_node=2),
      affinity=affinity,
      node_link="25gbe",
    )
    configs = [c.config for own in goal.candidates().values() for c in own]
    return {(c.link, c.tp_link, c.pp_link) for c in configs}

  # KV caches stay inside nodes; only pipelines cross. Alone, decode pools get them from anywhere.
  assert links("low") == {("nvlink", "nvlink", "nvlink"), ("nvlink", "nvlink", "25gbe")}
  assert links("high") == {("25gbe", "nvlink", "nvlink"), ("25gbe", "nvlink", "25gbe")}


@pytest.mark.once
def test_algorithm_1_counts_pools_for_the_rate(tmp_path):
  goal = PlacementGoal(
    asked(tmp_path),
    Nodes(num_nodes=1, devices_per_node=2),
    affinity="high",
    node_link="25gbe",
    rate_rps=90.0,
    baselines=False,
  )
  goal.run(driver(tmp_path), Progress())
  alone = {s.name: s.passed_rps for own in goal.searches.values() for s in own}
  for role, count in (
    ("prefill", goal.placement.num_prefill),
    ("decode", goal.placement.num_decode),
  ):
    shape = getattr(goal.placement, role)
    name = f"{role} tp{shape.tp}" + (f" pp{shape.pp}" if shape.pp > 1 else "")
    assert (count - 1) * alone[name] < 90.0 <= count * alone[name]


@pytest.mark.parametrize(
  ("model", "cluster", "affinity", "expected"),
  [
    ("opt-175b", (1, 2), "low", ["opt-175b fits no placement on 1 x 2 x a100", "weights"]),
    ("opt-66b", (1, 2), "low", ["2 x a100 cannot hold a prefill and a decode pool"]),
    ("opt-66b", (4, 1), "low", ["no node of 1 x a100", "--affinity=high"]),
    ("llama3-8b", (1, 4), "middle", ["affinity='middle'", "low, high"]),
  ],
)
def test_what_cannot_be_placed_is_told_at_once(tmp_path, model, cluster, affinity, expected):
  config = small("workload.length_scale=4", model=model)
  with pytest.raises(ValueError) as raised:
    PlacementGoal(
      asked(tmp_path, config), Nodes(num_nodes=cluster[0], devices_per_node=cluster[1]),
      affinity=affinity, node_link="25gbe",
    )  # fmt: skip
  for part in expected:
    assert part in str(raised.value)


# Budget -------------------------------------------------------------------------------------------


def budget_goal(out: pathlib.Path, itl_s: float = 0.06, **changes) -> BudgetGoal:
  config = small(**dict(strategies=("chunked",)) | changes)
  return BudgetGoal(dataclasses.replace(asked(out, config, Stalls(itl_s=itl_s)), tolerance=0.05))


def test_the_longest_step_has_all_rows_decoding_and_a_chunk_at_the_end_of_a_prompt(tmp_path):
  """By hand: contexts of 1,000 and half of 200; of 256 tokens 128 are left, behind 872."""
  workload = dataclasses.replace(
    small().workload, lengths=Fixed(prompt_tokens=1000, output_tokens=200)
  )
  goal = budget_goal(tmp_path, workload=workload)
  counts = StepCounts(
    num_prefill_tokens=128,
    num_prefill_pairs=sum(range(873, 1001)),
    num_prefill_keys=1000,
    num_decodes=128,
    num_decode_keys=128 * 1100,
    num_emitted=129,
    num_prefills=1,
  )
  config = small(strategies=("chunked",), workload=workload)
  world, (spec, *_) = unloaded(config).world, config.pools_of("chunked")
  assert goal.step_s[256] == pytest.approx(world.step_time(spec.group)(counts), rel=1e-9)
  steps_s = list(goal.step_s.values())
  assert all(budget % TILE == 0 for budget in goal.step_s) and steps_s == sorted(steps_s)


@pytest.mark.once
@pytest.mark.parametrize("best", [128, 512, 768, 4096])
def test_budgets_are_tried_until_the_capacity_falls(tmp_path, best):
  """Whether or not their longest step is within the target."""
  goal = budget_goal(tmp_path)
  within = [b for b, step_s in goal.step_s.items() if step_s <= 0.06]
  assert 0 < len(within) < len(goal.step_s) and max(within) < 768

  def served(probe: Probe) -> Outcome:
    budget = probe.config.scheduler.token_budget
    return outcome_at(probe, 20.0 * min(best / budget, budget / best))

  goal.run(driver(tmp_path, served), Progress())
  text, data = goal.report()
  assert f"token_budget={best} " in data["verdict"]
  tried = sorted(goal.searches)
  above = [b for b in goal.step_s if b > max(best, max(within))][:1]
  assert tried == [b for b in goal.step_s if b <= max([best, *within, *above])]
  assert ("a larger one may serve more" in data["verdict"]) == (best == 4096)
  assert text.count("not served") == len(goal.step_s) - len(tried)


@pytest.mark.once
def test_budgets_that_cannot_advance_all_rows_are_left_out(tmp_path):
  cache = dataclasses.replace(small().cache, num_rows=200)
  scheduler = dataclasses.replace(small().scheduler, token_budget=512)
  goal = budget_goal(tmp_path, cache=cache, scheduler=scheduler)
  assert min(goal.step_s) == 256
  assert "budgets below the 200 rows of a pool are left out" in goal.report()[0]


def test_budgets_are_of_one_strategy_and_a_target_out_of_reach_is_told(tmp_path):
  with pytest.raises(ValueError, match="one strategy"):
    BudgetGoal(asked(tmp_path, small(), Stalls(itl_s=0.1)))
  goal = budget_goal(tmp_path, itl_s=1e-4)
  goal.run(driver(tmp_path), Progress())
  assert list(goal.searches) == [128], "larger ones are no faster"
  assert "Nothing reaches it" in goal.report()[1]["verdict"]


# Replanning ---------------------------------------------------------------------------------------


def drifting() -> list[Seen]:
  """Two windows of short prompts, then two of long ones, each of 10 s."""
  return [Seen(0.25 * i, 100 if i < 80 else 3000, 40 if i < 80 else 4) for i in range(161)]


def replan(out: pathlib.Path, requests, **options) -> ReplanGoal:
  return ReplanGoal(
    asked(out),
    requests,
    Nodes(num_nodes=1, devices_per_node=3),
    **dict(affinity="low", node_link="25gbe", width_s=10.0, threshold=0.3, least_requests=20)
    | options,
  )


@pytest.mark.once
def test_a_drift_makes_another_search_and_both_placements_are_judged_by_the_new_traffic(tmp_path):
  goal = replan(tmp_path, drifting())
  goal.run(driver(tmp_path), Progress())
  first, second = goal.changes
  assert first.window.start_s == 0.0 and second.window.start_s == 20.0
  assert {d.name for d in second.drifts} == {"mean_prompt_tokens", "mean_output_tokens"}
  kept, best = second.kept, second.goal.final
  assert kept.template.strategy == first.placement.pools
  workloads = [s.template.config.workload for s in (kept, best)]
  assert len({dataclasses.replace(own, num_requests=None) for own in workloads}) == 1
  text, data = goal.report()
  assert [c["kept_rps"] for c in data["changes"]] == [None, kept.passed_rps]
  assert first.placement.pools in text and second.placement.pools in text
  lengths = (tmp_path / "window-20-30.csv").read_text().splitlines()
  assert set(lengths[1:]) == {"3000,4"} and len(lengths) == 41


@pytest.mark.once
def test_traffic_that_stays_keeps_its_placement(tmp_path):
  goal = replan(tmp_path, [Seen(0.25 * i, 100, 40) for i in range(161)])
  goal.run(driver(tmp_path), Progress())
  assert len(goal.changes) == 1 and "no drift" in goal.report()[0]
  with pytest.raises(ValueError, match="there is no drift to see"):
    replan(tmp_path, drifting(), least_requests=1000)


def test_traffic_that_all_but_ends_is_a_drift(tmp_path):
  """Forty requests in each of two windows, then four: enough to see the rate, not the lengths."""
  busy, rest = [Seen(7.0 + 0.25 * i, 100, 40) for i in range(80)], [30.0, 31.0, 33.0, 36.0, 38.0]
  goal = replan(tmp_path, [*busy, *(Seen(at_s, 3000, 4) for at_s in rest)])
  goal.run(driver(tmp_path, lambda probe: outcome_at(probe, 9.0)), Progress())
  first, second = goal.changes
  assert first.window.start_s == 7.0 and first.window.rate_rps == 4.0
  assert [d.name for d in second.drifts] == ["rate_rps"] and second.window.rate_rps == 0.4
  lengths = (tmp_path / "window-27-37.csv").read_text().splitlines()
  assert set(lengths[1:]) == {"100,40"}, "it was placed for lengths of four requests"


def test_a_recording_may_be_changed_as_it_is_read(tmp_path):
  path = tmp_path / "trace.csv"
  rows = [f"{r.arrival_s},{r.prompt_tokens},{r.output_tokens}" for r in drifting()]
  path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]) + "\n")
  workload = dataclasses.replace(
    small().workload, trace=str(path), arrivals="trace", trace_speed=2.0, trace_spread_s=0.1
  )
  faster = [Seen(r.arrival_s / 2, *r[1:]) for r in drifting()]
  goal = ReplanGoal(
    asked(tmp_path, small(workload=workload)),
    faster,
    Nodes(num_nodes=1, devices_per_node=3),
    **dict(affinity="low", node_link="25gbe", width_s=5.0, threshold=0.3, least_requests=20),
  )
  goal.run(driver(tmp_path, lambda probe: outcome_at(probe, 9.0)), Progress())
  assert len(goal.changes) == 2
  assert goal.changes[0].goal.final.passed_rps == pytest.approx(9.0, rel=0.4)


@pytest.mark.parametrize(
  ("options", "message"),
  [(dict(threshold=-1.0), "threshold=-1.0"), (dict(most_changes=0), "most_changes=0")],
)
def test_a_drift_has_a_threshold(tmp_path, options, message):
  with pytest.raises(ValueError, match=message):
    replan(tmp_path, drifting(), **options)


# The program --------------------------------------------------------------------------------------


def start(*argv: str, cwd) -> subprocess.CompletedProcess:
  command = [sys.executable, "-m", "experiments.search", *argv]
  env = os.environ | {"PYTHONPATH": str(ROOT)}
  return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
  ("argv", "expected"),
  [
    (["--goal=placment"], ["unknown goal 'placment'", "did you mean placement"]),
    (["--goal=placement", "--devices_per_node=0"], ["devices_per_node=0 must be at least 1"]),
    (["--goal=placement", "--rate_rps=-1"], ["rate_rps=-1.0 must be positive"]),
    (["--goal=replan"], ["either --trace=FILE, with arrivals, or --events=FILE"]),
  ],
)
def test_wrong_input_is_one_message(tmp_path, argv, expected):
  done = start(*argv, cwd=tmp_path)
  assert done.returncode == 2 and done.stderr.startswith("error: ")
  assert "Traceback" not in done.stderr and done.stderr.count("\n") == 1
  assert all(part in done.stderr for part in expected)
  assert not list(tmp_path.iterdir())


def test_the_program_writes_what_it_prints(tmp_path):
  pytest.importorskip("matplotlib")
  argv = ["--goal=capacity", "--strategies=chunked", "--num_requests=10"]
  done = start(*argv, "--tolerance=0.5", "--out=out", "--workload=humaneval", cwd=tmp_path)
  assert done.returncode == 0, done.stderr
  data = json.loads((tmp_path / "out" / "search.json").read_text())
  assert data["verdict"] in done.stdout
  assert "10 requests in every probe, or those of 1800 s" in done.stdout
  assert "TTFT" not in done.stdout and data["caveats"][0] in done.stdout
  assert (
    done.stderr.count("against")
    == data["num_probes"]["simulated"]
    == sum(len(s["outcomes"]) for s in data["searches"])
  ), "not a line for each probe"
  assert (tmp_path / "out" / "frontier.png").read_bytes().startswith(b"\x89PNG")


def test_a_search_over_has_nothing_more_to_probe():
  one = RateSearch("it", a_probe(), Attainment(), start_rps=1.0, tolerance=0.5)
  while (probe := one.next_probe()) is not None:
    one.take(simulate(probe))
  assert one.is_over and one.next_probe() is None
  assert one.outcomes[0].rate_rps == 1.0
