"""The part of `bench_handoff` that serves: how much of a copy is exposed when it is streamed.

A prompt of eight chunks, alone, goes from a prefill pool to a decode pool in this process: sent
when it is prefilled, chunk by chunk, or also by layer groups. Exposed is what is left of the copy
when its first token is there: from then until the decode pool has all of it (`Copied`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from pdjax.config import SchedulerOptions, parse_pools
from pdjax.core.clock import WallClock
from pdjax.core.events import Copied, EventLog, Step
from pdjax.core.model_config import ModelConfig
from pdjax.core.request import Request, SamplingParams
from pdjax.deployment import largest_budgets, make_cluster, uses_of
from pdjax.scheduling.hand_off import HandOff
from pdjax.scheduling.pages import PageConfig
from pdjax.serving.inbox import Inbox
from pdjax.serving.loop import serve

NUM_CHUNKS, CHUNK_TOKENS = 8, 256
NUM_REPEATS = 7
MODEL = ModelConfig(
  name="bench-streams",  # 32 KiB of K and V per token in float32; a chunk computes for 0.1 s
  num_layers=8,
  d_model=512,
  num_heads=8,
  num_kv_heads=8,
  head_dim=64,
  d_ff=1024,
  vocab_size=512,
  max_len=4096,
)
PAGES = PageConfig(
  num_rows=2,
  page_size=16,
  pages_per_row=NUM_CHUNKS * CHUNK_TOKENS // 16 + 1,
  num_pages=2 * (NUM_CHUNKS * CHUNK_TOKENS // 16 + 1),
  contiguous=True,
)
WAYS = {  # and the share of a one-shot hand-off that may be exposed
  "one-shot": (HandOff(streams=False), None),
  "by chunks": (HandOff(), 0.2),
  "by layer groups": (HandOff(layer_groups=8), 0.1),
}


def measure_all(show: Callable[[str], None] = lambda line: None) -> list[dict[str, Any]]:
  """Medians of each way, measured in turn. Needs two devices of this process."""
  clusters = {name: _make(hand_off, show) for name, (hand_off, _) in WAYS.items()}
  rows: dict[str, list[dict[str, float]]] = {name: [] for name in WAYS}
  for _ in range(NUM_REPEATS + 1):
    for name, make in clusters.items():
      rows[name].append(_serve(make()))
  warm = {name: own[1:] for name, own in rows.items()}
  medians = {
    name: {key: statistics.median(row[key] for row in own) for key in own[0]}
    for name, own in warm.items()
  }
  return [
    {
      "way": name,
      **medians[name],
      "share_of_one_shot": statistics.median(
        own["exposed_s"] / once["exposed_s"]
        for own, once in zip(warm[name], warm["one-shot"], strict=True)
      ),
      "asked_share": asked,
    }
    for name, (_, asked) in WAYS.items()
  ]


def _make(hand_off: HandOff, show: Callable[[str], None]):
  """A function that makes the pools of a run, on executors that are warm."""
  import jax

  from pdjax.engine.build import build_executors, default_buckets, warm_up
  from pdjax.models.transformer import from_arrays, random_arrays

  specs = parse_pools("1xprefill:prefill_chunks,1xdecode")
  options = SchedulerOptions(token_budget=CHUNK_TOKENS)
  whole, mixed = largest_budgets(specs, options, PAGES)
  uses = uses_of(specs, options)
  executors = build_executors(
    from_arrays(MODEL, random_arrays(MODEL, 0)),
    PAGES,
    default_buckets(PAGES, whole_budget=whole, chunk_budget=mixed),
    [[device] for device in jax.devices()[:2]],
    layout="slots",
    layer_groups=[hand_off.layer_groups, 1],
  )
  for line in warm_up(executors, list(uses.values())):
    show(f"{hand_off.layer_groups} layer groups: {line}")
  of_group = dict(zip(uses, executors, strict=True))

  def make():
    for executor in executors:
      executor.reset()
    return make_cluster(
      specs, options, lambda group: PAGES, of_group.__getitem__, hand_off=hand_off
    )

  return make


def _serve(cluster) -> dict[str, float]:
  num_tokens = NUM_CHUNKS * CHUNK_TOKENS
  request = Request(
    request_id=0,
    arrival_s=0.0,
    num_prompt_tokens=num_tokens,
    prompt_ids=tuple(i % MODEL.vocab_size for i in range(num_tokens)),
    sampling=SamplingParams(max_tokens=4),
  )
  log = EventLog()
  for _ in serve(cluster, Inbox([request]), WallClock(), log):
    pass
  (copy,) = (e for e in log if isinstance(e, Copied))
  chunks = [e for e in log if isinstance(e, Step) and e.prefill_ids]
  return {
    "prefill_s": chunks[-1].end_s - chunks[0].start_s,
    "exposed_s": copy.end_s - copy.start_s,
    "bytes": copy.num_bytes,
    "bytes_ahead": copy.num_bytes_ahead,
  }


def table(rows: list[dict[str, Any]]) -> str:
  lines = [
    f"a prompt of {NUM_CHUNKS} chunks of {CHUNK_TOKENS} tokens, {rows[0]['bytes'] / 2**20:.0f} MiB",
    f"{'sent':17}{'prefill ms':>11}{'exposed ms':>11}{'of prefill':>11}   of one-shot (asked)",
  ]
  for row in rows:
    asked = "" if row["asked_share"] is None else f" ({row['asked_share']:.0%})"
    lines.append(
      f"{row['way']:17}{row['prefill_s'] * 1e3:11.0f}{row['exposed_s'] * 1e3:11.1f}"
      f"{row['exposed_s'] / row['prefill_s']:11.1%}   {row['share_of_one_shot']:.1%}{asked}"
    )
  return "\n".join(lines)
