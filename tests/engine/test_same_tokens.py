"""A transformer gives a request the same tokens under every strategy, budget and layout."""

import dataclasses
import itertools
import random

import jax
import numpy as np
import pytest
from engine.pools import CAPACITY, make_cluster, request, serve_all
from virtual import tokens_of

from pdjax.core.model_config import TINY
from pdjax.engine.batch import RowState
from pdjax.models.sampling import Sampling, sample
from pdjax.scheduling.pages import PageConfig

CASES = [
  ("continuous", CAPACITY),
  ("chunked", 8),
  ("chunked", 24),
  ("chunked", CAPACITY),
  ("disaggregated", CAPACITY),
]
SAMPLED = dict(temperature=0.8, top_k=40, top_p=0.9)
LOOKING_BACK = dict(temperature=0.8, min_p=0.01, repetition_penalty=2.0)
SAMPLING = {"greedy": {}, "sampled": SAMPLED, "looking back": LOOKING_BACK}


def make_requests(**sampling):
  """Twelve prompts with one seed in common for every third, the request's own for the others."""
  rng, requests = random.Random(1), []
  for i in range(12):
    ids = [rng.randrange(512) for _ in range(rng.choice([1, 3, 4, 17, 30, 45]))]
    seed = 1234 if i % 3 == 0 else None
    requests.append(request(i, ids, i * 2e-3, max_tokens=rng.randint(1, 14), seed=seed, **sampling))
  return requests


@pytest.fixture(scope="module")
def alone(tiny_slots):
  """Name of the sampling -> tokens by request, each served by itself."""
  tokens = {}
  for name, sampling in SAMPLING.items():
    requests = make_requests(**sampling)
    tokens[name] = {}
    for r in requests:
      log = serve_all(make_cluster(tiny_slots, "continuous"), [r])
      tokens[name] |= tokens_of(log)
    assert [len(t) for t in tokens[name].values()] == [r.sampling.max_tokens for r in requests]
  assert all(tokens[a] != tokens[b] for a, b in itertools.combinations(SAMPLING, 2))
  return tokens


@pytest.mark.parametrize(("strategy", "budget"), CASES)
@pytest.mark.parametrize("name", SAMPLING)
def test_every_strategy_and_budget_gives_the_tokens_of_a_request_alone(
  tiny_engine, alone, name, strategy, budget
):
  requests = make_requests(**SAMPLING[name])
  cluster = make_cluster(tiny_engine, strategy, budget=budget, shuffle=2)
  assert tokens_of(serve_all(cluster, requests, steps_in_flight=2)) == alone[name]


def test_company_and_order_of_arrival_do_not_matter(tiny_engine, alone):
  """Greedy and sampled requests side by side, backwards and without half of them."""
  greedy, sampled = make_requests(), make_requests(**SAMPLED)
  mixed = [greedy[i] if i % 2 else sampled[i] for i in range(12)]
  want = {i: alone["greedy" if i % 2 else "sampled"][i] for i in range(12)}
  backwards = [
    request(r.request_id, r.prompt_ids, (11 - i) * 1e-3, **_sampling_of(r))
    for i, r in enumerate(mixed)
  ]
  for requests in (mixed, backwards, backwards[::2]):
    log = serve_all(make_cluster(tiny_engine, "chunked", shuffle=3), requests)
    assert tokens_of(log) == {r.request_id: want[r.request_id] for r in requests}


@pytest.mark.parametrize("name", ["sampled", "looking back"])
def test_preempted_requests_draw_the_same_tokens_again(tiny_paged, alone, name):
  cluster = make_cluster(tiny_paged, "chunked", num_pages=CAPACITY // 4)
  requests = [
    request(r.request_id, r.prompt_ids, **_sampling_of(r)) for r in make_requests(**SAMPLING[name])
  ]
  seen = []
  log = serve_all(cluster, requests, each_turn=lambda turn: seen.extend(turn.tokens))
  assert sum(e.__class__.__name__ == "Preempted" for e in log) > 0, "no pressure: nothing is shown"
  assert tokens_of(log) == alone[name]
  assert len(seen) == sum(map(len, alone[name].values())), "a token came twice"


def test_tokens_are_drawn_from_a_plain_forward_by_seed_and_position(alone, plain_logits):
  """The key of the token at position p is that of p, be it the first token or a later one."""
  logits, columns, positions, seen, got = [], [], [], [], []
  pages = PageConfig(num_rows=1, page_size=1, pages_per_row=1, num_pages=1)
  rows = RowState(pages, TINY.vocab_size)
  for name, sampling in SAMPLING.items():
    for r in make_requests(**sampling):
      tokens, num_prompt = alone[name][r.request_id], r.num_prompt_tokens
      after = plain_logits((*r.prompt_ids, *tokens))[num_prompt - 1 :]
      rows.seat(0, r.request_id, num_prompt, r.sampling)
      for i, token in enumerate(tokens):
        logits.append(after[i])
        columns.append(rows.sampling(np.array([0])))
        positions.append(num_prompt + i)
        seen.append(np.isin(np.arange(TINY.vocab_size), r.prompt_ids + tokens[:i]))
        got.append(token)
  columns = Sampling(*map(np.concatenate, zip(*columns)))
  sampled = jax.jit(sample)(
    np.array(logits), columns, np.array(positions), np.array(seen), np.arange(len(got))
  )
  assert sampled.ids.tolist() == got


def test_a_seed_and_not_the_request_decides_what_is_drawn(tiny_slots):
  ids = (5, 6, 7)

  def tokens(seed):
    requests = [request(i, ids, max_tokens=12, seed=seed, temperature=2.0) for i in range(4)]
    return list(tokens_of(serve_all(make_cluster(tiny_slots, "chunked"), requests)).values())

  assert len(set(tokens(7))) == 1
  assert len(set(tokens(None))) == 4, "without a seed every request draws its own"


def _sampling_of(r):
  return {field.name: getattr(r.sampling, field.name) for field in dataclasses.fields(r.sampling)}
