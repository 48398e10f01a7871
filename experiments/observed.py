"""What a run left behind of its requests, in four formats that are told apart by content.

  events.jsonl      ours: one event a line, of one run or of several (`--run` names one). SLOs and
                    the experiment are in summary.json beside it.
  vLLM              the result of `vllm bench serve --save-result --save-detailed`: one JSON object
                    (vllm/benchmarks/serve.py) whose lists `input_lens`, `output_lens`, `ttfts`,
                    `itls`, `errors` and, in newer ones, `start_times` have an item a request, in
                    seconds; its summary figures are in milliseconds. `itls` are between chunks, of
                    which one may hold several tokens. Failed requests have an error or no output.
  AIPerf            profile_export.jsonl (docs/tutorials/working-with-profile-exports.md): a line
                    a request with `metadata` (`request_start_ns`, `benchmark_phase`) and `metrics`,
                    each {"value", "unit"}: `time_to_first_token`, `input_sequence_length`,
                    `output_sequence_length`, `inter_chunk_latency` (a list, with streaming) or
                    `inter_token_latency` (the mean). Failed requests have an `error`.
  CSV               arrival_s, prompt_tokens, output_tokens, ttft_s, and itl_s (gaps separated by
                    spaces or semicolons) or tpot_s

All but CSV may have failed requests, which are counted and not shown. Reads files; changes nothing.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from experiments.validation.requests import Measured, check_units, read_requests
from pdjax.analysis.diagnose import Observed, observe
from pdjax.config import ExperimentConfig
from pdjax.core.events import EventLog, read_events
from pdjax.core.names import pick
from pdjax.core.plain import from_plain
from pdjax.core.request import Slo
from pdjax.metrics.latency import request_records

FORMATS = (
  "our events.jsonl, a result of `vllm bench serve --save-result --save-detailed` (JSON), AIPerf's "
  "profile_export.jsonl, or CSV with arrival_s,prompt_tokens,output_tokens,ttft_s and itl_s or "
  "tpot_s"
)
_VLLM = ("input_lens", "output_lens", "ttfts", "itls")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "seconds": 1.0}
_CLOCK_S = 1e-3  # of two clocks of one machine, the most that they may differ by


class Seen(NamedTuple):
  """What there is to see of a run. `log`, `slo` and `config` are None where only clients looked."""

  kind: str
  requests: tuple[Observed, ...]
  num_failed: int = 0
  notes: tuple[str, ...] = ()
  log: EventLog | None = None
  slo: Slo | None = None
  config: ExperimentConfig | None = None
  strategy: str | None = None


def read_observed(path: str | os.PathLike[str], run: str | None = None) -> Seen:
  """Reads a file of any of the four formats; `run` names one of several in an events.jsonl.

  Raises:
    ValueError: what is wrong with it, with the row.
  """
  path = pathlib.Path(path)
  if not path.is_file():
    raise ValueError(f"{path} does not exist, or is no file")
  text = _text(path)
  if not text.strip():
    raise ValueError(f"{path} is empty; it must be {FORMATS}")
  found = _records(text)
  first = found[0][1] if found else None
  if first is not None and "event" in first:
    return _read_log(path, run)
  if run is not None:
    raise ValueError(f"--run={run} goes with our events.jsonl, which {path} is not")
  if first is not None and ("ttfts" in first or "mean_ttft_ms" in first):
    return _read_vllm(path, [record for _, record in found])
  if first is not None and "metadata" in first and "metrics" in first:
    return _read_aiperf(path, found)
  if text.lstrip()[:1] in "{[":
    raise ValueError(f"{path}: JSON of another format; it must be {FORMATS}")
  rows = read_requests(path)
  return Seen("CSV", tuple(_observed(f"{path}: request {i}", row) for i, row in enumerate(rows)))


def _text(path: pathlib.Path) -> str:
  data = path.read_bytes()
  try:
    data = gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data
    return data.decode("utf-8-sig")
  except (OSError, EOFError, UnicodeDecodeError) as error:
    raise ValueError(f"{path}: no text ({error}); it must be {FORMATS}") from error


def _records(text: str) -> list[tuple[int, dict[str, Any]]]:
  """JSON objects with the lines that they stand in: one over all lines, or one a line.

  A line that is no object is None; nothing at all where the first is none.
  """
  if not text.lstrip().startswith("{"):
    return []
  try:
    return [(1, json.loads(text))]
  except json.JSONDecodeError:
    pass
  found = []
  for number, line in enumerate(text.splitlines(), 1):
    if line.strip():
      try:
        found.append((number, json.loads(line)))
      except json.JSONDecodeError:
        if not found:
          return []
        found.append((number, None))
  return found


def _observed(where: str, row: Measured) -> Observed:
  try:
    return Observed(**row._asdict())
  except ValueError as error:
    raise ValueError(f"{where}: {error}") from error


# Ours ---------------------------------------------------------------------------------------------


def _read_log(path: pathlib.Path, run: str | None) -> Seen:
  runs = read_events(path)
  if run is None and len(runs) > 1:
    raise ValueError(f"{path} has several runs; choose one: --run={' or '.join(runs)}")
  name = next(iter(runs)) if run is None else run
  log = pick(runs, name, "run")
  try:
    records = request_records(log)
    for record in records.values():
      if record.ttft_s is not None and record.ttft_s < 0:
        raise ValueError(
          f"request {record.request_id}: its first token came at {record.token_s[0]} s, before its "
          f"arrival at {record.arrival_s} s"
        )
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from error
  slo, config = _summary(path.with_name("summary.json"))
  failed = sum(r.outcome == "failed" for r in records.values())
  requests = tuple(observe(records.values()))
  return Seen("our event log", requests, failed, (), log, slo, config, name)


def _summary(path: pathlib.Path) -> tuple[Slo | None, ExperimentConfig | None]:
  """SLOs and experiment of a run, where it left them."""
  if not path.is_file():
    return None, None
  try:
    data = json.loads(path.read_text())
    return from_plain(Slo, data["slo"]), from_plain(ExperimentConfig, data["config"])
  except (KeyError, TypeError, ValueError) as error:
    raise ValueError(f"{path}: not the summary of a run ({error!r})") from error


# vLLM ---------------------------------------------------------------------------------------------


def _read_vllm(path: pathlib.Path, results: Sequence[Mapping[str, Any] | None]) -> Seen:
  if len(results) > 1:
    raise ValueError(f"{path} has {len(results)} results (--append-result); give one in a file")
  result = results[0]
  missing = [name for name in _VLLM if name not in result]
  if missing:
    raise ValueError(
      f"{path}: no {', '.join(missing)}: it was saved without --save-detailed, so single requests "
      f"are not in it"
    )
  lists = {name: _list(path, result, name) for name in _VLLM}
  num_requests = len(lists["ttfts"])
  for name in ("start_times", "errors"):
    lists[name] = _list(path, result, name) if result.get(name) else [None] * num_requests
  lengths = {name: len(own) for name, own in lists.items()}
  if len(set(lengths.values())) > 1:
    raise ValueError(f"{path}: lists of different lengths: {lengths}")
  rows, numbers, num_bundled, num_failed = [], [], 0, 0
  columns = (lists[n] for n in ("start_times", *_VLLM, "errors"))
  for number, (start_s, prompt, output, ttft_s, gaps_s, error) in enumerate(zip(*columns)):
    where = f"{path}: request {number}"
    if error or not output:
      num_failed += 1
      continue
    if not isinstance(gaps_s, list):
      raise ValueError(f"{where}: itls={gaps_s!r} is no list of gaps")
    gaps_s = tuple(_number(where, "itls", gap_s) for gap_s in gaps_s)
    output = _count(where, "output_lens", output)
    num_bundled += len(gaps_s) < output - 1
    rows.append(
      Measured(
        arrival_s=None if start_s is None else _number(where, "start_times", start_s),
        prompt_tokens=_count(where, "input_lens", prompt),
        output_tokens=output,
        ttft_s=_number(where, "ttfts", ttft_s),
        tpot_s=sum(gaps_s) / (output - 1) if output > 1 else None,
        itl_s=gaps_s,
      )
    )
    numbers.append(number)
  if not rows:
    raise ValueError(f"{path}: none of {num_requests} requests succeeded")
  check_units(path, rows, numbers)
  _check_mean(path, result, rows)
  notes = ["TTFT counts from when the client sent a request, not from when it was due (vLLM)"]
  if num_bundled:
    notes.append(f"{num_bundled} requests got several tokens in a chunk: their gaps are of chunks")
  seen = [_observed(f"{path}: request {n}", row) for n, row in zip(numbers, rows)]
  return Seen("vllm bench serve", _in_order(seen), num_failed, tuple(notes))


def _check_mean(path: pathlib.Path, result: Mapping[str, Any], rows: Sequence[Measured]) -> None:
  """The file's own mean, which is in milliseconds, tells the unit of its lists."""
  mean_ms = result.get("mean_ttft_ms")
  mean = math.fsum(row.ttft_s for row in rows) / len(rows)
  if isinstance(mean_ms, int | float) and mean_ms > 0 and 0.5 < mean / mean_ms < 2:
    raise ValueError(
      f"{path}: ttfts have a mean of {mean:g} and mean_ttft_ms is {mean_ms:g}: milliseconds? they "
      f"must be in seconds"
    )


