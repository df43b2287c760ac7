"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), in the half-split convention of Hugging Face's Llama.

Number i and number i + K/2 of a head form a pair, turned by the angle position * theta^(-2i/K). Other conventions pair
neighbours (2i, 2i + 1); weights trained with one are a permutation of weights trained with the other, not equal.

Scaling stretches the wavelengths of a model that was trained on shorter sequences:
  linear  all of them by `factor` (Chen et al. 2023, arXiv:2306.15595, equation 4);
  llama3  those longer than original_max_positions / low_freq_factor by `factor`, those shorter than
          original_max_positions / high_freq_factor not at all, and those between by a blend that is linear in
          original_max_positions / wavelength (the published Llama 3.1 reference code);
  longrope  each by a factor of its own: `short_factor` in sequences of up to original_max_positions tokens and `long_factor` in
          longer ones, and queries and keys grow by `attention_factor` (Ding et al. 2024, arXiv:2402.13753). It is the length
          of the arrays that counts, or of the cache in decoding, since keys that are in the cache keep their angles.

A model may turn only the first part of each head (GPT-J, GLM, Phi): then there are angles for that part alone.
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
    "longrope": ("short_factor", "long_factor", "attention_factor", "original_max_positions"),
}
PER_PAIR = ("short_factor", "long_factor")     # a number for each pair


def frequencies(head_dim: int, theta: float, scaling: Mapping[str, Any] | None = None, length: int = 0) -> np.ndarray:
    """Angle per position of each pair: float32 [head_dim / 2].

    Args:
      head_dim: how many numbers of a head are turned.
      length: of the sequences, where the scaling depends on it.

    Raises:
      DeclarationError: a scaling that is incomplete, unknown or out of range.
    """
    frequency = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is not None:
        frequency = _scale(frequency, length, **_checked(scaling, len(frequency)))
    return frequency.astype(np.float32)


def amplitude(scaling: Mapping[str, Any] | None) -> float:
    """Factor on queries and keys."""
    return (scaling or {}).get("attention_factor", 1.0)


def _scale(frequency, length, kind, factor=1.0, low_freq_factor=1.0, high_freq_factor=1.0, original_max_positions=1,
           short_factor=(), long_factor=(), attention_factor=1.0):
    if kind == "linear":
        return frequency / factor
    if kind == "longrope":
        return frequency / np.array(long_factor if length > original_max_positions else short_factor)
    turns = original_max_positions * frequency / (2 * math.pi)      # within the original length
    kept = np.clip((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0.0, 1.0)
    return kept * frequency + (1 - kept) * frequency / factor


def _checked(scaling: Mapping[str, Any], pairs: int) -> dict[str, Any]:
    key = "config.model.rope_scaling"
    kinds = " or ".join(f"dict(kind={kind!r}, {', '.join(f'{k}=' for k in keys)})" for kind, keys in SCALING_KEYS.items())
    kind = scaling.get("kind")
    if kind not in SCALING_KEYS:
        raise DeclarationError(f"{key} has kind = {kind!r}; expected {kinds}.")
    keys = SCALING_KEYS[kind]
    for name, value in scaling.items():
        if name != "kind" and name not in keys:
            raise DeclarationError(f"unknown key {key}.{name} for kind {kind!r}: {nearest(name, keys, 'key')}")
        if name in PER_PAIR:
            if not (isinstance(value, (list, tuple)) and len(value) == pairs and all(map(_is_positive, value))):
                raise DeclarationError(f"{key}.{name} = {value!r}; expected {pairs} numbers above 0, one for each pair.")
        elif name != "kind" and not _is_positive(value):
            raise DeclarationError(f"{key}.{name} = {value!r}; expected a number above 0.")
    missing = [name for name in keys if name not in scaling]
    if missing:
        raise DeclarationError(f"{key} lacks {', '.join(missing)}; expected {kinds}.")
    if kind == "llama3" and not scaling["low_freq_factor"] < scaling["high_freq_factor"]:
        raise DeclarationError(f"{key}.low_freq_factor = {scaling['low_freq_factor']} is not below high_freq_factor = "
                               f"{scaling['high_freq_factor']}; the former bounds the long wavelengths.")
    return dict(scaling)


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def angles(positions: jax.Array, frequency_P: np.ndarray, amplitude: float = 1.0) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine times `amplitude`, float32 [..., L, 1, P], of int32 positions [..., L]; the 1 stands for the heads."""
    angle = positions.astype(jnp.float32)[..., None, None] * frequency_P
    if amplitude == 1:
        return jnp.cos(angle), jnp.sin(angle)
    return amplitude * jnp.cos(angle), amplitude * jnp.sin(angle)


def rotate(x_BLHK: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turns the first pairs of every head by `angles`, which may be fewer than there are; computed in float32, returned in the
    dtype of x."""
    cos, sin = rotation
    pairs = cos.shape[-1]
    ends = [pairs, 2 * pairs] if 2 * pairs < x_BLHK.shape[-1] else [pairs]
    first, second, *rest = jnp.split(x_BLHK.astype(jnp.float32), ends, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, *rest], axis=-1).astype(x_BLHK.dtype)
