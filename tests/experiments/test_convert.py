from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest
from forks import Start, forks

from pdjax.core.model_config import TINY
from pdjax.models.checkpoints.checkpoint import open_checkpoint
from pdjax.models.checkpoints.orbax import MANIFEST, save_orbax
from pdjax.models.transformer import from_tensors, param_shapes
from pdjax.tokenizer import load_tokenizer

ROOT = pathlib.Path(__file__).parents[2]
HF_CONFIG = {
  "architectures": ["LlamaForCausalLM"],
  "model_type": "llama",
  "vocab_size": 300,
  "hidden_size": 32,
  "intermediate_size": 64,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "max_position_embeddings": 64,
  "rms_norm_eps": 1e-5,
  "tie_word_embeddings": True,
  "hidden_act": "silu",
  "bos_token_id": 0,
  "eos_token_id": 1,
}
LAYER_NAMES = {
  "input_layernorm": (32,),
  "post_attention_layernorm": (32,),
  "self_attn.q_proj": (32, 32),
  "self_attn.k_proj": (16, 32),
  "self_attn.v_proj": (16, 32),
  "self_attn.o_proj": (32, 32),
  "mlp.gate_proj": (64, 32),
  "mlp.up_proj": (64, 32),
  "mlp.down_proj": (32, 64),
}


@pytest.fixture(scope="module")
def convert() -> Iterator[Start]:
  """Starts the program with these arguments."""
  env = os.environ | {"PYTHONPATH": str(ROOT)}
  with forks("experiments.program", "pdjax.models.checkpoints.orbax", env=env) as start:
    yield functools.partial(start, "experiments.convert", cwd=ROOT)


