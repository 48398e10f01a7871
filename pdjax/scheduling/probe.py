"""Plans that no scheduler made: to warm up compiled steps and to time them."""

from __future__ import annotations

from collections.abc import Sequence

from pdjax.core.plan import DecodeSlices, PageUpdates, Slice, StepPlan
from pdjax.core.request import SamplingParams
from pdjax.scheduling.pages import PageConfig


def probe_plan(
  pages: PageConfig,
  *,
  prefills: Sequence[int] = (),
  start: int = 0,
  decodes: int = 0,
  context: int = 1,
) -> StepPlan:
  """Prompts of these lengths in the first rows, `decodes` of `context` tokens in the last.

  Whole prompts, or chunks behind `start` cached tokens each. Only the last prompt emits a token, so
  that many prompts fill a bucket as one would.
  Where a pool has too few pages for all of them, rows share pages: what is computed is meaningless,
  its cost is not.

  Raises:
    ValueError: more rows or longer ones than the pool has.
  """
  longest = max([*(start + num_tokens for num_tokens in prefills), context])
  if len(prefills) + decodes > pages.num_rows or longest > pages.capacity_tokens:
    raise ValueError(
      f"prefills={tuple(prefills)} behind {start} tokens and {decodes} decodes of {context} do not "
      f"fit {pages.num_rows} rows of {pages.capacity_tokens} tokens"
    )
  decode_rows = tuple(range(pages.num_rows - decodes, pages.num_rows))
  entries = [
    (row, i, (row * pages.pages_per_row + i) % pages.num_pages)
    for row in (*range(len(prefills)), *decode_rows)
    for i in range(pages.pages_per_row)
  ]
  update_rows, indices, page_ids = zip(*entries, strict=True)
  return StepPlan(
    step_id=0,
    prefills=tuple(
      Slice(
        request_id=-1,
        generation=0,
        row=row,
        num_prompt_tokens=start + num_tokens,
        start=start,
        num_tokens=num_tokens,
        token_ids=(0,) * num_tokens,
        emits_token=row == len(prefills) - 1,
        sampling=SamplingParams(max_tokens=1),
      )
      for row, num_tokens in enumerate(prefills)
    ),
    decodes=DecodeSlices(
      request_ids=decode_rows,
      generations=(0,) * decodes,
      rows=decode_rows,
      positions=(context - 1,) * decodes,
    ),
    page_updates=PageUpdates(rows=update_rows, indices=indices, page_ids=page_ids),
  )
