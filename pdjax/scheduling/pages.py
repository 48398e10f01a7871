"""Which pages of a pool's cache belong to which row. Host integers only."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PageConfig:
  """The memory of one pool as the scheduler sees it.

  `contiguous` is the rule of the `slots` layout: page i of row r has id r * pages_per_row + i, so a
  row is one stretch of memory and every row can grow to its full length.

  Raises:
    ValueError: a size below 1, or contiguous pages that do not fill the rows exactly.
  """

  num_rows: int
  page_size: int
  pages_per_row: int
  num_pages: int
  contiguous: bool = False

  def __post_init__(self):
    for name in ("num_rows", "page_size", "pages_per_row", "num_pages"):
      if getattr(self, name) < 1:
        raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
    if self.contiguous and self.num_pages != self.num_rows * self.pages_per_row:
      raise ValueError(
        f"contiguous rows need num_pages = num_rows * pages_per_row = "
        f"{self.num_rows * self.pages_per_row}, not {self.num_pages}"
      )

  @property
  def capacity_tokens(self) -> int:
    """Longest sequence (cached tokens) that fits when it is alone in the pool."""
    return min(self.pages_per_row, self.num_pages) * self.page_size


class PagePool:
  """Rows and pages of one pool: free or held, each exactly once.

  A row given back while a plan that touches it is in flight stays held until the scheduler says
  that the plan has ended (`release` is called then); this class knows no plans.
  """

  def __init__(self, config: PageConfig):
    self.config = config
    self._free_rows = list(range(config.num_rows - 1, -1, -1))
    self._free_pages = [] if config.contiguous else list(range(config.num_pages - 1, -1, -1))
    self._tables: dict[int, list[int]] = {}

  @property
  def num_free_rows(self) -> int:
    return len(self._free_rows)

  @property
  def num_free_pages(self) -> int:
    if self.config.contiguous:
      return self.config.num_pages - sum(map(len, self._tables.values()))
    return len(self._free_pages)

  def num_missing(self, row: int | None, num_tokens: int) -> int:
    """Pages that `row` (None: a new row) lacks to hold `num_tokens`."""
    held = len(self._tables[row]) if row is not None else 0
    return max(0, -(-num_tokens // self.config.page_size) - held)

  def has_room(self, row: int | None, num_tokens: int, *, spare: int = 0) -> bool:
    """Whether `grow` would succeed and leave `spare` pages free. Does not change the pool."""
    missing = self.num_missing(row, num_tokens)
    held = len(self._tables[row]) if row is not None else 0
    if held + missing > self.config.pages_per_row:
      return False
    return self.config.contiguous or missing == 0 or missing + spare <= len(self._free_pages)

  def take_row(self) -> int:
    """Gives out a free row with an empty table."""
    row = self._free_rows.pop()
    self._tables[row] = []
    return row

  def grow(self, row: int, num_tokens: int) -> tuple[int, ...] | None:
    """Extends the table of `row` to hold `num_tokens`; returns the new pages, None without room."""
    if not self.has_room(row, num_tokens):
      return None
    table, missing = self._tables[row], self.num_missing(row, num_tokens)
    if self.config.contiguous:
      first = row * self.config.pages_per_row + len(table)
      new = tuple(range(first, first + missing))
    else:
      new = tuple(self._free_pages.pop() for _ in range(missing))
    table.extend(new)
    return new

  def table(self, row: int) -> tuple[int, ...]:
    """The pages of `row` in the order of their positions."""
    return tuple(self._tables[row])

  def release(self, row: int) -> None:
    """Takes a row and its pages back.

    Raises:
      KeyError: the row is not held (it was already released).
    """
    pages = self._tables.pop(row)
    self._free_rows.append(row)
    if not self.config.contiguous:
      self._free_pages.extend(reversed(pages))

  def check(self) -> None:
    """Raises AssertionError unless every row and page is free or held exactly once."""
    rows = sorted(self._free_rows + list(self._tables))
    assert rows == list(range(self.config.num_rows)), f"rows lost or held twice: {rows}"
    held = [page for table in self._tables.values() for page in table]
    if self.config.contiguous:
      expected = [
        row * self.config.pages_per_row + i
        for row, table in self._tables.items()
        for i in range(len(table))
      ]
      assert held == expected, "a contiguous row holds a page of another row"
    else:
      pages = sorted(held + self._free_pages)
      assert pages == list(range(self.config.num_pages)), "pages lost or held twice"
