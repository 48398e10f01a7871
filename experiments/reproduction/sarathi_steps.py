"""Sarathi-Serve's figures about the operators of a step: by latency models and closed forms.

Step times are those of the A100's fit to measured operators of Llama-2-7B (`configs/hardware.py`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

from configs.hardware import HARDWARE
from configs.models import MODELS
from experiments.figures.reproduction import Bars, Panel, Series, draw
from experiments.reproduction import published_sarathi as published
from experiments.reproduction.bench import Bench
from experiments.reproduction.figure import (
  HOLDS,
  IN_PART,
  NOT,
  Compared,
  Figure,
  Found,
  Judged,
)
from experiments.reproduction.sarathi_systems import (
  NEAR,
  decode_terms,
  judged_share,
  latency_of,
  ms,
  prefill_terms,
)
from experiments.validation.measured import vidur_layers
from pdjax.core.costs import StepCounts, shard_of, step_costs
from pdjax.sim.latency_model import StepTerms

GROWS = 2.0  # times as much: a curve that grows
FLAT = 1.3  # times as much: a curve that does not
JUMP = 1.12  # between neighbours: what chance does not explain
NEAR_PERCENT = 10.0  # of measured points
MATRICES = ("qkv", "attn_out", "mlp_up", "mlp_down")
LINEAR_TOKENS = (1, 32, 64, 128, 256, 264, 512, 1024, 2048, 4096)


# Figure 3 -----------------------------------------------------------------------------------------


def fig3(bench: Bench) -> Found:
  latency, prompt = latency_of("mistral-7b", "a100"), 1024
  batches = (1, 8, 64) if bench.quick else (1, 2, 4, 8, 16, 32, 64)
  prefill = {
    n: n * prompt / prefill_terms(latency, prompt, batch=n).total_s for n in batches if n <= 8
  }
  decode = {n: n / decode_terms(latency, n, prompt).total_s for n in batches}
  growth = {"prefill": prefill[8] / prefill[1], "decode": decode[64] / decode[1]}
  rows = [("prefill", n, rate) for n, rate in prefill.items()]
  rows += [("decode", n, rate) for n, rate in decode.items()]

  def both(ours, read, label) -> list[Series]:
    return [
      Series(f"{label}, ours", list(ours.items())),
      Series("published, read", list(read.items()), "read"),
    ]

  return Found(
    columns=("phase", "batch", "tokens_per_s"),
    rows=rows,
    judged=[
      Judged(
        HOLDS if growth["prefill"] <= FLAT else NOT,
        f"From a batch of 1 to one of 8 it grows {growth['prefill']:.2f}x (at most {FLAT}).",
      ),
      Judged(
        HOLDS if growth["decode"] >= 16 else IN_PART if growth["decode"] >= GROWS else NOT,
        f"From 1 to 64 it grows {growth['decode']:.0f}x (16 asked), "
        f"{published.FIG3_DECODE[64] / published.FIG3_DECODE[1]:.0f}x by the plot.",
      ),
    ],
    compared=[
      *(Compared(f"prefill, batch {n}", rate, prefill[n], "tokens/s", True)
        for n, rate in published.FIG3_PREFILL.items()),
      *(Compared(f"decode, batch {n}", rate, decode[n], "tokens/s", True)
        for n, rate in published.FIG3_DECODE.items()),
    ],
    draw=lambda path: draw(
      [
        Panel("Prefill, prompts of 1,024", "batch", "tokens/s",
              both(prefill, published.FIG3_PREFILL, "prefill"), is_log_x=True, ylim=(0, None)),
        Panel("Decode at 1,024 tokens", "batch", "tokens/s",
              both(decode, published.FIG3_DECODE, "decode"), is_log_x=True, ylim=(0, None)),
      ],
      path,
      "Sarathi-Serve, figure 3: Mistral-7B on an A100 (analytic)",
    ),
    notes=[
      "Rates read off this plot are a third of ours, and of those of figure 4, where a prompt of "
      f"2,048 tokens takes {published.FIG4_PREFILL_MS[2048]:.0f} ms "
      f"({2048e3 / published.FIG4_PREFILL_MS[2048]:,.0f} tokens/s) and 64 decodes "
      f"{published.FIG4_DECODE_MS[64]:.0f} ms ({64e3 / published.FIG4_DECODE_MS[64]:,.0f}): the "
      "plot has two scales, and which of them was read is not known.",
    ],
  )  # fmt: skip


# Figure 4 -----------------------------------------------------------------------------------------


def _parts_ms(terms: StepTerms) -> tuple[float, float, float]:
  """Linear operators, attention, others."""
  attention_s = terms.attention_prefill_s + terms.attention_decode_s
  others_s = terms.total_s - terms.linear_s - attention_s
  return ms(terms.linear_s), ms(attention_s), ms(others_s)


def fig4(bench: Bench) -> Found:
  latency = latency_of("mistral-7b", "a100")
  prefill = {n: _parts_ms(prefill_terms(latency, n)) for n in (128, 256, 512, 1024, 2048)}
  decode = {n: _parts_ms(decode_terms(latency, n, 1024)) for n in (1, 8, 16, 32, 64)}
  shares = {f"prompt of {n}": parts[0] / sum(parts) for n, parts in prefill.items()}
  linear = decode[1][0] / prefill[128][0]
  one_ms, many_ms = published.FIG4_LINEAR_MS.values()
  theirs = one_ms / many_ms
  least = min(shares, key=shares.get)
  names = ("linear", "attention", "others")
  return Found(
    columns=("phase", "tokens_or_batch", "linear_ms", "attention_ms", "others_ms"),
    rows=[
      *(("prefill", n, *parts) for n, parts in prefill.items()),
      *(("decode", n, *parts) for n, parts in decode.items()),
    ],
    judged=[
      judged_share(
        {name: share >= published.FIG4_LINEAR_SHARE for name, share in shares.items()},
        f"The least is {shares[least]:.0%}, of the {least}; host time of "
        f"{ms(latency.device.fit.host_s):.1f} ms a step weighs on the shortest",
      ),
      Judged(
        HOLDS if linear >= NEAR * theirs else IN_PART if linear >= 0.5 else NOT,
        f"{decode[1][0]:.1f} ms for one token, {prefill[128][0]:.1f} ms for 128: {linear:.0%}, "
        f"and {theirs:.0%} read off the plot, of which {NEAR:.0%} is asked.",
      ),
    ],
    compared=[
      *(Compared(f"prefill of {n}", ms, sum(prefill[n]), "ms", True)
        for n, ms in published.FIG4_PREFILL_MS.items()),
      *(Compared(f"decode of {n}", ms, sum(decode[n]), "ms", True)
        for n, ms in published.FIG4_DECODE_MS.items()),
    ],
    draw=lambda path: draw(
      [
        Bars("Prefill by prompt tokens", "ms", names, {str(n): p for n, p in prefill.items()},
             is_stacked=True),
        Bars("Decode at 1,024 tokens by batch", "ms", names,
             {str(n): p for n, p in decode.items()}, is_stacked=True),
      ],
      path,
      "Sarathi-Serve, figure 4: Mistral-7B on an A100 (analytic)",
    ),
    notes=["The published bars were read off the plot; only their sums, at both ends."],
  )  # fmt: skip


# Figure 5 -----------------------------------------------------------------------------------------


def intensity(num_tokens: int, tp: int) -> float:
  """FLOP per byte of LLaMA2-70B's matrices on one of `tp` devices."""
  ops = step_costs(StepCounts(num_prefill_tokens=num_tokens), shard_of(MODELS["llama2-70b"], tp))
  own = [op for op in ops if op.name in MATRICES]
  return sum(op.flops for op in own) / sum(op.num_bytes for op in own)


