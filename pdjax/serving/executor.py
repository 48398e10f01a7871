"""What a pool's device must be able to do. Takes and gives plain data, so it may live elsewhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
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
  """A part of a sequence between two pools; the last part has what the next one needs to go on.

  That is `first_token_id`, the token that prefill sampled, which is never computed again; None is a
  part that others follow. `token_ids` are those of all positions handed over, where sampling looks
  back at them: with the last part. The loop makes a handle, `export` fills in the last two fields.
  `payload` is the executors' own (device arrays, copied pages, nothing in simulation) and the only
  part that is not plain data.
  """

  request_id: int
  start: int = 0  # whole pages before it are there: sent in parts before, or in the prefix cache
  num_tokens: int  # positions [start, num_tokens) are handed over: whole pages, or the end
  num_prompt_tokens: int
  first_token_id: int | None
  sampling: SamplingParams
  layers: tuple[int, int] | None = None  # [first, last) that are handed over; None: all
  token_ids: tuple[int, ...] | None = None
  num_bytes: int = 0
  payload: Any = None


class PoolLost(Exception):
  """A pool's process has ended or does not answer, and all that it held is lost. It may come back.

  Raised by calls and by tickets of its executor; `Executor.is_up` says when it can be used again.
  """


class StrokeTicket(Ticket, Protocol):
  """A ticket of steps that follow one another, each ending at its own of `ends_s`, ascending."""

  ends_s: list[float]

  def cut(self, now_s: float) -> None:
    """Lets no step begin after `now_s`, or at it: the ends of those that would are taken away."""
    ...


class Executor(Protocol):
  """One pool's device. Calls return at once; work happens in the order in which it was submitted.

  `vocab_size` None accepts any token id (a simulation that knows only lengths), `page_shape` None
  any page. `bytes_per_token` is what an export counts for each, over all layers.

  A step goes through `layer_groups`, ranges [first, last) of layers, one after another. Those on
  devices of their own are stages: `num_stages` steps can be on their way at once, each in another.

  `is_up` False: the pool was lost and is not back yet; nothing may be asked of it.

  `repeats`: it knows how long steps take before they begin, and takes many in one stroke.
  """

  vocab_size: int | None
  page_shape: PageShape | None
  bytes_per_token: int
  layer_groups: tuple[tuple[int, int], ...]
  num_stages: int
  is_up: bool
  repeats: bool

  def submit(
    self,
    plan: StepPlan,
    now_s: float,
    exports: Sequence[tuple[Handle, tuple[int, ...]]] = (),
  ) -> Ticket:
    """Starts a step. The ticket's result is a `StepResult`.

    `exports` are handles, with their pages, that calls before the next step may export: their pages
    are read as soon as the step has computed their layers, before the others.
    """
    ...

  def submit_stroke(
    self, plan: StepPlan, now_s: float, num_steps: int, until_s: float | None
  ) -> StrokeTicket:
    """Starts a step of decodes so many times, each a position further. Only where it `repeats`.

    Fewer times will do where those that are left would begin after `until_s`.
    """
    ...

  def export(self, handle: Handle, *, page_ids: tuple[int, ...], now_s: float) -> Handle:
    """Starts to read the pages of the positions that are handed over.

    Returns the handle with its bytes and payload.
    The pages may be reused once the import has ended.
    """
    ...

  def import_(self, handle: Handle, *, row: int, page_ids: tuple[int, ...], now_s: float) -> Ticket:
    """Starts to copy an exported part into own pages; the last part seats the sequence in `row`.

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


def export_bytes(executor: Executor, handle: Handle) -> int:
  """What an export by this handle has: of its positions, the share of its layers."""
  num_layers = executor.layer_groups[-1][1]
  first, last = handle.layers or (0, num_layers)
  num_bytes = (handle.num_tokens - handle.start) * executor.bytes_per_token
  return num_bytes * (last - first) // num_layers


class Nowhere:
  """Stands for a device where a cluster is only asked what it would refuse. Can do nothing."""

  vocab_size = None
  page_shape = None
