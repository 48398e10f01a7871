"""What requests say: real text, from Python's own documentation, which every machine has."""

from __future__ import annotations

import hashlib
import itertools
import platform
import re
from collections.abc import Sequence

import numpy as np

from pdjax.tokenizer import ByteTokenizer, Tokenizer
from pdjax.workloads.traces import Blocks

_CHARS_PER_TOKEN = 4  # a first guess of how much to encode; too little is noticed and doubled
_SHARED_TOKENS = 16  # the smallest page: shorter common beginnings are no use to a prefix cache
_TRIES = 20
_MARKER = "\ue000"  # a private character, in no chat template


def corpus_text() -> str:
  """All of `pydoc_data.topics`, sorted by topic. Differs between versions of Python."""
  from pydoc_data.topics import topics  # half a megabyte, which simulations never need

  return "\n\n".join(topics[name].strip() for name in sorted(topics))


def corpus_source() -> str:
  """Where the text of the prompts comes from, to be kept with results: equal means equal text."""
  digest = hashlib.sha256(corpus_text().encode()).hexdigest()
  return f"pydoc_data.topics of Python {platform.python_version()}, sha256 {digest}"


def text_prompts(
  tokenizer: Tokenizer | ByteTokenizer,
  lengths: Sequence[tuple[int, int]],
  seed: int,
  *,
  chat: bool = False,
) -> list[tuple[int, ...]]:
  """One prompt of exactly the prompt tokens of each of `lengths`, as ids.

  Prompt i begins at a word that depends on (`seed`, i) alone, drawn again while an earlier prompt
  has the same first page, so no prompt finds another's prefix in a cache. Only prompts shorter than
  a page may coincide. With `chat` each is a user's message in the chat template, whose own tokens
  count (and begin every prompt alike); prompts too short for the template are plain text.

  Raises:
    ValueError: a length below 1, or no text left that is new.
  """
  text = corpus_text()
  starts = [match.start() for match in re.finditer(r"\S+", text)]
  before, after = _template_ids(tokenizer) if chat else ((), ())
  prompts: list[tuple[int, ...]] = []
  seen: set[tuple[int, ...]] = set()
  for i, (num_tokens, _) in enumerate(lengths):
    if num_tokens < 1:
      raise ValueError(f"prompt {i}: {num_tokens} tokens, must be at least 1")
    in_template = chat and num_tokens > len(before) + len(after)
    num_body = num_tokens - len(before) - len(after) if in_template else num_tokens
    rng = np.random.default_rng((seed, i))
    for _ in range(_TRIES):
      body = _encode_from(tokenizer, text, starts[rng.integers(len(starts))], num_body)
      if body[:_SHARED_TOKENS] not in seen:
        break
    else:
      if num_body >= _SHARED_TOKENS:
        raise ValueError(f"prompt {i}: {_TRIES} draws gave only beginnings of earlier prompts")
    seen.add(body[:_SHARED_TOKENS])
    prompts.append(before + body + after if in_template else body)
  return prompts


def block_prompts(
  tokenizer: Tokenizer | ByteTokenizer,
  lengths: Sequence[tuple[int, int]],
  blocks: Blocks,
  seed: int,
) -> list[tuple[int, ...]]:
  """Prompts with the prefixes in common that a trace recorded: equal block ids give equal tokens.

  The text of a block depends on (`seed`, id) alone, drawn again while an earlier id has the same
  first page; only blocks shorter than a page may coincide. There is no chat template: it would
  shift every block.

  Raises:
    ValueError: another number of ids than of blocks in a prompt, or no text left that is new.
  """
  block_tokens = blocks.num_tokens
  stream = tokenizer.encode(corpus_text())
  stream_tokens = len(stream)
  stream *= 1 + -(-block_tokens // stream_tokens)  # so that it goes round at its end
  # A block begins in one place and goes on in another. Windows of one place would be too few: a
  # trace has more ids than the corpus has tokens.
  head = min(_SHARED_TOKENS, block_tokens) // 2
  texts: dict[int, tuple[int, ...]] = {}
  seen: set[tuple[int, ...]] = set()

  def text(block_id: int) -> tuple[int, ...]:
    if block_id in texts:
      return texts[block_id]
    rng = np.random.default_rng((seed, block_id))
    for _ in range(_TRIES):
      first, second = rng.integers(stream_tokens, size=2).tolist()
      tokens = stream[first : first + head] + stream[second : second + block_tokens - head]
      if tokens[:_SHARED_TOKENS] not in seen:
        break
    else:
      if block_tokens >= _SHARED_TOKENS:
        raise ValueError(f"block {block_id}: {_TRIES} draws gave only beginnings of other blocks")
    seen.add(tokens[:_SHARED_TOKENS])
    texts[block_id] = tokens
    return tokens

  prompts = []
  for i, ((num_tokens, _), ids) in enumerate(zip(lengths, blocks.ids, strict=True)):
    if len(ids) != -(-num_tokens // block_tokens):
      raise ValueError(
        f"prompt {i}: {len(ids)} block ids for {num_tokens} tokens in blocks of {block_tokens}"
      )
    prompts.append(tuple(itertools.chain.from_iterable(map(text, ids)))[:num_tokens])
  return prompts


def _encode_from(
  tokenizer: Tokenizer | ByteTokenizer, text: str, start: int, num_tokens: int
) -> tuple[int, ...]:
  """The first `num_tokens` ids of `text` from `start` on, which goes round at its end."""
  # One token more than wanted is encoded: the last one may be cut by the end of the slice.
  num_chars = _CHARS_PER_TOKEN * (num_tokens + 1)
  while True:
    piece = text[start : start + num_chars]
    while len(piece) < num_chars:
      piece += text[: num_chars - len(piece)]
    ids = tokenizer.encode(piece)
    if len(ids) > num_tokens:
      return ids[:num_tokens]
    num_chars *= 2


def _template_ids(
  tokenizer: Tokenizer | ByteTokenizer,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
  """The ids before and after the user's words in the chat template."""
  rendered = tokenizer.apply_chat_template([{"role": "user", "content": _MARKER}])
  parts = rendered.split(_MARKER)
  if len(parts) != 2:
    raise ValueError(f"the chat template repeats or drops the user's words: {rendered!r}")
  return tokenizer.encode(parts[0]), tokenizer.encode(parts[1])
