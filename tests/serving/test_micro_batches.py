"""Decodes in a pipeline: a share of them in each stage, so that no stage waits for their tokens."""

from __future__ import annotations

import dataclasses

import pytest
from virtual import expected, make_pool, make_requests, run, tokens_of

from pdjax.core.events import Step
from pdjax.serving.cluster import Cluster

pytestmark = pytest.mark.quick

STAGES = 2  # the checksum model has two layers
CUT = dict(num_stages=STAGES, layer_groups=((0, 1), (1, 2)), num_rows=8, num_pages=256)


def serve(requests, *, micro_batches=STAGES, policy="sarathi", each_turn=None, **options):
  pool = make_pool(policy=policy, limits={"micro_batches": micro_batches}, **CUT | options)
  watch = None if each_turn is None else lambda turn: each_turn(pool)
  return run(Cluster([pool]), requests, each_turn=watch)


@pytest.mark.parametrize("policy", ["sarathi", "fcfs", "orca", "deadline", "prefill_first"])
def test_no_sequence_decodes_in_two_steps_that_are_under_way(policy):
  requests = make_requests(30, seed=2, rate_rps=100)
  most = 0

  def look(pool):
    nonlocal most
    most = max(most, len(pool.in_flight))
    decoding = [i for plan, *_ in pool.in_flight for i in plan.decodes.request_ids]
    assert len(decoding) == len(set(decoding))

  whole = dict(chunk_prompts=False, budget=200) if policy in ("orca", "prefill_first") else {}
  log = serve(requests, policy=policy, each_turn=look, **whole)
  assert tokens_of(log) == expected(requests) and most == STAGES


@pytest.mark.parametrize("seed", [7, 19, 24])
def test_one_that_waits_for_a_page_takes_no_share_from_the_one_that_will_give_it(seed):
  requests = make_requests(3, seed=seed, rate_rps=1000, prompt=(5, 20), output=(10, 30))
  pool = make_pool(
    limits={"micro_batches": STAGES, "max_preemptions": 1}, **CUT | dict(num_pages=13)
  )
  assert tokens_of(run(Cluster([pool]), requests)) == expected(requests)


def test_a_full_pipeline_has_no_bubbles():
  """As many tokens take as long as on one device of all its layers that runs the shares in turn."""
  requests = [
    dataclasses.replace(r, arrival_s=0.0)
    for r in make_requests(8, seed=1, prompt=(1, 1), output=(50, 50))
  ]

  def decode_s(log):
    steps = [e for e in log if isinstance(e, Step) and e.kind == "decode" and len(e.decode_ids) > 3]
    return (steps[-1].end_s - steps[0].end_s) / (sum(len(e.decode_ids) for e in steps[1:]))

  shares = decode_s(serve(requests, step_s=lambda plan: 1.0))
  at_once = decode_s(serve(requests, step_s=lambda plan: 1.0, micro_batches=1))
  assert shares == pytest.approx(0.5 / 4, rel=1e-3), "a share of 4 leaves the last stage each 0.5 s"
  assert at_once == pytest.approx(1.0 / 8, rel=1e-3), "all 8 go through both stages in 1 s"
  by_tokens = dict(step_s=lambda plan: 0.25 * plan.num_tokens)
  assert decode_s(serve(requests, **by_tokens)) == pytest.approx(
    decode_s(serve(requests, micro_batches=1, **by_tokens)) / STAGES, rel=1e-3
  ), "where work grows with the batch, two stages do twice as much"
