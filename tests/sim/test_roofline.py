"""Step times grow with the work, and on the A100 agree with what others measured."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.hardware import HARDWARE
from configs.models import MODELS
from pdjax.core.costs import StepCounts, count_slices, later, step_costs, total_bytes
from pdjax.core.plan import DecodeSlices, StepPlan
from pdjax.sim.hardware import Device, Fit, Link
from pdjax.sim.latency_model import StepTerms
from pdjax.sim.roofline import Roofline, num_pages

pytestmark = pytest.mark.quick

MODEL = MODELS["llama3-8b"]
A100 = HARDWARE["a100"]
IDEAL = dataclasses.replace(A100, fit=None)
NVLINK = Link(name="nvlink", latency_s=10e-6, bytes_per_s=300e9)
ROOFLINES = [Roofline(model=MODEL, device=A100), Roofline(model=MODEL, device=HARDWARE["h200"])]
rooflines = pytest.mark.parametrize("roofline", ROOFLINES, ids=lambda r: r.device.label)


def prefill(start: int, num_tokens: int, *, emits: bool = False) -> StepCounts:
  return count_slices(
    prefill_starts=[start], prefill_tokens=[num_tokens], num_emitted=1 if emits else 0
  )


def decode(*positions: int) -> StepCounts:
  return count_slices(decode_positions=positions, num_emitted=len(positions))


def total_s(roofline: Roofline, counts: StepCounts) -> float:
  return roofline.terms_of(counts).total_s


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)), min_size=2))
def test_what_was_asked_before_changes_nothing(steps):
  used = Roofline(model=MODEL, device=A100)
  for num_prefill_tokens, num_decodes, num_more in steps:
    counts = StepCounts(
      num_prefill_tokens=num_prefill_tokens,
      num_prefill_pairs=num_prefill_tokens,
      num_decodes=num_decodes,
      num_decode_keys=num_decodes,
      num_emitted=num_decodes + num_more,
    )
    assert used.terms_of(counts) == Roofline(model=MODEL, device=A100).terms_of(counts)


@pytest.mark.once
@rooflines
@given(start=st.integers(0, 4000), num_tokens=st.integers(1, 4000), more=st.integers(1, 200))
def test_more_prefill_tokens_take_longer(roofline, start, num_tokens, more):
  assert total_s(roofline, prefill(start, num_tokens)) < total_s(
    roofline, prefill(start, num_tokens + more)
  )


@rooflines
@given(start=st.integers(0, 4000), num_tokens=st.integers(1, 4000), more=st.integers(1, 200))
def test_a_later_chunk_takes_at_least_as_long(roofline, start, num_tokens, more):
  assert total_s(roofline, prefill(start, num_tokens)) < total_s(
    roofline, prefill(start + more, num_tokens)
  )


@pytest.mark.once
@rooflines
@given(positions=st.lists(st.integers(0, 8000), min_size=1, max_size=64))
def test_decode_takes_longer_with_more_rows_or_longer_contexts(roofline, positions):
  base_s = total_s(roofline, decode(*positions))
  assert base_s < total_s(roofline, decode(*positions, 0))
  assert base_s < total_s(roofline, decode(*[p + 1 for p in positions]))


@rooflines
@given(sizes=st.lists(st.integers(1, 1024), min_size=2, max_size=6))
def test_a_prompt_in_chunks_takes_at_least_as_long_as_whole(roofline, sizes):
  # But for clocks that fall in long launches, which chunks make shorter.
  fit = dataclasses.replace(roofline.device.fit, gemm_throttle=0.0)
  device = dataclasses.replace(roofline.device, fit=fit)
  roofline = dataclasses.replace(roofline, device=device)
  chunked_s, start = 0.0, 0
  for size in sizes:
    emits = start + size == sum(sizes)
    chunked_s += total_s(roofline, prefill(start, size, emits=emits))
    start += size
  # Bound by arithmetic at ideal peaks, chunks cost exactly the whole but for rounding.
  assert chunked_s * (1 + 1e-12) > total_s(roofline, prefill(0, start, emits=True))


@rooflines
@given(
  num_tokens=st.integers(1, 2048), positions=st.lists(st.integers(0, 4000), min_size=1, max_size=64)
)
def test_a_fused_mixed_step_beats_prefill_then_decode(roofline, num_tokens, positions):
  counts = count_slices(
    prefill_starts=[0],
    prefill_tokens=[num_tokens],
    decode_positions=positions,
    num_emitted=len(positions) + 1,
  )
  separate = dataclasses.replace(roofline, fused=False)
  fused_terms, separate_terms = roofline.terms_of(counts), separate.terms_of(counts)
  assert fused_terms.linear_s < separate_terms.linear_s
  assert fused_terms.total_s < separate_terms.total_s
  # Attention is the same two kernels, and one step is planned by the host either way.
  for field in ("attention_prefill_s", "attention_decode_s", "host_s"):
    assert getattr(fused_terms, field) == getattr(separate_terms, field)


def test_separate_dispatch_costs_the_sum_of_two_steps_but_for_the_host():
  separate = Roofline(model=MODEL, device=A100, fused=False)
  mixed = count_slices(
    prefill_starts=[0], prefill_tokens=[512], decode_positions=[900] * 32, num_emitted=33
  )
  two_s = total_s(separate, prefill(0, 512, emits=True)) + total_s(separate, decode(*[900] * 32))
  assert total_s(separate, mixed) == pytest.approx(two_s - A100.fit.host_s, rel=1e-12)
  pure = decode(1, 2)
  assert separate.terms_of(pure) == Roofline(model=MODEL, device=A100).terms_of(pure)


# Vidur's A100 operator timings of Llama-3-8B (microsoft/vidur, MIT): 4 matrices, 32 layers, ms.
@pytest.mark.parametrize(
  "num_tokens, measured_ms",
  [(1, 8.8), (32, 10.1), (64, 10.4), (128, 12.1), (512, 31.8), (1024, 69.6), (2048, 133.9),
   (4096, 250.8)],
)  # fmt: skip
def test_a100_matrices_agree_with_vidurs_timings(num_tokens, measured_ms):
  linear_s = Roofline(model=MODEL, device=A100).terms_of(prefill(0, num_tokens)).linear_s
  assert linear_s * 1e3 == pytest.approx(measured_ms, rel=0.15)


# The same source, Llama-2-70B over two A100s, no part of the fit: half of every matrix.
@pytest.mark.parametrize(
  "num_tokens, measured_ms",
  [(1, 42.3), (32, 45.7), (64, 47.4), (128, 58.7), (512, 161.3), (1024, 330.8), (2048, 601.6)],
)
def test_a100_fit_carries_over_to_matrices_it_never_saw(num_tokens, measured_ms):
  half = Roofline(model=MODELS["llama2-70b"], device=A100, tp=2, link=NVLINK)
  linear_s = half.terms_of(prefill(0, num_tokens)).linear_s
  assert linear_s * 1e3 == pytest.approx(measured_ms, rel=0.15)


# Tensor parallelism ------------------------------------------------------------------------------

MIXED = count_slices(
  prefill_starts=[0], prefill_tokens=[512], decode_positions=[900] * 32, num_emitted=33
)


def test_devices_share_the_matrices_and_pay_for_two_all_reduces_a_layer():
  model = MODELS["llama3-70b"]
  whole = Roofline(model=model, device=IDEAL).terms_of(MIXED)
  split = Roofline(model=model, device=IDEAL, tp=4, link=NVLINK).terms_of(MIXED)
  for field in ("attention_prefill_s", "attention_decode_s"):
    assert getattr(split, field) == pytest.approx(getattr(whole, field) / 4)
  # Weights divide by four; hidden states are read and written whole by every device.
  assert whole.linear_s / 4 < split.linear_s < whole.linear_s / 3.8
  assert whole.elementwise_s / 4 < split.elementwise_s < whole.elementwise_s
  hidden_bytes = MIXED.num_tokens * model.d_model * 2
  assert split.all_reduce_s == pytest.approx(2 * 80 * (10e-6 + 1.5 * hidden_bytes / 300e9))
  assert whole.all_reduce_s == 0


def test_kv_heads_fewer_than_devices_are_read_by_several():
  model = MODELS["llama3-8b"]  # 32 heads on 8
  by_tp = {
    tp: Roofline(model=model, device=IDEAL, tp=tp, link=NVLINK).terms_of(decode(*[4000] * 16))
    for tp in (8, 16, 32)
  }
  # One kv head a device from 8 devices on; what halves is the little that queries take.
  for tp in (16, 32):
    ratio = by_tp[tp].attention_decode_s / by_tp[8].attention_decode_s
    assert 0.99 < ratio <= 1


def test_a_model_too_large_for_one_device_fits_on_four():
  model = MODELS["llama3-70b"]
  pages = num_pages(model=model, device=A100, page_size=16, tp=4)
  used = model.num_params * 2 + pages * 16 * model.kv_bytes_per_token()
  assert used <= 4 * 0.9 * A100.memory_bytes < used + 5 * 16 * model.kv_bytes_per_token()
  with pytest.raises(ValueError, match=r"llama3-70b does not fit on one of 2 x tpu-v5e"):
    num_pages(model=model, device=HARDWARE["tpu-v5e"], page_size=16, tp=2)


@pytest.mark.parametrize(("tp", "pp"), [(1, 4), (2, 2), (2, 3), (1, 80)])
def test_a_stage_holds_the_weights_and_the_pages_of_its_own_layers(tp, pp):
  """And one of the two matrices of the vocabulary: the first stage embeds, the last unembeds."""
  model, page_size = MODELS["llama3-70b"], 16
  pages = num_pages(model=model, device=A100, page_size=page_size, tp=tp, pp=pp)
  num_layers = -(-model.num_layers // pp)
  weights = num_layers * (model.attention_params + model.mlp_params)
  weights += model.vocab_size * model.d_model
  kv_bytes = 2 * num_layers * model.num_kv_heads * model.head_dim * 2 * page_size
  used = (2 * weights + pages * kv_bytes) / tp
  assert used <= 0.9 * A100.memory_bytes < used + kv_bytes / tp


def test_a_page_more_than_its_stage_can_hold_is_said_of_its_devices():
  with pytest.raises(ValueError, match=r"llama3-70b does not fit on one of 4 x tpu-v5e"):
    num_pages(model=MODELS["llama3-70b"], device=HARDWARE["tpu-v5e"], page_size=16, tp=2, pp=2)
  with pytest.raises(ValueError, match="80 layers cannot be cut into 81 parts"):
    num_pages(model=MODELS["llama3-70b"], device=A100, page_size=16, pp=81)


def test_hidden_states_cross_the_link_to_the_next_stage():
  latency = Roofline(model=MODEL, device=A100, link=NVLINK)
  num_bytes = 512 * MODEL.d_model * 2
  assert latency.hand_over_s(512) == NVLINK.latency_s + num_bytes / NVLINK.bytes_per_s
  with pytest.raises(ValueError, match="stages need a link"):
    Roofline(model=MODEL, device=A100).hand_over_s(512)


@pytest.mark.parametrize(
  ("model", "tp", "message"),
  [
    ("llama3-70b", 3, "num_heads=64 is no multiple of the 3 devices"),
    ("smollm2-135m", 2, "num_heads=9 is no multiple of the 2 devices"),
    ("llama3-8b", 0, "tp=0 must be 1"),
  ],
)
def test_a_split_that_leaves_parts_over_is_refused(model, tp, message):
  with pytest.raises(ValueError, match=message):
    Roofline(model=MODELS[model], device=A100, tp=tp, link=NVLINK)


def test_several_devices_need_a_link():
  with pytest.raises(ValueError, match="tp=2 must be 1, or more with a link"):
    Roofline(model=MODEL, device=A100, tp=2)


# FlashInfer decode attention of Llama-2-7B on an A800 (NetX-lab/Frontier, MIT), ms a layer.
@pytest.mark.parametrize(
  "batch, keys, measured_ms", [(32, 1024, 0.321), (128, 1024, 1.205), (128, 3968, 4.620)]
)
def test_a100_decode_attention_is_near_another_kernel_on_the_same_die(batch, keys, measured_ms):
  roofline = Roofline(model=MODELS["llama2-7b"], device=A100)
  decode_s = roofline.terms_of(decode(*[keys - 1] * batch)).attention_decode_s
  assert decode_s / 32 * 1e3 == pytest.approx(measured_ms, rel=0.25)


def test_decode_of_one_row_is_little_more_than_reading_the_weights():
  terms = Roofline(model=MODEL, device=A100).terms_of(decode(1000))
  read_s = 2 * MODEL.num_params / A100.peak_bytes_per_s
  assert read_s < terms.total_s - terms.host_s < 1.5 * read_s


def test_an_uncalibrated_device_takes_what_its_peaks_promise():
  device = Device(name="d", peak_flops_per_s=1e12, peak_bytes_per_s=1e9, memory_bytes=1e9)
  roofline = Roofline(model=MODELS["tiny"], device=device)
  counts = decode(10, 20)  # two rows: every operator is bound by memory
  assert total_s(roofline, counts) == pytest.approx(
    total_bytes(step_costs(counts, MODELS["tiny"])) / 1e9
  )
  compute_bound = dataclasses.replace(roofline, device=dataclasses.replace(
    device, peak_flops_per_s=1e6, peak_bytes_per_s=1e15))  # fmt: skip
  flops = sum(op.flops for op in step_costs(counts, MODELS["tiny"]) if op.kind == "linear")
  assert compute_bound.terms_of(counts).linear_s == pytest.approx(flops / 1e6)


def test_the_norm_lies_between_perfect_overlap_and_none():
  def linear_s(p: float) -> float:
    device = dataclasses.replace(A100, fit=dataclasses.replace(A100.fit, gemm_p=p))
    return Roofline(model=MODEL, device=device).terms_of(prefill(0, 150)).linear_s

  times = [linear_s(p) for p in (math.inf, 4.0, 1.5, 1.0)]
  assert times == sorted(times) and times[-1] < 2 * times[0]


def test_matrices_that_go_on_for_long_are_slowed_by_up_to_the_throttle():
  def ratio(num_tokens: int) -> float:
    """Of the arithmetic of all matrices, with a throttle to without."""
    linear_s = [
      Roofline(model=MODEL, device=dataclasses.replace(A100, fit=Fit(gemm_throttle=throttle)))
      .terms_of(prefill(0, num_tokens))
      .linear_s
      for throttle in (0.3, 0.0)
    ]
    return linear_s[0] / linear_s[1]

  ratios = [ratio(n) for n in (1, 512, 4096, 1_000_000)]
  assert ratios == sorted(ratios)
  assert ratios[0] < 1.01 and 1.29 < ratios[-1] < 1.3


@pytest.mark.parametrize(
  "field, value",
  [("gemm_launch_s", 1e-3), ("elementwise_launch_s", 1e-3), ("prefill_launch_s", 1e-3),
   ("decode_launch_s", 1e-3), ("decode_pad_tokens", 1000.0), ("host_s", 1e-2), ("host_row_s", 1e-3),
   ("gemm_compute", 0.3), ("gemm_memory", 0.3), ("gemm_p", 1.0), ("elementwise_memory", 0.2),
   ("prefill_compute", 0.2), ("prefill_memory", 0.2), ("decode_memory", 0.2),
   ("prefill_fill_rows", 1e5), ("gemm_throttle", 0.5)],
)  # fmt: skip
def test_each_parameter_slows_its_own_term_and_no_other(field, value):
  counts = count_slices(
    prefill_starts=[500], prefill_tokens=[500], decode_positions=[1000] * 8, num_emitted=9
  )
  worse = dataclasses.replace(A100, fit=dataclasses.replace(A100.fit, **{field: value}))
  before = Roofline(model=MODEL, device=A100).terms_of(counts)
  after = Roofline(model=MODEL, device=worse).terms_of(counts)
  term = {
    "gemm": "linear_s",
    "elementwise": "elementwise_s",
    "prefill": "attention_prefill_s",
    "decode": "attention_decode_s",
    "host": "host_s",
  }[field.split("_")[0]]
  for name in StepTerms._fields:
    if name == term:
      assert getattr(after, name) > getattr(before, name)
    else:
      assert getattr(after, name) == getattr(before, name)


@given(num_tokens=st.integers(1, 150), more=st.integers(1, 100))
def test_prefill_attention_that_does_not_fill_the_device_takes_as_long_as_if_it_did(
  num_tokens, more
):
  """But for its memory traffic, which here is free."""
  fit = dataclasses.replace(A100.fit, prefill_fill_rows=256.0 * MODEL.num_heads, prefill_p=1.0)
  fast = dataclasses.replace(A100, peak_bytes_per_s=1e30, fit=fit)
  latency = Roofline(model=MODEL, device=fast)

  def per_pair_s(tokens: int) -> float:
    counts = prefill(4000, tokens)
    work_s = latency.terms_of(counts).attention_prefill_s - MODEL.num_layers * fit.prefill_launch_s
    return work_s / counts.num_prefill_pairs

  assert per_pair_s(num_tokens) * num_tokens == pytest.approx(per_pair_s(256) * 256, rel=1e-9)
  assert per_pair_s(256 + more) == pytest.approx(per_pair_s(256), rel=1e-9)


FUSED = HARDWARE["rtx-pro-6000"]


@given(
  start=st.integers(0, 8000),
  num_tokens=st.integers(1, 2048),
  positions=st.lists(st.integers(0, 8000), min_size=1, max_size=64),
)
def test_one_kernel_for_both_takes_longer_than_its_chunk_alone_and_changes_nothing_else(
  start, num_tokens, positions
):
  two = Roofline(model=MODEL, device=FUSED)
  one = dataclasses.replace(two, one_kernel=True)
  mixed = count_slices(
    prefill_starts=[start],
    prefill_tokens=[num_tokens],
    decode_positions=positions,
    num_emitted=len(positions) + 1,
  )
  together, apart = one.terms_of(mixed), two.terms_of(mixed)
  assert together.attention_decode_s >= 0
  assert together._replace(attention_decode_s=0) == apart._replace(attention_decode_s=0)
  assert one.terms_of(mixed).total_s <= one.terms_of(later(mixed, 10)).total_s
  for pure in mixed.split():
    assert one.terms_of(pure) == two.terms_of(pure)


def test_many_decodes_are_slower_in_one_kernel_than_in_one_of_their_own():
  """LLMServingSim's vLLM: 1.6 to 3.4 times as slow as two kernels with 128 decodes."""
  mixed = count_slices(
    prefill_starts=[0], prefill_tokens=[512], decode_positions=[1023] * 128, num_emitted=129
  )
  two = Roofline(model=MODEL, device=FUSED)
  one_terms = dataclasses.replace(two, one_kernel=True).terms_of(mixed)
  two_terms = two.terms_of(mixed)
  ratio = (one_terms.attention_prefill_s + one_terms.attention_decode_s) / (
    two_terms.attention_prefill_s + two_terms.attention_decode_s
  )
  assert 1.3 < ratio < 3.5


