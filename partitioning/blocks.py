"""Which block of an array each device holds, and how to draw that: the arithmetic behind the pictures of a layout.

Devices are counted in mesh order, the last axis fastest. A spec cuts each dim of an array into as many equal blocks as its
axes have devices; the blocks of an array are numbered as its elements are, the last dim fastest.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Picture:
    """An array's blocks as rectangles: one for each block of the dims that are neither down nor across.

    Attributes:
      counts: blocks along each dim.
      down, across: the dims that are drawn, those with the most blocks; None where the array has no such dim.
      drawn: along each dim, the blocks that are drawn: those that drawn devices hold.
      held: for each device that is drawn, the number of its block.
    """
    counts: tuple[int, ...]
    down: int | None
    across: int | None
    drawn: tuple[tuple[int, ...], ...]
    held: tuple[int, ...]

    def rectangles(self) -> list[list[list[tuple[int, ...]]]]:
        """Rectangles of rows of blocks; a block is its index along each dim."""
        def along(dim):
            return (0,) if dim is None else self.drawn[dim]

        rest = [(0,) if dim in (self.down, self.across) else self.drawn[dim] for dim in range(len(self.counts))]

        def block(others, i, j):
            return tuple(i if dim == self.down else j if dim == self.across else others[dim] for dim in range(len(others)))

        return [[[block(others, i, j) for j in along(self.across)] for i in along(self.down)]
                for others in itertools.product(*rest)]


def blocks(spec: Sequence[Any], sizes: Mapping[str, int]) -> list[tuple[int, ...]]:
    """For each device of the mesh, the index along each dim of the block that it holds.

    Args:
      spec: for every dim None, an axis or a tuple of axes, of which the first splits coarsest.
      sizes: of the mesh axes, in mesh order.
    """
    dims = [() if axes is None else (axes,) if isinstance(axes, str) else tuple(axes) for axes in spec]
    held = []
    for place in itertools.product(*map(range, sizes.values())):
        coordinate = dict(zip(sizes, place))
        held.append(tuple(number([coordinate[axis] for axis in axes], [sizes[axis] for axis in axes]) for axes in dims))
    return held


def number(index: Sequence[int], counts: Sequence[int]) -> int:
    """The place of an index among all of them, the last dim fastest."""
    result = 0
    for i, count in zip(index, counts, strict=True):
        result = result * count + i
    return result


def drawn_sizes(sizes: Mapping[str, int], limit: int) -> dict[str, int]:
    """How much of each axis to draw so that at most `limit` devices are: the longest axis is halved until they fit."""
    drawn = dict(sizes)
    while math.prod(drawn.values()) > limit:
        longest = max(drawn, key=drawn.get)
        drawn[longest] = (drawn[longest] + 1) // 2
    return drawn


def drawn_devices(sizes: Mapping[str, int], limit: int) -> list[tuple[int, dict[str, int]]]:
    """(number, coordinates) of the devices to draw, in mesh order: the first along each axis."""
    counts = tuple(sizes.values())
    places = itertools.product(*map(range, drawn_sizes(sizes, limit).values()))
    return [(number(place, counts), dict(zip(sizes, place))) for place in places]


def picture(spec: Sequence[Any], shape: Sequence[int], sizes: Mapping[str, int], limit: int) -> Picture:
    """How to draw an array of this shape and spec on at most `limit` devices."""
    held = blocks(spec, sizes)
    counts = tuple(1 + max(indices) for indices in zip(*held))
    faces = sorted(sorted(range(len(shape)), key=lambda dim: (-counts[dim], -shape[dim], dim))[:2])
    indices = [held[device] for device, _ in drawn_devices(sizes, limit)]
    return Picture(counts, faces[0] if len(faces) == 2 else None, faces[-1] if faces else None,
                   tuple(tuple(sorted(set(along))) for along in zip(*indices)),
                   tuple(number(index, counts) for index in indices))
