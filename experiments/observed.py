"""What a run left behind of its requests, in four formats that are told apart by content.

  events.jsonl      ours: one event a line, of one run or of several (`--run` names one). SLOs and
                    the experiment are in summary.json beside it.
  vLLM              the result of `vllm bench serve --save-result --save-detailed`: one JSON object
                    (vllm/benchmarks/serve.py, seen at commit 009e6d4) whose lists `input_lens`,
                    `output_lens`, `ttfts`, `itls`, `errors` and, in newer ones, `start_times` and
                    `queue_times` have an item a request, in seconds; its summary figures are in
                    milliseconds. `itls` are between chunks: one may hold several tokens, and the
                    first of a chat holds none. `queue_times` are what a request waited in the
                    client. Failed requests have an error or no output.
  AIPerf            profile_export.jsonl (docs/tutorials/working-with-profile-exports.md, seen of
                    0.14): a line a request with `metadata` (`request_start_ns`, `benchmark_phase`,
                    in newer ones `credit_issued_ns`, when it was due) and `metrics`, each {"value",
                    "unit"}: `time_to_first_token`, `input_sequence_length`,
                    `output_sequence_length`, `inter_chunk_latency` (a list, with streaming) or
                    `inter_token_latency` (the mean). Failed requests have an `error`.
  CSV               arrival_s, prompt_tokens, output_tokens, ttft_s, and itl_s (gaps separated by
                    spaces or semicolons) or tpot_s

All but CSV may have failed requests, which are counted and not shown. Reads files; changes nothing.
"""

from __future__ import annotations

import collections
import dataclasses
import gzip
import json
import math
import os
import pathlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from experiments.validation.requests import check_units, doubt, read_requests
from pdjax.analysis.diagnose import Observed, observe_by_id
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
_SKEW_S = 0.1  # of the clocks of two machines
_LONG_TTFT_S = 5.0  # of the quickest request: possible, but not without a word
_MOST_CHARS = 100  # of somebody else's error message


class Seen(NamedTuple):
  """What there is to see of a run. `log`, `slo` and `config` are None where only clients looked.

  `by_id` are the requests in order of arrival, by their ids; clients' by their place in the file,
  from 0.
  """

  kind: str
  by_id: Mapping[int, Observed]
  num_failed: int = 0
  notes: tuple[str, ...] = ()
  log: EventLog | None = None
  slo: Slo | None = None
  config: ExperimentConfig | None = None
  strategy: str | None = None

  @property
  def requests(self) -> tuple[Observed, ...]:
    return tuple(self.by_id.values())


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
  if _is_log(text):
    return _read_log(path, run)
  found = _records(path, text)
  first = found[0][1] if found else None
  if run is not None:
    raise ValueError(f"--run={run} goes with our events.jsonl, which {path} is not")
  if first is not None and ("ttfts" in first or "mean_ttft_ms" in first):
    return _read_vllm(path, [record for _, record in found])
  if first is not None and "metadata" in first and "metrics" in first:
    return _read_aiperf(path, found)
  if text.lstrip()[:1] in "{[":
    raise ValueError(f"{path}: JSON of another format; it must be {FORMATS}")
  rows = read_requests(path)
  requests = {place: Observed(**row._asdict()) for place, row in enumerate(rows)}
  return _seen("CSV", requests, notes=[question] if (question := doubt(rows)) else [])


def _seen(
  kind: str, requests: Mapping[int, Observed], num_failed: int = 0, notes: Sequence[str] = ()
) -> Seen:
  """What clients saw, by its place in the file."""
  least_s = min(request.served_s for request in requests.values())
  if least_s > _LONG_TTFT_S:
    notes = [
      *notes,
      f"the quickest first token took {least_s:.3g} s; if that is in ms, all of this is wrong",
    ]
  return Seen(kind, _in_order(requests), num_failed, tuple(notes))


def _failures(reasons: Sequence[str]) -> list[str]:
  """A note with what most failures say; a traceback says it in its last line."""
  lasts = collections.Counter(
    reason.strip().splitlines()[-1] for reason in reasons if reason.strip()
  )
  if not lasts:
    return []
  (reason, count), *_ = lasts.most_common(1)
  return [f"{count} of {len(reasons)} failed requests say: {reason[:_MOST_CHARS]}"]


def _text(path: pathlib.Path) -> str:
  data = path.read_bytes()
  try:
    data = gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data
    return data.decode("utf-8-sig")
  except (OSError, EOFError, UnicodeDecodeError) as error:
    raise ValueError(f"{path}: no text ({error}); it must be {FORMATS}") from error


def _is_log(text: str) -> bool:
  """By its first line: a log may be long."""
  line = text.lstrip().partition("\n")[0]
  try:
    return line.startswith("{") and "event" in json.loads(line)
  except json.JSONDecodeError:
    return False


