"""Reports: what a layout says, for a terminal and for other programs.

Everything here only reads `Layout.rows`, and the collectives and memory of a compiled step where there is one; nothing is
decided. Bytes are exact in the JSON form.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from partitioning.layout import Layout, Row
from partitioning.memory import Memory

STATE = ("params", "gradients", "optimizer")
HEADINGS = {"params": "parameters", "gradients": "gradients", "optimizer": "optimizer state",
            "activations": "activations (of one microbatch)"}
COLLECTIVE_COLUMNS = ("kind", "axis", "dtype", "loops", "executions", "bytes", "moved per device")


def memory_per_device(layout: Layout) -> dict[str, int]:
    """Bytes that one device holds of params, gradients and optimizer state."""
    return {kind: sum(row.bytes_per_device for row in layout.rows if row.kind == kind) for kind in STATE}


def to_json(layout: Layout, collectives: Sequence[Mapping[str, Any]] | None = None,
            memory: Memory | None = None, links: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The whole report in plain values: `devices`, `mesh`, `links`, `arrays`, `totals` (bytes per kind of state), `notes`, and
    what a compiled step adds: `collectives` and `memory`.

    A spec is a list with None, the name of an axis, or a list of names for each dim. `collectives` and `memory` are None
    where nothing was compiled, `links` where no machine is known; a step that moves nothing has an empty list.

    Args:
      layout: what to report.
      collectives: of one training step, from `partitioning.collectives.group`.
      memory: of one training step.
      links: mesh axis to what connects its devices, from `partitioning.links`.
    """
    def array(row: Row) -> dict[str, Any]:
        return dataclasses.asdict(row) | {"shape": list(row.shape), "dims": list(row.dims),
                                          "spec": [list(axes) if isinstance(axes, tuple) else axes for axes in row.spec]}

    per_device = memory_per_device(layout)
    totals = {kind: {"bytes": sum(row.bytes for row in layout.rows if row.kind == kind), "bytes_per_device": per_device[kind]}
              for kind in STATE}
    return {"devices": layout.num_devices, "mesh": dict(layout.sizes), "links": None if links is None else dict(links),
            "arrays": [array(row) for row in layout.rows], "totals": totals, "notes": list(layout.notes),
            "collectives": None if collectives is None else [dict(row) | {"axes": list(row["axes"])} for row in collectives],
            "memory": None if memory is None else _memory_json(memory)}


def text(layout: Layout, collectives: Sequence[Mapping[str, Any]] | None = None, memory: Memory | None = None,
         links: Mapping[str, str] | None = None) -> str:
    """The report as aligned text; the arguments are those of `to_json`."""
    lines, shown = [mesh_line(layout)], {}
    if links:
        lines += ["", "links", *_align(list(links.items()), right=())]
    for kind, heading in HEADINGS.items():
        rows = [row for row in layout.rows if row.kind == kind]
        if not rows:
            continue
        lines += ["", heading, *_lines_of_arrays(kind, rows, shown)]
        if kind in STATE:
            lines.append(_total(rows))
    if collectives is not None:
        lines += ["", "collectives of one training step", *_table_of_collectives(collectives)]
    if memory is not None:
        lines += ["", f"memory of one training step, per device ({memory.platform})", *_memory_lines(memory)]
    if layout.notes:
        lines += ["", "notes", *(f"  {note}" for note in layout.notes)]
    return "\n".join(lines) + "\n"


def mesh_line(layout: Layout) -> str:
    """The number of devices and the axes that are larger than 1."""
    axes = " x ".join(f"{axis}={size}" for axis, size in layout.sizes.items() if size > 1)
    return f"{layout.num_devices} device{'s' if layout.num_devices > 1 else ''}" + (f": {axes}" if axes else "")


def spec_words(spec: Any) -> str:
    """A spec such as (-, data+fsdp, tensor); '-' for a dim that is whole."""
    return tuple_words("+".join(axes) if isinstance(axes, tuple) else axes for axes in spec)


def size_words(number: int) -> str:
    """Bytes with a binary unit: 1536 is '1.5 KiB'."""
    size, unit = float(number), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{number} B" if unit == "B" else f"{size:.1f} {unit}"


