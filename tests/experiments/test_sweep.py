"""Every item of a sweep ends with its result or with why there is none, wherever it runs."""

from __future__ import annotations

import collections
import contextlib
import multiprocessing

import pytest
import sweeps

from experiments.sweep import (
  MOST_ATTEMPTS,
  Failure,
  Processes,
  RayCluster,
  Serial,
  as_configured,
  make_sweep,
)

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module", params=[Serial, lambda: Processes(2)], ids=["serial", "processes"])
def sweep(request):
  with contextlib.closing(request.param()) as sweep:
    yield sweep


def run(sweep, work, items) -> dict:
  return dict(sweep.run(work, collections.deque(items)))


def test_every_item_has_its_result(sweep):
  assert run(sweep, sweeps.square, range(7)) == {n: n * n for n in range(7)}
  assert run(sweep, sweeps.square, []) == {}


def test_results_may_lead_to_more_work(sweep):
  todo, found = collections.deque([2]), []
  for n, result in sweep.run(sweeps.square, todo):
    found.append((n, result))
    if result < 1000:
      todo.append(result)
  assert found == [(2, 4), (4, 16), (16, 256), (256, 65536)]


def test_what_fails_is_told_and_loses_nothing_else(sweep):
  found = run(sweep, sweeps.square_but_not_3, range(6))
  assert "3 is not squared here" in found[3].message and "square_but_not_3" in found[3].trace
  assert {n: r for n, r in found.items() if n != 3} == {n: n * n for n in (0, 1, 2, 4, 5)}


def test_a_lost_process_is_replaced_and_its_item_done_again(tmp_path):
  marker = tmp_path / "died"
  with contextlib.closing(Processes(2)) as sweep:
    found = run(sweep, sweeps.square_after_dying_once, [(n, str(marker)) for n in range(6)])
  assert marker.exists()
  assert found == {(n, str(marker)): n * n for n in range(6)}


def test_an_item_that_kills_every_process_is_named():
  with contextlib.closing(Processes(2)) as sweep:
    found = run(sweep, sweeps.die_on_3, range(6))
  assert isinstance(found[3], Failure) and f"died {MOST_ATTEMPTS} times" in found[3].message
  assert {n: r for n, r in found.items() if n != 3} == {n: n * n for n in (0, 1, 2, 4, 5)}


def test_deaths_are_counted_for_an_item_and_not_for_what_comes_after_it(tmp_path):
  """Here the same object: a later item may well have the address of one that is gone."""
  item = str(tmp_path / "deaths")
  todo, found = collections.deque([item]), []
  with contextlib.closing(Processes(1)) as sweep:
    for _, result in sweep.run(sweeps.die_four_times, todo):
      found.append(result)
      if len(found) == 1:
        todo.append(item)
  assert isinstance(found[0], Failure) and found[1] == 4


def test_a_sweep_that_is_left_early_leaves_no_process():
  others = set(multiprocessing.active_children())
  with contextlib.closing(make_sweep(jobs=2, ray=None)) as sweep:
    run_of_100 = sweep.run(sweeps.square, collections.deque(range(100)))
    next(run_of_100)
    assert set(multiprocessing.active_children()) - others
    run_of_100.close()
    assert run(sweep, sweeps.square, [5]) == {5: 25}, "the next run sees what the last one left"
  assert set(multiprocessing.active_children()) <= others


def test_processes_begin_as_they_are_told():
  with contextlib.closing(make_sweep(jobs=2, ray=None, begin=sweeps.learn_7)) as sweep:
    assert run(sweep, sweeps.is_known, [7, 8]) == {7: True, 8: False}
  assert not sweeps.is_known(7)


def test_a_sweep_has_a_process():
  with pytest.raises(ValueError, match="jobs=0"):
    make_sweep(jobs=0, ray=None)


CONFIG = """
from configs.llama3_8b_a100 import get_config
from configs.workloads import WORKLOADS

WORKLOADS["mine"] = WORKLOADS["sharegpt"]
"""


def test_other_processes_know_what_a_config_file_adds_also_where_it_is_not(tmp_path):
  path = tmp_path / "own.py"
  path.write_text(CONFIG)
  begin = as_configured(path)
  for _ in range(2):
    with contextlib.closing(make_sweep(jobs=2, ray=None, begin=begin)) as sweep:
      assert run(sweep, sweeps.is_workload, ["mine"]) == {"mine": True}
    path.unlink(missing_ok=True)
  assert not sweeps.is_workload("mine")


@pytest.mark.slow  # a cluster starts
def test_a_ray_cluster_repeats_what_a_lost_worker_had_and_knows_own_configs(tmp_path):
  pytest.importorskip("ray", reason="needs the extra [ray]")
  marker = tmp_path / "died"

  def square(n: int) -> int:  # not of a module: the cluster has no tests
    import os
    import signal

    if n == 3 and not marker.exists():
      marker.touch()
      os.kill(os.getpid(), signal.SIGKILL)
    if n == 4:
      raise ValueError("4 is not squared here")
    return n * n

  def is_workload(name: str) -> bool:
    from configs.workloads import WORKLOADS

    return name in WORKLOADS

  config = tmp_path / "own.py"
  config.write_text(CONFIG)
  begin = as_configured(config)
  config.unlink()
  with contextlib.closing(RayCluster("local", begin)) as sweep:
    found = run(sweep, square, range(7))
    assert run(sweep, is_workload, ["mine"]) == {"mine": True}
  assert marker.exists(), "no worker was lost"
  assert "4 is not squared here" in found.pop(4).message
  assert found == {n: n * n for n in (0, 1, 2, 3, 5, 6)}
