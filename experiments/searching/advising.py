"""Which strategy for this traffic on so many devices: each kind at its best, what would flip it."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from configs.hardware import HARDWARE, link
from configs.models import HUGGING_FACE, MODELS
from experiments.program import Progress, whole_file
from experiments.searching.drive import Driver, RateSearch
from experiments.searching.goals import (
  Asked,
  asked_line,
  data_of,
  found,
  make_search,
  table,
  with_pools,
  with_slo,
)
from experiments.searching.placing import BASELINE_BUDGETS, Candidate, best_of
from experiments.searching.probe import Probe, unloaded
from experiments.traffic import Traffic, read_traffic
from experiments.worlds import num_links
from pdjax.analysis.placement import Nodes, Shape, shapes
from pdjax.analysis.rules import Rule, rules
from pdjax.analysis.targets import Attainment
from pdjax.analysis.verdict import time_text
from pdjax.config import ExperimentConfig, WorkloadConfig, parse_pools
from pdjax.core.names import pick
from pdjax.workloads.lengths import Lengths, Sampled

KINDS = ("continuous", "chunked", "disaggregated")
POLICY = {"continuous": "prefill_first", "chunked": "sarathi"}
SAME = 0.05  # rates that differ by less are the same, as they are found to within as much
FACTORS = (0.25, 0.5, 2.0, 4.0)  # of prompt lengths and SLOs, to see what flips the choice
WAITS = 5.0  # TTFT SLOs that a probe lasts, at least: in a shorter one a queue can break no target
QUICK_FACTORS = (0.5, 2.0)
SERVED = 500  # requests, by the config that is written
OTHER_LINKS = ("10gbps", "100gbps", "nvlink")


class Setting(NamedTuple):
  """A strategy with its knobs, on all devices: `parts` of pools (shape, role, how many), so many
  `times`.
  """

  kind: str
  parts: tuple[tuple[Shape, str, int], ...]
  times: int
  token_budget: int | None = None

  def text(self, times: int) -> str:
    """So many of its parts, as `parse_pools` reads it."""
    policy = POLICY.get(self.kind)
    return ",".join(shape.text(role, times * n, policy) for shape, role, n in self.parts)

  @property
  def pools(self) -> str:
    """All of them."""
    return self.text(self.times)

  @property
  def label(self) -> str:
    budget = f", token budget {self.token_budget}" if self.token_budget else ""
    return f"{self.kind}: {self.pools}{budget}"


class Flip(NamedTuple):
  """The best of each kind with one thing changed: the choice first, then the others."""

  what: str
  searches: list[RateSearch]

  @property
  def is_over(self) -> bool:
    return all(search.is_over for search in self.searches)

  @property
  def flips(self) -> bool | None:
    """None: none serves anything, or it is not known."""
    rates = [search.passed_rps for search in self.searches]
    if not self.is_over or not any(rates):
      return None
    return (self.winner.passed_rps or 0.0) > (rates[0] or 0.0) * (1 + SAME)

  @property
  def winner(self) -> RateSearch:
    return max(self.searches, key=lambda search: search.passed_rps or 0.0)

  @property
  def says(self) -> str:
    """What the winner serves then, and the choice."""
    rates = [(s.name.rsplit(": ", 1)[1], s.passed_rps) for s in (self.winner, self.searches[0])]
    return ", ".join(f"{kind} serves {f'{rps:.4g}/s' if rps else 'nothing'}" for kind, rps in rates)


class AdviceGoal:
  """The goodput of every kind of strategy, each tuned, on as many devices; a choice, and why.

  First the rules that need no simulation. Then candidates: pools of every tensor parallelism that
  holds the model; of chunked prefill a range of token budgets, of separate pools every ratio of
  prefill to decode pools. One replica stands for all in the search, the best of each kind are
  served once more with all their pools. Last, the choice and the best of the other kinds with other
  prompt lengths, links and SLOs: what flips the choice.

  Raises:
    ValueError: the model fits on no pool of so many devices, or a target that is no attainment.
  """

  def __init__(self, asked: Asked, *, num_devices: int, quick: bool = False):
    if not isinstance(asked.target, Attainment):
      raise ValueError("advice is about goodput, not capacity")
    if num_devices < 1:
      raise ValueError(f"devices={num_devices} must be at least 1")
    self._num_devices, self._quick = num_devices, quick
    config = asked.config
    self.model = pick(MODELS, config.model, "model")
    self._device = pick(HARDWARE, config.hardware, "hardware")
    self.traffic: Traffic = read_traffic(config.workload)
    self._unfit: dict[Shape, str] = {}
    self._shapes = [
      shape
      for shape in shapes(
        self.model, Nodes(num_nodes=1, devices_per_node=num_devices), lambda s: True
      )
      if shape.pp == 1 and shape.tp & (shape.tp - 1) == 0 and self._fits(shape, asked)
    ]
    if not self._shapes:
      largest, why = list(self._unfit.items())[-1]
      raise ValueError(
        f"{self.model.name} fits on no pool of {num_devices} x {config.hardware}: over "
        f"{largest.tp} devices {why}"
      )
    first = with_pools(config, self._shapes[0].text("mixed"))
    slo = with_slo(first).slo
    self.asked = dataclasses.replace(
      asked,
      config=dataclasses.replace(config, slo=slo),
      least_s=max(asked.least_s, WAITS * slo.ttft_s),
    )
    self.rules = self._rules(first)
    self.searches: dict[str, list[RateSearch]] = {}
    self.finals: dict[Setting, RateSearch] = {}
    self._not_tried: dict[str, str] = {}  # changes, and why not
    self._promising: dict[str, Setting] = {}  # the best of each kind, or what promises most
    self.flips: list[Flip] = []

  def _fits(self, shape: Shape, asked: Asked) -> bool:
    try:
      unloaded(with_pools(asked.config, shape.text("mixed")))
    except ValueError as error:
      self._unfit[shape] = str(error)
      return False
    return True

  def _rules(self, config: ExperimentConfig) -> list[Rule]:
    """On the smallest pool that holds the model."""
    world = unloaded(config).world
    token_bytes = self.model.kv_bytes_per_token(world.bytes_per_value)
    way = link(config.link)
    at_once = num_links(way, self.model, self._shapes[0].tp)
    return rules(
      self.traffic.sample(config.workload.seed),
      prefill_s=world.alone.prefill_s,
      decode_step_s=world.alone.decode_s(world.pages.num_rows),
      copy_s=lambda tokens: way.copy_s(tokens * token_bytes / at_once),
      tpot_slo_s=self.asked.config.slo.tpot_s,
    )

  # Candidates -------------------------------------------------------------------------------------

  def settings(self) -> dict[str, list[Setting]]:
    """What is searched, by kind."""
    num_rows = self.asked.config.cache.num_rows
    budgets = [b for b in BASELINE_BUDGETS if b >= num_rows] or [num_rows]
    alone = [
      (shape, self._num_devices // shape.tp)
      for shape in self._shapes
      if self._num_devices % shape.tp == 0
    ]
    settings: dict[str, list[Setting]] = {}
    for kind in POLICY:
      settings[kind] = [
        Setting(kind, ((shape, "mixed", 1),), count, budget)
        for shape, count in alone
        for budget in (budgets if kind == "chunked" else [None])
      ]
    settings["disaggregated"] = [
      Setting("disaggregated", parts, times) for parts, times in self._pairs()
    ]
    return settings

  def _pairs(self) -> Iterator[tuple[tuple[tuple[Shape, str, int], ...], int]]:
    """Ratios of prefill to decode pools that use all devices: in lowest terms, and how often."""
    for prefill in self._shapes:
      for decode in self._shapes:
        for num_prefill in range(1, self._num_devices // prefill.tp + 1):
          left = self._num_devices - num_prefill * prefill.tp
          if left < decode.tp or left % decode.tp:
            continue
          num_decode = left // decode.tp
          times = math.gcd(num_prefill, num_decode)
          parts = (
            (prefill, "prefill", num_prefill // times),
            (decode, "decode", num_decode // times),
          )
          yield parts, times

  def config_of(self, setting: Setting, *, whole: bool = True) -> ExperimentConfig:
    """The experiment under a setting, with its parts once or all of its pools."""
    config = with_pools(self.asked.config, setting.text(setting.times if whole else 1))
    if setting.token_budget is None:
      return config
    scheduler = dataclasses.replace(config.scheduler, token_budget=setting.token_budget)
    return dataclasses.replace(config, scheduler=scheduler)

  # The search -------------------------------------------------------------------------------------

  def run(self, driver: Driver, progress: Progress) -> None:
    for kind, settings in self.settings().items():
      candidates = [
        Candidate(
          name=setting.label,
          config=self.config_of(setting, whole=False),
          weight=setting.times / self._num_devices,
          thing=setting,
        )
        for setting in settings
      ]
      if not candidates:
        continue
      best = best_of(self.asked, candidates, driver, self.searches.setdefault(kind, []))
      if best is None:
        self._promising[kind] = max(candidates, key=_promise_rps).thing
        continue
      self._promising[kind] = setting = best[0].thing
      self.finals[setting] = make_search(self.asked, setting.label, self.config_of(setting))
    driver.run(list(self.finals.values()))
    if self.ranked and len(self._promising) > 1 and not self._decides_nothing:
      self._look_for_flips(driver)

  @property
  def ranked(self) -> list[Setting]:
    """The best of each kind that serves anything, the best of all first; simple ones before others
    that serve no more.
    """
    passed = [s for s, search in self.finals.items() if search.passed_rps is not None]
    ranked = sorted(passed, key=lambda s: -self.finals[s].passed_rps)
    if ranked:
      most = self.finals[ranked[0]].passed_rps / (1 + SAME)
      level = [s for s in ranked if self.finals[s].passed_rps >= most]
      simplest = min(level, key=lambda s: KINDS.index(s.kind))
      ranked.remove(simplest)
      ranked.insert(0, simplest)
    return ranked

  @property
  def _decides_nothing(self) -> bool:
    """Whether the SLOs are so loose that the choice meets them at any rate that was tried."""
    return self.finals[self.ranked[0]].bound.failed_rps is None

  def _look_for_flips(self, driver: Driver) -> None:
    """The choice and the runner-up at any rate; the last kind only at one that beats the choice."""
    kinds = {setting.kind for setting in self.ranked}
    last = [setting for kind, setting in self._promising.items() if kind not in kinds]
    settings = [*self.ranked, *last]
    changes = self._changes(settings)
    asked = dataclasses.replace(self.asked, confirms=False)

    def search(what: str, setting: Setting, beats_rps: float | None = None) -> RateSearch:
      config = changes[what](self.config_of(setting))
      name = f"{what}: {setting.kind}"
      return make_search(asked, name, config, must_beat_rps=beats_rps, is_candidate=True)

    for what in changes:
      try:
        self.flips.append(Flip(what, [search(what, setting) for setting in settings[:2]]))
      except ValueError as error:
        self._not_tried[what] = str(error)
    driver.run([own for flip in self.flips for own in flip.searches])
    for flip in self.flips:
      own_rps = flip.searches[0].passed_rps
      beats_rps = own_rps and own_rps * (1 + SAME)
      for setting in settings[2:]:
        try:
          flip.searches.append(search(flip.what, setting, beats_rps))
        except ValueError as error:
          self._not_tried[f"{flip.what}: {setting.kind}"] = str(error)
    driver.run([own for flip in self.flips for own in flip.searches[2:]])

  def _changes(
    self, settings: Sequence[Setting]
  ) -> dict[str, Callable[[ExperimentConfig], ExperimentConfig]]:
    """What is changed, one thing at a time."""
    factors = QUICK_FACTORS if self._quick else FACTORS
    slo = self.asked.config.slo
    changes: dict[str, Callable] = {}

    def with_slos(**own: float) -> Callable:
      return lambda c: dataclasses.replace(c, slo=dataclasses.replace(c.slo, **own))

    for factor in factors:
      what, workload = self._with_prompts(factor)
      changes[what] = lambda c, workload=workload: dataclasses.replace(c, workload=workload)
    for name, value_s in (("ttft_s", slo.ttft_s), ("tpot_s", slo.tpot_s)):
      for factor in factors:
        what = f"{name[:4].upper()} SLO {time_text(value_s * factor)}"
        changes[what] = with_slos(**{name: value_s * factor})
    if any(setting.kind == "disaggregated" for setting in settings):
      for other in OTHER_LINKS:
        if link(other).bytes_per_s != link(self.asked.config.link).bytes_per_s:
          changes[f"link {other}"] = lambda c, other=other: dataclasses.replace(c, link=other)
    return changes

  def _with_prompts(self, factor: float) -> tuple[str, WorkloadConfig]:
    """The requests with prompts so many times as long, as far as the model has room; in words."""
    workload = self.asked.config.workload
    pairs = self.traffic.sample(workload.seed)
    room = max(self.model.max_len, *map(sum, pairs))
    wanted = [max(1, round(prompt * factor)) for prompt, _ in pairs]
    longer = tuple(Lengths(min(p, max(1, room - n)), n) for p, (_, n) in zip(wanted, pairs))
    what = f"prompts {factor:g} times as long"
    if any(p > own.prompt_tokens for p, own in zip(wanted, longer)):
      what += f" (with the answer at most {room} tokens)"
    own: dict[str, Any] = {"lengths": Sampled(recorded=longer), "length_scale": 1}
    if self.traffic.trace is not None:
      own |= {"trace": None, "trace_limit_s": None, "trace_speed": 1.0, "trace_spread_s": None}
      if self.traffic.lengths is None:
        own["arrivals"] = "poisson"
        what += " (Poisson arrivals)"
    return what, dataclasses.replace(workload, **own)

  # The report -------------------------------------------------------------------------------------

  def verdict(self) -> str:
    every = [s for own in self.searches.values() for s in own] + list(self.finals.values())
    if not all(search.is_over for search in every) or not every:
      return "interrupted: nothing is recommended."
    if not self.ranked:
      return self._out_of_reach(every)
    best, *others = self.ranked
    lines = [f"Use {best.label}: {found(self.finals[best])}."]
    rate = self.finals[best].passed_rps
    if others:
      second, other_rps = others[0], self.finals[others[0]].passed_rps
      if rate * (1 + SAME) >= other_rps >= rate / (1 + SAME):
        lines.append(
          f"Runner-up, and no worse as far as these runs can tell: {second.label}, "
          f"{other_rps:.4g}/s; the simpler one is recommended."
        )
      else:
        lines.append(
          f"Runner-up: {second.label}, {other_rps:.4g}/s; the margin is {rate / other_rps - 1:.0%}."
        )
      lines += [f"Then {s.label}, {self.finals[s].passed_rps:.4g}/s." for s in others[1:]]
    missing = [kind for kind in self.searches if kind not in {s.kind for s in self.ranked}]
    if missing:
      lines.append(f"No rate meets the SLOs under {' or '.join(missing)}.")
    if self._decides_nothing:
      lines.append(
        "No rate that was tried breaks these SLOs, so they decide nothing: tighten them."
      )
      return "\n".join(lines)
    lines += self._flip_lines()
    if (why := self._why_not_apart()) is not None:
      lines.append(why)
    return "\n".join(lines)

  def _out_of_reach(self, every: Sequence[RateSearch]) -> str:
    """What comes closest to each SLO where nobody meets anybody."""
    unloaded = [(search.name, min(search.outcomes, key=lambda o: o.rate_rps))
                for search in every if search.outcomes]  # fmt: skip
    lines = [f"Nothing meets the SLOs, not even with next to no load ({self.asked.target.label})."]
    for name in ("ttft", "tpot"):
      found = [(value, own) for own, o in unloaded if (value := getattr(o, f"{name}_p90_s"))]
      if found:
        value_s, own = min(found)
        slo_s = getattr(self.asked.config.slo, f"{name}_s")
        lines.append(
          f"The lowest {name.upper()} p90 is {time_text(value_s)}, of {own}; the SLO is "
          f"{time_text(slo_s)}."
        )
    return "\n".join(lines)

  def _why_not_apart(self) -> str | None:
    """That separate pools cost more than they gain, where they do; None where they are chosen, or
    serve as much and no rule of thumb speaks against them.
    """
    best = self.ranked[0]
    if best.kind == "disaggregated":
      return None
    against = [rule.says for rule in self.rules if not rule.speaks_for_separation]
    if "disaggregated" not in self.searches:
      return (
        f"Separate pools were not searched: {self._num_devices} x {self._device.label} cannot hold "
        f"two pools of {self.model.name}."
      )
    rate = self.finals[best].passed_rps
    other = next((s for s in self.ranked if s.kind == "disaggregated"), None)
    other_rps = None if other is None else self.finals[other].passed_rps
    if other_rps is None:
      shown = "separate pools meet the SLOs at no rate"
    else:
      shown = f"the best separate pools serve {other_rps:.4g}/s, {best.kind} {rate:.4g}/s"
      if other_rps * (1 + SAME) >= rate and not against:
        return None
    return f"Disaggregation costs more than it gains here: {'; '.join([shown, *against])}."

  def _flip_lines(self) -> list[str]:
    lines = [f"Flips with {flip.what}: then {flip.says}." for flip in self.flips if flip.flips]
    kept = [flip.what for flip in self.flips if flip.flips is False]
    if kept:
      lines.append(f"Does not flip with {', '.join(kept)}.")
    neither = [flip.what for flip in self.flips if flip.flips is None and flip.is_over]
    if neither:
      lines.append(f"Nothing meets the SLOs with {', '.join(neither)}.")
    lines += [f"Not tried, {what}: {why}." for what, why in self._not_tried.items()]
    return lines

  def report(self) -> tuple[str, dict[str, Any]]:
    lines = [
      asked_line(self.asked),
      f"{self._num_devices} x {self._device.label}, {self.asked.config.link} between pools.",
      "Before any simulation",
      *(f"  {'for' if r.speaks_for_separation else 'against'} separate pools: {r.says}"
        for r in self.rules),
    ]  # fmt: skip
    for kind, searches in self.searches.items():
      lines += [f"{kind.capitalize()}, one replica:", table(searches)]
    if self.finals:
      lines += ["The best of each with all pools:", table(list(self.finals.values()))]
    words = self.verdict()
    lines += ["Advice", *(f"  {line}" for line in words.splitlines())]
    if self.ranked:
      commands = vllm_commands(self.ranked[0], self.asked.config, self._longest_tokens)
      lines += ["The like of it in vLLM", *(f"  {line}" for line in commands)]
    data = {
      "num_devices": self._num_devices,
      "rules": [rule._asdict() for rule in self.rules],
      "ranked": [
        {"kind": s.kind, "pools": s.pools, "token_budget": s.token_budget,
         "goodput_rps": self.finals[s].passed_rps}
        for s in self.ranked
      ],
      "flips": [{"what": f.what, "flips": f.flips, "searches": [data_of(s) for s in f.searches]}
                for f in self.flips],
      "searches": {kind: [data_of(s) for s in own] for kind, own in self.searches.items()},
      "finals": [data_of(search) for search in self.finals.values()],
      "verdict": words,
    }  # fmt: skip
    return "\n".join(lines), data

  @property
  def _longest_tokens(self) -> int:
    """Of the longest request, so far as the model can hold it."""
    return min(sum(self.traffic.longest), self.model.max_len)

  def write_config(self, path: pathlib.Path) -> None:
    """Writes the recommended experiment as a config file, at 0.8 of its goodput."""
    best = self.ranked[0]
    config = self.config_of(best)
    workload = dataclasses.replace(config.workload, num_requests=SERVED)
    probe = Probe(
      config=dataclasses.replace(config, workload=workload),
      rate_rps=round(0.8 * self.finals[best].passed_rps, 4),
    )
    with whole_file(path) as part:
      part.write_text(config_source(probe.at_rate, best.label))

  def draw(self, out: pathlib.Path) -> list[str]:
    from experiments.figures.search import draw_bars, draw_frontier

    passed = {
      kind: {s.name.split(": ", 1)[1]: s.per_device_rps for s in own if s.per_device_rps}
      for kind, own in self.searches.items()
    }
    files = []
    if any(passed.values()):
      with whole_file(out / "candidates.png") as path:
        draw_bars(passed, "goodput a device (requests a second)", self.asked.target.label, path)
      files.append("candidates.png")
    if self.finals:
      with whole_file(out / "frontier.png") as path:
        draw_frontier(list(self.finals.values()), path)
      files.append("frontier.png")
    return files


def _promise_rps(candidate: Candidate) -> float:
  """The rate that step times promise for all devices."""
  return unloaded(candidate.config).capacity_rps * candidate.weight


def config_source(config: ExperimentConfig, label: str) -> str:
  """A config file that makes this experiment. It says what differs from the defaults."""
  names: dict[str, set[str]] = {"pdjax.config": {"ExperimentConfig"}}
  text = _source(config, "  ", names)
  imports = "\n".join(
    f"from {module} import {', '.join(sorted(own))}" for module, own in sorted(names.items())
  )
  return f'''"""{label}. Written by `python -m experiments.advise`.

    python -m experiments.run --config=THIS_FILE
    python -m experiments.compare --config=THIS_FILE
