"""What the pictures of a schedule say in words: the same in text and on a page."""

from collections.abc import Sequence

from partitioning.schedules.figures import Costs, Figures
from partitioning.schedules.table import BACKWARD, FORWARD, INPUT, KINDS, WEIGHT, WORDS, Table


def size_line(table: Table) -> str:
    """The schedule and its sizes."""
    sizes = [_count(table.num_stages, "stage"), _count(table.num_microbatches, "microbatch", "es"),
             _count(len(table.ticks), "tick")]
    sizes += [f"{table.num_chunks} chunks of the model on each stage"] if table.num_chunks > 1 else []
    sizes += [f"results used {table.latency} ticks later"] if table.latency > 1 else []
    return f"{table.name}: {', '.join(sizes)}"


def bubble_line(figures: Figures, costs: Costs, table: Table) -> str:
    """The bubble, and what the time was reckoned with."""
    prices = {FORWARD: costs.forward, BACKWARD: costs.backward, INPUT: costs.input, WEIGHT: costs.weight}
    said = ", ".join(f"{WORDS[kind]} {prices[kind]:g}" for kind in kinds_of(table))
    return (f"idle: {figures.bubble:.1%} in ticks, {figures.time_bubble:.1%} of the time, which is {figures.time_ratio:.2f} of "
            f"the ideal (modelled: {said}; neighbours wait for each other at each tick)")


def live_line(figures: Figures, table: Table, shown: Sequence[int]) -> str:
    """The most microbatches that are live on each stage; on the stages `shown`, if not all are."""
    numbers = [f"{figures.live[stage]:g}" for stage in shown]
    if len(shown) < table.num_stages:
        numbers.insert(len(shown) // 2, "...")
    return f"live at once on each stage: {' '.join(numbers)} of {_count(table.num_microbatches, 'microbatch', 'es')}"


def kinds_of(table: Table) -> list[str]:
    """The kinds of work that a table has, in the order of KINDS."""
    found = {entry.work.kind for entry in table.entries()}
    return [kind for kind in KINDS if kind in found]


def legend(table: Table) -> list[str]:
    """What the letters stand for."""
    return [f"{kind} {WORDS[kind]}" for kind in kinds_of(table)]


def ends(count: int, most: int) -> tuple[list[int], int]:
    """The first and last of `count` things, `most` in all, and how many are left out between them."""
    if count <= most:
        return list(range(count)), 0
    first = most - most // 2
    return [*range(first), *range(count - most // 2, count)], count - most


def _count(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{plural if number != 1 else ''}"
