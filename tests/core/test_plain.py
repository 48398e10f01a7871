"""Plain data and back gives an equal value; data that does not fit is a TypeError."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdjax.core.plain import from_plain, to_plain
from pdjax.core.plan import DecodeSlices, PageUpdates, Slice, StepPlan, StepResult, TokenLogprobs
from pdjax.core.request import Request, SamplingParams

pytestmark = pytest.mark.quick
NUMBERS = st.integers(0, 2**40)


def columns(cls, names):
  rows = st.lists(st.tuples(*[NUMBERS] * len(names)), max_size=4)
  return rows.map(lambda r: cls(**{n: tuple(row[i] for row in r) for i, n in enumerate(names)}))


SAMPLING = st.builds(
  SamplingParams,
  max_tokens=st.integers(7, 100),
  min_tokens=st.integers(0, 7),
  temperature=st.floats(0, 10),
  top_k=st.none() | st.integers(1, 50),
  top_p=st.floats(0.01, 1),
  min_p=st.floats(0, 1),
  repetition_penalty=st.floats(0.1, 3),
  seed=st.none() | NUMBERS,
  stop_ids=st.lists(NUMBERS, max_size=3).map(tuple),
  stop=st.lists(st.text(min_size=1, max_size=4), max_size=2).map(tuple),
  ignore_eos=st.booleans(),
  logprobs=st.none() | st.integers(0, 20),
)
LOGPROBS = st.builds(
  TokenLogprobs,
  logprob=st.floats(-100, 0),
  top_ids=st.lists(NUMBERS, max_size=3).map(tuple),
  top_logprobs=st.lists(st.floats(-100, 0), max_size=3).map(tuple),
)
SLICES = st.builds(
  Slice,
  request_id=NUMBERS,
  generation=NUMBERS,
  row=NUMBERS,
  num_prompt_tokens=NUMBERS,
  start=NUMBERS,
  num_tokens=NUMBERS,
  token_ids=st.none() | st.lists(NUMBERS, max_size=4).map(tuple),
  emits_token=st.booleans(),
  sampling=SAMPLING,
)
PLANS = st.builds(
  StepPlan,
  step_id=NUMBERS,
  prefills=st.lists(SLICES, max_size=3).map(tuple),
  decodes=columns(DecodeSlices, ("request_ids", "generations", "rows", "positions")),
  page_updates=columns(PageUpdates, ("rows", "indices", "page_ids")),
  preempted=st.lists(NUMBERS, max_size=2).map(tuple),
)
RESULTS = st.builds(
  StepResult,
  token_ids=st.lists(st.none() | NUMBERS, max_size=4).map(tuple),
  logprobs=st.lists(st.none() | LOGPROBS, max_size=4).map(tuple),
  errors=st.lists(st.tuples(NUMBERS, st.text(max_size=5)), max_size=2).map(tuple),
)
REQUESTS = st.builds(
  Request,
  request_id=NUMBERS,
  arrival_s=st.floats(0, 1e6),
  num_prompt_tokens=st.integers(1, 100),
  sampling=SAMPLING,
)


@settings(max_examples=150, derandomize=True, deadline=None)
@given(PLANS | RESULTS | REQUESTS)
def test_through_json_and_back_is_equal(value):
  copy = from_plain(type(value), json.loads(json.dumps(to_plain(value))))
  assert copy == value and hash(copy) == hash(value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner:
  n: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Other:
  n: int
  name: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer:
  inner: Inner | Other
  pair: tuple[int, float]
  table: dict[str, tuple[int, ...]]
  flag: bool = False


def test_unions_take_the_first_type_that_fits():
  plain = {"inner": {"n": 1, "name": "a"}, "pair": [1, 2], "table": {"x": [1, 2]}}
  value = from_plain(Outer, plain)
  assert value == Outer(inner=Other(n=1, name="a"), pair=(1, 2.0), table={"x": (1, 2)})
  assert isinstance(value.pair[1], float)
  assert to_plain(value) == plain | {"flag": False}


@pytest.mark.parametrize(
  ("hint", "data"),
  [
    (int, 1.0),
    (int, "1"),
    (int, True),
    (int, None),
    (float, True),
    (float, "1"),
    (bool, 1),
    (str, 1),
    (int | None, "1"),
    (tuple[int, ...], 1),
    (tuple[int, ...], "12"),
    (tuple[int, ...], [1, "2"]),
    (tuple[int, int], [1]),
    (tuple[int, int], [1, 2, 3]),
    (dict[str, int], [1]),
    (dict[str, int], {"a": "b"}),
    (Inner, 1),
    (Inner, [1]),
    (Inner, {}),
    (Inner, {"n": 1, "m": 2}),
    (Inner, {"n": "1"}),
    (Inner | Other, 1),
    (Inner | Other, {"m": 1}),
  ],
)
def test_data_that_does_not_fit_is_a_type_error(hint, data):
  with pytest.raises(TypeError):
    from_plain(hint, data)


def test_the_error_names_the_value_and_the_fields():
  with pytest.raises(TypeError, match=r"\{'m': 1\} is not Inner\(n\)"):
    from_plain(Inner, {"m": 1})
