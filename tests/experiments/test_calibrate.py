"""The catalogue is what its fits give, and steps are put together from what was measured."""

import dataclasses
import pathlib
import random

import numpy as np
import pytest

from configs.hardware import FITTED_FROM, HARDWARE
from configs.models import MODELS
from experiments import calibrate
from experiments.program import ROOT
from experiments.validation.measured import LayerTimes, between, medians
from experiments.validation.steps import (
  HELD_OUT,
  OTHER_TP,
  OTHERS,
  SOURCES,
  TABLE,
  TARGETS,
  Compared,
  Source,
  compared,
  mixed_compared,
  rows_of,
  source_of,
  step_rows,
  table,
)
from pdjax.sim.fitting import Errors, predict
from pdjax.sim.hardware import Fit
from pdjax.sim.roofline import Roofline

pytestmark = pytest.mark.quick

DATA = ROOT.parent / "shared" / "data"
MODEL = dataclasses.replace(MODELS["llama2-7b"], num_layers=3)


@pytest.fixture(scope="module")
def data() -> pathlib.Path:
  if not (DATA / "measured").is_dir():
    pytest.skip("no published timings beside this project, in shared/data/measured")
  return DATA


@pytest.fixture(scope="module")
def rtx_4090(data):
  return source_of("rtx-4090 llmservingsim", data)


@pytest.fixture(scope="module")
def rtx_4090_fit(rtx_4090):
  return calibrate.rounded(rtx_4090.fit())


@pytest.fixture(scope="module")
def held_out(data):
  """Rows by device and kind."""
  return {
    (hardware, row.kind): row
    for hardware in ("rtx-4090", "tpu-v6e")
    for row in rows_of(compared(source_of(FITTED_FROM[hardware], data), HARDWARE[hardware].fit))
  }


def made_up(**more) -> LayerTimes:
  """LayerTimes whose times tell where each part of a step came from."""
  sizes = [1, 2, 4, 6, 8, 12, 16, 24]
  return LayerTimes(
    model=MODEL,
    linear={(op,): {n: 1e-3 * n for n in sizes} for op in ("qkv", "mlp_up")},
    elementwise={n: 1e-4 * n for n in sizes},
    prefill={(1, before, n): 1e-5 * n + 1e-6 * before for n in sizes for before in (0, 10)},
    decode={(n, keys): 1e-7 * n * keys for n in sizes for keys in (5, 50)},
    **more,
  )


def test_a_step_is_the_sum_of_what_its_operators_took_over_all_layers():
  steps = made_up().steps()
  assert {kind: len(of) for kind, of in steps.items()}["prefill"] == 16
  for step in steps["mixed"]:
    counts = step.counts
    tokens = counts.num_tokens
    keys = counts.num_decode_keys
    before = counts.num_prefill_keys - counts.num_prefill_tokens
    attention_s = 1e-5 * counts.num_prefill_tokens + 1e-6 * before + 1e-7 * keys
    assert step.seconds == pytest.approx(3 * (2.1e-3 * tokens + attention_s))
    assert set(step.ops) == {"qkv", "mlp_up", "elementwise", "attention_prefill",
                             "attention_decode"}  # fmt: skip


def test_a_split_model_has_two_all_reduces_a_layer_and_rows_their_head():
  operators = made_up(all_reduce={n: 1e-2 for n in (1, 2, 4)}, lm_head={n: 7.0 for n in (1, 4)})
  steps = dataclasses.replace(operators, tp=2).steps()
  step = next(step for step in steps["decode"] if step.counts.num_decodes == 4)
  keys = step.counts.num_decode_keys
  assert step.seconds == pytest.approx(3 * (2.1e-3 * 4 + 1e-7 * keys + 2e-2) + 7.0)
  assert {"all_reduce", "lm_head"} <= set(step.ops) and step.counts.num_emitted == 4
  assert max(step.counts.num_tokens for step in steps["prefill"]) == 4


