"""Advice: every kind tuned on equal devices, a choice, what flips it, and a config that runs."""

from __future__ import annotations

import dataclasses
import pathlib

import pytest

from experiments.program import Progress
from experiments.searching.advising import (
  SAME,
  AdviceGoal,
  Setting,
  config_source,
  vllm_commands,
)
from experiments.searching.drive import Driver, ProbeCache
from experiments.searching.goals import Asked
from experiments.sweep import Serial
from experiments.traffic import read_traffic
from pdjax.analysis.placement import Shape
from pdjax.analysis.targets import Attainment, Outcome, Stalls
from pdjax.config import (
  CacheConfig,
  ExperimentConfig,
  SloConfig,
  WorkloadConfig,
  load_config,
  parse_pools,
)
from pdjax.workloads.lengths import Fixed

pytestmark = pytest.mark.quick

CONFIG = ExperimentConfig(
  model="llama3-8b",
  hardware="a100",
  backend="sim",
  workload=WorkloadConfig(lengths=Fixed(prompt_tokens=1000, output_tokens=20)),
  cache=CacheConfig(layout="paged", num_rows=16),
  slo=SloConfig(ttft_s=1.0, tpot_s=0.05),
)


def _goal(config=CONFIG, num_devices=2, target=None) -> AdviceGoal:
  asked = Asked(
    config=config,
    target=target or Attainment(),
    out=pathlib.Path(),
    requests_per_device=20,
    least_s=1.0,
  )
  return AdviceGoal(asked, num_devices=num_devices, quick=True)


def _served(goal: AdviceGoal, out: pathlib.Path, goodput_rps) -> AdviceGoal:
  """As if rates up to `goodput_rps(config)` met the target."""

  def simulate(probe) -> Outcome:
    share = 1.0 if probe.rate_rps <= goodput_rps(probe.config) else 0.0
    values = {f"{m}_p{q}_s": 0.1 for m in ("ttft", "tpot") for q in (50, 90, 99)}
    return Outcome(
      rate_rps=probe.rate_rps,
      num_requests=20,
      num_failed=0,
      attainment=share,
      attainment_ttft=share,
      attainment_tpot=share,
      itl_p99_s=0.1,
      queue_p50_s=0.0,
      **values,
    )

  driver = Driver(Serial(), ProbeCache(out / "probes.jsonl"), Progress(), simulate)
  goal.run(driver, Progress())
  return goal


def _kind(config: ExperimentConfig) -> str:
  policies = {spec.policy for spec in parse_pools(config.pools)}
  return {"prefill_first": "continuous", "sarathi": "chunked"}.get(policies.pop(), "disaggregated")


def _by_kind(**rates):
  """Goodput of all devices; of a unit its share."""
  return lambda config: rates[_kind(config)] * config.num_devices / 2


def test_every_setting_uses_all_devices_and_ratios_come_once():
  settings = _goal(num_devices=4).settings()
  every = [setting for own in settings.values() for setting in own]
  assert {sum(len(s.devices) for s in parse_pools(x.pools)) for x in every} == {4}
  assert len({(x.pools, x.token_budget) for x in every}) == len(every)
  ratios = {x.pools for x in settings["disaggregated"]}
  assert {"1xprefill,3xdecode", "2xprefill,2xdecode", "3xprefill,1xdecode"} <= ratios
  assert "1xprefill:tp2,1xdecode:tp2" in ratios


def test_a_unit_and_its_times_are_all_pools():
  parts = ((Shape(tp=2), "prefill", 1), (Shape(), "decode", 2))
  assert Setting("disaggregated", parts, 3).pools == "3xprefill:tp2,6xdecode"


@pytest.mark.parametrize("best", ["continuous", "chunked", "disaggregated"])
def test_what_serves_most_is_recommended(best, tmp_path):
  rates = dict.fromkeys(("continuous", "chunked", "disaggregated"), 4.0) | {best: 8.0}
  goal = _served(_goal(), tmp_path, _by_kind(**rates))
  assert goal.ranked[0].kind == best
  assert goal.verdict().startswith(f"Use {best}")


def test_of_rates_that_are_the_same_the_simplest_is_recommended(tmp_path):
  rates = _by_kind(continuous=5.0, chunked=5.0 * (1 + SAME / 4), disaggregated=2.0)
  goal = _served(_goal(), tmp_path, rates)
  assert goal.ranked[0].kind == "continuous" and "no worse" in goal.verdict()


def test_it_says_what_flips_the_choice(tmp_path):
  def goodput_rps(config) -> float:
    is_tight = config.slo.tpot_s < 0.05
    rates = dict(continuous=3.0, chunked=6.0, disaggregated=5.0 + 4.0 * is_tight)
    return _by_kind(**rates)(config)

  goal = _served(_goal(), tmp_path, goodput_rps)
  flipped = [flip.what for flip in goal.flips if flip.flips]
  assert flipped == ["TPOT SLO 25 ms"]
  assert "Flips with TPOT SLO 25 ms: then disaggregated serves" in goal.verdict()


