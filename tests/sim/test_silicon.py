"""Measured operators come back as they are, go on as they should between and beyond, and say so."""

import dataclasses
import importlib.util
import itertools
import pathlib
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.validation.silicon import ROWS, choose, closed_loop, read_rows
from pdjax.config import SchedulerOptions, parse_pools
from pdjax.core.costs import StepCounts, count_slices
from pdjax.core.model_config import ModelConfig
from pdjax.deployment import make_cluster
from pdjax.metrics.latency import request_records
from pdjax.scheduling.pages import PageConfig
from pdjax.sim.hardware import Device, Link
from pdjax.sim.latency_model import LatencyModel
from pdjax.sim.silicon import Operators, Silicon, read_operators, systems
from pdjax.sim.sim_executor import SimExecutor

pytestmark = pytest.mark.quick

HAS_PACKAGE = importlib.util.find_spec("aiconfigurator_core") is not None
needs_package = pytest.mark.skipif(not HAS_PACKAGE, reason="needs the extra [silicon]")

MODEL = ModelConfig(
  name="measured",
  num_layers=3,
  d_model=256,
  num_heads=8,
  num_kv_heads=4,
  head_dim=64,
  d_ff=1024,
  vocab_size=4096,
  max_len=65_536,
)
# n, k of its matrices: qkv, out, up, down; all of them, and of a half of it, on the axes below
SHAPES = ((1024, 256), (256, 512), (2048, 256), (256, 1024))
SHAPES_OF_HALF = ((512, 256), (256, 256), (1024, 256), (256, 512))
NUM_ROWS = (1, 16, 256, 4096)
WIDTHS = (256, 512, 1024, 2048, 4096)
LENGTHS = (1, 64, 512, 2048)
SEQUENCES = (1, 4, 16, 64)
HEADS = ((8, 4), (4, 2))


def rising(seed, *sizes):
  """Random numbers that rise along every axis."""
  values = np.random.default_rng(seed).uniform(1e-6, 1e-4, sizes)
  for axis in range(len(sizes)):
    values = values.cumsum(axis)
  return values


def rows_of(seed, *axes):
  """A row for each place of a grid: its coordinates and a time."""
  values = rising(seed, *map(len, axes)).ravel()
  places = [np.hstack(place) for place in itertools.product(*axes)]
  return np.column_stack([np.array(places, float), values])


def operators(seed=0, heads=HEADS):
  return Operators(
    device=Device(name="test", peak_flops_per_s=1e12, peak_bytes_per_s=1e11, memory_bytes=8e9),
    gemm=rows_of(seed, NUM_ROWS, WIDTHS, WIDTHS),
    lm_head=rows_of(seed + 1, NUM_ROWS, WIDTHS, WIDTHS),
    context=rows_of(seed + 2, heads, SEQUENCES, LENGTHS),
    generation=rows_of(seed + 3, heads, SEQUENCES, LENGTHS),
    all_reduce=rows_of(seed + 4, (2, 4), (256, 256 * 4096)),
    memory_share=0.8,
    launch_s=1e-6,
  )


def silicon(**more):
  return Silicon(**dict(model=MODEL, operators=operators()) | more)


def value(rows, *place):
  (found,) = rows[(rows[:, :-1] == place).all(axis=1), -1]
  return found


def decodes(num, keys):
  return StepCounts(num_decodes=num, num_decode_keys=num * keys, num_emitted=num)


def chunk(start, num_tokens):
  return count_slices(prefill_starts=[start], prefill_tokens=[num_tokens], num_emitted=0)


counts = st.builds(
  StepCounts,
  num_prefill_tokens=st.integers(0, 9000),
  num_prefill_pairs=st.integers(0, 30_000_000),
  num_decodes=st.integers(0, 100),
  num_decode_keys=st.integers(0, 300_000),
  num_emitted=st.integers(0, 100),
).filter(lambda c: not c.num_decodes or c.num_decode_keys >= c.num_decodes)


