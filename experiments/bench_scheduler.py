"""What the scheduler itself costs: plan and commit of a step, no device, no loop, one core.

    python -m experiments.bench_scheduler [--out=DIR]

Steps of decodes alone and steps that mix in a chunk, with the prefix cache on, by how many
sequences run and how many wait. Prints a table and a profile of what is left, writes `bench.json`.
"""

from __future__ import annotations

import cProfile
import gc
import io
import itertools
import json
import os
import pathlib
import platform
import pstats
import statistics
import time

from absl import flags

from experiments.program import main, out_folder, whole_file
from pdjax.core.plan import StepPlan, StepResult
from pdjax.core.request import Request, SamplingParams
from pdjax.core.sequence import Sequence
from pdjax.scheduling.pages import PageConfig
from pdjax.scheduling.policies import make_policy
from pdjax.scheduling.scheduler import Scheduler, SchedulerConfig

PROMPT_TOKENS, CHUNK_TOKENS, PAGE_SIZE = 480, 64, 16
NUM_STEPS = 300
CASES = ((64, 1_000), (256, 0), (256, 1_000), (256, 100_000))  # running, waiting


def make_scheduler(num_running: int, num_waiting: int, *, mixed: bool) -> Scheduler:
  """So many decodes running and prompts waiting.

  Their prompts begin alike, so they share pages. All rows are taken, so that nobody is admitted;
  with `mixed`, one more row has a prompt too long to end within the measurement, a chunk a step.
  """
  pages_per_row = -(-(PROMPT_TOKENS + 4 * NUM_STEPS) // PAGE_SIZE)
  if mixed:
    pages_per_row = max(pages_per_row, -(-4 * NUM_STEPS * CHUNK_TOKENS // PAGE_SIZE))
  num_rows = num_running + mixed
  pages = PageConfig(
    num_rows=num_rows,
    page_size=PAGE_SIZE,
    pages_per_row=pages_per_row,
    num_pages=num_rows * pages_per_row,
  )
  limits = SchedulerConfig(token_budget=num_running + CHUNK_TOKENS, prefix_cache=True)
  scheduler = Scheduler(make_policy("sarathi"), pages, limits)
  numbers, common = itertools.count(), tuple(range(PROMPT_TOKENS // 2))  # a prefix of all prompts

  def add(num_prompt_tokens: int) -> None:
    number = next(numbers)
    scheduler.add(
      Sequence(
        Request(
          request_id=number,
          arrival_s=0.0,
          num_prompt_tokens=num_prompt_tokens,
          prompt_ids=common + tuple(range(number, number + num_prompt_tokens - len(common))),
          sampling=SamplingParams(max_tokens=4 * NUM_STEPS),
        )
      )
    )

  for i in range(num_running):
    add(PROMPT_TOKENS - i % PAGE_SIZE)  # so that every step fills the pages of a sixteenth of them
  while scheduler.waiting or scheduler.prefilling:
    step(scheduler)
  if mixed:
    add(4 * NUM_STEPS * CHUNK_TOKENS - 4 * NUM_STEPS)
  for _ in range(num_waiting):
    add(PROMPT_TOKENS)
  return scheduler


def results(plan: StepPlan) -> StepResult:
  num_tokens = sum(s.emits_token for s in plan.prefills) + len(plan.decodes)
  return StepResult(token_ids=tuple(range(num_tokens)))


def step(scheduler: Scheduler) -> tuple[StepPlan, float, float]:
  """The plan of one step, and the seconds that it took to plan and to commit."""
  start_s = time.perf_counter()
  plan = scheduler.next_step()
  planned_s = time.perf_counter()
  result = results(plan)
  begin_s = time.perf_counter()
  scheduler.commit(plan, result)
  return plan, planned_s - start_s, time.perf_counter() - begin_s


def measure(num_running: int, num_waiting: int, *, mixed: bool) -> dict:
  scheduler = make_scheduler(num_running, num_waiting, mixed=mixed)
  gc.collect()
  steps = [step(scheduler) for _ in range(NUM_STEPS)]
  plans = [plan for plan, _, _ in steps]
  assert all(len(plan.decodes) == num_running for plan in plans)
  assert all(bool(plan.prefills) == mixed for plan in plans)
  totals = [plan_s + commit_s for _, plan_s, commit_s in steps]
  return {
    "running": num_running,
    "waiting": num_waiting,
    "kind": plans[0].kind,
    "plan_s": statistics.median(s for _, s, _ in steps),
    "commit_s": statistics.median(s for _, _, s in steps),
    "step_s": statistics.median(totals),
    "step_p99_s": statistics.quantiles(totals, n=100)[-1],
  }


def profile(num_running: int, num_waiting: int) -> str:
  """The functions that the steps of one case spend their time in."""
  scheduler = make_scheduler(num_running, num_waiting, mixed=True)
  profiler = cProfile.Profile()
  profiler.enable()
  for _ in range(NUM_STEPS):
    step(scheduler)
  profiler.disable()
  text = io.StringIO()
  pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(12)
  lines = text.getvalue().splitlines()
  first = next(i for i, line in enumerate(lines) if "ncalls" in line)
  root = str(pathlib.Path(__file__).resolve().parent.parent) + os.sep
  return "\n".join(line.replace(root, "") for line in lines[first:] if line.strip())


def prepare() -> pathlib.Path:
  return out_folder("bench_scheduler")


def run(out: pathlib.Path) -> int:
  rows = [measure(n, w, mixed=mixed) for mixed in (False, True) for n, w in CASES]
  result = {
    "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    "python": platform.python_version(),
    "load_average": os.getloadavg()[0],
    "date": time.strftime("%Y-%m-%d %H:%M"),
    "steps": rows,
  }
  print(table(result))
  print(f"\na profile of {NUM_STEPS} mixed steps at 256 running, 1,000 waiting (it slows them):")
  print(profile(256, 1_000))
  out.mkdir(parents=True, exist_ok=True)
  with whole_file(out / "bench.json") as part:
    part.write_text(json.dumps(result, indent=2) + "\n")
  print(f"wrote {out / 'bench.json'}")
  return 0


def table(result: dict) -> str:
  lines = [
    f"Python {result['python']}, {result['machine']}, load {result['load_average']:.1f}, "
    f"{result['date']}; microseconds, medians of {NUM_STEPS} steps",
    f"{'step':8}{'running':>9}{'waiting':>9}{'plan':>8}{'commit':>8}{'both':>8}{'p99':>8}",
  ]
  for row in result["steps"]:
    times = "".join(
      f"{row[name] * 1e6:8.0f}" for name in ("plan_s", "commit_s", "step_s", "step_p99_s")
    )
    lines.append(f"{row['kind']:8}{row['running']:>9,}{row['waiting']:>9,}{times}")
  return "\n".join(lines)


if __name__ == "__main__":
  flags.DEFINE_string("out", None, "folder for bench.json; default: runs/bench_scheduler-TIME")
  main(prepare, run)
