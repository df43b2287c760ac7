"""Which parameters decay: regular expressions on their paths."""

import difflib
import re
from collections.abc import Iterable

from partitioning.declaration import DeclarationError


def decayed(patterns: tuple[str, ...], paths: Iterable[str], key: str = "config.optimizer.decay_mask") -> frozenset[str]:
    """The paths that any of `patterns` matches as a whole.

    Raises:
      DeclarationError: a pattern is no regular expression, or matches no parameter.
    """
    paths = list(paths)
    found: set[str] = set()
    for pattern in patterns:
        try:
            matches = [path for path in paths if re.fullmatch(pattern, path)]
        except re.error as error:
            raise DeclarationError(f"{key}: {pattern!r} is no regular expression ({error}).") from None
        if not matches:
            bare = re.sub(r"[^\w/]", "", pattern)
            close = difflib.get_close_matches(bare, paths, n=3, cutoff=0.4) or paths
            raise DeclarationError(f"{key}: {pattern!r} matches no parameter (a pattern must match the whole path); "
                                   f"nearest paths: {', '.join(close)}.")
        found.update(matches)
    return frozenset(found)