def test_at_measured_points_a_step_takes_what_was_measured():
  own, model = operators(), silicon()
  for num, keys in itertools.product((1, 16), LENGTHS[1:]):
    terms = model.terms_of(decodes(num, keys))
    matrices_s = sum(value(own.gemm, num, *shape) for shape in SHAPES)
    linear_s = 3 * matrices_s + value(own.lm_head, num, 4096, 256)
    assert terms.linear_s == pytest.approx(linear_s)
    assert terms.attention_decode_s == pytest.approx(3 * value(own.generation, 8, 4, num, keys))
    assert terms.attention_prefill_s == terms.all_reduce_s == terms.host_s == 0
  for tokens in LENGTHS[1:]:
    prefill_s = model.terms_of(chunk(0, tokens)).attention_prefill_s
    assert prefill_s == pytest.approx(3 * value(own.context, 8, 4, 1, tokens))


def test_a_device_takes_its_share_of_the_matrices_and_heads_and_reduces_twice_a_layer():
  own = operators()
  terms = silicon(tp=2).terms_of(decodes(16, 512)._replace(num_emitted=0))
  matrices_s = sum(value(own.gemm, 16, *shape) for shape in SHAPES_OF_HALF)
  assert terms.linear_s == pytest.approx(3 * matrices_s)
  assert terms.attention_decode_s == pytest.approx(3 * value(own.generation, 4, 2, 16, 512))
  first_s, last_s = (value(own.all_reduce, 2, elements) for elements in (256, 256 * 4096))
  assert terms.all_reduce_s == pytest.approx(6 * (first_s + (last_s - first_s) * 15 / 4095))


@given(small=counts, more=counts)
@settings(max_examples=50)
def test_more_work_never_takes_less_where_the_tables_rise(small, more):
  model = silicon()
  if not small.num_prefill_tokens or not more.num_prefill_tokens:
    small = small._replace(num_prefill_tokens=0)
    more = more._replace(num_prefill_tokens=0)
  more = more._replace(num_decodes=0, num_emitted=more.num_emitted)
  both = StepCounts(*map(sum, zip(small, more)))
  if not small.num_decodes:
    both = both._replace(num_decode_keys=0)
  ours, theirs = model.terms_of(small), model.terms_of(both)
  assert ours.linear_s <= theirs.linear_s * (1 + 1e-9)
  assert ours.elementwise_s <= theirs.elementwise_s * (1 + 1e-9)
  assert ours.attention_decode_s <= theirs.attention_decode_s * (1 + 1e-9)


@given(start=st.integers(0, 20_000), tokens=st.integers(1, 9000), more=st.integers(0, 5000))
def test_a_chunk_takes_longer_the_longer_it_is_and_the_more_is_before_it(start, tokens, more):
  model = silicon()

  def prefill_s(*place):
    return model.terms_of(chunk(*place)).attention_prefill_s

  least_s = prefill_s(start, tokens) * (1 - 1e-9)
  assert least_s <= prefill_s(start, tokens + more)
  assert prefill_s(0, tokens) * (1 - 1e-9) <= prefill_s(start, tokens)


def test_chunks_of_a_prompt_take_as_long_as_all_of_it_but_for_a_launch():
  context = rows_of(2, HEADS, SEQUENCES, LENGTHS)
  for row in context:  # a quadratic: nothing is faster alone than behind others
    row[-1] = row[2] * (1e-5 + 1e-9 * row[3] ** 2)
  model = silicon(operators=dataclasses.replace(operators(), context=context))

  def layer_s(*place):
    return model.terms_of(chunk(*place)).attention_prefill_s / 3

  launch_s = layer_s(0, 1)
  both_s = layer_s(0, 2048) + layer_s(2048, 2048)
  assert both_s == pytest.approx(layer_s(0, 4096) + launch_s)
  assert layer_s(2048, 2048) == pytest.approx(launch_s + 1e-9 * (4096**2 - 2048**2))


