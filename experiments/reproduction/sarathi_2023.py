"""SARATHI (2023): what chunks cost, and what it gains by the ratio of prompt to output."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping

from experiments.figures.reproduction import Panel, Series, draw
from experiments.reproduction import published_sarathi as published
from experiments.reproduction import reduce
from experiments.reproduction.bench import Bench, Point
from experiments.reproduction.figure import HOLDS, IN_PART, NOT, Compared, Figure, Found, Judged
from experiments.reproduction.sarathi_systems import (
  FOLDER,
  NEAR,
  chunked_s,
  config_of,
  decode_terms,
  judged_share,
  latency_of,
  prefill_terms,
  with_strategy,
)
from pdjax.sim.latency_model import LatencyModel
from pdjax.workloads.lengths import Fixed

PROMPTS, SIZES = (1024, 2048, 3072), (64, 128, 256, 512)

# What chunks cost ---------------------------------------------------------------------------------


def _latency() -> LatencyModel:
  """The stand-ins: OPT-13B on an A40."""
  return latency_of("opt-13b", "a40")


def chunk_loss(prompt: int, size: int) -> float:
  """The share of a prefill's throughput that chunks of a size cost."""
  return 1 - prefill_terms(_latency(), prompt).total_s / chunked_s(_latency(), prompt, size)


def chunks_2023(bench: Bench) -> Found:
  latency = _latency()
  loss = {size: [chunk_loss(n, size) for n in PROMPTS] for size in SIZES}
  small = min(loss[64])
  limits = published.CHUNK_LOSS_2023
  alone = {n: decode_terms(latency, n, 1024).total_s / n for n in (1, 2, 18)}
  token_s = prefill_terms(latency, 1024).total_s / 1024
  return Found(
    columns=("chunk", *(f"loss_at_{n}" for n in PROMPTS)),
    rows=[(size, *loss[size]) for size in SIZES],
    judged=[
      judged_share(
        {f"chunks of {size}": max(loss[size]) <= most for size, most in limits.items()},
        f"Prefill loses at most {max(loss[256]):.0%} of its throughput in chunks of 256 and "
        f"{max(loss[512]):.0%} in chunks of 512: matrices of so few tokens reach less of the A40's "
        f"rate by its fit to Vidur's timings",
      ),
      Judged(
        HOLDS if small >= 0.3 else IN_PART if small >= 0.2 else NOT,
        f"Chunks of 64 lose {small:.0%} or more (30 % is harm): each reads all weights.",
      ),
      Judged(
        HOLDS if alone[1] / token_s >= 80 else IN_PART if alone[1] / token_s >= 40 else NOT,
        f"A decode token alone takes {alone[1] / token_s:.0f} times as long as a prompt's token, "
        f"{alone[2] / token_s:.0f} in a batch of 2 and {alone[18] / token_s:.0f} in one of 18; "
        f"published about 200, 100 and 16.7.",
      ),
    ],
    compared=[
      Compared(f"decode over prefill token, batch {n}", ratio, alone[n] / token_s, "x")
      for n, ratio in {1: 200.0, 2: 100.0, 18: 16.7}.items()
    ],
    draw=lambda path: draw(
      [
        Panel(
          "OPT-13B on an A40: stand-ins",
          "chunk (tokens)",
          "throughput lost",
          [
            Series(f"prompt of {n}", [(size, loss[size][i]) for size in SIZES], colour=i)
            for i, n in enumerate(PROMPTS)
          ]
          + [Series("published limits", list(limits.items()), "published", 3)],
          is_log_x=True,
          ylim=(0, None),
        )
      ],
      path,
      "SARATHI (2023): what chunks cost a prefill (analytic)",
    ),
    notes=[
      "Stand-ins: OPT-13B on an A40 for LLaMA-13B on an A6000 (matrices of the same size, the same "
      "die at 91 % of the memory's rate).",
    ],
  )


# What it gains ------------------------------------------------------------------------------------

CHUNK_2023, SUM_2023 = 256, 1024
ROWS_2023 = tuple(published.GAIN_2023)
RATIOS_2023 = (1, 2, 4, 8, 12, 14, 16, 24, 32, 50, 64)
BEFORE_2023 = {"faster_transformer": "prompts, then decodes", "orca": "Orca"}

Rates = Mapping[tuple[str, int, float], float]  # tokens a second by policy, sequences a step, P:D


def gains_2023(rates: Rates, rows: int, before: str) -> dict[float, float]:
  """Times as many tokens a second as another policy has, by P:D."""
  ratios = sorted({ratio for _, own, ratio in rates if own == rows})
  return {ratio: rates["chunked", rows, ratio] / rates[before, rows, ratio] for ratio in ratios}


def judge_2023(rates: Rates) -> list[Judged]:
  best, wanted = {}, {}
  for rows in ROWS_2023:
    gains = gains_2023(rates, rows, "faster_transformer")
    ratio = max(gains, key=gains.get)
    best[rows], wanted[rows] = (ratio, gains[ratio]), CHUNK_2023 / (rows - 1)
  peaks = {
    f"{rows} sequences": wanted[rows] / 2 <= ratio <= 2 * wanted[rows]
    for rows, (ratio, _) in best.items()
  }
  said = ", ".join(
    f"at {ratio:g} with {rows} sequences ({wanted[rows]:.0f} there)"
    for rows, (ratio, _) in best.items()
  )
  over_orca = gains_2023(rates, ROWS_2023[0], "orca")
  return [
    judged_share(peaks, f"The gain is largest {said}; within a factor of two holds"),
    judge_gains_2023({f"{rows} sequences": (gain, published.GAIN_2023[rows])
                      for rows, (_, gain) in best.items()}),
    judge_gains_2023({f"{ROWS_2023[0]} sequences, over Orca":
                      (max(over_orca.values()), over_orca_there())}),
  ]  # fmt: skip


