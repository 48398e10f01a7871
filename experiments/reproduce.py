"""The figures and tables of the papers, made again beside their published points.

    python -m experiments.reproduce --list
    python -m experiments.reproduce --figure=distserve/fig8a [--quick] [--jobs=2] [--out=DIR]
    python -m experiments.reproduce --figure='sarathi/*'
    python -m experiments.reproduce --figure=all [--jobs=2]

Each figure gives a table (CSV), a picture with ours beside the published points, an error against
those, and for every claim of the paper whether it holds here, holds in part or does not, and why.
Without --out, `--figure=all` writes REPRODUCTION.md here, with its files in
experiments/figures/reproduction, also as a page of HTML (index.html); any others, and --quick,
write the same of the figures that they name to runs/reproduce-TIME.

Finished runs and searches are kept in OUT/points.jsonl and OUT/probes.jsonl: the same command with
the same --out goes on where it was interrupted. Figures of kind "engine" are measured on this
machine, and anew each time. What needs files of --data_dir or --trace_dir that are not there is
named as missing. Exit status 1: a figure failed; 2: wrong input; 130: interrupted: a page under
--out has the figures that were done, REPRODUCTION.md stays as it was.
"""

from __future__ import annotations

import contextlib
import csv
import os
import pathlib
import platform
import sys
import time
import traceback
from typing import NamedTuple

from absl import flags

from experiments.program import FLAGS, ROOT, Progress, main, out_folder, whole_file
from experiments.reproduction.bench import Bench
from experiments.reproduction.catalogue import FIGURES, chosen
from experiments.reproduction.figure import Figure, Found, Missing
from experiments.reproduction.page import Entry, counts_line, markdown, web_page
from experiments.sweep import Sweep, make_sweep
from pdjax.sources import SourceError

FILES = "experiments/figures/reproduction"  # beside REPRODUCTION.md
KEPT = "runs/reproduce-all"  # finished runs of the page in this checkout


class Prepared(NamedTuple):
  """Figures that can be made."""

  figures: list[Figure]
  out: pathlib.Path  # of the page
  kept: pathlib.Path  # of finished runs
  sweep: Sweep

  @property
  def is_in_place(self) -> bool:
    """Whether the page is the checkout's own."""
    return self.out == ROOT


def prepare() -> Prepared | None:
  if FLAGS.list:
    return None
  if FLAGS.figure is None:
    raise ValueError("--figure=NAME is missing: a name, a glob, or all; --list shows all names")
  if FLAGS.jobs < 1:
    raise ValueError(f"--jobs={FLAGS.jobs} must be at least 1")
  figures = chosen(FLAGS.figure)
  in_place = FLAGS.out is None and not FLAGS.quick and FLAGS.figure == "all"
  out = ROOT if in_place else out_folder("reproduce")
  kept = ROOT / KEPT if in_place else out
  return Prepared(figures, out, kept.absolute(), make_sweep(jobs=FLAGS.jobs, ray=None))


def run(prepared: Prepared | None) -> int:
  """Makes the figures in turn; writes each at once, and the page of all at the end."""
  if prepared is None:
    width = max(map(len, FIGURES))
    for figure in FIGURES.values():
      print(f"{figure.name.ljust(width)}  {figure.kind.ljust(9)}  {figure.title}")
    return 0
  progress, files = Progress(), prepared.out / FILES
  files.mkdir(parents=True, exist_ok=True)
  prepared.kept.mkdir(parents=True, exist_ok=True)
  bench = Bench(
    out=prepared.kept,
    sweep=prepared.sweep,
    progress=progress,
    quick=FLAGS.quick,
    data_dir=pathlib.Path(FLAGS.data_dir),
    trace_dir=pathlib.Path(FLAGS.trace_dir),
  )
  entries: list[Entry] = []
  num_failed, was_interrupted, start_s = 0, False, time.monotonic()
  with contextlib.closing(prepared.sweep):
    for number, figure in enumerate(prepared.figures, 1):
      figure_s = time.monotonic()
      try:
        entry = make(figure, bench, files)
      except KeyboardInterrupt:
        was_interrupted = True
        progress.done("interrupted")
        break
      except Exception as error:  # of one figure; the others do not depend on it
        traceback.print_exc()
        num_failed += 1
        entry = Entry(figure, None, f"It failed: {type(error).__name__}: {error}")
      entries.append(entry)
      progress.done(
        f"[{number} of {len(prepared.figures)}] {figure.name}, "
        f"{time.monotonic() - figure_s:.0f} s{'' if entry.found else ': MISSING'}"
      )
      print(_report(entry), flush=True)
  if was_interrupted and prepared.is_in_place:  # one of a few figures should replace none of all
    print("REPRODUCTION.md stays as it was")
  elif entries:
    num_left = len(prepared.figures) - len(entries)
    write_page(entries, prepared.out, time.monotonic() - start_s, bench.num_kept, num_left)
    print(
      f"{counts_line(entries)}\nwrote {prepared.out / 'REPRODUCTION.md'}, and "
      f"{files / 'index.html'} with tables and pictures beside it"
    )
  if was_interrupted:
    print(f"run it again{_again(prepared)} to go on", file=sys.stderr)
    return 130
  return int(num_failed > 0)


