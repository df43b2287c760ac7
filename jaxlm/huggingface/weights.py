"""The weights of a Hugging Face folder, read straight to where they are to lie.

Each of our arrays is put together on the host in the blocks that this process's devices hold, out of the memory-mapped tensors
of the file, layer by layer: of a tensor only what those blocks need is looked at, and its pages are given back before the next
one. On a CPU the blocks themselves become the array, elsewhere they are sent and forgotten.
"""

import math
import os
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jaxlm.selection import Selection, match
from jaxlm.config import ModelConfig, to_config
from jaxlm.huggingface.architecture import family_of, mismatches
from jaxlm.huggingface.families import BUFFERS, Family
from jaxlm.huggingface.folder import Entry, Tensors, read_config
from jaxlm.huggingface.tensors import Bound, Tensor, copy, read_into, workers
from jaxlm.models import build_model
from partitioning.array import ArraySpec
from partitioning.declaration import DeclarationError
from partitioning.paths import flatten, unflatten

ALIGNMENT = 64  # of memory that XLA:CPU uses as it is
PIECE = 2**25  # bytes that one thread copies at a time


class Weights:
    """A folder's weights under our paths, to be read like a checkpoint."""

    def __init__(self, path: str | pathlib.Path, key: str = "the folder"):
        """Reads config.json and the files' headers, and compares the tensors with the model.

        Raises:
          DeclarationError: it is no such folder, of no known family, or a tensor is unknown, missing or misshapen.
        """
        self.path = pathlib.Path(os.path.expanduser(path))
        self._config = read_config(path, key)
        self.family = family_of(self._config)
        self.model = to_config({"model": {"from_hf": str(path)}}).model
        self.specs = flatten(build_model(self.model).specs)
        self._tensors = Tensors(path)
        self._sources = sources(self.family, self.model, self.specs, self._prefix())
        self._check()

    def _prefix(self) -> str:
        """What names begin with here: nothing in a file of the bare model."""
        first = self.family.tensors[0].name
        return self.family.prefix if first not in self._tensors.entries else ""

    def _check(self) -> None:
        expected = {name: bound for _, names, bound in self._sources.values() for name in names}
        there = {name for name in self._tensors.entries if not any(re.fullmatch(pattern, f".{name}") for pattern in BUFFERS)}
        if self.model.tie_embeddings and self.family.head in there:
            self._check_tied()
            there.remove(self.family.head)
        lines = [f"{name}: missing; expected of shape {bound.shape}" for name, bound in expected.items() if name not in there]
        lines += [
            f"{name}: shape {self._tensors.entries[name].shape}, expected {bound.shape}"
            for name, bound in expected.items()
            if name in there and self._tensors.entries[name].shape != bound.shape
        ]
        lines += [f"{name}: unknown, of shape {self._tensors.entries[name].shape}" for name in sorted(there - expected.keys())]
        if lines:
            more = f"\n  and {len(lines) - 6} more tensors" if len(lines) > 6 else ""
            raise DeclarationError(
                f"the tensors of {self.path} are not those of the {self.family.model_type} model that its "
                f"config.json describes:\n  " + "\n  ".join(lines[:6]) + more
            )
        for name in expected:
            self._tensors.dtype(name)

    def _check_tied(self) -> None:
        table = self._sources["embed/embedding"][1][0]
        if table in self._tensors.entries and not np.array_equal(
            self._tensors.array(table), self._tensors.array(self.family.head)
        ):
            raise DeclarationError(
                f"config.json of {self.path} ties the output matrix to the embedding, but {self.family.head} "
                f"differs from {table}; set tie_word_embeddings to false there."
            )

    @property
    def entries(self) -> dict[str, Entry]:
        """The folder's tensors by name."""
        return self._tensors.entries

    def dtypes(self) -> dict[str, np.dtype]:
        """Path to the dtype that its tensors have.

        Raises:
          DeclarationError: layers differ in it, or arrays cannot have it, so that none would be true.
        """
        out = {}
        for path, (_, names, _) in self._sources.items():
            found = {self._tensors.dtype(name) for name in names}
            if len(found) > 1 or np.dtype(np.float64) in found:
                what = " and ".join(sorted(str(dtype) for dtype in found))
                raise DeclarationError(
                    f"{self.path}: {names[0]} and its like in other layers are {what}; an array of all layers has one dtype, "
                    "float32, bfloat16 or float16. Say with --dtype which."
                )
            out[path] = found.pop()
        return out

    def differences(self, model: ModelConfig) -> list[tuple[str, Any, Any]]:
        """(key, value, value of the folder's model) of what makes a model another one."""
        return mismatches(model, self._config)

    def check(self, step: int, abstract: Any, selection: Selection | None = None) -> dict[str, str]:
        """Compares the arrays with those that are asked for (params/<path>); see `selection.match`. `step` is of no meaning here
        and in `restore`; with it a folder is read as a run's Checkpoints are."""
        shapes = {f"params/{path}": spec.shape for path, spec in self.specs.items()}
        return match(shapes, abstract, selection or Selection(), str(self.path))

    def restore(self, step: int, abstract: Any, selection: Selection | None = None) -> Any:
        """Reads arrays.

        Args:
          abstract: nested dict (params/<path>) of ShapeDtypeStruct with shardings. Of each array this process reads what its
            devices hold.
          selection: what is called otherwise there, and which arrays to leave out of the result.

        Raises:
          DeclarationError: the folder's arrays are not the ones asked for.
        """
        theirs, wanted = self.check(step, abstract, selection), flatten(abstract)
        return unflatten({path: self._read(theirs[path].removeprefix("params/"), wanted[path]) for path in theirs})

    def _read(self, path: str, like: jax.ShapeDtypeStruct) -> jax.Array:
        devices = like.sharding.addressable_devices_indices_map(like.shape)
        places = [
            tuple(slice(*part.indices(size)[:2]) for part, size in zip(index, like.shape, strict=True))
            for index in devices.values()
        ]
        blocks = _memory([[part.stop - part.start for part in index] for index in places], like.dtype)
        first: dict[tuple, np.ndarray] = {}    # a block that several devices hold is read once
        for index, block in zip(places, blocks, strict=True):
            first.setdefault(_key(index), block)
        read = [(index, block) for index, block in zip(places, blocks, strict=True) if first[_key(index)] is block]
        list(workers().map(lambda task: task(), self._tasks(path, read)))
        for index, block in zip(places, blocks, strict=True):
            if first[_key(index)] is not block:
                copy(block, first[_key(index)])
        arrays = [jax.device_put(block, device) for block, device in zip(blocks, devices, strict=True)]
        out = jax.make_array_from_single_device_arrays(like.shape, like.sharding, arrays)
        return out.block_until_ready()

    def _tasks(self, path: str, blocks: list[tuple[tuple[slice, ...], np.ndarray]]) -> Iterator[Any]:
        """Functions that together fill the blocks, each out of one tensor."""
        stacked, names, bound = self._sources[path]
        if stacked:
            for layer, name in enumerate(names):
                pieces = [
                    (index[1:], block[layer - index[0].start])
                    for index, block in blocks
                    if index[0].start <= layer < index[0].stop
                ]
                if pieces:
                    yield self._task(name, bound, path, pieces)
            return
        for index, block in blocks:
            rows = max(1, len(block) * PIECE // max(1, block.nbytes))
            for start in range(0, len(block), rows):
                first = slice(index[0].start + start, min(index[0].start + start + rows, index[0].stop))
                yield self._task(names[0], bound, path, [((first, *index[1:]), block[start : start + rows])])

    def _task(self, name: str, bound: Bound, path: str, pieces: list) -> Any:
        def fill():
            array = self._tensors.array(name)
            read_into(pieces, bound, path, array)
            self._tensors.release(name)

        return fill


def sources(
    family: Family, model: ModelConfig, specs: Mapping[str, ArraySpec], prefix: str
) -> dict[str, tuple[bool, list[str], Bound]]:
    """For each of our paths: whether it is stacked, the names of the tensors that hold it, layer by layer, and how they do.

    Args:
      specs: path to ArraySpec of the whole model.
      prefix: of the names.
    """
    layers = {path: spec.without(0) if spec.dims[:1] == ("layers",) else spec for path, spec in specs.items()}
    head = Tensor(family.head, (("lm_head/kernel", "vocab, embed"),))
    out = {}
    for tensor in (*family.tensors, head):
        paths = [path for path, _ in tensor.parts]
        if not all(path in layers for path in paths):
            continue
        name = tensor.name if tensor is head else prefix + tensor.name
        bound = Bound(tensor, {path: layers[path] for path in paths}, model.rotated_width)
        for path in paths:
            stacked = specs[path].dims[:1] == ("layers",)
            names = [name.replace("{layer}", str(i)) for i in range(model.num_layers if stacked else 1)]
            out[path] = (stacked, names, bound)
    lost = set(specs) - set(out)
    assert not lost, f"{family.model_type} declares no tensor for {sorted(lost)}"
    return out


def _key(index: tuple[slice, ...]) -> tuple:
    return tuple((part.start, part.stop) for part in index)


def _memory(shapes: list[list[int]], dtype: Any) -> list[np.ndarray]:
    """Arrays without values, each where XLA:CPU can take it over as it is. They are one piece of memory, which the system can
    give in large pages; many pieces have many edges, and small pages there."""
    sizes = [math.prod(shape) * np.dtype(dtype).itemsize for shape in shapes]
    memory = np.empty(sum(size + ALIGNMENT for size in sizes) + ALIGNMENT, np.uint8)
    start, out = -memory.ctypes.data % ALIGNMENT, []
    for shape, size in zip(shapes, sizes, strict=True):
        out.append(memory[start : start + size].view(dtype).reshape(shape))
        start += -(-size // ALIGNMENT) * ALIGNMENT
    return out
