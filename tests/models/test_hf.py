"""Folders as on Hugging Face: every tensor comes out in its place; what is wrong is named."""

import json
import pathlib
import subprocess
import sys
import textwrap

import jax
import ml_dtypes
import numpy as np
import pytest

from pdjax.models import transformer
from pdjax.models.checkpoints.checkpoint import open_checkpoint

pytestmark = pytest.mark.quick

D, H, K, HEAD_DIM, F, V, L = 16, 4, 2, 6, 20, 30, 3
LLAMA = {
  "architectures": ["LlamaForCausalLM"],
  "hidden_size": D,
  "num_attention_heads": H,
  "num_key_value_heads": K,
  "head_dim": HEAD_DIM,
  "intermediate_size": F,
  "vocab_size": V,
  "num_hidden_layers": L,
}
NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64"}


def llama_shapes(config=LLAMA):
  """Names and shapes, matrices as [out, in]."""
  d, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
  q, kv = (config[f"num_{k}_heads"] * config["head_dim"] for k in ("attention", "key_value"))
  shapes = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
  if not config.get("tie_word_embeddings"):
    shapes["lm_head.weight"] = (v, d)
  for i in range(config["num_hidden_layers"]):
    shapes |= {
      f"model.layers.{i}.{name}.weight": shape
      for name, shape in {
        "input_layernorm": (d,),
        "self_attn.q_proj": (q, d),
        "self_attn.k_proj": (kv, d),
        "self_attn.v_proj": (kv, d),
        "self_attn.o_proj": (d, q),
        "post_attention_layernorm": (d,),
        "mlp.gate_proj": (f, d),
        "mlp.up_proj": (f, d),
        "mlp.down_proj": (d, f),
      }.items()
    }
  return shapes


def random_tensors(shapes, seed=0):
  rng = np.random.default_rng(seed)
  return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def header(tensors):
  """The header of a file as a dict: the tensors in the order given."""
  entries, end = {"__metadata__": {"format": "pt"}}, 0
  for name, x in tensors.items():
    start, end = end, end + x.nbytes
    entries[name] = {"dtype": NAMES[x.dtype.name], "shape": x.shape, "data_offsets": [start, end]}
  return entries


def write_file(path, tensors, entries=None):
  text = entries if isinstance(entries, str) else json.dumps(entries or header(tensors))
  with open(path, "wb") as file:
    file.write(len(text).to_bytes(8, "little") + text.encode())
    for x in tensors.values():
      if x.strides[0]:
        file.write(x.tobytes())
      else:  # a value broadcast: zeros that take no room on disk
        file.truncate(file.seek(x.nbytes, 1))


def write(folder, tensors, config=LLAMA, num_shards=None):
  """A folder with config.json and the tensors, dealt out to `num_shards`."""
  folder.mkdir(exist_ok=True)
  (folder / "config.json").write_text(json.dumps(config))
  if num_shards is None:
    write_file(folder / "model.safetensors", tensors)
    return folder
  places = {name: f"model-{i % num_shards}.safetensors" for i, name in enumerate(tensors)}
  for file in set(places.values()):
    write_file(folder / file, {n: x for n, x in tensors.items() if places[n] == file})
  index = {"metadata": {}, "weight_map": places}
  (folder / "model.safetensors.index.json").write_text(json.dumps(index))
  return folder


def load(folder, **options):
  """Parameters by name, on the host."""
  model = open_checkpoint(folder, **options).load()
  return dict(zip(model.param_names, model.params))


def refusal(folder, **options):
  """The message with which a folder is refused, on opening or on loading."""
  with pytest.raises(ValueError) as error:
    load(folder, **options)
  assert str(folder) in str(error.value)
  return str(error.value)


def heads(matrix, num_heads):
  """[D, heads, h] of a [heads * h, D] matrix, element by element."""
  out = np.empty((D, num_heads, HEAD_DIM), matrix.dtype)
  for head in range(num_heads):
    for i in range(HEAD_DIM):
      out[:, head, i] = matrix[head * HEAD_DIM + i]
  return out


