"""What a pool's device must be able to do. Takes and gives plain data, so it may live elsewhere."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

from pdjax.core.clock import Ticket
from pdjax.core.plan import StepPlan
from pdjax.core.request import SamplingParams


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PageShape:
  """What is in a page: pools can exchange theirs only if they are alike in all of this."""

  page_size: int
  num_layers: int
  num_kv_heads: int  # of the model: how they are split over devices, and copied, is a pool's own
  head_dim: int
  dtype: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Handle:
  """A sequence between two pools: what the next one needs to go on with it.

  `first_token_id` is the token that prefill sampled; it is never computed again. `token_ids` are
  those of the positions handed over, where sampling looks back at them. The loop makes a handle,
  `export` fills in the last two fields. `payload` is the executors' own (device arrays, copied
  pages, nothing in simulation) and the only part that is not plain data.
  """

  request_id: int
  start: int = 0  # whole pages before it are in the target's prefix cache
  num_tokens: int  # positions [start, num_tokens) are handed over
  num_prompt_tokens: int
  first_token_id: int
  sampling: SamplingParams
  token_ids: tuple[int, ...] | None = None
  num_bytes: int = 0
  payload: Any = None


class Executor(Protocol):
  """One pool's device. Calls return at once; work happens in the order in which it was submitted.

  `vocab_size` None accepts any token id (a simulation that knows only lengths), `page_shape` None
  any page.
  """

  vocab_size: int | None
  page_shape: PageShape | None

  def submit(self, plan: StepPlan, now_s: float) -> Ticket:
    """Starts a step. The ticket's result is a `StepResult`."""
    ...

  def export(self, handle: Handle, *, page_ids: tuple[int, ...], now_s: float) -> Handle:
    """Starts to read the pages of the positions that are handed over.

    Returns the handle with its bytes and payload.
    The pages may be reused once the import has ended.
    """
    ...

  def import_(self, handle: Handle, *, row: int, page_ids: tuple[int, ...], now_s: float) -> Ticket:
    """Starts to copy an exported sequence into own pages and seats it in `row`.

    `page_ids` are those of all its positions, also of those that are here already.
    Steps submitted after the ticket is ready see it. The ticket's result is None.
    """
    ...

  def drop(self, handle: Handle) -> None:
    """Forgets an export, imported or not."""
    ...

  def recover(self) -> bool:
    """Makes the pool usable after a call or a ticket has failed; says whether K and V are lost.

    Then every row is empty, and whatever was submitted before counts for nothing. Exports that had
    begun are left as they are.
    """
    ...


class Nowhere:
  """Stands for a device where a cluster is only asked what it would refuse. Can do nothing."""

  vocab_size = None
  page_shape = None
