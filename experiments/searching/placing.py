"""Which pools, and how many of each: DistServe's placement search beside tuned colocated pools."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from configs.hardware import HARDWARE, link
from configs.latency import LATENCY
from configs.models import MODELS
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
  with_pools,
  with_slo,
)
from experiments.searching.probe import unloaded
from experiments.traffic import read_traffic
from experiments.worlds import INSTANT, largest_step
from pdjax.analysis.placement import (
  Nodes,
  Placement,
  Shape,
  holds,
  most_on,
  pools_for_rate,
  segmented,
  shapes,
  units_on,
)
from pdjax.analysis.targets import Attainment
from pdjax.config import ExperimentConfig, parse_pools
from pdjax.core.names import pick
from pdjax.core.plain import to_plain
from pdjax.sim.roofline import num_pages

AFFINITIES = ("low", "high")
BASELINE_BUDGETS = (256, 512, 1024, 2048)  # of chunked prefill; Sarathi-Serve has 512 and 2,048
WAVE = 8  # searches at once: fixed, so that what is cut short does not depend on --jobs


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
  """Something to be searched. `weight` times its rate is what it is judged by."""

  name: str
  config: ExperimentConfig
  weight: float
  half: str | None = None
  target: Attainment | None = None
  thing: Any = None  # what it stands for


def best_of(
  asked: Asked,
  candidates: Sequence[Candidate],
  driver: Driver,
  searches: list[RateSearch],
  *,
  prunes: bool = True,
) -> tuple[Candidate, RateSearch] | None:
  """The candidate that serves most by its weight, or None. Appends to `searches`.

  Those whose step times promise most come first, in waves of a fixed size, each against the best of
  the waves before: one that fails at a rate better by more than the tolerance costs one probe,
  unless all rates are wanted (`prunes` False).
  """
  promised = [(unloaded(c.config).capacity_rps, c) for c in candidates]
  promised.sort(key=lambda pair: -pair[0] * pair[1].weight)
  best: tuple[Candidate, RateSearch] | None = None
  score = 0.0
  for start in range(0, len(promised), WAVE):
    wave = [
      (
        candidate,
        make_search(
          asked,
          candidate.name,
          candidate.config,
          capacity_rps=capacity_rps,
          half=candidate.half,
          target=candidate.target,
          must_beat_rps=score * (1 + asked.tolerance) / candidate.weight
          if prunes and score
          else None,
          is_candidate=True,
        ),
      )
      for capacity_rps, candidate in promised[start : start + WAVE]
    ]
    searches += [search for _, search in wave]
    driver.run([search for _, search in wave])
    for candidate, search in wave:
      if search.passed_rps is not None and search.passed_rps * candidate.weight > score:
        best, score = (candidate, search), search.passed_rps * candidate.weight
  return best


class PlacementGoal:
  """DistServe's algorithm 1 (`high` affinity) or 2 (`low`), then colocated pools on equal devices.

  High: links between nodes are good, so prefill and decode pools are searched alone and may be
  anywhere. Low: KV caches stay inside nodes, so a prefill and a decode pool are searched together.
  The pools are then replicated: for `rate_rps`, or to fill the cluster. What comes out, and the
  best of the colocated, are served once more as they would be, with all their pools.

  A shape that the latency model knows nothing of is no candidate, and the report says so.

  Raises:
    ValueError: the model fits nowhere, or one of the names or numbers is wrong.
  """

  def __init__(
    self,
    asked: Asked,
    cluster: Nodes,
    *,
    affinity: str,
    node_link: str,
    rate_rps: float | None = None,
    most_pools: int = 1,
    baselines: bool = True,
  ):
    if affinity not in AFFINITIES:
      raise ValueError(f"affinity={affinity!r} must be one of {', '.join(AFFINITIES)}")
    if not isinstance(asked.target, Attainment):
      raise ValueError("placements are searched for goodput, not for capacity")
    if rate_rps is not None and not rate_rps > 0:
      raise ValueError(f"rate_rps={rate_rps} must be positive")
    if most_pools < 1:
      raise ValueError(f"most_pools={most_pools} must be at least 1")
    self._cluster, self._affinity, self._node_link = cluster, affinity, node_link
    self._rate_rps, self._baselines = rate_rps, baselines
    self.asked, config = asked, asked.config
    self.model = pick(MODELS, config.model, "model")
    self._device = pick(HARDWARE, config.hardware, "hardware")
    self._longest = read_traffic(config.workload).longest
    self._refused: dict[Shape, str | None] = {}  # why not, of every shape that was looked at
    self._num_unknown, self._unknown = 0, ""  # shapes without step times, and what one of them says
    self.shapes = shapes(self.model, cluster, self._fits)
    if not self.shapes:
      raise ValueError(self._why_nowhere())
    smallest = with_pools(config, self.shapes[0].text("mixed"))
    config = dataclasses.replace(config, slo=with_slo(smallest).slo)
    self.asked = dataclasses.replace(asked, config=config)
    self.units: list[Placement] = []
    if affinity == "low":
      self.units = segmented(self.model, cluster, self._fits, most_pools=most_pools)
    if 2 * self.shapes[0].num_devices > cluster.num_devices:
      raise ValueError(
        f"{cluster.num_devices} x {config.hardware} cannot hold a prefill and a decode pool of "
        f"{self.model.name}: the smallest has {self.shapes[0].num_devices}"
      )
    if affinity == "low" and not self.units:
      raise ValueError(
        f"no node of {cluster.devices_per_node} x {config.hardware} holds a prefill and a decode "
        f"pool of {self.model.name}: take more devices a node, or --affinity=high"
      )
    unloaded(self._config_of(self.units[0] if self.units else self._smallest_pair()))
    self.searches: dict[str, list[RateSearch]] = {}  # by what was searched
    self.unit: Placement | None = None  # what is replicated (low affinity)
    self.placement: Placement | None = None
    self.final: RateSearch | None = None
    self.baseline: RateSearch | None = None

  def _smallest_pair(self) -> Placement:
    return Placement(prefill=self.shapes[0], decode=self.shapes[0])

  def _fits(self, shape: Shape) -> bool:
    if shape not in self._refused:
      self._refused[shape] = self._why_not(shape)
    return self._refused[shape] is None

  def _why_not(self, shape: Shape) -> str | None:
    """Why a pool cannot have this shape; None where it can."""
    config, device = self.asked.config, self._device
    try:
      make = pick(LATENCY, config.latency, "latency model")
      make(self.model, device, shape.tp, shape.pp, link(config.tp_link or config.link))
    except ValueError as error:
      self._num_unknown, self._unknown = self._num_unknown + 1, str(error)
      return str(error)
    page_size = config.cache.page_size
    try:
      pages = num_pages(
        model=self.model,
        device=device,
        page_size=page_size,
        tp=shape.tp,
        pp=shape.pp,
        step_tokens=largest_step(config, parse_pools("prefill,decode"), self._longest),
        bytes_per_weight=device.bytes_per_value,
        bytes_per_kv=device.bytes_per_value,
        bytes_per_activation=device.bytes_per_value,
      )
    except ValueError as error:
      return str(error)
    if pages * page_size < sum(self._longest):
      return "the longest request has no room beside the weights"
    return None

  def _why_nowhere(self) -> str:
    everywhere = shapes(self.model, self._cluster, lambda shape: True)
    if not everywhere:
      return f"{self.model.name} cannot be split over the devices of a node in any way"
    largest = everywhere[-1]
    return (
      f"{self.model.name} fits no placement on {self._cluster.num_nodes} x "
      f"{self._cluster.devices_per_node} x {self._device.name}; of {len(everywhere)} shapes the "
      f"largest is tp={largest.tp} pp={largest.pp}: {self._refused[largest]}"
    )

  # The experiments --------------------------------------------------------------------------------

  def _joined(
    self, pools: str, *, crosses: bool, stages_cross: bool, **changes: Any
  ) -> ExperimentConfig:
    """These pools, with KV caches and pipelines going inside nodes or between them."""
    config = dataclasses.replace(with_pools(self.asked.config, pools), **changes)
    inner = config.tp_link or config.link
    return dataclasses.replace(
      config,
      link=self._node_link if crosses else inner,
      tp_link=inner,
      pp_link=self._node_link if stages_cross else inner,
    )

  def _config_of(self, placement: Placement) -> ExperimentConfig:
    per_node = self._cluster.devices_per_node
    if placement.segments:
      return self._joined(placement.pools, crosses=False, stages_cross=placement.segments > 1)
    return self._joined(
      placement.pools,
      crosses=placement.num_devices > per_node,
      stages_cross=max(placement.prefill.num_devices, placement.decode.num_devices) > per_node,
    )

  def _half(self, shape: Shape, role: str) -> Candidate:
    other = "decode" if role == "prefill" else "prefill"
    # Of as many devices a stage, so that as many links carry the KV caches.
    pools = [shape.text(role), f"{Shape(tp=shape.tp).text(other)}@{INSTANT}"]
    return Candidate(
      name=f"{role} {_name(shape)}",
      config=self._joined(
        ",".join(pools if role == "prefill" else pools[::-1]),
        crosses=self._cluster.num_nodes > 1,
        stages_cross=shape.num_devices > self._cluster.devices_per_node,
      ),
      weight=1 / shape.num_devices,
      half=role,
      target=dataclasses.replace(
        self.asked.target, part={"prefill": "ttft", "decode": "tpot"}[role]
      ),
      thing=shape,
    )

  def _colocated(self, num_devices: int) -> list[Candidate]:
    """One pool of each shape and policy; stages only where no pool without fits, as vLLM had it."""
    plain = [s for s in self.shapes if s.pp == 1 and s.num_devices <= num_devices]
    num_rows = self.asked.config.cache.num_rows
    budgets = [b for b in BASELINE_BUDGETS if b >= num_rows]  # a step has a token of every row
    candidates = []
    for shape in plain or [s for s in self.shapes if s.num_devices <= num_devices]:
      count = num_devices // shape.num_devices
      for policy, budget in [("prefill_first", None), *(("sarathi", b) for b in budgets)]:
        changes = {}
        if budget is not None:
          scheduler = self.asked.config.scheduler
          changes["scheduler"] = dataclasses.replace(scheduler, token_budget=budget)
        cross = shape.num_devices > self._cluster.devices_per_node
        candidates.append(
          Candidate(
            name=f"{_name(shape)} {policy}" + (f" {budget}" if budget else ""),
            config=self._joined(
              shape.text("mixed", policy=policy), crosses=False, stages_cross=cross, **changes
            ),
            weight=count / num_devices,
            thing=(shape, policy, count),
          )
        )
    return candidates

  # The search -------------------------------------------------------------------------------------

  def run(self, driver: Driver, progress: Progress) -> None:
    self.placement = self._place(driver)
    if self.placement is None:
      return
    self.final = self.serve(self.placement, driver)
    if self._baselines and self.final.passed_rps is not None:
      self.baseline = self._best_colocated(self.placement.num_devices, driver)

  def candidates(self) -> dict[str, list[Candidate]]:
    """What is searched to place prefill and decode, by what it is called."""
    if self._affinity == "high":
      return {
        f"{role} pools alone": [self._half(shape, role) for shape in self.shapes]
        for role in ("prefill", "decode")
      }
    return {
      "a prefill and a decode pool together": [
        Candidate(
          name=unit.pools + (f" on {unit.segments} nodes" if unit.segments > 1 else ""),
          config=self._config_of(unit),
          weight=1 / unit.num_devices,
          thing=unit,
        )
        for unit in self.units
      ]
    }

  def _place(self, driver: Driver) -> Placement | None:
    bests = []
    # To fill a cluster the best of a device alone does not do: what is left over counts as well.
    prunes = self._affinity == "low" or self._rate_rps is not None
    for what, candidates in self.candidates().items():
      best = self._search(what, candidates, driver, prunes=prunes)
      if best is None:
        return None
      bests.append((best[0].thing, best[1].passed_rps))
    return self._count_alone(bests) if self._affinity == "high" else self._count_together(*bests)

  def _search(
    self, what: str, candidates: Sequence[Candidate], driver: Driver, *, prunes: bool = True
  ) -> tuple[Candidate, RateSearch] | None:
    searches = self.searches.setdefault(what, [])
    return best_of(self.asked, candidates, driver, searches, prunes=prunes)

  def _count_alone(self, bests: Sequence[tuple[Shape, float]]) -> Placement | None:
    """Algorithm 1, from where it counts replicas."""
    if self._rate_rps is not None:
      (prefill, prefill_rps), (decode, decode_rps) = bests
      return Placement(
        prefill=prefill,
        decode=decode,
        num_prefill=pools_for_rate(self._rate_rps, prefill_rps),
        num_decode=pools_for_rate(self._rate_rps, decode_rps),
      )
    # The best of each need not fit the cluster together.
    served = []
    for what, candidates in self.candidates().items():
      shape_of = {c.name: c.thing for c in candidates}
      passed = (s for s in self.searches[what] if s.passed_rps is not None)
      served.append([(shape_of[s.name], s.passed_rps) for s in passed])
    return most_on(self._cluster, *served)

  def _count_together(self, best: tuple[Placement, float]) -> Placement:
    """Algorithm 2, from where it counts replicas."""
    self.unit, unit_rps = best
    if self._rate_rps is not None:
      return self.unit.times(pools_for_rate(self._rate_rps, unit_rps))
    return self.unit.times(units_on(self._cluster, self.unit))

  def serve(self, placement: Placement, driver: Driver) -> RateSearch:
    """The goodput of all pools of a placement."""
    search = make_search(self.asked, placement.pools, self._config_of(placement))
    self.searches.setdefault("all pools", []).append(search)
    driver.run([search])
    return search

  def _best_colocated(self, num_devices: int, driver: Driver) -> RateSearch | None:
    best = self._search("a colocated pool", self._colocated(num_devices), driver)
    if best is None:
      return None
    candidate, _ = best
    shape, policy, count = candidate.thing
    pools = shape.text("mixed", count, policy)
    config = dataclasses.replace(
      candidate.config, pools=pools, num_devices=count * shape.num_devices
    )
    search = make_search(self.asked, f"{count} x {candidate.name}", config)
    self.searches["all pools"].append(search)
    driver.run([search])
    return search

  # The report -------------------------------------------------------------------------------------

  def report(self) -> tuple[str, dict[str, Any]]:
    lines = [
      asked_line(self.asked),
      f"Nodes: {self._cluster.num_nodes} x {self._cluster.devices_per_node} x "
      f"{self.asked.config.hardware}, {self._node_link} between them. Affinity {self._affinity}: "
      f"{_ALGORITHM[self._affinity]}",
    ]
    if self._num_unknown:
      lines.append(
        f"{self._num_unknown} shapes are no candidates, as latency={self.asked.config.latency} "
        f"does not know them: {self._unknown}."
      )
    for what, searches in self.searches.items():
      lines += [f"{what.capitalize()}:", table(searches)]
    words = self.verdict()
    lines += ["Verdict", *(f"  {line}" for line in words.splitlines())]
    data = {
      "cluster": to_plain(self._cluster),
      "affinity": self._affinity,
      "node_link": self._node_link,
      "placement": None if self.placement is None else self._placement_data(self.placement),
      "goodput_rps": self.final and self.final.passed_rps,
      "baseline": None if self.baseline is None else data_of(self.baseline),
      "searches": {what: [data_of(s) for s in own] for what, own in self.searches.items()},
      "verdict": words,
    }
    return "\n".join(lines), data

  def _placement_data(self, placement: Placement) -> dict[str, Any]:
    data = {**to_plain(placement), "pools": placement.pools, "num_devices": placement.num_devices}
    if placement.segments:
      data["nodes"] = [to_plain(node) for node in placement.nodes(self.model.num_layers)]
    return data

  def verdict(self) -> str:
    every = [s for own in self.searches.values() for s in own]
    if not all(search.is_over for search in every):
      return "interrupted: nothing is chosen."
    if self.final is None:
      return nothing_passes(every) or "no placement was found."
    if self.final.passed_rps is None:
      return f"{self.placement.pools} with all its pools: {found(self.final)}."
    text = f"Place {self.placement.pools}: {found(self.final)}."
    text += self._lack()
    if self.placement.segments > 1:
      text += f" Each pool's stages are on {self.placement.segments} nodes."
    if self._rate_rps is not None and self.final.passed_rps < self._rate_rps:
      text += (
        f" That is below the {self._rate_rps:.4g}/s asked for: pools were counted by what one does "
        f"alone."
      )
    if self.baseline is None or self.baseline.per_device_rps is None:
      return text if not self._baselines else f"{text}\nNo colocated pools meet the SLOs."
    devices = self.placement.num_devices
    ours, theirs = self.final.passed_rps / devices, self.baseline.passed_rps / devices
    text += (
      f"\nBest of the colocated on {devices} devices: {self.baseline.name}, {theirs:.4g} a device"
    )
    if ours >= theirs:
      return f"{text}. Disaggregation serves {ours / theirs:.2f} times as much."
    return f"{text}. Colocated pools serve {theirs / ours:.2f} times as much: do not disaggregate."

  def _lack(self) -> str:
    """What the nodes cannot hold of the placement, if anything."""
    nodes = f" {self._cluster.num_nodes} nodes of {self._cluster.devices_per_node} devices"
    if self.unit is not None:
      num_units = units_on(self._cluster, self.unit)
      if self.placement.num_prefill > num_units * self.unit.num_prefill:
        return f"{nodes} do not hold it: only {num_units} x {self.unit.pools}, as KV stays inside."
    elif not holds(self._cluster, self.placement):
      return f"{nodes} do not hold it."
    return ""

  def draw(self, out: pathlib.Path) -> list[str]:
    from experiments.figures.search import draw_bars, draw_frontier

    files = []
    passed = {
      what: {s.name: s.per_device_rps for s in own if s.per_device_rps is not None}
      for what, own in self.searches.items()
      if what != "all pools"
    }
    if any(passed.values()):
      with whole_file(out / "placements.png") as path:
        label = "goodput a device (requests a second)"
        draw_bars(passed, label, self.asked.target.label, path)
      files.append("placements.png")
    if final := self.searches.get("all pools"):
      with whole_file(out / "frontier.png") as path:
        draw_frontier(final, path)
      files.append("frontier.png")
    return files


_ALGORITHM = {
  "high": "each role alone, then as many of each as needed (DistServe, algorithm 1).",
  "low": "both roles on the same nodes (DistServe, algorithm 2).",
}


def _name(shape: Shape) -> str:
  return f"tp{shape.tp}" + (f" pp{shape.pp}" if shape.pp > 1 else "")
