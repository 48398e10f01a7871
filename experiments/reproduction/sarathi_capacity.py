"""Sarathi-Serve's capacities by model, data set and SLO. Simulated."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from experiments.figures.reproduction import Bars, draw
from experiments.reproduction import published_sarathi as published
from experiments.reproduction.bench import Bench
from experiments.reproduction.figure import Compared, Figure, Found, Judged
from experiments.reproduction.sarathi_systems import (
  A40_NOTE,
  DEPLOYMENTS,
  LONGEST,
  NEAR,
  POLICY,
  SYNTHETIC,
  as_system,
  capacities,
  capacity_note,
  is_near,
  judged_ratio,
  judged_share,
  over,
  rule_budget,
  rule_slos_s,
)
from pdjax.config import ExperimentConfig

DIFFERS = 0.2  # of the published SLO: ours by the rule is then searched too, and judged by
SLOS = ("strict", "relaxed")
PUBLISHED, BY_RULE = "published SLO", "SLO by the rule"


class Case(NamedTuple):
  """One group of bars."""

  model: str
  dataset: str
  slo: str  # one of SLOS
  source: str  # PUBLISHED or BY_RULE

  @property
  def label(self) -> str:
    return f"{self.model} {self.slo}"

  def __str__(self) -> str:
    return f"{self.label} {self.dataset} ({self.source})"


def slos_of(model: str) -> dict[str, tuple[float, float]]:
  """Strict and relaxed, by where they are from: the last is the one to judge by."""
  deployment = DEPLOYMENTS[model]
  found = {PUBLISHED: deployment.slos_s()}
  own = rule_slos_s(deployment.config())
  if abs(own[0] / found[PUBLISHED][0] - 1) > DIFFERS:
    found[BY_RULE] = own
  return found


def system_config(
  model: str, dataset: str, system: str, slo: str, source: str = PUBLISHED, **limits
) -> ExperimentConfig:
  """A deployment under a system with the limits of the authors' runs.

  With an SLO by the rule Sarathi-Serve's budget is by its rule too, where that is less.
  """
  deployment = DEPLOYMENTS[model]
  config = deployment.config()
  budget = deployment.relaxed_budget if system == "Sarathi" and slo == "relaxed" else 512
  if system == "Sarathi" and source == BY_RULE:
    slo_s = slos_of(model)[source][SLOS.index(slo)]
    budget = min(budget, rule_budget(config, slo_s, dataset))
  rows = deployment.orca_rows if system == "Orca" else 128
  own = dict(rows=rows, budget=budget, dataset=dataset) | limits
  return as_system(config, deployment.parts, system, **own)


def capacities_of(bench: Bench, models: Sequence[str]) -> dict[tuple[Case, str], float]:
  """Requests a second by case and system."""
  asked = {}
  for model in models:
    for source, slos_s in slos_of(model).items():
      for dataset, (slo, itl_s) in itertools.product(LONGEST, zip(SLOS, slos_s)):
        for system in POLICY:
          case = Case(model, dataset, slo, source)
          asked[case, system] = system_config(model, dataset, system, slo, source), itl_s
  return capacities(bench, asked)


# Figures 10 and 11 --------------------------------------------------------------------------------


def judged_cases(found: Mapping[tuple[Case, str], float]) -> list[Case]:
  """Those to judge by: with the SLOs by the rule where there are such."""
  cases = list(dict.fromkeys(case for case, _ in found))
  by_rule = {case.model for case in cases if case.source == BY_RULE}
  return [case for case in cases if (case.source == BY_RULE) == (case.model in by_rule)]


def gain(found: Mapping[tuple[Case, str], float], case: Case, other: str) -> float | None:
  return over(found[case, "Sarathi"], found[case, other])


def judge_order(found: Mapping[tuple[Case, str], float]) -> Judged:
  """Sarathi-Serve serves at least 10 % more than each other."""
  cases = judged_cases(found)
  met = {
    f"{case.label} {case.dataset} over {other}": found[case, "Sarathi"] >= 1.1 * found[case, other]
    for case in cases
    for other in ("Orca", "vLLM")
  }
  return judged_share(met, "Its capacity is at least 10 % above the other's")


def judge_loosening(found: Mapping[tuple[Case, str], float]) -> Judged:
  """Capacity at the relaxed over that at the strict SLO, of vLLM and of Sarathi-Serve."""
  met, shown = {}, []
  for case in judged_cases(found):
    if case.slo == "strict":
      relaxed = case._replace(slo="relaxed")
      more = {s: over(found[relaxed, s], found[case, s]) for s in ("vLLM", "Sarathi")}
      name = f"{case.model} {case.dataset}"
      met[name] = None in more.values() or more["vLLM"] > more["Sarathi"]
      shown += [f"{m:.1f}x" if m else "from nothing" for m in (more["vLLM"],)]
  return judged_share(
    met, f"vLLM gains more by the relaxed SLO than Sarathi-Serve ({', '.join(shown)})"
  )


def judge_baselines(found: Mapping[tuple[Case, str], float]) -> Judged:
  """vLLM over Orca where the SLO is relaxed; every system lower on arXiv."""
  met = {}
  for case in judged_cases(found):
    if case.slo == "relaxed":
      name = f"{case.label} {case.dataset}: vLLM over Orca"
      met[name] = found[case, "vLLM"] >= found[case, "Orca"]
    if case.dataset == "arxiv":
      for system in POLICY:
        sharegpt = case._replace(dataset="sharegpt")
        name = f"{case.label}: {system} lower on arXiv"
        met[name] = found[case, system] < found[sharegpt, system]
  return judged_share(met, "Orders of these kinds hold")


def judge_orca(found: Mapping[tuple[Case, str], float]) -> Judged:
  """Each gain over Orca is near the label on its bar."""
  met, gains = {}, []
  for case in judged_cases(found):
    ours = gain(found, case, "Orca")
    met[f"{case.label} {case.dataset}"] = ours is not None and is_near(ours, _orca(case))
    gains.append(ours)
  known = [g for g in gains if g is not None]
  return judged_share(
    met,
    f"Gains over Orca are {min(known):.2f} to {max(known):.2f}x; within {1 - NEAR:.0%} of the "
    f"larger of both is near",
  )


def _orca(case: Case) -> float:
  labels = published.OVER_ORCA[case.model]
  return labels[2 * (case.dataset == "arxiv") + (case.slo == "relaxed")]


def judged_gain(
  found: Mapping[tuple[Case, str], float], model: str, slo: str, other: str, ratio: float
) -> Judged:
  """One published gain, on ShareGPT."""
  (case,) = [c for c in judged_cases(found) if c[:3] == (model, "sharegpt", slo)]
  rates = f"{found[case, 'Sarathi']:.2f} against {found[case, other]:.2f} requests/s"
  if case.source == BY_RULE:
    by_published = gain(found, case._replace(source=PUBLISHED), other)
    rates += f" (with the published SLO {by_published or 0:.2f}x)"
  return judged_ratio(gain(found, case, other), ratio, f"{case.label}, {case.source}, {rates}")


def _capacity_found(
  bench: Bench, models: Sequence[str], title: str, own: Sequence[tuple[str, str, str, float]]
) -> Found:
  """`own`: model, SLO, other system and gain of the claims between the first and the last."""
  found = capacities_of(bench, models)
  cases = list(dict.fromkeys(case for case, _ in found))
  judged = judged_cases(found)
  compared = [
    Compared(f"{case.label}, {case.dataset}: over Orca ({case.source})", _orca(case),
             gain(found, case, "Orca"), "x")
    for case in judged
  ]  # fmt: skip
  compared += [
    Compared(f"{model} {slo}: over {other}", ratio,
             next(gain(found, c, other) for c in judged if c[:3] == (model, "sharegpt", slo)), "x")
    for model, slo, other, ratio in own if other == "vLLM"
  ]  # fmt: skip
  compared += [
    Compared(f"{case.label}, Sarathi ({case.source})", rate, found[case, "Sarathi"], "1/s", True)
    for case in cases
    if case.dataset == "sharegpt"
    if (rate := published.SARATHI_RPS[case.model][case.slo == "relaxed"]) is not None
  ]

  def bars(dataset: str) -> Bars:
    of = [case for case in cases if case.dataset == dataset]
    short = {case: _short(case) for case in of}
    read = {}
    if dataset == "sharegpt":
      read = {
        (short[case], "Sarathi"): rate
        for case in of
        if (rate := published.SARATHI_RPS[case.model][case.slo == "relaxed"]) is not None
      }
    return Bars(
      f"Capacity, {dataset} (synthetic lengths)", "requests/s", list(POLICY),
      {short[case]: [found[case, system] for system in POLICY] for case in of},
      published=read, is_read=True,
    )  # fmt: skip

  def gains(dataset: str) -> Bars:
    of = [case for case in judged if case.dataset == dataset]
    marks = {(_short(case), "over Orca"): _orca(case) for case in of}
    if dataset == "sharegpt":
      marks |= {
        (_short(case), "over vLLM"): ratio
        for model, slo, other, ratio in own if other == "vLLM"
        for case in of if case[:3] == (model, dataset, slo)
      }  # fmt: skip
    return Bars(
      f"Sarathi-Serve's gain, {dataset}", "times", ("over Orca", "over vLLM"),
      {_short(case): [gain(found, case, other) for other in ("Orca", "vLLM")] for case in of},
      published=marks, lines={"none": 1.0},
    )  # fmt: skip

  return Found(
    columns=("model", "dataset", "slo", "slo_from", *(f"{s.lower()}_rps" for s in POLICY)),
    rows=[(*case, *(found[case, system] for system in POLICY)) for case in cases],
    judged=[
      judge_order(found),
      *(judged_gain(found, *claim) for claim in own),
      judge_orca(found),
      judge_loosening(found),
      judge_baselines(found),
    ],
    compared=compared,
    draw=lambda path: draw(
      [panel(dataset) for panel in (bars, gains) for dataset in LONGEST], path, title, columns=2
    ),
    notes=[
      capacity_note(bench),
      SYNTHETIC,
      "That the labels on the paper's bars are gains over Orca is inferred: it agrees with all the "
      "text says. The abstract does not say over what Falcon-180B gains 5.6 times.",
      *([A40_NOTE] if "LLaMA2-70B" in models else []),
      *_rule_notes(models),
    ],
  )


def _rule_notes(models: Sequence[str]) -> list[str]:
  """Of models that have SLOs by the rule: what follows from them."""
  notes = []
  for model in models:
    own = slos_of(model)
    if BY_RULE in own:
      budgets = [
        f"{system_config(model, dataset, 'Sarathi', slo, BY_RULE).scheduler.token_budget} "
        f"({slo} {dataset})"
        for dataset in LONGEST
        for slo in SLOS
      ]
      notes.append(
        f"{model} is judged by SLOs of {own[BY_RULE][0]:.2f} and {own[BY_RULE][1]:.2f} s, by the "
        f"paper's rule on our devices (published {own[PUBLISHED][0]:g} and {own[PUBLISHED][1]:g}). "
        f"Sarathi-Serve's budget is the published, or what keeps it: {', '.join(budgets)}."
      )
  return notes


def _short(case: Case) -> str:
  mark = "" if case.source == PUBLISHED else ", rule"
  return f"{case.model.split('-')[0]} {case.slo}{mark}"


def fig10(bench: Bench) -> Found:
  own = [
    ("Mistral-7B", "strict", "vLLM", published.OVER_VLLM["Mistral-7B"]),
    ("Yi-34B", "strict", "vLLM", published.OVER_VLLM["Yi-34B"]),
  ]
  title = "Sarathi-Serve, figure 10: capacity of Mistral-7B and Yi-34B (simulated)"
  return _capacity_found(bench, ("Mistral-7B", "Yi-34B"), title, own)


def fig11(bench: Bench) -> Found:
  labels = published.OVER_ORCA
  own = [
    ("LLaMA2-70B", "relaxed", "Orca", labels["LLaMA2-70B"][1]),
    ("LLaMA2-70B", "strict", "vLLM", published.OVER_VLLM["LLaMA2-70B"]),
    ("Falcon-180B", "relaxed", "Orca", labels["Falcon-180B"][1]),
    ("Falcon-180B", "strict", "vLLM", published.OVER_VLLM["Falcon-180B"]),
    ("Falcon-180B", "relaxed", "vLLM", published.OVER_VLLM_FALCON_RELAXED),
  ]
  title = "Sarathi-Serve, figure 11: capacity of two stages (simulated; A40 partly STAND-INS)"
  return _capacity_found(bench, ("LLaMA2-70B", "Falcon-180B"), title, own)


FIGURES = (
  Figure(
    name="sarathi/fig10",
    title="Capacity of Mistral-7B and Yi-34B",
    kind="simulated",
    claims=(
      "Sarathi-Serve serves more than Orca and vLLM, on both data sets, within both SLOs.",
      "It serves 2.6 times as much as vLLM with Mistral-7B.",
      "It serves 3.7 times as much as vLLM with Yi-34B.",
      "Over Orca it gains 1.7 to 4.0 times.",
      "Loosening the SLO helps the baseline more.",
      "vLLM serves more than Orca where the SLO is relaxed, and all serve less of arXiv.",
    ),
    make=fig10,
    configs=(DEPLOYMENTS["Mistral-7B"].path, DEPLOYMENTS["Yi-34B"].path),
    is_headline=True,
  ),
  Figure(
    name="sarathi/fig11",
    title="Capacity of LLaMA2-70B and Falcon-180B in two stages",
    kind="simulated",
    claims=(
      "Sarathi-Serve serves more than Orca and vLLM, on both data sets, within both SLOs.",
      "It serves 6.3 times as much as Orca with LLaMA2-70B.",
      "It serves up to 4.3 times as much as vLLM with LLaMA2-70B.",
      "It serves 5.6 times as much as Orca with Falcon-180B.",
      "It serves 3.6 times as much as vLLM with Falcon-180B within the strict SLO.",
      "It serves 1.48 times as much as vLLM with Falcon-180B within the relaxed SLO.",
      "Over Orca it gains 2.75 to 6.3 times.",
      "Loosening the SLO helps the baseline more.",
      "vLLM serves more than Orca where the SLO is relaxed, and all serve less of arXiv.",
    ),
    make=fig11,
    configs=(DEPLOYMENTS["LLaMA2-70B"].path, DEPLOYMENTS["Falcon-180B"].path),
    is_headline=True,
  ),
)
