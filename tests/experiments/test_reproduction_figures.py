"""Pictures of reproduced figures can be read: labels on axes, legends beside what is drawn."""

from __future__ import annotations

import pytest

from experiments.figures.reproduction import Bars, Panel, Series, draw

pytest.importorskip("matplotlib")
pytestmark = pytest.mark.quick


def _labels(axis) -> list[str]:
  """Those of a drawn axis that are in view."""
  low, high = sorted(axis.get_view_interval())
  ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
  return [t.label1.get_text() for t in ticks if low <= t.get_loc() <= high and t.label1.get_text()]


@pytest.mark.parametrize("ys", [(0.3, 2.4), (22.0, 645.0), (1.05, 1.7), (4.0, 4000.0)])
def test_a_logarithmic_axis_has_two_labels_or_more(ys, tmp_path):
  curve = Panel("", "x", "y", [Series("a", [(1, ys[0]), (2, ys[1])])], is_log_y=True)
  bars = Bars("", "y", ["a"], {"one": [ys[0]], "two": [ys[1]]}, is_log_y=True)
  for axes in draw([curve, bars], tmp_path / "a.png", "").axes:
    labels = _labels(axes.yaxis)
    assert len(labels) >= 2 and len(labels) == len(set(labels))


def test_a_legend_that_would_lie_over_curves_is_below_them(tmp_path):
  across = [Series(f"curve {i}", [(0, i), (1, 9 - i)], colour=i) for i in range(10)]
  short = [Series("curve", [(0, 0), (1, 1)])]
  figure = draw([Panel("", "x", "y", across), Panel("", "x", "y", short)], tmp_path / "a.png", "")
  full, roomy = figure.axes
  inside = [a.get_legend().get_window_extent().y0 > a.get_window_extent().y0 for a in (full, roomy)]
  assert inside == [False, True]
  assert full.get_legend().get_window_extent().y1 <= full.get_window_extent().y0
  assert full.get_tightbbox().y0 >= 0  # and in the picture
