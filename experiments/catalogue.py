"""What can be named on a command line or in a config: a line each, for `--list`."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from configs.hardware import HARDWARE, LINKS
from configs.latency import LATENCY
from configs.models import MODELS
from configs.slos import SLOS
from configs.workloads import WORKLOADS
from pdjax.config import STRATEGIES, SloConfig
from pdjax.core.model_config import ModelConfig
from pdjax.scheduling.policies import POLICIES, PolicySpec
from pdjax.scheduling.routing import ROUTERS
from pdjax.sim.hardware import Device, Link
from pdjax.workloads.arrivals import ARRIVALS
from pdjax.workloads.synthetic import Synthetic


def catalogue() -> str:
  """All names with a line each, under how each kind of name is given."""
  tables = {
    "strategies (--strategies)": STRATEGIES,
    "policies (--set scheduler.policy=)": POLICIES,
    "routers": ROUTERS,
    "workloads (--workload)": WORKLOADS,
    "arrivals (--set workload.arrivals=)": ARRIVALS,
    "models (--model)": MODELS,
    "hardware (--hardware)": HARDWARE,
    "links (--set link=)": LINKS,
    "latency models (--set latency=)": LATENCY,
    "targets (search --slo=)": SLOS,
  }
  return "\n\n".join(_section(title, table) for title, table in tables.items())


def _section(title: str, table: Mapping[str, Any]) -> str:
  width = max(map(len, table))
  lines = [f"  {name.ljust(width)}  {_line(entry)}" for name, entry in table.items()]
  return "\n".join([title, *lines])


def _line(entry: Any) -> str:
  match entry:
    case ModelConfig():
      return (
        f"{entry.num_layers} layers of {entry.d_model}, {entry.num_heads} heads on "
        f"{entry.num_kv_heads}, {_size(entry.num_params)} parameters, "
        f"{entry.kv_bytes_per_token(2):,} B of KV a token in 16 bits, {entry.max_len:,} tokens"
      )
    case Device():
      return (
        f"{entry.peak_flops_per_s / 1e12:g} TFLOP/s, {entry.peak_bytes_per_s / 1e12:g} TB/s, "
        f"{entry.memory_bytes / 1e9:g} GB; "
        + ("step times fitted" if entry.is_calibrated else "uncalibrated: data-sheet peaks")
      )
    case Link():
      return f"{entry.bytes_per_s / 1e9:g} GB/s, {entry.latency_s * 1e6:g} us"
    case PolicySpec():
      options = f" (options: {', '.join(entry.options)})" if entry.options else ""
      return first_sentence(entry.policy) + options
    case functools.partial():
      given = [*map(str, entry.args), *(f"{k}={v}" for k, v in entry.keywords.items())]
      return f"{first_sentence(entry.func)}: {', '.join(given)}"
    case SloConfig():
      given = {"TTFT": entry.ttft_s, "TPOT": entry.tpot_s}
      return ", ".join(f"{name} {time_s:g} s" for name, time_s in given.items() if time_s)
    case Synthetic():
      medians = [_median(p) for p in (entry.lengths.prompt_tokens, entry.lengths.output_tokens)]
      return (
        f"synthetic, from the quantiles of {entry.source}: medians {medians[0]:,} and "
        f"{medians[1]:,} tokens"
      )
  return first_sentence(entry)


def first_sentence(thing: Any) -> str:
  """Of the docstring of a function or class, on one line."""
  text = inspect.getdoc(thing) or ""
  paragraph = " ".join(text.split("\n\n")[0].split())
  return re.split(r"(?<=\.)\s", paragraph)[0].rstrip(".")


def _median(points: tuple[tuple[float, int], ...]) -> int:
  return round(np.interp(0.5, *zip(*points)))


def _size(n: float) -> str:
  return f"{n / 1e9:.3g} B" if n >= 1e9 else f"{n / 1e6:.3g} M"
