"""Serves without end while pools are killed and requests cancelled; checks that nothing is lost.

    python -m experiments.soak [--pools=prefill:prefill_chunks,2xdecode] [--noprocesses]
      [--operations=1000] [--kills=0.06] [--seed=0] [--out=DIR]

An operation is one of: SIGKILL of a pool's process, at a random moment of its service or of its
start; a cancel of a request, in the state that was cancelled least; a request with a time-out that
it may not meet; another role for a pool. Checked all the while: every request ends once, for a
reason that it was given; its tokens are those of one mixed pool that served them before, none
missing or repeated; schedulers and cluster add up. Checked at the end: all rows and pages are back,
workers hold nothing and compiled nothing while they served, and this process has as many threads,
files and children as before. Writes soak.json. Exit status 1: something was not as it must be; 2:
wrong input; 130: interrupted, with the counts until then. With --operations=1040
--kills=0.04 --gap_s=0.4 it took 8 minutes on two busy cores (42 kills; a restart took 14 s).
"""

from __future__ import annotations

import collections
import dataclasses
import gc
import json
import math
import os
import pathlib
import platform
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from absl import flags

from experiments.program import FLAGS, Progress, main, out_folder, whole_file
from experiments.serving import TIE_MARGINS, Checked, check
from pdjax.config import (
  POOLS_FORM,
  CacheConfig,
  ExperimentConfig,
  SchedulerOptions,
  WorkloadConfig,
  num_devices_of,
  override,
  parse_pools,
)
from pdjax.core.events import EventLog, PoolChanged
from pdjax.core.request import Request, SamplingParams
from pdjax.core.sequence import State
from pdjax.deployment import in_role, make_cluster
from pdjax.remote.executor import RemoteExecutor
from pdjax.scheduling.routing import ROLES
from pdjax.serving.cluster import Cluster
from pdjax.serving.executor import Executor, PoolLost
from pdjax.serving.inbox import Inbox
from pdjax.serving.loop import Turn, serve
from pdjax.workloads.lengths import Mix

POOLS = "prefill:prefill_chunks,2xdecode"
STATES = ("queued", "running", "streaming", "moving", "ready")  # a cancel must hit each of them
OTHERS = {"cancel": 0.55, "time-out": 0.25, "role": 0.2}  # shares of what is no kill
STUCK_S = 240.0  # a request that takes so long hangs
LOOK_EVERY = 50  # operations from one look at the workers to the next
NUM_PROMPTS = 48
MOST_KILL_DELAY_S = 0.05  # from the turn that decides it


