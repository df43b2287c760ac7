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
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from partitioning import paths
from partitioning.array import ArraySpec


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


def specs(declared: dict[str, nnx.Param], dtype: Any, num_layers: int) -> dict[str, Any]:
    """Nested dict of ArraySpec; what lies below `layers` gets a leading dim of that name."""
    out = {}
    for path, param in declared.items():
        shape, dims = param.get_value().shape, param.get_metadata("dims")
        if path.startswith("layers/"):
            shape, dims = (num_layers, *shape), ("layers", *dims)
        out[path] = ArraySpec(shape, jnp.dtype(dtype), dims)
    return paths.unflatten(out)


def initialise(declared: dict[str, nnx.Param], key: jax.Array, dtype: Any, num_layers: int) -> dict[str, Any]:
    """Nested dict of initial values: float32 draws, rounded to `dtype`. Call it under jit:
    eager draws differ in the last bit."""
    out = {}
    for path, param in declared.items():
        shape, initial = param.get_value().shape, param.get_metadata("initial")
        stacked = path.startswith("layers/")
        if initial.std == 0:
            out[path] = jnp.full((num_layers, *shape) if stacked else shape, initial.mean, dtype)
            continue

        def draw(key, shape=shape, initial=initial):
            return (initial.mean + initial.std * jax.random.normal(key, shape, jnp.float32)).astype(dtype)

        own = jax.random.fold_in(key, zlib.crc32(path.encode()))
        out[path] = jax.vmap(lambda i: draw(jax.random.fold_in(own, i)))(jnp.arange(num_layers)) if stacked else draw(own)
    return paths.unflatten(out)


def count_parameters(specs: dict[str, Any]) -> int:
    """Number of numbers in a nested dict of ArraySpec (or of arrays). A tied output matrix is counted once."""
    return sum(leaf.size for leaf in paths.flatten(specs).values())
