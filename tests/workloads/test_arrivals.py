from __future__ import annotations

import itertools

import numpy as np
import pytest

from pdjax.core.clock import to_ticks
from pdjax.workloads.arrivals import ARRIVALS, AllAtOnce, Gamma, Poisson, Recorded

pytestmark = pytest.mark.quick

PROCESSES = [
  AllAtOnce(),
  Poisson(rate_rps=3.0),
  Gamma(rate_rps=3.0, cv=0.3),
  Gamma(rate_rps=3.0, cv=4.0),
  Recorded(arrivals_s=tuple(0.1 * i for i in range(500))),
]


def gaps_s(process, n=40_000, seed=1):
  times_s = process.times_s(n, np.random.default_rng(seed))
  return np.diff(np.array([0.0, *times_s]))


@pytest.mark.parametrize("process", PROCESSES, ids=str)
def test_times_are_sorted_ticks_and_repeat_with_the_seed(process):
  times_s = process.times_s(400, np.random.default_rng(5))
  assert len(times_s) == 400
  assert times_s[0] >= 0
  assert all(a <= b for a, b in itertools.pairwise(times_s))
  assert all(type(t) is float and t == to_ticks(t) for t in times_s)
  assert times_s == process.times_s(400, np.random.default_rng(5))


@pytest.mark.parametrize("rate_rps", [0.5, 20.0])
def test_poisson_gaps_have_mean_1_over_rate_and_cv_1(rate_rps):
  gaps = gaps_s(Poisson(rate_rps=rate_rps))
  # Standard errors over 40,000 gaps: mean 0.5 %, cv 0.5 %; four of them.
  assert gaps.mean() == pytest.approx(1 / rate_rps, rel=0.02)
  assert gaps.std() / gaps.mean() == pytest.approx(1, rel=0.02)
  # Exponential, not only of the right moments: the share above the mean is 1 / e.
  assert (gaps > 1 / rate_rps).mean() == pytest.approx(np.exp(-1), abs=0.01)


@pytest.mark.parametrize("cv", [0.3, 1.0, 3.0])
def test_gamma_gaps_have_mean_1_over_rate_and_the_given_cv(cv):
  gaps = gaps_s(Gamma(rate_rps=4.0, cv=cv), n=200_000)
  assert gaps.mean() == pytest.approx(0.25, rel=4 * cv / 200_000**0.5)
  # A gamma's relative error of cv is about sqrt((1 + 2 cv^2) / 2n) or less than thrice that.
  assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.04)


def test_the_process_is_raw_and_not_rescaled_to_end_at_n_over_rate():
  ends_s = [Poisson(rate_rps=2.0).times_s(100, np.random.default_rng(s))[-1] for s in range(300)]
  # The end of 100 arrivals is Erlang: mean 50 s, standard deviation 5 s.
  assert np.mean(ends_s) == pytest.approx(50, abs=1.2)
  assert np.std(ends_s) == pytest.approx(5, rel=0.2)


def test_poisson_starts_with_a_gap():
  firsts_s = [Poisson(rate_rps=2.0).times_s(1, np.random.default_rng(s))[0] for s in range(500)]
  assert np.mean(firsts_s) == pytest.approx(0.5, rel=0.2)


def test_all_at_once_is_at_zero():
  assert AllAtOnce().times_s(3, np.random.default_rng(0)) == [0.0, 0.0, 0.0]


def test_recorded_times_are_kept_up_to_a_tick_and_cut_to_n():
  times_s = Recorded(arrivals_s=(0.0, 0.1, 0.1, 7.5)).times_s(3, np.random.default_rng(0))
  assert times_s == pytest.approx([0.0, 0.1, 0.1], abs=2**-30)


@pytest.mark.parametrize(
  ("name", "arguments", "message"),
  [
    ("poisson", {"rate_rps": 0}, "rate_rps=0 must be positive"),
    ("poisson", {"rate_rps": float("nan")}, "rate_rps=nan must be positive"),
    ("poisson", {"rate_rps": float("inf")}, "rate_rps=inf must be positive"),
    ("gamma", {"rate_rps": -1.5, "cv": 1.0}, "rate_rps=-1.5 must be positive"),
    ("gamma", {"rate_rps": 1.0, "cv": 0}, "cv=0 must be positive"),
    ("trace", {"arrivals_s": (0.0, 2.0, 1.0)}, r"arrivals_s\[2\]=1.0 must be .* at least 2.0"),
    ("trace", {"arrivals_s": (-1.0,)}, r"arrivals_s\[0\]=-1.0 must be"),
    ("trace", {"arrivals_s": (float("nan"),)}, r"arrivals_s\[0\]=nan must be"),
  ],
)
def test_wrong_arguments_are_refused_with_the_value(name, arguments, message):
  with pytest.raises(ValueError, match=message):
    ARRIVALS[name](**arguments)


def test_a_trace_never_repeats_to_fill_up():
  with pytest.raises(ValueError, match="3 requests wanted but the trace has 2"):
    Recorded(arrivals_s=(0.0, 1.0)).times_s(3, np.random.default_rng(0))
