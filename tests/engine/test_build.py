"""The default shapes hold every step that a scheduler can plan, and warm-up compiles them all."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from engine.pools import cpus
from hypothesis import given, settings
from hypothesis import strategies as st

from pdjax.core.model_config import TINY
from pdjax.core.plan import DecodeSlices, Slice, StepPlan
from pdjax.core.request import SamplingParams
from pdjax.engine import build
from pdjax.engine.aot import abstract_model
from pdjax.engine.batch import RowState, step_inputs
from pdjax.engine.build import default_buckets, make_attention, warm_up
from pdjax.engine.jax_executor import JaxExecutor
from pdjax.engine.mesh import make_mesh
from pdjax.kernels.choice import choose
from pdjax.kernels.tile_config import TileConfig
from pdjax.models.checksum import checksum_model
from pdjax.models.sampling import Sampled
from pdjax.scheduling.pages import PageConfig
from pdjax.scheduling.probe import probe_plan

pytestmark = pytest.mark.quick


@st.composite
def pools(draw):
  """Pages, a whole-prompt budget and a chunk budget that a scheduler accepts."""
  num_rows = draw(st.integers(1, 20))
  page_size = draw(st.sampled_from([1, 4, 16]))
  pages_per_row = draw(st.integers(-(-16 // page_size), 20))
  num_pages = draw(st.integers(max(1, 16 // page_size), 2 * num_rows * pages_per_row))
  pages = PageConfig(
    num_rows=num_rows, page_size=page_size, pages_per_row=pages_per_row, num_pages=num_pages
  )
  whole = max(pages.capacity_tokens, num_rows) + draw(st.integers(0, 100))
  return pages, whole, draw(st.integers(num_rows, 300))


@st.composite
def plans(draw, pages, whole_budget, chunk_budget):
  """Slices of distinct rows within a budget, as all of its steps: whole prompts have no decodes."""
  is_whole = draw(st.booleans())
  num_decodes = 0 if is_whole else draw(st.integers(0, pages.num_rows))
  left = whole_budget if is_whole else chunk_budget - num_decodes
  slices = []
  for row in range(draw(st.integers(0 if num_decodes else 1, pages.num_rows - num_decodes))):
    if left < 1:
      break
    most = min(left, pages.capacity_tokens)
    num_tokens = draw(st.sampled_from([1, most]) | st.integers(1, most))
    left -= num_tokens
    start = draw(st.sampled_from([0, pages.capacity_tokens - num_tokens]))
    slices.append(
      Slice(
        request_id=row,
        generation=0,
        row=row,
        num_prompt_tokens=start + num_tokens,
        start=start,
        num_tokens=num_tokens,
        token_ids=(0,) * num_tokens,
        emits_token=is_whole or draw(st.booleans()),
        sampling=SamplingParams(max_tokens=1),
      )
    )
  rows = tuple(range(pages.num_rows - num_decodes, pages.num_rows))
  columns = dict(request_ids=rows, generations=rows, rows=rows, positions=(0,) * num_decodes)
  return StepPlan(step_id=0, prefills=tuple(slices), decodes=DecodeSlices(**columns))


def shape_of(inputs):
  """All that a compiled step depends on: which arrays there are, and their shapes."""
  leaves, structure = jax.tree.flatten(inputs)
  return structure, tuple(leaf.shape for leaf in leaves)


class Recorder:
  """`Steps` that compute nothing and remember which shapes they were called with."""

  def __init__(self, model, pages, *, serves_fresh=False):
    self.shapes, self.num_copied_pages = set(), {"gather": set(), "scatter": set()}
    attention = make_attention(model, pages, make_mesh(cpus(1)[0]), "paged", "xla")
    fresh = TileConfig(backend="splash") if serves_fresh else None
    tuning = dataclasses.replace(attention.tuning, fresh=fresh)
    self.attention = dataclasses.replace(attention, tuning=tuning)

  def prefill_step(self, params, cache, last_token, seen, inputs, hidden, layers):
    self.shapes.add(shape_of(inputs))
    ids = np.zeros(inputs.sample_rows.shape, np.int32)
    return cache, last_token, seen, Sampled(ids, None, None, None)

  decode_step = mixed_step = prefill_step

  def add_seen(self, seen, row, ids, anew):
    return seen

  def gather_pages(self, cache, page_ids, into, num_cuts):
    self.num_copied_pages["gather"].add(len(page_ids))
    return (np.zeros((1, 1, 1, 1, 1)),) * num_cuts

  def scatter_pages(self, cache, page_ids, cuts):
    self.num_copied_pages["scatter"].add(len(page_ids))
    return cache

  def set_last_token(self, last_token, row, token_id):
    return last_token


USES = {"prefill", "decode", "mixed", "gather", "scatter"}


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_every_plan_within_the_budgets_finds_a_shape_that_warm_up_compiled(data):
  pages, whole_budget, chunk_budget = data.draw(pools())
  buckets = default_buckets(pages, whole_budget=whole_budget, chunk_budget=chunk_budget)
  assert len(buckets.prefill) + len(buckets.mixed) + len(buckets.rows) <= 12
  # A cache of one page: the recorder never looks into it.
  one = PageConfig(num_rows=1, page_size=1, pages_per_row=pages.pages_per_row, num_pages=1)
  model, serves_fresh = checksum_model(), data.draw(st.booleans())
  steps = Recorder(model, one, serves_fresh=serves_fresh)
  executor = JaxExecutor(model, steps, pages, buckets, [make_mesh(cpus(1)[0])])
  lines = list(warm_up([executor], [USES]))
  assert len(lines) == len(set(lines)) >= len(steps.shapes)
  for copied in steps.num_copied_pages.values():
    assert copied == set(buckets.pages) and max(copied) == pages.pages_per_row
  for _ in range(8):
    plan = data.draw(plans(pages, whole_budget, chunk_budget))
    inputs = step_inputs(plan, buckets, RowState(pages, 997), serves_fresh=serves_fresh)
    assert shape_of(inputs) in steps.shapes


@pytest.mark.parametrize(
  ("num_rows", "capacity", "budget"),
  [(4, 17, 17), (4, 17, 67), (2, 16, 33), (1, 20, 20), (3, 1, 3)],
)
def test_prompts_begun_before_find_their_shape_among_buckets_that_are_close(
  num_rows, capacity, budget
):
  pages = PageConfig(
    num_rows=num_rows, page_size=1, pages_per_row=capacity, num_pages=num_rows * capacity
  )
  buckets = default_buckets(pages, whole_budget=budget, chunk_budget=budget)
  steps = Recorder(checksum_model(), pages, serves_fresh=True)
  executor = JaxExecutor(checksum_model(), steps, pages, buckets, [make_mesh(cpus(1)[0])])
  list(warm_up([executor], [{"prefill"}]))
  for num_tokens in range(1, min(budget, num_rows * capacity - 1) + 1 if capacity > 1 else 1):
    lengths, left = [], num_tokens
    for row in range(num_rows):
      lengths.append(min(left, capacity - (row == 0)))
      left -= lengths[-1]
    plan = probe_plan(pages, prefills=[n for n in lengths if n])
    first, *rest = plan.prefills
    plan = dataclasses.replace(plan, prefills=(dataclasses.replace(first, start=1), *rest))
    inputs = step_inputs(plan, buckets, RowState(pages, 997), serves_fresh=True)
    assert inputs.batch.fresh is None and left == 0
    assert shape_of(inputs) in steps.shapes


@pytest.mark.parametrize(("tp", "heads"), [(1, (8, 2)), (2, (4, 1)), (4, (2, 1)), (8, (1, 1))])
def test_kernels_are_chosen_for_the_heads_of_one_device(monkeypatch, tp, heads):
  asked = {}

  def record(chip, attention, **case):
    asked.update(case, attention=attention)
    return choose(chip, attention, **case)

  monkeypatch.setattr(build, "choose", record)
  model = abstract_model(TINY, make_mesh(cpus(tp)[0]), dtype="float32")
  pages = PageConfig(num_rows=2, page_size=4, pages_per_row=8, num_pages=16)
  attention = make_attention(model, pages, make_mesh(cpus(tp)[0]), "paged", "pallas")
  assert (asked["num_heads"], asked["num_kv_heads"]) == heads
  assert attention.layout.num_kv_heads * attention.layout.kv_copies == tp * heads[1]
  assert attention.tuning.prefill.backend == "triton"
  make_attention(checksum_model(), pages, make_mesh(cpus(1)[0]), "paged", "pallas")
  assert asked["attention"] == "xla", "only plain XLA has the checksum model's reduction"


def test_warm_up_compiles_only_what_is_used():
  pages = PageConfig(num_rows=4, page_size=4, pages_per_row=8, num_pages=32)
  buckets = default_buckets(pages, whole_budget=32, chunk_budget=16)
  kinds = {}
  for use in USES:
    steps = Recorder(checksum_model(), pages)
    executor = JaxExecutor(checksum_model(), steps, pages, buckets, [make_mesh(cpus(1)[0])])
    kinds[use] = {line.split(": ")[1].split()[0] for line in warm_up([executor], [{use}])}
  assert kinds == {use: {use, "seen"} for use in USES}


def test_a_failing_warm_up_raises_where_it_is_consumed():
  def breaks(uses):
    yield "first"
    raise MemoryError("device is full")

  lines = warm_up([SimpleNamespace(warm_up=breaks)], [{"mixed"}])
  assert next(lines) == "device 0: first"
  with pytest.raises(MemoryError, match="device is full"):
    next(lines)


def test_chunks_are_not_padded_to_whole_prompts_that_are_mixed_with_decodes():
  pages = PageConfig(num_rows=8, page_size=16, pages_per_row=26, num_pages=208)
  whole = default_buckets(pages, whole_budget=512, chunk_budget=512).mixed
  assert min(whole) == 64 and len(whole) == 4
  chunks = default_buckets(pages, whole_budget=512, chunk_budget=64).mixed
  assert chunks == (32, 64)


def test_buckets_end_at_the_budgets():
  pages = PageConfig(num_rows=6, page_size=16, pages_per_row=13, num_pages=78)
  buckets = default_buckets(pages, whole_budget=200, chunk_budget=48)
  ends = {name: sizes[-1] for name, sizes in dataclasses.asdict(buckets).items()}
  assert ends == {"prefill": 200, "mixed": 48, "rows": 6, "pages": 13}
