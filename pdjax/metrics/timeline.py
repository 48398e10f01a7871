"""A run as a picture to zoom into. Changes nothing: a pure function of the event log.

The format is the Chrome trace event format; https://ui.perfetto.dev opens it.
"""

from __future__ import annotations

import heapq
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from pdjax.core.events import (
  Arrived,
  Copied,
  Event,
  Failed,
  Fetched,
  Finished,
  PoolChanged,
  Preempted,
  Step,
  Stroke,
)
from pdjax.core.model_config import ModelConfig
from pdjax.metrics.counters import Count, Peaks, fill_counts, step_counts
from pdjax.metrics.utilisation import Work, works


def _ns(time_s: float) -> int:
  return round(time_s * 1e9)


def _when(start_s: float, end_s: float) -> dict[str, float]:
  """Start and duration in microseconds.

  Both come from whole nanoseconds, so that what began where another ended still does.
  """
  return {"ts": _ns(start_s) / 1e3, "dur": (_ns(end_s) - _ns(start_s)) / 1e3}


def chrome_trace(
  log: Iterable[Event],
  config: ModelConfig | None = None,
  *,
  bytes_per_value: float = 2,
  page_size: int = 16,
  peaks: Mapping[str, Peaks] | None = None,
) -> dict[str, Any]:
  """The trace of a run: a process per pool with its steps, and one for the copies between pools.

  A copy is an arrow from the prefill step that made its last page, through the copy, to the first
  step of its request in the target pool; one that was streamed begins before that first step ends.
  With a model, steps carry FLOPs and bytes. Beside its steps a pool has counters: tokens per step,
  FLOP/s and bytes/s (of `peaks`, where they are known), requests that wait, pages in use.
  """
  log = list(log)
  pids: dict[str, int] = {}  # of pools; 0 is the run itself, for requests that reached no pool
  for event in log:
    pool = event.target if isinstance(event, Copied) else event.pool
    if pool is not None:
      pids.setdefault(pool, len(pids) + 1)
  handoff_pid = len(pids) + 1
  names = {0: "run"} | {pid: f"pool {pool}" for pool, pid in pids.items()}
  names[handoff_pid] = "hand-off"
  worked = list(works(log, config, bytes_per_value=bytes_per_value))
  rows = [_step_row(step, work, pids[step.pool]) for step, work in worked]

  for event in log:
    match event:
      case Preempted() | Failed():
        failed = isinstance(event, Failed)
        in_pool = event.pool is not None
        rows.append(
          {
            "name": f"{'failed' if failed else 'preempted'} {event.request_id}",
            "cat": "failed" if failed else "preempted",
            "ph": "i",
            "s": "p" if in_pool else "g",
            "ts": _ns(event.time_s) / 1e3,
            "pid": pids[event.pool] if in_pool else 0,
            "tid": 0,
            "args": {"request_id": event.request_id} | ({"reason": event.reason} if failed else {}),
          }
        )
      case PoolChanged():
        rows.append(
          {
            "name": f"{event.pool}: {event.reason}",
            "cat": "pool",
            "ph": "i",
            "s": "p",
            "ts": _ns(event.time_s) / 1e3,
            "pid": pids[event.pool],
            "tid": 0,
            "args": {"role": event.role, "is_up": event.is_up},
          }
        )
      case Step() | Stroke() | Copied() | Fetched() | Arrived() | Finished():
        pass  # steps above, copies below, with the steps on both sides; the rest shows in these

  counts = (*step_counts(worked, peaks=peaks), *fill_counts(log, page_size=page_size))
  rows += [_count_row(count, pids[count.pool]) for count in counts]
  copies = sorted((e for e in log if isinstance(e, Copied)), key=lambda c: c.begin_s)
  lanes = _lanes(copies)
  ends = _step_before_and_after(copies, [step for step, _ in worked])
  for number, (copy, lane, (before, after)) in enumerate(zip(copies, lanes, ends, strict=True)):
    rows += _copy_rows(copy, number, handoff_pid, lane, before, after, pids)

  used = sorted({(row["pid"], row["tid"]) for row in rows})
  metadata = []
  for pid in sorted({pid for pid, _ in used}):
    metadata.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": names[pid]}})
    metadata.append(
      {"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": pid}}
    )
  for pid, tid in used:
    name = f"copy {tid}" if pid == handoff_pid else "steps" if pid else "requests"
    metadata.append(
      {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
    )
  rows.sort(key=lambda row: row["ts"])
  return {"traceEvents": metadata + rows, "displayTimeUnit": "ms"}


def write_chrome_trace(
  path: pathlib.Path,
  runs: Mapping[str, Iterable[Event]],
  config: ModelConfig | None = None,
  *,
  bytes_per_value: float = 2,
  page_size: int = 16,
  peaks: Mapping[str, Mapping[str, Peaks]] | None = None,
) -> None:
  """Writes the traces of named runs to one file, each on its own tracks `run: pool`.

  `peaks` are of the pools of each run.
  """
  rows: list[dict[str, Any]] = []
  first_pid = 0
  for run, log in runs.items():
    trace = chrome_trace(
      log,
      config,
      bytes_per_value=bytes_per_value,
      page_size=page_size,
      peaks=(peaks or {}).get(run),
    )["traceEvents"]
    for row in trace:
      row["pid"] += first_pid
      if "id" in row:  # arrows of different runs must not join
        row["id"] = f"{run} {row['id']}"
      if row["name"] == "process_name":
        row["args"]["name"] = f"{run}: {row['args']['name']}"
      elif row["name"] == "process_sort_index":
        row["args"]["sort_index"] = row["pid"]
    rows += trace
    first_pid = max((row["pid"] for row in rows), default=-1) + 1
  trace = {"traceEvents": rows, "displayTimeUnit": "ms"}
  pathlib.Path(path).write_text(json.dumps(trace, separators=(",", ":")))


def _step_row(step: Step | Stroke, work: Work, pid: int) -> dict[str, Any]:
  is_stroke = isinstance(step, Stroke)
  args = {
    "step_id": step.step_id,
    "steps": work.num_steps,
    "prefill_tokens": work.num_prefill_tokens,
    "decode_rows": len(step.decode_ids),
    "tokens": work.num_tokens,
    "emitted": work.num_decode_tokens if is_stroke else len(step.emitted_ids),
  }
  if work.flops is not None:
    args |= {
      "flops": work.flops,
      "bytes": work.num_bytes,
      "flop_per_byte": work.flop_per_byte,
    }
  return {
    "name": f"{step.kind} x {work.num_steps}" if is_stroke else step.kind,
    "cat": "step",
    "ph": "X",
    **_when(step.start_s, step.end_s),
    "pid": pid,
    "tid": 0,
    "args": args,
  }


def _count_row(count: Count, pid: int) -> dict[str, Any]:
  values = {name or count.name: round(value, 4) for name, value in count.values.items()}
  return {
    "name": count.name,
    "ph": "C",
    "ts": _ns(count.time_s) / 1e3,
    "pid": pid,
    "tid": 0,
    "args": values,
  }


def _copy_rows(
  copy: Copied,
  number: int,
  pid: int,
  lane: int,
  before: Step | Stroke | None,
  after: Step | Stroke | None,
  pids: dict[str, int],
) -> list[dict[str, Any]]:
  """The copy and its arrow. An arrow binds to the slice that is open at its own time."""
  name = f"hand-off {copy.request_id}"
  arrow = {"name": name, "cat": "hand-off", "id": number}
  rows = [
    {
      "name": name,
      "cat": "hand-off",
      "ph": "X",
      **_when(copy.begin_s, copy.end_s),
      "pid": pid,
      "tid": lane,
      "args": {
        "request_id": copy.request_id,
        "source": copy.source,
        "target": copy.target,
        "tokens": copy.num_tokens,
        "bytes": copy.num_bytes,
        "bytes before its first token": copy.num_bytes_ahead,
        "exposed_s": copy.end_s - copy.start_s,
      },
    }
  ]
  if before is None:
    return rows
  # Just inside the step's end: at the end itself the slice is closed.
  inside_ns = max(_ns(before.start_s), _ns(before.end_s) - 1000)
  rows.append({**arrow, "ph": "s", "ts": inside_ns / 1e3, "pid": pids[copy.source], "tid": 0})
  here = {"ts": _ns(copy.start_s) / 1e3, "pid": pid, "tid": lane}
  if after is None:
    rows.append({**arrow, "ph": "f", "bp": "e", **here})
  else:
    rows.append({**arrow, "ph": "t", "bp": "e", **here})
    target = {"ts": _ns(after.start_s) / 1e3, "pid": pids[copy.target], "tid": 0}
    rows.append({**arrow, "ph": "f", "bp": "e", **target})
  return rows


def _lanes(copies: list[Copied]) -> list[int]:
  """A lane for each copy, so that two at the same time never share one. Sorted by start."""
  busy: list[tuple[float, int]] = []  # heap of (end, lane)
  free: list[int] = []
  lanes = []
  for copy in copies:
    while busy and busy[0][0] <= copy.begin_s:
      heapq.heappush(free, heapq.heappop(busy)[1])
    lane = heapq.heappop(free) if free else len(busy)
    heapq.heappush(busy, (copy.end_s, lane))
    lanes.append(lane)
  return lanes


def _step_before_and_after(
  copies: list[Copied], steps: list[Step | Stroke]
) -> list[tuple[Step | Stroke | None, Step | Stroke | None]]:
  """For each copy the last source step of its request before it and the first target step after."""
  wanted = {c.request_id for c in copies}
  of_request: dict[int, list[Step | Stroke]] = {}
  for step in steps:
    prefill_ids = step.prefill_ids if isinstance(step, Step) else ()
    for request_id in wanted.intersection((*prefill_ids, *step.decode_ids)):
      of_request.setdefault(request_id, []).append(step)
  found = []
  for copy in copies:
    own = of_request.get(copy.request_id, [])
    before = [s for s in own if s.pool == copy.source and s.end_s <= copy.start_s]
    after = [s for s in own if s.pool == copy.target and s.start_s >= copy.end_s]
    found.append((before[-1] if before else None, after[0] if after else None))
  return found
