"""Simulated steps queue on their device, copies take latency and bytes over rate."""

import pytest

from pdjax.core.clock import VirtualClock, to_ticks
from pdjax.core.device_group import split_layers
from pdjax.core.plan import DecodeSlices, Slice, StepPlan
from pdjax.core.request import SamplingParams
from pdjax.serving.executor import Handle
from pdjax.sim.hardware import Link
from pdjax.sim.sim_executor import SimExecutor

pytestmark = pytest.mark.quick

SAMPLING = SamplingParams(max_tokens=4)


def plan(num_decodes: int = 0, emits: tuple[bool, ...] = ()) -> StepPlan:
  zeros = (0,) * num_decodes
  return StepPlan(
    step_id=0,
    prefills=tuple(
      Slice(
        request_id=100 + row,
        generation=0,
        row=row,
        num_prompt_tokens=8,
        start=0,
        num_tokens=8,
        token_ids=None,
        emits_token=emits_token,
        sampling=SAMPLING,
      )
      for row, emits_token in enumerate(emits)
    ),
    decodes=DecodeSlices(
      request_ids=tuple(range(num_decodes)), generations=zeros, rows=zeros, positions=zeros
    ),
  )


def executor(**options) -> SimExecutor:
  return SimExecutor(
    step_s=lambda plan: 0.25 * plan.num_tokens,
    link=Link(name="l", latency_s=0.5, bytes_per_s=64.0),
    bytes_per_token=32,
    **options,
  )


def export(pool: SimExecutor, num_tokens: int):
  handle = Handle(
    request_id=3,
    num_tokens=num_tokens,
    num_prompt_tokens=num_tokens,
    first_token_id=9,
    sampling=SAMPLING,
  )
  return pool.export(handle, page_ids=(5,), now_s=0.0)


def test_a_step_begins_when_the_one_before_ends():
  pool = executor()
  assert pool.submit(plan(4), 1.0).finish_s == 2.0
  assert pool.submit(plan(2), 1.25).finish_s == 2.5  # queued behind the first
  assert pool.submit(plan(2), 4.0).finish_s == 4.5  # the device had been idle


def test_a_step_gives_a_token_per_emitting_slice_and_per_decode():
  result = executor().submit(plan(3, emits=(True, False, True)), 0.0).result()
  assert result.token_ids == (0,) * 5
  assert result.errors == ()


def test_steps_end_on_a_tick_so_that_phases_add_up_exactly():
  pool = SimExecutor(
    step_s=lambda plan: 0.1, link=Link(name="l", latency_s=0.0, bytes_per_s=3.0),
    bytes_per_token=1,
  )  # fmt: skip
  finish_s = pool.submit(plan(1), 0.0).finish_s
  assert finish_s == to_ticks(0.1)
  copy = pool.import_(export(pool, 1), row=0, page_ids=(), now_s=0.0)
  clock = VirtualClock()
  clock.wait([copy], None)
  assert clock.now_s() == copy.finish_s == to_ticks(1 / 3)


def test_a_copy_moves_the_bytes_of_its_tokens_beside_the_steps():
  source, target = executor(), executor()
  handle = export(source, num_tokens=6)
  assert (handle.request_id, handle.num_tokens, handle.first_token_id) == (3, 6, 9)
  assert handle.num_bytes == 6 * 32
  target.submit(plan(40), 1.0)  # busy for 10 s, yet the copy is not held up
  ticket = target.import_(handle, row=2, page_ids=(7,), now_s=1.0)
  assert ticket.finish_s == 1.0 + 0.5 + 6 * 32 / 64
  assert ticket.result() is None
  source.drop(handle)


@pytest.mark.parametrize(("sends", "receives"), [(1, 4), (4, 1), (2, 4), (4, 2), (4, 4)])
def test_a_copy_takes_as_many_links_as_both_sides_have(sends, receives):
  source, target = executor(num_links=sends), executor(num_links=receives)
  handle = export(source, num_tokens=6)
  ticket = target.import_(handle, row=2, page_ids=(7,), now_s=1.0)
  assert ticket.finish_s == 1.0 + 0.5 + 6 * 32 / 64 / min(sends, receives)


