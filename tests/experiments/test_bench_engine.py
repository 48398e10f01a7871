"""The benchmark's device of no time can do all that the loop asks of an executor."""

from __future__ import annotations

import pytest

from experiments import bench_engine


@pytest.mark.quick
def test_host_time_of_a_step_is_measured_without_a_device():
  assert 0 < bench_engine.host_s_per_step(vocab_size=256) < 1
