"""Every plan of every policy under random load keeps the invariants, and everything gets done."""

from __future__ import annotations

import collections
import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual import expected, make_pool, make_requests, run, tokens_of

from pdjax.core.checksum import generate
from pdjax.core.events import Failed, Finished, Preempted
from pdjax.core.plan import StepResult
from pdjax.core.request import Request, SamplingParams
from pdjax.core.sequence import Sequence
from pdjax.scheduling.pages import PageConfig
from pdjax.scheduling.policies import make_policy
from pdjax.scheduling.scheduler import Scheduler, SchedulerConfig
from pdjax.serving.cluster import Cluster
from pdjax.serving.inbox import Inbox

pytestmark = pytest.mark.quick


# Policies that no paper proposes: a builder that owns the invariants must survive them. -----------


def newest_first(step):
  for seq in reversed(step.decoding):
    step.advance(seq, preempt=True)
  for seq in reversed(step.prefilling):
    step.advance(seq)
  for seq in step.waiting:
    step.advance(seq)  # goes on behind one that has no room


def admits_first(step):
  for seq in step.waiting:
    if not step.advance(seq):
      break
  for seq in step.prefilling:
    step.advance(seq)
  for seq in step.decoding:
    step.advance(seq, preempt=True)


def token_by_token(step):
  """Chunks of one token and each sequence offered twice."""
  for seq in [*step.decoding, *step.prefilling]:
    step.advance(seq, 1, preempt=True)
    step.advance(seq, 1, preempt=True)
  for seq in step.waiting:
    if not step.advance(seq, 1):
      break


def lowers_the_budget(step):
  """Room for a few of the decodes only; and it tries to get it back."""
  if step.decoding:
    step.tokens_left = 3
    step.tokens_left = 1000
  step.decode()
  step.prefill()
  step.admit()
  step.admit()


def offers_all_it_has_seen(step, seen=[]):  # noqa: B006 (kept between steps on purpose)
  """Sequences of earlier steps and of other pools, too, ended ones among them."""
  seen.extend(s for s in [*step.running, *step.waiting] if s not in seen)
  for seq in seen:
    step.advance(seq, preempt=True)
  del seen[:-64]


MIXED = {name: make_policy(name) for name in ("prefill_first", "sarathi")} | {
  "newest_first": newest_first,
  "admits_first": admits_first,
  "token_by_token": token_by_token,
  "lowers_the_budget": lowers_the_budget,
  "offers_all_it_has_seen": offers_all_it_has_seen,
}


