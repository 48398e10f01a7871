"""The checksum executor gives the model's tokens, and other tokens when a page is wrong."""

import random

import pytest

from pdjax.core.checksum import VOCAB_SIZE, generate
from pdjax.core.plan import DecodeSlices, PageUpdates, Slice, StepPlan
from pdjax.core.request import SamplingParams
from pdjax.serving.executor import Handle
from pdjax.sim.checksum_executor import ChecksumExecutor
from pdjax.sim.hardware import Link

pytestmark = pytest.mark.quick

SAMPLING = SamplingParams(max_tokens=8)
PROMPT = (5, 900, 17, 17, 3, 44, 0, 996, 81, 12)
PAGES = (6, 1, 4, 3, 0)  # of 4 tokens each, deliberately out of order


def executor(**kwargs) -> ChecksumExecutor:
  return ChecksumExecutor(
    num_pages=8,
    page_size=4,
    step_s=lambda plan: 1.0,
    link=Link(name="l", latency_s=1.0, bytes_per_s=1e9),
    **kwargs,
  )


def table(row: int, page_ids) -> PageUpdates:
  return PageUpdates(
    rows=(row,) * len(page_ids), indices=tuple(range(len(page_ids))), page_ids=tuple(page_ids)
  )


def prefill(prompt, start=0, end=None, *, row=0, request_id=0, updates=PageUpdates()):  # noqa: B008
  end = len(prompt) if end is None else end
  return StepPlan(
    step_id=0,
    prefills=(
      Slice(
        request_id=request_id,
        generation=0,
        row=row,
        num_prompt_tokens=len(prompt),
        start=start,
        num_tokens=end - start,
        token_ids=tuple(prompt[start:end]),
        emits_token=end == len(prompt),
        sampling=SAMPLING,
      ),
    ),
    page_updates=updates,
  )


def decode(*row_positions, updates=PageUpdates()):  # noqa: B008
  rows, positions = zip(*row_positions)
  return StepPlan(
    step_id=0,
    decodes=DecodeSlices(
      request_ids=rows, generations=(0,) * len(rows), rows=rows, positions=positions
    ),
    page_updates=updates,
  )


def tokens_of(pool: ChecksumExecutor, plans) -> tuple[int, ...]:
  return tuple(t for plan in plans for t in pool.submit(plan, 0.0).result().token_ids)


def decodes(num_tokens: int, row: int = 0):
  return [decode((row, len(PROMPT) + i)) for i in range(num_tokens)]


def test_shuffled_pages_give_the_tokens_of_the_model():
  plans = [prefill(PROMPT, updates=table(0, PAGES)), *decodes(7)]
  assert tokens_of(executor(), plans) == generate(PROMPT, 8)


@pytest.mark.parametrize("cut", range(1, len(PROMPT)))
def test_a_prompt_in_two_chunks_gives_the_tokens_of_the_whole(cut):
  plans = [prefill(PROMPT, 0, cut, updates=table(0, PAGES)), prefill(PROMPT, cut), *decodes(3)]
  assert tokens_of(executor(), plans) == generate(PROMPT, 4)


@pytest.mark.parametrize("i, j", [(0, 1), (0, 2), (1, 2)])
def test_two_pages_swapped_give_another_token(i, j):
  swapped = list(PAGES)
  swapped[i], swapped[j] = swapped[j], swapped[i]
  pool = executor()
  (first,) = tokens_of(pool, [prefill(PROMPT, updates=table(0, PAGES))])
  (second,) = tokens_of(pool, [decode((0, len(PROMPT)), updates=table(0, swapped))])
  expected = generate(PROMPT, 2)
  assert first == expected[0]
  assert second != expected[1]


def test_a_page_shared_by_mistake_gives_another_token():
  other = tuple(reversed(PROMPT))
  apart, shared = executor(), executor()
  for pool, pages in ((apart, (2, 5, 7)), (shared, (2, PAGES[1], 7))):
    first = prefill(PROMPT, updates=table(0, PAGES))
    second = prefill(other, row=1, updates=table(1, pages))
    tokens = tokens_of(pool, [first, second, decode((0, 10))])
    assert (tokens[2] == generate(PROMPT, 2)[1]) == (pool is apart)


