"""Requests refuse what can never be served; sequences count tokens and know no phase."""

import numpy as np
import pytest

from pdjax.core.plan import TokenLogprobs
from pdjax.core.request import Request, SamplingParams
from pdjax.core.sequence import Sequence

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
  ("field", "value", "message"),
  [
    ("max_tokens", 0, "max_tokens=0 must be at least 1"),
    ("temperature", -0.5, "temperature=-0.5 must be 0 (greedy) or positive"),
    ("temperature", float("nan"), "temperature=nan must be 0 (greedy) or positive"),
    ("top_k", 0, "top_k=0 must be at least 1, or None for no limit"),
    ("top_p", 0.0, "top_p=0.0 must be in (0, 1]"),
    ("top_p", 1.5, "top_p=1.5 must be in (0, 1]"),
    ("top_p", float("nan"), "top_p=nan must be in (0, 1]"),
    ("min_tokens", -1, "min_tokens=-1 must be in [0, max_tokens=1]"),
    ("min_tokens", 2, "min_tokens=2 must be in [0, max_tokens=1]"),
    ("min_p", -0.1, "min_p=-0.1 must be in [0, 1]"),
    ("min_p", float("nan"), "min_p=nan must be in [0, 1]"),
    ("repetition_penalty", 0.0, "repetition_penalty=0.0 must be positive, 1 for no penalty"),
    (
      "repetition_penalty",
      float("inf"),
      "repetition_penalty=inf must be positive, 1 for no penalty",
    ),
    ("stop", "abc", "stop='abc' must be a tuple of strings, none of them empty"),
    ("stop", ("a", ""), "stop=('a', '') must be a tuple of strings, none of them empty"),
    ("stop", None, "stop=None must be a tuple of strings, none of them empty"),
    ("temperature", None, "temperature=None must be a number"),
    ("temperature", "0.5", "temperature='0.5' must be a number"),
    ("top_p", None, "top_p=None must be a number"),
    ("min_p", "0", "min_p='0' must be a number"),
    ("repetition_penalty", None, "repetition_penalty=None must be a number"),
    ("max_tokens", 8.0, "max_tokens=8.0 must be a whole number"),
    ("max_tokens", None, "max_tokens=None must be a whole number"),
    ("seed", 0.5, "seed=0.5 must be a whole number"),
    ("logprobs", 1.0, "logprobs=1.0 must be a whole number"),
    ("stop_ids", [3], "stop_ids=[3] must be a tuple of token ids"),
    ("stop_ids", 3, "stop_ids=3 must be a tuple of token ids"),
    ("stop_ids", ("</s>",), "stop_ids=('</s>',) must be a tuple of token ids"),
    ("logprobs", -1, "logprobs=-1 must be in [0, 20], or None for none at all"),
    ("logprobs", 21, "logprobs=21 must be in [0, 20], or None for none at all"),
  ],
)
def test_sampling_outside_its_range_is_refused_with_the_value(field, value, message):
  with pytest.raises(ValueError) as error:
    SamplingParams(**{"max_tokens": 1, field: value})
  assert str(error.value) == message


def test_whole_numbers_of_numpy_are_whole_numbers():
  params = SamplingParams(max_tokens=np.int64(3), seed=np.uint32(7), stop_ids=(np.int32(2),))
  assert params == SamplingParams(max_tokens=3, seed=7, stop_ids=(2,))


def test_more_stop_ids_than_a_step_can_hold_back_are_refused_only_with_min_tokens():
  ids = tuple(range(9))
  assert SamplingParams(max_tokens=1, stop_ids=ids).stop_ids == ids
  assert SamplingParams(max_tokens=1, min_tokens=1, stop_ids=ids[:8]).min_tokens == 1
  with pytest.raises(ValueError, match="min_tokens=1 can hold back 8 stop ids at most, not 9"):
    SamplingParams(max_tokens=1, min_tokens=1, stop_ids=ids)


