"""Fixtures for all tests. Default runs need no network: what is absent skips, and says so."""

import os
import pathlib

import pytest

# Two devices for pools that hand over. JAX reads it at its first use, whichever test comes first.
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")


@pytest.fixture(scope="session")
def smollm2_gguf() -> pathlib.Path:
  """The GGUF file of SmolLM2-135M-Instruct, fetched once into the user's cache."""
  pytest.importorskip("gguf", reason="needs the extra [hf]")
  from experiments.fetch_model import FetchError, fetch

  try:
    return fetch("smollm2-135m")
  except FetchError as error:
    pytest.skip(f"SmolLM2 cannot be fetched: {error}")
