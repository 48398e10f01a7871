"""What all figures come to: REPRODUCTION.md, and the same as a page of HTML."""

from __future__ import annotations

import collections
import html
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from experiments.reproduction.figure import HOLDS, IN_PART, MISSING, NOT, Figure, Found, Judged
from experiments.validation.replay import markdown_table

INTRO = (
  "Figures and tables of DistServe (OSDI'24), Sarathi-Serve (OSDI'24), SARATHI (2023) and Mooncake "
  "(2024, FAST'25), and the numbers of the article that this project began with, made again: ours "
  "beside the published points. Parameters come from published coefficients or from calibration "
  "(`configs/linear.py`, `configs/hardware.py`), never from a figure shown here.",
  "simulated: the serving loop in virtual time. analytic: closed forms and latency models alone. "
  "engine: real steps of the engine on the machine named there, at its scale.",
)


class Entry(NamedTuple):
  """A figure and what it came to, or why it could not be made. `picture`: there is one."""

  figure: Figure
  found: Found | None
  missing: str | None = None
  picture: bool = False

  @property
  def judged(self) -> list[tuple[str, Judged]]:
    """Each claim with what became of it."""
    claims = self.figure.claims
    if self.found is None:
      return [(claim, Judged(MISSING, self.missing or "")) for claim in claims]
    return list(zip(claims, self.found.judged, strict=True))


def counts(entries: Iterable[Entry]) -> dict[str, int]:
  """How many claims came to each verdict."""
  number = collections.Counter(j.verdict for entry in entries for _, j in entry.judged)
  return {verdict: number[verdict] for verdict in (HOLDS, IN_PART, NOT, MISSING)}


_OF_SEVERAL = {HOLDS: "hold", NOT: "do not hold"}


def counted(verdict: str, number: int) -> str:
  """So many claims that came to a verdict, in words."""
  return f"{number} {verdict if number == 1 else _OF_SEVERAL.get(verdict, verdict)}"


def counts_line(entries: Sequence[Entry]) -> str:
  own = counts(entries)
  words = ", ".join(counted(verdict, n) for verdict, n in own.items())
  return f"{sum(own.values())} claims of {len(entries)} figures and tables: {words}."


def _ordered(entries: Sequence[Entry]) -> list[Entry]:
  """Headlines first."""
  return sorted(entries, key=lambda entry: not entry.figure.is_headline)


def markdown(entries: Sequence[Entry], folder: str, made: str) -> str:
  """The page; pictures and tables lie in `folder` beside it. `made` says when, where and how."""
  parts = ["# Reproduction", *INTRO, made, f"**{counts_line(entries)}**"]
  rows = [("figure", "kind", "verdicts", "against published numbers")]
  for entry in (ordered := _ordered(entries)):
    figure, found, own = entry.figure, entry.found, counts([entry])
    rows.append(
      (
        f"[{figure.name}](#{_anchor(figure)})",
        figure.kind,
        ", ".join(counted(verdict, n) for verdict, n in own.items() if n),
        found.error_words if found is not None else "",
      )
    )
  parts.append(markdown_table(rows))
  for entry in ordered:
    parts += _section(entry, folder)
  return "\n\n".join(parts) + "\n"


def _anchor(figure: Figure) -> str:
  """As GitHub makes it of the heading."""
  kept = (c if c.isalnum() or c in "-_ " else "" for c in _heading(figure).lower())
  return "".join(kept).replace(" ", "-")


def _heading(figure: Figure) -> str:
  return f"{figure.name}: {figure.title}"


def _section(entry: Entry, folder: str) -> list[str]:
  figure, found = entry.figure, entry.found
  parts = [f"## {_heading(figure)}"]
  how = [f"`python -m experiments.reproduce --figure={figure.name}`", figure.kind]
  how += [f"`{path}`" for path in figure.configs]
  parts.append("; ".join(how))
  parts.append("\n".join(f"- **{j.verdict}**: {claim} {j.why}" for claim, j in entry.judged))
  if found is None:
    return parts
  if entry.picture:
    parts.append(f"![{figure.name}]({folder}/{figure.file}.png)")
  if found.compared:
    rows = [("", "published", "ours", "error")]
    for c in found.compared:
      error = c.error_percent
      rows.append(
        (
          c.what,
          f"{c.published:.4g} {c.unit}".strip() + (" (read)" if c.is_read else ""),
          "none" if c.ours is None else f"{c.ours:.4g} {c.unit}".strip(),
          "" if error is None else f"{error:+.1f} %",
        )
      )
    parts += [markdown_table(rows), f"[data]({folder}/{figure.file}.csv)"]
  else:
    parts.append(f"[data]({folder}/{figure.file}.csv)")
  parts += [f"Note: {note}" for note in found.notes]
  return parts


_STYLE = """body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#222}
img{max-width:100%}table{border-collapse:collapse;margin:1em 0}td,th{padding:.2em .7em;
border-bottom:1px solid #ddd;text-align:left}nav a{margin-right:1em;white-space:nowrap}
.holds{color:#00703c}.part{color:#b36b00}.not{color:#b30000}.missing{color:#777}
code{background:#f4f4f4;padding:0 .2em}section{border-top:2px solid #eee;margin-top:2em}"""
_CLASSES = {HOLDS: "holds", IN_PART: "part", NOT: "not", MISSING: "missing"}


def web_page(entries: Sequence[Entry], made: str) -> str:
  """The same as one page of HTML, which lies beside pictures and tables."""
  text = html.escape
  ordered = _ordered(entries)
  links = "".join(f'<a href="#{e.figure.file}">{text(e.figure.name)}</a> ' for e in ordered)
  parts = [
    f'<!doctype html><html lang="en"><meta charset="utf-8"><title>pdjax: reproduction</title>'
    f"<style>{_STYLE}</style><h1>Reproduction</h1>",
    *(f"<p>{text(paragraph)}</p>" for paragraph in (*INTRO, made)),
    f"<p><b>{text(counts_line(entries))}</b></p><nav>{links}</nav>",
  ]
  for entry in ordered:
    figure, found = entry.figure, entry.found
    claims = "".join(
      f'<li><b class="{_CLASSES[j.verdict]}">{j.verdict}</b>: {text(claim)} {text(j.why)}</li>'
      for claim, j in entry.judged
    )
    parts.append(
      f'<section id="{figure.file}"><h2>{text(_heading(figure))}</h2>'
      f"<p>{figure.kind} &middot; <code>python -m experiments.reproduce --figure="
      f"{text(figure.name)}</code></p><ul>{claims}</ul>"
    )
    if entry.picture:
      parts.append(f'<img src="{figure.file}.png" alt="{text(figure.title)}" loading="lazy">')
    if found is not None:
      words = f"{text(found.error_words)} &middot; " if found.error_words else ""
      parts.append(f'<p>{words}<a href="{figure.file}.csv">data</a></p>')
      parts += [f"<p><i>{text(note)}</i></p>" for note in found.notes]
    parts.append("</section>")
  return "\n".join(parts) + "\n"
