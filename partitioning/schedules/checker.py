"""Whether a table keeps its contract (`table`): what a user wrote by hand is answered with the tick, stage and piece at fault."""

from collections import Counter, defaultdict

from partitioning.declaration import DeclarationError
from partitioning.schedules.table import BACKWARD, FORWARD, INPUT, KINDS, NEXT, STAY, WEIGHT, WORDS, Entry, Table, Work

HALVES = frozenset((INPUT, WEIGHT))


def check(table: Table) -> None:
    """Holds a table to its contract.

    Raises:
      DeclarationError: the first thing that is wrong, where, and what would be right.
    """
    _check_types(table)
    _check_form(table)
    done = _check_once(table)
    _check_dependencies(table, done)
    _check_messages(table)
    _check_live(table)


def live_counts(table: Table) -> tuple[int, ...]:
    """[stage] the most microbatches (times chunks) that are live at once."""
    now, most = [0] * table.num_stages, [0] * table.num_stages
    for _, stage, _, work in table.entries():
        now[stage] += (work.kind == FORWARD) - (work.kind in (BACKWARD, WEIGHT))
        most[stage] = max(most[stage], now[stage])
    return tuple(most)


def outgoing(table: Table) -> dict[tuple[str, int], int]:
    """(kind, position) to the step of what such work gives: STAY, NEXT or PREVIOUS. Work that gives nothing is not there."""
    ways = {}
    for position, step in enumerate(table.steps()):
        ways[FORWARD, position] = step
        ways[BACKWARD, position + 1] = ways[INPUT, position + 1] = -step
    return ways


def _fail(table: Table, what: str) -> None:
    raise DeclarationError(f"the schedule {table.name} is not valid: {what}")


def _at(entry: Entry) -> str:
    return f"tick {entry.tick}, stage {entry.stage}, {entry.work} ({WORDS[entry.work.kind]})"


def _check_types(table: Table) -> None:
    """Numbers, rows and work of the kinds that `Table` says: a function of the user's may have made it of anything."""
    def row(entries: object) -> bool:
        return isinstance(entries, (tuple, list))

    def whole(numbers: object) -> bool:
        return row(numbers) and all(type(number) is int for number in numbers)

    for name, fits, expected in (
            ("num_microbatches", type(table.num_microbatches) is int, "a whole number"),
            ("latency", type(table.latency) is int, "a whole number"),
            ("live", table.live is None or whole(table.live), "None or a tuple of whole numbers"),
            ("placement", row(table.placement) and len(table.placement) > 0 and all(map(whole, table.placement)),
             "a tuple of tuples of whole numbers, one for each chunk")):
        if not fits:
            _fail(table, f"its {name} is {getattr(table, name)!r}; expected {expected}.")
    if not row(table.ticks):
        _fail(table, f"its ticks are a {type(table.ticks).__name__}; expected a tuple of ticks.")
    for tick, stages in enumerate(table.ticks):
        if not row(stages) or not all(map(row, stages)):
            _fail(table, f"tick {tick} is {stages!r}; expected a tuple with a tuple of Work for each stage.")
        for work in (work for cell in stages for work in cell):
            if not isinstance(work, Work) or type(work.microbatch) is not int or type(work.chunk) is not int:
                _fail(table, f"tick {tick} has {work!r}; expected a Work(kind, microbatch, chunk).")


def _check_form(table: Table) -> None:
    """Sizes that fit together, known kinds, and positions that follow one another on neighbours."""
    if table.latency not in (1, 2):
        _fail(table, f"its latency is {table.latency!r}; a result takes 1 or 2 ticks to another stage.")
    if not table.num_stages or any(len(row) != table.num_stages for row in table.placement):
        _fail(table, "the rows of its placement (one for each chunk) differ in length; each needs an entry for each stage.")
    if sorted(position for row in table.placement for position in row) != list(range(table.num_positions)):
        _fail(table, f"its placement is {table.placement}; it must hold each position from 0 to {table.num_positions - 1} once.")
    stages = table.stages()
    for position, step in enumerate(table.steps()):
        if step is None:
            _fail(table, f"position {position} is on stage {stages[position]} and {position + 1} on stage "
                         f"{stages[position + 1]}; these are no neighbours, and only neighbours exchange results.")
    for tick, row in enumerate(table.ticks):
        if len(row) != table.num_stages:
            _fail(table, f"tick {tick} has work for {len(row)} stages, its placement for {table.num_stages}.")
    if table.live is not None and len(table.live) != table.num_stages:
        _fail(table, f"live has {len(table.live)} numbers; expected one for each of {table.num_stages} stages.")
    for entry in table.entries():
        kind, microbatch, chunk = entry.work
        place = f"tick {entry.tick}, stage {entry.stage}"
        if kind not in KINDS or len(kind) != 1:
            _fail(table, f"{place} has work of kind {kind!r}; known: {', '.join(f'{k} ({WORDS[k]})' for k in KINDS)}.")
        if not 0 <= microbatch < table.num_microbatches:
            _fail(table, f"{place} has {entry.work}, but microbatches go from 0 to {table.num_microbatches - 1}.")
        if not 0 <= chunk < table.num_chunks:
            _fail(table, f"{place} has {entry.work}, but its chunks go from 0 to {table.num_chunks - 1}.")