def test_a_link_never_carries_more_than_its_rate():
  """Copies that begin together take turns."""
  source, target = executor(), executor()
  handles = [export(source, num_tokens=6) for _ in range(3)]
  tickets = [target.import_(h, row=i, page_ids=(i,), now_s=1.0) for i, h in enumerate(handles)]
  one_s = 0.5 + 6 * 32 / 64
  assert [t.finish_s for t in tickets] == [1.0 + one_s * (i + 1) for i in range(3)]
  late = target.import_(handles[0], row=3, page_ids=(3,), now_s=100.0)
  assert late.finish_s == 100.0 + one_s


# Layer groups and stages --------------------------------------------------------------------------


def pipeline(num_stages: int, num_layers: int = 8, hand_over_s: float = 0.0, **options):
  return executor(
    layer_groups=split_layers(num_layers, num_stages),
    num_stages=num_stages,
    hand_over_s=lambda num_tokens: hand_over_s,
    **options,
  )


@pytest.mark.parametrize("num_stages", [1, 2, 4, 8])
@pytest.mark.parametrize("num_chunks", [1, 3, 8])
def test_chunks_follow_one_another_through_the_stages(num_stages, num_chunks):
  """S stages take (C + S - 1) / (C S) of the time that one device takes for C chunks."""
  pool, one = pipeline(num_stages), executor()
  chunk = plan(emits=(False,))
  for _ in range(num_chunks):
    end_s, one_s = pool.submit(chunk, 0.0).finish_s, one.submit(chunk, 0.0).finish_s
  share = (num_chunks + num_stages - 1) / (num_chunks * num_stages)
  assert end_s == pytest.approx(share * one_s, abs=1e-7)


def test_a_chunk_alone_is_no_faster_in_a_pipeline_and_pays_for_the_way():
  for num_stages in (1, 2, 4):
    pool = pipeline(num_stages, hand_over_s=0.125)
    step_s = pool.submit(plan(emits=(True,)), 0.0).finish_s
    assert step_s == 0.25 * 8 + 0.125 * (num_stages - 1)


def test_a_short_step_waits_for_a_long_one_that_is_in_the_next_stage():
  pool = pipeline(2)
  assert pool.submit(plan(emits=(False,) * 4), 0.0).finish_s == 8.0  # 4 s in each stage
  assert pool.submit(plan(emits=(False,)), 0.0).finish_s == 8.0 + 1.0


def test_stages_of_unequal_layers_wait_for_the_longest():
  pool = pipeline(2, num_layers=5)  # 3 and 2
  ends_s = [pool.submit(plan(emits=(False,)), 0.0).finish_s for _ in range(3)]
  assert ends_s == pytest.approx([2.0, 2.0 + 1.2, 2.0 + 2.4])


def test_a_decode_waits_for_the_step_that_computes_its_token():
  pool = pipeline(4)
  first_s = pool.submit(plan(2), 0.0).finish_s  # requests 0 and 1
  other_s = pool.submit(plan(emits=(False,)), 0.0).finish_s
  assert other_s < first_s + 0.25 * 8, "it is behind the first in each stage, not in all"
  again_s = pool.submit(plan(1), 0.0).finish_s
  assert again_s >= first_s + 0.25
  prompt = plan(emits=(True,))  # request 100
  prompt_s = pool.submit(prompt, 100.0).finish_s
  decodes = DecodeSlices(request_ids=(100,), generations=(0,), rows=(0,), positions=(8,))
  decode = StepPlan(step_id=1, decodes=decodes)
  assert pool.submit(decode, 100.0).finish_s == prompt_s + 0.25
  assert pool.submit(decode, 200.0).finish_s == 200.0 + 0.25


def test_layer_groups_that_stages_cannot_share_are_refused():
  with pytest.raises(ValueError, match="do not make num_stages=2"):
    executor(layer_groups=split_layers(9, 3), num_stages=2)


def layered(layers, *, request_id=3, num_tokens=8) -> Handle:
  return Handle(
    request_id=request_id,
    num_tokens=num_tokens,
    num_prompt_tokens=num_tokens,
    first_token_id=None,
    sampling=SAMPLING,
    layers=layers,
  )


