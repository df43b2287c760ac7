"""Sharding tables: from logical dims to mesh axes, for parameters, gradients, optimizer state and activations.

A table has two parts. Its rules say for a logical dim which mesh axes split it, in every array of that kind. Its
`spread` names axes that split each array once more, on whichever of its dims suits best. `sharding.rules` seeds the rules
of all four tables, and a table's own entries win per dim.

ZeRO (Rajbhandari et al. 2020) is nothing but words for spreads: stage n adds `zero_axes` to the spread of the first n of
optimizer, gradients and params. Past `read_tables` nobody knows that there was a stage.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from partitioning.declaration import DeclarationError, leaf, nearest
from partitioning.mesh import AXES

DEFAULT_RULES = {
    "batch": ("data", "fsdp"), "length": None, "stream_length": None, "embed": None, "heads": "tensor", "kv_heads": "tensor",
    "head_dim": None, "mlp": "tensor", "vocab": "tensor", "experts": "expert", "layers": "pipe",
}
TABLES = ("params", "gradients", "optimizer", "activations")
ZERO_ORDER = ("optimizer", "gradients", "params")


@dataclasses.dataclass(frozen=True)
class ShardingConfig:
    """How arrays lie on the mesh. `rules` seeds all four tables; a table's own entries win, per dim."""
    rules: dict[str, Any] = leaf({}, "logical dim to mesh axis, tuple of axes or None, over the defaults")
    zero: int = leaf(3, "ZeRO stage: 1 shards optimizer state, 2 gradients too, 3 parameters too", at_least=0, at_most=3)
    zero_axes: tuple[str, ...] = leaf(("fsdp",), "mesh axes that ZeRO shards over")
    overrides: tuple[Any, ...] = leaf((), "pairs (regular expression on a parameter's path, axes per dim)")
    pad: tuple[str, ...] = leaf((), "logical dims that are padded to a size that their axes divide")
    within_host: tuple[str, ...] = leaf((), "mesh axes that must not cross hosts: more than fits in one is an error")
    params: dict[str, Any] = leaf({}, "parameters' own table: dict(rules=..., spread=axes)")
    gradients: dict[str, Any] = leaf({}, "gradients' own table, likewise")
    optimizer: dict[str, Any] = leaf({}, "optimizer state's own table, likewise")
    activations: dict[str, Any] = leaf({}, "activations' own table, likewise (rules only)")


@dataclasses.dataclass(frozen=True)
class Rule:
    """The mesh axes that split one dim, and where that was said (a configuration key, or 'default')."""
    axes: tuple[str, ...]
    source: str


@dataclasses.dataclass(frozen=True)
class Table:
    """One kind's table, by name only: no sizes.

    Attributes:
      name: one of TABLES.
      rules: logical dim to Rule.
      spread: mesh axis to the words for who asked, in the order in which they are placed.
    """
    name: str
    rules: Mapping[str, Rule]
    spread: Mapping[str, str]


def read_axes(value: Any, key: str) -> tuple[str, ...]:
    """An axis, several ('tensor,fsdp' or a tuple) or None as a tuple of mesh axes.

    Raises:
      DeclarationError: no such axis, or one named twice.
    """
    axes = () if value is None else tuple(value.split(",")) if isinstance(value, str) else value
    if not isinstance(axes, (tuple, list)) or not all(isinstance(axis, str) for axis in axes):
        raise DeclarationError(f"{key} = {value!r}; expected a mesh axis, a tuple of mesh axes, or None.")
    for axis in axes:
        if axis not in AXES:
            raise DeclarationError(f"{key} = {value!r}: there is no mesh axis {axis!r}; {nearest(axis, AXES)}")
    if len(set(axes)) < len(axes):
        raise DeclarationError(f"{key} = {value!r} names an axis twice.")
    return tuple(axes)


def read_tables(config: ShardingConfig, dims: Collection[str]) -> dict[str, Table]:
    """The four tables that a declaration stands for.

    Args:
      config: the declaration.
      dims: logical dims that the arrays at hand have; a rule may name these besides the ones of DEFAULT_RULES.

    Raises:
      DeclarationError: an unknown axis, logical dim or key of a table.
    """
    known = [*DEFAULT_RULES, *(dim for dim in dims if dim not in DEFAULT_RULES)]
    seeds = {dim: Rule(read_axes(axes, dim), "default") for dim, axes in DEFAULT_RULES.items()}
    seeds |= _read_rules(config.rules, known, "sharding.rules")
    zero_axes = read_axes(config.zero_axes, "config.sharding.zero_axes")
    rules: dict[str, dict[str, Rule]] = {}
    spreads: dict[str, dict[str, str]] = {}
    for name in TABLES:
        own, key = getattr(config, name), f"sharding.{name}"
        allowed = ("rules",) if name == "activations" else ("rules", "spread")
        for entry in own:
            if entry not in allowed:
                raise DeclarationError(f"unknown key config.{key}.{entry}: {nearest(entry, allowed, 'key')}")
        rules[name] = seeds | _read_rules(own.get("rules") or {}, known, f"{key}.rules")
        spreads[name] = {axis: f"{key}.spread" for axis in read_axes(own.get("spread"), f"config.{key}.spread")}
    for name in ZERO_ORDER[:config.zero]:
        for axis in zero_axes:
            spreads[name].setdefault(axis, f"ZeRO {config.zero}")
    # One order for all: an axis of several tables then lies on the same dim in each, and a table that spreads further
    # only cuts the blocks of the others, so that going from one to the other is a slice.
    order = list(dict.fromkeys(axis for name in reversed(ZERO_ORDER) for axis in spreads[name]))
    return {name: Table(name, rules[name], {axis: spreads[name][axis] for axis in order if axis in spreads[name]})
            for name in TABLES}


def _read_rules(rules: Any, known: Collection[str], key: str) -> dict[str, Rule]:
    if not isinstance(rules, Mapping):
        raise DeclarationError(f"config.{key} = {rules!r}; expected a dict from logical dim to mesh axes.")
    for dim in rules:
        if dim not in known:
            raise DeclarationError(f"config.{key} has a rule for {dim!r}, but no array has such a dim; "
                                   f"{nearest(dim, known, 'dim')}")
    return {dim: Rule(read_axes(axes, f"config.{key}.{dim}"), key) for dim, axes in rules.items()}


def declared_dims(config: ShardingConfig) -> dict[str, str]:
    """Every logical dim that the user wrote a rule for, with the key that holds it."""
    dims = {dim: "sharding.rules" for dim in config.rules}
    for name in TABLES:
        dims |= {dim: f"sharding.{name}.rules" for dim in getattr(config, name).get("rules") or {}}
    return dims
