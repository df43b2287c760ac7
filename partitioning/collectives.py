"""The collectives of a compiled program, read from its HLO: what each moves, along which mesh axes, and how often.

    for row in group(read_collectives(jax.jit(step).lower(...).compile().as_text(), sizes)):
        print(row)

The text is that of XLA after optimisation, on any backend. Each backend decides for itself: XLA:CPU has all-reduces where
XLA:GPU has reduce-scatters, and float32 where XLA:GPU has bfloat16, so a program is judged on the chip it is compiled for.
Device numbers in the text are positions in the flattened mesh, whatever the ids of its devices. Groups of one device are
left out, and so are sends and receives that stand alone.
"""

import dataclasses
import graphlib
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from partitioning.mesh import AXES

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "ragged-all-to-all", "all-to-all", "collective-permute",
         "collective-broadcast")
UNKNOWN_AXES = ("?",)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One array that one instruction moves between devices; an instruction that moves several arrays makes several."""
    kind: str               # one of KINDS
    axes: tuple[str, ...]   # the mesh axes along which its groups extend, in the order of AXES; ("?",) if no axes make them
    dtype: str              # as numpy calls it: "bfloat16"
    shape: tuple[int, ...]  # of the full array: gathered, or not yet reduced; other axes still split it. The pieces of an
    #                         all-to-all that has one operand per device are stacked: (devices, *piece)
    bytes: int              # of the full array, per execution
    count: int              # executions in one run of the program
    loops: int              # how many loops it stands in
    source: str             # the JAX operation it comes from ("" if the program does not say)
    group_size: int         # devices in a group
    exact: bool             # False: `count` takes every branch of a conditional as taken, or guesses a loop's trips
    branch: bool = False    # whether it stands in a branch of a conditional inside a loop: not all devices may come there

    @property
    def moved(self) -> int:
        """Bytes that one device sends per execution, by a ring's formulas."""
        if self.kind in ("collective-permute", "collective-broadcast"):
            return self.bytes
        share = self.bytes * (self.group_size - 1) // self.group_size
        return 2 * share if self.kind == "all-reduce" else share


def group(collectives: Iterable[Collective]) -> list[dict]:
    """Rows of what a program moves, the most first: one per kind, axes and dtype, inside and outside loops apart.

    A row has `kind`, `axes`, `dtype`, `in_loop`, `count` (executions), `bytes` and `moved` (over all executions), and `exact`
    (whether each count is).
    """
    rows: dict[tuple, dict] = {}
    for one in collectives:
        key = dict(kind=one.kind, axes=one.axes, dtype=one.dtype, in_loop=one.loops > 0)
        row = rows.setdefault(tuple(key.values()), key | dict(count=0, bytes=0, moved=0, exact=True))
        row["count"] += one.count
        row["bytes"] += one.count * one.bytes
        row["moved"] += one.count * one.moved
        row["exact"] &= one.exact
    return sorted(rows.values(), key=lambda row: -row["moved"])


def read_collectives(hlo: str, sizes: Mapping[str, int]) -> tuple[Collective, ...]:
    """All collectives over more than one device that a run of the program executes, in the order of the text.

    Args:
      hlo: `compiled.as_text()`.
      sizes: the size of each axis of the mesh it was compiled for.

    Raises:
      ValueError: the text is not that of a compiled program, or it is for another number of devices.
    """
    computations, entry = _computations(hlo)
    partitions = re.search(r"\bnum_partitions=(\d+)", hlo.partition("\n")[0])
    if partitions and int(partitions[1]) != math.prod(sizes.values()):
        raise ValueError(f"The program is for {partitions[1]} devices; a mesh of {dict(sizes)} has {math.prod(sizes.values())}.")
    groups = _Groups(sizes)
    found, calls = {}, {}
    for name, lines in computations.items():
        found[name], calls[name] = [], []
        for line in filter(_WORTH_READING.search, lines):
            instruction = _Instruction.read(line)
            found[name] += _moved_arrays(instruction, groups)
            calls[name] += _calls(instruction, computations)
    visits = _visits(calls, entry)
    return tuple(dataclasses.replace(one, count=count, loops=loops, exact=exact, branch=branch) for name in computations
                 for one in found[name] for (loops, exact, branch), count in visits[name].items())