class Watch:
  """Checks every plan of one pool when it is made, before the executor sees it."""

  def __init__(self, pool, policy_name, most_plans):
    self.pool, self.policy_name, self.most_plans = pool, policy_name, most_plans
    self.scheduler = pool.scheduler
    self.num_plans = self.num_preemptions = self.num_grown_pages = 0
    self.next_position: dict[tuple[int, int], int] = {}  # (request, generation) -> not computed yet
    self.first_scheduled: list[int] = []
    self.pages_of_plan: dict[int, set[int]] = {}
    self.device_table = collections.defaultdict(dict)  # row -> index -> page, as the executor knows
    self._next_step, self._import = pool.scheduler.next_step, pool.executor.import_
    pool.scheduler.next_step, pool.executor.import_ = self.next_step, self.import_

  def import_(self, handle, *, row, page_ids, now_s):
    self.device_table[row] = dict(enumerate(page_ids))
    return self._import(handle, row=row, page_ids=page_ids, now_s=now_s)

  def next_step(self, now_s):
    running = list(self.scheduler.running.values())
    decoding = [s for s in running if s.is_decoding and s.num_unscheduled_tokens]
    plan = self._next_step(now_s)
    if self.policy_name == "sarathi":
      self._check_no_stall(decoding, plan)
    if running:
      assert running[0].row is not None, "the oldest running sequence was preempted"
    if plan is not None:
      self.num_plans += 1
      assert self.num_plans <= self.most_plans, "no progress: more steps than tokens could need"
      self._check_limits(plan)
      self._check_pages(plan)
      self._check_positions(plan)
      self.num_preemptions += len(plan.preempted)
    return plan

  def _check_no_stall(self, decoding, plan):
    """Every running decode is in the step, unless it gave up its pages or waits for some."""
    planned = set() if plan is None else set(plan.decodes.request_ids)
    kept = [s for s in decoding if s.row is not None]
    stalled = [s for s in kept if s.request_id not in planned]
    assert all(s.request_id in self.scheduler.pages_owed for s in stalled)
    if self.scheduler.num_pages_coming:
      return
    # No page is on its way: only those go without who find nobody newer to take pages from.
    running, most = list(self.scheduler.running.values()), self.scheduler.config.max_preemptions
    for seq in stalled:
      newer = running[running.index(seq) + 1 :]
      assert all(
        s.num_preemptions >= most or s.request_id in planned or not s.num_unscheduled_tokens
        for s in newer
      )

  def _check_limits(self, plan):
    config, pages = self.scheduler.config, self.scheduler.pages.config
    assert 1 <= plan.num_tokens <= config.token_budget
    assert all(s.num_tokens >= 1 for s in plan.prefills)
    ids = [s.request_id for s in plan.prefills] + list(plan.decodes.request_ids)
    rows = [s.row for s in plan.prefills] + list(plan.decodes.rows)
    assert len(set(ids)) == len(ids), "two slices of one sequence"
    assert len(set(rows)) == len(rows), "two sequences in one row"
    assert len(self.scheduler.running) + len(self.scheduler.leaving) <= pages.num_rows
    if not config.chunk_prompts:
      assert all(s.start == 0 and s.emits_token for s in plan.prefills), "a prompt was cut"

  def _check_pages(self, plan):
    pages = self.scheduler.pages
    in_flight = {p.step_id for p, _, _ in self.pool.in_flight}
    busy = set().union(*(self.pages_of_plan[i] for i in in_flight))
    updates = plan.page_updates
    prefill_rows = {s.row for s in plan.prefills}
    assert set(updates.rows) <= prefill_rows | set(plan.decodes.rows), "pages for one not in it"
    for row, index, page in zip(updates.rows, updates.indices, updates.page_ids, strict=True):
      if not pages.config.contiguous:
        assert page not in busy, "a page of a plan in flight was given away"
      self.device_table[row][index] = page
      self.num_grown_pages += row not in prefill_rows
    touched = set()
    ends = [(s.row, s.start + s.num_tokens) for s in plan.prefills]
    ends += [(r, p + 1) for r, p in zip(plan.decodes.rows, plan.decodes.positions, strict=True)]
    for row, end in ends:
      table = pages.table(row)
      assert len(table) * pages.config.page_size >= end, "a position without a page"
      assert table == tuple(self.device_table[row][i] for i in range(len(table)))
      touched.update(table)
    self.pages_of_plan[plan.step_id] = touched

  def _check_positions(self, plan):
    for s in plan.prefills:
      if s.generation == 0 and s.start == 0:
        self.first_scheduled.append(s.request_id)
      self._take(s.request_id, s.generation, s.start, s.num_tokens, first=0)
    for i, g, p in zip(
      plan.decodes.request_ids, plan.decodes.generations, plan.decodes.positions, strict=True
    ):
      first = None if self.pool.role == "decode" else 0
      self._take(i, g, p, 1, first)

  def _take(self, request_id, generation, start, num_tokens, first):
    known = self.next_position.get((request_id, generation), first)
    assert known in (None, start), f"gap or overlap: position {start} after {known}"
    self.next_position[request_id, generation] = start + num_tokens


@dataclasses.dataclass
class Case:
  requests: list
  pools: list  # of keyword arguments of `make_pool`
  steps_in_flight: int


