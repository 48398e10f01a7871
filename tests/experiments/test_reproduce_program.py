"""`python -m experiments.reproduce --quick` on three figures, as a user runs it: its tables."""

from __future__ import annotations

import csv
import itertools
import pathlib
import subprocess
import sys

import pytest

from experiments.program import ROOT
from experiments.reproduction import published_distserve as published
from experiments.reproduction.figure import VERDICTS
from experiments.reproduction.sarathi_timelines import FIG7, NAMES

pytestmark = pytest.mark.slow

NAMED = ("distserve/fig4", "sarathi/fig7", "seed/intensity")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[str, pathlib.Path]:
  """What the command printed, and its folder."""
  out = tmp_path_factory.mktemp("reproduce")
  asked = [f"--figure={','.join(NAMED)}", "--quick", f"--out={out}"]
  done = subprocess.run(
    [sys.executable, "-m", "experiments.reproduce", *asked],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 0, done.stderr
  return done.stdout, out


def _table(made: tuple[str, pathlib.Path], figure: str) -> list[dict[str, str]]:
  path = made[1] / "experiments/figures/reproduction" / f"{figure.replace('/', '-')}.csv"
  with open(path, newline="") as file:
    return list(csv.DictReader(file))


def test_every_claim_of_the_three_is_judged_on_the_page(made):
  printed, out = made
  page = (out / "REPRODUCTION.md").read_text()
  verdicts = [line.split("**")[1] for line in page.splitlines() if line.startswith("- **")]
  assert len(verdicts) == 7 and set(verdicts) <= set(VERDICTS) - {"missing"}
  assert "7 claims of 3 figures and tables" in printed and "7 claims of 3 figures" in page
  for figure in NAMED:
    assert (out / "experiments/figures/reproduction" / f"{figure.replace('/', '-')}.png").exists()


def test_figure_4_has_the_published_points_and_a_loop_whose_queues_grow(made):
  rows = _table(made, "distserve/fig4")
  ttft_s = {(row["placement"], row["by"][:6], float(row["rate a GPU (1/s)"])):
            float(row["mean TTFT (s)"]) for row in rows}  # fmt: skip
  curves = {"inter-op": published.FIG4_INTER}
  curves |= {f"intra-op, K = {k}": points for k, points in published.FIG4_INTRA.items()}
  for name, points in curves.items():
    for rate, there_s in points:
      assert ttft_s[name, "closed", rate] == pytest.approx(there_s, abs=1e-4)
  inter, intra = ([ttft_s[name, "servin", rate] for rate in (1.0, 2.0, 3.0)]
                  for name in ("inter-op", f"intra-op, K = {published.FIG4_SPEEDUP}"))  # fmt: skip
  shares = [a / b for a, b in zip(intra, inter)]
  assert shares[0] < 0.7 and shares == sorted(shares)  # execution decides, then queueing
  assert all(slow < fast for own in (inter, intra) for slow, fast in itertools.pairwise(own))


def test_figure_7_has_every_step_of_every_request_under_four_schedulers(made):
  bars: dict[tuple[str, str], list[tuple[float, float, str]]] = {}
  for row in _table(made, "sarathi/fig7"):
    bar = (float(row["start_s"]), float(row["end_s"]), row["kind"])
    bars.setdefault((row["system"], row["request"]), []).append(bar)
  systems = {system for system, _ in bars}
  assert systems == {"vLLM", "Orca", "FasterTransformer", "Sarathi-Serve"}
  longest_s = dict.fromkeys(systems, 0.0)
  for (system, name), own in bars.items():
    _, _, num_output = FIG7[NAMES.index(name)]
    assert [kind for *_, kind in own].count("decode") == num_output - 1  # prefill gives the first
    for (_, end_s, _), (start_s, *_) in itertools.pairwise(own):
      assert start_s >= end_s
    if name in "AB":
      ends_s = [end_s for _, end_s, kind in own if kind == "decode"]
      gaps_s = [b - a for a, b in itertools.pairwise(ends_s)]
      longest_s[system] = max(longest_s[system], *gaps_s)
  assert 3 * longest_s["Sarathi-Serve"] < min(longest_s["vLLM"], longest_s["Orca"])


def test_intensity_is_that_of_a_product_of_matrices(made):
  rows = [row for row in _table(made, "seed/intensity") if row["what"] == "matrix 4096 x 4096"]
  assert len(rows) == 14
  for row in rows:
    n, d = int(row["tokens or rows"]), 4096
    num_bytes = 2 * (d * d + 2 * n * d)  # the matrix, what goes in, what comes out
    assert float(row["flop_per_byte"]) == pytest.approx(2 * n * d * d / num_bytes)
