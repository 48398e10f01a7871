from __future__ import annotations

import re

import pytest

from pdjax.workloads.traces import read_trace

pytestmark = pytest.mark.quick

HEADER = "arrival_s,prompt_tokens,output_tokens\n"


def write(tmp_path, text, encoding="utf-8"):
  path = tmp_path / "trace.csv"
  path.write_bytes(text.encode(encoding))
  return path


def test_rows_are_read_in_order(tmp_path):
  rows = read_trace(write(tmp_path, HEADER + "0,100,20\n1.5,7,1\n1.5,8,2\n"))
  assert rows == [(0.0, 100, 20, 2), (1.5, 7, 1, 3), (1.5, 8, 2, 4)]  # the last is the line
  assert [row.lengths for row in rows] == [(100, 20), (7, 1), (8, 2)]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_other_columns_orders_and_line_ends_are_read_alike(tmp_path, encoding):
  text = "user,output_tokens,arrival_s,prompt_tokens\r\nann,20,0,100\r\n\r\nbob, 1, 1.5, 7"
  rows = read_trace(write(tmp_path, text, encoding))
  assert rows == [(0.0, 100, 20, 2), (1.5, 7, 1, 4)]  # blank lines count as lines


@pytest.mark.parametrize(
  ("text", "line", "problem"),
  [
    ("", 1, "no column arrival_s, prompt_tokens, output_tokens"),
    ("arrival_s,prompt_tokens\n0,1\n", 1, "no column output_tokens"),
    (HEADER, 1, "no rows"),
    (HEADER + "0,1,1\nx,1,1\n", 3, "arrival_s='x' is not a number"),
    (HEADER + "0,1.5,1\n", 2, "prompt_tokens='1.5' is not a whole number"),
    (HEADER + "0,1,1\n\n2,1,many\n", 4, "output_tokens='many' is not a whole number"),
    (HEADER + "0,1,\n", 2, "output_tokens is missing"),
    (HEADER + "0,1\n", 2, "output_tokens is missing"),
    (HEADER + "0,1,1,9\n", 2, "more values than columns"),
    (HEADER + "-0.5,1,1\n", 2, "arrival_s=-0.5 must be from 0 to 8388608 seconds"),
    (HEADER + "nan,1,1\n", 2, "arrival_s=nan must be from 0"),
    (HEADER + "inf,1,1\n", 2, "arrival_s=inf must be from 0"),
    (HEADER + "0,0,1\n", 2, "prompt_tokens=0 must be at least 1"),
    (HEADER + "0,-3,1\n", 2, "prompt_tokens=-3 must be at least 1"),
    (HEADER + "0,1,0\n", 2, "output_tokens=0 must be at least 1"),
    (HEADER + "0,1,1\n2,1,1\n1.5,1,1\n", 4, "arrival_s=1.5 is before the row above (2.0)"),
    (HEADER + '0,1,1\n"0,1,1\n', 3, "unexpected end of data"),
  ],
)
def test_errors_name_the_file_the_line_and_what_is_wrong(tmp_path, text, line, problem):
  path = write(tmp_path, text)
  with pytest.raises(ValueError, match=re.escape(f"{path}:{line}: {problem}")):
    read_trace(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
  missing = tmp_path / "missing.csv"
  with pytest.raises(ValueError, match=re.escape(f"{missing}: cannot read the trace: No such")):
    read_trace(missing)
  with pytest.raises(ValueError, match=re.escape(f"{tmp_path}: cannot read the trace")):
    read_trace(tmp_path)
  binary = tmp_path / "binary.csv"
  binary.write_bytes(b"\x1f\x8b\xff\xfe")
  with pytest.raises(ValueError, match=re.escape(f"{binary}: cannot read the trace: not a text")):
    read_trace(binary)
