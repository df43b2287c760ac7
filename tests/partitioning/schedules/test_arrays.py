"""The arrays of a table, followed by hand with labels for values: every read finds what was written for it."""

import collections

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partitioning.schedules import SCHEDULES, from_csv, live_counts, make, plan
from partitioning.schedules.arrays import ACTIVATION, CODES, GRADIENT
from partitioning.schedules.table import BACKWARD, FORWARD, INPUT, WEIGHT
from tests.partitioning.schedules.test_tables import made

KINDS = {code: kind for kind, code in CODES.items()}


def follow(table, keep_outputs):
    """Runs the plan with tuples instead of arrays, as the executor does; returns how many pieces were done."""
    arrays, last = plan(table, keep_outputs), table.num_positions - 1
    stages = range(table.num_stages)
    buffers = {name: [dict() for _ in stages] for name in ("activations", "gradients", "residuals", "cotangents")}
    outboxes, count = [], collections.Counter()
    for tick in range(len(table.ticks)):
        outbox = {}
        for stage in stages:
            for lane in range(len(arrays.lanes)):
                at = tick, stage, lane
                kind = KINDS.get(int(arrays.kind[at]))
                if kind is None:
                    continue
                microbatch, position = int(arrays.microbatch[at]), int(arrays.position[at])
                count[kind, microbatch, position] += 1
                mine = {name: buffer[stage] for name, buffer in buffers.items()}
                label = ("activation" if kind == FORWARD else "gradient", microbatch, position)
                if kind == FORWARD:
                    if position:
                        assert mine["activations"].pop(arrays.take[at]) == ("activation", microbatch, position - 1)
                    assert mine["residuals"].setdefault(arrays.residual[at], (microbatch, position)) == (microbatch, position)
                else:
                    assert mine["residuals"][arrays.residual[at]] == (microbatch, position)
                    if kind == WEIGHT:
                        assert mine["cotangents"].pop(arrays.cotangent[at]) == (microbatch, position)
                    elif position < last:
                        assert mine["gradients"].pop(arrays.take[at]) == ("gradient", microbatch, position + 1)
                    elif keep_outputs:
                        assert mine["gradients"].pop(arrays.take[at]) == ("activation", microbatch, last)
                    if kind == INPUT:
                        assert arrays.cotangent[at] not in mine["cotangents"]
                        mine["cotangents"][arrays.cotangent[at]] = (microbatch, position)
                    if kind in (BACKWARD, WEIGHT):
                        del mine["residuals"][arrays.residual[at]]
                if arrays.keep[at] >= 0:
                    buffer = mine["activations" if kind == FORWARD and position < last else "gradients"]
                    assert arrays.keep[at] not in buffer
                    buffer[arrays.keep[at]] = label
                if arrays.send[at]:
                    assert (stage, arrays.send[at]) not in outbox
                    outbox[stage, int(arrays.send[at])] = label
        outboxes.append(outbox)
        came = outboxes[tick - table.latency + 1] if tick >= table.latency - 1 else {}
        for pairs, step, side in ((arrays.to_next, 1, 0), (arrays.to_previous, -1, 1)):
            for source, destination in pairs:
                what = arrays.arrival[tick, destination, side]
                if what:
                    buffer = buffers["activations" if what == ACTIVATION else "gradients"][destination]
                    label = came[source, step]
                    assert label[0] == {ACTIVATION: "activation", GRADIENT: "gradient"}[what]
                    assert arrays.arrival_slot[tick, destination, side] not in buffer
                    buffer[arrays.arrival_slot[tick, destination, side]] = label
    assert not any(buffer for each in buffers.values() for buffer in each)     # everything was taken
    return arrays, count


@pytest.mark.parametrize("keep_outputs", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
@settings(max_examples=25, deadline=None)
@given(stages=st.integers(1, 6), microbatches=st.integers(1, 12), latency=st.integers(1, 2))
def test_every_read_finds_what_was_written_for_it(name, keep_outputs, stages, microbatches, latency):
    table = made(name, stages, microbatches, latency)
    arrays, count = follow(table, keep_outputs)
    assert set(count.values()) == {1} and len(count) == sum(1 for _ in table.entries())
    assert arrays.slots.residuals == max(live_counts(table))           # as small as the peak


@pytest.mark.parametrize("name, lanes", [("gpipe", "FB"), ("one_f_one_b", "FB"), ("one_f_one_b_alternating", "FB"),
                                         ("zero_bubble", "FIW"), ("zero_bubble_paired", "FIW")])
def test_a_lane_holds_one_kind_of_work(name, lanes):
    arrays = plan(make(name, 4, 8))
    assert arrays.lanes == lanes
    for lane, kind in enumerate(lanes):
        assert set(np.unique(arrays.kind[:, :, lane])) == {0, CODES[kind]}


def test_there_are_lanes_for_lists_in_any_order():
    table = from_csv("0,F0,F1 B0,B1 F2,B2", "mine")
    assert plan(table).lanes == "FBF"
    follow(table, True)
