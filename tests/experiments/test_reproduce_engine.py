"""Figures on the engine: what decides their verdicts, and that their settings serve."""

from __future__ import annotations

import dataclasses
import io
import pathlib
from types import SimpleNamespace

import pytest

from configs.models import MODELS
from experiments.program import ROOT, Progress
from experiments.reproduction import (
  engine,
  engine_serving,
  engine_steps,
  published_distserve,
  published_sarathi,
)
from experiments.reproduction.engine_serving import Emitted, System, Tails, crossing, padded
from experiments.reproduction.engine_steps import Engine, Probe, Rates, at_least, at_most
from experiments.reproduction.figure import HOLDS, IN_PART, NOT, Found
from experiments.serving import check, serve_strategy, set_up
from pdjax.config import load_config
from pdjax.core.events import EventLog, Step
from pdjax.metrics.latency import request_records
from pdjax.sim.padded import Padding

pytestmark = pytest.mark.quick

CONFIGS = sorted((ROOT / "configs" / "engine").glob("*.py"))
STEP_FIGURES = [figure for figure in engine.FIGURES if not figure.configs]
# By the same model: one whose weights dominate up to 4,096 tokens a step, one up to a token.
MEMORY_BOUND = Rates(flops_per_s=4e15, bytes_per_s=2e12, bytes_per_value=4)
COMPUTE_BOUND = Rates(flops_per_s=2e11, bytes_per_s=4e11, bytes_per_value=4)


class ByRoofline(Engine):
  """Steps take what a roofline says, and linear operators what their weights and FLOPs say."""

  def times_s(self, probes, show):
    return {probe: self.roofline_s(probe) for probe in probes}


def _engine(rates: Rates) -> Engine:
  model = MODELS["smollm2-135m"]
  weights = model.num_params

  def linear_s(num_tokens: int, num_emitted: int) -> float:
    return max(2 * weights * num_tokens / rates.flops_per_s, 4 * weights / rates.bytes_per_s)

  return ByRoofline(None, model, rates, "by a roofline", linear_s)


def _made(make, rates: Rates, *, quick: bool) -> Found:
  own = _engine(rates)
  return make(SimpleNamespace(quick=quick, once=lambda make: own, show=lambda text: None))


def _verdicts(found: Found) -> list[str]:
  return [judged.verdict for judged in found.judged]


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("figure", STEP_FIGURES, ids=lambda figure: figure.name)
def test_a_figure_of_steps_judges_all_of_its_claims(figure, quick):
  found = _made(figure.make, COMPUTE_BOUND, quick=quick)
  assert len(found.judged) == len(figure.claims)
  assert any("--quick" in note for note in found.notes) == quick
  assert len({tuple(row[:3]) for row in found.rows}) == len(found.rows) > 1


@pytest.mark.parametrize(
  ("make", "claim", "memory_bound", "compute_bound"),
  [
    (engine.sarathi_fig3, 0, NOT, HOLDS),  # several prompts share a reading of the weights
    (engine.sarathi_fig3, 1, HOLDS, NOT),
    (engine.sarathi_fig4, 1, HOLDS, NOT),
    (engine.sarathi_fig9, 0, IN_PART, HOLDS),  # a whole prompt costs hardly more than a decode
    (engine.sarathi_fig9, 1, HOLDS, NOT),
    (engine.sarathi_fig14, 0, NOT, HOLDS),  # every chunk reads the weights again
    (engine.sarathi_fig14, 1, NOT, HOLDS),
    (engine.distserve_fig2, 0, IN_PART, HOLDS),
    (engine.distserve_fig3, 0, NOT, HOLDS),
    (engine.distserve_fig3, 1, HOLDS, NOT),
  ],
)
def test_the_ridge_of_the_device_decides(make, claim, memory_bound, compute_bound):
  verdicts = [
    _made(make, rates, quick=False).judged[claim].verdict for rates in (MEMORY_BOUND, COMPUTE_BOUND)
  ]
  assert verdicts == [memory_bound, compute_bound]


def test_where_all_steps_take_the_same_nobody_waits_for_anybody():
  own = _engine(COMPUTE_BOUND)
  own.times_s = lambda probes, show: dict.fromkeys(probes, 1.0)
  bench = SimpleNamespace(quick=False, once=lambda make: own, show=lambda text: None)
  assert _verdicts(engine.distserve_fig2(bench)) == [NOT, NOT]
  assert _verdicts(engine.sarathi_fig9(bench)) == [NOT, HOLDS, NOT]


