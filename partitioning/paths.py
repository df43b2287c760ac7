"""Paths: nested dicts of arrays seen as flat ones, keyed by 'layers/attention/query/kernel'."""

from collections.abc import Callable, Mapping
from typing import Any


def join(*parts: str) -> str:
    """The path through `parts`; empty ones vanish."""
    return "/".join(p for p in parts if p)


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Path to leaf, in the tree's own order. Whatever is no mapping is a leaf; `prefix` goes in front of each path."""
    if not isinstance(tree, Mapping):
        return {prefix: tree}
    return {path: leaf for key, child in tree.items() for path, leaf in flatten(child, join(prefix, str(key))).items()}


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The nested dict that `flatten` came from (one whose root is a mapping)."""
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        *parents, last = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def map_paths(f: Callable[[str, Any], Any], tree: Any, prefix: str = "") -> Any:
    """The same nesting with every leaf replaced by f(path, leaf)."""
    if not isinstance(tree, Mapping):
        return f(prefix, tree)
    return {key: map_paths(f, child, join(prefix, str(key))) for key, child in tree.items()}
