from __future__ import annotations

import gzip
import json
import pathlib
import re

import numpy as np
import pytest

from pdjax.workloads.traces import MOONCAKE_BLOCK_TOKENS, Blocks, Trace, TraceRow, read_trace

pytestmark = pytest.mark.quick

HEADER = "arrival_s,prompt_tokens,output_tokens\n"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
LENGTHS = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n"
PUBLISHED = pathlib.Path(__file__).resolve().parents[3] / "shared" / "data" / "traces"


def write(tmp_path, text, encoding="utf-8"):
  path = tmp_path / "trace.csv"
  path.write_bytes(text.encode(encoding))
  return path


def json_row(timestamp=0, input_length=600, output_length=5, hash_ids=(0, 1), **more):
  record = dict(timestamp=timestamp, input_length=input_length, output_length=output_length)
  return json.dumps(record | {"hash_ids": list(hash_ids)} | more) + "\n"


def rows_of(trace):
  """Rows without blocks, as plain tuples: arrival, prompt, output, line."""
  return [row[:4] for row in trace.rows]


def published(name):
  path = PUBLISHED / name
  if not path.exists():
    pytest.skip(f"no published trace {name} beside this project, in shared/data/traces")
  return read_trace(path)


def test_rows_are_read_in_order(tmp_path):
  trace = read_trace(write(tmp_path, HEADER + "0,100,20\n1.5,7,1\n1.5,8,2\n"))
  assert rows_of(trace) == [(0.0, 100, 20, 2), (1.5, 7, 1, 3), (1.5, 8, 2, 4)]
  assert [row.lengths for row in trace.rows] == [(100, 20), (7, 1), (8, 2)]
  assert (trace.kind, trace.has_arrivals, trace.blocks) == ("pdjax", True, None)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_other_columns_orders_and_line_ends_are_read_alike(tmp_path, encoding):
  text = "user,output_tokens,arrival_s,prompt_tokens\r\nann,20,0,100\r\n\r\nbob, 1, 1.5, 7"
  trace = read_trace(write(tmp_path, text, encoding))
  assert rows_of(trace) == [(0.0, 100, 20, 2), (1.5, 7, 1, 4)]  # blank lines count as lines


def test_an_azure_trace_begins_at_0_and_keeps_all_decimals_of_its_dates(tmp_path):
  text = AZURE + (
    "2023-11-16 23:59:59.9999999,374,44\r\n"
    "2023-11-17 00:00:00,396,109\r\n"
    "2023-11-17 00:00:00.0000001+00:00,879,55"
  )
  trace = read_trace(write(tmp_path, text))
  assert trace.kind == "azure"
  assert [row.arrival_s for row in trace.rows] == [0.0, 1e-7, 2e-7]
  assert [row.lengths for row in trace.rows] == [(374, 44), (396, 109), (879, 55)]


def test_lengths_alone_have_no_arrivals_and_arrivals_beside_them_are_taken(tmp_path):
  trace = read_trace(write(tmp_path, LENGTHS + "74,918,992,0.08\n290,905,1195,0.3\n"))
  assert rows_of(trace) == [(None, 74, 918, 2), (None, 290, 905, 3)]
  assert (trace.kind, trace.has_arrivals) == ("lengths", False)
  trace = read_trace(write(tmp_path, "arrived_at,num_prefill_tokens,num_decode_tokens\n0.25,3,4\n"))
  assert (trace.kind, rows_of(trace)) == ("vidur", [(0.25, 3, 4, 2)])


def test_a_mooncake_trace_has_blocks_of_512_tokens(tmp_path):
  text = json_row(0, 1024, 9, [0, 1]) + "\n" + json_row(2500, 1025, 1, [0, 1, 2], user="ann")
  trace = read_trace(write(tmp_path, text))
  assert rows_of(trace) == [(0.0, 1024, 9, 1), (2.5, 1025, 1, 3)]
  assert (trace.kind, trace.blocks) == ("mooncake", Blocks(((0, 1), (0, 1, 2)), 512))


@pytest.mark.parametrize("text", [HEADER + "0,1,2\n", json_row(), LENGTHS + "1,2,3,0.5\n"])
def test_gzipped_files_are_read_alike_whatever_their_name(tmp_path, text):
  plain = read_trace(write(tmp_path, text))
  packed = tmp_path / "packed.csv"
  packed.write_bytes(gzip.compress(text.encode()))
  assert read_trace(packed) == plain


