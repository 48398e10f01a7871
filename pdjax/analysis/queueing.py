"""Mean TTFT of prefill as a queue, in closed form (DistServe, section 3.1). Changes nothing.

Prompts of equal length arrive as a Poisson process and are computed one at a time, in order of
arrival: an M/D/1 queue. Of several devices, a pipeline shortens what the next prompt waits for,
tensor parallelism the prompt itself.
"""

from __future__ import annotations

import math


def md1_wait_s(rate_rps: float, service_s: float) -> float:
  """The mean wait of M/D/1 (Pollaczek and Khinchine): R D^2 / (2 (1 - R D)).

  Raises:
    ValueError: a rate or a service time that is not positive, or more arrivals than are served.
  """
  for name, value in (("rate_rps", rate_rps), ("service_s", service_s)):
    if not 0 < value < math.inf:
      raise ValueError(f"{name}={value} must be positive")
  load = rate_rps * service_s
  if load >= 1:
    raise ValueError(
      f"rate_rps={rate_rps} is not served at {service_s} s each: the queue grows without end"
    )
  return load * service_s / (2 * (1 - load))


def mean_ttft_s(
  rate_rps: float, prefill_s: float, *, stages: int = 1, speedup: float = 1.0, pools: int = 1
) -> float:
  """Of prompts that take `prefill_s` on one device, at `rate_rps` in all.

  `stages` are those of a pipeline, each as long, so that the next prompt waits for one of them
  (equation 2 with two); `speedup` is that of tensor parallelism (equation 3: K); `pools` share the
  arrivals evenly.

  Raises:
    ValueError: a number that is not positive, fewer than one stage or pool, or more arrivals than
      are served.
  """
  for name, value in (("stages", stages), ("pools", pools)):
    if value < 1:
      raise ValueError(f"{name}={value} must be at least 1")
  if not 0 < speedup < math.inf:
    raise ValueError(f"speedup={speedup} must be positive")
  service_s = prefill_s / speedup
  return service_s + md1_wait_s(rate_rps / pools, service_s / stages)


def even_rate_rps(prefill_s: float, *, stages: int, speedup: float) -> float | None:
  """The rate from which a pipeline of `stages` has a shorter TTFT than tensor parallelism with a
  `speedup` has on as many devices. None: no rate that both serve.

  Raises:
    ValueError: a number that is not positive, or fewer than one stage.
  """

  def gain_s(rate_rps: float) -> float:
    pipelined_s = mean_ttft_s(rate_rps, prefill_s, stages=stages)
    return mean_ttft_s(rate_rps, prefill_s, speedup=speedup) - pipelined_s

  most = min(stages, speedup) / prefill_s
  low, high = most * 1e-9, most * (1 - 1e-9)
  if gain_s(low) > 0 or gain_s(high) < 0:
    return None
  while high - low > 1e-12 * most:
    middle = (low + high) / 2
    low, high = (low, middle) if gain_s(middle) > 0 else (middle, high)
  return high
