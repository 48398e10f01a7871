"""Simulated steps queue on their device, copies take latency and bytes over rate."""

import pytest

from pdjax.core.clock import VirtualClock, to_ticks
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
    kv_bytes_per_token=32,
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
    kv_bytes_per_token=1,
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