def over_orca_there() -> float:
  """Both gains are published over prompts and decodes apart."""
  return published.GAIN_2023[ROWS_2023[0]] / published.ORCA_GAIN_2023


def judge_gains_2023(gains: Mapping[str, tuple[float, float]]) -> Judged:
  """Of (ours, published): held from `NEAR` of what the gain is above 1, in part from a tenth on."""
  said = ", ".join(
    f"{ours:.2f}x here, {theirs:.3g}x published ({name})" for name, (ours, theirs) in gains.items()
  )
  is_near = all(ours - 1 >= NEAR * (theirs - 1) for ours, theirs in gains.values())
  is_more = all(ours >= 1.1 for ours, _ in gains.values())
  return Judged(
    HOLDS if is_near else IN_PART if is_more else NOT,
    f"At best {said}: of what decodes save, chunks take back more here, where they cost a prefill "
    f"{chunk_loss(SUM_2023, CHUNK_2023):.0%} (sarathi/2023-chunks) and "
    f"{published.CHUNK_LOSS_2023[CHUNK_2023]:.0%} at most there.",
  )


def pd_2023(bench: Bench) -> Found:
  config, batches = config_of("pd_2023.py"), 4 if bench.quick else 10
  names, points = ("chunked", *BEFORE_2023), {}
  for rows, ratio in itertools.product(ROWS_2023, RATIOS_2023):
    output = max(2, round(SUM_2023 / (1 + ratio)))
    lengths = Fixed(prompt_tokens=SUM_2023 - output, output_tokens=output)
    for name in names:
      own = with_strategy(config, name, lengths=lengths, num_requests=batches * rows)
      own = dataclasses.replace(own, cache=dataclasses.replace(own.cache, num_rows=rows))
      points[name, rows, ratio] = Point(config=own, reduce=reduce.outpouring)
  runs = bench.run(points)
  rates = {key: batches * key[1] * SUM_2023 / run["end_s"] for key, run in runs.items()}
  gains = {
    (rows, words): gains_2023(rates, rows, name)
    for rows in ROWS_2023
    for name, words in BEFORE_2023.items()
  }
  apart = BEFORE_2023["faster_transformer"]

  def panel(rows: int) -> Panel:
    marks = [(CHUNK_2023 / (rows - 1), published.GAIN_2023[rows])]
    lines = {}
    if rows == ROWS_2023[0]:
      lines = {f"over Orca at its best, published, {over_orca_there():.2f}": over_orca_there()}
    return Panel(
      f"{rows} sequences; OPT-13B on an A40: stand-ins",
      "prompt over output tokens (P:D)",
      "throughput, times the other's",
      [
        *(Series(f"over {words}", list(gains[rows, words].items()), colour=i)
          for i, words in enumerate(BEFORE_2023.values())),
        Series(f"over {apart}, published", marks, "published", 0),
      ],
      lines=lines,
      is_log_x=True,
    )  # fmt: skip

  return Found(
    columns=("sequences_a_step", "prompt_over_output", *(f"{name}_tokens_per_s" for name in names)),
    rows=[
      (rows, ratio, *(rates[name, rows, ratio] for name in names))
      for rows, ratio in itertools.product(ROWS_2023, RATIOS_2023)
    ],
    judged=judge_2023(rates),
    compared=[
      *(Compared(f"gain over {apart}, {rows} sequences", there, max(gains[rows, apart].values()),
                 "x")
        for rows, there in published.GAIN_2023.items()),
      Compared(f"gain over Orca at its best, {ROWS_2023[0]} sequences", over_orca_there(),
               max(gains[ROWS_2023[0], "Orca"].values()), "x"),
    ],
    draw=lambda path: draw(
      [panel(rows) for rows in ROWS_2023],
      path,
      "SARATHI (2023): chunks that carry decodes, by P:D (simulated)",
    ),
    notes=[
      f"Stand-ins: OPT-13B on an A40 for LLaMA-13B on an A6000. {batches} requests a sequence, of "
      f"{SUM_2023} tokens each, all at once; chunks within {CHUNK_2023} tokens.",
      "Orca here takes all prompts that have come into its first step, so its requests then run in "
      "phase, which the paper calls its worst case; its best case has them out of phase.",
    ],
  )  # fmt: skip


FIGURES = (
  Figure(
    name="sarathi/2023-chunks",
    title="SARATHI 2023: what chunks cost a prefill",
    kind="analytic",
    claims=(
      "Chunks of 256 cost a prefill 20 % of its throughput at most, chunks of 512 10 %.",
      "Chunks of 64 tokens are harmful.",
      "A decode token alone takes some 200 times as long as a prompt's token.",
    ),
    make=chunks_2023,
  ),
  Figure(
    name="sarathi/2023-pd",
    title="SARATHI 2023: gain by the ratio of prompt to output",
    kind="simulated",
    claims=(
      "The gain is largest where chunks and decodes run out together, P:D = C / (B - 1).",
      "It is 1.27 times over prompts and decodes in turn with 18 sequences a step, 1.33 with 6.",
      "With 18 it is 1.14 times over Orca at its best, which is 1.11 times over the same.",
    ),
    make=pd_2023,
    configs=(f"{FOLDER}/pd_2023.py",),
  ),
)
