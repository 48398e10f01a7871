"""Looking things up by name, with an error that helps."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TypeVar

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
