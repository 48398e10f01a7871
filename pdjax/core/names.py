"""Looking things up by name, and making them with options, with errors that help."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from pdjax.core.plain import from_plain

T = TypeVar("T")


def pick(table: Mapping[str, T], name: str, what: str) -> T:
  """The entry of `table` called `name`; `what` says what kind of thing it is.

  Raises:
    ValueError: no such entry, with near matches and all known names.
  """
  if name in table:
    return table[name]
  near = difflib.get_close_matches(str(name), table, n=3)
  hint = f"; did you mean {' or '.join(near)}?" if near else ";"
  raise ValueError(f"unknown {what} {name!r}{hint} known: {', '.join(table)}")


def options_of(entry: Any) -> dict[str, Any]:
  """The options of a family's member by name, with their types: a dataclass has its fields."""
  if not (isinstance(entry, type) and dataclasses.is_dataclass(entry)):
    return {}
  hints = typing.get_type_hints(entry)
  return {f.name: hints[f.name] for f in dataclasses.fields(entry) if f.init}


def make(entry: Any, options: Mapping[str, Any], what: str) -> Any:
  """A member of a family: the function itself, or an instance of the dataclass with `options`.

  Raises:
    ValueError: no such option, or one of the wrong type or out of range; `what` names the member.
  """
  known, given = options_of(entry), {}
  for option, value in options.items():
    if not known:
      raise ValueError(f"{what} has no options, so none is called {option!r}")
    hint = pick(known, option, f"option of {what}:")
    try:
      given[option] = from_plain(hint, value)
    except TypeError as error:
      type_name = hint.__name__ if isinstance(hint, type) else hint
      raise ValueError(
        f"{what}: {option}={value!r} is not a value of type {type_name}; its options: "
        f"{', '.join(known)}"
      ) from error
  if not isinstance(entry, type):
    return entry
  try:
    return entry(**given)
  except ValueError as error:
    raise ValueError(f"{what}: {error}") from error
