"""Files by name: paths, globs, URLs of anything that fsspec reads, and the packaged text.

    notes/a.txt    'corpus/**/*.jsonl.gz'    gs://bucket/corpus/*.jsonl    embedded:shakespeare    a folder that is a data set

Files come in the order in which they are named, the matches of a glob sorted; a file that several names match comes once, at its
first place. A folder stands for itself where it is a token cache or a Hugging Face data set on disk.
"""

import contextlib
import dataclasses
import glob
import gzip
import io
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from jaxlm.data.extras import needed
from partitioning.declaration import DeclarationError, nearest

EMBEDDED = {"shakespeare": pathlib.Path(__file__).parent / "embedded" / "shakespeare.txt"}
PREFIX = "embedded:"
COMPRESSED = (".gz", ".zst")
DOCUMENTS = (".txt", ".jsonl", ".parquet", ".arrayrecord", ".array_record")  # the first two may be compressed
TOKENS = (".bin",)
CACHE = "manifest.json"  # in a folder: a token cache
DATASET = ("state.json", "dataset_dict.json")  # in a folder: Hugging Face `save_to_disk`


@dataclasses.dataclass(frozen=True)
class File:
    """Attributes:
    name: path or URL.
    named: whether it was named itself, rather than matched by a glob.
    """

    name: str
    named: bool = True

    @property
    def remote(self) -> bool:
        return "://" in self.name

    @property
    def path(self) -> pathlib.Path:
        """The file on this machine.

        Raises:
          DeclarationError: it is elsewhere.
        """
        if self.remote:
            raise DeclarationError(f"{self.name} must lie on this machine, to be mapped into memory; copy it here first.")
        return pathlib.Path(self.name)

    @property
    def compression(self) -> str:
        """'.gz', '.zst' or ''."""
        suffix = pathlib.PurePosixPath(self.name).suffix.lower()
        return suffix if suffix in COMPRESSED else ""

    @property
    def kind(self) -> str:
        """What is in it: its extension without that of compression; 'cache' or 'dataset' for a folder."""
        if not self.remote and os.path.isdir(self.path):
            return "cache" if (self.path / CACHE).exists() or (self.path / "plan.json").exists() else "dataset"
        name = self.name[: -len(self.compression)] if self.compression else self.name
        return pathlib.PurePosixPath(name).suffix.lower()

    @property
    def holds_tokens(self) -> bool:
        return self.kind in TOKENS or self.kind == "cache"

    def size(self) -> int:
        """Bytes, as stored."""
        with _readable(self.name):
            if self.remote:
                return int(_file_system(self.name).size(self.name) or 0)
            return sum(p.stat().st_size for p in self.path.rglob("*")) if self.path.is_dir() else self.path.stat().st_size

    def open_stored(self) -> BinaryIO:
        """Opens it for reading, compressed if it is."""
        with _readable(self.name):
            return _file_system(self.name).open(self.name, "rb") if self.remote else open(self.name, "rb")

    def open(self) -> BinaryIO:
        """Opens it for reading; what is compressed is read decompressed."""
        raw = self.open_stored()
        if self.compression == ".gz":
            return gzip.open(raw, "rb")
        if self.compression == ".zst":
            zstandard = needed("zstandard", "zstandard", f"{self.name}: a file compressed with zstd")
            return io.BufferedReader(_Zstd(raw, zstandard.ZstdDecompressor), 1 << 17)
        return raw


class _Zstd(io.RawIOBase):
    """A stream of zstd frames, decompressed. Unlike the library it does not take a file that is cut off for whole."""

    def __init__(self, raw: BinaryIO, decompressor: Any):
        self._raw, self._decompressor = raw, decompressor
        self._frame, self._ready, self._rest = None, b"", b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._ready:
            piece = self._rest or self._raw.read(1 << 17)
            self._rest = b""
            if not piece:
                if self._frame is not None:
                    raise EOFError("it is cut off inside a zstd frame")
                return 0
            self._frame = self._frame or self._decompressor().decompressobj()
            self._ready = self._frame.decompress(piece)
            if self._frame.eof:
                self._rest, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


