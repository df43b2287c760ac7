"""Sharding presets: the values of `mesh` and `sharding` under a name, in a file of a few lines.

    # when to use it, and where it comes from
    mesh = dict(data=-1, tensor=2)
    sharding = dict(zero=1, zero_axes=("data",))

`config.sharding.preset` names a shipped one (`configs/sharding/NAME.py`) or a file. It is an input only: reading a configuration
puts its values where the configuration has the defaults, and leaves no preset behind.
"""

import pathlib
import runpy
import types
from collections.abc import Mapping
from typing import Any

from partitioning.declaration import DeclarationError, nearest
from partitioning.mesh import MeshConfig
from partitioning.tables import ShardingConfig

SECTIONS = {"mesh": MeshConfig, "sharding": ShardingConfig}


def shipped_presets() -> dict[str, pathlib.Path]:
    """Name to file of the presets that come with the package."""
    import configs

    return {path.stem: path for folder in configs.__path__ for path in sorted(pathlib.Path(folder, "sharding").glob("*.py"))}


def read_preset(source: str) -> dict[str, dict[str, Any]]:
    """The values of a preset, by section.

    Args:
      source: a shipped name, or the path of a .py file.

    Raises:
      DeclarationError: there is no such preset, its file fails, or it sets something else.
    """
    shipped = shipped_presets()
    path = shipped.get(source, pathlib.Path(source))
    if not path.is_file() or path.suffix != ".py":
        raise DeclarationError(f"config.sharding.preset = {source!r} is neither a .py file nor a shipped preset; "
                               f"{nearest(source, shipped, 'preset')}")
    try:
        found = runpy.run_path(str(path))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's own file
        raise DeclarationError(f"the preset {path} failed: {type(error).__name__}: {error}") from None
    values = {name: value for name, value in found.items() if not (name.startswith("_") or isinstance(value, types.ModuleType))}
    for section, keys in values.items():
        if section not in SECTIONS:
            raise DeclarationError(f"the preset {path} sets {section}; a preset sets {' and '.join(SECTIONS)}, each a dict.")
        if not isinstance(keys, Mapping):
            raise DeclarationError(f"the preset {path}: {section} = {keys!r}; expected a dict.")
        for key in keys:
            known = SECTIONS[section].__dataclass_fields__
            if key not in known:
                raise DeclarationError(f"the preset {path} sets {section}.{key}, which is no key; {nearest(key, known, 'key')}")
    return {section: dict(values.get(section, {})) for section in SECTIONS}


def under(values: Any, defaults: Mapping[str, Mapping[str, Any]]) -> Any:
    """A configuration's values with the preset that they name under them: what they set otherwise than the defaults stands,
    in dicts entry by entry. Themselves where they name none.

    Args:
      values: nested mapping (or ConfigDict), not changed.
      defaults: the defaults of `mesh` and `sharding`.

    Raises:
      DeclarationError: as `read_preset`.
    """
    source = _section(values, "sharding").get("preset")
    if source is None:
        return values
    if not isinstance(source, str):
        raise DeclarationError(f"config.sharding.preset = {source!r}; expected the name of a preset or a file.")
    preset = read_preset(source)
    out = dict(values.items())
    for name in SECTIONS:
        own = _section(values, name)
        own = {key: value for key, value in own.items() if key not in defaults[name] or value != defaults[name][key]}
        out[name] = _over(preset[name], own)
    out["sharding"].pop("preset")
    return out


def over(values: Any, source: str) -> Any:
    """A configuration's values with a preset over them, in dicts entry by entry. Its mesh is one value: sizes that it leaves out
    are the defaults, since those of another mesh would not fit.

    Raises:
      DeclarationError: as `read_preset`.
    """
    preset = read_preset(source)
    out = dict(values.items())
    out["mesh"] = preset["mesh"] or _section(values, "mesh")
    out["sharding"] = _over(_section(values, "sharding"), preset["sharding"])
    return out


def without_preset(values: Any) -> Any:
    """The values, naming no preset."""
    if _section(values, "sharding").get("preset") is None:
        return values
    return {**dict(values.items()), "sharding": {**_section(values, "sharding"), "preset": None}}


def _section(values: Any, name: str) -> dict[str, Any]:
    section = values.get(name) if hasattr(values, "get") else None
    return dict(section.items()) if hasattr(section, "items") else {}


def _over(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """Two nested dicts as one; where both say something, the upper one holds."""
    out = dict(lower)
    for key, value in upper.items():
        both = hasattr(value, "items") and hasattr(out.get(key), "items")
        out[key] = _over(out[key], dict(value.items())) if both else value
    return out
