"""The mechanisms of Sarathi-Serve and DistServe on running code, at this machine's scale.

Here are the figures about single steps, of SmolLM2 at an eighth of the papers' lengths;
`engine_serving.py` has those about requests that are served.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping, Sequence

from experiments.figures.reproduction import Bars, Panel, Series, draw
from experiments.reproduction import engine_serving, published_distserve, published_sarathi
from experiments.reproduction.bench import Bench
from experiments.reproduction.engine_steps import (
  SCALE,
  Engine,
  Probe,
  at_least,
  at_most,
  open_engine,
)
from experiments.reproduction.figure import HOLDS, IN_PART, NOT, Compared, Figure, Found, Judged

Pairs = Sequence[tuple[float, float]]


def _notes(engine: Engine, bench: Bench, *more: str) -> list[str]:
  notes = [f"Measured here: {engine.label}.", *more]
  if bench.quick:
    notes.append("Fewer points, by --quick.")
  return notes


def _drawn(panels: Sequence[Panel | Bars], title: str) -> Callable[[pathlib.Path], None]:
  return lambda path: draw(panels, path, f"{title} (engine, SmolLM2-135M)")


def _growth(points: Pairs) -> list[tuple[float, float]]:
  """Over the first."""
  return [(x, y / points[0][1]) for x, y in points]


# Throughput over the batch ------------------------------------------------------------------------

THROUGHPUT_COLUMNS = ("step", "input_tokens", "batch", "tokens_per_s", "roofline_tokens_per_s")
Curves = Mapping[tuple[str, int], Pairs]
"""Tokens/s by batch of each kind of step and each input length."""


def _throughputs(bench: Bench, inputs: Sequence[int]) -> tuple[Curves, Curves]:
  """What is measured, and what this machine's roofline says."""
  engine = bench.once(open_engine)
  prefill_batches = (1, 2) if bench.quick else (1, 2, 4, 8)
  decode_batches = (1, 8, 32) if bench.quick else (1, 2, 4, 8, 16, 32)
  steps = {("prefill", n): [(b, n * b, Probe(prefills=(n,) * b)) for b in prefill_batches]
           for n in inputs}  # fmt: skip
  steps |= {("decode", n): [(b, b, Probe(decodes=b, context=n)) for b in decode_batches]
            for n in inputs}  # fmt: skip
  took_s = engine.times_s([probe for own in steps.values() for _, _, probe in own], bench.show)
  return tuple(
    {key: [(batch, tokens / time_s(probe)) for batch, tokens, probe in own]
     for key, own in steps.items()}
    for time_s in (took_s.__getitem__, engine.roofline_s)
  )  # fmt: skip


def _throughput_rows(measured: Curves, roofline: Curves) -> list[tuple]:
  return [
    (*key, batch, per_s, most_per_s)
    for key, points in measured.items()
    for (batch, per_s), (_, most_per_s) in zip(points, roofline[key])
  ]


def _prefill_claim(points: Pairs, tokens: int) -> Judged:
  gain = max(per_s for _, per_s in points) / points[0][1]
  return at_most(
    gain,
    1.3,
    1.7,
    f"Of prompts of {tokens} tokens one gives {points[0][1]:.0f} tokens/s, several at best "
    f"{gain:.2f} times as many.",
  )


def _decode_claim(points: Pairs, engine: Engine) -> Judged:
  """Of linear growth the share that is reached at the largest batch."""
  batch, growth = _growth(points)[-1]
  return at_least(
    growth / batch,
    0.5,
    2 / batch,
    f"{batch} rows give {growth:.1f} times the tokens/s of one, {growth / batch:.2f} of linear: "
    f"arithmetic outweighs reading the weights from {engine.rates.ridge_tokens:.0f} rows on here, "
    f"from 153 on an A100.",
  )


