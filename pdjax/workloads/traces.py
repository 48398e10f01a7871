"""Recorded workloads: CSV files with the columns `arrival_s,prompt_tokens,output_tokens`."""

from __future__ import annotations

import csv
import os
from typing import NamedTuple

from pdjax.workloads.lengths import Lengths

_LAST_S = 2.0**23  # 97 days: up to there times are exact (core/clock.py)


_COLUMNS = (("arrival_s", float), ("prompt_tokens", int), ("output_tokens", int))


class TraceRow(NamedTuple):
  arrival_s: float
  prompt_tokens: int
  output_tokens: int
  line: int  # of the file

  @property
  def lengths(self) -> Lengths:
    return Lengths(self.prompt_tokens, self.output_tokens)


def read_trace(path: str | os.PathLike[str]) -> list[TraceRow]:
  """Reads a trace, in the file's order. Columns may stand in any order, beside others.

  Raises:
    ValueError: a file that cannot be read, has no rows, or lacks a column; a value that is no
      number, negative, or a length of 0; an arrival before the one above it. Names file and line.
  """
  try:
    with open(path, newline="", encoding="utf-8-sig") as file:
      lines = file.read().splitlines()
  except OSError as error:
    raise ValueError(f"{path}: cannot read the trace: {error.strerror}") from error
  except UnicodeDecodeError as error:
    raise ValueError(f"{path}: cannot read the trace: not a text file ({error})") from error

  reader = csv.DictReader(lines, strict=True, skipinitialspace=True)
  rows: list[TraceRow] = []
  try:
    missing = [name for name, _ in _COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
      raise ValueError(f"no column {', '.join(missing)} (found: {reader.fieldnames})")
    for record in reader:
      row = _parse(record, reader.reader.line_num)
      if rows and row.arrival_s < rows[-1].arrival_s:
        raise ValueError(
          f"arrival_s={row.arrival_s} is before the row above ({rows[-1].arrival_s})"
        )
      rows.append(row)
  except (ValueError, csv.Error) as error:
    raise ValueError(f"{path}:{max(1, reader.reader.line_num)}: {error}") from error
  if not rows:
    raise ValueError(f"{path}:{len(lines)}: no rows below the header")
  return rows


def _parse(record: dict[str | None, str | None], line: int) -> TraceRow:
  if None in record:
    raise ValueError(f"more values than columns: {record[None]}")
  values = []
  for name, parse in _COLUMNS:
    text = record[name]
    if text is None or not text.strip():
      raise ValueError(f"{name} is missing")
    try:
      value = parse(text)
    except ValueError:
      kind = "number" if parse is float else "whole number"
      raise ValueError(f"{name}={text!r} is not a {kind}") from None
    if parse is float and not 0 <= value <= _LAST_S:
      raise ValueError(f"{name}={text} must be from 0 to {_LAST_S:.0f} seconds")
    if parse is int and value < 1:
      raise ValueError(f"{name}={text} must be at least 1")
    values.append(value)
  return TraceRow(*values, line)
