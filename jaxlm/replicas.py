"""Comparing the copies of parameters and optimizer state that devices hold, bit by bit.

Data parallelism keeps copies of an array on several devices and trusts that the same program makes the same bits of them. A
device that computes wrongly, or a program that does not, breaks that silently. The check reads each device's own copy: a hash of
its bits, exact and the same in any order of summation, so that two copies that differ in one place never have the same one.
"""

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxlm.errors import RunError


def hash_of_bits(x: jax.Array) -> jax.Array:
    """A uint32 scalar of the bits of an array of any dtype: the sum modulo 2^32 of a bijection of each 32-bit word with its
    position (MurmurHash3's finaliser)."""
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint32)
    width = x.dtype.itemsize
    words = jax.lax.bitcast_convert_type(x, {1: jnp.uint8, 2: jnp.uint16}.get(width, jnp.uint32)).astype(jnp.uint32).reshape(-1)
    h = words ^ (jax.lax.iota(jnp.uint32, words.size) * jnp.uint32(0x9E3779B9))
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return jnp.sum(h ^ (h >> 16), dtype=jnp.uint32)


class ReplicaCheck:
    """Compares the copies of a tree's arrays. Compiled once, at the first call."""

    def __init__(self, mesh: jax.sharding.Mesh, shapes: Any):
        """`shapes`: a tree of arrays or ShapeDtypeStructs with NamedShardings on `mesh`."""
        self._mesh = mesh
        leaves = jax.tree_util.tree_leaves_with_path(shapes)
        self._paths = ["/".join(str(key.key) for key in keys) for keys, _ in leaves]
        # For each array: a number per device of the mesh, the same for devices that hold the same piece.
        self._pieces = [self._pieces_of(leaf) for _, leaf in leaves]
        specs = jax.tree.map(lambda leaf: leaf.sharding.spec, shapes)
        everywhere = PartitionSpec(mesh.axis_names)

        def local(tree):
            return jnp.stack([hash_of_bits(x) for x in jax.tree.leaves(tree)])[None]

        hashes = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=everywhere, check_vma=False)
        self._hashes = jax.jit(hashes, out_shardings=NamedSharding(mesh, PartitionSpec()))

    @property
    def compares(self) -> bool:
        """Whether any piece of any array is on two devices; if not, there is nothing to compare."""
        return any(len(set(pieces)) < len(pieces) for pieces in self._pieces)

    def __call__(self, tree: Any) -> None:
        """Compares; all processes must call it at the same step.

        Raises:
          RunError: naming an array and the devices whose copies differ from the others'.
        """
        hashes = np.asarray(self._hashes(tree).addressable_data(0))            # [devices, arrays]
        found = [line for i, path in enumerate(self._paths) for line in self._differences(path, self._pieces[i], hashes[:, i])]
        if found:
            more = f"\n  and {len(found) - 5} more" if len(found) > 5 else ""
            raise RunError("copies of the same numbers differ between devices (config.faults.replica_check_every):\n  "
                           + "\n  ".join(found[:5]) + more + "\nNothing was saved of this step. A device computes wrongly, or "
                           "its memory is damaged: leave it out, and run the same command again.")

    def _pieces_of(self, leaf: Any) -> list[int]:
        indices = leaf.sharding.devices_indices_map(leaf.shape)
        numbers: dict[str, int] = {}
        return [numbers.setdefault(str(indices[device]), len(numbers)) for device in self._mesh.devices.flat]

    def _differences(self, path: str, pieces: list[int], hashes: np.ndarray) -> list[str]:
        devices, out = list(self._mesh.devices.flat), []
        for piece in sorted(set(pieces)):
            holders = [i for i, p in enumerate(pieces) if p == piece]
            usual, _ = collections.Counter(hashes[i] for i in holders).most_common(1)[0]
            others = [i for i in holders if hashes[i] != usual]
            if others:
                same = [i for i in holders if hashes[i] == usual]
                out.append(f"{path}: {_names(devices, others)} differ from {_names(devices, same)}")
        return out


def _names(devices: list[Any], chosen: list[int]) -> str:
    return ", ".join(f"device {devices[i].id} of process {devices[i].process_index}" for i in chosen)
