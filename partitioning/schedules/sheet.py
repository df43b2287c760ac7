"""A table as a sheet that can be drawn by hand: a CSV file with a line for each stage and a column for each tick.

    latency,1
    live,3,1
    stage,0,1,2,3
    0,F0,F1,B0,B1
    1,,F0 B0,F1 B1,

A cell holds the work in order: a kind (F, B, I or W), a microbatch, and after a point the chunk if it is not 0 (`F3.1`). The
lines before `stage` are optional: `latency` (1), `live` (nothing declared), and for each chunk a `placement` with the position
on each stage (going round). The line `stage` numbers the ticks for the eye; its numbers are not read.
"""

import csv
import io
import pathlib
import re

from partitioning.declaration import DeclarationError
from partitioning.schedules.table import KINDS, Table, Work, looped

PIECE = re.compile(rf"([{KINDS}])(\d+)(?:\.(\d+))?")
SETTINGS = ("latency", "live", "placement")


def to_csv(table: Table) -> str:
    """The sheet of a table."""
    lines: list[list] = [["latency", table.latency]]
    lines += [["live", *table.live]] if table.live is not None else []
    lines += [["placement", *row] for row in table.placement]
    lines += [["stage", *range(len(table.ticks))]]
    lines += [[stage, *(" ".join(map(str, row[stage])) for row in table.ticks)] for stage in range(table.num_stages)]
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(lines)
    return out.getvalue()


def read_csv(path: str | pathlib.Path) -> Table:
    """The table in a file, unchecked. Its name is the file's, its microbatches are as many as it speaks of.

    Raises:
      DeclarationError: there is no such file, or a line or cell that is no part of a sheet.
    """
    path = pathlib.Path(path)
    try:
        text = path.read_text("utf-8-sig")                      # spreadsheets write a mark first
    except (OSError, UnicodeDecodeError) as error:
        raise DeclarationError(f"the schedule {path} cannot be read: {error}") from error
    return from_csv(text, path.stem)


def from_csv(text: str, name: str) -> Table:
    """The table of a sheet, unchecked; `read_csv` says what is wrong with what."""
    settings: dict[str, list[list[int]]] = {key: [] for key in SETTINGS}
    rows: list[list[tuple[Work, ...]]] = []
    for number, line in enumerate(csv.reader(io.StringIO(text)), 1):
        line = [cell.strip() for cell in line]
        where = f"the schedule {name}, line {number}"
        if not any(line) or line[0] == "stage":
            continue
        if line[0] in SETTINGS:
            settings[line[0]].append(_numbers(line[1:], where))
        elif line[0] == str(len(rows)):
            rows.append([_cell(cell, f"{where}, tick {tick}") for tick, cell in enumerate(line[1:])])
        else:
            raise DeclarationError(f"{where} begins with {line[0]!r}; expected one of {', '.join((*SETTINGS, 'stage'))}, or the "
                                   f"number of the stage that comes next, {len(rows)}.")
    if not rows:
        raise DeclarationError(f"the schedule {name} has no line for a stage; the first one begins with 0.")
    for key in ("latency", "live"):
        if len(settings[key]) > 1:
            raise DeclarationError(f"the schedule {name} has {len(settings[key])} lines {key}; expected one.")
    if settings["latency"] and len(settings["latency"][0]) != 1:
        raise DeclarationError(f"the schedule {name} has {len(settings['latency'][0])} numbers for latency; expected one.")
    length = max(map(len, rows))
    padded = [row + [()] * (length - len(row)) for row in rows]
    works = [work for row in rows for cell in row for work in cell]
    chunks = 1 + max((work.chunk for work in works), default=0)
    if chunks > len(works):
        raise DeclarationError(f"the schedule {name} speaks of chunk {chunks - 1}, and has {len(works)} pieces of work in all; "
                               "chunks count from 0.")
    return Table(name, 1 + max((work.microbatch for work in works), default=0),
                 tuple(map(tuple, settings["placement"])) or looped(len(rows), chunks), tuple(zip(*padded)),
                 settings["latency"][0][0] if settings["latency"] else 1,
                 tuple(settings["live"][0]) if settings["live"] else None)


def _numbers(cells: list[str], where: str) -> list[int]:
    while cells and not cells[-1]:                              # spreadsheets make all lines equally long
        cells = cells[:-1]
    for cell in cells:
        if not re.fullmatch(r"\d+", cell):
            raise DeclarationError(f"{where} has {cell!r}; expected a number.")
    return [int(cell) for cell in cells]


def _cell(cell: str, where: str) -> tuple[Work, ...]:
    works = []
    for piece in cell.split():
        match = PIECE.fullmatch(piece)
        if not match:
            raise DeclarationError(f"{where} has {piece!r}; expected work such as F3 or B3.1: a kind ({', '.join(KINDS)}), a "
                                   "microbatch, and a chunk if it is not 0.")
        works.append(Work(match[1], int(match[2]), int(match[3] or 0)))
    return tuple(works)
