"""From a model and devices to executors that share their compiled steps."""

from __future__ import annotations

import dataclasses
import itertools
import math
import queue
import threading
from collections.abc import Collection, Iterator, Sequence

import jax

from pdjax.engine.buckets import Buckets, grow_to
from pdjax.engine.jax_executor import JaxExecutor
from pdjax.engine.mesh import make_mesh
from pdjax.engine.steps import Steps
from pdjax.kernels.choice import chip_of, choose
from pdjax.models.attention import Attention
from pdjax.models.model import Model
from pdjax.scheduling.pages import PageConfig


def default_buckets(pages: PageConfig, *, whole_budget: int, chunk_budget: int) -> Buckets:
  """Buckets for pools of any role: at most twelve steps and three hand-offs.

  `whole_budget` is the largest step of whole prompts, `chunk_budget` that of chunks or prompts with
  decodes. Sizes double, so padding is under half of a step, but not below the smallest that is
  kept: a bucket costs seconds of compilation. Where whole prompts are mixed with decodes, chunks of
  another strategy may be a fraction of them.
  """
  mixed = grow_to(16, max(16, chunk_budget), 2)
  return Buckets(
    prefill=grow_to(16, max(16, whole_budget, chunk_budget), 2)[-4:],
    mixed=(*(size for size in mixed[-4:-2] if size >= 64), *mixed[-2:]),
    rows=tuple(
      sorted({1, *grow_to(1, pages.num_rows, 2)[-3:]})
    ),  # one row is a product by a vector
    pages=grow_to(min(4, pages.pages_per_row), pages.pages_per_row, 4)[-3:],
  )


def build_executors(
  model: Model,
  pages: PageConfig,
  buckets: Buckets,
  groups: Sequence[Sequence[jax.Device]],
  *,
  layout: str,
  attention: str = "auto",
  stages: Sequence[int] = (),
  layer_groups: Sequence[int] = (),
) -> list[JaxExecutor]:
  """One executor for each group of devices, over which the model is split.

  Of each group, `stages` has the number of pipeline stages, whose devices are listed stage by
  stage, and `layer_groups` into how many groups the layers of a stage are cut, so that they can be
  handed over one by one; not given, 1. Groups of one kind of device whose stages have one size
  share their steps: traced once, compiled once for each stage. `attention` is one of
  `kernels.choice.ATTENTION`. Pages are handed over in cuts along kv heads, as fine as the pools of
  these groups need to give them to one another: then none is cut or joined on its way.

  Raises:
    ValueError: the model cannot be split over a group, or has too few layers.
  """
  steps: dict[tuple[int, str], Steps] = {}
  pools = []
  ones = (1,) * len(groups)
  for group, pp, cuts in zip(groups, stages or ones, layer_groups or ones, strict=True):
    if pp < 1 or len(group) % pp:
      raise ValueError(f"{len(group)} devices do not make {pp} stages of equal size")
    tp = len(group) // pp
    meshes = [make_mesh(group[i : i + tp]) for i in range(0, len(group), tp)]
    key = tp, group[0].device_kind  # which kernels are best on
    if key not in steps:
      steps[key] = Steps(model, make_attention(model, pages, meshes[0], layout, attention))
    pools.append((steps[key], meshes, cuts))
  num_parts = math.lcm(*(own.num_shards for own, _, _ in pools))
  return [
    JaxExecutor(
      model,
      own,
      pages,
      buckets,
      meshes,
      groups_per_stage=cuts,
      num_cuts=num_parts // own.num_shards,
    )
    for own, meshes, cuts in pools
  ]


def make_attention(
  model: Model, pages: PageConfig, mesh: jax.sharding.Mesh, layout: str, attention: str
) -> Attention:
  """How pools on meshes like this one attend, and how their caches lie in memory.

  Raises:
    ValueError: the model cannot be split over the mesh, or `attention` is unknown.
  """
  config = model.config
  config.check_split(mesh.size)
  kv_layout = model.layout(
    kind=layout,
    num_rows=pages.num_rows,
    page_size=pages.page_size,
    pages_per_row=pages.pages_per_row,
    num_pages=pages.num_pages,
    tp=mesh.size,
  )
  tuning = choose(
    chip_of(mesh.devices.flat[0]),
    "xla" if model.reduction else attention,
    num_heads=config.num_heads // mesh.size,
    num_kv_heads=max(1, config.num_kv_heads // mesh.size),
    head_dim=config.head_dim,
    page_size=pages.page_size,
    dtype=model.cache_dtype,
    cache_dtype=model.cache_dtype,
  )
  if tuning.interleaves:
    kv_layout = dataclasses.replace(kv_layout, kind="interleaved")
  return Attention(
    layout=kv_layout,
    tuning=tuning,
    mesh=mesh.abstract_mesh if mesh.size > 1 else None,
    reduction=model.reduction,
  )


def warm_up(executors: Sequence[JaxExecutor], uses: Sequence[Collection[str]]) -> Iterator[str]:
  """Warms up every executor for its uses, all at once; yields a line for each shape compiled.

  A thread each: XLA compiles without the interpreter lock, and each device compiles its own. Then
  those whose uses are `gather` and `scatter` hand pages to one another.
  """
  done: queue.SimpleQueue[str | Exception | None] = queue.SimpleQueue()

  def run(number: int) -> None:
    try:
      for line in executors[number].warm_up(uses[number]):
        done.put(f"device {number}: {line}")
    except Exception as error:  # raised again in the caller's thread
      done.put(error)
    done.put(None)

  for number in range(len(executors)):
    threading.Thread(target=run, args=(number,), daemon=True, name=f"warm-up-{number}").start()
  num_running = len(executors)
  while num_running:
    line = done.get()
    if line is None:
      num_running -= 1
    elif isinstance(line, Exception):
      raise line
    else:
      yield line
  for (source, gives), (target, takes) in itertools.permutations(enumerate(uses), 2):
    if "gather" in gives and "scatter" in takes:
      for line in executors[target].warm_up_from(executors[source]):
        yield f"devices {source} to {target}: {line}"
