"""Mooncake's figures: hit rates by hand, configs that run, verdicts that come out either way."""

from __future__ import annotations

import dataclasses
import pathlib
import types

import pytest

from experiments.reproduction import mooncake, mooncake_cache, mooncake_overload, mooncake_serving
from experiments.reproduction.bench import Point, simulate
from experiments.reproduction.figure import HOLDS, IN_PART, NOT
from experiments.reproduction.mooncake_cache import hits
from experiments.reproduction.mooncake_overload import as_vllm, with_rule, write_simulated
from experiments.reproduction.reduce import mooncake as reduce
from pdjax.config import load_config
from pdjax.workloads.traces import TraceRow, read_trace

pytestmark = pytest.mark.quick
ROOT = pathlib.Path(__file__).parents[2]
TRACES = ROOT.parent / "shared" / "data" / "traces"
CONFIGS = sorted({path for figure in mooncake.FIGURES for path in figure.configs})


def row(*block_ids, last=512):
  tokens = 512 * (len(block_ids) - 1) + last
  return TraceRow(0.0, tokens, 1, 1, block_ids)


# Hit rates ----------------------------------------------------------------------------------------


def test_leading_blocks_count_and_a_block_behind_a_new_one_does_not():
  rows = [row(1, 2, 3), row(1, 2, 4), row(5, 2, 3)]
  assert hits(rows, None).blocks == pytest.approx(2 / 9)


def test_tokens_are_those_of_the_blocks_the_last_of_which_may_be_cut():
  rows = [row(1, 2, last=100), row(1, 2, last=100)]
  assert hits(rows, None) == pytest.approx((2 / 4, 612 / 1224))


def test_the_least_recently_used_goes_first_and_the_end_of_a_prefix_before_its_beginning():
  rows = [row(1, 2), row(3), row(4), row(1, 2)]
  assert hits(rows, 3).blocks == pytest.approx(1 / 6), "2 went for 4; 1 is still there"
  assert hits(rows, 4).blocks == pytest.approx(2 / 6)


def test_rules_give_up_different_blocks():
  """1 was hit and is old, 2 is new and was not; 3 needs room."""
  rows = [row(1), row(1), row(2), row(3), row(1)]
  assert hits(rows, 2, "lfu").blocks == pytest.approx(2 / 5)
  assert hits(rows, 2, "lru").blocks == pytest.approx(1 / 5)


def test_of_a_prompt_longer_than_the_cache_what_fits_is_kept():
  rows = [row(1, 2, 3, 4), row(1, 2, 3, 4)]
  assert hits(rows, 2).blocks == pytest.approx(2 / 8)


@pytest.mark.skipif(not TRACES.is_dir(), reason="no folder of traces beside the checkout")
@pytest.mark.parametrize(("num_blocks", "percent"), [(1000, 8.4), (10_000, 42.4), (None, 64.0)])
def test_hit_rates_of_the_synthetic_trace_are_those_counted_by_others(num_blocks, percent):
  """Counted from the file without this code (README of the folder of traces)."""
  rows = read_trace(TRACES / "mooncake_fast25_synthetic_trace.jsonl.gz").rows
  assert 100 * hits(rows, num_blocks).blocks == pytest.approx(percent, abs=0.06)


# Runs ---------------------------------------------------------------------------------------------


def short(path, **changes):
  config = load_config(ROOT / path)
  workload = dataclasses.replace(config.workload, num_requests=6, seed=3)
  return dataclasses.replace(config, workload=workload, **changes)


@pytest.mark.parametrize("path", CONFIGS)
def test_every_config_serves_a_handful_of_requests(path):
  found = simulate(Point(config=short(path), reduce=reduce))
  assert found["num_ended"] == found["num_requests"] == 6
  assert 0 < found["ttft_s"][0] <= found["ttft_mean_s"] <= found["ttft_s"][100]
  assert 0 < found["busy"]["prefill"] <= 1


