"""Linear latency models: the published sums, computed by hand from the published coefficients."""

import json
import pathlib

import numpy as np
import pytest

from configs.linear import NIYAMA, SIMDISTSERVE, distserve_fit, pads_prompts
from pdjax.core.costs import StepCounts, count_slices
from pdjax.core.plan import Slice, StepPlan
from pdjax.core.request import SamplingParams
from pdjax.sim.linear import DistServeForm

pytestmark = pytest.mark.quick

DATA = pathlib.Path(__file__).resolve().parents[3] / "shared" / "data" / "distserve"
# DistServe, OPT-13B, TP 1, ms: prompts, fewer than 95 decodes, more (its profiler's JSON file).
PROMPTS = (18.10254647486372, 0.1019122572698738, 7.122264314252114e-06)
FEW = (19.934702624895458, 0.0006269356524350583, 0.03850697740828398)
MANY = (7.1661889468253595, 0.0005798000403396046, 0.15831096191764046)


def form(**changes):
  return DistServeForm(fit=distserve_fit("distserve", "opt-13b", 1), **changes)


def prompts(*lengths, start=0):
  return count_slices(
    prefill_starts=[start] * len(lengths), prefill_tokens=lengths, num_emitted=len(lengths)
  )


def decodes(num, context):
  return count_slices(decode_positions=[context - 1] * num, num_emitted=num)


def plan(*lengths):
  slices = tuple(
    Slice(
      request_id=i,
      generation=0,
      row=i,
      num_prompt_tokens=n,
      start=0,
      num_tokens=n,
      token_ids=None,
      emits_token=True,
      sampling=SamplingParams(max_tokens=1),
    )
    for i, n in enumerate(lengths)
  )
  return StepPlan(step_id=0, prefills=slices)


def ms(value_s):
  return pytest.approx(value_s / 1e3, rel=1e-12)


def test_prompts_cost_their_tokens_and_the_squares_of_their_lengths():
  a, b, c = PROMPTS
  expected = a + b * (512 + 100) + c * (512**2 + 100**2)
  assert form().terms_of(prompts(512, 100)).total_s == ms(expected)


@pytest.mark.parametrize(("num", "coefficients"), [(1, FEW), (94, FEW), (95, MANY), (200, MANY)])
def test_decodes_cost_their_contexts_and_their_number_in_two_regimes(num, coefficients):
  a, b, c = coefficients
  expected = a + b * num * 700 + c * num
  assert form().terms_of(decodes(num, 700)).total_s == ms(expected)


def test_a_prompt_in_chunks_adds_up_to_its_square():
  whole = form().terms_of(prompts(900))
  chunks = [form().terms_of(prompts(n, start=at)) for n, at in ((100, 0), (500, 100), (300, 600))]
  assert sum(t.attention_prefill_s for t in chunks) == pytest.approx(whole.attention_prefill_s)
  assert whole.attention_prefill_s == ms(PROMPTS[2] * 900**2)


def test_what_simdistserve_adds():
  """1 ms for each stage to prompts alone; 2 ms and 0.1 us a token before the step to both."""
  plain, added = form(), form(**SIMDISTSERVE)
  counts = prompts(400, 200)
  extra_s = added.terms_of(counts).total_s - plain.terms_of(counts).total_s
  assert extra_s == pytest.approx(1e-3 + 2e-3 + 1e-7 * 600)
  counts = decodes(3, 500)  # 499 tokens are cached before each
  extra_s = added.terms_of(counts).total_s - plain.terms_of(counts).total_s
  assert extra_s == pytest.approx(2e-3 + 1e-7 * 3 * 499)


def test_each_of_several_stages_takes_the_constant_of_all():
  """(a + b T + c S) / pp + 1 ms * pp in each of pp stages, which share what a step takes alike."""
  counts = prompts(512)
  one, four = (form(pp=pp, stage_s=1e-3).terms_of(counts).total_s for pp in (1, 4))
  body_s = form().terms_of(counts).total_s
  assert one == pytest.approx(body_s + 1e-3)
  assert four / 4 == pytest.approx(body_s / 4 + 4e-3)
  with pytest.raises(ValueError, match="pp=0"):
    form(pp=0)


def test_padded_prompts_are_all_as_long_as_the_longest():
  padded = form(pads_prompts=True)
  assert padded.step_s(plan(500, 20, 300)) == pytest.approx(form().step_s(plan(500, 500, 500)))
  assert padded.step_s(plan(500)) == form().step_s(plan(500))
  assert form().step_s(plan(500, 20)) < padded.step_s(plan(500, 20))