def _balance_tokens(ridge: float, tp: int) -> int:
  """The fewest tokens at which matrices are limited by arithmetic."""
  return next(n for n in range(1, 1 << 16) if intensity(n, tp) >= ridge)


def fig5(bench: Bench) -> Found:
  device, tp = HARDWARE["a100"], 4
  fit = device.fit
  peak = device.ridge_flop_per_byte
  achieved = peak * fit.gemm_compute / fit.gemm_memory
  tokens = [2**i for i in range(13)]
  balance = _balance_tokens(peak, tp)
  ours = {name: intensity(n, tp) for name, (n, _) in published.FIG5_MARKS.items()}
  saturated = _saturated_tokens()
  return Found(
    columns=("tokens", "flop_per_byte"),
    rows=[(n, intensity(n, tp)) for n in tokens],
    judged=[
      Judged(
        HOLDS if ours["decode"] < achieved / 2 and ours["prefill"] > peak else NOT,
        f"A decode step of 30 rows has {ours['decode']:.0f} FLOP/byte, prompts of 1,000 tokens "
        f"{ours['prefill']:.0f}; the peaks balance at {peak:.0f}, what kernels reach at "
        f"{achieved:.0f}.",
      ),
      Judged(
        IN_PART if balance < 400 <= saturated else HOLDS if balance >= 400 else NOT,
        f"By the peaks they balance at {balance} tokens, not 500 to 600. Times per token stop "
        f"falling near {saturated} tokens (within 10 % of the least), where loads of weights no "
        f"longer show: saturation in that sense is what the plot marks.",
      ),
    ],
    compared=[
      Compared(f"{name}, {n} tokens", mark, ours[name], "FLOP/byte", True)
      for name, (n, mark) in published.FIG5_MARKS.items()
    ],
    draw=lambda path: draw(
      [
        Panel(
          "LLaMA2-70B's matrices, TP 4",
          "tokens in the step",
          "FLOP/byte",
          [
            Series("ours", [(n, intensity(n, tp)) for n in tokens]),
            Series("published, read", list(published.FIG5_MARKS.values()), "read"),
          ],
          lines={
            f"ridge of the peaks, {peak:.0f}": peak,
            f"ridge of what is reached, {achieved:.0f}": achieved,
          },
          is_log_x=True,
          is_log_y=True,
        )
      ],
      path,
      "Sarathi-Serve, figure 5: arithmetic intensity (analytic)",
    ),
  )


