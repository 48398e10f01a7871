"""Where an answer ends: end-of-text, stop strings across token borders, and the text until there.

A stop string ends the request with the token that completes it. Of several, the one that is
complete first counts, and of those that end together the longest: so the text does not depend on
how it is cut into tokens. The text is cut where that stop string begins. Kept are the tokens whose
text begins before that place, so the last of them may reach into the stop string; ids and
log-probabilities are cut alike. It must leave `min_tokens` tokens, else it is text like any other.
A stop id ends the request too and stays in the ids, but its own text (`<|im_end|>`) is no part of
the answer. The event log keeps every token: what is cut was computed all the same.
"""

from __future__ import annotations

import bisect
import dataclasses
import weakref
from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

from pdjax.core.request import SamplingParams
from pdjax.core.sequence import Sequence
from pdjax.scheduling.scheduler import length_or_stop

_UNFINISHED = "\ufffd"  # what decoding gives for a character that lacks bytes
_MAX_PENDING = 3  # bytes of a character of UTF-8 that may be missing their last; so tokens, at most
_WINDOW = 16  # tokens decoded again with each new one; only speed depends on it


class Decoder(Protocol):
  """What `pdjax.tokenizer` has of it."""

  vocab_size: int

  def decode(self, ids: Seq[int]) -> str: ...


def with_eos(sampling: SamplingParams, eos_ids: Seq[int]) -> SamplingParams:
  """`sampling` with a tokenizer's end-of-text among its stop ids, unless it ignores that.

  Raises:
    ValueError: more stop ids than `min_tokens` can hold back.
  """
  missing = tuple(i for i in eos_ids if i not in sampling.stop_ids)
  if sampling.ignore_eos or not missing:
    return sampling
  return dataclasses.replace(sampling, stop_ids=sampling.stop_ids + missing)


class Settled(NamedTuple):
  """What no later token changes: text without a beginning stop string, and the tokens it is of."""

  text: str
  num_tokens: int


class Stopper:
  """The finish rule of requests whose text matters: stop ids, stop strings, length.

  Give it to `serve` as `finish_reason`. What it keeps of a sequence goes when the sequence goes, be
  it finished, failed or cancelled. Text is decoded only for stop strings, or when it is asked for.
  """

  def __init__(self, tokenizer: Decoder):
    self._tokenizer = tokenizer
    self._states: weakref.WeakKeyDictionary[Sequence, _State] = weakref.WeakKeyDictionary()

  def __call__(self, seq: Sequence) -> str | None:
    """Why `seq` ends with its newest token, or None. Sets `num_kept_tokens` at a stop string."""
    sampling, reason = seq.request.sampling, length_or_stop(seq)
    is_stop_id = reason == "stop"
    if sampling.stop and not is_stop_id:
      kept = self._state(seq).find_stop(seq.output_ids, sampling)
      if kept is not None:
        seq.num_kept_tokens, reason = kept, "stop"
    if reason is not None:
      self._state(seq).end(len(seq.output_ids) - is_stop_id)
    return reason

  def settled(self, seq: Sequence) -> Settled:
    """The answer so far, and all of it once the request has ended. Only ever grows.

    A character that lacks bytes is left out, also at the end.
    """
    state, stop = self._state(seq), seq.request.sampling.stop
    state.read(seq.output_ids, bool(stop))
    if state.num_text_tokens is not None or not stop:
      return Settled(state.text, len(seq.output_ids))
    end = len(state.text) - _num_held(state.text, stop)
    return Settled(state.text[:end], bisect.bisect_left(state.begins, end))

  def _state(self, seq: Sequence) -> _State:
    state = self._states.get(seq)
    if state is None:
      state = self._states[seq] = _State(self._tokenizer)
    return state


