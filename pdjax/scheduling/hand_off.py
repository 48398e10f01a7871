"""How KV caches go from prefill to decode pools: what to ask for, before and while they do."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HandOff:
  """How KV caches go from prefill to decode pools.

  `streams`: pages of a prompt are sent while its later chunks are computed yet; with `layer_groups`
  above 1 also those of a step's first layers while it computes the others, which is for long steps:
  each group is a function of its own to compile and to start.
  `most_bytes` may be on their way to a pool at once, or one part that is larger; None: any number.
  `reservation`: what a decode pool must have room for before anything is sent. `request`: all that
  the request may become, so that nobody there is ever preempted (DistServe). `prompt`: what there
  is, growing then; more requests share the pool, and the newest of them is computed again, by a
  prefill pool, when its pages run out.

  Raises:
    ValueError: another reservation, or a number below 1.
  """

  streams: bool = True
  layer_groups: int = 1
  most_bytes: int | None = None
  reservation: str = "request"

  def __post_init__(self):
    if self.reservation not in ("request", "prompt"):
      raise ValueError(f"hand_off.reservation={self.reservation!r} must be 'request' or 'prompt'")
    for name in ("layer_groups", "most_bytes"):
      value = getattr(self, name)
      if value is not None and value < 1:
        raise ValueError(f"hand_off.{name}={value} must be at least 1")
