"""A Hugging Face model's folder: config.json, and tensors in memory-mapped safetensors files.

The format of a file is a length (8 bytes, little endian), a JSON header that says dtype, shape and place of each tensor, and the
numbers (https://github.com/huggingface/safetensors). A model in several files has an index, model.safetensors.index.json.
"""

import dataclasses
import itertools
import json
import math
import mmap
import os
import pathlib
import struct
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from partitioning.declaration import DeclarationError

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
FILE_BYTES = 5 * 10**9  # to one written file, unless a tensor is larger by itself


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor in a file. `dtype` is the file's own name of it; [start, end) are bytes of the file."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def is_folder(path: str | pathlib.Path) -> bool:
    """Whether a folder is a Hugging Face model's: it has a config.json that says which."""
    try:
        return "model_type" in json.loads((pathlib.Path(path) / CONFIG).read_text("utf-8"))
    except (OSError, ValueError, TypeError):
        return False


def read_config(path: str | pathlib.Path, key: str) -> dict[str, Any]:
    """The config.json of a folder. `key`: what the folder was given as, for messages.

    Raises:
      DeclarationError: there is none.
    """
    place = pathlib.Path(os.path.expanduser(path)) / CONFIG
    try:
        config = json.loads(place.read_text("utf-8"))
    except OSError as error:
        raise DeclarationError(
            f"{key} = {str(path)!r} is no folder of a Hugging Face model: {place}: {error.strerror}. "
            "Nothing is looked up or downloaded; give the path of a folder."
        ) from None
    except ValueError as error:
        raise DeclarationError(f"{place} is no JSON file: {error}.") from None
    if not isinstance(config, dict) or "model_type" not in config:
        raise DeclarationError(f"{place} has no model_type; it is no Hugging Face model's.")
    return config


class Tensors:
    """The tensors of a folder, by name."""

    def __init__(self, path: str | pathlib.Path):
        """Reads index and headers.

        Raises:
          DeclarationError: there are no safetensors files, one is missing or is cut short, or its header cannot be read.
        """
        self.path = pathlib.Path(os.path.expanduser(path))
        self._maps: dict[str, mmap.mmap] = {}
        index = self.path / INDEX
        if index.is_file():
            try:
                places = json.loads(index.read_text("utf-8"))["weight_map"]
                files = list(dict.fromkeys(places.values()))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise DeclarationError(f"{index} cannot be read: {error!r}.") from None
        else:
            places, files = None, [SINGLE]
        self.entries: dict[str, Entry] = {}
        for file in files:
            self.entries |= self._header(file)
        if places is not None:
            lost = [name for name in places if name not in self.entries]
            if lost:
                raise DeclarationError(
                    f"{index} puts {lost[0]} into {places[lost[0]]}, which has no such tensor"
                    f"{f' (nor {len(lost) - 1} others)' if len(lost) > 1 else ''}."
                )

    def _header(self, file: str) -> dict[str, Entry]:
        place = self.path / file
        try:
            size = place.stat().st_size
            with open(place, "rb") as handle:
                (length,) = struct.unpack("<Q", handle.read(8))
                header = json.loads(handle.read(length))
            header.pop("__metadata__", None)
            out = {}
            for name, facts in header.items():
                start, end = facts["data_offsets"]
                out[name] = Entry(file, facts["dtype"], tuple(facts["shape"]), 8 + length + start, 8 + length + end)
                if not 0 <= start <= end:
                    raise ValueError(f"{name} lies at bytes {start} to {end}")
        except FileNotFoundError:
            others = sorted(p.name for p in self.path.glob("*.bin"))
            raise DeclarationError(
                f"there is no {place}" + (f", only {others[0]}; save the model as safetensors first." if others else ".")
            ) from None
        except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, struct.error, MemoryError) as error:
            raise DeclarationError(f"{place} is no safetensors file: {error}.") from None
        lying = sorted(out, key=lambda name: (out[name].start, out[name].end))
        for one, other in itertools.pairwise(lying):
            if out[one].end > out[other].start:
                raise DeclarationError(f"{place} is no safetensors file: {one} and {other} lie in the same bytes.")
        for name in out:
            if out[name].end > size:
                raise DeclarationError(f"{place} is cut short: {name} ends at byte {out[name].end:,}, and the file has {size:,}.")
        return out

    def dtype(self, name: str) -> np.dtype:
        """Of a tensor.

        Raises:
          DeclarationError: its numbers are of no kind that weights have.
        """
        entry = self.entries[name]
        if entry.dtype not in DTYPES:
            raise DeclarationError(
                f"{self.path / entry.file}: {name} is of dtype {entry.dtype}; expected one of {', '.join(DTYPES)}."
            )
        return np.dtype(DTYPES[entry.dtype])

    def array(self, name: str) -> np.ndarray:
        """A tensor, memory-mapped, not to be written to."""
        entry, dtype = self.entries[name], self.dtype(name)
        if math.prod(entry.shape) * dtype.itemsize != entry.end - entry.start:
            raise DeclarationError(
                f"{self.path / entry.file}: {name} of shape {entry.shape} and dtype {entry.dtype} does not have "
                f"{entry.end - entry.start:,} bytes."
            )
        return np.frombuffer(self._map(entry.file), np.uint8)[entry.start : entry.end].view(dtype).reshape(entry.shape)

    def release(self, name: str) -> None:
        """Gives back the memory that a tensor's pages take; they are read again when they are asked for again."""
        entry = self.entries[name]
        _give_back(self._map(entry.file), entry.start, entry.end)

    def _map(self, file: str) -> mmap.mmap:
        if file not in self._maps:
            with open(self.path / file, "rb") as handle:
                self._maps[file] = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        return self._maps[file]


