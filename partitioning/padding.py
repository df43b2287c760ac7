"""Padding: a dim made larger than it is in truth, so that the axes that split it divide it, where the user says so.

What may be padded is the model's knowledge, for it must see to it that the padding counts for nothing; how large the dim
becomes is arithmetic on the tables, and is done here. An ArraySpec carries both shapes. Padding is at the end of a dim and
holds zeros; `cut` and `fill` go from one shape to the other.

Outside the devices an array has its true shape: `trimmed` and `filled` take a state there and back, one array after the
other. Where the axes of a padded dim do not divide its true size, the trimmed array is split by them along other dims as
far as those divide, and is whole along the rest.
"""

import dataclasses
import functools
import math
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from partitioning.array import ArraySpec
from partitioning.declaration import DeclarationError
from partitioning.overrides import match, read_overrides
from partitioning.paths import flatten, map_paths
from partitioning.placement import Placed
from partitioning.tables import ShardingConfig, read_tables


@dataclasses.dataclass(frozen=True)
class Padded:
    """The two forms of one padded array: shapes, and how each lies."""
    shape: tuple[int, ...]
    spec: PartitionSpec
    true_shape: tuple[int, ...]
    true_spec: PartitionSpec


def multiples(sizes: Mapping[str, int], sharding: ShardingConfig, params: Mapping[str, Any],
              paddable: Collection[str]) -> dict[str, int]:
    """For each dim in `paddable` the smallest number whose multiples can lie as declared: by the rules of all four tables and
    by the overrides. Spread axes choose among the dims that fit, so they ask for nothing.

    Args:
      sizes: of all mesh axes.
      sharding: the declaration; `pad` is only checked here.
      params: nested dict of ArraySpec, true sizes.
      paddable: dims that the model can pad.

    Raises:
      DeclarationError: `pad` names another dim; or a table or an override is wrong.
    """
    for dim in sharding.pad:
        if dim not in paddable:
            raise DeclarationError(f"config.sharding.pad = {sharding.pad!r}: the dim {dim!r} cannot be padded; those that can: "
                                   f"{', '.join(paddable)}.")
    arrays = flatten(params)
    tables = read_tables(sharding, dict.fromkeys(dim for array in arrays.values() for dim in array.dims if dim))
    splits = [(dim, table.rules[dim].axes) for table in tables.values() for dim in paddable if dim in table.rules]
    for path, override in match(read_overrides(sharding.overrides), arrays).items():
        splits += zip(reversed(arrays[path].dims), reversed(override.axes))   # a leading `layers` may be left out
    return {dim: math.lcm(*(math.prod(sizes[axis] for axis in axes) for split, axes in splits if split == dim))
            for dim in paddable}


def next_multiple(size: int, step: int) -> int:
    """The smallest multiple of `step` that is at least `size`."""
    return -(-size // step) * step


def trimmed_placement(array: ArraySpec, placed: Placed, sizes: Mapping[str, int]) -> Placed:
    """How a padded array lies once it has its true shape, given how it lies with its padding."""
    result: list[tuple[str, ...]] = []
    homeless: list[str] = []
    for size, axes in zip(array.true_shape, placed):
        kept = next(n for n in range(len(axes), -1, -1) if size % math.prod(sizes[axis] for axis in axes[:n]) == 0)
        result.append(axes[:kept])
        homeless += axes[kept:]
    for axis in homeless:
        blocks = {i: size // math.prod(sizes[a] for a in result[i]) for i, size in enumerate(array.true_shape)}
        fits = [i for i, block in blocks.items() if block and block % sizes[axis] == 0]
        if fits:
            result[max(fits, key=lambda i: (blocks[i], -i))] += (axis,)
    return tuple(result)


def cut(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The first `shape` of an array, its padding left off."""
    return x if x.shape == shape else jax.lax.slice(x, (0,) * x.ndim, shape)


def fill(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """An array with zeros at the end of its dims up to `shape`."""
    return x if x.shape == shape else jnp.pad(x, [(0, new - old) for old, new in zip(x.shape, shape)])


def trimmed(state: Any, layout: Any) -> Any:
    """Groups of a state (params/<path>, optimizer/<slot>/<path>, others) on the layout's devices, every array in its true
    shape. An array without padding is passed on as it is."""
    def one(path, x):
        form = layout.padded.get(path)
        return x if form is None else _mover(cut, form.true_shape, layout.sharding(form.true_spec))(x)

    return map_paths(one, state)


def filled(state: Any, layout: Any) -> Any:
    """The inverse of `trimmed`."""
    def one(path, x):
        form = layout.padded.get(path)
        return x if form is None else _mover(fill, form.shape, layout.sharding(form.spec))(x)

    return map_paths(one, state)


def trimmed_abstract(state: Any, layout: Any) -> Any:
    """The ShapeDtypeStructs of `trimmed`, from those of a state."""
    def one(path, x):
        form = layout.padded.get(path)
        return x if form is None else jax.ShapeDtypeStruct(form.true_shape, x.dtype, sharding=layout.sharding(form.true_spec))

    return map_paths(one, state)


@functools.cache                               # so that arrays of one form compile once
def _mover(action: Any, shape: tuple[int, ...], sharding: NamedSharding) -> Any:
    return jax.jit(functools.partial(action, shape=shape), out_shardings=sharding)
