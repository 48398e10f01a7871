"""Why requests were slow, told from arrivals, lengths, TTFT and gaps alone. Changes nothing.

Nothing is known of the server: neither its steps, nor how many devices it has. Each cause leaves a
mark on what clients see; each function here looks for one mark, and its threshold says why.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import itertools
import statistics
from collections.abc import Sequence

from pdjax.analysis.diagnose import (
  FEWEST,
  STALL_GAPS,
  Cause,
  Diagnosis,
  Loss,
  Lost,
  Observed,
  Seconds,
  Symptom,
  conclude,
  symptoms,
)
from pdjax.analysis.verdict import time_text
from pdjax.core.request import Slo
from pdjax.metrics.latency import percentile

AT_ONCE_S = 3e-4
"""Tokens so close came in one piece: no step of a model that is worth serving is so short."""
GO_ON = 0.8
"""Of the requests that run, the share that goes on in a gap of one that was stopped alone. Under a
step with a long prompt all of its pool stop, less only where there are over five."""
BUSY = 0.5
"""Of a wait, the share in which prompts were visibly computed, from which on it was for them.
Not 1: beside decodes prompts take longer than when it is quiet. While room is short it is less."""
SLOWER = 1.25
"""Gaps beside prompts are so much longer than others, or prompts are not what makes gaps long."""
LEAST_MARKS = 0.02
"""Long lone gaps for each request, from which on hand-offs or preemptions are a habit of a run."""
GROWS = 0.3
"""Correlation of first gaps with prompts, from which on it is their bytes that are waited for. What
a request waits for room depends on others, hardly on its own prompt."""
SETTLES = 2.0
"""A first gap of so many other gaps is more than a step: something lies between the two tokens."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Quiet:
  """What requests take at the quietest moments of a run, as its quickest requests show."""

  prompt_token_s: float
  least_ttft_s: float
  gap_s: float

  @classmethod
  def of(cls, requests: Sequence[Observed]) -> Quiet:
    middle = statistics.median(r.prompt_tokens for r in requests)
    longer = [r for r in requests if r.prompt_tokens >= middle]
    tpots_s = [r.tpot_s for r in requests if r.tpot_s is not None]
    return cls(
      prompt_token_s=min(r.served_s / r.prompt_tokens for r in longer),
      least_ttft_s=min(r.served_s for r in requests),
      gap_s=percentile(tpots_s, 10) or 0.0,
    )

  def prompt_s(self, request: Observed) -> float:
    own_s = max(self.least_ttft_s, self.prompt_token_s * request.prompt_tokens)
    return min(request.served_s, own_s)


def derive_slo(requests: Sequence[Observed], *, ttft_multiple: float, tpot_multiple: float) -> Slo:
  """Targets by Sarathi-Serve's rule (`analysis.capacity.derive_slo`), of what is seen.

  The longest prompt at the pace of the quickest, and the lowest tenth of the times per token.
  """
  quiet = Quiet.of(requests)
  longest_s = quiet.prompt_token_s * max(r.prompt_tokens for r in requests)
  return Slo(
    ttft_s=max(ttft_multiple * max(longest_s, quiet.least_ttft_s), AT_ONCE_S),
    tpot_s=max(tpot_multiple * quiet.gap_s, AT_ONCE_S),
  )


def diagnose_requests(
  requests: Sequence[Observed],
  slo: Slo,
  *,
  ids: Sequence[int] | None = None,
  num_failed: int = 0,
  notes: Sequence[str] = (),
) -> Diagnosis:
  """The causes that what clients saw points to. Without arrivals or gaps less can be told.

  `ids` are what the requests are called; None: their places.
  """
  notes, losses, facts = list(notes), [], {}
  ids = range(len(requests)) if ids is None else ids
  if requests:
    look = _Look(requests, slo)
    notes += look.notes
    for number, request in enumerate(requests):
      for symptom in symptoms(request, slo):
        at_s, lost_s = look.loss(number, symptom)
        losses.append(Loss(request_id=ids[number], symptom=symptom, at_s=at_s, lost_s=lost_s))
    facts = look.facts()
  return conclude(
    losses,
    slo,
    num_requests=len(requests) + num_failed,
    num_failed=num_failed,
    facts=facts,
    notes=notes,
  )