@contextlib.contextmanager
def _readable(name: str) -> Iterator[None]:
    """Turns what goes wrong while a file is looked for into a message. Every remote file system has errors of its own."""
    try:
        yield
    except DeclarationError:
        raise
    except Exception as error:
        if "://" not in name and not isinstance(error, (OSError, ValueError)):
            raise
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise DeclarationError(f"{name} cannot be read: {why}.") from None


def _file_system(url: str):
    fsspec = needed("fsspec", "fsspec", f"{url}: a URL")
    try:
        return fsspec.core.url_to_fs(url)[0]
    except ImportError as error:  # the message names the package of that protocol
        raise DeclarationError(f"{url}: {error}") from None
    except ValueError as error:
        raise DeclarationError(f"{url}: {error}.") from None


def find_files(names: Sequence[str], key: str) -> list[File]:
    """The files that `names` stand for.

    Args:
      key: the configuration key of the names, for messages.

    Raises:
      DeclarationError: a name without a file, or a kind of file that is not known.
    """
    if not names:
        raise DeclarationError(
            f"{key} is empty; expected paths, globs or URLs of files of text or tokens, or {PREFIX}shakespeare."
        )
    found: dict[str, File] = {}                # by where it lies, since a file can be named in several ways
    for name in names:
        for file in _matches(name, key):
            found.setdefault(file.name if file.remote else os.path.realpath(file.name), file)
    return list(found.values())


def _matches(name: str, key: str) -> list[File]:
    if name.startswith(PREFIX):
        text = name.removeprefix(PREFIX)
        if text not in EMBEDDED:
            raise DeclarationError(f"{key}: there is no packaged text {name!r}; {nearest(text, EMBEDDED, 'text')}")
        return [File(str(EMBEDDED[text]))]
    if "://" in name:
        return _remote(name, key)
    path = pathlib.Path(os.path.expanduser(name))
    if os.path.exists(path) or not glob.has_magic(name):
        return [_checked(File(str(path)), key)]
    matches = [match for match in sorted(glob.glob(str(path), recursive=True)) if not os.path.isdir(match) or _is_data(match)]
    if not matches:
        raise DeclarationError(
            f"{key}: no file matches {name!r} (seen from {pathlib.Path.cwd()}); check the pattern, and quote it for the shell."
        )
    return [_checked(File(match, named=False), key) for match in matches]


def _is_data(folder: str) -> bool:
    return any(os.path.exists(os.path.join(folder, name)) for name in (CACHE, *DATASET))


def _remote(url: str, key: str) -> list[File]:
    with _readable(url):
        system = _file_system(url)
        if not glob.has_magic(url):
            if not system.exists(url):
                raise DeclarationError(f"{key}: there is no file {url!r}.")
            return [_checked(File(url), key)]
        protocol = url.partition("://")[0]
        found = system.glob(url, detail=True)
        files = [match for match, facts in found.items() if facts["type"] != "directory"]
        names = sorted(match if "://" in match else f"{protocol}://{match}" for match in files)
    if not names:
        raise DeclarationError(f"{key}: no file matches {url!r}.")
    return [_checked(File(name, named=False), key) for name in names]


def _checked(file: File, key: str) -> File:
    if not file.remote:
        path = file.path
        if os.path.isdir(path) and not (_is_data(str(path)) or (path / "plan.json").exists()):
            raise DeclarationError(f"{key}: {path} is a folder; name its files, for example '{path}/**/*.txt'.")
        if not os.path.exists(path):
            siblings = (
                [p.name for p in path.parent.iterdir() if File(p.name).kind in DOCUMENTS + TOKENS] if path.parent.is_dir() else []
            )
            hint = f"; {nearest(path.name, sorted(siblings)[:20], 'file')}" if siblings else "."
            raise DeclarationError(f"{key}: there is no file {str(path)!r} (seen from {pathlib.Path.cwd()}){hint}")
    known = (*DOCUMENTS, *TOKENS, "cache", "dataset")
    if file.kind not in known or (file.compression and file.kind not in DOCUMENTS[:2]):
        suffix = pathlib.PurePosixPath(file.name).suffix
        raise DeclarationError(
            f"{key}: {file.name} has the extension {suffix!r}; expected .txt (one document) or .jsonl (one JSON "
            "record with a text field per line), both perhaps with .gz or .zst, .parquet, .arrayrecord, or "
            "tokens: .bin or the folder of a token cache. Rename or convert it."
        )
    return file
