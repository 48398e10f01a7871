from __future__ import annotations

import numpy as np
import pytest

from pdjax.workloads.lengths import LENGTHS, Fixed, LogNormal, Mix, Uniform

pytestmark = pytest.mark.quick

FAMILIES = [
  Fixed(prompt_tokens=512, output_tokens=64),
  Uniform(prompt_tokens=(4, 9), output_tokens=(1, 3)),
  LogNormal(prompt_tokens=(1020, 2735, 14050), output_tokens=(129, 424, 1000)),
  LogNormal(prompt_tokens=(1, 3, 8), output_tokens=(1, 1, 1)),
  Mix(prompt_tokens=(8, 16), long_prompt_tokens=(500, 600), output_tokens=(4, 4), long_every=10),
]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: type(f).__name__)
def test_pairs_are_positive_integers_and_repeat_with_the_seed(family):
  pairs = family.pairs(3000, np.random.default_rng(2))
  assert len(pairs) == 3000
  assert all(type(x) is int and x >= 1 for pair in pairs for x in pair)
  assert pairs == family.pairs(3000, np.random.default_rng(2))


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
  ],
)
def test_wrong_arguments_are_refused_with_the_value(name, arguments, message):
  with pytest.raises(ValueError, match=message):
    LENGTHS[name](**arguments)
