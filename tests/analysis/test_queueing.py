"""Prefill as a queue: the closed forms against what they were derived from."""

import pytest

from pdjax.analysis.queueing import even_rate_rps, md1_wait_s, mean_ttft_s

pytestmark = pytest.mark.quick

D = 0.2


def test_a_wait_is_that_of_pollaczek_and_khinchine():
  assert md1_wait_s(2.5, D) == pytest.approx(0.5 * D / (2 * 0.5))
  assert md1_wait_s(1e-6, D) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("rate_rps", [0.5, 2.0, 4.9])
def test_one_two_stages_and_two_devices_are_the_three_equations_of_the_paper(rate_rps):
  r, k = rate_rps, 1.7
  assert mean_ttft_s(r, D) == pytest.approx(D + r * D**2 / (2 * (1 - r * D)))
  assert mean_ttft_s(r, D, stages=2) == pytest.approx(D + r * D**2 / (4 * (2 - r * D)))
  expected_s = D / k + r * D**2 / (2 * k * (k - r * D))
  assert mean_ttft_s(r, D, speedup=k) == pytest.approx(expected_s)


def test_pools_share_the_arrivals():
  assert mean_ttft_s(6.0, D, pools=3) == mean_ttft_s(2.0, D)


@pytest.mark.parametrize("speedup", [1.5, 1.7, 1.9])
def test_tensor_parallelism_is_better_below_the_even_rate_and_a_pipeline_above(speedup):
  even_rps = even_rate_rps(D, stages=2, speedup=speedup)
  for share, is_tensor in ((0.99, True), (1.01, False)):
    tensor_s = mean_ttft_s(share * even_rps, D, speedup=speedup)
    assert (tensor_s < mean_ttft_s(share * even_rps, D, stages=2)) == is_tensor


def test_a_speedup_of_as_many_devices_is_better_at_every_rate():
  assert even_rate_rps(D, stages=2, speedup=2.0) is None
  assert even_rate_rps(D, stages=2, speedup=0.9) is None  # and of less than one at none


@pytest.mark.parametrize(
  ("call", "message"),
  [
    (lambda: md1_wait_s(5.0, D), "rate_rps=5.0 is not served at 0.2 s each"),
    (lambda: md1_wait_s(0.0, D), "rate_rps=0.0 must be positive"),
    (lambda: md1_wait_s(1.0, -1.0), "service_s=-1.0 must be positive"),
    (lambda: mean_ttft_s(1.0, D, stages=0), "stages=0 must be at least 1"),
    (lambda: mean_ttft_s(1.0, D, pools=0), "pools=0 must be at least 1"),
    (lambda: mean_ttft_s(1.0, D, speedup=0.0), "speedup=0.0 must be positive"),
    (lambda: even_rate_rps(D, stages=0, speedup=1.5), "stages=0 must be at least 1"),
  ],
)
def test_wrong_input_says_what_is_wrong(call, message):
  with pytest.raises(ValueError, match=message):
    call()
