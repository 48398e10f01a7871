"""What happened. One record per step or state change; token times are derived from the steps."""

from __future__ import annotations

import dataclasses
import gzip
import json
import pathlib
import typing
from collections.abc import Iterable, Iterator, Mapping

from pdjax.core.plain import from_plain, to_plain


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
  """A request entered a pool's queue. `time_s` is when it was due, not when the loop saw it."""

  time_s: float
  request_id: int
  pool: str | None  # None: refused
  num_prompt_tokens: int
  max_tokens: int
  seen_s: float | None = None  # when the loop took it in; how late it was is its own lag


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
  """One forward of one pool. All its tokens exist at `end_s`.

  `start_s` is when the device could begin: the later of its submission and the end of the step
  before it. `emitted_ids` are the requests that got a token, `token_ids` the tokens, in parallel.
  """

  pool: str
  step_id: int
  kind: str  # prefill, decode, mixed
  start_s: float
  end_s: float
  prefill_ids: tuple[int, ...]
  prefill_starts: tuple[int, ...]
  prefill_tokens: tuple[int, ...]
  decode_ids: tuple[int, ...]
  decode_positions: tuple[int, ...]
  emitted_ids: tuple[int, ...]
  token_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stroke:
  """Decode steps of one pool that followed one another without a change, as a simulator takes them.

  Each has a token of every request in `decode_ids`, a position further than the one before, and
  ends at its own of `ends_s`, where the next begins. `step_id` and `decode_positions` are the
  first one's.
  """

  pool: str
  step_id: int
  start_s: float
  ends_s: tuple[float, ...]
  decode_ids: tuple[int, ...]
  decode_positions: tuple[int, ...]

  kind: typing.ClassVar[str] = "decode"

  @property
  def end_s(self) -> float:
    return self.ends_s[-1]

  def steps(self) -> Iterator[Step]:
    """The same steps, one at a time."""
    starts_s = (self.start_s, *self.ends_s)
    for number, end_s in enumerate(self.ends_s):
      yield Step(
        pool=self.pool,
        step_id=self.step_id + number,
        kind="decode",
        start_s=starts_s[number],
        end_s=end_s,
        prefill_ids=(),
        prefill_starts=(),
        prefill_tokens=(),
        decode_ids=self.decode_ids,
        decode_positions=tuple(position + number for position in self.decode_positions),
        emitted_ids=self.decode_ids,
        token_ids=(0,) * len(self.decode_ids),
      )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Preempted:
  """A request lost its pages and will be recomputed."""

  time_s: float
  request_id: int
  pool: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
  """A KV cache went from a prefill pool to a decode pool.

  Its last part began at `start_s`, when the prompt was prefilled, and all were there at `end_s`:
  this much of the copying was exposed. Where it was streamed the first part began at
  `first_start_s`, and `num_bytes_ahead` were sent before the prompt was prefilled.
  """

  request_id: int
  source: str
  target: str
  start_s: float
  end_s: float
  num_tokens: int
  num_bytes: int
  first_start_s: float | None = None
  num_bytes_ahead: int = 0

  @property
  def begin_s(self) -> float:
    """When its first part began."""
    return self.start_s if self.first_start_s is None else self.first_start_s


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
  """Cached pages of a prefix were copied from the pool `source` to `pool`, for a queued request."""

  time_s: float
  request_id: int
  pool: str
  source: str
  start_s: float
  num_tokens: int
  num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
  """A request has all its tokens. `reason`: `length` or `stop`."""

  time_s: float
  request_id: int
  pool: str
  reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
  """A request ended without all its tokens: refused, broken or cancelled; a miss in attainment."""

  time_s: float
  request_id: int
  pool: str | None
  reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolChanged:
  """A pool took another role, was lost, or came back. `reason`: why, or why not."""

  time_s: float
  pool: str
  role: str
  is_up: bool
  reason: str


Event = Arrived | Step | Stroke | Preempted | Copied | Fetched | Finished | Failed | PoolChanged
_KINDS = {cls.__name__.lower(): cls for cls in typing.get_args(Event)}


class EventLog:
  """Append-only history of a run, in the order in which things were noticed."""

  def __init__(self, events: Iterable[Event] = ()):
    self._events: list[Event] = list(events)

  def append(self, event: Event) -> None:
    self._events.append(event)

  def since(self, number: int) -> list[Event]:
    """All but the first `number`."""
    return self._events[number:]

  def __iter__(self) -> Iterator[Event]:
    return iter(self._events)

  def __len__(self) -> int:
    return len(self._events)


def each_step(log: Iterable[Event]) -> Iterator[Step]:
  """The steps of a log, those of strokes one at a time."""
  for event in log:
    if isinstance(event, Stroke):
      yield from event.steps()
    elif isinstance(event, Step):
      yield event


def write_events(path: pathlib.Path, runs: Mapping[str, Iterable[Event]]) -> None:
  """Writes the logs of named runs, one JSON object a line: `run`, `event`, then its fields."""
  with open(path, "w") as file:
    for run, log in runs.items():
      for event in log:
        record = {"run": run, "event": type(event).__name__.lower(), **to_plain(event)}
        file.write(json.dumps(record, separators=(",", ":")) + "\n")


def read_events(path: pathlib.Path) -> dict[str, EventLog]:
  """Reads what `write_events` wrote, plain or gzipped: run name -> log.

  Raises:
    ValueError: a line that is no event, with file and line number.
  """
  runs: dict[str, EventLog] = {}
  with open(path, "rb") as file:
    is_packed = file.read(2) == b"\x1f\x8b"
  with (gzip.open if is_packed else open)(path, "rt", encoding="utf-8-sig") as file:
    for number, line in enumerate(file, 1):
      try:
        record = json.loads(line)
        log = runs.setdefault(record.pop("run"), EventLog())
        log.append(from_plain(_KINDS[record.pop("event")], record))
      except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path}:{number}: not a pdjax event ({error!r})") from error
  return runs