def test_linear_operators_lose_their_share_where_attention_is_slow():
  def judged(linear_share: float) -> str:
    own = _engine(COMPUTE_BOUND)
    own.linear_s = lambda n, emitted: linear_share * own.roofline_s(Probe(prefills=(n,)))
    bench = SimpleNamespace(quick=True, once=lambda make: own, show=lambda text: None)
    own.times_s = lambda probes, show: {
      p: own.roofline_s(Probe(prefills=(sum(p.prefills) or p.decodes,))) for p in probes
    }
    return engine.sarathi_fig4(bench).judged[0].verdict

  assert [judged(share) for share in (0.85, 0.7, 0.5)] == [HOLDS, IN_PART, NOT]


def test_the_ridge_is_where_arithmetic_takes_as_long_as_reading_the_weights():
  rates = Rates(flops_per_s=312e12, bytes_per_s=2.039e12, bytes_per_value=2)
  weights = 7e9
  arithmetic_s = 2 * weights * rates.ridge_tokens / rates.flops_per_s
  assert arithmetic_s == pytest.approx(weights * 2 / rates.bytes_per_s)
  assert rates.ridge_tokens == pytest.approx(153, abs=0.5)


def test_a_verdict_says_its_limits():
  assert at_least(2, 2, 1, "a")[0] == at_most(2, 2, 3, "a")[0] == HOLDS
  assert at_least(1.9, 2, 1, "a")[0] == at_most(2.1, 2, 3, "a")[0] == IN_PART
  assert at_least(0.9, 2, 1, "a")[0] == at_most(3.1, 2, 3, "a")[0] == NOT
  assert "from 2" in at_least(3, 2, 1, "a").why and "to 3" in at_most(1, 2, 3, "a").why


# Served requests ----------------------------------------------------------------------------------


def test_published_goodputs_are_the_crossings_of_the_published_curves():
  cross_rps = published_distserve.FIG1_CROSS_RPS
  for _, name, curves, slo_s in engine_serving.FIG1_METRICS:
    name = name.replace(" ", "_")
    assert crossing(curves[name], slo_s) == (pytest.approx(cross_rps[name], abs=0.1), True)
  both = [
    crossing(curves["existing"], slo_s) for _, _, curves, slo_s in engine_serving.FIG1_METRICS
  ]
  assert min(both) == (pytest.approx(cross_rps["existing"], abs=0.1), True)


def test_a_crossing_is_between_points_or_at_the_end_that_was_tested():
  points = [(1.0, 2.0), (3.0, 6.0)]
  assert crossing(points, 4.0) == (2.0, True)
  assert crossing(points, 7.0) == (3.0, False)
  assert crossing(points, 1.0) == (1.0, True)


def test_stalls_are_judged_by_gaps_makespan_and_tail():
  ends_s = (1.0, 2.0, 10.0)
  quiet = Emitted(ends_s=ends_s, longest_gap_s=0.1, itl_p99_s=0.1)
  stalled = quiet._replace(longest_gap_s=0.5)
  slower = quiet._replace(ends_s=(1.0, 12.0))
  flat, rising = [(0.4, 0.1), (0.9, 0.1)], [(0.4, 0.2), (0.9, 0.5)]

  def judged(whole, chunked, tbt):
    runs = {"continuous": whole, "chunked": chunked}
    return _verdicts(engine_serving.stalls(runs, {"continuous": tbt, "chunked": flat}, (), ""))

  assert judged(stalled, quiet, rising) == [HOLDS, HOLDS, HOLDS]
  assert judged(quiet, slower, flat) == [NOT, NOT, NOT]


def test_the_ablation_is_judged_by_both_orders():
  paper = {name: Tails(*own, 1.0) for name, (own, _) in published_sarathi.TABLE4.items()}
  assert _verdicts(engine_serving.ablation(paper, (), "")) == [HOLDS, HOLDS]
  backwards = {
    "hybrid_only": Tails(3, 0.1, 1.0),
    "simple_chunking": Tails(1, 0.1, 1.0),
    "chunked": Tails(2, 0.2, 1.0),
  }
  assert _verdicts(engine_serving.ablation(backwards, (), "")) == [NOT, NOT]


def _systems(slowdown: float, both_rps: float) -> dict[str, System]:
  """Flat up to a rate of 8 for one phase, to `both_rps` for both, then far above any SLO."""
  alone = [(1.0, 0.1), (8.0, 0.1), (8.1, 9.0)]
  both = [(1.0, 0.1 * slowdown), (both_rps, 0.1 * slowdown), (both_rps + 0.1, 9.0)]
  return {
    "both phases": System(both, both),
    "prefill only": System(ttft_s=alone),
    "decode only": System(tpot_s=alone),
  }


