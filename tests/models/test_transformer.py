"""Any split of a sequence gives the logits of one pass, and those of a plain numpy Llama."""

import dataclasses
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.model_passes import (
  attention,
  decode_batch,
  make_pass,
  make_tables,
  prefill_batch,
  step_batch,
)

from pdjax.core.model_config import TINY, ModelConfig
from pdjax.models import kv_cache
from pdjax.models.transformer import from_arrays, merge, random_arrays

SMALL = ModelConfig(
  name="small",
  num_layers=2,
  d_model=48,
  num_heads=6,
  num_kv_heads=2,
  head_dim=10,
  d_ff=80,
  vocab_size=101,
  max_len=64,
  tie_embeddings=True,
  rope_theta=500.0,
  norm_eps=1e-3,
)
TOLERANCE = 2e-4  # of logits with a standard deviation of 10


def numpy_llama(config, arrays, ids):
  """Logits [n, V] of one sequence in float64, with pairs turned as complex numbers."""
  a = {name: x.astype(np.float64) for name, x in arrays.items()}
  n = len(ids)

  def norm(x, scale):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps) * scale

  def rope(x):  # [n, heads, h]
    half = config.head_dim // 2
    turns = np.arange(n)[:, None] / config.rope_theta ** (np.arange(half) / half)
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * turns)[:, None]
    return np.concatenate([z.real, z.imag], -1)

  def project(x, w):
    return (x @ w.reshape(config.d_model, -1)).reshape(n, -1, config.head_dim)

  x = a["embedding"][ids]
  for layer in range(config.num_layers):
    p = {k.split(".", 2)[2]: v for k, v in a.items() if k.startswith(f"blocks.{layer}.")}
    y = norm(x, p["attention_norm.scale"])
    q, k = rope(project(y, p["attention.q"])), rope(project(y, p["attention.k"]))
    v = project(y, p["attention.v"])
    heads = []
    for head in range(config.num_heads):
      kv_head = head * config.num_kv_heads // config.num_heads
      scores = q[:, head] @ k[:, kv_head].T / np.sqrt(config.head_dim)
      scores[np.triu_indices(n, 1)] = -np.inf
      weights = np.exp(scores - scores.max(-1, keepdims=True))
      heads.append(weights / weights.sum(-1, keepdims=True) @ v[:, kv_head])
    x = x + np.concatenate(heads, -1) @ p["attention.o"].reshape(-1, config.d_model)
    y = norm(x, p["mlp_norm.scale"])
    gate = y @ p["mlp.gate"]
    x = x + (gate / (1 + np.exp(-gate)) * (y @ p["mlp.up"])) @ p["mlp.down"]
  out = a["embedding"].T if config.tie_embeddings else a["unembedding"]
  return norm(x, a["final_norm.scale"]) @ out


def make_layout(model, kind="slots", num_rows=3, pages_per_row=8, page_size=8):
  num_pages = num_rows * pages_per_row + (5 if kind == "paged" else 0)
  return model.layout(
    kind=kind,
    num_rows=num_rows,
    page_size=page_size,
    pages_per_row=pages_per_row,
    num_pages=num_pages,
  )


def one_pass(model, ids, layout=None):
  layout = layout or make_layout(model)
  batch, places = prefill_batch(
    layout, make_tables(layout), [(1, 0, ids)], num_tokens=layout.max_len
  )
  logits, _ = make_pass(model, layout)(kv_cache.init_cache(layout), batch, None)
  return np.asarray(logits)[places]


def random_ids(config, n, seed=0):
  return [int(i) for i in np.random.default_rng(seed).integers(0, config.vocab_size, n)]


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.quick), True])
def test_logits_are_those_of_an_independent_llama(tied):
  config = dataclasses.replace(SMALL, tie_embeddings=tied)
  arrays = random_arrays(config, 1)
  rng = np.random.default_rng(2)
  for name in arrays:  # scales of one would hide a norm that forgets them
    if name.endswith("scale"):
      arrays[name] = rng.uniform(0.5, 2, arrays[name].shape).astype(np.float32)
  ids = random_ids(config, 30)
  want = numpy_llama(config, arrays, ids)
  assert 3 < want.std() < 30
  logits = one_pass(from_arrays(config, arrays), ids)
  assert logits.dtype == np.float32
  np.testing.assert_allclose(logits, want, rtol=0, atol=TOLERANCE)

  # and it sees each part: the same numbers in another place are far away
  for names in (("attention.k", "attention.v"), ("mlp.gate", "mlp.up")):
    first, second = (f"blocks.1.{name}" for name in names)
    swapped = arrays | {first: arrays[second], second: arrays[first]}
    assert np.abs(one_pass(from_arrays(config, swapped), ids) - want).max() > 1000 * TOLERANCE


