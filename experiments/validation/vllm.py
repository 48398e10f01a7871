"""A real vLLM 0.19 that serves Llama-3.1-8B on an RTX PRO 6000, and its twin in simulation.

Source: LLMServingSim (casys-kaist, MIT, 5daddb2), bench/examples/RTXPRO6000/Llama-3.1-8B: 300
ShareGPT requests at about 10 a second, at most 128 at a time, 2,048 tokens a step. Prefix caching
was on, and 7.6 % of the prompt tokens were hits; the file has no token ids, so here there are none.

Step times are the device's, fitted to operators of the same model (`configs/hardware.py`). The
host's time per step comes from another machine: `host_of_rtx_4090`.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence

from configs.hardware import HARDWARE, LINKS
from configs.models import MODELS
from experiments.figures.validation import draw_replay
from experiments.validation.measured import llmservingsim
from experiments.validation.page import Reached, Section
from experiments.validation.replay import (
  METRICS,
  Replay,
  error_percent,
  error_rows,
  markdown_table,
  simulate,
)
from experiments.validation.requests import Measured, to_requests
from pdjax.config import SchedulerOptions, parse_pools
from pdjax.scheduling.pages import PageConfig
from pdjax.sim.hardware import Device
from pdjax.sim.latency_model import LatencyModel
from pdjax.sim.roofline import Roofline, num_pages

MODEL = MODELS["llama3-8b"]  # 3.1 has the same sizes
RUN = "RTXPRO6000_llama3.1-8b_vllm_measured_requests.csv"
PAGE_SIZE = 16
MS = 1e3
TOKEN_BUDGET = 2048

# The same requests, served by the same vLLM on an RTX 4090 (bench/examples/RTX4090/Llama-3.1-8B, at
# most 256 at a time, 2,588 pages as its meta.json says): means of its validation/summary.txt.
RTX_4090_TPOT_S = 32.4e-3
RTX_4090_TTFT_S = 65.5
RTX_4090_NUM_PAGES = 2588
RTX_4090_NUM_ROWS = 256


def read_run(folder: pathlib.Path) -> tuple[Measured, ...]:
  """Arrivals are of another clock than the engine's: the quickest way in is taken for none."""
  with open(folder / RUN, newline="") as file:
    records = list(csv.DictReader(file))
  apart_s = max(float(r["arrival_time"]) - float(r["queued_ts"]) for r in records)
  start_s = min(float(r["arrival_time"]) for r in records)
  rows = []
  for r in records:
    arrival_s, output_tokens = float(r["arrival_time"]), int(r["output_toks"])
    first_s, last_s = float(r["first_token_ts"]), float(r["last_token_ts"])
    rows.append(
      Measured(
        arrival_s=arrival_s - start_s,
        prompt_tokens=int(r["input_toks"]),
        output_tokens=output_tokens,
        ttft_s=first_s - (arrival_s - apart_s),
        tpot_s=(last_s - first_s) / (output_tokens - 1) if output_tokens > 1 else None,
      )
    )
  return tuple(sorted(rows, key=lambda row: row.arrival_s))


def with_host(device: Device, host_s: float) -> Device:
  """The device with another time of the host for each step.

  Raises:
    ValueError: nobody measured the device, and a time of the host would not make it measured.
  """
  if device.fit is None:
    raise ValueError(f"host_s={host_s:g} of {device.name}: only of devices that are calibrated")
  return dataclasses.replace(device, fit=dataclasses.replace(device.fit, host_s=host_s))


def fitted(hardware: str, host_s: float) -> LatencyModel:
  """Step times of the device's fit; vLLM has one kernel for the attention of both kinds."""
  device = with_host(HARDWARE[hardware], host_s)
  return Roofline(model=MODEL, device=device, one_kernel=True)


