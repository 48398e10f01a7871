from __future__ import annotations

import numpy as np
import pytest

from pdjax.workloads.lengths import (
  LENGTHS,
  Fixed,
  Lengths,
  LogNormal,
  Mix,
  Quantiles,
  Sampled,
  Scaled,
  Uniform,
  longest_of,
)

pytestmark = pytest.mark.quick

FAMILIES = [
  Fixed(prompt_tokens=512, output_tokens=64),
  Uniform(prompt_tokens=(4, 9), output_tokens=(1, 3)),
  LogNormal(prompt_tokens=(1020, 2735, 14050), output_tokens=(129, 424, 1000)),
  LogNormal(prompt_tokens=(1, 3, 8), output_tokens=(1, 1, 1)),
  Mix(prompt_tokens=(8, 16), long_prompt_tokens=(500, 600), output_tokens=(4, 4), long_every=10),
  Quantiles(
    prompt_tokens=((0, 10), (0.25, 20), (0.9, 900), (1, 1000)),
    output_tokens=((0, 1), (0.5, 5), (1, 300)),
  ),
  Quantiles(
    prompt_tokens=((0, 1), (1, 1000)), output_tokens=((0, 1), (1, 900)), max_total_tokens=700
  ),
  Quantiles(prompt_tokens=((0, 1), (1, 90)), output_tokens=((0, 5), (1, 5)), max_total_tokens=2),
  Quantiles(
    prompt_tokens=((0, 1), (1, 1000)),
    output_tokens=((0, 1), (1, 900)),
    max_total_tokens=700,
    cuts_prompts=True,
  ),
  Sampled(recorded=(Lengths(5, 9), Lengths(100, 1), Lengths(7, 7))),
  Scaled(lengths=Fixed(prompt_tokens=33, output_tokens=15), scale=32),
  Scaled(lengths=Uniform(prompt_tokens=(1, 63), output_tokens=(1, 63)), scale=8),
]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: type(f).__name__)
def test_pairs_are_positive_integers_and_repeat_with_the_seed(family):
  pairs = family.pairs(3000, np.random.default_rng(2))
  assert len(pairs) == 3000
  assert all(type(x) is int and x >= 1 for pair in pairs for x in pair)
  assert pairs == family.pairs(3000, np.random.default_rng(2))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: type(f).__name__)
def test_nothing_is_longer_than_the_longest(family):
  prompt, output = family.longest
  assert min(prompt, output) >= 1
  pairs = family.pairs(3000, np.random.default_rng(3))
  assert max(p for p, _ in pairs) <= prompt
  assert max(map(sum, pairs)) <= prompt + output


def test_fixed_is_fixed():
  assert set(FAMILIES[0].pairs(5, np.random.default_rng(0))) == {(512, 64)}


def test_uniform_takes_every_value_between_its_bounds():
  prompts, outputs = zip(*FAMILIES[1].pairs(2000, np.random.default_rng(0)))
  assert set(prompts) == {4, 5, 6, 7, 8, 9}
  assert set(outputs) == {1, 2, 3}
  assert abs(np.corrcoef(prompts, outputs)[0, 1]) < 0.1  # drawn independently


def test_lognormal_has_its_quantiles_and_stays_below_max():
  columns = np.array(FAMILIES[2].pairs(50_000, np.random.default_rng(0))).T
  for column, (median, p90, most) in zip(columns, ((1020, 2735, 14050), (129, 424, 1000))):
    assert np.quantile(column, 0.5) == pytest.approx(median, rel=0.03)
    assert np.quantile(column, 0.9) == pytest.approx(p90, rel=0.04)
    assert column.max() <= most


def test_quantiles_hold_within_sampling_error():
  n = 50_000
  family = FAMILIES[5]
  columns = np.array(family.pairs(n, np.random.default_rng(0))).T
  for column, points in zip(columns, (family.prompt_tokens, family.output_tokens)):
    for share, length in points:
      # Of n draws, a share of them is below; five standard errors, and half a token of rounding.
      error = 5 * np.sqrt(share * (1 - share) / n)
      assert np.mean(column < length) <= share + error
      assert np.mean(column <= length) >= share - error
    assert (column.min(), column.max()) == (points[0][1], points[-1][1])
  assert abs(np.corrcoef(*columns)[0, 1]) < 0.02  # drawn independently


@pytest.mark.once
def test_between_two_quantiles_the_logarithm_is_uniform():
  family = Quantiles(prompt_tokens=((0, 100), (1, 10_000)), output_tokens=((0, 7), (1, 7)))
  prompts, outputs = zip(*family.pairs(20_000, np.random.default_rng(0)))
  assert np.quantile(prompts, [0.25, 0.5, 0.75]) == pytest.approx([316, 1000, 3162], rel=0.05)
  assert set(outputs) == {7}


def test_what_is_too_long_together_shrinks_in_proportion_and_the_rest_is_left():
  points = dict(prompt_tokens=((0, 10), (1, 1000)), output_tokens=((0, 10), (1, 900)))
  free = Quantiles(**points).pairs(5000, np.random.default_rng(4))
  capped = Quantiles(**points, max_total_tokens=700).pairs(5000, np.random.default_rng(4))
  assert {sum(pair) > 700 for pair in free} == {True, False}
  for before, after in zip(free, capped):
    if sum(before) <= 700:
      assert after == before
    else:
      assert 698 <= sum(after) <= 700
      for a, b in zip(after, before):
        assert a == pytest.approx(b * 700 / sum(before), abs=1)


