"""Documents from files: a .txt file is one document, a line of a .jsonl file is one document.

Files are read as bytes and stay bytes, checked to be UTF-8 and otherwise untouched (line ends included; a byte order mark is
dropped). Every mistake in them is found here, before anything is compiled, and the message names file and line.
"""

import dataclasses
import glob
import json
import pathlib
from collections.abc import Iterator, Sequence

from partitioning.declaration import DeclarationError, nearest

EMBEDDED = {"shakespeare": pathlib.Path(__file__).parent / "embedded" / "shakespeare.txt"}
PREFIX = "embedded:"


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Documents in their order: files in the order they were named (the matches of a glob sorted), lines in file order.

    Attributes:
      documents: UTF-8 text of each document; none is blank.
      files: where they came from.
      skipped: JSONL records that could not be read, left out as config.data.on_bad_record='skip' asks.
      blank: documents without text that were left out.
    """
    documents: tuple[bytes, ...]
    files: tuple[str, ...]
    skipped: int
    blank: int


def read_corpus(names: Sequence[str], *, text_field: str, on_bad_record: str, key: str) -> Corpus:
    """Reads all documents of `names`: paths, globs ('**' goes into folders) and `embedded:NAME`.

    A file that several names match is read once, at its first place.

    Args:
      text_field: field of a JSONL record that holds its text.
      on_bad_record: 'fail' or 'skip'.
      key: the configuration key of the names, for messages.

    Raises:
      DeclarationError: a name without a file, a kind of file that is not known, text that is not UTF-8, a bad record (unless
        it is to be skipped), a named file without text, or no text at all.
    """
    documents, files, skipped, blank = [], [], 0, 0
    for path, was_named in _find(names, key):
        readable, bad = [], 0
        for text in _read_txt(path) if path.suffix.lower() == ".txt" else _read_jsonl(path, text_field, on_bad_record):
            if text is None:
                bad += 1
            elif text.strip():
                readable.append(text)
            else:
                blank += 1
        if not readable and was_named:
            raise DeclarationError(f"{key}: {path} has no text ({path.stat().st_size} bytes"
                                   + (f", {bad} bad records skipped" if bad else "") + "); name a file that has some.")
        documents += readable
        files.append(str(path))
        skipped += bad
    if not documents:
        raise DeclarationError(f"{key} = {tuple(names)!r} has no text: {len(files)} files"
                               + (f", {skipped} bad records skipped" if skipped else "") + "; name files that have some.")
    return Corpus(tuple(documents), tuple(files), skipped, blank)


def _find(names: Sequence[str], key: str) -> list[tuple[pathlib.Path, bool]]:
    """Files in order, and whether each was named itself rather than matched by a glob."""
    if not names:
        raise DeclarationError(f"{key} is empty; expected paths or globs of .txt or .jsonl files, or {PREFIX}shakespeare.")
    found: dict[pathlib.Path, bool] = {}
    for name in names:
        if name.startswith(PREFIX):
            text = name.removeprefix(PREFIX)
            if text not in EMBEDDED:
                raise DeclarationError(f"{key}: there is no packaged text {name!r}; {nearest(text, EMBEDDED, 'text')}")
            found.setdefault(EMBEDDED[text], True)
            continue
        path = pathlib.Path(name).expanduser()
        if path.exists() or not glob.has_magic(name):
            _check_file(path, key)
            found.setdefault(path, True)
            continue
        matches = [pathlib.Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
        matches = [match for match in matches if not match.is_dir()]
        if not matches:
            raise DeclarationError(f"{key}: no file matches {name!r} (seen from {pathlib.Path.cwd()}); "
                                   "check the pattern, and quote it for the shell.")
        for match in matches:
            _check_file(match, key)
            found.setdefault(match, False)
    return list(found.items())


def _check_file(path: pathlib.Path, key: str) -> None:
    if path.is_dir():
        raise DeclarationError(f"{key}: {path} is a folder; name its files, for example '{path}/**/*.txt'.")
    if not path.exists():
        siblings = [p.name for p in path.parent.iterdir() if p.suffix in (".txt", ".jsonl")] if path.parent.is_dir() else []
        hint = f"; {nearest(path.name, sorted(siblings)[:20], 'file')}" if siblings else "."
        raise DeclarationError(f"{key}: there is no file {str(path)!r} (seen from {pathlib.Path.cwd()}){hint}")
    if path.suffix.lower() not in (".txt", ".jsonl"):
        raise DeclarationError(f"{key}: {path} has the extension {path.suffix!r}; expected .txt (one document) or .jsonl "
                               "(one JSON record with a text field per line). Rename or convert it.")


def _read(path: pathlib.Path) -> bytes:
    try:
        return path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise DeclarationError(f"{path} cannot be read: {error.strerror}.") from None


def _read_txt(path: pathlib.Path) -> Iterator[bytes]:
    text = _read(path)
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DeclarationError(f"{path} is not UTF-8: byte 0x{text[error.start]:02x} at offset {error.start} ({error.reason}); "
                               "convert it, for example with iconv -f LATIN1 -t UTF-8.") from None
    yield text


def _read_jsonl(path: pathlib.Path, text_field: str, on_bad_record: str) -> Iterator[bytes | None]:
    """The text of each record; None for one that is skipped. Lines end at a line feed only: U+2028 may stand inside a text."""
    for number, line in enumerate(_read(path).split(b"\n"), 1):
        if not line.strip():
            continue
        text, problem = _text_of(line, text_field)
        if problem and on_bad_record == "fail":
            raise DeclarationError(f"{path}:{number} {problem}. Mend the record, or set config.data.on_bad_record='skip'.")
        yield text


def _text_of(line: bytes, text_field: str) -> tuple[bytes | None, str]:
    """A record's text, or what is wrong with it."""
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return None, f"is not UTF-8: byte 0x{line[error.start]:02x} at offset {error.start} of the line"
    except (ValueError, RecursionError) as error:
        return None, f"is not JSON: {error}"
    if not isinstance(record, dict):
        return None, f"is a JSON {type(record).__name__}; expected an object with the field {text_field!r}"
    if text_field not in record:
        fields = ", ".join(map(repr, list(record)[:8])) or "none"
        return None, f"has no field {text_field!r} (its fields: {fields}); config.data.text_field names the field"
    if not isinstance(record[text_field], str):
        return None, f"has a {type(record[text_field]).__name__} in the field {text_field!r}; expected a string"
    try:
        return record[text_field].encode("utf-8"), ""
    except UnicodeEncodeError:
        return None, f"has half a surrogate pair in the field {text_field!r}, which is no text"