@pytest.mark.parametrize("num_shards", [None, 1, 5])
def test_llama_tensors_come_out_in_their_places(num_shards, tmp_path):
  tensors = random_tensors(llama_shapes())
  got = load(write(tmp_path / "model", tensors, num_shards=num_shards))
  assert len(got) == len(tensors)
  same = np.testing.assert_array_equal
  same(got["embedding"], tensors["model.embed_tokens.weight"])
  same(got["unembedding"], tensors["lm_head.weight"].T)
  same(got["final_norm.scale"], tensors["model.norm.weight"])
  for i in range(L):
    t = {name.split(".", 3)[3]: x for name, x in tensors.items() if f"layers.{i}." in name}
    p = {name.split(".", 2)[2]: x for name, x in got.items() if name.startswith(f"blocks.{i}.")}
    same(p["attention.q"], heads(t["self_attn.q_proj.weight"], H))
    same(p["attention.k"], heads(t["self_attn.k_proj.weight"], K))
    same(p["attention.v"], heads(t["self_attn.v_proj.weight"], K))
    same(p["attention.o"], heads(t["self_attn.o_proj.weight"].T, H).transpose(1, 2, 0))
    for name in ("gate", "up", "down"):
      same(p[f"mlp.{name}"], t[f"mlp.{name}_proj.weight"].T)
    same(p["attention_norm.scale"], t["input_layernorm.weight"])
    same(p["mlp_norm.scale"], t["post_attention_layernorm.weight"])


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_falcons_fused_heads_are_taken_apart(num_kv_heads, bias, tmp_path):
  """Rows are numbered, so that each head can be told: per kv head its queries, then k, then v."""
  head_dim = D // H
  config = {
    "architectures": ["FalconForCausalLM"],
    "hidden_size": D,
    "num_attention_heads": H,
    "num_hidden_layers": 1,
    "vocab_size": V,
    "bias": bias,
    "multi_query": num_kv_heads == 1,
  }
  if num_kv_heads == 2:
    config |= {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}
  num_rows = (H + 2 * num_kv_heads) * head_dim
  shapes = {
    "self_attention.dense.weight": (D, D),
    "input_layernorm.weight": (D,),
    "input_layernorm.bias": (D,),
    "mlp.dense_h_to_4h.weight": (4 * D, D),
    "mlp.dense_4h_to_h.weight": (D, 4 * D),
  }
  fused = np.repeat(np.arange(num_rows, dtype=np.float32)[:, None], D, axis=1)
  blocks = {"self_attention.query_key_value.weight": fused}
  if bias:
    shapes |= {
      "self_attention.dense.bias": (D,),
      "mlp.dense_h_to_4h.bias": (4 * D,),
      "mlp.dense_4h_to_h.bias": (D,),
    }
    blocks["self_attention.query_key_value.bias"] = fused[:, 0]
  tensors = {f"transformer.h.0.{name}": x for name, x in (blocks | random_tensors(shapes)).items()}
  tensors |= random_tensors(
    {
      "transformer.word_embeddings.weight": (V, D),
      "transformer.ln_f.weight": (D,),
      "transformer.ln_f.bias": (D,),
    }
  )
  got = load(write(tmp_path / "model", tensors, config))
  rows = {"q": [], "k": [], "v": []}
  for row in range(num_rows // head_dim):
    place = row % (H // num_kv_heads + 2) - H // num_kv_heads
    rows["q" if place < 0 else "kv"[place]].append(row * head_dim + np.arange(head_dim))
  for kind, want in rows.items():
    for column in got[f"blocks.0.attention.{kind}"]:
      np.testing.assert_array_equal(column, want)
    if bias:
      np.testing.assert_array_equal(got[f"blocks.0.attention.{kind}_bias"], want)


def test_opt_drops_two_positions(tmp_path):
  config = {
    "architectures": ["OPTForCausalLM"],
    "hidden_size": D,
    "num_attention_heads": H,
    "num_hidden_layers": 1,
    "ffn_dim": F,
    "vocab_size": V,
    "max_position_embeddings": 9,
  }
  shapes = {"embed_tokens.weight": (V, D), "embed_positions.weight": (11, D)}
  for norm in ("final_layer_norm", "layers.0.self_attn_layer_norm", "layers.0.final_layer_norm"):
    shapes |= {f"{norm}.weight": (D,), f"{norm}.bias": (D,)}
  for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
    shapes |= {f"layers.0.self_attn.{name}.weight": (D, D), f"layers.0.self_attn.{name}.bias": (D,)}
  shapes |= {"layers.0.fc1.weight": (F, D), "layers.0.fc1.bias": (F,)}
  shapes |= {"layers.0.fc2.weight": (D, F), "layers.0.fc2.bias": (D,)}
  for prefix in ("model.decoder.", "decoder."):
    tensors = random_tensors({prefix + name: shape for name, shape in shapes.items()})
    got = load(write(tmp_path / "model", tensors, config))
    want = tensors[f"{prefix}embed_positions.weight"][2:]
    np.testing.assert_array_equal(got["position_embedding"], want)


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("on_device", [False, True])
def test_types_are_cast_on_the_way(stored, dtype, on_device, tmp_path):
  stored = np.dtype(stored if stored != "bfloat16" else ml_dtypes.bfloat16)
  tensors = {name: x.astype(stored) for name, x in random_tensors(llama_shapes()).items()}
  folder = write(tmp_path / "model", tensors, num_shards=2)
  target = jax.devices()[0] if on_device else None
  model = open_checkpoint(folder).load(dtype=dtype, target=target)
  assert {param.dtype.name for param in model.params} == {dtype}
  got = dict(zip(model.param_names, model.params))
  want = tensors["model.layers.1.mlp.down_proj.weight"].T.astype(got["blocks.1.mlp.down"].dtype)
  np.testing.assert_array_equal(np.asarray(got["blocks.1.mlp.down"]), want)


def test_the_safetensors_package_writes_what_is_read(tmp_path):
  numpy = pytest.importorskip("safetensors.numpy")
  tensors = random_tensors(llama_shapes())
  folder = write(tmp_path / "model", tensors)
  want = load(folder)
  numpy.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
  jax.tree.map(np.testing.assert_array_equal, load(folder), want)


def test_other_names_of_the_same_weights_are_known(tmp_path):
  tied = LLAMA | {"tie_word_embeddings": True}
  tensors = random_tensors(llama_shapes(tied))
  want = load(write(tmp_path / "model", tensors, tied))
  assert "unembedding" not in want
  embedding = tensors["model.embed_tokens.weight"]
  buffers = {
    "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(HEAD_DIM // 2, np.float32),
    "model.rotary_emb.inv_freq": np.ones(HEAD_DIM // 2, np.int64),
  }
  renamed = {("lm_head.weight" if "embed" in n else n): x for n, x in tensors.items()}
  bare = {name.removeprefix("model."): x for name, x in tensors.items()}
  for others in (
    tensors | buffers | {"lm_head.weight": embedding},  # old buffers and a copy
    renamed,  # tied weights are written once, under either name
    bare,  # saved without its LM head
    bare | {"lm_head.weight": embedding},
  ):
    got = load(write(tmp_path / "model", others, tied))
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_embeddings_that_are_tied_and_differ_are_refused(tmp_path):
  """transformers then runs them untied: which of the two is meant, nobody knows."""
  tied = LLAMA | {"tie_word_embeddings": True}
  tensors = random_tensors(llama_shapes(tied))
  embedding = tensors["model.embed_tokens.weight"]
  other = embedding.copy()
  other[-1, -1] += 1
  for copy in (other, embedding.astype(np.float16), embedding[:-1]):
    folder = write(tmp_path / "model", tensors | {"lm_head.weight": copy}, tied)
    message = refusal(folder)
    assert "model.safetensors: tensor lm_head.weight differs from model.embed_tokens" in message
    assert "tie_word_embeddings" in message


def test_each_file_is_opened_once_and_read_in_its_own_order(tmp_path, monkeypatch):
  tensors = random_tensors(llama_shapes())
  names = np.random.default_rng(1).permutation(list(tensors)).tolist()
  folder = write(tmp_path / "model", {name: tensors[name] for name in names}, num_shards=3)
  checkpoint = open_checkpoint(folder)
  opened, order = [], []

  def counting_open(path, *args, **kwargs):
    opened.append(pathlib.Path(path).name)
    return open(path, *args, **kwargs)

  def values(x):  # the same however its axes lie
    return np.sort(x, axis=None).tobytes()

  def note_order(config, tensors, **options):
    order.extend(values(x) for _, x in tensors)

  monkeypatch.setattr("pdjax.models.checkpoints.hf.open", counting_open, raising=False)
  monkeypatch.setattr(transformer, "from_tensors", note_order)
  checkpoint.load()
  assert opened == [f"model-{i}.safetensors" for i in range(3)]
  assert order == [values(tensors[name]) for i in range(3) for name in names[i::3]]


def test_opening_starts_no_backend_and_reads_no_weights(tmp_path):
  """After JAX has started, the CPU can no longer be split into devices."""
  tensors = random_tensors(llama_shapes())
  folder = write(tmp_path / "model", tensors)
  path = folder / "model.safetensors"
  size = path.stat().st_size
  with open(path, "r+b") as file:  # weights that say something else
    file.truncate(size - sum(x.nbytes for x in tensors.values()))
    file.truncate(size)
  program = """
    import sys
    from pdjax.models.checkpoints.checkpoint import open_checkpoint
    checkpoint = open_checkpoint(sys.argv[1])
    import jax
    jax.config.update("jax_num_cpu_devices", 2)
    mesh = jax.sharding.Mesh(jax.devices(), ("tensor",))
    assert not any(abs(x).max() for x in checkpoint.load(target=mesh).params)
  """
  run_program(program, folder)


def run_program(program, folder):
  """Runs it in a Python of its own, whose JAX is not started yet. Returns what it prints."""
  done = subprocess.run(
    [sys.executable, "-c", textwrap.dedent(program), str(folder)],
    env={"JAX_PLATFORMS": "cpu", "PYTHONPATH": ":".join(sys.path)},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  return done.stdout


# What is wrong.


def test_wrong_tensors_are_listed_in_one_message_before_any_is_read(tmp_path):
  tensors = random_tensors(llama_shapes())
  del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
  for i in range(L):
    del tensors[f"model.layers.{i}.mlp.down_proj.weight"]
    tensors[f"model.layers.{i}.self_attn.q_proj.bias"] = np.zeros(H * HEAD_DIM, np.float32)
  tensors["model.layers.2.mlp.gate_proj.weight"] = np.zeros((F + 1, D), np.float32)
  tensors["visual.proj"] = np.zeros(3, np.float32)
  folder = write(tmp_path / "model", tensors, num_shards=2)
  with pytest.raises(ValueError) as error:
    open_checkpoint(folder)
  message = str(error.value)
  missing, unknown, shaped = message.split("missing ")[1].split("; ")
  assert set(missing.split(", ")) == {
    "model.norm.weight",
    "model.layers.1.mlp.up_proj.weight",
    "model.layers.{0,1,2}.mlp.down_proj.weight",
  }
  assert "model.layers.{0,1,2}.self_attn.q_proj.bias" in unknown
  assert "visual.proj" in unknown
  assert shaped == (
    f"of shape [{F + 1}, {D}] instead of [{F}, {D}] model.layers.2.mlp.gate_proj.weight"
  )
  assert "LlamaForCausalLM that config.json describes" in message
  assert str(folder) in message


def test_weights_of_another_model_are_named_as_such(tmp_path):
  tensors = random_tensors(llama_shapes())
  opt = {"architectures": ["OPTForCausalLM"], "ffn_dim": F, "num_key_value_heads": None}
  falcon = {"architectures": ["FalconForCausalLM"]}
  for other in (opt, falcon):
    message = refusal(write(tmp_path / "model", tensors, LLAMA | other))
    assert "weights of Llama, Mistral or Qwen, not those of the " in message
    assert other["architectures"][0] in message
  message = refusal(write(tmp_path / "model", tensors, LLAMA | {"vocab_size": V + 1}))
  assert f"of shape [{V}, {D}] instead of [{V + 1}, {D}] model.embed_tokens.weight" in message
  message = refusal(write(tmp_path / "model", tensors, LLAMA | {"num_hidden_layers": 2}))
  assert "unknown model.layers.2.input_layernorm.weight" in message
  qwen = LLAMA | {"architectures": ["Qwen2ForCausalLM"]}
  message = refusal(write(tmp_path / "model", tensors, qwen))
  assert "model.layers.{0,1,2}.self_attn.q_proj.bias" in message.partition("missing ")[2]


def test_a_truncated_file_is_named_with_its_tensor(tmp_path):
  tensors = random_tensors(llama_shapes())
  folder = write(tmp_path / "model", tensors)
  path = folder / "model.safetensors"
  whole = path.read_bytes()
  for size in (0, 1, 7, 8, 9, 200, 2000):
    path.write_bytes(whole[:size])
    assert "model.safetensors: truncated" in refusal(folder)
  *_, before, last = tensors
  path.write_bytes(whole[:-1])
  assert f"model.safetensors: truncated: tensor {last} ends" in refusal(folder)
  path.write_bytes(whole[: -tensors[last].nbytes - 1])
  assert f"model.safetensors: truncated: tensor {before} ends" in refusal(folder)
  path.write_bytes(whole + b"\0")
  assert "1 bytes after the last tensor" in refusal(folder)
  path.write_bytes(whole)
  checkpoint = open_checkpoint(folder)
  path.write_bytes(whole[: len(whole) // 2])
  with pytest.raises(ValueError, match=r"model\.safetensors: truncated since.* tensor model\."):
    checkpoint.load()


def test_any_damage_of_a_header_is_one_error_that_names_the_file(tmp_path):
  folder = write(tmp_path / "model", random_tensors(llama_shapes()))
  path = folder / "model.safetensors"
  whole = path.read_bytes()
  size = 8 + int.from_bytes(whole[:8], "little")
  rng = np.random.default_rng(0)
  num_refused = 0
  for _ in range(300):
    damaged = bytearray(whole)
    for place in rng.integers(0, size, rng.integers(1, 4)):
      damaged[place] = rng.integers(0, 256)
    path.write_bytes(damaged)
    try:
      open_checkpoint(folder)
    except ValueError as error:
      num_refused += 1
      assert str(folder) in str(error)
  assert num_refused > 250  # the rest hit the metadata or wrote what was there


@pytest.mark.parametrize("text", ["[]", "7", "null", '"a"', "[" * 100_000], ids=lambda t: t[:4])
def test_a_header_that_is_no_object_names_the_file(text, tmp_path):
  tensors = random_tensors(llama_shapes())
  folder = write(tmp_path / "model", tensors)
  write_file(folder / "model.safetensors", tensors, text)
  assert "model.safetensors: damaged header" in refusal(folder)


def test_wrong_entries_of_a_header_name_the_tensor(tmp_path):
  tensors = random_tensors(llama_shapes())
  folder = write(tmp_path / "model", tensors)
  path, name = folder / "model.safetensors", "model.layers.1.mlp.up_proj.weight"

  def damaged(**changes):
    entries = header(tensors)
    entries[name] = {k: v for k, v in (entries[name] | changes).items() if v is not None}
    write_file(path, tensors, entries)
    message = refusal(folder)
    assert f"tensor {name}" in message
    assert "model.safetensors" in message
    return message

  start, end = header(tensors)[name]["data_offsets"]
  assert "dtype F8_E4M3" in damaged(dtype="F8_E4M3")
  damaged(dtype=None)
  damaged(dtype=["F32"])
  damaged(shape=[F, D, 2])
  damaged(shape=[-F, -D])
  damaged(shape="FD")
  damaged(data_offsets=[start, end + 4])
  damaged(data_offsets=[start - 4, end - 4])
  damaged(data_offsets=[start])
  damaged(data_offsets=None)
  text = json.dumps(header(tensors))
  write_file(path, tensors, text[:-1] + f', "{name}": {json.dumps(header(tensors)[name])}}}')
  assert f"{name} appears twice" in refusal(folder)


def test_a_wrong_index_is_named_with_file_and_tensor(tmp_path):
  tensors = random_tensors(llama_shapes())
  folder = tmp_path / "model"
  name, index = "model.layers.1.mlp.up_proj.weight", "model.safetensors.index.json"

  def changed(**places):
    write(folder, tensors, num_shards=3)
    values = json.loads((folder / index).read_text())
    values["weight_map"] |= places
    (folder / index).write_text(json.dumps(values))
    return refusal(folder)

  where = json.loads((write(folder, tensors, num_shards=3) / index).read_text())["weight_map"]
  other = next(file for file in where.values() if file != where[name])
  assert f"{index}: names model-9.safetensors (with {name})" in changed(
    **{name: "model-9.safetensors"}
  )
  assert f"{index}: tensor {name} is not in {other}" in changed(**{name: other})
  assert f"{index}: tensor absent.weight is not in {other}" in changed(**{"absent.weight": other})
  assert index in changed(**{name: 7})
  for text in ("", "[]", "{}", '{"weight_map": []}'):
    (folder / index).write_text(text)
    assert f"{index}: not an index" in refusal(folder)

  write(folder, tensors, num_shards=3)  # a tensor in two files
  extra = {n: x for n, x in tensors.items() if where[n] == other} | {name: tensors[name]}
  write_file(folder / other, extra)
  assert f"tensor {name} is also in " in refusal(folder)
  (folder / other).unlink()
  assert f"{index}: names {other}" in refusal(folder)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_weights_are_refused_on_request(dtype, value, tmp_path):
  tensors = {name: x.astype(dtype) for name, x in random_tensors(llama_shapes()).items()}
  folder = write(tmp_path / "model", tensors, num_shards=2)
  load(folder, check_weights=True)
  name = "model.layers.1.self_attn.k_proj.weight"
  tensors[name][3, 5] = value
  write(folder, tensors, num_shards=2)
  assert not np.isfinite(load(folder)["blocks.1.attention.k"]).all()
  file = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]
  message = refusal(folder, check_weights=True)
  assert f"{file}: tensor {name}: 1 of " in message


def test_a_quantised_model_is_refused(tmp_path):
  config = LLAMA | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
  message = refusal(write(tmp_path / "model", random_tensors(llama_shapes()), config))
  assert "config.json" in message
  assert "gptq" in message


def test_what_is_no_checkpoint_is_refused_with_its_path(tmp_path):
  with pytest.raises(FileNotFoundError, match="absent"):
    open_checkpoint(tmp_path / "absent")
  folder = tmp_path / "model"
  folder.mkdir()
  assert "holds no checkpoint" in refusal(folder)
  (folder / "config.json").write_text(json.dumps(LLAMA))
  (folder / "pytorch_model.bin").write_bytes(b"PK")
  assert ".bin" in refusal(folder)
  (folder / "some-q4.gguf").write_bytes(b"GGUF")
  assert "some-q4.gguf" in refusal(folder)
  (folder / "notes.txt").write_text("hello")
  with pytest.raises(ValueError, match=r"notes\.txt is neither"):
    open_checkpoint(folder / "notes.txt")
  with pytest.raises(ValueError, match=r"config\.json is part of a checkpoint; give its folder"):
    open_checkpoint(folder / "config.json")
  write(folder, random_tensors(llama_shapes()))
  load(folder)
  (folder / "model.safetensors").rename(folder / "weights.safetensors")
  assert "model.safetensors" in refusal(folder)
  (folder / "config.json").unlink()
  with pytest.raises(FileNotFoundError, match=r"config\.json"):
    open_checkpoint(folder)


@pytest.mark.once
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_peak_memory_is_under_twice_the_largest_tensor_beside_what_devices_hold(stored, tmp_path):
  """RssAnon of /proc/self/status, sampled every half millisecond while loading over two devices.

  The same program then loads with all tensors held at once, and must see that.
  """
  if not pathlib.Path("/proc/self/status").exists():
    pytest.skip("needs Linux")
  sizes = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4}
  sizes |= {"head_dim": 64, "intermediate_size": 2048, "vocab_size": 16384, "num_hidden_layers": 4}
  config = LLAMA | sizes
  zero = np.zeros((), ml_dtypes.bfloat16 if stored == "bfloat16" else stored)
  tensors = {name: np.broadcast_to(zero, shape) for name, shape in llama_shapes(config).items()}
  write(tmp_path / "model", tensors, config, num_shards=4)
  program = '''
    import sys, threading
    import jax
    jax.config.update("jax_num_cpu_devices", 2)
    import numpy as np
    from pdjax.models import transformer
    from pdjax.models.checkpoints.checkpoint import open_checkpoint

    def anonymous_bytes():
      with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))

    def excess(load):
      """Peak bytes beside the shards on the devices, in largest tensors."""
      before, peak, stop = anonymous_bytes(), [0], threading.Event()

      def watch():
        while not stop.wait(0.0005):
          peak[0] = max(peak[0], anonymous_bytes() - before)

      thread = threading.Thread(target=watch)
      thread.start()
      model = load()
      stop.set()
      thread.join()
      held = sum(s.data.nbytes for x in model.params for s in x.addressable_shards)
      assert held > 250e6, held
      return (peak[0] - held) / max(x.nbytes for x in model.params)

    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("tensor",))
    for device in jax.devices():
      jax.device_put(np.ones(3), device).block_until_ready()
    checkpoint = open_checkpoint(sys.argv[1])
    print(excess(lambda: checkpoint.load(target=mesh)))
    from_tensors = transformer.from_tensors

    def all_at_once(config, tensors, **options):
      held = [(name, np.array(x, np.float32)) for name, x in tensors]
      return from_tensors(config, held, **options)

    transformer.from_tensors = all_at_once
    print(excess(lambda: checkpoint.load(target=mesh)))
  '''
  streamed, all_at_once = map(float, run_program(program, tmp_path / "model").split())
  assert streamed < 2
  assert all_at_once > 2
