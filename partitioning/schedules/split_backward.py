"""Zero-bubble schedules: the backward is split, and weight halves, which nobody waits for, fill what would be bubbles.

Both are built tick by tick, one piece of work per tick: each stage takes the first piece of an order of preference that can be
done. The three kinds of work take about the same time, so neighbours lose little by waiting for each other. All stages join at
the end of a step, so the first ticks of the last stage, p - 1 of them, are lost whatever the schedule (the papers begin the
next step meanwhile, which needs an optimizer that can be undone).
"""

from collections.abc import Callable, Iterator

from partitioning.schedules.table import FORWARD, INPUT, WEIGHT, Table, Work, folded, looped

Done = dict[tuple[str, int], list[int]]        # (kind, position): the ticks of its microbatches, in order
Preference = Callable[[int, Done], Iterator[tuple[str, int]]]  # of a stage: (kind, chunk), the most urgent first


def zero_bubble(num_stages: int, num_microbatches: int, latency: int = 1) -> Table:
    """ZB-H1 (Qi et al. 2023, arXiv:2401.10241): as 1F1B with a third of its bubble, and no stage has more than p live."""
    placement, bound = looped(num_stages), latency * num_stages

    def prefer(stage: int, done: Done) -> Iterator[tuple[str, int]]:
        forwards, backwards, weights = (len(done[kind, stage]) for kind in (FORWARD, INPUT, WEIGHT))
        behind = forwards - backwards < latency * (num_stages - stage)   # what 1F1B sends ahead before it takes turns
        first = (FORWARD, INPUT) if behind else (INPUT, FORWARD)
        for kind in (*first, WEIGHT):
            if kind != FORWARD or forwards - weights < bound:
                yield kind, 0

    ticks = _filled(placement, num_microbatches, latency, prefer)
    return Table("zero_bubble", num_microbatches, placement, ticks, latency, (min(bound, num_microbatches),) * num_stages)


def zero_bubble_v(num_stages: int, num_microbatches: int, latency: int = 1) -> Table:
    """ZB-V (Qi et al. 2024, arXiv:2405.15362): positions go down the stages and come back, so that the first stage is the last,
    too. No stage has more than 2 p halves live, as much as p microbatches."""
    placement, bound = folded(num_stages), 2 * latency * num_stages

    def prefer(stage: int, done: Done) -> Iterator[tuple[str, int]]:
        live = sum(len(done[FORWARD, row[stage]]) - len(done[WEIGHT, row[stage]]) for row in placement)
        yield INPUT, 0
        yield INPUT, 1
        if live < bound:
            yield FORWARD, 1
        if live < bound - 1:                                    # the way down leaves room for the way back, or all would stop
            yield FORWARD, 0
        yield WEIGHT, 0
        yield WEIGHT, 1

    ticks = _filled(placement, num_microbatches, latency, prefer)
    return Table("zero_bubble_v", num_microbatches, placement, ticks, latency, (min(bound, 2 * num_microbatches),) * num_stages)


def _filled(placement: tuple[tuple[int, ...], ...], num_microbatches: int, latency: int,
            prefer: Preference) -> tuple[tuple[tuple[Work, ...], ...], ...]:
    """The ticks that come of taking what is preferred and possible, until all is done. `prefer` must leave something possible."""
    table = Table("", num_microbatches, placement, (), latency)
    last = table.num_positions - 1
    delays = [latency if step else 1 for step in table.steps()]  # to the position after, and back
    done: Done = {(kind, position): [] for kind in (FORWARD, INPUT, WEIGHT) for position in range(last + 1)}

    def possible(kind: str, position: int, tick: int) -> bool:
        number = len(done[kind, position])                      # the microbatch that would be next
        if kind == WEIGHT:
            return number < len(done[INPUT, position])
        if kind == INPUT and number >= len(done[FORWARD, position]):
            return False
        if position == (0 if kind == FORWARD else last):
            return number < num_microbatches
        source, delay = (position - 1, delays[position - 1]) if kind == FORWARD else (position + 1, delays[position])
        came = done[kind, source]
        return number < len(came) and came[number] + delay <= tick

    ticks: list[tuple[tuple[Work, ...], ...]] = []
    left = 3 * num_microbatches * (last + 1)
    while left:
        row = []
        for stage in range(table.num_stages):
            chosen = next(((kind, chunk) for kind, chunk in prefer(stage, done)
                           if possible(kind, placement[chunk][stage], len(ticks))), None)
            if chosen is None:
                row.append(())
                continue
            kind, chunk = chosen
            times = done[kind, placement[chunk][stage]]
            row.append((Work(kind, len(times), chunk),))
            times.append(len(ticks))                            # nobody can use it before the next tick
            left -= 1
        ticks.append(tuple(row))
    return tuple(ticks)
