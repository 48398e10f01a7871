"""The benchmark's device of no time can do all that the loop asks of an executor."""

from __future__ import annotations

import json

import pytest

from experiments import bench_engine


@pytest.mark.quick
def test_host_time_of_a_step_is_measured_without_a_device():
  assert 0 < bench_engine.host_s_per_step(vocab_size=256) < 1


@pytest.mark.quick
@pytest.mark.parametrize("wrong", ["x", 1.5, -1, 256])
def test_a_request_of_something_else_than_ids_is_named(tmp_path, wrong):
  path = tmp_path / "requests.json"

  def write(*ids) -> None:
    row = {"id": 0, "prompt_ids": ids, "output_len": 1, "arrival_s": 0}
    path.write_text(json.dumps({"requests": [row]}))

  write(0, 255)
  assert bench_engine.read_requests(path, vocab_size=256)[0].prompt_ids == (0, 255)
  write(0, wrong)
  message = r"requests\.json: request 0: .*not all whole numbers from 0 to 255"
  with pytest.raises(ValueError, match=message):
    bench_engine.read_requests(path, vocab_size=256)
