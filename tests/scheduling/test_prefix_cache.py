"""What was computed is found again: which tokens, from when on, and never a wrong page."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual import expected, make_cluster, make_pool, run, tokens_of

from pdjax.core.events import Copied, Preempted, Step
from pdjax.core.request import Request, SamplingParams
from pdjax.core.sequence import Sequence
from pdjax.metrics.utilisation import prefix_hits
from pdjax.scheduling.pages import EVICTION, PageConfig, PagePool
from pdjax.scheduling.prefix import extend_keys
from pdjax.serving.cluster import Cluster

pytestmark = pytest.mark.quick
PAGE = 4
CACHE = {"prefix_cache": True}


def ids(n, seed=1):
  return tuple((seed * 131 + 7 * i) % 97 for i in range(n))


def request(request_id, prompt, *, max_tokens=4, arrival_s=None):
  return Request(
    request_id=request_id,
    arrival_s=float(request_id) if arrival_s is None else arrival_s,
    num_prompt_tokens=len(prompt),
    prompt_ids=prompt,
    sampling=SamplingParams(max_tokens=max_tokens),
  )


def first_starts(log):
  """Where the first slice of each request began: what the cache had for it."""
  starts = {}
  for event in log:
    if isinstance(event, Step):
      for request_id, start in zip(event.prefill_ids, event.prefill_starts):
        starts.setdefault(request_id, start)
  return starts


def serve_all(requests, **options):
  cluster = Cluster([make_pool(limits=CACHE, **options)])
  log = run(cluster, requests)
  assert tokens_of(log) == expected(requests)
  return log, cluster.pools[0].scheduler


@pytest.mark.parametrize("num_tokens", range(1, 4 * PAGE + 2))
def test_an_equal_prompt_hits_all_whole_pages_before_its_last_token(num_tokens):
  """Whole prompts, exact page multiples and all between: floor((n - 1) / page) pages."""
  log, _ = serve_all([request(0, ids(num_tokens)), request(1, ids(num_tokens))])
  hit = (num_tokens - 1) // PAGE * PAGE
  assert first_starts(log) == {0: 0, 1: hit}
  assert prefix_hits(log) == (hit, 2 * num_tokens)


@pytest.mark.parametrize("budget", [6, 7, 9, 64])
def test_a_longer_prompt_goes_on_where_the_common_beginning_ends(budget):
  common = ids(19)
  prompts = [common, common + ids(9, 2), common + ids(9, 3), ids(30, 4)]
  log, _ = serve_all([request(i, p) for i, p in enumerate(prompts)], budget=budget)
  assert first_starts(log) == {0: 0, 1: 16, 2: 16, 3: 0}


def test_generated_tokens_are_found_again_by_the_next_turn_of_a_conversation():
  first = request(0, ids(10), max_tokens=9)
  answer = expected([first])[0]
  # K and V of the last token were never computed.
  second = request(1, first.prompt_ids + answer + ids(5, 2))
  log, _ = serve_all([first, second])
  assert first_starts(log)[1] == (10 + 9 - 1) // PAGE * PAGE == 16


def test_two_equal_prompts_in_one_step_are_computed_twice_and_stay_apart():
  requests = [request(i, ids(12), arrival_s=0.0) for i in range(2)]
  log, scheduler = serve_all(requests, budget=64)
  assert first_starts(log) == {0: 0, 1: 0}, "nothing is complete before the step has ended"
  assert scheduler.pages.num_cached_pages < 2 * 3, "the second copy stays unknown"


def test_a_prompt_is_not_found_before_the_step_that_computes_it_has_ended():
  """The second arrives while chunks of the first run: it may use those that are complete."""
  requests = [request(0, ids(40), arrival_s=0.0), request(1, ids(40), arrival_s=0.02)]
  log, _ = serve_all(requests, budget=16)
  done_before = {0: 0}
  for event in log:
    if isinstance(event, Step) and 1 in event.prefill_ids:
      break
    if isinstance(event, Step):
      done_before[0] = sum(event.prefill_tokens) + done_before[0]
  assert 0 < first_starts(log)[1] <= done_before[0]


def test_a_preempted_owner_finds_its_own_pages():
  requests = [request(i, ids(8, i), max_tokens=20, arrival_s=0.0) for i in range(3)]
  log, _ = serve_all(requests, num_pages=14, budget=16)
  assert any(isinstance(event, Preempted) for event in log), "the case of this test"
  restarts = [
    start
    for event in log
    if isinstance(event, Step)
    for start, n in zip(event.prefill_starts, event.prefill_tokens)
    if start > 0
  ]
  assert restarts, "what it had computed was still there"


@pytest.mark.parametrize("strategy", ["continuous", "chunked", "disaggregated"])
@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("eviction", sorted(EVICTION))
@settings(max_examples=12, deadline=None, derandomize=True)
@given(data=st.data())
def test_tokens_are_those_of_a_pool_without_a_cache(strategy, steps_in_flight, eviction, data):
  """Few pages, so that pages are shared, evicted, and their owners preempted all the time."""
  stems = [ids(data.draw(st.integers(1, 24)), seed) for seed in range(3)]
  requests = []
  for i in range(data.draw(st.integers(2, 12))):
    stem = data.draw(st.sampled_from(stems))
    prompt = stem[: data.draw(st.integers(1, len(stem)))] + ids(data.draw(st.integers(0, 9)), i)
    requests.append(
      request(i, prompt, max_tokens=data.draw(st.integers(1, 8)), arrival_s=i * 2**-6)
    )
  cluster = make_cluster(
    strategy, num_pages=14, num_rows=4, limits={"prefix_cache": True, "eviction": eviction}
  )
  log = run(cluster, requests, steps_in_flight=steps_in_flight)
  assert tokens_of(log) == expected(requests)


@pytest.mark.parametrize("num_prompt", [3, 4, 5, 19, 20, 21])
def test_only_what_the_decode_pool_lacks_is_handed_over(num_prompt):
  """The second request finds its whole pages in both pools; with none left over nothing moves."""
  requests = [request(i, ids(num_prompt), max_tokens=3) for i in range(2)]
  cluster = make_cluster("disaggregated", limits=CACHE)
  log = run(cluster, requests)
  assert tokens_of(log) == expected(requests)
  first, second = (event for event in log if isinstance(event, Copied))
  in_pages = num_prompt // PAGE * PAGE  # its first token is known by then: no position is kept back
  assert first.num_tokens == num_prompt and second.num_tokens == num_prompt - in_pages
  assert second.num_bytes * num_prompt == first.num_bytes * second.num_tokens


def test_the_decode_pool_keeps_what_it_generated_for_the_next_turn():
  first = request(0, ids(10), max_tokens=9)
  second = request(1, first.prompt_ids + expected([first])[0] + ids(5, 2))
  log = run(make_cluster("disaggregated", limits=CACHE), [first, second])
  assert tokens_of(log) == expected([first, second])
  copies = [event for event in log if isinstance(event, Copied)]
  assert copies[1].num_tokens == 24 - 16, "18 positions of the first turn were computed there"
  assert first_starts(log)[1] == 8, "the prefill pool knows the prompt alone"


def test_pages_of_a_step_that_gave_no_token_are_not_published():
  """The model's logits were not finite: whoever has the same prompt computes it for itself."""
  requests = [request(0, ids(21)), request(1, ids(21))]
  pool = make_pool(budget=64, limits=CACHE, fails=lambda i: "broken" if i == 0 else None)
  log = run(Cluster([pool]), requests)
  assert first_starts(log) == {0: 0, 1: 0} and tokens_of(log)[1] == expected(requests)[1]


