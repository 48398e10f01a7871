"""A pool in a process of its own: serves what a coordinator asks until the coordinator is gone.

  python -m pdjax.engine.worker --connect=HOST:PORT < SECRET           as `RemoteExecutor` starts it
  python -m pdjax.engine.worker --listen=HOST:PORT --secret-file=FILE  on each host: waits for calls

Who waits serves every coordinator that knows the secret, each call by a process of its own, until
it is told to end (Ctrl-C, SIGTERM). `pdjax/remote/hosts.py` says how hosts make a cluster.

One thread listens, one does all that changes the pool, in the order in which it was asked, and
others wait for devices and memory. JAX is imported only when it is known which cores and devices it
may have.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import gc
import math
import os
import pathlib
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from pdjax.core.plain import from_plain, to_plain
from pdjax.core.plan import StepPlan
from pdjax.core.request import SamplingParams
from pdjax.remote.hosts import read_secret
from pdjax.remote.process import WORKER, python_path
from pdjax.remote.protocol import (
  Connection,
  Heads,
  LayerRange,
  Message,
  ProtocolError,
  Split,
  WorkerPlace,
  WorkerReady,
  WorkerSetup,
  connect,
  greet,
  listen,
  split_address,
)
from pdjax.serving.executor import Handle

if TYPE_CHECKING:  # they import jax
  from pdjax.engine.copies import Copies
  from pdjax.engine.jax_executor import JaxExecutor

Due = queue.SimpleQueue  # of messages, and of calls that go on with what others waited for
MOST_WAITING = 256  # threads that wait for a device at once, made as needed
MOST_CALLS = 64  # at once; anyone may call, and is a process until it is known who it is
MEETING_TIMEOUT_S = 120  # for the processes of a pool to find each other
COMPILED_EVENT = "/jax/core/compile/backend_compile_duration"


def main(arguments: list[str]) -> None:
  """Returns never."""
  options = dict(argument.partition("=")[::2] for argument in arguments)
  try:
    if options.keys() == {"--listen", "--secret-file"}:
      _wait_for_calls(options["--listen"], pathlib.Path(options["--secret-file"]))
    elif options.keys() == {"--connect"}:
      connection = connect(options["--connect"])
    elif options.keys() == {"--call"}:
      connection = Connection(socket.socket(fileno=int(options["--call"])))
    else:
      raise ValueError(f"{arguments}: give --listen=HOST:PORT --secret-file=FILE")
    _serve(connection, sys.stdin.readline().strip())
  except (ProtocolError, OSError, ValueError) as error:
    sys.exit(f"pdjax worker: {error}")


def _wait_for_calls(address: str, secret_file: pathlib.Path) -> None:
  """Answers each call by a process of its own, as JAX can be set up once in a process."""
  secret = read_secret(secret_file)
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
  calls: list[subprocess.Popen] = []
  with listen(*split_address(address)) as listener:
    print(f"pdjax worker: waits at {address}", flush=True)
    try:
      while True:
        sock, _ = listener.accept()
        calls = [call for call in calls if call.poll() is None]
        with sock:
          if len(calls) < MOST_CALLS:
            try:
              calls.append(_answer_call(sock, secret))
            except OSError as error:  # no memory or files now; the other calls are well
              print(f"pdjax worker: cannot take a call: {error}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
      sys.exit(0)
    finally:
      for call in calls:
        call.kill()


def _answer_call(sock: socket.socket, secret: str) -> subprocess.Popen:
  """A process that takes the call. The secret goes through a pipe, which none but it can read."""
  call = subprocess.Popen(
    [sys.executable, "-m", WORKER, f"--call={sock.fileno()}"],
    stdin=subprocess.PIPE,
    pass_fds=[sock.fileno()],
    env={**os.environ, "PYTHONPATH": python_path()},
  )
  with call.stdin as pipe:
    pipe.write(secret.encode() + b"\n")
  return call


def _serve(connection: Connection, secret: str) -> None:
  """Serves one coordinator. Returns never: with the connection the process ends."""
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # the coordinator's: it may want to ask more
  greet(connection, secret, is_worker=True)
  due: Due = queue.SimpleQueue()
  threading.Thread(target=_listen, args=(connection, due), daemon=True).start()
  try:
    place, message = None, due.get()
    if "place" in message:
      place = _take_place(from_plain(WorkerPlace, message["place"]), connection)
      message = due.get()
    setup = from_plain(WorkerSetup, message)
    worker = _start(setup, place or WorkerPlace(devices=setup.group.devices), connection, due)
  except Exception as error:
    connection.send({"error": f"{type(error).__name__}: {error}"})
    connection.close()
    sys.exit(1)
  worker.serve()


def _listen(connection: Connection, due: Due) -> None:
  """Ends the process when the coordinator is gone, whatever else runs here."""
  try:
    while True:
      due.put(connection.receive(None))
  except (OSError, EOFError):
    os._exit(0)
  except ProtocolError as error:
    print(f"pdjax worker: {error}", file=sys.stderr, flush=True)
    os._exit(1)


def _take_place(place: WorkerPlace, connection: Connection) -> WorkerPlace:
  """Says where the processes of the pool meet, if this is the one to choose."""
  place = dataclasses.replace(place, host=socket.gethostbyname(place.host))
  if place.num_processes == 1 or place.meet_at is not None:
    return place
  with listen(place.host) as free:  # a moment later the port might be another's: then it is tried
    meet_at = "{}:{}".format(*free.getsockname())  # again, as after any start that fails
  connection.send({"meet_at": meet_at})
  return dataclasses.replace(place, meet_at=meet_at)


def _meet_others(place: WorkerPlace) -> None:
  """Makes the devices of all processes of the pool known to each. Before JAX starts."""
  import jax
  from jax._src.lib import _jax

  # Gloo binds to what the name of this machine stands for, which other machines may not reach (on
  # Debian it is 127.0.1.1), and JAX has no option for it.
  _jax.make_gloo_tcp_collectives = functools.partial(
    _jax.make_gloo_tcp_collectives, hostname=place.host
  )
  jax.distributed.initialize(
    place.meet_at,
    place.num_processes,
    place.process_id,
    cluster_detection_method="deactivate",
    coordinator_bind_address=place.meet_at,
    initialization_timeout=MEETING_TIMEOUT_S,
  )


def _start(setup: WorkerSetup, place: WorkerPlace, connection: Connection, due: Due) -> Worker:
  """Builds the pool and warms it up; says so."""
  _restrict(setup, place)
  watch = _Watch()

  import jax

  from pdjax.engine.build import build_executors, default_buckets
  from pdjax.engine.copies import make_copies, parts_of, split_of
  from pdjax.engine.mesh import make_mesh
  from pdjax.models.checkpoints.checkpoint import open_checkpoint

  watch.start()
  if place.num_processes > 1:
    _meet_others(place)
  num_devices, pages = len(setup.group.devices), setup.pages
  devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
  if len(devices) < num_devices:
    raise ValueError(f"{num_devices} devices asked for, but JAX sees {devices}")
  devices = devices[:num_devices]
  platform = devices[0].platform
  dtype = setup.dtype or ("float32" if platform == "cpu" else "bfloat16")
  target = make_mesh(devices[: setup.group.tp])
  checkpoint = open_checkpoint(setup.model_path, check_weights=setup.check_weights)
  model = checkpoint.load(dtype=dtype, target=target)
  buckets = default_buckets(pages, whole_budget=setup.whole_budget, chunk_budget=setup.chunk_budget)
  (executor,) = build_executors(
    model,
    pages,
    buckets,
    [devices],
    layout=setup.layout,
    attention=setup.attention,
    stages=[setup.group.pp],
    layer_groups=[setup.layer_groups],
  )
  copies = make_copies(setup, place.host)
  for line in executor.warm_up(setup.uses):
    connection.send({"line": line})
  worker = Worker(connection, due, setup, place, executor, copies, buckets.pages, watch)
  own = executor.pieces_like(worker.whole_pages(1, None))
  ready = WorkerReady(
    vocab_size=executor.vocab_size,
    page_shape=executor.page_shape,
    bytes_per_token=executor.bytes_per_token,
    layer_groups=executor.layer_groups,
    num_stages=executor.num_stages,
    split=split_of(own),
    platform=platform,
    parts=parts_of(own),
  )
  # What compiling left behind is never garbage: a full collection in a step would be a gap.
  gc.collect()
  gc.freeze()
  connection.send({"ready": to_plain(ready)})
  return worker


def _restrict(setup: WorkerSetup, place: WorkerPlace) -> None:
  """To the cores and devices of the setup. Before JAX starts: its threads are as many as cores."""
  if setup.cores is not None:
    for thread in os.listdir("/proc/self/task"):
      os.sched_setaffinity(int(thread), setup.cores)
  devices, environment = place.devices, os.environ
  environment["JAX_NUM_CPU_DEVICES"] = str(len(devices))
  if setup.group.hardware is not None:
    environment["JAX_PLATFORMS"] = setup.group.hardware.replace("gpu", "cuda")
  visible = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
  if visible != ["-1"]:
    names = [visible[i] if i < len(visible) and visible[i] else str(i) for i in devices]
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(names)


class _Watch:
  """What JAX did here that it should not do while it serves."""

  def __init__(self):
    self.num_compilations = 0
    self.warnings: list[str] = []
    self._show = warnings.showwarning
    warnings.showwarning = self._warn

  def start(self) -> None:
    import jax

    jax.monitoring.register_event_duration_secs_listener(self._event)

  def _event(self, name: str, duration_s: float, **_: Any) -> None:
    self.num_compilations += name == COMPILED_EVENT

  def _warn(self, message, category, filename, lineno, file=None, line=None) -> None:
    self.warnings.append(str(message))
    self._show(message, category, filename, lineno, file, line)


@dataclasses.dataclass(slots=True, kw_only=True)
class _Export:
  """Pages that were gathered, or why not."""

  handle: Handle | None
  error: Exception | None
  uids: list[int] = dataclasses.field(default_factory=list)  # of its offers


class Worker:
  """Answers messages. Owns the executor: all its calls are made by the thread that serves."""

  def __init__(
    self,
    connection: Connection,
    due: Due,
    setup: WorkerSetup,
    place: WorkerPlace,
    executor: JaxExecutor,
    copies: Copies,
    page_buckets: tuple[int, ...],
    watch: _Watch,
    now_s: Callable[[], float] = time.monotonic,
  ):
    self._connection, self._due, self._setup, self._place = connection, due, setup, place
    self._watch, self._now_s = watch, now_s
    self._executor, self._copies, self._page_buckets = executor, copies, page_buckets
    self._exports: dict[int, _Export] = {}
    self._waiters = concurrent.futures.ThreadPoolExecutor(MOST_WAITING, "wait")
    self._open: dict[int, float] = {}  # numbers not yet answered -> when they fail
    self._copy_timeout_s = setup.copy_timeout_s
    self._num_warm = watch.num_compilations

  def serve(self) -> None:
    while True:
      left_s = min(self._open.values(), default=math.inf) - self._now_s()
      try:
        item = self._due.get(timeout=None if left_s == math.inf else max(0.0, left_s))
      except queue.Empty:
        self._time_out()
        continue
      if callable(item):
        item()
      else:
        self._handle(item)
      if left_s <= 0:
        self._time_out()

  def _handle(self, message: Message) -> None:
    message = dict(message)
    do, number = message.pop("do"), message.pop("number", None)
    verb = _VERBS.get(do)
    if number is not None:
      self._open[number] = math.inf
    try:
      if verb is None:
        raise ProtocolError(f"nothing is called {do!r}")
      verb(self, number, **message)
    except Exception as error:
      if number is None:
        raise
      self._fail(number, error)

  # Answers ---------------------------------------------------------------------------------------

  def _answer(self, number: int, value: Any = None) -> None:
    if self._open.pop(number, None) is not None:  # else it has timed out
      self._connection.send({"number": number, "value": value})

  def _fail(self, number: int, error: Exception) -> None:
    if self._open.pop(number, None) is not None:
      self._connection.send({"number": number, "error": f"{type(error).__name__}: {error}"})

  def _time_out(self) -> None:
    now_s = self._now_s()
    for number in [n for n, due_s in self._open.items() if due_s <= now_s]:
      self._fail(number, TimeoutError(f"a copy took longer than {self._copy_timeout_s} s"))

  def _later(
    self, number: int, wait: Callable[[], Any], then: Callable[[Any], None], is_copy: bool = False
  ) -> None:
    """Calls `wait` in a thread of its own and `then` with what it gave, unless that is too late."""
    if is_copy:
      self._open[number] = min(self._open[number], self._now_s() + self._copy_timeout_s)

    def finish(value: Any, error: Exception | None) -> None:
      if number not in self._open:
        return
      try:
        if error is not None:
          raise error
        then(value)
      except Exception as error:
        self._fail(number, error)

    def run() -> None:
      value, error = None, None
      try:
        value = wait()
      except Exception as raised:
        error = raised
      self._due.put(functools.partial(finish, value, error))

    self._waiters.submit(run)

  # What can be asked -----------------------------------------------------------------------------

  def _submit(self, number: int, *, plan: Any, exports: list) -> None:
    early = [(from_plain(Handle, handle), tuple(pages)) for handle, pages in exports]
    ticket = self._executor.submit(from_plain(StepPlan, plan), 0.0, early)
    self._later(number, ticket.block, lambda _: self._answer(number, to_plain(ticket.result())))

  def _export(self, _: None, *, export_id: int, handle: Any, page_ids: list[int]) -> None:
    gathered, error = None, None
    try:
      handle = from_plain(Handle, handle)
      gathered = self._executor.export(handle, page_ids=tuple(page_ids), now_s=0.0)
    except Exception as raised:
      error = raised  # the offer's answer says it
    self._exports[export_id] = _Export(handle=gathered, error=error)

  def _offer(self, number: int, *, export_id: int, uid: int, split: Any, each: bool) -> None:
    export = self._exports[export_id]
    if export.error is not None:
      raise export.error
    split = from_plain(Split, split)
    export.uids.append(uid)

    def offer() -> Any:
      offer = self._copies.offer_each if each else self._copies.offer
      offered = offer(uid, export.handle.payload, split)
      if self._exports.get(export_id) is not export:  # it was dropped meanwhile
        self._copies.forget(uid)
      return [offered]  # a list: other processes of this pool offer what they have

    self._later(number, offer, functools.partial(self._answer, number), is_copy=True)

  def _import(
    self, number: int, *, handle: Any, row: int, page_ids: list[int], offer: list[dict[str, Any]]
  ) -> None:
    handle = from_plain(Handle, handle)
    like = self._executor.pieces_like(handle)

    def insert(payload: Any) -> None:
      own = dataclasses.replace(handle, payload=payload)
      ticket = self._executor.import_(own, row=row, page_ids=tuple(page_ids), now_s=0.0)
      self._later(number, ticket.block, lambda _: self._answer(number, ticket.result()))

    def fetch() -> Any:
      if "parts_of_each" in offer[0]:
        return self._copies.fetch_each(offer, like)
      return self._copies.fetch(offer[0], like)

    self._later(number, fetch, insert, is_copy=True)

  def _drop(self, _: None, *, export_id: int) -> None:
    export = self._exports.pop(export_id, None)
    if export is None:
      return
    for uid in export.uids:
      self._copies.forget(uid)
    if export.handle is not None:
      self._executor.drop(export.handle)

  def _recover(self, number: int) -> None:
    self._answer(number, self._executor.recover())

  def _reset(self, number: int) -> None:
    self._executor.reset()
    self._answer(number)

  def _stats(self, number: int) -> None:
    value = {
      "num_traces": sum(self._executor.num_traces.values()),
      "num_compilations": self._watch.num_compilations,
      "warnings": self._watch.warnings,
    }
    self._answer(number, [value])

  def _holds(self, number: int) -> None:
    import jax

    gc.collect()
    arrays = jax.live_arrays()
    value = {
      "exports": len(self._exports),
      "offers": self._copies.num_offers,
      "open": len(self._open) - 1,  # this question itself
      **self._executor.num_kept,
      "arrays": len(arrays),
      "array_bytes": sum(array.nbytes for array in arrays),
      "late_compilations": self._watch.num_compilations - self._num_warm,
    }
    self._answer(number, value)

  def _top2_margin(self, number: int, *, token_ids: list[int]) -> None:
    self._answer(number, self._executor.top2_margin(token_ids))

  def _meet(self, number: int, *, ranges: Any, others: Any) -> None:
    """Compiles what copies from and to other pools need. Overwrites the cache."""
    others = from_plain(tuple[tuple[Split, tuple[Heads, ...]], ...], others)
    if "scatter" in self._setup.uses:
      for layers in from_plain(tuple[LayerRange, ...], ranges):
        for handle in self._each_size(layers):
          self._import_zeros(handle)
          for _, parts in others:
            if self._is_each(parts):
              self._copies.join_zeros(self._executor.pieces_like(handle), parts)
    if "gather" in self._setup.uses and hasattr(self._copies, "cut"):
      own = self._executor.layer_groups
      for layers in (None, *(own if len(own) > 1 else ())):
        for handle in self._each_size(layers):
          self._cut(handle, others)
    self._executor.reset()
    self._num_warm = self._watch.num_compilations
    self._answer(number)

  def _each_size(self, layers: LayerRange | None) -> Iterator[Handle]:
    return (self.whole_pages(num_pages, layers) for num_pages in self._page_buckets)

  def whole_pages(self, num_pages: int, layers: LayerRange | None) -> Handle:
    """A handle of so many pages."""
    num_tokens = num_pages * self._setup.pages.page_size
    return Handle(
      request_id=0,
      num_tokens=num_tokens,
      num_prompt_tokens=num_tokens,
      first_token_id=0,
      sampling=SamplingParams(max_tokens=1),
      layers=layers,
    )

  def _import_zeros(self, handle: Handle) -> None:
    import jax.numpy as jnp

    payload = {
      layers: jnp.zeros(pieces.shape, pieces.dtype, device=pieces.sharding)
      for layers, pieces in self._executor.pieces_like(handle).items()
    }
    page_ids = tuple(range(handle.num_tokens // self._setup.pages.page_size))
    handle = dataclasses.replace(handle, payload=payload)
    self._executor.import_(handle, row=0, page_ids=page_ids, now_s=0.0).result()

  def _is_each(self, parts: tuple[Heads, ...]) -> bool:
    """Whether copies from or to a pool of such `parts` are offered device by device."""
    return self._place.num_processes > 1 or len(parts) > 1

  def _cut(self, handle: Handle, others: tuple[tuple[Split, tuple[Heads, ...]], ...]) -> None:
    page_ids = tuple(range(handle.num_tokens // self._setup.pages.page_size))
    payload = self._executor.export(handle, page_ids=page_ids, now_s=0.0).payload
    for split, parts in others:
      if self._is_each(parts):
        cut = [part for _, _, part in self._copies.cut_each(payload, split)]
      else:
        cut = self._copies.cut(payload, split)
      for part in cut:
        part.block_until_ready()


_VERBS = {
  "submit": Worker._submit,
  "export": Worker._export,
  "offer": Worker._offer,
  "import": Worker._import,
  "drop": Worker._drop,
  "recover": Worker._recover,
  "reset": Worker._reset,
  "stats": Worker._stats,
  "holds": Worker._holds,
  "top2_margin": Worker._top2_margin,
  "meet": Worker._meet,
}


if __name__ == "__main__":
  main(sys.argv[1:])
