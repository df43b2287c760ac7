"""Mesh sizes: six numbers whose product is the number of devices, or a message that says what would fit."""

import math

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partitioning.declaration import DeclarationError
from partitioning.mesh import AXES, MeshConfig, make_mesh, nearest_divisors, resolve_sizes


def message(config, num_devices):
    with pytest.raises(DeclarationError) as caught:
        resolve_sizes(config, num_devices)
    return str(caught.value)


def sizes(**given_sizes):
    return dict.fromkeys(AXES, 1) | given_sizes


def test_data_takes_what_is_left_unless_another_axis_does():
    assert resolve_sizes(MeshConfig(), 8) == sizes(data=8)
    assert resolve_sizes(MeshConfig(tensor=2), 8) == sizes(data=4, tensor=2)
    assert resolve_sizes(MeshConfig(fsdp=-1, tensor=2), 8) == sizes(fsdp=4, tensor=2)
    assert resolve_sizes(MeshConfig(data=2, fsdp=-1), 8) == sizes(data=2, fsdp=4)


@given(st.sampled_from(["data", "fsdp", "tensor"]), st.integers(1, 12), st.integers(1, 12), st.integers(1, 200))
def test_the_product_of_the_sizes_is_the_number_of_devices_or_it_is_an_error(open_axis, a, b, num_devices):
    others = [axis for axis in ("data", "fsdp", "tensor") if axis != open_axis]
    config = MeshConfig(**{open_axis: -1, others[0]: a, others[1]: b})
    if num_devices % (a * b):
        assert str(num_devices) in message(config, num_devices)
    else:
        resolved = resolve_sizes(config, num_devices)
        assert math.prod(resolved.values()) == num_devices
        assert resolved[others[0]] == a and resolved[others[1]] == b


@given(st.integers(1, 400), st.integers(1, 40))
def test_nearest_divisors_divide_and_none_lies_between(number, size):
    found = nearest_divisors(number, size)
    assert all(number % d == 0 for d in found)
    assert not any(number % d == 0 for d in range(min(found) + 1, max(found)))
    assert (size in found) == (number % size == 0)


def test_too_many_devices_asked_for_says_which_single_change_fits():
    text = message(MeshConfig(data=2, fsdp=4, tensor=2), 8)
    assert "data=2 x fsdp=4 x tensor=2 needs 16 devices, but there are 8 devices" in text
    for way in ("data = 1", "fsdp = 2", "tensor = 1", "or 16 devices"):
        assert way in text


def test_too_few_devices_asked_for_offers_larger_sizes_and_minus_one():
    text = message(MeshConfig(data=1, fsdp=4), 8)
    assert "fsdp=4 needs 4 devices, but there are 8 devices" in text
    assert "fsdp = 8" in text and "data = -1" in text


def test_sizes_that_do_not_divide_the_devices_name_the_nearest_ones():
    text = message(MeshConfig(fsdp=-1, tensor=3), 8)
    assert "tensor=3 does not divide the 8 devices, so fsdp=-1 has no size" in text
    assert "tensor = 2 or 4" in text


@pytest.mark.parametrize("config", [MeshConfig(data=2, fsdp=4, tensor=2), MeshConfig(data=1, fsdp=4), MeshConfig(tensor=3),
                                    MeshConfig(data=3, tensor=8), MeshConfig(data=1, fsdp=8, tensor=8)])
def test_every_way_out_that_a_misfit_offers_does_fit(config):
    ways = message(config, 8).split("What fits: ")[1].split("; or ")
    offered = 0
    for way in ways:
        if " = " not in way:
            continue
        axis, values = way.split(" = ")
        for value in values.split(" or "):
            if value.split()[0].lstrip("-").isdigit() and "devices" not in value:
                declared = {name: getattr(config, name) for name in ("data", "fsdp", "tensor")} | {axis: int(value)}
                assert math.prod(resolve_sizes(MeshConfig(**declared), 8).values()) == 8
                offered += 1
    assert offered or "sizes whose product" in ways[0]


def test_two_open_axes_are_named():
    text = message(MeshConfig(data=-1, tensor=-1), 8)
    assert "data and tensor are -1" in text and "8 devices" in text


def test_a_size_of_zero_is_refused():
    assert "config.mesh.tensor = 0" in message(MeshConfig(tensor=0), 8)
    assert "config.mesh.data = 0" in message(MeshConfig(data=0), 8)


@pytest.mark.parametrize("axis", ["expert", "context"])
def test_axes_that_nothing_serves_yet_are_refused_even_when_open(axis):
    assert f"config.mesh.{axis} = 2" in message(MeshConfig(**{axis: 2}), 8)
    assert "not available yet" in message(MeshConfig(**{axis: -1}), 8)
    assert resolve_sizes(MeshConfig(data=1, **{axis: -1}), 1) == sizes()


def test_a_mesh_has_all_axes_in_order_of_type_auto():
    mesh = make_mesh(sizes(data=2, fsdp=2, tensor=2))
    assert mesh.axis_names == AXES and mesh.devices.shape == (1, 2, 2, 1, 1, 2)
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}


def test_a_mesh_over_some_devices_uses_just_those():
    assert make_mesh(sizes(fsdp=2), jax.devices()[2:4]).devices.flatten().tolist() == jax.devices()[2:4]
    with pytest.raises(DeclarationError, match="fsdp=2 needs 2 devices, but there are 8"):
        make_mesh(sizes(fsdp=2))