@pytest.mark.parametrize(
  ("text", "line", "problem"),
  [
    ("", 1, "the file is empty"),
    ("a,b,c\n1,2,3\n", 1, "no trace of a known kind: neither CSV with arrival_s,prompt_tokens"),
    ("TIMESTAMP,ContextTokens\n", 1, "no column GeneratedTokens (found: TIMESTAMP, ContextT"),
    ("num_prefill_tokens,arrived_at\n1,2\n", 1, "no column num_decode_tokens"),
    (AZURE + "2023-11-16 18:15,1,1\n", 2, "TIMESTAMP='2023-11-16 18:15' is not a date like 20"),
    (AZURE + "2023-13-16 18:15:46.1,1,1\n", 2, "TIMESTAMP='2023-13-16 18:15:46.1' is not a date"),
    (
      AZURE + "2023-11-16 18:15:46.2,1,1\n2023-11-16 18:15:46.1,1,1\n",
      3,
      "TIMESTAMP=2023-11-16 18:15:46.1 is before the row above",
    ),
    (LENGTHS + "1,0,1,1\n", 2, "num_decode_tokens=0 must be at least 1"),
    (json_row() + '{"timestamp": 1', 2, "not JSON: Expecting ',' delimiter at column 16"),
    ("[" + json_row() + "]", 1, "a JSON list; in a trace each line is a JSON object of its own"),
    (json_row() + "[1]\n", 2, "no timestamp, input_length, output_length, hash_ids"),
    (json_row() + '{"timestamp": 1, "input_length": 5}', 2, "no output_length, hash_ids"),
    (json_row(input_length=1025), 1, "2 hash_ids, but input_length=1025 are 3 blocks of 512"),
    (json_row(hash_ids=(0, -1)), 1, "hash_ids is not a list of whole numbers"),
    (json_row(hash_ids=(0, 2**63)), 1, "hash_ids is not a list of whole numbers"),
    (json_row(timestamp="0"), 1, "timestamp='0' is not a number"),
    (json_row(timestamp=-1), 1, "timestamp=-1 must be from 0"),
    (json_row(input_length=600.0), 1, "input_length=600.0 is not a whole number"),
    (json_row(output_length=0), 1, "output_length=0 must be at least 1"),
    (json_row(timestamp=2) + json_row(timestamp=1), 2, "timestamp=1 is before the row above"),
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
    (HEADER + "0,1,1\n2,1,1\n1.5,1,1\n", 4, "arrival_s=1.5 is before the row above"),
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
  binary.write_bytes(b"\xff\xfe\x1f\x8b")
  with pytest.raises(ValueError, match=re.escape(f"{binary}: cannot read the trace: not a text")):
    read_trace(binary)
  packed = gzip.compress(b"a" * 1000)
  for damaged in (packed[:-9], packed[:12] + b"xxxx" + packed[16:], packed[:2]):
    binary.write_bytes(damaged)
    with pytest.raises(ValueError, match=re.escape(f"{binary}: cannot read the trace: a damaged")):
      read_trace(binary)


# What is done with a trace ------------------------------------------------------------------------


def mooncake(num_rows=400, seed=0):
  """A trace like Mooncake's: ticks of 3 s, lengths from 1 up, whatever its blocks."""
  rng = np.random.default_rng(seed)
  rows = []
  for i in range(num_rows):
    prompt, output = rng.integers(1, 5000, 2).tolist()
    ids = tuple(range(-(-prompt // MOONCAKE_BLOCK_TOKENS)))
    rows.append(TraceRow(3.0 * (i // 10), prompt, output, i + 1, ids))
  return Trace(kind="mooncake", rows=tuple(rows), block_tokens=MOONCAKE_BLOCK_TOKENS)


@pytest.mark.parametrize("scale", [1, 2, 32, 512])
def test_scaled_prompts_fill_as_many_scaled_blocks(scale):
  before = mooncake()
  after = before.scaled(scale)
  assert after.block_tokens == 512 // scale
  for row, old in zip(after.rows, before.rows, strict=True):
    assert -(-row.prompt_tokens // after.block_tokens) == len(row.block_ids)
    assert (row.block_ids, row.arrival_s, row.line) == (old.block_ids, old.arrival_s, old.line)
    assert 0 <= row.prompt_tokens - old.prompt_tokens / scale < 1
    assert row.output_tokens >= 1
    assert abs(row.output_tokens - old.output_tokens / scale) <= 0.5 or row.output_tokens == 1


def test_a_scale_that_breaks_blocks_is_refused():
  with pytest.raises(ValueError, match="length_scale=3 must divide the blocks of 512 tokens"):
    mooncake().scaled(3)
  with pytest.raises(ValueError, match="length_scale=0 must be at least 1"):
    mooncake().scaled(0)


def test_spread_requests_keep_their_order_and_their_tick():
  before = mooncake()
  after = before.spread(3.0, np.random.default_rng(1))
  times, ticks = ([row.arrival_s for row in t.rows] for t in (after, before))
  assert times == sorted(times)
  assert all(0 <= time_s - tick_s < 3 for time_s, tick_s in zip(times, ticks))
  assert len(set(times)) == len(times)
  assert np.mean(np.subtract(times, ticks)) == pytest.approx(1.5, abs=0.15)
  assert [row[1:] for row in after.rows] == [row[1:] for row in before.rows]
  assert after == before.spread(3.0, np.random.default_rng(1))
  assert after != before.spread(3.0, np.random.default_rng(2))


def test_slices_and_speed():
  trace = mooncake()
  assert trace.first(7).rows == trace.rows[:7]
  assert trace.first(1000) is trace
  assert trace.until(6.0).rows == trace.rows[:20]  # what arrives at 6 s is no longer in it
  assert [row.arrival_s for row in trace.faster(2.0).rows[::10]] == [1.5 * i for i in range(40)]
  with pytest.raises(ValueError, match=r"first request arrives at 6.0 s, not in 1.0"):
    Trace(kind="mooncake", rows=trace.rows[20:]).until(1.0)


def test_a_trace_says_what_was_done_to_it():
  trace = mooncake().scaled(32).until(60.0).first(50).spread(3.0, np.random.default_rng(0))
  assert trace.faster(2.0).changes == (
    "lengths divided by 32",
    "the first 60 s",
    "the first 50 of 200 requests",
    "arrivals spread over 3 s",
    "2 times as fast",
  )


# The published files ------------------------------------------------------------------------------

# Kind, rows, seconds, mean prompt and output, as numpy has them of the files.
FILES = {
  "AzureLLMInferenceTrace_conv.csv.gz": ("azure", 19_366, 3501.7, 1154.7, 211.1),
  "mooncake_fast25_conversation_trace.jsonl.gz": ("mooncake", 12_031, 3537.0, 12_035.1, 342.6),
  "mooncake_fast25_synthetic_trace.jsonl.gz": ("mooncake", 3993, 1022.0, 15_325.5, 149.1),
  "vidur_arxiv_summarization_lengths.csv.gz": ("lengths", 28_257, None, 2588.1, 291.4),
  "sarathi_sharegpt_8k_lengths.csv.gz": ("lengths", 30_731, None, 2340.0, 438.7),
}
# Hits of one cache without end, requests in order: share of blocks, share of tokens.
HITS = {
  "mooncake_fast25_conversation_trace.jsonl.gz": (0.3664, 0.3736),
  "mooncake_fast25_synthetic_trace.jsonl.gz": (0.6396, 0.6512),
}


@pytest.mark.once
@pytest.mark.parametrize("name", FILES)
def test_a_published_trace_has_the_rows_and_means_that_are_known_of_it(name):
  kind, num_rows, span_s, prompt, output = FILES[name]
  trace = published(name)
  assert (trace.kind, len(trace.rows)) == (kind, num_rows)
  if span_s is None:
    assert not trace.has_arrivals
  else:
    assert trace.rows[-1].arrival_s - trace.rows[0].arrival_s == pytest.approx(span_s, abs=0.05)
  assert np.mean([row.lengths for row in trace.rows], axis=0) == pytest.approx(
    (prompt, output), abs=0.05
  )


@pytest.mark.parametrize("name", HITS)
def test_the_blocks_of_a_published_trace_hit_as_often_as_is_known_of_it(name):
  assert hit_shares(published(name)) == pytest.approx(HITS[name], abs=5e-5)


@pytest.mark.parametrize("name", HITS)
def test_a_published_trace_divided_by_32_keeps_its_blocks_and_suits_a_small_model(name):
  before = published(name)
  after = before.scaled(32)
  assert after.block_tokens == 16
  assert all(-(-row.prompt_tokens // 16) == len(row.block_ids) for row in after.rows)
  assert after.blocks.ids == before.blocks.ids
  longest = {"conversation": 3954, "synthetic": 5982}
  assert max(sum(row.lengths) for row in after.rows) == longest[name.split("_")[2]]


def hit_shares(trace):
  """Of blocks and of tokens; a hit is the leading run of blocks that some request had before."""
  seen, hit_blocks, hit_tokens, num_tokens, num_blocks = set(), 0, 0, 0, 0
  for row in trace.rows:
    run = next((i for i, x in enumerate(row.block_ids) if x not in seen), len(row.block_ids))
    hit_blocks += run
    hit_tokens += min(run * trace.block_tokens, row.prompt_tokens)
    num_tokens += row.prompt_tokens
    num_blocks += len(row.block_ids)
    seen.update(row.block_ids)
  return hit_blocks / num_blocks, hit_tokens / num_tokens
