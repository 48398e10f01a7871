"""Which pages of a pool's cache belong to which row, and which can be used again. Host integers."""

from __future__ import annotations

import collections
import dataclasses
import heapq
from collections.abc import Callable, Sequence, Set

from pdjax.core.names import pick


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


@dataclasses.dataclass(slots=True)
class _Cached:
  """A page whose content is known by its key."""

  key: bytes
  depth: int  # pages before it in its prefix
  num_hits: int = 0
  last_use: int = 0  # counts uses of the pool


# Which unused page goes first: the least of these. The end of a prefix goes before its beginning,
# without which it is no use. Mooncake compares the three (tech report, Table 1); its length-aware
# rule gives up the ends of long prefixes first.
EVICTION: dict[str, Callable[[_Cached], tuple[int, ...]]] = {
  "lru": lambda page: (page.last_use, -page.depth),
  "lfu": lambda page: (page.num_hits, page.last_use, -page.depth),
  "length": lambda page: (-page.depth, page.last_use),
}


class PagePool:
  """Rows and pages of one pool: a row free or held, a page free, held by rows, or cached.

  A page that was published keeps its content when the last row gives it up, until it is needed.
  Such a page counts as free. A row given back while a plan that touches it is in flight stays held
  until the scheduler says that the plan has ended (`release` is called then); this class knows no
  plans.

  Raises:
    ValueError: an eviction rule that does not exist.
  """

  def __init__(self, config: PageConfig, *, eviction: str = "lru"):
    self.config = config
    self._free_rows = list(range(config.num_rows - 1, -1, -1))
    self._free_pages = [] if config.contiguous else list(range(config.num_pages - 1, -1, -1))
    self._tables: dict[int, list[int]] = {}
    self._shared: dict[int, int] = {}  # page -> rows that hold it beyond the first
    self._cached: dict[int, _Cached] = {}  # published pages, held or not
    self._page_of: dict[bytes, int] = {}
    self._idle: set[int] = set()  # published and held by no row
    self._order: list[tuple[tuple[int, ...], int]] = []  # heap over `_idle`, with stale entries
    self._priority = pick(EVICTION, eviction, "eviction rule")
    self._num_uses = 0

  @property
  def num_free_rows(self) -> int:
    return len(self._free_rows)

  @property
  def held_rows(self) -> Set[int]:
    return self._tables.keys()

  @property
  def num_free_pages(self) -> int:
    if self.config.contiguous:
      return self.config.num_pages - sum(map(len, self._tables.values()))
    return len(self._free_pages) + len(self._idle)

  @property
  def num_cached_pages(self) -> int:
    """Pages whose content the prefix cache knows, held or not."""
    return len(self._cached)

  def num_held(self, row: int) -> int:
    """Pages of `row`."""
    return len(self._tables[row])

  def num_missing(self, row: int | None, num_tokens: int) -> int:
    """Pages that `row` (None: a new row) lacks to hold `num_tokens`."""
    held = len(self._tables[row]) if row is not None else 0
    return max(0, -(-num_tokens // self.config.page_size) - held)

  def has_room(
    self, row: int | None, num_tokens: int, *, spare: int = 0, keys: Sequence[bytes] = ()
  ) -> bool:
    """Whether `grow` would succeed and leave `spare` pages free. Does not change the pool.

    For a new row that begins with the cached pages of `keys`.
    """
    held = len(self._tables[row]) if row is not None else 0
    needed = -(-num_tokens // self.config.page_size)
    if max(held, needed) > self.config.pages_per_row:
      return False
    if self.config.contiguous:
      return True
    taken = max(0, needed - held - len(keys))
    taken += sum(self._page_of[key] in self._idle for key in keys)
    return taken == 0 or taken + spare <= self.num_free_pages

  def match(self, keys: Sequence[bytes]) -> int:
    """How many of `keys`, from the first on, are cached. Does not change the pool."""
    n = 0
    for key in keys:
      if key not in self._page_of:
        break
      n += 1
    return n

  def take_row(self, keys: Sequence[bytes] = ()) -> int:
    """Gives out a free row whose table begins with the cached pages of `keys`."""
    row = self._free_rows.pop()
    table = [self._page_of[key] for key in keys]
    self._tables[row] = table
    self._num_uses += 1
    for page in table:
      if page in self._idle:
        self._idle.remove(page)
      else:
        self._shared[page] = self._shared.get(page, 0) + 1
      cached = self._cached[page]
      cached.num_hits += 1
      cached.last_use = self._num_uses
    return row

  def grow(self, row: int, num_tokens: int) -> tuple[int, ...] | None:
    """Extends the table of `row` to hold `num_tokens`; returns the new pages, None without room."""
    table, free, config = self._tables[row], self._free_pages, self.config
    needed = -(-num_tokens // config.page_size)
    missing = needed - len(table)
    if missing <= 0:
      return ()
    if needed > config.pages_per_row:
      return None
    if config.contiguous:
      first = row * config.pages_per_row + len(table)
      new = tuple(range(first, first + missing))
    elif missing <= len(free):
      new = tuple(free[: -missing - 1 : -1])
      del free[len(free) - missing :]
    elif missing > self.num_free_pages:
      return None
    else:
      new = tuple(free.pop() if free else self._evict() for _ in range(missing))
    table.extend(new)
    return new

  def table(self, row: int) -> tuple[int, ...]:
    """The pages of `row` in the order of their positions."""
    return tuple(self._tables[row])

  def publish(self, row: int, index: int, key: bytes) -> None:
    """Makes page `index` of `row` known by `key`: its content is complete and will not change.

    Where another page has that key already, this one stays unknown.
    """
    if key not in self._page_of:
      page = self._tables[row][index]
      self._page_of[key] = page
      self._cached[page] = _Cached(key=key, depth=index, last_use=self._num_uses)

  def forget(self) -> None:
    """Empties the prefix cache: the content of all pages is gone."""
    self._free_pages.extend(self._idle)
    for part in (self._cached, self._page_of, self._idle, self._order):
      part.clear()

  def release(self, row: int) -> None:
    """Takes a row and its pages back.

    Raises:
      KeyError: the row is not held (it was already released).
    """
    pages = self._tables.pop(row)
    self._free_rows.append(row)
    if self.config.contiguous:
      return
    self._num_uses += 1
    if not (self._cached or self._shared):
      self._free_pages += reversed(pages)
      return
    for page in reversed(pages):
      if (num_others := self._shared.pop(page, 0)) > 1:
        self._shared[page] = num_others - 1
      elif num_others:
        pass  # one is left
      elif page in self._cached:
        self._rest(page)
      else:
        self._free_pages.append(page)

  def _rest(self, page: int) -> None:
    self._idle.add(page)
    cached = self._cached[page]
    cached.last_use = self._num_uses
    heapq.heappush(self._order, (self._priority(cached), page))
    if len(self._order) > 2 * len(self._idle) + 64:
      self._order = [(self._priority(self._cached[page]), page) for page in self._idle]
      heapq.heapify(self._order)

  def _evict(self) -> int:
    while True:
      priority, page = heapq.heappop(self._order)
      if page in self._idle and priority == self._priority(self._cached[page]):
        break
    self._idle.remove(page)
    del self._page_of[self._cached.pop(page).key]
    return page

  def check(self) -> None:
    """Raises AssertionError unless every row and page is free, cached, or held as often as rows
    say."""
    rows = sorted(self._free_rows + list(self._tables))
    assert rows == list(range(self.config.num_rows)), f"rows lost or held twice: {rows}"
    if self.config.contiguous:
      for row, table in self._tables.items():
        first = row * self.config.pages_per_row
        assert table == list(range(first, first + len(table))), "a row holds a page of another"
      return
    users = collections.Counter(page for table in self._tables.values() for page in table)
    shared = {page: n - 1 for page, n in users.items() if n > 1}
    assert shared == self._shared, "pages are held by other rows than they are counted for"
    pages = sorted([*users, *self._free_pages, *self._idle])
    assert pages == list(range(self.config.num_pages)), "pages lost or held twice"
    assert self._idle <= self._cached.keys()
    assert {page: cached.key for page, cached in self._cached.items()} == {
      page: key for key, page in self._page_of.items()
    }, "the prefix cache knows a page by two keys"
    waiting = {page for _, page in self._order}
    assert self._idle <= waiting, "a cached page can never be evicted"
