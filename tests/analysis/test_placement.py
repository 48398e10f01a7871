"""Candidates fit, divide the model evenly, and keep what belongs together on one node."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.models import MODELS
from pdjax.analysis.placement import (
  Nodes,
  Placement,
  Shape,
  holds,
  most_on,
  pools_for_rate,
  segmented,
  shapes,
  units_on,
)
from pdjax.config import num_devices_of, parse_pools
from pdjax.core.device_group import split_layers

pytestmark = pytest.mark.quick
OPT_13B, OPT_66B, OPT_175B = MODELS["opt-13b"], MODELS["opt-66b"], MODELS["opt-175b"]


def anything(shape: Shape) -> bool:
  return True


def at_least(num_devices: int):
  return lambda shape: shape.num_devices >= num_devices


@pytest.mark.parametrize("model", [OPT_13B, OPT_66B, OPT_175B])
def test_shapes_divide_the_model_and_stay_inside_nodes_with_tp(model):
  found = shapes(model, Nodes(num_nodes=4, devices_per_node=8), anything)
  assert found and found == sorted(found, key=lambda s: (s.num_devices, s))
  for shape in found:
    assert shape.tp <= 8 and shape.num_devices <= 32
    assert model.num_heads % shape.tp == 0 and model.num_layers % shape.pp == 0


def test_the_papers_placements_are_among_the_candidates():
  """Table 5: prefill and decode of OPT-13B, 66B and 175B on four nodes of eight GPUs."""
  cluster = Nodes(num_nodes=4, devices_per_node=8)
  for model, prefill, decode in (
    (OPT_13B, (2, 1), (1, 1)),
    (OPT_66B, (4, 1), (2, 2)),
    (OPT_175B, (3, 3), (4, 3)),
  ):
    found = {(p.prefill, p.decode) for p in segmented(model, cluster, anything)}
    assert tuple(Shape(tp=tp, pp=pp) for tp, pp in (prefill, decode)) in found


def test_nothing_that_does_not_fit_is_a_candidate():
  cluster = Nodes(num_nodes=2, devices_per_node=8)
  fits = at_least(3)
  assert all(fits(shape) for shape in shapes(OPT_13B, cluster, fits))
  found = segmented(OPT_13B, cluster, fits)
  assert found and all(fits(p.prefill) and fits(p.decode) for p in found)
  assert not shapes(OPT_13B, cluster, at_least(100))


@pytest.mark.parametrize("most_pools", [1, 3])
def test_low_affinity_keeps_the_stages_of_a_layer_on_one_node(most_pools):
  """Whatever node has a layer's prefill has its decode, and no node more than its devices."""
  cluster = Nodes(num_nodes=4, devices_per_node=4)
  found = segmented(OPT_13B, cluster, anything, most_pools=most_pools)
  assert len({p.pools for p in found}) == len(found)
  assert {p.segments for p in found} == {1, 2, 4}  # 3 does not divide 40 layers
  assert {p.num_prefill for p in found} == set(range(1, most_pools + 1))
  for placement in found:
    nodes = placement.nodes(OPT_13B.num_layers)
    assert len(nodes) == placement.segments <= cluster.num_nodes
    node_of = {}
    for role, shape in (("prefill", placement.prefill), ("decode", placement.decode)):
      stages = [(node, layers) for node, parts in enumerate(nodes) for layers in parts[role]]
      assert tuple(layers for _, layers in stages) == split_layers(OPT_13B.num_layers, shape.pp)
      for node, (first, last) in stages:
        for layer in range(first, last):
          assert node_of.setdefault(layer, node) == node, (placement, layer)
    for parts in nodes:
      used = placement.num_prefill * placement.prefill.tp * len(parts["prefill"])
      used += placement.num_decode * placement.decode.tp * len(parts["decode"])
      assert used <= cluster.devices_per_node


