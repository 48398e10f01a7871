"""Times of the device, its two ceilings, and why a measurement ends early.

One program makes n calls in a row, each on the result of the one before, so that none can be
skipped, merged or run beside another, and its time, less that of an empty program, is divided by
n; the median of five. What depends on the batch alone, as its tiles do, XLA may do once for all of
them, as for all layers of a step. A profiler would see inside a call, but needs CUPTI, and counts
no gaps between the kernels of one call.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from experiments.kernel_cases import Sizes

REPEATS = 5


class OutOfTime(Exception):
  """The limit has passed."""


class DeviceLost(Exception):
  """A fault after which the device answers nothing more."""


def check_time(deadline_s: float) -> None:
  """Raises OutOfTime after `deadline_s` of time.monotonic."""
  if time.monotonic() > deadline_s:
    raise OutOfTime


def refused(error: Exception) -> dict:
  """The columns of what could not run. Raises DeviceLost if it has taken the device along."""
  reason = f"{type(error).__name__}: {str(error).strip() or repr(error)}".splitlines()[0]
  try:
    jax.block_until_ready(jnp.zeros(8) + 1)
  except Exception as lost:
    raise DeviceLost(reason) from lost
  return {"status": "refused", "reason": reason}


class Ceilings(NamedTuple):
  flops_per_s: float
  bytes_per_s: float
  empty_s: float  # of a program that does nothing

  def least_s(self, flops: float, num_bytes: float) -> float:
    return max(flops / self.flops_per_s, num_bytes / self.bytes_per_s)

  def reached(self, flops: float, num_bytes: float, time_s: float) -> dict:
    """The columns of what ran."""
    return {
      "status": "ok",
      "time_s": time_s,
      "flops_per_s": flops / time_s,
      "bytes_per_s": num_bytes / time_s,
      "of_ceiling": self.least_s(flops, num_bytes) / time_s,
    }


class Run(NamedTuple):
  """A call to measure: its result is the next one's `state`, its other operands rotate."""

  state: Any
  sets: list[tuple]
  call: Callable[..., Any]
  out: Callable[[Any], Any] = lambda state: state  # as the reference gives it


def repeated(run: Run, num_rounds: int) -> Callable[[Any, list[tuple]], Any]:
  """One program of so many calls on each set, in a row. Donates the state."""
  call = jax.jit(run.call)  # so that it is traced and lowered once

  def many(state, sets):
    def one_round(_, state):
      for operands in sets:
        state = call(state, *operands)
      return state

    return lax.fori_loop(0, num_rounds, one_round, state)

  return jax.jit(many, donate_argnums=0)


def device_s(run: Run, least_s: float, sample_s: float, empty_s: float = 0.0) -> float:
  """Seconds of one call on the device. Leaves `run.state` alone."""
  num_calls = min(max(1, math.ceil(sample_s / least_s)), 1000)
  num_rounds = -(-num_calls // len(run.sets))
  many = repeated(run, num_rounds)
  state = jax.block_until_ready(many(jax.tree.map(jnp.copy, run.state), run.sets))
  times, begin_s = [], time.perf_counter()
  while len(times) < REPEATS and (not times or time.perf_counter() - begin_s < 2):
    start_s = time.perf_counter()
    state = jax.block_until_ready(many(state, run.sets))
    times.append(time.perf_counter() - start_s)
  total_s = statistics.median(times)
  return max(total_s - empty_s, 0.5 * total_s) / (num_rounds * len(run.sets))


def measure_ceilings(sizes: Sizes) -> Ceilings:
  keys = jax.random.split(jax.random.key(0), 3)
  dtype, n = sizes.dtype, sizes.matmul_width
  empty = jax.jit(lambda x: x + 1)
  x = jax.block_until_ready(empty(jnp.zeros(8)))
  times = []
  for _ in range(20):
    start_s = time.perf_counter()
    x = jax.block_until_ready(empty(x))
    times.append(time.perf_counter() - start_s)
  empty_s = statistics.median(times)

  def seconds(run: Run, guess_s: float) -> float:
    return device_s(run, guess_s, 3 * sizes.sample_s, empty_s)

  x, w = (jax.random.normal(key, (n, n), dtype) for key in keys[:2])
  w = (w * n**-0.5).astype(dtype)
  flops = 2 * n**3
  flops_per_s = flops / seconds(Run(x, [(w,)], lambda x, w: x @ w), flops / 5e14)
  # 1 - 2 x^2 keeps random numbers in [-1, 1] as they are distributed, and two such calls are no
  # simpler one.
  x = jax.random.uniform(keys[2], (sizes.copy_bytes // 4,), minval=-1)
  copy_s = seconds(Run(x, [()], lambda x: 1 - 2 * x * x), 2 * x.nbytes / 3e12)
  return Ceilings(flops_per_s, 2 * x.nbytes / copy_s, empty_s)
