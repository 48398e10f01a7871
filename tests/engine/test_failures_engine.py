"""A step that really fails takes the donated cache along; the executor makes a new one."""

import itertools

import jax
import numpy as np
import pytest
from engine.pools import make_cluster, serve_all
from jax.experimental import transfer
from virtual import expected, make_requests, tokens_of

from pdjax.core.events import Failed, Finished, Preempted, Step
from pdjax.scheduling.probe import probe_plan

pytestmark = pytest.mark.quick
STEPS = ("prefill_step", "decode_step", "mixed_step")


def state_of(executor):
  return jax.tree.leaves((executor._cache, executor._last_token, executor._seen))


def poisoned(x):
  """An array like `x` that a device failed to compute: whatever reads it fails as well, later."""
  shape = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
  return transfer.make_error_array(shape, "device lost")


def change_step(monkeypatch, steps, number, change):
  """What the step number `number` returned goes through `change`."""
  calls = itertools.count()

  def watched(step):
    def call(*args):
      result = step(*args)
      return change(result) if next(calls) == number else result

    return call

  for name in STEPS:
    monkeypatch.setattr(steps, name, watched(getattr(steps, name)))


def fail_at_call(result):
  jax.block_until_ready(result)
  raise MemoryError("out of memory, after the cache was donated")


def fail_on_device(result):
  cache, last_token, seen, sampled = result
  return (
    jax.tree.map(poisoned, cache),
    last_token,
    seen,
    sampled._replace(ids=poisoned(sampled.ids)),
  )


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("strategy", ["continuous", "chunked", "disaggregated"])
def test_what_a_failed_step_did_not_touch_is_computed_again(
  checksum_engine, monkeypatch, strategy, steps_in_flight
):
  requests = make_requests(20, seed=40, rate_rps=1e5, prompt=(8, 40), output=(4, 12))
  recovered, recover = [], type(checksum_engine.executors[0]).recover

  def watch(executor):
    gone = any(x.is_deleted() for x in state_of(executor))
    recovered.append((gone, recover(executor)))
    return recovered[-1][1]

  cluster = make_cluster(checksum_engine, strategy, shuffle=9)
  monkeypatch.setattr(type(checksum_engine.executors[0]), "recover", watch)
  change_step(monkeypatch, checksum_engine.steps, 9, fail_at_call)
  log = serve_all(cluster, requests, steps_in_flight=steps_in_flight)  # every page comes back
  assert recovered == [(True, True)], "the injected failure must really delete the cache"
  failed = {e.request_id: e.reason for e in log if isinstance(e, Failed)}
  assert failed and all("out of memory" in reason for reason in failed.values())
  assert len([e for e in log if isinstance(e, Finished)]) == 20 - len(failed) > 0
  want = expected(requests)
  for i, tokens in tokens_of(log).items():
    assert tokens == (want[i][: len(tokens)] if i in failed else want[i])


def test_a_failure_that_comes_with_the_result_takes_the_steps_behind_it_along(
  checksum_paged, monkeypatch
):
  """The call itself went well, and a second step is in flight when the device's failure shows."""
  change_step(monkeypatch, checksum_paged.steps, 12, fail_on_device)
  requests = make_requests(20, seed=41, rate_rps=1e5, prompt=(8, 40), output=(4, 12))
  cluster = make_cluster(checksum_paged, "continuous", shuffle=9)
  log = serve_all(cluster, requests, steps_in_flight=2)
  failed = {e.request_id: e.reason for e in log if isinstance(e, Failed)}
  broken = [e for e in log if isinstance(e, Step) and not e.emitted_ids]
  assert broken and set(failed) == {*broken[0].prefill_ids, *broken[0].decode_ids}
  assert all("device lost" in reason for reason in failed.values())
  assert {e.request_id for e in log if isinstance(e, Preempted)}.isdisjoint(failed)
  want = expected(requests)
  for i, tokens in tokens_of(log).items():
    assert tokens == (want[i][: len(tokens)] if i in failed else want[i])


def test_an_intact_cache_is_kept(checksum_paged):
  executor = checksum_paged.executors[0]
  plan = probe_plan(checksum_paged.pages, prefills=(8, 3), decodes=2)
  executor.submit(plan, 0.0)
  before = state_of(executor)
  assert not executor.recover()
  assert all(a is b for a, b in zip(before, state_of(executor), strict=True))
  executor.reset()
  assert all(a is b for a, b in zip(before, state_of(executor), strict=True))


@pytest.mark.parametrize("call", ["recover", "reset"])
def test_a_lost_cache_is_replaced_by_one_that_serves_as_before(checksum_paged, call):
  executor = checksum_paged.executors[0]
  plan = probe_plan(checksum_paged.pages, prefills=(8, 3))
  executor.reset()
  want = executor.submit(plan, 0.0).result()
  before = state_of(executor)
  traces = checksum_paged.steps.num_traces.total()
  for x in before:
    x.delete()
  with pytest.raises(RuntimeError, match="deleted"):
    executor.submit(plan, 0.0)
  getattr(executor, call)()
  for old, new in zip(before, state_of(executor), strict=True):
    assert (old.shape, old.dtype) == (new.shape, new.dtype)
    assert new.sharding.is_equivalent_to(old.sharding, new.ndim)
  assert all(not np.asarray(x).any() for x in state_of(executor))
  assert executor.submit(plan, 0.0).result() == want
  assert checksum_paged.steps.num_traces.total() == traces
  executor.reset()