def serve_as_vllm(
  rows: Sequence[Measured], latency: LatencyModel, *, num_rows: int, num_pages: int
) -> Replay:
  """By the rules of its scheduler: first come first served, cut to the budget, growing.

  When pages run out the newest is computed again.
  """
  longest = max(row.prompt_tokens + row.output_tokens for row in rows)
  pages = PageConfig(
    num_rows=num_rows,
    page_size=PAGE_SIZE,
    pages_per_row=-(-longest // PAGE_SIZE),
    num_pages=num_pages,
  )
  options = SchedulerOptions(
    policy="fcfs",
    token_budget=TOKEN_BUDGET,
    reservation="chunk",
    watermark=0.0,
    max_preemptions=len(rows) * longest,  # nobody is protected from preemption there
    steps_in_flight=1,
  )
  log = simulate(
    to_requests(rows),
    parse_pools("mixed"),
    options,
    MODEL,
    lambda spec: latency,
    lambda spec: pages,
    LINKS["nvlink"],
  )
  return Replay.of(rows, log)


def replay(rows: Sequence[Measured], latency: LatencyModel) -> Replay:
  """The run on the RTX PRO 6000."""
  found = num_pages(
    model=MODEL,
    device=HARDWARE["rtx-pro-6000"],
    page_size=PAGE_SIZE,
    step_tokens=TOKEN_BUDGET,
  )
  return serve_as_vllm(rows, latency, num_rows=128, num_pages=found)


def host_of_rtx_4090(rows: Sequence[Measured], *, tolerance_s: float = 1e-5) -> float:
  """The host's time per step that gives the run on the RTX 4090 its mean TPOT; 0 if none does.

  By bisection up to 5 ms. Only the lengths and arrivals of `rows` count.
  """
  low_s, high_s = 0.0, 5e-3
  if on_rtx_4090(rows, low_s).mean_s("tpot_s") >= RTX_4090_TPOT_S:
    return low_s
  while high_s - low_s > tolerance_s:
    middle_s = (low_s + high_s) / 2
    if on_rtx_4090(rows, middle_s).mean_s("tpot_s") < RTX_4090_TPOT_S:
      low_s = middle_s
    else:
      high_s = middle_s
  return (low_s + high_s) / 2


def on_rtx_4090(rows: Sequence[Measured], host_s: float) -> Replay:
  """These lengths and arrivals there; what is measured in `rows` is not."""
  return serve_as_vllm(
    rows,
    fitted("rtx-4090", host_s),
    num_rows=RTX_4090_NUM_ROWS,
    num_pages=RTX_4090_NUM_PAGES,
  )


def part(data_dir: pathlib.Path, show: Callable[[str], None]) -> Section:
  """Of the suite: its mean times, by the host's time per step."""
  title = "End to end: vLLM 0.19, Llama-3.1-8B, RTX PRO 6000"
  folder = data_dir / "measured" / "llmservingsim"
  if not (folder / RUN).is_file():
    return Section(title=title, missing=f"there is no {RUN} in measured/llmservingsim")
  rows = read_run(folder)
  show("vLLM on an RTX 4090, for the host's time")
  host_s = host_of_rtx_4090(rows)
  there = on_rtx_4090(rows, host_s)
  show("vLLM on an RTX PRO 6000")
  table = [("step times", "host per step", *(f"mean {_name(metric)}" for metric in METRICS))]
  tables = llmservingsim(folder, "RTXPRO6000").tables()
  replays = {
    (times, h): replay(rows, own(h))
    for times, own in (
      ("fit", functools.partial(fitted, "rtx-pro-6000")),
      ("measured tables", lambda h: dataclasses.replace(tables, host_s=h)),
    )
    for h in sorted({0.0, 1e-3, 2e-3, host_s})
  }
  used = replays["fit", host_s]
  for (times, h), own in replays.items():
    errors = (f"{error:+.1f} %" for error in _mean_errors(own).values())
    table.append((f"{times}{' (judged)' if own is used else ''}", f"{h * MS:.2f} ms", *errors))
  found, by_tables = _mean_errors(used), _mean_errors(replays["measured tables", host_s])
  text = f"""300 ShareGPT requests at about 10 a second, at most 128 at a time, 2,048 tokens a step,
pages from real bytes. Step times: the device's fit, made of operators of the same model
(`configs/hardware.py`), with one kernel for all attention of a step. Not modelled: hits of the
prefix cache, 7.6 % of the prompt tokens.

The host's time per step was to come from another machine, where the same requests were served by
the same vLLM, an RTX 4090: so much as gives the simulator the mean TPOT there. {
    _host_words(host_s, there)
  } vLLM 0.19 plans a step while the one before runs. Judged is the fit, which is what simulations
use by default, and not the measured tables; the table below was known when that was said.

Errors of the means:

{markdown_table(table)}

Simulated / measured, as judged:

{markdown_table(error_rows(used))}"""
  return Section(
    title=title,
    reached=[
      Reached(
        f"vLLM 0.19 on an RTX PRO 6000: mean {_name(metric)}, host time per step "
        f"{host_s * MS:.2f} ms{'' if host_s else ' (a clamp: see there)'}",
        "within 5 %",
        f"{found[metric]:+.1f} %; by measured tables {by_tables[metric]:+.1f} %",
        abs(found[metric]) <= 5,
      )
      for metric in ("ttft_s", "tpot_s")
    ],
    text=text,
    pictures={"vllm.png": functools.partial(draw_replay, used)},
  )


def _host_words(host_s: float, there: Replay) -> str:
  tpot_s, ttft_s = there.mean_s("tpot_s"), there.mean_s("ttft_s")
  found = (
    f"With {host_s * MS:.2f} ms the simulator has there a mean TPOT of {tpot_s * MS:.1f} ms "
    f"(measured {RTX_4090_TPOT_S * MS:.1f} ms) and a mean TTFT of {ttft_s:.1f} s (measured "
    f"{RTX_4090_TTFT_S:.1f} s, not used)."
  )
  if host_s:
    return found
  return (
    f"None does: without any the simulator is too slow there already, and less than none there is "
    f"not. So this is a clamp at 0, not a measurement of the host. {found}"
  )


def _mean_errors(own: Replay) -> dict[str, float]:
  """In percent, by metric."""
  return {
    metric: error_percent(simulated.mean, measured.mean)
    for metric, (measured, simulated) in own.summaries().items()
  }


def _name(metric: str) -> str:
  return metric.removesuffix("_s").upper()
