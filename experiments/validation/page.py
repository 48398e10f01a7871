"""What a part of the validation suite found, and the page that all parts make. Markdown."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from experiments.validation.replay import markdown_table


class Reached(NamedTuple):
  """One figure that was asked for. `is_met` None: it is only told."""

  what: str
  asked: str
  reached: str
  is_met: bool | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Section:
  """One part: figures, `text` with its tables, pictures and plain data by file name.

  `missing` says why it has nothing to show: a file that is not there, an extra not installed.
  """

  title: str
  reached: Sequence[Reached] = ()
  text: str = ""
  pictures: Mapping[str, Callable[[pathlib.Path], object]] = dataclasses.field(default_factory=dict)
  data: Mapping[str, object] = dataclasses.field(default_factory=dict)
  missing: str | None = None

  def markdown(self, folder: str) -> str:
    parts = [f"## {self.title}"]
    if self.missing is not None:
      return "\n\n".join([*parts, f"Not run: {self.missing}."])
    if self.reached:
      parts.append(reached_table(self.reached))
    parts.append(self.text.strip())
    parts += [f"![{name}]({folder}/{name})" for name in self.pictures]
    return "\n\n".join(filter(None, parts))


def reached_table(figures: Sequence[Reached]) -> str:
  words = {True: "yes", False: "**no**", None: ""}
  rows = [(f.what, f.asked, f.reached, words[f.is_met]) for f in figures]
  return markdown_table([("", "asked", "reached", "met"), *rows])


def page(sections: Sequence[Section], folder: str) -> str:
  """All of it; pictures lie in `folder`, beside the page."""
  head = """# Validation

Simulated against measured. Each part says what was fitted on what; where step times were fitted to
runs of the same system, or something was chosen in knowledge of results, this first table says so
too. Written by `python -m experiments.validate`, which reads the published measurements from
`../shared/data` (`--data_dir`) and needs no accelerator. Run again it writes the same, but for the
engine on this machine, which is measured anew unless `--engine=saved`."""
  figures = [f for section in sections for f in section.reached]
  return "\n\n".join([head, reached_table(figures), *(s.markdown(folder) for s in sections)]) + "\n"