def test_only_vllm_as_it_was_profiled_pads():
  """The factors of the shipped coefficients were chosen in a simulator that does not."""
  pads = {
    (s, b) for s in ("distserve", "vllm") for b in (True, False) if pads_prompts(s, shipped=b)
  }
  assert pads == {("vllm", False)}


@pytest.mark.parametrize("model", [form(**SIMDISTSERVE), NIYAMA])
def test_a_run_of_decodes_takes_what_its_steps_take(model):
  counts = decodes(30, 400)
  one_by_one = [
    model.terms_of(counts._replace(num_decode_keys=counts.num_decode_keys + 30 * i)).total_s
    for i in range(50)
  ]
  np.testing.assert_allclose(model.decode_steps_s(counts, 50), one_by_one, rtol=1e-12)
  assert one_by_one[0] < one_by_one[-1]


def test_shipped_coefficients_are_the_fits_times_a_factor():
  for system, by_prefill, by_decode in (("distserve", 1.1, 1.0), ("vllm", 1.4, 1.2)):
    shipped, raw = (distserve_fit(system, "opt-13b", 2, shipped=s) for s in (True, False))
    assert shipped.prefill_s == pytest.approx([by_prefill * x for x in raw.prefill_s])
    assert shipped.few_decodes_s == pytest.approx([by_decode * x for x in raw.few_decodes_s])
    assert shipped.many_decodes_s == pytest.approx([by_decode * x for x in raw.many_decodes_s])


def test_what_nobody_published_is_refused():
  with pytest.raises(ValueError, match="unknown linear model 'vllm opt-13b tp=3'"):
    distserve_fit("vllm", "opt-13b", 3)
  with pytest.raises(ValueError, match="vllm opt-66b tp=8: what it was fitted to"):
    distserve_fit("vllm", "opt-66b", 8, shipped=False)


def test_niyama_by_hand():
  """Seconds, from the two regimes of its scheduler: up to 512 tokens in a step, and beyond."""
  chunk, cached, num, context = 300, 1000, 12, 800
  counts = StepCounts(*map(sum, zip(prompts(chunk, start=cached), decodes(num, context))))
  few = (0.014936 + 5.882475e-05 * (chunk + num) + 2.247956e-05 * chunk + 3.634519e-05 * num
         + 1.111258e-07 * num * context + 7.554773e-07 * cached)  # fmt: skip
  assert NIYAMA.terms_of(counts).total_s == pytest.approx(few, rel=1e-12)
  chunk = 501
  counts = StepCounts(*map(sum, zip(prompts(chunk, start=cached), decodes(num, context))))
  many = (0.005004 + 2.719050e-05 * (chunk + num) + 6.863043e-05 * chunk - 4.143993e-05 * num
          + 1.663409e-07 * num * context + 2.727223e-06 * cached)  # fmt: skip
  assert chunk + num == 513
  assert NIYAMA.terms_of(counts).total_s == pytest.approx(many, rel=1e-12)
  with pytest.raises(ValueError, match="one stage"):
    NIYAMA.hand_over_s(10)


def test_all_coefficients_are_those_of_the_publishers_files():
  names = {"distserve": "profiler-a100-80g.distserve.json", "vllm": "profiler-a100-80g.vllm.json"}
  if not (DATA / "facts.json").exists():
    pytest.skip("no published coefficients beside this project, in shared/data/distserve")
  raw = json.loads((DATA / "facts.json").read_text())["coeff"]["rawfit"]
  for system, name in names.items():
    for model, by_tp in json.loads((DATA / name).read_text()).items():
      short = model.removeprefix("facebook/")
      for tp, row in by_tp.items():
        fit = distserve_fit(system, short, int(tp))
        assert fit.many_decodes == row["decoding_large_small_bs_threshold"]
        for own, theirs in ((fit.prefill_s, row["prefill"]),
                            (fit.few_decodes_s, row["decoding_smallbs"]),
                            (fit.many_decodes_s, row["decoding_largebs"])):  # fmt: skip
          assert own == pytest.approx([x / 1e3 for x in theirs], rel=1e-12)
        if int(tp) == 8:
          continue  # nothing that they were scaled from is known
        fit, row = distserve_fit(system, short, int(tp), shipped=False), raw[system][short][tp]
        assert fit.prefill_s == pytest.approx([x / 1e3 for x in row["prefill"]], rel=1e-12)
        assert fit.few_decodes_s == pytest.approx([x / 1e3 for x in row["dec_small"]], rel=1e-12)
