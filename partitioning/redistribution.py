"""From the order in which layers rest, an equal run of them on each stage, to the positions that a schedule gives the stages.

Each stage sends as many blocks as it holds chunks, and gets as many. They go in rounds, in each of which every stage sends one
block and gets one, so that a round is one permute (which is possible whatever the placement: a bipartite graph in which all
have the same degree falls into perfect matchings). Checkpoints and optimizers know the order at rest alone.
"""

import dataclasses
from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp

from partitioning.schedules.table import Table


@dataclasses.dataclass(frozen=True)
class Round:
    """One permute: `pairs` of (source, destination), [stage] the block at rest that it sends, [stage] the chunk that it gets."""
    pairs: tuple[tuple[int, int], ...]
    block: tuple[int, ...]
    chunk: tuple[int, ...]


def rounds(table: Table) -> tuple[Round, ...]:
    """The rounds of a table; none where stages hold just what rests on them."""
    chunks, stages = table.num_chunks, table.num_stages
    goals = {row[stage]: (stage, chunk) for chunk, row in enumerate(table.placement) for stage in range(stages)}
    if all(goals[position] == divmod(position, chunks) for position in goals):
        return ()
    left: dict[int, dict[int, list[tuple[int, int]]]] = {source: defaultdict(list) for source in range(stages)}
    for position, (stage, chunk) in goals.items():
        left[position // chunks][stage].append((position % chunks, chunk))
    out = []
    for _ in range(chunks):
        matched = _matching({source: [stage for stage in found if found[stage]] for source, found in left.items()})
        block, chunk = [0] * stages, [0] * stages
        for destination, source in matched.items():
            block[source], chunk[destination] = left[source][destination].pop()
        out.append(Round(tuple(sorted((source, stage) for stage, source in matched.items())), tuple(block), tuple(chunk)))
    return tuple(out)


def _matching(wanted: dict[int, list[int]]) -> dict[int, int]:
    """Destination to source, each once (Kuhn's algorithm)."""
    taken: dict[int, int] = {}

    def place(source: int, tried: set[int]) -> bool:
        for destination in wanted[source]:
            if destination not in tried:
                tried.add(destination)
                if destination not in taken or place(taken[destination], tried):
                    taken[destination] = source
                    return True
        return False

    for source in wanted:
        place(source, set())
    return taken


def to_positions(tree: Any, plan: tuple[Round, ...], axis: str) -> Any:
    """A stage's arrays as they rest, [its layers, ...], to chunk after chunk; in a program that is manual over `axis`."""
    return _moved(tree, [(one.pairs, one.block, one.chunk) for one in plan], axis)


def to_rest(tree: Any, plan: tuple[Round, ...], axis: str) -> Any:
    """The inverse of `to_positions`."""
    return _moved(tree, [(tuple((other, one) for one, other in each.pairs), each.chunk, each.block) for each in plan], axis)


def _moved(tree: Any, plan: list, axis: str) -> Any:
    if not plan:
        return tree
    stage = jax.lax.axis_index(axis)

    def move(x):
        count, moved = x.shape[0] // len(plan), jnp.zeros_like(x)
        for pairs, sent, got in plan:
            block = jax.lax.dynamic_slice_in_dim(x, jnp.array(sent)[stage] * count, count)
            came = jax.lax.ppermute(block, axis, pairs)
            moved = jax.lax.dynamic_update_slice_in_dim(moved, came, jnp.array(got)[stage] * count, 0)
        return moved

    return jax.tree.map(move, tree)
