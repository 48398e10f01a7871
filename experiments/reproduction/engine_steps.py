"""Single steps of the engine at this machine's scale, timed for the figures that are about them."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable
from typing import NamedTuple

from experiments.bench_engine import copy_bytes_per_s, matmul_flops_per_s, weight_matmuls_s
from experiments.profiling import measured_device, time_steps
from experiments.reproduction.bench import Bench
from experiments.reproduction.figure import HOLDS, IN_PART, NOT, Judged
from pdjax.core.costs import count_plan, step_costs
from pdjax.core.model_config import ModelConfig
from pdjax.scheduling.pages import PageConfig
from pdjax.scheduling.probe import probe_plan
from pdjax.serving.executor import Executor

MODEL = "smollm2-135m"
SCALE = 8  # lengths are an eighth of the papers'
NUM_ROWS = 33  # 32 decodes and a prompt
MAX_LEN = 1024
PAGES = PageConfig(
  num_rows=NUM_ROWS,
  page_size=16,
  pages_per_row=MAX_LEN // 16,
  num_pages=NUM_ROWS * MAX_LEN // 16,
  contiguous=True,
)
MATMUL_REPEATS = 3


class Probe(NamedTuple):
  """A step to time: the arguments of `probe_plan`."""

  prefills: tuple[int, ...] = ()
  start: int = 0
  decodes: int = 0
  context: int = 1


class Rates(NamedTuple):
  """What a device reaches in a large matmul and in a stream over its memory."""

  flops_per_s: float
  bytes_per_s: float
  bytes_per_value: int

  @property
  def ridge_tokens(self) -> float:
    """Tokens of a step whose arithmetic takes as long as reading the weights."""
    return self.flops_per_s / self.bytes_per_s * self.bytes_per_value / 2


class Engine:
  """One pool on one device. Steps are compiled at exactly the sizes asked for: nothing is padded.

  Owns `executor`, whose cache is overwritten by every timing.
  """

  def __init__(
    self,
    executor: Executor,
    model: ModelConfig,
    rates: Rates,
    label: str,
    linear_s: Callable[[int, int], float],
  ):
    self.model, self.rates, self.label = model, rates, label
    self.linear_s = linear_s  # (tokens, rows of the LM head) -> the model's own matmuls alone
    self._executor = executor

  def times_s(self, probes: Iterable[Probe], show: Callable[[str], None]) -> dict[Probe, float]:
    """How long each takes among its like, as `time_steps` does: all in turn, in two orders."""
    plans = {probe: probe_plan(PAGES, **probe._asdict()) for probe in dict.fromkeys(probes)}
    for number, (probe, plan) in enumerate(plans.items(), 1):
      show(f"compiling what is new, step {number} of {len(plans)}: {probe}")
      self._executor.submit(plan, 0.0).result()
    points = time_steps(self._executor, list(plans.values()), show=show)
    return {probe: point.seconds for probe, point in zip(plans, points, strict=True)}

  def roofline_s(self, probe: Probe) -> float:
    """What the step takes if every operator runs at the rates that this device reaches."""
    width = self.rates.bytes_per_value
    ops = step_costs(
      count_plan(probe_plan(PAGES, **probe._asdict())),
      self.model,
      bytes_per_weight=width,
      bytes_per_kv=width,
      bytes_per_activation=width,
    )
    return sum(
      max(op.flops / self.rates.flops_per_s, op.num_bytes / self.rates.bytes_per_s) for op in ops
    )


def open_engine(bench: Bench) -> Engine:
  """SmolLM2 on the first device that JAX sees here.

  Raises:
    SourceError: its weights cannot be had.
  """
  from pdjax.engine.buckets import Buckets
  from pdjax.engine.build import build_executors
  from pdjax.engine.mesh import ensure_devices
  from pdjax.models.checkpoints.checkpoint import open_checkpoint
  from pdjax.sources import resolve

  path = resolve(MODEL, show=bench.show)
  devices = ensure_devices(1)
  is_cpu = devices[0].platform == "cpu"
  dtype, width = ("float32", 4) if is_cpu else ("bfloat16", 2)
  model = open_checkpoint(path).load(dtype=dtype, target=devices[0])
  sizes = tuple(range(1, MAX_LEN + NUM_ROWS + 1))  # compiled when they are first asked for
  buckets = Buckets(prefill=sizes, mixed=sizes, rows=sizes[:NUM_ROWS], pages=(1,))
  (executor,) = build_executors(model, PAGES, buckets, [devices], layout="slots")
  bench.show("measuring a matmul and a stream")
  if is_cpu:
    rates = Rates(matmul_flops_per_s(), copy_bytes_per_s(), width)
  else:
    device = measured_device(devices[0], dtype)
    rates = Rates(device.peak_flops_per_s, device.peak_bytes_per_s, width)
  label = (
    f"{MODEL} in {dtype} on one {devices[0].device_kind} device "
    f"({platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}), which reaches "
    f"{rates.flops_per_s / 1e9:.0f} GFLOP/s and {rates.bytes_per_s / 1e9:.0f} GB/s: its ridge is "
    f"at {rates.ridge_tokens:.0f} tokens a step, an A100's at 153"
  )
  return Engine(
    executor,
    model.config,
    rates,
    label,
    lambda num_tokens, num_emitted: weight_matmuls_s(
      model, num_tokens, num_emitted=num_emitted, repeats=MATMUL_REPEATS
    ),
  )


# Verdicts -----------------------------------------------------------------------------------------


def at_least(value: float, whole: float, part: float, why: str) -> Judged:
  """Holds from `whole` on, in part from `part` on. Says so."""
  verdict = HOLDS if value >= whole else IN_PART if value >= part else NOT
  return Judged(verdict, f"{why} (Holds from {whole:g}, in part from {part:g}.)")


def at_most(value: float, whole: float, part: float, why: str) -> Judged:
  """Holds up to `whole`, in part up to `part`. Says so."""
  verdict = HOLDS if value <= whole else IN_PART if value <= part else NOT
  return Judged(verdict, f"{why} (Holds up to {whole:g}, in part up to {part:g}.)")
