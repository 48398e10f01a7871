"""What to change for each cause of slow requests, and what that would do, by simulating it.

A remedy is another experiment for the same requests. Reads nothing; changes nothing.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from configs.hardware import HARDWARE, LINKS, link
from experiments.serving import Experiment, log_of, unserved
from experiments.traffic import read_traffic
from experiments.validation.requests import to_requests
from pdjax.analysis.diagnose import STALL_GAPS, Cause, Observed, is_troubled, observe
from pdjax.analysis.verdict import percent_text, time_text
from pdjax.config import ExperimentConfig, PoolSpec, WorkloadConfig, num_devices_of, parse_pools
from pdjax.core.events import EventLog
from pdjax.core.request import Request, Slo
from pdjax.metrics.latency import RequestRecord, percentile, request_records
from pdjax.scheduling.policies import POLICIES
from pdjax.workloads.lengths import Fixed, Lengths, longest_of

BUDGETS = (256, 512, 1024, 2048)
"""Token budgets to try: from a chunk that decodes hardly feel to one that fills a large device."""
FASTER = 1.25  # a device whose memory is so many times faster is worth a try
LINKS_TO_TRY = ("25gbe", "100gbe", "hdr200", "nvlink")


class Simulated(NamedTuple):
  experiment: Experiment
  log: EventLog
  records: dict[int, RequestRecord]


def simulate(config: ExperimentConfig, requests: Sequence[Request] | None = None) -> Simulated:
  """Serves an experiment of one strategy in virtual time, of its own requests or of these.

  Raises:
    ValueError: an experiment that cannot run.
  """
  experiment = unserved(config)
  if requests is not None:
    experiment.requests = [dataclasses.replace(r, slo=experiment.slo) for r in requests]
  log = log_of(experiment)
  return Simulated(experiment, log, request_records(log))


def for_requests(
  config: ExperimentConfig, strategy: str, requests: Sequence[Observed], slo: Slo
) -> ExperimentConfig:
  """A simulation of the same pools for these requests, whatever the experiment served them on.

  The longest request that the experiment could have had decides on limits, as it did there.
  """
  longest = [Lengths(r.prompt_tokens, r.output_tokens) for r in requests]
  with contextlib.suppress(ValueError, OSError):  # of a trace that is not here any more
    longest.append(read_traffic(config.workload).longest)
  return dataclasses.replace(
    with_pools(config, config.pools_of(strategy)),
    backend="sim",
    processes=False,
    pin=False,
    hosts=None,
    workload=WorkloadConfig(
      lengths=Fixed(**longest_of(longest)._asdict()),
      num_requests=1,
      rate_rps=1.0,
    ),
    slo=dataclasses.replace(config.slo, ttft_s=slo.ttft_s, tpot_s=slo.tpot_s),
  )


def with_pools(config: ExperimentConfig, specs: Sequence[PoolSpec]) -> ExperimentConfig:
  """The experiment with these pools as its only strategy."""
  return _with_text(config, ",".join(map(_text, specs)))


def _with_text(config: ExperimentConfig, pools: str) -> ExperimentConfig:
  """Alike pools that follow one another are written once."""
  counts = ((text, sum(1 for _ in own)) for text, own in itertools.groupby(pools.split(",")))
  text = ",".join(f"{count}x{text}" if count > 1 else text for text, count in counts)
  return dataclasses.replace(
    config, pools=text, strategies=(), num_devices=num_devices_of(parse_pools(text))
  )


def _text(spec: PoolSpec) -> str:
  parts = [spec.role, f"tp{spec.group.tp}", f"pp{spec.pp}", spec.policy]
  return ":".join(parts) + (f"@{spec.hardware}" if spec.hardware else "")


# What to try --------------------------------------------------------------------------------------

Remedy = tuple[str, ExperimentConfig]
"""What is changed, in words, and the experiment with that change."""


def _more(config: ExperimentConfig, role: str) -> Iterator[Remedy]:
  """A device more in a role, or one taken from the other role."""
  specs = list(config.pools_of(config.pools))
  own = [spec for spec in specs if spec.role == role]
  if not own:
    return
  yield f"one more {role} pool", with_pools(config, sorted([*specs, own[0]], key=specs.index))
  others = [s for s in specs if s.role in {"prefill", "decode"} - {role} and role != "mixed"]
  if len(others) > 1 and others[-1].group.tp == own[0].group.tp:
    fewer = [own[0] if spec is others[-1] else spec for spec in specs]
    fewer.sort(key=lambda spec: spec.role != "prefill")
    yield f"a {others[-1].role} pool turned into a {role} pool", with_pools(config, fewer)


def _roles(config: ExperimentConfig) -> set[str]:
  return {spec.role for spec in config.pools_of(config.pools)}


def _policy(config: ExperimentConfig, policy: str, **scheduler) -> ExperimentConfig:
  """Mixed pools under another policy."""
  specs = [
    dataclasses.replace(s, policy=policy) if s.role == "mixed" else s
    for s in config.pools_of(config.pools)
  ]
  options = dataclasses.replace(config.scheduler, policy=None, **scheduler)
  return dataclasses.replace(with_pools(config, specs), scheduler=options)


def _cuts_prompts(config: ExperimentConfig) -> bool:
  mixed = [s for s in config.pools_of(config.pools) if s.role == "mixed"]
  return all(POLICIES[config.scheduler.policy or spec.policy].chunks for spec in mixed)


def _for_queueing(config: ExperimentConfig) -> Iterator[Remedy]:
  yield from _more(config, "prefill")
  yield from _more(config, "mixed")
  if "mixed" in _roles(config) and _cuts_prompts(config):
    budget = 4 * config.scheduler.token_budget
    options = dataclasses.replace(config.scheduler, token_budget=budget)
    yield f"a token budget of {budget}", dataclasses.replace(config, scheduler=options)


def _for_interference(config: ExperimentConfig) -> Iterator[Remedy]:
  if "mixed" not in _roles(config):
    return
  for budget in BUDGETS:
    if not (_cuts_prompts(config) and budget >= config.scheduler.token_budget):
      yield (
        f"chunked prefill, a token budget of {budget}",
        _policy(config, "sarathi", token_budget=budget),
      )
  yield from _separated(config)


def _separated(config: ExperimentConfig) -> Iterator[Remedy]:
  """Half of the mixed pools prefill and half decode; of a single one, one more."""
  specs = config.pools_of(config.pools)
  num_pools = max(2, len(specs) - len(specs) % 2)
  tp, hardware = specs[0].group.tp, specs[0].hardware
  at = f"@{hardware}" if hardware else ""
  half = num_pools // 2
  text = ",".join([f"prefill:tp{tp}{at}"] * half + [f"decode:tp{tp}{at}"] * half)
  options = dataclasses.replace(config.scheduler, policy=None)
  added = "" if num_pools <= len(specs) else ", a pool more"
  yield (
    f"prefill and decode apart{added}",
    dataclasses.replace(_with_text(config, text), scheduler=options),
  )


def _more_pages(config: ExperimentConfig) -> Iterator[Remedy]:
  if config.cache.num_pages is not None or config.cache.layout == "slots":
    cache = dataclasses.replace(config.cache, layout="paged", num_pages=None)
    yield "as many pages as the memory holds", dataclasses.replace(config, cache=cache)


def _more_rows(config: ExperimentConfig) -> Iterator[Remedy]:
  rows = min(4 * config.cache.num_rows, config.scheduler.token_budget)  # a step has a token of each
  if rows > config.cache.num_rows:
    cache = dataclasses.replace(config.cache, layout="paged", num_rows=rows)
    yield f"{rows} rows", dataclasses.replace(config, cache=cache)


def _on_faster(config: ExperimentConfig, role: str) -> Iterator[Remedy]:
  """Pools of a role on the calibrated device with the fastest memory, if it is much faster."""
  best = max(
    (device for device in HARDWARE.values() if device.is_calibrated),
    key=lambda device: device.peak_bytes_per_s,
  )
  specs = []
  for spec in config.pools_of(config.pools):
    own = HARDWARE[spec.hardware or config.hardware]
    if spec.role == role and best.peak_bytes_per_s >= FASTER * own.peak_bytes_per_s:
      spec = dataclasses.replace(spec, hardware=best.name)
    specs.append(spec)
  if tuple(specs) != config.pools_of(config.pools):
    yield f"{role} pools on {best.name}", with_pools(config, specs)


def faster_decode(config: ExperimentConfig) -> Iterator[Remedy]:
  """Decode on a device with faster memory and prefill where it is: apart, if they are not."""
  if "decode" in _roles(config):
    yield from _on_faster(config, "decode")
  else:
    for apart, changed in _separated(config):
      for what, faster in _on_faster(changed, "decode"):
        yield f"{apart}, {what}", faster


def _for_memory(config: ExperimentConfig) -> Iterator[Remedy]:
  yield from _more_pages(config)
  yield from _more_rows(config)
  yield from _more(config, "decode")
  yield from _more(config, "mixed")
  yield from _on_faster(config, "decode" if "decode" in _roles(config) else "mixed")


def _for_preemption(config: ExperimentConfig) -> Iterator[Remedy]:
  yield from _more_pages(config)
  if config.scheduler.reservation != "request":
    options = dataclasses.replace(config.scheduler, reservation="request")
    yield (
      "pages for all of a request at its admission",
      dataclasses.replace(config, scheduler=options),
    )
  if "decode" in _roles(config) and config.hand_off.reservation != "request":
    hand_off = dataclasses.replace(config.hand_off, reservation="request")
    yield (
      "room for all of a request at its hand-off",
      dataclasses.replace(config, hand_off=hand_off),
    )
  yield from _more(config, "mixed")
  yield from _more(config, "decode")


def _for_handoff_wait(config: ExperimentConfig) -> Iterator[Remedy]:
  yield from _more_rows(config)
  yield from _more_pages(config)
  yield from _more(config, "decode")
  if config.hand_off.reservation != "prompt":
    hand_off = dataclasses.replace(config.hand_off, reservation="prompt")
    yield (
      "room for the prompt alone at the hand-off",
      dataclasses.replace(config, hand_off=hand_off),
    )


def _for_link(config: ExperimentConfig) -> Iterator[Remedy]:
  if not config.hand_off.streams:
    hand_off = dataclasses.replace(config.hand_off, streams=True)
    yield (
      "hand-offs streamed while prompts are computed",
      dataclasses.replace(config, hand_off=hand_off),
    )
  now = link(config.link).bytes_per_s
  for name in LINKS_TO_TRY:
    if LINKS[name].bytes_per_s > FASTER * now:
      yield f"a link like {name}", dataclasses.replace(config, link=name)


def _for_own_prefill(config: ExperimentConfig) -> Iterator[Remedy]:
  role = "prefill" if "prefill" in _roles(config) else "mixed"
  specs = []
  for spec in config.pools_of(config.pools):
    text = _text(spec).replace(f":tp{spec.group.tp}:", f":tp{2 * spec.group.tp}:")
    specs.append(text if spec.role == role else _text(spec))
  yield f"{role} pools of twice as many devices each", _with_text(config, ",".join(specs))


_REMEDIES: dict[Cause, Callable[[ExperimentConfig], Iterator[Remedy]]] = {
  Cause.QUEUEING: _for_queueing,
  Cause.INTERFERENCE: _for_interference,
  Cause.MEMORY: _for_memory,
  Cause.PREEMPTION: _for_preemption,
  Cause.HANDOFF_WAIT: _for_handoff_wait,
  Cause.LINK: _for_link,
  Cause.OWN_PREFILL: _for_own_prefill,
}

ADVICE: dict[Cause, str] = {
  Cause.QUEUEING: "more devices that prefill, or a larger token budget where prompts are cut",
  Cause.INTERFERENCE: "cut prompts into chunks, or keep prefill and decode apart",
  Cause.MEMORY: "more pages or rows, more devices that decode, or faster memory",
  Cause.PREEMPTION: "more pages, or a reservation that admits only what fits to its end",
  Cause.HANDOFF_WAIT: "more rows and pages in the decode pool, or more devices that decode",
  Cause.LINK: "a faster link, or hand-offs that are streamed while the prompt is computed",
  Cause.CLIENT: "look at the client: one that is busy sends late and reads late; the server is not "
  "what is slow",
  Cause.OWN_PREFILL: "more devices for each prompt (tensor parallelism), or a later target",
  Cause.UNEXPLAINED: "measure more: an event log, or gaps and arrivals of each request",
  Cause.HEALTHY: "nothing",
  Cause.TOO_FEW: "run it again with more requests",
}
"""What to change first, where nothing can be simulated."""


def remedies(cause: Cause, config: ExperimentConfig) -> list[Remedy]:
  """What there is to try against a cause, of an experiment with `pools` as its only strategy."""
  return list(_REMEDIES[cause](config)) if cause in _REMEDIES else []


# What it would do ---------------------------------------------------------------------------------


class Row(NamedTuple):
  """How the requests fare: a row of the table."""

  name: str
  num_devices: int | None
  requests: Sequence[Observed]
  num_requests: int
  num_met: int  # of all requests; those that failed are none of them
  num_calm: int  # without a stall, too
  nearest: float  # p99 of what comes nearest to its target, or beyond, in times of that
  num_new: int = 0  # devices that are not there yet


def row_of(
  name: str,
  num_devices: int | None,
  requests: Sequence[Observed],
  num_failed: int,
  slo: Slo,
  num_new: int = 0,
) -> Row:
  met = [r for r in requests if r.ttft_s <= slo.ttft_s and (r.tpot_s or 0.0) <= slo.tpot_s]
  calm = sum(not is_troubled(r, slo) for r in requests)
  in_targets = (
    [r.ttft_s / slo.ttft_s for r in requests],
    [(r.tpot_s or 0.0) / slo.tpot_s for r in requests],
    [r.longest_gap_s / (STALL_GAPS * slo.tpot_s) for r in requests],
  )
  nearest = max(percentile(own, 99) or 0.0 for own in in_targets)
  n = len(requests) + num_failed
  return Row(name, num_devices, requests, n, len(met), calm, nearest, num_new)


def try_out(
  found: Sequence[Remedy],
  requests: Sequence[Observed],
  slo: Slo,
  show: Callable[[str], None] = lambda text: None,
) -> tuple[list[Row], list[str]]:
  """Rows of the experiments, in order, and what could not be simulated, and why.

  The first has the devices that are there.
  """
  asked, rows, refused = to_requests(requests), [], []
  there = _hardware(found[0][1])
  for what, config in found:
    show(f"simulating {what}")
    try:
      records = simulate(config, asked).records
    except ValueError as error:
      refused.append(f"{what}: {error}")
      continue
    seen = observe(records.values())
    num_new = (_hardware(config) - there).total()
    num_failed = len(records) - len(seen)
    rows.append(row_of(what, config.num_devices, seen, num_failed, slo, num_new))
  return rows, refused


def _hardware(config: ExperimentConfig) -> collections.Counter[str]:
  """How many devices of each kind."""
  return collections.Counter(
    spec.hardware or config.hardware for spec in config.pools_of(config.pools) for _ in spec.devices
  )


def best_of(rows: Sequence[Row]) -> Row:
  """The one under which most requests are well; of equals that with fewest new devices, then that
  which keeps farthest from its targets.
  """
  return max(rows, key=lambda row: (row.num_calm, -row.num_new, -row.nearest))


def table(rows: Sequence[Row]) -> list[tuple[str, ...]]:
  """A header and a row each, as text."""
  cells = [("", "devices", "TTFT p50", "p99", "TPOT p50", "p99", "longest gap", "SLOs met", "calm")]
  for row in rows:
    ttfts_s = [r.ttft_s for r in row.requests]
    tpots_s = [r.tpot_s for r in row.requests if r.tpot_s is not None]
    gap_s = max((gap_s for r in row.requests for gap_s in r.itl_s or ()), default=None)
    values_s = [percentile(own, q) for own in (ttfts_s, tpots_s) for q in (50, 99)]
    cells.append(
      (
        row.name,
        "-" if row.num_devices is None else str(row.num_devices),
        *("n/a" if value_s is None else time_text(value_s) for value_s in (*values_s, gap_s)),
        percent_text(row.num_met, row.num_requests),
        percent_text(row.num_calm, row.num_requests),
      )
    )
  return cells
