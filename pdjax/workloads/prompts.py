"""What requests say: real text, from Python's own documentation, which every machine has."""

from __future__ import annotations

import hashlib
import platform
import re
from collections.abc import Sequence

import numpy as np

from pdjax.tokenizer import ByteTokenizer, Tokenizer

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
