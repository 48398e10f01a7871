"""Searches find what there is to find, say what they tried, and never try it twice."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys

import pytest

from configs.hardware import HARDWARE, LINKS
from experiments import search
from experiments.program import Progress
from experiments.searching import probe as probe_module
from experiments.searching.budgeting import TILE, BudgetGoal
from experiments.searching.drive import Driver, ProbeCache, RateSearch
from experiments.searching.goals import Asked, StrategiesGoal, make_search, with_pools, with_slo
from experiments.searching.placing import PlacementGoal
from experiments.searching.probe import Probe, simulate, unloaded
from experiments.searching.replanning import ReplanGoal
from experiments.serving import check, set_up
from experiments.sweep import Processes, Serial
from pdjax.analysis.placement import Nodes, Shape
from pdjax.analysis.replan import Seen
from pdjax.analysis.targets import Attainment, Stalls
from pdjax.config import ExperimentConfig, SloConfig, load_config

pytestmark = pytest.mark.quick
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


def a_probe_of(config_changes=None, **changes) -> Probe:
  return dataclasses.replace(a_probe(**(config_changes or {})), **changes)


def test_the_key_of_a_probe_is_of_all_that_it_depends_on(tmp_path, monkeypatch):
  path = tmp_path / "trace.csv"
  head = "num_prefill_tokens,num_decode_tokens\n"

  def traced(text: str) -> Probe:
    path.write_text(head + text)
    probe_module._digest.cache_clear()
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


def test_an_interrupted_search_reports_and_goes_on(tmp_path, monkeypatch, capsys):
  def run(simulate) -> tuple[int, dict]:
    monkeypatch.setattr(search, "Driver", functools.partial(Driver, simulate=simulate))
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
  assert len(simulated.probes) == 2 * len(goal.searches), "it went on though nothing can pass"
  text, data = goal.report()
  assert data["verdict"].startswith("Nothing reaches it")
  assert "TTFT p90 is" in text and "(SLO 0.0001 s)" in text


def test_slos_that_nobody_gave_are_those_of_the_devices(tmp_path):
  config = with_slo(small(slo=SloConfig(ttft_s=7.0)))
  assert (
    config.slo.ttft_s == 7.0 and config.slo.tpot_s == unloaded(small(slo=SloConfig())).slo.tpot_s
  )


# Placement ----------------------------------------------------------------------------------------


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
  assert data["placement"]["nodes"] == [{"prefill": [[0, 32]], "decode": [[0, 32]]}]
  assert goal.placement.pools in text and goal.baseline.name in text
  assert json.dumps(data, allow_nan=False)


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


def test_a_budget_is_tiles_whose_longest_step_is_within_the_target(tmp_path):
  config = small(strategies=("chunked",))
  goal = BudgetGoal(asked(tmp_path, config, Stalls(itl_s=0.06)))
  assert all(budget % TILE == 0 for budget in goal.step_s)
  steps_s = list(goal.step_s.values())
  assert steps_s == sorted(steps_s)
  assert all((goal.step_s[b] <= 0.06) == (b in goal.budgets) for b in goal.step_s)
  assert 0 < len(goal.budgets) < len(goal.step_s)
  wider = BudgetGoal(asked(tmp_path, config, Stalls(itl_s=0.12)))
  assert set(wider.budgets) > set(goal.budgets)
  goal.run(driver(tmp_path), Progress())
  _, data = goal.report()
  best = max(data["capacity_rps"].values())
  assert (
    f"token_budget={[b for b, c in data['capacity_rps'].items() if c == best][-1]} "
    in (data["verdict"])
  )


def test_budgets_are_of_one_strategy_with_a_target_in_reach(tmp_path):
  with pytest.raises(ValueError, match="one strategy"):
    BudgetGoal(asked(tmp_path, small(), Stalls(itl_s=0.1)))
  with pytest.raises(ValueError, match=r"no budget meets an ITL of 0\.0001 s"):
    BudgetGoal(asked(tmp_path, small(strategies=("chunked",)), Stalls(itl_s=1e-4)))


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


def test_a_drift_makes_another_search_and_both_placements_are_judged_by_the_new_traffic(tmp_path):
  goal = replan(tmp_path, drifting())
  goal.run(driver(tmp_path), Progress())
  first, second = goal.changes
  assert first.window.start_s == 0.0 and second.window.start_s == 20.0
  assert {d.name for d in second.drifts} == {"mean_prompt_tokens", "mean_output_tokens"}
  kept, best = second.kept, second.goal.final
  assert kept.template.strategy == first.placement.pools
  assert kept.template.config.workload == best.template.config.workload or (
    kept.num_devices != best.num_devices
  )
  text, data = goal.report()
  assert [c["kept_rps"] for c in data["changes"]] == [None, kept.passed_rps]
  assert first.placement.pools in text and second.placement.pools in text
  lengths = (tmp_path / "window-20-30.csv").read_text().splitlines()
  assert set(lengths[1:]) == {"3000,4"} and len(lengths) == 41


def test_traffic_that_stays_keeps_its_placement(tmp_path):
  goal = replan(tmp_path, [Seen(0.25 * i, 100, 40) for i in range(161)])
  goal.run(driver(tmp_path), Progress())
  assert len(goal.changes) == 1 and "no drift" in goal.report()[0]
  with pytest.raises(ValueError, match="there is no drift to see"):
    replan(tmp_path, drifting(), least_requests=1000)


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
  argv = ["--goal=capacity", "--strategies=chunked", "--requests_per_device=5", "--least_s=0"]
  done = start(*argv, "--tolerance=0.5", "--out=out", "--workload=humaneval", cwd=tmp_path)
  assert done.returncode == 0, done.stderr
  data = json.loads((tmp_path / "out" / "search.json").read_text())
  assert data["verdict"] in done.stdout
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
