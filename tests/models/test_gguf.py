"""GGUF files: what a writer put in comes out under pdjax's names, and damage is named."""

import subprocess
import sys
import textwrap

import numpy as np
import pytest

from pdjax.models.checkpoints.gguf import load_gguf
from pdjax.models.transformer import from_arrays

gguf = pytest.importorskip("gguf")

D, H, K, HEAD_DIM, F, V, L = 64, 4, 2, 16, 96, 40, 2


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


def write(path, tensors, *, architecture="llama", quantise=(), fields=None):
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
    writer.add_string(key, value)
  for name, weights in tensors.items():
    if "attn_q" in name or "attn_k" in name:
      weights = interleave(weights)
    if name in quantise:
      kind = gguf.GGMLQuantizationType.Q8_0
      writer.add_tensor(name, gguf.quantize(weights, kind), raw_dtype=kind)
    else:
      writer.add_tensor(name, weights)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


@pytest.mark.parametrize("tied", [False, True])
def test_tensors_come_out_in_half_split_order_and_run(tmp_path, tied):
  tensors = llama_tensors(tied)
  config, arrays = load_gguf(write(tmp_path / "model.gguf", tensors))
  assert (config.name, config.family, config.num_layers) == ("unit", "llama", L)
  assert (config.d_model, config.d_ff, config.vocab_size, config.max_len) == (D, F, V, 128)
  assert (config.num_heads, config.num_kv_heads, config.head_dim) == (H, K, HEAD_DIM)
  assert (config.rope_theta, config.tie_embeddings) == (5000.0, tied)
  assert config.norm_eps == pytest.approx(1e-6)
  from_arrays(config, arrays)  # refuses any tensor missing, unknown or of another shape

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


def test_quantised_tensors_are_dequantised(tmp_path):
  tensors = llama_tensors(True)
  path = write(tmp_path / "model.gguf", tensors, quantise={"blk.1.ffn_up.weight"})
  _, arrays = load_gguf(path)
  up, want = arrays["blocks.1.mlp.up"], tensors["blk.1.ffn_up.weight"].T
  assert up.dtype == np.float32
  assert 0 < np.abs(up - want).max() < np.abs(want).max() / 127


def test_a_truncated_file_is_one_error_with_file_and_tensor(tmp_path):
  path = write(tmp_path / "model.gguf", llama_tensors(True))
  whole = path.read_bytes()
  path.write_bytes(whole[:-2000])
  with pytest.raises(ValueError, match=r"model\.gguf.*tensor blk\.1\.ffn_down\.weight"):
    load_gguf(path)
  for size in (0, 3, 20, 100, 300, 1500, len(whole) // 2):
    path.write_bytes(whole[:size])
    with pytest.raises(ValueError, match=r"model\.gguf"):
      load_gguf(path)


def test_other_damage_is_named(tmp_path):
  path = tmp_path / "model.gguf"
  path.write_bytes(b"not a model at all" * 100)
  with pytest.raises(ValueError, match=r"model\.gguf"):
    load_gguf(path)
  tensors = llama_tensors(True)
  tensors["blk.0.ffn_up.weight"][3, 5] = np.nan
  with pytest.raises(ValueError, match=r"model\.gguf.*blk\.0\.ffn_up\.weight.*not finite"):
    load_gguf(write(path, tensors))
  with pytest.raises(FileNotFoundError, match=r"absent\.gguf"):
    load_gguf(tmp_path / "absent.gguf")


def test_what_pdjax_cannot_run_is_refused_by_name(tmp_path):
  path, tensors = tmp_path / "model.gguf", llama_tensors(True)
  with pytest.raises(ValueError, match="'gemma3' is not supported"):
    load_gguf(write(path, tensors, architecture="gemma3"))
  with pytest.raises(ValueError, match="RoPE scaling 'yarn'"):
    load_gguf(write(path, tensors, fields={"llama.rope.scaling.type": "yarn"}))
  bias = {"blk.0.attn_v.bias": np.zeros(D, np.float32)}
  with pytest.raises(ValueError, match=r"tensor blk\.0\.attn_v\.bias"):
    load_gguf(write(path, tensors | bias))


def test_without_the_package_the_error_names_the_extra(tmp_path):
  program = """
    import sys
    sys.modules["gguf"] = None
    from pdjax.models.checkpoints.gguf import load_gguf
    try:
      load_gguf(sys.argv[1])
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
