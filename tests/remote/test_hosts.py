"""Pools on two hosts: network namespaces of this machine, joined by a cable, with a worker in each.

The coordinator is on the first host. Namespaces need root; without it these tests skip.
"""

import contextlib
import ctypes
import dataclasses
import functools
import itertools
import os
import pathlib
import resource
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from engine.pools import Engine, make_cluster, request, serve_all
from remote.small import BUDGET, EXPERIMENT, PAGES, mixed_pool

from experiments.program import Progress
from experiments.serving import check, compare_tokens, machine, run_experiment
from pdjax.core.device_group import DeviceGroup
from pdjax.remote.executor import RemoteExecutor, start_all
from pdjax.remote.hosts import Host, Hosts, call, start_on_hosts
from pdjax.remote.protocol import ProtocolError, WorkerSetup
from pdjax.sources import resolve

pytestmark = [pytest.mark.slow, pytest.mark.processes]
ROOT = pathlib.Path(__file__).resolve().parents[2]
IPS = ("10.231.77.1", "10.231.77.2")
PORT = 7001
SECRET = "known to both hosts and nobody else"
CLONE_NEWNET = 0x40000000


def ip(*words):
  done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20)
  if done.returncode:
    raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@contextlib.contextmanager
def two_namespaces():
  """Two hosts with a cable between them; their names."""
  names = [f"pdjax-{os.getpid()}-{side}" for side in "ab"]
  ends = [f"pdj{os.getpid()}{side}" for side in "ab"]
  with contextlib.ExitStack() as undo:
    for name in names:
      try:
        ip("netns", "add", name)
      except (OSError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"no network namespaces here: {error}")
      undo.callback(ip, "netns", "del", name)  # and with it its end of the cable
    ip("link", "add", ends[0], "netns", names[0], "type", "veth",
       "peer", "name", ends[1], "netns", names[1])  # fmt: skip
    for name, end, address in zip(names, ends, IPS, strict=True):
      ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
      for link in ("lo", end):
        ip("-n", name, "link", "set", link, "up")
    yield names


@contextlib.contextmanager
def inside(name):
  """This thread, and those that it starts, on that host."""
  libc = ctypes.CDLL(None, use_errno=True)
  with open("/proc/thread-self/ns/net") as before, open(f"/run/netns/{name}") as there:
    if libc.setns(there.fileno(), CLONE_NEWNET):
      raise OSError(ctypes.get_errno(), f"setns {name}")
    try:
      yield
    finally:
      libc.setns(before.fileno(), CLONE_NEWNET)


@contextlib.contextmanager
def waiting_worker(name, address, secret_file):
  """A worker that waits on a host until the end."""
  process = subprocess.Popen(
    ["ip", "netns", "exec", name, sys.executable, "-m", "pdjax.engine.worker",
     f"--listen={address}:{PORT}", f"--secret-file={secret_file}"],
    stdout=subprocess.PIPE,
    text=True,
    env={**os.environ, "PYTHONPATH": str(ROOT)},
  )  # fmt: skip
  try:
    assert process.stdout.readline() == f"pdjax worker: waits at {address}:{PORT}\n"
    yield process
  finally:
    process.terminate()
    process.wait(10)


def calls_of(name):
  """The processes of workers that serve a call on a host."""
  done = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, timeout=20)
  return [int(pid) for pid in done.stdout.split() if "--call=" in command_of(pid)]


def command_of(pid):
  with contextlib.suppress(FileNotFoundError, ProcessLookupError):
    return pathlib.Path(f"/proc/{pid}/cmdline").read_text()
  return ""  # it has just ended


@pytest.fixture(scope="module")
def secret_file(tmp_path_factory):
  path = tmp_path_factory.mktemp("secret") / "secret"
  path.touch(0o600)
  path.write_text(SECRET)
  return path


@pytest.fixture(scope="module")
def hosts(secret_file):
  """The names of two hosts, with workers that wait; this thread is on the first."""
  with two_namespaces() as names, contextlib.ExitStack() as workers:
    for name, address in zip(names, IPS, strict=True):
      workers.enter_context(waiting_worker(name, address, secret_file))
    with inside(names[0]):
      yield names


CLUSTER = Hosts(
  secret_file="secret",
  hosts=tuple(Host(address=f"{address}:{PORT}", devices=2) for address in IPS),
)