def sarathi_fig3(bench: Bench) -> Found:
  engine, tokens = bench.once(open_engine), 1024 // SCALE
  measured, roofline = _throughputs(bench, [tokens])
  panels = []
  for kind, read in (
    ("prefill", published_sarathi.FIG3_PREFILL),
    ("decode", published_sarathi.FIG3_DECODE),
  ):
    ours = measured[kind, tokens]
    series = [
      Series(f"engine (1: {ours[0][1]:.0f} tokens/s)", _growth(ours)),
      Series("roofline of this machine", _growth(roofline[kind, tokens]), "peer", 2),
      Series("paper, Mistral-7B on an A100 (read)", _growth(list(read.items())), "read", 1),
    ]
    title = f"{kind}, prompts of {tokens} tokens (paper: 1,024)"
    panels.append(Panel(title, "batch", "tokens/s over batch 1", series, is_log_x=True,
                        is_log_y=kind == "decode"))  # fmt: skip
  return Found(
    columns=THROUGHPUT_COLUMNS,
    rows=_throughput_rows(measured, roofline),
    judged=[
      _prefill_claim(measured["prefill", tokens], tokens),
      _decode_claim(measured["decode", tokens], engine),
    ],
    draw=_drawn(panels, "Sarathi-Serve, Figure 3: throughput"),
    notes=_notes(engine, bench),
  )


def distserve_fig3(bench: Bench) -> Found:
  engine = bench.once(open_engine)
  inputs = (16, 128) if bench.quick else (16, 64, 128)
  measured, roofline = _throughputs(bench, inputs)
  panels, compared = [], []
  for kind, paper in (
    ("prefill", published_distserve.FIG3_PREFILL),
    ("decode", published_distserve.FIG3_DECODE),
  ):
    series = []
    for colour, n in enumerate((inputs[0], inputs[-1])):
      ours, theirs = _growth(measured[kind, n]), _growth(paper[n * SCALE])
      series += [
        Series(f"engine, input {n}", ours, colour=colour),
        Series(f"roofline, input {n}", _growth(roofline[kind, n]), "peer", colour),
        Series(f"paper, OPT-13B, input {n * SCALE}", theirs, "published", colour),
      ]
      batch, growth = ours[-1]
      what = f"{kind}, input {n} (paper {n * SCALE}), batch {batch} over 1"
      compared.append(Compared(what, dict(theirs)[batch], growth))
    panels.append(Panel(kind, "batch", "tokens/s over batch 1", series, is_log_x=True,
                        is_log_y=kind == "decode"))  # fmt: skip
  return Found(
    columns=THROUGHPUT_COLUMNS,
    rows=_throughput_rows(measured, roofline),
    judged=[
      _prefill_claim(measured["prefill", inputs[-1]], inputs[-1]),
      _decode_claim(measured["decode", inputs[0]], engine),
    ],
    compared=compared,
    draw=_drawn(panels, "DistServe, Figure 3: throughput"),
    notes=_notes(engine, bench),
  )


# Where the time of a step goes --------------------------------------------------------------------


def sarathi_fig4(bench: Bench) -> Found:
  engine, context = bench.once(open_engine), 1024 // SCALE
  lengths = (128, 256) if bench.quick else (64, 128, 256, 512, 1024)
  batches = (1, 8, 32) if bench.quick else (1, 2, 4, 8, 16, 32)
  steps = {("prefill", n): Probe(prefills=(n,)) for n in lengths}
  steps |= {("decode", n): Probe(decodes=n, context=context) for n in batches}
  took_s = engine.times_s(steps.values(), bench.show)
  linear_s = {}
  for kind, n in steps:
    bench.show(f"the matrices of the model alone: {n} tokens")
    linear_s[kind, n] = engine.linear_s(n, 1 if kind == "prefill" else n)
  rows = [
    (*key, took_s[probe] * 1e3, linear_s[key] * 1e3, engine.roofline_s(probe) * 1e3)
    for key, probe in steps.items()
  ]
  shares = {key: min(1.0, linear_s[key] / took_s[probe]) for key, probe in steps.items()}
  least = min(shares, key=shares.get)
  ratio = linear_s["prefill", 128] / linear_s["decode", 1]
  one_ms, many_ms = published_sarathi.FIG4_LINEAR_MS.values()
  panels = [
    Bars(
      title,
      "ms",
      ("linear operators alone", "attention and all else"),
      {
        f"{key[1]}": (linear_s[key] * 1e3, max(0.0, took_s[probe] - linear_s[key]) * 1e3)
        for key, probe in steps.items()
        if key[0] == wanted
      },
      is_stacked=True,
    )
    for wanted, title in (
      ("prefill", "a prefill, by its tokens"),
      ("decode", f"a decode step at context {context}, by its rows"),
    )
  ]
  return Found(
    columns=("step", "tokens", "step_ms", "linear_ms", "roofline_ms"),
    rows=rows,
    judged=[
      at_least(
        shares[least],
        0.8,
        0.6,
        f"The model's matrices alone take at least {shares[least]:.0%} of a step ({least[0]} of "
        f"{least[1]}), at most {max(shares.values()):.0%}.",
      ),
      at_most(
        ratio,
        1.5,
        3,
        f"Those of 128 prefill tokens take {ratio:.1f} times those of one decode, in the paper "
        f"{many_ms / one_ms:.2f} times: here arithmetic decides from "
        f"{engine.rates.ridge_tokens:.0f} tokens on.",
      ),
    ],
    compared=[
      Compared("linear operators, 128 tokens over 1", many_ms / one_ms, ratio, is_read=True)
    ],
    draw=_drawn(panels, "Sarathi-Serve, Figure 4: a step's time"),
    notes=_notes(
      engine,
      bench,
      "The linear operators are timed as a program of their own; what remains of the step is "
      "attention and all else.",
    ),
  )


