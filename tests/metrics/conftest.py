"""Event logs made by hand. All stamps are binary fractions, so answers are exact."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdjax.core.events import Arrived, Copied, EventLog, Failed, Finished, Preempted, Step


def step_event(
  pool: str,
  step_id: int,
  start_s: float,
  end_s: float,
  *,
  prefill: tuple[tuple[int, int, int], ...] = (),  # (request, start, tokens)
  decode: tuple[tuple[int, int], ...] = (),  # (request, position)
  emits: tuple[int, ...] = (),
) -> Step:
  return Step(
    pool=pool,
    step_id=step_id,
    kind="decode" if not prefill else "mixed" if decode else "prefill",
    start_s=start_s,
    end_s=end_s,
    prefill_ids=tuple(r for r, _, _ in prefill),
    prefill_starts=tuple(start for _, start, _ in prefill),
    prefill_tokens=tuple(tokens for _, _, tokens in prefill),
    decode_ids=tuple(r for r, _ in decode),
    decode_positions=tuple(position for _, position in decode),
    emitted_ids=emits,
    token_ids=tuple(100 * r + step_id for r in emits),
  )


def arrived(
  time_s: float, request_id: int, tokens: int, max_tokens: int, pool: str = "m"
) -> Arrived:
  return Arrived(
    time_s=time_s,
    request_id=request_id,
    pool=pool,
    num_prompt_tokens=tokens,
    max_tokens=max_tokens,
  )


@pytest.fixture(scope="session")
def make_step() -> Callable[..., Step]:
  return step_event


@pytest.fixture(scope="session")
def make_arrival() -> Callable[..., Arrived]:
  return arrived


@pytest.fixture
def mixed_log() -> EventLog:
  """One mixed pool. Per request:

  0: prompt 4, stops after 3 of 8 tokens, at 2, 3 and 6 s: its last gap overlaps the long prompt 1.
  1: prompt 64 in two chunks (3 to 6 s), one token at 6 s.
  2: prompt 4, preempted after its first token (2 s), recomputed, second and last token at 8 s.
  3: refused before it reached a pool.
  4: arrives, gets no token before the log ends.
  5: prompt 4, one token, then cancelled.
  """
  return EventLog(
    [
      arrived(0.5, 0, 4, 8),
      arrived(0.75, 2, 4, 2),
      arrived(0.75, 5, 4, 9),
      Failed(time_s=0.875, request_id=3, pool=None, reason="prompt too long"),
      step_event("m", 0, 1.0, 2.0, prefill=((0, 0, 4), (2, 0, 4), (5, 0, 4)), emits=(0, 2, 5)),
      arrived(2.0, 1, 64, 1),
      Failed(time_s=2.0, request_id=5, pool="m", reason="cancelled"),
      Preempted(time_s=2.0, request_id=2, pool="m"),
      step_event("m", 1, 2.0, 3.0, decode=((0, 4),), emits=(0,)),
      step_event("m", 2, 3.0, 4.5, prefill=((1, 0, 32),)),
      step_event("m", 3, 4.5, 6.0, prefill=((1, 32, 32),), decode=((0, 5),), emits=(0, 1)),
      Finished(time_s=6.0, request_id=0, pool="m", reason="stop"),
      Finished(time_s=6.0, request_id=1, pool="m", reason="length"),
      arrived(6.5, 4, 4, 4),
      step_event("m", 4, 7.0, 8.0, prefill=((2, 0, 5),), emits=(2,)),
      Finished(time_s=8.0, request_id=2, pool="m", reason="length"),
    ]
  )


@pytest.fixture
def handoff_log() -> EventLog:
  """A prefill pool `p`, a decode pool `d`; 1024 bytes copied per request, both at once for a while.

  0: arrives 0, first step 1, first token 2, copy 2.5 to 3.25, decodes end at 4 and 5.
  1: arrives 0.5, first step 2, first token 3, copy 3 to 4 (waited 0), decode ends at 5.
  2: arrives 1, first step 3, one token at 3.5 and done: never copied.
  """
  return EventLog(
    [
      arrived(0.0, 0, 8, 3, pool="p"),
      arrived(0.5, 1, 80, 2, pool="p"),
      arrived(1.0, 2, 8, 1, pool="p"),
      step_event("p", 0, 1.0, 2.0, prefill=((0, 0, 8),), emits=(0,)),
      step_event("p", 1, 2.0, 3.0, prefill=((1, 0, 80),), emits=(1,)),
      Copied(
        request_id=0, source="p", target="d", start_s=2.5, end_s=3.25, num_tokens=8, num_bytes=1024
      ),
      step_event("p", 2, 3.0, 3.5, prefill=((2, 0, 8),), emits=(2,)),
      Finished(time_s=3.5, request_id=2, pool="p", reason="length"),
      step_event("d", 0, 3.25, 4.0, decode=((0, 8),), emits=(0,)),
      Copied(
        request_id=1, source="p", target="d", start_s=3.0, end_s=4.0, num_tokens=80, num_bytes=1024
      ),
      step_event("d", 1, 4.0, 5.0, decode=((0, 9), (1, 80)), emits=(0, 1)),
      Finished(time_s=5.0, request_id=0, pool="d", reason="length"),
      Finished(time_s=5.0, request_id=1, pool="d", reason="length"),
    ]
  )
