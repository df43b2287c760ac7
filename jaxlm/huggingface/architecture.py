"""One architecture said twice: a config.json of Hugging Face and our ModelConfig, each made from the other."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxlm.huggingface.families import FAMILIES, Family
from partitioning.declaration import DeclarationError


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a config.json.

    Raises:
      DeclarationError: it is of none.
    """
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise DeclarationError(f"config.json has model_type = {kind!r}; the families that are known: {', '.join(FAMILIES)}.")
    return FAMILIES[kind]


def model_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of config.model that a config.json decides.

    Raises:
      DeclarationError: it is of no known family, lacks something, or has something that this family is not known with.
    """
    family = family_of(config)
    if packed := next((key for key in ("quantization_config", "compression_config") if config.get(key)), None):
        raise DeclarationError(f"config.json has a {packed}: quantised weights are not read; give the original model.")
    for key, values in family.expected.items():
        if key in config and config[key] not in values:
            raise DeclarationError(
                f"config.json has {key} = {config[key]!r}; {family.model_type} is known with "
                f"{' or '.join(map(repr, values))} alone."
            )
    merged = {**family.defaults, **config}
    lost = [theirs for theirs in family.keys.values() if theirs not in merged]
    if lost:
        raise DeclarationError(f"config.json of model_type {family.model_type} lacks {', '.join(lost)}.")
    values = {ours: merged[theirs] for ours, theirs in family.keys.items()}
    try:
        return {**values, **family.fixed, **family.read(merged)}
    except DeclarationError:
        raise
    except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        what = f"lacks {error}" if isinstance(error, KeyError) else f"cannot be understood: {error}"
        raise DeclarationError(f"config.json of model_type {family.model_type} {what}.") from None


def config_json(model: Any, family: Family) -> dict[str, Any]:
    """The config.json of a ModelConfig, as far as it describes the model.

    Raises:
      DeclarationError: no model of this family is like that.
    """
    values = {theirs: getattr(model, ours) for ours, theirs in family.keys.items()}
    values |= {
        theirs: own
        for key, own in (("num_kv_heads", model.kv_heads), ("head_dim", model.head_width))
        if (theirs := family.keys.get(key))
    }
    config = {"architectures": [family.architecture], "model_type": family.model_type, **values, **family.write(model)}
    wrong = mismatches(model, config)
    if wrong:
        raise DeclarationError(
            f"a model of the family {family.model_type} cannot be like this one: "
            + "; ".join(f"config.model.{key} = {mine!r}, there {theirs!r}" for key, mine, theirs in wrong)
            + "."
        )
    return config


def mismatches(model: Any, config: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(key, ours, the one of config.json) of what a ModelConfig and a config.json say differently."""
    try:
        other = dataclasses.replace(type(model)(), **model_values(config))
    except (DeclarationError, KeyError, TypeError, ValueError) as error:
        return [("activation", model.activation, str(error))]
    ours, theirs = _canonical(model), _canonical(other)
    return [(key, ours[key], theirs[key]) for key in ours if ours[key] != theirs[key]]


def _canonical(model: Any) -> dict[str, Any]:
    """What a model computes: the keys, those that mean the same by several values made one."""
    out = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
    for training in ("dropout", "scan_layers", "from_hf"):
        out.pop(training, None)
    out |= {
        "num_kv_heads": model.kv_heads,
        "head_dim": model.head_width,
        "window_pattern": model.windows(),
        "attention_scale": round(model.attention_scale or model.head_width**-0.5, 9),
        "embed_scale": round(model.embed_scale, 6),
        "norm_epsilon": float(model.norm_epsilon),
        "qk_norm_over": model.qk_norm_over if model.qk_norm else "head",
    }
    out |= {f"{part}_bias": model.has_bias(part) for part in ("qkv", "output", "mlp")}
    out["bias"] = model.bias and model.norm == "layernorm"
    if model.position != "rope":
        out |= {"rope_theta": None, "rope_scaling": None, "rope_fraction": None, "rope_local_theta": None}
    elif (
        all(window is None for window in model.windows()) or model.rope_local_theta == model.rope_theta and not model.rope_scaling
    ):
        out["rope_local_theta"] = None
    return out


def find_family(model: Any) -> Family:
    """The first family that has models like this one.

    Raises:
      DeclarationError: none has.
    """
    nearest_one, least = None, None
    for family in FAMILIES.values():
        try:
            config_json(model, family)
            return family
        except DeclarationError as error:
            if least is None or len(str(error)) < len(least):
                nearest_one, least = family.model_type, str(error)
    raise DeclarationError(f"no family has models like this one; the nearest is {nearest_one}: {least}")
