"""The collector of cycles rests where it is told to, and is then as it was."""

from __future__ import annotations

import gc

import pytest

from pdjax.core.garbage import no_collection

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def collector():
  yield
  gc.enable()


@pytest.mark.parametrize("switch", [gc.enable, gc.disable])
@pytest.mark.parametrize("fails", [False, True])
def test_it_rests_within_and_is_then_as_it_was(switch, fails):
  switch()
  before = gc.isenabled()
  try:
    with no_collection():
      assert not gc.isenabled()
      with no_collection():
        pass
      assert not gc.isenabled()
      if fails:
        raise KeyError
  except KeyError:
    pass
  assert gc.isenabled() == before
