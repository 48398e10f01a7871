"""Pictures of a diagnosis: what is drawn is what was found."""

from __future__ import annotations

import collections

import numpy as np
import pytest

from experiments.injected import INJECTED, draw_case
from pdjax.analysis.diagnose import Cause, Observed, Symptom
from pdjax.analysis.signatures import diagnose_requests
from pdjax.core.request import Slo

pytest.importorskip("matplotlib")

from experiments.figures.diagnose import COLOURS, draw_confusion, draw_diagnosis


def test_bars_add_up_to_all_ttfts_and_colours_are_those_of_causes_found(tmp_path):
  case = draw_case(Cause.QUEUEING, np.random.default_rng([5, 1]))
  found = diagnose_requests(case.requests, case.slo)
  by_id = dict(enumerate(case.requests))
  path = tmp_path / "diagnose.png"
  figure = draw_diagnosis(by_id, found, path, "a run")
  assert path.stat().st_size > 10_000
  above = figure.axes[0]
  drawn_s = collections.Counter()
  for bar in above.patches:
    drawn_s[round(bar.get_x(), 9)] += bar.get_height()
  edges = np.array(sorted(drawn_s))
  bins = np.searchsorted(edges, [r.arrival_s + 1e-9 for r in case.requests], side="right") - 1
  for number, edge in enumerate(edges):
    own = [r.ttft_s for r, at in zip(case.requests, bins) if at == number]
    assert drawn_s[edge] == pytest.approx(np.mean(own) if own else 0.0, rel=1e-6)
  labels = {text.get_text() for text in figure.legends[0].get_texts()}
  lost_s = collections.Counter()
  for loss in found.losses:
    if loss.symptom is not Symptom.SLOW:
      lost_s.update(loss.lost_s if loss.symptom is Symptom.LATE else {loss.main: 1e9})
  all_s = sum(r.ttft_s for r in case.requests)
  assert {str(c) for c, s in lost_s.items() if s > 0.01 * all_s} <= labels
  assert labels <= {str(c) for c, s in lost_s.items() if s > 1e-4 * all_s}
  assert set(COLOURS) >= {Cause(label) for label in labels}


def test_requests_without_arrivals_or_gaps_can_be_drawn(tmp_path):
  requests = [
    Observed(arrival_s=None, prompt_tokens=9, output_tokens=9, ttft_s=1.0, tpot_s=0.1)
  ] * 30
  found = diagnose_requests(requests, Slo(ttft_s=0.5, tpot_s=0.2))
  figure = draw_diagnosis(dict(enumerate(requests)), found, tmp_path / "a.png", "no arrivals")
  assert figure.axes[1].get_xlabel() == "requests in their order"


def test_every_run_of_a_confusion_matrix_is_drawn_once(tmp_path):
  counts = {(INJECTED[0], INJECTED[0]): 7, (INJECTED[1], Cause.UNEXPLAINED): 3}
  figure = draw_confusion({"a": counts, "b": counts}, INJECTED, tmp_path / "b.png")
  for axes in figure.axes:
    assert sorted(text.get_text() for text in axes.texts) == ["3", "7"]
    assert "7 of 10 right" in axes.get_title(loc="left")
