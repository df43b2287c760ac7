"""A table as arrays for an executor: for every tick and stage what to do, which buffers to read and where to put what arrives.

Each stage has four ring buffers, the same on all of them:

    activations   received, from when they arrive until the forward that takes them
    gradients     received, from when they arrive until the backward or input half that takes them
    residuals     from a forward until the backward or weight half (an input half reads them, too)
    cotangents    what an input half leaves, until the weight half

Slots are given in order of time, each time the first that is free, so there are as many as are ever in use at once on some
stage (interval colouring). A slot that is read can be written by a later piece of the same tick, or by what arrives after it.

One tick of the executor: do the pieces in order; a result that stays goes into its slot at once; the others are exchanged, one
to the next stage and one to the previous stage, and put where `arrival_slot` says. With latency 2 it exchanges what the tick
before gave.

The pieces of a tick stand in lanes, each for one kind of work, so that a program for a lane need not know the others. There are
as many lanes as it takes for the kinds of every list to be found in them in order.
"""

import dataclasses
import heapq
from collections import defaultdict

import numpy as np

from partitioning.schedules.checker import outgoing
from partitioning.schedules.table import BACKWARD, FORWARD, INPUT, KINDS, NEXT, STAY, WEIGHT, Table

CODES = {kind: code for code, kind in enumerate(KINDS, 1)}    # 0 is no work
NOTHING, ACTIVATION, GRADIENT = 0, 1, 2
FROM_PREVIOUS, FROM_NEXT = 0, 1


@dataclasses.dataclass(frozen=True)
class Slots:
    """How many slots each buffer has."""
    activations: int
    gradients: int
    residuals: int
    cotangents: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """Arrays of int32. Those of work are [tick, stage, lane], -1 where there is nothing to say.

    Attributes:
      lanes: the kind of work that each lane holds, a letter of KINDS.
      kind: 0 for none, else one of CODES: 1 forward, 2 backward, 3 input half, 4 weight half.
      microbatch, chunk, position: of the work.
      take: the slot of the activation (forward) or gradient (backward, input half) to read; -1 at the model's end where that
        comes from the data or the loss.
      residual: the slot that a forward writes and the others read.
      cotangent: the slot that an input half writes and a weight half reads.
      keep: the slot of activations (forward) or gradients (backward, input half) for a result that stays on its stage. If
        outputs are kept, the last forward has a slot of gradients, which its backward or input half takes.
      send: the step of a result that another stage takes: 1 to the next, -1 to the previous, else 0.
      arrival: [tick, stage, FROM_PREVIOUS or FROM_NEXT] what the exchange brings once the tick's work is done: NOTHING,
        ACTIVATION or GRADIENT.
      arrival_slot: the same shape, its slot in that buffer.
      slots: of each buffer.
      to_next, to_previous: (source, destination) of the two exchanges.
    """
    lanes: str
    kind: np.ndarray
    microbatch: np.ndarray
    chunk: np.ndarray
    position: np.ndarray
    take: np.ndarray
    residual: np.ndarray
    cotangent: np.ndarray
    keep: np.ndarray
    send: np.ndarray
    arrival: np.ndarray
    arrival_slot: np.ndarray
    slots: Slots
    to_next: tuple[tuple[int, int], ...]
    to_previous: tuple[tuple[int, int], ...]