def test_beyond_the_longest_measured_prompt_time_grows_with_its_pairs():
  model = silicon()
  long_s = [model.terms_of(chunk(0, n)).attention_prefill_s for n in (2048, 4096, 8192, 16_384)]
  first, second, third = np.diff(long_s)
  assert second == pytest.approx(4 * first) and third == pytest.approx(4 * second)


def test_heads_that_nobody_measured_are_as_more_sequences_of_fewer():
  of_four, of_eight = (operators(heads=heads) for heads in (((4, 2),), HEADS))
  few = silicon(operators=of_four)
  rows = of_four.generation
  terms = few.terms_of(decodes(4, 512))  # of 8 and 4 heads, as 8 sequences of 4 and 2
  middle_s = (value(rows, 4, 2, 4, 512) * 8 + value(rows, 4, 2, 16, 512) * 4) / 12
  assert terms.attention_decode_s == pytest.approx(3 * middle_s)
  assert silicon(operators=of_eight).terms_of(decodes(4, 512)) != terms
  with pytest.raises(ValueError, match=r"decode|prefill.*8 query heads and 4 kv heads.*8/8"):
    silicon(operators=operators(heads=((8, 8),)))


def test_sequences_that_did_not_fit_take_what_fewer_of_as_many_keys_promise():
  own = operators()
  is_large = (own.generation[:, 2] == 64) & (own.generation[:, 3] == 2048)
  short = dataclasses.replace(own, generation=own.generation[~is_large])
  fourth_s, sixteenth_s = (value(own.generation, 8, 4, n, 2048) for n in (4, 16))
  expected_s = sixteenth_s + (sixteenth_s - fourth_s) * 48 / 12
  model = silicon(operators=short)
  terms = model.terms_of(decodes(64, 2048))
  assert terms.attention_decode_s == pytest.approx(3 * expected_s)
  assert model.beyond(decodes(64, 2048)) and not model.beyond(decodes(16, 2048))


def test_steps_beyond_what_was_measured_are_named():
  model = silicon()
  inside = count_slices(
    prefill_starts=[64], prefill_tokens=[400], decode_positions=[700] * 9, num_emitted=9
  )
  assert model.beyond(inside) == ()
  assert any("5000 tokens" in text for text in model.beyond(chunk(0, 5000)))
  assert any("chunk" in text for text in model.beyond(chunk(1900, 400)))
  assert any("decodes" in text for text in model.beyond(decodes(9, 3000)))


@given(num=st.integers(1, 99), keys=st.integers(1, 5000), steps=st.integers(1, 300))
@settings(max_examples=30)
def test_steps_in_a_row_are_single_steps(num, keys, steps):
  model = silicon(host_s=1e-3, host_row_s=1e-5)
  first = decodes(num, keys)
  one_by_one = LatencyModel.decode_steps_s(model, first, steps)
  assert model.decode_steps_s(first, steps) == pytest.approx(one_by_one, rel=1e-9)


def test_devices_that_nobody_reduced_over_are_refused():
  with pytest.raises(ValueError, match=r"tp=8.*only 2, 4"):
    silicon(model=dataclasses.replace(MODEL, num_kv_heads=8), tp=8,
            operators=operators(heads=((1, 1),)))  # fmt: skip