@st.composite
def cases(draw, policies):
  seed = draw(st.integers(0, 10_000))
  rng = random.Random(seed)
  requests = make_requests(
    draw(st.integers(1, 14)),
    seed=seed,
    rate_rps=draw(st.sampled_from([30.0, 300.0, 1e6])),
    prompt=(1, draw(st.sampled_from([1, 6, 40]))),
    output=(1, draw(st.sampled_from([1, 5, 30]))),
  )
  if draw(st.booleans()):
    requests = [with_stop(r, rng) if rng.random() < 0.4 else r for r in requests]
  page_size = draw(st.sampled_from([1, 4]))
  longest = max(r.max_cached_tokens for r in requests)
  least_pages = -(-longest // page_size)
  num_rows, contiguous = draw(st.integers(1, 6)), draw(st.booleans())
  policy = draw(st.sampled_from(policies))
  chunk_prompts = policy == "token_by_token" or draw(st.booleans())
  least_budget = num_rows if chunk_prompts else max(num_rows, longest)
  common = dict(
    chunk_prompts=chunk_prompts,
    budget=least_budget + draw(st.sampled_from([0, 1, 3, 20])),
    num_rows=num_rows,
    page_size=page_size,
    pages_per_row=least_pages + draw(st.integers(0, 2)),
    num_pages=least_pages + draw(st.sampled_from([0, 1, 2, 5, least_pages, 200])),
    contiguous=contiguous,
    watermark=draw(st.sampled_from([0.0, 0.01, 0.3])),
  )
  if policy == "disaggregated":
    pools = [
      dict(name=f"{role}{i}", role=role, policy=f"{role}_only", **common)
      for role in ("prefill", "decode")
      for i in range(draw(st.integers(1, 2)))
    ]
  else:
    pools = [
      dict(name=f"mixed{i}", policy=MIXED[policy], **common) for i in range(draw(st.integers(1, 2)))
    ]
  return Case(requests, pools, draw(st.sampled_from([1, 2]))), policy


def with_stop(request, rng):
  """Stops `request` at one of its own tokens, or at one that may never come."""
  tokens = generate(request.prompt_ids, request.sampling.max_tokens)
  stop = rng.choice([*tokens, rng.randrange(997)])
  sampling = dataclasses.replace(request.sampling, stop_ids=(stop,))
  return dataclasses.replace(request, sampling=sampling)


def until_stop(tokens, stop_ids):
  for i, token in enumerate(tokens):
    if token in stop_ids:
      return tokens[: i + 1]
  return tokens


def serve_and_check(case, policy):
  cluster = Cluster([make_pool(**options) for options in case.pools])
  requests = case.requests
  most = 50 + 20 * sum(r.max_cached_tokens for r in requests)
  watches = {pool.name: Watch(pool, policy, most) for pool in cluster.pools}
  log = run(cluster, requests, steps_in_flight=case.steps_in_flight)

  want = {r.request_id: until_stop(expected([r])[r.request_id], r.sampling.stop_ids)
          for r in requests}  # fmt: skip
  assert tokens_of(log) == want
  assert not [e for e in log if isinstance(e, Failed)]
  for watch in watches.values():
    # A preemption frees at least one page, and it was for the one page that another needed. That
    # one grows by it or, its token in flight being its last, no longer has to.
    assert watch.num_preemptions <= watch.num_grown_pages + len(requests)
    if watch.pool.role != "mixed":
      assert watch.num_preemptions == 0
    if policy in ("prefill_first", "sarathi", "disaggregated"):
      assert watch.first_scheduled == sorted(watch.first_scheduled), "not first come, first served"
  assert sum(w.num_preemptions for w in watches.values()) == sum(
    isinstance(e, Preempted) for e in log
  )
  for r in requests:
    need = r.num_prompt_tokens + len(want[r.request_id]) - 1
    ends = [
      end
      for watch in watches.values()
      for (request_id, _), end in watch.next_position.items()
      if request_id == r.request_id
    ]
    assert max(ends) >= need
    if not r.sampling.stop_ids:  # a stop is noticed while a step beyond it is in flight
      assert max(ends) == need
  return log


# Random load -------------------------------------------------------------------------------------


@pytest.mark.once
@settings(max_examples=400, derandomize=True, deadline=None)
@given(cases(list(MIXED)))
def test_mixed_pools_keep_every_invariant(drawn):
  serve_and_check(*drawn)


@pytest.mark.once
@settings(max_examples=200, derandomize=True, deadline=None)
@given(cases(["disaggregated"]))
def test_disaggregated_pools_keep_every_invariant(drawn):
  serve_and_check(*drawn)


@pytest.mark.once
@settings(max_examples=200, derandomize=True, deadline=None)
@given(
  drawn=cases([*MIXED, "disaggregated", "disaggregated"]),
  cancels=st.lists(st.tuples(st.integers(0, 13), st.floats(0, 0.5)), min_size=1, max_size=12),
)
def test_cancelled_in_any_state_a_request_ends_once_and_frees_all(drawn, cancels):
  """Queued, between chunks, in a step, preempted, in the outbox, in transfer, decoding, twice."""
  case, policy = drawn
  cluster = Cluster([make_pool(**options) for options in case.pools])
  for pool in cluster.pools:
    Watch(pool, policy, 50 + 20 * sum(r.max_cached_tokens for r in case.requests))
  inbox = Inbox(case.requests)
  for request_id, at_s in cancels:
    inbox.cancel(request_id, at_s)

  def copies_keep_their_pages(turn):
    for transfer in cluster.transfers:
      assert transfer.source.scheduler.pages.table(transfer.seq.row)
      assert transfer.target.scheduler.pages.table(transfer.target_row)

  log = run(cluster, inbox, each_turn=copies_keep_their_pages, steps_in_flight=case.steps_in_flight)
  ends = collections.Counter(e.request_id for e in log if isinstance(e, Finished | Failed))
  assert ends == {r.request_id: 1 for r in case.requests}
  failed = {e.request_id for e in log if isinstance(e, Failed)}
  assert failed <= {request_id for request_id, _ in cancels}
  for request_id, tokens in tokens_of(log).items():
    want = until_stop(
      expected(case.requests)[request_id], case.requests[request_id].sampling.stop_ids
    )
    assert tokens == want[: len(tokens)]
    assert request_id in failed or len(tokens) == len(want)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("policy", ["prefill_first", "sarathi"])
def test_the_load_of_these_tests_does_preempt(policy, steps_in_flight):
  """Or the tests above would show nothing about preemption."""
  requests = make_requests(30, seed=1, rate_rps=1000, prompt=(4, 20), output=(10, 30))
  options = dict(policy=MIXED[policy], num_pages=20, num_rows=6, budget=60, watermark=0.0)
  log = serve_and_check(Case(requests, [options], steps_in_flight), policy)
  assert sum(isinstance(e, Preempted) for e in log) >= 5


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("policy", ["prefill_first", "sarathi"])
def test_two_requests_that_only_fit_singly_both_finish(policy, steps_in_flight):
  """Both prompts fit at once (3 + 3 of 8 pages), all of their tokens do not (8 + 8 pages)."""
  requests = [
    Request(
      request_id=i,
      arrival_s=0.0,
      num_prompt_tokens=12,
      prompt_ids=tuple(range(i, i + 12)),
      sampling=SamplingParams(max_tokens=21),
    )
    for i in range(2)
  ]
  pool = dict(policy=MIXED[policy], num_pages=8, num_rows=2, budget=32, watermark=0.0)
  log = serve_and_check(Case(requests, [pool], steps_in_flight), policy)
  preempted = [e.request_id for e in log if isinstance(e, Preempted)]
  assert set(preempted) == {1}, "only the newer one is ever preempted"
  finished = [e.request_id for e in log if isinstance(e, Finished)]
  assert finished == [0, 1]


# Results that come too late ----------------------------------------------------------------------


def make_scheduler(policy=MIXED["sarathi"], *, num_rows=2, num_pages=4, budget=16):
  """Pages of 4 tokens, no watermark."""
  pages = PageConfig(num_rows=num_rows, page_size=4, pages_per_row=4, num_pages=num_pages)
  return Scheduler(policy, pages, SchedulerConfig(token_budget=budget, watermark=0.0))


def make_sequence(request_id, num_prompt_tokens, max_tokens, stop_ids=()):
  return Sequence(
    Request(
      request_id=request_id,
      arrival_s=0.0,
      num_prompt_tokens=num_prompt_tokens,
      sampling=SamplingParams(max_tokens=max_tokens, stop_ids=stop_ids),
    )
  )


def result(plan, token_id):
  num_tokens = sum(s.emits_token for s in plan.prefills) + len(plan.decodes)
  return StepResult(token_ids=(token_id,) * num_tokens)


def test_a_token_beyond_a_stop_is_ignored_and_its_pages_wait_for_the_step():
  scheduler = make_scheduler()
  scheduler.add(seq := make_sequence(0, 3, 9, stop_ids=(7,)))
  first, second = scheduler.next_step(), scheduler.next_step()
  assert second.decodes.request_ids == (0,), "planned before the first token is known"
  outcome = scheduler.commit(first, result(first, 7))
  assert outcome.finished == [(seq, "stop")]
  assert scheduler.pages.num_free_rows == 1 and scheduler.pages.num_free_pages == 3
  assert scheduler.num_pages_coming == 1
  outcome = scheduler.commit(second, result(second, 8))
  assert (outcome.emitted, outcome.finished, outcome.failed) == ([], [], [])
  assert seq.output_ids == [7]
  assert scheduler.pages.num_free_rows == 2 and scheduler.pages.num_free_pages == 4
  scheduler.check()


def test_the_result_of_a_preempted_generation_is_ignored():
  scheduler = make_scheduler(num_pages=3)
  scheduler.add(old := make_sequence(0, 4, 6))
  scheduler.add(new := make_sequence(1, 8, 2))
  first = scheduler.next_step()  # pages 1 + 2: the pool is full
  second = scheduler.next_step()  # the old one must grow: the new one loses its row
  assert second is None and (new.row, new.generation, new.num_pending_tokens) == (None, 1, 0)
  assert scheduler.pages_owed == {0: 1} and scheduler.num_pages_coming == 2
  outcome = scheduler.commit(first, result(first, 5))
  assert outcome.emitted == [(old, 5)] and new.output_ids == []
  assert (outcome.emitted_ids, outcome.token_ids) == ((0,), (5,))
  assert new.num_computed_tokens == 0 and scheduler.pages.num_free_pages == 2
  third = scheduler.next_step()
  assert third.preempted == (1,) and third.decodes.request_ids == (0,)
  scheduler.check()


def test_pages_on_their_way_are_waited_for_and_cost_nobody_else_a_row():
  scheduler = make_scheduler(num_rows=3, num_pages=3)
  for i in range(3):
    scheduler.add(make_sequence(i, 4, 5))
  first = scheduler.next_step()  # a page each: the pool is full
  for _ in range(3):
    assert scheduler.next_step() is None
    assert list(scheduler.running) == [0, 1], "one page is coming, one is needed first"
  scheduler.commit(first, result(first, 5))
  second = scheduler.next_step()
  assert second.decodes.request_ids[0] == 0 and 0 not in scheduler.pages_owed


def test_a_debt_goes_with_its_sequence():
  for leave in ("drop", "preempt", "detach"):
    scheduler = make_scheduler(num_pages=3)
    scheduler.add(old := make_sequence(0, 4, 6))
    scheduler.add(make_sequence(1, 8, 2))
    scheduler.next_step()
    scheduler.next_step()
    assert scheduler.pages_owed == {0: 1}
    getattr(scheduler, leave)(0 if leave == "drop" else old)
    assert not scheduler.pages_owed, leave


def test_a_result_of_an_old_generation_is_ignored_even_if_the_request_runs_again():
  scheduler = make_scheduler(num_rows=3)
  scheduler.add(seq := make_sequence(0, 3, 9))
  old = scheduler.next_step()
  scheduler.preempt(seq)
  scheduler.waiting[0] = seq
  new = scheduler.next_step()
  assert (new.prefills[0].generation, new.prefills[0].start) == (1, 0)
  assert new.prefills[0].row != old.prefills[0].row, "the old row is busy"
  scheduler.commit(old, result(old, 5))
  assert seq.output_ids == [] and seq.num_computed_tokens == 0
  scheduler.commit(new, result(new, 6))
  assert seq.output_ids == [6] and seq.num_computed_tokens == 3
  scheduler.check()


def test_what_a_preempted_sequence_generated_is_computed_again_as_prefill():
  scheduler = make_scheduler()
  scheduler.add(seq := make_sequence(0, 3, 9))
  for token_id in (5, 6):
    plan = scheduler.next_step()
    scheduler.commit(plan, result(plan, token_id))
  scheduler.preempt(seq)
  scheduler.waiting[0] = seq
  plan = scheduler.next_step()
  assert len(plan.decodes) == 0
  assert [(s.start, s.num_tokens, s.emits_token) for s in plan.prefills] == [(0, 5, True)]
  scheduler.commit(plan, result(plan, 8))
  assert seq.output_ids == [5, 6, 8]


@pytest.mark.parametrize("num_ended", [0, 1, 2])
def test_a_dropped_row_comes_back_when_the_last_plan_that_touches_it_ends(num_ended):
  scheduler = make_scheduler()
  scheduler.add(make_sequence(0, 3, 9))
  plans = [scheduler.next_step(), scheduler.next_step()]
  for plan in plans[:num_ended]:
    scheduler.commit(plan, result(plan, 5))
  scheduler.drop(0)
  for i, plan in enumerate(plans[num_ended:], num_ended):
    assert scheduler.pages.num_free_rows == 1, f"freed while step {i} runs"
    scheduler.commit(plan, result(plan, 5))
  assert scheduler.pages.num_free_rows == 2 and scheduler.pages.num_free_pages == 4
  scheduler.check()


def test_an_aborted_step_fails_its_sequences_and_the_step_behind_it_ends_quietly():
  scheduler = make_scheduler()
  scheduler.add(seq := make_sequence(0, 3, 9))
  first, second = scheduler.next_step(), scheduler.next_step()
  assert scheduler.abort(first, "died").failed == [(seq, "died")]
  assert scheduler.pages.num_free_rows == 1
  outcome = scheduler.abort(second, "died too")
  assert outcome.failed == [] and scheduler.pages.num_free_rows == 2
  scheduler.check()


def test_a_token_that_did_not_come_fails_its_request():
  scheduler = make_scheduler()
  scheduler.add(seq := make_sequence(0, 3, 9))
  plan = scheduler.next_step()
  outcome = scheduler.commit(plan, StepResult(token_ids=(None,), errors=((0, "not finite"),)))
  assert outcome.failed == [(seq, "not finite")] and outcome.emitted == []
  assert not scheduler.running and scheduler.pages.num_free_rows == 2


def test_plans_end_in_order():
  scheduler = make_scheduler()
  scheduler.add(make_sequence(0, 3, 9))
  first, second = scheduler.next_step(), scheduler.next_step()
  with pytest.raises(RuntimeError, match="step 1 ended out of order"):
    scheduler.commit(second, result(second, 5))
  scheduler.commit(first, result(first, 5))
  with pytest.raises(RuntimeError, match="step 0 ended out of order"):
    scheduler.commit(first, result(first, 5))
  with pytest.raises(RuntimeError, match="step 0 ended out of order"):
    scheduler.abort(first, "again")


# Limits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_prompt_tokens", "max_tokens"), [(16, 1), (15, 2), (1, 16)])
def test_the_longest_request_fits_and_one_token_more_is_refused(num_prompt_tokens, max_tokens):
  scheduler = make_scheduler()  # 4 pages of 4 tokens; the last output token needs no slot
  fits = make_sequence(0, num_prompt_tokens, max_tokens).request
  more = make_sequence(0, num_prompt_tokens, max_tokens + 1).request
  assert scheduler.refusal(fits) is None
  assert scheduler.refusal(more) == "prompt + max_tokens - 1 = 17 tokens, but the pool holds 16"
  config = dataclasses.replace(scheduler.config, decodes=False)
  prefill_pool = Scheduler(scheduler.policy, scheduler.pages.config, config)
  assert prefill_pool.refusal(more) is None, "a prefill pool holds the prompt alone"


def test_whole_prompts_longer_than_the_budget_are_refused():
  pages = PageConfig(num_rows=2, page_size=4, pages_per_row=4, num_pages=8)
  config = SchedulerConfig(token_budget=8, chunk_prompts=False)
  scheduler = Scheduler(MIXED["sarathi"], pages, config)
  assert scheduler.refusal(make_sequence(0, 8, 1).request) is None
  assert "9 tokens never fit token_budget=8" in scheduler.refusal(make_sequence(0, 9, 1).request)
  assert "9 tokens never fit token_budget=8" in scheduler.refusal(make_sequence(0, 8, 2).request)


def test_the_watermark_is_kept_from_new_prompts_only_while_something_runs():
  pages = PageConfig(num_rows=4, page_size=4, pages_per_row=10, num_pages=10)
  scheduler = Scheduler(MIXED["sarathi"], pages, SchedulerConfig(token_budget=64, watermark=0.3))
  scheduler.add(make_sequence(0, 32, 9))  # 8 of 10 pages: the pool is empty, so it may
  plan = scheduler.next_step()
  scheduler.commit(plan, result(plan, 5))
  scheduler.add(make_sequence(1, 4, 2))  # 1 page of the 2 left, of which 3 are spared
  assert scheduler.next_step().decodes.request_ids == (0,) and 1 in scheduler.waiting


def test_a_budget_below_the_rows_is_refused():
  pages = PageConfig(num_rows=4, page_size=4, pages_per_row=4, num_pages=8)
  with pytest.raises(ValueError, match="token_budget=3 cannot advance 4 running sequences"):
    Scheduler(MIXED["sarathi"], pages, SchedulerConfig(token_budget=3))


@pytest.mark.parametrize(
  ("field", "value"), [("token_budget", 0), ("watermark", -0.1), ("watermark", 1.0)]
)
def test_limits_outside_their_range_are_refused_with_the_value(field, value):
  with pytest.raises(ValueError, match=f"{field}={value} must be"):
    SchedulerConfig(**{"token_budget": 4, field: value})


def test_reserve_without_room_changes_nothing():
  scheduler = make_scheduler(num_pages=3)
  row = scheduler.reserve(8)
  assert scheduler.reserve(8) is None and scheduler.pages.num_free_pages == 1
  assert scheduler.pages.num_free_rows == 1
  assert scheduler.reserve(4) not in (None, row)
  assert scheduler.reserve(4) is None, "no row is left"
