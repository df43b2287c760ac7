"""Reports: what a layout says, for a terminal and for other programs.

Everything here only reads `Layout.rows`; nothing is decided. Bytes are exact in the JSON form.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from partitioning.layout import Layout, Row

STATE = ("params", "gradients", "optimizer")
HEADINGS = {"params": "parameters", "gradients": "gradients", "optimizer": "optimizer state",
            "activations": "activations (of one microbatch)"}


def memory_per_device(layout: Layout) -> dict[str, int]:
    """Bytes that one device holds of params, gradients and optimizer state."""
    return {kind: sum(row.bytes_per_device for row in layout.rows if row.kind == kind) for kind in STATE}


def to_json(layout: Layout) -> dict[str, Any]:
    """The whole report in plain values: `devices`, `mesh`, `arrays`, `totals` (bytes per kind of state), `notes`.

    A spec is a list with None, the name of an axis, or a list of names for each dim.
    """
    def array(row: Row) -> dict[str, Any]:
        return dataclasses.asdict(row) | {"shape": list(row.shape), "dims": list(row.dims),
                                          "spec": [list(axes) if isinstance(axes, tuple) else axes for axes in row.spec]}

    per_device = memory_per_device(layout)
    totals = {kind: {"bytes": sum(row.bytes for row in layout.rows if row.kind == kind), "bytes_per_device": per_device[kind]}
              for kind in STATE}
    return {"devices": layout.num_devices, "mesh": dict(layout.sizes), "arrays": [array(row) for row in layout.rows],
            "totals": totals, "notes": list(layout.notes)}


def text(layout: Layout) -> str:
    """The report as aligned text."""
    lines, parameters = [mesh_line(layout)], [_place(row) for row in layout.rows if row.kind == "params"]
    for kind, heading in HEADINGS.items():
        rows = [row for row in layout.rows if row.kind == kind]
        if not rows:
            continue
        if kind == "gradients" and [_place(row) for row in rows] == parameters:
            lines += ["", heading, "  each as its parameter", _total(rows)]
            continue
        table = [("path", "shape", "dtype", "dims", "spec", "bytes", "per device", "rule")]
        table += [(row.path, "x".join(map(str, row.shape)) or "scalar", row.dtype, _tuple(row.dims), spec_words(row.spec),
                   size_words(row.bytes), size_words(row.bytes_per_device), row.rule) for row in rows]
        lines += ["", heading, *_align(table, right=(5, 6))]
        if kind in STATE:
            lines.append(_total(rows))
    if layout.notes:
        lines += ["", "notes", *(f"  {note}" for note in layout.notes)]
    return "\n".join(lines) + "\n"


def mesh_line(layout: Layout) -> str:
    """The number of devices and the axes that are larger than 1."""
    axes = " x ".join(f"{axis}={size}" for axis, size in layout.sizes.items() if size > 1)
    return f"{layout.num_devices} device{'s' if layout.num_devices > 1 else ''}" + (f": {axes}" if axes else "")


def spec_words(spec: Any) -> str:
    """A spec such as (-, data+fsdp, tensor); '-' for a dim that is whole."""
    return _tuple("+".join(axes) if isinstance(axes, tuple) else axes for axes in spec)


def size_words(number: int) -> str:
    """Bytes with a binary unit: 1536 is '1.5 KiB'."""
    size, unit = float(number), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{number} B" if unit == "B" else f"{size:.1f} {unit}"


def _place(row: Row) -> tuple[Any, ...]:
    return row.path, row.shape, row.dtype, row.spec, row.rule


def _total(rows: Sequence[Row]) -> str:
    whole, share = sum(row.bytes for row in rows), sum(row.bytes_per_device for row in rows)
    return f"  total: {size_words(whole)}, per device {size_words(share)} ({share:,} bytes)"


def _tuple(words: Any) -> str:
    return f"({', '.join(word or '-' for word in words)})"


def _align(table: Sequence[Sequence[str]], right: Sequence[int]) -> list[str]:
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return ["  " + "  ".join(cell.rjust(width) if i in right else cell.ljust(width)
                             for i, (cell, width) in enumerate(zip(row, widths))).rstrip() for row in table]