def test_one_kernel_that_nobody_measured_is_refused():
  with pytest.raises(ValueError, match="one_kernel: nobody measured one for both kinds on h200"):
    Roofline(model=MODEL, device=HARDWARE["h200"], one_kernel=True)


def test_what_nobody_measured_is_said():
  assert "data sheet" in Roofline(model=MODEL, device=IDEAL).caveats[0]
  assert Roofline(model=MODEL, device=A100).caveats == ()
  split = Roofline(model=MODEL, device=HARDWARE["tpu-v6e"], tp=2, link=NVLINK).caveats
  assert any("all-reduces of tpu-v6e" in caveat for caveat in split)
  assert any("host time" in caveat for caveat in split)


@given(tp=st.sampled_from([2, 4, 8]), num_tokens=st.integers(1, 8192))
def test_a_measured_all_reduce_grows_with_its_bytes_and_its_devices(tp, num_tokens):
  fit = dataclasses.replace(
    A100.fit, all_reduce_share=0.5, all_reduce_launch_s=1e-5, all_reduce_hop_s=2e-6,
    all_reduce_growth=2.0, all_reduces=(),
  )  # fmt: skip
  model = MODELS["llama3-70b"]
  latency = Roofline(model=model, device=dataclasses.replace(A100, fit=fit), tp=tp, link=NVLINK)
  num_bytes = 2 * (tp - 1) / tp * num_tokens * model.d_model * 2
  each_s = 1e-5 + (tp - 1) * 2e-6 + num_bytes / (0.5 * 300e9) * tp / 2
  reduced_s = latency.terms_of(prefill(0, num_tokens)).all_reduce_s
  assert reduced_s == pytest.approx(2 * 80 * each_s, rel=1e-9)


