"""The pictures of a comparison, drawn from toy runs: two devices, 40 requests, three strategies."""

from __future__ import annotations

import builtins
import itertools

import numpy as np
import pytest

from experiments.figures import serving
from pdjax.core.clock import to_ticks
from pdjax.core.events import Arrived, Copied, EventLog, Failed, Finished, Preempted, Step
from pdjax.metrics.goodput import Slo
from pdjax.metrics.latency import interference, mean_phases, request_records

pytest.importorskip("matplotlib")

SLO = Slo(ttft_s=0.6, tpot_s=0.03)


class _ToyPool:
  """Takes turns: as many prompt tokens as `budget` allows, with every decode where `is_mixed`."""

  def __init__(self, name: str, budget: int, *, is_mixed: bool, decodes: bool = True):
    self.name, self.budget, self.is_mixed, self.decodes = name, budget, is_mixed, decodes
    self.waiting: list[list[int]] = []  # [request, start, left]
    self.running: dict[int, list[int]] = {}  # request: [position, left]
    self.now_s, self.num_steps = 0.0, 0

  def step(self, lengths: dict[int, tuple[int, int]]) -> Step | None:
    prefill, budget = [], self.budget
    for item in self.waiting:
      tokens = min(item[2], budget)
      if tokens:
        prefill.append((item[0], item[1], tokens))
        item[1], item[2], budget = item[1] + tokens, item[2] - tokens, budget - tokens
    done = [item[0] for item in self.waiting if not item[2]]
    self.waiting = [item for item in self.waiting if item[2]]
    decode = [(r, p) for r, (p, _) in self.running.items()] if self.is_mixed or not prefill else []
    if not prefill and not decode:
      return None
    start_s, tokens = self.now_s, sum(t for _, _, t in prefill)
    self.now_s = to_ticks(start_s + 0.008 + 1e-4 * tokens + 2e-4 * len(decode))
    for request_id, _ in decode:
      position, left = self.running.pop(request_id)
      if left > 1:
        self.running[request_id] = [position + 1, left - 1]
    for request_id in done if self.decodes else ():
      if lengths[request_id][1] > 1:
        self.running[request_id] = [lengths[request_id][0], lengths[request_id][1] - 1]
    self.num_steps += 1
    emitted = (*done, *(r for r, _ in decode))
    return Step(
      pool=self.name,
      step_id=self.num_steps,
      kind="decode" if not prefill else "mixed" if decode else "prefill",
      start_s=start_s,
      end_s=self.now_s,
      prefill_ids=tuple(r for r, _, _ in prefill),
      prefill_starts=tuple(s for _, s, _ in prefill),
      prefill_tokens=tuple(t for _, _, t in prefill),
      decode_ids=tuple(r for r, _ in decode),
      decode_positions=tuple(p for _, p in decode),
      emitted_ids=emitted,
      token_ids=(0,) * len(emitted),
    )


def toy_run(strategy: str, num_requests: int = 40) -> EventLog:
  random = np.random.default_rng(0)
  arrivals_s = [to_ticks(t) for t in np.cumsum(random.exponential(0.12, num_requests))]
  lengths = {
    i: (4000 if i % 13 == 6 else int(random.integers(100, 900)), int(random.integers(5, 60)))
    for i in range(num_requests)
  }
  split = strategy == "disaggregated"
  if split:
    pools = [
      _ToyPool("prefill-0", 4096, is_mixed=False, decodes=False),
      _ToyPool("decode-0", 0, is_mixed=False),
    ]
  else:
    chunked = strategy == "chunked"
    pools = [_ToyPool(f"mixed-{i}", 256 if chunked else 8192, is_mixed=chunked) for i in range(2)]
  entries = pools[:1] if split else pools
  log, emitted = EventLog(), dict.fromkeys(lengths, 0)
  seats: list[tuple[float, int]] = []  # (end of copy, request)
  due = list(zip(arrivals_s, lengths))
  while due or seats or any(pool.waiting or pool.running for pool in pools):
    pool = min(pools, key=lambda p: p.now_s)
    while due and due[0][0] <= pool.now_s:
      time_s, i = due.pop(0)
      entry = entries[i % len(entries)]
      entry.waiting.append([i, 0, lengths[i][0]])
      log.append(
        Arrived(
          time_s=time_s,
          request_id=i,
          pool=entry.name,
          num_prompt_tokens=lengths[i][0],
          max_tokens=lengths[i][1],
        )
      )
    if split and pool is pools[1]:
      for seat in [s for s in seats if s[0] <= pool.now_s]:
        seats.remove(seat)
        pool.running[seat[1]] = [lengths[seat[1]][0], lengths[seat[1]][1] - 1]
    step = pool.step(lengths)
    if step is None:
      pool.now_s = to_ticks(pool.now_s + 0.002)
      continue
    log.append(step)
    for i in step.emitted_ids:
      emitted[i] += 1
      if emitted[i] == lengths[i][1]:
        log.append(Finished(time_s=step.end_s, request_id=i, pool=pool.name, reason="length"))
      elif split and emitted[i] == 1:
        end_s = to_ticks(step.end_s + 0.005 + 2e-5 * lengths[i][0])
        seats.append((end_s, i))
        log.append(
          Copied(
            request_id=i,
            source="prefill-0",
            target="decode-0",
            start_s=to_ticks(step.end_s + 0.002),
            end_s=end_s,
            num_tokens=lengths[i][0],
            num_bytes=1000 * lengths[i][0],
          )
        )
  return log


