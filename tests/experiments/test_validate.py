"""Replays of measured requests: what is refused, what agrees with itself, published runs."""

from __future__ import annotations

import csv
import gzip
import json
import math
import pathlib
import subprocess
import sys
import types

import numpy as np
import pytest

from configs.hardware import HARDWARE, LINKS
from configs.latency import LATENCY
from configs.models import MODELS
from experiments import validate
from experiments.profiling import Point
from experiments.validation import distserve, distserve_parts, engine, vllm
from experiments.validation.page import Reached, Section, page
from experiments.validation.replay import METRICS, Replay, error_percent, simulate
from experiments.validation.requests import COLUMNS, Measured, doubt, read_requests, to_requests
from pdjax.config import SchedulerOptions, parse_pools
from pdjax.core.costs import count_plan
from pdjax.core.events import Copied
from pdjax.core.plain import to_plain
from pdjax.metrics.latency import request_records
from pdjax.scheduling.pages import PageConfig
from pdjax.sim.linear import DistServeFit, DistServeForm
from pdjax.sim.padded import Padding
from pdjax.sim.roofline import Roofline, num_pages

pytestmark = pytest.mark.quick

ROOT = pathlib.Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data"
ROWS = [  # arrival, prompt, output
  (0.0, 300, 40), (0.01, 900, 25), (0.02, 50, 1), (0.3, 1200, 60), (0.31, 20, 30)
]  # fmt: skip


def write(tmp_path, rows, header=tuple(COLUMNS), name="requests.csv"):
  path = tmp_path / name
  with open(path, "w", newline="") as file:
    csv.writer(file).writerows([header, *rows])
  return path


def measured(**changes):
  row = dict(arrival_s=0.0, prompt_tokens=10, output_tokens=2, ttft_s=0.1, tpot_s=0.02)
  return Measured(**row | changes)


# Files --------------------------------------------------------------------------------------------


def test_requests_are_read_by_column_in_any_order(tmp_path):
  header = ("note", "tpot_s", "ttft_s", "output_tokens", "prompt_tokens", "arrival_s")
  rows = [("a", "0.02", "0.5", "3", "100", "7.5"), ("b", "", "0.25", "1", "40", "8")]
  path = write(tmp_path, rows, header)
  expected = (Measured(7.5, 100, 3, 0.5, 0.02), Measured(8.0, 40, 1, 0.25, None))
  assert read_requests(path) == expected
  assert expected[0].e2e_s == pytest.approx(0.54)
  packed = tmp_path / "requests.csv.gz"
  packed.write_bytes(gzip.compress(path.read_bytes()))
  assert read_requests(packed) == expected
  assert [r.arrival_s for r in to_requests(expected)] == [0.0, 0.5]


GOOD = ("0", "10", "2", "0.1", "0.02")


@pytest.mark.parametrize(
  ("rows", "message"),
  [
    ([GOOD, ("1", "10", "2", "-0.1", "0.02")], ":3: ttft_s=-0.1: its first token came before"),
    ([GOOD, ("1", "10", "2", "0.1", "-2")], ":3: tpot_s=-2.0: its last token came before"),
    ([("0", "10", "2", "", "0.02")], ":2: ttft_s is missing"),
    ([GOOD, ("1", "10", "2", "0.1", "")], ":3: tpot_s is missing"),
    ([("0", "10", "2", "soon", "0.02")], ":2: ttft_s='soon' is not a number"),
    ([("0", "10", "2", "inf", "0.02")], ":2: ttft_s=inf is not a time"),
    ([GOOD, ("1", "0", "2", "0.1", "0.02")], ":3: prompt_tokens=0 must be at least 1"),
    ([("5", "10", "2", "0.1", "0.02"), GOOD], ":3: arrival_s=0 is before the row above"),
    ([("0", "10", "2", "90", "0.02"), ("1", "10", "2", "70", "0.02")], ":3: ttft_s=70 .*millisec"),
    ([("0", "10", "2", "0.1", "31"), ("1", "10", "2", "0.1", "29")], ":3: tpot_s=29 .*millisec"),
  ],
)
def test_a_wrong_file_is_refused_with_row_and_column(tmp_path, rows, message):
  path = write(tmp_path, rows)
  with pytest.raises(ValueError, match=message) as error:
    read_requests(path)
  assert str(error.value).startswith(str(path)) and "\n" not in str(error.value)


