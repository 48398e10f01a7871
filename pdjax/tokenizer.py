"""Text to token ids and back, and chat templates. No jax; optional packages only when used."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

_SPECIAL = 3  # GGUF's token type of control tokens, such as <|im_end|>


class Tokenizer:
  """The byte-level BPE and chat template of one checkpoint. Never changes once made."""

  def __init__(
    self,
    *,
    bpe: Any,  # tokenizers.Tokenizer
    eos_id: int | None = None,
    chat_template: str | None = None,
    template_variables: Mapping[str, str] | None = None,
  ):
    self._bpe = bpe
    self._chat_template = chat_template
    self._template_variables = dict(template_variables or {})
    self.vocab_size: int = bpe.get_vocab_size()
    self.eos_id = eos_id

  @classmethod
  def from_gguf(cls, path: str | os.PathLike[str]) -> Tokenizer:
    """Reads the vocabulary, merges and chat template of a GGUF file; no weights. Takes seconds.

    Raises:
      ImportError: a package of the extra `[hf]` is missing.
      ValueError: not a GGUF file, or a tokenizer of another kind than SmolLM's.
    """
    gguf, tokenizers = _optional("gguf"), _optional("tokenizers")
    try:
      fields = gguf.GGUFReader(path).fields
    except ValueError as error:
      raise ValueError(f"{path}: not a readable GGUF file ({error})") from error

    def field(name: str) -> Any:
      return fields[name].contents() if name in fields else None

    kind, pre = field("tokenizer.ggml.model"), field("tokenizer.ggml.pre")
    if (kind, pre) != ("gpt2", "smollm"):
      # Another pre-tokenizer cuts text elsewhere and would give wrong ids without any error.
      raise ValueError(
        f"{path}: tokenizer model={kind!r} pre={pre!r}; only gpt2 with smollm is read"
      )
    tokens = field("tokenizer.ggml.tokens")
    types = field("tokenizer.ggml.token_type")
    merges = field("tokenizer.ggml.merges")
    if tokens is None or types is None or merges is None:
      raise ValueError(f"{path}: no tokenizer.ggml.tokens, token_type or merges")

    pre_tokenizers, byte_level = tokenizers.pre_tokenizers, tokenizers.pre_tokenizers.ByteLevel
    bpe = tokenizers.Tokenizer(
      tokenizers.models.BPE(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[tuple(merge.split(" ", 1)) for merge in merges],
      )
    )
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
      [
        pre_tokenizers.Digits(individual_digits=True),
        byte_level(add_prefix_space=False, use_regex=True),
      ]
    )
    bpe.decoder = tokenizers.decoders.ByteLevel()
    bpe.add_special_tokens([t for t, kind in zip(tokens, types, strict=True) if kind == _SPECIAL])

    ids = {name: field(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    return cls(
      bpe=bpe,
      eos_id=ids["eos"],
      chat_template=field("tokenizer.chat_template"),
      template_variables={f"{k}_token": tokens[i] for k, i in ids.items() if i is not None},
    )

  def encode(self, text: str) -> tuple[int, ...]:
    """Adds no special tokens; those written in `text` become their ids."""
    return tuple(self._bpe.encode(text, add_special_tokens=False).ids)

  def decode(self, ids: Sequence[int]) -> str:
    """The inverse of `encode`, special tokens included; cut characters become U+FFFD.

    Raises:
      ValueError: an id outside the vocabulary.
    """
    _check_ids(ids, self.vocab_size)
    return self._bpe.decode(list(ids), skip_special_tokens=False)

  def apply_chat_template(
    self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
  ) -> str:
    """The text a model was trained to see for `messages` (`role`, `content`).

    Raises:
      ImportError: jinja2, of the extra `[hf]`, is missing.
      ValueError: the checkpoint has no chat template, or refuses these messages.
    """
    _check_messages(messages)
    if self._chat_template is None:
      raise ValueError("this checkpoint has no chat template: send plain text")
    jinja2, sandbox = _optional("jinja2"), _optional("jinja2.sandbox")

    def raise_exception(message: str) -> None:  # templates call it by this name
      raise jinja2.TemplateError(message)

    # A template is a program from a downloaded file, hence the sandbox.
    environment = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    try:
      return environment.from_string(self._chat_template).render(
        messages=[dict(message) for message in messages],
        add_generation_prompt=add_generation_prompt,
        raise_exception=raise_exception,
        **self._template_variables,
      )
    except jinja2.TemplateError as error:
      raise ValueError(f"the chat template failed: {error}") from error


class ByteTokenizer:
  """Ids 0..255 are the bytes of UTF-8, the rest mean nothing. For models with no text of their own.

  Needs no download and no package. Never changes once made.

  Raises:
    ValueError: a vocabulary too small for the 256 bytes.
  """

  eos_id: int | None = None

  def __init__(self, vocab_size: int):
    if vocab_size < 256:
      raise ValueError(f"vocab_size={vocab_size} must be at least 256, one id per byte")
    self.vocab_size = vocab_size

  def encode(self, text: str) -> tuple[int, ...]:
    return tuple(text.encode())

  def decode(self, ids: Sequence[int]) -> str:
    """The inverse of `encode`; ids from 256 on and cut characters become U+FFFD.

    Raises:
      ValueError: an id outside the vocabulary.
    """
    _check_ids(ids, self.vocab_size)
    # 0xFF occurs nowhere in UTF-8.
    return bytes(i if i < 256 else 0xFF for i in ids).decode(errors="replace")

  def apply_chat_template(
    self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
  ) -> str:
    """The messages as plain text, a line each.

    Raises:
      ValueError: a message without `role` or `content`, or none at all.
    """
    _check_messages(messages)
    text = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
    return text + "assistant: " if add_generation_prompt else text


def _check_ids(ids: Sequence[int], vocab_size: int) -> None:
  for token_id in ids:
    if not 0 <= token_id < vocab_size:
      raise ValueError(f"token id {token_id} is not in the vocabulary of {vocab_size}")


def _check_messages(messages: Sequence[Mapping[str, str]]) -> None:
  if not messages:
    raise ValueError("no messages")
  for i, message in enumerate(messages):
    for key in ("role", "content"):
      if not isinstance(message.get(key), str):
        raise ValueError(f"message {i}: {key}={message.get(key)!r} must be a string")


def _optional(name: str) -> ModuleType:
  try:
    return importlib.import_module(name)
  except ImportError as error:
    raise ImportError(f"{name} is missing ({error}): pip install 'pdjax[hf]'") from error