def _give_back(mapped: mmap.mmap, start: int, end: int) -> None:
    """Takes the whole pages of [start, end) out of this process's memory. What was written to them stays in the file."""
    start = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    length = end // mmap.PAGESIZE * mmap.PAGESIZE - start
    if length > 0:
        mapped.madvise(mmap.MADV_DONTNEED, start, length)


class Writer:
    """New safetensors files of known tensors, memory-mapped, to be filled in any order."""

    def __init__(self, path: pathlib.Path, tensors: Mapping[str, tuple[tuple[int, ...], np.dtype]]):
        """Args:
        path: a folder.
        tensors: name to (shape, dtype), in the order in which they are to lie.
        """
        files, total = [{}], 0
        for name, (shape, dtype) in tensors.items():
            size = math.prod(shape) * np.dtype(dtype).itemsize
            if files[-1] and total + size > FILE_BYTES:
                files.append({})
                total = 0
            files[-1][name] = (tuple(shape), np.dtype(dtype), total, total + size)
            total += size
        self._arrays: dict[str, np.ndarray] = {}
        self._places: dict[str, tuple[mmap.mmap, int, int]] = {}
        self._maps, places = [], {}
        for number, members in enumerate(files, 1):
            file = SINGLE if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
            header = {"__metadata__": {"format": "pt"}} | {
                name: {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
                for name, (shape, dtype, start, end) in members.items()
            }
            text = json.dumps(header, separators=(",", ":")).encode()
            text += b" " * (-len(text) % 8)
            with open(path / file, "w+b") as handle:
                handle.write(struct.pack("<Q", len(text)) + text)
                offset = handle.tell()
                handle.truncate(offset + max(end for *_, end in members.values()))
                handle.flush()
                self._maps.append(mmap.mmap(handle.fileno(), 0))
            whole = np.frombuffer(self._maps[-1], np.uint8)
            for name, (shape, dtype, start, end) in members.items():
                self._arrays[name] = whole[offset + start : offset + end].view(dtype).reshape(shape)
                self._places[name] = (self._maps[-1], offset + start, offset + end)
            places |= dict.fromkeys(members, file)
        if len(files) > 1:
            size = sum(array.nbytes for array in self._arrays.values())
            text = json.dumps({"metadata": {"total_size": size}, "weight_map": places}, indent=2)
            (path / INDEX).write_text(text + "\n", "utf-8")

    def array(self, name: str) -> np.ndarray:
        """A tensor, to be written to."""
        return self._arrays[name]

    def release(self, name: str) -> None:
        """Takes a tensor's pages out of this process's memory, written or not; there may be more written to them."""
        _give_back(*self._places[name])

    def flush(self) -> None:
        """Everything to disk, and out of this process's memory."""
        for one in self._maps:
            one.flush()
            one.madvise(mmap.MADV_DONTNEED)
