"""The oracles are attention over each token's own keys, in float64, and writes slot by slot."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from kernels.cases import AttentionCase

from pdjax.kernels.reference import attention_reference, write_pages_reference

CASE = AttentionCase(
  num_heads=6,
  prefill=((9, 0), (0, 0), (7, 5), (1, 13)),
  decode=(29, 0, 1, 16),
)
CASES = {
  "plain": CASE,
  "pages side by side": dataclasses.replace(CASE, pages_per_outer=8),
  "one kv head": dataclasses.replace(CASE, num_kv_heads=1),
  "window": dataclasses.replace(CASE, window=6, forgets=True),
  "soft cap and scale": dataclasses.replace(CASE, soft_cap=1.5, scale=0.7),
  "int8": dataclasses.replace(CASE, cache_dtype="int8"),
  "only decodes": dataclasses.replace(CASE, prefill=None),
}


def dense(case: AttentionCase) -> np.ndarray:
  """In float64, a token and a head at a time, each key looked up by its page."""
  batch = case.build()
  k, v, *scales = (np.asarray(x, np.float64) for x in batch.pages)
  if scales:
    k, v = (x * scale[..., None] for x, scale in zip((k, v), scales, strict=True))
  q, out = np.asarray(batch.q, np.float64), np.zeros(batch.q.shape)
  group = case.num_heads // case.num_kv_heads
  for start, length, offset, table in zip(*map(np.asarray, batch.slices), strict=True):
    for i in range(length):
      first = 0 if case.window is None else max(0, offset + i + 1 - case.window)
      places = []
      for key in range(first, offset + i + 1):
        page = table[key // case.page_size]
        outer, index = divmod(page, case.pages_per_outer)
        places.append((outer, index * case.page_size + key % case.page_size))
      for head in range(case.num_heads):
        keys, values = (np.stack([x[o, head // group, p] for o, p in places]) for x in (k, v))
        scores = keys @ q[start + i, head] * case.options["scale"]
        if case.soft_cap is not None:
          scores = case.soft_cap * np.tanh(scores / case.soft_cap)
        weights = np.exp(scores - scores.max())
        out[start + i, head] = weights @ values / weights.sum()
  return out


@pytest.mark.parametrize("name", [pytest.param("plain", marks=pytest.mark.quick), *[*CASES][1:]])
def test_attention_is_softmax_over_the_keys_of_each_token(name):
  case = CASES[name]
  batch = case.build()
  out = attention_reference(batch.q, batch.pages, batch.slices, **case.options)
  assert out.dtype == np.float32
  np.testing.assert_allclose(out, dense(case), rtol=0, atol=2e-6)  # values of order 1


@pytest.mark.quick
@pytest.mark.parametrize("inner", [4, 12])
def test_writes_go_to_their_slots_and_others_are_dropped(inner):
  rng = np.random.default_rng(0)
  num_outer, num_heads, head_dim = 24 // inner, 2, 3
  pages = tuple(
    rng.standard_normal((num_outer, num_heads, inner, head_dim)).astype(np.float32)
    for _ in range(2)
  )
  k, v = (rng.standard_normal((7, num_heads, head_dim)).astype(np.float32) for _ in range(2))
  slots = np.array([5, 23, -1, 24, 0, 2**30, 11], np.int32)
  out = write_pages_reference(tuple(map(jnp.asarray, pages)), k, v, jnp.asarray(slots))
  for old, new, values in zip(pages, out, (k, v), strict=True):
    expected = old.copy()
    for token, slot in enumerate(slots):
      if 0 <= slot < 24:
        expected[slot // inner, :, slot % inner] = values[token]
    np.testing.assert_array_equal(new, expected)
