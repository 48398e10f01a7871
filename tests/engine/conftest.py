"""Engines, compiled once for all tests."""

import numpy as np
import pytest
from engine.pools import CAPACITY, PAGES_PER_ROW, ROWS, build, cpus
from models.model_passes import make_pass, make_tables, prefill_batch

from pdjax.engine.buckets import Buckets
from pdjax.models import kv_cache
from pdjax.models.checksum import checksum_model

# One shape of each step compiles in a third of the time of the engine in slots, which has several.
ONE_OF_EACH = Buckets(prefill=(CAPACITY,), mixed=(24,), rows=(ROWS,), pages=(PAGES_PER_ROW,))
SEVERAL = Buckets(prefill=(16, CAPACITY), mixed=(24,), rows=(2, ROWS), pages=(4, PAGES_PER_ROW))


@pytest.fixture(scope="session")
def checksum_slots():
  return build(checksum_model(), "slots", SEVERAL, cpus(1, 1))


@pytest.fixture(scope="session")
def checksum_paged():
  return build(checksum_model(), "paged", ONE_OF_EACH, cpus(1, 1))


@pytest.fixture(params=["slots", "paged"])
def checksum_engine(request):
  """The checksum model on two devices, in both layouts."""
  return request.getfixturevalue(f"checksum_{request.param}")


@pytest.fixture(scope="session")
def plain_logits(tiny):
  """ids -> the logits [n, V] after each of them, from one pass that knows no engine."""
  layout = tiny.layout(kind="slots", num_rows=1, page_size=CAPACITY, pages_per_row=1, num_pages=1)
  run, tables = make_pass(tiny, layout), make_tables(layout)

  def logits(ids):
    batch, _ = prefill_batch(layout, tables, [(0, 0, ids)], num_tokens=CAPACITY)
    return np.asarray(run(kv_cache.init_cache(layout), batch, None)[0])[: len(ids)]

  return logits


def _tiny_engine(tiny, layout, attention="auto"):
  # Mixed steps of any budget in one shape; both pools on one device, which compiles decodes once.
  buckets = Buckets(prefill=(CAPACITY,), mixed=(CAPACITY,), rows=(ROWS,), pages=(PAGES_PER_ROW,))
  return build(tiny, layout, buckets, cpus(1) * 2, attention=attention)


@pytest.fixture(scope="session")
def tiny_slots(tiny):
  return _tiny_engine(tiny, "slots")


@pytest.fixture(scope="session")
def tiny_paged(tiny):
  return _tiny_engine(tiny, "paged")


@pytest.fixture(scope="session", params=[pytest.param("slots", marks=pytest.mark.slow), "paged"])
def tiny_pallas(tiny, request):
  """Attention and page writes by the Pallas kernels, interpreted."""
  return _tiny_engine(tiny, request.param, "pallas")


@pytest.fixture(params=["slots", "paged"])
def tiny_engine(request):
  """The tiny transformer in both layouts, all pools on one device."""
  return request.getfixturevalue(f"tiny_{request.param}")