@contextlib.contextmanager
def pools(*groups):
  """Pools of these devices and uses, warm."""
  uids = itertools.count(1)
  executors = [
    RemoteExecutor(
      f"devices {devices}",
      WorkerSetup(
        model_path=str(resolve("tiny")),
        pages=PAGES,
        whole_budget=BUDGET,
        chunk_budget=BUDGET,
        uses=uses,
        group=DeviceGroup(devices=devices),
        copies="transfer",
        copy_timeout_s=5.0,
      ),
      uids,
      start=functools.partial(
        start_on_hosts, CLUSTER.parts_of(DeviceGroup(devices=devices)), SECRET
      ),
    )
    for devices, uses in groups
  ]
  try:
    for _ in start_all(executors):
      pass
    yield executors
  finally:
    for executor in executors:
      executor.close()


@pytest.fixture(scope="module")
def here(tiny):
  return mixed_pool(tiny)


def some_requests():
  """Lengths around a page, few and many tokens, and what samples look back at and tell."""
  rng = np.random.default_rng(1)
  return [
    request(
      i,
      rng.integers(0, 1000, length).tolist(),
      max_tokens=max_tokens,
      logprobs=2 if i % 3 == 0 else None,
      repetition_penalty=1.3 if i % 4 == 1 else 1.0,
    )
    for i, (length, max_tokens) in enumerate(itertools.product((1, 3, 4, 5, 8, 9, 12), (1, 2, 5)))
  ]


def streams(log):
  found = {}
  for event in log:
    if type(event).__name__ == "Step":
      for request_id, token_id in zip(event.emitted_ids, event.token_ids, strict=True):
        found.setdefault(request_id, []).append(token_id)
  return found


def serve_as(here, executors, strategy, requests=None):
  """What these pools say, after it was seen that nothing failed and nothing was compiled."""
  engine = Engine(executors=executors, steps=None, pages=here.pages, buckets=here.buckets)
  before = [executor.stats() for executor in executors]
  log = serve_all(make_cluster(engine, strategy), requests or some_requests())
  assert not [event for event in log if type(event).__name__ == "Failed"]
  assert [executor.stats() for executor in executors] == before
  assert not any(stats["warnings"] for stats in before)
  return streams(log)


PREFILL, DECODE, ALL = ("prefill", "gather"), ("decode", "scatter"), ("prefill", "decode")


@pytest.mark.parametrize(
  "groups",
  [
    {(0,): PREFILL, (2,): DECODE},  # a pool on each host
    {(1, 2): PREFILL, (0, 3): DECODE},  # both pools span the hosts
    {(1, 2): PREFILL, (3,): DECODE},
    {(0, 1, 2, 3): PREFILL, (1, 2): DECODE},  # of more devices than kv heads
  ],
  ids=lambda groups: " ".join(str(devices).replace(" ", "") for devices in groups),
)
def test_a_prefill_and_a_decode_pool_say_what_one_process_says(hosts, here, groups):
  with pools(*groups.items()) as executors:
    assert serve_as(here, executors, "disaggregated") == serve_as_here(here)


def serve_as_here(here, requests=None):
  return streams(serve_all(make_cluster(here, "continuous"), requests or some_requests()))


def test_a_pool_that_spans_both_hosts_says_what_one_process_says(hosts, here):
  with pools(((1, 2), ALL)) as executors:
    assert [len(calls_of(name)) for name in hosts] == [1, 1]
    assert serve_as(here, executors, "continuous") == serve_as_here(here)
    assert executors[0].top2_margin([5, 6, 7]) == pytest.approx(
      here.executors[0].top2_margin([5, 6, 7]), rel=1e-3
    )


@pytest.mark.parametrize("decodes_on", [(2,), (1, 2)], ids=["the other host", "both hosts"])
def test_a_run_survives_a_worker_that_is_killed(hosts, here, decodes_on):
  """Its pool is lost on all hosts; tokens that were emitted are kept, others computed again."""
  rng = np.random.default_rng(2)
  requests = [
    request(i, rng.integers(0, 1000, 9).tolist(), arrival_s=0.02 * i, max_tokens=8)
    for i in range(12)
  ]
  expected = serve_as_here(here, requests)
  with pools(((0,), PREFILL), (decodes_on, DECODE)) as executors:
    engine = Engine(executors=executors, steps=None, pages=here.pages, buckets=here.buckets)
    (victim,) = calls_of(hosts[1])
    timer = threading.Timer(0.15, os.kill, (victim, signal.SIGKILL))
    timer.start()
    log = serve_all(make_cluster(engine, "disaggregated"), requests)
    timer.join()
    assert not [event for event in log if type(event).__name__ == "Failed"]
    assert streams(log) == expected
    assert [event for event in log if type(event).__name__ == "PoolChanged"], "it came too late"
    assert victim not in calls_of(hosts[1]) and len(calls_of(hosts[1])) == 1
  end_s = time.monotonic() + 10
  while any(map(calls_of, hosts)):
    assert time.monotonic() < end_s, "processes that nobody asks any more"
    time.sleep(0.05)


