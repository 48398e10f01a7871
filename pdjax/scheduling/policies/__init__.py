"""Policies by name. A new one is a new file here and a line below."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from pdjax.core.names import make, options_of, pick
from pdjax.scheduling.policies.deadline import Deadline
from pdjax.scheduling.policies.decode_only import decode_only
from pdjax.scheduling.policies.faster_transformer import FasterTransformer
from pdjax.scheduling.policies.fcfs import fcfs
from pdjax.scheduling.policies.hybrid_only import hybrid_only
from pdjax.scheduling.policies.orca import orca
from pdjax.scheduling.policies.prefill_chunks import prefill_chunks
from pdjax.scheduling.policies.prefill_first import PrefillFirst
from pdjax.scheduling.policies.prefill_only import prefill_only
from pdjax.scheduling.policies.sarathi import Sarathi
from pdjax.scheduling.policies.shortest_prefill_first import ShortestPrefillFirst
from pdjax.scheduling.policies.sim_dist_serve import SimDistServe
from pdjax.scheduling.policies.simple_chunking import SimpleChunking
from pdjax.scheduling.scheduler import Policy


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PolicySpec:
  """A policy, and what it needs of the limits of its pool and of the shapes compiled for it.

  `policy` is a function, or a class where there are options (its fields) or something to keep
  between steps. `chunks`: it cuts prompts. `mixes`: prefill and decode may share a step.
  `reservation` is the scheduler's. `half`: the role of the pools that it is for, where it leaves
  half of a request to another.
  """

  policy: Policy | type[Policy]
  chunks: bool
  mixes: bool
  reservation: str = "prompt"
  half: str | None = None

  @property
  def options(self) -> dict[str, Any]:
    """The options by name, with their types."""
    return options_of(self.policy)


POLICIES: dict[str, PolicySpec] = {
  "faster_transformer": PolicySpec(
    policy=FasterTransformer, chunks=False, mixes=False, reservation="max_len"
  ),
  "orca": PolicySpec(policy=orca, chunks=False, mixes=True, reservation="max_len"),
  "prefill_first": PolicySpec(policy=PrefillFirst, chunks=False, mixes=False),
  "sarathi": PolicySpec(policy=Sarathi, chunks=True, mixes=True),
  "simple_chunking": PolicySpec(policy=SimpleChunking, chunks=True, mixes=False),
  "hybrid_only": PolicySpec(policy=hybrid_only, chunks=False, mixes=True),
  "fcfs": PolicySpec(policy=fcfs, chunks=True, mixes=True),
  "shortest_prefill_first": PolicySpec(policy=ShortestPrefillFirst, chunks=True, mixes=True),
  "deadline": PolicySpec(policy=Deadline, chunks=True, mixes=True),
  "sim_dist_serve": PolicySpec(policy=SimDistServe, chunks=False, mixes=False),
  "prefill_only": PolicySpec(policy=prefill_only, chunks=False, mixes=False, half="prefill"),
  "prefill_chunks": PolicySpec(policy=prefill_chunks, chunks=True, mixes=False, half="prefill"),
  "decode_only": PolicySpec(
    policy=decode_only, chunks=True, mixes=False, reservation="request", half="decode"
  ),
}


def make_policy(name: str, options: Mapping[str, Any] | None = None) -> Policy:
  """The policy called `name` for one pool: two pools never share what it keeps.

  Raises:
    ValueError: no such policy or option, or an option of the wrong type or out of range.
  """
  return make(pick(POLICIES, name, "policy").policy, options or {}, f"policy {name}")
