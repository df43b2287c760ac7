"""Where the arrays of a call lie: what a kernel needs to know of the mesh, and how it runs on each device's block.

XLA partitions its own operations over a mesh; a kernel is a closed box to it. So a kernel runs inside a `jax.shard_map` that
is manual over the whole mesh, on the blocks that the sharding rules give each device. In a program that is manual over
some axes already (a pipeline), only the others are left to map over.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

GPU_PLATFORMS = ("gpu", "cuda", "rocm")


@dataclasses.dataclass(frozen=True)
class Placement:
    """The mesh of a call's arrays, and how these lie on it.

    Attributes:
      mesh: None for a program of one device.
      query, key: of arrays [B, T, H, K] and [B, S, G, K].
    """
    mesh: Mesh | AbstractMesh | None = None
    query: PartitionSpec = PartitionSpec()
    key: PartitionSpec = PartitionSpec()

    def axes(self, array: str, dim: int) -> tuple[str, ...]:
        """The mesh axes that split a dimension of 'query' or 'key', those that the program is manual over left out."""
        return axes_of(self.mesh, getattr(self, array), dim)

    def parts(self, array: str, dim: int) -> int:
        """Into how many parts that dimension is split."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes(array, dim))

    def refusal(self) -> str | None:
        """Why no kernel can run on each device's block by itself, or None."""
        if self.mesh is None:
            return None
        for array in ("query", "key"):
            if self.axes(array, 1):
                return (f"the sharding rules split the {array}'s length along {'+'.join(self.axes(array, 1))}, and attention "
                        "along a split length is not built (config.sharding.activations.rules.length)")
        for dim, what, names in ((0, "batch", ""), (2, "heads", ", rules heads and kv_heads")):
            whole = dim == 2 and not self.axes("key", dim)             # a device then takes what it needs of them
            if self.axes("query", dim) != self.axes("key", dim) and not whole:
                return (f"the sharding rules split the {what} of queries along {'+'.join(self.axes('query', dim)) or 'nothing'} "
                        f"and of keys along {'+'.join(self.axes('key', dim)) or 'nothing'}; a device then lacks keys of its "
                        f"queries (config.sharding.activations{names})")
        return None

    def device(self) -> tuple[str, str]:
        """Platform and kind of the devices ('gpu', 'NVIDIA H200'), read from the mesh where there is one."""
        mesh = jax.sharding.get_abstract_mesh() if self.mesh is None else self.mesh
        if isinstance(mesh, Mesh):
            one = mesh.devices.flat[0]
        else:
            one = getattr(mesh, "abstract_device", None)
            one = jax.devices()[0] if one is None else one
        platform = one.platform or ""
        return "gpu" if platform in GPU_PLATFORMS else platform, one.device_kind

    def per_device(self, run: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """`run`, on each device's blocks. Needs `refusal() is None`."""
        return per_device(self.mesh, run, in_specs, out_specs)


HERE = Placement()


def per_device(mesh: Mesh | AbstractMesh | None, run: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """`run` on each device's blocks, which the specs say; itself where there is one device."""
    if mesh is None or mesh.size == 1:
        return run
    manual = _manual(mesh)
    left = [axis for axis in mesh.axis_names if axis not in manual]
    if all(mesh.shape[axis] == 1 for axis in left):
        return run
    mesh = jax.sharding.get_abstract_mesh() if manual else mesh
    return jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=set(left), check_vma=False)


def axes_of(mesh: Mesh | AbstractMesh | None, spec: PartitionSpec, dim: int) -> tuple[str, ...]:
    """The mesh axes that split a dimension, those that the program is manual over left out."""
    entry = spec[dim] if dim < len(spec) else None
    found = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
    manual = set() if mesh is None else _manual(mesh)
    return tuple(axis for axis in found if axis not in manual)


def _manual(mesh: Mesh | AbstractMesh) -> set[str]:
    """Axes of the mesh that the program being traced is manual over."""
    context = jax.sharding.get_abstract_mesh()
    return set(context.manual_axes) if context.axis_names == mesh.axis_names else set()
