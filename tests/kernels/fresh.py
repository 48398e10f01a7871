"""Cases of prompts that begin in their step, as `attend_fresh` of splash and tokamax takes them."""

from __future__ import annotations

import jax.numpy as jnp
from kernels.cases import MUTATIONS, Attend, AttentionCase


def contiguous(pages, slices, num_tokens):
  """K and V [T, K, h] of chunks with offset 0, out of pages of one token; large in between."""
  index = jnp.arange(num_tokens)[:, None] - slices.starts
  own = (index >= 0) & (index < slices.lengths)  # [T, B]
  owner = own.argmax(1)
  found = slices.tables[owner, jnp.take_along_axis(index, owner[:, None], 1)[:, 0]]
  return tuple(jnp.where(own.any(1)[:, None, None], x[found, :, 0], 1e3) for x in pages)


def fresh(run) -> Attend:
  """`attend_fresh` with its config bound, as an `attend`."""

  def attend(q, pages, prefill, decode, *, page_size, **options):
    assert decode is None and page_size == 1
    return run(q, *contiguous(pages, prefill, len(q)), prefill, **options)

  return attend


FRESH = AttentionCase(
  page_size=1,
  pages_per_row=256,
  num_pages=300,
  num_tokens=300,
  prefill=((130, 0), (0, 0), (1, 0), (97, 0), (40, 0)),
)
FRESH_CASES = {
  "plain": {},
  "one head of 64": dict(num_heads=3, num_kv_heads=1, head_dim=64),
  "window, cap": dict(window=33, soft_cap=2.0, scale=0.3),
  "bfloat16, 128": dict(dtype="bfloat16", head_dim=128, num_heads=4),
  "few tokens": dict(num_tokens=20, prefill=((7, 0), (0, 0), (9, 0))),
}

FRESH_MUTATIONS = {name: run for name, run in MUTATIONS.items() if "page" not in name}
