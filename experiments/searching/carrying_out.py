"""What every program that searches does with a goal: runs it, reports it, keeps it."""

from __future__ import annotations

import contextlib
import json
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from experiments.program import Progress, whole_file
from experiments.searching.drive import Driver, ProbeCache, RateSearch
from experiments.searching.goals import Goal, caveats_of
from experiments.searching.probe import code_version
from experiments.sweep import Sweep
from pdjax.config import ExperimentConfig
from pdjax.core.plain import to_plain


def anything_passed(searches: Sequence[RateSearch]) -> bool:
  return any(search.passed_rps is not None for search in searches)


def carry_out(
  goal: Goal,
  sweep: Sweep,
  out: pathlib.Path,
  *,
  name: str,
  title: str,
  config: ExperimentConfig,
  more: Mapping[str, Any] = MappingProxyType({}),
  has_found: Callable[[Sequence[RateSearch]], bool] = anything_passed,
  write_more: Callable[[pathlib.Path], list[str]] = lambda out: [],
) -> int:
  """Searches, prints and writes the report; returns the exit status. Closes the sweep.

  Files are `NAME.json`, which begins with `more`, pictures, and what `write_more` writes and names,
  which is not asked where it was interrupted.
  """
  progress = Progress()
  out.mkdir(parents=True, exist_ok=True)
  cache = ProbeCache(out / "probes.jsonl")
  if len(cache):
    progress.done(f"{len(cache)} probes of {out / 'probes.jsonl'} are known")
  was_interrupted = False
  driver = Driver(sweep, cache, progress)
  with contextlib.closing(sweep):
    try:
      goal.run(driver, progress)
    except KeyboardInterrupt:
      was_interrupted = True
      progress.done("interrupted: reporting what was found so far")
  text, data = goal.report()
  caveats = caveats_of(driver.searches)
  print(f"\n== {title}, simulated ==\n{text}")
  if caveats:
    print(f"  Not shown: {'; '.join(caveats)}.")
  data = {
    **more,
    **data,
    "caveats": caveats,
    "config": to_plain(config),
    "code": code_version(),
    "num_probes": {"simulated": driver.num_simulated, "known": driver.num_reused},
    "interrupted": was_interrupted,
    "date": time.strftime("%Y-%m-%d %H:%M:%S"),
  }
  with whole_file(out / f"{name}.json") as path:
    path.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")
  files = [f"{name}.json", *(["probes.jsonl"] if len(cache) else [])]
  if not was_interrupted:
    files += write_more(out)
  try:
    files += goal.draw(out)
  except ImportError as error:
    print(f"no pictures: {error}")
  print(
    f"{driver.num_simulated} probes simulated, {driver.num_reused} known before; wrote "
    f"{', '.join(files)} to {out}"
  )
  failed = [search for search in driver.searches if search.failure is not None]
  for search in failed:
    print(f"FAILED {search.name}: {search.failure.message}", file=sys.stderr)
  if was_interrupted:
    print(f"run it again with --out={out} to go on", file=sys.stderr)
    return 130
  return int(bool(failed) or not has_found(driver.searches))
