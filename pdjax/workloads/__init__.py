"""A workload: when requests arrive, how long they are, what they say. Imports no jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pdjax.core.clock import to_ticks
from pdjax.core.request import Request, SamplingParams
from pdjax.workloads.traces import Blocks


def make_requests(
  arrivals_s: Sequence[float],
  lengths: Sequence[tuple[int, int]],
  prompts: Sequence[tuple[int, ...]] | None,
  sampling: SamplingParams,
  blocks: Blocks | None = None,
) -> tuple[Request, ...]:
  """Requests 0, 1, ... in order of arrival, each with its own `max_tokens` from `lengths`.

  `lengths` are (prompt tokens, output tokens). `prompts` None leaves the prompts unsaid, which is
  enough for a simulation; `blocks` then say what they have in common.
  `sampling` gives everything but `max_tokens`.

  Raises:
    ValueError: columns of different length, arrivals going back in time, or a request that is no
      request (see `Request`).
  """
  counts = {"arrivals_s": len(arrivals_s), "lengths": len(lengths)}
  if prompts is not None:
    counts["prompts"] = len(prompts)
  if blocks is not None:
    counts["blocks.ids"] = len(blocks.ids)
  if len(set(counts.values())) > 1:
    listed = ", ".join(f"{n} {name}" for name, n in counts.items())
    raise ValueError(f"one of each per request, but there are {listed}")

  requests: list[Request] = []
  for i, (arrival_s, (prompt_tokens, output_tokens)) in enumerate(zip(arrivals_s, lengths)):
    if i and arrival_s < arrivals_s[i - 1]:
      raise ValueError(
        f"request {i}: arrival_s={arrival_s} is before request {i - 1} ({arrivals_s[i - 1]})"
      )
    requests.append(
      Request(
        request_id=i,
        arrival_s=to_ticks(arrival_s),
        num_prompt_tokens=prompt_tokens,
        prompt_ids=None if prompts is None else tuple(prompts[i]),
        prefix_hashes=None if blocks is None else blocks.ids[i],
        prefix_block_tokens=None if blocks is None else blocks.num_tokens,
        sampling=dataclasses.replace(sampling, max_tokens=output_tokens),
      )
    )
  return tuple(requests)
