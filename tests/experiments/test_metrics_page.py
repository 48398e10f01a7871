"""The page that defines metrics has all that a run reports."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from experiments.program import ROOT
from experiments.serving import report, served, token_report
from pdjax.config import load_config
from pdjax.metrics.timeline import chrome_trace, write_chrome_trace

pytestmark = pytest.mark.quick

FREE = {"config", "machine"}  # plain records, whose keys are no metrics


@pytest.fixture(scope="module")
def experiment():
  config = load_config(ROOT / "configs" / "llama3_8b_a100.py")
  workload = dataclasses.replace(config.workload, num_requests=60)
  strategies = ("chunked", "disaggregated")
  return served(dataclasses.replace(config, workload=workload, strategies=strategies))


@pytest.fixture(scope="module")
def defined() -> set[str]:
  return set(re.findall(r"`([^`]+)`", (ROOT / "pdjax" / "metrics" / "README.md").read_text()))


def _keys(data: Mapping[str, Any], names: set[str]) -> Iterator[str]:
  """All keys of nested records but names of strategies, and what is below `FREE`."""
  for key, value in data.items():
    if key not in names:
      yield key
    if key not in FREE and isinstance(value, Mapping):
      yield from _keys(value, names)


def test_every_key_of_a_summary_is_defined(experiment, defined):
  data = report(experiment)[1] | token_report(experiment)[1]
  keys = set(_keys(data, set(experiment.runs)))
  assert {"ttft_s", "queue_s", "capacity", "gap_s", "handoff_bytes_ahead"} <= keys
  assert keys - {"prefill", "decode"} <= defined  # of step_times: points that were measured


def test_every_counter_of_a_timeline_is_defined(experiment, defined):
  (name, run), *_ = experiment.runs.items()
  specs = experiment.config.pools_of(name)
  peaks = {spec.name: experiment.world.peaks_of(spec) for spec in specs}
  for known in (peaks, None):
    trace = chrome_trace(run.log, experiment.world.model, peaks=known)["traceEvents"]
    counters = {row["name"] for row in trace if row["ph"] == "C"}
    assert len(counters) == 5
    assert counters <= defined | {"FLOP/s", "bytes/s"}


def test_a_timeline_of_10_000_requests_is_small_enough_to_open(experiment, tmp_path):
  """ui.perfetto.dev reads JSON into the memory of a browser: some 100 MB at most."""
  (name, run), *_ = experiment.runs.items()
  specs = experiment.config.pools_of(name)
  peaks = {name: {spec.name: experiment.world.peaks_of(spec) for spec in specs}}
  path = tmp_path / "timeline.json"
  write_chrome_trace(path, {name: run.log}, experiment.world.model, peaks=peaks)
  assert path.stat().st_size / len(run.records) * 10_000 < 100e6
