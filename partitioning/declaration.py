"""Declarations: frozen dataclasses whose fields carry a type, a default, a range and one line of meaning.

Everything that a user can configure is such a field. This module reads plain values (from a config file, a JSON file or
the command line) into those dataclasses, and answers a mistake with what was found, what was expected and the way out.
It knows nothing of what is being configured, so `partitioning` and its users share it.
"""

import ast
import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any


class DeclarationError(ValueError):
    """The user's input is wrong. The message is complete: commands print it alone and exit with status 2."""


def leaf(default: Any, meaning: str, *, choices=None, at_least=None, above=None, at_most=None, below=None) -> Any:
    """Declares a dataclass field.

    Args:
      default: the value when the user says nothing.
      meaning: one line for `--config.help`.
      choices: the allowed values, if they can be listed (checked inside tuples too).
      at_least, above, at_most, below: closed and open bounds, for numbers.
    """
    metadata = dict(meaning=meaning, choices=choices, at_least=at_least, above=above, at_most=at_most, below=below)
    if isinstance(default, (dict, list)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def section(cls: type, meaning: str) -> Any:
    """Declares a field that is itself a declaration, with that declaration's defaults."""
    return dataclasses.field(default_factory=cls, metadata=dict(meaning=meaning))


def nearest(name: str, known, what: str = "name") -> str:
    """The tail of a message about an unknown name: the closest known one, or all of them when few."""
    known = [str(k) for k in known]
    close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known {what}s: {', '.join(known)}."


def _nearest_key(cls: type, name: str, place: str) -> str:
    """`nearest` among the fields of `cls`, or, for a leaf that was looked for in the wrong section, its full name."""
    fields = field_types(cls)
    elsewhere = [k.name for k in keys(cls, place) if k.name.rpartition(".")[2] == name]
    close = difflib.get_close_matches(name, fields, n=1, cutoff=0.6)
    if close or not elsewhere:
        return f"did you mean '{place}.{close[0]}'?" if close else nearest(name, fields, "key")
    return f"did you mean {' or '.join(elsewhere)}?"


def field_types(cls: type) -> dict[str, Any]:
    """Field name to resolved type annotation."""
    return typing.get_type_hints(cls)


def type_name(annotation: Any) -> str:
    """An annotation as a user would say it: 'int', 'float or None', 'tuple of str'."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is type(None):
        return "None"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_name(a) for a in args)
    if origin is tuple:
        return f"tuple of {type_name(args[0])}" if args else "tuple"
    if origin is dict or annotation is dict:
        return "dict"
    return getattr(annotation, "__name__", str(annotation))


def read(cls: type, values: Any, key: str = "config") -> Any:
    """Reads a mapping of plain values into the declaration `cls`; what the mapping lacks keeps its default.

    Args:
      cls: a dataclass whose fields are made with `leaf` or `section`.
      values: a mapping (a ConfigDict too) with those names.
      key: the dotted name of this place, for messages.

    Raises:
      DeclarationError: an unknown name, a wrong type, or a value out of range.
    """
    if isinstance(values, cls):
        return values
    if not isinstance(values, Mapping) and not hasattr(values, "items"):
        raise DeclarationError(f"{key} is {values!r}; expected a section with: {', '.join(field_types(cls))}.")
    annotations = field_types(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    out = {}
    for name, value in values.items():
        if name not in fields:
            raise DeclarationError(f"unknown key {key}.{name}: {_nearest_key(cls, name, key)}")
        out[name] = _convert(annotations[name], value, f"{key}.{name}")
        _check_range(fields[name].metadata, out[name], f"{key}.{name}")
    return cls(**out)


def _convert(annotation: Any, value: Any, key: str) -> Any:
    if dataclasses.is_dataclass(annotation):
        return read(annotation, value, key)
    converted, ok = _match(annotation, value)
    if not ok:
        raise DeclarationError(f"{key} = {value!r} has type {type(value).__name__}; expected {type_name(annotation)}.")
    return converted


def _match(annotation: Any, value: Any) -> tuple[Any, bool]:
    """The value as the annotation wants it, and whether it fits. Exact types first: '4' is no int, 1 is a float."""
    if annotation is Any:
        return _plain(value), True
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        for option in args:
            converted, ok = _match(option, value)
            if ok:
                return converted, True
        return value, False
    if annotation is type(None):
        return None, value is None
    if annotation is bool:
        return value, isinstance(value, bool)
    if annotation is int:
        return value, isinstance(value, int) and not isinstance(value, bool)
    if annotation is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value), True
        return value, False
    if annotation is str:
        return value, isinstance(value, str)
    if annotation is dict or origin is dict:
        if not isinstance(value, Mapping) and not hasattr(value, "items"):
            return value, False
        out = {}
        for name, item in value.items():
            item, ok = _match(args[1] if args else Any, item)
            if not ok or not isinstance(name, str):
                return value, False
            out[name] = _plain(item)
        return out, True
    if origin is tuple or annotation is tuple:
        if not args:
            return (tuple(value), True) if isinstance(value, (list, tuple)) else (value, False)
        if not isinstance(value, (list, tuple)):
            value = (value,)  # 'tensor' means ('tensor',)
        variadic = len(args) == 2 and args[1] is Ellipsis
        if not variadic and len(value) != len(args):
            return value, False
        out = [_match(args[0] if variadic else args[i], item) for i, item in enumerate(value)]
        return tuple(v for v, _ in out), all(ok for _, ok in out)
    return value, isinstance(value, annotation)


def _plain(value: Any) -> Any:
    """Nested mappings as dicts and lists as tuples, so that equal declarations compare equal."""
    if isinstance(value, Mapping) or hasattr(value, "items"):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(_plain(v) for v in value)
    return value


def _check_range(metadata: Mapping, value: Any, key: str) -> None:
    for item in value if isinstance(value, tuple) else (value,):
        choices = metadata.get("choices")
        if choices is not None and item is not None and item not in choices:
            raise DeclarationError(
                f"{key} = {item!r} is not one of: {', '.join(map(str, choices))}"
                + (f"; {nearest(item, choices)}" if isinstance(item, str) else ".")
            )
        if not isinstance(item, (int, float)) or isinstance(item, bool):
            continue
        if not math.isfinite(item):
            raise DeclarationError(f"{key} = {item!r} is no finite number.")
        for bound, fits, words in (
            ("at_least", lambda v, b: v >= b, "at least"),
            ("above", lambda v, b: v > b, "above"),
            ("at_most", lambda v, b: v <= b, "at most"),
            ("below", lambda v, b: v < b, "below"),
        ):
            limit = metadata.get(bound)
            if limit is not None and not fits(item, limit):
                raise DeclarationError(f"{key} = {item!r} is out of range; expected a value {words} {limit}.")


def parse(annotation: Any, text: str, key: str) -> Any:
    """Reads one value from the command line by its declared type.

    Strings need no quotes; tuples are 'a,b' or Python's "('a','b')"; dicts ("{'a': 1}" or "dict(a=1)") and None are Python's.

    Raises:
      DeclarationError: the text is no value of that type.
    """
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    options = args if origin in (typing.Union, types.UnionType) else (annotation,)
    for candidate in _readings(text, options):
        value, ok = _match(annotation, candidate)
        if ok:
            return value
    raise DeclarationError(f"{key} = {text!r} cannot be read as {type_name(annotation)}.")


def _readings(text: str, options) -> Iterator[Any]:
    """The values that a text can stand for, the likeliest first."""
    if type(None) in options and text in ("None", "none", "null"):
        yield None
    if bool in options and text.lower() in ("true", "false"):
        yield text.lower() == "true"
    if options == (str,):
        yield text
        return
    try:
        value = _literal(text)
        yield value
        if isinstance(value, dict):
            return  # its commas separate no parts
        if int in options and isinstance(value, float) and value.is_integer():
            yield int(value)  # 1e6 steps
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        pass
    if any(typing.get_origin(o) is tuple for o in options) and "," in text:
        parts = [p.strip() for p in text.strip("()[]").split(",") if p.strip()]
        yield tuple(_scalar(p) for p in parts)
        yield tuple(parts)
    yield text


def _scalar(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


class _Dicts(ast.NodeTransformer):
    """dict(a=1), as configuration files have it, for {'a': 1}."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        plain = isinstance(node.func, ast.Name) and node.func.id == "dict" and not node.args
        if not plain or any(word.arg is None for word in node.keywords):
            return node
        return ast.Dict([ast.Constant(word.arg) for word in node.keywords], [word.value for word in node.keywords])


def _literal(text: str) -> Any:
    return ast.literal_eval(_Dicts().visit(ast.parse(text.strip(), mode="eval")))


@dataclasses.dataclass(frozen=True)
class Key:
    """One configurable value: its dotted name, type, default and meaning."""

    name: str
    type: str
    default: Any
    meaning: str


def keys(cls: type, prefix: str = "config") -> Iterator[Key]:
    """Every leaf below the declaration `cls`, depth first, for help texts and tests."""
    annotations = field_types(cls)
    for f in dataclasses.fields(cls):
        name = f"{prefix}.{f.name}"
        if dataclasses.is_dataclass(annotations[f.name]):
            yield from keys(annotations[f.name], name)
            continue
        default = f.default if f.default is not dataclasses.MISSING else f.default_factory()
        meaning = f.metadata["meaning"]
        if f.metadata.get("choices"):
            meaning += f" ({', '.join(map(str, f.metadata['choices']))})"
        yield Key(name, type_name(annotations[f.name]), default, meaning)


def annotation_of(cls: type, dotted: str, key: str = "config") -> tuple[Any, tuple[str, ...]]:
    """The declared type at a dotted name below `cls`, and what of the name lies inside a dict leaf.

    `sharding.rules.heads` gives (type of the dict's values, ('heads',)).

    Raises:
      DeclarationError: there is no such key.
    """
    annotation: Any = cls
    parts = dotted.split(".")
    for i, part in enumerate(parts):
        if dataclasses.is_dataclass(annotation):
            annotations = field_types(annotation)
            if part not in annotations:
                place = ".".join([key, *parts[:i]])
                raise DeclarationError(f"unknown key {place}.{part}: {_nearest_key(annotation, part, place)}")
            annotation = annotations[part]
            continue
        options = (
            typing.get_args(annotation) if typing.get_origin(annotation) in (typing.Union, types.UnionType) else (annotation,)
        )
        dicts = [o for o in options if o is dict or typing.get_origin(o) is dict]
        if not dicts:
            raise DeclarationError(
                f"{key}.{'.'.join(parts[:i])} is a single value ({type_name(annotation)}); it has no key {part!r}."
            )
        args = typing.get_args(dicts[0])
        return (args[1] if args and i == len(parts) - 1 else Any), tuple(parts[i:])
    return annotation, ()
