"""The numbers of the article that this project began with, as figures.

What it states is taken from the list that the project was asked to reproduce: rules of thumb and
headlines of others, without settings or curves. So each claim is judged on settings of our own,
which `configs/seed/` and the notes name. Here are those of single steps; what is simulated is in
`seed_serving.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from configs.hardware import HARDWARE, LINKS
from configs.models import MODELS
from experiments.figures.reproduction import Bars, Panel, Series, draw
from experiments.reproduction import seed_headlines, seed_serving
from experiments.reproduction.bench import Bench
from experiments.reproduction.figure import HOLDS, IN_PART, NOT, Compared, Figure, Found, Judged
from experiments.reproduction.seed_serving import A100, CONTEXT, LLAMA, latency_of, profile_of
from pdjax.analysis.intensity import (
  StepProfile,
  crossing,
  flop_per_byte,
  matrix_flop_per_byte,
  ridge,
  step_of,
)

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
HIDDEN = 4096


# The ridge ----------------------------------------------------------------------------------------

RIDGE = 153.0
RIDGE_DEVICES = ("a100", "a100-vllm", "h100", "h200", "l40s")


def judge_ridge(ours: float, prefill: Mapping[int, float], decode: Mapping[int, float]):
  """The ridge within 1 %; prompts of 512 tokens and more above it, all decodes below."""
  off = abs(ours / RIDGE - 1)
  above = [n for n, value in prefill.items() if value > ours]
  below = [n for n, value in decode.items() if value < ours]
  long_ones = [n for n in prefill if n >= 512]
  both = set(long_ones) <= set(above), len(below) == len(decode)
  return [
    Judged(
      HOLDS if off < 0.01 else NOT, f"Its peaks, 312 TFLOP/s and 2.039 TB/s, give {ours:.1f}."
    ),
    Judged(
      HOLDS if all(both) else IN_PART if any(both) else NOT,
      f"Prompts are above it from {min(above, default=0)} tokens on (0: none); decodes of 1 to "
      f"{max(decode)} rows reach {max(decode.values()):.0f} FLOP per byte behind {CONTEXT} tokens.",
    ),
  ]


def make_ridge(bench: Bench) -> Found:
  model = MODELS[LLAMA]
  prefill = {n: profile_of(LLAMA, "a100", chunk_tokens=n) for n in TOKENS if n >= 32}
  decode = {n: profile_of(LLAMA, "a100", rows=n, context=CONTEXT) for n in ROWS}
  rows = [
    (LLAMA, "a100", phase, n, p.flop_per_byte, p.flops / p.step_s, p.mfu, p.mbu, p.step_s)
    for phase, profiles in (("prefill", prefill), ("decode", decode))
    for n, p in profiles.items()
  ]
  ridges = {name: ridge(latency_of(LLAMA, name), model, HARDWARE[name]) for name in RIDGE_DEVICES}
  for name, own in ridges.items():
    rows.append((LLAMA, name, "ridge, peak", None, own.peak, None, None, None, None))
    rows.append((LLAMA, name, "ridge, achieved", None, own.achieved, None, None, None, None))
  roof = [
    (x, min(A100.peak_flops_per_s, x * A100.peak_bytes_per_s) / 1e12)
    for x in (0.5, 1, 2, 4, 8, 16, 32, 64, A100.ridge_flop_per_byte, 512, 2048)
  ]
  own = ridges["a100"]
  reached = [
    (x, min(own.flops_per_s, x * own.bytes_per_s) / 1e12)
    for x in (0.5, 1, 4, 16, 64, own.achieved, 512, 2048)
  ]
  panel = Panel(
    f"{LLAMA} on an A100",
    "arithmetic intensity (FLOP per byte)",
    "TFLOP/s",
    (
      Series("the data sheet's roof", roof, "peer", 6),
      Series("what matrices reach", reached, "long", 6),
      Series("prompts of 32 to 8,192 tokens", _on_roof(prefill), "ours", 0),
      Series(f"decodes of 1 to 256 rows, context {CONTEXT}", _on_roof(decode), "ours", 1),
    ),
    is_log_x=True,
    is_log_y=True,
  )
  bars = Bars(
    "Ridge by device",
    "FLOP per byte",
    ("peak", "achieved by matrices"),
    {name: (own.peak, own.achieved) for name, own in ridges.items()},
    published={("a100", "peak"): RIDGE},
  )
  return Found(
    columns=("model", "hardware", "what", "tokens or rows", "flop_per_byte", "flops_per_s", "mfu",
             "mbu", "step_s"),
    rows=rows,
    judged=judge_ridge(
      A100.ridge_flop_per_byte,
      {n: p.flop_per_byte for n, p in prefill.items()},
      {n: p.flop_per_byte for n, p in decode.items()},
    ),
    compared=[Compared("A100", RIDGE, A100.ridge_flop_per_byte, "FLOP per byte")],
    draw=lambda path: draw([panel, bars], path, "Where arithmetic and memory balance"),
    notes=(
      "The achieved ridge is that of matrices alone, fitted to published operator timings: FLOP/s "
      "of a prompt of 8,192 tokens over bytes/s of a single decode.",
    ),
  )  # fmt: skip


def _on_roof(profiles: Mapping[int, StepProfile]) -> list[tuple[float, float]]:
  return [(p.flop_per_byte, p.flops / p.step_s / 1e12) for p in profiles.values()]


# Arithmetic intensity -----------------------------------------------------------------------------


def judge_intensity(one: float, many: float, share: float, whole_shares: Mapping[str, float]):
  """A single decode below 2 FLOP per byte and a prompt of 2,048 above the ridge; 32 rows at a sixth
  to a quarter of it, with attention too.
  """
  first = one < 2, many > A100.ridge_flop_per_byte
  near = [name for name, s in whole_shares.items() if 1 / 6 <= s <= 1 / 4]
  said = ", ".join(f"{name} {s:.2f}" for name, s in whole_shares.items())
  is_near = 1 / 6 <= share <= 1 / 4
  return [
    Judged(
      HOLDS if all(first) else IN_PART if any(first) else NOT,
      f"{one:.2f} FLOP per byte for one row, {many:.0f} for 2,048.",
    ),
    Judged(
      HOLDS if is_near and near else IN_PART if is_near else NOT,
      f"The matrix alone is at {share:.2f} of it; whole steps with attention at a context of "
      f"{CONTEXT}: {said}. Keys and values are read by one row alone, so batching does not help "
      f"them; fewer kv heads do.",
    ),
  ]


def make_intensity(bench: Bench) -> Found:
  limit = A100.ridge_flop_per_byte
  matrix = {n: matrix_flop_per_byte(n, HIDDEN, HIDDEN) for n in TOKENS}
  rows: list[tuple[Any, ...]] = [("matrix 4096 x 4096", n, value) for n, value in matrix.items()]
  series = [Series("one matrix, 4096 x 4096", list(matrix.items()), "peer", 6)]
  steps, shares, crossings = [], {}, {}
  for colour, name in enumerate(("llama2-7b", LLAMA)):
    model = MODELS[name]

    def linear(n: int, model=model) -> float:
      return flop_per_byte(step_of(rows=n, context=1), model, kinds=("linear",))

    crossings[name] = crossing(linear, limit, 8192)
    prefill = [(n, flop_per_byte(step_of(chunk_tokens=n), model)) for n in TOKENS]
    steps.append(Series(f"{name}, prompts of so many tokens", prefill, "ours", colour))
    rows += [(f"{name} prefill", n, value) for n, value in prefill]
    for context, source in ((1024, "long"), (8192, "peer")):
      decode = [(n, flop_per_byte(step_of(rows=n, context=context), model)) for n in ROWS]
      steps.append(Series(f"{name}, decodes behind {context}", decode, source, colour))
      rows += [(f"{name} decode behind {context}", n, value) for n, value in decode]
      if context == CONTEXT:
        shares[name] = dict(decode)[32] / limit
    series.append(Series(f"{name}, all matrices", [(n, linear(n)) for n in TOKENS], "ours", colour))
  panels = [
    Panel(title, "tokens or rows in a step", "FLOP per byte", own, {"ridge of an A100": limit},
          is_log_x=True, is_log_y=True, ylim=(0.8, 3e5))
    for title, own in (("Matrices", series), ("Whole steps", steps))
  ]  # fmt: skip
  said = ", ".join(f"{n} tokens ({name})" for name, n in crossings.items())
  return Found(
    columns=("what", "tokens or rows", "flop_per_byte"),
    rows=rows,
    judged=judge_intensity(matrix[1], matrix[2048], matrix[32] / limit, shares),
    compared=[Compared("32 rows, of the ridge", 0.2, matrix[32] / limit)],
    draw=lambda path: draw(panels, path, "Arithmetic intensity, 16-bit"),
    notes=(f"All matrices of a step together reach the A100's ridge at {said}.",),
  )


# KV caches ----------------------------------------------------------------------------------------

PROMPT = 2048
KV_BYTES = {LLAMA: 270e6, "llama3-70b": 670e6}
KV_DEVICES = {LLAMA: 1, "llama3-70b": 4}  # of a prefill pool
KV_LINKS = ("10gbe", "25gbe", "100gbe", "hdr200", "nvlink")


def judge_kv(kv_bytes: Mapping[str, float], shares: Mapping[str, float]):
  """Bytes within 2 % of the published; copies below a tenth of the prefill."""
  off = max(abs(kv_bytes[model] / KV_BYTES[model] - 1) for model in KV_BYTES)
  worst = max(shares.values())
  said = ", ".join(f"{share:.1%} of it ({model})" for model, share in shares.items())
  return [
    Judged(
      HOLDS if off < 0.02 else NOT,
      ", ".join(f"{model} {b / 1e6:.0f} MB" for model, b in kv_bytes.items()) + ".",
    ),
    Judged(
      HOLDS if worst < 0.1 else IN_PART if worst < 1 else NOT,
      f"Over 200 Gbit/s it takes {said}.",
    ),
  ]


def make_kv(bench: Bench) -> Found:
  rows, shares, series = [], {}, []
  kv_bytes = {model: PROMPT * MODELS[model].kv_bytes_per_token() for model in KV_BYTES}
  for colour, (model, tp) in enumerate(KV_DEVICES.items()):
    for link in KV_LINKS:
      points = []
      for n in (128, 256, 512, 1024, 2048, 4096, 8192):
        prefill_s = profile_of(model, "a100", tp=tp, chunk_tokens=n).step_s
        # One way, as between two nodes: what its tp devices send shares it.
        copy_s = LINKS[link].copy_s(n * MODELS[model].kv_bytes_per_token())
        rows.append((model, tp, link, n, prefill_s, copy_s, copy_s / prefill_s))
        points.append((n, copy_s / prefill_s))
        if (link, n) == ("hdr200", PROMPT):
          shares[model] = copy_s / prefill_s
      if link in ("10gbe", "hdr200"):
        source = "ours" if link == "hdr200" else "long"
        series.append(Series(f"{model} on {tp} A100, {link}", points, source, colour))
  bars = Bars(
    f"KV cache of {PROMPT:,} tokens",
    "MB",
    ("16-bit",),
    {model: (b / 1e6,) for model, b in kv_bytes.items()},
    published={(model, "16-bit"): b / 1e6 for model, b in KV_BYTES.items()},
  )
  panel = Panel(
    "Copy over prefill", "prompt tokens", "copy time / prefill time", series,
    {"as long as the prefill": 1.0}, is_log_x=True, is_log_y=True,
  )  # fmt: skip
  return Found(
    columns=("model", "a100s", "link", "prompt tokens", "prefill_s", "copy_s", "share"),
    rows=rows,
    judged=judge_kv(kv_bytes, shares),
    compared=[
      Compared(f"{model}, {PROMPT:,} tokens", b / 1e6, kv_bytes[model] / 1e6, "MB")
      for model, b in KV_BYTES.items()
    ],
    draw=lambda path: draw([bars, panel], path, "Hand-offs"),
    notes=("Over one link, which the devices of a pool share; whole, not streamed.",),
  )


# Utilisation --------------------------------------------------------------------------------------

FEW_ROWS = 64


def judge_utilisation(prefill: Mapping[str, float], decode: Mapping[str, Mapping[int, float]]):
  """MFU of the best prefill step on any device, and of decode steps by rows: below a fifth for all
  of them holds, up to `FEW_ROWS` on some device in part.
  """
  most = max(prefill.values())
  said = ", ".join(f"{name} {mfu:.0%}" for name, mfu in prefill.items())
  few = {name: max(mfu for n, mfu in own.items() if n <= FEW_ROWS) for name, own in decode.items()}
  every = {name: max(own.values()) for name, own in decode.items()}
  decodes, more = (
    ", ".join(f"{name} {mfu:.0%}" for name, mfu in own.items()) for own in (few, every)
  )
  return [
    Judged(
      HOLDS if most > 0.9 else IN_PART if most > 0.8 else NOT,
      f"The best prefill step of up to 8,192 tokens has an MFU of {said}. Matrices alone were "
      f"measured at 70 to 94 % of the peak; attention, elementwise operators and launches take the "
      f"rest. A GPU that is busy all the time may show more than that.",
    ),
    Judged(
      HOLDS if max(every.values()) < 0.2 else IN_PART if min(few.values()) < 0.2 else NOT,
      f"Decode steps of up to {FEW_ROWS} rows at a context of {CONTEXT}: at most {decodes}; of up "
      f"to {max(n for own in decode.values() for n in own)}: {more}.",
    ),
  ]


def make_utilisation(bench: Bench) -> Found:
  rows, prefill, decode = [], {}, {}
  mfus: list[Series] = []
  mbus: list[Series] = []
  for colour, hardware in enumerate(("a100", "a100-vllm", "h100")):
    steps = {
      "prefill": {n: profile_of(LLAMA, hardware, chunk_tokens=n) for n in TOKENS},
      "decode": {n: profile_of(LLAMA, hardware, rows=n, context=CONTEXT) for n in ROWS},
    }
    for phase, own in steps.items():
      rows += [(hardware, phase, n, p.mfu, p.mbu, p.step_s) for n, p in own.items()]
    prefill[hardware] = max(p.mfu for p in steps["prefill"].values())
    decode[hardware] = {n: p.mfu for n, p in steps["decode"].items()}
    for series, metric in ((mfus, "mfu"), (mbus, "mbu")):
      for phase, source in (("prefill", "ours"), ("decode", "long")):
        points = [(n, 100 * getattr(p, metric)) for n, p in steps[phase].items()]
        series.append(Series(f"{phase}, {hardware}", points, source, colour))
  panels = [
    Panel("MFU", "tokens or rows in a step", "% of peak FLOP/s", mfus,
          {"90 %": 90, "20 %": 20}, is_log_x=True, ylim=(0, 100)),
    Panel("MBU", "tokens or rows in a step", "% of peak bytes/s", mbus,
          is_log_x=True, ylim=(0, 100)),
  ]  # fmt: skip
  return Found(
    columns=("hardware", "phase", "tokens or rows", "mfu", "mbu", "step_s"),
    rows=rows,
    judged=judge_utilisation(prefill, decode),
    draw=lambda path: draw(panels, path, f"{LLAMA}: what a step makes of the device"),
    notes=(
      "a100 has the kernels of 2024 and its host time, a100-vllm those of 2026, h100 no host time.",
    ),
  )


FIGURES = (
  Figure(
    name="seed/ridge",
    title="The ridge of an A100, and on which side of it both phases are",
    kind="analytic",
    claims=(
      "An A100 balances at 153 FLOP per byte.",
      "Prefill is above that, limited by arithmetic, and decode below, limited by memory.",
    ),
    make=make_ridge,
  ),
  Figure(
    name="seed/intensity",
    title="Arithmetic intensity of both phases at a hidden size of 4,096",
    kind="analytic",
    claims=(
      "A decode of one row does about an operation a byte, a prompt hundreds.",
      "At a batch of 32 a decode is near a fifth of the ridge.",
    ),
    make=make_intensity,
  ),
  Figure(
    name="seed/kv",
    title="KV caches of 2,048 tokens, and what their copies take",
    kind="analytic",
    claims=(
      "They have 270 MB (8B) and 670 MB (70B).",
      "Over 200 Gbit/s a copy takes a small part of the prefill.",
    ),
    make=make_kv,
  ),
  Figure(
    name="seed/utilisation",
    title="Compute utilisation of prefill and decode steps",
    kind="analytic",
    claims=(
      "Prefill steps use over 90 % of the arithmetic.",
      "Decode steps use under 20 %.",
    ),
    make=make_utilisation,
  ),
  *seed_serving.FIGURES,
  *seed_headlines.FIGURES,
)