def test_what_an_earlier_request_left_in_a_page_is_not_read():
  pool = executor()
  tokens_of(pool, [prefill((1,) * 20, updates=table(0, PAGES))])
  plans = [prefill(PROMPT, updates=table(0, PAGES)), *decodes(3)]
  assert tokens_of(pool, plans) == generate(PROMPT, 4)


def test_a_skipped_chunk_gives_another_token():
  plans = [prefill(PROMPT, 0, 3, updates=table(0, PAGES)), prefill(PROMPT, 5)]
  assert tokens_of(executor(), plans) != generate(PROMPT, 1)


def test_a_mixed_step_gives_each_row_its_own_tokens():
  rng = random.Random(1)
  other = [rng.randrange(VOCAB_SIZE) for _ in range(7)]
  pool = executor()
  tokens_of(pool, [prefill(PROMPT, updates=table(0, PAGES[:4]))])
  start = prefill(other, row=1, request_id=1, updates=table(1, (7, 2, 5)))
  mixed = StepPlan(
    step_id=1,
    prefills=start.prefills,
    decodes=decode((0, len(PROMPT))).decodes,
    page_updates=start.page_updates,
  )
  result = pool.submit(mixed, 0.0).result()
  assert result.token_ids == (generate(other, 1)[0], generate(PROMPT, 2)[1])  # prefill first
  result = pool.submit(decode((1, 7), (0, 11)), 0.0).result()
  assert result.token_ids == (generate(other, 2)[1], generate(PROMPT, 3)[2])


def hand_off(source: ChecksumExecutor, target: ChecksumExecutor, first: int, pages):
  handle = Handle(
    request_id=0,
    num_tokens=len(PROMPT),
    num_prompt_tokens=len(PROMPT),
    first_token_id=first,
    sampling=SAMPLING,
  )
  handle = source.export(handle, page_ids=PAGES, now_s=0.0)
  return target.import_(handle, row=3, page_ids=pages, now_s=0.0)


def test_a_hand_off_to_other_pages_and_another_row_continues_the_tokens():
  source, target = executor(), executor()
  expected = generate(PROMPT, 5)
  (first,) = tokens_of(source, [prefill(PROMPT, updates=table(0, PAGES))])
  ticket = hand_off(source, target, first, (0, 7, 2, 5))
  tokens_of(source, [prefill((1,) * 20, updates=table(0, PAGES))])  # the source reuses its pages
  steps = [target.submit(d, ticket.finish_s) for d in decodes(4, row=3)]
  assert tuple(t for s in steps for t in s.result().token_ids) == expected[1:]


def test_a_step_before_the_copy_has_landed_does_not_see_it():
  source, target = executor(), executor()
  (first,) = tokens_of(source, [prefill(PROMPT, updates=table(0, PAGES))])
  ticket = hand_off(source, target, first, (0, 7, 2))
  with pytest.raises(KeyError):
    target.submit(decode((3, len(PROMPT))), ticket.finish_s / 2)


def test_a_request_that_fails_does_so_alone():
  pool = executor(fails=lambda request_id: "NaN logits" if request_id == 1 else None)
  other = PROMPT[::-1]
  tokens_of(pool, [prefill(PROMPT, updates=table(0, PAGES[:3]))])
  result = pool.submit(prefill(other, row=1, request_id=1, updates=table(1, (2, 5, 7))), 0.0)
  assert result.result().token_ids == (None,)
  assert result.result().errors == ((1, "NaN logits"),)
  result = pool.submit(decode((1, 10), (0, 10)), 0.0).result()
  assert result.token_ids == (None, generate(PROMPT, 2)[1])


def test_a_prompt_of_which_only_the_length_is_known_is_refused():
  plan = prefill(PROMPT, updates=table(0, PAGES))
  (slice_,) = plan.prefills
  lengths_only = StepPlan(
    step_id=0,
    prefills=(
      Slice(
        request_id=0,
        generation=0,
        row=0,
        num_prompt_tokens=slice_.num_tokens,
        start=0,
        num_tokens=slice_.num_tokens,
        token_ids=None,
        emits_token=True,
        sampling=SAMPLING,
      ),
    ),
  )
  with pytest.raises(ValueError, match=r"request 0: .*prompt ids"):
    executor().submit(lengths_only, 0.0)