@pytest.mark.parametrize(("gap_s", "is_asked"), [(1, False), (59, False), (900, True)])
def test_thin_traffic_is_replayed_but_its_unit_is_asked_about(tmp_path, gap_s, is_asked):
  rows = [(gap_s * i, 10, 2, 0.1, 0.02) for i in range(5)]
  found = read_requests(write(tmp_path, rows))
  assert [row.arrival_s for row in found] == [gap_s * i for i in range(5)]
  assert ("milliseconds" in (doubt(found) or "")) == is_asked


@pytest.mark.parametrize("missing", COLUMNS)
def test_a_column_that_is_missing_is_named(tmp_path, missing):
  kept = [i for i, name in enumerate(COLUMNS) if name != missing]
  header = [name for name in COLUMNS if name != missing]
  path = write(tmp_path, [[GOOD[i] for i in kept]], header)
  with pytest.raises(ValueError, match=rf":1: no column {missing} \(found"):
    read_requests(path)


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    (["--latency=one_kernel"], "--latency=one_kernel is of a replay, whose --requests=FILE"),
    (["--requests=served.csv", "--parts=steps"], "--parts=['steps'] is of the suite"),
    (["--requests=served.csv", "--num_pages=0"], "num_pages"),
  ],
)
def test_flags_of_something_else_than_is_asked_for_are_refused(flags, message):
  command = [sys.executable, "-m", "experiments.validate", *flags]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
  assert done.returncode == 2 and done.stdout == ""
  assert message in done.stderr and done.stderr.count("\n") == 1


def test_the_program_refuses_in_one_message(tmp_path):
  path = write(tmp_path, [("0", "10", "2", "-1", "0.02")])
  command = [sys.executable, "-m", "experiments.validate", f"--requests={path}",
             "--model=llama3-8b", "--hardware=a100", f"--out={tmp_path / 'out'}"]  # fmt: skip
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
  assert done.returncode == 2
  assert done.stderr.startswith(f"error: {path}:2: ttft_s") and done.stderr.count("\n") == 1
  assert not (tmp_path / "out").exists()


# A replay against itself --------------------------------------------------------------------------


def roofline(host_s):
  device = vllm.with_host(HARDWARE["a100"], host_s)
  return Roofline(model=MODELS["llama2-7b"], device=device)


def serve(rows, host_s=0.0, pools="mixed:fcfs", budget=256):
  pages = PageConfig(num_rows=8, page_size=16, pages_per_row=100, num_pages=800)
  return simulate(
    to_requests(rows),
    parse_pools(pools),
    SchedulerOptions(token_budget=budget, steps_in_flight=1),
    MODELS["llama2-7b"],
    lambda spec: roofline(host_s),
    lambda spec: pages,
    LINKS["nvlink"],
  )


@pytest.mark.parametrize("pools", ["mixed:fcfs", "prefill,decode"])
def test_a_run_replayed_has_no_error_against_itself(tmp_path, pools):
  asked = [Measured(arrival_s, prompt, output, 0.0, 0.0) for arrival_s, prompt, output in ROWS]
  records = request_records(serve(asked, pools=pools))
  rows = []
  for i, row in enumerate(ROWS):
    tpot_s = records[i].tpot_s
    rows.append((*row, records[i].ttft_s, "" if tpot_s is None else tpot_s))
  found = read_requests(write(tmp_path, rows))
  replay = Replay.of(found, serve(found, pools=pools))
  for metric in METRICS:
    # End-to-end times are put together from rounded quotients.
    assert replay.columns(metric)[1] == pytest.approx(replay.columns(metric)[0], rel=1e-12)
  assert replay.attainments(0.05, 0.02)[0] == replay.attainments(0.05, 0.02)[1]
  slower = Replay.of(found, serve(found, host_s=5e-3, pools=pools))
  for metric, (before, after) in slower.summaries().items():
    assert error_percent(after.mean, before.mean) > 5, metric


def test_a_request_that_cannot_run_is_no_result():
  rows = [measured(prompt_tokens=5000)]
  with pytest.raises(ValueError, match=r"request 0 .* failed in the simulation: refused"):
    Replay.of(rows, serve(rows))


def test_a_time_of_the_host_does_not_calibrate_a_device():
  with pytest.raises(ValueError, match=r"host_s=0\.001 of b200"):
    vllm.with_host(HARDWARE["b200"], 1e-3)


# The systems of DistServe's runs ------------------------------------------------------------------


