"""Sarathi-Serve's schematic figures as runs of a few requests: who is at work when."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from configs.hardware import LINKS
from configs.models import MODELS
from experiments.figures.reproduction import Bars, Lanes, draw
from experiments.reproduction import published_sarathi as published
from experiments.reproduction.bench import Bench
from experiments.reproduction.figure import HOLDS, IN_PART, NOT, Compared, Figure, Found, Judged
from experiments.reproduction.sarathi_systems import (
  DEPLOYMENTS,
  decode_terms,
  judged_share,
  latency_of,
  latency_of_config,
  mixed_terms,
  prefill_terms,
)
from experiments.validation.replay import simulate
from pdjax.config import SchedulerOptions, parse_pools
from pdjax.core.events import EventLog, each_step
from pdjax.core.request import Request, SamplingParams
from pdjax.metrics.latency import RequestRecord, request_records
from pdjax.scheduling.pages import PageConfig
from pdjax.sim.latency_model import LatencyModel
from pdjax.sim.sim_executor import SimExecutor

POLICIES = {
  "vLLM": "prefill_first",
  "Orca": "orca",
  "FasterTransformer": "faster_transformer",
  "Sarathi-Serve": "sarathi",
}
STALL = 3.0  # decode steps without a token: a stall
BUDGET = 512
LONGEST = 8192


def _serve(
  policy: str,
  parts: str,
  model: str,
  latency: LatencyModel,
  asked: Sequence[tuple[float, int, int]],
  make_executor: Callable[..., SimExecutor] = SimExecutor,
) -> EventLog:
  """Requests of (arrival, prompt, output) under a policy, with memory for all of them."""
  rows = len(asked)
  pages = PageConfig(
    num_rows=rows, page_size=16, pages_per_row=LONGEST // 16, num_pages=rows * LONGEST // 16
  )
  requests = [
    Request(
      request_id=number,
      arrival_s=arrival_s,
      num_prompt_tokens=prompt,
      sampling=SamplingParams(max_tokens=output),
    )
    for number, (arrival_s, prompt, output) in enumerate(asked)
  ]
  return simulate(
    requests,
    parse_pools(f"{parts}:{policy}"),
    SchedulerOptions(token_budget=BUDGET, prefill_budget=rows * LONGEST),
    MODELS[model],
    lambda spec: latency,
    lambda spec: pages,
    LINKS["nvlink"],
    make_executor=make_executor,
  )


# Figure 7 -----------------------------------------------------------------------------------------

NAMES = "ABCD"
FIG7 = ((0.0, 256, 40), (0.0, 256, 40), (0.2, 2048, 20), (0.3, 2048, 20))


def lanes_of(log: EventLog) -> dict[str, list[tuple[float, float, str]]]:
  """What each request was computed for when."""
  lanes: dict[str, list[tuple[float, float, str]]] = {name: [] for name in NAMES}
  for step in each_step(log):
    for ids, kind in ((step.prefill_ids, "prefill"), (step.decode_ids, "decode")):
      for request_id in ids:
        lanes[NAMES[request_id]].append((step.start_s, step.end_s, kind))
  return lanes


def judge_fig7(
  records: Mapping[str, Mapping[int, RequestRecord]], decode_s: float, chunk_s: float
) -> list[Judged]:
  """Of stalls that hurt running requests, of requests that have to wait, and of neither."""
  gap_s = {system: max(max(own[i].itl_s) for i in (0, 1)) for system, own in records.items()}
  waits = {
    system: own[2].first_scheduled_s >= min(own[i].finish_s for i in (0, 1))
    for system, own in records.items()
  }
  ft, sarathi = "FasterTransformer", "Sarathi-Serve"
  stalls = {system: gap_s[system] >= STALL * decode_s for system in ("vLLM", "Orca")}
  no_stall = gap_s[ft] < STALL * decode_s
  bounded = gap_s[sarathi] <= 1.1 * chunk_s
  return [
    judged_share(
      stalls,
      f"A or B go without a token for {1e3 * gap_s['vLLM']:.0f} ms (vLLM) and "
      f"{1e3 * gap_s['Orca']:.0f} ms (Orca); a decode step takes {1e3 * decode_s:.0f} ms",
    ),
    Judged(
      HOLDS if no_stall and waits[ft] else IN_PART if no_stall or waits[ft] else NOT,
      f"A and B wait {1e3 * gap_s[ft]:.0f} ms at most, C {records[ft][2].ttft_s:.2f} s for its "
      f"first token.",
    ),
    Judged(
      HOLDS if bounded and not waits[sarathi] else IN_PART if bounded else NOT,
      f"A and B wait {1e3 * gap_s[sarathi]:.0f} ms at most, as long as a step of {BUDGET} tokens, "
      f"and C has its first token after {records[sarathi][2].ttft_s:.2f} s.",
    ),
  ]


def fig7(bench: Bench) -> Found:
  latency = latency_of("mistral-7b", "a100")
  logs = {
    system: _serve(policy, "mixed", "mistral-7b", latency, FIG7)
    for system, policy in POLICIES.items()
  }
  records = {system: request_records(log) for system, log in logs.items()}
  decode_s = decode_terms(latency, 2, 300).total_s
  chunk_s = mixed_terms(latency, BUDGET, 2, 300).total_s
  lanes = {system: lanes_of(log) for system, log in logs.items()}
  end_s = max(r.finish_s for own in records.values() for r in own.values())
  return Found(
    columns=("system", "request", "start_s", "end_s", "kind"),
    rows=[
      (system, name, *bar)
      for system, own in lanes.items()
      for name, bars in own.items()
      for bar in bars
    ],
    judged=judge_fig7(records, decode_s, chunk_s),
    draw=lambda path: draw(
      [Lanes(system, "s", own, (0, 1.02 * end_s)) for system, own in lanes.items()],
      path,
      "Sarathi-Serve, figure 7: A and B decode when C and D arrive (simulated)",
      columns=2,
    ),
    notes=[
      "The published figure is a schematic without numbers. Here A and B have 256 prompt and 40 "
      "output tokens at 0 s, C and D 2,048 and 20 at 0.2 and 0.3 s: Mistral-7B on an A100, budget "
      f"{BUDGET}.",
    ],
  )


# Figure 8 -----------------------------------------------------------------------------------------

BUBBLES = {
  "PB1": "prompts of other lengths",
  "PB2": "a prompt next to decodes",
  "PB3": "decodes of other contexts",
}
NUM_FIG8 = 16
LEAST_BUBBLE = 0.01  # of all idle time: a kind of bubble that there is


class Work(NamedTuple):
  """A stage at work on a step."""

  stage: int
  start_s: float
  end_s: float
  kind: str


def _watched(works: list[Work]) -> type[SimExecutor]:
  """An executor that notes in `works` when each stage of its pipeline is at work."""

  class Watched(SimExecutor):
    def _group_ends_s(self, plan, now_s):
      ends_s = super()._group_ends_s(plan, now_s)
      each_s = self._step_s(plan) / self.num_stages
      works.extend(Work(i, end_s - each_s, end_s, plan.kind) for i, end_s in enumerate(ends_s))
      return ends_s

  return Watched


def bubbles(works: Sequence[Work], until_s: float, least_s: float = 1e-3) -> dict[str, float]:
  """Seconds that stages idle before `until_s`, by what held them up; shorter gaps are none.

  That is what another stage works at for most of the gap. If it is a step with a prompt, and one
  with a prompt is next to the gap too, it is PB1; if only one of the two has a prompt, PB2; if
  neither has, PB3.
  """
  found = dict.fromkeys(BUBBLES, 0.0)
  for stage in {work.stage for work in works}:
    own = sorted((w for w in works if w.stage == stage), key=lambda w: w.start_s)
    others = [w for w in works if w.stage != stage]
    for before, after in itertools.pairwise(own):
      start_s, end_s = before.end_s, min(after.start_s, until_s)
      if end_s - start_s > least_s:
        held_up_by = max(others, key=lambda w: min(w.end_s, end_s) - max(w.start_s, start_s))
        beside = "decode" if before.kind == after.kind == "decode" else "prompt"
        with_prompts = (held_up_by.kind != "decode") + (beside != "decode")
        found[("PB3", "PB2", "PB1")[with_prompts]] += end_s - start_s
  return found


def fig8(bench: Bench) -> Found:
  deployment = DEPLOYMENTS["Falcon-180B"]
  config = deployment.config()
  latency = latency_of_config(config)
  prompts = itertools.cycle((4096, 512, 2048, 1024))
  asked = [(0.6 * i, next(prompts), 24 + 4 * (i % 4)) for i in range(NUM_FIG8)]
  idle, works_of, until = {}, {}, {}
  for system, policy in (("Orca", "orca"), ("Sarathi-Serve", "sarathi")):
    works: list[Work] = []
    log = _serve(policy, deployment.parts, config.model, latency, asked, _watched(works))
    works_of[system] = works
    # Until the last prompt is through there is always something to do.
    until[system] = max(work.end_s for work in works if work.kind != "decode")
    idle[system] = bubbles(works, until[system])
    if any(r.finish_s is None for r in request_records(log).values()):
      raise RuntimeError(f"{system} did not finish")
  share = {system: sum(idle[system].values()) / (2 * until[system]) for system in idle}
  prompt_s = prefill_terms(latency, 4096).total_s
  decode_s = decode_terms(latency, 32, 4096).total_s
  shown_s = min(10.0, *until.values())
  panels: list = [
    Lanes(
      system,
      "s",
      {
        f"stage {stage + 1}": [w[1:] for w in works if w.stage == stage and w.start_s < shown_s]
        for stage in range(2)
      },
      (0, shown_s),
    )
    for system, works in works_of.items()
  ]
  panels.append(
    Bars(
      "Idle while there is work", "share of both stages' time", list(BUBBLES),
      {system: [s / (2 * until[system]) for s in own.values()] for system, own in idle.items()},
    )
  )  # fmt: skip
  return Found(
    columns=("system", "bubble", "between", "idle_s", "share"),
    rows=[
      (system, name, BUBBLES[name], seconds, seconds / (2 * until[system]))
      for system, own in idle.items()
      for name, seconds in own.items()
    ],
    judged=[
      *judge_fig8(idle["Orca"], share),
      Judged(
        HOLDS if prompt_s >= 3 * decode_s else NOT,
        f"A prompt of 4,096 tokens keeps a stage busy for {prompt_s / 2:.2f} s, a decode step of "
        f"32 rows for {decode_s / 2:.2f} s: so much longer a stage idles next to it. Published are "
        f"{published.FALCON_PROMPT_S} and {published.FALCON_DECODE_S} s, of which the paper takes "
        f"the difference; the latter is also what its SLO of 1 s implies for both stages together. "
        f"All-reduces, over PCIe between pairs, are {latency_share(latency):.0%} of the prompt.",
      ),
    ],
    compared=[
      Compared("prompt of 4k, a stage", published.FALCON_PROMPT_S, prompt_s / 2, "s"),
      Compared("decode step of 32, a stage", published.FALCON_DECODE_S, decode_s / 2, "s"),
    ],
    draw=lambda path: draw(
      panels, path, "Sarathi-Serve, figure 8: Falcon-180B in two stages (simulated)"
    ),
    notes=[
      "The published figure is a schematic of four requests. Here 16 come every 0.6 s with prompts "
      "of 4,096, 512, 2,048 and 1,024 tokens in turn; idle time is counted until the last prompt "
      "is through, by what the other stage works at meanwhile.",
    ],
  )


def latency_share(latency: LatencyModel) -> float:
  """Of a prompt of 4,096 tokens, what its all-reduces take."""
  terms = prefill_terms(latency, 4096)
  return terms.all_reduce_s / terms.total_s


def judge_fig8(orca: Mapping[str, float], share: Mapping[str, float]) -> list[Judged]:
  """Of the three kinds of bubbles in Orca's pipeline, and of what chunks leave of them."""
  ratio = share["Sarathi-Serve"] / share["Orca"] if share["Orca"] else 1.0
  return [
    judged_share(
      {name: seconds >= LEAST_BUBBLE * sum(orca.values()) for name, seconds in orca.items()},
      "Orca's stages idle "
      + ", ".join(f"{s:.2f} s as {name}" for name, s in orca.items())
      + f"; a kind has to be {LEAST_BUBBLE:.0%} of them",
    ),
    Judged(
      HOLDS if ratio <= 0.5 else IN_PART if ratio <= 0.9 else NOT,
      f"Stages idle {share['Orca']:.0%} of the time under Orca and {share['Sarathi-Serve']:.0%} "
      f"under Sarathi-Serve, {ratio:.2f} times as much (half holds).",
    ),
  ]


FIGURES = (
  Figure(
    name="sarathi/fig7",
    title="Four requests under four schedulers",
    kind="simulated",
    claims=(
      "vLLM and Orca stall running decodes while new prompts are prefilled.",
      "FasterTransformer stalls nobody, and new requests wait until the batch is done.",
      "Sarathi-Serve does neither: decodes go on beside chunks of the new prompts.",
    ),
    make=fig7,
  ),
  Figure(
    name="sarathi/fig8",
    title="Bubbles of a pipeline, Falcon-180B in two stages",
    kind="simulated",
    claims=(
      "Orca's pipeline has bubbles of three kinds: unlike prompts, prompts next to decodes, unlike "
      "contexts of decodes.",
      "Steps of equal tokens leave few of them.",
      "A long prompt next to decodes idles a stage for several decode steps.",
    ),
    make=fig8,
    configs=(DEPLOYMENTS["Falcon-180B"].path,),
  ),
)
