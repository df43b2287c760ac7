"""Copies that differ in a single bit are found, and named with their devices; those that may differ are left alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from jaxlm.errors import RunError
from jaxlm.replicas import ReplicaCheck, hash_of_bits

MESH = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "fsdp"))


def array(spec, dtype="float32", flip=None, shape=(8, 6)):
    """An array on four devices, one bit of which is flipped in the copy of device `flip`."""
    whole = np.random.default_rng(0).integers(0, 255, shape).astype(dtype)
    sharding = NamedSharding(MESH, P(*spec))
    pieces = []
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        piece = np.array(whole[index])
        if device.id == flip:
            piece.reshape(-1).view(np.uint8)[-1] ^= 1
        pieces.append(jax.device_put(piece, device))
    return jax.make_array_from_single_device_arrays(shape, sharding, pieces)


def check(**arrays):
    tree = {"params": arrays}
    ReplicaCheck(MESH, tree)(tree)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "int8"])
@pytest.mark.parametrize("spec", [(), ("fsdp",), (None, "data")])
def test_equal_copies_pass_and_one_flipped_bit_is_found(spec, dtype):
    check(a=array(spec, dtype), b=array((), dtype))
    with pytest.raises(RunError, match="params/b: device"):
        check(a=array((), dtype), b=array(spec, dtype, flip=2))


def test_the_devices_whose_copies_differ_from_most_are_named():
    with pytest.raises(RunError, match=r"params/kernel: device 3 of process 0 differ from device 0 .*, device 1 .*, device 2 "):
        check(good=array(()), kernel=array((), flip=3))


def test_pieces_of_a_spread_array_are_not_compared_with_each_other():
    shapes = {"params": {"a": array(("data", "fsdp"))}}
    assert not ReplicaCheck(MESH, shapes).compares
    ReplicaCheck(MESH, shapes)(shapes)


def test_nan_and_signed_zero_are_bits_like_any_others():
    values = np.array([np.nan, 0.0, -0.0, np.inf], np.float32)
    same = NamedSharding(MESH, P())
    check(a=jax.device_put(values, same))
    with pytest.raises(RunError):
        pieces = [jax.device_put(values if d.id else np.abs(values) * np.float32([1, 1, 1, 1]), d) for d in MESH.devices.flat]
        check(a=jax.make_array_from_single_device_arrays(values.shape, same, pieces))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "int8"])
def test_a_hash_changes_with_any_element_and_with_the_order(dtype):
    x = np.arange(12) % 2 == 0 if dtype == "bool" else np.arange(12)
    x = jnp.asarray(x, dtype)
    hashes = {int(hash_of_bits(x))} | {int(hash_of_bits(x.at[i].set((x[i] == 0).astype(dtype)))) for i in range(12)}
    assert len(hashes) == 13
    assert int(hash_of_bits(x[::-1])) != int(hash_of_bits(x))