def _records(path: pathlib.Path, text: str) -> list[tuple[int, dict[str, Any] | None]]:
  """JSON objects with the lines that they stand in: one over all lines, or one a line.

  A line that is no object is None; nothing at all where the file does not begin with an object.

  Raises:
    ValueError: it begins with one that is broken.
  """
  if not text.lstrip().startswith("{"):
    return []
  try:
    return [(1, json.loads(text))]
  except json.JSONDecodeError as error:
    whole = error
  found = []
  for number, line in enumerate(text.splitlines(), 1):
    if line.strip():
      try:
        found.append((number, json.loads(line)))
      except json.JSONDecodeError:
        if not found:
          raise ValueError(
            f"{path}:{whole.lineno}: broken JSON, perhaps cut off ({whole.msg} at character "
            f"{whole.colno}); it must be {FORMATS}"
          ) from whole
        found.append((number, None))
  return found


def _observed(where: str, **fields: Any) -> Observed:
  try:
    return Observed(**fields)
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
  reasons = [r.failed_reason or "" for r in records.values() if r.outcome == "failed"]
  return Seen(
    "our event log",
    observe_by_id(records.values()),
    len(reasons),
    tuple(_failures(reasons)),
    log,
    slo,
    config,
    name,
  )


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
  # Without a rate all are due at once, and are sent as others end: no client is late with them.
  has_queue = bool(result.get("queue_times")) and isinstance(
    result.get("request_rate"), int | float
  )
  for name in ("start_times", "errors", *(["queue_times"] if has_queue else [])):
    lists[name] = _list(path, result, name) if result.get(name) else [None] * len(lists["ttfts"])
  lengths = {name: len(own) for name, own in lists.items()}
  if len(set(lengths.values())) > 1:
    raise ValueError(f"{path}: lists of different lengths: {lengths}")
  requests: dict[int, Observed] = {}
  reasons, num_empty, num_bundled = [], 0, 0
  for number, values in enumerate(zip(*lists.values())):
    row = dict(zip(lists, values))
    if row["errors"] or not row["output_lens"]:
      reasons.append(str(row["errors"] or ""))
      continue
    requests[number] = request = _of_vllm(f"{path}: request {number}", row)
    num_empty += len(row["itls"]) >= request.output_tokens
    num_bundled += len(request.itl_s) < request.output_tokens - 1
  if not requests:
    raise ValueError(f"{path}: none of {lengths['ttfts']} requests succeeded")
  if not any(request.served_s for request in requests.values()):
    raise ValueError(f"{path}: all ttfts are 0: that backend does not stream what it generates")
  check_units(path, list(requests.values()), list(requests))
  _check_mean(path, result, requests.values())
  notes = [*_failures(reasons), _since("vLLM", "queue_times", has_queue), *_bundled(num_bundled)]
  if num_empty:
    notes.append(
      f"{num_empty} requests have a chunk for each token and one more: the first is taken to have "
      f"none (the role, in a chat), and TTFT counts to the second"
    )
  return _seen("vllm bench serve", requests, len(reasons), notes)


def _of_vllm(where: str, row: Mapping[str, Any]) -> Observed:
  if not isinstance(row["itls"], list):
    raise ValueError(f"{where}: itls={row['itls']!r} is no list of gaps")
  gaps_s = tuple(_number(where, "itls", gap_s) for gap_s in row["itls"])
  output = _count(where, "output_lens", row["output_lens"])
  ttft_s = _number(where, "ttfts", row["ttfts"])
  num_empty = len(gaps_s) + 1 - output  # chunks without a token: the first, then the last
  if num_empty > 0:
    ttft_s, gaps_s = ttft_s + gaps_s[0], gaps_s[1:output]
  start_s, late_s = row["start_times"], row.get("queue_times") or 0.0
  late_s = _number(where, "queue_times", late_s)
  return _observed(
    where,
    arrival_s=None if start_s is None else _number(where, "start_times", start_s) - late_s,
    prompt_tokens=_count(where, "input_lens", row["input_lens"]),
    output_tokens=output,
    ttft_s=ttft_s + late_s,
    tpot_s=_mean_s(gaps_s, output),
    itl_s=gaps_s,
    sent_late_s=late_s,
  )


def _mean_s(gaps_s: Sequence[float], output_tokens: int) -> float | None:
  """The mean time of a token; None for one token, and where all came in one chunk."""
  return sum(gaps_s) / (output_tokens - 1) if output_tokens > 1 and gaps_s else None


def _since(kind: str, name: str, is_known: bool) -> str:
  if is_known:
    return f"TTFT counts from when a request was due, as {name} says; {kind}'s own from when sent"
  return f"TTFT counts from when the client sent a request, not from when it was due ({kind})"


def _bundled(num_bundled: int) -> list[str]:
  if not num_bundled:
    return []
  return [f"{num_bundled} requests got several tokens in a chunk: their gaps are of chunks"]


