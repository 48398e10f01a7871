"""Every notebook runs from top to bottom, and shows pictures."""

from __future__ import annotations

import json
import os
import pathlib
import time

import pytest

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "experiments" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MOST_S = 120.0


def _cells(path: pathlib.Path) -> list[dict]:
  return json.loads(path.read_text())["cells"]


@pytest.mark.quick
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs_and_begins_with_words(path):
  cells = _cells(path)
  assert cells[0]["cell_type"] == "markdown" and cells[0]["source"][0].startswith("# ")
  assert not any(cell.get("outputs") for cell in cells)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom_in_time_and_shows_pictures(path, tmp_path):
  nbclient = pytest.importorskip("nbclient")
  nbformat = pytest.importorskip("nbformat")
  book = nbformat.read(path, as_version=4)
  os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
  start_s = time.monotonic()
  nbclient.NotebookClient(
    book, timeout=600, resources={"metadata": {"path": str(tmp_path)}}
  ).execute()
  took_s = time.monotonic() - start_s
  outputs = [output for cell in book.cells for output in cell.get("outputs", ())]
  pictures = [output for output in outputs if "image/png" in output.get("data", {})]
  assert len(pictures) >= 1
  assert took_s < MOST_S, f"{path.name} took {took_s:.0f} s"