class Violation(Exception):
  """Something that must always hold does not; the message says what."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
  """A request that was submitted, and what it must give."""

  prompt_ids: tuple[int, ...]
  expected: tuple[int, ...]
  got: list[int] = dataclasses.field(default_factory=list)


class Soak:
  """One run: feeds requests, disturbs, checks. Owns the inbox; one thread calls it."""

  def __init__(
    self,
    cluster: Cluster,
    inbox: Inbox,
    rng: random.Random,
    prompts: list[tuple[int, ...]],
    expected: list[tuple[int, ...]],
    *,
    num_operations: int,
    kill_share: float,
    num_open: int,
    gap_s: float,
    most_s: float = math.inf,
  ):
    self.cluster, self.inbox, self.rng = cluster, inbox, rng
    self._prompts, self._expected = prompts, expected
    self._num_open, self._gap_s, self._most_s = num_open, gap_s, most_s
    num_kills = round(kill_share * num_operations)
    others = rng.choices(list(OTHERS), list(OTHERS.values()), k=num_operations - num_kills)
    self._todo = ["kill"] * num_kills + others
    rng.shuffle(self._todo)
    self._kills_due = 0
    self._next_s = 0.0
    self._open: dict[int, Asked] = {}
    self._cancelled: set[int] = set()
    self._killed: set[int] = set()  # process ids
    self._start_killed: set[str] = set()  # pools whose present start was disturbed
    self._leaves_one = True
    self._timers: list[threading.Timer] = []
    self.num_requests = self.num_tokens = self.num_looks = 0
    self.ties: list[tuple[int, ...]] = []  # what came before a token that differs
    self.operations: collections.Counter[str] = collections.Counter()
    self.cancelled_in: collections.Counter[str] = collections.Counter()
    self.killed_while: collections.Counter[str] = collections.Counter()
    self.ends: collections.Counter[str] = collections.Counter()
    self._roles = {pool.name: pool.role for pool in cluster.pools}

  @property
  def is_done(self) -> bool:
    return not self._todo and not self._kills_due

  @property
  def remotes(self) -> list[RemoteExecutor]:
    pools = (pool.executor for pool in self.cluster.pools)
    return [executor for executor in pools if isinstance(executor, RemoteExecutor)]

  def step(self, turn: Turn) -> None:
    """Checks what a turn did, and does something to the next one.

    Raises:
      Violation: what was wrong.
    """
    self._check_turn(turn)
    if self.is_done or turn.now_s > self._most_s:
      self.inbox.close()
      return
    while len(self._open) < self._num_open:
      self._ask(turn.now_s, STUCK_S)
    if turn.now_s >= self._next_s and self._todo:
      self._next_s = turn.now_s + self.rng.expovariate(1 / self._gap_s)
      self._disturb(turn)
    if self._kills_due and self._kill():
      self._kills_due -= 1

  # What it does ----------------------------------------------------------------------------------

  def _ask(self, now_s: float, timeout_s: float) -> None:
    which = self.rng.randrange(len(self._prompts))
    prompt_ids, expected = self._prompts[which], self._expected[which]
    expected = expected[: self.rng.randint(1, len(expected))]
    request_id = self.num_requests
    self.num_requests += 1
    self._open[request_id] = Asked(prompt_ids=prompt_ids, expected=expected)
    self.inbox.submit(
      Request(
        request_id=request_id,
        arrival_s=now_s,
        num_prompt_tokens=len(prompt_ids),
        prompt_ids=prompt_ids,
        sampling=SamplingParams(max_tokens=len(expected)),
        timeout_s=timeout_s,
      )
    )

  def _disturb(self, turn: Turn) -> None:
    operation = self._todo[-1]
    if operation == "cancel" and not self._cancel():
      return  # nobody is there to be cancelled: at the next turn
    self._todo.pop()
    match operation:
      case "kill":
        self._kills_due += 1  # when there is one to be killed
        return
      case "time-out":
        self._ask(turn.now_s, self.rng.uniform(0.005, 0.5))
      case "role":
        pool = self.rng.choice(self.cluster.pools)
        others = [role for role in ROLES if role != (pool.next_role or pool.role)]
        role = self._roles[pool.name]  # back to its own as often as to another
        self.inbox.change_role(
          pool.name, role if role in others and self.rng.random() < 0.7 else self.rng.choice(others)
        )
    self._count(operation)

  def _count(self, operation: str) -> None:
    self.operations[operation] += 1
    if self.operations.total() % LOOK_EVERY == 0:
      self._look()

  def _cancel(self) -> bool:
    states = states_of(self.cluster)
    found = {state: ids - self._cancelled for state, ids in states.items()}
    present = [state for state, ids in found.items() if ids]
    if not present:
      return False
    state = min(present, key=lambda state: (self.cancelled_in[state], self.rng.random()))
    request_id = self.rng.choice(sorted(found[state]))
    self._cancelled.add(request_id)
    self.cancelled_in[state] += 1
    self.inbox.cancel(request_id)
    return True

  def _kill(self) -> bool:
    """Kills a process soon, at a moment that no turn knows of; False: none may be now.

    A start is disturbed once at most: one that fails every time makes a pool be gone, rightly. Most
    kills leave a pool to serve, as what happens while none does is soon known.
    """
    if self._leaves_one and sum(executor.is_up for executor in self.remotes) < 2:
      return False
    able = []
    for executor in self.remotes:
      if executor.is_up:
        self._start_killed.discard(executor.name)
      elif executor.name in self._start_killed:
        continue
      process_id = executor.process_id
      if process_id is not None and process_id not in self._killed:
        able.append((executor, process_id))
    if not able:
      return False
    executor, process_id = self.rng.choice(able)
    if not executor.is_up:
      self._start_killed.add(executor.name)
    self.killed_while["serving" if executor.is_up else "starting"] += 1
    self._killed.add(process_id)
    self._leaves_one = self.rng.random() < 0.8
    delay_s = self.rng.uniform(0, MOST_KILL_DELAY_S)
    timer = threading.Timer(delay_s, os.kill, (process_id, signal.SIGKILL))
    self._timers = [t for t in self._timers if t.is_alive()] + [timer]
    timer.start()
    self._count("kill")
    return True

  def settle(self) -> None:
    """Waits for kills under way."""
    for timer in self._timers:
      timer.join()

  # What it checks --------------------------------------------------------------------------------

  def _check_turn(self, turn: Turn) -> None:
    for request_id, token_id in turn.tokens:
      asked = self._open.get(request_id)
      if asked is None:
        raise Violation(f"request {request_id} had ended, and got the token {token_id}")
      self.num_tokens += 1
      self._check_token(request_id, asked, token_id)
    for request_id, reason in (*turn.ended, *turn.failed):
      asked = self._open.pop(request_id, None)
      if asked is None:
        raise Violation(f"request {request_id} ended twice, or was never asked: {reason}")
      self._check_end(request_id, asked, reason)
    try:
      self.cluster.check()
    except AssertionError as error:
      raise Violation(f"the cluster does not add up: {error!r}") from error

  def _check_token(self, request_id: int, asked: Asked, token_id: int) -> None:
    position = len(asked.got)
    if position >= len(asked.expected):
      raise Violation(f"request {request_id}: more than the {position} tokens it asked for")
    is_same = asked.got == list(asked.expected[:position])
    asked.got.append(token_id)
    if is_same and token_id != asked.expected[position]:  # the end says whether it is a tie
      self.ties.append((*asked.prompt_ids, *asked.got[:-1]))

  def _check_end(self, request_id: int, asked: Asked, reason: str) -> None:
    kind = "timed out" if reason.startswith("timed out") else reason
    self.ends[kind] += 1
    if request_id in self._cancelled and kind != "cancelled":
      raise Violation(f"request {request_id} was cancelled, and ended as: {reason}")
    if kind not in ("length", "cancelled", "timed out") or reason == f"timed out after {STUCK_S} s":
      raise Violation(f"request {request_id} ended as: {reason}")
    if kind == "length" and len(asked.got) != len(asked.expected):
      raise Violation(
        f"request {request_id} finished with {len(asked.got)} tokens of {len(asked.expected)}"
      )

  def _look(self) -> None:
    """At the workers that are up."""
    for executor in self.remotes:
      try:
        if not executor.is_up:
          continue
        held = executor.holds()
      except PoolLost:
        continue
      self.num_looks += 1
      if held["late_compilations"]:
        raise Violation(f"{executor.name} compiled {held['late_compilations']} times as it served")

  def check_end(self) -> None:
    """That nothing is left of all that was asked.

    Raises:
      Violation: what is left.
    """
    if self._open:
      raise Violation(f"requests never ended: {sorted(self._open)}")
    cluster = self.cluster
    left = {"outbox": cluster.outbox, "transfers": cluster.transfers}
    left |= {"prefetches": cluster.prefetches}
    for pool in cluster.pools:
      scheduler, pages = pool.scheduler, pool.scheduler.pages
      for name in ("waiting", "running", "leaving", "pages_owed"):
        left[f"{pool.name}: {name}"] = getattr(scheduler, name)
      left[f"{pool.name}: in flight"] = pool.in_flight
      left[f"{pool.name}: rows"] = pages.held_rows
      left[f"{pool.name}: pages"] = range(pages.config.num_pages - pages.num_free_pages)
      for name in ("num_swapped_tokens", "prefill_tokens_left", "output_tokens_left"):
        left[f"{pool.name}: {name}"] = range(getattr(scheduler, name))
    left = {name: len(items) for name, items in left.items() if items}
    if left:
      raise Violation(f"left at the end: {left}")


def states_of(cluster: Cluster) -> dict[str, set[int]]:
  """The requests that have not ended, by what is being done with them."""
  states: dict[str, set[int]] = collections.defaultdict(set)
  for pool in cluster.pools:
    for seq in pool.scheduler.waiting.values():
      states[seq.state.value].add(seq.request_id)
    states["running"] |= pool.scheduler.running.keys()
  for prefetch in cluster.prefetches:
    live = (seq for seq in prefetch.seqs if seq.state is not State.ENDED)
    states["fetching"] |= {seq.request_id for seq in live}
  states["ready"] |= {seq.request_id for _, seq in cluster.outbox}
  for transfer in cluster.transfers:
    if transfer.seq.state is not State.ENDED and not transfer.is_abandoned:
      states["streaming" if transfer.is_ahead else "moving"].add(transfer.seq.request_id)
  states["running"] -= states["streaming"]
  return states


def restarts_s(log: EventLog) -> list[float]:
  """How long pools were down, each time one came back."""
  lost_s: dict[str, float] = {}
  took_s = []
  for event in log:
    if isinstance(event, PoolChanged):
      if event.reason.startswith("lost"):
        lost_s[event.pool] = event.time_s
      elif event.pool in lost_s and event.is_up and event.reason == "it is back":
        took_s.append(event.time_s - lost_s.pop(event.pool))
  return took_s


# This process and the workers ---------------------------------------------------------------------


def resources() -> dict[str, int]:
  """What this process has of the system's."""
  tasks = list(pathlib.Path("/proc/self/task").iterdir())
  children = (len((task / "children").read_text().split()) for task in tasks if task.exists())
  return {
    "threads": len(tasks),
    "files": len(os.listdir("/proc/self/fd")),
    "children": sum(children),
    "shared_memory": len(os.listdir("/dev/shm")),
  }