# Prefills beside decodes --------------------------------------------------------------------------


def sarathi_fig9(bench: Bench) -> Found:
  engine, budget = bench.once(open_engine), 256 // SCALE
  most_prompt, most_chunk = published_sarathi.FIG9_MOST_PROMPT, published_sarathi.FIG9_MOST_CHUNK
  contexts = (128, 256) if bench.quick else (128, 256, 512)
  batches = (1, 8) if bench.quick else (1, 4, 8)
  cases = [(context, batch) for context in contexts for batch in batches]
  alone = {case: Probe(decodes=case[1], context=case[0]) for case in cases}
  chunked, whole = {}, {}
  for context, batch in cases:  # steps of `budget` and of `context` tokens, decodes included
    rest, beside = budget - batch, dict(decodes=batch, context=context)
    chunked[context, batch] = Probe(prefills=(rest,), start=context - rest, **beside)
    whole[context, batch] = Probe(prefills=(context - batch,), **beside)
  probes = [own[case] for own in (alone, chunked, whole) for case in cases]
  took_s = engine.times_s(probes, bench.show)
  ratios = {
    case: tuple(took_s[own[case]] / took_s[alone[case]] for own in (chunked, whole))
    for case in cases
  }
  chunks = {case: ratio for case, (ratio, _) in ratios.items()}
  most = max(cases, key=lambda case: ratios[case][1])
  num_within = sum(ratio <= most_chunk for ratio in chunks.values())
  by_batch = [chunks[context, batches[-1]] < chunks[context, batches[0]] for context in contexts]
  by_context = [chunks[contexts[-1], batch] < chunks[contexts[0], batch] for batch in batches]
  share = (sum(by_batch) + sum(by_context)) / (len(by_batch) + len(by_context))
  panels = [
    Bars(
      title,
      "step time over that of its decodes alone",
      (title,),
      {f"{context} / {batch}": (ratios[context, batch][i],) for context, batch in cases},
      lines={line: limit},
    )
    for i, (title, line, limit) in enumerate(
      (
        (
          f"with a chunk, {budget} tokens in all",
          f"paper: mostly within {most_chunk} (read)",
          most_chunk,
        ),
        (
          "with a whole prompt",
          f"paper: at most {most_prompt}",
          most_prompt,
        ),
      )
    )
  ]
  return Found(
    columns=("context", "batch", "decodes_ms", "with_chunk_ms", "with_prompt_ms"),
    rows=[(*c, *(took_s[own[c]] * 1e3 for own in (alone, chunked, whole))) for c in cases],
    judged=[
      at_least(
        ratios[most][1],
        10,
        3,
        f"A whole prompt makes the step up to {ratios[most][1]:.1f} times as long as its decodes "
        f"alone (context {most[0]}, batch {most[1]}); {most_prompt} in the paper.",
      ),
      at_least(
        num_within / len(cases),
        0.75,
        0.5,
        f"A step with a chunk takes {min(chunks.values()):.1f} to {max(chunks.values()):.1f} times "
        f"its decodes alone, {num_within / len(cases):.2f} of {len(cases)} cases within "
        f"{most_chunk}.",
      ),
      at_least(
        share,
        1,
        0.5,
        f"It falls from batch {batches[0]} to {batches[-1]} in {sum(by_batch)} of {len(by_batch)} "
        f"contexts, from context {contexts[0]} to {contexts[-1]} in {sum(by_context)} of "
        f"{len(by_context)} batches: in {share:.2f} of these.",
      ),
    ],
    compared=[Compared("most, with a whole prompt", most_prompt, ratios[most][1])],
    draw=_drawn(panels, "Sarathi-Serve, Figure 9: by context / batch"),
    notes=_notes(
      engine,
      bench,
      "The decodes count in the budget, and so in the tokens of the whole prompt.",
    ),
  )


