"""A fit finds the parameters that made the timings; a few whole steps are enough for others."""

import dataclasses
import itertools

import numpy as np
import pytest

from configs.hardware import HARDWARE, LINKS
from configs.models import MODELS
from pdjax.core.costs import StepCounts, count_slices
from pdjax.sim.fitting import Errors, Timing, all_reduce_curves, fit, fit_steps, predict, whole_step
from pdjax.sim.hardware import Device, Fit
from pdjax.sim.roofline import Roofline

pytestmark = pytest.mark.quick

MODEL = MODELS["llama3-8b"]
LAYER = dataclasses.replace(MODEL, num_layers=1)
LINK = LINKS["nvlink"]
BARE = Device(name="d", peak_flops_per_s=312e12, peak_bytes_per_s=2e12, memory_bytes=80e9)
TRUE = Fit(
  gemm_compute=0.7, gemm_memory=0.85, gemm_launch_s=5e-6, gemm_p=1.8, gemm_throttle=0.2,
  elementwise_memory=0.6, elementwise_launch_s=2e-6,
  prefill_compute=0.5, prefill_memory=0.4, prefill_launch_s=1.2e-5, prefill_p=1.3,
  prefill_fill_rows=8000.0,
  decode_memory=0.8, decode_launch_s=1.5e-5, decode_pad_tokens=60.0,
  all_reduce_share=0.4, all_reduce_launch_s=8e-6, all_reduce_hop_s=1.5e-6, all_reduce_growth=1.2,
  host_s=2e-3, host_row_s=3e-5,
)  # fmt: skip
MIXED = dataclasses.replace(TRUE, mixed_rows=20.0, mixed_idle_s=5e-11)


def chunk(start: int, num_tokens: int) -> StepCounts:
  return count_slices(prefill_starts=[start], prefill_tokens=[num_tokens], num_emitted=1)


def decodes(num: int, keys: int) -> StepCounts:
  return count_slices(decode_positions=[keys - 1] * num, num_emitted=num)


def both(start: int, num_tokens: int, num: int, keys: int) -> StepCounts:
  return StepCounts(*map(sum, zip(chunk(start, num_tokens), decodes(num, keys), strict=True)))


def operators() -> list[Timing]:
  """Timings of each operator alone, as if TRUE were a device."""
  sizes = [2**i for i in range(14)]
  timings = [
    Timing(LAYER, 1, StepCounts(num_prefill_tokens=n), (op,), 0.0)
    for n, op in itertools.product(sizes, ("qkv", "attn_out", "mlp_up", "mlp_down", "elementwise"))
  ]
  timings += [
    Timing(LAYER, tp, StepCounts(num_prefill_tokens=n), ("all_reduce",), 0.0)
    for n, tp in itertools.product(sizes, (2, 4, 8))
  ]
  timings += [
    Timing(LAYER, 1, chunk(start, n), ("attention_prefill",), 0.0)
    for start, n in itertools.product((0, 128, 1024, 8192), sizes)
  ]
  timings += [
    Timing(LAYER, 1, decodes(num, keys), ("attention_decode",), 0.0)
    for num, keys in itertools.product((1, 8, 64, 256), (16, 128, 1024, 8192))
  ]
  return measured(timings, TRUE)


def measured(timings: list[Timing], truth: Fit) -> list[Timing]:
  seconds = predict(truth, timings, BARE, LINK)
  return [t._replace(seconds=float(s)) for t, s in zip(timings, seconds, strict=True)]


def test_a_fit_finds_the_parameters_that_made_the_timings():
  found, errors = fit(operators(), BARE, link=LINK)
  assert errors.num_points == len(operators()) and errors.p95 < 1
  for field in dataclasses.fields(Fit):
    if field.name not in ("host_s", "host_row_s", "mixed_rows", "mixed_idle_s"):
      true = getattr(TRUE, field.name)
      assert getattr(found, field.name) == pytest.approx(true, rel=0.05), field.name


def test_what_no_timing_shows_is_left_as_it_was():
  only = [timing for timing in operators() if timing.ops == ("attention_decode",)]
  start = dataclasses.replace(TRUE, decode_memory=0.3)
  found = fit(only, BARE, start=start).fit
  assert found.decode_memory == pytest.approx(0.8, rel=0.02)
  untouched = [f.name for f in dataclasses.fields(Fit) if not f.name.startswith("decode_")]
  assert all(getattr(found, name) == getattr(start, name) for name in untouched)


