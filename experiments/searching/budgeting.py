"""The token budget of chunked prefill for a target between tokens (Sarathi-Serve, section 4.3)."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.program import Progress, whole_file
from experiments.searching.drive import Driver, RateSearch
from experiments.searching.goals import (
  Asked,
  asked_line,
  data_of,
  found,
  make_search,
  nothing_passes,
  table,
)
from experiments.searching.probe import unloaded
from experiments.traffic import read_traffic
from pdjax.analysis.targets import Stalls
from pdjax.core.costs import count_slices
from pdjax.scheduling.policies import POLICIES

TILE = 128  # of the matrix kernels, in tokens: a token more costs as much as a tile more
MULTIPLES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


class BudgetGoal:
  """The token budget, a multiple of the tile, that serves most within the target.

  Each budget has its longest step beside it: of all rows decoding at the 90th percentile of
  contexts, and for the rest of the budget the last chunk of a prompt at the 90th percentile. Those
  whose longest step is within the target are served, and larger ones, one after another, until the
  capacity falls: the target is of 99 % of the gaps, and few of them are such a step. A budget below
  the rows of a pool cannot advance all its decodes, and is left out.

  Raises:
    ValueError: several strategies, one that does not cut prompts, a target that is not `Stalls`, or
      more rows than the largest budget.
  """

  def __init__(self, asked: Asked):
    if not isinstance(asked.target, Stalls):
      raise ValueError("budgets are searched for capacity, not for goodput")
    self._asked, config = asked, asked.config
    if len(config.strategy_names) != 1:
      names = ", ".join(config.strategy_names)
      raise ValueError(f"--goal=budget is of one strategy, as --strategies=chunked; not {names}")
    experiment = unloaded(config)
    world, (strategy,) = experiment.world, config.strategy_names
    specs = [spec for spec in config.pools_of(strategy) if spec.role == "mixed"]
    if not specs:
      raise ValueError(f"{strategy} has no mixed pool, whose budget could be chosen")
    policy = config.scheduler.policy or specs[0].policy
    if not POLICIES[policy].chunks:
      raise ValueError(
        f"--goal=budget is of policies that cut prompts; {strategy} ({policy}) takes them whole"
      )
    predict_step_s, num_rows = world.step_time(specs[0].group), world.pages.num_rows
    pairs = read_traffic(config.workload).sample(config.workload.seed)
    prompt, output = np.percentile(pairs, 90, axis=0)
    context = int(prompt + output / 2)
    pages = world.pages
    num_decodes = max(1, min(num_rows, pages.num_pages * pages.page_size // context))
    self.num_decodes, self.context, self.num_rows = num_decodes, context, num_rows
    budgets = [m * TILE for m in MULTIPLES if m * TILE >= num_rows]
    if not budgets:
      raise ValueError(
        f"cache.num_rows={num_rows} is more than the largest budget, {MULTIPLES[-1] * TILE} tokens"
      )
    self.step_s: dict[int, float] = {}
    for budget in budgets:
      chunk = min(max(0, budget - num_decodes), int(prompt))
      self.step_s[budget] = predict_step_s(
        count_slices(
          prefill_starts=[int(prompt) - chunk] if chunk else [],
          prefill_tokens=[chunk] if chunk else [],
          decode_positions=[context - 1] * num_decodes,
          num_emitted=num_decodes + bool(chunk),
        )
      )
    self._searches: dict[int, RateSearch] = {
      budget: make_search(
        asked,
        f"budget {budget}",
        dataclasses.replace(
          config, scheduler=dataclasses.replace(config.scheduler, token_budget=budget)
        ),
      )
      for budget in budgets
    }
    self.searches: dict[int, RateSearch] = {}  # of these, those that are served

  def run(self, driver: Driver, progress: Progress) -> None:
    within = [b for b, step_s in self.step_s.items() if step_s <= self._asked.target.itl_s]
    self._serve(within, driver)
    for budget in self.step_s:
      if budget in within:
        continue
      best_rps = max(self._capacity_rps.values(), default=0.0)
      self._serve([budget], driver)
      rate_rps = self._capacity_rps.get(budget)
      if rate_rps is None or rate_rps * (1 + self._asked.tolerance) < best_rps:
        return

  def _serve(self, budgets: Sequence[int], driver: Driver) -> None:
    self.searches |= {budget: self._searches[budget] for budget in budgets}
    driver.run([self._searches[budget] for budget in budgets])

  @property
  def _capacity_rps(self) -> dict[int, float]:
    return {b: s.passed_rps for b, s in self.searches.items() if s.passed_rps is not None}

  def report(self) -> tuple[str, dict[str, Any]]:
    itl_s, capacity_rps = self._asked.target.itl_s, self._capacity_rps
    searches = list(self.searches.values())
    words = nothing_passes(searches) or "no search came to a rate."
    if capacity_rps:
      best = max(capacity_rps, key=lambda b: (capacity_rps[b], b))
      within = [b for b, step_s in self.step_s.items() if step_s <= itl_s]
      words = (
        f"token_budget={best} for an ITL of {itl_s:.3g} s on {self._asked.config.hardware} with "
        f"{self._asked.config.model}: {found(self.searches[best])}; "
        + (f"the largest whose longest step is within it is {max(within)}." if within
           else "the longest step of none is within it.")
      )  # fmt: skip
      if best == max(self.step_s):
        words += " It is the largest that was tried: a larger one may serve more."
    steps = "\n".join(
      f"  budget {budget:5d}  longest step {step_s:.4g} s"
      + ("" if step_s <= itl_s else "  over the target")
      + ("" if budget in self.searches else "  not served")
      for budget, step_s in self.step_s.items()
    )
    head = (
      f"Steps of {self.num_decodes} decodes of {self.context} tokens beside the last chunk of a "
      f"prompt, both at the 90th percentile:"
    )
    if self.num_rows > TILE:
      steps += f"\n  budgets below the {self.num_rows} rows of a pool are left out"
    text = "\n".join(
      [asked_line(self._asked), head, steps, table(searches), "Verdict", f"  {words}"]
    )
    data = {
      "tile_tokens": TILE,
      "longest_step_s": {str(b): s for b, s in self.step_s.items()},
      "capacity_rps": {str(b): c for b, c in capacity_rps.items()},
      "searches": [data_of(s) for s in searches],
      "verdict": words,
    }
    return text, data

  def draw(self, out: pathlib.Path) -> list[str]:
    from experiments.figures.search import draw_budgets, draw_frontier

    with whole_file(out / "budgets.png") as path:
      draw_budgets(self.step_s, self._capacity_rps, self._asked.target.itl_s, path)
    with whole_file(out / "frontier.png") as path:
      draw_frontier(list(self._searches.values()), path)
    return ["budgets.png", "frontier.png"]
