"""The checksum model through the real engine: any wrong page, position or row is a wrong token."""

import jax
import pytest
from engine.pools import PAGE_SIZE, make_cluster, request, serve_all
from virtual import expected, make_requests, tokens_of

from pdjax.core.events import Copied, Failed, Preempted, Step
from pdjax.engine import transfer

pytestmark = pytest.mark.quick
STRATEGIES = ("continuous", "chunked", "disaggregated")


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_gives_the_checksum_tokens(checksum_engine, strategy, steps_in_flight):
  requests = make_requests(30, seed=1, rate_rps=1000)
  cluster = make_cluster(checksum_engine, strategy, shuffle=5)
  log = serve_all(cluster, requests, steps_in_flight=steps_in_flight)
  assert tokens_of(log) == expected(requests)
  kinds = {e.kind for e in log if isinstance(e, Step)}
  assert ("mixed" in kinds) == (strategy == "chunked")


@pytest.mark.parametrize("budget", [6, 7, 11, 24])
def test_chunks_of_any_size_give_the_checksum_tokens(checksum_engine, budget):
  requests = make_requests(12, seed=2, rate_rps=1000)
  cluster = make_cluster(checksum_engine, "chunked", budget=budget, shuffle=6)
  assert tokens_of(serve_all(cluster, requests, steps_in_flight=2)) == expected(requests)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("strategy", ["continuous", "chunked"])
def test_preempted_requests_give_the_same_tokens(checksum_paged, strategy, steps_in_flight):
  requests = make_requests(25, seed=3, rate_rps=5000, prompt=(8, 40), output=(10, 30))
  cluster = make_cluster(checksum_paged, strategy, num_pages=24, shuffle=7)
  log = serve_all(cluster, requests, steps_in_flight=steps_in_flight)
  assert any(isinstance(e, Preempted) for e in log), "no pressure: the test shows nothing"
  assert tokens_of(log) == expected(requests)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_every_residue_of_the_page_size_hands_off_whole(checksum_engine, steps_in_flight):
  """1 token never transfers; with 2 or 3 exactly the tokens of the prompt are copied."""
  lengths = [n for n in (1, 2, 3, 4, 5, 8, 13, 14, 15, 16, 19, 40, 77) for _ in range(3)]
  assert {n % PAGE_SIZE for n in lengths} == set(range(PAGE_SIZE))
  requests = [
    request(i, [(i + j) % 997 for j in range(n)], max_tokens=1 + i % 3)
    for i, n in enumerate(lengths)
  ]
  cluster = make_cluster(checksum_engine, "disaggregated", shuffle=8)
  log = serve_all(cluster, requests, steps_in_flight=steps_in_flight)
  assert tokens_of(log) == expected(requests)
  copied = {e.request_id: e.num_tokens for e in log if isinstance(e, Copied)}
  assert copied == {i: n for i, n in enumerate(lengths) if i % 3}


def test_a_step_of_as_many_short_prompts_as_rows_finds_its_shape(checksum_engine):
  """All of them emit at once, however few tokens they have."""
  requests = [request(i, (i, 2), max_tokens=2) for i in range(12)]
  log = serve_all(make_cluster(checksum_engine, "continuous"), requests)
  assert max(len(e.emitted_ids) for e in log if isinstance(e, Step) and e.prefill_ids) == 6
  assert tokens_of(log) == expected(requests)


def test_an_engine_serves_one_run_after_another(checksum_engine):
  """Nothing is left of the run before: neither pages nor rows nor last tokens."""
  for seed in (4, 5):
    requests = make_requests(10, seed=seed, rate_rps=1000)
    cluster = make_cluster(checksum_engine, "disaggregated", shuffle=seed)
    assert tokens_of(serve_all(cluster, requests)) == expected(requests)


def test_a_copy_that_fails_fails_its_request_alone(checksum_engine, monkeypatch):
  device_put, calls = jax.device_put, []

  def breaks_once(x, sharding):
    calls.append(x)
    if len(calls) == 3:
      raise ConnectionError("peer died")
    return device_put(x, sharding)

  requests = make_requests(8, seed=6, rate_rps=1000, output=(2, 6))
  cluster = make_cluster(checksum_engine, "disaggregated")
  monkeypatch.setattr(transfer.jax, "device_put", breaks_once)
  log = serve_all(cluster, requests)  # checks that every page came back
  (failure,) = [e for e in log if isinstance(e, Failed)]
  assert "hand-off failed" in failure.reason and "peer died" in failure.reason
  tokens, want = tokens_of(log), expected(requests)
  assert tokens.pop(failure.request_id) == want.pop(failure.request_id)[:1]
  assert tokens == want