@pytest.mark.parametrize("num_stages", [1, 4])
def test_layers_are_sent_as_soon_as_they_are_computed_and_no_sooner(num_stages):
  groups = split_layers(8, 4)
  fast = Link(name="l", latency_s=0.0, bytes_per_s=1e12)
  source, target = (
    SimExecutor(
      step_s=lambda plan: 0.25 * plan.num_tokens,
      link=fast,
      bytes_per_token=32,
      layer_groups=groups,
      num_stages=num_stages,
    )
    for _ in range(2)
  )
  source.submit(plan(4), 1.0)  # the step is behind this one: by a second, or by its first stage
  wait_s = 1.0 / num_stages
  handles = [layered(layers) for layers in groups]
  ticket = source.submit(plan(emits=(True,)), 1.0, [(handle, (0, 1)) for handle in handles])
  exported = [source.export(handle, page_ids=(0, 1), now_s=1.0) for handle in handles]
  assert [handle.num_bytes for handle in exported] == [8 * 32 // 4] * 4
  ends_s = [target.import_(h, row=0, page_ids=(0, 1), now_s=1.0).finish_s for h in exported]
  assert ends_s == pytest.approx([1.0 + wait_s + 0.5 * (i + 1) for i in range(4)])
  assert ends_s[-1] == pytest.approx(ticket.finish_s)
  # What was computed long ago is there.
  source.submit(plan(4), 50.0)
  handle = source.export(layered(groups[2]), page_ids=(0, 1), now_s=50.0)
  assert target.import_(handle, row=0, page_ids=(0, 1), now_s=50.0).finish_s < 50.1


def test_stages_that_hold_the_layers_send_at_the_same_time():
  def copy_s(sends: int, receives: int, layers=None) -> float:
    source, target = pipeline(sends, num_links=2), pipeline(receives, num_links=2)
    handle = source.export(layered(layers), page_ids=(0,), now_s=0.0)
    return target.import_(handle, row=0, page_ids=(0,), now_s=0.0).finish_s - 0.5

  whole_s = copy_s(1, 1)
  assert copy_s(1, 4) == copy_s(4, 1) == whole_s
  assert copy_s(4, 4) == whole_s / 4
  assert copy_s(4, 4, (0, 2)) == whole_s / 4, "a quarter of the bytes, from one stage"
  assert copy_s(4, 4, (0, 4)) == whole_s / 4, "half of the bytes, from two"


def test_a_copy_that_waits_for_its_layers_leaves_the_link_to_others():
  source, target = pipeline(1, num_layers=4), pipeline(1, num_layers=4)
  late = layered((0, 4))
  source.submit(plan(40), 0.0, [(late, (0, 1))])  # ends at 10 s
  late = source.export(late, page_ids=(0, 1), now_s=0.0)
  assert target.import_(late, row=0, page_ids=(), now_s=0.0).finish_s == 10.0 + 0.5 + 8 * 32 / 64
  copy_s = 0.5 + 8 * 32 / 64
  others = [source.export(layered(None, request_id=i), page_ids=(0,), now_s=0.0) for i in range(3)]
  ends_s = [target.import_(h, row=0, page_ids=(), now_s=0.0).finish_s for h in others]
  assert ends_s[:2] == [copy_s, 2 * copy_s]
  assert ends_s[2] == 10.0 + 2 * copy_s, "the gap before 10 s is too short for it"


def test_copies_share_the_ways_of_both_pools():
  """Out of one pool they take turns, whoever gets them; between others they pass at once."""
  link = Link(name="l", latency_s=0.0, bytes_per_s=1e3)
  pools = [
    SimExecutor(step_s=lambda plan: 1.0, link=link, bytes_per_token=125, layer_groups=((0, 8),))
    for _ in range(4)
  ]

  def copy(source, target):
    handle = source.export(layered(None), page_ids=(0, 1), now_s=0.0)
    return target.import_(handle, row=0, page_ids=(0, 1), now_s=0.0).finish_s

  first, second, third, fourth = pools
  assert copy(first, third) == 1.0
  assert copy(first, fourth) == 2.0, "behind the other on the way out"
  assert copy(second, third) == 2.0, "behind the first on the way in"
  assert copy(third, first) == 1.0, "the other direction is free"
  assert copy(second, fourth) == 1.0, "both of its ways are free before the others"
  assert copy(second, fourth) == 3.0, "and then after them"
