"""What can be said before anything is simulated: rules of thumb, with numbers. Changes nothing.

They are the first questions of whoever thinks of separate pools (DistServe, section 3.3; NVIDIA's
"Beyond the Buzz", arXiv 2506.05508): is a KV cache sent faster than its prompt is computed, are
prompts long enough to be in anybody's way, and does one of them break the targets at all.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pdjax.analysis.verdict import time_text
from pdjax.metrics.latency import percentile

SHORT_TOKENS = 512
"""Prompts below it are not worth a hand-off, as a rule of the field."""
FEW_STEPS = 2.0
"""A prompt that takes no longer than so many decode steps is hardly in the way of decodes."""


class Rule(NamedTuple):
  """One question, whether its answer speaks for separate pools, and the numbers behind it."""

  name: str
  speaks_for_separation: bool
  says: str


def rules(
  lengths: Sequence[tuple[int, int]],
  *,
  prefill_s: Callable[[float], float],
  decode_step_s: float,
  copy_s: Callable[[float], float],
  tpot_slo_s: float,
) -> list[Rule]:
  """The rules for such requests.

  Args:
    lengths: (prompt, output) tokens of requests that stand for the workload.
    prefill_s: seconds of a whole prompt of so many tokens, alone.
    decode_step_s: a decode step of all rows at the workload's contexts.
    copy_s: seconds of the KV cache of so many tokens over the link.
    tpot_slo_s: the target between tokens.
  """
  prompts = [prompt for prompt, _ in lengths]
  median, long = statistics.median(prompts), percentile(prompts, 90)
  copy, compute = copy_s(median), prefill_s(median)
  num_short = sum(prompt < SHORT_TOKENS for prompt in prompts)
  stall_s = prefill_s(long)
  gap_s = decode_step_s + stall_s
  return [
    Rule(
      "transfer",
      copy < compute,
      f"the KV cache of a median prompt ({median:.0f} tokens) takes {time_text(copy)} over the "
      f"link, its prefill {time_text(compute)}: "
      + (
        "the copy can hide behind the prefill"
        if copy < compute
        else "the copy cannot hide behind it"
      ),
    ),
    Rule(
      "length",
      2 * num_short <= len(prompts),
      f"{num_short / len(prompts):.0%} of the prompts have fewer than {SHORT_TOKENS} tokens: "
      + ("most are short" if 2 * num_short > len(prompts) else "most are long enough"),
    ),
    Rule(
      "interference",
      stall_s > FEW_STEPS * decode_step_s,
      f"a long prompt (90th percentile, {long:.0f} tokens) holds up decodes for "
      f"{time_text(stall_s)}, {stall_s / decode_step_s:.1f} decode steps of "
      f"{time_text(decode_step_s)}",
    ),
    Rule(
      "target",
      gap_s > tpot_slo_s,
      f"a decode step with that prompt before it takes {time_text(gap_s)}, "
      + ("more" if gap_s > tpot_slo_s else "less")
      + f" than the target between tokens, {time_text(tpot_slo_s)}",
    ),
  ]
