"""RoPE as config.json declares it, in its two forms: `rope_theta` and `rope_scaling`, or both in `rope_parameters`, which may
have a set for each kind of layer."""

import math
from collections.abc import Mapping
from typing import Any

from partitioning.declaration import DeclarationError

FULL, SLIDING = "full_attention", "sliding_attention"


def _parameters(config: Mapping[str, Any], kind: str = FULL) -> dict[str, Any]:
    """One flat dict of what concerns the layers of a kind."""
    given = config.get("rope_parameters") or {}
    given = given.get(kind) or {} if FULL in given or SLIDING in given else given
    scaling = config.get("rope_scaling") or {}
    scaling = scaling.get(kind) or {} if FULL in scaling or SLIDING in scaling else scaling
    out = {key: config[key] for key in ("rope_theta", "partial_rotary_factor") if config.get(key) is not None}
    out |= {key: value for key, value in {**scaling, **given}.items() if value is not None}
    return out


def read_rope(config: Mapping[str, Any], *, partial: bool = False) -> dict[str, Any]:
    """rope_theta, rope_fraction and rope_scaling of our model. `partial`: whether the family can turn a part of each head.

    Raises:
      DeclarationError: a kind of scaling that is not known, or a part of each head in another family.
    """
    found = _parameters(config)
    fraction = float(found.get("partial_rotary_factor", 1.0))
    if fraction != 1 and not partial:
        raise DeclarationError(f"config.json has partial_rotary_factor = {fraction}, which its family is not known with.")
    kind = found.get("rope_type") or found.get("type") or "default"
    original = (
        found.get("original_max_position_embeddings")
        or config.get("original_max_position_embeddings")
        or config["max_position_embeddings"]
    )
    if kind == "default":
        scaling = None
    elif kind == "linear":
        scaling = dict(kind="linear", factor=float(found["factor"]))
    elif kind == "llama3":
        scaling = dict(
            kind="llama3",
            **{key: float(found[key]) for key in ("factor", "low_freq_factor", "high_freq_factor")},
            original_max_positions=original,
        )
    elif kind in ("longrope", "su"):
        factor = found.get("factor") or config["max_position_embeddings"] / original
        grows = found.get("attention_factor") or (1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original)))
        scaling = dict(
            kind="longrope",
            short_factor=tuple(found["short_factor"]),
            long_factor=tuple(found["long_factor"]),
            attention_factor=grows,
            original_max_positions=original,
        )
    else:
        raise DeclarationError(f"config.json has RoPE of the type {kind!r}; known: default, linear, llama3, longrope.")
    return {
        "rope_theta": float(found.get("rope_theta", 10_000.0)),
        "rope_fraction": fraction,
        "rope_scaling": scaling,
    }


def local_theta(config: Mapping[str, Any]) -> float:
    """The base of layers with a window, where they have one of their own."""
    found = _parameters(config, SLIDING) if config.get("rope_parameters") else {}
    if found.get("rope_type", "default") != "default":
        raise DeclarationError(
            f"config.json has RoPE of the type {found['rope_type']!r} in layers with a window; known: default."
        )
    own = (config.get("rope_parameters") or {}).get(SLIDING) or {}
    return float(own.get("rope_theta") or config.get("rope_local_base_freq") or 10_000.0)


def write_rope(model: Any) -> dict[str, Any]:
    """The inverse of `read_rope`, in the form that all versions read."""
    scaling = model.rope_scaling
    out = {"rope_theta": model.rope_theta, "rope_scaling": None}
    if model.rope_fraction != 1:
        out["partial_rotary_factor"] = model.rope_fraction
    if scaling is not None:
        names = {"kind": "rope_type", "original_max_positions": "original_max_position_embeddings"}
        values = {names.get(key, key): list(value) if isinstance(value, tuple) else value for key, value in scaling.items()}
        out["rope_scaling"] = values
    return out
