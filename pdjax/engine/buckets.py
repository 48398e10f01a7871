"""The few shapes that steps are compiled for. Everything is padded to the next one up."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


def grow_to(lowest: int, highest: int, ratio: int) -> tuple[int, ...]:
  """`lowest`, times `ratio` until `highest` is reached, which is the last.

  Raises:
    ValueError: lowest is above highest.
  """
  if lowest > highest:
    raise ValueError(f"lowest={lowest} is above highest={highest}")
  sizes = [lowest]
  while sizes[-1] < highest:
    sizes.append(min(ratio * sizes[-1], highest))
  return tuple(sizes)


def pick_bucket(buckets: Sequence[int], size: int) -> int:
  """The smallest bucket that holds `size`.

  Raises:
    ValueError: none does.
  """
  for bucket in buckets:
    if size <= bucket:
      return bucket
  raise ValueError(f"size {size} is larger than the largest bucket {buckets[-1]}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
  """Shapes of one pool, each ascending.

  prefill: tokens of a step without decodes; mixed: of a step with chunks and decodes, both counted;
  rows: tokens of a step of decodes alone; pages: pages of a hand-off.
  """

  prefill: tuple[int, ...] = ()
  mixed: tuple[int, ...] = ()
  rows: tuple[int, ...] = ()
  pages: tuple[int, ...] = ()