# What is called, and how often.

@dataclasses.dataclass(frozen=True)
class _Call:
    callee: str
    count: int = 1       # executions of the callee per execution of the caller
    loops: int = 0       # 1 for a loop
    exact: bool = True
    branch: bool = False


def _computations(hlo: str) -> tuple[dict[str, list[str]], str]:
    """The lines of each computation by its name, and the name of the entry."""
    computations: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in hlo.splitlines():
        if line.startswith(" "):
            lines.append(line)
        elif line.endswith("{") and (header := re.match(r"(ENTRY )?%?([^\s(]+) \(", line)):
            lines = computations[header[2]] = []
            entry = header[2] if header[1] else entry
        else:
            lines = []                         # tables of source lines and the like
    if not entry:
        raise ValueError("No ENTRY computation; expected the text of a compiled program (compiled.as_text()).")
    return computations, entry


def _visits(calls: Mapping[str, list[_Call]], entry: str) -> dict[str, dict[tuple[int, bool, bool], int]]:
    """Executions of each computation in one run, by (loops around it, is that exact, in a branch in a loop)."""
    visits: dict[str, dict[tuple[int, bool, bool], int]] = {name: defaultdict(int) for name in calls}
    visits[entry][0, True, False] = 1
    callees_first = graphlib.TopologicalSorter({name: {call.callee for call in calls[name]} for name in calls}).static_order()
    for name in reversed(list(callees_first)):
        for call in calls[name]:
            for (loops, exact, branch), count in visits[name].items():
                key = loops + call.loops, exact and call.exact, branch or (call.branch and loops > 0)
                visits[call.callee][key] += count * call.count
    return visits


def _calls(instruction: "_Instruction", computations: Mapping[str, list[str]]) -> Iterator[_Call]:
    """The computations that an instruction runs. The end of an asynchronous pair may name its computation again."""
    if instruction.opcode.endswith(("-done", "-update")):
        return
    callees = {key: re.findall(r"[^%{},\s]+", names) for key, names in _CALLEES.findall(instruction.attributes)}
    if instruction.opcode == "while":
        (condition,), (body,) = callees["condition"], callees["body"]
        known = re.search(r'"known_trip_count":\{"n":"(\d+)"', instruction.line)
        bound = None if known else _bound(condition, computations)
        trips = int(known[1]) if known else 1 if bound is None else bound
        yield _Call(body, trips, loops=1, exact=known is not None)
        yield _Call(condition, trips + 1, loops=1, exact=known is not None)
        return
    for names in callees.values():
        for name in names:
            chosen = instruction.opcode == "conditional"
            yield _Call(name, exact=not chosen, branch=chosen)


def _bound(condition: str, computations: Mapping[str, list[str]]) -> int | None:
    """The constant below which a loop's counter must be, if that is all its condition says: its trips if it counts from 0."""
    lines = computations[condition]
    root = next(line for line in lines if line.startswith("  ROOT "))
    if fused := re.search(r" fusion\(.* calls=%?([^\s,]+)", root):
        return _bound(fused[1], computations)
    compared = re.search(r" compare\((?:[^()]*, |[^()]* )?%?([^\s,()]+)\), direction=LT", root)
    for line in lines:
        constant = re.match(r"  %?(\S+) = [su]\d+\[\]\S* constant\((\d+)\)", line)
        if compared and constant and constant[1] == compared[1]:
            return int(constant[2])
    return None


# One instruction.

_CALLEES = re.compile(r"\b(calls|to_apply|body|condition|branch_computations|true_computation|false_computation"
                      r"|called_computations)=(\{[^{}]*\}|%?[^\s,{}]+)")
_WORTH_READING = re.compile(rf"{_CALLEES.pattern}| (?:{'|'.join(KINDS)})(?:-start)?\(")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<= ]*)\]")


