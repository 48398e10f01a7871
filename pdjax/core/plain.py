"""Dataclasses as plain data (dicts, lists, numbers, strings) and back, for JSON or msgpack."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from typing import Any

_SCALARS = {int, float, str, bool}  # of long columns, that are as plain as can be


def to_plain(value: Any) -> Any:
  """Nested dataclasses, dicts and tuples as dicts and lists."""
  if dataclasses.is_dataclass(value):
    return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
  if isinstance(value, dict):
    return {str(k): to_plain(v) for k, v in value.items()}
  if isinstance(value, list | tuple):
    return list(value) if _SCALARS.issuperset(map(type, value)) else [to_plain(v) for v in value]
  return value


_hints = functools.cache(typing.get_type_hints)  # 0.1 ms a class, and plans have many


def from_plain(hint: Any, data: Any) -> Any:
  """The inverse of `to_plain`: builds a value of type `hint`.

  Raises:
    TypeError: `data` does not fit `hint`.
  """
  if hint is Any:
    return data
  if isinstance(hint, type) and dataclasses.is_dataclass(hint):
    hints = _hints(hint)
    if not isinstance(data, dict) or not hints.keys() >= data.keys():
      raise TypeError(f"{data!r} is not {hint.__name__}({', '.join(hints)})")
    return hint(**{name: from_plain(hints[name], item) for name, item in data.items()})
  origin, args = typing.get_origin(hint), typing.get_args(hint)
  if origin in (types.UnionType, typing.Union):
    if data is None and type(None) in args:
      return None
    errors = []
    for arg in args:
      if arg is type(None):
        continue
      try:
        return from_plain(arg, data)
      except (TypeError, ValueError) as error:
        errors.append(str(error))
    raise TypeError(f"{data!r} is not {hint}: {'; '.join(errors)}")
  if origin is tuple:
    if not isinstance(data, list | tuple):
      raise TypeError(f"{data!r} is not a list")
    if len(args) == 2 and args[1] is Ellipsis:
      if args[0] in _SCALARS and all(type(item) is args[0] for item in data):
        return tuple(data)
      return tuple(from_plain(args[0], item) for item in data)
    if len(data) != len(args):
      raise TypeError(f"{data!r} does not have {len(args)} items")
    return tuple(from_plain(arg, item) for arg, item in zip(args, data, strict=True))
  if origin is dict:
    if not isinstance(data, dict):
      raise TypeError(f"{data!r} is not a dict")
    return {key: from_plain(args[1], item) for key, item in data.items()}
  if hint is float and isinstance(data, int) and not isinstance(data, bool):
    return float(data)
  if isinstance(hint, type) and (
    not isinstance(data, hint) or (isinstance(data, bool) and hint is not bool)
  ):
    raise TypeError(f"{data!r} is not {hint.__name__}")
  return data
