"""Every device is in one stage of its group, every layer in one part, in order."""

import pytest

from pdjax.core.device_group import DeviceGroup, split_layers

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (4, 1), (1, 4), (2, 3)])
def test_stages_share_the_devices_of_a_group_equally_and_in_order(tp, pp):
  devices = tuple(range(5, 5 + tp * pp))
  group = DeviceGroup(devices=devices, pp=pp)
  assert group.tp == tp
  assert [len(stage) for stage in group.stages] == [tp] * pp
  assert sum(group.stages, ()) == devices


@pytest.mark.parametrize(("devices", "pp"), [((), 1), ((0, 1, 2), 2), ((0,), 0), ((0,), 2)])
def test_devices_that_make_no_equal_stages_are_refused(devices, pp):
  with pytest.raises(ValueError, match=f"do not make pp={pp} stages"):
    DeviceGroup(devices=devices, pp=pp)


@pytest.mark.parametrize(("num_layers", "num_parts"), [(1, 1), (32, 4), (30, 4), (7, 7), (80, 3)])
def test_parts_cover_all_layers_and_differ_by_one_at_most(num_layers, num_parts):
  parts = split_layers(num_layers, num_parts)
  layers = [layer for first, last in parts for layer in range(first, last)]
  assert layers == list(range(num_layers))
  sizes = [last - first for first, last in parts]
  assert len(sizes) == num_parts and max(sizes) - min(sizes) <= 1
  assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("num_parts", [0, -1, 9])
def test_more_parts_than_layers_are_refused(num_parts):
  with pytest.raises(ValueError, match=f"8 layers cannot be cut into {num_parts} parts"):
    split_layers(8, num_parts)
