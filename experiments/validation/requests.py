"""Requests that a real system served, and how long each took. Reads files; changes nothing."""

from __future__ import annotations

import csv
import gzip
import math
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pdjax.core.request import Request, SamplingParams
from pdjax.workloads import make_requests
from pdjax.workloads.traces import read_trace

GAPS = "itl_s"  # may stand for tpot_s: the gaps of a request, separated by spaces or semicolons
COLUMNS = {
  "arrival_s": "seconds since any moment of the run; rows in this order",
  "prompt_tokens": "at least 1",
  "output_tokens": "at least 1",
  "ttft_s": "first token - arrival, in seconds",
  "tpot_s": "(last token - first) / (output_tokens - 1), in seconds; may be empty for one token",
}
# Beyond these a column is taken for milliseconds: nobody serves so slowly.
_MOST_TTFT_S = 20.0  # of the quickest request
_MOST_TPOT_S = 2.0  # of the quickest request
_LONG_GAP_S = 60.0  # on average: some traffic is so thin, so it is only asked about


class Measured(NamedTuple):
  """One request as a real system served it. `tpot_s` is None for one output token, `itl_s` where
  only the mean of its gaps is known.
  """

  arrival_s: float
  prompt_tokens: int
  output_tokens: int
  ttft_s: float
  tpot_s: float | None
  itl_s: tuple[float, ...] | None = None

  @property
  def e2e_s(self) -> float:
    return self.ttft_s + (self.tpot_s or 0.0) * (self.output_tokens - 1)


def read_requests(path: str | os.PathLike[str]) -> tuple[Measured, ...]:
  """Reads a CSV file, plain or .gz, with the columns `COLUMNS`, in any order beside others.

  A column `GAPS` stands for `tpot_s`, which follows from it.

  Raises:
    ValueError: what is wrong with it, with file, row and column: a column or a value that is
      missing or no number, times that go back, a first token before its arrival, milliseconds.
  """
  trace = read_trace(path)
  data = pathlib.Path(path).read_bytes()
  if data.startswith(b"\x1f\x8b"):
    data = gzip.decompress(data)
  reader = csv.DictReader(data.decode("utf-8-sig").splitlines(), skipinitialspace=True)
  has_gaps = GAPS in reader.fieldnames
  missing = [
    name
    for name in COLUMNS
    if name not in reader.fieldnames and not (has_gaps and name == "tpot_s")
  ]
  if missing:
    found = ", ".join(reader.fieldnames)[:100]
    raise ValueError(f"{path}:1: no column {', '.join(missing)} (found: {found})")
  rows = []
  for record, row in zip(reader, trace.rows, strict=True):
    where = f"{path}:{row.line}"
    ttft_s = _seconds(where, record, "ttft_s")
    if ttft_s < 0:
      raise ValueError(f"{where}: ttft_s={ttft_s}: its first token came before its arrival")
    tpot_s = itl_s = None
    if has_gaps:
      itl_s = _gaps(where, record)
      if not itl_s and row.output_tokens > 1:
        raise ValueError(f"{where}: {GAPS} is missing: {row.output_tokens} output tokens have gaps")
      if itl_s and len(itl_s) >= row.output_tokens:
        raise ValueError(
          f"{where}: {GAPS} has {len(itl_s)} gaps, but {row.output_tokens} output tokens have "
          f"{row.output_tokens - 1} at most"
        )
    if row.output_tokens > 1:
      if has_gaps:
        tpot_s = sum(itl_s) / (row.output_tokens - 1)
      else:
        tpot_s = _seconds(where, record, "tpot_s")
      if tpot_s < 0:
        raise ValueError(f"{where}: tpot_s={tpot_s}: its last token came before its first")
    rows.append(Measured(row.arrival_s, *row.lengths, ttft_s, tpot_s, itl_s))
  check_units(path, rows, [row.line for row in trace.rows])
  return tuple(rows)


def _seconds(where: str, record: Mapping[str, str | None], name: str) -> float:
  text = (record[name] or "").strip()
  if not text:
    raise ValueError(f"{where}: {name} is missing")
  try:
    value = float(text)
  except ValueError:
    raise ValueError(f"{where}: {name}={text!r} is not a number") from None
  if not math.isfinite(value):
    raise ValueError(f"{where}: {name}={text} is not a time")
  return value


def _gaps(where: str, record: Mapping[str, str | None]) -> tuple[float, ...]:
  gaps_s = []
  for text in re.split(r"[\s;]+", (record[GAPS] or "").strip()):
    if text:
      gap_s = _seconds(where, {GAPS: text}, GAPS)
      if gap_s < 0:
        raise ValueError(f"{where}: {GAPS}={text}: a token came before the one before it")
      gaps_s.append(gap_s)
  return tuple(gaps_s)


def check_units(
  path: str | os.PathLike[str], rows: Sequence[Measured], lines: Sequence[int]
) -> None:
  """Raises ValueError for columns that can only be milliseconds."""
  for name, most_s in (("ttft_s", _MOST_TTFT_S), ("tpot_s", _MOST_TPOT_S)):
    values = [(getattr(row, name), line) for row, line in zip(rows, lines)]
    least_s, line = min((v for v in values if v[0] is not None), default=(0.0, 1))
    if least_s > most_s:
      raise ValueError(
        f"{path}:{line}: {name}={least_s:g} is the least of its column: milliseconds? "
        f"it must be in seconds"
      )


def doubt(rows: Sequence[Measured]) -> str | None:
  """What is to be asked about arrivals that are far apart, or None."""
  gap_s = (rows[-1].arrival_s - rows[0].arrival_s) / len(rows)
  if gap_s <= _LONG_GAP_S:
    return None
  return (
    f"arrival_s: {gap_s:.0f} seconds for each of {len(rows)} requests; if that column is in "
    f"milliseconds, what was simulated is wrong"
  )


def to_requests(rows: Sequence[Measured], *, more_tokens: int = 0) -> tuple[Request, ...]:
  """What was asked, the first request at 0; `more_tokens` of output each."""
  start_s = rows[0].arrival_s
  return make_requests(
    [row.arrival_s - start_s for row in rows],
    [(row.prompt_tokens, row.output_tokens + more_tokens) for row in rows],
    None,
    SamplingParams(max_tokens=1),
  )