def test_vllm_has_the_same_nodes_and_longer_gaps():
  config = short("configs/mooncake/tr_fig12.py")
  ours, theirs = (simulate(Point(config=c, reduce=reduce)) for c in (config, as_vllm(config)))
  assert theirs["tbt_s"][100] > 2 * ours["tbt_s"][100], "prompts stall decodes"
  assert set(theirs["busy"]) == {"mixed"}


def test_every_request_ends_or_is_rejected_before_or_after_its_prefill():
  config = short("configs/mooncake/tr_table3.py")
  workload = dataclasses.replace(config.workload, num_requests=60, rate_rps=40.0)
  config = dataclasses.replace(config, workload=workload)
  found = {
    rule: simulate(Point(config=with_rule(config, rule, 0.0225), reduce=reduce))
    for rule in mooncake_overload.RULES
  }
  for own in found.values():
    assert own["num_ended"] + own["num_rejected"] + own["num_rejected_after_prefill"] == 60
  assert found["after_prefill"]["num_rejected_after_prefill"] > 0
  assert found["early"]["num_rejected_after_prefill"] == 0
  assert found["predicted"]["num_rejected"] > 0


@pytest.mark.parametrize("name", ["mooncake/fig9", "mooncake/fig5", "mooncake/tr-table3"])
def test_without_the_trace_a_figure_is_missing(name, tmp_path):
  (figure,) = (figure for figure in mooncake.FIGURES if figure.name == name)
  bench = types.SimpleNamespace(trace_dir=tmp_path, quick=True, show=print)
  with pytest.raises(FileNotFoundError, match="mooncake_fast25_conversation_trace"):
    figure.make(bench)


def test_half_of_every_simulated_prompt_is_in_common_with_others(tmp_path):
  write_simulated(tmp_path / "a.jsonl", 4096, 400)
  write_simulated(tmp_path / "b.jsonl", 4096, 400)
  assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
  rows = read_trace(tmp_path / "a.jsonl").rows
  assert {len(row.block_ids) for row in rows} == {8}
  firsts = {row.block_ids[:4] for row in rows}
  assert len(firsts) == mooncake_overload.NUM_DOCUMENTS
  assert len({block for row in rows for block in row.block_ids[4:]}) == 4 * 400
  assert hits(rows, None).tokens == pytest.approx(0.5, abs=0.01)
  assert rows[-1].arrival_s == pytest.approx(400, rel=0.2)


# Verdicts -----------------------------------------------------------------------------------------


def verdicts(judge, *cases):
  return [judge(*case).verdict for case in cases]


def test_verdicts_on_orders_and_ratios():
  order = ("a", "b", "c")
  rising, twisted, falling = (
    {"x": dict(zip(order, own))} for own in ((1, 2, 3), (2, 1, 3), (3, 2, 1))
  )
  judge = mooncake_serving.judge_order
  assert verdicts(judge, (rising, order), (twisted, order), (falling, order)) == [
    HOLDS,
    IN_PART,
    NOT,
  ]
  assert judge(rising | {"y": falling["x"]}, order).verdict == IN_PART
  judge = mooncake_serving.judge_ratio
  assert verdicts(judge, ({"x": 1.9}, 2.0), ({"x": 1.9, "y": 1.1}, 2.0), ({"x": 1.0}, 1.1)) == [
    HOLDS,
    IN_PART,
    NOT,
  ]
  assert verdicts(judge, ({"x": 0.9}, 0.5), ({"x": 1.1}, 0.5)) == [IN_PART, NOT]


def test_verdicts_on_bandwidth():
  flat, steep = {24: 3.0, 100: 1.0, 400: 1.0}, {24: 3.1, 100: 3.0, 400: 1.0}
  assert verdicts(mooncake_serving.judge_knee, (flat,), (steep,)) == [HOLDS, NOT]
  assert verdicts(mooncake_serving.judge_below, (flat,), (steep,)) == [HOLDS, NOT]
  assert verdicts(mooncake_serving.judge_rise, (flat, flat), (steep, flat), (steep, steep)) == [
    HOLDS,
    IN_PART,
    NOT,
  ]


