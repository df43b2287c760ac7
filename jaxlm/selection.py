"""Which stored arrays are wanted, what they are called there, and whether they are the ones that are asked for."""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from partitioning.declaration import DeclarationError
from partitioning.overrides import whole_or_tail
from partitioning.paths import flatten, join


def match(shapes: Mapping[str, tuple[int, ...]], abstract: Any, selection: "Selection", source: str) -> dict[str, str]:
    """For each array that is asked for the name of the stored one.

    Args:
      shapes: name to shape of all that is stored. Groups that `abstract` does not have are left alone.
      abstract: nested dict of what is wanted, with shapes.
      source: where it is stored, for messages.

    Raises:
      DeclarationError: an array is missing, has another shape or is unknown; the message lists them.
    """
    wanted = {path: tuple(leaf.shape) for path, leaf in flatten(abstract).items()}
    groups = {path.split("/")[0] for path in wanted}
    shapes = {path: tuple(shape) for path, shape in shapes.items() if path.split("/")[0] in groups}
    theirs = selection.names(shapes)
    stored = {path: shapes[theirs[path]] for path in theirs}
    wanted = selection.chosen(wanted)
    lines = [f"{path}: missing there; here of shape {shape}" for path, shape in wanted.items() if path not in stored]
    lines += [
        f"{path}: shape {stored[path]} there, {shape} here"
        for path, shape in wanted.items()
        if path in stored and stored[path] != shape
    ]
    if not selection.include:
        lines += [f"{path}: there, unknown here" for path in stored if path not in wanted and path not in selection.leave]
    if lines:
        more = f"\n  and {len(lines) - 4} more arrays" if len(lines) > 4 else ""
        raise DeclarationError(f"{source} is of another model:\n  " + "\n  ".join(lines[:4]) + more)
    return {path: theirs[path] for path in wanted}


@dataclasses.dataclass(frozen=True)
class Selection:
    """Which arrays of a checkpoint are wanted, and what they are called there.

    Attributes:
      include: regular expressions on the parameters' paths here; empty for all.
      rename: pairs of a regular expression on the parameters' paths there and what replaces what it matches (`re.sub`), in turn.
      leave: names of arrays there that may stay unread where they are not known here.
    """
    include: tuple[str, ...] = ()
    rename: tuple[tuple[str, str], ...] = ()
    leave: tuple[str, ...] = ()

    def names(self, stored: Iterable[str]) -> dict[str, str]:
        """For each stored array its name here, as the key, and there.

        Raises:
          DeclarationError: two arrays get the same name, or a pair changes none.
        """
        out: dict[str, str] = {}
        changed = set()
        for path in stored:
            group, name = _split(path)
            for i, (pattern, replacement) in enumerate(self.rename):
                before, name = name, re.sub(pattern, replacement, name)
                changed |= {i} if name != before else set()
            mine = join(group, name)
            if mine in out:
                raise DeclarationError(f"config.checkpoint.rename calls both {out[mine]} and {path} {mine}.")
            out[mine] = path
        for i, (pattern, _) in enumerate(self.rename):
            if i not in changed:
                raise DeclarationError(f"config.checkpoint.rename: {pattern!r} changes the name of no array of the checkpoint; "
                                       f"its parameters are {_few(_split(path)[1] for path in stored)}.")
        return out

    def chosen(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Those of the arrays here that are to be read.

        Raises:
          DeclarationError: an expression matches none.
        """
        if not self.include:
            return wanted
        matches = [{path for path in wanted if whole_or_tail(pattern, _split(path)[1])} for pattern in self.include]
        for pattern, paths in zip(self.include, matches, strict=True):
            if not paths:
                raise DeclarationError(f"config.checkpoint.include: {pattern!r} matches no parameter; there are "
                                       f"{_few(_split(path)[1] for path in wanted)}.")
        return {path: x for path, x in wanted.items() if any(path in paths for paths in matches)}


def _split(path: str) -> tuple[str, str]:
    """'params' or 'optimizer/SLOT', and the parameter's path."""
    parts = path.split("/")
    count = 2 if parts[0] == "optimizer" else 1
    return "/".join(parts[:count]), "/".join(parts[count:])


def _few(names: Iterable[str]) -> str:
    names = list(dict.fromkeys(names))
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
