"""Mooncake's hit rates: the traces' blocks through the page pool and its eviction, no time."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import NamedTuple

from experiments.figures.reproduction import Panel, Series, draw
from experiments.reproduction.bench import Bench
from experiments.reproduction.figure import HOLDS, IN_PART, NOT, Compared, Figure, Found, Judged
from experiments.reproduction.published_mooncake import (
  CACHE_RATIO,
  FIG9_SHARE,
  NODE_TOKENS,
  TABLE1,
  TABLE1_BLOCKS,
)
from pdjax.scheduling.pages import PageConfig, PagePool
from pdjax.workloads.traces import TraceRow, read_trace

TRACES = ("conversation", "synthetic")
BLOCK_TOKENS = 512
NEAR = 0.95  # of the highest hit rate: what counts as all of it
WITHIN = 0.15  # of a published number


def trace_file(bench: Bench, name: str) -> pathlib.Path:
  """A trace of FAST'25.

  Raises:
    FileNotFoundError: it is not there.
  """
  path = bench.trace_dir / f"mooncake_fast25_{name}_trace.jsonl.gz"
  if not path.is_file():
    raise FileNotFoundError(f"{path.name} is not in --trace_dir")
  return path


class Hits(NamedTuple):
  """Shares that were in the cache when their request came."""

  blocks: float
  tokens: float


def hits(rows: Sequence[TraceRow], num_blocks: int | None, eviction: str = "lru") -> Hits:
  """What one cache of `num_blocks` (None: all there are) would have had of prompts in this order.

  Leading blocks count, up to the first that is not there. Of a prompt longer than the cache, what
  fits is kept.
  """
  num_distinct = len({block for row in rows for block in row.block_ids})
  num_pages = min(num_blocks or num_distinct, num_distinct)
  pool = PagePool(
    PageConfig(num_rows=1, page_size=1, pages_per_row=num_pages, num_pages=num_pages),
    eviction=eviction,
  )
  found_blocks = found_tokens = 0
  for row in rows:
    keys = row.block_ids[:num_pages]
    num_found = pool.match(keys)
    found_blocks += num_found
    found_tokens += min(num_found * BLOCK_TOKENS, row.prompt_tokens)
    place = pool.take_row(keys[:num_found])
    pool.grow(place, len(keys))
    for i in range(num_found, len(keys)):
      pool.publish(place, i, keys[i])
    pool.release(place)
  return Hits(
    found_blocks / sum(len(row.block_ids) for row in rows),
    found_tokens / sum(row.prompt_tokens for row in rows),
  )


def rows_of(bench: Bench, name: str) -> Sequence[TraceRow]:
  return read_trace(trace_file(bench, name)).rows


def notes_of(bench: Bench) -> list[str]:
  return ["--quick: fewer capacities."] if bench.quick else []


# Figure 9 -----------------------------------------------------------------------------------------

FIG9_TOKENS = tuple(round(base * 10**power) for power in range(4, 9) for base in (1, 3))
ENOUGH_TOKENS = 50_000_000


def make_fig9(bench: Bench) -> Found:
  capacities = FIG9_TOKENS[::2] if bench.quick else FIG9_TOKENS
  capacities = sorted({*capacities, NODE_TOKENS, ENOUGH_TOKENS})
  found: dict[str, dict[int, Hits]] = {}
  most: dict[str, Hits] = {}
  for name in TRACES:
    rows = rows_of(bench, name)
    found[name] = {}
    for tokens in capacities:
      bench.show(f"{name}: a cache of {tokens:.0e} tokens")
      found[name][tokens] = hits(rows, max(1, tokens // BLOCK_TOKENS))
    most[name] = hits(rows, None)
  shares = {name: found[name][NODE_TOKENS].tokens / most[name].tokens for name in TRACES}
  enough = {name: found[name][ENOUGH_TOKENS].tokens / most[name].tokens for name in TRACES}
  compared = [
    *(Compared(f"{n}, no limit", CACHE_RATIO[n], most[n].tokens, "of tokens") for n in TRACES),
    *(Compared(f"{n}, a node's 3M tokens", FIG9_SHARE[n], shares[n], "of that") for n in TRACES),
  ]
  columns = ("trace", "cache (tokens)", "hit rate (tokens)", "hit rate (blocks)")
  rows = [(name, tokens, own.tokens, own.blocks) for name in TRACES
          for tokens, own in found[name].items()]  # fmt: skip
  rows += [(name, "no limit", most[name].tokens, most[name].blocks) for name in TRACES]

  def picture(path: pathlib.Path) -> None:
    series = []
    for i, name in enumerate(TRACES):
      points = [(tokens, own.tokens) for tokens, own in found[name].items()]
      series.append(Series(name, points, colour=i))
      node = FIG9_SHARE[name] * CACHE_RATIO[name]
      published = [(NODE_TOKENS, node), (1e9, CACHE_RATIO[name])]
      series.append(Series(f"{name}, published", published, "published", colour=i))
    panel = Panel("One cache, LRU", "cache (tokens)", "share of prompt tokens", series,
                  is_log_x=True, ylim=(0, 0.8))  # fmt: skip
    draw([panel], path, "Hit rate by the size of the cache")

  return Found(
    columns=columns,
    rows=rows,
    judged=[judge_share(shares), judge_enough(enough)],
    compared=compared,
    draw=picture,
    notes=[
      *notes_of(bench),
      "The toolagent trace, of whose hits a node's cache reaches 75 % there, and with it the curve "
      "of all three, is not at hand.",
      "Marks at 3M tokens are the published share times the published ratio without a limit.",
    ],
  )


def judge_share(shares: dict[str, float]) -> Judged:
  """Holds: all are below a half, and within `WITHIN` of the published ones. In part: the first."""
  words = ", ".join(
    f"{name} {share:.0%} ({FIG9_SHARE[name]:.0%} there)" for name, share in shares.items()
  )
  is_near = all(abs(share / FIG9_SHARE[name] - 1) <= WITHIN for name, share in shares.items())
  is_below = max(shares.values()) < 0.5
  verdict = NOT if not is_below else HOLDS if is_near else IN_PART
  return Judged(verdict, f"{words}.")


def judge_enough(shares: dict[str, float]) -> Judged:
  words = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
  reached = sum(share >= NEAR for share in shares.values())
  verdict = HOLDS if reached == len(shares) else IN_PART if reached else NOT
  return Judged(verdict, f"Of the highest rate: {words} ({NEAR:.0%} counts as all of it).")


# Table 1 of the report ----------------------------------------------------------------------------


def make_table1(bench: Bench) -> Found:
  blocks = (None, 50_000, 10_000, 1000) if bench.quick else TABLE1_BLOCKS
  rates: dict[str, dict[str, list[float]]] = {}
  for name in TRACES:
    rows = rows_of(bench, name)
    rates[name] = {}
    for rule in TABLE1:
      bench.show(f"{name}: {rule}")
      rates[name][rule] = [hits(rows, number, rule).blocks for number in blocks]
  published = {
    rule: [own[TABLE1_BLOCKS.index(number)] for number in blocks] for rule, own in TABLE1.items()
  }
  table = [
    (name, rule, *own) for name, rules in {**rates, "published": published}.items()
    for rule, own in rules.items()
  ]  # fmt: skip

  def picture(path: pathlib.Path) -> None:
    x = [number or 200_000 for number in blocks]
    panels = []
    for name in TRACES:
      series = []
      for i, rule in enumerate(TABLE1):
        series.append(Series(rule, list(zip(x, rates[name][rule])), colour=i))
        label = f"{rule}, published of another trace"
        series.append(Series(label, list(zip(x, published[rule])), "published", colour=i))
      panels.append(
        Panel(
          f"{name} trace",
          "cache (blocks; last: no limit)",
          "share of blocks",
          series,
          is_log_x=True,
          ylim=(0, 1),
        )
      )
    draw(panels, path, "Hit rate by eviction rule")

  return Found(
    columns=("trace", "rule", *(f"{number or 'all'} blocks" for number in blocks)),
    rows=table,
    judged=[judge_rules(rates, blocks), judge_saturation(rates, blocks)],
    draw=picture,
    notes=[
      *notes_of(bench),
      "The table's own trace is not at hand; ours are of the two traces of FAST'25 that are, so "
      "that only order and shape can be compared.",
    ],
  )


def judge_rules(rates: dict[str, dict[str, list[float]]], blocks: Sequence[int | None]) -> Judged:
  """Holds: LRU is ahead of both, to within half a percent, at every size. In part: at some."""
  cells = [
    (name, number, rule, own["lru"][i] - own[rule][i])
    for name, own in rates.items()
    for rule in own if rule != "lru"
    for i, number in enumerate(blocks) if number is not None
  ]  # fmt: skip
  behind = [cell for cell in cells if cell[3] < -0.005]
  ahead_most = max(cells, key=lambda cell: cell[3])
  words = (
    f"LRU is behind in {len(behind)} of {len(cells)} places; it is ahead most of {ahead_most[2]} "
    f"at {ahead_most[1]} blocks of the {ahead_most[0]} trace, by {100 * ahead_most[3]:.1f} points"
  )
  if behind:
    worst = min(behind, key=lambda cell: cell[3])
    words += (
      f", and behind most of {worst[2]} at {worst[1]} blocks of the {worst[0]} trace, by "
      f"{-100 * worst[3]:.1f} points"
    )
  is_ahead = ahead_most[3] > 0.005
  verdict = NOT if not is_ahead else IN_PART if behind else HOLDS
  return Judged(verdict, f"{words}.")


def judge_saturation(
  rates: dict[str, dict[str, list[float]]], blocks: Sequence[int | None]
) -> Judged:
  """Of LRU: the smallest size that has `NEAR` of the hits of all. Holds: at most 50,000 blocks."""
  smallest: dict[str, int | None] = {}
  for name, own in rates.items():
    most = own["lru"][list(blocks).index(None)]
    enough = [n for n, rate in zip(blocks, own["lru"]) if n is not None and rate >= NEAR * most]
    smallest[name] = min(enough, default=None)
  words = ", ".join(f"{name} from {number or 'no'} blocks on" for name, number in smallest.items())
  reached = [number is not None and number <= 50_000 for number in smallest.values()]
  verdict = HOLDS if all(reached) else IN_PART if any(reached) else NOT
  return Judged(verdict, f"{NEAR:.0%} of the hits of a cache without limit: {words}.")


FIGURES = (
  Figure(
    name="mooncake/fig9",
    title="Hit rate over cache capacity, conversation and synthetic traces (FAST'25)",
    kind="analytic",
    claims=(
      "The cache of one node (3M tokens) reaches less than half of the hits that are possible with "
      "these traces.",
      "50M tokens reach nearly all of them.",
    ),
    make=make_fig9,
  ),
  Figure(
    name="mooncake/tr-table1",
    title="Hit rate by eviction rule and capacity (technical report)",
    kind="analytic",
    claims=(
      "LRU has the most hits at every capacity, before LFU and length-aware eviction.",
      "50,000 blocks have nearly all the hits of a cache without limit.",
    ),
    make=make_table1,
  ),
)