def _saturated_tokens() -> int:
  """The fewest tokens whose matrices take at most 10 % more a token than the cheapest (TP 4)."""
  each_s = {n: _linear_ms(n, 4) / n for n in range(32, 4097, 32)}
  least_s = min(each_s.values())
  return next(n for n, s in each_s.items() if s <= 1.1 * least_s)


# Figure 6 -----------------------------------------------------------------------------------------


def _linear_ms(num_tokens: int, tp: int) -> float:
  counts = StepCounts(num_prefill_tokens=num_tokens)
  return ms(latency_of("llama2-70b", "a100", tp).terms_of(counts).linear_s)


@functools.cache
def _measured_ms(path, tp: int) -> dict[int, float]:
  """The four products of all layers by tokens, from Vidur's file."""
  model = MODELS["llama2-70b"]
  tables = vidur_layers(path, model, tp)["linear"].values()
  tokens = sorted(set.intersection(*map(set, tables)))
  return {n: ms(model.num_layers * sum(table[n] for table in tables)) for n in tokens}


def fig6(bench: Bench) -> Found:
  path = bench.data_dir / "measured" / "vidur" / "mlp_a100_Llama-2-70b-hf.csv"
  splits = (2, 4)
  has_file = path.is_file()
  measured = {
    tp: _measured_ms(path, tp) if has_file else published.FIG6_VIDUR_MS[tp] for tp in splits
  }
  errors = {
    f"TP{tp} at {n}": 100 * (_linear_ms(n, tp) / measured[tp][n] - 1)
    for tp in splits
    for n in LINEAR_TOKENS
  }
  jump = {tp: measured[tp][264] / measured[tp][256] for tp in splits}
  grows = {tp: measured[tp][512] / measured[tp][128] for tp in splits}
  steps = [n for n, ms in _jumps(measured[2])]
  on_tiles = [n for n in steps if n % 128 == 0]

  def panel(tp: int) -> Panel:
    return Panel(
      f"TP{tp}",
      "tokens",
      "ms, four products of 80 layers",
      [
        Series("fitted roofline", [(n, _linear_ms(n, tp)) for n in sorted(measured[tp])]),
        Series("operators as measured (Vidur)", list(measured[tp].items()), "long", 1),
        Series("published, read", list(published.FIG6_READ_MS[tp].items()), "read", 2),
      ],
      is_log_x=True,
      is_log_y=True,
    )

  zoom = Panel(
    "The tile jump",
    "tokens",
    "ms a token, TP2",
    [
      Series("fitted roofline", [(n, _linear_ms(n, 2) / n) for n in measured[2] if 128 <= n < 800]),
      Series("operators as measured (Vidur)",
             [(n, ms / n) for n, ms in measured[2].items() if 128 <= n < 800], "long", 1),
    ],
  )  # fmt: skip
  return Found(
    columns=("tp", "tokens", "measured_ms", "roofline_ms"),
    rows=[
      (tp, n, measured[tp][n], _linear_ms(n, tp)) for tp in splits for n in sorted(measured[tp])
    ],
    judged=[
      Judged(
        HOLDS if max(grows.values()) <= FLAT else NOT,
        f"From 128 to 512 tokens the measured operators take {grows[2]:.1f}x (TP2) and "
        f"{grows[4]:.1f}x (TP4) as long; they are flat (within {FLAT}x) to 64 tokens alone.",
      ),
      Judged(
        HOLDS if abs(jump[2] / published.TILE_JUMP - 1) <= 0.1 else IN_PART if jump[2] >= JUMP
        else NOT,
        f"From 256 to 264 tokens {100 * (jump[2] - 1):.0f} % (TP2) and {100 * (jump[4] - 1):.0f} % "
        f"(TP4) in the measured operators; {len(on_tiles)} of the {len(steps)} jumps above "
        f"{100 * (JUMP - 1):.0f} % come right after a multiple of 128. The roofline is smooth and "
        f"has none of them.",
      ),
      judged_share(
        {name: abs(error) <= NEAR_PERCENT for name, error in errors.items()},
        f"Fitted to Llama-2-7B on one device, the roofline is within {NEAR_PERCENT:.0f} % of "
        f"LLaMA2-70B's operators, but around a tile's edge and at 4,096 tokens",
      ),
    ],
    compared=[
      Compared("time at 264 over 256 tokens, TP2", published.TILE_JUMP, jump[2]),
      *(Compared(f"TP{tp} at {n}", ms, _linear_ms(n, tp), "ms")
        for tp in splits for n, ms in published.FIG6_VIDUR_MS[tp].items()),
      *(Compared(f"TP{tp} at {n}, plot", ms, measured[tp][n], "ms", True)
        for tp in splits for n, ms in published.FIG6_READ_MS[tp].items()),
    ],
    draw=lambda path: draw(
      [*map(panel, splits), zoom],
      path,
      "Sarathi-Serve, figure 6: linear operators of LLaMA2-70B on A100s (analytic)",
    ),
    notes=[
      "Beside the plot, whose points were read by eye, stand the medians that Vidur published of "
      "the same operators; the plot's TP2 points at 2,048 and 4,096 tokens are 15 to 25 % lower.",
      *([] if has_file else ["The file of these medians is not there: only ten sizes are shown."]),
    ],
  )  # fmt: skip


