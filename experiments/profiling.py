"""Whole steps of an engine, timed as they follow one another, and the fit of a latency model."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import itertools
import math
import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from experiments.bench_engine import best_s
from pdjax.core.costs import StepCounts, count_plan
from pdjax.core.model_config import ModelConfig
from pdjax.core.plan import StepPlan
from pdjax.scheduling.pages import PageConfig
from pdjax.scheduling.probe import probe_plan
from pdjax.serving.executor import Executor
from pdjax.sim.fitting import Errors, Fitted, fit_steps, predict, whole_step
from pdjax.sim.hardware import Device, Fit, Link
from pdjax.sim.padded import Padding

PASSES = 2  # over all steps, in a random order each: a machine that slows down slows all of them


class Point(NamedTuple):
  """A step, by what the scheduler asks for, and how long after it the next one can end."""

  kind: str
  counts: StepCounts
  seconds: float


def steps_to_time(
  pages: PageConfig, *, prefill_tokens: int, mixed_tokens: int, kinds: Iterable[str]
) -> list[StepPlan]:
  """Some 45 steps that tell the parameters of a latency model apart, of these kinds.

  Steps of prompts have up to `prefill_tokens`, those of chunks with decodes up to `mixed_tokens`.
  """
  most = pages.capacity_tokens
  rows = sorted({n for n in (1, 2, *(pages.num_rows // k for k in (4, 2, 1))) if n})
  rows = [n for n in rows if n <= pages.num_rows]
  contexts = sorted({min(16, most), max(1, most // 4), max(1, most // 2), most})
  plans = []
  if "prefill" in kinds:
    longest = min(prefill_tokens, most)
    sizes = _sizes(longest, 7)
    plans += [probe_plan(pages, prefills=(size,)) for size in sizes]
    for size in sizes[-1], sizes[len(sizes) // 2]:
      size = min(size, max(1, most // 2))
      plans += [
        probe_plan(pages, prefills=(size,), start=start)
        for start in sorted({most // 4, most // 2, most - size})
        if start + size <= most
      ]
    for n in (2, 4):
      if n <= pages.num_rows and longest >= n:
        plans.append(probe_plan(pages, prefills=(longest // n,) * n))
  if "decode" in kinds:
    plans += [probe_plan(pages, decodes=n, context=context) for n in rows for context in contexts]
  if "mixed" in kinds:
    beside = pages.num_rows - 1  # the prompt has a row too
    for n in sorted({min(n, beside) for n in (rows[0], rows[len(rows) // 2], beside)} - {0}):
      for size in _sizes(min(mixed_tokens - n, most // 2), 3):
        for start in (0, most // 2):
          plans.append(
            probe_plan(pages, prefills=(size,), start=start, decodes=n, context=most // 2)
          )
  return plans


def _sizes(most: int, num_sizes: int) -> list[int]:
  """`most`, and halves of it."""
  return sorted({max(1, most >> i) for i in range(num_sizes)}) if most >= 1 else []


def time_steps(
  executor: Executor,
  plans: Sequence[StepPlan],
  *,
  steps_in_flight: int = 2,
  passes: int = PASSES,
  least_s: float = 0.15,
  seed: int = 0,
  show: Callable[[str], None] = lambda line: None,
) -> list[Point]:
  """Times each step, as many in flight as a loop has.

  The seconds are from the end of one to the end of the next: what a plan costs a busy device.
  """
  times: list[list[float]] = [[] for _ in plans]
  order = [(number, i) for number in range(passes) for i in range(len(plans))]
  random.Random(seed).shuffle(order)
  order.sort(key=lambda item: item[0])
  for done, (_, i) in enumerate(order, 1):
    times[i].append(_spacing_s(executor, plans[i], steps_in_flight, least_s))
    show(f"timed {done} of {len(order)} steps")
  return [
    Point(plan.kind, count_plan(plan), statistics.median(seconds))
    for plan, seconds in zip(plans, times)
  ]


def _spacing_s(executor: Executor, plan: StepPlan, steps_in_flight: int, least_s: float) -> float:
  start_s = time.perf_counter()
  executor.submit(plan, 0.0).result()
  num_steps = max(2, math.ceil(least_s / (time.perf_counter() - start_s)))
  start_s = time.perf_counter()
  _run_steps(executor, itertools.repeat(plan, num_steps), steps_in_flight)
  return (time.perf_counter() - start_s) / num_steps


def _run_steps(executor: Executor, plans: Iterable[StepPlan], steps_in_flight: int) -> None:
  pending: collections.deque = collections.deque()
  for plan in plans:
    pending.append(executor.submit(plan, 0.0))
    if len(pending) == steps_in_flight:
      pending.popleft().result()
  while pending:
    pending.popleft().result()


@contextlib.contextmanager
def kept_busy(
  executor: Executor, plans: Sequence[StepPlan], steps_in_flight: int = 2
) -> Iterator[None]:
  """Within it another thread runs these steps on `executor` one after another, again and again.

  Raises:
    Exception: what a step raised, at the end.
  """
  is_over = threading.Event()
  steps = itertools.takewhile(lambda _: not is_over.is_set(), itertools.cycle(plans))
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    running = pool.submit(_run_steps, executor, steps, steps_in_flight)
    try:
      yield
    finally:
      is_over.set()
    running.result()


def fit_points(
  points: Sequence[Point],
  model: ModelConfig,
  device: Device,
  padding: Padding,
  *,
  tp: int = 1,
  link: Link | None = None,
) -> Fitted:
  """The latency model of steps that the engine pads, run one behind another (`time_steps`)."""
  return fit_steps(_padded(points, padding), model, device, tp=tp, link=link, hides_host=True)


def _padded(points: Sequence[Point], padding: Padding) -> list[tuple[StepCounts, float]]:
  return [(padding(point.counts), point.seconds) for point in points]


def predictions_s(
  points: Sequence[Point],
  fit: Fit,
  model: ModelConfig,
  device: Device,
  padding: Padding,
  *,
  tp: int = 1,
  link: Link | None = None,
) -> list[float]:
  timings = [whole_step(model, tp, *step, hides_host=True) for step in _padded(points, padding)]
  return predict(fit, timings, device, link).tolist()


def errors_by_kind(points: Sequence[Point], predicted_s: Sequence[float]) -> dict[str, Errors]:
  """Errors of each kind of step, then of `all`."""
  pairs: dict[str, list[tuple[float, float]]] = {}
  for point, seconds in zip(points, predicted_s, strict=True):
    pairs.setdefault(point.kind, []).append((seconds, point.seconds))
  pairs["all"] = [pair for own in list(pairs.values()) for pair in own]
  return {kind: Errors.of(*zip(*own)) for kind, own in pairs.items()}


def padding_of(buckets) -> Padding:
  """What `engine.buckets.Buckets` do to a step."""
  return Padding(prefill=buckets.prefill, mixed=buckets.mixed, rows=buckets.rows)


def rows_of(
  points: Sequence[Point], predicted_s: Sequence[float]
) -> list[dict[str, float | int | str]]:
  """One record a point, as a table has it."""
  return [
    {"kind": p.kind, **p.counts._asdict(), "seconds": p.seconds, "fitted_s": fitted_s}
    for p, fitted_s in zip(points, predicted_s, strict=True)
  ]


def measured_device(device, dtype: str) -> Device:
  """A JAX device by the rates that it reaches: of a large matmul, and of a stream over memory.

  The stream writes where it read: memory that nobody touched before costs page faults.
  """
  import jax
  import jax.numpy as jnp

  is_cpu = device.platform == "cpu"
  n, num_values = (2048, 1 << 26) if is_cpu else (8192, 1 << 28)
  x = jax.device_put(jnp.ones((n, n), dtype), device)
  values = jax.device_put(jnp.ones(num_values, dtype), device)
  multiply, add = jax.jit(lambda x: x @ x), jax.jit(lambda x: x + 1, donate_argnums=0)

  def stream() -> None:
    nonlocal values
    values = add(values).block_until_ready()

  flops_per_s = 2 * n**3 / best_s(lambda: multiply(x).block_until_ready(), 5)
  bytes_per_s = 2 * values.nbytes / best_s(stream, 5)
  stats = None if is_cpu else device.memory_stats()
  memory_bytes = (stats or {}).get("bytes_limit")
  if memory_bytes is None:  # that of the machine, or what the device does not tell
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
  return Device(
    name=device.device_kind,
    peak_flops_per_s=flops_per_s,
    peak_bytes_per_s=bytes_per_s,
    memory_bytes=memory_bytes,
  )


def ceiling_of(device: Device) -> Device:
  """A measured device with peaks to fit shares of: twice what it reached, as a kernel may reach
  more, and none may beat the ceiling that it is a share of.
  """
  return dataclasses.replace(
    device,
    peak_flops_per_s=2 * device.peak_flops_per_s,
    peak_bytes_per_s=2 * device.peak_bytes_per_s,
  )