class _Look:
  """A run as its clients saw it."""

  def __init__(self, requests: Sequence[Observed], slo: Slo):
    self._requests, self._slo = requests, slo
    self.quiet = Quiet.of(requests)
    self._has_gaps = any(r.itl_s is not None for r in requests)
    self._has_arrivals = all(r.arrival_s is not None for r in requests)
    self.notes = []
    if not self._has_gaps:
      self.notes.append(
        "no gaps, only their means: stalls, hand-offs, preemptions and a client that lags cannot "
        "be seen"
      )
    if not self._has_arrivals:
      self.notes.append(
        "no arrival times: what requests did to one another cannot be seen, neither waits nor "
        "interference, and nothing can be simulated again"
      )
    self._token_s = [r.token_s for r in requests]
    self._by_first = sorted(range(len(requests)), key=lambda number: self._token_s[number][0])
    self._firsts_s = [self._token_s[number][0] for number in self._by_first]
    self._longest_s = max(token_s[-1] - token_s[0] for token_s in self._token_s)
    self._prompts = [
      (r.arrival_s + r.ttft_s - self.quiet.prompt_s(r), r.arrival_s + r.ttft_s, 1.0)
      for r in requests
      if self._has_arrivals
    ]
    self._computing = Seconds(self._prompts)
    self._frozen = self._freezes()
    self._going, self._stalled = self._later_gaps()
    self._stopped_alone = self._lone_gaps()
    self._link_share = self._of_bytes()
    self._waits_for_room = self._room_cause()
    self._alone_gap_s = self._gap_without_prompts()

  # The marks --------------------------------------------------------------------------------------

  def _freezes(self) -> Seconds:
    """Gaps that end with several tokens at once: the server made them one by one, so it was the
    client that did not look. A server that sends tokens in bundles looks the same.
    """
    spans = sorted(
      (token_s[i], token_s[i + 1])
      for number, token_s in enumerate(self._token_s)
      for i, gap_s in enumerate(self._requests[number].itl_s or ())
      if gap_s >= AT_ONCE_S and self._ends_at_once(number, i)
    )
    merged: list[tuple[float, float, float]] = []
    for start_s, end_s in spans:
      if merged and start_s <= merged[-1][1]:
        start_s, last_s, _ = merged.pop()
        end_s = max(last_s, end_s)
      merged.append((start_s, end_s, 1.0))
    return Seconds(merged)

  def _ends_at_once(self, number: int, i: int) -> bool:
    """Whether the gap after token i of a request ends with several tokens."""
    gaps_s = self._requests[number].itl_s
    return i + 1 < len(gaps_s) and gaps_s[i + 1] < AT_ONCE_S

  def _later_gaps(self) -> tuple[Seconds, Seconds]:
    """Gaps after the second token: those in which a request goes on, and stalls."""
    spans: tuple[list, list] = ([], [])
    for token_s in self._token_s:
      for start_s, end_s in itertools.pairwise(token_s[1:]):
        spans[end_s - start_s > STALL_GAPS * self._slo.tpot_s].append((start_s, end_s, 1.0))
    return Seconds(spans[0]), Seconds(spans[1])

  def _lone_gaps(self) -> set[tuple[int, int]]:
    """Long gaps, by request and token, in which nearly all others that run go on."""
    if not self._has_arrivals:
      return set()
    lone = set()
    for number, request in enumerate(self._requests):
      for i, gap_s in enumerate(request.itl_s or ()):
        if (
          gap_s > STALL_GAPS * self._slo.tpot_s
          and not self._ends_at_once(number, i)
          and self._others_go_on(number, i)
        ):
          lone.add((number, i))
    return lone

  def _others_go_on(self, number: int, i: int) -> bool:
    """By what comes in its inner four fifths: a step that ends with the gap is no going on.

    Who is in a first gap as well, of another end, may wait for a hand-off too and is not asked.
    Where nobody else was there all the time those are who decoded for a part of it.
    """
    start_s, end_s = self._token_s[number][i : i + 2]
    edge_s = 0.1 * (end_s - start_s)
    num_running = num_going = 0
    first = bisect.bisect_left(self._firsts_s, end_s - self._longest_s)
    last = bisect.bisect_right(self._firsts_s, start_s)
    for other in self._by_first[first:last]:  # nobody else can be running
      token_s = self._token_s[other]
      if other == number or token_s[-1] < end_s:
        continue
      ends_apart = abs(token_s[1] - end_s) > 0.5 * self.quiet.gap_s
      if i == 0 and token_s[1] >= end_s - edge_s and ends_apart:
        continue
      num_running += 1
      j = bisect.bisect_right(token_s, start_s + edge_s)
      num_going += j < len(token_s) and token_s[j] < end_s - edge_s
    if num_running or i:
      return num_running > 0 and num_going >= GO_ON * num_running
    going_s = self._going.total(start_s, end_s)
    stalled_s = self._stalled.total(start_s, end_s)
    return going_s >= max(BUSY * (end_s - start_s), GO_ON * (going_s + stalled_s))

  def _first_gaps(self) -> list[tuple[int, float]]:
    """(prompt tokens, seconds beyond a step) of first gaps, where there is a second to compare."""
    found = []
    for request in self._requests:
      if request.itl_s is not None and len(request.itl_s) > 2:
        usual_s = statistics.median(request.itl_s[1:])
        found.append((request.prompt_tokens, max(0.0, request.itl_s[0] - usual_s)))
    return found

  def _of_bytes(self) -> float:
    """Of first gaps, the share that a time for each prompt token explains: bytes over a link.

    Even the quickest hand-off moves its bytes, so the least seconds a token of the longer prompts
    are those of the link; a wait for room is nothing for some. Where copies wait for one another
    on the link some are longer than their own bytes, but they still grow with them; and where most
    of a gap is such a wait, the time from the end of one to the end of the next does.
    """
    gaps = self._first_gaps()
    total_s = sum(gap_s for _, gap_s in gaps)
    if len(gaps) < FEWEST or not total_s:
      return 0.0
    if max(map(_correlation, (gaps, self._in_line()))) >= GROWS:
      return 1.0
    middle = statistics.median(tokens for tokens, _ in gaps)
    token_s = percentile([gap_s / tokens for tokens, gap_s in gaps if tokens >= middle], 5)
    return min(1.0, token_s * sum(tokens for tokens, _ in gaps) / total_s)

  def _in_line(self) -> list[tuple[int, float]]:
    """(prompt tokens, seconds since the one before was done) of lone first gaps that had begun by
    then.
    """
    lone = [number for number, i in self._stopped_alone if not i]
    lone.sort(key=lambda number: self._token_s[number][1])
    return [
      (self._requests[own].prompt_tokens, self._token_s[own][1] - self._token_s[before][1])
      for before, own in itertools.pairwise(lone)
      if self._token_s[own][0] < self._token_s[before][1]
    ]

  def _room_cause(self) -> Cause:
    """What a wait is for in which no prompts are computed, by what the run shows besides."""
    firsts = sum(i == 0 for _, i in self._stopped_alone)
    later = len(self._stopped_alone) - firsts
    if max(firsts, later) <= LEAST_MARKS * len(self._requests):
      return Cause.MEMORY
    if later > firsts:
      return Cause.PREEMPTION
    return Cause.LINK if self._link_share >= BUSY else Cause.HANDOFF_WAIT

  def _gap_without_prompts(self) -> float | None:
    """The median of gaps beside no prompt; None where prompts do not make gaps longer."""
    if not (self._has_arrivals and self._has_gaps):
      return None
    alone_s, beside_s = [], []
    for token_s, request in zip(self._token_s, self._requests):
      for start_s, gap_s in list(zip(token_s, request.itl_s or ()))[1:]:
        is_beside = self._computing.within(start_s, start_s + gap_s) > 0.1 * gap_s
        (beside_s if is_beside else alone_s).append(gap_s)
    if len(alone_s) < FEWEST or len(beside_s) < FEWEST:
      return self.quiet.gap_s if len(alone_s) < len(beside_s) else None
    usual_s = statistics.median(alone_s)
    return usual_s if statistics.fmean(beside_s) >= SLOWER * statistics.fmean(alone_s) else None

  # What a request lost ----------------------------------------------------------------------------

  def loss(self, number: int, symptom: Symptom) -> tuple[float | None, Lost]:
    request, token_s = self._requests[number], self._token_s[number]
    if symptom is Symptom.LATE:
      return request.arrival_s, self._of_first_token(request)
    if request.itl_s is None:
      return token_s[0] if self._has_arrivals else None, self._of_mean(request)
    gaps_s = list(enumerate(request.itl_s))
    if symptom is Symptom.STALLED:
      gaps_s = [(i, gap_s) for i, gap_s in gaps_s if gap_s > STALL_GAPS * self._slo.tpot_s]
    lost_s: Lost = collections.Counter()
    for i, gap_s in gaps_s:
      lost_s.update(self._of_gap(number, i, gap_s))
    longest = max(gaps_s, key=lambda gap: gap[1])[0]
    return token_s[longest] if self._has_arrivals else None, lost_s

  def _of_first_token(self, request: Observed) -> Lost:
    if not self._has_arrivals:
      return {Cause.UNEXPLAINED: request.ttft_s}
    own_s = self.quiet.prompt_s(request)
    sent_s = request.arrival_s + request.sent_late_s
    first_s = request.arrival_s + request.ttft_s
    frozen_s = self._frozen.within(sent_s, first_s)
    waited_s = max(0.0, request.served_s - own_s - frozen_s)
    computed_s = max(0.0, self._computing.within(sent_s, first_s) - own_s)
    is_for_prompts = computed_s >= BUSY * waited_s
    cause = Cause.QUEUEING if is_for_prompts else self._waits_for_room
    own_s = max(0.0, own_s - self._slo.ttft_s)
    client_s = request.sent_late_s + frozen_s
    return {Cause.CLIENT: client_s, cause: waited_s, Cause.OWN_PREFILL: own_s}

  def _of_gap(self, number: int, i: int, gap_s: float) -> Lost:
    """A gap beyond a quiet one: the client's, alone (a hand-off or a preemption), or all stop."""
    token_s = self._token_s[number]
    more_s = max(0.0, gap_s - min(self.quiet.gap_s, self._slo.tpot_s))
    if self._ends_at_once(number, i):
      return {Cause.CLIENT: more_s}
    if (number, i) in self._stopped_alone:
      if i:
        return {Cause.PREEMPTION: more_s}
      link_s = self._link_share * more_s
      return {Cause.LINK: link_s, Cause.HANDOFF_WAIT: more_s - link_s}
    if not self._has_arrivals:
      is_first = i == 0 and gap_s > SETTLES * statistics.median(self._requests[number].itl_s)
      return {Cause.UNEXPLAINED if not is_first else Cause.HANDOFF_WAIT: more_s}
    beside_s = 0.0
    if self._alone_gap_s is not None:
      beside_s = min(
        self._computing.within(token_s[i], token_s[i] + gap_s), max(0.0, gap_s - self._alone_gap_s)
      )
    return {Cause.INTERFERENCE: min(beside_s, more_s), Cause.MEMORY: max(0.0, more_s - beside_s)}

  def _of_mean(self, request: Observed) -> Lost:
    """Only a mean: prompts beside it are the most that they can explain."""
    num_gaps = request.output_tokens - 1
    more_s = max(0.0, request.tpot_s - min(self.quiet.gap_s, self._slo.tpot_s)) * num_gaps
    if not self._has_arrivals:
      return {Cause.UNEXPLAINED: more_s}
    first_s = request.arrival_s + request.ttft_s
    beside_s = min(more_s, self._computing.within(first_s, first_s + request.tpot_s * num_gaps))
    return {Cause.INTERFERENCE: beside_s, Cause.MEMORY: more_s - beside_s}

  def facts(self) -> dict[Cause, str]:
    firsts = [gap_s for _, gap_s in self._first_gaps()]
    later = sum(i > 0 for _, i in self._stopped_alone)
    quiet = self.quiet
    facts = {
      Cause.QUEUEING: (
        f"First tokens of others came meanwhile; at the quietest moments a prompt token takes "
        f"{quiet.prompt_token_s * 1e6:.0f} us."
      ),
      Cause.MEMORY: (
        f"Gaps beside no prompt are long too, or requests wait while no first token comes; the "
        f"quietest time per token is {time_text(quiet.gap_s)}."
      ),
      Cause.PREEMPTION: f"{later} long gaps amid requests while others went on.",
      Cause.CLIENT: self._client_words(),
    }
    if self._alone_gap_s is not None:
      facts[Cause.INTERFERENCE] = (
        f"Long gaps coincide with prompts of others; beside none a gap takes "
        f"{time_text(self._alone_gap_s)}."
      )
    if firsts:
      first = (
        f"First gaps are {time_text(statistics.fmean(firsts))} longer than those after them, of "
        f"which {self._link_share:.0%} grows with the prompt."
      )
      facts |= {Cause.HANDOFF_WAIT: first, Cause.LINK: first}
    return facts

  def _client_words(self) -> str:
    lates_s = [r.sent_late_s for r in self._requests]
    if max(lates_s) < AT_ONCE_S:
      return "Long gaps end with several tokens at once (or the server bundles them)."
    return (
      f"Requests were sent {time_text(statistics.fmean(lates_s))} after they were due on average, "
      f"{time_text(max(lates_s))} at most."
    )


def _correlation(pairs: Sequence[tuple[int, float]]) -> float:
  """Of the two; 0 where they are too few to tell, or one of them never changes."""
  if len(pairs) < FEWEST or any(len(set(own)) == 1 for own in zip(*pairs)):
    return 0.0
  return statistics.correlation(*zip(*pairs))
