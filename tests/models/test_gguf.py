"""GGUF files: what a writer put in comes out under pdjax's names, and damage is named."""

import dataclasses
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from pdjax.core.model_config import RopeScaling
from pdjax.models.checkpoints.checkpoint import open_checkpoint
from pdjax.models.transformer import rope_frequencies

gguf = pytest.importorskip("gguf")

# Rows of K quantisations are multiples of 256.
D, H, K, HEAD_DIM, F, V, L = 256, 4, 2, 64, 512, 40, 2


def load(path, **options):
  """The config, and parameters by name, on the host."""
  checkpoint = open_checkpoint(path, **options)
  model = checkpoint.load()
  return checkpoint.config, dict(zip(model.param_names, model.params))


def llama_tensors(tied):
  """Tensors [out, in] in Hugging Face's order, by GGUF name."""
  rng = np.random.default_rng(0)
  shapes = {"token_embd.weight": (V, D), "output_norm.weight": (D,)}
  if not tied:
    shapes["output.weight"] = (V, D)
  for i in range(L):
    shapes |= {
      f"blk.{i}.attn_norm.weight": (D,),
      f"blk.{i}.attn_q.weight": (H * HEAD_DIM, D),
      f"blk.{i}.attn_k.weight": (K * HEAD_DIM, D),
      f"blk.{i}.attn_v.weight": (K * HEAD_DIM, D),
      f"blk.{i}.attn_output.weight": (D, H * HEAD_DIM),
      f"blk.{i}.ffn_norm.weight": (D,),
      f"blk.{i}.ffn_gate.weight": (F, D),
      f"blk.{i}.ffn_up.weight": (F, D),
      f"blk.{i}.ffn_down.weight": (D, F),
    }
  return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def interleave(weights):
  """Rows of each head from (first half, second half) to (0, h / 2, 1, h / 2 + 1, ...)."""
  half = HEAD_DIM // 2
  order = np.stack([np.arange(half), np.arange(half) + half], 1).ravel()
  heads = weights.reshape(-1, HEAD_DIM, D)
  return heads[:, order].reshape(weights.shape)


def write(path, tensors, *, architecture="llama", blocks=None, fields=None):
  """`blocks`: name -> (type, quantised bytes [rows, n]) to write in place of the tensor."""
  writer = gguf.GGUFWriter(path, architecture)
  writer.add_name("unit")
  writer.add_context_length(128)
  writer.add_embedding_length(D)
  writer.add_block_count(L)
  writer.add_feed_forward_length(F)
  writer.add_head_count(H)
  writer.add_head_count_kv(K)
  writer.add_layer_norm_rms_eps(1e-6)
  writer.add_rope_freq_base(5000.0)
  for key, value in (fields or {}).items():
    add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
    add[type(value)](key, value)
  for name, weights in tensors.items():
    if "attn_q" in name or "attn_k" in name:
      weights = interleave(weights)
    if name in (blocks or {}):
      kind, weights = blocks[name]
      writer.add_tensor(name, weights, raw_dtype=kind)
    else:
      writer.add_tensor(name, weights)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