def test_without_the_package_the_message_names_the_extra(monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  with pytest.raises(ModuleNotFoundError, match=r"pdjax\[silicon\]"):
    Silicon(model=MODEL)


# The closed loop of the validation ----------------------------------------------------------------


@given(users=st.integers(1, 6), rounds=st.integers(1, 4), seed=st.integers(0, 99))
@settings(max_examples=15, deadline=None)
def test_each_user_of_a_closed_loop_has_one_request_at_a_time(users, rounds, seed):
  rng = np.random.default_rng(seed)
  lengths = [tuple(map(int, rng.integers(1, 60, 2))) for _ in range(users * rounds)]
  model = silicon()
  cluster = make_cluster(
    parse_pools("mixed:fcfs"),
    SchedulerOptions(steps_in_flight=1),
    lambda group: PageConfig(num_rows=4, page_size=16, pages_per_row=8, num_pages=32),
    lambda group: SimExecutor(
      step_s=model.step_s,
      steps_s=model.steps_s,
      link=Link(name="none", latency_s=0.0, bytes_per_s=1e9),
      bytes_per_token=1,
    ),
  )
  records = request_records(closed_loop(cluster, lengths, users, random.Random(seed)))
  found = [(r.num_prompt_tokens, r.max_tokens) for _, r in sorted(records.items())]
  assert found == lengths
  events = sorted([(r.arrival_s, 1) for r in records.values()]
                  + [(r.finish_s, -1) for r in records.values()])  # fmt: skip
  assert max(itertools.accumulate(change for _, change in events)) == users
  ends_s = sorted(r.finish_s for r in records.values())
  later_s = sorted(r.arrival_s for r in records.values())[users:]
  assert all(later > end for later, end in zip(later_s, ends_s))


# The package --------------------------------------------------------------------------------------


@needs_package
@pytest.mark.slow
def test_llama_is_on_measured_points_of_the_package():
  llama = ModelConfig(
    name="llama", num_layers=32, d_model=4096, num_heads=32, num_kv_heads=8, head_dim=128,
    d_ff=14_336, vocab_size=128_256, max_len=131_072,
  )  # fmt: skip
  own = read_operators("h100_sxm", "vllm", gemm="bfloat16", kv="bfloat16", head_dim=128)
  model = Silicon(model=llama, operators=own)
  for num, keys in ((1, 1024), (16, 2048), (128, 512)):
    assert model.beyond(decodes(num, keys)) == ()
    terms = model.terms_of(decodes(num, keys))
    assert terms.attention_decode_s == pytest.approx(32 * value(own.generation, 32, 8, num, keys))
    known_s = value(own.gemm, num, 6144, 4096) + value(own.gemm, num, 4096, 4096)
    assert terms.linear_s > 32 * known_s
  for tokens in (512, 2048, 16_384):
    prefill_s = model.terms_of(chunk(0, tokens)).attention_prefill_s
    assert prefill_s == pytest.approx(32 * value(own.context, 32, 8, 1, tokens))
  steps_s = [model.terms_of(decodes(n, 2048)).total_s for n in (1, 4, 16, 64, 256)]
  assert steps_s == sorted(steps_s)
  weights_s = 2 * llama.num_params / own.device.peak_bytes_per_s
  assert weights_s < steps_s[0] < 2 * weights_s


@needs_package
@pytest.mark.slow
def test_unknown_names_are_answered_with_those_there_are():
  for name, known in (("system", "h100_sxm"), ("backend", "trtllm"), ("gemm", "gemm_dtype=what")):
    with pytest.raises(ValueError, match=known):
      Silicon(model=MODEL, **{name: "what"})
  with pytest.raises(ValueError, match="not 9"):
    Silicon(model=dataclasses.replace(MODEL, head_dim=128), version="9")
  assert {"a100_sxm", "h100_sxm", "h200_sxm", "b200_sxm", "gb200", "l40s"} <= set(systems())


def test_rows_are_chosen_by_their_seed_alone():
  folder = pathlib.Path(__file__).resolve().parents[3] / "shared/data/measured/aiconfigurator"
  if not (folder / ROWS).is_file():
    pytest.skip(f"no {ROWS} beside this project, in shared/data/measured/aiconfigurator")
  rows = read_rows(folder)
  assert choose(rows, 3) == choose(rows[::-1], 3) != choose(rows, 4)
  assert {row for row in rows if row.decode is not None} <= set(choose(rows))
  assert all(row.users <= row.workers.batch for row in rows if row.decode is None)
