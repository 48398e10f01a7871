"""What was measured to be best on which chip: the table that comes before any backend's default.

The table is a JSON list, a file that `experiments.kernel_bench --tune` writes. Each entry has the
fields of `Tuned`; `case` and `config` are objects with the fields of `Case` and `TileConfig`.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.resources
import json
import math
import os
import pathlib
import typing
from collections.abc import Iterable, Sequence

from pdjax.kernels.tile_config import KERNELS, Case, Chip, TileConfig


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
  """The best `config` found for a case on chips of one kind, and how it was found.

  Raises:
    ValueError: a case that cannot be, a config that only interprets, or a time that is none.
  """

  chip: str  # as JAX calls its kind: NVIDIA H200
  case: Case
  config: TileConfig
  measured_s: float
  date: str  # 2026-11-29
  jax_version: str

  def __post_init__(self):
    case = self.case
    if not self.chip:
      raise ValueError("chip is empty")
    if case.kernel not in KERNELS:
      raise ValueError(f"kernel={case.kernel!r} must be one of {', '.join(KERNELS)}")
    for name in ("num_heads", "num_kv_heads", "head_dim", "page_size"):
      if getattr(case, name) < 1:
        raise ValueError(f"{name}={getattr(case, name)} must be at least 1")
    if case.num_heads % case.num_kv_heads:
      raise ValueError(f"num_heads={case.num_heads} is no multiple of {case.num_kv_heads} kv heads")
    if self.config.interpret:
      raise ValueError("interpret=True: what is interpreted was not measured on a chip")
    if not 0 < self.measured_s < math.inf:
      raise ValueError(f"measured_s={self.measured_s} must be positive")
    datetime.date.fromisoformat(self.date)


def tuned(chip: Chip, case: Case, table: Sequence[Tuned] | None = None) -> TileConfig | None:
  """The config measured to be best for `case` on `chip`, or for the nearest case; None for none.

  Only an entry of the same kind of chip, kernel, head_dim, heads per kv head and both dtypes can
  stand for another case: one of the nearest page size by ratio, and of those the nearest number of
  kv heads; of equals the smaller. `table` None is the one that comes with the package.

  Raises:
    ValueError: as `read_table`.
  """

  def alike(case: Case):
    group = case.num_heads // case.num_kv_heads
    return case.kernel, case.head_dim, group, case.dtype, case.cache_dtype

  def distance(entry: Tuned):
    sizes = ("page_size", "num_kv_heads")
    pairs = [(getattr(entry.case, name), getattr(case, name)) for name in sizes]
    return [(max(a, b) / min(a, b), a) for a, b in pairs]

  table = packaged_table() if table is None else table
  near = [e for e in table if e.chip == chip.kind and alike(e.case) == alike(case)]
  return min(near, key=distance).config if near else None


def packaged_table() -> tuple[Tuned, ...]:
  """The table that comes with the package."""
  file = importlib.resources.files("pdjax.kernels") / "tuned.json"
  return _parse(file.read_text(), "pdjax/kernels/tuned.json")


def read_table(path: str | os.PathLike) -> tuple[Tuned, ...]:
  """Reads a file of entries.

  Raises:
    ValueError: not such a file, with a line for each entry that is wrong.
  """
  return _parse(pathlib.Path(path).read_text(), str(path))


def table_text(entries: Iterable[Tuned]) -> str:
  """What a file of these entries holds: `read_table` gives them back."""
  return json.dumps([dataclasses.asdict(entry) for entry in entries], indent=2) + "\n"


def _parse(text: str, name: str) -> tuple[Tuned, ...]:
  try:
    rows = json.loads(text)
  except ValueError as error:
    raise ValueError(f"{name}: not JSON ({error})") from error
  if not isinstance(rows, list):
    raise ValueError(f"{name}: must be a list of entries, not {type(rows).__name__}")
  entries, problems, seen = [], [], {}
  for number, row in enumerate(rows):
    try:
      entry = _build(Tuned, row)
      first = seen.setdefault((entry.chip, entry.case), number)
      if first != number:
        raise ValueError(f"has the chip and the case of entry {first}")
      entries.append(entry)
    except ValueError as error:
      problems.append(f"{name}: entry {number}: {error}")
  if problems:
    raise ValueError("\n".join(problems))
  return tuple(entries)


def _build(kind: type, row: object):
  """A dataclass of plain fields, or of such dataclasses, from a JSON object."""
  if not isinstance(row, dict):
    raise ValueError(f"{row!r} is no object with the fields of {kind.__name__}")
  hints = typing.get_type_hints(kind)
  needed = [f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING]
  for what, names in (
    ("has no", [name for name in needed if name not in row]),
    ("has unknown", [name for name in row if name not in hints]),
  ):
    if names:
      raise ValueError(f"{kind.__name__} {what} {', '.join(names)}")
  values = {}
  for name, value in row.items():
    hint = hints[name]
    if dataclasses.is_dataclass(hint):
      value = _build(hint, value)
    elif hint is float and type(value) is int:
      value = float(value)
    elif type(value) is not hint:
      raise ValueError(f"{name}={value!r} must be of type {hint.__name__}")
    values[name] = value
  return kind(**values)
