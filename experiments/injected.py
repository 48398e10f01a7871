"""Simulated runs with one injected cause each, by which a diagnosis is judged. Draws from a seed.

A case is drawn as a run in which nothing is wrong, which is checked by simulating it, and as the
same run with one thing changed that brings the cause by construction:

  prefill queueing        prompts arrive faster than the pools can compute them
  interference            prompts are computed whole, or nearly, instead of in small chunks
  decode memory pressure  the pool has few pages, each request with all of its own from the start;
                          or so many long requests decode at once that steps are reading K and V
  preemption              few pages, of which requests take what they have need of as they grow
  hand-off wait           the decode pool has few rows
  link-bound hand-off     a slow link between the pools
  client-side lag         a client that does not look for a while, again and again: what is due is
                          sent late and what has come is seen at once; the server's log has it right
  too few samples         fewer requests than tell anything, of a run with or without a fault
  nothing wrong           no change

What clients saw of a run comes to them over a network that delays each token a little.

How strong the change is is drawn too, and is raised until the run has symptoms by its targets,
which are those of the healthy run; what the diagnosis says has no part in this.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from configs.models import MODELS
from experiments.remedies import Simulated, simulate
from pdjax.analysis.diagnose import STALL_GAPS, Cause, Observed, is_troubled, observe
from pdjax.config import (
  CacheConfig,
  ExperimentConfig,
  SchedulerOptions,
  WorkloadConfig,
  num_devices_of,
  parse_pools,
)
from pdjax.core.clock import to_ticks
from pdjax.core.events import Arrived, Event
from pdjax.core.request import Slo
from pdjax.metrics.latency import RequestRecord, request_records
from pdjax.scheduling.hand_off import HandOff
from pdjax.workloads.lengths import LogNormal, Mix

INJECTED = (
  Cause.QUEUEING,
  Cause.INTERFERENCE,
  Cause.MEMORY,
  Cause.PREEMPTION,
  Cause.HANDOFF_WAIT,
  Cause.LINK,
  Cause.CLIENT,
  Cause.HEALTHY,
  Cause.TOO_FEW,
)
NUM_REQUESTS = 150
NETWORK_S = 5e-4  # from the server to the client, on average: what a data centre's network takes
HEALTHY_SHARE = 0.03  # of requests with symptoms, at most; a diagnosis allows 0.05
HURT_SHARE = 0.2  # at least, of a run with a fault
MOST_DOSES, MOST_DRAWS = 8, 40

_PLACES = (  # what serves what, on a device with room for it
  ("llama3-8b", "a100"),
  ("llama3-8b", "h100"),
  ("llama3-8b", "l40s"),
  ("mistral-7b", "a100"),
  ("mistral-7b", "h200"),
  ("llama2-7b", "a100"),
  ("llama2-7b", "h100"),
  ("opt-13b", "a100"),
)


class Case(NamedTuple):
  """One run: what was injected, and what there is to see of it."""

  cause: Cause
  label: str
  log: Sequence[Event]
  requests: Sequence[Observed]
  slo: Slo


def draw_case(cause: Cause, rng: np.random.Generator) -> Case:
  """A case with this cause: drawn until the run without it is healthy and the one with it is not.

  Raises:
    RuntimeError: none was found.
  """
  for _ in range(MOST_DRAWS):
    if (found := _DRAWS[cause](rng)) is not None:
      return found
  raise RuntimeError(f"no run with {cause} in {MOST_DRAWS} draws")


def _seen(
  records: Mapping[int, RequestRecord],
  rng: np.random.Generator,
  back: Callable[[float], float] = lambda time_s: time_s,
) -> list[Observed]:
  """Finished requests as a client sees them: over a network that delays every token for a while.

  `back` says when the client looks that has got something at a time.
  """
  found = []
  for request in observe(records.values()):
    delays_s = rng.exponential(NETWORK_S, len(request.token_s))
    there_s = np.maximum.accumulate(np.array(request.token_s) + delays_s)
    token_s = [back(at_s) for at_s in there_s.tolist()]
    itl_s = tuple(b - a for a, b in itertools.pairwise(token_s))
    found.append(
      dataclasses.replace(
        request,
        ttft_s=token_s[0] - request.arrival_s,
        tpot_s=sum(itl_s) / len(itl_s) if itl_s else None,
        itl_s=itl_s,
      )
    )
  return found


# Healthy runs -------------------------------------------------------------------------------------


class Healthy(NamedTuple):
  config: ExperimentConfig
  run: Simulated
  slo: Slo

  @property
  def rate_rps(self) -> float:
    return self.run.experiment.rate_rps

  @property
  def num_running(self) -> float:
    """Requests in the system, on average (Little)."""
    records = self.run.records.values()
    span_s = max(r.finish_s for r in records) - min(r.arrival_s for r in records)
    return sum(r.e2e_s for r in records) / span_s


def _log_normal(rng, prompt: tuple[int, int], output: tuple[int, int]) -> LogNormal:
  """Medians within these bounds; a tenth is over twice as long, none over four times."""
  medians = [int(np.exp(rng.uniform(np.log(low), np.log(high)))) for low, high in (prompt, output)]
  prompts, outputs = ((m, 2 * m, 4 * m) for m in medians)
  return LogNormal(prompt_tokens=prompts, output_tokens=outputs)


def _healthy(
  rng: np.random.Generator,
  lengths: LogNormal | Mix,
  *,
  pools: str,
  loads: tuple[float, float] = (0.3, 0.55),
  places: Sequence[tuple[str, str]] = _PLACES,
  num_requests: int = NUM_REQUESTS,
  most_share: float = HEALTHY_SHARE,
  **scheduler,
) -> Healthy | None:
  """A run of these lengths in these pools, or None where it has more symptoms than it may.

  Targets are Sarathi-Serve's for the first token (three times the longest prompt alone) and three
  times what a token takes in this run.
  """
  model, hardware = places[rng.integers(len(places))]
  config = ExperimentConfig(
    model=model,
    hardware=hardware,
    backend="sim",
    num_devices=num_devices_of(parse_pools(pools)),
    strategies=(),
    pools=pools,
    link="nvlink",
    workload=WorkloadConfig(
      arrivals="gamma",
      cv=float(rng.uniform(0.7, 1.3)),
      load=float(rng.uniform(*loads)),
      lengths=lengths,
      num_requests=num_requests,
      seed=int(rng.integers(1 << 30)),
    ),
    scheduler=SchedulerOptions(
      token_budget=int(rng.choice((256, 384, 512))), steps_in_flight=1, **scheduler
    ),
    hand_off=HandOff(streams=bool(rng.integers(2))),
    cache=CacheConfig(layout="paged", num_rows=256, page_size=16),
  )
  try:
    run = simulate(config)
  except ValueError:  # it does not fit on that device
    return None
  records = list(run.records.values())
  if any(r.outcome != "finished" for r in records):
    return None
  usual_s = statistics.median(r.tpot_s for r in records if r.tpot_s is not None)
  slo = Slo(ttft_s=run.experiment.slo.ttft_s, tpot_s=3 * usual_s)
  if _share(observe(records), slo) > most_share:
    return None
  # Capacity depends on rows and pages, so from here on the rate is a number.
  return Healthy(_changed(config, workload={"rate_rps": run.experiment.rate_rps}), run, slo)


def _share(requests: Sequence[Observed], slo: Slo) -> float:
  return sum(is_troubled(r, slo) for r in requests) / len(requests)


def _changed(config: ExperimentConfig, **parts: dict) -> ExperimentConfig:
  """With values of its parts replaced; `fields` are its own."""
  own = parts.pop("fields", {})
  for name, values in parts.items():
    own[name] = dataclasses.replace(getattr(config, name), **values)
  return dataclasses.replace(config, **own)


def _injected(
  rng: np.random.Generator,
  cause: Cause,
  healthy: Healthy | None,
  change: Callable[[Healthy, float], tuple[ExperimentConfig, str]],
  doses: Sequence[float],
) -> Case | None:
  """The first dose that hurts."""
  if healthy is None:
    return None
  for dose in doses:
    config, label = change(healthy, dose)
    try:
      run = simulate(config)
    except ValueError:  # a request that no pool can hold any more: no stronger dose is possible
      return None
    requests = observe(run.records.values())
    if len(requests) == len(run.records) and _share(requests, healthy.slo) >= HURT_SHARE:
      seen = _seen(run.records, rng)
      return Case(cause, f"{_place(config)}: {label}", run.log, seen, healthy.slo)
  return None


def _place(config: ExperimentConfig) -> str:
  return f"{config.model} on {config.hardware}, {config.pools}"


def _doses(first: float, factor: float) -> list[float]:
  return [first * factor**i for i in range(MOST_DOSES)]


# One draw of each ---------------------------------------------------------------------------------


def _queueing(rng: np.random.Generator) -> Case | None:
  pools = str(rng.choice(("1xmixed", "2xmixed", "1xprefill,1xdecode", "2xprefill,1xdecode")))
  healthy = _healthy(rng, _log_normal(rng, (800, 2500), (16, 60)), pools=pools)

  def change(healthy: Healthy, dose: float) -> tuple[ExperimentConfig, str]:
    rate_rps = healthy.run.experiment.capacity_rps * dose
    return _changed(healthy.config, workload={"rate_rps": rate_rps}), f"{dose:.2f} of its capacity"

  return _injected(rng, Cause.QUEUEING, healthy, change, _doses(rng.uniform(1.2, 1.8), 1.3))


def _interference(rng: np.random.Generator) -> Case | None:
  long = int(rng.integers(3000, 7000))
  lengths = Mix(
    prompt_tokens=(100, int(rng.integers(200, 500))),
    long_prompt_tokens=(long, long + 1000),
    output_tokens=(80, int(rng.integers(150, 300))),
    long_every=int(rng.integers(4, 9)),
  )
  pools = str(rng.choice(("1xmixed", "2xmixed")))
  healthy = _healthy(rng, lengths, pools=pools, loads=(0.3, 0.5))
  way = str(rng.choice(("prefill_first", "orca", "token_budget")))

  def change(healthy: Healthy, dose: float) -> tuple[ExperimentConfig, str]:
    if way == "token_budget":
      return _changed(healthy.config, scheduler={"token_budget": 16_384}), "chunks of 16,384 tokens"
    return _changed(healthy.config, scheduler={"policy": way}), f"whole prompts, under {way}"

  return _injected(rng, Cause.INTERFERENCE, healthy, change, [1.0])


def _few_pages(cause: Cause, rng: np.random.Generator, reservation: str) -> Case | None:
  """Pages for a part of the requests that ran at once while there were enough."""
  pools = str(rng.choice(("1xmixed", "2xmixed")))
  lengths = _log_normal(rng, (150, 500), (120, 250))
  healthy = _healthy(rng, lengths, pools=pools, reservation=reservation, watermark=0.0)

  def change(healthy: Healthy, dose: float) -> tuple[ExperimentConfig, str]:
    records = healthy.run.records.values()
    tokens = statistics.fmean(r.num_prompt_tokens + len(r.token_s) for r in records)
    longest = max(r.num_prompt_tokens + len(r.token_s) for r in records)
    num_pools = healthy.config.num_devices
    num_pages = int(dose * healthy.num_running / num_pools * tokens) // 16
    num_pages = max(num_pages, -(-longest // 16) + 1)
    return _changed(healthy.config, cache={"num_pages": num_pages}), f"{num_pages} pages"

  return _injected(rng, cause, healthy, change, _doses(rng.uniform(0.7, 1.0), 0.8))


def _long_contexts(rng: np.random.Generator) -> Case | None:
  """Many long requests that decode at once, of models with K and V for every head."""
  places = [place for place in _PLACES if place[0] in ("llama2-7b", "opt-13b")]
  lengths = _log_normal(rng, (800, 1600), (150, 300))
  healthy = _healthy(rng, lengths, pools="3xprefill,1xdecode", loads=(0.08, 0.15), places=places)

  def change(healthy: Healthy, dose: float) -> tuple[ExperimentConfig, str]:
    rate_rps = healthy.rate_rps * dose
    return _changed(healthy.config, workload={"rate_rps": rate_rps}), f"{dose:.2f} times the rate"

  return _injected(rng, Cause.MEMORY, healthy, change, _doses(rng.uniform(1.3, 1.6), 1.2))


def _memory(rng: np.random.Generator) -> Case | None:
  if rng.integers(2):
    return _long_contexts(rng)
  return _few_pages(Cause.MEMORY, rng, "request")


def _preemption(rng: np.random.Generator) -> Case | None:
  return _few_pages(Cause.PREEMPTION, rng, str(rng.choice(("chunk", "prompt"))))


def _handoff_wait(rng: np.random.Generator) -> Case | None:
  pools = str(rng.choice(("1xprefill,1xdecode", "2xprefill,1xdecode", "2xprefill,2xdecode")))
  healthy = _healthy(rng, _log_normal(rng, (200, 1200), (80, 250)), pools=pools)

  def change(healthy: Healthy, dose: float) -> tuple[ExperimentConfig, str]:
    num_decode = int(healthy.config.pools.split(",")[1].split("x")[0])
    num_rows = max(1, round(dose * healthy.num_running / num_decode))
    return _changed(healthy.config, cache={"num_rows": num_rows}), f"{num_rows} rows"

  return _injected(rng, Cause.HANDOFF_WAIT, healthy, change, _doses(rng.uniform(0.8, 1.0), 0.85))


def _link(rng: np.random.Generator) -> Case | None:
  pools = str(rng.choice(("1xprefill,1xdecode", "2xprefill,1xdecode", "2xprefill,2xdecode")))
  healthy = _healthy(rng, _log_normal(rng, (400, 2000), (60, 200)), pools=pools, loads=(0.2, 0.45))
  if healthy is None:
    return None
  model = MODELS[healthy.config.model]
  prompts = [r.num_prompt_tokens for r in healthy.run.records.values()]
  num_bytes = statistics.fmean(prompts) * model.kv_bytes_per_token(2)

  def change(healthy: Healthy, dose: float) -> tuple[ExperimentConfig, str]:
    bytes_per_s = num_bytes * healthy.rate_rps / dose  # the share of its time that it is busy
    gbps = float(f"{bytes_per_s * 8 / 1e9:.3g}")
    return _changed(healthy.config, fields={"link": f"{gbps:g}gbps"}), f"a link of {gbps:g} Gb/s"

  return _injected(rng, Cause.LINK, healthy, change, _doses(rng.uniform(0.3, 0.6), 1.3))


def _any_healthy(rng: np.random.Generator, **more) -> Healthy | None:
  pools = str(rng.choice(("1xmixed", "2xmixed", "1xprefill,1xdecode", "2xprefill,2xdecode")))
  return _healthy(rng, _log_normal(rng, (150, 2000), (40, 250)), pools=pools, **more)


def _client(rng: np.random.Generator) -> Case | None:
  """The same requests by a client that is away from time to time."""
  healthy = _any_healthy(rng)
  if healthy is None:
    return None
  slo = healthy.slo
  requests = healthy.run.experiment.requests
  last_s = max(r.finish_s for r in healthy.run.records.values())
  for dose in _doses(rng.uniform(1.0, 2.0), 1.4):
    away_s = dose * max(slo.ttft_s, STALL_GAPS * slo.tpot_s)
    back = _absences(rng, away_s, last_s)
    due_s = {r.request_id: r.arrival_s for r in requests}
    sent = [dataclasses.replace(r, arrival_s=back(r.arrival_s)) for r in requests]
    run = simulate(healthy.config, sent)
    log = [
      dataclasses.replace(event, time_s=due_s[event.request_id])
      if isinstance(event, Arrived)
      else event
      for event in run.log
    ]
    seen = _seen(request_records(log), rng, back)
    late = [r for r in request_records(log).values() if is_troubled(r, slo)]
    if min(len(late) / len(requests), _share(seen, slo)) >= HURT_SHARE:
      label = f"{_place(healthy.config)}: a client that is away for {away_s:.2g} s at a time"
      return Case(Cause.CLIENT, label, log, seen, slo)
  return None


def _absences(rng: np.random.Generator, away_s: float, last_s: float) -> Callable[[float], float]:
  """When a client sees what happens at a time: then, or when it looks again."""
  spans, at_s = [], 0.0
  while at_s < 2 * last_s + 10 * away_s:
    at_s += float(rng.exponential(away_s))
    spans.append((at_s, to_ticks(at_s + away_s)))
    at_s += away_s
  starts_s = np.array([start_s for start_s, _ in spans])

  def back(time_s: float) -> float:
    i = int(np.searchsorted(starts_s, time_s, side="right")) - 1
    return max(time_s, spans[i][1]) if i >= 0 else time_s

  return back


def _nothing(rng: np.random.Generator, **more) -> Case | None:
  healthy = _any_healthy(rng, **more)
  if healthy is None:
    return None
  requests = _seen(healthy.run.records, rng)
  return Case(Cause.HEALTHY, _place(healthy.config), healthy.run.log, requests, healthy.slo)


def _too_few(rng: np.random.Generator) -> Case | None:
  """Fewer than twenty requests, at any load."""
  num_requests = int(rng.integers(3, 16))
  case = _nothing(rng, num_requests=num_requests, loads=(0.3, 2.0), most_share=1.0)
  if case is None:
    return None
  return case._replace(cause=Cause.TOO_FEW, label=f"{case.label}: {num_requests} requests")


_DRAWS: dict[Cause, Callable[[np.random.Generator], Case | None]] = {
  Cause.QUEUEING: _queueing,
  Cause.INTERFERENCE: _interference,
  Cause.MEMORY: _memory,
  Cause.PREEMPTION: _preemption,
  Cause.HANDOFF_WAIT: _handoff_wait,
  Cause.LINK: _link,
  Cause.CLIENT: _client,
  Cause.HEALTHY: _nothing,
  Cause.TOO_FEW: _too_few,
}
