"""Names are found, or the error says what was meant."""

import pytest

from pdjax.core.names import pick

pytestmark = pytest.mark.quick

TABLE = {"llama3-8b": 1, "llama3-70b": 2, "opt-13b": 3}


def test_a_known_name_gives_its_entry():
  assert pick(TABLE, "opt-13b", "model") == 3


def test_a_misspelt_name_gives_the_near_ones_first_and_all_known():
  with pytest.raises(ValueError) as error:
    pick(TABLE, "lama3-8b", "model")
  message = str(error.value)
  assert message.startswith("unknown model 'lama3-8b'; did you mean llama3-8b")
  assert message.endswith("known: llama3-8b, llama3-70b, opt-13b")


def test_a_name_near_nothing_is_not_guessed_at():
  with pytest.raises(ValueError, match=r"unknown model 'zzz'; known: llama3-8b"):
    pick(TABLE, "zzz", "model")