"""

{imports}


def get_config() -> ExperimentConfig:
  return {text}
'''


def _source(value: Any, indent: str, names: dict[str, set[str]]) -> str:
  """A value as Python. Adds what has to be imported to `names`, by module."""
  deeper = indent + "  "
  if dataclasses.is_dataclass(value):
    names.setdefault(type(value).__module__, set()).add(type(value).__name__)
    items = [
      f"{field.name}={_source(own, deeper, names)}"
      for field in dataclasses.fields(value)
      if (own := getattr(value, field.name)) != field.default
    ]
    if not items:
      return f"{type(value).__name__}()"
    lines = "".join(f"{deeper}{item},\n" for item in items)
    return f"{type(value).__name__}(\n{lines}{indent})"
  if isinstance(value, str):
    return json.dumps(value)
  if isinstance(value, tuple):
    flat = [_source(own, deeper, names) for own in tuple(value)]
    one_line = f"({', '.join(flat)}{',' if len(flat) == 1 else ''})"
    if len(indent + one_line) < 90:
      return one_line
    return "(\n" + "".join(f"{deeper}{own},\n" for own in flat) + f"{indent})"
  return repr(value)


def vllm_commands(setting: Setting, config: ExperimentConfig, longest_tokens: int) -> list[str]:
  """How vLLM's V1 engine would be started for the same, and what is different there."""
  base = f"vllm serve {HUGGING_FACE.get(config.model, config.model)}"
  base += f" --max-num-seqs {config.cache.num_rows} --block-size {config.cache.page_size}"
  base += f" --max-model-len {longest_tokens} --no-enable-prefix-caching"
  whole = max(longest_tokens, config.cache.num_rows)  # a budget below either is refused
  lines = []
  for (tp, role), count in _counted(setting.pools).items():
    command = base + (f" --tensor-parallel-size {tp}" if tp > 1 else "")
    if setting.kind == "chunked":
      command += f" --enable-chunked-prefill --max-num-batched-tokens {setting.token_budget}"
    elif role != "decode":
      command += f" --no-enable-chunked-prefill --max-num-batched-tokens {whole}"
    if setting.kind == "disaggregated":
      kind = "kv_producer" if role == "prefill" else "kv_consumer"
      transfer = f'{{"kv_connector":"NixlConnector","kv_role":"{kind}"}}'
      command += f" --kv-transfer-config '{transfer}'"
    lines.append(f"{count} x {command}")
  if setting.kind == "continuous":
    lines.append("(V1 computes a whole prompt in one step with running decodes, not before them)")
  if setting.kind == "disaggregated":
    lines.append(
      "(each with its own --port and VLLM_NIXL_SIDE_CHANNEL_PORT, behind a proxy that asks a "
      "producer for one token, then a consumer for the rest)"
    )
  elif sum(_counted(setting.pools).values()) > 1:
    lines.append("(each with its own --port, behind a router)")
  return lines


def _counted(pools: str) -> Mapping[tuple[int, str], int]:
  counts: dict[tuple[int, str], int] = {}
  for spec in parse_pools(pools):
    key = (spec.group.tp, spec.role)
    counts[key] = counts.get(key, 0) + 1
  return counts
