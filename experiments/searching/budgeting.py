"""The token budget of chunked prefill for a target between tokens (Sarathi-Serve, section 4.3)."""

from __future__ import annotations

import dataclasses
import pathlib
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

TILE = 128  # of the matrix kernels, in tokens: a token more costs as much as a tile more
MULTIPLES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


class BudgetGoal:
  """The token budget, a multiple of the tile, that serves most within the target.

  Those whose longest step takes longer than the target are told, and not served: a step of all rows
  decoding at the 90th percentile of contexts, and for the rest of the budget the last chunk of a
  prompt at the 90th percentile.

  Raises:
    ValueError: several strategies, one that does not cut prompts, or a target that is not `Stalls`.
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
    predict_step_s, num_rows = world.step_time(specs[0].group), world.pages.num_rows
    pairs = read_traffic(config.workload).sample(config.workload.seed)
    prompt, output = np.percentile(pairs, 90, axis=0)
    context = int(prompt + output / 2)
    pages = world.pages
    num_decodes = max(1, min(num_rows, pages.num_pages * pages.page_size // context))
    self.num_decodes, self.context = num_decodes, context
    self.step_s: dict[int, float] = {}
    for budget in (m * TILE for m in MULTIPLES):
      chunk = min(max(0, budget - num_decodes), int(prompt))
      self.step_s[budget] = predict_step_s(
        count_slices(
          prefill_starts=[int(prompt) - chunk] if chunk else [],
          prefill_tokens=[chunk] if chunk else [],
          decode_positions=[context - 1] * num_decodes,
          num_emitted=num_decodes + bool(chunk),
        )
      )
    self.budgets = [b for b, step_s in self.step_s.items() if step_s <= asked.target.itl_s]
    if not self.budgets:
      raise ValueError(
        f"no budget meets an ITL of {asked.target.itl_s:.3g} s: the longest step of the smallest, "
        f"{TILE} tokens, takes {self.step_s[TILE]:.3g} s with {num_decodes} decodes of {context} "
        f"tokens"
      )
    self.searches: list[RateSearch] = [
      make_search(
        asked,
        f"budget {budget}",
        dataclasses.replace(
          config, scheduler=dataclasses.replace(config.scheduler, token_budget=budget)
        ),
      )
      for budget in self.budgets
    ]

  def run(self, driver: Driver, progress: Progress) -> None:
    driver.run(self.searches)

  @property
  def _capacity_rps(self) -> dict[int, float]:
    pairs = zip(self.budgets, self.searches, strict=True)
    return {budget: s.passed_rps for budget, s in pairs if s.passed_rps is not None}

  def report(self) -> tuple[str, dict[str, Any]]:
    itl_s, capacity_rps = self._asked.target.itl_s, self._capacity_rps
    words = nothing_passes(self.searches) or "no search came to a rate."
    if capacity_rps:
      best = max(capacity_rps, key=lambda b: (capacity_rps[b], b))
      words = (
        f"token_budget={best} for an ITL of {itl_s:.3g} s on {self._asked.config.hardware} with "
        f"{self._asked.config.model}: {found(self.searches[self.budgets.index(best)])}; "
        f"the largest whose longest step is within it is {max(self.budgets)}."
      )
    steps = "\n".join(
      f"  budget {budget:5d}  longest step {step_s:.4g} s"
      + ("" if step_s <= itl_s else "  over the target: not served")
      for budget, step_s in self.step_s.items()
    )
    head = (
      f"Steps of {self.num_decodes} decodes of {self.context} tokens beside the last chunk of a "
      f"prompt, both at the 90th percentile:"
    )
    text = "\n".join(
      [asked_line(self._asked), head, steps, table(self.searches), "Verdict", f"  {words}"]
    )
    data = {
      "tile_tokens": TILE,
      "longest_step_s": {str(b): s for b, s in self.step_s.items()},
      "capacity_rps": {str(b): c for b, c in capacity_rps.items()},
      "searches": [data_of(s) for s in self.searches],
      "verdict": words,
    }
    return text, data

  def draw(self, out: pathlib.Path) -> list[str]:
    from experiments.figures.search import draw_budgets, draw_frontier

    with whole_file(out / "budgets.png") as path:
      draw_budgets(self.step_s, self._capacity_rps, self._asked.target.itl_s, path)
    with whole_file(out / "frontier.png") as path:
      draw_frontier(self.searches, path)
    return ["budgets.png", "frontier.png"]