class _State:
  """The text of one sequence, decoded as it grows."""

  def __init__(self, tokenizer: Decoder):
    self._detokeniser = Detokeniser(tokenizer)
    self._cut: int | None = None  # where a stop string begins
    self.begins: list[int] = []  # of each token's text; only for sequences with stop strings
    self.num_text_tokens: int | None = None  # of the whole answer, once it has ended

  @property
  def text(self) -> str:
    return self._detokeniser.text[: self._cut]

  def read(self, ids: Seq[int], one_by_one: bool) -> None:
    end = len(ids) if self.num_text_tokens is None else self.num_text_tokens
    if not one_by_one:
      self._detokeniser.read(ids, end)
      return
    for number in range(self._detokeniser.num_tokens, end):
      self.begins.append(len(self._detokeniser.text))
      self._detokeniser.read(ids, number + 1)

  def find_stop(self, ids: Seq[int], sampling: SamplingParams) -> int | None:
    """How many tokens are kept if the newest completes a stop string."""
    num_before, least = len(self._detokeniser.text), sampling.min_tokens
    self.read(ids, True)
    text = self._detokeniser.text
    if len(text) == num_before or len(ids) < least:
      return None
    first = self.begins[least - 1] + 1 if least else 0  # one that begins earlier leaves too little
    found = []  # end and beginning
    for stop in sampling.stop:
      at = text.find(stop, max(first, num_before - len(stop) + 1))
      if at >= 0:
        found.append((at + len(stop), at))
    if not found:
      return None
    _, self._cut = min(found)
    return bisect.bisect_left(self.begins, self._cut)

  def end(self, num_text_tokens: int) -> None:
    self.num_text_tokens = num_text_tokens


class Detokeniser:
  """The text of ids that come one after another. Mutable; `text` only ever grows.

  Decodes a short window again with each token, not the whole: what a token adds may depend on the
  few before it (bytes of one character, a space before a word). A character that still lacks bytes
  waits outside `text`.
  """

  def __init__(self, tokenizer: Decoder):
    self._tokenizer = tokenizer
    self.text = ""
    self.num_tokens = 0
    self._start = 0  # of the window
    self._whole = 0  # the last place in it where no character was cut
    self._num_read = 0  # characters of the window that are in `text`

  def read(self, ids: Seq[int], end: int) -> None:
    """Takes in `ids` up to `end`; those before `num_tokens` must be the same as ever."""
    if end <= self.num_tokens:
      return
    window = self._decode(ids[self._start : end])
    if end - self.num_tokens > 1 and window.endswith(_UNFINISHED):
      # Byte fallback makes all bytes in a row unfinished if the last is: which of their characters
      # are whole shows one by one.
      for number in range(self.num_tokens + 1, end + 1):
        self.read(ids, number)
      return
    self.num_tokens = end
    num_ready = len(window.rstrip(_UNFINISHED))
    if end - self._whole > _MAX_PENDING:  # too many bytes for one character: they are none
      num_ready = max(num_ready, len(window) - _MAX_PENDING)
    if num_ready > self._num_read:
      self.text += window[self._num_read : num_ready]
      self._num_read = num_ready
    is_whole, is_long = num_ready == len(window), end - self._start > _WINDOW
    if is_long and (is_whole or end - self._start > 4 * _WINDOW):
      # From the last whole place; where there was none for long, bytes that are no text.
      self._start = self._whole if is_whole else end - _WINDOW
      window = self._decode(ids[self._start : end])
      self._num_read = len(window) if is_whole else len(window.rstrip(_UNFINISHED))
    if is_whole:
      self._whole = end

  def _decode(self, ids: Seq[int]) -> str:
    # A model may have more rows than the tokenizer has ids: they have no text.
    return self._tokenizer.decode([i for i in ids if 0 <= i < self._tokenizer.vocab_size])


def _num_held(text: str, stop: Seq[str]) -> int:
  """The longest end of `text` with which a stop string begins."""
  return max(
    (n for s in stop for n in range(1, min(len(s) - 1, len(text)) + 1) if text.endswith(s[:n])),
    default=0,
  )