@pytest.fixture(scope="module")
def logs() -> dict[str, EventLog]:
  return {name: toy_run(name) for name in ("prefill first", "chunked", "disaggregated")}


@pytest.fixture(scope="module")
def runs(logs):
  return {name: request_records(log) for name, log in logs.items()}


def shown_texts(figure) -> list[tuple[str, object]]:
  """Every text that the reader sees with its place on the page."""
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.text import Text

  canvas = FigureCanvasAgg(figure)
  canvas.draw()
  hidden = set()
  for axes in figure.axes:
    for axis in (axes.xaxis, axes.yaxis):
      low, high = sorted(axis.get_view_interval())
      for minor in (False, True):
        for place, label in zip(axis.get_ticklocs(minor=minor), axis.get_ticklabels(minor=minor)):
          if not low <= place <= high:
            hidden.add(label)  # kept by matplotlib, not drawn
  texts = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip()]
  return [
    (t.get_text(), t.get_window_extent(canvas.get_renderer())) for t in texts if t not in hidden
  ]


def check_texts_lie_apart_and_inside(figure) -> None:
  texts = shown_texts(figure)
  assert len(texts) > 5
  width, height = figure.bbox.width, figure.bbox.height
  for text, box in texts:
    assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height, text
  for (a, box_a), (b, box_b) in itertools.combinations(texts, 2):
    assert not box_a.overlaps(box_b), (a, b)


def words(figure) -> str:
  return " | ".join(text for text, _ in shown_texts(figure))


def test_latency_curves_say_n_and_show_the_slo(runs, tmp_path):
  figure = serving.draw_latency(runs, SLO, tmp_path / "latency.png")
  check_texts_lie_apart_and_inside(figure)
  assert (tmp_path / "latency.png").read_bytes().startswith(b"\x89PNG")
  left, right = figure.axes
  for name, records in runs.items():
    num_gaps = sum(len(r.itl_s) for r in records.values())
    assert f"{name} (n={len(records)})" in words(figure)
    assert f"{name} (n={num_gaps})" in words(figure)
  assert [line.get_xdata()[0] for line in left.lines][-1] == SLO.ttft_s
  assert [line.get_xdata()[0] for line in right.lines][-1] == SLO.tpot_s * 1e3
  assert (left.get_xscale(), right.get_xscale()) == ("log", "log")


def test_a_request_without_a_token_keeps_its_curve_below_one(logs, tmp_path):
  log = EventLog(logs["chunked"])
  for request_id in range(100, 110):
    log.append(Failed(time_s=1.0, request_id=request_id, pool=None, reason="refused"))
  runs = {"chunked": request_records(log)}
  figure = serving.draw_latency(runs, None, tmp_path / "latency.png")
  (curve,) = figure.axes[0].lines
  assert curve.get_ydata()[0] == 0
  assert curve.get_ydata()[-1] == pytest.approx(40 / 50)


def test_five_strategies_with_long_names_fit(runs, tmp_path):
  many = {
    f"{name}, token budget {budget}": records
    for budget in (512, 2048)
    for name, records in runs.items()
  }
  many.pop("chunked, token budget 512")
  check_texts_lie_apart_and_inside(serving.draw_latency(many, SLO, tmp_path / "latency.png"))
  check_texts_lie_apart_and_inside(serving.draw_phases(many, tmp_path / "phases.png"))


