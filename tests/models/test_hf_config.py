"""config.json files of published models become the right `ModelConfig`; others are refused."""

import json

import pytest

from pdjax.core.model_config import ModelConfig, RopeScaling

pytestmark = pytest.mark.quick


def sizes(layers, d_model, heads, d_ff, vocab, kv_heads=None):
  values = {
    "num_hidden_layers": layers,
    "hidden_size": d_model,
    "num_attention_heads": heads,
    "intermediate_size": d_ff,
    "vocab_size": vocab,
  }
  return values if kv_heads is None else values | {"num_key_value_heads": kv_heads}


LLAMA3_ROPE = {
  "factor": 8.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 8192,
  "rope_type": "llama3",
}
# What the config.json files on Hugging Face say (as far as it matters), the parameters in 1e9 that
# the models' papers or cards give, and what tells the family.
PUBLISHED = {
  "meta-llama/Llama-2-70b-hf": (
    sizes(80, 8192, 64, 28672, 32000, 8)
    | {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5, "rope_scaling": None}
    | {"max_position_embeddings": 4096, "pretraining_tp": 1, "tie_word_embeddings": False},
    69.0,
    {"head_dim": 128, "max_len": 4096, "rope_theta": 10_000.0, "rope_scaling": None},
  ),
  "meta-llama/Llama-3.1-8B": (
    sizes(32, 4096, 32, 14336, 128256, 8)
    | {"architectures": ["LlamaForCausalLM"], "rope_theta": 500000.0, "rms_norm_eps": 1e-5}
    | {"max_position_embeddings": 131072, "rope_scaling": LLAMA3_ROPE, "attention_bias": False},
    8.03,
    {"rope_theta": 500_000.0, "rope_scaling": RopeScaling(kind="llama3", factor=8.0)},
  ),
  "01-ai/Yi-34B": (
    sizes(60, 7168, 56, 20480, 64000, 8)
    | {"architectures": ["LlamaForCausalLM"], "rope_theta": 5000000.0, "rms_norm_eps": 1e-5}
    | {"max_position_embeddings": 4096},
    34.4,
    {"rope_theta": 5e6, "num_kv_heads": 8, "qkv_bias": False},
  ),
  "mistralai/Mistral-7B-v0.1": (
    sizes(32, 4096, 32, 14336, 32000, 8)
    | {"architectures": ["MistralForCausalLM"], "sliding_window": 4096, "rms_norm_eps": 1e-5}
    | {"max_position_embeddings": 32768, "rope_theta": 10000.0},
    7.24,
    {"sliding_window": 4096, "first_window_layer": 0},
  ),
  "mistralai/Mistral-7B-v0.3": (
    sizes(32, 4096, 32, 14336, 32768, 8)
    | {"architectures": ["MistralForCausalLM"], "sliding_window": None, "rms_norm_eps": 1e-5}
    | {"max_position_embeddings": 32768, "rope_theta": 1000000.0},
    7.25,
    {"sliding_window": None},
  ),
  "Qwen/Qwen2.5-0.5B": (
    sizes(24, 896, 14, 4864, 151936, 2)
    | {"architectures": ["Qwen2ForCausalLM"], "rms_norm_eps": 1e-6, "rope_theta": 1000000.0}
    | {"max_position_embeddings": 32768, "sliding_window": 32768, "max_window_layers": 24}
    | {"use_sliding_window": False, "tie_word_embeddings": True},
    0.49,
    {"qkv_bias": True, "out_bias": False, "sliding_window": None, "tie_embeddings": True},
  ),
  "Qwen/Qwen3-8B": (
    sizes(36, 4096, 32, 12288, 151936, 8)
    | {"architectures": ["Qwen3ForCausalLM"], "rms_norm_eps": 1e-6, "rope_theta": 1000000}
    | {"head_dim": 128, "attention_bias": False, "sliding_window": None, "rope_scaling": None}
    | {"max_position_embeddings": 40960, "use_sliding_window": False, "max_window_layers": 36},
    8.2,
    {"qk_norm": True, "qkv_bias": False},
  ),
  "facebook/opt-13b": (
    sizes(40, 5120, 40, 1, 50272)
    | {"architectures": ["OPTForCausalLM"], "ffn_dim": 20480, "activation_function": "relu"}
    | {"max_position_embeddings": 2048, "word_embed_proj_dim": 5120}
    | {"do_layer_norm_before": True, "_remove_final_layer_norm": False},
    12.85,
    {
      "norm": "layer",
      "position": "learned",
      "activation": "relu",
      "gated_mlp": False,
      "qkv_bias": True,
      "out_bias": True,
      "mlp_bias": True,
      "tie_embeddings": True,
      "max_len": 2048,
    },
  ),
  "tiiuae/falcon-7b": (
    {k: v for k, v in sizes(32, 4544, 71, 1, 65024).items() if k != "intermediate_size"}
    | {"architectures": ["FalconForCausalLM"], "num_kv_heads": 71, "multi_query": True}
    | {"alibi": False, "bias": False, "new_decoder_architecture": False, "parallel_attn": True},
    6.92,
    {"num_kv_heads": 1, "head_dim": 64, "d_ff": 18176, "parallel_residual": True}
    | {"shared_norm": True, "activation": "gelu", "norm": "layer", "position": "rope"},
  ),
  "tiiuae/falcon-40b": (
    sizes(60, 8192, 128, 1, 65024)
    | {"architectures": ["FalconForCausalLM"], "num_kv_heads": 8, "multi_query": True}
    | {"alibi": False, "bias": False, "new_decoder_architecture": True, "parallel_attn": True},
    41.3,
    {"num_kv_heads": 8, "head_dim": 64, "parallel_residual": True, "shared_norm": False},
  ),
  "tiiuae/falcon-11B": (
    sizes(60, 4096, 32, 1, 65024)
    | {"architectures": ["FalconForCausalLM"], "num_kv_heads": 8, "multi_query": True}
    | {"new_decoder_architecture": True, "parallel_attn": True, "num_ln_in_parallel_attn": 1}
    | {"max_position_embeddings": 8192, "rope_theta": 5000042, "tie_word_embeddings": False},
    11.1,
    {"num_kv_heads": 8, "shared_norm": True, "tie_embeddings": False, "max_len": 8192},
  ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models(name, tmp_path):
  values, billions, facts = PUBLISHED[name]
  folder = tmp_path / name.partition("/")[2]
  folder.mkdir()
  (folder / "config.json").write_text(json.dumps(values))
  config = ModelConfig.from_hf(folder / "config.json")
  assert config.name == folder.name
  assert {field: getattr(config, field) for field in facts} == facts
  assert config.num_params / 1e9 == pytest.approx(billions, rel=0.01)


LLAMA = PUBLISHED["meta-llama/Llama-2-70b-hf"][0]
QWEN2 = PUBLISHED["Qwen/Qwen2.5-0.5B"][0]
OPT = PUBLISHED["facebook/opt-13b"][0]
FALCON = PUBLISHED["tiiuae/falcon-7b"][0]


def test_a_cache_of_huggingface_hub_gives_the_name_of_the_repository(tmp_path):
  folder = tmp_path / "models--meta-llama--Llama-2-70b-hf" / "snapshots" / "8cca527612"
  folder.mkdir(parents=True)
  (folder / "config.json").write_text(json.dumps(LLAMA))
  assert ModelConfig.from_hf(str(folder / "config.json")).name == "Llama-2-70b-hf"


def rope(**values):
  config = ModelConfig.from_hf(LLAMA | values)
  return config.rope_theta, config.rope_scaling


def test_rope_is_read_from_old_and_new_keys():
  linear = RopeScaling(kind="linear", factor=2.0)
  llama3 = RopeScaling(
    kind="llama3", factor=32, low_freq_factor=2, high_freq_factor=5, original_max_len=77
  )
  scaling = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 2, "high_freq_factor": 5}
  scaling["original_max_position_embeddings"] = 77
  assert rope(rope_theta=7.0) == (7.0, None)
  assert rope(rope_scaling={"type": "linear", "factor": 2}) == (10_000.0, linear)
  assert rope(rope_theta=7, rope_scaling=scaling) == (7.0, llama3)
  assert rope(rope_parameters={"rope_type": "default", "rope_theta": 9.0}) == (9.0, None)
  assert rope(rope_parameters=scaling | {"rope_theta": 9.0}) == (9.0, llama3)
  assert rope(rope_theta=8.0, rope_parameters={"rope_type": "linear", "factor": 2.0}) == (
    8.0,
    linear,
  )
  without = {k: v for k, v in scaling.items() if k != "original_max_position_embeddings"}
  assert rope(rope_scaling=without)[1].original_max_len == LLAMA["max_position_embeddings"]


def windows(**values):
  config = ModelConfig.from_hf(QWEN2 | {"num_hidden_layers": 4} | values)
  return [config.window(layer) for layer in range(4)]


def test_sliding_windows_of_qwen():
  full, slides = "full_attention", "sliding_attention"
  assert windows(sliding_window=9) == [None] * 4
  window = {"use_sliding_window": True, "sliding_window": 9}
  assert windows(**window) == [None] * 4  # max_window_layers is 24
  assert windows(**window, max_window_layers=0) == [9] * 4
  assert windows(**window, max_window_layers=3) == [None, None, None, 9]
  assert windows(**window, layer_types=[full, slides, slides, slides]) == [None, 9, 9, 9]
  assert windows(**window, layer_types=[full] * 4) == [None] * 4
  with pytest.raises(ValueError, match="layer_types"):
    windows(**window, layer_types=[slides, full, slides, full])


def test_head_dim_may_be_given():
  assert ModelConfig.from_hf(LLAMA | {"head_dim": 96}).head_dim == 96
  assert ModelConfig.from_hf(LLAMA | {"head_dim": None}).head_dim == 128


@pytest.mark.parametrize(
  ("values", "setting"),
  [
    (FALCON | {"alibi": True}, "alibi=True"),
    (FALCON | {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn=2"),
    (FALCON | {"new_decoder_architecture": True, "parallel_attn": False}, "parallel_attn=False"),
    (OPT | {"do_layer_norm_before": False}, "do_layer_norm_before=False"),
    (OPT | {"word_embed_proj_dim": 512}, "word_embed_proj_dim=512"),
    (OPT | {"_remove_final_layer_norm": True}, "_remove_final_layer_norm=True"),
    (OPT | {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine=False"),
    (OPT | {"activation_function": "gelu_new"}, "activation_function='gelu_new'"),
    (LLAMA | {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act='gelu_pytorch_tanh'"),
    (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    (LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "RoPE scaling 'yarn'"),
    (LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "RoPE scaling 'dynamic'"),
    (LLAMA | {"rope_parameters": {"rope_type": "longrope"}}, "RoPE scaling 'longrope'"),
    (LLAMA | {"rope_parameters": {"full_attention": {}}}, "each type of layer"),
    (LLAMA | {"hidden_size": 8193}, "hidden_size=8193 is no multiple"),
    (LLAMA | {"num_key_value_heads": 7}, "num_kv_heads=7"),
    (LLAMA | {"num_hidden_layers": 0}, "num_layers=0"),
    (LLAMA | {"rope_theta": 0.0}, "rope_theta=0.0"),
    (LLAMA | {"rms_norm_eps": -1e-5}, "norm_eps=-1e-05"),
    (LLAMA | {"vocab_size": "32000"}, "vocab_size='32000'"),
    (LLAMA | {"tie_word_embeddings": 1}, "tie_word_embeddings=1"),
    (LLAMA | {"architectures": "LlamaForCausalLM"}, "architectures='LlamaForCausalLM'"),
  ],
)
def test_what_cannot_run_is_refused_with_file_and_setting(values, setting, tmp_path):
  path = tmp_path / "config.json"
  path.write_text(json.dumps(values))
  with pytest.raises(ValueError) as error:
    ModelConfig.from_hf(path)
  assert setting in str(error.value)
  assert str(path) in str(error.value)


@pytest.mark.parametrize("architectures", [["MixtralForCausalLM"], ["LlamaModel"], [], [7]])
def test_another_architecture_is_refused_with_those_that_are_supported(architectures):
  with pytest.raises(ValueError) as error:
    ModelConfig.from_hf(LLAMA | {"architectures": architectures})
  message = str(error.value)
  assert all(str(name) in message for name in architectures)
  for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "OPT", "Falcon"):
    assert f"{name}ForCausalLM" in message


NEEDED = ("architectures", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")


@pytest.mark.parametrize(
  ("values", "key"),
  [(values, key) for values in (LLAMA, OPT, FALCON) for key in NEEDED]
  + [(LLAMA, "intermediate_size"), (OPT, "ffn_dim")],
)
@pytest.mark.parametrize("is_null", [False, True])
def test_a_needed_key_that_is_missing_is_named_with_the_file(values, key, is_null, tmp_path):
  values = values | {key: None}
  if not is_null:
    del values[key]
  path = tmp_path / "config.json"
  path.write_text(json.dumps(values))
  with pytest.raises(ValueError, match=rf"config\.json: key '{key}' is missing"):
    ModelConfig.from_hf(path)


@pytest.mark.parametrize("key", ["factor", "low_freq_factor", "high_freq_factor"])
def test_a_missing_key_of_the_rope_scaling_is_named(key):
  scaling = {k: v for k, v in LLAMA3_ROPE.items() if k != key}
  with pytest.raises(ValueError, match=f"config.json: rope_scaling: key '{key}' is missing"):
    ModelConfig.from_hf(LLAMA | {"rope_scaling": scaling})


def test_a_file_that_is_no_json_object_is_named(tmp_path):
  path = tmp_path / "config.json"
  for text in ("", '{"architectures": ["Llama', "\x00\x01", "[]", "7"):
    path.write_text(text)
    with pytest.raises(ValueError, match=r"config\.json: not (a )?JSON"):
      ModelConfig.from_hf(path)
  path.write_bytes(b"\xff\xfe{")
  with pytest.raises(ValueError, match=r"config\.json: not JSON"):
    ModelConfig.from_hf(path)
  with pytest.raises(FileNotFoundError, match="absent"):
    ModelConfig.from_hf(tmp_path / "absent" / "config.json")
