"""The few shapes that steps are compiled for. Everything is padded to the next one up."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


def powers_of_two(lowest: int, highest: int) -> tuple[int, ...]:
  """`lowest`, doubled until `highest` is reached, which is the last."""
  sizes = [lowest]
  while sizes[-1] < highest:
    sizes.append(min(2 * sizes[-1], highest))
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

  prefill: padded prefill tokens of a step without decodes; mixed: of a step with them, whose decode
  part always has all rows; rows: decode rows; pages: pages of a hand-off.
  """

  prefill: tuple[int, ...] = ()
  mixed: tuple[int, ...] = ()
  rows: tuple[int, ...] = ()
  pages: tuple[int, ...] = ()
