"""Sharding tables: from logical dims to mesh axes, for parameters, gradients, optimizer state and activations."""

import dataclasses
from typing import Any

from partitioning.declaration import leaf


@dataclasses.dataclass(frozen=True)
class ShardingConfig:
    """How arrays lie on the mesh. `rules` seeds all four tables; a table's own entries win, per dim."""
    rules: dict[str, Any] = leaf({}, "logical dim to mesh axis, tuple of axes or None, over the defaults")
    zero: int = leaf(3, "ZeRO stage: 1 shards optimizer state, 2 gradients too, 3 parameters too", at_least=0, at_most=3)
    zero_axes: tuple[str, ...] = leaf(("fsdp",), "mesh axes that ZeRO shards over")
    overrides: tuple[Any, ...] = leaf((), "pairs (regular expression on a parameter's path, axes per dim)")
    params: dict[str, Any] = leaf({}, "parameters' own table: dict(rules=..., spread=axes)")
    gradients: dict[str, Any] = leaf({}, "gradients' own table, likewise")
    optimizer: dict[str, Any] = leaf({}, "optimizer state's own table, likewise")
    activations: dict[str, Any] = leaf({}, "activations' own table, likewise (rules only)")
