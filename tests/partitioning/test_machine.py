"""The machine: what devices tell of it, which axes stay inside a host, and the mesh that follows."""

import dataclasses
import itertools
import math

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partitioning import AXES, DeclarationError, Machine, links, machine_of, make_mesh, simulated, target
from partitioning.machine import check_within_host, notes


@dataclasses.dataclass(frozen=True)
class Gpu:
    """As much of a device as a mesh looks at."""
    id: int
    process_index: int
    slice_index: int | None
    platform: str = "gpu"
    device_kind: str = "NVIDIA H200"


def sizes(**axes):
    return {axis: axes.get(axis, 1) for axis in AXES}


def cluster(hosts: int, size: int, processes_per_host: int = 1):
    return [Gpu(i, i * processes_per_host // size, i // size) for i in range(hosts * size)]


def test_devices_of_one_slice_index_are_one_host_however_many_processes_drive_them():
    for processes in (1, 8):
        machine = machine_of(cluster(2, 8, processes))
        assert (machine.num_devices, machine.devices_per_host, machine.num_hosts) == (16, 8, 2)


def test_where_the_platform_tells_of_no_slices_a_process_is_a_host():
    devices = [dataclasses.replace(device, slice_index=None, platform="cpu") for device in cluster(2, 4)]
    assert machine_of(devices) == Machine(8, 4, "shared memory", "network", "process")
    assert machine_of(jax.devices()) == simulated(8)
    one_machine = [dataclasses.replace(device, slice_index=0) for device in devices]
    assert links(sizes(fsdp=8), machine_of(one_machine)) == {"fsdp": "shared memory"}


def test_hosts_that_are_not_alike_are_an_error():
    with pytest.raises(DeclarationError, match="from 4 to 8"):
        machine_of(cluster(2, 8)[:12])


@given(st.integers(1, 64), st.lists(st.integers(1, 12), min_size=6, max_size=6))
def test_every_split_fills_hosts_and_gives_back_the_sizes(per_host, numbers):
    total = math.prod(numbers)
    machine = Machine(total, math.gcd(per_host, total))
    parts = machine.split(dict(zip(AXES, numbers)))
    assert [inside * across for inside, across in parts.values()] == numbers
    assert math.prod(inside for inside, _ in parts.values()) == machine.devices_per_host


def test_the_innermost_axes_fill_a_host_first():
    parts = Machine(64, 8).split(sizes(data=2, fsdp=8, tensor=4))
    assert (parts["tensor"], parts["fsdp"], parts["data"]) == ((4, 1), (2, 4), (1, 2))


@pytest.mark.parametrize("axes", [dict(tensor=4), dict(fsdp=2, tensor=4), dict(data=2, fsdp=4), dict(data=2, fsdp=2, tensor=2)])
def test_groups_along_an_axis_that_fits_lie_in_one_host(axes):
    axes = sizes(**axes)
    hosts = 2 if math.prod(axes.values()) == 8 else 1
    devices = cluster(hosts, 4)
    mesh = make_mesh(axes, np.random.default_rng(0).permutation(np.array(devices, object)).tolist() if hosts == 2 else devices)
    machine = machine_of(devices)
    for number, axis in enumerate(AXES):
        inside, across = machine.split(axes)[axis]
        for group in np.moveaxis(mesh.devices, number, -1).reshape(-1, axes[axis]):
            assert len({device.slice_index for device in group}) == across
            assert all(len(list(members)) == inside for _, members in itertools.groupby(group, lambda device: device.slice_index))


def test_processes_of_one_device_each_share_their_host():
    mesh = make_mesh(sizes(fsdp=4, tensor=4), cluster(2, 8, processes_per_host=8))
    assert [{device.slice_index for device in row} for row in mesh.devices.reshape(4, 4)] == [{0}, {0}, {1}, {1}]


def test_a_size_that_does_not_divide_a_host_lies_across_hosts_and_a_note_says_so():
    machine = Machine(24, 8)
    assert machine.split(sizes(fsdp=8, tensor=3))["tensor"] == (1, 3)
    (note,) = notes(sizes(fsdp=8, tensor=3), machine)
    assert "tensor = 3 crosses hosts" in note and "fsdp has the links within" in note and "1, 2, 4, 8" in note
    assert notes(sizes(data=3, tensor=8), machine) == notes(sizes(fsdp=12, tensor=2), machine) == []


def test_a_machine_that_makes_no_sense_is_refused():
    for devices, per_host in ((10, 4), (8, 0)):
        with pytest.raises(ValueError, match="do not fill hosts"):
            Machine(devices, per_host)
    with pytest.raises(ValueError, match="a machine of 16 devices for a mesh of 8"):
        make_mesh(sizes(fsdp=8), machine=Machine(16, 8))


def test_a_mesh_over_one_host_is_the_devices_in_order():
    assert make_mesh(sizes(fsdp=4, tensor=2)).devices.flatten().tolist() == jax.devices()


def test_devices_to_compile_for_lie_host_by_host():
    chip = target("h200")
    try:
        devices = chip.devices(32)
    except DeclarationError as error:
        pytest.skip(str(error))
    mesh = make_mesh(sizes(fsdp=4, tensor=8), devices, chip.machine(32))
    hosts = [{device.process_index for device in row} for row in mesh.devices.reshape(4, 8)]
    assert hosts == [{0}, {1}, {2}, {3}]


def test_the_links_of_each_axis_are_said():
    machine = Machine(64, 8, "NVLink", "network")
    assert links(sizes(data=2, fsdp=8, tensor=4), machine) == {
        "data": "network, across 2 hosts", "fsdp": "NVLink, within a host (2 of 8); network, across 4 hosts",
        "tensor": "NVLink, within a host"}
    assert links(sizes(tensor=8), simulated(8)) == {"tensor": "simulated devices of one process"}
    assert links(sizes(), simulated(1)) == {}


def test_an_axis_that_is_to_stay_inside_and_does_not_is_an_error_with_the_sizes_that_fit():
    machine = Machine(64, 8, "NVLink", "network")
    check_within_host(("tensor", "fsdp"), sizes(data=8, fsdp=2, tensor=4), machine)
    with pytest.raises(DeclarationError, match="tensor=16 crosses hosts: a host has 8 devices. Sizes .*: 1, 2, 4, 8;"):
        check_within_host(("tensor",), sizes(fsdp=4, tensor=16), machine)
    with pytest.raises(DeclarationError, match="8 devices, of which tensor=4 comes first. Sizes that stay inside: 1, 2;"):
        check_within_host(("fsdp",), sizes(data=2, fsdp=8, tensor=4), machine)