def _list(path: pathlib.Path, result: Mapping[str, Any], name: str) -> list[Any]:
  if not isinstance(result[name], list) or not result[name]:
    raise ValueError(f"{path}: {name} is no list with an item for each request")
  return result[name]


# AIPerf -------------------------------------------------------------------------------------------


def _read_aiperf(
  path: pathlib.Path, records: Iterable[tuple[int, Mapping[str, Any] | None]]
) -> Seen:
  seen, num_failed, num_warm_up, num_bundled = [], 0, 0, 0
  for number, record in records:
    where = f"{path}:{number}"
    metadata, metrics = _parts(where, record)
    if metadata.get("benchmark_phase", "profiling") != "profiling":
      num_warm_up += 1
    elif record.get("error") or metadata.get("was_cancelled"):
      num_failed += 1
    else:
      seen.append(_of_aiperf(where, metadata, metrics))
      request = seen[-1]
      num_bundled += request.itl_s is not None and len(request.itl_s) < request.output_tokens - 1
  if not seen:
    raise ValueError(f"{path}: no request of the phase profiling succeeded")
  notes = ["TTFT counts from when the client sent a request, not from when it was due (AIPerf)"]
  if num_warm_up:
    notes.append(f"{num_warm_up} requests of the warm-up are left out")
  if num_bundled:
    notes.append(f"{num_bundled} requests got several tokens in a chunk: their gaps are of chunks")
  return Seen("AIPerf", _in_order(seen), num_failed, tuple(notes))


