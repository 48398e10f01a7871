"""Training sees the model that serving runs; its optimizer decays and clips what it should."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from models.model_passes import make_pass, make_tables, prefill_batch

from pdjax.core.model_config import ModelConfig
from pdjax.models import kv_cache
from pdjax.models.training import Schedule, make_optimizer, token_losses, train_step
from pdjax.models.transformer import from_arrays, random_arrays

pytestmark = pytest.mark.quick

SMALL = ModelConfig(
  name="small",
  num_layers=2,
  d_model=32,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  d_ff=48,
  vocab_size=101,
  max_len=256,
)
SCHEDULE = Schedule(
  num_steps=100, num_warmup_steps=10, peak_rate=1e-2, weight_decay=0.5, max_grad_norm=1.0
)


def random_rows(num_rows, num_tokens, seed=0):
  shape = (num_rows, num_tokens + 1)
  return np.random.default_rng(seed).integers(0, SMALL.vocab_size, shape).astype(np.int32)


def served_losses(model, rows):
  """From the attention with a cache that the engine runs, a row at a time."""
  layout = model.layout(kind="slots", num_rows=1, page_size=256, pages_per_row=1, num_pages=1)
  tables, run, losses = make_tables(layout), make_pass(model, layout), []
  for ids in rows:
    batch, places = prefill_batch(layout, tables, [(0, 0, ids[:-1])], num_tokens=256)
    logits, _ = run(kv_cache.init_cache(layout), batch, None)
    logits = np.asarray(logits, np.float64)[places]
    losses.append(np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(places)), ids[1:]])
  return np.array(losses)


@pytest.mark.parametrize(
  "num_tokens, changes",
  [
    pytest.param(1, {}, marks=pytest.mark.once),
    pytest.param(200, {}, marks=pytest.mark.slow),
    (200, {"sliding_window": 20, "first_window_layer": 1}),
  ],
  ids=["short", "two_blocks", "window"],
)
def test_losses_are_those_of_the_served_model(num_tokens, changes):
  config = dataclasses.replace(SMALL, **changes)
  model = from_arrays(config, random_arrays(config, 0))
  rows = random_rows(3, num_tokens)
  got = np.asarray(jax.jit(functools.partial(token_losses, model))(model.params, rows))
  want = served_losses(model, rows)
  assert want.std() > 1
  np.testing.assert_allclose(got, want, rtol=0, atol=2e-4)  # of logits with deviation 10


def test_a_step_learns_what_it_is_shown():
  model = from_arrays(SMALL, {k: v * 0.3 for k, v in random_arrays(SMALL, 0).items()})
  optimizer, rows = make_optimizer(model, SCHEDULE), random_rows(4, 20)
  step = jax.jit(lambda params, state: train_step(model, optimizer, params, state, rows))
  params, state, losses = model.params, optimizer.init(model.params), []
  for _ in range(60):
    params, state, loss = step(params, state)
    losses.append(float(loss))
  assert losses[0] > 4 and losses[-1] < 0.5 * losses[0]


@pytest.mark.once
def test_only_matrices_decay():
  model = from_arrays(SMALL, random_arrays(SMALL, 0))
  optimizer = make_optimizer(model, SCHEDULE)
  zeros, state = jax.tree.map(np.zeros_like, model.params), optimizer.init(model.params)
  update = jax.jit(optimizer.update)
  for _ in range(2):  # the rate of the first step is 0
    updates, state = update(zeros, state, model.params)
  decayed = {name for name, update in zip(model.param_names, updates) if np.any(update)}
  kept = set(model.param_names) - decayed
  assert kept == {name for name in model.param_names if name.endswith("scale")} | {"embedding"}
  for param, update in zip(model.params, updates):
    if np.any(update):
      rate = SCHEDULE.rate(1) * SCHEDULE.weight_decay
      np.testing.assert_allclose(update, -rate * param, rtol=1e-5)


@pytest.mark.once
def test_gradients_are_clipped_by_their_global_norm():
  """Adam forgets the scale of all gradients alike, not that of one step among others."""
  model = from_arrays(SMALL, random_arrays(SMALL, 0))
  optimizer = make_optimizer(model, SCHEDULE)
  start, update = optimizer.init(model.params), jax.jit(optimizer.update)

  def moments(scale):
    grads = jax.tree.map(lambda p: np.full_like(p, scale), model.params)
    _, state = update(grads, start, model.params)
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(state) if np.ndim(x)])

  np.testing.assert_allclose(moments(10.0), moments(1.0), rtol=1e-5)  # both far above the norm
  assert np.abs(moments(1e-6)).max() < 0.1 * np.abs(moments(1.0)).max()


def test_the_rate_warms_up_and_falls_to_zero():
  rates = np.array([SCHEDULE.rate(step) for step in range(SCHEDULE.num_steps + 1)])
  assert rates[0] == 0 and rates.argmax() == SCHEDULE.num_warmup_steps
  assert rates.max() == pytest.approx(SCHEDULE.peak_rate) and rates[-1] == pytest.approx(0)
  assert np.all(np.diff(rates[: SCHEDULE.num_warmup_steps + 1]) > 0)
  assert np.all(np.diff(rates[SCHEDULE.num_warmup_steps :]) < 0)


@pytest.mark.parametrize(
  "field, value",
  [("num_warmup_steps", 100), ("peak_rate", 0.0), ("weight_decay", -1.0), ("max_grad_norm", 0.0)],
)
def test_wrong_values_are_named(field, value):
  with pytest.raises(ValueError, match=f"{field}={value}"):
    dataclasses.replace(SCHEDULE, **{field: value})
