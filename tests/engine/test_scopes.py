"""What a profile shows of a step: its phase, its layers, and their parts."""

from __future__ import annotations

import re

import jax
import pytest

from pdjax.engine.buckets import Buckets
from pdjax.engine.build import build_executors
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
