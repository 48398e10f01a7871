"""The checksum model in JAX gives the tokens of `pdjax.core.checksum`, and shows a wrong cache."""

import jax
import numpy as np
import pytest
from models.model_passes import decode_batch, make_pass, make_tables, prefill_batch

from pdjax.core import checksum
from pdjax.models import kv_cache
from pdjax.models.checksum import checksum_model

pytestmark = pytest.mark.quick

PROMPTS = {0: [0, 5, 996, 17, 5, 5, 800], 2: [3], 1: list(range(100, 119))}


def make_layout(model, kind):
  num_pages = 3 * 8 + (4 if kind == "paged" else 0)
  return model.layout(kind=kind, num_rows=3, page_size=4, pages_per_row=8, num_pages=num_pages)


@pytest.mark.parametrize("chunk", [8, *(pytest.param(n, marks=pytest.mark.once) for n in (3, 32))])
@pytest.mark.parametrize("kind", ["slots", "paged"])
def test_tokens_are_those_of_core(kind, chunk):
  model = checksum_model()
  layout = make_layout(model, kind)
  tables, run = make_tables(layout), make_pass(model, layout)
  cache = kv_cache.init_cache(layout)
  out = {}
  for row, prompt in PROMPTS.items():
    for start in range(0, len(prompt), chunk):
      part = prompt[start : start + chunk]
      batch, places = prefill_batch(layout, tables, [(row, start, part)], num_tokens=32)
      logits, cache = run(cache, batch, None)
    out[row] = [int(logits[places[-1]].argmax())]
  for step in range(9):
    entries = [(row, len(PROMPTS[row]) + step, ids[-1]) for row, ids in out.items()]
    logits, cache = run(cache, None, decode_batch(layout, tables, entries, num_rows=4))
    for i, ids in enumerate(out.values()):
      ids.append(int(logits[i].argmax()))
  for row, ids in out.items():
    assert tuple(ids) == checksum.generate(PROMPTS[row], 10)


@pytest.mark.once
def test_every_layer_and_place_of_the_cache_counts():
  model = checksum_model()
  layout = make_layout(model, "slots")
  tables, run = make_tables(layout), make_pass(model, layout)
  prompt = PROMPTS[1]
  batch, _ = prefill_batch(layout, tables, [(1, 0, prompt)], num_tokens=32)
  _, cache = run(kv_cache.init_cache(layout), batch, None)
  decode = decode_batch(layout, tables, [(1, len(prompt), 7)], num_rows=1)
  want = checksum.generate([*prompt, 7], 1)[0]

  def next_id(cache):
    logits, _ = run(jax.tree.map(lambda x: x.copy(), cache), None, decode)
    return int(logits[0].argmax())

  assert next_id(cache) == want
  for layer in range(layout.num_layers):
    for i in range(2):
      for position in (0, 3, len(prompt) - 1):
        wrong = [list(pair) for pair in cache]
        wrong[layer][i] = wrong[layer][i].at[1, 0, position, 0].add(1)
        assert next_id(tuple(map(tuple, wrong))) != want, (layer, i, position)
  assert next_id(cache[::-1]) != want
  assert next_id(tuple((v, k) for k, v in cache)) != want


def test_logits_are_one_hot():
  model = checksum_model()
  totals = np.random.default_rng(0).integers(0, 1 << 32, 50, dtype=np.uint32)
  logits = np.asarray(model.unembed(model.params, totals[:, None]))
  np.testing.assert_array_equal(logits.sum(-1), 1)
  np.testing.assert_array_equal(
    logits.argmax(-1), [checksum.next_token(int(total)) for total in totals]
  )