def in_chunks(model, ids, chunks, layout):
  """Logits of ids computed a chunk of at most 32 tokens a step."""
  tables, run = make_tables(layout), make_pass(model, layout)
  cache, start, got = kv_cache.init_cache(layout), 0, []
  for size in chunks:
    piece = [(1, start, ids[start : start + size])]
    batch, places = prefill_batch(layout, tables, piece, num_tokens=32)
    logits, cache = run(cache, batch, None)
    got.append(np.asarray(logits)[places])
    start += size
  return np.concatenate(got)


@pytest.mark.parametrize(
  ("chunks", "kind"),
  [
    ([1] * 20, "paged"),
    ([7, 13], "slots"),
    ([7, 13], "paged"),
    pytest.param([16, 1, 3], "paged", marks=pytest.mark.slow),
    pytest.param([19, 1], "slots", marks=pytest.mark.slow),
    pytest.param([5, 8, 7], "slots", marks=pytest.mark.slow),
  ],
)
def test_chunks_give_the_logits_of_one_pass(tiny, chunks, kind):
  ids = random_ids(TINY, sum(chunks), seed=len(chunks))
  got = in_chunks(tiny, ids, chunks, make_layout(tiny, kind))
  np.testing.assert_allclose(got, one_pass(tiny, ids), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("kind", ["slots", pytest.param("paged", marks=pytest.mark.slow)])
def test_decode_after_prefill_and_mixed_steps_give_the_logits_of_one_pass(tiny, kind):
  layout = make_layout(tiny, kind)
  tables, run = make_tables(layout), make_pass(tiny, layout)
  ids, other = random_ids(TINY, 24), random_ids(TINY, 30, seed=1)
  prefill, places = prefill_batch(layout, tables, [(2, 0, ids[:11])], num_tokens=32)
  logits, cache = run(kv_cache.init_cache(layout), prefill, None)
  got, others = [np.asarray(logits)[places]], []
  for step in range(3):  # chunks of another row share these steps
    decode = decode_batch(layout, tables, [(2, 11 + step, ids[11 + step])], num_rows=2)
    piece = [(0, 10 * step, other[10 * step : 10 * step + 10])]
    prefill, places = prefill_batch(layout, tables, piece, num_tokens=32)
    logits, cache = run(cache, prefill, decode)
    others.append(np.asarray(logits)[places])
    got.append(np.asarray(logits)[len(prefill.tokens) :][:1])
  for position in range(14, 24):
    decode = decode_batch(layout, tables, [(2, position, ids[position])], num_rows=2)
    logits, cache = run(cache, None, decode)
    got.append(np.asarray(logits)[:1])
  np.testing.assert_allclose(np.concatenate(got), one_pass(tiny, ids), rtol=0, atol=TOLERANCE)
  np.testing.assert_allclose(np.concatenate(others), one_pass(tiny, other), rtol=0, atol=TOLERANCE)


def test_an_early_token_still_changes_late_logits(tiny):
  ids = random_ids(TINY, 400, seed=3)
  layout = make_layout(tiny, num_rows=2, pages_per_row=50)
  changed = [(ids[0] + 1) % TINY.vocab_size, *ids[1:]]
  late, other = one_pass(tiny, ids, layout)[-1], one_pass(tiny, changed, layout)[-1]
  assert np.abs(late - other).max() > 50 * TOLERANCE


def test_random_logits_have_a_standard_deviation_of_10():
  for tied in (True, False):
    config = dataclasses.replace(SMALL, tie_embeddings=tied)
    logits = one_pass(from_arrays(config, random_arrays(config, 0)), random_ids(config, 30))
    assert 7 < logits.std() < 13


def test_layer_groups_compose(tiny):
  """embed, layers(0, 1), layers(1, L), unembed is one forward."""
  layout = make_layout(tiny)
  batch, _ = prefill_batch(
    layout, make_tables(layout), [(0, 0, random_ids(TINY, 9))], num_tokens=16
  )
  batch = jax.tree.map(jnp.asarray, batch)
  llama = merge(TINY, tiny.params)
  attend = attention(layout)(batch)
  cache = kv_cache.init_cache(layout)
  whole, whole_cache = tiny.forward(tiny.params, batch.tokens, batch.positions, cache, attend)
  x = llama.embed(batch.tokens, batch.positions)
  x, first = llama.layers(x, batch.positions, cache[:1], attend, 0, 1)
  x, rest = llama.layers(x, batch.positions, cache[1:], attend, 1, TINY.num_layers)
  np.testing.assert_array_equal(x, whole)
  jax.tree.map(np.testing.assert_array_equal, first + rest, whole_cache)


def test_a_step_updates_the_donated_cache_in_place(tiny):
  layout = make_layout(tiny, num_rows=8, pages_per_row=256, page_size=16)
  tables, step = make_tables(layout), make_pass(tiny, layout).step
  prefill, _ = prefill_batch(layout, tables, [(0, 0, [1] * 9)], num_tokens=16)
  decode = decode_batch(layout, tables, [(1, 0, 1)], num_rows=8)
  cache = jax.eval_shape(lambda: kv_cache.init_cache(layout))
  for batches in ((prefill, None), (None, decode), (prefill, decode)):
    batch = step_batch(*batches)
    stats = step.lower(tiny.params, cache, batch).compile().memory_analysis()
    assert stats.alias_size_in_bytes == layout.num_bytes
    assert stats.temp_size_in_bytes < layout.num_bytes / layout.num_layers / 2 / 2


@pytest.mark.quick
def test_wrong_tensors_are_named_in_one_error():
  arrays = random_arrays(SMALL, 0)
  del arrays["blocks.1.mlp.up"], arrays["final_norm.scale"]
  arrays["blocks.0.attention.bias"] = arrays["blocks.0.attention.q"]
  arrays["embedding"] = arrays["embedding"][1:]
  with pytest.raises(ValueError) as error:
    from_arrays(SMALL, arrays)
  for part in (
    "model small",
    "missing blocks.1.mlp.up",
    "missing final_norm.scale",
    "unknown blocks.0.attention.bias",
    "embedding has shape (100, 48), not (101, 48)",
  ):
    assert part in str(error.value)


@pytest.mark.quick
def test_random_arrays_depend_on_the_seed_alone():
  first, same, other = (random_arrays(SMALL, seed) for seed in (0, 0, 1))
  jax.tree.map(np.testing.assert_array_equal, first, same)
  assert (first["embedding"] != other["embedding"]).all()


@pytest.mark.quick
def test_tiny_has_about_a_million_parameters():
  num_params = sum(x.size for x in random_arrays(TINY, 0).values())
  assert 0.5e6 < num_params < 2e6
  norms = (2 * TINY.num_layers + 1) * TINY.d_model
  assert num_params == TINY.num_params + norms


def test_bfloat16_is_close():
  model = from_arrays(SMALL, random_arrays(SMALL, 1), dtype="bfloat16")
  assert make_layout(model).dtype == "bfloat16"
  ids = random_ids(SMALL, 30)
  want = numpy_llama(SMALL, random_arrays(SMALL, 1), ids)
  assert np.abs(one_pass(model, ids) - want).mean() < 0.03 * want.std()


def test_a_mesh_splits_heads_and_mlp_and_changes_no_logit():
  program = """
    import dataclasses
    import jax
    jax.config.update("jax_num_cpu_devices", 2)
    import numpy as np
    from models.test_transformer import SMALL, TOLERANCE, one_pass, random_ids
    from pdjax.models.transformer import from_arrays, random_arrays
    model = from_arrays(SMALL, random_arrays(SMALL, 0))
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("tensor",))
    split = model.to(mesh)
    for name, param in zip(split.param_names, split.params):
      halves = any(kind in name for kind in ("attention.", "mlp."))
      shard = param.addressable_shards[0].data
      assert shard.size * (2 if halves else 1) == param.size, name
    ids = random_ids(SMALL, 20)
    np.testing.assert_allclose(one_pass(split, ids), one_pass(model, ids), atol=TOLERANCE)
    second = jax.devices()[1]
    assert all(param.devices() == {second} for param in model.to(second).params)
    try:
      three = dataclasses.replace(SMALL, d_ff=81)
      from_arrays(three, random_arrays(three, 0)).to(mesh)
    except ValueError as error:
      assert "d_ff=81" in str(error)
    else:
      raise AssertionError("81 divided by 2")
  """
  environment = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": ":".join(sys.path)}
  done = subprocess.run(
    [sys.executable, "-c", textwrap.dedent(program)],
    env=environment,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
