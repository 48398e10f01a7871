"""Recorded workloads, as their publishers write them, plain or gzipped; told apart by content.

  pdjax     CSV: arrival_s, prompt_tokens, output_tokens
  azure     CSV of Azure's LLM inference traces: TIMESTAMP (a date), ContextTokens, GeneratedTokens
  vidur     CSV: arrived_at (seconds), num_prefill_tokens, num_decode_tokens
  lengths   CSV of Vidur and Sarathi-Serve, the same without arrivals
  mooncake  JSON lines: timestamp (ms), input_length, output_length, hash_ids of 512-token blocks

CSV columns may stand in any order, beside others.
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
import gzip
import json
import os
import pathlib
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pdjax.workloads.lengths import Lengths, scaled

MOONCAKE_BLOCK_TOKENS = 512

_LAST_S = 2.0**23  # 97 days: up to there times are exact (core/clock.py)
_CSV_COLUMNS: dict[str, tuple[str | None, str, str]] = {  # arrival, prompt, output
  "pdjax": ("arrival_s", "prompt_tokens", "output_tokens"),
  "azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
  "vidur": ("arrived_at", "num_prefill_tokens", "num_decode_tokens"),
  "lengths": (None, "num_prefill_tokens", "num_decode_tokens"),
}
_JSON_COLUMNS = ("timestamp", "input_length", "output_length", "hash_ids")
# The 2023 files have seven decimals, one more than datetime reads.
_DATE = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:Z|\+00:00)?")


class TraceRow(NamedTuple):
  arrival_s: float | None  # None: the file has lengths only
  prompt_tokens: int
  output_tokens: int
  line: int  # of the file
  block_ids: tuple[int, ...] = ()  # of the prompt, in order; the last block may be cut short

  @property
  def lengths(self) -> Lengths:
    return Lengths(self.prompt_tokens, self.output_tokens)


class Blocks(NamedTuple):
  """What prompts have in common: each is made of blocks, and equal ids stand for equal tokens.

  A block has `num_tokens`; the last one of a prompt may be cut short.
  """

  ids: tuple[tuple[int, ...], ...]  # of each prompt
  num_tokens: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
  """The rows of a file in its order, which is that of arrival. Every method gives a new trace.

  `block_tokens` is None where nothing is known of what the prompts have in common. `changes` says
  what was done to the rows since they were read.
  """

  kind: str
  rows: tuple[TraceRow, ...]
  block_tokens: int | None = None
  changes: tuple[str, ...] = ()

  @property
  def has_arrivals(self) -> bool:
    return self.rows[0].arrival_s is not None

  @property
  def blocks(self) -> Blocks | None:
    if self.block_tokens is None:
      return None
    return Blocks(tuple(row.block_ids for row in self.rows), self.block_tokens)

  def scaled(self, scale: int) -> Trace:
    """Lengths and blocks divided by `scale`, for a small model; prompts keep their blocks.

    Raises:
      ValueError: a scale below 1, or one that leaves no whole block.
    """
    if scale < 1:
      raise ValueError(f"length_scale={scale} must be at least 1")
    if self.block_tokens is not None and self.block_tokens % scale:
      raise ValueError(f"length_scale={scale} must divide the blocks of {self.block_tokens} tokens")
    rows = []
    for row in self.rows:
      prompt, output = scaled(row.lengths, scale)
      rows.append(row._replace(prompt_tokens=prompt, output_tokens=output))
    block_tokens = None if self.block_tokens is None else self.block_tokens // scale
    return self._changed(rows, f"lengths divided by {scale}", block_tokens=block_tokens)

  def first(self, n: int) -> Trace:
    """The first `n` rows, or all."""
    if n >= len(self.rows):
      return self
    return self._changed(self.rows[:n], f"the first {n} of {len(self.rows)} requests")

  def until(self, limit_s: float) -> Trace:
    """What arrives before `limit_s`.

    Raises:
      ValueError: nothing does.
    """
    rows = [row for row in self.rows if row.arrival_s < limit_s]
    if not rows:
      raise ValueError(f"the first request arrives at {self.rows[0].arrival_s} s, not in {limit_s}")
    return self._changed(rows, f"the first {limit_s:g} s")

  def faster(self, speed: float) -> Trace:
    """The same requests `speed` times as fast."""
    rows = [row._replace(arrival_s=row.arrival_s / speed) for row in self.rows]
    return self._changed(rows, f"{speed:g} times as fast")

  def spread(self, over_s: float, rng: np.random.Generator) -> Trace:
    """Each arrival moved back by up to `over_s`, uniformly drawn, the order kept.

    For stamps that are rounded down to a tick of `over_s`, such as the 3 s of Mooncake's
    conversation trace: replayed as they stand, ten users arrive at once.
    """
    stamps = np.array([row.arrival_s for row in self.rows])
    times = np.sort(stamps + rng.uniform(0, over_s, len(stamps))).tolist()
    rows = [row._replace(arrival_s=time_s) for row, time_s in zip(self.rows, times)]
    return self._changed(rows, f"arrivals spread over {over_s:g} s")

  def _changed(self, rows: Iterable[TraceRow], change: str, **fields: Any) -> Trace:
    return dataclasses.replace(self, rows=tuple(rows), changes=(*self.changes, change), **fields)


def read_trace(path: str | os.PathLike[str]) -> Trace:
  """Reads a trace.

  Raises:
    ValueError: a file that cannot be read, is of no known kind, or has no rows; a value that is
      missing, no number or out of range; an arrival before the one above it. Names file and line.
  """
  if not os.fspath(path):
    raise ValueError("the trace has no name: --trace= is empty")
  lines = _lines(path)
  first = next((line for line in lines if line.strip()), "").lstrip()
  if first.startswith("["):
    raise ValueError(f"{path}:1: a JSON list; in a trace each line is a JSON object of its own")
  is_json = first.startswith("{")
  try:
    kind, rows = _json_rows(lines) if is_json else _csv_rows(lines)
  except ValueError as error:  # begins with the line
    raise ValueError(f"{path}:{error}") from error
  if not rows:
    raise ValueError(f"{path}:{len(lines)}: no rows below the header")
  block_tokens = MOONCAKE_BLOCK_TOKENS if kind == "mooncake" else None
  return Trace(kind=kind, rows=tuple(rows), block_tokens=block_tokens)


def _lines(path: str | os.PathLike[str]) -> list[str]:
  try:
    data = pathlib.Path(path).read_bytes()
    if data[:2] == b"\x1f\x8b":
      data = gzip.decompress(data)
    return data.decode("utf-8-sig").splitlines()
  except UnicodeDecodeError as error:
    problem = f"not a text file ({error})"
  except (gzip.BadGzipFile, EOFError, zlib.error) as error:
    problem = f"a damaged gzip file ({error})"
  except OSError as error:
    problem = error.strerror
  raise ValueError(f"{path}: cannot read the trace: {problem}")


def _csv_rows(lines: list[str]) -> tuple[str, list[TraceRow]]:
  reader = csv.DictReader(lines, strict=True, skipinitialspace=True)
  rows: list[TraceRow] = []
  start_ns = None  # of an azure trace
  try:
    kind = _kind(reader.fieldnames or ())
    arrival, prompt, output = _CSV_COLUMNS[kind]
    for record in reader:
      if None in record:
        raise ValueError(f"more values than columns: {record[None]}")
      arrival_s = None
      if kind == "azure":
        time_ns = _date_ns(arrival, _text(record, arrival))
        start_ns = time_ns if start_ns is None else start_ns
        arrival_s = (time_ns - start_ns) / 1e9
      elif arrival is not None:
        arrival_s = _number(arrival, _text(record, arrival), float)
      if arrival_s is not None:
        _check_arrival(f"{arrival}={record[arrival]}", arrival_s, rows)
      lengths = [_number(name, _text(record, name), int) for name in (prompt, output)]
      for name, length in zip((prompt, output), lengths):
        _check_length(name, length)
      rows.append(TraceRow(arrival_s, *lengths, line=reader.reader.line_num))
  except (ValueError, csv.Error) as error:
    raise ValueError(f"{max(1, reader.reader.line_num)}: {error}") from error
  return kind, rows


def _kind(columns: Sequence[str]) -> str:
  """The first kind whose columns are all there."""
  if not columns:
    raise ValueError("the file is empty")
  wanted = {kind: [name for name in names if name] for kind, names in _CSV_COLUMNS.items()}
  missing = {kind: [n for n in names if n not in columns] for kind, names in wanted.items()}
  kind = min(missing, key=lambda kind: len(missing[kind]))
  if not missing[kind]:
    return kind
  found = f"found: {', '.join(columns)[:100]}"
  if missing[kind] != wanted[kind]:
    raise ValueError(f"no column {', '.join(missing[kind])} ({found})")
  known = "; ".join(",".join(names) for names in wanted.values())
  raise ValueError(
    f"no trace of a known kind: neither CSV with {known}, nor JSON lines with "
    f"{','.join(_JSON_COLUMNS)} ({found})"
  )


def _json_rows(lines: list[str]) -> tuple[str, list[TraceRow]]:
  rows: list[TraceRow] = []
  for line, text in enumerate(lines, 1):
    try:
      if text.strip():
        rows.append(_mooncake_row(json.loads(text), line, rows))
    except json.JSONDecodeError as error:
      raise ValueError(f"{line}: not JSON: {error.msg} at column {error.colno}") from error
    except ValueError as error:
      raise ValueError(f"{line}: {error}") from error
  return "mooncake", rows


def _mooncake_row(record: Any, line: int, above: Sequence[TraceRow]) -> TraceRow:
  missing = [name for name in _JSON_COLUMNS if not isinstance(record, dict) or name not in record]
  if missing:
    raise ValueError(f"no {', '.join(missing)}")
  stamp, prompt, output, block_ids = (record[name] for name in _JSON_COLUMNS)
  if isinstance(stamp, bool) or not isinstance(stamp, int | float):
    raise ValueError(f"timestamp={stamp!r} is not a number")
  _check_arrival(f"timestamp={stamp}", stamp / 1e3, above)
  for name in ("input_length", "output_length"):
    if type(record[name]) is not int:
      raise ValueError(f"{name}={record[name]!r} is not a whole number")
    _check_length(name, record[name])
  if not isinstance(block_ids, list) or not all(
    type(x) is int and 0 <= x < 2**63 for x in block_ids
  ):
    raise ValueError("hash_ids is not a list of whole numbers from 0 to 2**63 - 1")
  num_blocks = -(-prompt // MOONCAKE_BLOCK_TOKENS)
  if len(block_ids) != num_blocks:
    raise ValueError(
      f"{len(block_ids)} hash_ids, but input_length={prompt} are {num_blocks} blocks of "
      f"{MOONCAKE_BLOCK_TOKENS} tokens"
    )
  return TraceRow(stamp / 1e3, prompt, output, line, tuple(block_ids))


def _text(record: Mapping[str, str | None], name: str) -> str:
  text = record[name]
  if text is None or not text.strip():
    raise ValueError(f"{name} is missing")
  return text.strip()


def _number(name: str, text: str, parse: type[int] | type[float]) -> Any:
  try:
    return parse(text)
  except ValueError:
    kind = "number" if parse is float else "whole number"
    raise ValueError(f"{name}={text!r} is not a {kind}") from None


def _date_ns(name: str, text: str) -> int:
  """A date in nanoseconds: as a float of seconds it would lose its last decimals."""
  match = _DATE.fullmatch(text)
  try:
    since = datetime.datetime.fromisoformat(match[1]) - datetime.datetime(1970, 1, 1)
  except (TypeError, ValueError):
    raise ValueError(f"{name}={text!r} is not a date like 2023-11-16 18:15:46.6805900") from None
  return (since.days * 86_400 + since.seconds) * 10**9 + int((match[2] or "").ljust(9, "0"))


def _check_arrival(shown: str, arrival_s: float, above: Sequence[TraceRow]) -> None:
  if above and arrival_s < above[-1].arrival_s:
    raise ValueError(f"{shown} is before the row above")
  if not 0 <= arrival_s <= _LAST_S:
    raise ValueError(f"{shown} must be from 0 to {_LAST_S:.0f} seconds")


def _check_length(name: str, value: int) -> None:
  if value < 1:
    raise ValueError(f"{name}={value} must be at least 1")
