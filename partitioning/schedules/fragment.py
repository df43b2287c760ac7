"""A schedule as a part of a page (`partitioning.page`): a picture in time, and its figures. It has no script."""

import numpy as np

from partitioning.page import Markup, colour, tag
from partitioning.schedules.figures import Costs, measure, timeline
from partitioning.schedules.table import BACKWARD, FORWARD, INPUT, WEIGHT, WORDS, Table
from partitioning.schedules.words import bubble_line, kinds_of, size_line

COLOURS = {FORWARD: 4, BACKWARD: 1, INPUT: 3, WEIGHT: 2}      # places among the page's; a later chunk is lighter
TURN, SHADES = 8, 4                                           # colours until they come again; shades of chunks
ROW, MARGIN, SHORTEST = 22, 64, 22                            # pixels: of a stage, of its name, of the shortest work


def schedule_html(table: Table, costs: Costs = Costs(), most: int = 4000) -> Markup:
    """A `section` with the picture, its legend and a table of stages.

    Args:
      table: a valid one.
      costs: for the time.
      most: pieces of work that are drawn; of a longer schedule, the ticks that hold the first of them.
    """
    figures = measure(table, costs)
    start, end = timeline(table, costs)
    drawn = _drawn(table, most)
    part = f"The first {drawn} of {len(table.ticks)} ticks are drawn."
    cut = [tag("p", part, class_="quiet")] if drawn < len(table.ticks) else []
    busy = [sum(costs.of(work.kind, table.num_chunks) for row in table.ticks for work in row[stage])
            for stage in range(table.num_stages)]
    rows = [tag("tr", tag("td", str(stage)), tag("td", f"{1 - busy[stage] / figures.time:.1%}", class_="number"),
                tag("td", f"{figures.live[stage]:g}", class_="number")) for stage in range(table.num_stages)]
    heading = tag("tr", tag("th", "stage", scope="col"), tag("th", "idle", scope="col", class_="number"),
                  tag("th", "most live microbatches", scope="col", class_="number"))
    picture = _svg(table, costs, start, end, drawn)
    stages = tag("table", tag("thead", heading), tag("tbody", *rows))
    return tag("section", tag("h2", "Pipeline schedule"), tag("p", size_line(table)),
               tag("p", bubble_line(figures, costs, table)), tag("ul", *_legend(table), class_="legend"), *cut,
               tag("div", picture, class_="scroll", role="region", aria_label="schedule", tabindex=0),
               tag("div", stages, class_="scroll", role="region", aria_label="stages", tabindex=0), id="schedule")


def _drawn(table: Table, most: int) -> int:
    """How many ticks hold the first `most` pieces of work; at least one."""
    counts = np.cumsum([sum(map(len, row)) for row in table.ticks])
    return max(1, int(np.searchsorted(counts, most, side="right")))


def _place(kind: str, chunk: int) -> int:
    return COLOURS[kind] + TURN * 2 * (chunk % SHADES)


def _legend(table: Table) -> list[Markup]:
    chunks = range(min(table.num_chunks, SHADES))
    return [tag("li", tag("span", class_=f"swatch c{_place(kind, chunk)}"),
                WORDS[kind] + (f", chunk {chunk}" if table.num_chunks > 1 else ""))
            for kind in kinds_of(table) for chunk in chunks]


def _svg(table: Table, costs: Costs, start: np.ndarray, end: np.ndarray, drawn: int) -> Markup:
    """Time across, stages down; each piece of work a box with the number of its microbatch."""
    prices = {kind: costs.of(kind, table.num_chunks) for kind in kinds_of(table)}
    scale = SHORTEST / min((price for price in prices.values() if price), default=1)
    parts: list[Markup] = []
    for stage in range(table.num_stages):
        parts.append(tag("text", f"stage {stage}", x=0, y=ROW * stage + 15, fill="currentColor"))
        for tick in range(drawn):
            at = start[tick, stage]
            for work in table.ticks[tick][stage]:
                left, wide = MARGIN + at * scale, prices[work.kind] * scale
                words = f"tick {tick}, stage {stage}: {WORDS[work.kind]} of microbatch {work.microbatch}"
                words += f", chunk {work.chunk}" if table.num_chunks > 1 else ""
                box = tag("rect", x=f"{left:.1f}", y=ROW * stage + 1, width=f"{wide:.1f}", height=ROW - 2, stroke="#0006",
                          fill=colour(_place(work.kind, work.chunk)))
                number = tag("text", str(work.microbatch), x=f"{left + wide / 2:.1f}", y=ROW * stage + 15, text_anchor="middle",
                             fill="#000")
                parts.append(tag("g", tag("title", words), box, number))
                at += prices[work.kind]
    width, height = round(MARGIN + float(end[drawn - 1].max()) * scale) + 2, ROW * table.num_stages
    return tag("svg", *parts, viewBox=f"0 0 {width} {height}", width=width, height=height, role="img", font_size=11,
               font_family="system-ui, sans-serif", aria_label=f"{size_line(table)}; time across, stages down")
