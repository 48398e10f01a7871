"""SARATHI (2023): what chunks cost, and what it gains by the ratio of prompt to output."""

from __future__ import annotations

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

CHUNK_2023, ROWS_2023, SUM_2023 = 256, 18, 1024
RATIOS_2023 = (1, 2, 4, 8, 12, 16, 24, 32, 64)
BEFORE_2023 = {"faster_transformer": "prompts, then decodes", "orca": "Orca"}

Rates = Mapping[tuple[str, float], float]  # tokens a second by policy, P:D


def judge_2023(rates: Rates) -> list[Judged]:
  ratios = sorted({ratio for _, ratio in rates})
  gains = {
    name: {ratio: rates["chunked", ratio] / rates[name, ratio] for ratio in ratios}
    for name in BEFORE_2023
  }
  first = gains["faster_transformer"]
  best = max(first, key=first.get)
  wanted = CHUNK_2023 / (ROWS_2023 - 1)
  return [
    Judged(
      HOLDS if wanted / 2 <= best <= 2 * wanted else NOT,
      f"The gain is largest at a ratio of {best:g} ({first[best]:.2f}x); chunks and decodes run "
      f"out together at {wanted:.0f}, and within a factor of two holds.",
    ),
    judge_gain_2023(first[best], published.GAIN_2023),
    judge_gain_2023(max(gains["orca"].values()), published.GAIN_OVER_ORCA_2023[0]),
  ]


def judge_gain_2023(ours: float, theirs: float) -> Judged:
  """Held from `NEAR` of what the gain is above 1, in part from a tenth on."""
  verdict = HOLDS if ours - 1 >= NEAR * (theirs - 1) else IN_PART if ours >= 1.1 else NOT
  return Judged(
    verdict,
    f"At best {ours:.2f}x here, {theirs:g}x published: of what decodes save, chunks take back more "
    f"here, where they cost a prefill {chunk_loss(SUM_2023, CHUNK_2023):.0%} (sarathi/2023-chunks) "
    f"and {published.CHUNK_LOSS_2023[CHUNK_2023]:.0%} at most there.",
  )


def pd_2023(bench: Bench) -> Found:
  config, num_requests = config_of("pd_2023.py"), ROWS_2023 * (4 if bench.quick else 10)
  points = {}
  for ratio in RATIOS_2023:
    output = max(2, round(SUM_2023 / (1 + ratio)))
    lengths = Fixed(prompt_tokens=SUM_2023 - output, output_tokens=output)
    for name in ("chunked", *BEFORE_2023):
      own = with_strategy(config, name, lengths=lengths, num_requests=num_requests)
      points[name, ratio] = Point(config=own, reduce=reduce.outpouring)
  runs = bench.run(points)
  rates = {key: num_requests * SUM_2023 / run["end_s"] for key, run in runs.items()}
  gains = {
    words: [(ratio, rates["chunked", ratio] / rates[name, ratio]) for ratio in RATIOS_2023]
    for name, words in BEFORE_2023.items()
  }
  return Found(
    columns=("prompt_over_output", *(f"{name}_tokens_per_s" for name in ("chunked", *BEFORE_2023))),
    rows=[
      (ratio, *(rates[name, ratio] for name in ("chunked", *BEFORE_2023))) for ratio in RATIOS_2023
    ],
    judged=judge_2023(rates),
    compared=[
      Compared("gain over prompts, then decodes", published.GAIN_2023,
               max(gain for _, gain in gains["prompts, then decodes"]), "x"),
      Compared("gain over Orca at its best", published.GAIN_OVER_ORCA_2023[1],
               max(gain for _, gain in gains["Orca"]), "x"),
    ],
    draw=lambda path: draw(
      [
        Panel(
          "OPT-13B on an A40: stand-ins",
          "prompt over output tokens (P:D)",
          "throughput, times the other's",
          [Series(f"over {words}", own, colour=i) for i, (words, own) in enumerate(gains.items())],
          lines={
            f"published at best, {published.GAIN_2023:g}": published.GAIN_2023,
            f"over Orca, {published.GAIN_OVER_ORCA_2023[1]:g}": published.GAIN_OVER_ORCA_2023[1],
          },
          is_log_x=True,
        )
      ],
      path,
      "SARATHI (2023): chunks that carry decodes, by P:D (simulated)",
    ),
    notes=[
      f"Stand-ins: OPT-13B on an A40 for LLaMA-13B on an A6000. {num_requests} requests of "
      f"{SUM_2023} tokens at once, {ROWS_2023} a step, chunks within {CHUNK_2023} tokens.",
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
      "It is up to 1.33 times over prompts and decodes in turn.",
      "It is 1.23 to 1.27 times over Orca at its best.",
    ),
    make=pd_2023,
    configs=(f"{FOLDER}/pd_2023.py",),
  ),
)
