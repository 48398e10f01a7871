"""Figures of Sarathi-Serve: closed forms, deployments, and rules that can come out either way."""

from __future__ import annotations

import dataclasses
import io
import pathlib

import pytest

from configs.models import MODELS
from experiments.program import ROOT, Progress
from experiments.reproduction import published_sarathi as published
from experiments.reproduction import sarathi_2023
from experiments.reproduction import sarathi_capacity as capacity
from experiments.reproduction import sarathi_frontier as frontier
from experiments.reproduction import sarathi_serving as serving
from experiments.reproduction import sarathi_steps as steps
from experiments.reproduction import sarathi_timelines as timelines
from experiments.reproduction.bench import Bench, Point, simulate
from experiments.reproduction.figure import HOLDS, IN_PART, NOT
from experiments.reproduction.reduce import outpouring, tails
from experiments.reproduction.sarathi import FIGURES
from experiments.reproduction.sarathi_systems import (
  BUDGETS,
  DEPLOYMENTS,
  as_system,
  chunked_s,
  decode_terms,
  judged_ratio,
  judged_share,
  latency_of,
  mixed_terms,
  prefill_terms,
  rule_budget,
  rule_slos_s,
)
from experiments.sweep import make_sweep
from pdjax.config import load_config, override

pytestmark = pytest.mark.quick

CONFIGS = sorted((ROOT / "configs" / "sarathi").glob("*.py"))


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
  """Quick, without the folders of published data."""
  out = tmp_path_factory.mktemp("bench")
  none = out / "absent"
  sweep = make_sweep(jobs=1, ray=None)
  yield Bench(out=out, sweep=sweep, progress=Progress(io.StringIO()), quick=True, data_dir=none,
              trace_dir=none)  # fmt: skip
  sweep.close()


