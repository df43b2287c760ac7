"""How a tensor of a Hugging Face file and our arrays hold the same numbers, declared so that it can be used both ways.

A file has one tensor for each layer, its matrices as (out, in), with heads and their width in one dim, and some families put
several matrices into one tensor. Ours are stacked along `layers`, have a dim for everything that has a name, and are separate.
The pattern of a part names the dims of its piece of the file's tensor: 'heads head_dim, embed' is a matrix whose rows are the
numbers of the heads, head by head. What is in the pattern and in the ArraySpec of our array decides shapes, reshaping and
transposition; all that is done to a memory-mapped tensor is a view, and numbers move once, from the file to where they are to lie
or back.
"""

import concurrent.futures
import dataclasses
import functools
import math
import os
import threading
from collections.abc import Mapping, Sequence

import numpy as np

from partitioning.array import ArraySpec

HALVES, NEIGHBOURS = "halves", "neighbours"  # how the pairs that RoPE turns lie in a head
ROWS, COLUMNS = 2048, 128  # of what is transposed at a time, in cache
_own = threading.local()


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Attributes:
    name: in the file, without the family's prefix; '{layer}' stands for the number of a layer.
    parts: (path of our array, pattern of its piece), in the order in which the pieces follow each other along `axis`.
    pairs: how the file's heads pair the numbers that RoPE turns; ours are HALVES.
    """

    name: str
    parts: tuple[tuple[str, str], ...]
    axis: int = 0
    pairs: str = HALVES


def linear(name: str, *parts: tuple[str, str, str], transposed: bool = False, pairs: str = HALVES) -> tuple[Tensor, Tensor]:
    """The weight and the bias of a layer y = W x + b, each of one or several of our projections.

    Args:
      parts: (path of ours, pattern of its outputs, pattern of its inputs).
      transposed: the file has (in, out), as GPT-2's does.
    """
    weights = tuple(
        (f"{path}/kernel", f"{inputs}, {outputs}" if transposed else f"{outputs}, {inputs}") for path, outputs, inputs in parts
    )
    biases = tuple((f"{path}/bias", outputs) for path, outputs, _ in parts)
    return Tensor(f"{name}.weight", weights, int(transposed), pairs), Tensor(f"{name}.bias", biases, 0, pairs)


def norm(name: str, path: str, pattern: str = "embed") -> tuple[Tensor, Tensor]:
    """Gain and offset."""
    return Tensor(f"{name}.weight", ((f"{path}/scale", pattern),)), Tensor(f"{name}.bias", ((f"{path}/bias", pattern),))


@dataclasses.dataclass(frozen=True)
class Bound:
    """A Tensor for the arrays of one model.

    Attributes:
      specs: path to ArraySpec of its parts, without `layers` and without padding.
      rotated: numbers of a head that RoPE turns.
    """

    tensor: Tensor
    specs: Mapping[str, ArraySpec]
    rotated: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor in the file."""
        shapes = [self._shape(path) for path, _ in self.tensor.parts]
        axis = self.tensor.axis
        return (*shapes[0][:axis], sum(shape[axis] for shape in shapes), *shapes[0][axis + 1 :])

    def view(self, array: np.ndarray, path: str) -> np.ndarray:
        """The piece of one of our arrays in the file's tensor, as a view in our shape (of one layer)."""
        start, axis = 0, self.tensor.axis
        for other, _ in self.tensor.parts:
            size = self._shape(other)[axis]
            if other == path:
                break
            start += size
        piece = array[(slice(None),) * axis + (slice(start, start + size),)]
        names, sizes = self._names(path), self._sizes(path)
        order = [names.index(dim) for dim in sizes]
        return np.reshape(piece, [sizes[dim] for dim in names], copy=False).transpose(order)

    def order(self, path: str) -> tuple[int, np.ndarray] | None:
        """Where the numbers of a head lie otherwise than ours: (number of our dim, place in the file of each of ours)."""
        dims = self.specs[path].dims
        if self.tensor.pairs == HALVES or path.split("/")[-2] not in ("query", "key"):
            return None
        width = self.specs[path].true_shape[dims.index("head_dim")]
        turned = np.arange(self.rotated).reshape(-1, 2).T.reshape(-1)
        return dims.index("head_dim"), np.concatenate([turned, np.arange(self.rotated, width)])

    def _names(self, path: str) -> list[str]:
        return [name for group in self._groups(path) for name in group]

    def _groups(self, path: str) -> list[list[str]]:
        return [group.split() for group in dict(self.tensor.parts)[path].split(",")]

    def _sizes(self, path: str) -> dict[str, int]:
        spec = self.specs[path]
        return {dim or "place": size for dim, size in zip(spec.dims, spec.true_shape, strict=True)}

    def _shape(self, path: str) -> tuple[int, ...]:
        sizes = self._sizes(path)
        return tuple(math.prod(sizes[name] for name in group) for group in self._groups(path))


