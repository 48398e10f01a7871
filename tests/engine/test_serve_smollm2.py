"""Real weights through the engine: the ids of another implementation, however it is served."""

import pytest
from engine.pools import build, cpus, make_cluster, request, serve_all
from models.golden_smollm2 import CASES
from virtual import tokens_of

from pdjax.core.events import Copied, Step
from pdjax.engine.buckets import Buckets
from pdjax.models.checkpoints.checkpoint import open_checkpoint
from pdjax.scheduling.pages import PageConfig

pytestmark = pytest.mark.slow
USES = {
  "chunked": [{"mixed", "decode"}],
  "disaggregated": [{"prefill", "gather"}, {"decode", "scatter"}],
}  # each takes many seconds to compile


@pytest.fixture(scope="module")
def model(smollm2_gguf):
  return open_checkpoint(smollm2_gguf).load()


def serve_golden(model, strategy, groups):
  """The kinds of steps that each pool took and the number of hand-offs; EOS is not a stop id."""
  assert {len(case["greedy_ids"]) for case in CASES.values()} == {32}
  pages = PageConfig(num_rows=3, page_size=16, pages_per_row=5, num_pages=15, contiguous=True)
  buckets = Buckets(prefill=(80,), mixed=(16,), rows=(3,), pages=(5,))
  engine = build(model, "slots", buckets, groups, pages, uses=USES[strategy])
  requests = [
    request(i, case["prompt_ids"], max_tokens=32) for i, case in enumerate(CASES.values())
  ]
  log = serve_all(make_cluster(engine, strategy, budget=16), requests)
  assert tokens_of(log) == {i: tuple(case["greedy_ids"]) for i, case in enumerate(CASES.values())}
  kinds = {(e.pool, e.kind) for e in log if isinstance(e, Step)}
  return kinds, sum(isinstance(e, Copied) for e in log)


@pytest.mark.parametrize("tp", [1, 3])
def test_chunks_beside_decodes_give_the_golden_ids(model, tp):
  """Over three devices each has 3 of 9 query heads and 1 of 3 kv heads."""
  kinds, _ = serve_golden(model, "chunked", cpus(tp))
  assert ("mixed0", "mixed") in kinds


def test_prefill_and_decode_on_two_devices_give_the_golden_ids(model):
  prefill, decode = reversed(cpus(1, 1))  # decodes as above, where they are compiled already
  kinds, num_copies = serve_golden(model, "disaggregated", [prefill, decode])
  assert kinds == {("prefill0", "prefill"), ("decode0", "decode")}
  assert num_copies == 3