def plan(table: Table, keep_outputs: bool = False) -> Plan:
    """The arrays of a table that `check` has passed.

    Args:
      table: the schedule.
      keep_outputs: whether what the last forward gives waits for its backward or input half, in a slot of gradients.
    """
    lanes = _lanes(table)
    length, stages, width = len(table.ticks), table.num_stages, len(lanes)
    work = {name: np.full((length, stages, width), -1, np.int32)
            for name in ("microbatch", "chunk", "position", "take", "residual", "cotangent", "keep")}
    kind, send = np.zeros((2, length, stages, width), np.int32)
    arrival, arrival_slot = np.zeros((length, stages, 2), np.int32), np.full((length, stages, 2), -1, np.int32)
    done = {}                                                   # (kind, microbatch, position): (tick, stage, index)
    for tick, stage, index, (name, microbatch, chunk) in table.entries():
        lane = _in_lanes("".join(work.kind for work in table.ticks[tick][stage]), lanes)[index]
        place, position = (tick, stage, lane), table.placement[chunk][stage]
        done[name, microbatch, position] = place
        kind[place], work["microbatch"][place] = CODES[name], microbatch
        work["chunk"][place], work["position"][place] = chunk, position

    def time(place: tuple[int, int, int]) -> int:
        return place[0] * (width + 1) + place[2]

    ways = outgoing(table)
    residuals, cotangents, activations, gradients = (defaultdict(list) for _ in range(4))   # stage: what is to be held
    for (name, microbatch, position), place in done.items():
        stage = place[1]
        if name == FORWARD:
            readers = [done[k, microbatch, position] for k in (BACKWARD, INPUT, WEIGHT) if (k, microbatch, position) in done]
            residuals[stage].append((time(place), max(map(time, readers)), [("residual", each) for each in (place, *readers)]))
        if name == INPUT:
            reader = done[WEIGHT, microbatch, position]
            cotangents[stage].append((time(place), time(reader), [("cotangent", place), ("cotangent", reader)]))
        forward = name == FORWARD
        if keep_outputs and forward and position == table.num_positions - 1:
            reader = next(done[k, microbatch, position] for k in (BACKWARD, INPUT) if (k, microbatch, position) in done)
            gradients[stage].append((time(place), time(reader), [("keep", place), ("take", reader)]))
        if (name, position) not in ways:
            continue
        step = ways[name, position]
        readers = [(FORWARD, microbatch, position + 1)] if forward else [(k, microbatch, position - 1) for k in (BACKWARD, INPUT)]
        reader = next(done[key] for key in readers if key in done)
        if step == STAY:
            start, writers = time(place), [("keep", place)]
        else:
            send[place] = step
            at = (place[0] + table.latency - 1, reader[1], FROM_PREVIOUS if step == NEXT else FROM_NEXT)
            arrival[at] = ACTIVATION if forward else GRADIENT
            start, writers = at[0] * (width + 1) + width, [("arrival_slot", at)]
        (activations if forward else gradients)[reader[1]].append((start, time(reader), [*writers, ("take", reader)]))

    arrays = work | {"arrival_slot": arrival_slot}
    counts = [max((_colour(held, arrays) for held in buffer.values()), default=0)
              for buffer in (activations, gradients, residuals, cotangents)]
    links = sorted(table.links())
    return Plan(lanes=lanes, kind=kind, send=send, arrival=arrival, **arrays, slots=Slots(*counts), to_next=tuple(links),
                to_previous=tuple((other, one) for one, other in links))


def _lanes(table: Table) -> str:
    """The kind of work of each lane."""
    lists = {"".join(work.kind for work in works) for row in table.ticks for works in row}
    lanes = ""
    for kinds in sorted(lists, key=lambda kinds: (-len(kinds), [KINDS.index(kind) for kind in kinds])):
        found = _in_lanes(kinds, lanes)
        lanes += kinds[len(found):]
    return lanes


def _in_lanes(kinds: str, lanes: str) -> list[int]:
    """Rising lanes for the kinds of a list, each the first that there is; fewer than there are kinds where lanes run out."""
    found: list[int] = []
    for kind in kinds:
        lane = lanes.find(kind, found[-1] + 1 if found else 0)
        if lane < 0:
            break
        found.append(lane)
    return found


def _colour(held: list, arrays: dict[str, np.ndarray]) -> int:
    """Gives one buffer's contents of one stage their slots, and returns how many that takes.

    Args:
      held: (first time, last time, [(array, index) to write the slot to]).
      arrays: by name.
    """
    free: list[int] = []
    busy: list[tuple[int, int]] = []                            # (last time, slot)
    count = 0
    for first, last, places in sorted(held, key=lambda one: one[:2]):
        while busy and busy[0][0] < first:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            heapq.heappush(free, count)
            count += 1
        slot = heapq.heappop(free)
        heapq.heappush(busy, (last, slot))
        for name, index in places:
            arrays[name][index] = slot
    return count
