from __future__ import annotations

import itertools
import pathlib
import re

import numpy as np
import pytest

from pdjax.tokenizer import ByteTokenizer
from pdjax.workloads import prompts as prompts_lib
from pdjax.workloads.prompts import block_prompts, corpus_source, corpus_text, text_prompts
from pdjax.workloads.traces import Blocks, read_trace

BYTES = ByteTokenizer(512)
PUBLISHED = pathlib.Path(__file__).resolve().parents[3] / "shared" / "data" / "traces"
# Every small length, a page and its neighbours, and far more than the whole corpus of 465 kB.
LENGTHS = [(n, 1) for n in [*range(1, 70), 127, 128, 129, 1000, 4096, 600_000]]


def of(n: int, count: int) -> list[tuple[int, int]]:
  return [(n, 1)] * count


@pytest.mark.quick
@pytest.mark.parametrize("chat", [False, True])
def test_prompts_have_exactly_their_length(chat):
  prompts = text_prompts(BYTES, LENGTHS, 3, chat=chat)
  assert [len(prompt) for prompt in prompts] == [n for n, _ in LENGTHS]


@pytest.mark.quick
def test_prompts_are_text_of_the_corpus():
  for prompt in text_prompts(BYTES, of(200, 50), 0):
    assert BYTES.decode(prompt).rstrip("\ufffd") in corpus_text() * 2


@pytest.mark.quick
@pytest.mark.parametrize("chat", [False, True])
def test_no_two_prompts_share_a_page_of_text(chat):
  lengths = of(300, 2000)
  num_before = len("user: ") if chat else 0
  prompts = text_prompts(BYTES, lengths, 0, chat=chat)
  assert len({prompt[num_before : num_before + 16] for prompt in prompts}) == len(lengths)


@pytest.mark.quick
def test_when_the_text_runs_out_prompts_are_refused_rather_than_repeated(monkeypatch):
  monkeypatch.setattr(prompts_lib, "corpus_text", lambda: "one two three four")
  with pytest.raises(ValueError, match=r"prompt [1-9].*beginnings of earlier prompts"):
    text_prompts(BYTES, of(40, 100), 0)
  assert len(text_prompts(BYTES, of(2, 100), 0)) == 100  # too short for a page: may coincide


@pytest.mark.quick
def test_prompts_follow_the_seed_and_not_the_other_requests():
  lengths = of(100, 20)
  prompts = text_prompts(BYTES, lengths, 7)
  assert prompts == text_prompts(BYTES, lengths, 7)
  assert not set(prompts) & set(text_prompts(BYTES, lengths, 8))
  longer = text_prompts(BYTES, of(150, 10), 7)
  assert all(a[:100] == b for a, b in zip(longer, prompts))


@pytest.mark.quick
def test_chat_prompts_stand_in_the_template_and_short_ones_are_plain_text():
  overhead = len("user: \nassistant: ")
  plain, *chats = text_prompts(BYTES, [(overhead, 1), (overhead + 1, 1), (90, 1)], 0, chat=True)
  assert "user: " not in BYTES.decode(plain)
  for prompt in chats:
    assert re.fullmatch("user: .+\nassistant: ", BYTES.decode(prompt), re.DOTALL)


@pytest.mark.quick
def test_a_length_below_1_is_refused():
  with pytest.raises(ValueError, match="prompt 1: 0 tokens"):
    text_prompts(BYTES, [(1, 1), (0, 1)], 0)


@pytest.mark.quick
def test_the_source_says_which_text_it_was(monkeypatch):
  before = corpus_source()
  assert re.fullmatch(r"pydoc_data.topics of Python \d+\.\d+\.\S+, sha256 [0-9a-f]{64}", before)
  monkeypatch.setattr(prompts_lib, "corpus_text", lambda: "another text")
  assert corpus_source() != before


@pytest.mark.quick
def test_only_slices_of_the_text_are_encoded():
  class Counting(ByteTokenizer):
    num_chars = 0

    def encode(self, text):
      self.num_chars += len(text)
      return super().encode(text)

  tokenizer = Counting(512)
  text_prompts(tokenizer, of(100, 100), 0)
  assert tokenizer.num_chars < 10 * 100 * 100


def test_prompts_of_real_tokens_have_exactly_their_length(smollm2_gguf):
  from pdjax.tokenizer import Tokenizer

  tokenizer = Tokenizer.from_gguf(smollm2_gguf)
  lengths = [(n, 1) for n in [*range(1, 80), 128, 1000, 4000]]
  for chat in (False, True):
    prompts = text_prompts(tokenizer, lengths, 3, chat=chat)
    assert [len(prompt) for prompt in prompts] == [n for n, _ in lengths]
  texts = [tokenizer.decode(prompt) for prompt in prompts]
  whole = re.compile(r"<\|im_start\|>system\n.*<\|im_start\|>user\n.+<\|im_end\|>\n"
                     r"<\|im_start\|>assistant\n", re.DOTALL)  # fmt: skip
  # Once the template fits it is there for every longer prompt.
  fits = [whole.fullmatch(text) is not None for text in texts]
  assert not fits[0]
  assert fits[-1]
  assert all(b or not a for a, b in itertools.pairwise(fits))
  for text in (text for text, fit in zip(texts, fits) if not fit):
    assert "<|im_start|>" not in text


