from __future__ import annotations

import bisect
import dataclasses
import math
import weakref

from pdjax.core.costs import StepCounts, count_slices
from pdjax.core.sequence import Sequence
from pdjax.scheduling.policies.ranking import Ranking
from pdjax.scheduling.scheduler import StepBuilder, steady

_DECAY = 0.995  # of the prefill rate seen so far, a step


@steady
@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Deadline:
  """Prompts by deadline, in chunks as large as the decodes' slack allows (Niyama, QoServe).

  A request has the targets of its `slo`; without one, `ttft_s`, and `tpot_s` if that is given.

  The budget: the most prefill tokens, a multiple of `grid_tokens`, with which the step still ends
  before the next token of the most pressed decode is due, if it takes `safety` times as long as
  predicted; at least one such multiple. Token n + 1 is due n times `tpot_s` after the first one.
  (Deviation: not after the time that the first token was due at. One that came early would lend
  slack that TPOT as measured does not have.) Where step times are unknown the budget is the pool's.

  The order: arrival + `ttft_s` + `token_s` for each prompt token left, so neither urgent nor short
  prompts alone can starve the others; one that was preempted goes first. A prompt that has not
  started and that would miss its `ttft_s` even if the pool's whole prefill rate were its own is
  relegated, once: it goes where it would be with a `ttft_s` longer by `relegated_s`.

  Keeps its ranking of the queue, who was relegated, when each decode would have been on time, and
  the prefill rate.

  Raises:
    ValueError: an option that is not positive.
  """

  ttft_s: float = 30.0
  tpot_s: float | None = None
  grid_tokens: int = 32
  safety: float = 1.2
  token_s: float = 0.008
  relegated_s: float = 600.0
  _ranking: Ranking = dataclasses.field(init=False, repr=False)
  _relegated: weakref.WeakSet[Sequence] = dataclasses.field(
    init=False, repr=False, default_factory=weakref.WeakSet
  )
  _first_s: dict[int, float] = dataclasses.field(init=False, repr=False, default_factory=dict)
  _tokens: float = dataclasses.field(init=False, repr=False, default=0.0)  # prefilled in
  _seconds: float = dataclasses.field(init=False, repr=False, default=0.0)  # decayed alike
  _last: tuple[float, int] = dataclasses.field(init=False, repr=False, default=(0.0, 0))

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name) if field.init else None
      if value is not None and not 0 < value < math.inf:
        raise ValueError(f"{field.name}={value} must be positive")
    self._ranking = Ranking(self._key)

  def __call__(self, step: StepBuilder) -> None:
    self._learn_rate(step.now_s)
    slack_s = self._slack_s(step)
    step.decode()
    self._relegate(step)
    self._set_budget(step, slack_s)
    self._ranking.offer(step)
    self._last = step.now_s, step.counts.num_prefill_tokens

  def _learn_rate(self, now_s: float) -> None:
    planned_s, num_tokens = self._last
    if num_tokens and now_s > planned_s:
      self._tokens = _DECAY * self._tokens + num_tokens
      self._seconds = _DECAY * self._seconds + now_s - planned_s

  def _slack_s(self, step: StepBuilder) -> float:
    """The least time that a decode has for its next token."""
    start_s, slack_s, first_s = step.now_s, math.inf, {}
    for seq in step.decoding:
      slo = seq.request.slo
      tpot_s = slo.tpot_s if slo is not None else self.tpot_s
      if tpot_s is not None:
        num_tokens = seq.num_tokens - seq.request.num_prompt_tokens
        # One that was preempted is on time again when it comes back: what is lost is lost.
        on_time_s = start_s - (num_tokens - 1) * tpot_s
        first_s[seq.request_id] = first = self._first_s.get(seq.request_id, on_time_s)
        slack_s = min(slack_s, first + num_tokens * tpot_s - start_s)
    self._first_s = first_s
    return slack_s

  def _relegate(self, step: StepBuilder) -> None:
    if not self._seconds:
      return
    token_s = self._seconds / self._tokens
    for seq in self._ranking.candidates(step):
      if seq.row is None and not seq.num_preemptions:
        due_s = seq.request.arrival_s + self._ttft_s(seq)
        if seq in self._relegated or step.now_s + token_s * seq.num_tokens <= due_s:
          return
        self._relegated.add(seq)

  def _set_budget(self, step: StepBuilder, slack_s: float) -> None:
    if step.predict_step_s is None or slack_s == math.inf:
      return
    decodes, order = step.counts, self._first(step, step.tokens_left)
    if not order:
      return

    def step_s(num_tokens: int) -> float:
      return self.safety * step.predict_step_s(_with_prefill(decodes, order, num_tokens))

    sizes = [*range(self.grid_tokens, step.tokens_left, self.grid_tokens), step.tokens_left]
    num_fitting = bisect.bisect_right(sizes, slack_s, key=step_s)
    step.tokens_left = sizes[max(0, num_fitting - 1)]

  def _first(self, step: StepBuilder, num_tokens: int) -> list[Sequence]:
    """The candidates that `num_tokens` would go to."""
    order = []
    for seq in self._ranking.candidates(step):
      if num_tokens <= 0:
        break
      order.append(seq)
      num_tokens -= seq.num_unscheduled_tokens
    return order

  def _key(self, seq: Sequence) -> float:
    if seq.num_preemptions:
      return -math.inf
    num_left = seq.num_prefill_tokens - seq.num_scheduled_tokens
    key = seq.request.arrival_s + self._ttft_s(seq) + self.token_s * num_left
    return key + self.relegated_s if seq in self._relegated else key

  def _ttft_s(self, seq: Sequence) -> float:
    slo = seq.request.slo
    return self.ttft_s if slo is None else slo.ttft_s


def _with_prefill(decodes: StepCounts, order: list[Sequence], num_tokens: int) -> StepCounts:
  """What `decodes` becomes when `num_tokens` go to the prompts in `order`."""
  starts, sizes, num_emitted = [], [], 0
  for seq in order:
    size = min(seq.num_unscheduled_tokens, num_tokens)
    starts.append(seq.num_scheduled_tokens)
    sizes.append(size)
    num_emitted += size == seq.num_unscheduled_tokens
    num_tokens -= size
  chunks = count_slices(prefill_starts=starts, prefill_tokens=sizes, num_emitted=num_emitted)
  return StepCounts(*map(sum, zip(decodes, chunks)))