def random_blocks(kind, shape, seed=0):
  """Valid quantised rows: random bytes, but for the scales, which are float16 of order 1."""
  rng = np.random.default_rng(seed)
  per_block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
  blocks = rng.integers(0, 256, (shape[0], shape[1] // per_block, num_bytes), np.uint8)
  scales = {"Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q4_K": [0, 2], "Q6_K": [208]}[kind.name]
  for place in scales:
    values = rng.uniform(0.1, 1, blocks.shape[:2]).astype(np.float16)
    blocks[:, :, place : place + 2] = values[..., None].view(np.uint8)
  return blocks.reshape(shape[0], -1)


@pytest.mark.parametrize("tied", [False, True])
def test_tensors_come_out_in_half_split_order(tmp_path, tied):
  tensors = llama_tensors(tied)
  config, arrays = load(write(tmp_path / "model.gguf", tensors))
  assert (config.name, config.num_layers) == ("unit", L)
  assert (config.d_model, config.d_ff, config.vocab_size, config.max_len) == (D, F, V, 128)
  assert (config.num_heads, config.num_kv_heads, config.head_dim) == (H, K, HEAD_DIM)
  assert (config.rope_theta, config.rope_scaling, config.tie_embeddings) == (5000.0, None, tied)
  assert config.norm_eps == pytest.approx(1e-6)

  def same(name, want):
    np.testing.assert_array_equal(arrays[name], want)

  same("embedding", tensors["token_embd.weight"])
  same("final_norm.scale", tensors["output_norm.weight"])
  if not tied:
    same("unembedding", tensors["output.weight"].T)
  for i in range(L):
    for name, gguf_name in (("q", "attn_q"), ("k", "attn_k"), ("v", "attn_v")):
      want = tensors[f"blk.{i}.{gguf_name}.weight"].T.reshape(D, -1, HEAD_DIM)
      same(f"blocks.{i}.attention.{name}", want)
    o = tensors[f"blk.{i}.attn_output.weight"].T.reshape(H, HEAD_DIM, D)
    same(f"blocks.{i}.attention.o", o)
    for name in ("gate", "up", "down"):
      same(f"blocks.{i}.mlp.{name}", tensors[f"blk.{i}.ffn_{name}.weight"].T)
    same(f"blocks.{i}.attention_norm.scale", tensors[f"blk.{i}.attn_norm.weight"])
    same(f"blocks.{i}.mlp_norm.scale", tensors[f"blk.{i}.ffn_norm.weight"])


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"])
def test_quantised_tensors_are_dequantised_and_put_in_order(tmp_path, kind, monkeypatch):
  monkeypatch.setattr("pdjax.models.checkpoints.gguf._VALUES_AT_ONCE", 3 * D)  # in several parts
  kind, tensors = gguf.GGMLQuantizationType[kind], llama_tensors(True)
  names = ("token_embd.weight", "blk.0.attn_q.weight", "blk.1.attn_k.weight", "blk.1.ffn_up.weight")
  blocks = {name: (kind, random_blocks(kind, tensors[name].shape)) for name in names}
  _, arrays = load(write(tmp_path / "model.gguf", tensors, blocks=blocks), check_weights=True)
  embedding, q, k, up = (gguf.dequantize(blocks[name][1], kind) for name in names)
  np.testing.assert_array_equal(arrays["embedding"], embedding)
  np.testing.assert_array_equal(arrays["blocks.1.mlp.up"], up.T)
  for name, written in (("blocks.0.attention.q", q), ("blocks.1.attention.k", k)):
    got = arrays[name]
    assert got.dtype == np.float32
    back = interleave(got.transpose(1, 2, 0).reshape(-1, D))
    np.testing.assert_array_equal(back, written)
  assert len(np.unique(embedding)) > 50


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "F16", "BF16"])
def test_what_was_quantised_comes_back_nearly(tmp_path, kind):
  kind, tensors = gguf.GGMLQuantizationType[kind], llama_tensors(True)
  name, steps = "blk.1.ffn_up.weight", {"Q8_0": 127, "Q4_0": 7, "Q4_1": 7}.get(kind.name, 255)
  blocks = {name: (kind, gguf.quantize(tensors[name], kind))}
  if kind.name == "F16":
    tensors[name], blocks = tensors[name].astype(np.float16), None
  _, arrays = load(write(tmp_path / "model.gguf", tensors, blocks=blocks))
  up, want = arrays["blocks.1.mlp.up"], tensors[name].T.astype(np.float32)
  assert up.dtype == np.float32
  assert np.abs(up - want).max() < np.abs(want).max() / steps
  assert (kind.name == "F16") == (np.abs(up - want).max() == 0)


def test_other_quantisations_are_refused_by_name(tmp_path):
  kind, tensors = gguf.GGMLQuantizationType.Q2_K, llama_tensors(True)
  name = "blk.1.ffn_up.weight"
  blocks = {name: (kind, np.zeros((F, 84), np.uint8))}
  path = write(tmp_path / "model.gguf", tensors, blocks=blocks)
  with pytest.raises(ValueError, match=rf"model\.gguf.*tensor {name}.*Q2_K.*Q4_K"):
    open_checkpoint(path)


def rope_factors(config, scaling):
  """By how much a scaling divides each frequency, from the model's own RoPE."""
  scaled = dataclasses.replace(config, rope_scaling=scaling)
  return np.asarray(rope_frequencies(config) / rope_frequencies(scaled))


def test_rope_scaling(tmp_path):
  path, tensors = tmp_path / "model.gguf", llama_tensors(True)
  linear, factor = {"llama.rope.scaling.type": "linear"}, {"llama.rope.scaling.factor": 4.0}
  for fields in (linear | factor, factor, {"llama.rope.scale_linear": 4.0}):
    config, _ = load(write(path, tensors, fields=fields))
    assert config.rope_scaling == RopeScaling(kind="linear", factor=4.0)
  none = factor | {"llama.rope.scaling.type": "none"}
  assert load(write(path, tensors, fields=none))[0].rope_scaling is None
  # Llama 3.1 and 3.2 come with a tensor instead
  plain, _ = load(write(path, tensors))
  for factor in (8.0, 32.0):
    scaling = RopeScaling(kind="llama3", factor=factor)
    factors = rope_factors(plain, scaling)
    assert len(np.unique(factors.round(3))) > 3
    config, arrays = load(write(path, tensors | {"rope_freqs.weight": factors}))
    assert config.rope_scaling == scaling
    assert len(arrays) == len(tensors)
  other = rope_factors(plain, RopeScaling(kind="llama3", factor=8.0, low_freq_factor=2.0))
  with pytest.raises(ValueError, match=r"model\.gguf.*rope_freqs\.weight"):
    open_checkpoint(write(path, tensors | {"rope_freqs.weight": other}))
  with pytest.raises(ValueError, match=r"rope_freqs\.weight"):
    open_checkpoint(write(path, tensors | {"rope_freqs.weight": factors[:-1]}))


