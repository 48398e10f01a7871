"""The frame that figures are made in."""

from __future__ import annotations

import pathlib
import types
from typing import NamedTuple

import pytest

from experiments import reproduce
from experiments.program import SILENT
from experiments.reproduction import reduce
from experiments.reproduction.bench import Bench, _source
from experiments.reproduction.figure import HOLDS, MISSING, NOT, Compared, Figure, Found, Judged
from experiments.reproduction.page import Entry, counted, counts, markdown, web_page
from experiments.sweep import make_sweep

pytestmark = pytest.mark.quick


def _figure(name="paper/fig1", **changes) -> Figure:
  fields = dict(
    name=name, title="a title", kind="analytic", claims=("It grows.",), make=lambda bench: _found()
  )
  return Figure(**fields | changes)


def _found(**changes) -> Found:
  fields = dict(columns=("x", "y"), rows=[(1, 2)], judged=[Judged(HOLDS, "By 2.")])
  return Found(**fields | changes)


def test_a_row_has_a_cell_for_each_column():
  with pytest.raises(ValueError, match=r"\(1,\) has not the columns"):
    _found(rows=[(1,)])


def test_several_claims_are_counted_in_the_plural():
  words = {counted(verdict, n) for verdict in (HOLDS, "in part", NOT) for n in (1, 2)}
  assert words == {
    "1 holds", "2 hold", "1 in part", "2 in part", "1 does not hold", "2 do not hold"
  }  # fmt: skip


def test_a_verdict_is_one_of_four():
  with pytest.raises(ValueError, match="verdict='perhaps'"):
    _found(judged=[Judged("perhaps", "")])


def test_numbers_read_by_eye_are_shown_but_not_counted_as_errors():
  found = _found(compared=[Compared("a", 2.0, 3.0), Compared("b", 1.0, 9.0, is_read=True)])
  assert found.errors_percent == pytest.approx([50.0])
  assert found.compared[1].error_percent == pytest.approx(800)


def test_every_claim_of_a_figure_that_could_not_be_made_is_missing():
  entries = [
    Entry(_figure(claims=("one", "two")), None, "Not made: no trace."),
    Entry(_figure("paper/fig2"), _found(judged=[Judged(NOT, "It falls.")])),
  ]
  assert counts(entries) == {HOLDS: 0, "in part": 0, NOT: 1, MISSING: 2}


def test_pages_have_every_claim_with_its_verdict_and_headlines_first():
  entries = [
    Entry(_figure("paper/fig1"), _found(notes=["A stand-in: <none>."]), picture=True),
    Entry(_figure("paper/fig2", claims=("Twice.",), is_headline=True), None, "Not made: no data."),
  ]
  text = markdown(entries, "files", "Made today.")
  assert text.index("## paper/fig2") < text.index("## paper/fig1")
  assert "- **missing**: Twice. Not made: no data." in text
  assert "- **holds**: It grows. By 2." in text
  assert "![paper/fig1](files/paper-fig1.png)" in text
  page = web_page(entries, "Made today.")
  assert "A stand-in: &lt;none&gt;." in page and page.index("paper-fig2") < page.index("paper-fig1")


def test_a_link_of_the_page_is_the_anchor_of_its_heading():
  figure = _figure("paper/fig1", title="TTFT (s), P90 & more")
  text = markdown([Entry(figure, _found())], "files", "")
  assert "(#paperfig1-ttft-s-p90--more)" in text


def test_a_figure_has_claims_and_a_known_kind(tmp_path: pathlib.Path):
  with pytest.raises(ValueError, match="kind='guessed'"):
    _figure(kind="guessed")
  with pytest.raises(ValueError, match="claims nothing"):
    _figure(claims=())


def test_what_is_kept_depends_on_all_that_its_reducer_names():
  own = _source(reduce.slowest_micros)
  assert own.keys() >= {"slowest_micros", "_micros", "_tbt_s"}
  assert _source(reduce.stalls).keys() >= {"stalls", "STALL_PERCENTS"}
  assert "outpouring" not in _source(reduce.requests)


class _Run(NamedTuple):
  """A point whose result is known."""

  code: str

  def key(self) -> str:
    return self.code


class _Known:
  """A sweep that computes nothing."""

  def run(self, work, todo):
    for item in todo:
      yield item, [1.0]


def test_only_runs_that_a_command_takes_over_are_kept_from_before(tmp_path: pathlib.Path):
  def num_kept(*codes: str) -> int:
    bench = Bench(
      out=tmp_path,
      sweep=_Known(),
      progress=SILENT,
      quick=False,
      data_dir=tmp_path,
      trace_dir=tmp_path,
    )
    for _ in range(2):  # its own runs are not from before when a second figure asks for them
      assert list(bench.run({code: _Run(code) for code in codes}).values()) == [[1.0]] * len(codes)
    return bench.num_kept

  assert num_kept("old code") == 0
  assert num_kept("new code") == 0  # though there is a file with runs
  assert num_kept("new code", "old code", "newest code") == 2


@pytest.mark.parametrize("in_place", [True, False])
def test_an_interrupted_page_says_so_and_takes_the_place_of_no_whole_one(
  tmp_path, monkeypatch, in_place
):
  def interrupted(bench):
    raise KeyboardInterrupt

  monkeypatch.setattr(
    reproduce,
    "FLAGS",
    types.SimpleNamespace(quick=False, figure="all", jobs=1, data_dir=".", trace_dir="."),
  )
  if in_place:
    monkeypatch.setattr(reproduce, "ROOT", tmp_path)
  page = tmp_path / "REPRODUCTION.md"
  page.write_text("all figures")
  figures = [_figure(), _figure("paper/fig2", make=interrupted), _figure("paper/fig3")]
  kept = tmp_path / "kept"
  prepared = reproduce.Prepared(figures, tmp_path, kept, make_sweep(jobs=1, ray=None))
  assert reproduce.run(prepared) == 130
  if in_place:
    assert page.read_text() == "all figures"
  else:
    assert "paper/fig1" in page.read_text()
    assert "Interrupted: 2 figures are not here." in page.read_text()