def _check_mean(
  path: pathlib.Path, result: Mapping[str, Any], requests: Collection[Observed]
) -> None:
  """The file's own mean, which is in milliseconds, tells the unit of its lists."""
  mean_ms = result.get("mean_ttft_ms")
  mean = math.fsum(request.served_s for request in requests) / len(requests)
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
  requests: dict[int, Observed] = {}
  reasons, num_warm_up, num_bundled, knows_due = [], 0, 0, False
  for number, record in records:
    where = f"{path}:{number}"
    metadata, metrics, error = _parts(where, record)
    if metadata.get("benchmark_phase", "profiling") != "profiling":
      num_warm_up += 1
    elif error or metadata.get("was_cancelled"):
      reasons.append(_reason(error))
    else:
      requests[number - 1] = request = _of_aiperf(where, metadata, metrics)
      num_bundled += request.itl_s is not None and len(request.itl_s) < request.output_tokens - 1
      knows_due |= metadata.get("credit_issued_ns") is not None
  if not requests:
    raise ValueError(f"{path}: no request of the phase profiling succeeded")
  notes = [*_failures(reasons), _since("AIPerf", "credit_issued_ns", knows_due)]
  if num_warm_up:
    notes.append(f"{num_warm_up} requests of the warm-up are left out")
  return _seen("AIPerf", requests, len(reasons), [*notes, *_bundled(num_bundled)])


def _reason(error: Any) -> str:
  if isinstance(error, dict):
    return ": ".join(str(error[name]) for name in ("type", "message") if error.get(name))
  return str(error or "cancelled")


def _parts(where: str, record: Mapping[str, Any] | None) -> tuple[Mapping, Mapping, Any]:
  """Metadata, metrics and error; what failed may have no metrics."""
  if not isinstance(record, dict):
    raise ValueError(f"{where}: no JSON object; cut off, or another file")
  metadata, metrics, error = (record.get(name) for name in ("metadata", "metrics", "error"))
  metrics = {} if error and metrics is None else metrics
  if not isinstance(metadata, dict) or not isinstance(metrics, dict):
    raise ValueError(f"{where}: no record of AIPerf, with metadata and metrics")
  return metadata, metrics, error


def _of_aiperf(where: str, metadata: Mapping[str, Any], metrics: Mapping[str, Any]) -> Observed:
  start_s = _stamp_s(where, metadata, "request_start_ns")
  due_s = start_s
  if metadata.get("credit_issued_ns") is not None:
    due_s = _stamp_s(where, metadata, "credit_issued_ns")
    if due_s > start_s + _SKEW_S:
      raise ValueError(f"{where}: sent {due_s - start_s:g} s before it was due: two clocks")
  late_s = max(0.0, start_s - due_s)
  output = _count(where, "output_sequence_length", _value(where, metrics, "output_sequence_length"))
  ttft_s = _duration_s(where, metrics, "time_to_first_token")
  gaps_s = tpot_s = None
  if "inter_chunk_latency" in metrics:
    values, scale = _with_unit(where, metrics, "inter_chunk_latency")
    if not isinstance(values, list):
      raise ValueError(f"{where}: inter_chunk_latency={values!r} is no list of gaps")
    gaps_s = tuple(scale * _number(where, "inter_chunk_latency", value) for value in values)
    tpot_s = _mean_s(gaps_s, output)
  elif output > 1:  # 0 where all came in one chunk
    tpot_s = _duration_s(where, metrics, "inter_token_latency") or None
  if metadata.get("request_end_ns") is not None:
    took_s = _stamp_s(where, metadata, "request_end_ns") - start_s
    if ttft_s > took_s + _CLOCK_S:
      raise ValueError(
        f"{where}: its first token came {ttft_s:g} s after its start, and its end {took_s:g} s: "
        f"two clocks, or another unit"
      )
  prompt = _value(where, metrics, "input_sequence_length")
  return _observed(
    where,
    arrival_s=start_s - late_s,
    prompt_tokens=_count(where, "input_sequence_length", prompt),
    output_tokens=output,
    ttft_s=ttft_s + late_s,
    tpot_s=tpot_s,
    itl_s=gaps_s,
    sent_late_s=late_s,
  )


def _stamp_s(where: str, metadata: Mapping[str, Any], name: str) -> float:
  return _number(where, name, metadata.get(name)) * _SECONDS["ns"]


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


def _in_order(seen: Mapping[int, Observed]) -> dict[int, Observed]:
  """By arrival, the first at 0; as they stand where nobody noted when they came."""
  if any(request.arrival_s is None for request in seen.values()):
    return dict(seen)
  start_s = min(request.arrival_s for request in seen.values())
  moved = {i: dataclasses.replace(r, arrival_s=r.arrival_s - start_s) for i, r in seen.items()}
  return dict(sorted(moved.items(), key=lambda item: item[1].arrival_s))
