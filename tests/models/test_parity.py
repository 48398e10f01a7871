"""Every family gives the logits and the greedy tokens of transformers, from what it saves."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from models.model_passes import decode_batch, make_pass, make_tables, prefill_batch

from pdjax.core.model_config import ModelConfig
from pdjax.models import kv_cache, transformer
from pdjax.models.checkpoints.checkpoint import open_checkpoint

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.slow  # about a minute in all

TOLERANCE = 1e-4  # of float32 logits of order 1 to 10
NUM_PROMPT, NUM_NEW = 40, 32
CHUNKS = (7, 20, 1, 12)
WINDOW = 8
ORIGINAL_MAX_LEN = 16  # of llama3's RoPE scaling: prompts go far beyond it

GATED = {
  "vocab_size": 128,
  "hidden_size": 64,
  "intermediate_size": 96,
  "num_hidden_layers": 3,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "max_position_embeddings": 128,
}
OPT = {
  "vocab_size": 128,
  "hidden_size": 64,
  "ffn_dim": 96,
  "num_hidden_layers": 3,
  "num_attention_heads": 4,
  "max_position_embeddings": 80,
}
FALCON = {
  "vocab_size": 128,
  "hidden_size": 64,
  "num_hidden_layers": 3,
  "num_attention_heads": 4,
  "max_position_embeddings": 128,
}
LLAMA3_ROPE = {
  "rope_type": "llama3",
  "rope_theta": 10_000.0,
  "factor": 8.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": ORIGINAL_MAX_LEN,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
NO_SCALING, NO_WINDOW = {"rope_scaling": None}, {"sliding_window": None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """`without`: changes of the `ModelConfig` that turn off what the case is about."""

  family: str
  config: dict
  without: dict | None = None


CASES = {
  "llama2": Case(family="Llama", config=GATED | {"num_key_value_heads": 4, "rms_norm_eps": 1e-5}),
  "llama3": Case(
    family="Llama",
    config=GATED | {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True},
    without=NO_SCALING,
  ),
  "llama_linear_rope": Case(
    family="Llama", config=GATED | {"rope_parameters": LINEAR_ROPE}, without=NO_SCALING
  ),
  "llama_biases": Case(
    family="Llama",
    config=GATED | {"attention_bias": True, "mlp_bias": True, "head_dim": 24},
  ),
  "yi": Case(
    family="Llama",
    config=GATED | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}},
    without={"rope_theta": 10_000.0},
  ),
  "mistral": Case(family="Mistral", config=GATED | {"sliding_window": WINDOW}, without=NO_WINDOW),
  "qwen2": Case(family="Qwen2", config=GATED),
  "qwen2_window": Case(
    family="Qwen2",
    config=GATED
    | {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    | {"tie_word_embeddings": True},
    without={"first_window_layer": 0},
  ),
  "qwen3": Case(family="Qwen3", config=GATED | {"head_dim": 24}),
  "opt": Case(family="OPT", config=OPT),
  "falcon_7b": Case(family="Falcon", config=FALCON),
  "falcon_40b": Case(
    family="Falcon",
    config=FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2},
  ),
  "falcon_11b": Case(
    family="Falcon",
    config=FALCON
    | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}
    | {"tie_word_embeddings": False, "ffn_hidden_size": 96},
  ),
  "falcon_sequential": Case(
    family="Falcon",
    config=FALCON | {"parallel_attn": False, "multi_query": False, "bias": True},
  ),
}


def randomise(model, seed):
  """Weights for which logits have a standard deviation of about 4 and every part matters."""
  rng = np.random.default_rng(seed)
  for name, parameter in model.named_parameters():
    shape = tuple(parameter.shape)
    if name.endswith("bias"):
      values = 0.5 * rng.standard_normal(shape)
    elif len(shape) == 1:  # a norm's scale
      values = rng.uniform(0.5, 1.5, shape)
    elif "embed_positions" in name:
      values = rng.standard_normal(shape)
    elif "embed" in name or "lm_head" in name:
      values = 4 / np.sqrt(shape[1]) * rng.standard_normal(shape)
    else:
      values = 1.5 / np.sqrt(shape[1]) * rng.standard_normal(shape)
    with torch.no_grad():
      parameter.copy_(torch.tensor(values, dtype=torch.float32))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Truth:
  """What transformers gives: the prompt, then greedy tokens, and the logits of all positions."""

  ids: list[int]
  logits: np.ndarray  # [NUM_PROMPT + NUM_NEW, V]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
  """These models are so small that threads of torch mostly wait for each other."""
  before = torch.get_num_threads()
  torch.set_num_threads(1)
  yield
  torch.set_num_threads(before)


class Runner:
  """One row of a model. A prefill from the start takes a new cache."""

  def __init__(self, model):
    self.layout = model.layout(
      kind="slots", num_rows=2, page_size=8, pages_per_row=10, num_pages=20
    )
    self.model, self.tables = model, make_tables(self.layout)
    self.run = make_pass(model, self.layout)

  def prefill(self, ids, start=0):
    if start == 0:
      self.cache = kv_cache.init_cache(self.layout)
    batch, places = prefill_batch(self.layout, self.tables, [(1, start, ids)], num_tokens=48)
    logits, self.cache = self.run(self.cache, batch, None)
    return np.asarray(logits)[places]

  def decode(self, token, position):
    batch = decode_batch(self.layout, self.tables, [(1, position, token)], num_rows=2)
    logits, self.cache = self.run(self.cache, None, batch)
    return np.asarray(logits)[0]


@pytest.fixture(scope="module", params=CASES)
def made(request, tmp_path_factory):
  """A random model that transformers saved and ran. Every other one is saved in shards."""
  case, index = CASES[request.param], list(CASES).index(request.param)
  config = getattr(transformers, f"{case.family}Config")(**case.config)
  model = getattr(transformers, f"{case.family}ForCausalLM")(config).eval()
  randomise(model, seed=index)
  folder = tmp_path_factory.mktemp(request.param)
  model.save_pretrained(folder, max_shard_size="50KB" if index % 2 else "1GB")
  assert (folder / "model.safetensors.index.json").exists() == bool(index % 2)
  ids = np.random.default_rng(100 + index).integers(0, config.vocab_size, NUM_PROMPT).tolist()
  with torch.no_grad():
    for _ in range(NUM_NEW + 1):
      logits = model(torch.tensor([ids]), use_cache=False).logits[0]
      ids.append(int(logits[-1].argmax()))
  truth = Truth(ids=ids[:-1], logits=logits.numpy())
  top = np.sort(truth.logits[NUM_PROMPT - 1 :], axis=-1)
  assert 1 < truth.logits.std() < 20
  assert (top[:, -1] - top[:, -2]).min() > 10 * TOLERANCE, "near ties: take another seed"
  return case, Runner(open_checkpoint(folder).load(target=jax.devices()[0])), truth


def test_prefill_then_decode_gives_logits_and_greedy_tokens(made):
  _, runner, truth = made
  prompt = truth.ids[:NUM_PROMPT]
  logits = runner.prefill(prompt)
  np.testing.assert_allclose(logits, truth.logits[:NUM_PROMPT], rtol=0, atol=TOLERANCE)
  ids = [*prompt, int(logits[-1].argmax())]
  for position in range(NUM_PROMPT, NUM_PROMPT + NUM_NEW):
    row = runner.decode(ids[-1], position)
    np.testing.assert_allclose(row, truth.logits[position], rtol=0, atol=TOLERANCE)
    ids.append(int(row.argmax()))
  assert ids[:-1] == truth.ids


def test_chunked_prefill_gives_the_logits(made):
  _, runner, truth = made
  start = 0
  for size in CHUNKS:
    logits = runner.prefill(truth.ids[start : start + size], start)
    want = truth.logits[start : start + size]
    np.testing.assert_allclose(logits, want, rtol=0, atol=TOLERANCE)
    start += size
  assert start == NUM_PROMPT


@pytest.mark.parametrize(
  "made", [name for name, case in CASES.items() if case.without], indirect=True
)
def test_without_the_feature_the_logits_are_others(made):
  case, runner, truth = made
  config = dataclasses.replace(runner.model.config, **case.without)
  assert config != runner.model.config
  other = transformer.build(config, runner.model.params, dtype="float32")
  difference = np.abs(Runner(other).prefill(truth.ids[:NUM_PROMPT]) - truth.logits[:NUM_PROMPT])
  assert difference.max(axis=-1)[NUM_PROMPT // 2 :].min() > 1000 * TOLERANCE
  if case.without == NO_WINDOW:  # up to its size a window hides nothing
    assert difference[:WINDOW].max() < TOLERANCE


@pytest.mark.parametrize("theta", [1e4, 5e5, 5000042.0])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_rope_frequencies_are_those_of_transformers_to_the_last_bit(theta, head_dim):
  from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

  values = GATED | {"architectures": ["LlamaForCausalLM"], "head_dim": head_dim}
  values["max_position_embeddings"] = 16384
  for rope in (LINEAR_ROPE, LLAMA3_ROPE, LLAMA3_ROPE | {"original_max_position_embeddings": 8192}):
    rope = rope | {"rope_theta": theta}
    config = transformers.LlamaConfig(**values, rope_parameters=rope)
    want, _ = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, None)
    got = transformer.rope_frequencies(ModelConfig.from_hf(values | {"rope_parameters": rope}))
    assert got.dtype == np.float32
    differ = got != want.numpy()  # powers of another C library may be rounded otherwise
    assert differ.mean() < 0.1 and np.allclose(got, want.numpy(), rtol=2e-7, atol=0)


LONG = GATED | {"num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 2}
LONG |= {"max_position_embeddings": 16384}
LONG_ROPE = {"rope_theta": 5e5, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
  ("family", "extra"),
  [
    ("Llama", {"rope_parameters": LLAMA3_ROPE | LONG_ROPE}),
    ("Mistral", {"sliding_window": 4096}),
  ],
)
def test_logits_of_a_long_prompt(family, extra, tmp_path):
  """Past thresholds of the size that published models have."""
  num_tokens, page_size = 5000, 100
  config = getattr(transformers, f"{family}Config")(**LONG | extra)
  theirs = getattr(transformers, f"{family}ForCausalLM")(config).eval()
  randomise(theirs, seed=0)
  theirs.save_pretrained(tmp_path)
  ids = np.random.default_rng(0).integers(0, config.vocab_size, num_tokens).tolist()
  with torch.no_grad():
    want = theirs(torch.tensor([ids]), use_cache=False).logits[0].numpy()
  model = open_checkpoint(tmp_path).load(target=jax.devices()[0])
  num_pages = num_tokens // page_size
  layout = model.layout(
    kind="slots", num_rows=1, page_size=page_size, pages_per_row=num_pages, num_pages=num_pages
  )
  slices = [(0, 0, ids)]
  batch, places = prefill_batch(layout, make_tables(layout), slices, num_tokens=num_tokens)
  logits, _ = make_pass(model, layout)(kv_cache.init_cache(layout), batch, None)
  np.testing.assert_allclose(np.asarray(logits)[places], want, rtol=0, atol=TOLERANCE)


MINIMAL = {
  "Llama": {"num_attention_heads": 32},
  "Mistral": {"num_attention_heads": 32},
  "Qwen2": {"num_attention_heads": 32},
  "Qwen3": {"num_attention_heads": 32},
  "OPT": {"num_attention_heads": 32, "ffn_dim": 96},
  "Falcon": {"num_attention_heads": 32},
}


@pytest.mark.parametrize(
  "extra",
  [
    {},
    {"use_sliding_window": True, "num_hidden_layers": 30},
    {"new_decoder_architecture": True, "bias": True},
    {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 5000.0},
    {"rope_scaling": {k: v for k, v in LLAMA3_ROPE.items() if k != "rope_theta"}},
  ],
)
@pytest.mark.parametrize("family", MINIMAL)
def test_absent_keys_mean_what_they_mean_in_transformers(family, extra):
  """A file with only the needed keys is the one in which transformers writes out its defaults."""
  values = {"architectures": [f"{family}ForCausalLM"], "vocab_size": 99, "hidden_size": 256}
  values |= {"num_hidden_layers": 3, "intermediate_size": 96} | MINIMAL[family] | extra
  full = getattr(transformers, f"{family}Config").from_dict(dict(values)).to_dict()
  assert full.keys() > values.keys() - extra.keys()
  full = json.loads(json.dumps(full)) | {"model_type": "unnamed"}
  assert ModelConfig.from_hf(full) == ModelConfig.from_hf(values)