def test_where_nothing_passes_it_says_so(tmp_path):
  goal = _served(_goal(), tmp_path, lambda config: 0.0)
  assert not goal.ranked and goal.verdict().startswith("Nothing meets the SLOs")
  assert "The lowest TTFT p90 is 100 ms" in goal.verdict() and "the SLO is 1.00 s" in goal.verdict()


def test_slos_that_no_rate_breaks_decide_nothing(tmp_path):
  goal = _served(_goal(), tmp_path, lambda config: 1e9)
  assert "they decide nothing" in goal.verdict() and not goal.flips
  assert COSTS not in goal.verdict()


def test_a_probe_lasts_several_times_the_ttft_slo():
  config = dataclasses.replace(CONFIG, slo=SloConfig(ttft_s=100.0, tpot_s=5.0))
  assert _goal(config).asked.least_s == 500.0


COSTS = "Disaggregation costs more than it gains here: "
SHORT, LONG = Fixed(prompt_tokens=100, output_tokens=20), CONFIG.workload.lengths
SITUATIONS = {
  "a small model and short prompts on a slow link": dict(
    model="smollm2-135m", lengths=SHORT, link="1gbps"
  ),
  "short prompts": dict(lengths=SHORT, link="nvlink"),
  "a slow link": dict(lengths=LONG, link="1gbps"),
  "short prompts that break the target": dict(lengths=SHORT, link="10gbps", tpot_slo_s=1e-3),
}


def _situation(*, lengths, tpot_slo_s=0.05, **fields) -> ExperimentConfig:
  slo = SloConfig(ttft_s=1.0, tpot_s=tpot_slo_s)
  return dataclasses.replace(CONFIG, workload=WorkloadConfig(lengths=lengths), slo=slo, **fields)


@pytest.mark.parametrize("name", SITUATIONS)
@pytest.mark.parametrize("separate_rps", [0.0, 5.0, 9.0])
def test_separate_pools_that_serve_no_more_cost_more_than_they_gain(name, separate_rps, tmp_path):
  rates = _by_kind(continuous=9.0, chunked=8.0, disaggregated=separate_rps)
  goal = _served(_goal(_situation(**SITUATIONS[name])), tmp_path, rates)
  against = [rule.says for rule in goal.rules if not rule.speaks_for_separation]
  assert against and goal.ranked[0].kind == "continuous"
  (line,) = (line for line in goal.verdict().splitlines() if line.startswith(COSTS))
  assert all(says in line for says in against)
  assert ("at no rate" in line) is (not separate_rps)


@pytest.mark.parametrize("name", SITUATIONS)
def test_separate_pools_that_are_recommended_never_cost_more_than_they_gain(name, tmp_path):
  rates = _by_kind(continuous=4.0, chunked=4.0, disaggregated=5.0)
  goal = _served(_goal(_situation(**SITUATIONS[name])), tmp_path, rates)
  assert goal.ranked[0].kind == "disaggregated" and COSTS not in goal.verdict()


def test_separate_pools_that_serve_less_cost_more_whatever_the_rules_say(tmp_path):
  lengths = Fixed(prompt_tokens=4000, output_tokens=20)
  config = _situation(lengths=lengths, link="nvlink", tpot_slo_s=0.02)
  goal = _goal(config)
  assert all(rule.speaks_for_separation for rule in goal.rules)
  goal = _served(goal, tmp_path, _by_kind(continuous=9.0, chunked=8.0, disaggregated=5.0))
  assert COSTS in goal.verdict()


def test_level_separate_pools_that_no_rule_speaks_against_do_not_cost_more(tmp_path):
  lengths = Fixed(prompt_tokens=4000, output_tokens=20)
  config = _situation(lengths=lengths, link="nvlink", tpot_slo_s=0.02)
  goal = _served(_goal(config), tmp_path, _by_kind(continuous=9, chunked=8, disaggregated=9))
  assert goal.ranked[0].kind == "continuous" and COSTS not in goal.verdict()


def test_a_device_alone_has_no_separate_pools_and_the_advice_says_so(tmp_path):
  goal = _served(_goal(num_devices=1), tmp_path, _by_kind(continuous=3, chunked=2, disaggregated=0))
  assert "Separate pools were not searched: 1 x " in goal.verdict()
  assert "Disaggregated" not in goal.report()[0]


def test_a_kind_that_serves_nothing_may_still_flip_the_choice(tmp_path):
  def goodput_rps(config) -> float:
    rates = dict(continuous=3.0, chunked=6.0, disaggregated=20.0 * (config.link == "nvlink"))
    return _by_kind(**rates)(config)

  goal = _served(_goal(dataclasses.replace(CONFIG, link="10gbps")), tmp_path, goodput_rps)
  assert [setting.kind for setting in goal.ranked] == ["chunked", "continuous"]
  assert [flip.what for flip in goal.flips if flip.flips] == ["link nvlink"]
  assert "Flips with link nvlink: then disaggregated serves" in goal.verdict()


