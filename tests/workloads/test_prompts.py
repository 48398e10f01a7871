from __future__ import annotations

import itertools
import re

import pytest

from pdjax.tokenizer import ByteTokenizer
from pdjax.workloads import prompts as prompts_lib
from pdjax.workloads.prompts import corpus_source, corpus_text, text_prompts

BYTES = ByteTokenizer(512)
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