def test_the_factors_of_llama_3_1_by_hand(tmp_path):
  """Of 64 frequencies 29 have wavelengths below 8192 / 4 positions, and 29 above 8192."""
  config, _ = load(write(tmp_path / "model.gguf", llama_tensors(True)))
  config = dataclasses.replace(config, head_dim=128, rope_theta=500_000.0)
  factors = rope_factors(config, RopeScaling(kind="llama3", factor=8.0))
  np.testing.assert_allclose(factors[:29], 1)
  np.testing.assert_allclose(factors[35:], 8, rtol=1e-6)
  assert (np.diff(factors[28:36]) > 0).all()


def test_a_truncated_file_is_one_error_with_file_and_tensor(tmp_path):
  path = write(tmp_path / "model.gguf", llama_tensors(True))
  whole = path.read_bytes()
  path.write_bytes(whole[:-2000])
  with pytest.raises(ValueError, match=r"model\.gguf.*tensor blk\.1\.ffn_down\.weight"):
    open_checkpoint(path)
  for size in (0, 3, 20, 100, 300, 1500, len(whole) // 2):
    path.write_bytes(whole[:size])
    with pytest.raises(ValueError, match=r"model\.gguf"):
      open_checkpoint(path)


def test_wrong_tensors_are_listed_in_one_message(tmp_path):
  tensors = llama_tensors(True)
  del tensors["output_norm.weight"], tensors["blk.0.ffn_up.weight"], tensors["blk.1.ffn_up.weight"]
  tensors["blk.0.attn_v.bias"] = np.zeros(K * HEAD_DIM, np.float32)
  tensors["blk.1.ffn_gate.weight"] = np.zeros((F - 1, D), np.float32)
  with pytest.raises(ValueError) as error:
    open_checkpoint(write(tmp_path / "model.gguf", tensors))
  for part in (
    "model.gguf",
    "missing blk.{0,1}.ffn_up.weight, output_norm.weight; unknown blk.0.attn_v.bias; ",
    f"of shape [{F - 1}, {D}] instead of [{F}, {D}] blk.1.ffn_gate.weight",
  ):
    assert part in str(error.value)


def test_other_damage_is_named(tmp_path):
  path = tmp_path / "model.gguf"
  path.write_bytes(b"not a model at all" * 100)
  with pytest.raises(ValueError, match=r"model\.gguf"):
    open_checkpoint(path)
  with pytest.raises(FileNotFoundError, match=r"absent\.gguf"):
    open_checkpoint(tmp_path / "absent.gguf")
  path = write(path, llama_tensors(True))
  name = b"blk.1.ffn_gate.weight"
  path.write_bytes(path.read_bytes().replace(b"blk.0.ffn_gate.weight", name))
  with pytest.raises(ValueError, match=r"model\.gguf.*blk\.1\.ffn_gate\.weight appears twice"):
    open_checkpoint(path)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_weights_are_refused_on_request(tmp_path, value):
  tensors = llama_tensors(True)
  tensors["blk.0.ffn_up.weight"][3, 5] = value
  path = write(tmp_path / "model.gguf", tensors)
  _, arrays = load(path)
  assert not np.isfinite(arrays["blocks.0.mlp.up"]).all()
  with pytest.raises(ValueError, match=r"model\.gguf: tensor blk\.0\.ffn_up\.weight: 1 of "):
    load(path, check_weights=True)


def test_what_pdjax_cannot_run_is_refused_by_name(tmp_path):
  path, tensors = tmp_path / "model.gguf", llama_tensors(True)
  with pytest.raises(ValueError, match="'gemma3' is not supported"):
    open_checkpoint(write(path, tensors, architecture="gemma3"))
  with pytest.raises(ValueError, match="RoPE scaling 'yarn'"):
    open_checkpoint(write(path, tensors, fields={"llama.rope.scaling.type": "yarn"}))
  with pytest.raises(ValueError, match=r"llama\.rope\.dimension_count=32"):
    open_checkpoint(write(path, tensors, fields={"llama.rope.dimension_count": 32}))
  with pytest.raises(ValueError, match=r"field llama\.rope\.scaling\.factor is missing"):
    open_checkpoint(write(path, tensors, fields={"llama.rope.scaling.type": "linear"}))


def test_without_the_package_the_error_names_the_extra(tmp_path):
  program = """
    import sys
    sys.modules["gguf"] = None
    from pdjax.models.checkpoints.checkpoint import open_checkpoint
    try:
      open_checkpoint(sys.argv[1])
    except ImportError as error:
      assert "[hf]" in str(error), error
    else:
      raise AssertionError("loaded without gguf")
  """
  path = write(tmp_path / "model.gguf", llama_tensors(True))
  command = [sys.executable, "-c", textwrap.dedent(program), str(path)]
  done = subprocess.run(
    command, env={"PYTHONPATH": ":".join(sys.path)}, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr
