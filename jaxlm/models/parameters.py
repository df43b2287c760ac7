"""Parameters: declared by a module, described as specs, and drawn from a key.

A module says of each parameter its shape, the meaning of its dimensions and the normal distribution that it starts from;
it never holds numbers. From these declarations come the specs that everything else reads (sharding, optimizer,
checkpoint) and the initial values.

Each parameter is drawn from a key of its own: the model's key with a hash of the parameter's path folded in, and for a
parameter of a block also the layer's number. So the first values depend neither on the mesh nor on the order of drawing,
nor on whether the layers are stacked, and an option that adds a parameter leaves the others' first values as they were.
"""

import dataclasses
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from partitioning import paths
from partitioning.array import ArraySpec
from partitioning.padding import fill


@dataclasses.dataclass(frozen=True)
class Normal:
    """A normal distribution; with std 0 the constant `mean`."""
    mean: float = 0.0
    std: float = 0.0


def declare(shape: tuple[int, ...], dims: tuple[str | None, ...], initial: Normal) -> nnx.Param:
    """A parameter without a value. `dims` are logical names, one per dimension."""
    return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32), dims=dims, initial=initial)


def declarations(module: nnx.Module) -> dict[str, nnx.Param]:
    """Path ('attention/query/kernel') to declaration, for every parameter of a module."""
    return {"/".join(map(str, path)): param for path, param in nnx.to_flat_state(nnx.state(module, nnx.Param))}


def specs(declared: dict[str, nnx.Param], dtype: Any, num_layers: int, padding: Mapping[str, int]) -> dict[str, Any]:
    """Nested dict of ArraySpec; what lies below `layers` gets a leading dim of that name. `padding`: dim to padded size."""
    out = {}
    for path, param in declared.items():
        shape, dims = param.get_value().shape, param.get_metadata("dims")
        if path.startswith("layers/"):
            shape, dims = (num_layers, *shape), ("layers", *dims)
        out[path] = ArraySpec(shape, jnp.dtype(dtype), dims).padded(padding)
    return paths.unflatten(out)


def initialise(declared: dict[str, nnx.Param], key: jax.Array, specs: dict[str, Any]) -> dict[str, Any]:
    """Nested dict of initial values: float32 draws of the true shapes, rounded to the dtype of `specs`, with zeros for padding.
    Call it under jit: eager draws differ in the last bit."""
    out = {}
    for path, spec in paths.flatten(specs).items():
        initial = declared[path].get_metadata("initial")
        if initial.std == 0:
            out[path] = fill(jnp.full(spec.true_shape, initial.mean, spec.dtype), spec.shape)
            continue
        stacked = path.startswith("layers/")
        shape = spec.true_shape[1:] if stacked else spec.true_shape

        def draw(key, shape=shape, initial=initial, dtype=spec.dtype):
            return (initial.mean + initial.std * jax.random.normal(key, shape, jnp.float32)).astype(dtype)

        own = jax.random.fold_in(key, zlib.crc32(path.encode()))
        layers = jnp.arange(spec.shape[0])
        drawn = jax.vmap(lambda i: draw(jax.random.fold_in(own, i)))(layers) if stacked else draw(own)
        out[path] = fill(drawn, spec.shape)
    return paths.unflatten(out)


def count_parameters(specs: dict[str, Any]) -> int:
    """Number of numbers in a nested dict of ArraySpec, without padding. A tied output matrix is counted once."""
    return sum(leaf.true_size for leaf in paths.flatten(specs).values())
