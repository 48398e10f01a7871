"""Text to token ids and back, and chat templates. No jax; optional packages only when used."""

from __future__ import annotations

import datetime
import functools
import importlib
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from pdjax.core.model_config import ModelConfig

_SPECIAL = 3  # GGUF's token type of control tokens, such as <|im_end|>


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
  """The tokenizer of a checkpoint: of a GGUF file, or of a folder with tokenizer.json.

  Raises:
    FileNotFoundError: nothing at `path`.
    ImportError: a package of the extra `[hf]` is missing.
    ValueError: no tokenizer there that pdjax reads, or a damaged one; with the file.
  """
  path = pathlib.Path(path)
  return Tokenizer.from_folder(path) if path.is_dir() else Tokenizer.from_gguf(path)


def check_vocabulary(
  tokenizer: Tokenizer | ByteTokenizer, config: ModelConfig, path: str | os.PathLike[str]
) -> None:
  """Refuses a tokenizer whose ids the model at `path` has no rows for.

  More rows than ids are common: they pad the embedding to a round size.

  Raises:
    ValueError: with both numbers and `path`.
  """
  if tokenizer.vocab_size > config.vocab_size:
    raise ValueError(
      f"{path}: the tokenizer has {tokenizer.vocab_size} ids, the model {config.name} only "
      f"{config.vocab_size} embedding rows: they are not of one checkpoint"
    )


class Tokenizer:
  """The vocabulary and chat template of one checkpoint. Never changes once made.

  `vocab_size` is the largest id plus one. `eos_ids` all end an answer; `eos_id` is the first.
  """

  def __init__(
    self,
    *,
    bpe: Any,  # tokenizers.Tokenizer
    bos_id: int | None = None,
    eos_ids: Sequence[int] = (),
    chat_template: str | None = None,
    special_tokens: Mapping[str, str] | None = None,  # as templates know them: "bos_token": "<s>"
  ):
    self._bpe = bpe
    self._chat_template = chat_template
    self._special_tokens = dict(special_tokens or {})
    self.vocab_size: int = 1 + max(bpe.get_vocab().values(), default=-1)
    self.bos_id = bos_id
    self.eos_ids = tuple(eos_ids)

  @property
  def eos_id(self) -> int | None:
    return self.eos_ids[0] if self.eos_ids else None

  @classmethod
  def from_folder(cls, folder: str | os.PathLike[str]) -> Tokenizer:
    """Reads tokenizer.json and what the JSON files beside it say of special tokens and chat.

    OPT has vocab.json and merges.txt instead. What ends an answer: the tokenizer's own end token,
    and those of generation_config.json, or of config.json.

    Raises:
      ImportError: a package of the extra `[hf]` is missing.
      ValueError: no such files, or damaged ones; with the file.
    """
    folder = pathlib.Path(folder)
    config = _read_json(folder / "config.json")
    options = _read_json(folder / "special_tokens_map.json")
    options |= _read_json(folder / "tokenizer_config.json")
    texts = {name: _token_text(value) for name, value in options.items() if name[-6:] == "_token"}
    special_tokens = {name: text for name, text in texts.items() if text is not None}
    if (folder / "tokenizer.json").exists():
      bpe = _read_tokenizer_json(folder / "tokenizer.json")
    else:
      bpe = _read_gpt2_files(folder, config, options, special_tokens)

    def ids(name: str, *sources: Mapping[str, Any]) -> list[int]:
      """The ids of a special token: by its text, then those of the first source that has any."""
      found = [bpe.token_to_id(special_tokens.get(f"{name}_token", ""))]
      given = [source.get(f"{name}_token_id") for source in sources]
      value = next((value for value in given if value is not None), [])
      found += value if isinstance(value, list) else [value]
      return list(dict.fromkeys(i for i in found if isinstance(i, int)))

    generation = _read_json(folder / "generation_config.json")
    bos_ids = ids("bos", *(() if "bos_token" in options else (generation, config)))
    return cls(
      bpe=bpe,
      bos_id=bos_ids[0] if bos_ids else None,
      eos_ids=ids("eos", generation, config),
      chat_template=_chat_template(folder, options),
      special_tokens=special_tokens,
    )

  @classmethod
  def from_gguf(cls, path: str | os.PathLike[str]) -> Tokenizer:
    """Reads the vocabulary, merges and chat template of a GGUF file; no weights. Takes seconds.

    Raises:
      ImportError: a package of the extra `[hf]` is missing.
      ValueError: not a GGUF file, or a tokenizer of another kind than SmolLM's.
    """
    gguf, tokenizers = _optional("gguf"), _optional("tokenizers")
    try:
      return cls(**_read_gguf(gguf.GGUFReader(path).fields, tokenizers))
    except OSError:
      raise
    except Exception as error:  # the packages fail in many ways on a damaged file
      raise ValueError(f"{path}: no readable GGUF tokenizer: {error}") from error

  def files(self) -> dict[str, str]:
    """Name -> text of files from which `from_folder` makes an equal tokenizer."""
    options = dict(self._special_tokens)
    if self._chat_template is not None:
      options["chat_template"] = self._chat_template
    ids = {"bos_token_id": self.bos_id, "eos_token_id": list(self.eos_ids)}
    return {
      "tokenizer.json": self._bpe.to_str(),
      "tokenizer_config.json": json.dumps(options, indent=1),
      "generation_config.json": json.dumps(ids, indent=1),
    }

  def encode(self, text: str, *, add_special_tokens: bool = False) -> tuple[int, ...]:
    """The ids of `text`; special tokens written in it become their ids.

    With `add_special_tokens` also those that the model saw around plain text in training, such as
    Llama's first token: right for plain prompts, wrong for chat prompts, which have their own.
    """
    return tuple(self._bpe.encode(text, add_special_tokens=add_special_tokens).ids)

  def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
    """The inverse of `encode`, special tokens included unless `skip_special`.

    Cut characters become U+FFFD. Ids above the vocabulary, rows that only pad a model's embedding,
    become nothing.

    Raises:
      ValueError: a negative id.
    """
    if min(ids, default=0) < 0:
      raise ValueError(f"token id {min(ids)} is negative")
    return self._bpe.decode(list(ids), skip_special_tokens=skip_special)

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
    environment = _chat_environment()
    try:
      return environment.from_string(self._chat_template).render(
        messages=[dict(message) for message in messages],
        add_generation_prompt=add_generation_prompt,
        tools=None,
        documents=None,
        **self._special_tokens,
      )
    except Exception as error:  # a program fails in many ways
      raise ValueError(f"the chat template failed: {error}") from error


