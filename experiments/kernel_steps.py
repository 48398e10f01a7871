"""Whole steps of a model with random weights, through the executor that serves."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import statistics
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from configs.hardware import HARDWARE
from experiments.kernel_cases import EngineWork, Sizes
from experiments.kernel_timing import Ceilings, check_time, refused
from pdjax.core.costs import count_plan, step_costs, total_bytes, total_flops
from pdjax.core.model_config import ModelConfig
from pdjax.core.plan import PageUpdates, StepPlan
from pdjax.engine.buckets import Buckets
from pdjax.engine.build import build_executors
from pdjax.engine.jax_executor import JaxExecutor
from pdjax.engine.mesh import make_mesh
from pdjax.kernels.choice import chip_of
from pdjax.kernels.tile_config import Chip
from pdjax.models.model import Model, axes_sharding
from pdjax.models.transformer import build, param_shapes
from pdjax.scheduling.probe import probe_plan
from pdjax.sim.hardware import Device


def bench_engine(
  sizes: Sizes, device: jax.Device, ceilings: Ceilings, deadline_s: float
) -> Iterator[dict]:
  """A row for each kind of step, and one for what a mixed step saves."""
  work, dtype = sizes.engine, sizes.dtype
  config, pages, width = work.model, work.pages(), jnp.dtype(dtype).itemsize
  needed = config.num_params * width
  needed += pages.num_pages * pages.page_size * config.kv_bytes_per_token(width)
  limit = (device.memory_stats() or {}).get("bytes_limit", math.inf)
  if needed > 0.9 * limit:
    reason = f"{config.name} needs {needed / 1e9:.0f} GB, JAX has {limit / 1e9:.0f}"
    yield {"case": "engine", "name": config.name, "kind": "step", "status": "refused",
           "reason": reason}  # fmt: skip
    return
  buckets = Buckets(
    prefill=tuple(sorted({work.chunk, work.prefill_tokens})),
    mixed=(work.budget,),
    rows=tuple(sorted({*work.decodes, work.mixed_decodes})),
  )
  model = random_model(config, make_mesh([device]), dtype)
  (executor,) = build_executors(model, pages, buckets, [[device]], layout="paged")
  peaks = peaks_of(chip_of(device))
  times: dict[str, float] = {}
  for name, plan in engine_plans(work).items():
    check_time(deadline_s)
    row = {"case": "engine", "name": name, "kind": "step"}
    try:
      times[name] = time_s = step_s(executor, plan, 10 * sizes.sample_s)
    except Exception as error:
      yield row | refused(error)
      executor.recover()  # it may have taken the cache along
      continue
    ops = step_costs(
      count_plan(plan),
      config,
      bytes_per_weight=width,
      bytes_per_kv=width,
      bytes_per_activation=width,
    )
    flops = total_flops(op for op in ops if op.kind != "elementwise")
    num_bytes = total_bytes(ops)
    yield (
      row
      | ceilings.reached(flops, num_bytes, time_s)
      | {
        "mfu": peaks and flops / time_s / peaks.peak_flops_per_s,
        "mbu": peaks and num_bytes / time_s / peaks.peak_bytes_per_s,
      }
    )
  whole = f"mixed {work.budget}"
  parts = [f"prefill {work.chunk}", f"decode {work.mixed_decodes}"]
  if times.keys() >= {whole, *parts}:
    apart_s = sum(times[part] for part in parts)
    yield {
      "case": "engine",
      "name": f"{whole} instead of {' and '.join(parts)}",
      "kind": "saving",
      "status": "ok",
      "apart_s": apart_s,
      "saved_s": apart_s - times[whole],
    }


def peaks_of(chip: Chip) -> Device | None:
  """The data sheet of a GPU, if it is in the catalogue, and not in another version of it."""
  words = {*re.split(r"[\s-]", chip.kind.lower())}
  if chip.platform != "gpu" or words & {"pcie", "nvl", "40gb"}:
    return None
  return next((peaks for name, peaks in HARDWARE.items() if name in words), None)


def step_s(executor: JaxExecutor, plan: StepPlan, sample_s: float) -> float:
  """Seconds of one step when the device never waits for the host: several are in flight."""
  executor.submit(plan, 0.0).result()
  plan = dataclasses.replace(plan, page_updates=PageUpdates())  # its rows have their pages now

  def each_s(num_steps: int) -> float:
    start_s = time.perf_counter()
    tickets = [executor.submit(plan, 0.0) for _ in range(num_steps)]
    tickets[-1].result()
    return (time.perf_counter() - start_s) / num_steps

  num_steps = min(max(2, math.ceil(sample_s / each_s(1))), 30)
  return statistics.median(each_s(num_steps) for _ in range(3))


def engine_plans(work: EngineWork) -> dict[str, StepPlan]:
  """Steps by name. Prompts are random: a GPU at its power limit computes equal rows faster."""
  rng = np.random.default_rng(0)

  def probe(prefills: tuple[int, ...] = (), decodes: int = 0) -> StepPlan:
    plan = probe_plan(work.pages(), prefills=prefills, decodes=decodes, context=work.context)
    slices = tuple(
      dataclasses.replace(
        s, token_ids=tuple(rng.integers(work.model.vocab_size, size=s.num_tokens).tolist())
      )
      for s in plan.prefills
    )
    return dataclasses.replace(plan, prefills=slices)

  rows = sorted({*work.decodes, work.mixed_decodes})
  return {
    f"prefill {work.prefill_tokens}": probe((work.prefill_tokens,)),
    **{f"decode {num_rows}": probe(decodes=num_rows) for num_rows in rows},
    f"prefill {work.chunk}": probe((work.chunk,)),
    f"mixed {work.budget}": probe((work.chunk,), work.mixed_decodes),
  }


def random_model(config: ModelConfig, mesh: jax.sharding.Mesh, dtype: str) -> Model:
  """Random parameters, made on the device: the host may be too small for them."""
  names = build(config, (), dtype=dtype)

  @functools.cache
  def maker(shape, sharding):
    def make(key, scale):
      return (jax.random.normal(key, shape, dtype) * scale).astype(dtype)

    return jax.jit(make, out_shardings=sharding)

  params = []
  for axes, shape in zip(names.param_axes, param_shapes(config).values()):
    sharding = axes_sharding(axes, shape, mesh)
    if "->" in axes:
      num_in = math.prod(shape[: len(axes.split("->")[0].split())])
      params.append(maker(shape, sharding)(jax.random.key(len(params)), num_in**-0.5))
    else:
      params.append(jnp.ones(shape, dtype, device=sharding))
  return dataclasses.replace(names, params=tuple(params))
