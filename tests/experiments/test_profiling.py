"""The steps that are timed tell the parameters apart; their fit predicts the others."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time

import numpy as np
import pytest

from configs.hardware import HARDWARE
from configs.models import MODELS
from experiments.bench_engine import copy_bytes_per_s
from experiments.profiling import (
  Point,
  ceiling_of,
  errors_by_kind,
  fit_points,
  kept_busy,
  measured_device,
  predictions_s,
  steps_to_time,
  time_steps,
)
from experiments.program import ROOT
from pdjax.core.costs import count_plan
from pdjax.scheduling.pages import PageConfig
from pdjax.sim.padded import Padding
from pdjax.sim.roofline import Roofline

PAGES = PageConfig(num_rows=16, page_size=16, pages_per_row=64, num_pages=1024, contiguous=True)
KINDS = ("prefill", "decode", "mixed")
MODEL, DEVICE = MODELS["llama3-8b"], HARDWARE["a100"]
PADDING = Padding(prefill=(64, 128, 256, 512), mixed=(64, 128), rows=(1, 4, 8, 16))


def plans():
  return steps_to_time(PAGES, prefill_tokens=512, mixed_tokens=128, kinds=KINDS)


@pytest.mark.quick
def test_some_45_steps_cover_every_kind_and_end_of_the_range():
  found = plans()
  counts = [count_plan(plan) for plan in found]
  assert 35 <= len(found) <= 55 and {plan.kind for plan in found} == set(KINDS)
  assert len(set(counts)) == len(counts), "a step is timed twice"
  assert max(c.num_prefill_tokens for c in counts) == 512
  assert min(c.num_prefill_tokens for c in counts if c.num_prefill_tokens) <= 16
  assert {1, 16} <= {c.num_decodes for c in counts}
  assert max(c.num_decode_keys for c in counts) == 16 * PAGES.capacity_tokens
  assert all(c.num_tokens <= 128 for p, c in zip(found, counts) if p.kind == "mixed")


@pytest.mark.quick
@pytest.mark.parametrize("num_rows", [1, 2, 3])
def test_few_rows_are_room_enough(num_rows):
  pages = dataclasses.replace(PAGES, num_rows=num_rows, pages_per_row=2, num_pages=2 * num_rows)
  found = steps_to_time(pages, prefill_tokens=32, mixed_tokens=16, kinds=KINDS)
  counts = [count_plan(plan) for plan in found]
  assert max(c.num_decodes for c in counts) == num_rows
  beside = {c.num_decodes for plan, c in zip(found, counts) if plan.kind == "mixed"}
  assert beside == set(range(1, num_rows))  # the prompt has a row too


@pytest.mark.quick
def test_the_fit_of_these_steps_predicts_steps_that_were_not_timed():
  fit = dataclasses.replace(DEVICE.fit, host_s=0.0, host_row_s=0.0)  # behind the step before
  truth = Roofline(model=MODEL, device=dataclasses.replace(DEVICE, fit=fit))
  rng = np.random.default_rng(0)

  def measured(plan, noise):
    counts = count_plan(plan)
    step_s = truth.terms_of(PADDING(counts)).total_s
    return Point(plan.kind, counts, step_s * np.exp(noise * rng.standard_normal()))

  points = [measured(plan, 0.03) for plan in plans()]
  fitted = fit_points(points, MODEL, DEVICE, PADDING)
  others = steps_to_time(
    dataclasses.replace(PAGES, num_rows=12, num_pages=768),
    prefill_tokens=300,
    mixed_tokens=100,
    kinds=KINDS,
  )
  unseen = [measured(plan, 0.0) for plan in others]
  errors = errors_by_kind(unseen, predictions_s(unseen, fitted.fit, MODEL, DEVICE, PADDING))
  assert set(errors) == {*KINDS, "all"} and errors["all"].num_points == len(unseen)
  for kind in (*KINDS, "all"):
    assert errors[kind].median < 3 and errors[kind].p95 < 10, (kind, errors[kind])


class Counting:
  """An executor that counts what is in flight, and whether another one was."""

  def __init__(self, beside=None, fails_at=None):
    self.now = self.most = self.num_steps = self.num_beside = 0
    self.beside, self.fails_at = beside, fails_at
    self.plans = []

  def submit(self, plan, now_s):
    self.now += 1
    self.num_steps += 1
    self.plans.append(plan)
    self.most = max(self.most, self.now)
    self.num_beside += self.beside is not None and self.beside.now > 0
    if self.num_steps == self.fails_at:
      raise RuntimeError("lost")
    return self

  def result(self):
    time.sleep(1e-4)
    self.now -= 1


@pytest.mark.quick
def test_steps_are_timed_in_flight():
  executor = Counting()
  points = time_steps(executor, plans()[:3], steps_in_flight=2, least_s=1e-3)
  assert executor.most == 2 and executor.now == 0 and executor.num_steps >= 2 * 3 * 3
  assert all(point.seconds > 1e-4 for point in points)


@pytest.mark.quick
def test_a_neighbour_is_kept_busy_by_steps_in_turn_until_those_beside_it_were_timed():
  other = Counting()
  executor = Counting(beside=other)
  with kept_busy(other, plans()[:2]):
    while not other.now:
      time.sleep(1e-4)
    time_steps(executor, plans()[:3], least_s=1e-3)
  assert other.most == 2 and other.now == 0
  assert other.plans[:4] == 2 * plans()[:2]
  assert executor.num_beside > 0.8 * executor.num_steps
  seen = other.num_steps
  time.sleep(5e-3)
  assert other.num_steps == seen


@pytest.mark.quick
def test_a_neighbour_that_fails_ends_the_timing():
  with pytest.raises(RuntimeError, match="lost"), kept_busy(Counting(fails_at=3), plans()[:2]):
    time.sleep(0.01)


@pytest.mark.slow
def test_the_program_writes_a_fit_of_this_machine(tmp_path):
  command = [sys.executable, "-m", "experiments.profile_steps", "--model=tiny", "--num_rows=4"]
  command += ["--max_len=64", "--token_budget=16", f"--out={tmp_path}"]
  done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=ROOT)
  assert done.returncode == 0, done.stderr
  result = json.loads((tmp_path / "fit.json").read_text())
  assert result["errors"]["all"]["num_points"] == len(
    (tmp_path / "steps.csv").read_text().splitlines()
  ) - 1  # fmt: skip
  assert "Device(" in done.stdout and "fit=Fit(" in done.stdout
  assert (tmp_path / "fit.png").stat().st_size > 10_000


@pytest.mark.quick
@pytest.mark.parametrize(
  ("flag", "message"),
  [
    ("--token_budget=4", "--token_budget=4 cannot hold"),
    ("--page_size=0", "--page_size=0 must be at least 1"),
    ("--tp=3", "num_heads=8 is no multiple of the 3 devices"),
    ("--tp=8192", "no multiple of the 8192 devices"),
  ],
)
def test_what_cannot_be_timed_is_refused(flag, message):
  command = [sys.executable, "-m", "experiments.profile_steps", "--model=tiny", flag]
  done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT)
  assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


def test_what_a_device_reaches_is_a_copy_over_its_memory_and_no_page_faults():
  """A stream into memory that nobody touched before comes to a tenth of it."""
  import jax

  device = measured_device(jax.devices("cpu")[0], "float32")
  assert device.peak_bytes_per_s > copy_bytes_per_s() / 4
  ceiling = ceiling_of(device)
  assert ceiling.peak_flops_per_s == 2 * device.peak_flops_per_s
  assert ceiling.ridge_flop_per_byte == device.ridge_flop_per_byte