def _parts(where: str, record: Mapping[str, Any] | None) -> tuple[Mapping, Mapping]:
  parts = [
    record.get(name) if isinstance(record, dict) else None for name in ("metadata", "metrics")
  ]
  if not all(isinstance(part, dict) for part in parts):
    raise ValueError(f"{where}: no record of AIPerf, with metadata and metrics")
  return parts[0], parts[1]


def _of_aiperf(where: str, metadata: Mapping[str, Any], metrics: Mapping[str, Any]) -> Observed:
  start_ns = metadata.get("request_start_ns")
  start_s = _number(where, "request_start_ns", start_ns) * _SECONDS["ns"]
  output = _count(where, "output_sequence_length", _value(where, metrics, "output_sequence_length"))
  ttft_s = _duration_s(where, metrics, "time_to_first_token")
  gaps_s = tpot_s = None
  if "inter_chunk_latency" in metrics:
    values, scale = _with_unit(where, metrics, "inter_chunk_latency")
    if not isinstance(values, list):
      raise ValueError(f"{where}: inter_chunk_latency={values!r} is no list of gaps")
    gaps_s = tuple(scale * _number(where, "inter_chunk_latency", value) for value in values)
  if output > 1:
    tpot_s = sum(gaps_s) / (output - 1) if gaps_s is not None else None
    if tpot_s is None:
      tpot_s = _duration_s(where, metrics, "inter_token_latency")
  end_ns = metadata.get("request_end_ns")
  if end_ns is not None:
    took_s = _number(where, "request_end_ns", end_ns) * _SECONDS["ns"] - start_s
    if ttft_s > took_s + _CLOCK_S:
      raise ValueError(
        f"{where}: its first token came {ttft_s:g} s after its start, and its end {took_s:g} s: "
        f"two clocks, or another unit"
      )
  row = Measured(
    arrival_s=start_s,
    prompt_tokens=_count(
      where, "input_sequence_length", _value(where, metrics, "input_sequence_length")
    ),
    output_tokens=output,
    ttft_s=ttft_s,
    tpot_s=tpot_s,
    itl_s=gaps_s,
  )
  return _observed(where, row)


def _value(where: str, metrics: Mapping[str, Any], name: str) -> Any:
  metric = metrics.get(name)
  if not isinstance(metric, dict) or "value" not in metric:
    raise ValueError(f"{where}: {name} is missing (was it run with --streaming?)")
  return metric["value"]


def _with_unit(where: str, metrics: Mapping[str, Any], name: str) -> tuple[Any, float]:
  """A value and the seconds of its unit."""
  value, unit = _value(where, metrics, name), metrics[name].get("unit")
  if unit not in _SECONDS:
    raise ValueError(f"{where}: {name} has the unit {unit!r}, none of {', '.join(_SECONDS)}")
  return value, _SECONDS[unit]


def _duration_s(where: str, metrics: Mapping[str, Any], name: str) -> float:
  value, scale = _with_unit(where, metrics, name)
  return scale * _number(where, name, value)


# Values -------------------------------------------------------------------------------------------


def _number(where: str, name: str, value: Any) -> float:
  is_number = isinstance(value, int | float) and not isinstance(value, bool)
  if not is_number or not math.isfinite(value):
    raise ValueError(f"{where}: {name}={value!r} is not a number")
  return float(value)


def _count(where: str, name: str, value: Any) -> int:
  number = _number(where, name, value)
  if number < 1 or number != int(number):
    raise ValueError(f"{where}: {name}={value!r} is no number of tokens, 1 or more")
  return int(number)


def _in_order(seen: Sequence[Observed]) -> tuple[Observed, ...]:
  """By arrival, the first at 0; as they stand where nobody noted when they came."""
  if any(request.arrival_s is None for request in seen):
    return tuple(seen)
  start_s = min(request.arrival_s for request in seen)
  moved = [dataclasses.replace(r, arrival_s=r.arrival_s - start_s) for r in seen]
  return tuple(sorted(moved, key=lambda request: request.arrival_s))
