"""Real weights through the engine: the ids of another implementation under two strategies."""

import pytest
from engine.pools import build, cpus, make_cluster, request, serve_all
from models.golden_smollm2 import CASES
from virtual import tokens_of

from pdjax.core.events import Copied, Step
from pdjax.engine.buckets import Buckets
from pdjax.models.checkpoints.gguf import load_gguf
from pdjax.models.transformer import from_arrays
from pdjax.scheduling.pages import PageConfig

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def engine(smollm2_gguf):
  pages = PageConfig(num_rows=3, page_size=16, pages_per_row=5, num_pages=15, contiguous=True)
  buckets = Buckets(prefill=(80,), mixed=(16,), rows=(3,), pages=(5,))
  return build(from_arrays(*load_gguf(smollm2_gguf)), "slots", buckets, cpus(), pages)


@pytest.mark.parametrize("strategy", ["chunked", "disaggregated"])
def test_served_greedy_ids_are_the_golden_ones(engine, strategy):
  """Chunks beside decodes on one device, and prefill and decode on two; EOS is not a stop id."""
  assert {len(case["greedy_ids"]) for case in CASES.values()} == {32}
  requests = [
    request(i, case["prompt_ids"], max_tokens=32) for i, case in enumerate(CASES.values())
  ]
  log = serve_all(make_cluster(engine, strategy, budget=16), requests)
  assert tokens_of(log) == {i: tuple(case["greedy_ids"]) for i, case in enumerate(CASES.values())}
  kinds = {(e.pool, e.kind) for e in log if isinstance(e, Step)}
  if strategy == "chunked":
    assert ("mixed0", "mixed") in kinds
  else:
    assert kinds == {("prefill0", "prefill"), ("decode0", "decode")}
    assert sum(isinstance(e, Copied) for e in log) == 3