def test_an_all_reduce_takes_what_was_measured_for_its_size_devices_and_link():
  model = MODELS["llama3-70b"]  # 16,384 bytes a token
  curve = ((2 * 16_384, 1e-5), (4 * 16_384, 3e-5), (16 * 16_384, 9e-5))
  fit = dataclasses.replace(A100.fit, all_reduces=((4, curve),))
  device = dataclasses.replace(A100, fit=fit)

  def each_s(num_tokens, tp=4, link=NVLINK, device=device):
    latency = Roofline(model=model, device=device, tp=tp, link=link)
    return latency.terms_of(prefill(0, num_tokens)).all_reduce_s / (2 * 80)

  expected = {1: 1e-5, 2: 1e-5, 3: 2e-5, 4: 3e-5, 10: 6e-5, 16: 9e-5, 28: 15e-5}
  assert {n: each_s(n) for n in expected} == pytest.approx(expected)

  # Over other devices and over another link, what the parameters say of it.
  form = dataclasses.replace(A100, fit=dataclasses.replace(fit, all_reduces=()))
  slow = dataclasses.replace(NVLINK, name="slow", bytes_per_s=1e9)
  assert each_s(3, tp=8) == each_s(3, tp=8, device=form) != pytest.approx(2e-5)
  assert each_s(3, link=slow) == each_s(3, link=slow, device=form) > 2e-5
  assert Roofline(model=model, device=device, tp=4, link=NVLINK).caveats == ()
  (said,) = Roofline(model=model, device=device, tp=8, link=NVLINK).caveats
  assert "all-reduces over 8 x a100" in said
  (said,) = Roofline(model=model, device=device, tp=4, link=slow).caveats
  assert "measured over nvlink, not slow" in said


