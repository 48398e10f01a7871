"""Decode steps in one stroke: the history of a step at a time, in less time."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual import make_cluster, make_requests, run

from pdjax.core.costs import count_plan
from pdjax.core.events import Step, Stroke, each_step, read_events, write_events
from pdjax.core.model_config import ModelConfig
from pdjax.core.request import SamplingParams
from pdjax.metrics.latency import interference, request_records
from pdjax.metrics.timeline import chrome_trace
from pdjax.metrics.utilisation import pool_usage, span_s
from pdjax.scheduling.hand_off import HandOff
from pdjax.scheduling.routing import make_router
from pdjax.serving.inbox import Inbox
from pdjax.sim.hardware import Link
from pdjax.sim.sim_executor import SimExecutor

pytestmark = pytest.mark.quick

LINK = Link(name="test", latency_s=1e-3, bytes_per_s=1e6)
MODEL = ModelConfig(
  name="test",
  vocab_size=64,
  num_layers=2,
  d_model=16,
  num_heads=4,
  num_kv_heads=2,
  head_dim=4,
  d_ff=32,
  max_len=256,
)


def seconds(counts, num_keys):
  return 8e-3 + 28e-6 * counts.num_tokens + 1e-6 * (counts.num_prefill_pairs + num_keys)


def step_s(plan):
  counts = count_plan(plan)
  return seconds(counts, counts.num_decode_keys)


def steps_s(plan, num_steps):
  counts = count_plan(plan)
  return seconds(counts, counts.num_decode_keys + counts.num_decodes * np.arange(num_steps))


def history(
  strategy,
  requests,
  *,
  in_strokes,
  policy=None,
  grid_s=None,
  link=LINK,
  cancels=(),
  role_changes=(),
  each_turn=None,
  **options,
):
  """The log of one run, with strokes or without. All steps take `grid_s`, if it is given."""
  cluster = make_cluster(strategy, **options)
  for pool in cluster.pools:
    if policy is not None:
      pool.scheduler.become(policy, pool.scheduler.config)
    one_s, many_s = step_s, steps_s
    if grid_s is not None:
      one_s, many_s = lambda plan: grid_s, lambda plan, num_steps: np.full(num_steps, grid_s)
    pool.executor = SimExecutor(
      step_s=one_s, steps_s=many_s if in_strokes else None, link=link, bytes_per_token=8
    )
    if pool.scheduler.predict_step_s is not None:
      pool.scheduler.predict_step_s = lambda c: seconds(c, c.num_decode_keys)
  inbox = Inbox(requests)
  for request_id, at_s in cancels:
    inbox.cancel(request_id, at_s)
  for pool, role, at_s in role_changes:
    inbox.change_role(pool, role, at_s)
  return run(cluster, inbox, each_turn=each_turn)


def by_pool(log):
  steps = {}
  for step in each_step(log):
    steps.setdefault(step.pool, []).append(step)
  return steps


def others(log):
  return sorted(repr(e) for e in log if not isinstance(e, Step | Stroke))


def assert_same(strategy, requests, **options):
  """Returns the log in strokes."""
  stepped = history(strategy, requests, in_strokes=False, **options)
  stroked = history(strategy, requests, in_strokes=True, **options)
  assert not any(isinstance(e, Stroke) for e in stepped)
  assert by_pool(stroked) == by_pool(stepped)
  assert others(stroked) == others(stepped)
  return stroked


@pytest.mark.parametrize(
  "strategy",
  ["sarathi", "prefill_first", "orca", "faster_transformer", "fcfs", "deadline",
   "shortest_prefill_first", "simple_chunking", "disaggregated", "2xprefill,2xdecode",
   "prefill,decode,mixed"],
)  # fmt: skip
@pytest.mark.parametrize("rate_rps", [4.0, 60.0])
def test_strokes_give_the_history_of_single_steps(strategy, rate_rps):
  requests = make_requests(60, seed=3, rate_rps=rate_rps, output=(1, 60))
  log = assert_same(strategy, requests)
  strokes = [e for e in log if isinstance(e, Stroke)]
  assert sum(len(e.ends_s) for e in strokes) > 2 * len(strokes) > 0


def test_a_policy_that_does_not_say_that_its_steps_repeat_takes_them_one_at_a_time():
  def shortest_first(step):
    for seq in sorted(step.decoding, key=lambda seq: seq.num_tokens)[:2]:
      step.advance(seq, preempt=True)
    step.prefill()
    step.admit()

  requests = make_requests(20, seed=3, rate_rps=60.0, output=(1, 60))
  logs = [
    history("mixed", requests, in_strokes=in_strokes, policy=shortest_first)
    for in_strokes in (False, True)
  ]
  assert list(logs[0]) == list(logs[1])


def test_a_request_that_could_end_with_its_last_token_ends_there():
  sampling = SamplingParams(max_tokens=3, min_tokens=3, stop_ids=(7,))
  request = dataclasses.replace(make_requests(1, seed=0)[0], sampling=sampling)
  for in_strokes in (False, True):
    (record,) = request_records(history("mixed", [request], in_strokes=in_strokes)).values()
    assert record.finish_reason == "length" and len(record.token_ids) == 3


@pytest.mark.once
@settings(max_examples=30, deadline=None)
@given(st.data())
def test_strokes_give_the_history_of_single_steps_whatever_happens(data):
  rng = random.Random(data.draw(st.integers(0, 10**6)))
  requests = make_requests(
    30, seed=rng.randrange(100), rate_rps=rng.choice([5, 40, 400]), output=(1, 50)
  )
  end_s = requests[-1].arrival_s + 1
  requests = [
    dataclasses.replace(r, timeout_s=rng.uniform(0.1, 1)) if rng.random() < 0.2 else r
    for r in requests
  ]
  reservation = data.draw(st.sampled_from(["chunk", "prompt", "request"]))
  strategy = data.draw(st.sampled_from(["sarathi", "chunked", "2xmixed", "disaggregated",
                                        "prefill,2xdecode", "deadline", "fcfs",
                                        "prefill:prefill_chunks,2xdecode",
                                        "prefill,decode,3xmixed"]))  # fmt: skip
  grid_s = data.draw(st.sampled_from([None, 2**-7]))  # then steps end just where things happen
  if grid_s is not None:
    requests = [
      dataclasses.replace(
        r,
        arrival_s=round(r.arrival_s / grid_s) * grid_s,
        timeout_s=r.timeout_s and grid_s * max(1, round(r.timeout_s / grid_s)),
      )
      for r in requests
    ]
  assert_same(
    strategy,
    requests,
    grid_s=grid_s,
    link=data.draw(st.sampled_from([LINK, dataclasses.replace(LINK, bytes_per_s=2e3)])),
    cancels=[(rng.randrange(30), rng.uniform(0, end_s)) for _ in range(5)],
    role_changes=[
      (rng.choice(["mixed0", "decode0"]), role, rng.uniform(0, end_s))
      for role in rng.choices(["prefill", "decode", "mixed"], k=2)
    ],
    router=make_router(data.draw(st.sampled_from(["least_loaded", "conductor", "local_cache"]))),
    hand_off=HandOff(reservation=data.draw(st.sampled_from(["request", "prompt"]))),
    num_pages=data.draw(st.sampled_from([32, 40, 64])),
    limits={
      "reservation": reservation,
      "prefix_cache": data.draw(st.booleans()),
      "swap_tokens": data.draw(st.sampled_from([0, 100])),
      "look_ahead": data.draw(st.sampled_from([0, 3])),
    },
  )


def test_tokens_that_say_nothing_are_only_counted():
  requests = make_requests(20, seed=2, rate_rps=20, output=(1, 40))
  for in_strokes in (False, True):
    turns = []
    log = history("chunked", requests, in_strokes=in_strokes, each_turn=turns.append)
    num_tokens = sum(len(record.token_ids) for record in request_records(log).values())
    assert sum(turn.num_tokens for turn in turns) == num_tokens
    assert sum(len(turn.tokens) for turn in turns) == (0 if in_strokes else num_tokens)
    assert any(turn.sequences for turn in turns) != in_strokes


def test_a_stroke_ends_where_a_sequence_does_and_at_an_arrival():
  first, second = make_requests(2, seed=1, prompt=(8, 8), output=(40, 40))
  second = dataclasses.replace(second, arrival_s=first.arrival_s + 0.1)
  log = history("mixed", [first, second], in_strokes=True)
  strokes = [e for e in log if isinstance(e, Stroke) and e.pool == "mixed0"]
  assert strokes[0].ends_s[-2] < second.arrival_s <= strokes[0].end_s  # the step under way goes on
  ends_s = {r.finish_s for r in request_records(log).values()}
  assert ends_s <= {e.end_s for e in log if isinstance(e, Step | Stroke)}


def test_metrics_of_strokes_are_those_of_single_steps(tmp_path):
  requests = make_requests(40, seed=5, rate_rps=20, output=(2, 60))
  stepped = history("disaggregated", requests, in_strokes=False)
  stroked = history("disaggregated", requests, in_strokes=True)
  assert request_records(stroked) == request_records(stepped)
  assert span_s(stroked) == span_s(stepped)
  assert interference(stroked, any_pool=True) == interference(stepped, any_pool=True)
  ours, theirs = (pool_usage(log, MODEL) for log in (stroked, stepped))
  assert ours.keys() == theirs.keys()
  for pool, usage in ours.items():
    assert usage.total.num_steps == theirs[pool].total.num_steps
    assert usage.total.num_decode_tokens == theirs[pool].total.num_decode_tokens
    assert usage.total.flops == theirs[pool].total.flops
    assert usage.total.num_bytes == pytest.approx(theirs[pool].total.num_bytes, rel=1e-12)
    assert usage.total.busy_s == theirs[pool].total.busy_s
  write_events(tmp_path / "events.jsonl", {"run": stroked})
  assert list(read_events(tmp_path / "events.jsonl")["run"]) == list(stroked)
  rows = [r for r in chrome_trace(stroked, MODEL)["traceEvents"] if r.get("cat") == "step"]
  assert sum(r["args"]["steps"] for r in rows) == sum(1 for _ in each_step(stepped))