def test_interference_is_judged_by_latency_and_by_goodput():
  assert _verdicts(engine_serving.interference(_systems(1.5, 2.0), (), "")) == [HOLDS] * 3
  # Both phases as fast as one, up to the same rate: two devices then serve what one does.
  assert _verdicts(engine_serving.interference(_systems(1.0, 8.0), (), "")) == [NOT, NOT, NOT]


def test_published_curves_are_judged_as_the_paper_says():
  ttft_s, tpot_s = (curves for _, _, curves, _ in engine_serving.FIG1_METRICS)
  systems = {
    "both phases": System(ttft_s["existing"], tpot_s["existing"]),
    "prefill only": System(ttft_s=ttft_s["prefill_only"]),
    "decode only": System(tpot_s=tpot_s["decode_only"]),
  }
  found = engine_serving.interference(systems, (), "")
  assert _verdicts(found) == [HOLDS] * 3
  for compared in found.compared:
    assert compared.ours == pytest.approx(compared.published, rel=0.05)


def test_padding_counts_what_steps_compute_beyond_their_tokens():
  log = EventLog()
  step = Step(
    pool="mixed0", step_id=0, kind="mixed", start_s=0.0, end_s=1.0, prefill_ids=(1,),
    prefill_starts=(0,), prefill_tokens=(29,), decode_ids=(0,), decode_positions=(3,),
    emitted_ids=(), token_ids=(),
  )  # fmt: skip
  log.append(step)
  assert padded(log, Padding(mixed=(64,))) == 64 / 30
  assert padded(log, Padding(mixed=(30,), prefill=(64,))) == 1


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_serves_in_simulation_as_it_is(path):
  config = load_config(path, ["workload.num_requests=4"])
  experiment = set_up(
    check(dataclasses.replace(config, backend="sim"), pathlib.Path()), Progress(io.StringIO())
  )
  for strategy in config.strategy_names:
    log = EventLog()
    serve_strategy(experiment, strategy, log, Progress(io.StringIO()))
    records = request_records(log)
    assert [r.outcome for r in records.values()] == ["finished"] * 4
    assert all(len(r.token_s) == r.max_tokens for r in records.values())


def test_the_world_that_figures_share_holds_what_each_config_asks_for():
  first, *others = (load_config(path) for path in CONFIGS)
  for config in others:
    assert (config.model, config.cache) == (first.model, first.cache)
    assert config.scheduler == first.scheduler


@pytest.mark.slow
def test_decodes_alone_run_no_prefill_on_the_engine(monkeypatch):
  bench = SimpleNamespace(quick=True, show=lambda text: None)
  # Of all that the figures share, what this one runs: the rest takes most of a minute to compile.
  shared = dataclasses.replace(engine_serving._shared_config(bench), strategies=("continuous",))
  monkeypatch.setattr(engine_serving, "_shared_config", lambda bench: shared)
  world = engine_serving.open_world(bench)
  bench.once = lambda make: world
  config = load_config(ROOT / "configs/engine/distserve_fig1.py")
  both = engine_serving._experiment(dataclasses.replace(config, strategies=("continuous",)), bench)
  alone = dataclasses.replace(
    both,
    config=dataclasses.replace(both.config, num_devices=2, strategies=("disaggregated",)),
    world=engine_serving.DecodesAlone(world),
  )
  (spec,) = both.config.pools_of("continuous")
  executor, kinds = world.executor(spec.group), []
  submit = executor.submit
  monkeypatch.setattr(
    executor, "submit", lambda plan, *rest: (kinds.append(plan.kind), submit(plan, *rest))[1]
  )
  log = EventLog()
  serve_strategy(alone, "disaggregated", log, Progress(io.StringIO()))
  assert set(kinds) == {"decode"}
  records = request_records(log)
  assert len(records) == engine_serving.QUICK_REQUESTS
  assert all(len(r.token_s) == 16 for r in records.values())


def test_no_step_of_a_figure_is_larger_than_the_engine_holds():
  seen = []

  class Recorder(ByRoofline):
    def times_s(self, probes, show):
      seen.extend(probes)
      return super().times_s(seen, show)

  own = _engine(COMPUTE_BOUND)
  recorder = Recorder(None, own.model, own.rates, "", own.linear_s)
  bench = SimpleNamespace(quick=False, once=lambda make: recorder, show=lambda text: None)
  for figure in STEP_FIGURES:
    figure.make(bench)
  most = engine_steps.MAX_LEN + engine_steps.NUM_ROWS
  assert 0 < max(sum(probe.prefills) + probe.decodes for probe in seen) <= most