class ByteTokenizer:
  """Ids 0..255 are the bytes of UTF-8, the rest mean nothing. For models with no text of their own.

  Needs no download and no package. Never changes once made.

  Raises:
    ValueError: a vocabulary too small for the 256 bytes.
  """

  bos_id: int | None = None
  eos_id: int | None = None
  eos_ids: tuple[int, ...] = ()

  def __init__(self, vocab_size: int):
    if vocab_size < 256:
      raise ValueError(f"vocab_size={vocab_size} must be at least 256, one id per byte")
    self.vocab_size = vocab_size

  def encode(self, text: str, *, add_special_tokens: bool = False) -> tuple[int, ...]:
    """There are no special tokens to add."""
    return tuple(text.encode())

  def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
    """The inverse of `encode`; ids from 256 on and cut characters become U+FFFD.

    Raises:
      ValueError: an id outside the vocabulary.
    """
    for token_id in ids:
      if not 0 <= token_id < self.vocab_size:
        raise ValueError(f"token id {token_id} is not in the vocabulary of {self.vocab_size}")
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


@functools.cache
def _chat_environment() -> Any:
  """What chat templates run in: a sandbox, as each is a program from a downloaded file."""
  jinja2, sandbox, ext = map(_optional, ("jinja2", "jinja2.sandbox", "jinja2.ext"))

  def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)

  class Generation(ext.Extension):
    """`{% generation %}` marks what training is to learn; to serve it is text like any other."""

    tags = frozenset({"generation"})

    def parse(self, parser):
      next(parser.stream)
      return parser.parse_statements(("name:endgeneration",), drop_needle=True)

  environment = sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[ext.loopcontrols, Generation]
  )
  environment.globals.update(  # templates call them by these names
    raise_exception=raise_exception,
    strftime_now=lambda form: datetime.datetime.now().strftime(form),
  )
  # Jinja's own makes text safe for HTML: other tokens than the model was trained on.
  environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
  return environment


