"""What a profile shows of a step: its phase, its layers, and their parts."""

from __future__ import annotations

import gzip
import json
import re

import jax
import pytest

from pdjax.engine.buckets import Buckets
from pdjax.engine.build import build_executors
from pdjax.engine.profiler import PERFETTO, profiled, scope_rows, scopes_of
from pdjax.scheduling.pages import PageConfig
from pdjax.scheduling.probe import probe_plan

pytestmark = pytest.mark.quick

PAGES = PageConfig(num_rows=2, page_size=4, pages_per_row=8, num_pages=16, contiguous=True)
PLANS = {
  "prefill": dict(prefills=(5,)),
  "decode": dict(decodes=1, context=6),
  "mixed": dict(prefills=(5,), decodes=1, context=6),
}


@pytest.mark.parametrize("kind", PLANS)
def test_operators_are_named_by_phase_layer_and_part(tiny, kind, monkeypatch):
  buckets = Buckets(prefill=(8,), mixed=(8,), rows=(1,))
  (executor,) = build_executors(tiny, PAGES, buckets, [jax.devices()[:1]], layout="slots")
  step = getattr(executor.steps, f"{kind}_step")
  texts = []

  class Submitted(Exception):
    pass

  def lower(*args):
    texts.append(step.lower(*args).as_text(debug_info=True))
    raise Submitted

  monkeypatch.setattr(executor.steps, f"{kind}_step", lower)
  with pytest.raises(Submitted):
    executor.submit(probe_plan(PAGES, **PLANS[kind]), 0.0)
  scopes = set(re.findall(rf"{kind}/(embed|unembed|sample|layer_\d+/(?:attention|mlp))", texts[0]))
  layers = range(tiny.config.num_layers)
  parts = {f"layer_{i}/{part}" for i in layers for part in ("attention", "mlp")}
  assert scopes == {"embed", "unembed", "sample", *parts}


# In a profile -------------------------------------------------------------------------------------


def _within(inner: dict, outer: dict) -> bool:
  ends = (inner["ts"] + inner["dur"], outer["ts"] + outer["dur"])
  return outer["ts"] <= inner["ts"] and ends[0] <= ends[1] + 1e-6


def test_a_profile_shows_each_step_its_layers_and_their_parts(tiny, tiny_slots, tmp_path):
  executor, pages = tiny_slots.executors[0], tiny_slots.pages
  executor.reset()
  with profiled(tmp_path):
    for plan in PLANS.values():
      executor.submit(probe_plan(pages, **plan), 0.0).result()
  (folder,) = (tmp_path / "plugins" / "profile").iterdir()
  assert len(list(folder.glob("*.xplane.pb"))) == 1
  with gzip.open(folder / PERFETTO, "rt") as file:
    rows = json.load(file)["traceEvents"]
  scopes = [row for row in rows if row.get("cat") == "scope"]
  steps = [row for row in scopes if row["name"] in PLANS]
  assert {row["name"] for row in steps} == set(PLANS)
  parts = {"embed", "unembed", "sample"}
  for name in PLANS:
    own = [row for row in steps if row["name"] == name]
    names = {
      row["name"]
      for row in scopes
      for step in own
      if row is not step and row["tid"] == step["tid"] and _within(row, step)
    }
    assert {f"layer_{i}" for i in range(tiny.config.num_layers)} | {"attention", "mlp"} <= names
    assert names & parts
  tracks = {(row["pid"], row["tid"]) for row in scopes}
  assert tracks == {(r["pid"], r["tid"]) for r in rows if r["name"] == "thread_name"} & tracks


HLO = """
  %dot.1 = f32[8]{0} dot(%a, %b), metadata={op_name="jit(decode_step)/decode/layer_0/mlp/dot" id=1}
  ROOT %add.2 = f32[8]{0} add(%a, %b), metadata={op_type="a" op_name="jit(x)/decode/unembed/add"}
  %copy.3 = f32[8]{0} copy(%a)
  %while.4 = f32[8]{0} while(%a), metadata={op_name="jit(x)/decode/layer_1/attention/while/max"}
  %other.5 = f32[8]{0} add(%a), metadata={op_name="jit(encoder)/add"}
"""


def test_the_scope_of_an_operator_is_that_of_its_metadata():
  assert scopes_of(HLO) == {
    "dot.1": ("decode", "layer_0", "mlp"),
    "add.2": ("decode", "unembed"),
    "while.4": ("decode", "layer_1", "attention"),
  }


def _op(name: str, ts: float, dur: float, run: str = "1") -> dict:
  args = {"hlo_op": name, "hlo_module": "jit_decode_step", "run_id": run}
  return {"name": name, "ph": "X", "pid": 7, "tid": 3, "ts": ts, "dur": dur, "args": args}


def test_operators_that_follow_one_another_in_a_scope_are_one_slice_of_each_run():
  program = {"a": ("decode", "layer_0", "mlp"), "b": ("decode", "layer_1", "mlp")}
  ops = [_op("a", 0, 2), _op("a", 3, 1), _op("none", 4, 1), _op("b", 6, 5), _op("a", 10, 2, "2")]
  rows = scope_rows(ops, {"jit_decode_step": [{"c": ("prefill",)}, program]})
  found = sorted((r["name"], r["ts"], r["dur"]) for r in rows if r["ph"] == "X")
  assert found == [
    ("decode", 0, 10),  # ends where the next run begins: slices of a track never overlap
    ("decode", 10, 2),
    ("layer_0", 0, 4),
    ("layer_0", 10, 2),
    ("layer_1", 6, 4),
    ("mlp", 0, 4),
    ("mlp", 6, 4),
    ("mlp", 10, 2),
  ]
  assert all(a["tid"] == 4 for a in rows)