def test_of_the_same_pools_those_on_fewest_nodes_are_kept():
  cluster = Nodes(num_nodes=2, devices_per_node=4)
  pair = Placement(prefill=Shape(pp=2), decode=Shape(pp=2), segments=1)
  assert pair in segmented(OPT_13B, cluster, anything)


def test_stages_that_do_not_make_segments_are_refused():
  with pytest.raises(ValueError, match="segments=2"):
    Placement(prefill=Shape(pp=3), decode=Shape(pp=2), segments=2)


SHAPES = st.builds(Shape, tp=st.integers(1, 4), pp=st.integers(1, 3))


@given(prefill=SHAPES, decode=SHAPES, n=st.integers(1, 3), m=st.integers(1, 3))
def test_the_text_of_a_placement_is_what_pools_are_made_of(prefill, decode, n, m):
  placement = Placement(prefill=prefill, decode=decode, num_prefill=n, num_decode=m)
  specs = parse_pools(placement.pools)
  assert num_devices_of(specs) == placement.num_devices
  groups = [(s.role, s.group.tp, s.pp) for s in specs]
  assert groups.count(("prefill", prefill.tp, prefill.pp)) == n
  assert groups.count(("decode", decode.tp, decode.pp)) == m
  assert placement.times(2).num_devices == 2 * placement.num_devices


CLUSTERS = st.builds(Nodes, num_nodes=st.integers(1, 2), devices_per_node=st.integers(1, 8))
RATED = st.lists(st.tuples(SHAPES, st.floats(0.1, 10)), min_size=1, max_size=3)


@given(cluster=CLUSTERS, prefill=RATED, decode=RATED)
def test_no_placement_on_the_cluster_serves_more(cluster, prefill, decode):
  def served_rps(p_rps, d_rps, n, m):
    return min(n * p_rps, m * d_rps)

  every = [
    served_rps(p_rps, d_rps, n, m)
    for p, p_rps in prefill
    for d, d_rps in decode
    for n in range(1, 17)
    for m in range(1, 17)
    if holds(cluster, Placement(prefill=p, decode=d, num_prefill=n, num_decode=m))
  ]
  found = most_on(cluster, prefill, decode)
  if found is None:
    assert not every
    return
  assert holds(cluster, found) and found.num_devices <= cluster.num_devices
  reached = max(
    served_rps(p_rps, d_rps, found.num_prefill, found.num_decode)
    for p, p_rps in prefill
    for d, d_rps in decode
    if (p, d) == (found.prefill, found.decode)
  )
  assert reached == max(every)


def test_devices_are_counted_by_nodes():
  """Ten units of three are 30 devices, but of four nodes with eight each holds two."""
  cluster = Nodes(num_nodes=4, devices_per_node=8)
  pair = dict(prefill=Shape(tp=2), decode=Shape())
  assert units_on(cluster, Placement(**pair, segments=1)) == 8
  two = Placement(prefill=Shape(tp=2, pp=2), decode=Shape(pp=2), segments=2)
  assert units_on(cluster, two) == 4, "two units of three on each node, of two nodes each"
  assert units_on(cluster, Placement(prefill=Shape(pp=3), decode=Shape(pp=3), segments=3)) == 4
  # Anywhere: a stage has its devices on one node, its pool need not.
  assert holds(cluster, Placement(prefill=Shape(tp=5, pp=4), decode=Shape(tp=3), num_decode=4))
  assert not holds(cluster, Placement(prefill=Shape(tp=5, pp=5), decode=Shape()))


def test_pools_for_a_rate_are_just_enough():
  assert [pools_for_rate(rate, 2.0) for rate in (0.1, 2.0, 2.1, 9.9)] == [1, 1, 2, 5]


@pytest.mark.parametrize("sizes", [(0, 8), (1, 0)])
def test_a_cluster_has_devices(sizes):
  with pytest.raises(ValueError, match="=0 must be at least 1"):
    Nodes(num_nodes=sizes[0], devices_per_node=sizes[1])