def read_into(
    pieces: Sequence[tuple[tuple[slice, ...], np.ndarray]], bound: Bound, path: str, file_tensor: np.ndarray
) -> None:
    """Fills arrays, each with a block of our array (of one layer) out of the file's tensor, in its own dtype.

    Args:
      pieces: (index of the block, array to fill).
    """
    view, order = bound.view(file_tensor, path), bound.order(path)
    if order is None:
        return copy_all([(target, view[index]) for index, target in pieces])
    dim, places = order
    for index, target in pieces:
        whole = (*index[:dim], slice(None), *index[dim + 1 :])
        copy(target, view[whole].take(places[index[dim]], axis=dim))


def write_from(block: np.ndarray, bound: Bound, path: str, file_tensor: np.ndarray, index: tuple[slice, ...]) -> None:
    """The inverse of `read_into`: puts a block of our array where it belongs in the file's tensor."""
    view, order = bound.view(file_tensor, path), bound.order(path)
    if order is None:
        return copy(view[index], block)
    dim, places = order
    view[(*index[:dim], slice(None), *index[dim + 1 :])][(slice(None),) * dim + (places[index[dim]],)] = block


def copy(target: np.ndarray, source: np.ndarray) -> None:
    """Copies numbers, converting them to the target's dtype."""
    copy_all([(target, source)])


def copy_all(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    """Copies numbers from each second array to the first. Where one is the transpose of the other it goes tile by tile: numpy
    walks along the one and jumps through the other, which costs a cache miss for each number. What lies side by side in the
    same rows, as the blocks of several devices do, goes together: a page of the file is then looked at once, not for each."""
    crossed = []
    for target, source in pairs:
        flat = _as_matrices(target, source)
        if flat is None:
            with np.errstate(over="ignore"):   # whoever asked for a narrower dtype looks for infinities
                np.copyto(target, source, casting="unsafe")
            continue
        target, source = flat
        if target.strides[1] != target.itemsize:  # so that it is the target whose rows are contiguous
            target, source = target.T, source.T
        crossed += [(target[i : i + ROWS], source[i : i + ROWS]) for i in range(0, len(target), ROWS)]
    for targets, source in _side_by_side(crossed):
        _transpose(targets, source)


def _side_by_side(pairs: list[tuple[np.ndarray, np.ndarray]]) -> list[tuple[list[np.ndarray], np.ndarray]]:
    """Sources each of which goes on where the one before ends as one, of at most ROWS, with the targets in their order."""
    out: list[tuple[list[np.ndarray], np.ndarray]] = []
    for target, source in sorted(pairs, key=lambda pair: pair[1].ctypes.data):
        if out:
            targets, before = out[-1]
            end = before.ctypes.data + len(before) * before.strides[0]
            alike = before.strides == source.strides and before.shape[1] == source.shape[1] and before.dtype == source.dtype
            if alike and end == source.ctypes.data and len(before) + len(source) <= ROWS:
                joined = np.lib.stride_tricks.as_strided(
                    before, (len(before) + len(source), source.shape[1]), source.strides, writeable=False
                )
                out[-1] = ([*targets, target], joined)
                continue
        out.append(([target], source))
    return out


def _transpose(targets: Sequence[np.ndarray], source: np.ndarray) -> None:
    """Fills the targets, whose rows follow each other in the source; theirs are contiguous, the source's columns are."""
    columns = min(COLUMNS, source.shape[1])
    # Lines at distances that are no power of two: those share a place in the cache.
    near = _scratch(columns * (len(source) + 16), source.dtype).reshape(columns, len(source) + 16)
    for j in range(0, source.shape[1], columns):
        piece = source[:, j : j + columns].T
        own = near[: len(piece), : len(source)]
        own[...] = piece
        start = 0
        for target in targets:
            np.copyto(target[:, j : j + columns], own[:, start : start + len(target)].T, casting="unsafe")
            start += len(target)


def _scratch(size: int, dtype: np.dtype) -> np.ndarray:
    """Memory that a thread uses again and again: fresh memory costs more than what is done in it."""
    if not hasattr(_own, "memory"):
        _own.memory = np.empty(COLUMNS * (ROWS + 16) * 8, np.uint8)
    return _own.memory.view(dtype)[:size]


def _as_matrices(target: np.ndarray, source: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Both as views of two dims, if one is the transpose of the other and they are large enough for that to matter."""
    if target.ndim < 2 or target.size < COLUMNS:
        return None
    for k in range(1, target.ndim):
        shape = (math.prod(target.shape[:k]), math.prod(target.shape[k:]))
        try:
            a, b = (np.reshape(x, shape, copy=False) for x in (target, source))
        except ValueError:  # it would take a copy
            continue
        along = [x.strides.index(min(x.strides)) for x in (a, b)]
        if along[0] != along[1] and min(shape) > 1:
            return a, b
    return None


@functools.cache
def workers() -> concurrent.futures.ThreadPoolExecutor:
    """Threads that copy: numpy lets the others go on while it does."""
    return concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1), "copy")