def _jumps(table: dict[int, float]) -> Iterator[tuple[int, float]]:
  """Sizes after which the time jumps within 8 tokens more."""
  for (n, own_ms), (more, more_ms) in itertools.pairwise(table.items()):
    if n >= 64 and more - n <= 8 and more_ms / own_ms > JUMP:
      yield n, more_ms / own_ms


FIGURES = (
  Figure(
    name="sarathi/fig3",
    title="Throughput of prefill and decode by batch, Mistral-7B",
    kind="analytic",
    claims=(
      "Prefill saturates the device with one prompt: more of them add next to nothing.",
      "Decode throughput grows nearly in proportion to the batch.",
    ),
    make=fig3,
  ),
  Figure(
    name="sarathi/fig4",
    title="Where the time of a step goes, Mistral-7B",
    kind="analytic",
    claims=(
      "Linear operators take more than 80 % of a prefill, whatever its length.",
      "The linear operators of one decode token take as long as those of 128 prompt tokens.",
    ),
    make=fig4,
  ),
  Figure(
    name="sarathi/fig5",
    title="Arithmetic intensity of LLaMA2-70B's linear operators",
    kind="analytic",
    claims=(
      "Decode steps are limited by memory, prefill by arithmetic.",
      "Steps of some 500 to 600 tokens balance both, which a chunk beside decodes reaches.",
    ),
    make=fig5,
  ),
  Figure(
    name="sarathi/fig6",
    title="Time of LLaMA2-70B's linear operators by tokens",
    kind="analytic",
    claims=(
      "The time is largely stagnant from 128 to 512 tokens.",
      "One token beyond a multiple of the tile costs a third more (256 to 257: 32 %).",
      "Our fitted step times follow the measured operators within 10 %.",
    ),
    make=fig6,
  ),
)