def check_resources(before: dict[str, int], timeout_s: float = 15.0) -> dict[str, int]:
  """What there is now, as soon as it is no more than before: threads take a moment to end.

  Raises:
    Violation: it stays more.
  """
  end_s = time.monotonic() + timeout_s
  while True:
    gc.collect()
    now = resources()
    more = {name: (before[name], n) for name, n in now.items() if n > before[name]}
    if not more:
      return now
    if time.monotonic() > end_s:
      raise Violation(f"this process has more than before (before, after): {more}")
    time.sleep(0.1)


def holdings(executors: Iterable[Executor]) -> list[dict[str, int]]:
  """What pools hold when nothing runs."""
  held = []
  for executor in executors:
    if isinstance(executor, RemoteExecutor):
      executor.reset()
      held.append(executor.holds())
    else:
      import jax

      executor.reset()
      gc.collect()
      arrays = jax.live_arrays()
      num_traces = sum(executor.num_traces.values())
      held.append({**executor.num_kept, "arrays": len(arrays), "traces": num_traces})
  return held


def check_holdings(
  before: list[dict[str, int]], executors: list[Executor], timeout_s: float = 5.0
) -> list[dict[str, int]]:
  """What they hold now.

  Raises:
    Violation: it is more than before, and stays so.
  """
  end_s = time.monotonic() + timeout_s
  while True:
    after = holdings(executors)
    more = [
      f"pool {i}: {name} {old[name]} before, {new[name]} after"
      for i, (old, new) in enumerate(zip(before, after, strict=True))
      for name in new
      if new[name] > old[name]
    ]
    if not more:
      return after
    if time.monotonic() > end_s:
      raise Violation(f"pools hold more than before: {'; '.join(more)}")
    time.sleep(0.1)