def by_links(collectives: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows with those of one kind and axes together; what moves most comes first."""
    moved: dict[Any, int] = {}
    for row in collectives:
        key = row["kind"], row["axes"]
        moved[key] = moved.get(key, 0) + row["moved"]
    return sorted(collectives, key=lambda row: (-moved[row["kind"], row["axes"]], row["kind"], row["axes"], -row["moved"]))


def collective_words(row: Mapping[str, Any]) -> tuple[str, ...]:
    """One row of collectives as the cells of COLLECTIVE_COLUMNS. '~' before a count that is not exact."""
    count = f"{'' if row['exact'] else '~'}{row['count']:,}"
    return (row["kind"], "+".join(row["axes"]), row["dtype"], "inside" if row["in_loop"] else "outside", count,
            size_words(row["bytes"]), size_words(row["moved"]))


def collectives_total(collectives: Sequence[Mapping[str, Any]]) -> str:
    """Executions and bytes of all rows."""
    count, moved = sum(row["count"] for row in collectives), sum(row["moved"] for row in collectives)
    return f"total: {count:,} executions, {size_words(moved)} moved per device ({moved:,} bytes)"


def memory_parts(memory: Memory) -> list[tuple[str, int, str]]:
    """(name, bytes, meaning) of what a step needs."""
    return [("state", memory.state, "arguments: parameters, optimizer state, batch"),
            ("temporary", memory.temporary, "while it runs: activations, gradients, gathered weights"),
            ("output", memory.output, "results that take no argument's place")]


def verdict(memory: Memory) -> str:
    """Whether the step fits on the device, in words."""
    needs = f"needs {size_words(memory.needed)}"
    if memory.capacity is None:
        return f"{needs}; what one {memory.platform} device has is not known"
    of = f"{needs} of {size_words(memory.capacity)}"
    if memory.fits:
        return f"fits: {of}, {size_words(memory.room)} to spare"
    return f"does not fit: {of}, {size_words(-memory.room)} too much"


def suggestion_words(memory: Memory) -> list[str]:
    """What would help, the best first."""
    fitting = [" (fits)" if memory.fits is False and needed <= memory.capacity else "" for _, needed in memory.helpful]
    return [f"what would help{' most' if i == 0 else ''}: {declaration} -> needs {size_words(needed)}{fits}"
            for i, ((declaration, needed), fits) in enumerate(zip(memory.helpful, fitting))]


def shape_words(shape: Sequence[int]) -> str:
    """A shape such as 64x32."""
    return "x".join(map(str, shape)) or "scalar"


def tuple_words(words: Any) -> str:
    """(batch, -, embed); '-' for None."""
    return f"({', '.join(word or '-' for word in words)})"


def _lines_of_arrays(kind: str, rows: Sequence[Row], shown: dict[tuple[Any, ...], str]) -> list[str]:
    """A table of the arrays, without groups that lie array by array as one that is shown already; `shown`, from places to
    what they are the places of, grows by the groups that are in the table. Each slot of the optimizer is a group."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.path.partition("/")[0] if kind == "optimizer" else kind, []).append(row)
    listed, alike = [], {}
    for name, members in groups.items():
        prefix = f"{name}/" if kind == "optimizer" else ""
        places = tuple((row.path.removeprefix(prefix), row.shape, row.dtype, row.spec, row.rule) for row in members)
        if places in shown:
            alike.setdefault(shown[places], []).append(name)
        else:
            shown[places] = {"params": "its parameter", "gradients": "its gradient"}.get(kind, f"in {name}")
            listed += members
    table = [("path", "shape", "dtype", "dims", "spec", "bytes", "per device", "copies", "rule")]
    table += [(row.path, shape_words(row.shape), row.dtype, tuple_words(row.dims), spec_words(row.spec), size_words(row.bytes),
               size_words(row.bytes_per_device), str(row.copies), row.rule) for row in listed]
    return (_align(table, right=(5, 6, 7)) if listed else []) + [
        f"  {f'{", ".join(names)}: ' if kind == 'optimizer' else ''}each as {what}" for what, names in alike.items()]


def _table_of_collectives(collectives: Sequence[Mapping[str, Any]]) -> list[str]:
    if not collectives:
        return ["  none"]
    lines = _align([COLLECTIVE_COLUMNS, *map(collective_words, by_links(collectives))], right=(4, 5, 6))
    return [*lines, "  " + collectives_total(collectives)]


def _memory_lines(memory: Memory) -> list[str]:
    parts = [(name, size_words(number), meaning) for name, number, meaning in memory_parts(memory)]
    return [*_align(parts, right=(1,)), f"  {verdict(memory)}", *(f"  {words}" for words in suggestion_words(memory))]


def _memory_json(memory: Memory) -> dict[str, Any]:
    return dataclasses.asdict(memory) | {
        "needed": memory.needed, "fits": memory.fits, "room": memory.room,
        "suggestions": [{"declaration": declaration, "needed": needed} for declaration, needed in memory.helpful]}


def _total(rows: Sequence[Row]) -> str:
    whole, share = sum(row.bytes for row in rows), sum(row.bytes_per_device for row in rows)
    return f"  total: {size_words(whole)}, per device {size_words(share)} ({share:,} bytes)"


def _align(table: Sequence[Sequence[str]], right: Sequence[int]) -> list[str]:
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return ["  " + "  ".join(cell.rjust(width) if i in right else cell.ljust(width)
                             for i, (cell, width) in enumerate(zip(row, widths))).rstrip() for row in table]