def _read_gguf(fields: Mapping[str, Any], tokenizers: ModuleType) -> dict[str, Any]:
  """What `Tokenizer` is made of, from the fields of a GGUF file."""

  def field(name: str) -> Any:
    return fields[name].contents() if name in fields else None

  kind, pre = field("tokenizer.ggml.model"), field("tokenizer.ggml.pre")
  if (kind, pre) != ("gpt2", "smollm"):
    # Another pre-tokenizer cuts text elsewhere and would give wrong ids without any error.
    raise ValueError(f"tokenizer model={kind!r} pre={pre!r}; only gpt2 with smollm is read")
  tokens = field("tokenizer.ggml.tokens")
  types = field("tokenizer.ggml.token_type")
  merges = field("tokenizer.ggml.merges")
  if tokens is None or types is None or merges is None:
    raise ValueError("no tokenizer.ggml.tokens, token_type or merges")

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

  ids = {name: field(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot")}
  if ids["bos"] is not None and field("tokenizer.ggml.add_bos_token"):
    bpe.post_processor = _add_first(tokenizers, tokens[ids["bos"]], ids["bos"])
  return dict(
    bpe=bpe,
    bos_id=ids["bos"],
    eos_ids=tuple(dict.fromkeys(ids[k] for k in ("eos", "eot") if ids[k] is not None)),
    chat_template=field("tokenizer.chat_template"),
    special_tokens={
      f"{name}_token": tokens[ids[name]] for name in ("bos", "eos") if ids[name] is not None
    },
  )


def _read_json(path: pathlib.Path) -> dict[str, Any]:
  """The object in a file; empty where there is no file."""
  if not path.exists():
    return {}
  try:
    value = json.loads(path.read_bytes())
  except ValueError as error:
    raise ValueError(f"{path}: not readable as JSON ({error})") from error
  if not isinstance(value, dict):
    raise ValueError(f"{path}: not a JSON object")
  return value


def _read_tokenizer_json(path: pathlib.Path) -> Any:
  tokenizers = _optional("tokenizers")
  try:
    bpe = tokenizers.Tokenizer.from_file(str(path))
  except Exception as error:  # the package raises this very class
    raise ValueError(f"{path}: not a readable tokenizer ({error})") from error
  bpe.no_truncation()  # a checkpoint may have been saved with either on
  bpe.no_padding()
  return bpe


def _read_gpt2_files(
  folder: pathlib.Path,
  config: Mapping[str, Any],
  options: Mapping[str, Any],
  special_tokens: Mapping[str, str],
) -> Any:
  """The tokenizer of OPT and GPT-2, published as vocab.json and merges.txt."""
  vocabulary, merges = folder / "vocab.json", folder / "merges.txt"
  # Other models with such files cut text elsewhere: wrong ids without any error.
  is_gpt2 = str(options.get("tokenizer_class")).startswith("GPT2Tokenizer") or config.get(
    "model_type"
  ) in ("gpt2", "opt")
  if not (is_gpt2 and vocabulary.exists() and merges.exists()):
    hint = ""
    if (folder / "tokenizer.model").exists():
      hint = (
        " (tokenizer.model alone is not read: load the folder with transformers' AutoTokenizer "
        "and save_pretrained it, which writes tokenizer.json)"
      )
    raise ValueError(f"{folder}: no tokenizer.json{hint}")
  tokenizers = _optional("tokenizers")
  try:
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(str(vocabulary), str(merges)))
  except Exception as error:  # the package raises this very class
    raise ValueError(f"{folder}: vocab.json and merges.txt are no tokenizer ({error})") from error
  bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=bool(options.get("add_prefix_space", False))
  )
  bpe.decoder = tokenizers.decoders.ByteLevel()
  bpe.add_special_tokens(sorted(set(special_tokens.values())))
  first = special_tokens.get("bos_token")
  if first is not None and options.get("add_bos_token"):
    bpe.post_processor = _add_first(tokenizers, first, bpe.token_to_id(first))
  return bpe


def _add_first(tokenizers: ModuleType, token: str, token_id: int) -> Any:
  return tokenizers.processors.TemplateProcessing(
    single=[token, "$A"], special_tokens=[(token, token_id)]
  )


def _token_text(value: Any) -> str | None:
  """A special token as the JSON files write it: its text, an object with it, or null."""
  text = value.get("content") if isinstance(value, dict) else value
  return text if isinstance(text, str) else None


def _chat_template(folder: pathlib.Path, options: Mapping[str, Any]) -> str | None:
  path = folder / "chat_template.jinja"
  if path.exists():
    return path.read_text()
  template = options.get("chat_template")
  if isinstance(template, list):  # several by name
    named = [entry for entry in template if isinstance(entry, dict)]
    template = next((e.get("template") for e in named if e.get("name") == "default"), None)
  return template if isinstance(template, str) else None


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
