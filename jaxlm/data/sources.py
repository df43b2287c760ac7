"""Documents from files, one file after the other.

    .txt (.gz, .zst)      one document
    .jsonl (.gz, .zst)    a document per line: a JSON object
    .parquet              a document per row
    .arrayrecord          a document per record: a JSON object, or the text itself
    a folder              a Hugging Face data set that `save_to_disk` wrote: a document per row

Text stays bytes, checked to be UTF-8 and otherwise untouched (line ends included; a byte order mark is dropped). A document that
cannot be read stops everything with its file and line, or is skipped and counted (config.data.on_bad_record); one without text is
left out and counted.
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxlm.data.extras import needed
from jaxlm.data.files import File, find_files
from partitioning.declaration import DeclarationError

# What makes a document of a record, or says what is wrong with it: record -> (bytes, '') or (None, problem).
Extract = Callable[[Mapping], tuple[bytes | None, str]]


class UnreadableField(Exception):
    """A field of a record whose value cannot be had."""


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Documents in their order.

    Attributes:
      documents: UTF-8 text of each document; none is blank.
      files: where they came from.
      skipped: documents that could not be read, left out as config.data.on_bad_record='skip' asks.
      blank: documents without text that were left out.
    """

    documents: tuple[bytes, ...]
    files: tuple[str, ...]
    skipped: int
    blank: int


@dataclasses.dataclass
class Counts:
    """What `documents_of` has left out so far."""

    skipped: int = 0
    blank: int = 0


def read_corpus(names: Sequence[str], *, text_field: str, on_bad_record: str, key: str) -> Corpus:
    """Reads all documents of `names`, as `find_files` knows them.

    Args:
      text_field: field of a record that holds its text.
      on_bad_record: 'fail' or 'skip'.
      key: the configuration key of the names, for messages.

    Raises:
      DeclarationError: a name without a file, a kind of file that is not known, text that is not UTF-8, a bad record (unless
        it is to be skipped), a named file without text, or no text at all.
    """
    return read_files(find_files(names, key), text_extract(text_field), on_bad_record, key, names)


def read_files(files: Sequence[File], extract: Extract, on_bad_record: str, key: str, names: Sequence[str]) -> Corpus:
    """`read_corpus` of files that have been found."""
    documents, counts = [], Counts()
    for file in files:
        before, bad = len(documents), counts.skipped
        documents += documents_of(file, extract, on_bad_record, counts)
        if len(documents) == before and file.named:
            raise DeclarationError(
                f"{key}: {file.name} has no text ({file.size()} bytes"
                + (f", {counts.skipped - bad} bad records skipped" if counts.skipped > bad else "")
                + "); name a file that has some."
            )
    if not documents:
        raise DeclarationError(
            f"{key} = {tuple(names)!r} has no text: {len(files)} files"
            + (f", {counts.skipped} bad records skipped" if counts.skipped else "")
            + "; name files that have some."
        )
    return Corpus(tuple(documents), tuple(file.name for file in files), counts.skipped, counts.blank)


def documents_of(
    file: File, extract: Extract, on_bad_record: str, counts: Counts, part: tuple[int, int] | None = None
) -> Iterator[bytes]:
    """The documents of one file, read as they are asked for.

    Args:
      counts: added to.
      part: bytes [begin, end) of an uncompressed .jsonl file: the lines that begin there.

    Raises:
      DeclarationError: a bad record, unless it is to be skipped.
    """
    for place, record in _RECORDS[file.kind](file, part) if file.kind == ".jsonl" else _RECORDS[file.kind](file):
        try:
            text, problem = (
                (None, record) if isinstance(record, str) else (record, "") if isinstance(record, bytes) else extract(record)
            )
        except UnreadableField as error:
            text, problem = None, str(error)
        if problem and on_bad_record == "fail":
            if place == file.name:
                raise DeclarationError(f"{place} {problem}; convert it, for example with iconv -f {_encoding(file)} -t UTF-8.")
            raise DeclarationError(f"{place} {problem}. Mend the record, or set config.data.on_bad_record='skip'.")
        if problem:
            counts.skipped += 1
        elif not text.strip():
            counts.blank += 1
        else:
            yield text


def text_extract(text_field: str) -> Extract:
    """Takes the text of a field."""

    def extract(record: dict) -> tuple[bytes | None, str]:
        if text_field not in record:
            fields = ", ".join(map(repr, list(record)[:8])) or "none"
            return None, f"has no field {text_field!r} (its fields: {fields}); config.data.text_field names the field"
        if not isinstance(record[text_field], str):
            return None, f"has {type(record[text_field]).__name__} in the field {text_field!r}; expected a string"
        try:
            return record[text_field].encode("utf-8"), ""
        except UnicodeEncodeError:
            return None, f"has half a surrogate pair in the field {text_field!r}, which is no text"

    return extract


# Readers: a file -> (place, record) pairs. A record is a dict, the document's bytes, or, as a string, what is wrong with it.


def _txt(file: File) -> Iterator[tuple[str, Any]]:
    with file.open() as handle:
        text = _all(handle, file).removeprefix(b"\xef\xbb\xbf")
    yield file.name, _utf8(text, "") or text


def _encoding(file: File) -> str:
    """What text that is not UTF-8 most likely is."""
    with file.open() as handle:
        return "UTF-16" if handle.read(2) in (b"\xff\xfe", b"\xfe\xff") else "LATIN1"


def _utf8(text: bytes, where: str) -> str:
    """'' or what is wrong with text that should be UTF-8."""
    try:
        text.decode("utf-8")
        return ""
    except UnicodeDecodeError as error:
        return f"is not UTF-8: byte 0x{text[error.start]:02x} at offset {error.start}{where}" + (
            "" if where else f" ({error.reason})"
        )


