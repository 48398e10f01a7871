"""Fixtures for all tests. Default runs need no network: what is absent skips, and says so."""

import os
import pathlib
import tempfile

import pytest

# Eight devices: pools that hand over, and models split over up to eight. JAX reads it at its first
# use, whichever test comes first.
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
# Also where a GPU is or its compiler is installed: a topology of absent devices can be had only in
# a process that is restricted to the CPU before its first use of JAX.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Compiling takes most of the time of these tests, and several tests, and the programs that they
# start, compile the same. Keys are whole programs: what a test changes is compiled anew. Workers
# have the folder of the process that starts them: it is in their environment.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
  _compiled = tempfile.TemporaryDirectory(prefix="pdjax-tests-")  # gone with this process
  os.environ["JAX_COMPILATION_CACHE_DIR"] = _compiled.name
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
  """`-n auto`: a worker for each core of this process, none beside this process if it has one.

  More than eight would each make what tests have in common, and take some gigabytes of memory.
  """
  cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
  return min(cores, 8) if cores > 1 else 0


def pytest_addoption(parser: pytest.Parser) -> None:
  parser.addoption(
    "--operations",
    type=int,
    default=20_000,
    help="random operations on a served cluster (tests/serving/test_life_cycle.py)",
  )


@pytest.fixture(scope="session")
def smollm2_gguf() -> pathlib.Path:
  """The GGUF file of SmolLM2-135M-Instruct, fetched once into the user's cache."""
  pytest.importorskip("gguf", reason="needs the extra [hf]")
  from pdjax.sources import SourceError, resolve

  try:
    return resolve("smollm2-135m")
  except SourceError as error:
    pytest.skip(f"SmolLM2 cannot be fetched: {error}")


@pytest.fixture(scope="session")
def tiny():
  """The tiny model with its trained weights: no near ties among its greedy tokens."""
  from pdjax.models.checkpoints.checkpoint import open_checkpoint
  from pdjax.sources import resolve

  return open_checkpoint(resolve("tiny")).load()


@pytest.fixture
def plain_sampling(monkeypatch):
  """Greedy tokens alone: all of sampling takes most of the time to compile."""
  import jax.numpy as jnp

  from pdjax.engine import steps
  from pdjax.models.sampling import Sampled

  def sample(logits, sampling, positions, seen, rows):
    ids = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    top = jnp.zeros((*ids.shape, 1), jnp.int32)
    return Sampled(ids, jnp.zeros(ids.shape), top, top.astype(jnp.float32))

  monkeypatch.setattr(steps, "sample", sample)
