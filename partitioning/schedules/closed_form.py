"""Schedules whose ticks follow from a formula: GPipe, 1F1B, interleaved 1F1B, and 1F1B with late weight halves.

A forward and a backward share a tick wherever both are due. Neighbours wait for each other at every tick, so a tick takes as
long as the longest work in it; a pair takes the same time on every stage, while one piece per tick makes forwards wait for
backwards. In every schedule here microbatches are taken in order, so that their gradients are added in the same order.
"""

from collections import defaultdict

from partitioning.declaration import DeclarationError
from partitioning.schedules.table import BACKWARD, FORWARD, INPUT, WEIGHT, Table, Work, laid_out, looped


def gpipe(num_stages: int, num_microbatches: int, latency: int = 1) -> Table:
    """GPipe (Huang et al. 2019, arXiv:1811.06965): all forwards, then all backwards. Every microbatch is live at once."""
    last, entries = num_stages - 1, defaultdict(list)
    turn = num_microbatches + latency * last                    # the last stage has done its last forward
    for stage in range(num_stages):
        for microbatch in range(num_microbatches):
            entries[latency * stage + microbatch, stage].append(Work(FORWARD, microbatch))
            entries[turn + latency * (last - stage) + microbatch, stage].append(Work(BACKWARD, microbatch))
    return Table("gpipe", num_microbatches, looped(num_stages), laid_out(entries, num_stages), latency,
                 (num_microbatches,) * num_stages)


def one_f_one_b(num_stages: int, num_microbatches: int, latency: int = 1) -> Table:
    """1F1B (Narayanan et al. 2019, arXiv:1806.03377, without its stale weights): each microbatch goes back as soon as it has
    come through. Stage s has at most 2 (p - s) - 1 live of p stages (with latency 1), however many there are."""
    return _paired("one_f_one_b", num_stages, num_microbatches, 1, latency, num_microbatches)


def one_f_one_b_alternating(num_stages: int, num_microbatches: int) -> Table:
    """1F1B as it is drawn, one piece of work per tick: stage s has only p - s microbatches live, but where neighbours wait
    for each other at every tick forwards take as long as backwards."""
    last, entries = num_stages - 1, defaultdict(list)
    for stage in range(num_stages):
        ahead = num_stages - stage                              # forwards before the first backward
        for microbatch in range(num_microbatches):
            tick = stage + microbatch if microbatch < ahead else 2 * microbatch + stage
            entries[tick, stage].append(Work(FORWARD, microbatch))
            entries[2 * last + 1 - stage + 2 * microbatch, stage].append(Work(BACKWARD, microbatch))
    live = tuple(min(num_microbatches, num_stages - stage) for stage in range(num_stages))
    return Table("one_f_one_b_alternating", num_microbatches, looped(num_stages), laid_out(entries, num_stages), 1, live)


def zero_bubble_paired(num_stages: int, num_microbatches: int, latency: int = 1) -> Table:
    """1F1B of whose backwards the weight halves wait until every stage has begun to go backward, all three kinds in one tick.
    The bubble lacks 1F1B's weight halves, at any costs; schedules with one piece per tick do better only while the three kinds
    take the same time. Stage s has at most 2 p - 1 - s live (with latency 1)."""
    last, entries = num_stages - 1, defaultdict(list)
    for stage in range(num_stages):
        for kind, start in ((FORWARD, latency * stage), (INPUT, latency * (2 * last - stage)), (WEIGHT, 2 * latency * last)):
            for microbatch in range(num_microbatches):
                entries[start + microbatch, stage].append(Work(kind, microbatch))
    live = tuple(min(num_microbatches, latency * (2 * last - stage) + 1) for stage in range(num_stages))
    return Table("zero_bubble_paired", num_microbatches, looped(num_stages), laid_out(entries, num_stages), latency, live)


def interleaved(num_stages: int, num_microbatches: int, num_chunks: int = 2, latency: int = 1) -> Table:
    """Interleaved 1F1B (Narayanan et al. 2021, arXiv:2104.04473): each stage holds `num_chunks` positions, p apart. A group of
    microbatches goes through one chunk after the other; it is as large as the way round is long.

    Raises:
      DeclarationError: the groups do not divide the microbatches.
    """
    group = num_stages * latency
    if num_microbatches % group:
        below = num_microbatches // group * group
        fits = " or ".join(str(number) for number in (below, below + group) if number)
        raise DeclarationError(
            f"config.pipeline.num_microbatches = {num_microbatches} does not suit the schedule interleaved: microbatches go "
            f"round in groups of {group} ({num_stages} stages{f', latency {latency}' if latency > 1 else ''}). "
            f"The nearest that {'work' if below else 'works'}: {fits}.")
    return _paired("interleaved", num_stages, num_microbatches, num_chunks, latency, group)


def _paired(name: str, num_stages: int, num_microbatches: int, num_chunks: int, latency: int, group: int) -> Table:
    """Forwards without a gap from tick `latency * stage` on, backwards without one from when the first microbatch comes back."""
    last, entries = num_stages - 1, defaultdict(list)
    turn = latency * last + (num_chunks - 1) * group            # the first microbatch is at the last position
    order = [(chunk, microbatch) for first in range(0, num_microbatches, group) for chunk in range(num_chunks)
             for microbatch in range(first, first + group)]
    live = []
    for stage in range(num_stages):
        start = turn + latency * (last - stage)
        for place, (chunk, microbatch) in enumerate(order):
            entries[latency * stage + place, stage].append(Work(FORWARD, microbatch, chunk))
        for place, (chunk, microbatch) in enumerate(order):
            entries[start + place, stage].append(Work(BACKWARD, microbatch, num_chunks - 1 - chunk))
        live.append(min(len(order), start - latency * stage + 1))
    return Table(name, num_microbatches, looped(num_stages, num_chunks), laid_out(entries, num_stages), latency, tuple(live))
