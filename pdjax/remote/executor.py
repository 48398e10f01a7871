"""A pool in another process, as an `Executor` of this one. Imports no jax."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pdjax.core.plain import from_plain, to_plain
from pdjax.core.plan import StepPlan, StepResult
from pdjax.remote.process import WorkerProcess, start_process
from pdjax.remote.protocol import Message, ProtocolError, WorkerReady, WorkerSetup
from pdjax.serving.executor import Handle, PageShape, PoolLost, export_bytes

STEP_TIMEOUT_S = 60.0
START_TIMEOUT_S = 600.0  # between two signs of life while it reads weights and compiles
NUM_STARTS = 3  # of a pool that was lost, before it is gone for good


class RemoteError(Exception):
  """What went wrong in a worker, which is alive and well."""


class Answer:
  """A ticket that ends when the answer to a message has come, or never will."""

  finish_s = None

  def __init__(self, parse: Callable[[Any], Any]):
    self._parse = parse
    self._ended = threading.Event()
    self._value: Any = None
    self._error: Exception | None = None

  def is_ready(self) -> bool:
    return self._ended.is_set()

  def block(self) -> None:
    self._ended.wait()

  def result(self) -> Any:
    self._ended.wait()
    if self._error is not None:
      raise self._error
    return self._value

  def succeed(self, data: Any) -> None:
    try:
      self._value = self._parse(data)
    except (TypeError, ValueError) as error:
      self._error = RemoteError(f"an answer that cannot be read: {error}")
    self._ended.set()

  def fail(self, error: Exception) -> None:
    self._error = error
    self._ended.set()


class _Offered(Answer):
  """Calls `then` with itself when it has ended, in the thread that found out."""

  def __init__(self, then: Callable[[Answer], None]):
    super().__init__(lambda data: data)
    self._then = then

  def succeed(self, data: Any) -> None:
    super().succeed(data)
    self._then(self)

  def fail(self, error: Exception) -> None:
    super().fail(error)
    self._then(self)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
  """The payload of a handle: pages that a worker has gathered, under a name it knows."""

  source: RemoteExecutor
  life: int
  export_id: int


@dataclasses.dataclass(slots=True, kw_only=True)
class _Asked:
  answer: Answer
  asked_s: float
  timeout_s: float


class RemoteExecutor:
  """One pool in a process of its own, or one on each of its hosts.

  Its worker keeps the order of what it is asked.

  `uids` numbers exports and offers: one counter for all pools that exchange pages, so that no
  number is used twice, whoever is started again. What the worker does not answer for
  `step_timeout_s`, while it is silent altogether, ends the process, as whatever it does now can no
  longer be trusted; a copy fails by itself after the `copy_timeout_s` of the setup. When the
  process ends, for whatever reason, all that was asked raises `PoolLost`, and `recover` starts
  another one in the background.

  One thread may call it; a thread of its own listens to the worker.
  """

  repeats = False

  def __init__(
    self,
    name: str,
    setup: WorkerSetup,
    uids: Iterator[int],
    *,
    start: Callable[[], WorkerProcess] = start_process,
    step_timeout_s: float = STEP_TIMEOUT_S,
    now_s: Callable[[], float] = time.monotonic,
  ):
    self.name, self.setup = name, setup
    self._uids, self._start, self._now_s = uids, start, now_s
    self._step_timeout_s = step_timeout_s
    self._copy_timeout_s = setup.copy_timeout_s + step_timeout_s  # the worker says so before
    self._lock = threading.RLock()
    self._numbers = itertools.count()
    self._asked: dict[int, _Asked] = {}
    self._process: WorkerProcess | None = None
    self._life = 0  # which process: what an older one was asked is void
    self._heard_s = 0.0
    self._met: Message | None = None
    self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    self._why_down = "it was not started"
    self._is_up = self._is_starting = self._is_gone = self._is_closed = False
    self.ready: WorkerReady | None = None

  @property
  def is_up(self) -> bool:
    """As every executor's.

    Raises:
      PoolLost: it will not come back by itself, and why.
    """
    if self._is_gone:
      raise PoolLost(f"{self.name}: {self._why_down}")
    return self._is_up

  # Facts of the pool, known once it was up. They do not change when it starts again.

  @property
  def vocab_size(self) -> int:
    return self._known.vocab_size

  @property
  def page_shape(self) -> PageShape:
    return self._known.page_shape

  @property
  def bytes_per_token(self) -> int:
    return self._known.bytes_per_token

  @property
  def layer_groups(self) -> tuple[tuple[int, int], ...]:
    return self._known.layer_groups

  @property
  def num_stages(self) -> int:
    return self._known.num_stages

  @property
  def platform(self) -> str:
    """Of its devices: `cpu`, `gpu`, `tpu`."""
    return self._known.platform

  @property
  def process_id(self) -> int | None:
    return None if self._process is None else self._process.process_id

  @property
  def _known(self) -> WorkerReady:
    if self.ready is None:
      raise PoolLost(f"{self.name}: {self._why_down}")
    return self.ready

  # What the loop asks --------------------------------------------------------------------------

  def submit(
    self,
    plan: StepPlan,
    now_s: float,
    exports: Sequence[tuple[Handle, tuple[int, ...]]] = (),
  ) -> Answer:
    return self._ask(
      "submit",
      Answer(lambda data: from_plain(StepResult, data)),
      self._step_timeout_s,
      plan=to_plain(plan),
      exports=[[_plain_handle(handle), page_ids] for handle, page_ids in exports],
    )

  def export(self, handle: Handle, *, page_ids: tuple[int, ...], now_s: float) -> Handle:
    export_id = next(self._uids)
    self._tell("export", export_id=export_id, handle=_plain_handle(handle), page_ids=page_ids)
    return dataclasses.replace(
      handle,
      num_bytes=export_bytes(self, handle),
      payload=Exported(source=self, life=self._life, export_id=export_id),
    )

  def import_(self, handle: Handle, *, row: int, page_ids: tuple[int, ...], now_s: float) -> Answer:
    """Asks the source to offer the pages, and then the worker to take them: never before."""
    exported: Exported = handle.payload
    source, life = exported.source, self._life
    ticket = Answer(lambda data: None)

    def take(offered: Answer) -> None:
      try:
        self._ask(
          "import",
          ticket,
          self._copy_timeout_s,
          life=life,
          handle=_plain_handle(handle),
          row=row,
          page_ids=page_ids,
          offer=offered.result(),
        )
      except Exception as error:
        ticket.fail(error)

    source._ask(
      "offer",
      _Offered(take),
      source._copy_timeout_s,
      life=exported.life,
      export_id=exported.export_id,
      uid=next(self._uids),
      split=self._known.split,
      each=len(source._known.parts) > 1 or len(self._known.parts) > 1,
    )
    return ticket

  def drop(self, handle: Handle) -> None:
    exported = handle.payload
    if isinstance(exported, Exported) and exported.life == self._life and self._is_up:
      with contextlib.suppress(PoolLost):  # and the export with it
        self._tell("drop", export_id=exported.export_id)

  def recover(self) -> bool:
    """As every executor's; starts a lost process again, in the background."""
    try:
      return self._ask("recover", Answer(bool), self._step_timeout_s).result()
    except PoolLost:
      self.start()
      return True

  # What else a worker can be asked, between runs -----------------------------------------------

  def reset(self) -> None:
    """Forgets every row, for a new run."""
    self._ask("reset", Answer(lambda data: None), self._step_timeout_s).result()

  def stats(self) -> dict[str, Any]:
    """`num_traces` and `num_compilations` since the start, and the texts of all `warnings`.

    Of all its processes together.
    """
    each = self._ask("stats", Answer(list), self._step_timeout_s).result()
    return {
      "num_traces": sum(stats["num_traces"] for stats in each),
      "num_compilations": sum(stats["num_compilations"] for stats in each),
      "warnings": [text for stats in each for text in stats["warnings"]],
    }

  def holds(self) -> dict[str, int]:
    """What the worker keeps: exports, offers, numbers that are open, arrays. For leaks.

    And `late_compilations`, those since its warm-up.
    """
    return self._ask("holds", Answer(dict), self._step_timeout_s).result()

  def top2_margin(self, token_ids: Sequence[int]) -> float:
    """As `JaxExecutor.top2_margin`; compiles when it is first asked."""
    ticket = Answer(float)
    return self._ask("top2_margin", ticket, START_TIMEOUT_S, token_ids=list(token_ids)).result()

  def meet(self, others: Sequence[RemoteExecutor]) -> None:
    """Compiles what copies from and to these pools need; they must be up. For good.

    A process that is started again does so before it is up.
    """
    self._met = {
      "ranges": sorted({layers for other in others for layers in other.layer_groups}),
      "others": sorted({(other._known.split, other._known.parts) for other in others}),
    }
    self._ask("meet", Answer(lambda data: None), START_TIMEOUT_S, **self._met).result()

  # Its life ------------------------------------------------------------------------------------

  def start(self) -> None:
    """Starts the process in the background, unless it is up or starting."""
    with self._lock:
      if self._is_up or self._is_starting or self._is_closed:
        return
      self._is_starting, self._is_gone = True, False
    threading.Thread(target=self._live, daemon=True, name=f"remote-{self.name}").start()

  def wait_until_up(self) -> Iterator[str]:
    """Yields what a pool that was started does until it is up.

    Raises:
      PoolLost: it could not start, and why.
    """
    while self._is_starting or not self._lines.empty():
      yield from self._news()
    if not self._is_up:
      raise PoolLost(f"{self.name}: {self._why_down}")

  def _news(self) -> Iterator[str]:
    """What it did, once it did something, or soon."""
    with contextlib.suppress(queue.Empty):
      yield self._lines.get(timeout=0.05)

  def close(self) -> None:
    """Ends the process, for good."""
    with self._lock:
      self._is_closed, process = True, self._process
    self._lose(self._life, "it was closed")
    self._is_gone = True
    if process is not None:
      process.close()

  def _live(self) -> None:
    """The life of a process: its start, perhaps again, and what it says until its end."""
    process, num_starts = None, NUM_STARTS if self.ready is not None else 1
    while process is None and num_starts and not self._is_closed:
      num_starts -= 1
      process = self._try_to_start()
    with self._lock:
      self._is_starting, self._is_gone, life = False, process is None, self._life
    if process is not None:
      try:
        self._listen(process, life)
      except Exception as error:
        self._lose(life, str(error) or type(error).__name__)

  def _try_to_start(self) -> WorkerProcess | None:
    process = None
    try:
      process = self._start()
      with self._lock:
        self._life += 1
        self._process = process
      if self._is_closed:
        raise ProtocolError("it was closed")
      self._begin(process)
      return process
    except Exception as error:
      if process is not None:
        process.kill()
      self._why_down = f"it could not start: {error}"
      return None

  def _begin(self, process: WorkerProcess) -> None:
    connection = process.connection
    connection.send(to_plain(self.setup))

    def next_message() -> Message:
      message = connection.receive(START_TIMEOUT_S)
      if message is None:
        raise ProtocolError(f"no sign of life for {START_TIMEOUT_S} s")
      if "error" in message:
        raise RemoteError(message["error"])
      return message

    while "ready" not in (message := next_message()):
      self._lines.put(message["line"])
    ready = from_plain(WorkerReady, message["ready"])
    if self._met is not None:  # it is started again
      connection.send({"do": "meet", "number": -1, **self._met})
      next_message()
    with self._lock:
      self.ready, self._heard_s = ready, self._now_s()
      self._is_up = not self._is_closed

  def _listen(self, process: WorkerProcess, life: int) -> None:
    while True:
      message = process.connection.receive(min(1.0, self._step_timeout_s / 4))
      now_s = self._now_s()
      if message is None:
        self._check_silence(now_s)
        continue
      with self._lock:
        self._heard_s = now_s
        asked = self._asked.pop(message["number"], None) if life == self._life else None
      if asked is None:
        raise ProtocolError(f"an answer that nobody waits for: {message['number']}")
      if "error" in message:
        asked.answer.fail(RemoteError(message["error"]))
      else:
        asked.answer.succeed(message["value"])

  def _check_silence(self, now_s: float) -> None:
    with self._lock:
      for asked in self._asked.values():
        silent_s = now_s - max(self._heard_s, asked.asked_s)
        if silent_s > asked.timeout_s:
          raise ProtocolError(f"it did not answer for {silent_s:.1f} s")

  def _lose(self, life: int, reason: str) -> None:
    """Ends what is left of a process, and all that it was asked."""
    with self._lock:
      if life != self._life or not self._is_up:
        return
      self._is_up, self._why_down = False, reason
      asked, self._asked = self._asked, {}
      process = self._process
    if not self._is_closed:
      process.kill()
    for each in asked.values():
      each.answer.fail(PoolLost(f"{self.name}: {reason}"))

  def _ask(
    self, do: str, answer: Answer, timeout_s: float, life: int | None = None, **message: Any
  ) -> Answer:
    """Sends a message that is answered, to the process of that `life`, or else to the present."""
    with self._lock:
      number = next(self._numbers)
      if self._is_up and life in (None, self._life):
        now_s = self._now_s()
        self._asked[number] = _Asked(answer=answer, asked_s=now_s, timeout_s=timeout_s)
    try:
      self._tell(do, life, number=number, **message)
    except Exception:  # it was not sent
      with self._lock:
        self._asked.pop(number, None)
      raise
    return answer

  def _tell(self, do: str, life: int | None = None, **message: Any) -> None:
    with self._lock:
      is_up, process, now = self._is_up, self._process, self._life
    if not is_up or life not in (None, now):
      raise PoolLost(f"{self.name}: {self._why_down}")
    try:
      process.connection.send({"do": do, **message})
    except OSError as error:
      self._lose(now, str(error))
      raise PoolLost(f"{self.name}: {error}") from error


def _plain_handle(handle: Handle) -> Any:
  return to_plain(dataclasses.replace(handle, payload=None))


def start_all(executors: Sequence[RemoteExecutor]) -> Iterator[str]:
  """Starts pools side by side and makes them known to one another; yields what they do.

  Raises:
    PoolLost: one could not start, and why. Then all are closed.
  """
  try:
    for executor in executors:
      executor.start()
    while any(executor._is_starting for executor in executors):
      for executor in executors:
        yield from (f"{executor.name}: {line}" for line in executor._news())
    for executor in executors:
      yield from (f"{executor.name}: {line}" for line in executor.wait_until_up())
    for executor in executors:
      others = [other for other in executors if other is not executor]
      if others:
        yield f"{executor.name}: copies from and to the others"
        executor.meet(others)
  except BaseException:
    for executor in executors:
      executor.close()
    raise
