"""The table of a pipeline schedule: which stage does which work at which tick, and nothing else.

The model is cut into `chunks * num_stages` positions, from its input (0) to its output (the last). A stage is one place along
the `pipe` axis and holds `chunks` of the positions: `placement[chunk][stage]` is the position. Work is done on one microbatch
at one position:

    F   forward: takes the activation of the position before, leaves residuals, gives an activation to the position after
    B   backward: takes the gradient of the position after, frees the residuals, gives a gradient to the position before
    I   its input half: takes and gives the same gradients, leaves cotangents for the weight half
    W   its weight half: frees the residuals and those cotangents, gives nothing

The contract of a table, which `checker` holds it to:

- Every stage does the pieces of its list in their order, all within the tick.
- A result for another stage is used `latency` ticks later at the earliest (1: the exchange follows the tick's work; 2: it goes
  on beside the next tick's work). A result that stays on its stage can be used by the next piece already.
- Positions that follow one another lie on the same stage or on neighbours, where the last and the first are neighbours too.
- In one tick a stage sends at most one activation or gradient to the next stage, and at most one to the previous one.
- Every microbatch goes through every position once: F, then B or both halves.
- A microbatch at a position is live on its stage from F until B or W. No more are live at once than `live` says.
"""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

FORWARD, BACKWARD, INPUT, WEIGHT = KINDS = "FBIW"
WORDS = {FORWARD: "forward", BACKWARD: "backward", INPUT: "input half", WEIGHT: "weight half"}
STAY, NEXT, PREVIOUS = 0, 1, -1                # where a result goes, as a step along the stages


class Work(NamedTuple):
    """One piece of work: kind is one of KINDS."""
    kind: str
    microbatch: int
    chunk: int = 0

    def __str__(self):
        return f"{self.kind}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


class Entry(NamedTuple):
    """A piece of work and its place: the `index`-th of the list of `stage` at `tick`."""
    tick: int
    stage: int
    index: int
    work: Work


@dataclasses.dataclass(frozen=True)
class Table:
    """A schedule.

    Attributes:
      name: for messages and pictures.
      num_microbatches: of one step.
      placement: [chunk][stage], the position in the model.
      ticks: [tick][stage], the work in order.
      latency: ticks until another stage can use a result, 1 or 2.
      live: [stage], the most microbatches (times chunks) that are live at once; None where nothing is declared.
    """
    name: str
    num_microbatches: int
    placement: tuple[tuple[int, ...], ...]
    ticks: tuple[tuple[tuple[Work, ...], ...], ...]
    latency: int = 1
    live: tuple[int, ...] | None = None

    @property
    def num_stages(self) -> int:
        """Places along the pipeline."""
        return len(self.placement[0])

    @property
    def num_chunks(self) -> int:
        """Positions that each stage holds."""
        return len(self.placement)

    @property
    def num_positions(self) -> int:
        """Parts into which the model is cut."""
        return self.num_stages * self.num_chunks

    @property
    def width(self) -> int:
        """The most pieces of work that a stage does in one tick."""
        return max((len(work) for tick in self.ticks for work in tick), default=0)

    def stages(self) -> tuple[int, ...]:
        """The stage that holds each position."""
        where = {position: stage for row in self.placement for stage, position in enumerate(row)}
        return tuple(where[position] for position in range(self.num_positions))

    def entries(self) -> Iterator[Entry]:
        """All work, tick by tick, stage by stage, in order."""
        for tick, row in enumerate(self.ticks):
            for stage, works in enumerate(row):
                for index, work in enumerate(works):
                    yield Entry(tick, stage, index, work)

    def steps(self) -> tuple[int, ...]:
        """[position] the way of an activation to the position after it: STAY, NEXT or PREVIOUS, or None where there is no
        such way. The gradient goes back the opposite way. Of two stages, which are neighbours both ways, activations take
        NEXT."""
        stages = self.stages()
        return tuple(step_between(one, other, self.num_stages) for one, other in zip(stages, stages[1:]))

    def links(self) -> frozenset[tuple[int, int]]:
        """(stage, the next stage) for every two neighbours that exchange anything."""
        stages, pairs = self.stages(), set()
        for position, step in enumerate(self.steps()):
            if step in (NEXT, PREVIOUS):
                one, other = stages[position], stages[position + 1]
                pairs.add((one, other) if step == NEXT else (other, one))
        return frozenset(pairs)


def step_between(one: int, other: int, num_stages: int) -> int | None:
    """The step from a stage to another; None where they are no neighbours."""
    if one == other:
        return STAY
    if (other - one) % num_stages == 1:
        return NEXT
    return PREVIOUS if (one - other) % num_stages == 1 else None


def looped(num_stages: int, num_chunks: int = 1) -> tuple[tuple[int, ...], ...]:
    """The placement that goes round: chunk c of stage s is position c * num_stages + s (Narayanan et al. 2021)."""
    return tuple(tuple(range(chunk * num_stages, (chunk + 1) * num_stages)) for chunk in range(num_chunks))


def folded(num_stages: int) -> tuple[tuple[int, ...], ...]:
    """The placement that goes down and comes back: stage s holds s and 2 * num_stages - 1 - s (Qi et al. 2024)."""
    return tuple(range(num_stages)), tuple(range(2 * num_stages - 1, num_stages - 1, -1))


def laid_out(entries: dict[tuple[int, int], list[Work]], num_stages: int) -> tuple[tuple[tuple[Work, ...], ...], ...]:
    """(tick, stage) to work, as a table's `ticks`."""
    length = max((tick for tick, _ in entries), default=-1) + 1
    return tuple(tuple(tuple(entries.get((tick, stage), ())) for stage in range(num_stages)) for tick in range(length))
