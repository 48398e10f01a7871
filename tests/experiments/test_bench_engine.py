"""The benchmark's device of no time can do all that the loop asks of an executor."""

from __future__ import annotations

import pytest

from experiments import bench_engine


@pytest.mark.quick
def test_host_time_of_a_step_is_measured_without_a_device():
  assert 0 < bench_engine.host_s_per_step(vocab_size=256) < 1


@pytest.mark.quick
def test_a_request_of_something_else_than_ids_is_named(tmp_path):
  path = tmp_path / "requests.json"
  path.write_text(
    '{"requests": [{"id": 0, "prompt_ids": [1, "x"], "output_len": 1, "arrival_s": 0}]}'
  )
  with pytest.raises(ValueError, match=r"requests\.json: request 0: .*not all whole numbers"):
    bench_engine.read_requests(path)