def test_memory_from_real_bytes_is_what_distserve_found():
  """Its max_num_tokens.csv: 66,144 tokens on one A100 and 163,008 on two, 0.95 - 0.01 of each."""
  for tp, tokens in ((1, 66_144), (2, 163_008)):
    pages = num_pages(
      model=distserve.MODEL, device=distserve.DEVICE, page_size=16, tp=tp, memory_share=0.94
    )
    assert pages * 16 == pytest.approx(tokens, rel=0.005)


@pytest.mark.parametrize("is_between", [False, True])
def test_copies_between_steps_hold_up_decodes(is_between):
  """A long prompt arrives while a short one decodes: its copy takes 0.2 s over a slow link."""
  link = distserve.Link(name="slow", latency_s=0.2, bytes_per_s=1e15)
  fit = DistServeFit(
    prefill_s=(0.05, 0, 0), few_decodes_s=(0.01, 0, 0), many_decodes_s=(0.01, 0, 0)
  )
  pages = PageConfig(num_rows=4, page_size=16, pages_per_row=100, num_pages=400)
  rows = [measured(output_tokens=80), measured(arrival_s=0.5, prompt_tokens=600, output_tokens=5)]
  log = simulate(
    to_requests(rows),
    parse_pools("prefill,decode"),
    SchedulerOptions(steps_in_flight=1, token_budget=8),
    distserve.MODEL,
    lambda spec: DistServeForm(fit=fit),
    lambda spec: pages,
    link,
    make_executor=distserve.CopiesBetweenSteps if is_between else distserve.SimExecutor,
  )
  first, second = Replay.of(rows, log).records
  gaps = sorted(first.itl_s[1:])  # the first has its own copy in it
  assert gaps[0] == pytest.approx(0.01, abs=1e-5)
  assert gaps[-1] == pytest.approx(0.21 if is_between else 0.01, abs=1e-5)
  assert second.itl_s[0] >= 0.2


def test_runs_are_told_apart_by_name():
  names = {"vllm-100-1": "vllm", "distserve-c21d11-300-3": "distserve",
           "distserve-c21d12-400-4": None, "distserve-300-3": None}  # fmt: skip
  assert {name: distserve.system_of(name) for name in names} == names


@pytest.mark.parametrize("shipped", [4.5, 6.0])
def test_step_times_scaled_to_runs_do_not_hide_those_that_were_not(shipped):
  points = {"vllm": {"shipped": shipped, "profiled": 24.8}}
  (row,) = distserve_parts.reached_rows(points, {"vllm": 6})
  assert row.is_met == (shipped < 5)
  assert "profiled 24.8" in row.reached and "scaled by its authors" in row.what


def published(*parts):
  folder = DATA.joinpath(*parts)
  if not folder.is_dir():
    pytest.skip(f"no published data beside this project, in shared/data/{'/'.join(parts)}")
  return folder


