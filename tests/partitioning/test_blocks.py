"""The blocks that pictures show are those that JAX gives to the devices."""

import math

import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from partitioning import AXES, make_mesh
from partitioning.blocks import blocks, drawn_devices, drawn_sizes, number, picture

CASES = [
    (dict(data=2, fsdp=2, tensor=2), (8, 16), [P(None, None), P("data", None), P(None, "tensor"), P("tensor", "data"),
                                               P(("data", "fsdp"), "tensor"), P(("fsdp", "data"), None),
                                               P(("tensor", "data", "fsdp"), None), P(None, ("fsdp", "tensor"))]),
    (dict(data=2, fsdp=2, tensor=2), (4, 8, 2), [P("fsdp", "data", "tensor"), P(None, ("tensor", "fsdp"), "data")]),
    (dict(fsdp=8), (16,), [P("fsdp"), P(None)]),
    (dict(fsdp=4, tensor=2), (), [P()]),
    (dict(data=8), (8, 8, 8, 8), [P(None, None, "data", None)]),
]
CASES = [(dict.fromkeys(AXES, 1) | sizes, shape, spec) for sizes, shape, specs in CASES for spec in specs]


def slices(shape, counts, index):
    return tuple((i * size // count, (i + 1) * size // count) for size, count, i in zip(shape, counts, index))


def held_by_jax(sizes, shape, spec):
    """For each device in mesh order, the (start, stop) of its block along each dim."""
    mesh = make_mesh(sizes)
    found = NamedSharding(mesh, spec).devices_indices_map(shape)
    return [tuple(part.indices(size)[:2] for part, size in zip(found[device], shape)) for device in mesh.devices.flat]


@pytest.mark.parametrize("sizes, shape, spec", CASES, ids=str)
def test_blocks_are_those_of_the_sharding(sizes, shape, spec):
    held = blocks(spec, sizes)
    counts = [1 + max(index[dim] for index in held) for dim in range(len(shape))]
    assert [slices(shape, counts, index) for index in held] == held_by_jax(sizes, shape, spec)


@pytest.mark.parametrize("sizes, shape, spec", CASES, ids=str)
def test_a_picture_has_every_block_once_and_each_device_at_its_block(sizes, shape, spec):
    one = picture(spec, shape, sizes, limit=64)
    drawn = [block for rectangle in one.rectangles() for row in rectangle for block in row]
    assert len(set(drawn)) == len(drawn) == math.prod(one.counts)
    by_number = {number(block, one.counts): slices(shape, one.counts, block) for block in drawn}
    assert len(by_number) == len(drawn)
    assert [by_number[block] for block in one.held] == held_by_jax(sizes, shape, spec)


def test_the_dims_that_are_cut_most_make_the_rectangle():
    sizes = dict(data=2, fsdp=2, tensor=2)
    one = picture(P("fsdp", None, ("data", "tensor")), (4, 64, 8), sizes, limit=64)
    assert (one.down, one.across) == (0, 2) and len(one.rectangles()) == 1
    assert [[block[2] for block in row] for row in one.rectangles()[0]] == [[0, 1, 2, 3]] * 2
    assert len(picture(P("fsdp", "data", "tensor"), (4, 64, 8), sizes, limit=64).rectangles()) == 2
    assert picture(P(None, None, None), (4, 64, 8), sizes, limit=64).down == 1


def test_a_large_mesh_is_drawn_in_part_and_only_the_blocks_of_its_devices():
    sizes = dict(data=2, fsdp=64, tensor=8)
    assert math.prod(drawn_sizes(sizes, 64).values()) <= 64 and drawn_sizes(dict(fsdp=512), 64) == dict(fsdp=64)
    assert drawn_sizes(dict(fsdp=3, tensor=5), 64) == dict(fsdp=3, tensor=5)
    devices = drawn_devices(sizes, 64)
    assert all(device == number(list(place.values()), list(sizes.values())) for device, place in devices)
    one = picture(P(("fsdp", "data"), "tensor"), (1024, 64), sizes, limit=64)
    everywhere = blocks(P(("fsdp", "data"), "tensor"), sizes)
    assert one.held == tuple(number(everywhere[device], one.counts) for device, _ in devices)
    drawn = [number(block, one.counts) for row in one.rectangles()[0] for block in row]
    assert set(drawn) == set(one.held) and len(drawn) <= 64