def write_hf_folder(folder: pathlib.Path, *, nan: bool = False) -> pathlib.Path:
  """A small Llama with random weights, in the layout of Hugging Face."""
  shapes = {"model.embed_tokens.weight": (300, 32), "model.norm.weight": (32,)}
  for layer in range(HF_CONFIG["num_hidden_layers"]):
    shapes |= {f"model.layers.{layer}.{k}.weight": shape for k, shape in LAYER_NAMES.items()}
  rng, header, data = np.random.default_rng(0), {}, b""
  for name, shape in shapes.items():
    values = rng.standard_normal(shape, np.float32)
    if nan and name == "model.norm.weight":
      values[3] = np.nan
    end = len(data) + values.nbytes
    header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), end]}
    data += values.tobytes()
  text = json.dumps(header).encode()
  folder.mkdir()
  (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
  (folder / "config.json").write_text(json.dumps(HF_CONFIG))
  return folder


def write_tokenizer(folder: pathlib.Path, num_ids: int) -> None:
  tokenizers = pytest.importorskip("tokenizers")
  vocabulary = {"<s>": 0, "</s>": 1} | {f"w{i}": i for i in range(2, num_ids)}
  bpe = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<s>"))
  bpe.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
  bpe.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> pathlib.Path:
  folder = write_hf_folder(tmp_path_factory.mktemp("source") / "llama")
  write_tokenizer(folder, 290)
  return folder


def test_a_converted_model_is_the_same_model_with_its_tokenizer(convert, source, tmp_path):
  done = convert(f"--from={source}", f"--to={tmp_path / 'a'}", "--dtype=float32", "--tp=2")
  assert done.returncode == 0, done.stderr
  assert done.stdout == f"python -m experiments.run --model={tmp_path / 'a'}\n"
  assert "reading embedding (300, 32)" in done.stderr
  done = convert(f"--from={tmp_path / 'a'}", f"--to={tmp_path / 'b'}")  # in bfloat16
  assert done.returncode == 0, done.stderr

  original, wanted = open_checkpoint(source), load_tokenizer(source)
  for name, dtype in (("a", "float32"), ("b", "bfloat16")):
    copy = open_checkpoint(tmp_path / name, check_weights=True)
    assert copy.config == original.config
    for mine, theirs in zip(copy.load().params, original.load(dtype=dtype).params, strict=True):
      assert (mine == theirs.astype(np.float32)).all()
    tokenizer = load_tokenizer(tmp_path / name)
    assert tokenizer.encode("w2 w289 w3") == wanted.encode("w2 w289 w3") == (2, 289, 3)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (wanted.bos_id, wanted.eos_ids) == (0, (1,))


def test_a_model_without_a_tokenizer_is_converted_and_it_is_said(convert, tmp_path):
  source = write_hf_folder(tmp_path / "llama")
  done = convert(f"--from={source}", f"--to={tmp_path / 'out'}")
  assert done.returncode == 0
  assert f"without a tokenizer: {source}: no tokenizer.json" in done.stderr
  assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["params", MANIFEST]


def test_a_model_is_replaced_only_on_request(convert, source, tmp_path):
  out = tmp_path / "out"
  assert convert(f"--from={source}", f"--to={out}").returncode == 0
  before = (out / MANIFEST).read_bytes()
  done = convert(f"--from={source}", f"--to={out}", "--dtype=float32")
  assert (done.returncode, done.stdout) == (2, "")
  assert f"error: {out} has a model already; --overwrite replaces it" in done.stderr
  assert (out / MANIFEST).read_bytes() == before
  done = convert(f"--from={source}", f"--to={out}", "--dtype=float32", "--overwrite")
  assert done.returncode == 0
  assert (out / MANIFEST).read_bytes() != before
  open_checkpoint(out, check_weights=True).load()


def wrong(tmp_path, case: str) -> tuple[list[str], str]:
  """(arguments, a part of the message) of wrong input."""
  out = f"--to={tmp_path / 'out'}"
  if case == "no from":
    return [out], "--from is missing"
  if case == "no to":
    return ["--from=tiny"], "--to is missing"
  if case == "same":
    return [f"--from={tmp_path}", f"--to={tmp_path}"], "--from and --to are both"
  if case == "unknown":
    return ["--from=gpt-9", out], "unknown model 'gpt-9'"
  if case == "dtype":
    return ["--from=tiny", out, "--dtype=int8"], "int8"
  if case == "empty":
    (tmp_path / "empty").mkdir()
    return [f"--from={tmp_path / 'empty'}", out], f"{tmp_path / 'empty'} holds no checkpoint"
  folder = write_hf_folder(tmp_path / "llama", nan=case == "nan")
  arguments = [f"--from={folder}", out]
  if case == "occupied":
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("")
    return arguments, "has files that are not a model saved by pdjax"
  if case == "cut":
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    return arguments, "model.safetensors: truncated"
  if case == "nan":
    return [*arguments, "--check_weights"], "model.norm.weight: 1 of 32 values are NaN"
  if case == "tp":
    return [*arguments, "--tp=3"], "num_heads=4 is no multiple of the 3 devices"
  assert case == "vocabulary"
  write_tokenizer(folder, 301)
  return arguments, "the tokenizer has 301 ids"


@pytest.mark.parametrize(
  "case",
  ["no from", "no to", "same", "unknown", "dtype", "empty", "occupied", "cut", "nan", "tp",
   "vocabulary"],
)  # fmt: skip
def test_wrong_input_ends_with_one_message_and_writes_nothing(convert, tmp_path, case):
  arguments, message = wrong(tmp_path, case)
  before = sorted(tmp_path.rglob("*"))
  done = convert(*arguments)
  assert (done.returncode, done.stdout) == (2, "")
  (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
  assert message in line
  assert "Traceback" not in done.stderr
  assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
def test_ctrl_c_leaves_nothing_that_opens_and_the_same_command_goes_on(convert, tmp_path):
  config = dataclasses.replace(TINY, d_model=512, d_ff=8192, num_layers=6, vocab_size=40_000)
  ones = ((name, np.ones(shape)) for name, shape in param_shapes(config).items())
  save_orbax(tmp_path / "source", from_tensors(config, ones))
  arguments = [f"--from={tmp_path / 'source'}", f"--to={tmp_path / 'out'}"]
  running = subprocess.Popen(
    [sys.executable, "-m", "experiments.convert", *arguments],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
  until_s = time.monotonic() + 60
  while not any(path.is_file() for path in (tmp_path / "out").glob("params*/**/*")):
    assert running.poll() is None and time.monotonic() < until_s
    time.sleep(0.002)
  running.send_signal(signal.SIGINT)
  _, stderr = running.communicate(timeout=60)
  assert running.returncode == 130
  assert f"interrupted; {tmp_path / 'out'} is refused" in stderr and "Traceback" not in stderr
  with pytest.raises(ValueError, match="its saving was interrupted"):
    open_checkpoint(tmp_path / "out")
  done = convert(*arguments)
  assert done.returncode == 0, done.stderr
  assert open_checkpoint(tmp_path / "out", check_weights=True).config == config
