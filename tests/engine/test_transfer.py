"""A hand-off moves exactly the bytes it should, and a copy that failed is never used."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine.pools import PAGE_SIZE, PAGES_PER_ROW, ROWS, cpus

from pdjax.core.model_config import TINY
from pdjax.core.plan import Swap
from pdjax.core.request import SamplingParams
from pdjax.engine import transfer
from pdjax.engine.buckets import Buckets
from pdjax.engine.build import build_executors, warm_up
from pdjax.engine.mesh import make_mesh
from pdjax.engine.transfer import Reshard, SpareMemory, TransferTicket, make_plan
from pdjax.models.kv_cache import init_cache
from pdjax.models.model import axes_sharding
from pdjax.models.transformer import from_arrays, random_arrays
from pdjax.scheduling.pages import PageConfig
from pdjax.scheduling.probe import probe_plan
from pdjax.serving.executor import Handle

COMPILED = "/jax/core/compile/backend_compile_duration"
SIZES = [1, 2, 4, 8]  # of the pools
quick = pytest.mark.quick


def fill(executor, seed):
  """Other random bytes in every leaf of the cache, the same in the copies of a head.

  Returns them on the host.
  """
  rng, layout = np.random.default_rng(seed), executor._layout

  def draw(x):
    outer, num_heads, inner, head_dim = x.shape
    shape = (outer, num_heads // layout.kv_copies, inner, head_dim)
    if x.dtype == np.uint32:
      return rng.integers(0, 2**32, shape, np.uint32).repeat(layout.kv_copies, axis=1)
    return rng.random(shape, x.dtype).repeat(layout.kv_copies, axis=1)

  cache = jax.tree.map(draw, init_cache(layout))
  executor._cache = jax.tree.map(  # numpy's memory cannot be donated
    lambda x, y: jnp.copy(jax.device_put(x, y.sharding)), cache, executor._cache
  )
  return cache


def page_of(layout, leaf, page):
  """The bytes [copy, K, page_size, h] of one page, from what `kv_cache` says of layouts alone."""
  outer, index = divmod(page, layout.pages_per_outer)
  heads = leaf[outer, :, index * layout.page_size : (index + 1) * layout.page_size]
  return np.stack([heads[copy :: layout.kv_copies] for copy in range(layout.kv_copies)])


def export(source, pages, num_tokens):
  handle = Handle(
    request_id=5,
    num_tokens=num_tokens,
    num_prompt_tokens=num_tokens,
    first_token_id=123,
    sampling=SamplingParams(max_tokens=4),
  )
  return source.export(handle, page_ids=tuple(pages), now_s=0.0)


def hand_over(source, target, source_pages, target_pages, num_tokens, *, row):
  handle = export(source, source_pages, num_tokens)
  ticket = target.import_(handle, row=row, page_ids=tuple(target_pages), now_s=0.0)
  while not ticket.is_ready():
    pass
  ticket.result()
  return handle


def check_arrived(source, target, sent, before, arrived):
  """`arrived`: target page -> source page. Every other page, and the source, are as they were."""
  after = jax.device_get(target._cache)
  for got, old, new in zip(*map(jax.tree.leaves, (after, before, sent)), strict=True):
    for page in range(target._layout.num_pages):
      want = page_of(target._layout, old, page)
      if page in arrived:
        one = page_of(source._layout, new, arrived[page])[:1]
        want = np.broadcast_to(one, want.shape)
      np.testing.assert_array_equal(page_of(target._layout, got, page), want)
  for leaf, new in zip(*map(jax.tree.leaves, (source._cache, sent)), strict=True):
    np.testing.assert_array_equal(leaf, new, "the source changed")


LAYOUTS = ["slots", "paged"]


@quick
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
  check_arrived(source, target, sent, before, dict(zip(target_pages, source_pages)))
  assert int(target._last_token[2]) == 123
  assert target._rows.tables[2, :reserved].tolist() == list(target_pages)
  source.reset()
  target.reset()


def pieces_sharding(shape, devices):
  return axes_sharding("2 L K P h", shape, make_mesh(devices))


def num_parts(num_kv_heads, *sizes):
  """Of the heads, that pools of these sizes hand to one another."""
  return math.lcm(*(tp if num_kv_heads % tp == 0 else 1 for tp in sizes))


def random_pieces(num_kv_heads, source, target):
  """What a pool on the first `source` devices gathers for one of `target`; their bytes.

  As an array where it need not be cut.
  """
  shape = (2, 3, num_kv_heads, 8, 4)
  host = np.random.default_rng(0).integers(0, 2**32, shape, np.uint32)
  num_shards = num_parts(num_kv_heads, source)
  num_cuts = num_parts(num_kv_heads, source, target) // num_shards
  by_cut = host.reshape(2, 3, num_shards, num_cuts, -1, 8, 4)
  sharding = pieces_sharding(shape, jax.devices()[:source])
  cuts = tuple(
    jax.device_put(by_cut[:, :, :, cut].reshape(2, 3, -1, 8, 4), sharding)
    for cut in range(num_cuts)
  )
  return host, cuts if num_cuts > 1 else cuts[0]


def on_each_device(pieces):
  """What each device has, its cuts side by side."""
  cuts = [{s.device: np.asarray(s.data) for s in x.addressable_shards}
          for x in jax.tree.leaves(pieces)]  # fmt: skip
  return {device: np.concatenate([cut[device] for cut in cuts], axis=2) for device in cuts[0]}


@quick
@pytest.mark.parametrize("num_kv_heads", [8, 2, 1])
@pytest.mark.parametrize(("source", "target"), list(itertools.product(SIZES, SIZES)))
def test_pieces_are_equal_on_pools_of_any_two_sizes(source, target, num_kv_heads, monkeypatch):
  """On each device, split or replicated as the pool wants them, with all layers in one part."""
  host, x = random_pieces(num_kv_heads, source, target)
  sent = jax.device_get(x)
  sharding = pieces_sharding(host.shape, jax.devices()[::-1][:target])
  reshard, parts, put = Reshard(sharding), [], jax.device_put
  monkeypatch.setattr(jax, "device_put", lambda own, to: (parts.extend(own), put(own, to))[1])
  arrived = on_each_device(reshard.send(x))
  wanted = sharding.devices_indices_map(host.shape)
  assert arrived.keys() == wanted.keys()
  for device, index in wanted.items():
    np.testing.assert_array_equal(arrived[device], host[index])
  jax.tree.map(np.testing.assert_array_equal, x, sent)  # the source is as it was
  read = sum(part.size for part in parts)
  assert read == sum(of_device.size for of_device in arrived.values()), "an element went twice"
  if num_kv_heads == 8:
    assert len(parts) == max(source, target)
  assert not reshard.num_traces


@quick
def test_of_other_layers_one_slice_is_compiled_for_each_shape():
  host, x = random_pieces(8, 2, 4)
  reshard = Reshard(pieces_sharding(host.shape, jax.devices()[::-1][:4]))
  assert reshard.take_layers(x, (3, 6), (3, 6)) is x and not reshard.num_traces
  for _ in range(3):
    taken = reshard.take_layers(x, (3, 6), (4, 6))
    arrived = on_each_device(reshard.send(taken))
    np.testing.assert_array_equal(arrived[jax.devices()[-2]], host[:, 1:, 2:4])
  assert reshard.num_traces.total() == 1


@quick
def test_a_plan_reads_replicas_in_turn_and_pools_whose_sizes_do_not_divide():
  assert make_plan([(0, 3), (3, 6)] * 2, [(0, 3), (0, 3), (3, 6)]) == [[0], [2], [1]]
  assert make_plan([(0, 6)] * 4, [(0, 6)] * 4) == [[0], [1], [2], [3]]
  assert make_plan([(0, 1), (1, 2), (2, 3)], [(0, 3), (1, 3)]) == [[0, 1, 2], [1, 2]]
  ones = [(i, i + 1) for i in (0, 3, 1, 4, 2, 5)]  # of two devices, cut for three
  assert make_plan(ones, [(0, 2), (2, 4), (4, 6)]) == [[0, 2], [4, 1], [3, 5]]


@quick
def test_holes_and_pieces_that_were_cut_or_split_otherwise_are_refused():
  with pytest.raises(ValueError, match="no cut is of heads 2 to 4 at most"):
    make_plan([(0, 2), (3, 4)], [(0, 4)])
  host, x = random_pieces(8, 2, 2)
  reshard = Reshard(pieces_sharding(host.shape, jax.devices()[::-1][:4]))
  with pytest.raises(ValueError, match="no cut is of heads 0 to 2 at most"):
    reshard.send(x)
  by_positions = jax.sharding.PartitionSpec(None, None, None, x.sharding.mesh.axis_names[0])
  with pytest.raises(ValueError, match=r"by their heads alone, not into \(2, 3, 8, 4, 4\)"):
    reshard.send(jax.device_put(host, jax.sharding.NamedSharding(x.sharding.mesh, by_positions)))


@quick
@pytest.mark.parametrize(("source", "target"), [(2, 2), (1, 2), (2, 4), (4, 2)])
def test_a_hand_off_is_sent_while_its_pieces_are_being_computed(source, target):
  """What `jax.device_put` does not where the sizes differ: it waits for them, on the host."""
  host, x = random_pieces(8, source, target)
  mesh = jax.tree.leaves(x)[0].sharding.mesh

  @jax.jit
  def slow(w, x):  # as a step before the gather
    w = jax.lax.fori_loop(0, 60, lambda _, w: jnp.tanh(w @ w * 1e-3), w)
    return jax.tree.map(lambda x: x + (w[0, 0] * 0).astype(x.dtype), x)

  w = jax.device_put(np.ones((512, 512), np.float32), axes_sharding("D F", (512, 512), mesh))
  sharding = pieces_sharding(host.shape, cpus(source, target)[1])
  reshard = Reshard(sharding)
  jax.block_until_ready(reshard.send(slow(w, x)))  # compiles
  pieces = slow(w, x)
  sent = reshard.send(pieces)
  ticket = TransferTicket({(0, 3): sent}, lambda sent: None)
  assert not any(cut.is_ready() for cut in jax.tree.leaves(pieces)) and not ticket.is_ready()
  arrived = on_each_device(sent)
  for device, index in sharding.devices_indices_map(host.shape).items():
    np.testing.assert_array_equal(arrived[device], host[index])


PAGES = PageConfig(
  num_rows=ROWS, page_size=PAGE_SIZE, pages_per_row=PAGES_PER_ROW, num_pages=ROWS * PAGES_PER_ROW
)
BUCKETS = Buckets(prefill=(16,), mixed=(16,), rows=(ROWS,), pages=(4, PAGES_PER_ROW))


@pytest.mark.parametrize(
  ("sizes", "num_kv_heads"), [((2, 4), 8), ((4, 2), 8), ((4, 2), 2), ((1, 4), 2)]
)
def test_pools_of_other_sizes_hand_over_every_byte_and_compile_nothing_once_warm(
  sizes, num_kv_heads
):
  """Through export and import, in every bucket; with 2 kv heads on 4 devices each lies on two.

  And swap them, in as many cuts.
  """
  config = dataclasses.replace(TINY, num_layers=2, num_kv_heads=num_kv_heads)
  model = from_arrays(config, random_arrays(config, 0))
  executors = build_executors(model, PAGES, BUCKETS, cpus(*sizes), layout="paged")
  lines = list(warm_up(executors, [{"gather", "scatter"}, {"scatter"}]))
  assert [line for line in lines if "copy" in line] == [
    f"devices 0 to 1: copy {n} pages" for n in BUCKETS.pages
  ]
  source, target = executors
  before = source.num_traces + target.num_traces
  compiled = []
  sent, old = fill(source, 1), fill(target, 2)
  jax.block_until_ready((source._cache, target._cache))

  def listen(event, duration_s, **_):
    if event == COMPILED:
      compiled.append(duration_s)

  jax.monitoring.register_event_duration_secs_listener(listen)
  arrived = {}
  try:
    for row, num_tokens in enumerate((3, 16, 17, 79)):
      num_pages = -(-num_tokens // PAGE_SIZE)
      source_pages = range(90, 90 - num_pages, -1)
      target_pages = range(20 * row, 20 * row + num_pages)
      hand_over(source, target, source_pages, target_pages, num_tokens, row=row)
      arrived |= dict(zip(target_pages, source_pages))
    jax.block_until_ready(target._cache)
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)
  assert not compiled
  check_arrived(source, target, sent, old, arrived)
  swap = Swap(request_id=1, num_tokens=11, page_ids=(7, 3, 50))
  back, plan = dataclasses.replace(swap, page_ids=(11, 12, 13)), probe_plan(PAGES, prefills=(4,))
  source._swap(dataclasses.replace(plan, swap_outs=(swap,)))
  source._swap(dataclasses.replace(plan, swap_ins=(back,)))
  for leaf, was in zip(*map(jax.tree.leaves, (source._cache, sent)), strict=True):
    np.testing.assert_array_equal(leaf[np.array(back.page_ids)], was[np.array(swap.page_ids)])
  assert before == source.num_traces + target.num_traces


@pytest.mark.parametrize("sizes", [(1, 1), (2, 2), (4, 2), (1, 2)])
def test_a_gather_writes_where_one_that_was_dropped_had_written(sizes):
  config = dataclasses.replace(TINY, num_layers=2, num_kv_heads=8)
  model = from_arrays(config, random_arrays(config, 0))
  source, target = build_executors(model, PAGES, BUCKETS, cpus(*sizes), layout="paged")
  sent, old = fill(source, 1), fill(target, 2)

  def memory_of(handle):
    shards = [s for x in jax.tree.leaves(handle.payload) for s in x.addressable_shards]
    return sorted(s.data.unsafe_buffer_pointer() for s in shards)

  first, second = export(source, range(4), 16), export(source, range(10, 13), 12)
  assert not set(memory_of(first)) & set(memory_of(second))
  where = memory_of(first)
  target.import_(first, row=0, page_ids=tuple(range(8, 12)), now_s=0.0).result()
  source.drop(first)
  third = export(source, (70, 3, 90), 12)
  assert memory_of(third) == where
  for handle, row, pages in ((second, 1, (30, 31, 32)), (third, 2, (50, 51, 52))):
    target.import_(handle, row=row, page_ids=pages, now_s=0.0).result()
  moved = {8: 0, 9: 1, 10: 2, 11: 3, 30: 10, 31: 11, 32: 12, 50: 70, 51: 3, 52: 90}
  check_arrived(source, target, sent, old, moved)


def _like(x):
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


@quick
def test_spare_memory_is_given_once_by_shape_up_to_a_limit(monkeypatch):
  monkeypatch.setattr(transfer, "MOST_SPARE_BYTES", 100)
  spare, (a, b, c) = SpareMemory("cpu"), (jnp.full(n, 7.0) for n in (8, 8, 12))
  spare.give({(0, 1): (a, b)})
  assert spare.take(_like(c)) is not c
  assert spare.take(_like(a)) is a and spare.take(_like(a)) is b
  assert spare.take(_like(a)).tolist() == [0.0] * 8
  spare.give({(0, 1): a, (1, 2): (c, b)})  # 112 bytes: the first has to go
  assert spare.take(_like(c)) is c
  assert spare.take(_like(a)) is b and spare.take(_like(a)) is not a
  elsewhere = SpareMemory("gpu")
  elsewhere.give({(0, 1): a})
  assert elsewhere.take(_like(a)) is None


@quick
def test_memory_of_what_failed_or_is_not_computed_is_not_spare():
  class Array:
    shape, nbytes, sharding = (8,), 32, None

    def __init__(self, *, is_ready, error=None):
      self.is_ready, self._error = lambda: is_ready, error

    def is_deleted(self):
      return False

    def block_until_ready(self):
      if self._error is not None:
        raise self._error
      return self

  spare = SpareMemory("cpu")
  like = jax.ShapeDtypeStruct((8,), np.float32, sharding=None)
  spare.give({(0, 1): (Array(is_ready=False), Array(is_ready=True, error=RuntimeError("broken")))})
  assert isinstance(spare.take(like), jax.Array)
  good = Array(is_ready=True)
  spare.give({(0, 1): good})
  assert spare.take(like) is good


class _Part:
  """What `device_put` gives: a copy that ends when the test says so."""

  def __init__(self, error=None):
    self.has_ended, self._error = False, error

  def is_ready(self):
    return self.has_ended

  def block_until_ready(self):
    if self._error is not None:
      raise self._error


@quick
def test_a_ticket_is_ready_when_the_copy_is_and_inserts_it_once():
  parts, inserted = (_Part(), _Part()), []
  ticket = TransferTicket({(0, 3): parts}, inserted.append)
  for part in parts:
    assert not ticket.is_ready() and not ticket.is_ready() and not inserted
    part.has_ended = True
  assert ticket.is_ready() and ticket.is_ready()
  assert ticket.result() is None and inserted == [{(0, 3): parts}]


@quick
def test_a_failed_copy_is_ready_raises_and_is_never_inserted():
  parts, inserted = (_Part(), _Part(ConnectionError("peer died"))), []
  for part in parts:
    part.has_ended = True
  ticket = TransferTicket({(0, 1): parts[0], (1, 2): parts[1]}, inserted.append)
  ticket.block()  # raises nothing
  for _ in range(2):
    assert ticket.is_ready()
    with pytest.raises(ConnectionError, match="peer died"):
      ticket.result()
  assert not inserted


@quick
def test_an_insert_that_fails_surfaces_in_the_result():
  def insert(sent):
    raise MemoryError("no room")

  part = _Part()
  part.has_ended = True
  ticket = TransferTicket({(0, 3): part}, insert)
  assert ticket.is_ready()
  with pytest.raises(MemoryError, match="no room"):
    ticket.result()