def _check_once(table: Table) -> dict[tuple[str, int, int], Entry]:
    """(kind, microbatch, position) to where that is done; each once, and none left out."""
    done: dict[tuple[str, int, int], Entry] = {}
    kinds: dict[tuple[int, int], set[str]] = defaultdict(set)
    for entry in table.entries():
        kind, microbatch, chunk = entry.work
        position = table.placement[chunk][entry.stage]
        before = done.setdefault((kind, microbatch, position), entry)
        if before is not entry:
            _fail(table, f"{_at(entry)} was done at tick {before.tick} already.")
        kinds[microbatch, position].add(kind)
    for position, stage in enumerate(table.stages()):
        for microbatch in range(table.num_microbatches):
            found = kinds[microbatch, position]
            where = f"microbatch {microbatch} at position {position} (stage {stage})"
            if FORWARD not in found:
                _fail(table, f"{where} has no forward.")
            if found - {FORWARD} not in ({BACKWARD}, HALVES):
                got = ", ".join(WORDS[kind] for kind in KINDS if kind in found and kind != FORWARD) or "none of them"
                _fail(table, f"{where} needs either a backward or an input half and a weight half; it has {got}.")
    return done


def _check_dependencies(table: Table, done: dict[tuple[str, int, int], Entry]) -> None:
    steps = (*table.steps(), None)
    for (kind, microbatch, position), entry in done.items():
        if kind == WEIGHT:
            _check_after(table, entry, done[INPUT, microbatch, position], STAY)
            continue
        if kind != FORWARD:
            _check_after(table, entry, done[FORWARD, microbatch, position], STAY)
        neighbour = position - 1 if kind == FORWARD else position + 1
        if 0 <= neighbour < table.num_positions:
            kinds = (FORWARD,) if kind == FORWARD else (BACKWARD, INPUT)
            source = next(done[k, microbatch, neighbour] for k in kinds if (k, microbatch, neighbour) in done)
            _check_after(table, entry, source, steps[min(position, neighbour)])


def _check_after(table: Table, entry: Entry, source: Entry, step: int) -> None:
    """Whether what `source` gives is there when `entry` takes it."""
    if step == STAY:
        if (source.tick, source.index) >= (entry.tick, entry.index):
            _fail(table, f"{_at(entry)} needs {_at(source)}, which comes later; it must come before it.")
    elif source.tick + table.latency > entry.tick:
        _fail(table, f"{_at(entry)} needs {_at(source)}, whose result can be used from tick {source.tick + table.latency} on "
                     f"(latency {table.latency}).")


def _check_messages(table: Table) -> None:
    ways = outgoing(table)
    sent: Counter[tuple[int, int, int]] = Counter()
    for entry in table.entries():
        step = ways.get((entry.work.kind, table.placement[entry.work.chunk][entry.stage]), STAY)
        if step == STAY:
            continue
        sent[entry.tick, entry.stage, step] += 1
        if sent[entry.tick, entry.stage, step] > 1:
            _fail(table, f"at tick {entry.tick} stage {entry.stage} sends two results to the {_way(step)} stage, the second from "
                         f"{entry.work}; one tick has room for one each way. Move one of them to another tick.")


def _way(step: int) -> str:
    return "next" if step == NEXT else "previous"


def _check_live(table: Table) -> None:
    for stage, (count, bound) in enumerate(zip(live_counts(table), table.live or ())):
        if count > bound:
            _fail(table, f"stage {stage} has up to {count} microbatches live; declared are at most {bound} (live).")