# The program --------------------------------------------------------------------------------------


def prepare() -> Checked:
  for name, lowest in (("operations", 1), ("requests", 1)):
    if getattr(FLAGS, name) < lowest:
      raise ValueError(f"--{name}={getattr(FLAGS, name)} must be at least {lowest}")
  if not 0 <= FLAGS.kills <= 1:
    raise ValueError(f"--kills={FLAGS.kills} must be in [0, 1]")
  for name in ("gap_s", "most_s"):
    if not getattr(FLAGS, name) > 0:
      raise ValueError(f"--{name}={getattr(FLAGS, name)} must be positive")
  config = ExperimentConfig(
    model="tiny",
    processes=FLAGS.processes,
    strategies=(),
    pools=FLAGS.pools,
    num_devices=num_devices_of(parse_pools(FLAGS.pools)),
    workload=WorkloadConfig(
      lengths=Mix(
        prompt_tokens=(3, 20), long_prompt_tokens=(36, 44), output_tokens=(1, 20), long_every=2
      ),
      chat=False,
      seed=FLAGS.seed,
    ),
    # Few rows, so that requests wait in every place where they can; short ones, so that there are
    # few shapes for a process that is started again.
    cache=CacheConfig(num_rows=4, page_size=8),
    scheduler=SchedulerOptions(token_budget=16, changes_roles=True),
  )
  return check(override(config, FLAGS.set), out_folder("soak"))


