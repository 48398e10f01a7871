"""The tiny model in the package: small, readable, and without near ties among its greedy tokens."""

import functools
import re
from pydoc_data.topics import topics

import jax
import numpy as np
import pytest
from models.model_passes import make_pass, make_tables, prefill_batch

from pdjax.core.model_config import TINY
from pdjax.models import kv_cache
from pdjax.models.checkpoints.checkpoint import open_checkpoint
from pdjax.models.training import causal_attend, token_losses
from pdjax.sources import resolve
from pdjax.tokenizer import load_tokenizer
from pdjax.workloads.prompts import corpus_text, text_prompts

NUM_NEW = 32
NOISE = 1e-4  # several times what float32 does to its logits over one pass, chunks or a mesh


@pytest.fixture(scope="module")
def model():
  return open_checkpoint(resolve("tiny"), check_weights=True).load()


@pytest.fixture(scope="module")
def tokenizer():
  pytest.importorskip("tokenizers")
  return load_tokenizer(resolve("tiny"))


@pytest.fixture(scope="module")
def greedy(model):
  """Prompts of ids -> greedy ids of each, and the margin of each over the runner-up."""

  @jax.jit
  def last_logits(params, ids, last):  # [B, S], [B]
    num_rows, num_tokens = ids.shape
    positions = np.tile(np.arange(num_tokens), num_rows)
    no_cache, attend = (None,) * model.config.num_layers, causal_attend(num_rows)
    hidden, _ = model.forward(params, ids.reshape(-1), positions, no_cache, attend)
    return model.unembed(params, hidden[np.arange(num_rows) * num_tokens + last])

  def run(prompts, num_new=NUM_NEW):
    lengths = np.array([len(prompt) for prompt in prompts])
    ids = np.zeros((len(prompts), -(-(lengths.max() + num_new) // 64) * 64), np.int32)
    for row, prompt in zip(ids, prompts):
      row[: len(prompt)] = prompt
    margins, rows = [], np.arange(len(prompts))
    for i in range(num_new):
      logits = np.asarray(last_logits(model.params, ids, lengths - 1 + i))
      ids[rows, lengths + i] = logits.argmax(-1)
      second, first = np.sort(logits, -1)[:, -2:].T
      margins.append(first - second)
    new = [row[n : n + num_new].tolist() for row, n in zip(ids, lengths)]
    return new, np.array(margins).ravel()

  return run


def prompts_of(tokenizer, num_prompts, longest, seed):
  rng = np.random.default_rng(seed)
  return text_prompts(tokenizer, [(int(n), 0) for n in rng.integers(2, longest, num_prompts)], seed)


@pytest.mark.quick
def test_it_is_the_config_that_programs_know_as_tiny():
  assert open_checkpoint(resolve("tiny")).config == TINY


@pytest.mark.quick
def test_it_is_small():
  sizes = {path.name: path.stat().st_size for path in resolve("tiny").iterdir()}
  assert {"config.json", "model.safetensors", "tokenizer.json"} <= sizes.keys()
  assert sum(sizes.values()) <= 2_000_000


@pytest.mark.quick
def test_every_layer_took_part_in_training(model):
  """Norm scales begin at 1 and are not decayed: where they moved, gradients arrived."""
  for name, param in zip(model.param_names, model.params):
    if name.endswith("scale"):
      assert np.abs(np.asarray(param) - 1).max() > 0.05, name


def test_the_tokenizer_fits_and_encodes_any_text(model, tokenizer):
  assert tokenizer.vocab_size == model.config.vocab_size
  assert tokenizer.eos_id is not None
  for text in ('The "while" statement', "\x00\n\t  ", "Grüße, 你好 🎉", "<|endoftext|>"):
    assert tokenizer.decode(tokenizer.encode(text)) == text
  text = corpus_text()
  assert len(text) / len(tokenizer.encode(text)) > 2.5  # characters a token: it learnt this text


@pytest.mark.parametrize("topic, bound", [("while", 0.6), ("booleans", 0.9), ("lambda", 1.2)])
def test_it_predicts_the_documentation(model, tokenizer, topic, bound):
  ids = np.array([tokenizer.encode(topics[topic])[:257]], np.int32)
  losses = jax.jit(functools.partial(token_losses, model))(model.params, ids)
  assert float(losses.mean()) < bound  # an untrained one has ln(1024) = 6.9


def test_greedy_text_is_words(tokenizer, greedy):
  known = {*re.findall(r"[a-z]+", corpus_text().lower())}
  outputs, _ = greedy(prompts_of(tokenizer, 16, 40, seed=1))
  texts = [tokenizer.decode(ids) for ids in outputs]
  words = [word for text in texts for word in re.findall(r"[a-z]+", text.lower())[1:-1]]  # whole
  assert len(words) > 8 * len(texts)
  assert len({*words}) > 60
  assert sum(word in known for word in words) / len(words) > 0.85


def test_chat_answers_with_the_topic(tokenizer, greedy):
  pytest.importorskip("jinja2")
  message = {"role": "user", "content": "while"}
  prompt = tokenizer.encode(tokenizer.apply_chat_template([message]))
  ((*ids,),), _ = greedy([prompt])
  assert tokenizer.decode(ids).startswith('The "while" statement\n****')


@pytest.mark.parametrize("longest, seed", [(32, 0), pytest.param(200, 1, marks=pytest.mark.slow)])
def test_greedy_tokens_have_no_near_ties(tokenizer, greedy, longest, seed):
  num_prompts = 40 if longest < 64 else 8
  _, margins = greedy(prompts_of(tokenizer, num_prompts, longest, seed))
  assert margins.min() > NOISE
  assert np.quantile(margins, 0.01) > 100 * NOISE
  assert np.mean(margins < 10 * NOISE) < 0.005


def test_the_noise_is_a_true_bound(model, tokenizer):
  """Two ways to the same logits, over a cache and without one, differ by less."""
  ids = tokenizer.encode(corpus_text())[:128]
  layout = model.layout(kind="slots", num_rows=1, page_size=128, pages_per_row=1, num_pages=1)
  batch, places = prefill_batch(layout, make_tables(layout), [(0, 0, ids)], num_tokens=128)
  cached, _ = make_pass(model, layout)(kv_cache.init_cache(layout), batch, None)

  @jax.jit
  def plain(params, ids):
    no_cache = (None,) * model.config.num_layers
    hidden, _ = model.forward(params, ids, np.arange(128), no_cache, causal_attend(1))
    return model.unembed(params, hidden)

  got, want = np.asarray(cached)[places], np.asarray(plain(model.params, np.array(ids)))
  assert want.std() > 1
  assert 0 < np.abs(got - want).max() < NOISE / 2