def test_a_cut_prompt_leaves_the_output_whole():
  points = dict(prompt_tokens=((0, 10), (1, 1000)), output_tokens=((0, 10), (1, 900)))
  free = Quantiles(**points).pairs(5000, np.random.default_rng(4))
  family = Quantiles(**points, max_total_tokens=700, cuts_prompts=True)
  cut = family.pairs(5000, np.random.default_rng(4))
  assert {min(sum(pair), 700) < 700 for pair in free} == {True, False}
  for (prompt, output), after in zip(free, cut):
    output = min(output, 699)
    assert after == (min(prompt, 700 - output), output)


def test_sampled_pairs_come_once_before_any_comes_twice():
  recorded = tuple(Lengths(i, 1) for i in range(1, 21))
  pairs = Sampled(recorded=recorded).pairs(45, np.random.default_rng(0))
  for rounds in (pairs[:20], pairs[20:40]):
    assert sorted(rounds) == list(recorded)
  assert pairs[:20] != list(recorded)
  assert set(pairs[40:]) <= set(recorded)


def test_scaled_prompts_are_rounded_up_and_outputs_to_the_nearest_but_one():
  for pair, expected in (((32, 16), (1, 1)), ((33, 49), (2, 2)), ((1, 1), (1, 1))):
    fixed = Fixed(prompt_tokens=pair[0], output_tokens=pair[1])
    assert Scaled(lengths=fixed, scale=32).pairs(1, np.random.default_rng(0)) == [expected]


def test_the_longest_of_several_is_as_long_as_any_and_has_the_longest_prompt():
  assert longest_of([Lengths(5, 90), Lengths(40, 2)]) == (40, 55)
  assert longest_of([Lengths(40, 2)]) == (40, 2)


@pytest.mark.parametrize(("n", "long_every"), [(30, 10), (30, 7), (31, 1), (200, 3)])
def test_mix_spreads_its_long_prompts_evenly(n, long_every):
  mix = Mix(
    prompt_tokens=(8, 16),
    long_prompt_tokens=(500, 600),
    output_tokens=(4, 9),
    long_every=long_every,
  )
  prompts = [prompt for prompt, _ in mix.pairs(n, np.random.default_rng(0))]
  assert all(8 <= p <= 16 or 500 <= p <= 600 for p in prompts)
  long_ones = [i for i, prompt in enumerate(prompts) if prompt >= 500]
  assert abs(len(long_ones) - n / long_every) < 1
  assert set(np.diff(long_ones)) <= {long_every}
  assert long_ones[0] < long_every


@pytest.mark.parametrize(
  ("name", "arguments", "message"),
  [
    ("fixed", {"prompt_tokens": 0, "output_tokens": 1}, "prompt_tokens=0 must be at least 1"),
    ("fixed", {"prompt_tokens": 1, "output_tokens": -2}, "output_tokens=-2 must be at least 1"),
    ("uniform", {"prompt_tokens": (9, 4), "output_tokens": (1, 1)}, r"prompt_tokens=\(9, 4\)"),
    ("uniform", {"prompt_tokens": (4, 9), "output_tokens": (0, 1)}, r"output_tokens=\(0, 1\)"),
    ("uniform", {"prompt_tokens": (4, 9, 9), "output_tokens": (1, 1)}, r"=\(4, 9, 9\).*lo, hi"),
    ("lognormal", {"prompt_tokens": (5, 4, 9), "output_tokens": (1, 1, 1)}, r"=\(5, 4, 9\)"),
    (
      "mix",
      {
        "prompt_tokens": (1, 1),
        "long_prompt_tokens": (2, 2),
        "output_tokens": (1, 1),
        "long_every": 0,
      },
      "long_every=0 must be at least 1",
    ),
    ("quantiles", {"prompt_tokens": (), "output_tokens": ()}, r"prompt_tokens=\(\) .*from 0 to 1"),
    (
      "quantiles",
      {"prompt_tokens": ((0, 1), (0.5, 9)), "output_tokens": ((0, 1), (1, 1))},
      "shares rising from 0 to 1",
    ),
    (
      "quantiles",
      {"prompt_tokens": ((0, 1), (1, 9)), "output_tokens": ((0, 1), (0.5, 3), (0.5, 4), (1, 5))},
      "output_tokens=.* shares rising from 0 to 1",
    ),
    (
      "quantiles",
      {"prompt_tokens": ((0, 5), (1, 4)), "output_tokens": ((0, 1), (1, 1))},
      "prompt_tokens=.* lengths rising from 1 up",
    ),
    (
      "quantiles",
      {"prompt_tokens": ((0, 0), (1, 4)), "output_tokens": ((0, 1), (1, 1))},
      "prompt_tokens=.* lengths rising from 1 up",
    ),
    (
      "quantiles",
      {
        "prompt_tokens": ((0, 1), (1, 4)),
        "output_tokens": ((0, 1), (1, 1)),
        "max_total_tokens": 1,
      },
      "max_total_tokens=1 must be at least 2",
    ),
  ],
)
def test_wrong_arguments_are_refused_with_the_value(name, arguments, message):
  with pytest.raises(ValueError, match=message):
    LENGTHS[name](**arguments)