def test_a_timeline_has_a_panel_per_run_a_lane_per_pool_and_an_arrow_per_copy(logs, tmp_path):
  logs = {name: EventLog(log) for name, log in logs.items()}
  logs["chunked"].append(Preempted(time_s=1.0, request_id=1, pool="mixed-0"))
  figure = serving.draw_timeline(logs, tmp_path / "timeline.png", "40 requests, three strategies")
  check_texts_lie_apart_and_inside(figure)
  assert [axes.get_title(loc="left") for axes in figure.axes] == list(logs)
  assert len({axes.get_xlim() for axes in figure.axes}) == 1, "one time axis for all"
  for axes, (name, log) in zip(figure.axes, logs.items()):
    labels = [label.get_text().split("\n")[0] for label in axes.get_yticklabels()]
    assert labels == _pools(log)
    copies = [e for e in log if isinstance(e, Copied)]
    arrows = [t for t in axes.texts if getattr(t, "arrow_patch", None) is not None]
    assert [(a.xyann[0], a.xy[0]) for a in arrows] == [(c.start_s, c.end_s) for c in copies]
    assert bool(copies) == (name == "disaggregated")
    steps = [e for e in log if isinstance(e, Step)]
    tokens = {e.request_id: e.num_prompt_tokens for e in log if isinstance(e, Arrived)}
    long = {i for i, n in tokens.items() if n >= 4 * np.median(list(tokens.values()))}
    of_long = [e for e in steps if long & set(e.prefill_ids)]
    assert long and of_long
    spans = sorted((e.start_s, e.end_s) for e in (*steps, *of_long))
    np.testing.assert_allclose(sorted(_spans(axes)), spans)
  assert "preempted" in words(figure)


def test_a_timeline_shows_the_longest_gap_beside_a_long_prompt(logs, tmp_path):
  figure = serving.draw_timeline(logs, tmp_path / "timeline.png", "40 requests")
  for axes, log in zip(figure.axes, logs.values()):
    found = interference(log) or interference(log, any_pool=True)
    (line,) = [line for line in axes.lines if line.get_color() == serving.GAP_COLOUR]
    start_s, end_s = line.get_xdata()
    assert end_s - start_s == found.gap_s
    assert start_s in request_records(log)[found.request_id].token_s
    assert f"{found.gap_s * 1e3:.0f} ms" in axes.get_title(loc="right")


def test_a_timeline_can_show_a_part(logs, tmp_path):
  figure = serving.draw_timeline(logs, tmp_path / "part.png", "one second", window_s=(1.0, 2.0))
  assert {axes.get_xlim() for axes in figure.axes} == {(1.0, 2.0)}
  check_texts_lie_apart_and_inside(figure)


def test_phase_bars_are_as_long_as_the_mean_request(runs, tmp_path):
  figure = serving.draw_phases(runs, tmp_path / "phases.png")
  check_texts_lie_apart_and_inside(figure)
  (axes,) = figure.axes
  ends_s = {}
  for bar in axes.patches:
    row = round(bar.get_y() + bar.get_height() / 2)
    ends_s[row] = max(ends_s.get(row, 0.0), bar.get_x() + bar.get_width())
  assert list(ends_s.values()) == pytest.approx(
    [mean_phases(records).total_s for records in runs.values()]
  )


def test_phases_and_strategies_have_colours_of_their_own():
  phases = [colour for _, colour in serving.PHASES.values()]
  strategies = [style["color"] for style in serving.STRATEGY_STYLES]
  colours = [*phases, serving.KIND_COLOURS["mixed"], *strategies, serving.SLO_COLOUR]
  assert len(set(colours)) == len(colours)


def test_empty_runs_draw_without_a_crash(tmp_path):
  runs = {"nothing": request_records(EventLog())}
  serving.draw_latency(runs, SLO, tmp_path / "a.png")
  serving.draw_timeline({"nothing": EventLog()}, tmp_path / "b.png", "nothing")
  figure = serving.draw_phases(runs, tmp_path / "c.png")
  assert "nothing finished" in words(figure)
  assert {p.name for p in tmp_path.iterdir()} == {"a.png", "b.png", "c.png"}


def test_without_matplotlib_the_error_names_the_extra(runs, tmp_path, monkeypatch):
  original = builtins.__import__

  def no_matplotlib(name, *args, **kwargs):
    if name.startswith("matplotlib"):
      raise ImportError(name)
    return original(name, *args, **kwargs)

  monkeypatch.setattr(builtins, "__import__", no_matplotlib)
  with pytest.raises(ImportError, match=r"pdjax\[figures\]"):
    serving.draw_phases(runs, tmp_path / "phases.png")


def _spans(axes) -> list[tuple[float, float]]:
  """From when to when each bar lasts."""
  paths = [path for bars in axes.collections for path in bars.get_paths()]
  return [(path.vertices[:, 0].min(), path.vertices[:, 0].max()) for path in paths]


def _pools(log) -> list[str]:
  return list(dict.fromkeys(e.pool for e in log if isinstance(e, Step)))
