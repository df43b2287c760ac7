"""A token cache: a folder with a corpus as tokens, written once by `python -m jaxlm.tokenize` and then mapped into memory.

    manifest.json     what it was made of and by (source files and their hashes, the tokenizer's hash, options), counts, and the
                      sizes and checksums of the files below; written last, so that a cache without it is unfinished
    tokens.bin        ids, uint16 or uint32, little-endian
    ends.bin          int64 [documents]: the place behind each document's last token
    byte_ends.bin     int64 [documents]: the bytes of text up to there
    loss.bin          uint8, for chats: whether a token is a target

While it is made there are `plan.json` and `parts/`, one group of files for each part of the corpus that is done. A part is
renamed into place when it is whole; what was killed goes on with those that are not.
"""

import dataclasses
import json
import pathlib
import zlib
from typing import Any

import numpy as np

from jaxlm.data.files import CACHE, File
from jaxlm.data.streams import Stream
from jaxlm.data.token_files import mapped
from jaxlm.data.tokenizer import Tokenizer
from partitioning.declaration import DeclarationError

FORMAT = 1
ARRAYS = {"tokens.bin": None, "ends.bin": "<i8", "byte_ends.bin": "<i8", "loss.bin": "u1"}  # None: of the manifest
WHOLE = 1 << 32  # a cache of so many bytes is compared byte by byte at every opening (a second), a larger one by samples:
SAMPLE = 1 << 16  # bytes of each file's beginning, middle and end
# Options that make other tokens of the same text; config.data has them under these names.
OPTIONS = ("content", "bos", "eos", "text_field")


def read_manifest(folder: pathlib.Path) -> dict[str, Any]:
    """The manifest of a finished cache.

    Raises:
      DeclarationError: it is unfinished, or not as it was written.
    """
    path = folder / CACHE
    if not path.is_file():
        raise DeclarationError(
            f"{folder} is an unfinished token cache; run the same python -m jaxlm.tokenize again to finish it."
        )
    try:
        manifest = json.loads(path.read_text("utf-8"))
        if manifest["crc32"] != crc_of({k: v for k, v in manifest.items() if k != "crc32"}):
            raise ValueError("its checksum differs")
        if manifest["format"] != FORMAT:
            raise ValueError(f"it has format {manifest['format']}, and this version reads {FORMAT}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DeclarationError(
            f"{path} is no manifest of a token cache as it was written: {error}; make the cache anew."
        ) from None
    return manifest


def crc_of(values: Any) -> str:
    return f"{zlib.crc32(json.dumps(values, sort_keys=True).encode()):08x}"


def checksums(path: pathlib.Path) -> dict[str, Any]:
    """What the manifest says of a file: its bytes, and crc32 of three stretches of it and of all."""
    size = path.stat().st_size
    total = 0
    with open(path, "rb") as handle:
        while piece := handle.read(1 << 24):
            total = zlib.crc32(piece, total)
    return {"bytes": size, "crc32": f"{total:08x}", "sample": sample(path, size)}


def sample(path: pathlib.Path, size: int) -> str:
    total = 0
    with open(path, "rb") as handle:
        for place in sorted({0, max(size // 2 - SAMPLE, 0), max(size - SAMPLE, 0)}):
            handle.seek(place)
            total = zlib.crc32(handle.read(SAMPLE), total)
    return f"{total:08x}"


def damage(folder: pathlib.Path, manifest: dict[str, Any], *, whole: bool) -> list[str]:
    """A line for each file that is not as the manifest says. `whole` reads every byte; else sizes and samples are compared."""
    out = []
    for name, facts in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            out.append(f"{name} is missing")
        elif path.stat().st_size != facts["bytes"]:
            out.append(f"{name} has {path.stat().st_size:,} bytes, not {facts['bytes']:,}")
        elif (checksums(path) if whole else {**facts, "sample": sample(path, facts["bytes"])}) != facts:
            out.append(f"{name} is not as it was written")
    return out


def open_cache(file: File, tokenizer: Tokenizer, options: dict[str, Any]) -> Stream:
    """The stream of a token cache.

    Args:
      options: of the encoder that the configuration declares.

    Raises:
      DeclarationError: it is unfinished, damaged, or of another tokenizer or other options.
    """
    folder = file.path
    manifest = read_manifest(folder)
    found = damage(folder, manifest, whole=sum(facts["bytes"] for facts in manifest["files"].values()) <= WHOLE)
    if found:
        raise DeclarationError(
            f"{folder} is not as its manifest says: {'; '.join(found)}. Make the cache anew, or copy it again."
        )
    theirs = manifest["tokenizer"]
    if theirs["sha256"] != tokenizer.sha256:
        raise DeclarationError(
            f"{folder} was tokenized with {theirs['name']!r} (sha256 {theirs['sha256'][:12]}), but "
            f"config.data.tokenizer = {tokenizer.name!r} is another (sha256 {tokenizer.sha256[:12]}); set the one "
            "it was made with, or make the cache anew."
        )
    for name in dict.fromkeys(("content", *sorted({*options, *manifest["options"]}))):  # the content decides of the others
        theirs, ours = manifest["options"].get(name), options.get(name)
        if theirs != ours:
            key = {"bos_id": "bos_token", "eos_id": "eos_token", "template_sha256": "chat_template"}.get(name, name)
            raise DeclarationError(
                f"{folder} was made with {name} = {theirs!r}, but the configuration says {ours!r} (config.data.{key}); "
                "set what it was made with, or make the cache anew."
            )
    arrays = {
        name: mapped(folder / name, np.dtype(kind or manifest["dtype"]).newbyteorder("<"))
        for name, kind in ARRAYS.items()
        if name in manifest["files"]
    }
    return Stream(
        (arrays["tokens.bin"],),
        arrays["ends.bin"],
        arrays["byte_ends.bin"],
        (arrays["loss.bin"],) if "loss.bin" in arrays else None,
        ":".join(facts["crc32"] for facts in manifest["files"].values()),
    )


@dataclasses.dataclass(frozen=True)
class Encoded:
    """Some documents as tokens: what a part of a cache holds, and a stream in memory too.

    tokens [T]; ends int64 [D]; byte_ends int64 [D]; loss uint8 [T] or None; skipped: conversations that are not among them,
    because their template cannot render them.
    """

    tokens: np.ndarray
    ends: np.ndarray
    byte_ends: np.ndarray
    loss: np.ndarray | None
    skipped: int = 0

    def stream(self) -> Stream:
        return Stream((self.tokens,), self.ends, self.byte_ends, None if self.loss is None else (self.loss,))
