"""The kernels on a real GPU are the reference: JAX_PLATFORMS=cuda python -m pytest tests/gpu."""

import dataclasses
import functools

import jax
import pytest
from kernels.cases import AttentionCase, check, check_isolation, check_padding, check_write

from pdjax.kernels.backends import backend
from pdjax.kernels.choice import chip_of
from pdjax.kernels.tile_config import Case

MIXED = AttentionCase(
  num_heads=8,
  num_kv_heads=2,
  head_dim=128,
  page_size=16,
  pages_per_row=64,
  num_pages=512,
  num_tokens=500,
  dtype="bfloat16",
  prefill=((300, 77), (0, 0), (1, 640), (129, 0)),
  decode=(1000, 0, 1, 64, 513),
)
CASES = {
  "as most models": MIXED,
  "chunks alone": dataclasses.replace(MIXED, decode=None),
  "decodes alone": dataclasses.replace(MIXED, prefill=None),
  "h 64, window, soft cap": dataclasses.replace(MIXED, head_dim=64, window=100, soft_cap=30.0),
  "h 256, window": dataclasses.replace(MIXED, head_dim=256, window=20, forgets=True),
  "groups of 3, f16": dataclasses.replace(MIXED, num_heads=6, dtype="float16"),
  "groups of 8": dataclasses.replace(MIXED, num_heads=16, page_size=64, pages_per_row=16),
  "one group of 71": dataclasses.replace(MIXED, num_heads=71, num_kv_heads=1, head_dim=64),
  "pages side by side": dataclasses.replace(MIXED, pages_per_outer=64),
}


@pytest.fixture(params=["mosaic", "triton"])
def kernels(request):
  """A backend's functions, on the configs that it takes for a case."""
  try:
    device = jax.devices("gpu")[0]
  except RuntimeError:
    pytest.skip("there is no GPU, or JAX_PLATFORMS leaves it out")
  module, chip = backend(request.param), chip_of(device)

  def bind(name: str, kernel: str, case: AttentionCase):
    asked = Case(
      kernel=kernel,
      num_heads=case.num_heads,
      num_kv_heads=case.num_kv_heads,
      head_dim=case.head_dim,
      page_size=case.page_size,
      dtype=case.dtype,
      cache_dtype=case.dtype,
    )
    reason = module.refuses(asked, chip)
    if reason is not None:
      pytest.skip(f"{request.param}: {reason}")
    return functools.partial(getattr(module, name), config=module.default(asked, chip))

  return bind


def kind(case: AttentionCase) -> str:
  if case.prefill is None:
    return "decode"
  return "prefill" if case.decode is None else "mixed"


@pytest.mark.parametrize("name", CASES)
def test_attention_is_the_reference(kernels, name):
  case = CASES[name]
  attend = kernels("attend", kind(case), case)
  check(attend, case)
  check_padding(attend, case)


def test_what_goes_wrong_in_a_request_stays_there(kernels):
  check_isolation(kernels("attend", "mixed", MIXED), MIXED)


@pytest.mark.parametrize("num_kv_heads", [1, 8])
def test_writes_are_the_reference(kernels, num_kv_heads):
  case = dataclasses.replace(MIXED, num_heads=num_kv_heads, num_kv_heads=num_kv_heads)
  write = kernels("write", "write", case)
  check_write(write, num_kv_heads=num_kv_heads, head_dim=128, inner=64, dtype="bfloat16")