FEWER = dataclasses.replace(
  EXPERIMENT, workload=dataclasses.replace(EXPERIMENT.workload, num_requests=8)
)


def start_up_file(folder, secret_file, addresses):
  path = folder / "hosts.toml"
  lines = [f'secret_file = "{secret_file}"']
  lines += [f'[[hosts]]\naddress = "{address}:{PORT}"' for address in addresses]
  path.write_text("\n".join(lines))
  return str(path)


def test_an_experiment_on_two_hosts_says_what_it_says_here(hosts, secret_file, tmp_path):
  tokens = {}
  for where in (None, start_up_file(tmp_path, secret_file, IPS)):
    checked = check(dataclasses.replace(FEWER, hosts=where), tmp_path)
    try:
      experiment = run_experiment(checked, Progress())
    finally:
      checked.world.close()
    num_compared, differences = compare_tokens(experiment)
    assert num_compared and not [d for d in differences if not d.is_tie]
    records = experiment.runs["disaggregated"].records
    tokens[where] = {request_id: record.token_ids for request_id, record in records.items()}
  here, there = tokens.values()
  assert there == here and len(here) == 8 and all(here.values())
  assert machine(experiment)["processes"] == [
    {"host": f"{address}:{PORT}", "devices": [0]} for address in IPS
  ]
  assert experiment.world.label.endswith("on 2 hosts")


# What is wrong with the input ---------------------------------------------------------------------


def refused(config, folder):
  with pytest.raises(ValueError) as error:
    check(config, folder)
  return str(error.value)


def test_hosts_with_too_few_devices_are_refused(secret_file, tmp_path):
  path = start_up_file(tmp_path, secret_file, IPS[:1])
  message = refused(dataclasses.replace(EXPERIMENT, hosts=path), tmp_path)
  assert "lists 1 devices, but the pools have 2" in message


def test_a_host_with_another_secret_is_refused_and_goes_on_waiting(hosts, tmp_path):
  other = tmp_path / "other"
  other.touch(0o600)
  other.write_text("a secret that no host knows")
  path = start_up_file(tmp_path, other, IPS)
  message = refused(dataclasses.replace(EXPERIMENT, hosts=path), tmp_path)
  assert "is not our worker" in message and "secret" in message and "\n" not in message
  for address in IPS:
    call(f"{address}:{PORT}", SECRET).close()


@pytest.mark.parametrize(
  ("address", "reason"),
  [
    (f"{IPS[1]}:{PORT + 1}", "refused"),  # nobody listens
    (f"10.231.77.9:{PORT}", "No route to host|timed out"),  # there is no such host
    (f"10.9.9.9:{PORT}", "unreachable"),  # nor a way there
  ],
)
def test_an_address_where_nobody_waits_is_one_message(hosts, address, reason):
  with pytest.raises(ProtocolError, match=f"no worker waits at {address}: .*({reason})"):
    call(address, SECRET)


def test_a_worker_refuses_a_secret_that_others_can_read(tmp_path):
  secret = tmp_path / "secret"
  secret.write_text(SECRET)
  secret.chmod(0o644)
  done = subprocess.run(
    [
      sys.executable,
      "-m",
      "pdjax.engine.worker",
      "--listen=127.0.0.1:0",
      f"--secret-file={secret}",
    ],
    capture_output=True,
    text=True,
    timeout=60,
    cwd=ROOT,
  )
  assert done.returncode == 1 and "chmod 600" in done.stderr and done.stderr.count("\n") == 1


def test_a_call_that_cannot_be_answered_ends_no_other(tmp_path):
  """A process takes more files than this worker may have."""
  secret = tmp_path / "secret"
  secret.write_text(SECRET)
  secret.chmod(0o600)
  with socket.create_server(("127.0.0.1", 0)) as free:
    host, port = free.getsockname()
  worker = subprocess.Popen(
    [sys.executable, "-m", "pdjax.engine.worker", f"--listen={host}:{port}",
     f"--secret-file={secret}"],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    cwd=ROOT,
    preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8)),
  )  # fmt: skip
  try:
    assert "waits" in worker.stdout.readline()
    for _ in range(2):
      with socket.create_connection((host, port)):
        assert "cannot take a call" in worker.stderr.readline()
    assert worker.poll() is None
  finally:
    worker.kill()
    worker.communicate()
