"""All latency models keep one interface: what follows from `terms_of` agrees with it."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.hardware import HARDWARE, LINKS
from configs.models import MODELS
from pdjax.core.costs import StepCounts, count_slices, later
from pdjax.sim.latency_model import LatencyModel, StepTerms
from pdjax.sim.roofline import Roofline
from pdjax.sim.tables import Grid, Tables

pytestmark = pytest.mark.quick

MODEL = MODELS["llama3-8b"]


class Quadratic(LatencyModel):
  """Writes only what it must."""

  def terms_of(self, counts: StepCounts) -> StepTerms:
    return StepTerms(host_s=1e-3, attention_decode_s=1e-12 * counts.num_decode_keys**2)

  def hand_over_s(self, num_tokens: int) -> float:
    return 0.0


def tables(**more) -> Tables:
  """Of a device whose operators were timed at round sizes; every number another."""
  sizes = [1, 16, 64, 256, 1024]
  rng = np.random.default_rng(0)

  def grid(*axes):
    values = np.zeros([len(axis) for axis in axes])
    for i, axis in enumerate(axes):
      line = 1e-5 + np.array(axis) * rng.uniform(1e-8, 2e-8)
      values = values + line.reshape([-1 if i == j else 1 for j in range(len(axes))])
    axes = tuple(tuple(axis) for axis in axes)
    return Grid(axes=axes, values=values, is_measured=np.ones(values.shape, bool))

  return Tables(
    model=MODEL,
    linear=grid(sizes),
    elementwise=grid(sizes),
    lm_head=grid(sizes),
    prefill=grid(sizes, [0, 512, 4096]),
    decode=grid([1, 8, 64], [1, 100, 1000, 8000]),
    host_s=1e-3,
    **more,
  )


LATENCIES = {
  "defaults": Quadratic(),
  "ideal": Roofline(model=MODEL, device=HARDWARE["b200"]),
  "fitted": Roofline(model=MODEL, device=HARDWARE["a100"]),
  "split": Roofline(model=MODEL, device=HARDWARE["h100"], tp=4, link=LINKS["nvlink4"]),
  "apart": Roofline(model=MODEL, device=HARDWARE["a100"], fused=False),
  "one kernel": Roofline(model=MODEL, device=HARDWARE["rtx-pro-6000"], one_kernel=True),
  "tables": tables(),
}
latencies = pytest.mark.parametrize("latency", LATENCIES.values(), ids=LATENCIES.keys())


@latencies
@given(
  positions=st.lists(st.integers(0, 20_000), min_size=1, max_size=80),
  chunk=st.integers(0, 700),
  num_steps=st.integers(0, 40),
)
def test_steps_in_one_stroke_take_what_each_takes(latency, positions, chunk, num_steps):
  counts = count_slices(
    prefill_starts=[300] * (chunk > 0),
    prefill_tokens=[chunk] * (chunk > 0),
    decode_positions=positions,
    num_emitted=len(positions),
  )
  each = [
    latency.terms_of(
      counts._replace(num_decode_keys=counts.num_decode_keys + i * len(positions))
    ).total_s
    for i in range(num_steps)
  ]
  found = latency.decode_steps_s(counts, num_steps)
  assert isinstance(found, np.ndarray) and found.shape == (num_steps,)
  np.testing.assert_allclose(found, each, rtol=1e-12)


@latencies
def test_an_empty_step_takes_host_time_at_most(latency):
  terms = latency.terms_of(StepCounts())
  assert terms == StepTerms(host_s=terms.host_s)


def test_later_steps_have_a_key_more_for_every_decode():
  counts = count_slices(decode_positions=[5, 9, 9], num_emitted=3)
  assert later(counts, 4) == count_slices(decode_positions=[9, 13, 13], num_emitted=3)


def test_tables_without_a_curve_say_so():
  assert LATENCIES["tables"].caveats == ()
  (caveat,) = dataclasses.replace(LATENCIES["tables"], elementwise=None).caveats
  assert "elementwise" in caveat and "lm_head" not in caveat
