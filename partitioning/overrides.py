"""Overrides: how single parameters lie when the rules do not fit them.

An override is a pair: a regular expression, and the axes of each dim. The expression must match a parameter's whole
path or its tail from a slash on: `lm_head/kernel`, `kernel` and `attention/.*` all match something, `head/kernel` does
not. Where several match, the first one decides.

What an override says is final for the parameter, its gradient and its optimizer state: no spread is added to it. So it is
also the way to keep ZeRO off a parameter. For stacked arrays the leading `layers` may be left out; its own rule then holds.
"""

import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from partitioning.array import ArraySpec
from partitioning.declaration import DeclarationError
from partitioning.tables import Rule, read_axes


@dataclasses.dataclass(frozen=True)
class Override:
    """One pair of the declaration; `axes` are per dim."""
    pattern: str
    axes: tuple[tuple[str, ...], ...]
    source: str


def read_overrides(declared: Iterable[Any]) -> tuple[Override, ...]:
    """The overrides of a declaration.

    Raises:
      DeclarationError: no pair, no regular expression, or no such axis.
    """
    out = []
    for i, pair in enumerate(declared):
        source = f"sharding.overrides[{i}]"
        is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2
        if not is_pair or not isinstance(pair[0], str) or not isinstance(pair[1], (tuple, list)):
            raise DeclarationError(f"config.{source} = {pair!r}; expected a pair (regular expression on a parameter's path, "
                                   "axes of each dim), such as ('lm_head/kernel', (None, 'tensor')).")
        try:
            re.compile(_whole(pair[0]))
        except re.error as error:
            raise DeclarationError(f"config.{source}: {pair[0]!r} is no regular expression: {error}.") from None
        out.append(Override(pair[0], tuple(read_axes(axes, f"config.{source}") for axes in pair[1]), source))
    return tuple(out)


def _whole(pattern: str) -> str:
    """The expression for a whole path whose tail, from a slash on, is `pattern`."""
    return f"(?:.*/)?(?:{pattern})"


def whole_or_tail(pattern: str, path: str) -> bool:
    """Whether a regular expression matches a path, or its tail from a slash on."""
    return re.fullmatch(_whole(pattern), path) is not None


def match(overrides: Sequence[Override], params: Mapping[str, ArraySpec]) -> dict[str, Override]:
    """Path to the override that decides it.

    Raises:
      DeclarationError: an override decides no parameter, or has another number of dims than one that it matches.
    """
    decided: dict[str, Override] = {}
    for override in overrides:
        matched = [path for path in params if whole_or_tail(override.pattern, path)]
        mine = [path for path in matched if path not in decided]
        if not mine:
            raise DeclarationError(_matches_nothing(override, matched, decided, params))
        for path in mine:
            dims = params[path].dims
            stacked = dims[:1] == ("layers",)
            if len(override.axes) not in (len(dims), len(dims) - stacked):
                way = f" Give {len(dims)}, or {len(dims) - 1} without layers." if stacked else ""
                raise DeclarationError(f"config.{override.source} gives axes for {len(override.axes)} dims, but {path}, which "
                                       f"{override.pattern!r} matches, has {len(dims)}: ({', '.join(map(str, dims))}).{way}")
            decided[path] = override
    return decided


def rules_of(override: Override, param: ArraySpec, array: ArraySpec, by_dim: Mapping[str, Rule]) -> tuple[Rule, ...]:
    """One rule per dim of `array`: the parameter itself, or optimizer state that has some of its dims.

    Args:
      override: the one that decides the parameter.
      param: the parameter.
      array: `param`, or state of it whose dims are a subsequence of the parameter's; other dims get no axes.
      by_dim: the table's rules, for a leading `layers` that the override leaves out.
    """
    axes = override.axes
    if len(axes) < len(param.dims):
        axes = (by_dim["layers"].axes, *axes)
    rules, i = [], 0
    for dim, size in zip(array.dims, array.shape):
        at = next((j for j in range(i, len(param.dims)) if (param.dims[j], param.shape[j]) == (dim, size)), None)
        rules.append(Rule(() if at is None else axes[at], override.source))
        i = i if at is None else at + 1
    return tuple(rules)


def _matches_nothing(override: Override, matched: Sequence[str], decided: Mapping[str, Override],
                     params: Mapping[str, ArraySpec]) -> str:
    if matched:
        earlier = decided[matched[0]]
        return (f"config.{override.source} ({override.pattern!r}) has no effect: whatever it matches, such as {matched[0]}, is "
                f"decided already, by config.{earlier.source} ({earlier.pattern!r}); the first match decides. Put the narrower "
                "expression first.")
    close = difflib.get_close_matches(override.pattern, params, n=3, cutoff=0.0)
    return (f"config.{override.source}: no parameter's path, or its tail from a slash on, matches {override.pattern!r}; "
            f"the nearest of {len(params)}: {', '.join(close)}.")
