"""What a table costs: its bubble in ticks and in time, and how much is live.

In time, a stage begins a tick when it has finished the one before and its neighbours have sent what they exchange: they wait
for each other at each tick, whether or not there is anything to send, for the exchange is part of every tick. With latency 2
the exchange goes on beside the next tick's work, so that a stage waits for what its neighbours did two ticks ago.
"""

import dataclasses

import numpy as np

from partitioning.schedules.checker import live_counts
from partitioning.schedules.table import BACKWARD, FORWARD, INPUT, WEIGHT, Table


@dataclasses.dataclass(frozen=True)
class Costs:
    """Time of a stage's work on one microbatch, all its chunks together, in any unit. A whole backward takes both halves'."""
    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0

    @property
    def backward(self) -> float:
        """Of a backward that is not split."""
        return self.input + self.weight

    def of(self, kind: str, num_chunks: int) -> float:
        """Of one piece of work, on one of the chunks."""
        whole = {FORWARD: self.forward, BACKWARD: self.backward, INPUT: self.input, WEIGHT: self.weight}[kind]
        return whole / num_chunks


@dataclasses.dataclass(frozen=True)
class Figures:
    """What a table comes to.

    Attributes:
      ticks: their number.
      slots: the sum over ticks of the longest list of work; the time in lockstep if every piece took one.
      bubble: idle share of slots times stages.
      time: until the last stage has finished, in the unit of the costs.
      time_bubble: idle share of time times stages.
      time_ratio: time over that of the work alone; 1 is ideal.
      live: [stage], the most microbatches live at once, in whole stages: one chunk of v counts 1/v.
    """
    ticks: int
    slots: int
    bubble: float
    time: float
    time_bubble: float
    time_ratio: float
    live: tuple[float, ...]


def timeline(table: Table, costs: Costs = Costs()) -> tuple[np.ndarray, np.ndarray]:
    """(start, end) of every tick on every stage, both float64 [tick, stage]."""
    prices = {kind: costs.of(kind, table.num_chunks) for kind in (FORWARD, BACKWARD, INPUT, WEIGHT)}
    length = np.zeros((len(table.ticks), table.num_stages))
    for tick, stage, _, work in table.entries():
        length[tick, stage] += prices[work.kind]
    waits = np.eye(table.num_stages, dtype=bool)
    for one, other in table.links():
        waits[one, other] = waits[other, one] = True
    start, end = np.zeros_like(length), np.zeros_like(length)
    for tick in range(len(length)):
        if tick:
            start[tick] = end[tick - 1]
        if tick >= table.latency:
            start[tick] = np.maximum(start[tick], np.where(waits, end[tick - table.latency], 0).max(axis=1))
        end[tick] = start[tick] + length[tick]
    return start, end


def measure(table: Table, costs: Costs = Costs()) -> Figures:
    """The figures of a valid table under these costs."""
    _, end = timeline(table, costs)
    counts = [[len(works) for works in row] for row in table.ticks]
    slots, pieces = sum(map(max, counts)), sum(map(sum, counts))
    ideal, time = table.num_microbatches * (costs.forward + costs.backward), float(end.max(initial=0))
    return Figures(len(table.ticks), slots, 1 - pieces / (slots * table.num_stages), time, 1 - ideal / time, time / ideal,
                   tuple(count / table.num_chunks for count in live_counts(table)))
