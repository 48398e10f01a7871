"""The seed article's numbers and the crossover map: what decides their verdicts and cells."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from types import SimpleNamespace

import numpy as np
import pytest

from experiments.program import ROOT
from experiments.reproduction import crossover, reduce, seed, seed_serving
from experiments.reproduction.bench import Point, simulate
from experiments.reproduction.crossover import CHECKED, MAP_LINKS, MAP_WORKLOADS, TAICHI, Group
from experiments.reproduction.crossover_rates import (
  LEVELS,
  PAIRS,
  Best,
  Cell,
  Run,
  best_of,
  cell_of,
  goodput_rps,
  of_seconds,
  only,
  rates_of,
  sweep_rates,
  targets,
  tuned,
)
from experiments.reproduction.figure import HOLDS, IN_PART, NOT
from pdjax.config import load_config
from pdjax.core.request import Slo

pytestmark = pytest.mark.quick

CONFIGS = [*sorted((ROOT / "configs" / "seed").glob("[a-z]*.py")),
           *sorted((ROOT / "configs").glob("crossover*.py"))]  # fmt: skip
SLO = Slo(ttft_s=1.0, tpot_s=0.1)


def _run(rate_rps: float, share: float, num: int = 100) -> Run:
  """Of which a share is in time."""
  ttft_s = np.where(np.arange(num) < share * num, 0.5, 2.0)
  return Run(rate_rps, ttft_s, np.full(num, 0.05))


def _verdicts(judged) -> list[str]:
  return [own.verdict for own in judged]


# Goodput ------------------------------------------------------------------------------------------


def test_goodput_is_linear_between_the_rates_where_attainment_falls():
  runs = [_run(1, 1.0), _run(2, 0.95), _run(4, 0.85), _run(8, 0.1)]
  assert goodput_rps(runs, SLO) == pytest.approx(3.0)
  assert goodput_rps(reversed(runs), SLO) == pytest.approx(3.0)


def test_goodput_ends_at_the_first_rate_that_fails():
  assert goodput_rps([_run(1, 1.0), _run(2, 0.8), _run(4, 1.0)], SLO) == pytest.approx(1.5)


def test_without_a_rate_that_passes_there_is_no_goodput():
  assert goodput_rps([_run(1, 0.5)], SLO) is None
  assert goodput_rps([], SLO) is None
  assert goodput_rps([_run(1, 1.0), _run(2, 0.9)], SLO) == 2


def test_both_targets_count_and_a_request_of_one_token_has_no_tpot():
  run = Run.of(1.0, {"ttft_us": [500_000, 500_000, None, 2_000_000],
                     "tpot_us": [50_000, 200_000, None, None]})  # fmt: skip
  assert run.attainment(SLO) == 0.25
  assert run.attainment(dataclasses.replace(SLO, tpot_s=0.3)) == 0.5
  assert run.attainment(dataclasses.replace(SLO, ttft_s=3.0)) == 0.5
  assert run.attainment(Slo(ttft_s=1e9, tpot_s=1e9)) == 0.75  # one never came


def test_a_strategy_is_taken_at_its_best_setting():
  runs = {
    ("chunked", "256"): [_run(1, 1.0), _run(2, 0.8)],
    ("chunked", "512"): [_run(1, 1.0), _run(2, 1.0), _run(4, 0.8)],
    ("continuous", "64"): [_run(1, 0.2)],
  }
  best = best_of(runs, SLO)
  assert best["chunked"].how == "512" and best["continuous"] == Best(None)
  assert cell_of(best) == Cell("chunked")
  assert cell_of({"continuous": Best(None)}) == Cell(None)


def test_a_margin_is_over_the_second():
  cell = cell_of({"a": Best(2.0, ""), "b": Best(3.0, ""), "c": Best(1.0, "")})
  assert cell[:2] == ("b", "a") and cell.margin_percent == pytest.approx(50)


def test_a_setting_is_swept_until_it_fails_under_all_targets():
  config = crossover.crossover.get_config()
  asked = []

  class FakeBench:
    def run(self, points):
      found = {}
      for name, point in points.items():
        rate_rps = point.config.workload.rate_rps
        asked.append((name, rate_rps))
        num_late = {"fast": 0, "slow": 50}[name] if rate_rps > 1 else 0
        found[name] = {"ttft_us": [0] * (100 - num_late) + [9_000_000] * num_late,
                       "tpot_us": [0] * 100}  # fmt: skip
      return found

  settings = {name: only(config, "chunked") for name in ("fast", "slow")}
  grids = {"fast": [1.0, 2.0, 4.0], "slow": [1.0, 2.0, 4.0]}
  runs = sweep_rates(FakeBench(), settings, grids, {name: [SLO] for name in settings})
  assert [run.rate_rps for run in runs["fast"]] == [1, 2, 4]
  assert [run.rate_rps for run in runs["slow"]] == [1, 2]
  assert ("slow", 4.0) not in asked


def test_targets_are_multiples_of_what_devices_do_alone():
  config = crossover.crossover.get_config()
  slos = targets(config, 2048)
  assert set(slos) == set(PAIRS) and len(PAIRS) == 9
  firsts = [slos[level, "tight"].ttft_s for level in LEVELS]
  assert firsts[1] == pytest.approx(2 * firsts[0]) and firsts[2] == pytest.approx(4 * firsts[0])
  alone_s = seed_serving.profile_of("llama3-8b", "a100", chunk_tokens=2048).step_s
  assert firsts[0] == pytest.approx(5 * alone_s)
  faster = targets(dataclasses.replace(config, hardware="h100"), 2048)
  assert all(faster[pair].ttft_s < slos[pair].ttft_s for pair in PAIRS)


def test_rates_go_up_by_a_factor():
  assert rates_of(5.0, 0.1, 2.0, 0.8) == pytest.approx([0.5, 1, 2, 4])


def test_a_run_has_the_requests_of_its_seconds_and_no_fewer_than_asked():
  config = crossover.crossover.get_config()
  assert of_seconds(config, 20.0, 10.0, 50).workload.num_requests == 200
  assert of_seconds(config, 2.0, 10.0, 50).workload.num_requests == 50


# Settings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_settings_serve_a_few_requests_under_each_strategy(path: pathlib.Path):
  config = load_config(path)
  config = dataclasses.replace(
    config, workload=dataclasses.replace(config.workload, num_requests=6)
  )
  for name in config.strategy_names:
    found = simulate(Point(config=only(config, name), reduce=reduce.micros))
    assert len(found["ttft_us"]) == 6 and None not in found["ttft_us"]


def test_every_strategy_of_the_map_has_equal_devices_and_several_settings():
  config = crossover.crossover.get_config()
  settings = crossover.map_settings(config, MAP_LINKS, quick=False)
  assert {own.num_devices for own in settings.values()} == {8}
  strategies = [strategy for _, strategy, _ in settings]
  assert all(strategies.count(name) > 1 for name in set(strategies))
  assert {own.link for (link, *_), own in settings.items() if link} == set(MAP_LINKS)
  quick = crossover.map_settings(config, MAP_LINKS, quick=True)
  assert set(quick) <= set(settings)


def test_cells_that_are_checked_are_of_the_map():
  assert all(w in MAP_WORKLOADS and link in MAP_LINKS and p in PAIRS for w, link, p in CHECKED)


def test_taichis_groups_have_four_devices_each():
  config = crossover.crossover_taichi.get_config()
  settings = crossover.taichi_settings(config, Group("h100", 8), quick=False)
  for own in settings.values():
    (name,) = own.strategy_names
    assert own.num_devices == 32 and own.hardware == "h100"
    assert {spec.group.tp for spec in own.pools_of(name)} == {4}


def test_a_tuned_setting_changes_what_it_says_and_nothing_else():
  config = crossover.crossover.get_config()
  own = tuned(config, "chunked", rows=64, token_budget=512)
  assert (own.cache.num_rows, own.scheduler.token_budget) == (64, 512)
  assert own.strategies == ("chunked",) and own.pools is None and own.slo == config.slo


# Verdicts -----------------------------------------------------------------------------------------


def _bests(goodputs_of) -> dict:
  """From the goodputs of whole prompts, chunks and separate pools by link and pair of SLOs."""
  names = (*crossover.SHARED, crossover.SEPARATE)
  return {
    (workload, link, pair): dict(zip(names, map(Best, goodputs_of(link, pair))))
    for workload in MAP_WORKLOADS
    for link in MAP_LINKS
    for pair in PAIRS
  }


def test_the_maps_claims_hold_where_targets_and_link_decide():
  def goodputs(link, pair):
    if pair == ("tight", "loose"):
      return 3.0, 2.0, 1.0
    return (2.0, 3.0, 1.0) if link == "10gbe" else (1.0, 2.0, 3.0)

  assert _verdicts(crossover.judge_map(_bests(goodputs))) == [HOLDS, HOLDS, HOLDS, HOLDS]


def test_the_maps_claims_do_not_hold_where_one_always_wins():
  always_separate = _bests(lambda link, pair: (None, 1.0, 2.0))
  assert _verdicts(crossover.judge_map(always_separate)) == [NOT, HOLDS, NOT, NOT]
  always_chunks = _bests(lambda link, pair: (1.0, 2.0, None))
  assert _verdicts(crossover.judge_map(always_chunks)) == [HOLDS, NOT, NOT, NOT]
  level = _bests(lambda link, pair: (2.0, 2.0, 2.05))
  assert _verdicts(crossover.judge_map(level)) == [NOT, NOT, NOT, NOT]


def test_shared_devices_lead_also_where_chunks_and_whole_prompts_are_level():
  judged = crossover.judge_map(_bests(lambda link, pair: (2.0, 2.0, 1.0)))
  assert judged[0].verdict == HOLDS and "sharegpt +100 %" in judged[0].why


def test_out_of_reach_is_nobodys_win():
  judged = crossover.judge_map(_bests(lambda link, pair: (None, None, None)))
  assert _verdicts(judged) == [NOT, NOT, NOT, NOT]


def test_taichis_orders_are_judged_by_size():
  as_published = {Group("a100", 20): dict(TAICHI)}
  assert _verdicts(crossover.judge_taichi(as_published)) == [HOLDS] * 3
  turned = {pair: (b, a) for pair, (a, b) in TAICHI.items()}
  assert _verdicts(crossover.judge_taichi({Group("a100", 20): turned})) == [NOT] * 3
  some = as_published | {Group("a100", n): turned for n in (8, 12)}
  assert _verdicts(crossover.judge_taichi(some)) == [IN_PART] * 3
  most = {Group("a100", 20): dict(TAICHI) | {(6.0, 0.1): (16, 99)}}  # one serves most requests
  assert _verdicts(crossover.judge_taichi(most)) == [HOLDS, HOLDS, NOT]
  level = {Group("a100", 20): {pair: (90.0, 91.0) for pair in TAICHI}}
  assert _verdicts(crossover.judge_taichi(level)) == [NOT] * 3


def test_the_ridge_is_judged_by_both_phases():
  prefill, decode = {128: 100.0, 512: 300.0}, {1: 1.0, 32: 30.0}
  assert _verdicts(seed.judge_ridge(153.02, prefill, decode)) == [HOLDS, HOLDS]
  assert _verdicts(seed.judge_ridge(295.0, prefill, decode | {256: 400.0})) == [NOT, IN_PART]
  assert _verdicts(seed.judge_ridge(153.0, {512: 9.0}, {32: 200.0}))[1] == NOT


def test_intensity_is_judged_with_and_without_attention():
  assert _verdicts(seed.judge_intensity(1.0, 1000, 0.2, {"a": 0.2})) == [HOLDS, HOLDS]
  assert _verdicts(seed.judge_intensity(1.0, 100, 0.2, {"a": 0.05})) == [IN_PART, IN_PART]
  assert _verdicts(seed.judge_intensity(9.0, 100, 0.5, {"a": 0.5})) == [NOT, NOT]


def test_kv_is_judged_by_bytes_and_by_the_copy():
  right = dict(seed.KV_BYTES)
  assert _verdicts(seed.judge_kv(right, {"a": 0.05})) == [HOLDS, HOLDS]
  wrong = right | {"llama3-8b": 540e6}
  assert _verdicts(seed.judge_kv(wrong, {"a": 0.5})) == [NOT, IN_PART]
  assert _verdicts(seed.judge_kv(right, {"a": 1.5}))[1] == NOT


def test_utilisation_is_judged_by_its_best_step():
  low, growing, high = {1: 0.01, 256: 0.1}, {1: 0.01, 256: 0.3}, {1: 0.3, 256: 0.5}
  judge = seed.judge_utilisation
  assert _verdicts(judge({"a": 0.95}, {"a": low})) == [HOLDS, HOLDS]
  assert _verdicts(judge({"a": 0.85}, {"a": low, "b": high})) == [IN_PART, IN_PART]
  assert _verdicts(judge({"a": 0.85}, {"a": growing})) == [IN_PART, IN_PART]  # with many rows
  assert _verdicts(judge({"a": 0.6}, {"a": high})) == [NOT, NOT]


def _stalls(longest_s: float) -> dict:
  return {"itl_s": [0.01] * 3 + [longest_s] * 3, "long_ttft_p50_s": 0.2}


def test_a_stall_is_judged_against_the_prefill():
  whole = _stalls(0.16)
  assert _verdicts(seed_serving.judge_stall(0.15, whole, _stalls(0.05))) == [HOLDS, HOLDS]
  assert _verdicts(seed_serving.judge_stall(0.15, whole, _stalls(0.1))) == [HOLDS, IN_PART]
  assert _verdicts(seed_serving.judge_stall(0.9, whole, _stalls(0.16))) == [NOT, NOT]


def _budgets(ttfts_s, itls_s) -> dict:
  return {
    256 * 2**i: {"ttft_p50_s": a, "itl_s": [0, 0, 0, b, b, b]}
    for i, (a, b) in enumerate(zip(ttfts_s, itls_s))
  }


def test_a_budget_trades_one_for_the_other():
  judge = seed_serving.judge_budget
  assert judge("m", _budgets([3, 2, 1], [1, 2, 3])).verdict == HOLDS
  assert judge("m", _budgets([1, 2, 3], [1, 2, 3])).verdict == IN_PART
  assert judge("m", _budgets([1, 2, 3], [3, 2, 1])).verdict == NOT
  assert judge("m", _budgets([3, 2, 2.05], [1, 2, 3])).verdict == HOLDS  # within 5 %


def test_an_upgrade_is_judged_by_the_traffic():
  judge = seed_serving.judge_upgrade
  gains = {
    "arxiv": {"prefill on H100": 2.0, "decode on H100": 1.0},
    "sharegpt": {"prefill on H100": 1.0, "decode on H100": 1.5},
  }
  right = {"prefill": 3.2, "decode": 1.7}
  assert _verdicts(judge(right, gains)) == [HOLDS, HOLDS]
  same = gains | {"sharegpt": gains["arxiv"]}
  assert _verdicts(judge({"prefill": 3.2, "decode": 3.2}, same)) == [IN_PART, IN_PART]
  level = {"arxiv": {"prefill on H100": 1.0, "decode on H100": 1.01}}
  assert _verdicts(judge({"prefill": 1.0, "decode": 1.0}, level)) == [NOT, NOT]
  assert _verdicts(judge(right, {"arxiv": dict.fromkeys(gains["arxiv"])}))[1] == NOT


def _both(shared: float | None, separate: float | None) -> dict[str, Best]:
  return {"shared": Best(shared, ""), "separate": Best(separate, "")}


def test_prompt_lengths_are_judged_by_who_leads():
  judge = seed_serving.judge_lengths
  grows = {128: _both(10, 8), 2048: _both(5, 6), 8192: _both(1, 2)}
  slow = {n: _both(10, 5) for n in grows}
  late = {128: _both(10, 8), 2048: _both(5, 5), 8192: _both(None, 2)}
  assert _verdicts(judge({"10gbe": slow, "hdr200": grows}, late)) == [HOLDS, HOLDS]
  assert _verdicts(judge({"10gbe": slow, "hdr200": slow}, slow)) == [IN_PART, NOT]
  always = {n: _both(1, 2) for n in grows}
  assert _verdicts(judge({"10gbe": slow, "hdr200": always}, always)) == [NOT, IN_PART]
  none = {n: _both(None, None) for n in grows}
  assert _verdicts(judge({"10gbe": none, "hdr200": none}, none)) == [IN_PART, NOT]


@pytest.mark.parametrize("figure", [f for f in seed.FIGURES if f.kind == "analytic"],
                         ids=lambda figure: figure.name)  # fmt: skip
def test_analytic_figures_judge_each_claim(figure):
  found = figure.make(SimpleNamespace(quick=False))
  assert len(found.judged) == len(figure.claims) and found.rows
  assert all(not math.isnan(error) for error in found.errors_percent)


def test_the_article_s_exact_numbers_come_out():
  found = {
    f.name: f.make(SimpleNamespace(quick=True)) for f in seed.FIGURES if f.kind == "analytic"
  }
  assert max(found["seed/ridge"].errors_percent) < 0.1
  assert max(found["seed/kv"].errors_percent) < 1
