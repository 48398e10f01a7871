"""Queued sequences in the order of a key, without a sort of the queue. Shared by two policies."""

from __future__ import annotations

import bisect
import heapq
import operator
from collections.abc import Callable, Iterator, ValuesView

from pdjax.core.sequence import Sequence
from pdjax.scheduling.scheduler import StepBuilder

Entry = tuple[float, int, int, Sequence]  # key, request id, generation


class Ranking:
  """Follows the queue of one pool: a step costs what is new in it, not what waits.

  The key of a sequence may rise while it waits, and never falls: `key` is asked again when the
  sequence has come to the front.
  """

  def __init__(self, key: Callable[[Sequence], float]):
    self._key = key
    self._entries: list[Entry] = []  # ascending; some have left the queue
    self._known: dict[Sequence, int] = {}  # those with an entry -> the generation in it

  def candidates(self, step: StepBuilder) -> Iterator[Sequence]:
    """Prompts in progress and queued ones, least key first. Starts nothing."""
    started = sorted(map(self._entry, step.prefilling))
    return (seq for *_, seq in heapq.merge(started, self._queued(step.waiting)))

  def offer(self, step: StepBuilder) -> None:
    """Fills the step with `candidates`; of the queue, until one finds no room."""
    step.admit(self._advance_started(step))
    for *_, seq in sorted(map(self._entry, step.prefilling)):  # behind one that found no room
      step.advance(seq, preempt=True)

  def _advance_started(self, step: StepBuilder) -> Iterator[Sequence]:
    for seq in self.candidates(step):
      if seq.row is None:
        yield seq
      else:
        step.advance(seq, preempt=True)

  def _entry(self, seq: Sequence) -> Entry:
    return self._key(seq), seq.request_id, seq.generation, seq

  def _queued(self, waiting: ValuesView[Sequence]) -> Iterator[Entry]:
    # Preempted sequences come back at the front, others at the end: what is new is there.
    for end in (waiting, reversed(waiting)):
      for seq in end:
        if self._known.get(seq) == seq.generation:
          break
        self._insert(seq)
    if len(self._entries) > 2 * len(waiting) + 64:  # most have left, and from the middle
      self._entries, self._known = [], {}
      for seq in waiting:
        self._insert(seq)
    entries, place = self._entries, 0
    while place < len(entries):
      key, request_id, generation, seq = entry = entries[place]
      if waiting.mapping.get(request_id) is not seq or seq.generation != generation:
        del entries[place]
        if self._known.get(seq) == generation:
          del self._known[seq]
      elif self._key(seq) > key:
        del entries[place]
        self._insert(seq)
      else:
        yield entry
        place += 1

  def _insert(self, seq: Sequence) -> None:
    self._known[seq] = seq.generation
    bisect.insort(self._entries, self._entry(seq), key=operator.itemgetter(0, 1, 2))
