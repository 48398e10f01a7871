from __future__ import annotations

import pytest

from pdjax.core.clock import to_ticks
from pdjax.core.request import SamplingParams
from pdjax.workloads import make_requests
from pdjax.workloads.traces import Blocks

pytestmark = pytest.mark.quick

SAMPLING = SamplingParams(max_tokens=1, temperature=0.7, top_k=40, stop_ids=(2,))


def test_requests_carry_their_own_lengths_and_the_shared_sampling():
  requests = make_requests([0.0, 0.1, 0.1], [(3, 10), (1, 20), (2, 30)], None, SAMPLING)
  assert [r.request_id for r in requests] == [0, 1, 2]
  assert [r.arrival_s for r in requests] == [to_ticks(t) for t in (0.0, 0.1, 0.1)]
  assert [r.num_prompt_tokens for r in requests] == [3, 1, 2]
  assert [r.sampling.max_tokens for r in requests] == [10, 20, 30]
  assert all(r.prompt_ids is None for r in requests)
  for request in requests:
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.stop_ids) == (0.7, 40, (2,))


def test_prompts_are_attached_in_order():
  requests = make_requests([0.0, 1.0], [(2, 1), (1, 1)], [(5, 6), (7,)], SAMPLING)
  assert [r.prompt_ids for r in requests] == [(5, 6), (7,)]


def test_what_prompts_have_in_common_is_attached_in_order():
  blocks = Blocks(((4, 5), (4,)), 16)
  for prompts in (None, [(1,) * 17, (1,) * 16]):
    requests = make_requests([0.0, 1.0], [(17, 1), (16, 1)], prompts, SAMPLING, blocks)
    assert [r.prefix_hashes for r in requests] == [(4, 5), (4,)]
    assert [r.prefix_block_tokens for r in requests] == [16, 16]
  with pytest.raises(ValueError, match=r"2 arrivals_s, 2 lengths, 1 blocks\.ids"):
    make_requests([0.0, 1.0], [(1, 1), (1, 1)], None, SAMPLING, Blocks(((4,),), 16))
  with pytest.raises(ValueError, match=r"request 0: 2 prefix_hashes, but .*=16 are 1 blocks of 16"):
    make_requests([0.0], [(16, 1)], None, SAMPLING, Blocks(((4, 5),), 16))


@pytest.mark.parametrize(
  ("arrivals_s", "lengths", "prompts", "message"),
  [
    ([0.0], [(1, 1), (1, 1)], None, "1 arrivals_s, 2 lengths"),
    ([0.0, 1.0], [(1, 1), (1, 1)], [(1,)], "2 arrivals_s, 2 lengths, 1 prompts"),
    ([2.0, 1.0], [(1, 1), (1, 1)], None, r"request 1: arrival_s=1.0 is before request 0 \(2.0\)"),
    ([0.0], [(2, 1)], [(1,)], "request 0: 1 prompt_ids but num_prompt_tokens=2"),
    ([0.0], [(2, 0)], None, "max_tokens=0"),
  ],
)
def test_what_does_not_fit_together_is_refused(arrivals_s, lengths, prompts, message):
  with pytest.raises(ValueError, match=message):
    make_requests(arrivals_s, lengths, prompts, SAMPLING)
