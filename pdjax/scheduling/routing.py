"""Which pool takes a request. A router is a function of the pools' schedulers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdjax.core.request import Request
from pdjax.scheduling.scheduler import Scheduler

Router = Callable[[Sequence[Scheduler], Request], int]


def least_outstanding_tokens(schedulers: Sequence[Scheduler], request: Request) -> int:
  """The pool with the fewest prompt and output tokens left to compute; the first among equals."""
  left = [s.prefill_tokens_left + s.output_tokens_left for s in schedulers]
  return left.index(min(left))


ROUTERS: dict[str, Router] = {"least_outstanding_tokens": least_outstanding_tokens}