@pytest.mark.once
@pytest.mark.parametrize(
  "run", ["vllm-100-1", "vllm-400-4", "distserve-c21d11-300-3", "distserve-c21d11-300-12"]
)
def test_simdistserves_assumptions_give_its_attainment(run):
  """Also where 50,000 tokens of context do not hold all decodes (12 requests a second)."""
  folder = published("distserve")
  rows = distserve.read_runs(folder)[run]
  peers = {p["name"]: p for p in distserve.read_facts(folder)["peer_results"]["align"]}
  replay = Replay.of(rows, distserve.as_simdistserve(rows, distserve.system_of(run)))
  for slos, (real, simulated) in peers[run]["att"].items():
    ttft_s, tpot_s = (float(slo) / 1e3 for slo in slos.split("/"))
    assert tuple(round(x, 1) for x in replay.attainments(ttft_s, tpot_s)) == (real, simulated)
  for metric in ("ttft", "tpot"):
    values = sorted(getattr(record, f"{metric}_s") for record in replay.records)
    middle = len(values) // 2
    p50 = (values[(len(values) - 1) // 2] + values[middle]) / 2
    assert p50 * 1e3 == pytest.approx(peers[run][f"{metric}_p50_p90_sim"][0], abs=2e-3)


@pytest.mark.once
def test_the_memory_of_decodes_is_what_makes_the_tail_of_ttft():
  folder = published("distserve")
  rows = distserve.read_runs(folder)["distserve-c21d11-1050-10.5"]
  limited, free = (
    Replay.of(rows, distserve.as_served(rows, "distserve", has_limits=limits))
    for limits in (True, False)
  )
  (seen, with_limits), (_, without) = (r.summaries()["ttft_s"] for r in (limited, free))
  assert with_limits.p90 == pytest.approx(seen.p90, rel=0.3)
  assert without.p90 < seen.p90 / 50


# A real vLLM --------------------------------------------------------------------------------------


def test_the_engines_clock_is_brought_to_that_of_arrivals(tmp_path):
  """The quickest way in counts as none: here that of the second request, by 5 ms."""
  header = ("request_id", "input_toks", "output_toks", "arrival_time", "queued_ts", "scheduled_ts",
            "first_token_ts", "last_token_ts")  # fmt: skip
  rows = [
    ("a", 100, 11, 5000.000, 20.010, 20.010, 20.105, 20.305),
    ("b", 50, 1, 5001.000, 21.005, 21.006, 21.055, 21.055),
  ]
  write(tmp_path, rows, header, vllm.RUN)
  first, second = vllm.read_run(tmp_path)
  assert (first.arrival_s, second.arrival_s) == (0.0, 1.0)
  assert (first.ttft_s, second.ttft_s) == pytest.approx((0.1, 0.05))
  assert first.tpot_s == pytest.approx(0.02) and second.tpot_s is None


# The page -----------------------------------------------------------------------------------------


NEED_DATA = validate.PARTS.keys() - {"engine"}  # it measures


@pytest.mark.parametrize("folders", [(), ("distserve", "measured/vidur", "measured/llmservingsim")])
@pytest.mark.parametrize("name", sorted(NEED_DATA))
def test_a_part_without_data_says_what_it_lacks(name, folders, tmp_path):
  for folder in folders:
    (tmp_path / folder).mkdir(parents=True)
  section = validate.section_of(name, validate.PARTS[name], tmp_path, lambda text: None)
  assert section.missing and not section.reached
  assert f"Not run: {section.missing}." in section.markdown("pictures")


def engine_runs():
  times = [engine.Measured(0.5 + i / 10, 0.1 + i / 100, 0.01) for i in range(3)]
  return [
    engine.Run(strategy, load, repeat, times[repeat], times[0])
    for strategy in ("a", "b")
    for load in (0.4, 0.8)
    for repeat in range(3)
  ]


def test_runs_of_the_engine_that_were_kept_make_the_same_section(tmp_path):
  section = engine.section(engine.TITLE, engine_runs(), "a machine")
  path = tmp_path / engine.SAVED
  path.write_text(json.dumps(to_plain(section.data[engine.SAVED])))
  again = engine.saved(path, tmp_path, lambda text: None)
  assert again.markdown("pictures") == section.markdown("pictures")
  assert "0 of 4" in section.reached[0].reached  # 10 points apart
  assert engine.saved(tmp_path / "none.json", tmp_path, lambda text: None).missing


def test_steps_of_every_size_of_an_engine_tell_apart_what_their_times_depend_on():
  pages = PageConfig(num_rows=16, page_size=16, pages_per_row=30, num_pages=480, contiguous=True)
  padding = Padding(prefill=(64, 128, 480), mixed=(32, 64), rows=(1, 4, 16))
  by_size = {}
  for plan in engine.steps_of_each_size(pages, padding):
    counts = count_plan(plan)
    parts = (1, counts.num_prefills, counts.num_prefill_pairs)
    parts += (counts.num_decodes, counts.num_decode_keys)
    by_size.setdefault((plan.kind, padding(counts).num_tokens), []).append(parts)
  sizes = {"prefill": padding.prefill, "mixed": padding.mixed, "decode": padding.rows}
  assert by_size.keys() == {(kind, size) for kind, own in sizes.items() for size in own}
  for (kind, size), rows in by_size.items():
    one_row = (kind, size) == ("decode", 1)  # the number of rows never changes
    needed = {"prefill": 3, "mixed": 5, "decode": 2 if one_row else 3}[kind]
    assert np.linalg.matrix_rank(np.array(rows, float)) == needed, (kind, size)


def test_a_disturbed_pass_over_the_steps_of_an_engine_changes_nothing():
  pages = PageConfig(num_rows=16, page_size=16, pages_per_row=30, num_pages=480, contiguous=True)
  padding = Padding(prefill=(64, 480), mixed=(64,), rows=(1, 16))
  plans = engine.steps_of_each_size(pages, padding)
  experiment = types.SimpleNamespace(world=types.SimpleNamespace(model=MODELS["tiny"]))

  def timed(slower):
    alone, *beside = (
      [Point(plan.kind, count_plan(plan), each * plan.num_tokens) for plan in plans]
      for each in (slower, 2 * slower, 3 * slower)
    )
    copies = [
      Copied(
        request_id=0, source="a", target="b", start_s=0.0, end_s=n / 100, num_tokens=n, num_bytes=n
      )
      for n in (100, 200)
    ]
    return engine.Timed(alone, dict(zip(("prefill", "decode"), beside)), copies)

  one = engine.calibration_of(experiment, padding, [timed(1.0)])
  three = engine.calibration_of(experiment, padding, [timed(1.0), timed(3.0), timed(0.9)])
  assert (three.alone, three.beside) == (one.alone, one.beside)
  step = count_plan(plans[0])
  part = one.alone.blend([(one.beside["prefill"], 0.5), (one.beside["decode"], 0.25)])
  assert part.terms_of(step).total_s == pytest.approx(2 * one.alone.terms_of(step).total_s)
  assert one.link.copy_s(100 * MODELS["tiny"].kv_bytes_per_token(2)) == pytest.approx(1.0)


def test_a_part_that_lacks_a_file_ends_no_other_and_data_are_kept(tmp_path):
  def lacks(data_dir, show):
    return (data_dir / "absent.csv").read_text()

  def found(data_dir, show):
    return Section(title="Found", text="Words.", data={"runs.json": {"runs": [(1, "a")]}})

  suite = validate.Suite(tmp_path, tmp_path, {"lacks": lacks, "found": found})
  assert validate.run_suite(suite) == 0
  text = (tmp_path / "VALIDATION.md").read_text()
  assert "## lacks\n\nNot run: there is no absent.csv." in text and "## Found\n\nWords." in text
  kept = json.loads((tmp_path / validate.FILES / "runs.json").read_text())
  assert kept == {"runs": [[1, "a"]]}


def test_the_page_has_every_figure_and_every_part():
  sections = [
    Section(
      title="One",
      reached=[Reached("speed", "10", "12", True), Reached("error", "1 %", "2 %", False)],
      text="Words.",
      pictures={"a.png": lambda path: None},
    ),
    Section(title="Two", missing="there is no file"),
  ]
  text = page(sections, "pictures")
  for line in ("| speed | 10 | 12 | yes |", "| error | 1 % | 2 % | **no** |"):
    assert text.count(line) == 2  # in front, and in its part
  assert "![a.png](pictures/a.png)" in text
  assert text.endswith("## Two\n\nNot run: there is no file.\n")


@pytest.mark.once
def test_a_replay_is_written_whole_and_takes_steps_by_name(tmp_path):
  pytest.importorskip("matplotlib")
  rows = [(*row, 0.1, "" if row[2] == 1 else 0.02) for row in ROWS]
  path, out = write(tmp_path, rows), tmp_path / "out"
  command = [sys.executable, "-m", "experiments.validate", f"--requests={path}",
             "--model=opt-13b", "--hardware=a100", "--latency=distserve",
             f"--out={out}"]  # fmt: skip
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
  assert done.returncode == 0, done.stderr
  assert "TTFT" in done.stdout and "wrote summary.json, replay.png" in done.stdout
  data = json.loads((out / "summary.json").read_text())
  assert data["ttft_s"]["measured"]["mean"] == pytest.approx(0.1)
  assert data["tpot_s"]["measured"]["n"] == len(ROWS) - 1
  assert math.isfinite(data["e2e_s"]["simulated"]["p99"])
  assert (out / "replay.png").stat().st_size > 1000
  asked = read_requests(path)
  model, link = MODELS["opt-13b"], LINKS["nvlink"]
  pages = PageConfig(num_rows=128, page_size=16, pages_per_row=100, num_pages=1000)
  log = simulate(
    to_requests(asked),
    parse_pools("mixed:fcfs"),
    SchedulerOptions(token_budget=2048, steps_in_flight=1),
    model,
    lambda spec: LATENCY["distserve"](model, HARDWARE["a100"], 1, 1, link),
    lambda spec: pages,
    link,
  )
  for metric, (_, simulated) in Replay.of(asked, log).summaries().items():
    assert data[metric]["simulated"]["mean"] == pytest.approx(simulated.mean), metric
