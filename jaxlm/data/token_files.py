"""Tokens that are on disk already, mapped into memory.

    NAME.bin              ids one after the other, uint16 or uint32, little-endian; which one: config.data.token_dtype
    NAME.bin, a header    256 int32 first: 20240520 (uint16) or 20240801 (uint32), 1, the count of tokens, as llm.c writes it
    NAME.bin + NAME.idx   Megatron's indexed data set: the index says the dtype and where documents end

A flat file does not say where documents end; that is found from the tokenizer's end token where it is needed.
"""

import dataclasses
import hashlib
import pathlib
import struct
from typing import Any

import numpy as np

from jaxlm.data.streams import Stream
from partitioning.declaration import DeclarationError

HEADER = 256 * 4
MAGIC = {20240520: np.uint16, 20240801: np.uint32}
MEGATRON = b"MMIDIDX\x00\x00"
MEGATRON_DTYPES = {1: np.uint8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


def mapped(path: pathlib.Path, dtype: Any, offset: int = 0, count: int | None = None) -> np.ndarray:
    """An array [count] that is a map of a file; an empty file gives an empty array."""
    if count == 0 or path.stat().st_size <= offset:
        return np.zeros(0, dtype)
    return np.asarray(np.memmap(path, dtype, "r", offset, None if count is None else (count,)))


def read_bin(path: pathlib.Path, *, dtype: str, vocab_size: int, limit: int) -> Stream:
    """The stream of a .bin file.

    Args:
      dtype: of a file that does not say it: 'uint16', 'uint32', or 'auto', the smaller that holds the tokenizer's ids.
      vocab_size: the tokenizer's.
      limit: ids that the model knows.

    Raises:
      DeclarationError: the file is damaged, or not of that dtype.
    """
    try:
        index = path.with_suffix(".idx")
        if index.is_file():
            return _megatron(path, index, limit)
        size = path.stat().st_size
        with open(path, "rb") as handle:
            head = handle.read(HEADER)
    except OSError as error:
        raise DeclarationError(f"{path} cannot be read: {error.strerror or error}.") from None
    magic = struct.unpack("<3i", head[:12]) if len(head) == HEADER else (0, 0, 0)
    offset, count = 0, None
    if magic[0] in MAGIC:
        if magic[1] != 1:
            raise DeclarationError(f"{path} has a header of version {magic[1]}; expected version 1.")
        kind, offset, count = np.dtype(MAGIC[magic[0]]), HEADER, magic[2] & 0xFFFFFFFF
        if size != HEADER + count * kind.itemsize:
            raise DeclarationError(
                f"{path}: its header says {count:,} tokens of {kind.itemsize} bytes, but {size - HEADER:,} bytes "
                "follow; it is cut off or damaged."
            )
    else:
        name = dtype if dtype != "auto" else "uint16" if vocab_size <= 2**16 else "uint32"
        kind = np.dtype(name)
        if size % kind.itemsize:
            raise DeclarationError(
                f"{path} has {size:,} bytes, which is no whole number of {name} ids; it is cut off, or "
                "config.data.token_dtype is wrong."
            )
    tokens = mapped(path, kind.newbyteorder("<"), offset, count)
    if dtype == "auto" and not offset and kind == np.uint16 and _is_wider(tokens):
        raise DeclarationError(
            f"{path}: every second uint16 of it is 0, as in a file of uint32 ids; say which it is: "
            "config.data.token_dtype='uint32' or 'uint16'."
        )
    return _sampled(tokens, None, limit)


def _is_wider(tokens: np.ndarray) -> bool:
    """Whether uint16 ids look like the halves of uint32 ids."""
    if len(tokens) < 8 or len(tokens) % 2:
        return False
    places = np.linspace(0, max(len(tokens) - 2048, 0), 64).astype(int) // 2 * 2
    halves = np.concatenate([tokens[place : place + 2048].reshape(-1, 2) for place in places.tolist()])
    return bool(halves[:, 0].any() and not halves[:, 1].any())


def _sampled(tokens: np.ndarray, ends: np.ndarray | None, limit: int) -> Stream:
    """The stream of a file that may be too large to read whole: it is known by its length and 64 stretches of it, whose ids are
    checked here, as the others are when they are read."""
    digest = hashlib.sha256(str(tokens.nbytes).encode())
    out = Stream((tokens,), ends, limit=limit)
    for place in np.linspace(0, max(len(tokens) - 2048, 0), 64).astype(int).tolist():
        stretch = np.ascontiguousarray(tokens[place : place + 2048])
        out.check(stretch)
        digest.update(stretch)
    return dataclasses.replace(out, fingerprint=digest.hexdigest())


def _megatron(path: pathlib.Path, index: pathlib.Path, limit: int) -> Stream:
    head = index.read_bytes()[:34]
    if head[:9] != MEGATRON or len(head) < 34:
        raise DeclarationError(
            f"{index}, beside {path.name}, is no index of Megatron's; rename it if it belongs to something else."
        )
    version, code, sequences, documents = struct.unpack("<QBQQ", head[9:34])
    if version != 1 or code not in MEGATRON_DTYPES:
        raise DeclarationError(f"{index} has version {version} and dtype code {code}; expected version 1 and integers.")
    kind = np.dtype(MEGATRON_DTYPES[code])
    need = 34 + 12 * sequences + 8 * documents
    if index.stat().st_size < need:
        raise DeclarationError(
            f"{index} has {index.stat().st_size:,} bytes; {sequences:,} sequences and {documents:,} documents "
            f"need {need:,}. It is cut off."
        )
    sizes = mapped(index, "<i4", 34, sequences)
    pointers = mapped(index, "<i8", 34 + 4 * sequences, sequences)
    first = mapped(index, "<i8", 34 + 12 * sequences, documents)
    if sequences and sizes.min() < 0 or documents and (first.min() < 0 or first.max() > sequences or (np.diff(first) < 0).any()):
        raise DeclarationError(f"{index} is damaged: it has negative sizes, or documents that do not follow each other.")
    ends = np.cumsum(sizes, dtype=np.int64)
    if sequences and not np.array_equal(pointers, (ends - sizes) * kind.itemsize):
        raise DeclarationError(f"{index}: its sequences do not lie one after the other in {path.name}; write the data set anew.")
    total = int(ends[-1]) if sequences else 0
    if path.stat().st_size != total * kind.itemsize:
        raise DeclarationError(f"{path} has {path.stat().st_size:,} bytes, but {index.name} says {total * kind.itemsize:,}.")
    borders = first[first > 0]
    document_ends = np.unique(ends[borders - 1]) if len(borders) else np.zeros(0, np.int64)
    if total and (not len(document_ends) or document_ends[-1] != total):
        document_ends = np.append(document_ends, total)
    return _sampled(mapped(path, kind.newbyteorder("<"), 0, total), document_ends, limit)
