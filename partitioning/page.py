"""The report as a page to look at: one HTML file that needs no network, and no script except for its picture's controls.

    pathlib.Path("sharding.html").write_text(html(layout), "utf-8")

It shows what `partitioning.report` says, and a picture of which block of an array each device holds. All words from the
layout go through `tag`, which escapes them. The same layout makes the same page, byte for byte.
"""

import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from partitioning.blocks import Picture, drawn_devices, drawn_sizes, number, picture
from partitioning.layout import Layout, Row
from partitioning.memory import Memory
from partitioning.report import (COLLECTIVE_COLUMNS, HEADINGS, STATE, by_links, collective_words, collectives_total, memory_parts,
                                 memory_per_device, mesh_line, shape_words, size_words, spec_words, suggestion_words, tuple_words,
                                 verdict)

DRAWN = 64                                     # devices in the picture; no more blocks than these hold
# Okabe and Ito's colours, which colour-blind people tell apart, with grey for black. Blocks take them in turn, lighter each
# time round.
COLOURS = (0x0072B2, 0xE69F00, 0x009E73, 0xCC79A7, 0x56B4E9, 0xD55E00, 0xF0E442, 0xA0A0A0)
COLUMNS = ("kind", "path", "shape", "dtype", "dims", "spec", "bytes", "per device", "copies", "rule")
NUMBERS = ("bytes", "per device", "copies")


class Markup(str):
    """Text that is HTML already."""


def tag(name: str, /, *children: str, **attributes: Any) -> Markup:
    """An element. Children that are no Markup are escaped, as attributes are; None leaves an attribute out, `class_` is
    class and `data_x` is data-x."""
    given = "".join(f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"' for key, value in attributes.items()
                    if value is not None)
    inside = "".join(child if isinstance(child, Markup) else escape(child) for child in children)
    return Markup(f"<{name}{given}>" + ("" if name in ("meta", "input") else f"{inside}</{name}>"))