def test_rows_that_are_one_stretch_of_memory_cannot_share():
  with pytest.raises(ValueError, match=r"cache\.layout=paged"):
    make_pool(contiguous=True, limits=CACHE)


def test_keys_tell_prefixes_apart_by_content_and_by_place():
  def keys(prompt):
    extend_keys(seq := Sequence(request(0, prompt)), len(prompt), PAGE)
    return seq.page_keys

  a, b = ids(8, 1), ids(8, 2)
  assert len(keys((*a, 5))) == 2
  assert keys(a + b)[:2] == keys(a)
  assert len({*keys(a + a), *keys(b + a)}) == 8, "the same page elsewhere is another"
  lengths_only = dataclasses.replace(request(0, a), prompt_ids=None)
  extend_keys(seq := Sequence(lengths_only), 8, PAGE)
  assert seq.page_keys == []


@pytest.mark.parametrize("block", [2, 4, 6, 8, 512])
def test_ids_of_blocks_stand_for_tokens_that_nobody_knows(block):
  """Blocks may be smaller or larger than pages, and the last one cut short."""

  def keys(hashes, num_tokens):
    lengths_only = Request(
      request_id=0,
      arrival_s=0.0,
      num_prompt_tokens=num_tokens,
      sampling=SamplingParams(max_tokens=1),
      prefix_hashes=hashes[: -(-num_tokens // block)],
      prefix_block_tokens=block,
    )
    extend_keys(seq := Sequence(lengths_only), num_tokens, PAGE)
    return seq.page_keys

  one, two = tuple(range(50)), (*range(2), *range(100, 148))
  a, b = keys(one, 30), keys(two, 30)
  assert len(a) == len(b) == 30 // PAGE
  common = min(2 * block, 30) // PAGE
  assert (a[:common] == b[:common] and a[common:] != b[common:]) or common == 30 // PAGE
  assert keys(one, 25) == a[: 25 // PAGE], "a shorter prompt of the same blocks"


# The pool by itself -------------------------------------------------------------------------------


def pool_with(prefixes, *, eviction="lru", num_pages=12):
  """A pool that has seen `prefixes`, (name, pages) in this order."""
  config = PageConfig(num_rows=4, page_size=PAGE, pages_per_row=8, num_pages=num_pages)
  pool = PagePool(config, eviction=eviction)
  for name, num in prefixes:
    use(pool, name, num)
  return pool


def keys_of(name, num):
  return tuple(f"{name}{i}".encode() for i in range(num))


def use(pool, name, num):
  keys = keys_of(name, num)
  row = pool.take_row(keys[: pool.match(keys)])
  assert pool.grow(row, num * PAGE) is not None
  for index, key in enumerate(keys):
    pool.publish(row, index, key)
  pool.release(row)
  pool.check()


def test_lru_gives_up_the_prefix_that_was_not_used_for_longest_from_its_end():
  pool = pool_with([("a", 4), ("b", 4), ("a", 4)])
  use(pool, "c", 6)  # 4 pages were never used, so two go
  assert [pool.match(keys_of(n, 4)) for n in "ab"] == [4, 2]


def test_lfu_gives_up_the_prefix_with_fewest_hits():
  pool = pool_with([("a", 4), ("a", 4), ("b", 4)], eviction="lfu")
  use(pool, "c", 6)
  assert [pool.match(keys_of(n, 4)) for n in "ab"] == [4, 2]
  lru = pool_with([("a", 4), ("a", 4), ("b", 4)])
  use(lru, "c", 6)
  assert [lru.match(keys_of(n, 4)) for n in "ab"] == [2, 4], "the rules differ here"


def test_the_length_aware_rule_gives_up_the_ends_of_long_prefixes():
  pool = pool_with([("a", 2), ("b", 6)], eviction="length")
  use(pool, "c", 7)  # 4 were never used
  assert [pool.match(keys_of(n, k)) for n, k in (("a", 2), ("b", 6))] == [2, 3]


def test_pages_of_a_running_row_are_never_evicted():
  pool = pool_with([("a", 4)], num_pages=8)
  row = pool.take_row(keys_of("a", 4))
  assert not pool.has_room(None, 5 * PAGE) and pool.has_room(None, 4 * PAGE)
  other = pool.take_row()
  assert pool.grow(other, 4 * PAGE) is not None and pool.grow(other, 5 * PAGE) is None
  assert pool.match(keys_of("a", 4)) == 4
  pool.release(row), pool.release(other)
  pool.check()


def test_a_hit_counts_the_cached_pages_that_it_takes_from_the_free_ones():
  pool = pool_with([("a", 4)], num_pages=8)
  keys = keys_of("a", 4)
  assert pool.num_free_pages == 8
  assert pool.has_room(None, 8 * PAGE, keys=keys) and not pool.has_room(
    None, 8 * PAGE, keys=keys, spare=1
  )


def test_a_forgotten_cache_gives_its_pages_back_and_finds_nothing():
  pool = pool_with([("a", 4), ("b", 4)])
  row = pool.take_row(keys_of("a", 2))
  pool.forget()
  pool.check()
  assert pool.match(keys_of("a", 4)) == 0 and pool.num_free_pages == 10
  pool.release(row)
  pool.check()
  assert pool.num_free_pages == 12