@dataclasses.dataclass(frozen=True)
class _Instruction:
    line: str
    type: str         # of its result: an array or a tuple
    opcode: str
    attributes: str   # what follows the opcode, without the contents of quoted strings

    @classmethod
    def read(cls, line: str) -> "_Instruction":
        """From a line `  %name = type opcode(operands), attributes`."""
        rest = line.partition(" = ")[2]
        end = _closing(rest) if rest.startswith("(") else rest.index(" ")
        opcode, _, attributes = rest[end:].lstrip().partition("(")
        return cls(line, rest[:end], opcode, _QUOTED.sub('""', attributes))

    def attribute(self, pattern: str) -> str:
        """What the pattern's first group matches among the attributes, or ""."""
        match = re.search(pattern, self.attributes)
        return match[1] if match else ""


def _closing(text: str) -> int:
    """Where the parenthesis that opens `text` has been closed."""
    depth = 0
    for match in re.finditer(r"[()]", text):
        depth += 1 if match[0] == "(" else -1
        if not depth:
            return match.end()
    raise ValueError(f"A parenthesis is not closed: {text[:100]}")


def _elements(type_: str) -> list[str]:
    """The types in a tuple type, nested tuples whole; of an array type, itself."""
    if not type_.startswith("("):
        return [type_]
    depth, start, elements = 0, 1, []
    for match in re.finditer(r"[()\[\]{},]", type_):
        depth += {"(": 1, "[": 1, "{": 1, ",": 0}.get(match[0], -1)
        if (match[0] == "," and depth == 1) or depth == 0:
            elements.append(type_[start:match.start()].strip())
            start = match.end()
    return elements


def _results(instruction: _Instruction) -> str:
    """The type of what a collective yields. A start yields (operands, results, ...), of which an older all-reduce-start
    names the results alone."""
    elements = _elements(instruction.type)
    if not instruction.opcode.endswith("-start"):
        return instruction.type
    if instruction.opcode == "all-reduce-start" and not elements[0].startswith("("):
        return instruction.type
    return elements[1]


def _moved_arrays(instruction: _Instruction, groups: "_Groups") -> Iterator[Collective]:
    """The arrays that an instruction moves, if it is a collective; executions are counted elsewhere."""
    kind = instruction.opcode.removesuffix("-start")
    if kind not in KINDS:
        return
    axes, size = groups.of_pairs(instruction.attribute(r"\bsource_target_pairs=(\{[{}\d,\s]*\})")) \
        if kind == "collective-permute" else groups.of_groups(instruction.attribute(_REPLICA_GROUPS))
    if size == 1:
        return
    arrays = [(dtype, tuple(int(dim.strip("<= ")) for dim in dims.split(",") if dim))
              for dtype, dims in _ARRAY.findall(_results(instruction))]
    dimension = instruction.attribute(r"\bdimensions=\{(\d+)\}")
    if kind == "all-to-all" and not dimension:
        arrays = [(arrays[0][0], (len(arrays), *arrays[0][1]))]
    name = re.search(r'\bop_name="((?:[^"\\]|\\.)*)"', instruction.line)
    for dtype, shape in arrays:
        if kind == "reduce-scatter":
            shape = tuple(dim * size if i == int(dimension) else dim for i, dim in enumerate(shape))
        bits = 8 if dtype == "pred" else int(re.search(r"\d+", dtype)[0])
        yield Collective(kind, axes, _numpy_name(dtype), shape, bytes=(math.prod(shape) * bits + 7) // 8, count=0, loops=0,
                         source=name[1] if name else "", group_size=size, exact=True)


def _numpy_name(dtype: str) -> str:
    """XLA's name of a dtype as numpy and ml_dtypes say it: s32 is int32, f8e4m3fn is float8_e4m3fn."""
    if dtype == "pred":
        return "bool"
    letters, bits, rest = re.fullmatch(r"([a-z]+)(\d+)(\w*)", dtype).groups()
    return {"bf": "bfloat", "f": "float", "s": "int", "u": "uint", "c": "complex"}[letters] + bits + ("_" + rest if rest else "")


# Which axes a group of devices extends along.

_IOTA = r"\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?"
_MESH = r"mesh\[[^\]]*\](?:, device_ids=\([^)]*\))? \{[^}]*\}"
_REPLICA_GROUPS = rf"\breplica_groups=({_IOTA}|{_MESH}|\{{[{{}}\d,\s]*\}})"


