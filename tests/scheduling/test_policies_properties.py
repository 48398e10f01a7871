"""What must hold for every step of every policy, whatever comes and whatever room there is."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual import expected, make_pool, make_requests, run, tokens_of

from pdjax.core.events import Preempted
from pdjax.core.request import Slo
from pdjax.scheduling.policies import POLICIES
from pdjax.scheduling.scheduler import RESERVATIONS
from pdjax.serving.cluster import Cluster

MIXED = [name for name, spec in POLICIES.items() if not spec.half]
NO_STALL = ("sarathi", "hybrid_only", "orca", "shortest_prefill_first", "deadline")
LONGEST = 40 + 12 - 1


class Watch:
  """Checks every plan of one pool as it is made."""

  def __init__(self, pool, name):
    self._scheduler, self._name = pool.scheduler, name
    self._next_step = pool.scheduler.next_step
    pool.scheduler.next_step = self.next_step

  def next_step(self, now_s):
    scheduler, needs = self._scheduler, POLICIES[self._name]
    decoding = [s for s in scheduler.decoding.values() if s.num_unscheduled_tokens]
    plan = self._next_step(now_s)
    if plan is None:
      return plan
    assert plan.num_tokens <= scheduler.config.token_budget
    assert all(s.num_tokens >= 1 for s in plan.prefills)
    ids = [s.request_id for s in plan.prefills] + list(plan.decodes.request_ids)
    assert len(ids) == len(set(ids)), "two slices of one sequence"
    if not needs.mixes:
      assert plan.kind != "mixed"
    if not needs.chunks:
      swaps = scheduler.config.swap_tokens  # what was swapped out is not computed again
      assert all(s.emits_token and (s.start == 0 or swaps) for s in plan.prefills), "it was cut"
    if self._name in NO_STALL:
      stalled = {s.request_id for s in decoding if s.row is not None} - set(ids)
      # But for one that no page is left for, not even one of a newer sequence.
      assert stalled <= scheduler.pages_owed.keys()
    if scheduler.config.reservation in ("request", "max_len"):
      assert not plan.preempted
    return plan


def predict_step_s(counts):
  """As `virtual.step_s`."""
  return 8e-3 + 28e-6 * counts.num_tokens


def make_pools(name, num_pools=1, *, num_rows, budget, limits=None, **options):
  needs = POLICIES[name]
  whole = LONGEST + needs.mixes * num_rows
  pools = [
    make_pool(
      f"mixed{i}",
      policy=name,
      num_rows=num_rows,
      budget=max(num_rows, budget) if needs.chunks else whole,
      chunk_prompts=needs.chunks,
      limits={"reservation": needs.reservation} | (limits or {}),
      pages_per_row=-(-LONGEST // options["page_size"]),
      **options,
    )
    for i in range(num_pools)
  ]
  for pool in pools:
    pool.scheduler.predict_step_s = predict_step_s
    Watch(pool, name)
  return pools


@st.composite
def traffic(draw):
  requests = make_requests(
    draw(st.integers(1, 14)),
    seed=draw(st.integers(0, 10_000)),
    rate_rps=draw(st.sampled_from([30.0, 300.0, 1e6])),
    prompt=(1, draw(st.sampled_from([1, 6, 40]))),
    output=(1, draw(st.sampled_from([1, 4, 12]))),
  )
  slos = st.none() | st.builds(
    lambda ttft_s, tpot_s: Slo(ttft_s=ttft_s, tpot_s=tpot_s),
    st.sampled_from([1e-3, 0.05, 1.0]),
    st.sampled_from([1e-3, 0.01, 1.0]),
  )
  return [dataclasses.replace(request, slo=draw(slos)) for request in requests]


@settings(max_examples=500, derandomize=True, deadline=None)
@given(
  name=st.sampled_from(MIXED),
  requests=traffic(),
  num_pools=st.integers(1, 2),
  num_rows=st.integers(1, 6),
  budget=st.sampled_from([1, 5, 16, 64]),
  page_size=st.sampled_from([1, 4]),
  spare_pages=st.sampled_from([0, 1, 5, 200]),
  contiguous=st.booleans(),
  watermark=st.sampled_from([0.0, 0.3]),
  limits=st.fixed_dictionaries(
    {},
    optional={
      "reservation": st.sampled_from(RESERVATIONS),
      "look_ahead": st.integers(0, 2),
      "max_partial_prefills": st.integers(1, 2),
      "max_preemptions": st.integers(0, 2),
      "swap_tokens": st.sampled_from([20, 1000]),
    },
  ),
  steps_in_flight=st.sampled_from([1, 2]),
)
def test_every_step_keeps_what_its_policy_promises_and_every_request_is_served(
  name, requests, num_pools, steps_in_flight, page_size, spare_pages, **options
):
  num_pages = -(-LONGEST // page_size) + spare_pages
  pools = make_pools(name, num_pools, page_size=page_size, num_pages=num_pages, **options)
  log = run(Cluster(pools), requests, steps_in_flight=steps_in_flight)
  assert tokens_of(log) == expected(requests)


REQUESTS = make_requests(16, seed=4, rate_rps=200.0, prompt=(4, 40), output=(4, 12))
ROOMY, SCARCE = 200, 20  # pages; the longest sequence needs 13


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("budget", [6, 11, 64])
@pytest.mark.parametrize("room", ["slots", ROOMY, SCARCE])
@pytest.mark.parametrize("name", MIXED)
def test_tokens_depend_on_nothing_that_a_policy_does(name, room, budget, steps_in_flight):
  """The same under every policy, layout, chunk size and pattern of preemption."""
  contiguous = room == "slots"
  pools = make_pools(
    name,
    num_rows=6,
    budget=budget,
    page_size=4,
    num_pages=ROOMY if contiguous else room,
    contiguous=contiguous,
    watermark=0.0,
  )
  log = run(Cluster(pools), REQUESTS, steps_in_flight=steps_in_flight)
  assert tokens_of(log) == expected(REQUESTS)
  was_preempted = any(isinstance(event, Preempted) for event in log)
  assert was_preempted == (room == SCARCE and POLICIES[name].reservation != "max_len")


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("reservation", RESERVATIONS)
@pytest.mark.parametrize("name", MIXED)
def test_every_policy_makes_progress_under_every_reservation(name, reservation, steps_in_flight):
  """Whatever it asks for itself: `scheduler.reservation` may say otherwise."""
  pools = make_pools(
    name,
    num_rows=6,
    budget=11,
    page_size=4,
    num_pages=SCARCE,
    watermark=0.0,
    limits={"reservation": reservation},
  )
  log = run(Cluster(pools), REQUESTS, steps_in_flight=steps_in_flight)
  assert tokens_of(log) == expected(REQUESTS)