def _all(handle: Any, file: File) -> bytes:
    try:
        return handle.read()
    except (OSError, EOFError, ValueError) as error:
        raise DeclarationError(f"{file.name} cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    except Exception as error:  # zstandard's own
        raise DeclarationError(f"{file.name} cannot be read: {error}.") from None


def _lines(file: File, part: tuple[int, int] | None) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers (from the part's beginning). They end at a line feed only: U+2028 may stand inside a text."""
    begin, end = part or (0, None)
    with file.open() as handle:
        if begin:
            handle.seek(begin - 1)
            handle.readline()  # the line that began before
        place = handle.tell() if part else 0
        number = 0
        while end is None or place < end:
            try:
                line = handle.readline()
            except Exception as error:  # of the decompressors
                raise DeclarationError(f"{file.name} cannot be read: {getattr(error, 'strerror', None) or error}.") from None
            if not line:
                break
            number, place = number + 1, place + len(line)
            yield number, line.removesuffix(b"\n")


def _jsonl(file: File, part: tuple[int, int] | None = None) -> Iterator[tuple[str, Any]]:
    for number, line in _lines(file, part):
        if number == 1 and not (part and part[0]):
            line = line.removeprefix(b"\xef\xbb\xbf")
        if line.strip():
            where = f"{file.name}:{number}" if not (part and part[0]) else f"{file.name}: line {number} after byte {part[0]}"
            yield where, _object(line)


def _object(line: bytes) -> dict | str:
    """A JSON object, or what is wrong."""
    problem = _utf8(line, " of the line")
    if problem:
        return problem
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        return f"is not JSON: {error}"
    if not isinstance(record, dict):
        return f"is a JSON {type(record).__name__}; expected an object with the field that config.data.text_field names"
    return record


def _parquet(file: File) -> Iterator[tuple[str, Any]]:
    parquet = needed("pyarrow.parquet", "pyarrow", f"{file.name}: a Parquet file")
    row = 0
    with file.open() as handle:
        for batch in _of_arrow(file, lambda: parquet.ParquetFile(handle).iter_batches(batch_size=256)):
            for record in _rows(batch):
                row += 1
                yield f"{file.name}: row {row}", record


def _dataset(file: File) -> Iterator[tuple[str, Any]]:
    folder = file.path
    if (folder / "dataset_dict.json").exists():
        raise DeclarationError(
            f"{folder} is a data set of several splits; name one of them: "
            f"{', '.join(str(p.parent) for p in sorted(folder.glob('*/state.json')))}."
        )
    arrow = needed("pyarrow", "pyarrow", f"{folder}: a Hugging Face data set")
    try:
        state = json.loads((folder / "state.json").read_text("utf-8"))
        names = [item["filename"] for item in state["_data_files"]]
        if state.get("_indices_files"):
            raise DeclarationError(f"{folder} is a selection of rows; flatten it with its own library before saving it.")
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, DeclarationError):
            raise
        raise DeclarationError(f"{folder / 'state.json'} is not as save_to_disk writes it: {error}.") from None
    row = 0
    for name in names:
        part = File(str(folder / name))

        def batches() -> Iterator[Any]:
            with arrow.memory_map(str(part.path)) as source:
                yield from arrow.ipc.open_stream(source)

        for batch in _of_arrow(part, batches):
            for record in _rows(batch):
                row += 1
                yield f"{folder}: row {row}", record


def _of_arrow(file: File, batches: Callable[[], Iterable]) -> Iterator[Any]:
    try:
        yield from batches()
    except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
        raise DeclarationError(f"{file.name} cannot be read: {error}.") from None


class _Columns(dict):
    """The columns of an Arrow batch as lists of values, made when one is asked for: others may hold what Python has no type for.
    A value that cannot be had is the error that says why."""

    def __init__(self, batch: Any):
        self.batch = batch

    def __missing__(self, name: str) -> list[Any]:
        column = self.batch.column(name)
        try:
            self[name] = column.to_pylist()
        except (ValueError, OverflowError):
            self[name] = [_value(scalar) for scalar in column]
        return self[name]


def _value(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except (ValueError, OverflowError) as error:
        return error


class _Row(Mapping):
    def __init__(self, columns: _Columns, i: int):
        self._columns, self._i = columns, i

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(name)
        value = self._columns[name][self._i]
        if isinstance(value, Exception):
            raise UnreadableField(f"has a value in the field {name!r} that cannot be read: {value}")
        return value

    def __contains__(self, name: object) -> bool:
        return name in self._columns.batch.schema.names

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns.batch.schema.names)

    def __len__(self) -> int:
        return self._columns.batch.num_columns


def _rows(batch: Any) -> Iterator[Mapping]:
    columns = _Columns(batch)
    return (_Row(columns, i) for i in range(batch.num_rows))


def _array_record(file: File) -> Iterator[tuple[str, Any]]:
    module = needed("array_record.python.array_record_module", "array_record", f"{file.name}: an ArrayRecord file")
    try:
        reader = module.ArrayRecordReader(str(pathlib.Path(file.path)))
    except Exception as error:  # the library's own
        raise DeclarationError(f"{file.name} cannot be read as ArrayRecord: {error}.") from None
    try:
        for i in range(reader.num_records()):
            content = reader.read([i])[0]
            record = _object(content) if content[:1] == b"{" else _utf8(content, " of the record") or content
            yield f"{file.name}: record {i + 1}", record
    finally:
        reader.close()


_RECORDS = {
    ".txt": _txt,
    ".jsonl": _jsonl,
    ".parquet": _parquet,
    ".arrayrecord": _array_record,
    ".array_record": _array_record,
    "dataset": _dataset,
}
