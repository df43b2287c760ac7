"""metrics.jsonl: one JSON object a line, the record of a run that any tool can read.

A row is written with a single call and stands in the file at once. If the disk has no room for all of it, the part that
was written is taken back, so that the file ends with a whole line. JSON has no infinities: a number that is not finite is null.
"""

import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any


class MetricsFile:
    """Appends rows to a file. Not for several writers."""

    def __init__(self, path: pathlib.Path | str):
        """Opens (and makes, with its folder) the file. Raises OSError."""
        self.path = pathlib.Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "ab", buffering=0)

    def write(self, row: Mapping[str, Any]) -> None:
        """Appends one row of plain values (see `plain`). Raises OSError; the file is then as it was before."""
        line = (json.dumps(row, allow_nan=False) + "\n").encode()
        size = os.fstat(self._file.fileno()).st_size
        try:
            written = self._file.write(line)
            if written < len(line):            # a full disk takes what fits; writing the rest says why it does not
                self._file.write(line[written:])
        except OSError:
            os.ftruncate(self._file.fileno(), size)
            raise

    def close(self) -> None:
        self._file.close()


def plain(value: Any) -> Any:
    """A scalar of numpy or JAX as Python's own; a float that is not finite as None."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def read_rows(path: pathlib.Path | str) -> list[dict[str, Any]]:
    """The rows of a file in order, without those that a crash cut short. A file that is not there has none."""
    try:
        lines = pathlib.Path(path).read_bytes().splitlines()
    except FileNotFoundError:
        return []
    return [row for row in map(_row, lines) if row is not None]


def drop_rows_after(path: pathlib.Path | str, step: int) -> int:
    """Removes the rows past `step` (those of a crashed run that will be computed again), and lines cut short.

    The file is replaced in one move: a reader, or a crash in between, sees the old or the new one.

    Returns:
      How many lines were removed.
    """
    path = pathlib.Path(path)
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return 0
    kept = [line for line in lines if line.endswith(b"\n") and (row := _row(line)) is not None and row.get("step", 0) <= step]
    if len(kept) < len(lines):
        draft = path.with_name(path.name + ".draft")
        with open(draft, "wb") as file:
            file.write(b"".join(kept))
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    return len(lines) - len(kept)


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
