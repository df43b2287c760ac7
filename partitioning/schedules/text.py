"""A schedule drawn for a terminal: time across, stages down, no colours.

    tick     0  1     2     3
    stage 0 |F0|F1 . |.  B0|B1|
    stage 1 |. |F0 B0|F1 B1|. |
"""

import shutil
import textwrap

from partitioning.schedules.figures import Costs, measure
from partitioning.schedules.table import BACKWARD, FORWARD, INPUT, Table, Work
from partitioning.schedules.words import bubble_line, ends, legend, live_line, size_line

IDLE = "."


def schedule_text(table: Table, costs: Costs = Costs(), width: int | None = None, stages: int = 16, blocks: int = 6) -> str:
    """The picture and its figures.

    Args:
      table: a valid one.
      costs: for the time.
      width: columns of the terminal; None asks it.
      stages, blocks: the most stages, and blocks of ticks below one another, that are drawn; of more, the first and the last.
    """
    width = shutil.get_terminal_size().columns if width is None else width
    figures = measure(table, costs)
    shown, left_out = ends(table.num_stages, stages)
    labels = [f"stage {stage}" for stage in shown]
    margin = max(map(len, [*labels, "tick"]))
    columns = [_column(table, tick, shown) for tick in range(len(table.ticks))]
    groups = _wrapped([len(column[0]) for column in columns], width - margin - 2)
    drawn, missing = ends(len(groups), blocks)
    words = (size_line(table), bubble_line(figures, costs, table), live_line(figures, table, shown))
    lines = [line for said in words for line in textwrap.wrap(said, max(width, 20), subsequent_indent="  ")]
    for place, group in enumerate(drawn):
        if missing and place and drawn[place - 1] + 1 < group:
            first, last = groups[drawn[place - 1]].stop, groups[group].start - 1
            lines += ["", f"... ticks {first} to {last} are not drawn ..."]
        ticks = groups[group]
        lines += ["", _line("tick", margin, [str(tick).ljust(len(columns[tick][0])) for tick in ticks], " ")]
        for row, label in enumerate(labels):
            if left_out and row == len(shown) - len(shown) // 2:
                lines.append(f"... {left_out} stages are not drawn ...")
            lines.append(_line(label, margin, [columns[tick][row] for tick in ticks], "|"))
    lines += ["", *textwrap.wrap(", ".join([*legend(table), f"{IDLE} idle"]) + f"; {_example(table)}", max(width, 20))]
    return "\n".join(line.rstrip() for line in lines)


def _column(table: Table, tick: int, shown: list[int]) -> list[str]:
    """What each stage that is shown does at a tick, all equally wide. Where some stage does several pieces, like stands
    below like."""
    row = table.ticks[tick]
    lanes = max(map(len, row)) or 1
    cells = [_spread(row[stage], lanes) for stage in shown]
    wide = max(len(str(tick)) // lanes, *(len(word) for cell in cells for word in cell))
    return [" ".join(word.ljust(wide) for word in cell).ljust(len(str(tick))) for cell in cells]


def _spread(works: tuple[Work, ...], lanes: int) -> list[str]:
    """A list over all lanes; a shorter one with forwards first, what goes backward second, weight halves last."""
    if len(works) == lanes:
        return [str(work) for work in works]
    lane = {FORWARD: 0, BACKWARD: 1, INPUT: 1}
    words = [IDLE] * lanes
    wanted = [min(lane.get(work.kind, lanes - 1), lanes - 1) for work in works]
    if len(set(wanted)) < len(wanted):
        wanted = list(range(len(works)))
    for place, work in zip(wanted, works):
        words[place] = str(work)
    return words


def _wrapped(widths: list[int], room: int) -> list[range]:
    """Ticks in as few lines as they need, at least one in each."""
    groups, first, used = [], 0, 0
    for tick, wide in enumerate(widths):
        if tick > first and used + wide + 1 > room:
            groups.append(range(first, tick))
            first, used = tick, 0
        used += wide + 1
    return [*groups, range(first, len(widths))] if widths else []


def _line(label: str, margin: int, cells: list[str], edge: str) -> str:
    return f"{label.ljust(margin)} {edge}{edge.join(cells)}{edge}"


def _example(table: Table) -> str:
    work = max((entry.work for entry in table.entries()), key=lambda work: (work.chunk, work.kind == FORWARD))
    return f"{work} is microbatch {work.microbatch}" + (f", chunk {work.chunk}" if work.chunk else "")