def test_a_few_wrong_timings_do_not_move_a_fit():
  timings = operators()
  rng = np.random.default_rng(1)
  wrong = set(rng.choice(len(timings), len(timings) // 20, replace=False))
  spoilt = [t._replace(seconds=t.seconds * (3 if i in wrong else 1)) for i, t in enumerate(timings)]
  found = fit(spoilt, BARE, link=LINK).fit
  assert Errors.of(predict(found, timings, BARE, LINK), [t.seconds for t in timings]).p95 < 5


def test_many_timings_of_one_size_do_not_outvote_the_rest():
  """A device slower than the form at 4,096 tokens alone, which was timed 50 times.

  All timings alike, it would look as if it reached half of its peak and not 0.7.
  """
  timings = [t for t in operators() if t.ops == ("mlp_up",)]
  odd = [t._replace(seconds=1.4 * t.seconds) for t in timings if t.counts.num_tokens == 4096]
  rest = [t for t in timings if t.counts.num_tokens != 4096]
  once, often = (fit([*rest, *(odd * num)], BARE).fit for num in (1, 50))
  assert once.gemm_compute > 0.67
  assert often.gemm_compute > 0.56


def test_one_kernel_for_both_is_fitted_beside_the_rest():
  grid = itertools.product((0, 1024, 8192), (16, 128, 1024), (1, 8, 64), (64, 1024, 8192))
  timings = [Timing(LAYER, 1, both(*place), ("attention_mixed",), 0.0) for place in grid]
  found = fit(measured(timings, MIXED), BARE, start=TRUE).fit
  assert found.mixed_rows == pytest.approx(20, rel=0.05)
  assert found.mixed_idle_s == pytest.approx(5e-11, rel=0.2)


def leaping_s(num_bytes: float, tp: int) -> float:
  """A library that changes its algorithm at 1 MB."""
  return 5e-6 * tp + num_bytes * (1e-11 if num_bytes < 2**20 else 3e-11)


def all_reduces(tokens) -> list[Timing]:
  return [
    Timing(LAYER, tp, StepCounts(num_prefill_tokens=n), ("all_reduce",),
           2 * leaping_s(8192 * n, tp))
    for n in tokens
    for tp in (2, 4)
  ]  # fmt: skip


def test_all_reduces_that_were_timed_alone_are_kept_by_size():
  seen = all_reduces([2**i for i in range(14)])
  start = fit(seen, BARE, link=LINK).fit
  curves = all_reduce_curves(seen, BARE)
  assert [devices for devices, _ in curves] == [2, 4]
  assert [size for size, _ in curves[0][1]] == [2**i for i in range(13, 27)]
  found = dataclasses.replace(start, all_reduces=curves)
  others = all_reduces([3, 11, 40, 200, 700, 3000])  # none just before the leap
  right = [timing.seconds for timing in others]
  assert predict(found, others, BARE, LINK) == pytest.approx(right, rel=1e-3)
  assert Errors.of(predict(start, others, BARE, LINK), right).p95 > 10  # of one form for all sizes


def test_sizes_of_a_curve_lie_apart_and_noise_between_them_is_evened_out():
  rng = np.random.default_rng(0)
  true = all_reduces(range(8, 2049, 8))
  noisy = [t._replace(seconds=t.seconds * rng.lognormal(0, 0.2)) for t in true]
  curves = all_reduce_curves(noisy, BARE)
  for _, curve in curves:
    sizes, seconds = zip(*curve)
    assert list(seconds) == sorted(seconds)
    assert sizes[0] == 8 * 8192 and sizes[-1] == 2048 * 8192
    assert all(b >= 2 * a for a, b in itertools.pairwise(sizes))
  found = dataclasses.replace(TRUE, all_reduces=curves)
  far = [t for t in true if not 2**19 < 8192 * t.counts.num_tokens < 2**21]  # from the leap
  assert Errors.of(predict(found, far, BARE, LINK), [t.seconds for t in far]).median < 5


def test_a_fit_of_whole_steps_forgets_all_reduces_of_another():
  start = dataclasses.replace(TRUE, all_reduces=((4, ((8192, 1.0), (16384, 2.0))),))
  steps = [whole_step(MODEL, 4, counts, 1.0) for counts in STEPS]
  steps = measured(steps, TRUE)
  found = fit(steps, dataclasses.replace(BARE, fit=start), link=LINK)
  assert found.fit.all_reduces == () and found.errors.p95 < 3


def test_one_size_is_no_curve():
  assert all_reduce_curves(all_reduces([4]), BARE) == ()


STEPS = [
  *(chunk(start, n) for start in (0, 1024) for n in (16, 64, 128, 256, 512, 1024, 2048)),
  *(decodes(num, keys) for num in (1, 4, 16, 64, 128) for keys in (64, 512, 2048)),
  *(both(0, n, num, 700) for n in (64, 256, 512, 1024) for num in (1, 16, 64, 128)),
]


@pytest.mark.parametrize(
  ("truth", "tp", "one_kernel"), [(TRUE, 1, False), (TRUE, 4, False), (MIXED, 1, True)]
)
def test_a_fit_predicts_what_the_roofline_says(truth, tp, one_kernel):
  latency = Roofline(
    model=MODEL,
    device=dataclasses.replace(BARE, fit=truth),
    tp=tp,
    link=LINK,
    one_kernel=one_kernel,
  )
  steps = [whole_step(MODEL, tp, counts, 1.0) for counts in STEPS]
  if one_kernel:
    pair = {"attention_prefill", "attention_decode"}
    steps = [
      step._replace(ops=(*(op for op in step.ops if op not in pair), "attention_mixed"))
      for step in steps
      if pair <= {*step.ops}
    ]
  said = [latency.terms_of(step.counts).total_s for step in steps]
  assert predict(truth, steps, BARE, LINK) == pytest.approx(said, rel=1e-9)


def test_45_noisy_steps_are_enough_for_the_times_of_others():
  """Not for each parameter: a step has many constants, and only their sum shows."""
  assert len(STEPS) == 45
  rng = np.random.default_rng(0)
  truth = Roofline(model=MODEL, device=dataclasses.replace(BARE, fit=TRUE))
  points = [(counts, truth.terms_of(counts).total_s * rng.normal(1, 0.02)) for counts in STEPS]
  found, errors = fit_steps(points, MODEL, BARE)
  assert errors.median < 3
  others = [
    *(chunk(start, n) for start in (0, 300, 3000) for n in (30, 90, 190, 400, 800, 1500)),
    *(decodes(num, keys) for num in (1, 2, 8, 32, 100) for keys in (100, 900, 3000)),
    *(both(500, n, num, 1500) for n in (100, 400, 800) for num in (4, 30, 100)),
  ]
  latency = Roofline(model=MODEL, device=dataclasses.replace(BARE, fit=found))
  said, right = (
    [model.terms_of(counts).total_s for counts in others] for model in (latency, truth)
  )
  held_out = Errors.of(said, right)
  assert held_out.median < 3 and held_out.p95 < 8


def test_steps_that_hide_the_host_say_what_reading_the_weights_takes():
  """Also where that is far from what GPUs reach: a prior would give the rest to the host."""
  slow = dataclasses.replace(TRUE, gemm_memory=0.12, host_s=0.0, host_row_s=0.0)
  truth = Roofline(model=MODEL, device=dataclasses.replace(BARE, fit=slow))
  points = [(counts, truth.terms_of(counts).total_s) for counts in STEPS]
  found, errors = fit_steps(points, MODEL, BARE, hides_host=True)
  assert (found.host_s, found.host_row_s) == (0.0, 0.0) and errors.p95 < 3
  assert found.gemm_memory == pytest.approx(0.12, rel=0.05)


def test_errors_are_percentiles_of_their_size():
  errors = Errors.of([1.1, 0.8, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0])
  assert errors.num_points == 4
  assert errors.median == pytest.approx(5) and errors.bias == pytest.approx(0)
  assert errors.p95 == pytest.approx(np.percentile([10, 20, 0, 0], 95))
  assert str(errors) == "5.0 / 18.5 %"


def test_nothing_to_fit_is_refused():
  with pytest.raises(ValueError, match="no timings"):
    fit([], BARE)
  with pytest.raises(ValueError, match="all-reduce over 2 devices needs a link"):
    fit_steps([(decodes(1, 9), 1.0)], MODEL, BARE, tp=2)


def test_parameters_of_the_catalogue_are_within_the_priors_bounds():
  from pdjax.sim.fitting import PRIORS

  for device in HARDWARE.values():
    for name, prior in PRIORS.items():
      value = getattr(device.fit, name, None)
      if value and value != getattr(Fit(), name):
        assert prior.lowest * 0.99 <= value <= prior.highest * 1.01, (device.name, name)