def test_a_plan_takes_the_sum_of_its_terms():
  plan = StepPlan(
    step_id=0,
    decodes=DecodeSlices(request_ids=(7,), generations=(0,), rows=(0,), positions=(99,)),
  )
  roofline = Roofline(model=MODEL, device=A100)
  assert roofline.step_s(plan) == sum(roofline.terms_of(decode(99)))


def test_narrower_weights_and_caches_are_read_faster():
  counts = decode(*[2000] * 16)
  full, narrow = (
    Roofline(model=MODEL, device=A100, bytes_per_weight=w, bytes_per_kv=k).terms_of(counts)
    for w, k in ((2, 2), (1, 1))
  )
  assert narrow.linear_s < 0.75 * full.linear_s
  assert narrow.attention_decode_s < 0.75 * full.attention_decode_s


def test_pages_fill_what_the_weights_leave():
  device = Device(name="d", peak_flops_per_s=1.0, peak_bytes_per_s=1.0, memory_bytes=10e6)
  model = MODELS["tiny"]
  page_bytes = 16 * 2 * 4 * 2 * 16 * 2  # tokens x (K and V) x layers x kv heads x head x bytes
  weight_bytes = 2 * model.num_params
  pages = num_pages(model=model, device=device, page_size=16)
  assert pages * page_bytes <= 9e6 - weight_bytes < (pages + 1) * page_bytes
  fewer = num_pages(model=model, device=device, page_size=16, reserve_bytes=10 * page_bytes)
  assert pages - fewer == 10
  half = num_pages(model=model, device=device, page_size=32)
  assert pages // 2 == half
  beside = num_pages(model=model, device=device, page_size=16, step_tokens=100)
  step_bytes = 100 * (2 * model.d_ff + 5 * model.d_model) * 2
  assert (pages - beside - 1) * page_bytes < step_bytes < (pages - beside + 1) * page_bytes


def test_a_model_that_does_not_fit_is_refused_with_its_sizes():
  with pytest.raises(ValueError, match=r"llama3-70b does not fit on a100: weights 141\.1 GB"):
    num_pages(model=MODELS["llama3-70b"], device=A100, page_size=16)


def test_fit_refuses_a_share_above_the_peak():
  with pytest.raises(ValueError, match=r"gemm_compute=1\.2"):
    Fit(gemm_compute=1.2)
  with pytest.raises(ValueError, match=r"gemm_p=0\.5"):
    Fit(gemm_p=0.5)
  with pytest.raises(ValueError, match="host_s=-1"):
    Fit(host_s=-1)
