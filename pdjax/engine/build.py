"""From a model and devices to executors that share their compiled steps."""

from __future__ import annotations

import jax

from pdjax.engine.buckets import Buckets, powers_of_two
from pdjax.engine.jax_executor import JaxExecutor
from pdjax.engine.mesh import make_mesh
from pdjax.engine.steps import Steps
from pdjax.models.model import Model
from pdjax.scheduling.pages import PageConfig


def default_buckets(pages: PageConfig, *, whole_budget: int, chunk_budget: int) -> Buckets:
  """Buckets for pools of any role, at most a dozen steps and a few hand-offs.

  `whole_budget` is the largest step of whole prompts, `chunk_budget` that of chunks with decodes.
  """
  prefill = powers_of_two(32, max(32, whole_budget, chunk_budget))
  mixed = powers_of_two(32, max(32, chunk_budget))
  return Buckets(
    prefill=prefill[-5:],
    mixed=mixed[-3:],
    rows=powers_of_two(1, pages.num_rows)[-4:],
    pages=powers_of_two(min(4, pages.pages_per_row), pages.pages_per_row)[-4:],
  )


def build_executors(
  model: Model,
  pages: PageConfig,
  buckets: Buckets,
  devices: list[jax.Device],
  *,
  layout: str,
) -> tuple[list[JaxExecutor], Steps]:
  """One executor a device. They share their steps, so pools of any strategy compile once."""
  kv_layout = model.layout(
    kind=layout,
    num_rows=pages.num_rows,
    page_size=pages.page_size,
    pages_per_row=pages.pages_per_row,
    num_pages=pages.num_pages,
  )
  steps = Steps(model, kv_layout)
  executors = [
    JaxExecutor(model, steps, pages, kv_layout, buckets, make_mesh([device])) for device in devices
  ]
  return executors, steps
