"""Real weights: the logits and ids of another implementation, through prefill and decode."""

import jax
import numpy as np
import pytest
from models.golden_smollm2 import CASES
from models.model_passes import decode_batch, make_pass, make_tables, prefill_batch

from pdjax.models import kv_cache
from pdjax.models.checkpoints.checkpoint import open_checkpoint

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf):
  return open_checkpoint(smollm2_gguf).load()


def test_the_config_is_that_of_the_model(smollm2):
  config = smollm2.config
  assert (config.num_layers, config.d_model, config.d_ff) == (30, 576, 1536)
  assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
  assert (config.vocab_size, config.max_len, config.rope_theta) == (49_152, 8192, 100_000)
  assert config.norm_eps == pytest.approx(1e-5) and config.tie_embeddings
  assert sum(x.size for x in smollm2.params) == 134_515_008


@pytest.mark.parametrize("kind", ["slots", "paged"])
def test_logits_and_greedy_ids_are_the_golden_ones(smollm2, kind):
  """All prompts as rows of one batch."""
  rows = {name: row for row, name in enumerate(CASES)}
  layout = smollm2.layout(kind=kind, num_rows=3, page_size=16, pages_per_row=6, num_pages=18)
  tables, run = make_tables(layout), make_pass(smollm2, layout)
  pieces = [(rows[name], 0, case["prompt_ids"]) for name, case in CASES.items()]
  batch, places = prefill_batch(layout, tables, pieces, num_tokens=128)
  with jax.default_matmul_precision("highest"):
    logits, cache = run(kv_cache.init_cache(layout), batch, None)
    last = np.cumsum([len(case["prompt_ids"]) for case in CASES.values()]) - 1
    ids = {}
    for name, row in zip(CASES, np.asarray(logits)[places[last]], strict=True):
      for token, want in CASES[name]["last_logits"].items():
        assert row[token] == pytest.approx(want, abs=1e-3)
      ids[name] = [int(row.argmax())]
    for step in range(31):
      entries = [
        (rows[name], len(case["prompt_ids"]) + step, ids[name][-1]) for name, case in CASES.items()
      ]
      logits, cache = run(cache, None, decode_batch(layout, tables, entries, num_rows=4))
      for row, name in enumerate(CASES):
        ids[name].append(int(logits[row].argmax()))
  assert ids == {name: case["greedy_ids"] for name, case in CASES.items()}