def test_halves_share_no_point_and_lose_none():
  operators = made_up(lm_head={n: 1.0 for n in range(9)})
  halves = operators.split()
  for field in ("elementwise", "prefill", "decode", "lm_head"):
    first, second = (dict(getattr(half, field)) for half in halves)
    assert first | second == getattr(operators, field) and not first.keys() & second.keys()
    assert abs(len(first) - len(second)) <= 1
  tokens = [set(half.linear["qkv",]) for half in halves]
  assert tokens == [set(half.elementwise) for half in halves]


def test_of_all_reduces_a_fit_sees_both_ends_and_one_of_every_two():
  sizes = [8 * n for n in range(1, 42)]
  operators = made_up(all_reduce={n: 1e-5 * n for n in sizes})
  seen, rest = (list(half.all_reduce) for half in operators.split())
  assert sorted([*seen, *rest]) == sizes and {sizes[0], sizes[-1]} <= set(seen)
  assert all({a, b} & set(seen) for a, b in zip(sizes[::2], sizes[1::2]))
  assert len(rest) >= 19  # the lower ones and the upper ones, by chance
  assert {(n - 8) // 8 % 2 for n in rest} == {0, 1}


def test_between_measured_sizes_times_are_interpolated_only_if_these_are_near():
  sizes = {2: 2.0, 3: 4.0, 8: 9.0}
  assert between(sizes, 3) == 4.0
  assert between({2: 2.0, 3: 4.0}, 2.5) == 3.0
  assert between(sizes, 5) is None and between(sizes, 5, apart=3) == 6.0
  assert between(sizes, 1) is None and between(sizes, 9) is None


def test_repeated_measurements_count_as_their_median():
  assert medians([(2, 1.0), (1, 5.0), (2, 9.0), (2, 2.0)]) == {1: 5.0, 2: 2.0}


def test_rows_pool_models_and_say_what_is_missed():
  def part(group, model, ratio):
    measured = np.ones(10)
    return Compared("s", group, model, "decode", measured * ratio, measured)

  rows = rows_of([part(HELD_OUT, "a", 1.1), part(OTHERS, "b", 1.02), part(OTHERS, "c", 0.98)])
  assert [(row.models, row.errors.num_points, row.is_reached) for row in rows] == [
    ("a", 10, False), ("b, c", 20, True),
  ]  # fmt: skip
  assert [line.split()[-2:] for line in table(rows).splitlines()[1:]] == [
    ["missed", "a"], ["b,", "c"],
  ]  # fmt: skip


def test_no_all_reduce_of_a_fitted_size_judges_the_fit():
  sizes = {n: 1e-5 * n for n in (1, 2, 4, 8, 12, 16, 24)}
  wide = dataclasses.replace(MODEL, name="wide", d_model=2 * MODEL.d_model)
  split = dataclasses.replace(made_up(all_reduce=sizes), tp=2)
  source = Source(
    name="s",
    device=HARDWARE["a100"],
    fitted=made_up(),
    besides=(LayerTimes(model=MODEL, tp=2, all_reduce=sizes),),
    others=(split, dataclasses.replace(split, model=wide), dataclasses.replace(split, tp=4)),
  )
  fitted_bytes = {
    (t.tp, t.counts.num_tokens * t.model.d_model) for t in source.timings()
    if t.ops == ("all_reduce",)
  }  # fmt: skip
  assert len(fitted_bytes) == 5
  groups, parts = zip(*source.unseen())
  assert groups == (HELD_OUT, OTHER_TP, OTHERS, OTHER_TP)
  for part in parts[1:]:
    kept = {(part.tp, n * part.model.d_model) for n in part.all_reduce}
    every = {(part.tp, n * part.model.d_model) for n in sizes}
    assert kept == every - fitted_bytes and kept
  assert parts[3].all_reduce == sizes  # over four devices none was fitted
  assert not parts[0].decode.keys() & source.fitted.split()[0].decode.keys()


def test_without_its_files_each_source_is_named(tmp_path):
  rows, missing = step_rows(tmp_path)
  assert rows == [] and [line.partition(",")[0] for line in missing] == [*SOURCES, "splitwise"]
  assert all(line.endswith((".csv", ".csv.gz")) for line in missing)


def test_vidurs_models_on_the_a100_all_have_their_row(data):
  names = {path.name for path in (data / "measured" / "vidur").glob("mlp_a100_*.csv")}
  source = source_of("a100 vidur", data)
  assert len({part.model.name for part in (source.fitted, *source.others)}) == len(names) == 4


def test_every_calibrated_device_has_a_source_of_its_own():
  calibrated = {name for name, device in HARDWARE.items() if device.fit}
  assert calibrated == {*FITTED_FROM, "cpu"}  # by steps of this engine
  for name, source in FITTED_FROM.items():
    assert source in SOURCES and source.split()[0] == name


def test_an_entry_of_the_catalogue_is_what_its_fit_gives(rtx_4090_fit):
  entry, found = HARDWARE["rtx-4090"].fit, rtx_4090_fit
  for field in dataclasses.fields(Fit):
    value = getattr(found, field.name)
    if not field.name.startswith("host_") and value is not None:
      assert getattr(entry, field.name) == pytest.approx(value, rel=0.02), field.name


def test_the_printed_entry_is_the_fit():
  fit = HARDWARE["l40s"].fit
  assert eval(calibrate.entry(fit), {"Fit": Fit}) == fit


def test_steps_are_predicted_as_the_roofline_of_the_catalogue_says(rtx_4090):
  steps = rtx_4090.fitted.steps()
  chosen = random.Random(0).sample([*steps["prefill"], *steps["decode"], *steps["mixed"]], 50)
  latency = Roofline(model=rtx_4090.fitted.model, device=HARDWARE["rtx-4090"])
  said = [latency.terms_of(step.counts).total_s for step in chosen]
  assert predict(latency.device.fit, chosen, latency.device) == pytest.approx(said, rel=1e-9)


SHORT_PROMPTS = "p95 of prompts is missed, for those of 128 tokens and less (VALIDATION.md)"


@pytest.mark.parametrize("kind", [
  pytest.param("rtx-4090 prefill", marks=pytest.mark.xfail(strict=True, reason=SHORT_PROMPTS)),
  "rtx-4090 decode", "rtx-4090 mixed", "tpu-v6e prefill", "tpu-v6e decode", "tpu-v6e mixed",
])  # fmt: skip
def test_steps_that_a_fit_never_saw_take_what_it_says(held_out, kind):
  row = held_out[tuple(kind.split())]
  assert row.group == HELD_OUT and row.target == TARGETS[HELD_OUT] and row.is_reached


def test_steps_that_a_fit_never_saw_are_many(held_out):
  assert len(held_out) == 6 and all(row.errors.num_points >= 40 for row in held_out.values())


@pytest.mark.once
def test_a_table_of_one_kernel_for_both_is_near_the_points_that_it_has_not(rtx_4090):
  rows = {row.group: row for row in rows_of(mixed_compared(rtx_4090, HARDWARE["rtx-4090"].fit))}
  assert rows[TABLE].is_reached and rows[TABLE].errors.num_points > 5000
  two, one = (rows[group].errors for group in ("fused, as two", "fused, fit"))
  assert one.median < two.median and one.p95 < 0.75 * two.p95


def test_the_program_prints_the_entry(rtx_4090, rtx_4090_fit, capsys):
  assert calibrate.run(calibrate.Job("rtx-4090", rtx_4090, True)) == 0
  out = capsys.readouterr().out
  assert f"rtx-4090: {len(rtx_4090.timings())} timings" in out
  assert calibrate.entry(rtx_4090_fit) in out and "held out" in out


def test_errors_by_operator_cover_all_timings(rtx_4090):
  timings = rtx_4090.timings()
  found = calibrate.errors_by_operator(rtx_4090, HARDWARE["rtx-4090"].fit, timings)
  assert sum(errors.num_points for errors in found.values()) == len(timings)
  assert all(isinstance(errors, Errors) for errors in found.values())