class _Groups:
    """The axes of groups of devices, each form of words read once: programs repeat a few, and each names every device."""

    def __init__(self, sizes: Mapping[str, int]):
        self.sizes = {axis: sizes[axis] for axis in AXES}
        self.devices = math.prod(self.sizes.values())
        self.known: dict[str, tuple[tuple[str, ...], int]] = {}

    def of_groups(self, text: str) -> tuple[tuple[str, ...], int]:
        """(axes, devices in a group) of replica groups, from any of the forms they are written in."""
        if text not in self.known:
            self.known[text] = self._axes_of(_read_groups(text, self.devices))
        return self.known[text]

    def of_pairs(self, text: str) -> tuple[tuple[str, ...], int]:
        """(axes along which a source and its target differ, the devices along those), from source and target pairs."""
        if text not in self.known:
            pairs = np.array([numbers for numbers in _lists(text) if numbers], int).reshape(-1, 2)
            axes = self._varying(pairs)
            self.known[text] = axes, math.prod(self.sizes[axis] for axis in axes)
        return self.known[text]

    def _axes_of(self, rows: list[list[int]]) -> tuple[tuple[str, ...], int]:
        length = max(map(len, rows))
        if any(len(row) != length for row in rows):
            return UNKNOWN_AXES, length
        axes = self._varying(np.array(rows))
        # Devices that differ along some axes only, and are as many as those axes have, are all of them.
        return axes if math.prod(self.sizes[axis] for axis in axes) == length else UNKNOWN_AXES, length

    def _varying(self, rows: np.ndarray) -> tuple[str, ...]:
        """The axes along which the devices of some row differ."""
        if rows.max(initial=0) >= self.devices:
            raise ValueError(f"The program names device {rows.max()}; a mesh of {self.sizes} has {self.devices}.")
        places = np.unravel_index(rows, tuple(self.sizes.values()))
        return tuple(axis for axis, place in zip(self.sizes, places, strict=True) if (place != place[:, :1]).any())


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _lists(text: str) -> list[list[int]]:
    """{{0,1},{2,3}} as lists."""
    return [_numbers(numbers) for numbers in re.findall(r"\{([\d,\s]*)\}", text)]


def _read_groups(text: str, devices: int) -> list[list[int]]:
    """The devices of each group. The forms: lists ({} is one group of all); [groups,devices]<=[dims]T(permutation), an iota of
    those dims, transposed and reshaped; and a mesh with the names of its axes (or a part of one, name:(before)size)."""
    if text.startswith("["):
        shape, dims, order = (_numbers(part) for part in re.fullmatch(r"(\[.*\])<=(\[.*?\])(.*)", text).groups())
        return np.arange(math.prod(dims)).reshape(dims).transpose(order or range(len(dims))).reshape(shape).tolist()
    if text.startswith("mesh"):
        axes, ids, along = re.fullmatch(r"mesh\[(.*?)\](?:, device_ids=\((.*)\))? \{(.*)\}", text).groups()
        return _groups_of_mesh(dict(re.findall(r"'?([^',=\s]+)'?=(\d+)", axes)), _numbers(ids or ""), along)
    return [row for row in _lists(text) if row] or [list(range(devices))]


def _groups_of_mesh(axes: Mapping[str, str], ids: list[int], along: str) -> list[list[int]]:
    """Groups along some axes of a mesh. An axis of which a part is named is split in three: before, the part, after."""
    parts = {name.strip(" '"): (int(before), int(size)) for name, before, size in
             re.findall(r"([^,]+?):\((\d+)\)(\d+)", along)}
    whole = {name.strip(" '") for name in along.split(",")}
    dims, inside = [], []
    for name, size in axes.items():
        before, part = parts.get(name, (1, int(size) if name in whole else 1))
        dims += [before, part, int(size) // (before * part)]
        inside.append(len(dims) - 2)
    placed = np.array(ids) if ids else np.arange(math.prod(dims))
    outside = [i for i in range(len(dims)) if i not in inside]
    return placed.reshape(dims).transpose(outside + inside).reshape(-1, math.prod(dims[i] for i in inside)).tolist()
