"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), in the half-split convention of Hugging Face's Llama.

Number i and number i + K/2 of a head form a pair, turned by the angle position * theta^(-2i/K). Other conventions pair
neighbours (2i, 2i + 1); weights trained with one are a permutation of weights trained with the other, not equal.

Scaling stretches the wavelengths of a model that was trained on shorter sequences:
  linear  all of them by `factor` (Chen et al. 2023, arXiv:2306.15595, equation 4);
  llama3  those longer than original_max_positions / low_freq_factor by `factor`, those shorter than
          original_max_positions / high_freq_factor not at all, and those between by a blend that is linear in
          original_max_positions / wavelength (the published Llama 3.1 reference code).
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from partitioning.declaration import DeclarationError, nearest

SCALING_KEYS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_positions"),
}


def frequencies(head_dim: int, theta: float, scaling: Mapping[str, Any] | None = None) -> np.ndarray:
    """Angle per position of each pair: float32 [head_dim / 2].

    Raises:
      DeclarationError: a scaling that is incomplete, unknown or out of range.
    """
    frequency = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is not None:
        frequency = _scale(frequency, **_checked(scaling))
    return frequency.astype(np.float32)


def _scale(frequency, kind, factor, low_freq_factor=1.0, high_freq_factor=1.0, original_max_positions=1):
    if kind == "linear":
        return frequency / factor
    turns = original_max_positions * frequency / (2 * math.pi)      # within the original length
    kept = np.clip((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0.0, 1.0)
    return kept * frequency + (1 - kept) * frequency / factor


def _checked(scaling: Mapping[str, Any]) -> dict[str, Any]:
    key = "config.model.rope_scaling"
    kinds = " or ".join(f"dict(kind={kind!r}, {', '.join(f'{k}=' for k in keys)})" for kind, keys in SCALING_KEYS.items())
    kind = scaling.get("kind")
    if kind not in SCALING_KEYS:
        raise DeclarationError(f"{key} has kind = {kind!r}; expected {kinds}.")
    keys = SCALING_KEYS[kind]
    for name, value in scaling.items():
        if name != "kind" and name not in keys:
            raise DeclarationError(f"unknown key {key}.{name} for kind {kind!r}: {nearest(name, keys, 'key')}")
        if name != "kind" and not (isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf):
            raise DeclarationError(f"{key}.{name} = {value!r}; expected a number above 0.")
    missing = [name for name in keys if name not in scaling]
    if missing:
        raise DeclarationError(f"{key} lacks {', '.join(missing)}; expected {kinds}.")
    if kind == "llama3" and not scaling["low_freq_factor"] < scaling["high_freq_factor"]:
        raise DeclarationError(f"{key}.low_freq_factor = {scaling['low_freq_factor']} is not below high_freq_factor = "
                               f"{scaling['high_freq_factor']}; the former bounds the long wavelengths.")
    return dict(scaling)


def angles(positions: jax.Array, frequency_P: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine, float32 [..., L, 1, P], of int32 positions [..., L]; the 1 stands for the heads."""
    angle = positions.astype(jnp.float32)[..., None, None] * frequency_P
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x_BLHK: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turns the pairs of every head by `angles`; computed in float32, returned in the dtype of x."""
    cos, sin = rotation
    first, second = jnp.split(x_BLHK.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_BLHK.dtype)