def run(checked: Checked) -> int:
  """Soaks, prints and writes what happened; returns the exit status."""
  config, world, progress = checked.config, checked.world, Progress()
  result: dict[str, Any] = {
    "date": time.strftime("%Y-%m-%d %H:%M:%S"),
    "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    "pools": config.pools,
    "processes": config.processes,
    "seed": FLAGS.seed,
  }
  status, start_s = 0, time.monotonic()
  with tempfile.TemporaryDirectory() as folder:
    if config.processes:  # what one process compiled, those that are started again only read
      os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", folder)
      os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
      os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
    try:
      world.prepare(progress.update)
      _soak(checked, result, progress)
    except Violation as error:
      status, result["violation"] = 1, str(error)
    except KeyboardInterrupt:
      status = 130
    finally:
      world.close()
      children = resources()["children"]
    if children and not status:
      status, result["violation"] = 1, f"{children} processes are left after the end"
  result |= {"interrupted": status == 130, "took_s": time.monotonic() - start_s}
  print(summary(result))
  checked.out.mkdir(parents=True, exist_ok=True)
  with whole_file(checked.out / "soak.json") as path:
    path.write_text(json.dumps(result, indent=1) + "\n")
  print(f"wrote {checked.out / 'soak.json'}", flush=True)
  return status


def _soak(checked: Checked, result: dict[str, Any], progress: Progress) -> None:
  """Fills `result` as far as it comes."""
  config, world = checked.config, checked.world
  lengths = checked.traffic.lengths.pairs(NUM_PROMPTS, np.random.default_rng(FLAGS.seed))
  prompts = world.prompts(lengths, FLAGS.seed, chat=False, blocks=None)
  progress.update("tokens of one mixed pool")
  expected = reference(checked, prompts, [output for _, output in lengths])
  specs = config.pools_of(config.pools)

  def new_cluster() -> Cluster:
    return make_cluster(specs, config.scheduler, world.pages_of, world.executor, world.step_time,
                        hand_off=config.hand_off)  # fmt: skip

  executors = [pool.executor for pool in new_cluster().pools]
  held = holdings(executors)
  gc.collect()
  before = resources()
  log, inbox, clock = EventLog(), Inbox(is_open=True), world.clock()
  soak = Soak(
    new_cluster(),
    inbox,
    random.Random(FLAGS.seed),
    prompts,
    expected,
    num_operations=FLAGS.operations,
    kill_share=FLAGS.kills if config.processes else 0.0,
    num_open=FLAGS.requests,
    gap_s=FLAGS.gap_s,
    most_s=FLAGS.most_s,
  )
  turns = serve(soak.cluster, inbox, clock, log, steps_in_flight=config.scheduler.steps_in_flight)
  try:
    for turn in turns:
      soak.step(turn)
      progress.update(
        f"{soak.operations.total()} of {FLAGS.operations} operations "
        f"({soak.operations['kill']} kills), {soak.num_requests} requests, "
        f"{soak.num_tokens} tokens, {turn.now_s:.0f} s"
      )
    soak.settle()
    soak.check_end()
    for executor in soak.remotes:
      executor.start()  # unless it is up
      for _ in executor.wait_until_up():
        pass
    result["workers"] = check_holdings(held, executors)
    del turns, turn, clock  # and with it its threads
    inbox.wake = lambda: None
    result["resources"] = {"before": before, "after": check_resources(before)}
    _check_ties(soak.ties, world.top2_margin, world.bytes_per_value)
  finally:
    times_s = sorted(restarts_s(log))
    result |= {
      "operations": dict(soak.operations),
      "cancelled_in": dict(soak.cancelled_in),
      "killed_while": dict(soak.killed_while),
      "ends": dict(soak.ends),
      "num_requests": soak.num_requests,
      "num_tokens": soak.num_tokens,
      "num_ties": len(soak.ties),
      "num_looks": soak.num_looks,
      "restarts_s": [round(took_s, 2) for took_s in times_s],
      "events": dict(collections.Counter(type(event).__name__ for event in log)),
      "pool_changes": dict(
        collections.Counter(e.reason for e in log if isinstance(e, PoolChanged)).most_common(30)
      ),
    }