def make_request(**changes):
  fields = dict(
    request_id=3, arrival_s=0.0, num_prompt_tokens=2, sampling=SamplingParams(max_tokens=4)
  )
  return Request(**fields | changes)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"num_prompt_tokens": 0}, "request 3: empty prompt (num_prompt_tokens=0)"),
    ({"prompt_ids": (1, 2, 3)}, "request 3: 3 prompt_ids but num_prompt_tokens=2"),
    ({"prompt_ids": ()}, "request 3: 0 prompt_ids but num_prompt_tokens=2"),
    (
      {"prefix_hashes": (1,), "prefix_block_tokens": 1},
      "request 3: 1 prefix_hashes, but num_prompt_tokens=2 are 2 blocks of 1",
    ),
    (
      {"prefix_hashes": (1, 1), "prefix_block_tokens": 0},
      "request 3: prefix_block_tokens=0 must be at least 1",
    ),
    (
      {"prefix_hashes": (1, 1)},
      "request 3: prefix_hashes=(1, 1) goes with prefix_block_tokens=None: both or neither",
    ),
    ({"arrival_s": -1.0}, "request 3: arrival_s=-1.0 must be 0 or later, and finite"),
    ({"arrival_s": float("nan")}, "request 3: arrival_s=nan must be 0 or later, and finite"),
    ({"arrival_s": float("inf")}, "request 3: arrival_s=inf must be 0 or later, and finite"),
    (
      {"timeout_s": float("inf")},
      "request 3: timeout_s=inf must be positive and finite, or None to wait for ever",
    ),
  ],
)
def test_a_request_that_is_none_is_refused_with_its_id(changes, message):
  with pytest.raises(ValueError) as error:
    make_request(**changes)
  assert str(error.value) == message


def test_the_last_output_token_needs_no_slot():
  assert make_request().max_cached_tokens == 5
  assert make_request(sampling=SamplingParams(max_tokens=1)).max_cached_tokens == 2


def test_a_prompt_of_one_token_that_is_not_computed_yet_is_no_decode():
  seq = Sequence(make_request(num_prompt_tokens=1))
  assert not seq.is_decoding and seq.num_unscheduled_tokens == 1
  seq.num_scheduled_tokens = 1
  assert seq.is_decoding and seq.num_unscheduled_tokens == 1


def test_nothing_is_left_to_schedule_while_the_last_token_is_in_flight():
  seq = Sequence(make_request(sampling=SamplingParams(max_tokens=1)))
  seq.num_scheduled_tokens = 2
  assert seq.num_unscheduled_tokens == 0


def test_known_ids_run_from_the_prompt_into_the_output():
  seq = Sequence(make_request(prompt_ids=(10, 11)))
  seq.output_ids += [20, 21]
  assert [seq.known_ids(0, end) for end in range(5)] == [
    (), (10,), (10, 11), (10, 11, 20), (10, 11, 20, 21)
  ]  # fmt: skip
  assert seq.known_ids(1, 3) == (11, 20)
  assert seq.known_ids(3, 4) == (21,)
  assert Sequence(make_request()).known_ids(0, 1) is None


def test_a_cut_keeps_ids_and_logprobs_alike():
  seq = Sequence(make_request())
  logprobs = [TokenLogprobs(logprob=-float(i)) for i in range(4)]
  seq.output_ids, seq.output_logprobs = [20, 21, 22, 23], list(logprobs)
  seq.cut()
  assert len(seq.output_ids) == 4, "nothing says that it is cut"
  seq.num_kept_tokens = 3
  seq.cut()
  assert seq.output_ids == [20, 21, 22] and seq.output_logprobs == logprobs[:3]
  seq.num_kept_tokens = 0
  seq.cut()
  assert seq.output_ids == seq.output_logprobs == []


def test_a_lost_row_makes_everything_known_prefill_again():
  seq = Sequence(make_request())
  seq.output_ids += [20]
  seq.row, seq.num_computed_tokens, seq.num_scheduled_tokens = 1, 2, 3
  assert seq.is_decoding and seq.num_tokens == 4
  seq.lose_row()
  assert (seq.row, seq.generation, seq.num_tokens) == (None, 1, 3)
  assert not seq.is_decoding and seq.num_unscheduled_tokens == 3
