"""The soak program: in virtual time, for real but short, what it notices and what it refuses."""

import json
import os
import pathlib
import random
import subprocess
import sys

import pytest
import virtual

from experiments.soak import POOLS, STATES, Soak, Violation, restarts_s
from pdjax.core import checksum
from pdjax.core.clock import VirtualClock
from pdjax.core.events import EventLog, PoolChanged
from pdjax.serving.inbox import Inbox
from pdjax.serving.loop import serve

ROOT = pathlib.Path(__file__).resolve().parents[2]


def make_soak(num_operations=300, seed=3, pools=POOLS, **options):
  rng = random.Random(seed)
  prompts = [tuple(rng.randrange(99) for _ in range(rng.randint(1, 60))) for _ in range(20)]
  expected = [checksum.generate(ids, rng.randint(1, 20)) for ids in prompts]
  cluster = virtual.make_cluster(pools, budget=8, num_rows=4)
  given = dict(num_operations=num_operations, kill_share=0.0, num_open=16, gap_s=0.01)
  return Soak(cluster, Inbox(is_open=True), rng, prompts, expected, **given | options)


def run(soak, each_turn=lambda turn: None):
  for turn in serve(soak.cluster, soak.inbox, VirtualClock(), EventLog()):
    each_turn(turn)
    soak.step(turn)
  soak.check_end()
  return soak


def test_all_operations_are_done_and_every_state_is_cancelled_in():
  soak = run(make_soak())
  assert soak.operations.total() == 300 and soak.operations.keys() == {"cancel", "time-out", "role"}
  assert soak.cancelled_in.total() == soak.operations["cancel"] == soak.ends["cancelled"]
  assert all(soak.cancelled_in[state] for state in STATES)
  assert soak.ends["timed out"] and soak.ends["length"] and not soak.ties
  assert soak.ends.total() == soak.num_requests


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("pools", [POOLS, "2xprefill,decode,mixed", "2xmixed"])
def test_whichever_pools_change_their_roles_no_request_is_lost(pools, seed):
  soak = run(make_soak(seed=seed, pools=pools, gap_s=0.02))
  assert soak.operations["role"] and soak.ends.keys() == {"length", "cancelled", "timed out"}


def test_a_token_that_differs_is_kept_with_what_came_before_it():
  soak = make_soak()
  right = soak._expected
  soak._expected = [(*own[:-1], own[-1] + 1) for own in right]
  run(soak)
  wrong = {(*ids, *own[:-1]) for ids, own in zip(soak._prompts, right, strict=True)}
  assert soak.ties and set(soak.ties) <= wrong


def break_failures(turn):
  turn.failed = [(request_id, "step failed") for request_id, _ in turn.failed]


@pytest.mark.parametrize(
  "spoil, message",
  [
    (lambda turn: turn.ended.append(turn.ended[0]) if turn.ended else None, "ended twice"),
    (lambda turn: turn.tokens.append((10**9, 1)) if turn.tokens else None, "had ended, and got"),
    (lambda turn: turn.tokens.extend(turn.tokens * 20), "more than the"),
    (lambda turn: turn.tokens.clear(), "finished with 0 tokens"),
    (break_failures, "ended as: step failed"),
  ],
)
def test_what_must_not_be_is_noticed(spoil, message):
  with pytest.raises(Violation, match=message):
    run(make_soak(), spoil)


def test_a_row_that_does_not_come_back_is_noticed():
  soak = make_soak(num_operations=3)
  soak.cluster.pools[1].scheduler.reserve(5)
  with pytest.raises(Violation, match="decode0: rows': 1, 'decode0: pages': 2"):
    run(soak)


def test_a_cancel_that_does_nothing_is_noticed():
  soak = make_soak()
  soak.inbox.cancel = lambda request_id: None
  with pytest.raises(Violation, match="was cancelled, and ended as: length"):
    run(soak)


def test_a_restart_takes_from_its_loss_to_its_return():
  def changed(time_s, pool, reason, is_up=True):
    return PoolChanged(time_s=time_s, pool=pool, role="mixed", is_up=is_up, reason=reason)

  lost, back = "lost: its process ended", "it is back"
  events = [changed(1, "a", lost, False), changed(2, "b", lost, False), changed(4, "a", back),
            changed(5, "a", "it is decode now"), changed(7, "a", lost, False)]  # fmt: skip
  assert restarts_s(EventLog(events)) == [3]


@pytest.mark.parametrize(
  "flag, message",
  [
    ("--operations=0", "--operations=0 must be at least 1"),
    ("--kills=1.5", "--kills=1.5 must be in [0, 1]"),
    ("--gap_s=0", "--gap_s=0.0 must be positive"),
    ("--most_s=-1", "--most_s=-1.0 must be positive"),
    ("--pools=2xprefill", "decode pool"),
    ("--set=cache.page_sise=8", "page_sise"),
  ],
)
def test_wrong_input_is_one_message_and_nothing_is_written(flag, message, tmp_path):
  done = start(tmp_path, flag, timeout_s=60)
  assert done.returncode == 2 and message in done.stderr
  assert len(done.stderr.splitlines()) == 1 and not (tmp_path / "out").exists()


def start(folder, *argv, timeout_s):
  command = [sys.executable, "-m", "experiments.soak", f"--out={folder / 'out'}", *argv]
  return subprocess.run(
    command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=timeout_s
  )


@pytest.mark.slow
@pytest.mark.processes
def test_two_kills_of_processes_among_twenty_operations_leave_nothing_behind(tmp_path):
  done = start(
    tmp_path,
    "--pools=prefill:prefill_chunks,decode",
    "--operations=20",
    "--kills=0.1",
    "--gap_s=0.05",
    "--set=cache.num_rows=2",
    timeout_s=400,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  result = json.loads((tmp_path / "out" / "soak.json").read_text())
  assert sum(result["operations"].values()) == 20
  assert result["operations"]["kill"] == sum(result["killed_while"].values()) == 2
  assert result["restarts_s"] and sum(result["ends"].values()) == result["num_requests"]