# Prompts of a trace with blocks -------------------------------------------------------------------


def chained_blocks(num_prompts: int) -> tuple[tuple[int, ...], ...]:
  """Ids as in Mooncake's traces, where an id stands for its block and for all before it."""
  rng = np.random.default_rng(0)
  ids: list[tuple[int, ...]] = []
  children: dict[tuple[int, ...], list[int]] = {}
  new_ids = itertools.count()
  for _ in range(num_prompts):
    path: tuple[int, ...] = ()
    for _ in range(rng.integers(1, 8)):
      choices = children.setdefault(path, [])
      if not choices or rng.random() < 0.5:
        choices.append(next(new_ids))
      path = (*path, choices[rng.integers(len(choices))])
    ids.append(path)
  return tuple(ids)


@pytest.mark.quick
@pytest.mark.parametrize("block_tokens", [1, 2, 16, 64, 512])
def test_equal_ids_give_equal_tokens_and_other_ids_another_first_page(block_tokens):
  blocks = Blocks(chained_blocks(300), block_tokens)
  rng = np.random.default_rng(1)
  last = rng.integers(1, block_tokens + 1, len(blocks.ids)).tolist()
  lengths = [((len(ids) - 1) * block_tokens + n, 1) for ids, n in zip(blocks.ids, last)]
  prompts = block_prompts(BYTES, lengths, blocks, 0)
  assert [len(prompt) for prompt in prompts] == [n for n, _ in lengths]
  tokens_of: dict[int, tuple[int, ...]] = {}
  for prompt, ids in zip(prompts, blocks.ids):
    for i, block_id in enumerate(ids):
      block = prompt[i * block_tokens : (i + 1) * block_tokens]
      known = tokens_of.get(block_id, block)
      shorter, longer = sorted((known, block), key=len)  # one of them may be cut
      assert longer[: len(shorter)] == shorter
      tokens_of[block_id] = longer
  pages = [tokens[:16] for tokens in tokens_of.values() if len(tokens) >= 16]
  assert len(set(pages)) == len(pages)
  assert len(pages) > 100 or block_tokens < 16


@pytest.mark.quick
def test_a_block_follows_the_seed_and_not_the_other_requests():
  ids = chained_blocks(50)
  lengths = [(16 * len(x), 1) for x in ids]
  whole = block_prompts(BYTES, lengths, Blocks(ids, 16), 3)
  assert whole[:9] == block_prompts(BYTES, lengths[:9], Blocks(ids[:9], 16), 3)
  assert whole[9:] == block_prompts(BYTES, lengths[9:], Blocks(ids[9:], 16), 3)
  assert not {p[:16] for p in whole} & {
    p[:16] for p in block_prompts(BYTES, lengths, Blocks(ids, 16), 4)
  }


@pytest.mark.quick
def test_a_block_is_text_of_the_corpus_from_two_places():
  (prompt,) = block_prompts(BYTES, [(512, 1)], Blocks(((0,),), 512), 0)
  ids, corpus = bytes(prompt), corpus_text().encode() * 2
  assert ids[:8] in corpus
  assert ids[8:] in corpus
  assert ids not in corpus


@pytest.mark.quick
def test_blocks_that_do_not_fit_their_prompt_or_find_no_new_text_are_refused(monkeypatch):
  with pytest.raises(ValueError, match="prompt 1: 2 block ids for 33 tokens in blocks of 16"):
    block_prompts(BYTES, [(16, 1), (33, 1)], Blocks(((0,), (0, 1)), 16), 0)
  monkeypatch.setattr(prompts_lib, "corpus_text", lambda: "one")
  with pytest.raises(ValueError, match=r"block \d+: .*beginnings of other blocks"):
    block_prompts(BYTES, [(16, 1)] * 20, Blocks(tuple((i,) for i in range(20)), 16), 0)
  assert (
    len(block_prompts(BYTES, [(2, 1)] * 20, Blocks(tuple((i,) for i in range(20)), 2), 0)) == 20
  )


def test_mooncakes_prompts_hit_a_cache_of_pages_as_often_as_is_known_of_its_blocks():
  """At a 32nd a block is a page of 16 tokens."""
  path = PUBLISHED / "mooncake_fast25_conversation_trace.jsonl.gz"
  if not path.exists():
    pytest.skip(f"no published trace {path.name} beside this project, in shared/data/traces")
  trace = read_trace(path).scaled(32)
  prompts = block_prompts(BYTES, [row.lengths for row in trace.rows], trace.blocks, 0)
  seen: set[int] = set()
  num_blocks = num_hits = 0
  for prompt in prompts:
    chain, is_hit = 0, True
    for start in range(0, len(prompt), 16):
      chain = hash((chain, prompt[start : start + 16]))
      is_hit = is_hit and chain in seen
      num_hits += is_hit
      num_blocks += 1
      seen.add(chain)
  assert num_blocks == 288_500
  # Last blocks of few tokens may meet by chance; they fill no page, so no cache would keep them.
  assert num_hits / num_blocks == pytest.approx(0.3664, abs=2e-4)