def test_what_nothing_serves_is_said(tmp_path):
  rates = _by_kind(continuous=3.0, chunked=2.0, disaggregated=1.0)
  goal = _served(_goal(), tmp_path, lambda c: rates(c) * (c.slo.ttft_s >= 1.0))
  assert "Nothing meets the SLOs with TTFT SLO 500 ms." in goal.verdict()


def test_longer_prompts_have_room_and_are_scaled_once(tmp_path):
  lengths = Fixed(prompt_tokens=6000, output_tokens=200)
  workload = WorkloadConfig(lengths=lengths, length_scale=2)
  goal = _goal(dataclasses.replace(CONFIG, workload=workload))
  for factor, prompt in ((0.5, 1500), (2.0, 6000), (4.0, 8192 - 100)):
    what, changed = goal._with_prompts(factor)
    assert set(read_traffic(changed).sample(0)) == {(prompt, 100)}
    assert ("at most 8192 tokens" in what) is (factor == 4.0)


def test_the_config_that_it_writes_is_the_one_that_it_means(tmp_path):
  goal = _served(_goal(), tmp_path, _by_kind(continuous=3.0, chunked=2.0, disaggregated=9.0))
  goal.write_config(tmp_path / "advised.py")
  config = load_config(tmp_path / "advised.py")
  assert config.pools == "1xprefill,1xdecode"
  assert config.workload.rate_rps == pytest.approx(
    0.8 * goal.finals[goal.ranked[0]].passed_rps, abs=1e-3
  )
  assert dataclasses.replace(config, workload=CONFIG.workload) == dataclasses.replace(
    goal.config_of(goal.ranked[0]), workload=CONFIG.workload
  )


def test_the_config_of_a_recording_replays_it_at_the_rate(tmp_path):
  trace = tmp_path / "trace.csv"
  rows = [f"{i * 0.1},1000,20" for i in range(40)]
  trace.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]))
  workload = WorkloadConfig(lengths=SHORT, trace=str(trace), trace_limit_s=3.0)
  goal = _goal(dataclasses.replace(CONFIG, workload=workload))
  _served(goal, tmp_path, _by_kind(continuous=3.0, chunked=2.0, disaggregated=1.0))
  goal.write_config(tmp_path / "advised.py")
  config = load_config(tmp_path / "advised.py")
  assert config.workload.rate_rps is None
  rate_rps = 10 * config.workload.trace_speed
  assert rate_rps == pytest.approx(0.8 * goal.finals[goal.ranked[0]].passed_rps, rel=1e-3)
  assert any("Poisson arrivals" in flip.what for flip in goal.flips)


@pytest.mark.parametrize("name", ["llama3_8b_a100", "opt13b_a100", "quickstart", "interference"])
def test_a_config_as_python_is_the_same_config(name, tmp_path):
  root = pathlib.Path(__file__).resolve().parents[2]
  config = load_config(root / "configs" / f"{name}.py")
  path = tmp_path / "config.py"
  path.write_text(config_source(config, "the same"))
  assert load_config(path) == config


def test_the_like_of_it_in_vllm_names_what_differs():
  chunked = Setting("chunked", ((Shape(tp=2), "mixed", 1),), 2, 512)
  line, note = vllm_commands(chunked, CONFIG, 1020)
  assert "router" in note
  assert line.startswith("2 x vllm serve meta-llama/Meta-Llama-3-8B")
  assert "--tensor-parallel-size 2" in line and "--max-num-batched-tokens 512" in line
  parts = ((Shape(), "prefill", 1), (Shape(), "decode", 1))
  pair = vllm_commands(Setting("disaggregated", parts, 1), CONFIG, 1020)
  assert ["kv_producer" in line for line in pair] == [True, False, False]
  assert ["kv_consumer" in line for line in pair] == [False, True, False]
  assert "VLLM_NIXL_SIDE_CHANNEL_PORT" in pair[-1]


def test_vllm_refuses_a_budget_below_its_rows_or_its_longest_request():
  whole = Setting("continuous", ((Shape(), "mixed", 1),), 1)
  for num_rows, longest, budget in ((256, 100, 256), (16, 1020, 1020)):
    cache = dataclasses.replace(CONFIG.cache, num_rows=num_rows)
    line, note = vllm_commands(whole, dataclasses.replace(CONFIG, cache=cache), longest)
    assert f"--no-enable-chunked-prefill --max-num-batched-tokens {budget}" in line
    assert "V1" in note


def test_wrong_input():
  with pytest.raises(ValueError, match="devices=0 must be at least 1"):
    _goal(num_devices=0)
  with pytest.raises(ValueError, match="not capacity"):
    _goal(target=Stalls(itl_s=0.1))
  with pytest.raises(ValueError, match="llama3-70b fits on no pool of 1 x a100"):
    _goal(dataclasses.replace(CONFIG, model="llama3-70b"), num_devices=1)
