"""The table of measured configs: what is written is read back, and the nearest entry is found."""

from __future__ import annotations

import dataclasses
import json

import pytest

from pdjax.kernels.tile_config import Case, Chip, TileConfig
from pdjax.kernels.tuning import Tuned, packaged_table, read_table, table_text, tuned

pytestmark = pytest.mark.quick

CASE = Case(
  kernel="decode",
  num_heads=32,
  num_kv_heads=8,
  head_dim=128,
  page_size=64,
  dtype="bfloat16",
  cache_dtype="bfloat16",
)
CHIP = Chip(platform="gpu", kind="NVIDIA H200", compute_capability=9.0, num_cores=132)


def entry(programs: int = 100, *, chip: str = CHIP.kind, **changes) -> Tuned:
  """An entry that can be told by its `programs`."""
  return Tuned(
    chip=chip,
    case=dataclasses.replace(CASE, **changes),
    config=TileConfig(backend="triton", programs=programs),
    measured_s=2.5e-4,
    date="2026-11-30",
    jax_version="0.11.2",
  )


def found(*table: Tuned, **changes) -> int | None:
  config = tuned(CHIP, dataclasses.replace(CASE, **changes), table)
  return config and config.programs


def test_what_is_written_is_read_back(tmp_path):
  table = (entry(1), entry(2, kernel="prefill"), entry(3, chip="NVIDIA H100"))
  path = tmp_path / "tuning.json"
  path.write_text(table_text(table))
  assert read_table(path) == table
  path.write_text(table_text(()))
  assert read_table(path) == ()


def test_the_packaged_table_can_be_read_and_is_what_is_asked_by_default():
  table = packaged_table()
  for known in table:
    chip = Chip(platform="gpu", kind=known.chip)
    assert tuned(chip, known.case) == known.config
  assert tuned(Chip(platform="gpu", kind="no such chip"), CASE) is None


def test_the_entry_of_the_case_itself_comes_first():
  near = [entry(n, page_size=n) for n in (16, 32, 128)] + [entry(7, num_heads=16, num_kv_heads=4)]
  assert found(*near, entry(64), *near) == 64


@pytest.mark.parametrize(
  ("page_size", "nearest"), [(16, 16), (20, 16), (32, 16), (33, 64), (60, 64), (256, 64)]
)
def test_the_nearest_page_size_by_ratio_stands_in(page_size, nearest):
  table = [entry(64, page_size=64), entry(16, page_size=16)]
  assert found(*table, page_size=page_size) == nearest


def test_of_equal_page_sizes_the_nearest_number_of_heads_stands_in():
  table = [entry(n, num_heads=4 * n, num_kv_heads=n) for n in (1, 2, 16)]
  assert found(*table) == 16
  assert found(*table, num_heads=12, num_kv_heads=3) == 2
  farther = entry(5, page_size=32)
  assert found(farther, *table) == 16, "the page size counts before the heads"


@pytest.mark.parametrize(
  "change",
  [
    {"kernel": "prefill"},
    {"head_dim": 64},
    {"num_heads": 64},  # 8 heads a kv head
    {"dtype": "float16"},
    {"cache_dtype": "int8"},
  ],
)
def test_an_entry_of_another_kind_never_stands_in(change):
  assert found(entry(**change)) is None
  assert found(entry(9, **change), **change) == 9


def test_an_entry_of_another_chip_never_stands_in():
  assert found(entry(chip="NVIDIA H100 80GB HBM3")) is None


# name: (change to an entry's plain data, what the message must hold)
WRONG = {
  "no field": (lambda row: row.pop("date"), "Tuned has no date"),
  "unknown field": (lambda row: row.update(speed=3), "Tuned has unknown speed"),
  "no field of the case": (lambda row: row["case"].pop("head_dim"), "Case has no head_dim"),
  "type": (lambda row: row["case"].update(head_dim="128"), "head_dim='128' must be of type int"),
  "bool for a number": (lambda row: row["config"].update(block_q=True), "block_q=True"),
  "no object": (lambda row: row.update(case=3), "3 is no object with the fields of Case"),
  "backend": (lambda row: row["config"].update(backend="cuda"), "backend='cuda'"),
  "tile": (lambda row: row["config"].update(block_k=0), "block_k=0"),
  "kernel": (lambda row: row["case"].update(kernel="decoding"), "kernel='decoding'"),
  "page size": (lambda row: row["case"].update(page_size=0), "page_size=0"),
  "heads": (lambda row: row["case"].update(num_heads=30), "num_heads=30 is no multiple of 8"),
  "interpreted": (lambda row: row["config"].update(interpret=True), "interpret=True"),
  "time": (lambda row: row.update(measured_s=0), "measured_s=0.0 must be positive"),
  "no time": (lambda row: row.update(measured_s=float("inf")), "measured_s=inf"),
  "date": (lambda row: row.update(date="30.11.2026"), "30.11.2026"),
  "chip": (lambda row: row.update(chip=""), "chip is empty"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_entry_is_named_with_its_number(tmp_path, name):
  change, message = WRONG[name]
  rows = json.loads(table_text([entry(), entry(kernel="prefill")]))
  change(rows[1])
  path = tmp_path / "tuning.json"
  path.write_text(json.dumps(rows))
  with pytest.raises(ValueError) as error:
    read_table(path)
  (line,) = str(error.value).splitlines()
  assert line.startswith(f"{path}: entry 1: ") and message in line


def test_every_wrong_entry_has_its_line(tmp_path):
  rows = json.loads(table_text([entry(), entry(kernel="write"), entry(page_size=16), entry()]))
  rows[1]["measured_s"], rows[2] = -1, "nothing"
  path = tmp_path / "tuning.json"
  path.write_text(json.dumps(rows))
  with pytest.raises(ValueError) as error:
    read_table(path)
  lines = str(error.value).splitlines()
  assert [line.split("entry ")[1][0] for line in lines] == ["1", "2", "3"]
  assert "has the chip and the case of entry 0" in lines[2]


@pytest.mark.parametrize("text", ["", "{}", "[1"])
def test_what_is_no_table_is_refused(tmp_path, text):
  path = tmp_path / "tuning.json"
  path.write_text(text)
  with pytest.raises(ValueError, match=r"tuning\.json: (not JSON|must be a list)"):
    read_table(path)