# Single steps -------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [1, 30, 600])
def test_intensity_is_flops_over_bytes_of_the_matrices(num_tokens):
  model, tp = MODELS["llama2-70b"], 4
  d, f, kv = model.d_model, model.d_ff // tp, model.num_kv_heads * model.head_dim // tp
  shapes = [(d, d // tp + 2 * kv), (d // tp, d), (d, 2 * f), (f, d)]
  flops = sum(2 * num_tokens * a * b for a, b in shapes)
  num_bytes = sum(2 * (a * b + num_tokens * (a + b)) for a, b in shapes)
  assert steps.intensity(num_tokens, tp) == pytest.approx(flops / num_bytes)


def test_the_roofline_is_near_the_measured_matrices_away_from_tile_edges():
  for tp, table in published.FIG6_VIDUR_MS.items():
    for n, ms in table.items():
      if n not in (256, 264, 4096):
        assert steps._linear_ms(n, tp) == pytest.approx(ms, rel=0.1), (tp, n)


def test_jumps_are_found_where_the_time_rises_within_a_tile():
  table = {8: 1.0, 16: 2.0, 120: 5.0, 128: 5.1, 136: 6.0, 144: 6.1, 512: 20.0, 1024: 40.0}
  assert [n for n, _ in steps._jumps(table)] == [128]


def test_chunks_of_a_whole_prompt_are_the_prompt():
  latency = latency_of("yi-34b", "a100", 2)
  whole_s = prefill_terms(latency, 2048).total_s
  assert chunked_s(latency, 2048, 2048) == whole_s
  assert chunked_s(latency, 2048, 512) > whole_s


def test_parts_of_a_step_add_up_and_a_mixed_one_is_more_than_either():
  latency = latency_of("mistral-7b", "a100")
  terms = mixed_terms(latency, 512, 32, 1024)
  assert sum(steps._parts_ms(terms)) == pytest.approx(1e3 * terms.total_s)
  alone = prefill_terms(latency, 512).total_s, decode_terms(latency, 32, 1024).total_s
  assert max(alone) < terms.total_s < sum(alone)


def test_slos_by_the_rule_are_multiples_of_each_other_and_of_one_stage_near_the_published():
  for name, deployment in DEPLOYMENTS.items():
    strict_s, relaxed_s = rule_slos_s(deployment.config())
    assert relaxed_s == pytest.approx(5 * strict_s)
    if name in ("Mistral-7B", "Yi-34B"):
      assert strict_s == pytest.approx(deployment.slos_s()[0], rel=0.2)


def test_a_budget_by_the_rule_grows_with_the_slo():
  config = DEPLOYMENTS["Falcon-180B"].config()
  found = [rule_budget(config, slo_s, "sharegpt") for slo_s in (1e-3, 0.4, 1.0, 100.0)]
  assert found[0] == BUDGETS[0] and found[-1] == BUDGETS[-1]
  assert found == sorted(found) and len(set(found)) == 4


@pytest.mark.parametrize("name", ["fig3", "fig4", "fig5", "fig6", "fig9", "fig14", "yi-steps",
                                  "tab1", "tab2", "tab3", "2023-chunks"])  # fmt: skip
def test_figures_of_steps_need_no_file_and_judge_every_claim(bench, name):
  (figure,) = [figure for figure in FIGURES if figure.name == f"sarathi/{name}"]
  found = figure.make(bench)
  assert len(found.judged) == len(figure.claims) and found.rows
  assert all(judged.why.endswith(".") for judged in found.judged)


def test_published_operators_are_those_of_the_file():
  path = ROOT.parent / "shared/data/measured/vidur/mlp_a100_Llama-2-70b-hf.csv"
  if not path.is_file():
    pytest.skip("no published timings beside this project, in shared/data/measured")
  for tp, table in published.FIG6_VIDUR_MS.items():
    measured = steps._measured_ms(path, tp)
    for n, ms in table.items():
      assert measured[n] == pytest.approx(ms, abs=0.06)


# Deployments --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_serves_a_handful_of_requests(path: pathlib.Path):
  config = override(load_config(path), ["workload.num_requests=4"])
  strategy = config.strategy_names[-1]
  if config.strategies:
    config = dataclasses.replace(config, strategies=(strategy,))
  found = simulate(Point(config=config, reduce=tails))
  assert found["ttft_p50_s"] > 0 and found["itl_p99_s"] > 0


def test_every_config_is_of_a_figure_and_every_figure_s_config_is_there():
  named = {ROOT / path for figure in FIGURES for path in figure.configs}
  assert named == set(CONFIGS)


def test_orca_has_the_step_that_its_rows_can_fill_and_the_others_one_request():
  config, parts = DEPLOYMENTS["Yi-34B"].config(), DEPLOYMENTS["Yi-34B"].parts
  orca = as_system(config, parts, "Orca", rows=16, dataset="arxiv")
  vllm = as_system(config, parts, "vLLM", dataset="arxiv")
  assert orca.scheduler.prefill_budget == 16 * 16_384 and orca.cache.num_rows == 16
  assert vllm.scheduler.prefill_budget == vllm.cache.max_len == 16_384
  assert vllm.num_devices == 2
  with pytest.raises(KeyError):
    as_system(config, parts, "Triton")


def test_published_budgets_go_with_published_slos():
  own = {
    (model, slo): capacity.system_config(model, "arxiv", "Sarathi", slo).scheduler.token_budget
    for model in DEPLOYMENTS
    for slo in capacity.SLOS
  }
  assert {own[model, "strict"] for model in DEPLOYMENTS} == {512}
  assert own["LLaMA2-70B", "relaxed"] == 1536 and own["Yi-34B", "relaxed"] == 2048


def test_the_curve_of_tokens_has_all_of_them():
  config = override(load_config(ROOT / "configs/sarathi/pd_2023.py"), ["workload.num_requests=5"])
  config = dataclasses.replace(config, strategies=("chunked",))
  found = simulate(Point(config=config, reduce=outpouring))
  assert found["num_tokens"] == 5 * 64
  assert (len(found["token_s"]) - 1) * found["every"] < found["num_tokens"]
  assert found["token_s"] == sorted(found["token_s"])
  assert 0 < found["stall_s"] < found["end_s"]


# Timelines ----------------------------------------------------------------------------------------


def test_idle_time_of_stages_is_told_apart_by_what_the_other_stage_works_at():
  def idle(before, after, other):
    """Of a stage that idles for half a second beside a step of the other stage."""
    works = [
      timelines.Work(0, 0.0, 1.0, before),
      timelines.Work(0, 1.5, 2.0, after),
      timelines.Work(1, 0.5, 1.5, other),
    ]
    return {name: s for name, s in timelines.bubbles(works, 10.0).items() if s}

  assert idle("prefill", "decode", "mixed") == {"PB1": 0.5}
  assert idle("decode", "decode", "prefill") == {"PB2": 0.5}
  assert idle("decode", "mixed", "decode") == {"PB2": 0.5}
  assert idle("decode", "decode", "decode") == {"PB3": 0.5}


def test_idle_time_beyond_the_end_is_not_counted():
  works = [timelines.Work(0, 0.0, 1.0, "decode"), timelines.Work(0, 9.0, 9.5, "decode"),
           timelines.Work(1, 0.0, 9.0, "decode")]  # fmt: skip
  assert timelines.bubbles(works, 3.0) == {"PB1": 0.0, "PB2": 0.0, "PB3": 2.0}


def test_figure_7_holds_by_runs_of_the_schedulers(bench):
  assert all(judged.verdict == HOLDS for judged in timelines.fig7(bench).judged)


def test_chunks_leave_few_bubbles(bench):
  _, left, _ = timelines.fig8(bench).judged
  assert left.verdict == HOLDS


def test_a_scheduler_that_stalls_is_not_taken_for_sarathi():
  latency = latency_of("mistral-7b", "a100")
  log = timelines._serve("prefill_first", "mixed", "mistral-7b", latency, timelines.FIG7)
  records = dict.fromkeys(timelines.POLICIES, timelines.request_records(log))
  stalls, ft, sarathi = timelines.judge_fig7(records, 0.011, 0.045)
  assert (stalls.verdict, ft.verdict, sarathi.verdict) == (HOLDS, NOT, NOT)


def test_bubbles_that_stay_do_not_hold():
  orca = {"PB1": 1.0, "PB2": 1.0, "PB3": 0.0}
  kinds, left = timelines.judge_fig8(orca, {"Orca": 0.4, "Sarathi-Serve": 0.4})
  assert (kinds.verdict, left.verdict) == (IN_PART, NOT)
  assert timelines.judge_fig8(orca, {"Orca": 0.4, "Sarathi-Serve": 0.1})[1].verdict == HOLDS


# Rules --------------------------------------------------------------------------------------------


def test_a_gain_is_judged_by_how_much_of_the_published_there_is():
  verdicts = [judged_ratio(ours, 4.0, "x").verdict for ours in (5.1, 5.0, 3.2, 3.1, 1.0, None)]
  assert verdicts == [IN_PART, HOLDS, HOLDS, IN_PART, NOT, NOT]


def test_a_share_of_cases_names_those_that_fail():
  assert judged_share({"a": True}, "It").verdict == HOLDS
  half = judged_share({"a": True, "b": False}, "It")
  assert half.verdict == IN_PART and "not so: b" in half.why
  assert judged_share({"a": False, "b": False, "c": True}, "It").verdict == NOT


def _capacities(sarathi=2.0, vllm=1.0, orca=None):
  """Orca's as published where it is not given."""
  found = {}
  for dataset, share in (("sharegpt", 1.0), ("arxiv", 0.3)):
    for slo, loosened in zip(capacity.SLOS, (1.0, 1.5)):
      case = capacity.Case("Yi-34B", dataset, slo, capacity.PUBLISHED)
      found[case, "Sarathi"] = share * sarathi
      found[case, "vLLM"] = share * vllm * loosened
      of_orca = share * orca * loosened if orca else share * sarathi / capacity._orca(case)
      found[case, "Orca"] = of_orca
  return found


def test_claims_about_capacities_can_hold_and_fail():
  good, bad = _capacities(), _capacities(sarathi=1.0, orca=2.0)
  rules = (capacity.judge_order, capacity.judge_loosening, capacity.judge_baselines,
           capacity.judge_orca)  # fmt: skip
  assert [rule(good).verdict for rule in rules] == [HOLDS] * 4
  assert capacity.judge_order(bad).verdict == NOT
  assert capacity.judge_orca(bad).verdict == NOT
  assert capacity.judge_baselines(bad).verdict == IN_PART  # lower on arXiv, yes
  steady = {key: rate if key[0].slo == "strict" else 3 * rate for key, rate in good.items()
            if key[1] == "Sarathi"}  # fmt: skip
  assert capacity.judge_loosening(good | steady).verdict == NOT
  assert capacity.judged_gain(good, "Yi-34B", "strict", "vLLM", 2.0).verdict == HOLDS
  assert capacity.judged_gain(good, "Yi-34B", "strict", "vLLM", 4.0).verdict == IN_PART


def test_slos_by_the_rule_are_what_is_judged_where_they_are_searched():
  case = capacity.Case("Falcon-180B", "sharegpt", "strict", capacity.PUBLISHED)
  by_rule = case._replace(source=capacity.BY_RULE)
  found = {(c, "Sarathi"): 1.0 for c in (case, by_rule)}
  assert capacity.judged_cases(found) == [by_rule]
  assert list(capacity.slos_of("Falcon-180B")) == [capacity.PUBLISHED, capacity.BY_RULE]
  assert list(capacity.slos_of("Yi-34B")) == [capacity.PUBLISHED]


def _frontier(vllm, small, large):
  """Requests a second by how strict the SLO is: the first, the last."""
  found = {}
  for model, slos_s in frontier.FIG12_SLOS_S.items():
    for i, slo_s in enumerate((slos_s[0], slos_s[-1])):
      for rows in (32, 64, 128):
        found[model, f"vLLM {rows}", slo_s] = vllm[i]
      found[model, "Sarathi 512", slo_s] = small[i]
      found[model, "Sarathi 2048", slo_s] = large[i]
  return found


def test_claims_of_figure_12_can_hold_and_fail():
  good = frontier.judge_fig12(_frontier((0.3, 0.7), (1.1, 1.2), (0.2, 1.2)))
  assert [judged.verdict for judged in good] == [HOLDS] * 4
  bad = frontier.judge_fig12(_frontier((1.0, 1.2), (1.0, 1.2), (1.0, 0.5)))
  assert [judged.verdict for judged in bad] == [HOLDS, NOT, NOT, NOT]


def test_claims_of_figure_1b_can_hold_and_fail():
  flat, steep = {0.5: 0.3, 1.0: 0.3}, {0.5: 0.5, 1.0: 1.5}
  good = serving.judge_fig1b({"vLLM": steep, "Sarathi": flat})
  assert [judged.verdict for judged in good] == [HOLDS, HOLDS]
  bad = serving.judge_fig1b({"vLLM": flat, "Sarathi": steep})
  assert [judged.verdict for judged in bad] == [NOT, NOT]


def test_claims_of_table_4_hold_by_the_published_numbers_and_fail_turned_round():
  def tails_of(order):
    return {
      (name, dataset): dict(zip(("ttft_p50_s", "itl_p99_s"), published.TABLE4[own][i]))
      for name, own in zip(serving.ABLATION, order)
      for i, dataset in enumerate(serving.DATASETS)
    }

  names = list(serving.ABLATION)
  assert [judged.verdict for judged in serving.judge_tab4(tails_of(names))] == [HOLDS, HOLDS]
  turned = serving.judge_tab4(tails_of(names[::-1]))
  assert [judged.verdict for judged in turned] == [IN_PART, NOT]


def test_claims_of_the_p_to_d_sweep_can_hold_and_fail():
  def verdicts(gains):
    """Of gains by P:D, by sequences a step."""
    rates = {
      (name, rows, ratio): 100.0 * (gain if name == "chunked" else 1.0)
      for rows, own in gains.items()
      for ratio, gain in own.items()
      for name in ("chunked", *sarathi_2023.BEFORE_2023)
    }
    return [judged.verdict for judged in sarathi_2023.judge_2023(rates)]

  peaks = {18: {1: 1.05, 14: 1.27, 50: 1.02}, 6: {1: 1.05, 14: 1.1, 50: 1.33}}
  assert verdicts(peaks) == [HOLDS] * 3
  low = {1: 1.05, 14: 1.2, 50: 1.02}  # less with 6 sequences than published, and at another ratio
  assert verdicts(peaks | {6: low}) == [IN_PART, IN_PART, HOLDS]
  flat = {rows: {1: 1.05, 14: 1.01, 50: 0.9} for rows in peaks}
  assert verdicts(flat) == [NOT] * 3