def sarathi_fig14(bench: Bench) -> Found:
  engine = bench.once(open_engine)
  prompts = (256,) if bench.quick else (256, 512, 1024)
  chunks = (64, 128, 256)
  ends: dict[tuple[int, int], tuple[Probe, Probe]] = {}  # first and last chunk
  for prompt in prompts:
    for chunk in chunks:
      ends[prompt, chunk] = tuple(
        Probe(prefills=(chunk,), start=start) for start in (0, prompt - chunk)
      )
  whole = {prompt: Probe(prefills=(prompt,)) for prompt in prompts}
  took_s = engine.times_s([*whole.values(), *(p for own in ends.values() for p in own)], bench.show)
  overheads = {
    (prompt, chunk): prompt // chunk * (took_s[a] + took_s[b]) / 2 / took_s[whole[prompt]]
    for (prompt, chunk), (a, b) in ends.items()
  }
  paper = {
    (prompt // SCALE, chunk // SCALE): ratio
    for chunk, ratios in published_sarathi.FIG14_OVERHEAD.items()
    for prompt, ratio in zip(published_sarathi.FIG14_PROMPTS, ratios)
  }
  series = []
  for colour, prompt in enumerate(prompts):
    series += [
      Series(
        f"engine, prompt {prompt}", [(c, overheads[prompt, c]) for c in chunks], colour=colour
      ),
      Series(
        f"paper, Yi-34B, prompt {prompt * SCALE // 1024}K",
        [(c, paper[prompt, c]) for c in chunks],
        "published",
        colour,
      ),
    ]
  small = max(overheads[prompt, chunks[0]] for prompt in prompts)
  large = max(overheads[prompt, chunks[-1]] for prompt in prompts)
  return Found(
    columns=("prompt_tokens", "chunk_tokens", "over_whole"),
    rows=[(*key, ratio) for key, ratio in overheads.items()],
    judged=[
      at_most(
        small,
        1.25,
        1.5,
        f"In chunks of {chunks[0]} (512 there) prompts take up to {small:.2f} times as long.",
      ),
      at_most(
        large,
        1.05,
        1.15,
        f"In chunks of {chunks[-1]} (2,048 there) they take up to {large:.2f} times as long.",
      ),
    ],
    compared=[
      Compared(f"prompt {p}, chunk {c} (x {SCALE} in the paper)", paper[p, c], ratio)
      for (p, c), ratio in overheads.items()
    ],
    draw=_drawn(
      [
        Panel(
          "time of a prefill in chunks over that in one step",
          f"tokens a chunk (x {SCALE} in the paper)",
          "times",
          series,
          {"no overhead": 1.0},
          is_log_x=True,
        )
      ],
      "Sarathi-Serve, Figure 14",
    ),
    notes=_notes(
      engine,
      bench,
      "The first and the last chunk of a prompt are timed, and their mean stands for all: what a "
      "chunk takes grows in proportion to what is cached before it.",
    ),
  )


def distserve_fig2(bench: Bench) -> Found:
  engine, inputs = bench.once(open_engine), (128 // SCALE, 1024 // SCALE)
  batches = (32,) if bench.quick else (8, 16, 32)
  prefill = {n: Probe(prefills=(n,)) for n in inputs}
  alone = {(n, b): Probe(decodes=b, context=n) for n in inputs for b in batches}
  both = {(n, b): Probe(prefills=(n,), decodes=b, context=n) for n, b in alone}
  took_s = engine.times_s([*prefill.values(), *alone.values(), *both.values()], bench.show)
  decodes = {key: took_s[both[key]] / took_s[alone[key]] for key in alone}
  prefills = {(n, b): took_s[both[n, b]] / took_s[prefill[n]] for n, b in alone}
  paper_decodes, paper_prefills = {}, {}
  for n in inputs:
    paper = published_distserve.FIG2_MS[n * SCALE]
    pairs = zip(paper["decodes alone"], paper["with a prefill"], strict=True)
    paper_decodes[n] = [(b / SCALE, both_ms / alone_ms) for (b, alone_ms), (_, both_ms) in pairs]
    (_, prefill_ms), *_ = paper["with a prefill"]  # that of the figure: with one decode
    paper_prefills[n] = [(b / SCALE, ms / prefill_ms) for b, ms in paper["with a prefill"]]
  panels, compared = [], []
  for what, ours, paper in (
    ("the decodes: over a step without the prefill", decodes, paper_decodes),
    ("the prefill: over a step of its own", prefills, paper_prefills),
  ):
    series = []
    for colour, n in enumerate(inputs):
      series += [
        Series(f"engine, input {n}", [(b, ours[n, b]) for b in batches], colour=colour),
        Series(f"paper, 13B, input {n * SCALE}", paper[n], "published", colour),
      ]
      compared += [
        Compared(
          f"{what.split(':')[0]} slowed, input {n}, batch {b} (x {SCALE} in the paper)",
          dict(paper[n])[b],
          ours[n, b],
        )
        for b in batches
        if b in dict(paper[n])
      ]
    panels.append(
      Panel(
        what,
        f"decodes in the step (x {SCALE} in the paper)",
        "times",
        series,
        is_log_x=True,
        is_log_y=True,
      )
    )
  short, long = inputs
  least = min(decodes[long, b] for b in batches)
  is_worse = all(decodes[long, b] > decodes[short, b] for b in batches)
  at_end = [prefills[n, batches[-1]] for n in inputs]
  return Found(
    columns=("input_tokens", "batch", "decodes_ms", "prefill_ms", "both_ms"),
    rows=[
      (*key, *(took_s[p] * 1e3 for p in (alone[key], prefill[key[0]], both[key]))) for key in alone
    ],
    judged=[
      Judged(
        HOLDS if is_worse and least >= 2 else IN_PART if least >= 1.3 else NOT,
        f"A prompt of {long} tokens makes a decode step {least:.1f} to "
        f"{max(decodes[long, b] for b in batches):.1f} times as long, one of {short} tokens "
        f"{min(decodes[short, b] for b in batches):.1f} to "
        f"{max(decodes[short, b] for b in batches):.1f} times. (Holds from 2 for the long one, if "
        f"the short one does less at every batch; in part from 1.3.)",
      ),
      at_least(
        min(at_end),
        1.15,
        1.05,
        f"{batches[-1]} decodes make the step of a prefill {at_end[0]:.2f} times (input {short}) "
        f"and {at_end[1]:.2f} times (input {long}) as long.",
      ),
    ],
    compared=compared,
    draw=_drawn(panels, "DistServe, Figure 2: one step"),
    notes=_notes(engine, bench, "The paper does not say on which hardware it measured this."),
  )


FIGURES = (
  Figure(
    name="engine/sarathi-fig3",
    title="Prefill and decode throughput over the batch",
    kind="engine",
    claims=(
      "One prompt fills the device: prefilling several at once adds little.",
      "Decode throughput grows almost linearly with the batch.",
    ),
    make=sarathi_fig3,
  ),
  Figure(
    name="engine/sarathi-fig4",
    title="Where the time of a step goes",
    kind="engine",
    claims=(
      "Linear operators take over 80 % of a step, also for long sequences.",
      "The linear operators of one decode take about as long as those of 128 prefill tokens.",
    ),
    make=sarathi_fig4,
  ),
  Figure(
    name="engine/sarathi-fig9",
    title="A decode step alone, with a chunk, and with a whole prompt",
    kind="engine",
    claims=(
      "A whole prompt makes running decodes wait many times a decode step.",
      "A chunk within the token budget keeps the step within a few decode steps.",
      "What a chunk adds falls with the batch and with the context.",
    ),
    make=sarathi_fig9,
  ),
  Figure(
    name="engine/sarathi-fig14",
    title="What chunking costs a prefill",
    kind="engine",
    claims=(
      "The smallest chunks make a prefill at most a quarter slower.",
      "With the largest chunks there is next to no overhead.",
    ),
    make=sarathi_fig14,
  ),
  Figure(
    name="engine/distserve-fig2",
    title="A prefill and decodes in one step",
    kind="engine",
    claims=(
      "One prefill makes a decode step several times as long, the more so the longer the prompt.",
      "Decodes in its step make the prefill slower too.",
    ),
    make=distserve_fig2,
  ),
  Figure(
    name="engine/distserve-fig3",
    title="Throughput of both phases over the batch",
    kind="engine",
    claims=(
      "Batching prefills gains little once a prompt is long.",
      "Batching decodes gains nearly as much as there are rows.",
    ),
    make=distserve_fig3,
  ),
  *engine_serving.FIGURES,
)
