"""All figures by name. A family of figures is a module here and a line below."""

from __future__ import annotations

import fnmatch

from experiments.reproduction import crossover, distserve, engine, mooncake, sarathi, seed
from experiments.reproduction.figure import Figure
from pdjax.core.names import pick

FAMILIES = (
  distserve.FIGURES,
  sarathi.FIGURES,
  mooncake.FIGURES,
  seed.FIGURES,
  crossover.FIGURES,
  engine.FIGURES,  # last: they are measured anew each time
)

FIGURES: dict[str, Figure] = {figure.name: figure for family in FAMILIES for figure in family}


def chosen(names: str) -> list[Figure]:
  """Those that a name, a glob or `all` stands for, or several with commas between them.

  Raises:
    ValueError: one that stands for none, with near matches.
  """
  found: dict[str, Figure] = {}
  for name in filter(None, map(str.strip, names.split(","))):
    pattern = "*" if name == "all" else name
    own = [figure for key, figure in FIGURES.items() if fnmatch.fnmatchcase(key, pattern)]
    found |= {figure.name: figure for figure in own or [pick(FIGURES, name, "figure")]}
  if not found:
    raise ValueError(f"--figure={names!r} names no figure; --list shows all")
  return list(found.values())