def test_verdicts_on_the_best_ratio():
  peak, slope = {5: 0.5, 8: 0.9, 11: 0.6}, {5: 0.5, 8: 0.8, 11: 0.9}
  judge = mooncake_serving.judge_best
  assert verdicts(judge, ({"x": peak},), ({"x": peak, "y": slope},), ({"y": slope},)) == [
    HOLDS,
    IN_PART,
    NOT,
  ]


def test_verdicts_on_hit_rates():
  judge = mooncake_cache.judge_share
  assert verdicts(
    judge,
    ({"conversation": 0.40, "synthetic": 0.47},),
    ({"conversation": 0.30, "synthetic": 0.47},),
    ({"conversation": 0.90, "synthetic": 0.47},),
    ({"conversation": 0.40, "synthetic": 0.52},),  # near the published share, and above a half
  ) == [HOLDS, IN_PART, NOT, NOT]
  blocks = (None, 50_000, 1000)
  good = {"x": {"lru": [0.5, 0.5, 0.3], "lfu": [0.5, 0.4, 0.3], "length": [0.5, 0.4, 0.2]}}
  mixed = {"x": {"lru": [0.5, 0.5, 0.1], "lfu": [0.5, 0.4, 0.3], "length": [0.5, 0.4, 0.2]}}
  bad = {"x": {"lru": [0.5, 0.3, 0.1], "lfu": [0.5, 0.4, 0.3], "length": [0.5, 0.4, 0.2]}}
  cases = [(own, blocks) for own in (good, mixed, bad)]
  assert verdicts(mooncake_cache.judge_rules, *cases) == [HOLDS, IN_PART, NOT]
  assert verdicts(mooncake_cache.judge_saturation, *cases) == [HOLDS, HOLDS, NOT]


def test_gains_are_over_the_better_of_taking_requests_at_once_and_one_by_one():
  one_by_one = mooncake_overload.ONE_BY_ONE
  highest = {
    "Mooncake": {1: 4.0, 2: 4.0, 3: 4.0, 4: None},
    "vLLM": {1: 2.0, 2: 1.0, 3: None, 4: 1.0},
    one_by_one: {1: 1.0, 2: 2.0, 3: None, 4: None},
    "vLLM, prefix cache": {1: 4.0, 2: 4.0, 3: 4.0, 4: 4.0},
  }
  gains = mooncake_overload.gains_percent(highest, (1, 2, 3, 4), {p: [0.5] for p in (1, 2, 3, 4)})
  assert gains == {1: 100.0, 2: 100.0, 3: 700.0, 4: -100.0}


def test_verdicts_on_rejections():
  rising = dict(zip(mooncake_overload.RULES, (0.1, 0.2, 0.3)))
  falling = dict(zip(mooncake_overload.RULES, (0.3, 0.2, 0.1)))
  judge = mooncake_overload.judge_rules
  assert verdicts(
    judge, ({0.1: falling, 0.03: rising},), ({0.1: rising, 0.03: falling},), ({0.1: rising},)
  ) == [HOLDS, IN_PART, NOT]


def test_verdicts_on_gains():
  assert verdicts(mooncake_overload.judge_gain, (80, 75), (20, 75), (0, 75)) == [
    HOLDS,
    IN_PART,
    NOT,
  ]
  assert verdicts(
    mooncake_overload.judge_most, ({1: 500.0, 2: 90.0},), ({1: 1000.0},), ({1: 5.0},)
  ) == [HOLDS, IN_PART, NOT]
  assert verdicts(mooncake_overload.judge_least, ({1: 60.0},), ({1: 10.0},), ({1: -1.0},)) == [
    HOLDS,
    IN_PART,
    NOT,
  ]
  judge = mooncake_overload.judge_tbt
  assert verdicts(
    judge,
    ({"Mooncake": 0.99, "vLLM": 0.6},),
    ({"Mooncake": 0.99, "vLLM": 0.2},),
    ({"Mooncake": 0.6, "vLLM": 0.6},),
  ) == [HOLDS, IN_PART, NOT]