def reference(
  checked: Checked, prompts: list[tuple[int, ...]], num_tokens: list[int]
) -> list[tuple[int, ...]]:
  """The tokens that the first pool gives when it is mixed and serves alone."""
  config, world = checked.config, checked.world
  alone = [in_role(config.pools_of(config.pools)[0], "mixed")]
  cluster = make_cluster(alone, config.scheduler, world.pages_of, world.executor, world.step_time)
  inbox = Inbox(
    Request(
      request_id=i,
      arrival_s=0.0,
      num_prompt_tokens=len(ids),
      prompt_ids=ids,
      sampling=SamplingParams(max_tokens=n),
    )
    for i, (ids, n) in enumerate(zip(prompts, num_tokens, strict=True))
  )
  tokens: list[list[int]] = [[] for _ in prompts]
  for turn in serve(cluster, inbox, world.clock(), EventLog()):
    if turn.failed:
      raise Violation(f"one mixed pool failed: {turn.failed}")
    for request_id, token_id in turn.tokens:
      tokens[request_id].append(token_id)
  return [tuple(own) for own in tokens]


def _check_ties(
  contexts: list[tuple[int, ...]],
  top2_margin: Callable[[tuple[int, ...]], float],
  bytes_per_value: int,
) -> None:
  """Raises Violation for a token that differs where one was clearly the likeliest."""
  for context in sorted(set(contexts)):
    margin = top2_margin(context)
    if margin > TIE_MARGINS[bytes_per_value]:
      raise Violation(
        f"{len(contexts)} tokens differ from one mixed pool's, one of them after {len(context)} "
        f"tokens, where the likeliest is {margin:.2g} ahead"
      )


def summary(result: dict[str, Any]) -> str:
  """For a person."""
  lines = [f"{result['date']}, {result['machine']}: {result['pools']}, {result['took_s']:.0f} s"]
  for name in ("operations", "cancelled_in", "killed_while", "ends"):
    counts = result.get(name, {})
    if counts:
      each = ", ".join(f"{n} {what}" for what, n in sorted(counts.items()))
      lines.append(f"{name.replace('_', ' ')}: {each} ({sum(counts.values())})")
  if "num_requests" in result:
    missed = [state for state in STATES if not result["cancelled_in"].get(state)]
    lines.append(
      f"{result['num_requests']} requests, {result['num_tokens']} tokens, {result['num_ties']} at "
      f"ties; never cancelled in: {', '.join(missed) or 'no state'}"
    )
  if times_s := result.get("restarts_s"):
    middle_s = times_s[len(times_s) // 2]
    lines.append(
      f"{len(times_s)} restarts: {times_s[0]:.1f} s, median {middle_s:.1f}, {times_s[-1]:.1f}"
    )
  for name in ("resources", "workers"):
    if name in result:
      lines.append(f"{name}: {result[name]}")
  if "violation" in result:
    lines.append(f"FAILED: {result['violation']}")
  elif not result["interrupted"]:
    lines.append("nothing was lost, repeated or left")
  return "\n".join(lines)


if __name__ == "__main__":
  flags.DEFINE_string("pools", POOLS, f"the pools to disturb: {POOLS_FORM}")
  flags.DEFINE_bool("processes", True, "each pool in a process of its own; else nothing is killed")
  flags.DEFINE_integer("operations", 1000, "how many kills, cancels, time-outs and role changes")
  flags.DEFINE_float("kills", 0.06, "share of the operations that kill a process")
  flags.DEFINE_integer("requests", 24, "requests that are there at a time")
  flags.DEFINE_float("gap_s", 0.2, "mean time from one operation to the next")
  flags.DEFINE_float("most_s", math.inf, "end after so long, with the operations done until then")
  flags.DEFINE_integer("seed", 0, "of prompts and operations")
  flags.DEFINE_multi_string("set", [], "change one value, as in --set cache.num_rows=2")
  flags.DEFINE_string("out", None, "folder for soak.json; default: runs/soak-TIME")
  main(prepare, run)
