"""Placing one array: from the rules of its dims to the mesh axes that split each of them.

Two steps, both arithmetic on sizes. `place` takes what rules or an override say, and refuses what JAX would quietly
turn into replication. `spread` then adds axes to whichever dims suit best.

An axis of size 1 splits nothing, so it is left out of the result and its dim counts as free; it still counts when two
dims claim one axis, because a declaration that is wrong should not wait for a larger mesh to say so.
"""

import dataclasses
import math
import types
from collections.abc import Collection, Mapping, Sequence

from partitioning.array import ArraySpec
from partitioning.declaration import DeclarationError
from partitioning.mesh import nearest_divisors
from partitioning.tables import Rule

@dataclasses.dataclass(frozen=True)
class Hint:
    """What a message can say of a dim whose size does not suit.

    Attributes:
      key: of the configuration, that the size comes from.
      times: the key's value for a size of 1.
      pad: the config.sharding.pad that would pad it.
    """
    key: str | None = None
    times: int = 1
    pad: tuple[str, ...] = ()


Placed = tuple[tuple[str, ...], ...]           # per dim, the axes larger than 1 that split it


def place(name: str, array: ArraySpec, rules: Sequence[Rule], sizes: Mapping[str, int],
          hints: Mapping[str, Hint] = types.MappingProxyType({})) -> Placed:
    """The axes of each dim by its rule.

    Args:
      name: what to call the array in messages.
      rules: one for each dim.
      hints: of some dims.

    Raises:
      DeclarationError: one mesh axis on two dims, or a dim that its axes do not divide.
    """
    check_claims(name, array.dims, rules)
    for i, rule in enumerate(rules):
        if array.shape[i] % math.prod(sizes[axis] for axis in rule.axes):
            raise DeclarationError(_indivisible(name, array, i, rule, sizes, hints.get(array.dims[i], Hint())))
    return tuple(tuple(axis for axis in rule.axes if sizes[axis] > 1) for rule in rules)


def check_claims(name: str, dims: Sequence[str | None], rules: Sequence[Rule]) -> None:
    """Refuses rules that put one mesh axis on two dims of an array; sizes do not matter."""
    owner: dict[str, int] = {}
    for i, rule in enumerate(rules):
        for axis in rule.axes:
            if axis in owner:
                raise DeclarationError(_conflict(name, dims, axis, owner[axis], i, rules))
            owner[axis] = i


def spread(array: ArraySpec, placed: Placed, axes: Collection[str],
           sizes: Mapping[str, int]) -> tuple[Placed, dict[str, int], tuple[str, ...]]:
    """Adds axes to the dims that suit them, one after the other.

    An axis goes to the dim of the axis before it while that still divides; else to the largest dim that it divides and
    that nothing splits yet (of equals the first), never to `layers`. Axes of size 1, and those that the array uses
    already, have nothing to do here.

    Returns:
      (the new placement, axis to the index of its dim, the axes that fit nowhere).
    """
    result = list(placed)
    used = {axis for dim in placed for axis in dim}
    homes: dict[str, int] = {}
    unplaced, home = [], None
    for axis in axes:
        if sizes[axis] == 1 or axis in used:
            continue
        if home is None or array.shape[home] % (math.prod(sizes[a] for a in result[home]) * sizes[axis]):
            free = [i for i, size in enumerate(array.shape)
                    if not result[i] and array.dims[i] != "layers" and size and size % sizes[axis] == 0]
            if not free:
                unplaced.append(axis)
                continue
            home = max(free, key=lambda i: (array.shape[i], -i))
        result[home] += (axis,)
        homes[axis] = home
    return tuple(result), homes, tuple(unplaced)


def dim_name(dims: Sequence[str | None], i: int) -> str:
    """What to call dimension `i`: its logical name, or its number."""
    return dims[i] or f"number {i}"


def _where(rule: Rule, dim: str | None) -> str:
    """The key to change for another result."""
    key = "sharding.rules" if rule.source == "default" else rule.source
    return f"config.{key}" + (f".{dim}" if dim and key.endswith("rules") else "")


def _conflict(name: str, dims: Sequence[str | None], axis: str, first: int, second: int, rules: Sequence[Rule]) -> str:
    one, other = dim_name(dims, first), dim_name(dims, second)
    between = ""
    if "length" in (one, other):
        between = " To split the length only between the parts of a block, give the rule to stream_length."
    return (f"{name}: its dims {one} and {other} both claim the mesh axis {axis!r} "
            f"({one} by {_where(rules[first], dims[first])}, {other} by {_where(rules[second], dims[second])}), "
            f"and one axis can split an array only once. Take {axis!r} off one of them; if it is right for another kind of "
            f"array, say so in that kind's own table (config.sharding.params, gradients, optimizer or activations).{between}")


def _indivisible(name: str, array: ArraySpec, i: int, rule: Rule, sizes: Mapping[str, int],
                 hint: Hint) -> str:
    size, dim = array.shape[i], dim_name(array.dims, i)
    axes = [axis for axis in rule.axes if sizes[axis] > 1]
    product = math.prod(sizes[axis] for axis in axes)
    asked = " x ".join(f"{axis}={sizes[axis]}" for axis in axes) + (f" = {product}" if len(axes) > 1 else "")
    fitting = " or ".join(str(n * hint.times) for n in _nearest_multiples(size, product))
    ways = [f"{hint.key or dim} = {fitting}"]
    for axis in axes:
        rest = product // sizes[axis]
        if size and size % rest == 0:
            divisors = " or ".join(str(n) for n in nearest_divisors(size // rest, sizes[axis]))
            ways.append(f"{axis} = {divisors}")
    others = f" (with the devices that are left over on an axis that does not split {dim})" if len(ways) > 1 else ""
    where = _where(rule, array.dims[i])
    pad = f"; or pad it: config.sharding.pad = {hint.pad!r}" if hint.pad else ""
    of = f" ({hint.key} = {size * hint.times} in {hint.times} parts)" if hint.times > 1 else ""
    return (f"{name}: its dim {dim} has size {size}{of}, which {asked} does not divide ({where} splits {dim} over "
            f"{' and '.join(axes)}). What works: {'; or '.join(ways)}{others}. To replicate this dim instead, "
            f"{f'set {where} = None' if where.endswith(f'.{dim}') else f'put None for it in {where}'}{pad}.")


def _nearest_multiples(size: int, step: int) -> list[int]:
    below, above = size // step * step, -(-size // step) * step
    return sorted({n for n in (below, above) if n}, key=lambda n: (abs(n - size), n))
