"""`config.model.from_hf`: the architecture and the tokenizer of a Hugging Face folder as values of a configuration.

It is an input only, like a sharding preset: reading a configuration puts the folder's values where the configuration has the
defaults, and names no folder afterwards.
"""

import itertools
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxlm.huggingface.architecture import model_values
from jaxlm.huggingface.folder import read_config
from partitioning.declaration import DeclarationError

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def under(values: Any, defaults: Mapping[str, Mapping[str, Any]]) -> Any:
    """A configuration's values with those of the folder that it names under them: what they set otherwise than the defaults
    stands. Themselves where they name none.

    Args:
      values: nested mapping (or ConfigDict), not changed.
      defaults: the defaults of `model` and `data`.

    Raises:
      DeclarationError: there is no such folder, or it is of no known family.
    """
    source = _section(values, "model").get("from_hf")
    if source is None:
        return values
    own = {key: value for key, value in _section(values, "model").items()
           if key not in defaults["model"] or value != defaults["model"][key]}
    data = _section(values, "data")
    if data.get("tokenizer", defaults["data"]["tokenizer"]) == defaults["data"]["tokenizer"]:
        data = {**tokenizer_of(source), **{key: value for key, value in data.items() if value != defaults["data"].get(key)}}
    model = {**_read(source), **own, "from_hf": None}
    length = defaults["data"]["sequence_length"]
    if data.get("sequence_length", length) == length > model["max_positions"]:
        data["sequence_length"] = model["max_positions"]
    return {**dict(values.items()), "model": model, "data": data}


def over(values: Any, source: str) -> Any:
    """A configuration's values with the folder's over them.

    Raises:
      DeclarationError: as `under`.
    """
    model = {**_section(values, "model"), **_read(source), "from_hf": None}
    return {**dict(values.items()), "model": model, "data": {**_section(values, "data"), **tokenizer_of(source)}}


def tokenizer_of(source: str | pathlib.Path) -> dict[str, Any]:
    """config.data.tokenizer and bos of a folder, if it has a tokenizer."""
    folder = pathlib.Path(os.path.expanduser(source))
    if not any((folder / name).is_file() for name in TOKENIZERS):
        return {}
    return {"tokenizer": str(source), "bos": _begins(_json(folder / "tokenizer.json"), _json(folder / "tokenizer_config.json"))}


def _begins(tokenizer: dict[str, Any], config: dict[str, Any]) -> bool:
    """Whether a tokenizer puts its beginning token, and nothing else, before a text: such a model has seen no text without."""
    token = config.get("bos_token")
    token = token.get("content") if isinstance(token, dict) else token
    if token is None or config.get("add_bos_token") is not None:
        return token is not None and config["add_bos_token"] is True
    post = tokenizer.get("post_processor") or {}
    for one in post.get("processors", [post]):
        if one.get("type") == "TemplateProcessing":
            first = list(itertools.takewhile(lambda part: "SpecialToken" in part, one.get("single", [])))
            return [part["SpecialToken"].get("id") for part in first] == [token]
    return False


def _json(path: pathlib.Path) -> dict[str, Any]:
    """What a JSON file holds; nothing if it cannot be read, which whoever needs it says."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _read(source: Any) -> dict[str, Any]:
    """Every key of config.model that makes an architecture."""
    if not isinstance(source, str):
        raise DeclarationError(f"config.model.from_hf = {source!r}; expected the path of a folder.")
    from jaxlm.config import ModelConfig

    plain = {key: getattr(ModelConfig(), key) for key in ModelConfig.__dataclass_fields__}
    for key in ("dropout", "scan_layers"):     # no folder has an opinion of these
        plain.pop(key)
    return {**plain, **model_values(read_config(source, "config.model.from_hf"))}


def _section(values: Any, name: str) -> dict[str, Any]:
    section = values.get(name) if hasattr(values, "get") else None
    return dict(section.items()) if hasattr(section, "items") else {}