def colour(place: int) -> str:
    """The background of the block in this place, as #rrggbb; black is readable on it."""
    base, white = COLOURS[place % len(COLOURS)], 0.15 + 0.09 * (place // len(COLOURS) % 8)
    return "#" + "".join(f"{round(part + (255 - part) * white):02x}" for part in base.to_bytes(3))


def html(layout: Layout, collectives: Sequence[Mapping[str, Any]] | None = None, memory: Memory | None = None,
         title: str = "Sharding", links: Mapping[str, str] | None = None, sections: Sequence[Markup] = ()) -> str:
    """The whole page.

    Args:
      layout: what to show.
      collectives: of one training step, from `partitioning.collectives.group`; None where nothing was compiled.
      memory: of one training step; None where nothing was compiled.
      title: heads the page.
      links: mesh axis to what connects its devices, in words.
      sections: more of the page, such as a schedule.
    """
    parts = [_head(layout, title, links or {}), *([_picture(layout)] if layout.rows else []), *sections,
             *_arrays(layout), *([] if collectives is None else [_collectives(collectives)]),
             *([] if memory is None else [_memory(memory)])]
    styles = "\n".join([_file("page.css"), *(f".c{place} {{ background: {colour(place)} }}" for place in range(DRAWN))])
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    head = tag("head", tag("meta", charset="utf-8"), tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
               tag("meta", http_equiv="Content-Security-Policy", content=policy),
               tag("title", title), tag("style", Markup(styles)))
    body = tag("body", tag("main", *parts), tag("script", Markup(_file("page.js"))))
    return "<!DOCTYPE html>\n" + tag("html", head, "\n", body, lang="en") + "\n"


def _file(name: str) -> str:
    return pathlib.Path(__file__).with_name(name).read_text("utf-8")


def _head(layout: Layout, title: str, links: Mapping[str, str]) -> Markup:
    axes = [tag("li", tag("b", axis), f": {size}, {links[axis]}") for axis, size in layout.sizes.items() if axis in links]
    held = memory_per_device(layout)
    parts, whole = [(HEADINGS[kind], held[kind]) for kind in STATE], sum(held.values())
    notes = [tag("h2", "Notes"), tag("ul", *(tag("li", note) for note in layout.notes))] if layout.notes else []
    return tag("header", tag("h1", title), tag("p", mesh_line(layout)), *([tag("ul", *axes)] if axes else []),
               tag("h2", f"Each device holds {size_words(whole)} of state"), *_bar(parts, whole), *notes)


def _bar(parts: Sequence[tuple[str, int]], whole: int, limit: int | None = None) -> list[Markup]:
    """A bar of stacked parts, with a mark at the limit, and its legend in numbers."""
    spans = [tag("span", class_=f"c{place}", style=f"width:{100 * size / max(whole, 1):.2f}%")
             for place, (_, size) in enumerate(parts)]
    legend = [tag("li", tag("span", class_=f"swatch c{place}"), f"{name} {size_words(size)} ({size:,} bytes)")
              for place, (name, size) in enumerate(parts)]
    if limit is not None:
        spans.append(tag("span", class_="limit", style=f"left:{100 * limit / max(whole, 1):.2f}%"))
    return [tag("div", *spans, class_="bar", aria_hidden="true"), tag("ul", *legend, class_="legend")]


# The picture.

def _picture(layout: Layout) -> Markup:
    """The devices beside the array. One figure for each way that arrays are cut; the script shows that of the chosen array."""
    pictures = _pictures(layout)
    chosen = max(layout.rows, key=lambda row: (row.kind == "params", row.bytes))
    figures = [_figure(one, key, place, key == _key(chosen)) for place, (key, one) in enumerate(pictures.items())]
    options = [tag("optgroup", *(tag("option", row.path, value=f"array-{i}", selected="" if row is chosen else None)
                                 for i, row in enumerate(layout.rows) if row.kind == kind), label=heading)
               for kind, heading in HEADINGS.items() if any(row.kind == kind for row in layout.rows)]
    choice = tag("p", tag("label", "Array ", tag("select", *options, id="choice")), data_script="", hidden="")
    details = [part for name, words in zip(COLUMNS, _words(chosen)) for part in (tag("dt", name), tag("dd", words))]
    held = pictures[_key(chosen)]
    return tag("section", tag("h2", "Which device holds what"), choice,
               tag("p", "Devices of the same colour hold the same block. Point at a device or a block to see both."),
               tag("p", id="said", class_="quiet", aria_live="polite"),
               tag("div", tag("div", tag("h3", "Devices"), tag("p", _drawn_words(layout), class_="quiet"),
                              tag("div", _boxes(layout, held), id="devices", role="group", aria_label="devices")),
                   tag("div", tag("h3", "Array"), *figures, tag("dl", *details, id="details")), class_="sides"),
               id="picture")


def _key(row: Row) -> tuple[Any, ...]:
    return row.shape, row.dims, tuple(row.spec)


def _pictures(layout: Layout) -> dict[tuple[Any, ...], Picture]:
    """A picture for each shape, dims and spec that arrays have."""
    return {key: picture(key[2], key[0], layout.sizes, DRAWN) for key in dict.fromkeys(map(_key, layout.rows))}


def _drawn_words(layout: Layout) -> str:
    """How devices are numbered, and which are left out."""
    words = "Numbered by their place in the mesh, the last axis fastest."
    drawn = drawn_sizes(layout.sizes, DRAWN)
    if dict(layout.sizes) == drawn:
        return words
    cut = [f"the first {drawn[axis]} of {size} along {axis}" for axis, size in layout.sizes.items() if drawn[axis] < size]
    return f"{words} {math.prod(drawn.values())} of {layout.num_devices} devices are drawn: {' and '.join(cut)}."


def _boxes(layout: Layout, held: Picture) -> Markup:
    """The devices that are drawn in a box for each place along each axis, the innermost axis in a row."""
    places = {block: place for place, block in enumerate(_numbers(held))}
    axes = [axis for axis, size in layout.sizes.items() if size > 1]
    devices = [(device, {axis: coordinates[axis] for axis in axes}, block) for (device, coordinates), block in
               zip(drawn_devices(layout.sizes, DRAWN), held.held, strict=True)]

    def nest(outer: list[str], members: list[tuple[int, dict[str, int], int]]) -> Markup:
        if not outer:
            return tag("div", *(_device(*one, places[one[2]]) for one in members), class_="cells")
        axis, *inner = outer
        groups: dict[int, list] = {}
        for one in members:
            groups.setdefault(one[1][axis], []).append(one)
        return tag("div", *(tag("div", tag("span", f"{axis} {place}", class_="quiet"), nest(inner, group), class_="box")
                            for place, group in groups.items()), class_="boxes")

    return nest(axes[:-1], devices)


def _device(device: int, coordinates: Mapping[str, int], block: int, place: int) -> Markup:
    where = [tag("small", f"{axis} {at}") for axis, at in coordinates.items()]
    return tag("button", tag("b", str(device)), *where, tag("em", f"block {block}"), type="button", class_=f"cell c{place}",
               data_device=device, data_block=block, tabindex=0 if device == 0 else -1)


def _numbers(one: Picture) -> list[int]:
    """The numbers of the blocks that are drawn, in the order of the picture, which is that of their colours."""
    return [number(block, one.counts) for rectangle in one.rectangles() for row in rectangle for block in row]


def _figure(one: Picture, key: tuple[Any, ...], place: int, shown: bool) -> Markup:
    """The array's rectangle, cut into its blocks."""
    shape, dims, _ = key
    names = [dim or f"dim {i}" for i, dim in enumerate(dims)]
    sizes = [size // count for size, count in zip(shape, one.counts)]
    colours = {block: at for at, block in enumerate(_numbers(one))}

    def cell(block: tuple[int, ...]) -> Markup:
        at = number(block, one.counts)
        slices = ", ".join(f"{name} {i * size}:{(i + 1) * size}" for name, i, size in zip(names, block, sizes))
        return tag("button", str(at), type="button", class_=f"cell c{colours[at]}", data_block=at, title=slices or "the scalar",
                   tabindex=-1 if colours[at] else 0)

    rectangles = []
    for rectangle in one.rectangles():
        others = [f"{names[dim]} block {i}" for dim, i in enumerate(rectangle[0][0])
                  if one.counts[dim] > 1 and dim not in (one.down, one.across)]
        rectangles.append(tag("div", *([tag("span", ", ".join(others), class_="quiet")] if others else []),
                              tag("div", *(cell(block) for row in rectangle for block in row), class_="rectangle",
                                  style=f"grid-template-columns:repeat({len(rectangle[0])},auto)")))
    faces = [f"{way}: {_cut(names[dim], shape[dim], one.counts[dim], len(one.drawn[dim]))}"
             for way, dim in (("down", one.down), ("across", one.across)) if dim is not None]
    faces += [_cut(names[dim], shape[dim], one.counts[dim], len(one.drawn[dim])) for dim in range(len(shape))
              if dim not in (one.down, one.across)]
    return tag("figure", tag("figcaption", "; ".join(faces) or "a scalar, whole on every device"),
               tag("div", *rectangles, class_="rectangles", role="group", aria_label="blocks"), id=f"picture-{place}",
               data_held=" ".join(map(str, one.held)), hidden=None if shown else "")


def _cut(name: str, size: int, count: int, drawn: int) -> str:
    if count == 1:
        return f"{name} {size}, whole"
    return f"{name} {size} in {count} blocks of {size // count}" + (f", {drawn} of them drawn" if drawn < count else "")


# The tables.

def _words(row: Row) -> tuple[str, ...]:
    """A row as the cells of COLUMNS."""
    return (row.kind, row.path, shape_words(row.shape), row.dtype, tuple_words(row.dims), spec_words(row.spec),
            size_words(row.bytes), size_words(row.bytes_per_device), str(row.copies), row.rule)


def _arrays(layout: Layout) -> list[Markup]:
    places = {key: place for place, key in enumerate(dict.fromkeys(map(_key, layout.rows)))}

    def line(i: int, row: Row) -> Markup:
        values = {"bytes": row.bytes, "per device": row.bytes_per_device}
        cells = [tag("td", tag("a", words, href="#picture") if name == "path" else words, data_value=values.get(name),
                     class_="number" if name in NUMBERS else "words" if name == "rule" else None)
                 for name, words in zip(COLUMNS, _words(row))]
        return tag("tr", *cells, id=f"array-{i}", data_picture=places[_key(row)])

    find = tag("p", tag("label", "Show arrays with ", tag("input", id="filter", type="search")), " ",
               tag("span", id="found", class_="quiet", aria_live="polite"), data_script="", hidden="")
    sections = [find]
    for heading, kinds in (("State", STATE), ("Activations of one microbatch", ("activations",))):
        lines = [line(i, row) for i, row in enumerate(layout.rows) if row.kind in kinds]
        if lines:
            sections.append(tag("section", tag("h2", heading), _table(heading, COLUMNS, NUMBERS, lines)))
    return sections


def _table(name: str, columns: Iterable[str], numbers: Iterable[str], lines: Iterable[Markup]) -> Markup:
    """A table in a frame that scrolls, by keyboard too."""
    heading = tag("tr", *(tag("th", column, scope="col", class_="number" if column in numbers else None) for column in columns))
    body = tag("tbody", *(Markup(f"\n{line}") for line in lines))
    return tag("div", tag("table", tag("thead", heading), body), class_="scroll", role="region", aria_label=name, tabindex=0)


def _collectives(collectives: Sequence[Mapping[str, Any]]) -> Markup:
    most = max((row["moved"] for row in collectives), default=0)
    lines = []
    for row in by_links(collectives):
        values = {"executions": row["count"], "bytes": row["bytes"], "moved per device": row["moved"]}
        cells = [tag("td", words, data_value=values.get(name), class_="number" if name in values else None)
                 for name, words in zip(COLLECTIVE_COLUMNS, collective_words(row))]
        bar = tag("span", class_="c0", style=f"width:{100 * row['moved'] / max(most, 1):.1f}%")
        lines.append(tag("tr", *cells, tag("td", tag("div", bar, class_="bar", aria_hidden="true"), data_value=row["moved"])))
    table = _table("collectives", (*COLLECTIVE_COLUMNS, "share"), COLLECTIVE_COLUMNS[4:], lines)
    return tag("section", tag("h2", "Collectives of one training step"),
               tag("p", collectives_total(collectives) if collectives else "none"), *([table] if collectives else []))


def _memory(memory: Memory) -> Markup:
    parts = [(f"{name} ({meaning})", size) for name, size, meaning in memory_parts(memory)]
    parts += [("to spare", memory.room)] if memory.fits else []
    what = "" if memory.capacity is None else f"The mark is what the device has: {size_words(memory.capacity)}."
    helpful = [tag("li", words) for words in suggestion_words(memory)]
    bar = _bar(parts, max(memory.needed, memory.capacity or 0), memory.capacity)
    return tag("section", tag("h2", f"Memory of one training step, per device ({memory.platform})"),
               tag("p", tag("b", verdict(memory))), *bar, *([tag("p", what, class_="quiet")] if what else []),
               *([tag("ul", *helpful)] if helpful else []))