def _again(prepared: Prepared) -> str:
  return "" if prepared.is_in_place else f" with --out={prepared.out}"


def make(figure: Figure, bench: Bench, files: pathlib.Path) -> Entry:
  """Makes one figure and writes its table and picture. What lacks data is an entry that says so."""
  bench.show(f"{figure.name}: {figure.title}")
  try:
    found = figure.make(bench)
  except (Missing, FileNotFoundError, ImportError, SourceError) as error:
    return Entry(figure, None, f"Not made: {error}.")
  if len(found.judged) != len(figure.claims):
    raise ValueError(f"{figure.name} judges {len(found.judged)} of {len(figure.claims)} claims")
  with whole_file(files / f"{figure.file}.csv") as path, open(path, "w", newline="") as file:
    writer = csv.writer(file)
    writer.writerow(found.columns)
    writer.writerows(found.rows)
  return Entry(figure, found, picture=_draw(found, files / f"{figure.file}.png"))


def _draw(found: Found, path: pathlib.Path) -> bool:
  if found.draw is None:
    return False
  try:
    with whole_file(path) as part:
      found.draw(part)
  except ImportError as error:
    print(f"no picture {path.name}: {error}")
    return False
  return True


def _report(entry: Entry) -> str:
  lines = [f"{entry.figure.name}: {entry.figure.title} ({entry.figure.kind})"]
  lines += [f"  {judged.verdict.upper()}: {claim} {judged.why}" for claim, judged in entry.judged]
  if entry.found is not None:
    lines += [f"  {words}" for words in (entry.found.error_words, *entry.found.notes) if words]
  return "\n".join(lines)


def write_page(
  entries: list[Entry], out: pathlib.Path, took_s: float, num_kept: int, num_left: int
) -> None:
  """Writes both pages. So many runs were kept from before, and took their time then.

  `num_left`: of the figures that were asked for, those that an interrupt left away.
  """
  quick = " --quick" if FLAGS.quick else ""
  left = f" Interrupted: {num_left} figures are not here." if num_left else ""
  beside = f" beside {num_kept:,} runs kept from before" if num_kept else ""
  made = (
    f"Made by `python -m experiments.reproduce --figure={FLAGS.figure}{quick}` in "
    f"{took_s / 60:.1f} minutes{beside}, {time.strftime('%d %b %Y')}, on {os.cpu_count()} cores "
    f"({platform.machine()}), {FLAGS.jobs} at work.{left}"
  )
  with whole_file(out / "REPRODUCTION.md") as path:
    path.write_text(markdown(entries, FILES, made))
  with whole_file(out / FILES / "index.html") as path:
    path.write_text(web_page(entries, made))


if __name__ == "__main__":
  data = ROOT.parent / "shared" / "data"
  flags.DEFINE_string("figure", None, "a name, a glob, or all; several with commas between them")
  flags.DEFINE_bool("list", False, "name all figures; make none")
  flags.DEFINE_bool("quick", False, "fewer points and shorter runs")
  flags.DEFINE_integer("jobs", 1, "processes to simulate in")
  flags.DEFINE_string("data_dir", str(data), "published measurements")
  flags.DEFINE_string("trace_dir", str(data / "traces"), "published traces")
  flags.DEFINE_string("out", None, "folder; default: see above")
  main(prepare, run)
