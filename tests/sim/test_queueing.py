"""The loop in virtual time is a queue: with one row and constant steps it is M/D/1.

The mean wait of M/D/1 is rho D / (2 (1 - rho)) (Pollaczek-Khinchine; DistServe, section 3.1). With
one row, prompts of one step and one output token, the simulator must give it within the statistical
error of so many requests: waits are correlated, so the error is that of the means of batches.
"""

import math
import random
import statistics

import pytest

from pdjax.core.clock import VirtualClock, to_ticks
from pdjax.core.events import EventLog
from pdjax.core.request import Request, SamplingParams
from pdjax.metrics.latency import phases, request_records
from pdjax.scheduling.pages import PageConfig
from pdjax.scheduling.policies import make_policy
from pdjax.scheduling.scheduler import Scheduler, SchedulerConfig
from pdjax.serving.cluster import Cluster, Pool
from pdjax.serving.inbox import Inbox
from pdjax.serving.loop import serve
from pdjax.sim.hardware import Link
from pdjax.sim.sim_executor import SimExecutor

STEP_S = 2.0**-6
NUM_REQUESTS, NUM_BATCHES = 20_000, 20


def waits_s(rho, policy, steps_in_flight):
  rng = random.Random(12)
  now_s, requests = 0.0, []
  for i in range(NUM_REQUESTS):
    now_s += rng.expovariate(rho / STEP_S)
    requests.append(
      Request(
        request_id=i,
        arrival_s=to_ticks(now_s),
        num_prompt_tokens=4,
        sampling=SamplingParams(max_tokens=1),
      )
    )
  pages = PageConfig(num_rows=1, page_size=4, pages_per_row=1, num_pages=1)
  scheduler = Scheduler(make_policy(policy), pages, SchedulerConfig(token_budget=4, watermark=0.0))
  link = Link(name="none", latency_s=0.0, bytes_per_s=1.0)
  executor = SimExecutor(step_s=lambda plan: STEP_S, link=link, bytes_per_token=1)
  log = EventLog()
  for _ in serve(
    Cluster([Pool("mixed0", "mixed", scheduler, executor)]),
    Inbox(requests),
    VirtualClock(),
    log,
    steps_in_flight=steps_in_flight,
  ):
    pass
  parts = [phases(record) for record in request_records(log).values()]
  assert all(p.prefill_s == STEP_S and p.decode_s == 0 for p in parts)
  return [p.queue_s for p in parts]


@pytest.mark.parametrize(
  ("rho", "policy", "steps_in_flight"),
  [
    (0.3, "sarathi", 1),
    pytest.param(0.6, "prefill_first", 1, marks=pytest.mark.slow),
    pytest.param(0.8, "sarathi", 1, marks=pytest.mark.slow),
    (0.8, "prefill_first", 2),
  ],
)
def test_the_mean_wait_is_that_of_m_d_1(rho, policy, steps_in_flight):
  waits = waits_s(rho, policy, steps_in_flight)
  size = NUM_REQUESTS // NUM_BATCHES
  means = [statistics.fmean(waits[i : i + size]) for i in range(0, NUM_REQUESTS, size)]
  error_s = statistics.stdev(means) / math.sqrt(NUM_BATCHES)
  mean_s, expected_s = statistics.fmean(waits), rho * STEP_S / (2 * (1 - rho))
  assert abs(mean_s - expected_s) < 3 * error_s
  # Sharp enough to tell: 3 errors are under a fifth, and the wait of M/M/1 is twice as long.
  assert 3 * error_s < 0.2 * expected_s
