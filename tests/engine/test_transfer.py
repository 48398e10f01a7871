"""A hand-off moves exactly the bytes it should, and a copy that failed is never used."""

import jax
import numpy as np
import pytest

from pdjax.core.request import SamplingParams
from pdjax.engine import transfer
from pdjax.engine.transfer import TransferTicket
from pdjax.models.kv_cache import init_cache
from pdjax.serving.executor import Handle

pytestmark = pytest.mark.quick


def fill(executor, seed):
  """Other random bytes in every leaf of the cache; returns them on the host."""
  rng = np.random.default_rng(seed)
  cache = jax.tree.map(
    lambda x: rng.integers(0, 2**32, x.shape, np.uint32),
    init_cache(executor._layout),
  )
  executor._cache = jax.tree.map(lambda x, y: jax.device_put(x, y.sharding), cache, executor._cache)
  return cache


def page_of(layout, leaf, page):
  """The bytes [K, page_size, h] of one page, from what `kv_cache` says about the layouts alone."""
  outer, index = divmod(page, layout.pages_per_outer)
  return leaf[outer, :, index * layout.page_size : (index + 1) * layout.page_size]


def hand_over(source, target, source_pages, target_pages, num_tokens, *, row):
  sampling = SamplingParams(max_tokens=4)
  handle = Handle(
    request_id=5,
    num_tokens=num_tokens,
    num_prompt_tokens=num_tokens,
    first_token_id=123,
    sampling=sampling,
  )
  handle = source.export(handle, page_ids=tuple(source_pages), now_s=0.0)
  ticket = target.import_(handle, row=row, page_ids=tuple(target_pages), now_s=0.0)
  while not ticket.is_ready():
    pass
  ticket.result()
  return handle


LAYOUTS = ["slots", "paged"]


@pytest.mark.parametrize("to", LAYOUTS)
@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("num_tokens", [24, 25, 27, 79, 80])
def test_pages_arrive_byte_for_byte_and_nothing_else_changes(request, kind, to, num_tokens):
  """Of every layer, K and V, between devices and between layouts, whole last pages included."""
  source = request.getfixturevalue(f"checksum_{kind}").executors[0]
  target = request.getfixturevalue(f"checksum_{to}").executors[1]
  sent, before = fill(source, 1), fill(target, 2)
  num_pages, reserved = -(-num_tokens // 4), 20
  # In slots a row's pages follow its number; a decode pool has reserved more than arrives.
  source_pages = range(20, 20 + num_pages) if kind == "slots" else range(90, 90 - num_pages, -1)
  target_pages = range(40, 60) if to == "slots" else range(119, 119 - reserved, -1)
  handle = hand_over(source, target, source_pages, target_pages, num_tokens, row=2)
  assert handle.num_bytes == num_tokens * 2 * 2 * 4  # K and V, two layers, uint32
  after = jax.device_get(target._cache)
  arrived = dict(zip(target_pages, source_pages))
  for got, old, new in zip(*map(jax.tree.leaves, (after, before, sent)), strict=True):
    for page in range(target._layout.num_pages):
      want = page_of(source._layout, new, arrived[page]) if page in arrived else None
      if want is None:
        want = page_of(target._layout, old, page)
      np.testing.assert_array_equal(page_of(target._layout, got, page), want)
  for leaf, new in zip(*map(jax.tree.leaves, (source._cache, sent)), strict=True):
    np.testing.assert_array_equal(leaf, new, "the source changed")
  assert int(target._last_token[2]) == 123
  assert target._rows.tables[2, :reserved].tolist() == list(target_pages)
  source.reset()
  target.reset()


class _Pieces:
  """What `device_put` gives: a copy that ends when the test says so."""

  def __init__(self, error=None):
    self.has_ended, self._error = False, error

  def is_ready(self):
    return self.has_ended

  def block_until_ready(self):
    if self._error is not None:
      raise self._error


def make_ticket(monkeypatch, pieces, insert):
  monkeypatch.setattr(transfer.jax, "device_put", lambda x, sharding: pieces)
  ticket = TransferTicket(None, None, insert)
  monkeypatch.undo()
  return ticket


def test_a_ticket_is_ready_when_the_copy_is_and_inserts_it_once(monkeypatch):
  pieces, inserted = _Pieces(), []
  ticket = make_ticket(monkeypatch, pieces, inserted.append)
  assert not ticket.is_ready() and not ticket.is_ready() and not inserted
  pieces.has_ended = True
  assert ticket.is_ready() and ticket.is_ready()
  assert ticket.result() is None and inserted == [pieces]


def test_a_failed_copy_is_ready_raises_and_is_never_inserted(monkeypatch):
  pieces, inserted = _Pieces(ConnectionError("peer died")), []
  pieces.has_ended = True
  ticket = make_ticket(monkeypatch, pieces, inserted.append)
  for _ in range(2):
    assert ticket.is_ready()
    with pytest.raises(ConnectionError, match="peer died"):
      ticket.result()
  assert not inserted


def test_an_insert_that_fails_surfaces_in_the_result(monkeypatch):
  def insert(pieces):
    raise MemoryError("no room")

  pieces = _Pieces()
  pieces.has_ended = True
  ticket = make_ticket(monkeypatch, pieces, insert)
  assert ticket.is_ready()
  with pytest.raises(MemoryError, match="no room"):
    ticket.result()
